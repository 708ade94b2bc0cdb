//! The rows of the op table.

use super::Op;
use crate::DType;

/// Element types an operand accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elem {
    /// Exactly this type.
    Is(DType),
    /// `f32`, `bf16` or `f16`: the same for all such operands of a call.
    Float,
    /// `bf16` or `f16`, for outputs: whichever of them its value says.
    Rounded,
    /// A gradient accumulator: `f32`, `bf16` or `fixed64`. As an output, whichever of them its value says.
    Accumulator,
    /// Any type.
    Any,
}

/// One operand's row in the table.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// Name, for messages.
    pub name: &'static str,
    /// One letter per dimension, `?` for a dimension of any size; `*` for any shape.
    pub dims: &'static str,
    /// Element type.
    pub elem: Elem,
}

/// What a gradient rule may look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Saved {
    /// The op's input at this index.
    Input(usize),
    /// The op's output at this index.
    Output(usize),
}

/// One op's row in the table.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Name in printed graphs.
    pub name: &'static str,
    /// Inputs, in order. With `variadic`, the first repeats.
    pub inputs: &'static [Operand],
    /// Outputs, in order.
    pub outputs: &'static [Operand],
    /// Whether the first input may be given any number of times.
    pub variadic: bool,
    /// (input, output) pairs that may share memory, if the input is not read afterwards.
    pub in_place: &'static [(usize, usize)],
    /// Outputs that the op makes even where they are unused: it works on them itself.
    pub always_made: &'static [usize],
    /// Whether those pairs must share memory: the op changes a state, or a part of it, where it is.
    pub always_in_place: bool,
    /// What the gradient rule reads besides the output gradients; `None` if the op has no gradient.
    pub gradient_reads: Option<&'static [Saved]>,
    /// Dimensions along which the op may be sharded, as groups of letters that are split together. An operand without a
    /// letter of the group is whole on every rank if it is an input, and a partial sum if it is an output.
    pub splits: &'static [&'static str],
    /// The letter whose entries the op tells apart by number: where ranks split that dimension, it must know where their parts
    /// start.
    pub numbers: Option<char>,
    /// Outputs that are worth recomputing: they follow from what is saved for backward anyway, and cost no matmul, or a
    /// small one beside their bytes (attention scores).
    pub cheap: &'static [usize],
    /// Whether there is an output for every input, of the same type: collectives over several tensors at once.
    pub each: bool,
}

const fn f32(name: &'static str, dims: &'static str) -> Operand {
    Operand { name, dims, elem: Elem::Is(DType::F32) }
}

const fn rounded(name: &'static str, dims: &'static str) -> Operand {
    Operand { name, dims, elem: Elem::Rounded }
}

const fn float(name: &'static str, dims: &'static str) -> Operand {
    Operand { name, dims, elem: Elem::Float }
}

const fn f64(name: &'static str, dims: &'static str) -> Operand {
    Operand { name, dims, elem: Elem::Is(DType::F64) }
}

const fn u32(name: &'static str, dims: &'static str) -> Operand {
    Operand { name, dims, elem: Elem::Is(DType::U32) }
}

const fn fixed(name: &'static str, dims: &'static str) -> Operand {
    Operand { name, dims, elem: Elem::Is(DType::Fixed64) }
}

const fn any(name: &'static str) -> Operand {
    Operand { name, dims: "*", elem: Elem::Any }
}

const fn accumulator(name: &'static str, dims: &'static str) -> Operand {
    Operand { name, dims, elem: Elem::Accumulator }
}

const fn row(
    name: &'static str,
    inputs: &'static [Operand],
    outputs: &'static [Operand],
    in_place: &'static [(usize, usize)],
    gradient_reads: Option<&'static [Saved]>,
) -> Spec {
    Spec {
        name,
        inputs,
        outputs,
        variadic: false,
        in_place,
        always_made: &[],
        always_in_place: false,
        gradient_reads,
        splits: &[],
        numbers: None,
        cheap: &[],
        each: false,
    }
}

