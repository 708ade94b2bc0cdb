//! Norms of positions and of heads.

use super::attention::packed_heads;
use super::row::{ShapeRule, Spec, accumulator, f32, float, row};
use super::sample::{Draw, Draw::Positive, Shapes, embed, floats, normal, sample};
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
}

impl Norm {
    /// Which row of two for each norm.
    pub(super) fn row(self, residual: bool) -> usize {
        2 * self as usize + usize::from(residual)
    }
}

pub(super) static RMS_NORM: Spec = row(
    "rms_norm",
    &[float("x", "… features"), float("w", "features")],
    &[float("y", "… features"), f32("rstd", "…")],
    |batch| {
        let of = |s: Shapes| sample(Op::rms_norm(EPS), [s.normal(embed()), normal([embed()])]);
        Shapes::any_leading(batch).map(of).into()
    },
)
.gradient(&[Input(0), Input(1), Output(1)])
.splits(&["…"])
.cheap(&[0, 1]);

pub(super) static ADD_RMS_NORM: Spec = row(
    "add_rms_norm",
    &[float("x", "… features"), float("delta", "… features"), float("w", "features")],
    &[float("sum", "… features"), float("y", "… features"), f32("rstd", "…")],
    |batch| {
        let of = |x: (TensorType, Draw)| {
            sample(Op::Norm { norm: Norm::Rms, residual: true, eps: EPS }, [x.clone(), x, normal([embed()])])
        };
        Shapes::any_leading(batch).map(|s| of(s.normal(embed()))).into()
    },
)
.in_place(&[(1, 0), (0, 0)])
.always_made(&[0])
.gradient(&[Output(0), Input(2), Output(2)])
.splits(&["…"])
.cheap(&[1, 2]);

pub(super) static RMS_NORM_GRAD: Spec = row(
    "rms_norm_grad",
    &[float("dy", "… features"), float("x", "… features"), float("w", "features"), f32("rstd", "…")],
    &[float("dx", "… features")],
    |batch| {
        let of = |s: Shapes| {
            let x = s.normal(embed());
            sample(
                Op::NormGrad { norm: Norm::Rms, residual: false },
                [x.clone(), x, normal([embed()]), (s.row(), Positive)],
            )
        };
        Shapes::any_leading(batch).map(of).into()
    },
)
.in_place(&[(0, 0)])
.splits(&["…"]);

pub(super) static ADD_RMS_NORM_GRAD: Spec = row(
    "add_rms_norm_grad",
    &[
        float("dy", "… features"),
        float("sum", "… features"),
        float("w", "features"),
        f32("rstd", "…"),
        float("dsum", "… features"),
    ],
    &[float("dx", "… features")],
    |batch| {
        let of = |s: Shapes| {
            let x = s.normal(embed());
            sample(
                Op::NormGrad { norm: Norm::Rms, residual: true },
                [x.clone(), x.clone(), normal([embed()]), (s.row(), Positive), x],
            )
        };
        Shapes::any_leading(batch).map(of).into()
    },
)
.in_place(&[(4, 0), (0, 0)])
.splits(&["…"]);

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
.splits(&["…"]);

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

/// The packed weights of the norms, and a deviation of every head that is normed.
const OF_HEADS: ShapeRule = |op, _, dims| {
    let q = packed_heads(op, dims)?;
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

pub(super) static QK_NORM: Spec = row(
    "qk_norm",
    &[float("qkv", "batch seq qkv"), float("w", "weights")],
    &[float("y", "batch seq qkv"), f32("rstd", "batch seq normed")],
    |batch| {
        let s = Shapes::new(batch);
        vec![sample(Op::QkNorm { eps: EPS }, [s.normal(s.qkv()), normal(head_weights(&s).dims)])]
    },
)
.in_place(&[(0, 0)])
.gradient(&[Input(0), Input(1), Output(1)])
.splits(&["batch", "seq", "qkv heads kv_heads normed"])
.shape(OF_HEADS);

pub(super) static QK_NORM_GRAD: Spec = row(
    "qk_norm_grad",
    &[
        float("dy", "batch seq qkv"),
        float("qkv", "batch seq qkv"),
        float("w", "weights"),
        f32("rstd", "batch seq normed"),
    ],
    &[float("dqkv", "batch seq qkv")],
    |batch| {
        let s = Shapes::new(batch);
        let qkv = s.normal(s.qkv());
        let inputs = [qkv.clone(), qkv, normal(head_weights(&s).dims), (head_deviations(&s), Positive)];
        vec![sample(Op::QkNormGrad, inputs)]
    },
)
.in_place(&[(0, 0)])
.splits(&["batch", "seq", "qkv heads kv_heads normed"])
.shape(OF_HEADS);

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
