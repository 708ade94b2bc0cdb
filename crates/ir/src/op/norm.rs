//! Norms of positions and of heads.

use super::attention::packed_heads;
use super::row::{Operand, Samples, ShapeRule, Spec, accumulator, f32, float, row};
use super::sample::{Draw, Draw::Positive, Sample, Shapes, embed, floats, normal, sample};
use super::{Op, Saved::Input, Saved::Output};
use crate::{Axis, Dim, Section, TensorType};

const EPS: f32 = 1e-5;

/// Norms of positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Norm {
    /// RMS norm.
    Rms,
    /// Layer norm: it takes the mean off first, and has a bias.
    Layer,
    /// RMS norm whose weight is stored less 1: it multiplies by `1 + w`.
    RmsPlusOne,
}

impl Op {
    /// RMS norm of what is there.
    pub const fn rms_norm(eps: f32) -> Self {
        Self::Norm { norm: Norm::Rms, residual: false, eps }
    }

    /// Layer norm of what is there.
    pub const fn layer_norm(eps: f32) -> Self {
        Self::Norm { norm: Norm::Layer, residual: false, eps }
    }

    /// RMS norm of what is there, by `1 + w`.
    pub const fn rms_norm_plus_one(eps: f32) -> Self {
        Self::Norm { norm: Norm::RmsPlusOne, residual: false, eps }
    }
}

impl Norm {
    /// Which row of two for each norm.
    pub(super) fn row(self, residual: bool) -> usize {
        2 * self as usize + usize::from(residual)
    }

    /// Statistics of a position: the mean where it takes it off, and one over the deviation.
    pub const fn statistics(self) -> usize {
        match self {
            Norm::Rms | Norm::RmsPlusOne => 1,
            Norm::Layer => 2,
        }
    }

    /// The norm that has the same gradient of its weight.
    pub const fn of_weight(self) -> Norm {
        match self {
            Norm::Rms | Norm::RmsPlusOne => Norm::Rms,
            Norm::Layer => Norm::Layer,
        }
    }
}

const RMS_INPUTS: &[Operand] = &[float("x", "… features"), float("w", "features")];
const RMS_OUTPUTS: &[Operand] = &[float("y", "… features"), f32("rstd", "…")];

/// An RMS norm, of either kind.
const fn rms_norm(name: &'static str, samples: Samples) -> Spec {
    row(name, RMS_INPUTS, RMS_OUTPUTS, samples).gradient(&[Input(0), Input(1), Output(1)]).splits(&["…"]).cheap(&[0, 1])
}

fn forward_samples(batch: usize, op: Op) -> Vec<Sample> {
    Shapes::any_leading(batch).map(|s| sample(op, [s.normal(embed()), normal([embed()])])).into()
}

pub(super) static RMS_NORM: Spec = rms_norm("rms_norm", |batch| forward_samples(batch, Op::rms_norm(EPS)));
pub(super) static RMS_NORM_PLUS_ONE: Spec =
    rms_norm("rms_norm_plus_one", |batch| forward_samples(batch, Op::rms_norm_plus_one(EPS)));

const ADD_RMS_INPUTS: &[Operand] = &[float("x", "… features"), float("delta", "… features"), float("w", "features")];
const ADD_RMS_OUTPUTS: &[Operand] = &[float("sum", "… features"), float("y", "… features"), f32("rstd", "…")];

/// The same of a sum that it adds up first.
const fn add_rms_norm(name: &'static str, samples: Samples) -> Spec {
    row(name, ADD_RMS_INPUTS, ADD_RMS_OUTPUTS, samples)
        .in_place(&[(1, 0), (0, 0)])
        .always_made(&[0])
        .gradient(&[Output(0), Input(2), Output(2)])
        .splits(&["…"])
        .cheap(&[1, 2])
}

fn add_samples(batch: usize, norm: Norm) -> Vec<Sample> {
    let of =
        |x: (TensorType, Draw)| sample(Op::Norm { norm, residual: true, eps: EPS }, [x.clone(), x, normal([embed()])]);
    Shapes::any_leading(batch).map(|s| of(s.normal(embed()))).into()
}

pub(super) static ADD_RMS_NORM: Spec = add_rms_norm("add_rms_norm", |batch| add_samples(batch, Norm::Rms));
pub(super) static ADD_RMS_NORM_PLUS_ONE: Spec =
    add_rms_norm("add_rms_norm_plus_one", |batch| add_samples(batch, Norm::RmsPlusOne));

