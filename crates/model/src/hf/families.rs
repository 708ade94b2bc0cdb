//! The families, and where their `config.json` keeps what `[model]` has.

use lockstep_config::{ModelConfig, RopeScalingConfig};
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
    /// The base of the rotary embedding where nothing is said.
    pub theta: f64,
    /// Other names of fields, each with the one that is used here: a file may have either.
    pub same: &'static [(&'static str, &'static str)],
    /// Whether transformers refuses a width that is no multiple of the heads.
    pub whole_heads: bool,
    /// How many tokens each layer sees: the field, and its value where it is not there. Null is all.
    pub window: Option<(&'static str, usize)>,
    /// Where `sliding_window` is that of the layers from `max_window_layers` on, unless `layer_types` says which: the value of
    /// `max_window_layers` where it is not there. No such layer is supported.
    pub sliding_from: Option<usize>,
    /// Where layers with a window alternate with others, unless `layer_types` says which: the field of how many layers there are from
    /// one without a window to the next, and its value where it is not there.
    pub pattern: Option<(Option<&'static str>, usize)>,
    /// Where layers with a window have a RoPE of their own: the field of its base in files of version 4, and its value where nothing
    /// is said.
    pub local_theta: Option<(Option<&'static str>, f64)>,
    /// Whether some layers have no RoPE.
    pub no_rope: bool,
    /// Whether attention is latent: `head_dim` is then of the part with RoPE alone, which scales scores by YaRN's `mscale_all_dim` too.
    pub latent: bool,
    /// Whether files may have modules after the last layer that predict further tokens (MTP), which are no part of the model here.
    pub mtp: bool,
    /// The scaling of RoPE where neither of its fields is there.
    pub scaling: Option<RopeScalingConfig>,
    /// Whether files may have experts in mxfp4, which `quantization_config` then says.
    pub mxfp4: bool,
    /// Whether files may have matrices in fp8, which `quantization_config` then says.
    pub fp8: bool,
    /// Whether `topk_method` says if groups of experts limit the choice.
    pub topk_method: bool,
    /// Positions: the field, and its value where it is not there.
    pub context: (&'static str, usize),
    /// Shares of elements that training drops, and whether `model.dropout` is about them. They are written, so that others do not
    /// take their own, and not read: how a model was trained is no part of it.
    pub dropout: &'static [(&'static str, bool)],
    pub switches: &'static [Switch],
    pub numbers: &'static [Number],
    /// Fields that have one value only, which is also their value where they are not there.
    pub fixed: &'static [(&'static str, Fixed)],
    /// Fields of its class that change nothing in what a model computes, besides those of every class.
    pub without_effect: &'static [&'static str],
    /// What names of tensors begin with.
    pub prefix: &'static str,
    /// How the names of matrices end whose rows are inputs.
    pub transposed: &'static [&'static str],
    /// How the names of tensors end whose outputs alternate between two halves.
    pub interleaved: &'static [&'static str],
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
    /// Whether it may be 0.
    pub zero: bool,
    /// What it is where the field is not there.
    pub absent: f64,
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
    /// This number.
    Is(usize),
    /// Nothing where it is null, which our config has as not set and `get` as 0; where it is not there, it is refused.
    NoneIfNull,
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
    Real(f64),
    /// A list of nothing.
    Nothing,
}

