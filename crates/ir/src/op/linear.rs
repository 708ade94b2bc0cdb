//! Matmuls of activations and weights, and what is added to all positions alike.

use super::row::{FlopsRule, Spec, accumulator, float, row};
use super::sample::{Shapes, embed, ffn, normal, sample};
use super::{Cost, Dims, Flops, Matmuls, Op, Saved::Input};

/// One matmul.
const MATMUL: FlopsRule = |_, dims, _| Flops::all(2 * dims.product("…nk"));

/// A matmul of these letters: rows, columns, terms.
fn matmul(dims: &Dims, rows: &str, cols: &str, inner: &str) -> Cost {
    let [rows, cols, inner] = [rows, cols, inner].map(|letters| dims.product(letters) as u64);
    Cost::Matmul(Matmuls::one(rows, cols, inner))
}

pub(super) static LINEAR: Spec =
    row("linear", &[float("x", "…k"), float("w", "nk")], &[float("y", "…n")], |batch| {
        Shapes::any_leading(batch).map(|s| sample(Op::Linear, [s.normal(embed()), normal([ffn(), embed()])])).into()
    })
    .gradient(&[Input(0), Input(1)])
    .splits(&["…", "n", "k"])
    .flops(MATMUL)
    .multiplies(&[0, 1], |_, dims, _| matmul(dims, "…", "n", "k"));

pub(super) static LINEAR_GRAD_INPUT: Spec =
    row("linear_grad_input", &[float("dy", "…n"), float("w", "nk")], &[float("dx", "…k")], |batch| {
        let of = |s: Shapes| sample(Op::LinearGradInput, [s.normal(ffn()), normal([ffn(), embed()])]);
        Shapes::any_leading(batch).map(of).into()
    })
    .splits(&["…", "n", "k"])
    .flops(MATMUL)
    .multiplies(&[0, 1], |_, dims, _| matmul(dims, "…", "k", "n"));

pub(super) static LINEAR_GRAD_WEIGHT: Spec =
    row("linear_grad_weight", &[float("dy", "…n"), float("x", "…k")], &[accumulator("dw", "nk")], |batch| {
        Shapes::any_leading(batch).map(|s| sample(Op::LinearGradWeight, [s.normal(ffn()), s.normal(embed())])).into()
    })
    .sums(0)
    .splits(&["…", "n", "k"])
    .flops(MATMUL)
    .multiplies(&[0, 1], |_, dims, call| Cost::Matmul(Matmuls::of_weights(1, dims, dims.product("…") as u64, call)));

pub(super) static ADD_BIAS: Spec =
    row("add_bias", &[float("x", "…d"), float("bias", "d")], &[float("y", "…d")], |batch| {
        Shapes::any_leading(batch).map(|s| sample(Op::AddBias, [s.normal(s.qkv()), normal([s.qkv()])])).into()
    })
    .in_place(&[(0, 0)])
    .gradient(&[])
    .splits(&["…", "d"]);

pub(super) static BIAS_GRAD: Spec = row("bias_grad", &[float("dy", "…d")], &[accumulator("dbias", "d")], |batch| {
    Shapes::any_leading(batch).map(|s| sample(Op::BiasGrad, [s.normal(s.qkv())])).into()
})
.sums(0)
.splits(&["…", "d"]);
