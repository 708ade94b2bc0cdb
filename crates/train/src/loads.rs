//! What experts got in a step, for `metrics.jsonl`.

use lockstep_config::ModelConfig;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How evenly the experts of a model got tokens in a step. Empty for a model without experts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExpertMetrics {
    /// Tokens of the expert that got most, over all layers, as a multiple of an even share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_most: Option<f64>,
    /// The same of the expert that got least.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_least: Option<f64>,
    /// Layers by number.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub experts: BTreeMap<String, LayerLoad>,
}

/// What the experts of a layer got.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerLoad {
    /// Tokens of the expert that got most, as a multiple of an even share.
    pub most: f64,
    /// The same of the expert that got least.
    pub least: f64,
    /// Tokens of every expert, in models of at most [`COUNTS_LISTED`](ExpertMetrics::COUNTS_LISTED) experts in all layers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub counts: Vec<u64>,
}

impl ExpertMetrics {
    /// Most experts, of all layers, whose counts are in a line: those of thousands would be larger than everything else.
    pub const COUNTS_LISTED: usize = 256;

    /// From the tokens of every expert, layer by layer.
    pub(crate) fn of(loads: &[f64], model: &ModelConfig) -> Self {
        let experts = model.experts.unwrap_or(1);
        let layer = |load: &[f64]| {
            let even = load.iter().sum::<f64>() / experts as f64;
            let (least, most) = load.iter().fold((f64::INFINITY, 0.0f64), |(l, m), n| (l.min(*n), m.max(*n)));
            let counts = if loads.len() <= Self::COUNTS_LISTED { load } else { &[] };
            let share = |n: f64| (1e4 * n / even).round() / 1e4;
            LayerLoad { most: share(most), least: share(least), counts: counts.iter().map(|n| *n as u64).collect() }
        };
        let named = |(i, load): (usize, &[f64])| ((model.dense_layers + i).to_string(), layer(load));
        let layers: BTreeMap<String, LayerLoad> = loads.chunks(experts).enumerate().map(named).collect();
        Self {
            expert_most: layers.values().map(|layer| layer.most).reduce(f64::max),
            expert_least: layers.values().map(|layer| layer.least).reduce(f64::min),
            experts: layers,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_config::Config;

    fn model(experts: usize) -> ModelConfig {
        let text = format!(
            "[model]\narchitecture = \"deepseek\"\ndense_layers = 1\nexperts = {experts}\nvocab_size = 8\nlayers = 3\ndim = 8\n\
             heads = 2\nffn = 16\n[train]\nseq = 8\n"
        );
        Config::parse(&text, "run.toml", &[]).unwrap().model
    }

    #[test]
    fn layers_are_numbered_behind_dense_ones_and_counts_are_shares_of_an_even_one() {
        let found = ExpertMetrics::of(&[6.0, 0.0, 4.0, 2.0, 3.0, 3.0, 3.0, 3.0], &model(4));
        assert_eq!((found.expert_most, found.expert_least), (Some(2.0), Some(0.0)));
        let text = serde_json::to_string(&found).unwrap();
        let (first, second) =
            (r#"{"most":2.0,"least":0.0,"counts":[6,0,4,2]}"#, r#"{"most":1.0,"least":1.0,"counts":[3,3,3,3]}"#);
        assert_eq!(text, format!(r#"{{"expert_most":2.0,"expert_least":0.0,"experts":{{"1":{first},"2":{second}}}}}"#));
        assert_eq!(serde_json::from_str::<ExpertMetrics>(&text).unwrap(), found);
    }

    #[test]
    fn counts_of_many_experts_are_left_out_and_no_experts_are_nothing() {
        let found = ExpertMetrics::of(&vec![7.0; 2 * 200], &model(200));
        assert!(found.experts.values().all(|layer| layer.counts.is_empty() && layer.most == 1.0));
        assert_eq!(serde_json::to_string(&ExpertMetrics::of(&[], &model(4))).unwrap(), "{}");
    }
}
