//! The families, and where their `config.json` keeps what `[model]` has.

use lockstep_config::ModelConfig;
use serde_json::{Value, json};

/// A family of models.
pub(super) struct Family {
    /// `model_type`, and our `model.architecture`.
    pub name: &'static str,
    /// The class that loads it.
    pub class: &'static str,
    /// Its extents, in lists that families share.
    pub counts: &'static [&'static [Count]],
    /// The field, and its value where it is not there.
    pub norm_eps: (&'static str, f64),
    /// Whether embeddings are tied where nothing is said.
    pub tied: bool,
    pub rotary: bool,
    /// Whether transformers refuses a width that is no multiple of the heads.
    pub whole_heads: bool,
    /// How many tokens each layer sees: the field, and its value where it is not there. Null is all.
    pub window: Option<(&'static str, usize)>,
    /// Positions: the field, and its value where it is not there.
    pub context: (&'static str, usize),
    /// Shares of elements that training drops, and whether `model.dropout` is about them. They are written, so that others do not
    /// take their own, and not read: how a model was trained is no part of it.
    pub dropout: &'static [(&'static str, bool)],
    pub switches: &'static [Switch],
    pub numbers: &'static [Number],
    /// Fields that have one value only, which is also their value where they are not there.
    pub fixed: &'static [(&'static str, Fixed)],
    /// What names of tensors begin with.
    pub prefix: &'static str,
    /// How the names of matrices end whose rows are inputs.
    pub transposed: &'static [&'static str],
    /// The tensor that a tied head shares.
    pub embedding: &'static str,
}

/// An extent.
pub(super) struct Count {
    pub theirs: &'static str,
    pub ours: &'static str,
    pub get: fn(&ModelConfig) -> usize,
    /// The smallest that there is.
    pub least: u64,
    pub absent: Absent,
}

/// A factor.
pub(super) struct Number {
    pub theirs: &'static str,
    pub ours: &'static str,
    pub get: fn(&ModelConfig) -> f64,
}

/// Something that is or is not.
pub(super) struct Switch {
    pub theirs: &'static str,
    pub ours: &'static str,
    pub get: fn(&ModelConfig) -> bool,
    /// What it is where the field is not there.
    pub absent: bool,
}

/// What a field stands for that is not there.
pub(super) enum Absent {
    Refused,
    /// Our config has the same default.
    Derived,
}

/// The one value of a field.
pub(super) enum Fixed {
    Is(Word),
    Absent,
}