const RMS_GRAD_INPUTS: &[Operand] =
    &[float("dy", "… features"), float("x", "… features"), float("w", "features"), f32("rstd", "…")];
const RMS_GRAD_OUTPUTS: &[Operand] = &[float("dx", "… features")];

/// The input gradient of either.
const fn rms_norm_grad(name: &'static str, samples: Samples) -> Spec {
    row(name, RMS_GRAD_INPUTS, RMS_GRAD_OUTPUTS, samples).in_place(&[(0, 0)]).splits(&["…"])
}

fn grad_samples(batch: usize, norm: Norm) -> Vec<Sample> {
    let of = |s: Shapes| {
        let x = s.normal(embed());
        let inputs = [x.clone(), x, normal([embed()]), (s.row(), Positive)];
        sample(Op::NormGrad { norm, residual: false }, inputs)
    };
    Shapes::any_leading(batch).map(of).into()
}

pub(super) static RMS_NORM_GRAD: Spec = rms_norm_grad("rms_norm_grad", |batch| grad_samples(batch, Norm::Rms));
pub(super) static RMS_NORM_PLUS_ONE_GRAD: Spec =
    rms_norm_grad("rms_norm_plus_one_grad", |batch| grad_samples(batch, Norm::RmsPlusOne));

const ADD_RMS_GRAD_INPUTS: &[Operand] = &[
    float("dy", "… features"),
    float("sum", "… features"),
    float("w", "features"),
    f32("rstd", "…"),
    float("dsum", "… features"),
];
const ADD_RMS_GRAD_OUTPUTS: &[Operand] = &[float("dx", "… features")];

/// The same with what reaches the normed value on another path.
const fn add_rms_norm_grad(name: &'static str, samples: Samples) -> Spec {
    row(name, ADD_RMS_GRAD_INPUTS, ADD_RMS_GRAD_OUTPUTS, samples).in_place(&[(4, 0), (0, 0)]).splits(&["…"])
}

fn add_grad_samples(batch: usize, norm: Norm) -> Vec<Sample> {
    let of = |s: Shapes| {
        let x = s.normal(embed());
        let inputs = [x.clone(), x.clone(), normal([embed()]), (s.row(), Positive), x];
        sample(Op::NormGrad { norm, residual: true }, inputs)
    };
    Shapes::any_leading(batch).map(of).into()
}

pub(super) static ADD_RMS_NORM_GRAD: Spec =
    add_rms_norm_grad("add_rms_norm_grad", |batch| add_grad_samples(batch, Norm::Rms));
pub(super) static ADD_RMS_NORM_PLUS_ONE_GRAD: Spec =
    add_rms_norm_grad("add_rms_norm_plus_one_grad", |batch| add_grad_samples(batch, Norm::RmsPlusOne));

pub(super) static RMS_NORM_GRAD_WEIGHT: Spec = row(
    "rms_norm_grad_weight",
    &[float("dy", "… features"), float("x", "… features"), f32("rstd", "…")],
    &[accumulator("dw", "features")],
    |batch| {
        let of = |s: Shapes| {
            let x = s.normal(embed());
            sample(Op::NormGradWeight { norm: Norm::Rms }, [x.clone(), x, (s.row(), Positive)])
        };
        Shapes::any_leading(batch).map(of).into()
    },
)
.sums(0)
.splits(&["…", "features"]);

pub(super) static LAYER_NORM: Spec = row(
    "layer_norm",
    &[float("x", "… features"), float("w", "features"), float("bias", "features")],
    &[float("y", "… features"), f32("mean", "…"), f32("rstd", "…")],
    |batch| {
        let vector = || normal([embed()]);
        let of = |s: Shapes| sample(Op::layer_norm(EPS), [s.normal(embed()), vector(), vector()]);
        Shapes::any_leading(batch).map(of).into()
    },
)
.gradient(&[Input(0), Input(1), Output(1), Output(2)])
.splits(&["…"])
.cheap(&[0, 1, 2]);

pub(super) static ADD_LAYER_NORM: Spec = row(
    "add_layer_norm",
    &[float("x", "… features"), float("delta", "… features"), float("w", "features"), float("bias", "features")],
    &[float("sum", "… features"), float("y", "… features"), f32("mean", "…"), f32("rstd", "…")],
    |batch| {
        let of = |s: Shapes| {
            let (x, vector) = (s.normal(embed()), normal([embed()]));
            sample(Op::Norm { norm: Norm::Layer, residual: true, eps: EPS }, [x.clone(), x, vector.clone(), vector])
        };
        Shapes::any_leading(batch).map(of).into()
    },
)
.in_place(&[(1, 0), (0, 0)])
.always_made(&[0])
.gradient(&[Output(0), Input(2), Output(2), Output(3)])
.splits(&["…"])
.cheap(&[1, 2, 3]);