/// A row of an op that changes the sharding of tensors, several at once.
const fn collective(name: &'static str, in_place: &'static [(usize, usize)]) -> Spec {
    const X: &[Operand] = &[any("x")];
    Spec { variadic: true, each: true, ..row(name, X, X, in_place, None) }
}

impl Spec {
    const fn splits(self, splits: &'static [&'static str]) -> Spec {
        Spec { splits, ..self }
    }

    const fn numbers(self, letter: char) -> Spec {
        Spec { numbers: Some(letter), ..self }
    }

    const fn cheap(self, cheap: &'static [usize]) -> Spec {
        Spec { cheap, ..self }
    }
}

mod update;

const ANY_OPERAND: &[(usize, usize)] = &[(0, 0), (1, 0)];

use Saved::{Input, Output};
use update::{
    ACCUMULATE, ADAMW, ADD_STATE, DESCEND, GRADIENT_NORM, LION, MERGE_SUMS, MOMENTUM, ORTHOGONALISE, SGD, SQUARE_SUM,
};

static EMBEDDING: Spec =
    row("embedding", &[u32("tokens", "bs"), float("table", "vd")], &[float("x", "bsd")], &[], Some(&[Input(0)]))
        .splits(&["b", "v"])
        .numbers('v');
static EMBEDDING_GRAD: Spec =
    row("embedding_grad", &[float("dx", "bsd"), u32("tokens", "bs")], &[accumulator("dtable", "vd")], &[], None)
        .splits(&["b", "s", "v"])
        .numbers('v');
static LINEAR: Spec =
    row("linear", &[float("x", "bsk"), float("w", "nk")], &[float("y", "bsn")], &[], Some(&[Input(0), Input(1)]))
        .splits(&["b", "s", "n", "k"]);
static LINEAR_GRAD_INPUT: Spec =
    row("linear_grad_input", &[float("dy", "bsn"), float("w", "nk")], &[float("dx", "bsk")], &[], None)
        .splits(&["b", "s", "n", "k"]);
static LINEAR_GRAD_WEIGHT: Spec =
    row("linear_grad_weight", &[float("dy", "bsn"), float("x", "bsk")], &[accumulator("dw", "nk")], &[], None)
        .splits(&["b", "s", "n", "k"]);
static ADD_BIAS: Spec =
    row("add_bias", &[float("x", "bsd"), float("bias", "d")], &[float("y", "bsd")], &[(0, 0)], Some(&[]))
        .splits(&["b", "s", "d"]);
static BIAS_GRAD: Spec =
    row("bias_grad", &[float("dy", "bsd")], &[accumulator("dbias", "d")], &[], None).splits(&["b", "s", "d"]);