pub(super) enum Word {
    Flag(bool),
    Text(&'static str),
    Number(u64),
    /// A list of nothing.
    Nothing,
    /// Null, where a field that is not there stands for something.
    Null,
}

impl Word {
    pub(super) fn json(&self) -> Value {
        match self {
            Word::Flag(flag) => json!(flag),
            Word::Text(text) => json!(text),
            Word::Number(number) => json!(number),
            Word::Nothing => json!([]),
            Word::Null => Value::Null,
        }
    }
}

const fn count(theirs: &'static str, ours: &'static str, get: fn(&ModelConfig) -> usize, absent: Absent) -> Count {
    Count { theirs, ours, get, least: 1, absent }
}

/// First layers that have no experts.
const DENSE_LAYERS: Count = Count {
    theirs: "first_k_dense_replace",
    ours: "dense_layers",
    get: |m| m.dense_layers,
    least: 0,
    absent: Absent::Derived,
};

/// How many experts there are, and how many a token takes.
const fn experts(theirs: &'static str, per_token: Absent) -> [Count; 2] {
    [
        count(theirs, "experts", |m| m.experts.unwrap_or(1), Absent::Refused),
        count("num_experts_per_tok", "experts_per_token", |m| m.experts_per_token.unwrap_or(1), per_token),
    ]
}

const MOE_WIDTH: [Count; 1] =
    [count("moe_intermediate_size", "expert_ffn", |m| m.expert_ffn.unwrap_or(m.ffn), Absent::Refused)];

/// What DeepSeek has besides experts.
const DEEPSEEK: [Count; 2] =
    [count("n_shared_experts", "shared_experts", |m| m.shared_experts.unwrap_or(1), Absent::Refused), DENSE_LAYERS];

const NORM_TOPK: &[Switch] =
    &[Switch { theirs: "norm_topk_prob", ours: "norm_topk", get: |m| m.norm_topk, absent: false }];

const OFF: Fixed = Fixed::Is(Word::Flag(false));
const NOT_QUANTIZED: (&str, Fixed) = ("quantization_config", Fixed::Absent);
const SILU: Fixed = Fixed::Is(Word::Text("silu"));

/// The extents of Llama and its relatives.
const fn extents(kv_heads: Absent) -> [Count; 5] {
    [
        count("vocab_size", "vocab_size", |m| m.vocab_size, Absent::Refused),
        count("num_hidden_layers", "layers", |m| m.layers, Absent::Refused),
        count("hidden_size", "dim", |m| m.dim, Absent::Refused),
        count("num_attention_heads", "heads", |m| m.heads, Absent::Refused),
        count("num_key_value_heads", "kv_heads", |m| m.kv_heads, kv_heads),
    ]
}

const fn head_dim(absent: Absent) -> [Count; 1] {
    [count("head_dim", "head_dim", |m| m.head_dim, absent)]
}

const FFN: [Count; 1] = [count("intermediate_size", "ffn", |m| m.ffn, Absent::Refused)];

/// Where every layer has experts, and nothing else has a width.
const FFN_OF_EXPERTS: [Count; 1] =
    [count("intermediate_size", "ffn", |m| m.expert_ffn.unwrap_or(m.ffn), Absent::Refused)];

/// What DeepSeek-V3's router has besides.
const GROUPS: [Count; 2] = [
    count("n_group", "expert_groups", |m| m.expert_groups, Absent::Derived),
    count("topk_group", "expert_top_groups", |m| m.expert_top_groups, Absent::Derived),
];

const LLAMA: Family = Family {
    name: "llama",
    class: "LlamaForCausalLM",
    counts: &[&extents(Absent::Derived), &head_dim(Absent::Derived), &FFN],
    norm_eps: ("rms_norm_eps", 1e-6),
    tied: false,
    rotary: true,
    whole_heads: true,
    window: None,
    context: ("max_position_embeddings", 2048),
    dropout: &[("attention_dropout", false)],
    switches: &[],
    numbers: &[],
    fixed: &[("hidden_act", SILU), ("attention_bias", OFF), ("mlp_bias", OFF), NOT_QUANTIZED],
    prefix: "model.",
    transposed: &[],
    embedding: "model.embed_tokens.weight",
};

pub(super) const FAMILIES: &[Family] = &[
    LLAMA,
    Family {
        name: "mistral",
        class: "MistralForCausalLM",
        counts: &[&extents(Absent::Refused), &head_dim(Absent::Derived), &FFN],
        whole_heads: false,
        window: Some(("sliding_window", 4096)),
        context: ("max_position_embeddings", 131_072),
        fixed: &[("hidden_act", SILU), NOT_QUANTIZED],
        ..LLAMA
    },
    Family {
        name: "qwen2",
        class: "Qwen2ForCausalLM",
        counts: &[&extents(Absent::Refused), &head_dim(Absent::Derived), &FFN],
        whole_heads: false,
        context: ("max_position_embeddings", 32_768),
        fixed: &[("hidden_act", SILU), ("use_sliding_window", OFF), NOT_QUANTIZED],
        ..LLAMA
    },
    Family {
        name: "qwen3",
        class: "Qwen3ForCausalLM",
        counts: &[&extents(Absent::Refused), &head_dim(Absent::Refused), &FFN],
        whole_heads: false,
        context: ("max_position_embeddings", 32_768),
        fixed: &[("hidden_act", SILU), ("attention_bias", OFF), ("use_sliding_window", OFF), NOT_QUANTIZED],
        ..LLAMA
    },
    Family {
        name: "mixtral",
        class: "MixtralForCausalLM",
        counts: &[
            &experts("num_local_experts", Absent::Derived),
            &extents(Absent::Refused),
            &head_dim(Absent::Derived),
            &FFN_OF_EXPERTS,
        ],
        whole_heads: false,
        context: ("max_position_embeddings", 131_072),
        fixed: &[("hidden_act", SILU), ("sliding_window", Fixed::Absent), NOT_QUANTIZED],
        ..LLAMA
    },
    Family {
        name: "qwen3_moe",
        class: "Qwen3MoeForCausalLM",
        counts: &[
            &experts("num_experts", Absent::Refused),
            &MOE_WIDTH,
            &extents(Absent::Refused),
            &head_dim(Absent::Derived),
            &FFN,
        ],
        whole_heads: false,
        context: ("max_position_embeddings", 32_768),
        switches: NORM_TOPK,
        fixed: &[
            ("hidden_act", SILU),
            ("attention_bias", OFF),
            ("use_sliding_window", OFF),
            ("decoder_sparse_step", Fixed::Is(Word::Number(1))),
            ("mlp_only_layers", Fixed::Is(Word::Nothing)),
            NOT_QUANTIZED,
        ],
        ..LLAMA
    },
    Family {
        name: "olmoe",
        class: "OlmoeForCausalLM",
        counts: &[&experts("num_experts", Absent::Refused), &extents(Absent::Derived), &FFN_OF_EXPERTS],
        norm_eps: ("rms_norm_eps", 1e-5),
        context: ("max_position_embeddings", 4096),
        switches: NORM_TOPK,
        fixed: &[("hidden_act", SILU), ("attention_bias", OFF), ("clip_qkv", Fixed::Absent), NOT_QUANTIZED],
        ..LLAMA
    },
    Family {
        name: "deepseek",
        class: "DeepseekForCausalLM",
        counts: &[
            &experts("n_routed_experts", Absent::Refused),
            &MOE_WIDTH,
            &DEEPSEEK,
            &extents(Absent::Derived),
            &FFN,
        ],
        switches: NORM_TOPK,
        fixed: &[
            ("hidden_act", SILU),
            ("attention_bias", OFF),
            ("moe_layer_freq", Fixed::Is(Word::Number(1))),
            ("scoring_func", Fixed::Is(Word::Text("softmax"))),
            NOT_QUANTIZED,
        ],
        ..LLAMA
    },
    Family {
        name: "dots1",
        class: "Dots1ForCausalLM",
        counts: &[
            &experts("n_routed_experts", Absent::Refused),
            &MOE_WIDTH,
            &DEEPSEEK,
            &GROUPS,
            &extents(Absent::Derived),
            &head_dim(Absent::Derived),
            &FFN,
        ],
        whole_heads: false,
        switches: NORM_TOPK,
        numbers: &[Number { theirs: "routed_scaling_factor", ours: "router_scale", get: |m| m.router_scale }],
        fixed: &[
            ("hidden_act", SILU),
            ("attention_bias", OFF),
            ("sliding_window", Fixed::Is(Word::Null)),
            NOT_QUANTIZED,
        ],
        ..LLAMA
    },
    Family {
        name: "gpt2",
        class: "GPT2LMHeadModel",
        counts: &[&[
            count("vocab_size", "vocab_size", |m| m.vocab_size, Absent::Refused),
            count("n_layer", "layers", |m| m.layers, Absent::Refused),
            count("n_embd", "dim", |m| m.dim, Absent::Refused),
            count("n_head", "heads", |m| m.heads, Absent::Refused),
            count("n_inner", "ffn", |m| m.ffn, Absent::Derived),
            count(POSITIONS.0, "positions", |m| m.positions.unwrap_or(POSITIONS.1), Absent::Derived),
        ]],
        norm_eps: ("layer_norm_epsilon", 1e-5),
        tied: true,
        rotary: false,
        whole_heads: false,
        window: None,
        context: POSITIONS,
        switches: &[],
        numbers: &[],
        dropout: &[("embd_pdrop", true), ("resid_pdrop", true), ("attn_pdrop", false)],
        fixed: &[
            ("activation_function", Fixed::Is(Word::Text("gelu_new"))),
            ("scale_attn_weights", Fixed::Is(Word::Flag(true))),
            ("scale_attn_by_inverse_layer_idx", OFF),
            ("add_cross_attention", OFF),
            NOT_QUANTIZED,
        ],
        prefix: "transformer.",
        transposed: &["c_attn.weight", "c_proj.weight", "c_fc.weight"],
        embedding: "transformer.wte.weight",
    },
];

const POSITIONS: (&str, usize) = ("n_positions", 1024);
