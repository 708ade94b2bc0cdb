//! fp8 with many units in a tensor: one for each row of a matmul's operand, or for every 128 of its elements in a row.
//!
//! Both operands of a matmul have their units along the dimension that is summed, so a tensor and its transpose have other units, and are rounded each
//! for itself. Units of blocks stand with the rows of the operand side by side, as matrix libraries take them. A weight in blocks has one unit for
//! every 128 × 128 elements, written down for each row.

use super::quantise::{COST, SEEN, bytes, seen};
use super::row::{FlopsRule, Operand, Samples, Spec, TypeVar, accumulator, f32, float, fp8, row};
use super::sample::{Draw, Shapes, floats, normal, sample};
use super::{Cost, Dims, Flops, Matmuls, Op, Sample, TypeError, attributes};
use crate::{Axis, DType, Dim, TensorType};

/// Elements of a block.
pub const BLOCK: usize = 128;

/// What has a unit of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fine {
    /// A row of an operand.
    Rows,
    /// 128 elements of it; of a weight 128 × 128.
    Blocks,
}

/// One matmul.
const MATMUL: FlopsRule = |_, dims, _| Flops::all(2 * dims.product("batch seq outputs inputs"));

/// This many blocks.
fn blocks(op: &Op, elements: usize) -> Result<Dim, TypeError> {
    match elements.is_multiple_of(BLOCK) {
        true => Ok(Dim::new(Axis::Scalar, elements / BLOCK)),
        false => Err(op.refuse(format!("{elements} elements are no blocks of {BLOCK}"))),
    }
}

/// The format that the op says, and blocks of these dimensions.
fn bind(op: &Op, dims: &mut Dims, of: &[(&'static str, &'static str)]) -> Result<(), TypeError> {
    attributes!(op, Op::QuantiseFine { to, .. });
    if !to.is_fp8() {
        return Err(op.refuse(format!("{to} is no format of fp8")));
    }
    dims.set_float(TypeVar::U, to);
    dims.set("seen", &seen());
    of.iter().try_for_each(|(counted, in_blocks)| {
        let count = blocks(op, dims.size(counted))?;
        dims.set(in_blocks, &count);
        Ok(())
    })
}

/// Positions in whole blocks.
fn shapes(batch: usize) -> Shapes {
    Shapes::sized(batch, 128, 16)
}

fn inputs() -> Dim {
    Dim::new(Axis::Embed, 256)
}

fn outputs() -> Dim {
    Dim::new(Axis::Ffn, 128)
}

/// Rows of other magnitudes: what one unit for all would flush to zero.
fn rows(batch: usize, by: Fine) -> Vec<Sample> {
    let of = |to| {
        let x = (shapes(batch).act(inputs()), Draw::Growing);
        sample(Op::QuantiseFine { by, weight: false, to }, [x])
    };
    [DType::E4M3, DType::E5M2].map(of).into()
}

fn weights(by: Fine) -> Vec<Sample> {
    vec![sample(Op::QuantiseFine { by, weight: true, to: DType::E4M3 }, [normal([outputs(), inputs()])])]
}

const X: &[Operand] = &[float("x", "batch seq features")];
const W: &[Operand] = &[float("w", "outputs inputs")];

/// Tensor-parallel ranks that have parts of the positions would have other units for one column: they gather first.
pub(super) static QUANTISE_ROWWISE: Spec = row(
    "quantise_rowwise",
    X,
    &[
        fp8("q", "batch seq features"),
        f32("units", "batch seq"),
        fp8("transposed", "features batch seq"),
        f32("units_transposed", "features"),
        SEEN,
    ],
    |batch| rows(batch, Fine::Rows),
)
.gradient(&[])
.splits(&["batch", "seq", "features"])
.same_over_tp(&["seq"])
.cheap(&[0, 1, 2, 3])
.sums(4)
.own(&[1, 3, 4])
.cost(COST)
.shape(|op, _, dims| bind(op, dims, &[]));

pub(super) static QUANTISE_ROWWISE_WEIGHT: Spec = row(
    "quantise_rowwise_weight",
    W,
    &[
        fp8("q", "outputs inputs"),
        f32("units", "outputs"),
        fp8("transposed", "inputs outputs"),
        f32("units_transposed", "inputs"),
        SEEN,
    ],
    |_| weights(Fine::Rows),
)
.splits(&["outputs", "inputs"])
.sums(4)
.own(&[1, 3, 4])
.forward()
.cost(COST)
.shape(|op, _, dims| bind(op, dims, &[]));

pub(super) static QUANTISE_BLOCKWISE: Spec = row(
    "quantise_blockwise",
    X,
    &[
        fp8("q", "batch seq features"),
        f32("units", "across batch seq"),
        fp8("transposed", "features batch seq"),
        f32("units_transposed", "batch positions features"),
        SEEN,
    ],
    |batch| rows(batch, Fine::Blocks),
)
.gradient(&[])
.splits(&["batch", "seq positions", "features across"])
.sums(4)
.own(&[4])
.cheap(&[0, 1, 2, 3])
.cost(COST)
.shape(|op, _, dims| bind(op, dims, &[("features", "across"), ("seq", "positions")]));

