//! The architectures that `model.architecture` names, and what of a config follows from each.

use crate::value::{Field, Value};
use crate::words::{Activation, LayerType, NormPlaces, QkNorm, words};

/// Every architecture, a line each: its name, its word in `run.toml`, its file in `crates/model/src/architectures`, and what it has.
/// Calls the macro `$with` with these lines: here it makes the enum, in `lockstep-model` the choice of the file.
#[macro_export]
macro_rules! architectures {
    ($with:ident) => {
        $with! {
            Llama = "llama", llama, Features::LLAMA;
            Gpt2 = "gpt2", gpt2, Features::GPT2;
            Qwen2 = "qwen2", qwen2, Features { qkv_bias: true, ..Features::LLAMA };
            Qwen3 = "qwen3", qwen3, Features { qk_norm: QkNorm::Head, ..Features::LLAMA };
            Mistral = "mistral", mistral, Features::LLAMA;
            Mixtral = "mixtral", mixtral, Features { experts: true, ..Features::LLAMA };
            Qwen3Moe = "qwen3_moe", qwen3_moe, Features { qk_norm: QkNorm::Head, experts: true, ..Features::LLAMA };
            Olmoe = "olmoe", olmoe, Features { qk_norm: QkNorm::Whole, experts: true, ..Features::LLAMA };
            Deepseek = "deepseek", deepseek, Features { experts: true, shared_experts: true, ..Features::LLAMA };
            Dots1 = "dots1", dots1, Features {
                qk_norm: QkNorm::Head, experts: true, shared_experts: true, scaled_router: true, sigmoid_router: true,
                ..Features::LLAMA
            };
            DeepseekV2 = "deepseek_v2", deepseek_v2, Features {
                latent: true, experts: true, shared_experts: true, scaled_router: true, norm_topk: false, ..Features::LLAMA
            };
            DeepseekV3 = "deepseek_v3", deepseek_v3, Features {
                latent: true, experts: true, shared_experts: true, scaled_router: true, sigmoid_router: true, ..Features::LLAMA
            };
            GptOss = "gpt_oss", gpt_oss, Features {
                qkv_bias: true, block_bias: true, sinks: true, activation: Activation::ClampedSwiGlu, layer_types: PATTERN_1_1,
                experts: true, ..Features::LLAMA
            };
            SmolLm3 = "smollm3", smollm3, Features { rope_layers: &[1, 1, 1, 0], tied: true, ..Features::LLAMA };
            Olmo2 = "olmo2", olmo2, Features::OLMO2;
            Olmo3 = "olmo3", olmo3, Features { layer_types: PATTERN_3_1, local_rope: true, ..Features::OLMO2 };
            Gemma3Text = "gemma3_text", gemma3_text, Features {
                norms: NormPlaces::Sandwich, norm_plus_one: true, qk_norm: QkNorm::Head, activation: Activation::Gelu,
                scaled_embedding: true, layer_types: PATTERN_5_1, local_rope: true, rope_local_theta: Some(10_000.0), tied: true,
                ..Features::LLAMA
            };
        }
    };
}

/// The default of `model.architecture`.
pub(crate) const DEFAULT: &str = "\"llama\"";

/// A layer with a sliding window, then one without.
const PATTERN_1_1: &[LayerType] = &[LayerType::Sliding, LayerType::Full];
/// Three layers with a sliding window, then one without.
const PATTERN_3_1: &[LayerType] = &[LayerType::Sliding, LayerType::Sliding, LayerType::Sliding, LayerType::Full];
/// Five layers with a sliding window, then one without.
const PATTERN_5_1: &[LayerType] = &[
    LayerType::Sliding,
    LayerType::Sliding,
    LayerType::Sliding,
    LayerType::Sliding,
    LayerType::Sliding,
    LayerType::Full,
];

/// What the models of an architecture have: parts that no key gives, and the defaults of keys for those that one does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Features {
    /// Learned position embeddings, and no RoPE.
    pub learned_positions: bool,
    /// Layer norms with biases, a bias after every matmul of a layer, dropout, an MLP of two matmuls, tied embeddings and as
    /// many key heads as heads, as GPT-2 has. Else RMS norms and a gated MLP of three.
    pub gpt2_block: bool,
    /// A bias of Q, K and V.
    pub qkv_bias: bool,
    /// A bias of attention's output projection, of the router, and of every matmul of experts, as gpt-oss has them.
    pub block_bias: bool,
    /// The default of `model.attention_sinks`.
    pub sinks: bool,
    /// The default of `model.norms`.
    pub norms: NormPlaces,
    /// The default of `model.norm_plus_one`.
    pub norm_plus_one: bool,
    /// The default of `model.qk_norm`.
    pub qk_norm: QkNorm,
    /// The default of `model.activation`.
    pub activation: Activation,
    /// Whether the default of `model.embedding_scale` is the root of the width.
    pub scaled_embedding: bool,
    /// The default of `model.layer_types`, where there is a sliding window.
    pub layer_types: &'static [LayerType],
    /// The default of `model.rope_layers`.
    pub rope_layers: &'static [usize],
    /// Whether layers with a sliding window have a RoPE of their own, where others have no window: `model.rope_local_theta` has a default.
    pub local_rope: bool,
    /// This default, if it is not `model.rope_theta`.
    pub rope_local_theta: Option<f64>,
    /// The default of `model.tied_embeddings`.
    pub tied: bool,
    /// A mixture of experts in place of the MLP: `model.experts`.
    pub experts: bool,
    /// Experts that every token goes to, and first layers without a mixture: `model.shared_experts`, `model.dense_layers`.
    pub shared_experts: bool,
    /// A scale of the router's weights, and groups of experts: `model.router_scale`, `model.expert_groups`.
    pub scaled_router: bool,
    /// DeepSeek-V3's router: sigmoid scores, and a bias of the choice that balances (`model.balance_bias`).
    pub sigmoid_router: bool,
    /// The default of `model.norm_topk`.
    pub norm_topk: bool,
    /// Latent attention: whether `model.kv_lora_rank` has a default.
    pub latent: bool,
}

impl Features {
    /// Those of Llama.
    pub const LLAMA: Self = Self {
        learned_positions: false,
        gpt2_block: false,
        qkv_bias: false,
        block_bias: false,
        sinks: false,
        norms: NormPlaces::Pre,
        norm_plus_one: false,
        qk_norm: QkNorm::None,
        activation: Activation::Silu,
        scaled_embedding: false,
        layer_types: &[],
        rope_layers: &[],
        local_rope: false,
        rope_local_theta: None,
        tied: false,
        experts: false,
        shared_experts: false,
        scaled_router: false,
        sigmoid_router: false,
        norm_topk: true,
        latent: false,
    };
    /// Those of GPT-2.
    pub const GPT2: Self =
        Self { learned_positions: true, gpt2_block: true, activation: Activation::Gelu, tied: true, ..Self::LLAMA };
    /// Those of OLMo 2.
    pub const OLMO2: Self = Self { norms: NormPlaces::Post, qk_norm: QkNorm::Whole, ..Self::LLAMA };
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
