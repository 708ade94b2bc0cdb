//! Models whose shape their name says: presets, and published models that are none.

use super::row::PublishedShape;
use lockstep_config::{Config, presets};
use serde::Serialize;

/// A model that is known by its name.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KnownModel {
    /// What it is called here.
    pub name: String,
    /// Keys of `[model]`, a line each, that make it; it is written by its sizes alone where there are none.
    pub keys: Option<String>,
    /// Experts that a token goes to, where there are some.
    pub active_experts: Option<usize>,
    /// Width of the MLP that a token goes through, of one expert where there are some.
    pub expert_ffn: Option<usize>,
}

/// A published model that is no preset.
struct Published {
    names: &'static [&'static str],
    /// Layers, width, query heads, key heads, hidden units of the MLP and vocabulary.
    sizes: [usize; 6],
    kind: Kind,
}

/// What a published model is made of.
#[derive(Clone, Copy)]
enum Kind {
    /// Of one kind, that its name or its sizes say.
    Dense,
    /// Experts, of which a token goes to this many.
    Experts { experts: usize, chosen: usize },
}

const fn published(names: &'static [&'static str], sizes: [usize; 6], kind: Kind) -> Published {
    Published { names, sizes, kind }
}

/// Sizes as their papers have them: arXiv 2402.16819, arXiv 2406.11704, github.com/xai-org/grok-1, arXiv 2005.14165, arXiv 2205.01068,
/// arXiv 2201.11990, arXiv 2211.05100, arXiv 2401.02385 and the model cards of MPT.
const PUBLISHED: [Published; 9] = [
    published(&["nemotron-4-15b", "nemotron-15b"], [32, 6144, 48, 8, 24_576, 256_000], Kind::Dense),
    published(&["nemotron-4-340b", "nemotron-340b"], [96, 18_432, 96, 8, 73_728, 256_000], Kind::Dense),
    published(
        &["grok-1", "grok-1-314b", "grok-314b"],
        [64, 6144, 48, 8, 32_768, 131_072],
        Kind::Experts { experts: 8, chosen: 2 },
    ),
    published(&["gpt-3", "gpt-3-175b", "gpt-175b"], [96, 12_288, 96, 96, 49_152, 51_200], Kind::Dense),
    published(&["opt-175b"], [96, 12_288, 96, 96, 49_152, 50_272], Kind::Dense),
    published(&["mt-nlg-530b", "mt-nlg"], [105, 20_480, 128, 128, 81_920, 51_200], Kind::Dense),
    published(&["bloom-176b", "bloom"], [70, 14_336, 112, 112, 57_344, 250_880], Kind::Dense),
    published(&["mpt-7b"], [32, 4096, 32, 32, 16_384, 50_432], Kind::Dense),
    published(&["tinyllama-1.1b", "tinyllama"], [22, 2048, 32, 4, 5632, 32_000], Kind::Dense),
];

/// Words after a name that say nothing of the shape.
const DECORATION: [&str; 7] = ["proxy", "base", "instruct", "hf", "moe", "dense", "pretrain"];

/// The letters, digits and points of a name: `meta-llama/Llama_3.1-8B (8 layers)` is `llama3.18b`.
fn key(name: &str) -> String {
    let name = name.to_lowercase();
    let name = name.split(['(', '[']).next().unwrap_or_default();
    let name = name.rsplit('/').next().unwrap_or_default();
    let name = name.trim().trim_start_matches("meta-");
    let words = name.split(|c: char| !(c.is_ascii_alphanumeric() || c == '.'));
    words.filter(|word| !DECORATION.contains(word)).collect()
}

