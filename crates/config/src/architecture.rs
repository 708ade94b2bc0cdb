//! The architectures that `model.architecture` names, and what of a config follows from each.

use crate::value::{Field, Value};
use crate::words::words;

/// Every architecture, a line each: its name, its word in `run.toml`, its file in `crates/model/src/architectures`, and what it has.
/// Calls the macro `$with` with these lines: here it makes the enum, in `lockstep-model` the choice of the file.
#[macro_export]
macro_rules! architectures {
    ($with:ident) => {
        $with! {
            Llama = "llama", llama, Features::LLAMA;
            Gpt2 = "gpt2", gpt2, Features::GPT2;
            Qwen2 = "qwen2", qwen2, Features { qkv_bias: true, ..Features::LLAMA };
            Qwen3 = "qwen3", qwen3, Features { qk_norm: true, ..Features::LLAMA };
            Mistral = "mistral", mistral, Features { sliding_window: true, ..Features::LLAMA };
            Mixtral = "mixtral", mixtral, Features { experts: true, ..Features::LLAMA };
            Qwen3Moe = "qwen3_moe", qwen3_moe, Features { qk_norm: true, experts: true, ..Features::LLAMA };
            Olmoe = "olmoe", olmoe, Features { whole_qk_norm: true, experts: true, ..Features::LLAMA };
            Deepseek = "deepseek", deepseek, Features { experts: true, shared_experts: true, ..Features::LLAMA };
            Dots1 = "dots1", dots1, Features {
                qk_norm: true, experts: true, shared_experts: true, sigmoid_router: true, ..Features::LLAMA
            };
        }
    };
}

/// The default of `model.architecture`.
pub(crate) const DEFAULT: &str = "\"llama\"";

/// What the models of an architecture have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Learned position embeddings, and no RoPE.
    pub learned_positions: bool,
    /// Layer norms with biases, a bias behind every matmul of a layer, dropout, an MLP of two matmuls, tied embeddings and as
    /// many key heads as heads, as GPT-2 has. Else RMS norms and a gated MLP of three.
    pub gpt2_block: bool,
    /// A bias of Q, K and V alone.
    pub qkv_bias: bool,
    /// Norms over the heads of Q and K.
    pub qk_norm: bool,
    /// `model.sliding_window`.
    pub sliding_window: bool,
    /// A mixture of experts in place of the MLP: `model.experts`.
    pub experts: bool,
    /// Norms over all of Q and all of K: tensor-parallel ranks cannot split them.
    pub whole_qk_norm: bool,
    /// Experts that every token goes to, and first layers without a mixture: `model.shared_experts`, `model.dense_layers`.
    pub shared_experts: bool,
    /// DeepSeek-V3's router: sigmoid scores, a scale, groups, and a bias of the choice that balances (`model.balance_bias`).
    pub sigmoid_router: bool,
}

impl Features {
    /// Those of Llama.
    pub const LLAMA: Self = Self {
        learned_positions: false,
        gpt2_block: false,
        qkv_bias: false,
        qk_norm: false,
        sliding_window: false,
        experts: false,
        whole_qk_norm: false,
        shared_experts: false,
        sigmoid_router: false,
    };
    /// Those of GPT-2.
    pub const GPT2: Self = Self { learned_positions: true, gpt2_block: true, ..Self::LLAMA };
}

macro_rules! declare {
    ($($Variant:ident = $word:literal, $file:ident, $features:expr;)+) => {
        words! {
            /// The family of models that a shape belongs to.
            Architecture {
                $(#[doc = concat!("`", $word, "`.")] $Variant = $word,)+
            }
        }

        impl Architecture {
            /// Those whose models have something, for a hint: `"a", "b" or "c"`.
            pub(crate) fn listed(has: impl Fn(Features) -> bool) -> String {
                let all = Self::ALL.iter().filter(|one| has(one.features()));
                let words: Vec<String> = all.map(|one| format!("\"{one}\"")).collect();
                match &words[..] {
                    [words @ .., last] if !words.is_empty() => format!("{} or {last}", words.join(", ")),
                    words => words.concat(),
                }
            }

            /// What its models have.
            pub const fn features(self) -> Features {
                match self {
                    $(Self::$Variant => $features,)+
                }
            }
        }
    };
}

architectures!(declare);
