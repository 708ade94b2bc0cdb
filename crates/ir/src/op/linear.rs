//! Matmuls of activations and weights, and what is added to all positions alike.

use super::row::{FlopsRule, Spec, accumulator, float, row};
use super::sample::{Shapes, embed, ffn, normal, sample};
use super::{Flops, Op, Saved::Input};

/// One matmul.
const MATMUL: FlopsRule = |_, dims, _| Flops::all(2 * dims.product("bsnk"));

pub(super) static LINEAR: Spec = row("linear", &[float("x", "bsk"), float("w", "nk")], &[float("y", "bsn")], |batch| {
    let s = Shapes::new(batch);
    vec![sample(Op::Linear, [s.normal(embed()), normal([ffn(), embed()])])]
})
.gradient(&[Input(0), Input(1)])
.splits(&["b", "s", "n", "k"])
.flops(MATMUL);

pub(super) static LINEAR_GRAD_INPUT: Spec =
    row("linear_grad_input", &[float("dy", "bsn"), float("w", "nk")], &[float("dx", "bsk")], |batch| {
        let s = Shapes::new(batch);
        vec![sample(Op::LinearGradInput, [s.normal(ffn()), normal([ffn(), embed()])])]
    })
    .splits(&["b", "s", "n", "k"])
    .flops(MATMUL);

pub(super) static LINEAR_GRAD_WEIGHT: Spec =
    row("linear_grad_weight", &[float("dy", "bsn"), float("x", "bsk")], &[accumulator("dw", "nk")], |batch| {
        let s = Shapes::new(batch);
        vec![sample(Op::LinearGradWeight, [s.normal(ffn()), s.normal(embed())])]
    })
    .sums(0)
    .splits(&["b", "s", "n", "k"])
    .flops(MATMUL);

pub(super) static ADD_BIAS: Spec =
    row("add_bias", &[float("x", "bsd"), float("bias", "d")], &[float("y", "bsd")], |batch| {
        let s = Shapes::new(batch);
        vec![sample(Op::AddBias, [s.normal(s.qkv()), normal([s.qkv()])])]
    })
    .in_place(&[(0, 0)])
    .gradient(&[])
    .splits(&["b", "s", "d"]);

pub(super) static BIAS_GRAD: Spec = row("bias_grad", &[float("dy", "bsd")], &[accumulator("dbias", "d")], |batch| {
    let s = Shapes::new(batch);
    vec![sample(Op::BiasGrad, [s.normal(s.qkv())])]
})
.sums(0)
.splits(&["b", "s", "d"]);