pub(super) static LAYER_NORM_GRAD: Spec = row(
    "layer_norm_grad",
    &[float("dy", "… features"), float("x", "… features"), float("w", "features"), f32("mean", "…"), f32("rstd", "…")],
    &[float("dx", "… features")],
    |batch| {
        let of = |s: Shapes| {
            let (x, mean) = (s.normal(embed()), normal(s.row().dims));
            sample(
                Op::NormGrad { norm: Norm::Layer, residual: false },
                [x.clone(), x, normal([embed()]), mean, (s.row(), Positive)],
            )
        };
        Shapes::any_leading(batch).map(of).into()
    },
)
.in_place(&[(0, 0)])
.splits(&["…"]);

pub(super) static ADD_LAYER_NORM_GRAD: Spec = row(
    "add_layer_norm_grad",
    &[
        float("dy", "… features"),
        float("sum", "… features"),
        float("w", "features"),
        f32("mean", "…"),
        f32("rstd", "…"),
        float("dsum", "… features"),
    ],
    &[float("dx", "… features")],
    |batch| {
        let of = |s: Shapes| {
            let (x, mean) = (s.normal(embed()), normal(s.row().dims));
            let inputs = [x.clone(), x.clone(), normal([embed()]), mean, (s.row(), Positive), x];
            sample(Op::NormGrad { norm: Norm::Layer, residual: true }, inputs)
        };
        Shapes::any_leading(batch).map(of).into()
    },
)
.in_place(&[(5, 0), (0, 0)])
.splits(&["…"]);

pub(super) static LAYER_NORM_GRAD_WEIGHT: Spec = row(
    "layer_norm_grad_weight",
    &[float("dy", "… features"), float("x", "… features"), f32("mean", "…"), f32("rstd", "…")],
    &[accumulator("dw", "features")],
    |batch| {
        let of = |s: Shapes| {
            let (x, mean) = (s.normal(embed()), normal(s.row().dims));
            sample(Op::NormGradWeight { norm: Norm::Layer }, [x.clone(), x, mean, (s.row(), Positive)])
        };
        Shapes::any_leading(batch).map(of).into()
    },
)
.sums(0)
.splits(&["…"]);

pub(super) static ROW_DOT: Spec = row(
    "row_dot",
    &[float("a", "… features"), float("b", "… features"), float("w", "features")],
    &[f32("dot", "…")],
    |batch| {
        let of = |(s, plus_one): (Shapes, bool)| {
            let inputs = [s.normal(embed()), s.normal(embed()), normal([embed()])];
            [sample(Op::RowDot { plus_one: false }, &inputs[..2]), sample(Op::RowDot { plus_one }, inputs)]
        };
        Shapes::any_leading(batch).into_iter().zip([false, true, true]).flat_map(of).collect()
    },
)
.optional(1)
.splits(&["…", "features"]);

pub(super) static RMS_NORM_BY: Spec = row(
    "rms_norm_by",
    &[float("x", "… features"), float("w", "features"), f32("squares", "…")],
    &[float("y", "… features"), f32("rstd", "…")],
    |batch| {
        let of = |(s, plus_one): (Shapes, bool)| {
            let op = Op::NormBy { plus_one, eps: EPS, width: 2 * embed().size() };
            sample(op, [s.normal(embed()), normal([embed()]), (s.row(), Positive)])
        };
        Shapes::any_leading(batch).into_iter().zip([false, true, false]).map(of).collect()
    },
)
.splits(&["…", "features"])
.own(&[1])
.forward();

pub(super) static RMS_NORM_BY_GRAD: Spec = row(
    "rms_norm_by_grad",
    &[float("dy", "… features"), float("x", "… features"), float("w", "features"), f32("rstd", "…"), f32("dot", "…")],
    &[float("dx", "… features")],
    |batch| {
        let of = |(s, plus_one): (Shapes, bool)| {
            let (x, op) = (s.normal(embed()), Op::NormByGrad { plus_one, width: 2 * embed().size() });
            sample(op, [x.clone(), x, normal([embed()]), (s.row(), Positive), normal(s.row().dims)])
        };
        Shapes::any_leading(batch).into_iter().zip([false, true, false]).map(of).collect()
    },
)
.in_place(&[(0, 0)])
.splits(&["…", "features"]);