pub(super) static QUANTISE_BLOCKWISE_WEIGHT: Spec = row(
    "quantise_blockwise_weight",
    W,
    &[
        fp8("q", "outputs inputs"),
        f32("units", "across outputs"),
        fp8("transposed", "inputs outputs"),
        f32("units_transposed", "down inputs"),
        SEEN,
    ],
    |_| weights(Fine::Blocks),
)
.splits(&["outputs down", "inputs across"])
.sums(4)
.own(&[4])
.forward()
.cost(COST)
.shape(|op, _, dims| bind(op, dims, &[("inputs", "across"), ("outputs", "down")]));

/// Units of this many rows and blocks, drawn.
fn units(dims: impl Into<Vec<Dim>>) -> (TensorType, Draw) {
    (floats(dims), Draw::Powers)
}

fn counted(elements: usize) -> Dim {
    Dim::new(Axis::Scalar, elements / BLOCK)
}

fn linear(batch: usize, by: Fine) -> Vec<Sample> {
    let s = shapes(batch);
    let of = |a, to| {
        let (across, [a_units, b_units]) = (counted(inputs().size()), [vec![s.b(), s.s()], vec![outputs()]]);
        let of = |rows: Vec<Dim>| match by {
            Fine::Rows => units(rows),
            Fine::Blocks => units([vec![across.clone()], rows].concat()),
        };
        let (a, b) = (bytes(a, s.act(inputs()).dims), bytes(DType::E4M3, [outputs(), inputs()]));
        sample(Op::FineLinear { by, to }, [a, of(a_units), b, of(b_units)])
    };
    vec![of(DType::E4M3, DType::BF16), of(DType::E5M2, DType::BF16), of(DType::E4M3, DType::F32)]
}

const fn fine_linear(name: &'static str, inputs: &'static [Operand], samples: Samples) -> Spec {
    row(name, inputs, Y, samples)
        .gradient(&[])
        .flops(MATMUL)
        .multiplies(&[0, 2], |_, dims, _| Cost::Matmul(Matmuls::of(dims, "batch seq", "outputs", "inputs")))
        .shape(|op, _, dims| {
            attributes!(op, Op::FineLinear { to, .. });
            if !to.is_float() {
                return Err(op.refuse(format!("{to} is no floating-point type")));
            }
            dims.set_float(TypeVar::T, to);
            Ok(())
        })
}

const Y: &[Operand] = &[float("y", "batch seq outputs")];
const A: Operand = fp8("a", "batch seq inputs");
const B: Operand = fp8("b", "outputs inputs");

pub(super) static ROWWISE_LINEAR: Spec =
    fine_linear("rowwise_linear", &[A, f32("a_units", "batch seq"), B, f32("b_units", "outputs")], |batch| {
        linear(batch, Fine::Rows)
    })
    .splits(&["batch", "seq", "outputs", "inputs"]);

pub(super) static BLOCKWISE_LINEAR: Spec = fine_linear(
    "blockwise_linear",
    &[A, f32("a_units", "across batch seq"), B, f32("b_units", "across outputs")],
    |batch| linear(batch, Fine::Blocks),
)
.splits(&["batch", "seq", "outputs", "inputs across"]);

fn grad_weight(batch: usize, by: Fine) -> Vec<Sample> {
    let s = shapes(batch);
    let of = |dy| {
        let units = |features: Dim| match by {
            Fine::Rows => units([features]),
            Fine::Blocks => units([s.b(), counted(s.seq), features]),
        };
        let dims = |features| [features, s.b(), s.s()];
        let (dy, x) = (bytes(dy, dims(outputs())), bytes(DType::E4M3, dims(inputs())));
        sample(Op::FineGradWeight { by }, [dy, units(outputs()), x, units(inputs())])
    };
    vec![of(DType::E5M2), of(DType::E4M3)]
}

const fn fine_grad_weight(name: &'static str, inputs: &'static [Operand], samples: Samples) -> Spec {
    row(name, inputs, DW, samples).sums(0).flops(MATMUL).multiplies(&[0, 2], |_, dims, call| {
        Cost::Matmul(Matmuls::of_weights(1, dims, dims.product("batch seq") as u64, call))
    })
}

const DW: &[Operand] = &[accumulator("dw", "outputs inputs")];
const DY_T: Operand = fp8("dy", "outputs batch seq");
const X_T: Operand = fp8("x", "inputs batch seq");

pub(super) static ROWWISE_GRAD_WEIGHT: Spec = fine_grad_weight(
    "rowwise_grad_weight",
    &[DY_T, f32("dy_units", "outputs"), X_T, f32("x_units", "inputs")],
    |batch| grad_weight(batch, Fine::Rows),
)
.splits(&["batch", "seq", "outputs", "inputs"]);

pub(super) static BLOCKWISE_GRAD_WEIGHT: Spec = fine_grad_weight(
    "blockwise_grad_weight",
    &[DY_T, f32("dy_units", "batch positions outputs"), X_T, f32("x_units", "batch positions inputs")],
    |batch| grad_weight(batch, Fine::Blocks),
)
.splits(&["batch", "seq positions", "outputs", "inputs"]);