static RMS_NORM: Spec = row(
    "rms_norm",
    &[float("x", "bsd"), float("w", "d")],
    &[float("y", "bsd"), f32("rstd", "bs")],
    &[],
    Some(&[Input(0), Input(1), Output(1)]),
)
.splits(&["b", "s"])
.cheap(&[0, 1]);
static ADD_RMS_NORM: Spec = Spec {
    always_made: &[0],
    ..row(
        "add_rms_norm",
        &[float("x", "bsd"), float("delta", "bsd"), float("w", "d")],
        &[float("sum", "bsd"), float("y", "bsd"), f32("rstd", "bs")],
        &[(1, 0), (0, 0)],
        Some(&[Output(0), Input(2), Output(2)]),
    )
    .splits(&["b", "s"])
    .cheap(&[1, 2])
};
static RMS_NORM_GRAD: Spec = row(
    "rms_norm_grad",
    &[float("dy", "bsd"), float("x", "bsd"), float("w", "d"), f32("rstd", "bs")],
    &[float("dx", "bsd")],
    &[(0, 0)],
    None,
)
.splits(&["b", "s"]);
static ADD_RMS_NORM_GRAD: Spec = row(
    "add_rms_norm_grad",
    &[float("dy", "bsd"), float("sum", "bsd"), float("w", "d"), f32("rstd", "bs"), float("dsum", "bsd")],
    &[float("dx", "bsd")],
    &[(4, 0), (0, 0)],
    None,
)
.splits(&["b", "s"]);
static RMS_NORM_GRAD_WEIGHT: Spec = row(
    "rms_norm_grad_weight",
    &[float("dy", "bsd"), float("x", "bsd"), f32("rstd", "bs")],
    &[accumulator("dw", "d")],
    &[],
    None,
)
.splits(&["b", "s"]);
static QK_NORM: Spec = row(
    "qk_norm",
    &[float("qkv", "bsp"), float("w", "i")],
    &[float("y", "bsp"), f32("rstd", "bsx")],
    &[(0, 0)],
    Some(&[Input(0), Input(1), Output(1)]),
)
.splits(&["b", "pqux"]);
static QK_NORM_GRAD: Spec = row(
    "qk_norm_grad",
    &[float("dy", "bsp"), float("qkv", "bsp"), float("w", "i"), f32("rstd", "bsx")],
    &[float("dqkv", "bsp")],
    &[(0, 0)],
    None,
)
.splits(&["b", "pqux"]);
static QK_NORM_GRAD_WEIGHT: Spec = row(
    "qk_norm_grad_weight",
    &[float("dy", "bsp"), float("qkv", "bsp"), f32("rstd", "bsx")],
    &[accumulator("dw", "i")],
    &[],
    None,
)
.splits(&["b", "pqux"]);
static LAYER_NORM: Spec = row(
    "layer_norm",
    &[float("x", "bsd"), float("w", "d"), float("bias", "d")],
    &[float("y", "bsd"), f32("mean", "bs"), f32("rstd", "bs")],
    &[],
    Some(&[Input(0), Input(1), Output(1), Output(2)]),
)
.splits(&["b", "s"])
.cheap(&[0, 1, 2]);
static ADD_LAYER_NORM: Spec = Spec {
    always_made: &[0],
    ..row(
        "add_layer_norm",
        &[float("x", "bsd"), float("delta", "bsd"), float("w", "d"), float("bias", "d")],
        &[float("sum", "bsd"), float("y", "bsd"), f32("mean", "bs"), f32("rstd", "bs")],
        &[(1, 0), (0, 0)],
        Some(&[Output(0), Input(2), Output(2), Output(3)]),
    )
    .splits(&["b", "s"])
    .cheap(&[1, 2, 3])
};
static LAYER_NORM_GRAD: Spec = row(
    "layer_norm_grad",
    &[float("dy", "bsd"), float("x", "bsd"), float("w", "d"), f32("mean", "bs"), f32("rstd", "bs")],
    &[float("dx", "bsd")],
    &[(0, 0)],
    None,
)
.splits(&["b", "s"]);
static ADD_LAYER_NORM_GRAD: Spec = row(
    "add_layer_norm_grad",
    &[
        float("dy", "bsd"),
        float("sum", "bsd"),
        float("w", "d"),
        f32("mean", "bs"),
        f32("rstd", "bs"),
        float("dsum", "bsd"),
    ],
    &[float("dx", "bsd")],
    &[(5, 0), (0, 0)],
    None,
)
.splits(&["b", "s"]);
static LAYER_NORM_GRAD_WEIGHT: Spec = row(
    "layer_norm_grad_weight",
    &[float("dy", "bsd"), float("x", "bsd"), f32("mean", "bs"), f32("rstd", "bs")],
    &[accumulator("dw", "d")],
    &[],
    None,
)
.splits(&["b", "s"]);
static ADD_POSITIONS: Spec =
    row("add_positions", &[float("x", "bsd"), float("table", "td")], &[float("y", "bsd")], &[(0, 0)], Some(&[]))
        .splits(&["b", "s"])
        .numbers('s');