impl Word {
    pub(super) fn json(&self) -> Value {
        match self {
            Word::Flag(flag) => json!(flag),
            Word::Text(text) => json!(text),
            Word::Number(number) => json!(number),
            Word::Real(number) => json!(number),
            Word::Nothing => json!([]),
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

const fn shared_experts(absent: Absent) -> Count {
    count("n_shared_experts", "shared_experts", |m| m.shared_experts.unwrap_or(1), absent)
}

/// What DeepSeek has besides experts.
const DEEPSEEK: [Count; 2] = [shared_experts(Absent::Refused), DENSE_LAYERS];

/// The sizes of latent attention.
const LATENT: [Count; 5] = [
    count("kv_lora_rank", "kv_lora_rank", |m| m.kv_lora_rank.unwrap_or(0), Absent::Refused),
    count("q_lora_rank", "q_lora_rank", |m| m.q_lora_rank.unwrap_or(0), Absent::NoneIfNull),
    count("qk_nope_head_dim", "qk_nope_head_dim", |m| m.qk_nope_head_dim.unwrap_or(0), Absent::Refused),
    count("qk_rope_head_dim", "qk_rope_head_dim", |m| m.rope_dim(), Absent::Refused),
    count("v_head_dim", "v_head_dim", |m| m.value_dim(), Absent::Refused),
];

/// What the weights of chosen experts are multiplied by.
const fn router_scale(absent: f64) -> Number {
    Number { theirs: "routed_scaling_factor", ours: "router_scale", get: |m| m.router_scale, zero: false, absent }
}

/// How many modules predict further tokens.
pub(super) const MTP_LAYERS: &str = "num_nextn_predict_layers";

/// How DeepSeek-V2 and V3 were trained, what they return, and what follows from other fields.
const DEEPSEEK_TRAINING: &[&str] = &["output_router_logits", "seq_aux", "ep_size", MTP_LAYERS, "qk_head_dim"];

const NORM_TOPK: &[Switch] =
    &[Switch { theirs: "norm_topk_prob", ours: "norm_topk", get: |m| m.norm_topk, absent: false }];

/// How much the load-balancing loss counts.
const fn balance_loss(theirs: &'static str, absent: f64) -> Number {
    Number { theirs, ours: "balance_loss", get: |m| m.balance_loss, zero: true, absent }
}

const NUM_LOCAL_EXPERTS: &str = "num_local_experts";
/// What a model with experts returns, and noise of its training.
const ROUTER_OUTPUT: &[&str] = &["output_router_logits", "router_jitter_noise"];
/// The sliding window of models that say by `use_sliding_window` that they have none.
const UNUSED_WINDOW: &[&str] = &["sliding_window", "max_window_layers"];

/// Names that every config class takes for others.
pub(super) const SAME: &[(&str, &str)] = &[("torch_dtype", "dtype")];

/// How weights are quantised.
pub(super) const QUANTIZATION: &str = "quantization_config";

/// Fields that any class may have, and no model here.
pub(super) const NEVER: &[(&str, Fixed)] = &[("per_layer_config", Fixed::Absent)];

const OFF: Fixed = Fixed::Is(Word::Flag(false));
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

/// Groups of experts that limit the choice.
const fn groups(groups: Absent, chosen: Absent) -> [Count; 2] {
    [
        count(N_GROUP, "expert_groups", |m| m.expert_groups, groups),
        count(TOPK_GROUP, "expert_top_groups", |m| m.expert_top_groups, chosen),
    ]
}

pub(super) const N_GROUP: &str = "n_group";
pub(super) const TOPK_GROUP: &str = "topk_group";

const LLAMA: Family = Family {
    name: "llama",
    class: "LlamaForCausalLM",
    counts: &[&extents(Absent::Derived), &head_dim(Absent::Derived), &FFN],
    norm_eps: ("rms_norm_eps", 1e-6),
    tied: false,
    rotary: true,
    theta: 10_000.0,
    same: &[],
    whole_heads: true,
    window: None,
    sliding_from: None,
    pattern: None,
    local_theta: None,
    no_rope: false,
    latent: false,
    mtp: false,
    scaling: None,
    mxfp4: false,
    fp8: false,
    topk_method: false,
    context: ("max_position_embeddings", 2048),
    dropout: &[("attention_dropout", false)],
    switches: &[],
    numbers: &[],
    fixed: &[("hidden_act", SILU), ("attention_bias", OFF), ("mlp_bias", OFF)],
    without_effect: &[],
    prefix: "model.",
    transposed: &[],
    interleaved: &[],
    embedding: "model.embed_tokens.weight",
};

const OLMO2: Family = Family {
    name: "olmo2",
    class: "Olmo2ForCausalLM",
    counts: &[&extents(Absent::Derived), &FFN],
    norm_eps: ("rms_norm_eps", 1e-5),
    whole_heads: false,
    fixed: &[("hidden_act", SILU), ("attention_bias", OFF)],
    ..LLAMA
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
        fixed: &[("hidden_act", SILU)],
        ..LLAMA
    },
    Family {
        name: "qwen2",
        class: "Qwen2ForCausalLM",
        counts: &[&extents(Absent::Refused), &head_dim(Absent::Derived), &FFN],
        whole_heads: false,
        context: ("max_position_embeddings", 32_768),
        fixed: &[("hidden_act", SILU), ("use_sliding_window", OFF)],
        without_effect: UNUSED_WINDOW,
        ..LLAMA
    },
    Family {
        name: "qwen3",
        class: "Qwen3ForCausalLM",
        counts: &[&extents(Absent::Refused), &head_dim(Absent::Refused), &FFN],
        whole_heads: false,
        context: ("max_position_embeddings", 32_768),
        fixed: &[("hidden_act", SILU), ("attention_bias", OFF), ("use_sliding_window", OFF)],
        without_effect: UNUSED_WINDOW,
        ..LLAMA
    },
    Family {
        name: "mixtral",
        class: "MixtralForCausalLM",
        counts: &[
            &experts(NUM_LOCAL_EXPERTS, Absent::Derived),
            &extents(Absent::Refused),
            &head_dim(Absent::Derived),
            &FFN_OF_EXPERTS,
        ],
        norm_eps: ("rms_norm_eps", 1e-5),
        theta: 1_000_000.0,
        same: &[("num_experts", NUM_LOCAL_EXPERTS)],
        whole_heads: false,
        context: ("max_position_embeddings", 131_072),
        numbers: &[balance_loss("router_aux_loss_coef", 0.001)],
        fixed: &[("hidden_act", SILU), ("sliding_window", Fixed::Absent)],
        without_effect: ROUTER_OUTPUT,
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
        same: &[(NUM_LOCAL_EXPERTS, "num_experts")],
        whole_heads: false,
        context: ("max_position_embeddings", 32_768),
        switches: NORM_TOPK,
        numbers: &[balance_loss("router_aux_loss_coef", 0.001)],
        fixed: &[
            ("hidden_act", SILU),
            ("attention_bias", OFF),
            ("use_sliding_window", OFF),
            ("decoder_sparse_step", Fixed::Is(Word::Number(1))),
            ("mlp_only_layers", Fixed::Is(Word::Nothing)),
        ],
        without_effect: &["sliding_window", "max_window_layers", "output_router_logits"],
        ..LLAMA
    },
    Family {
        name: "olmoe",
        class: "OlmoeForCausalLM",
        counts: &[&experts("num_experts", Absent::Refused), &extents(Absent::Derived), &FFN_OF_EXPERTS],
        norm_eps: ("rms_norm_eps", 1e-5),
        same: &[(NUM_LOCAL_EXPERTS, "num_experts")],
        context: ("max_position_embeddings", 4096),
        switches: NORM_TOPK,
        numbers: &[balance_loss("router_aux_loss_coef", 0.01)],
        fixed: &[("hidden_act", SILU), ("attention_bias", OFF), ("clip_qkv", Fixed::Absent)],
        without_effect: ROUTER_OUTPUT,
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
        ],
        numbers: &[balance_loss("aux_loss_alpha", 0.001)],
        without_effect: &["seq_aux"],
        ..LLAMA
    },
    Family {
        name: "dots1",
        class: "Dots1ForCausalLM",
        counts: &[
            &experts("n_routed_experts", Absent::Refused),
            &MOE_WIDTH,
            &DEEPSEEK,
            &groups(Absent::Derived, Absent::Derived),
            &extents(Absent::Refused),
            &head_dim(Absent::Derived),
            &FFN,
        ],
        same: &[(NUM_LOCAL_EXPERTS, "n_routed_experts")],
        whole_heads: false,
        sliding_from: Some(62),
        switches: NORM_TOPK,
        numbers: &[router_scale(1.0)],
        fixed: &[("hidden_act", SILU), ("attention_bias", OFF)],
        without_effect: ROUTER_OUTPUT,
        ..LLAMA
    },
    Family {
        name: "deepseek_v2",
        class: "DeepseekV2ForCausalLM",
        counts: &[
            &experts("n_routed_experts", Absent::Refused),
            &MOE_WIDTH,
            &[shared_experts(Absent::Refused), DENSE_LAYERS],
            &groups(Absent::Derived, Absent::Derived),
            &LATENT,
            &extents(Absent::Derived),
            &FFN,
        ],
        same: &[("num_experts", "n_routed_experts")],
        latent: true,
        topk_method: true,
        numbers: &[router_scale(1.0), balance_loss("aux_loss_alpha", 0.001)],
        fixed: &[
            ("hidden_act", SILU),
            ("attention_bias", OFF),
            ("mlp_bias", OFF),
            ("norm_topk_prob", OFF),
            ("moe_layer_freq", Fixed::Is(Word::Number(1))),
            ("scoring_func", Fixed::Is(Word::Text("softmax"))),
        ],
        without_effect: DEEPSEEK_TRAINING,
        ..LLAMA
    },
    Family {
        name: "deepseek_v3",
        class: "DeepseekV3ForCausalLM",
        counts: &[
            &experts("n_routed_experts", Absent::Refused),
            &MOE_WIDTH,
            &[shared_experts(Absent::Refused), Count { absent: Absent::Is(3), ..DENSE_LAYERS }],
            &groups(Absent::Is(8), Absent::Is(4)),
            &LATENT,
            &extents(Absent::Refused),
            &FFN,
        ],
        same: &[(NUM_LOCAL_EXPERTS, "n_routed_experts"), ("num_mtp_layers", MTP_LAYERS)],
        whole_heads: false,
        latent: true,
        mtp: true,
        fp8: true,
        context: ("max_position_embeddings", 4096),
        switches: &[Switch { absent: true, ..NORM_TOPK[0] }],
        numbers: &[router_scale(2.5), balance_loss("aux_loss_alpha", 0.001)],
        fixed: &[
            ("hidden_act", SILU),
            ("attention_bias", OFF),
            ("rope_interleave", Fixed::Is(Word::Flag(true))),
            ("moe_layer_freq", Fixed::Is(Word::Number(1))),
            ("scoring_func", Fixed::Is(Word::Text("sigmoid"))),
            ("topk_method", Fixed::Is(Word::Text("noaux_tc"))),
        ],
        without_effect: DEEPSEEK_TRAINING,
        ..LLAMA
    },
    Family {
        name: "gpt_oss",
        class: "GptOssForCausalLM",
        counts: &[
            &experts(NUM_LOCAL_EXPERTS, Absent::Is(4)),
            &extents(Absent::Refused),
            &head_dim(Absent::Is(64)),
            &FFN_OF_EXPERTS,
        ],
        norm_eps: ("rms_norm_eps", 1e-5),
        theta: 150_000.0,
        same: &[("num_experts", NUM_LOCAL_EXPERTS)],
        whole_heads: false,
        window: Some(("sliding_window", 128)),
        pattern: Some((None, 2)),
        scaling: Some(RopeScalingConfig::Yarn {
            factor: 32.0,
            original_context: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
            mscale_all_dim: None,
            truncate: false,
        }),
        mxfp4: true,
        context: ("max_position_embeddings", 131_072),
        numbers: &[Number {
            theirs: "swiglu_limit",
            ours: "swiglu_limit",
            get: |m| m.swiglu_limit.unwrap_or(7.0),
            zero: false,
            absent: 7.0,
        }],
        fixed: &[("attention_bias", Fixed::Is(Word::Flag(true))), ("swiglu_alpha", Fixed::Is(Word::Real(1.702)))],
        // Its experts have a function of their own, whatever `hidden_act` says. The loss of the router counts in transformers only where the router's logits are asked for. Published files have other names of
        // fields besides, which the class does not read.
        without_effect: &[
            "hidden_act",
            "router_aux_loss_coef",
            "output_router_logits",
            "router_jitter_noise",
            "experts_per_token",
            "initial_context_length",
        ],
        transposed: &["experts.gate_up_proj", "experts.down_proj"],
        interleaved: &["experts.gate_up_proj", "experts.gate_up_proj_bias"],
        ..LLAMA
    },
    Family {
        name: "smollm3",
        class: "SmolLM3ForCausalLM",
        counts: &[&extents(Absent::Is(4)), &head_dim(Absent::Derived), &FFN],
        tied: true,
        theta: 2_000_000.0,
        whole_heads: false,
        no_rope: true,
        context: ("max_position_embeddings", 32_768),
        fixed: &[("hidden_act", SILU), ("attention_bias", OFF), ("mlp_bias", OFF), ("use_sliding_window", OFF)],
        without_effect: &["sliding_window"],
        ..LLAMA
    },
    OLMO2,
    Family {
        name: "olmo3",
        class: "Olmo3ForCausalLM",
        theta: 500_000.0,
        window: Some(("sliding_window", 4096)),
        pattern: Some((None, 4)),
        local_theta: Some((None, 500_000.0)),
        ..OLMO2
    },
    Family {
        name: "gemma3_text",
        class: "Gemma3ForCausalLM",
        counts: &[
            &extents(Absent::Is(4)),
            &head_dim(Absent::Is(256)),
            &FFN,
            &[count("query_pre_attn_scalar", "softmax_scale_dim", |m| m.softmax_scale_dim, Absent::Is(256))],
        ],
        tied: true,
        theta: 1_000_000.0,
        window: Some(("sliding_window", 4096)),
        pattern: Some((Some("sliding_window_pattern"), 6)),
        local_theta: Some((Some("rope_local_base_freq"), 10_000.0)),
        context: ("max_position_embeddings", 131_072),
        fixed: &[
            ("hidden_activation", Fixed::Is(Word::Text("gelu_pytorch_tanh"))),
            ("attention_bias", OFF),
            ("use_bidirectional_attention", OFF),
            ("attn_logit_softcapping", Fixed::Absent),
            ("final_logit_softcapping", Fixed::Absent),
        ],
        without_effect: &["_sliding_window_pattern"],
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
        theta: 10_000.0,
        same: &[
            ("hidden_size", "n_embd"),
            ("max_position_embeddings", POSITIONS.0),
            ("num_attention_heads", "n_head"),
            ("num_hidden_layers", "n_layer"),
        ],
        whole_heads: false,
        window: None,
        sliding_from: None,
        pattern: None,
        local_theta: None,
        no_rope: false,
        latent: false,
        mtp: false,
        scaling: None,
        mxfp4: false,
        fp8: false,
        topk_method: false,
        context: POSITIONS,
        switches: &[],
        numbers: &[],
        dropout: &[("embd_pdrop", true), ("resid_pdrop", true), ("attn_pdrop", false)],
        fixed: &[
            ("activation_function", Fixed::Is(Word::Text("gelu_new"))),
            ("scale_attn_weights", Fixed::Is(Word::Flag(true))),
            ("scale_attn_by_inverse_layer_idx", OFF),
            ("add_cross_attention", OFF),
        ],
        without_effect: &[
            "n_ctx",
            "reorder_and_upcast_attn",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        ],
        prefix: "transformer.",
        transposed: &["c_attn.weight", "c_proj.weight", "c_fc.weight"],
        interleaved: &[],
        embedding: "transformer.wte.weight",
    },
];

const POSITIONS: (&str, usize) = ("n_positions", 1024);