/// The packed weights of the norms, and a deviation of every head that is normed.
const OF_HEADS: ShapeRule = |op, _, dims| {
    let q = packed_heads(op, dims)?;
    if dims.size("value_dim") != q.unit {
        return Err(op.refuse("heads of V must be as wide as those of Q and K".into()));
    }
    let norms = [(Axis::Heads, q.count), (Axis::KvHeads, dims.size("kv_heads"))];
    let norms = Dim::packed(norms.map(|(axis, count)| Section { axis, count, unit: 1 }));
    let weight = Section { axis: Axis::HeadDim, count: q.unit, unit: 1 };
    op.ask(dims, "normed", norms)?;
    op.ask(dims, "weights", Dim::packed([weight, weight]))
};

fn head_weights(s: &Shapes) -> TensorType {
    let weight = Section { axis: Axis::HeadDim, count: s.head_dim, unit: 1 };
    floats([Dim::packed([weight, weight])])
}

fn head_deviations(s: &Shapes) -> TensorType {
    s.act(Dim::packed([Section { unit: 1, ..s.q() }, Section { unit: 1, ..s.kv() }]))
}

const QK_INPUTS: &[Operand] = &[float("qkv", "batch seq qkv"), float("w", "weights")];
const QK_OUTPUTS: &[Operand] = &[float("y", "batch seq qkv"), f32("rstd", "batch seq normed")];

/// A norm of heads, by `w` or `1 + w`.
const fn qk_norm(name: &'static str, samples: Samples) -> Spec {
    row(name, QK_INPUTS, QK_OUTPUTS, samples)
        .in_place(&[(0, 0)])
        .gradient(&[Input(0), Input(1), Output(1)])
        .splits(&["batch", "seq", "qkv heads kv_heads normed"])
        .shape(OF_HEADS)
}

fn head_samples(batch: usize, plus_one: bool) -> Vec<Sample> {
    let s = Shapes::new(batch);
    vec![sample(Op::QkNorm { plus_one, eps: EPS }, [s.normal(s.qkv()), normal(head_weights(&s).dims)])]
}

pub(super) static QK_NORM: Spec = qk_norm("qk_norm", |batch| head_samples(batch, false));
pub(super) static QK_NORM_PLUS_ONE: Spec = qk_norm("qk_norm_plus_one", |batch| head_samples(batch, true));

const QK_GRAD_INPUTS: &[Operand] = &[
    float("dy", "batch seq qkv"),
    float("qkv", "batch seq qkv"),
    float("w", "weights"),
    f32("rstd", "batch seq normed"),
];
const QK_GRAD_OUTPUTS: &[Operand] = &[float("dqkv", "batch seq qkv")];

/// Its input gradient.
const fn qk_norm_grad(name: &'static str, samples: Samples) -> Spec {
    row(name, QK_GRAD_INPUTS, QK_GRAD_OUTPUTS, samples)
        .in_place(&[(0, 0)])
        .splits(&["batch", "seq", "qkv heads kv_heads normed"])
        .shape(OF_HEADS)
}

fn head_grad_samples(batch: usize, plus_one: bool) -> Vec<Sample> {
    let s = Shapes::new(batch);
    let qkv = s.normal(s.qkv());
    let inputs = [qkv.clone(), qkv, normal(head_weights(&s).dims), (head_deviations(&s), Positive)];
    vec![sample(Op::QkNormGrad { plus_one }, inputs)]
}

pub(super) static QK_NORM_GRAD: Spec = qk_norm_grad("qk_norm_grad", |batch| head_grad_samples(batch, false));
pub(super) static QK_NORM_PLUS_ONE_GRAD: Spec =
    qk_norm_grad("qk_norm_plus_one_grad", |batch| head_grad_samples(batch, true));

pub(super) static QK_NORM_GRAD_WEIGHT: Spec = row(
    "qk_norm_grad_weight",
    &[float("dy", "batch seq qkv"), float("qkv", "batch seq qkv"), f32("rstd", "batch seq normed")],
    &[accumulator("dw", "weights")],
    |batch| {
        let s = Shapes::new(batch);
        let qkv = s.normal(s.qkv());
        vec![sample(Op::QkNormGradWeight, [qkv.clone(), qkv, (head_deviations(&s), Positive)])]
    },
)
.sums(0)
.splits(&["batch", "seq", "qkv heads kv_heads normed"])
.shape(OF_HEADS);