static ADD_DOCUMENT_POSITIONS: Spec = row(
    "add_document_positions",
    &[float("x", "bsd"), float("table", "td"), u32("starts", "bo")],
    &[float("y", "bsd")],
    &[(0, 0)],
    Some(&[Input(2)]),
)
.splits(&["b", "s"])
.numbers('s');
static ADD_POSITIONS_AT: Spec = row(
    "add_positions_at",
    &[float("x", "bsd"), float("table", "td"), u32("start", "b")],
    &[float("y", "bsd")],
    &[(0, 0)],
    None,
);
static POSITIONS_GRAD: Spec = row("positions_grad", &[float("dx", "bsd")], &[accumulator("dtable", "td")], &[], None)
    .splits(&["b", "s"])
    .numbers('s');
static DOCUMENT_POSITIONS_GRAD: Spec = row(
    "document_positions_grad",
    &[float("dx", "bsd"), u32("starts", "bo")],
    &[accumulator("dtable", "td")],
    &[],
    None,
)
.splits(&["b", "s"])
.numbers('s');
static ROPE: Spec =
    row("rope", &[float("qkv", "bsp"), f32("table", "tr")], &[float("rotated", "bsp")], &[(0, 0)], Some(&[Input(1)]))
        .splits(&["b", "pqu"]);
static ROPE_INVERSE: Spec =
    row("rope_inverse", &[float("qkv", "bsp"), f32("table", "tr")], &[float("rotated", "bsp")], &[(0, 0)], None)
        .splits(&["b", "pqu"]);
static DOCUMENT_ROPE: Spec = row(
    "document_rope",
    &[float("qkv", "bsp"), f32("table", "tr"), u32("starts", "bs")],
    &[float("rotated", "bsp")],
    &[(0, 0)],
    Some(&[Input(1), Input(2)]),
)
.splits(&["b", "pqu"]);
static DOCUMENT_ROPE_INVERSE: Spec = row(
    "document_rope_inverse",
    &[float("qkv", "bsp"), f32("table", "tr"), u32("starts", "bs")],
    &[float("rotated", "bsp")],
    &[(0, 0)],
    None,
)
.splits(&["b", "pqu"]);
static ROPE_AT: Spec = row(
    "rope_at",
    &[float("qkv", "bsp"), f32("table", "tr"), u32("start", "b")],
    &[float("rotated", "bsp")],
    &[(0, 0)],
    None,
);
static ATTENTION: Spec = row(
    "attention",
    &[float("qkv", "bsp")],
    &[float("o", "bsh"), f32("lse", "bqs")],
    &[],
    Some(&[Input(0), Output(0), Output(1)]),
)
.splits(&["b", "phqu"]);
static ATTENTION_GRAD: Spec = row(
    "attention_grad",
    &[float("do", "bsh"), float("qkv", "bsp"), float("o", "bsh"), f32("lse", "bqs")],
    &[float("dqkv", "bsp")],
    &[],
    None,
)
.splits(&["b", "phqu"]);
static DOCUMENT_ATTENTION: Spec = row(
    "document_attention",
    &[float("qkv", "bsp"), u32("starts", "bs")],
    &[float("o", "bsh"), f32("lse", "bqs")],
    &[],
    Some(&[Input(0), Input(1), Output(0), Output(1)]),
)
.splits(&["b", "phqu"]);
static DOCUMENT_ATTENTION_GRAD: Spec = row(
    "document_attention_grad",
    &[float("do", "bsh"), float("qkv", "bsp"), float("o", "bsh"), f32("lse", "bqs"), u32("starts", "bs")],
    &[float("dqkv", "bsp")],
    &[],
    None,
)
.splits(&["b", "phqu"]);
const P: Operand = float("p", "bqst");
static ATTENTION_SCORES: Spec =
    row("attention_scores", &[float("qkv", "bsp")], &[P], &[], Some(&[Input(0), Output(0)]))
        .splits(&["b", "pqu"])
        .cheap(&[0]);
