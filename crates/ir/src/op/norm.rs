//! Norms of positions and of heads.

use super::attention::packed_heads;
use super::row::{ShapeRule, Spec, accumulator, f32, float, row};
use super::sample::{Draw::Positive, Shapes, embed, floats, normal, sample};
use super::{Op, Saved::Input, Saved::Output};
use crate::{Axis, Dim, Section, TensorType};

const EPS: f32 = 1e-5;

pub(super) static RMS_NORM: Spec =
    row("rms_norm", &[float("x", "bsd"), float("w", "d")], &[float("y", "bsd"), f32("rstd", "bs")], |batch| {
        vec![sample(Op::RmsNorm { eps: EPS }, [Shapes::new(batch).normal(embed()), normal([embed()])])]
    })
    .gradient(&[Input(0), Input(1), Output(1)])
    .splits(&["b", "s"])
    .cheap(&[0, 1]);

pub(super) static ADD_RMS_NORM: Spec = row(
    "add_rms_norm",
    &[float("x", "bsd"), float("delta", "bsd"), float("w", "d")],
    &[float("sum", "bsd"), float("y", "bsd"), f32("rstd", "bs")],
    |batch| {
        let x = Shapes::new(batch).normal(embed());
        vec![sample(Op::AddRmsNorm { eps: EPS }, [x.clone(), x, normal([embed()])])]
    },
)
.in_place(&[(1, 0), (0, 0)])
.always_made(&[0])
.gradient(&[Output(0), Input(2), Output(2)])
.splits(&["b", "s"])
.cheap(&[1, 2]);

pub(super) static RMS_NORM_GRAD: Spec = row(
    "rms_norm_grad",
    &[float("dy", "bsd"), float("x", "bsd"), float("w", "d"), f32("rstd", "bs")],
    &[float("dx", "bsd")],
    |batch| {
        let s = Shapes::new(batch);
        let x = s.normal(embed());
        vec![sample(Op::RmsNormGrad, [x.clone(), x, normal([embed()]), (s.row(), Positive)])]
    },
)
.in_place(&[(0, 0)])
.splits(&["b", "s"]);

pub(super) static ADD_RMS_NORM_GRAD: Spec = row(
    "add_rms_norm_grad",
    &[float("dy", "bsd"), float("sum", "bsd"), float("w", "d"), f32("rstd", "bs"), float("dsum", "bsd")],
    &[float("dx", "bsd")],
    |batch| {
        let s = Shapes::new(batch);
        let x = s.normal(embed());
        vec![sample(Op::AddRmsNormGrad, [x.clone(), x.clone(), normal([embed()]), (s.row(), Positive), x])]
    },
)
.in_place(&[(4, 0), (0, 0)])
.splits(&["b", "s"]);

pub(super) static RMS_NORM_GRAD_WEIGHT: Spec = row(
    "rms_norm_grad_weight",
    &[float("dy", "bsd"), float("x", "bsd"), f32("rstd", "bs")],
    &[accumulator("dw", "d")],
    |batch| {
        let s = Shapes::new(batch);
        let x = s.normal(embed());
        vec![sample(Op::RmsNormGradWeight, [x.clone(), x, (s.row(), Positive)])]
    },
)
.sums(0)
.splits(&["b", "s"]);

pub(super) static LAYER_NORM: Spec = row(
    "layer_norm",
    &[float("x", "bsd"), float("w", "d"), float("bias", "d")],
    &[float("y", "bsd"), f32("mean", "bs"), f32("rstd", "bs")],
    |batch| {
        let vector = normal([embed()]);
        vec![sample(Op::LayerNorm { eps: EPS }, [Shapes::new(batch).normal(embed()), vector.clone(), vector])]
    },
)
.gradient(&[Input(0), Input(1), Output(1), Output(2)])
.splits(&["b", "s"])
.cheap(&[0, 1, 2]);

pub(super) static ADD_LAYER_NORM: Spec = row(
    "add_layer_norm",
    &[float("x", "bsd"), float("delta", "bsd"), float("w", "d"), float("bias", "d")],
    &[float("sum", "bsd"), float("y", "bsd"), f32("mean", "bs"), f32("rstd", "bs")],
    |batch| {
        let (x, vector) = (Shapes::new(batch).normal(embed()), normal([embed()]));
        vec![sample(Op::AddLayerNorm { eps: EPS }, [x.clone(), x, vector.clone(), vector])]
    },
)
.in_place(&[(1, 0), (0, 0)])
.always_made(&[0])
.gradient(&[Output(0), Input(2), Output(2), Output(3)])
.splits(&["b", "s"])
.cheap(&[1, 2, 3]);

pub(super) static LAYER_NORM_GRAD: Spec = row(
    "layer_norm_grad",
    &[float("dy", "bsd"), float("x", "bsd"), float("w", "d"), f32("mean", "bs"), f32("rstd", "bs")],
    &[float("dx", "bsd")],
    |batch| {
        let s = Shapes::new(batch);
        let (x, mean) = (s.normal(embed()), normal(s.row().dims));
        vec![sample(Op::LayerNormGrad, [x.clone(), x, normal([embed()]), mean, (s.row(), Positive)])]
    },
)
.in_place(&[(0, 0)])
.splits(&["b", "s"]);

pub(super) static ADD_LAYER_NORM_GRAD: Spec = row(
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
    |batch| {
        let s = Shapes::new(batch);
        let (x, mean) = (s.normal(embed()), normal(s.row().dims));
        let inputs = [x.clone(), x.clone(), normal([embed()]), mean, (s.row(), Positive), x];
        vec![sample(Op::AddLayerNormGrad, inputs)]
    },
)
.in_place(&[(5, 0), (0, 0)])
.splits(&["b", "s"]);

pub(super) static LAYER_NORM_GRAD_WEIGHT: Spec = row(
    "layer_norm_grad_weight",
    &[float("dy", "bsd"), float("x", "bsd"), f32("mean", "bs"), f32("rstd", "bs")],
    &[accumulator("dw", "d")],
    |batch| {
        let s = Shapes::new(batch);
        let (x, mean) = (s.normal(embed()), normal(s.row().dims));
        vec![sample(Op::LayerNormGradWeight, [x.clone(), x, mean, (s.row(), Positive)])]
    },
)
.sums(0)
.splits(&["b", "s"]);

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
    .splits(&["b", "pqux"])
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
.splits(&["b", "pqux"])
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
.splits(&["b", "pqux"])
.shape(OF_HEADS);
