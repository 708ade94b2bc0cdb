//! The families, and where their `config.json` keeps what `[model]` has.

use lockstep_config::ModelConfig;
use serde_json::{Value, json};

/// A family of models.
pub(super) struct Family {
    /// `model_type`, and our `model.architecture`.
    pub name: &'static str,
    /// The class that loads it.
    pub class: &'static str,
    pub counts: &'static [Count],
    /// The field, and its value where it is not there.
    pub norm_eps: (&'static str, f64),
    /// Whether embeddings are tied where nothing is said.
    pub tied: bool,
    pub rotary: bool,
    /// Whether `sliding_window` is about every layer.
    pub window: bool,
    /// Positions: the field, and its value where it is not there.
    pub context: (&'static str, usize),
    /// Fields that have one value only, which is also their value where they are not there.
    pub fixed: &'static [(&'static str, Fixed)],
    /// What names of tensors begin with.
    pub prefix: &'static str,
    /// The tensor that a tied head shares.
    pub embedding: &'static str,
}

/// An extent.
pub(super) struct Count {
    pub theirs: &'static str,
    pub ours: &'static str,
    pub get: fn(&ModelConfig) -> usize,
    pub absent: Absent,
}

/// What a field stands for that is not there.
pub(super) enum Absent {
    Refused,
    /// Our config has the same default.
    Derived,
    /// So many times another field.
    Times(usize, &'static str),
}

/// The one value of a field.
pub(super) enum Fixed {
    Is(Word),
    Absent,
}

pub(super) enum Word {
    Flag(bool),
    Text(&'static str),
}

impl Word {
    pub(super) fn json(&self) -> Value {
        match self {
            Word::Flag(flag) => json!(flag),
            Word::Text(text) => json!(text),
        }
    }
}

const fn count(theirs: &'static str, ours: &'static str, get: fn(&ModelConfig) -> usize, absent: Absent) -> Count {
    Count { theirs, ours, get, absent }
}

const OFF: Fixed = Fixed::Is(Word::Flag(false));
const SILU: Fixed = Fixed::Is(Word::Text("silu"));

const LLAMA_COUNTS: [Count; 7] = [
    count("vocab_size", "vocab_size", |m| m.vocab_size, Absent::Refused),
    count("num_hidden_layers", "layers", |m| m.layers, Absent::Refused),
    count("hidden_size", "dim", |m| m.dim, Absent::Refused),
    count("num_attention_heads", "heads", |m| m.heads, Absent::Refused),
    count("num_key_value_heads", "kv_heads", |m| m.kv_heads, Absent::Derived),
    count("head_dim", "head_dim", |m| m.head_dim, Absent::Derived),
    count("intermediate_size", "ffn", |m| m.ffn, Absent::Refused),
];

pub(super) const FAMILIES: &[Family] = &[Family {
    name: "llama",
    class: "LlamaForCausalLM",
    counts: &LLAMA_COUNTS,
    norm_eps: ("rms_norm_eps", 1e-6),
    tied: false,
    rotary: true,
    window: false,
    context: ("max_position_embeddings", 2048),
    fixed: &[
        ("hidden_act", SILU),
        ("attention_bias", OFF),
        ("mlp_bias", OFF),
        ("quantization_config", Fixed::Absent),
    ],
    prefix: "model.",
    embedding: "model.embed_tokens.weight",
}];