static DOCUMENT_ATTENTION_SCORES: Spec = row(
    "document_attention_scores",
    &[float("qkv", "bsp"), u32("starts", "bs")],
    &[P],
    &[],
    Some(&[Input(0), Output(0)]),
)
.splits(&["b", "pqu"])
.cheap(&[0]);
static ATTENTION_SCORES_GRAD: Spec =
    row("attention_scores_grad", &[float("dp", "bqst"), P, float("qkv", "bsp")], &[float("dqkv", "bsp")], &[], None)
        .splits(&["b", "pqu"]);
static ATTENTION_MIX: Spec =
    row("attention_mix", &[P, float("qkv", "bsp")], &[float("o", "bsh")], &[], Some(&[Input(0), Input(1)]))
        .splits(&["b", "phqu"]);
static ATTENTION_MIX_GRAD: Spec = row(
    "attention_mix_grad",
    &[float("do", "bsh"), P, float("qkv", "bsp")],
    &[float("dp", "bqst"), float("dqkv", "bsp")],
    &[],
    None,
)
.splits(&["b", "phqu"]);
static CACHED_ATTENTION: Spec = Spec {
    always_in_place: true,
    ..row(
        "cached_attention",
        &[float("qkv", "bsp"), float("cache", "btw"), u32("start", "b"), u32("count", "b")],
        &[float("o", "bsh"), float("cache", "btw")],
        &[(1, 1)],
        None,
    )
};
static LAST_POSITION: Spec =
    row("last_position", &[float("x", "bsd"), u32("count", "b")], &[float("y", "bld")], &[], None);
static SWIGLU: Spec = row("swiglu", &[float("gate_up", "bsg")], &[float("y", "bsf")], &[], Some(&[Input(0)]))
    .splits(&["b", "s", "gf"])
    .cheap(&[0]);
static SWIGLU_GRAD: Spec =
    row("swiglu_grad", &[float("dy", "bsf"), float("gate_up", "bsg")], &[float("dgate_up", "bsg")], &[(1, 0)], None)
        .splits(&["b", "s", "gf"]);
static GELU: Spec = row("gelu", &[float("x", "bsf")], &[float("y", "bsf")], &[(0, 0)], Some(&[Input(0)]))
    .splits(&["b", "s", "f"])
    .cheap(&[0]);
static GELU_GRAD: Spec =
    row("gelu_grad", &[float("dy", "bsf"), float("x", "bsf")], &[float("dx", "bsf")], ANY_OPERAND, None)
        .splits(&["b", "s", "f"]);
static DROPOUT: Spec =
    row("dropout", &[float("x", "bsd"), u32("keys", "bz")], &[float("y", "bsd")], &[(0, 0)], Some(&[Input(1)]))
        .splits(&["b", "s"])
        .numbers('s');
static ADD: Spec =
    row("add", &[float("a", "bsd"), float("b", "bsd")], &[float("sum", "bsd")], &[(0, 0), (1, 0)], Some(&[]))
        .splits(&["b", "s", "d"]);
