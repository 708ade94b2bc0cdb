//! Norms of positions and of heads.

use super::attention::packed_heads;
use super::row::{ShapeRule, Spec, accumulator, f32, float, row};
use super::sample::{Draw, Draw::Positive, Shapes, embed, floats, normal, sample};
use super::{Op, Saved::Input, Saved::Output};
use crate::{Axis, Dim, Section, TensorType};

const EPS: f32 = 1e-5;

pub(super) static RMS_NORM: Spec =
    row("rms_norm", &[float("x", "…d"), float("w", "d")], &[float("y", "…d"), f32("rstd", "…")], |batch| {
        let of = |s: Shapes| sample(Op::RmsNorm { eps: EPS }, [s.normal(embed()), normal([embed()])]);
        Shapes::any_leading(batch).map(of).into()
    })
    .gradient(&[Input(0), Input(1), Output(1)])
    .splits(&["…"])
    .cheap(&[0, 1]);

pub(super) static ADD_RMS_NORM: Spec = row(
    "add_rms_norm",
    &[float("x", "…d"), float("delta", "…d"), float("w", "d")],
    &[float("sum", "…d"), float("y", "…d"), f32("rstd", "…")],
    |batch| {
        let of = |x: (TensorType, Draw)| sample(Op::AddRmsNorm { eps: EPS }, [x.clone(), x, normal([embed()])]);
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
    &[float("dy", "…d"), float("x", "…d"), float("w", "d"), f32("rstd", "…")],
    &[float("dx", "…d")],
    |batch| {
        let of = |s: Shapes| {
            let x = s.normal(embed());
            sample(Op::RmsNormGrad, [x.clone(), x, normal([embed()]), (s.row(), Positive)])
        };
        Shapes::any_leading(batch).map(of).into()
    },
)
.in_place(&[(0, 0)])
.splits(&["…"]);

pub(super) static ADD_RMS_NORM_GRAD: Spec = row(
    "add_rms_norm_grad",
    &[float("dy", "…d"), float("sum", "…d"), float("w", "d"), f32("rstd", "…"), float("dsum", "…d")],
    &[float("dx", "…d")],
    |batch| {
        let of = |s: Shapes| {
            let x = s.normal(embed());
            sample(Op::AddRmsNormGrad, [x.clone(), x.clone(), normal([embed()]), (s.row(), Positive), x])
        };
        Shapes::any_leading(batch).map(of).into()
    },
)
.in_place(&[(4, 0), (0, 0)])
.splits(&["…"]);

pub(super) static RMS_NORM_GRAD_WEIGHT: Spec = row(
    "rms_norm_grad_weight",
    &[float("dy", "…d"), float("x", "…d"), f32("rstd", "…")],
    &[accumulator("dw", "d")],
    |batch| {
        let of = |s: Shapes| {
            let x = s.normal(embed());
            sample(Op::RmsNormGradWeight, [x.clone(), x, (s.row(), Positive)])
        };
        Shapes::any_leading(batch).map(of).into()
    },
)
.sums(0)
.splits(&["…"]);

pub(super) static LAYER_NORM: Spec = row(
    "layer_norm",
    &[float("x", "…d"), float("w", "d"), float("bias", "d")],
    &[float("y", "…d"), f32("mean", "…"), f32("rstd", "…")],
    |batch| {
        let vector = || normal([embed()]);
        let of = |s: Shapes| sample(Op::LayerNorm { eps: EPS }, [s.normal(embed()), vector(), vector()]);
        Shapes::any_leading(batch).map(of).into()
    },
)
.gradient(&[Input(0), Input(1), Output(1), Output(2)])
.splits(&["…"])
.cheap(&[0, 1, 2]);

pub(super) static ADD_LAYER_NORM: Spec = row(
    "add_layer_norm",
    &[float("x", "…d"), float("delta", "…d"), float("w", "d"), float("bias", "d")],
    &[float("sum", "…d"), float("y", "…d"), f32("mean", "…"), f32("rstd", "…")],
    |batch| {
        let of = |s: Shapes| {
            let (x, vector) = (s.normal(embed()), normal([embed()]));
            sample(Op::AddLayerNorm { eps: EPS }, [x.clone(), x, vector.clone(), vector])
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
    &[float("dy", "…d"), float("x", "…d"), float("w", "d"), f32("mean", "…"), f32("rstd", "…")],
    &[float("dx", "…d")],
    |batch| {
        let of = |s: Shapes| {
            let (x, mean) = (s.normal(embed()), normal(s.row().dims));
            sample(Op::LayerNormGrad, [x.clone(), x, normal([embed()]), mean, (s.row(), Positive)])
        };
        Shapes::any_leading(batch).map(of).into()
    },
)
.in_place(&[(0, 0)])
.splits(&["…"]);

pub(super) static ADD_LAYER_NORM_GRAD: Spec = row(
    "add_layer_norm_grad",
    &[float("dy", "…d"), float("sum", "…d"), float("w", "d"), f32("mean", "…"), f32("rstd", "…"), float("dsum", "…d")],
    &[float("dx", "…d")],
    |batch| {
        let of = |s: Shapes| {
            let (x, mean) = (s.normal(embed()), normal(s.row().dims));
            let inputs = [x.clone(), x.clone(), normal([embed()]), mean, (s.row(), Positive), x];
            sample(Op::AddLayerNormGrad, inputs)
        };
        Shapes::any_leading(batch).map(of).into()
    },
)
.in_place(&[(5, 0), (0, 0)])
.splits(&["…"]);

pub(super) static LAYER_NORM_GRAD_WEIGHT: Spec = row(
    "layer_norm_grad_weight",
    &[float("dy", "…d"), float("x", "…d"), f32("mean", "…"), f32("rstd", "…")],
    &[accumulator("dw", "d")],
    |batch| {
        let of = |s: Shapes| {
            let (x, mean) = (s.normal(embed()), normal(s.row().dims));
            sample(Op::LayerNormGradWeight, [x.clone(), x, mean, (s.row(), Positive)])
        };
        Shapes::any_leading(batch).map(of).into()
    },
)
.sums(0)
.splits(&["…"]);

/// The packed weights of the norms, and a deviation of every head that is normed.
const OF_HEADS: ShapeRule = |op, _, dims| {
    let q = packed_heads(op, dims)?;
    let norms = [(Axis::Heads, q.count), (Axis::KvHeads, dims.size('u'))];
    let norms = Dim::packed(norms.map(|(axis, count)| Section { axis, count, unit: 1 }));
    let weight = Section { axis: Axis::HeadDim, count: q.unit, unit: 1 };
    op.ask(dims, 'x', norms)?;
    op.ask(dims, 'i', Dim::packed([weight, weight]))
};

fn head_weights(s: &Shapes) -> TensorType {
    let weight = Section { axis: Axis::HeadDim, count: s.head_dim, unit: 1 };
    floats([Dim::packed([weight, weight])])
}

fn head_deviations(s: &Shapes) -> TensorType {
    s.act(Dim::packed([Section { unit: 1, ..s.q() }, Section { unit: 1, ..s.kv() }]))
}

pub(super) static QK_NORM: Spec =
    row("qk_norm", &[float("qkv", "bsp"), float("w", "i")], &[float("y", "bsp"), f32("rstd", "bsx")], |batch| {
        let s = Shapes::new(batch);
        vec![sample(Op::QkNorm { eps: EPS }, [s.normal(s.qkv()), normal(head_weights(&s).dims)])]
    })
    .in_place(&[(0, 0)])
    .gradient(&[Input(0), Input(1), Output(1)])
    .splits(&["b", "s", "pqux"])
    .shape(OF_HEADS);

pub(super) static QK_NORM_GRAD: Spec = row(
    "qk_norm_grad",
    &[float("dy", "bsp"), float("qkv", "bsp"), float("w", "i"), f32("rstd", "bsx")],
    &[float("dqkv", "bsp")],
    |batch| {
        let s = Shapes::new(batch);
        let qkv = s.normal(s.qkv());
        let inputs = [qkv.clone(), qkv, normal(head_weights(&s).dims), (head_deviations(&s), Positive)];
        vec![sample(Op::QkNormGrad, inputs)]
    },
)
.in_place(&[(0, 0)])
.splits(&["b", "s", "pqux"])
.shape(OF_HEADS);

pub(super) static QK_NORM_GRAD_WEIGHT: Spec = row(
    "qk_norm_grad_weight",
    &[float("dy", "bsp"), float("qkv", "bsp"), f32("rstd", "bsx")],
    &[accumulator("dw", "i")],
    |batch| {
        let s = Shapes::new(batch);
        let qkv = s.normal(s.qkv());
        vec![sample(Op::QkNormGradWeight, [qkv.clone(), qkv, (head_deviations(&s), Positive)])]
    },
)
.sums(0)
.splits(&["b", "s", "pqux"])
.shape(OF_HEADS);
