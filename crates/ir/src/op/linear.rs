//! Matmuls of activations and weights, and what is added to all positions alike.

use super::row::{FlopsRule, Spec, accumulator, float, row};
use super::sample::{Shapes, embed, ffn, normal, sample};
use super::{Cost, Flops, Matmuls, Op, Saved::Input};
use crate::{Axis, Dim};

/// One matmul.
const MATMUL: FlopsRule = |_, dims, _| Flops::all(2 * dims.product("… outputs inputs"));

pub(super) static LINEAR: Spec =
    row("linear", &[float("x", "… inputs"), float("w", "outputs inputs")], &[float("y", "… outputs")], |batch| {
        let any = Shapes::any_leading(batch).map(|s| sample(Op::Linear, [s.normal(embed()), normal([ffn(), embed()])]));
        // As few rows as decoding has, of weights that kernels for few rows take.
        let few = [(1, 192, 48), (1, 64, 16400), (4, 320, 32), (4, 64, 16384), (9, 1088, 48), (9, 64, 16384)];
        let few = few.map(|(rows, inputs, outputs)| {
            let (inputs, outputs) = (Dim::new(Axis::Embed, inputs), Dim::new(Axis::Ffn, outputs));
            sample(Op::Linear, [Shapes::sized(batch, rows, 20).normal(inputs.clone()), normal([outputs, inputs])])
        });
        any.into_iter().chain(few).collect()
    })
    .gradient(&[Input(0), Input(1)])
    .splits(&["…", "outputs", "inputs"])
    .flops(MATMUL)
    .multiplies(&[0, 1], |_, dims, _| Cost::Matmul(Matmuls::of(dims, "…", "outputs", "inputs")));

pub(super) static LINEAR_GRAD_INPUT: Spec = row(
    "linear_grad_input",
    &[float("dy", "… outputs"), float("w", "outputs inputs")],
    &[float("dx", "… inputs")],
    |batch| {
        let of = |s: Shapes| sample(Op::LinearGradInput, [s.normal(ffn()), normal([ffn(), embed()])]);
        Shapes::any_leading(batch).map(of).into()
    },
)
.splits(&["…", "outputs", "inputs"])
.flops(MATMUL)
.multiplies(&[0, 1], |_, dims, _| Cost::Matmul(Matmuls::of(dims, "…", "inputs", "outputs")));

pub(super) static LINEAR_GRAD_WEIGHT: Spec = row(
    "linear_grad_weight",
    &[float("dy", "… outputs"), float("x", "… inputs")],
    &[accumulator("dw", "outputs inputs")],
    |batch| {
        Shapes::any_leading(batch).map(|s| sample(Op::LinearGradWeight, [s.normal(ffn()), s.normal(embed())])).into()
    },
)
.sums(0)
.splits(&["…", "outputs", "inputs"])
.flops(MATMUL)
.multiplies(&[0, 1], |_, dims, call| Cost::Matmul(Matmuls::of_weights(1, dims, dims.product("…") as u64, call)));

pub(super) static ADD_BIAS: Spec =
    row("add_bias", &[float("x", "… features"), float("bias", "features")], &[float("y", "… features")], |batch| {
        Shapes::any_leading(batch).map(|s| sample(Op::AddBias, [s.normal(s.qkv()), normal([s.qkv()])])).into()
    })
    .in_place(&[(0, 0)])
    .gradient(&[])
    .splits(&["…", "features"]);

pub(super) static BIAS_GRAD: Spec =
    row("bias_grad", &[float("dy", "… features")], &[accumulator("dbias", "features")], |batch| {
        Shapes::any_leading(batch).map(|s| sample(Op::BiasGrad, [s.normal(s.qkv())])).into()
    })
    .sums(0)
    .splits(&["…", "features"]);
