//! Matmuls of experts in fp8. Rows have one unit, the weights of every expert their own; results are in bf16.
//!
//! A sum over rows takes bytes as they are: those of an expert lie apart, so kernels sort and transpose them for themselves.

use super::quantise::{UNIT_A, UNIT_B, bytes, unit};
use super::row::{Operand, Samples, Spec, accumulator, bf16, f32, fp8, row, u32};
use super::sample::{Draw, floats, sample};
use super::{Op, Sample, Saved::Input, attributes, dispatch, experts};
use crate::{Axis, DType, Dim, TensorType};

const WEIGHTS: Operand = fp8("w", "experts outputs inputs");
const UNITS: Operand = f32("w_units", "experts");
const CHOSEN: Operand = u32("chosen", "… choices");
const RESULT: &[Operand] = &[bf16("y", "… choices outputs")];
const GRADIENT: &[Operand] = &[accumulator("dw", "experts outputs inputs")];
const OWNERS: Operand = u32("owners", "parts rows");

/// The same drawn tensor as bytes.
fn as_bytes(dtype: DType, (ty, _): (TensorType, Draw)) -> (TensorType, Draw) {
    bytes(dtype, ty.dims)
}

/// Weights of every expert, and their units.
fn stack((ty, _): (TensorType, Draw)) -> [(TensorType, Draw); 2] {
    let units = floats([ty.dims[0].clone()]);
    [bytes(DType::E4M3, ty.dims), (units, Draw::Powers)]
}

fn grouped(batch: usize, each: bool) -> Vec<Sample> {
    let of = |g: &experts::Grouped, x| {
        let rows = as_bytes(x, if each { g.each(&g.embed) } else { g.x() });
        let [w, units] = stack(g.stack());
        sample(Op::Fp8Grouped { each }, [rows, unit(), w, units, g.chosen()])
    };
    experts::Grouped::of_bytes(batch).iter().flat_map(|g| [DType::E4M3, DType::E5M2].map(|x| of(g, x))).collect()
}

const fn fp8_grouped(name: &'static str, inputs: &'static [Operand], samples: Samples) -> Spec {
    row(name, inputs, RESULT, samples)
        .gradient(&[Input(4)])
        .splits(&["…", "outputs", "inputs"])
        .flops(experts::MATMUL)
        .multiplies(&[0, 2], experts::FORWARD)
}

pub(super) static FP8_GROUPED: Spec =
    fp8_grouped("fp8_grouped", &[fp8("x", "… inputs"), UNIT_A, WEIGHTS, UNITS, CHOSEN], |batch| {
        grouped(batch, false)
    });

pub(super) static FP8_GROUPED_EACH: Spec =
    fp8_grouped("fp8_grouped_each", &[fp8("x", "… choices inputs"), UNIT_A, WEIGHTS, UNITS, CHOSEN], |batch| {
        grouped(batch, true)
    });

fn grad_weight(batch: usize, each: bool) -> Vec<Sample> {
    let of = |g: &experts::Grouped, dy| {
        let dy = as_bytes(dy, g.each(&g.ffn));
        let x = as_bytes(DType::E4M3, if each { g.each(&g.embed) } else { g.x() });
        sample(Op::Fp8GroupedGradWeight { each, experts: g.experts }, [dy, unit(), x, unit(), g.chosen()])
    };
    experts::Grouped::of_bytes(batch).iter().flat_map(|g| [DType::E5M2, DType::E4M3].map(|dy| of(g, dy))).collect()
}

const fn fp8_grad_weight(name: &'static str, inputs: &'static [Operand], samples: Samples) -> Spec {
    row(name, inputs, GRADIENT, samples)
        .sums(0)
        .splits(&["…", "outputs", "inputs"])
        .shape(|op, _, dims| {
            attributes!(op, Op::Fp8GroupedGradWeight { experts, .. });
            op.ask(dims, "experts", Dim::new(Axis::Experts, experts))
        })
        .flops(experts::MATMUL)
        .multiplies(&[0, 2], experts::WEIGHTS)
}

pub(super) static FP8_GROUPED_GRAD_WEIGHT: Spec = fp8_grad_weight(
    "fp8_grouped_grad_weight",
    &[fp8("dy", "… choices outputs"), UNIT_A, fp8("x", "… inputs"), UNIT_B, CHOSEN],
    |batch| grad_weight(batch, false),
);

pub(super) static FP8_GROUPED_GRAD_WEIGHT_EACH: Spec = fp8_grad_weight(
    "fp8_grouped_grad_weight_each",
    &[fp8("dy", "… choices outputs"), UNIT_A, fp8("x", "… choices inputs"), UNIT_B, CHOSEN],
    |batch| grad_weight(batch, true),
);

pub(super) static FP8_ROWS: Spec = row(
    "fp8_rows",
    &[fp8("x", "parts rows inputs"), UNIT_A, WEIGHTS, UNITS, OWNERS],
    &[bf16("y", "parts rows outputs")],
    |_| {
        let of = |g: &dispatch::Grouped, x| {
            let [w, units] = stack(g.stack());
            let op = Op::Fp8Rows { blocks: g.blocks };
            sample(op, [as_bytes(x, g.rows(&g.embed)), unit(), w, units, g.owners()])
        };
        let [odd, _] = dispatch::Grouped::all();
        [odd, dispatch::Grouped::of_bytes()].iter().flat_map(|g| [DType::E4M3, DType::E5M2].map(|x| of(g, x))).collect()
    },
)
.gradient(&[Input(4)])
.splits(&["rows", "parts experts", "outputs", "inputs"])
.chunks()
.flops(dispatch::MATMUL)
.multiplies(&[0, 2], dispatch::FORWARD)
.shape(|op, _, dims| op.even_parts(dims));

pub(super) static FP8_ROWS_GRAD_WEIGHT: Spec = row(
    "fp8_rows_grad_weight",
    &[fp8("dy", "parts rows outputs"), UNIT_A, fp8("x", "parts rows inputs"), UNIT_B, OWNERS],
    GRADIENT,
    |_| {
        let of = |g: &dispatch::Grouped| {
            let (dy, x) = (as_bytes(DType::E5M2, g.rows(&g.ffn)), as_bytes(DType::E4M3, g.rows(&g.embed)));
            let op = Op::Fp8RowsGradWeight { experts: g.experts, blocks: g.blocks };
            sample(op, [dy, unit(), x, unit(), g.owners()])
        };
        let [odd, _] = dispatch::Grouped::all();
        [odd, dispatch::Grouped::of_bytes()].iter().map(of).collect()
    },
)
.sums(0)
.splits(&["rows", "parts experts", "outputs", "inputs"])
.shape(|op, _, dims| {
    attributes!(op, Op::Fp8RowsGradWeight { experts, .. });
    op.ask(dims, "experts", Dim::new(Axis::Experts, experts))?;
    op.even_parts(dims)
})
.local(|op, outputs| {
    attributes!(op, Op::Fp8RowsGradWeight { blocks, .. });
    Op::Fp8RowsGradWeight { experts: dispatch::first_size(outputs), blocks }
})
.flops(dispatch::MATMUL)
.multiplies(&[0, 2], dispatch::WEIGHTS);
