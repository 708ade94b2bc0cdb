//! What rounding to fp8 lost in a step, for `metrics.jsonl`, and whether a run has anything in fp8.

use lockstep_compile::Stays;
use lockstep_config::Config;
use lockstep_ir::graph::{Fp8Class, State, Tally};
use lockstep_ir::program::{Role, Tensor};
use lockstep_ir::{Seen, units};
use lockstep_plan::Plan;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Shares of the elements that matmuls in fp8 read, of weights, activations and gradients. Empty for a run without fp8.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Fp8Metrics {
    /// Those that were too large for their scale, and became the largest number.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub fp8_overflow: BTreeMap<String, f64>,
    /// Those that were not 0, and became 0.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub fp8_underflow: BTreeMap<String, f64>,
}

impl Fp8Metrics {
    /// From what was seen of every tensor, and what each is.
    pub(crate) fn of(seen: &[f64], classes: &[Fp8Class]) -> Self {
        let mut sums: BTreeMap<&str, [f64; Seen::CLASSES]> = BTreeMap::new();
        for (row, class) in seen.chunks_exact(Seen::COUNT).zip(classes) {
            let sum = sums.entry(class.name()).or_default();
            sum.iter_mut().zip(row).for_each(|(sum, count)| *sum += count);
        }
        let shares = |which: usize| {
            let share =
                |(name, sum): (&&str, &[f64; Seen::CLASSES])| ((*name).to_owned(), sum[which] / sum[0].max(1.0));
            sums.iter().map(share).collect()
        };
        Self { fp8_overflow: shares(1), fp8_underflow: shares(2) }
    }
}

/// Of what a program's tensor counts the losses of rounding, if it does.
pub(crate) fn fp8_class(tensor: &Tensor) -> Option<Fp8Class> {
    match tensor.role {
        Role::State(State::Total(Tally::Fp8(class))) => Some(class),
        _ => None,
    }
}

/// Where the policy is fp8 and every matmul stays in bf16, what to tell the user.
pub(crate) fn nothing_in_fp8(config: &Config, plan: &Plan) -> Option<String> {
    if plan.precision.fp8.is_none() || plan.fp8.iter().any(|(_, stays)| stays.is_none()) {
        return None;
    }
    let small = plan.fp8.iter().filter_map(|(_, stays)| match stays {
        Some(Stays::Small { weights, fewest }) => Some((*weights, *fewest)),
        Some(Stays::Edge | Stays::Odd { .. }) | None => None,
    });
    let (why, remedy) = match small.max() {
        Some((weights, fewest)) => {
            let [weights, fewest] = [weights, fewest].map(|n| units::thousands(n as u64));
            let why =
                format!("the largest linear layer has {weights} weights on a rank, and fp8 is faster from {fewest} on");
            (why, "give precision.fp8_weights = 0 to have layers of all sizes in fp8")
        }
        None => ("`lockstep explain` says why".to_owned(), "choose other sizes, or skip fewer layers"),
    };
    let compares = match config.precision.shadow_every {
        0 => "",
        _ => "; precision.shadow_every compares bf16 with itself",
    };
    Some(format!(
        "precision.policy = \"fp8\", and no matmul of this model is in fp8: {why}; {remedy}, or precision.policy = \"bf16\", which \
         computes the same{compares}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_a_class_count_together() {
        let row = |counts: [f64; 3]| [counts.to_vec(), vec![1.0; Seen::COUNT - 3]].concat();
        let seen = [row([100.0, 1.0, 5.0]), row([10.0, 0.0, 0.0]), row([300.0, 0.0, 15.0])].concat();
        let metrics = Fp8Metrics::of(&seen, &[Fp8Class::Gradients, Fp8Class::Weights, Fp8Class::Gradients]);
        let expected =
            r#"{"fp8_overflow":{"gradients":0.0025,"weights":0.0},"fp8_underflow":{"gradients":0.05,"weights":0.0}}"#;
        assert_eq!(serde_json::to_string(&metrics).unwrap(), expected);
        assert_eq!(serde_json::to_string(&Fp8Metrics::default()).unwrap(), "{}");
    }
}