static CROSS_ENTROPY: Spec = row(
    "cross_entropy",
    &[float("logits", "bsv"), u32("targets", "bs")],
    &[f64("loss", "b"), f32("lse", "bs")],
    &[],
    Some(&[Input(0), Input(1), Output(1)]),
)
.splits(&["b"]);
static CROSS_ENTROPY_GRAD: Spec = row(
    "cross_entropy_grad",
    &[float("logits", "bsv"), u32("targets", "bs"), f32("lse", "bs")],
    &[float("dlogits", "bsv")],
    &[(0, 0)],
    None,
)
.splits(&["b"]);
static LINEAR_CROSS_ENTROPY: Spec = row(
    "linear_cross_entropy",
    &[float("x", "bsk"), float("w", "vk"), u32("targets", "bs")],
    &[f64("loss", "b"), float("dx", "bsk"), accumulator("dw", "vk")],
    &[],
    Some(&[Output(1), Output(2)]),
)
.splits(&["b"]);
static SCALED_LINEAR_CROSS_ENTROPY: Spec = row(
    "scaled_linear_cross_entropy",
    &[float("x", "bsk"), float("w", "vk"), u32("targets", "bs"), f32("scalars", "z")],
    &[f64("loss", "b"), float("dx", "bsk"), accumulator("dw", "vk")],
    &[],
    Some(&[Output(1), Output(2)]),
)
.splits(&["b"]);
static VOCAB_LOGITS: Spec = row(
    "vocab_logits",
    &[float("x", "bsk"), float("w", "vk"), u32("targets", "bs")],
    &[f32("logits", "cv"), f32("statistics", "acj")],
    &[],
    None,
)
.splits(&["bc", "va"])
.numbers('v');
static VOCAB_LOSS: Spec = Spec {
    variadic: true,
    ..row("vocab_loss", &[f32("statistics", "a?j"), u32("targets", "bs")], &[f64("loss", "b")], &[], None)
        .splits(&["b?"])
};
static VOCAB_GRAD: Spec = row(
    "vocab_grad",
    &[f32("logits", "cv"), f32("statistics", "acj"), float("x", "bsk"), float("w", "vk"), u32("targets", "bs")],
    &[float("dx", "ck"), accumulator("dw", "vk")],
    &[],
    None,
)
.splits(&["bc", "v"])
.numbers('v');
static SCALED_VOCAB_GRAD: Spec = row(
    "scaled_vocab_grad",
    &[
        f32("logits", "cv"),
        f32("statistics", "acj"),
        float("x", "bsk"),
        float("w", "vk"),
        u32("targets", "bs"),
        f32("scalars", "z"),
    ],
    &[float("dx", "ck"), accumulator("dw", "vk")],
    &[],
    None,
)
.splits(&["bc", "v"])
.numbers('v');
static JOIN_ROWS: Spec = Spec {
    variadic: true,
    ..row("join_rows", &[float("part", "?k"), u32("targets", "bs")], &[float("joined", "bsk")], &[], None)
        .splits(&["b?"])
};
static ALL_REDUCE: Spec = collective("all_reduce", &[(0, 0)]);
static SUM_SHARED: Spec = Spec { always_in_place: true, ..collective("sum_shared", &[(0, 0)]) };
static REDUCE_SCATTER: Spec = collective("reduce_scatter", &[]);
static ALL_GATHER: Spec = collective("all_gather", &[]);
static SHARD: Spec = row("shard", &[any("x")], &[any("part")], &[], None);
static SEND: Spec = row("send", &[any("x")], &[], &[], None);
static RECEIVE: Spec = row("receive", &[], &[any("x")], &[], None);