/// The layers that a name says in brackets: `(8 layers)`.
pub(super) fn layers_of(name: &str) -> Option<usize> {
    let before = name.to_lowercase();
    let before = before.split(" layers").next().filter(|before| before.len() < name.len())?;
    before.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// The model that a name means, with its shape; the sequence length is that of its pre-training, where that is known.
pub(super) fn named(name: &str) -> Option<(KnownModel, PublishedShape)> {
    let wanted = key(name);
    if let Some(found) = PUBLISHED.iter().find(|model| model.names.iter().any(|name| key(name) == wanted)) {
        return Some(found.known());
    }
    let preset = presets().find(|preset| key(preset) == wanted)?;
    let model = Config::parse(&format!("[model]\npreset = \"{preset}\""), "preset", &[]).ok()?;
    let (seq, model) = (model.train.seq, model.model);
    let plain = model.experts.is_none() && model.kv_lora_rank.is_none() && model.head_dim * model.heads == model.dim;
    let known = KnownModel {
        name: preset.to_owned(),
        keys: (!plain).then(|| format!("preset = \"{preset}\"")),
        active_experts: model.experts_per_token,
        expert_ffn: model.expert_ffn,
    };
    let shape = PublishedShape {
        layers: model.layers,
        hidden: model.dim,
        heads: model.heads,
        kv_heads: Some(model.kv_heads),
        ffn: Some(model.ffn),
        vocab: Some(model.vocab_size),
        seq,
        params: None,
    };
    Some((known, shape))
}

impl Published {
    fn known(&self) -> (KnownModel, PublishedShape) {
        let [layers, hidden, heads, kv_heads, ffn, vocab] = self.sizes;
        let (keys, active) = match self.kind {
            Kind::Dense => (None, None),
            Kind::Experts { experts, chosen } => {
                let sizes = format!(
                    "vocab_size = {vocab}\ndim = {hidden}\nheads = {heads}\nkv_heads = {kv_heads}\nffn = {ffn}"
                );
                let mixture = format!("experts = {experts}\nexperts_per_token = {chosen}");
                // A mixture of gated MLPs, as this preset is.
                (Some(format!("preset = \"mixtral-8x7b\"\n{sizes}\n{mixture}")), Some(chosen))
            }
        };
        let known = KnownModel {
            name: self.names[0].to_owned(),
            keys,
            active_experts: active,
            expert_ffn: active.map(|_| ffn),
        };
        let shape = PublishedShape {
            layers,
            hidden,
            heads,
            kv_heads: Some(kv_heads),
            ffn: Some(ffn),
            vocab: Some(vocab),
            seq: 2048,
            params: None,
        };
        (known, shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_people_write_them() {
        let of = |name: &str| named(name).map(|(known, shape)| (known.name, shape.layers));
        for name in ["LLAMA3_8B", "meta-llama/Meta-Llama-3-8B", "Llama 3 8B", "llama3-8b-instruct"] {
            assert_eq!(of(name), Some(("llama-3-8b".into(), 32)), "{name}");
        }
        assert_eq!(of("Llama3.1-405b-proxy(8 layers)"), Some(("llama-3.1-405b".into(), 126)));
        assert_eq!(of("Qwen3_30B_a3B (tokendrop)"), Some(("qwen3-30b-a3b".into(), 48)));
        assert_eq!(of("Grok1-314b (MoE)"), Some(("grok-1".into(), 64)));
        assert_eq!(of("Nemotron4-15b"), Some(("nemotron-4-15b".into(), 32)));
        assert_eq!((of("llama-9b"), of("")), (None, None));
        assert_eq!(
            (layers_of("Llama (8 layers)"), layers_of("llama-8b"), layers_of("of layers")),
            (Some(8), None, None)
        );
    }

    #[test]
    fn a_model_of_more_than_sizes_has_its_keys() {
        let keys = |name: &str| named(name).unwrap().0.keys;
        assert_eq!(keys("llama-3-8b"), None);
        assert_eq!(keys("qwen3-30b-a3b").as_deref(), Some("preset = \"qwen3-30b-a3b\""));
        assert!(keys("grok-1").unwrap().contains("experts_per_token = 2"));
    }
}
