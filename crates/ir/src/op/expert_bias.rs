//! Biases of matmuls of experts: every row gets that of the expert which it is of.
//!
//! Rows are those of every expert of a token, or rows of blocks (see `dispatch`), which have the experts of their part. A row of no expert
//! stays as it is.

use super::dispatch::{Grouped as Blocked, first_size};
use super::experts::Grouped;
use super::row::{Spec, accumulator, float, row, u32};
use super::sample::{normal, sample};
use super::{Op, Saved::Input, attributes};
use crate::{Axis, Dim, TensorType};

/// A bias of every expert.
fn biases(experts: usize, features: &Dim) -> (TensorType, super::Draw) {
    normal([Dim::new(Axis::Experts, experts), features.clone()])
}

pub(super) static GROUPED_BIAS: Spec = row(
    "grouped_bias",
    &[float("x", "… choices outputs"), float("bias", "experts outputs"), u32("chosen", "… choices")],
    &[float("y", "… choices outputs")],
    |batch| {
        let of = |g: &Grouped| {
            let inputs = [g.each(&g.ffn), biases(g.experts, &g.ffn), g.chosen()];
            sample(Op::GroupedBias { rows: false }, inputs)
        };
        Grouped::all(batch).iter().map(of).collect()
    },
)
.in_place(&[(0, 0)])
.gradient(&[Input(2)])
.splits(&["…", "outputs"]);

pub(super) static ROWS_BIAS: Spec = row(
    "rows_bias",
    &[float("x", "parts rows outputs"), float("bias", "experts outputs"), u32("owners", "parts rows")],
    &[float("y", "parts rows outputs")],
    |_| {
        let of = |g: &Blocked| {
            sample(Op::GroupedBias { rows: true }, [g.rows(&g.ffn), biases(g.experts, &g.ffn), g.owners()])
        };
        Blocked::all().iter().map(of).collect()
    },
)
.in_place(&[(0, 0)])
.gradient(&[Input(2)])
.splits(&["rows", "parts experts", "outputs"])
.shape(|op, _, dims| op.even_parts(dims));

pub(super) static GROUPED_BIAS_GRAD: Spec = row(
    "grouped_bias_grad",
    &[float("dy", "… choices outputs"), u32("chosen", "… choices")],
    &[accumulator("dbias", "experts outputs")],
    |batch| {
        let op = |g: &Grouped| Op::GroupedBiasGrad { rows: false, experts: g.experts };
        Grouped::all(batch).iter().map(|g| sample(op(g), [g.each(&g.ffn), g.chosen()])).collect()
    },
)
.sums(0)
.splits(&["…", "outputs"])
.shape(|op, _, dims| {
    attributes!(op, Op::GroupedBiasGrad { experts, .. });
    op.ask(dims, "experts", Dim::new(Axis::Experts, experts))
});

pub(super) static ROWS_BIAS_GRAD: Spec = row(
    "rows_bias_grad",
    &[float("dy", "parts rows outputs"), u32("owners", "parts rows")],
    &[accumulator("dbias", "experts outputs")],
    |_| {
        let op = |g: &Blocked| Op::GroupedBiasGrad { rows: true, experts: g.experts };
        Blocked::all().iter().map(|g| sample(op(g), [g.rows(&g.ffn), g.owners()])).collect()
    },
)
.sums(0)
.splits(&["rows", "parts experts", "outputs"])
.shape(|op, _, dims| {
    attributes!(op, Op::GroupedBiasGrad { experts, .. });
    op.ask(dims, "experts", Dim::new(Axis::Experts, experts))?;
    op.even_parts(dims)
})
.local(|op, outputs| {
    attributes!(op, Op::GroupedBiasGrad { rows, .. });
    Op::GroupedBiasGrad { rows, experts: first_size(outputs) }
});