impl Op {
    /// The op's row in the table.
    pub fn spec(&self) -> &'static Spec {
        match self {
            Op::Embedding => &EMBEDDING,
            Op::EmbeddingGrad { .. } => &EMBEDDING_GRAD,
            Op::Linear => &LINEAR,
            Op::LinearGradInput => &LINEAR_GRAD_INPUT,
            Op::LinearGradWeight => &LINEAR_GRAD_WEIGHT,
            Op::AddBias => &ADD_BIAS,
            Op::BiasGrad => &BIAS_GRAD,
            Op::RmsNorm { .. } => &RMS_NORM,
            Op::AddRmsNorm { .. } => &ADD_RMS_NORM,
            Op::RmsNormGrad => &RMS_NORM_GRAD,
            Op::AddRmsNormGrad => &ADD_RMS_NORM_GRAD,
            Op::RmsNormGradWeight => &RMS_NORM_GRAD_WEIGHT,
            Op::QkNorm { .. } => &QK_NORM,
            Op::QkNormGrad => &QK_NORM_GRAD,
            Op::QkNormGradWeight => &QK_NORM_GRAD_WEIGHT,
            Op::LayerNorm { .. } => &LAYER_NORM,
            Op::AddLayerNorm { .. } => &ADD_LAYER_NORM,
            Op::LayerNormGrad => &LAYER_NORM_GRAD,
            Op::AddLayerNormGrad => &ADD_LAYER_NORM_GRAD,
            Op::LayerNormGradWeight => &LAYER_NORM_GRAD_WEIGHT,
            Op::AddPositions { documents: false, .. } => &ADD_POSITIONS,
            Op::AddPositions { documents: true, .. } => &ADD_DOCUMENT_POSITIONS,
            Op::AddPositionsAt => &ADD_POSITIONS_AT,
            Op::PositionsGrad { documents: false, .. } => &POSITIONS_GRAD,
            Op::PositionsGrad { documents: true, .. } => &DOCUMENT_POSITIONS_GRAD,
            Op::Rope { inverse: false, documents: false } => &ROPE,
            Op::Rope { inverse: true, documents: false } => &ROPE_INVERSE,
            Op::Rope { inverse: false, documents: true } => &DOCUMENT_ROPE,
            Op::Rope { inverse: true, documents: true } => &DOCUMENT_ROPE_INVERSE,
            Op::RopeAt => &ROPE_AT,
            Op::Attention { documents: false, .. } => &ATTENTION,
            Op::Attention { documents: true, .. } => &DOCUMENT_ATTENTION,
            Op::AttentionGrad { documents: false, .. } => &ATTENTION_GRAD,
            Op::AttentionGrad { documents: true, .. } => &DOCUMENT_ATTENTION_GRAD,
            Op::AttentionScores { documents: false, .. } => &ATTENTION_SCORES,
            Op::AttentionScores { documents: true, .. } => &DOCUMENT_ATTENTION_SCORES,
            Op::AttentionScoresGrad { .. } => &ATTENTION_SCORES_GRAD,
            Op::AttentionMix { .. } => &ATTENTION_MIX,
            Op::AttentionMixGrad { .. } => &ATTENTION_MIX_GRAD,
            Op::CachedAttention { .. } => &CACHED_ATTENTION,
            Op::LastPosition => &LAST_POSITION,
            Op::SwiGlu => &SWIGLU,
            Op::SwiGluGrad => &SWIGLU_GRAD,
            Op::Gelu => &GELU,
            Op::GeluGrad => &GELU_GRAD,
            Op::Dropout { .. } => &DROPOUT,
            Op::Add => &ADD,
            Op::CrossEntropy => &CROSS_ENTROPY,
            Op::CrossEntropyGrad => &CROSS_ENTROPY_GRAD,
            Op::LinearCrossEntropy { scaled: false, .. } => &LINEAR_CROSS_ENTROPY,
            Op::LinearCrossEntropy { scaled: true, .. } => &SCALED_LINEAR_CROSS_ENTROPY,
            Op::AddState => &ADD_STATE,
            Op::Accumulate => &ACCUMULATE,
            Op::SquareSum { .. } => &SQUARE_SUM,
            Op::MergeSums => &MERGE_SUMS,
            Op::GradientNorm => &GRADIENT_NORM,
            Op::AdamW { .. } => &ADAMW,
            Op::Lion { .. } => &LION,
            Op::Sgd { .. } => &SGD,
            Op::Momentum { .. } => &MOMENTUM,
            Op::Orthogonalise => &ORTHOGONALISE,
            Op::Descend { .. } => &DESCEND,
            Op::VocabLogits { .. } => &VOCAB_LOGITS,
            Op::VocabLoss => &VOCAB_LOSS,
            Op::VocabGrad { scaled: false, .. } => &VOCAB_GRAD,
            Op::VocabGrad { scaled: true, .. } => &SCALED_VOCAB_GRAD,
            Op::JoinRows => &JOIN_ROWS,
            Op::AllReduce { .. } => &ALL_REDUCE,
            Op::SumShared { .. } => &SUM_SHARED,
            Op::ReduceScatter { .. } => &REDUCE_SCATTER,
            Op::AllGather { .. } => &ALL_GATHER,
            Op::Shard { .. } => &SHARD,
            Op::Send { .. } => &SEND,
            Op::Receive { .. } => &RECEIVE,
        }
    }
}
