//! fp8: tensors as bytes of one unit, and matmuls of them.
//!
//! Matrix units of before 2024 take operands in fp8 only where the summed dimension is contiguous in both. So what is quantised is stored a second
//! time as its transpose where a gradient asks for that: one kernel makes both.

use super::row::{FlopsRule, LocalRule, Operand, ShapeRule, Spec, TypeVar, accumulator, f32, float, fp8, row};
use super::sample::{Draw, Shapes, floats, normal, sample};
use super::{Cost, Flops, Matmuls, Op, Sample, attributes};
use crate::{Axis, DType, Dim, TensorType};

/// One matmul.
const MATMUL: FlopsRule = |_, dims, _| Flops::all(2 * dims.product("… outputs inputs"));

/// A unit.
fn one() -> Dim {
    Dim::new(Axis::Scalar, 1)
}

fn parts(count: usize) -> Dim {
    Dim::new(Axis::Scalar, count)
}

/// As many largest magnitudes as the op says.
const COUNTED: ShapeRule = |op, _, dims| {
    attributes!(op, Op::Amax { parts: count, .. });
    dims.set("parts", &parts(count));
    Ok(())
};

const COUNTED_HERE: LocalRule = |op, outputs| {
    attributes!(op, Op::Amax { weight, parts });
    let here = outputs[0].as_ref().map_or(parts, |amax| amax.dims[0].size());
    Op::Amax { weight, parts: here }
};

/// Tensors of a step: usual ones and, once, others. Of the last every number is too small for its byte, but for what the largest one leaves.
fn magnitudes(batch: usize, of: impl Fn(f64) -> Sample) -> Vec<Sample> {
    let others: &[f64] = if batch == 1 { &[3e-7, 5e4, 1e-30] } else { &[] };
    [1.0].iter().chain(others).map(|magnitude| of(*magnitude)).collect()
}

/// Whole multiples of what the matrix units take.
fn inputs() -> Dim {
    Dim::new(Axis::Embed, 80)
}

fn outputs() -> Dim {
    Dim::new(Axis::Ffn, 48)
}

/// Positions of which 16 times as many are there.
fn shapes(batch: usize) -> Shapes {
    Shapes::sized(batch, 64, 16)
}

pub(super) static AMAX: Spec = row("amax", &[float("x", "batch seq features")], &[f32("amax", "parts")], |batch| {
    let of = |by| sample(Op::Amax { weight: false, parts: 3 }, [(shapes(batch).act(inputs()), Draw::Scaled(by))]);
    magnitudes(batch, of)
})
.splits(&["batch", "seq parts", "features parts"])
.own(&[0])
.forward()
.shape(COUNTED)
.local(COUNTED_HERE);

pub(super) static WEIGHT_AMAX: Spec =
    row("weight_amax", &[float("w", "outputs inputs")], &[f32("amax", "parts")], |_| {
        vec![sample(Op::Amax { weight: true, parts: 2 }, [normal([outputs(), inputs()])])]
    })
    .splits(&["outputs parts", "inputs parts"])
    .forward()
    .shape(COUNTED)
    .local(COUNTED_HERE);

/// The format that the op says, and a unit.
const FORMAT: ShapeRule = |op, _, dims| {
    attributes!(op, Op::Quantise { to, .. });
    if !to.is_fp8() {
        return Err(op.refuse(format!("{to} is no format of fp8")));
    }
    dims.set_float(TypeVar::U, to);
    dims.set("one", &one());
    Ok(())
};

/// A tensor and its largest magnitude.
fn with_amax(weight: bool, to: DType, x: (TensorType, Draw)) -> Sample {
    let amax = (floats([parts(3)]), Draw::Of(Op::Amax { weight, parts: 3 }, 0, &[0]));
    sample(Op::Quantise { weight, to }, [x, amax])
}

pub(super) static QUANTISE: Spec = row(
    "quantise",
    &[float("x", "batch seq features"), f32("amax", "?")],
    &[fp8("q", "batch seq features"), fp8("transposed", "features batch seq"), f32("unit", "one")],
    |batch| {
        let of = |to, by| with_amax(false, to, (shapes(batch).act(inputs()), Draw::Scaled(by)));
        let gradient = of(DType::E5M2, 1.0);
        [vec![gradient], magnitudes(batch, |by| of(DType::E4M3, by))].concat()
    },
)
.gradient(&[])
.splits(&["batch", "seq", "features"])
.cheap(&[0, 1])
.own(&[2])
.shape(FORMAT);

pub(super) static QUANTISE_WEIGHT: Spec = row(
    "quantise_weight",
    &[float("w", "outputs inputs"), f32("amax", "?")],
    &[fp8("q", "outputs inputs"), fp8("transposed", "inputs outputs"), f32("unit", "one")],
    |_| vec![with_amax(true, DType::E4M3, normal([outputs(), inputs()]))],
)
.splits(&["outputs", "inputs"])
.own(&[2])
.forward()
.shape(FORMAT);

/// A tensor of bytes, drawn.
fn bytes(dtype: DType, dims: impl Into<Vec<Dim>>) -> (TensorType, Draw) {
    (TensorType::new(dtype, dims), Draw::Normal)
}

/// Its unit.
fn unit() -> (TensorType, Draw) {
    (floats([one()]), Draw::Powers)
}

const UNIT_A: Operand = f32("a_unit", "one");
const UNIT_B: Operand = f32("b_unit", "one");

pub(super) static FP8_LINEAR: Spec = row(
    "fp8_linear",
    &[fp8("a", "… inputs"), UNIT_A, fp8("b", "outputs inputs"), UNIT_B],
    &[float("y", "… outputs")],
    |batch| {
        let s = shapes(batch);
        let of = |a, to| {
            let a = bytes(a, s.act(inputs()).dims);
            sample(Op::Fp8Linear { to }, [a, unit(), bytes(DType::E4M3, [outputs(), inputs()]), unit()])
        };
        vec![of(DType::E4M3, DType::BF16), of(DType::E5M2, DType::BF16), of(DType::E4M3, DType::F32)]
    },
)
.gradient(&[])
.splits(&["…", "outputs", "inputs"])
.flops(MATMUL)
.multiplies(&[0, 2], |_, dims, _| Cost::Matmul(Matmuls::of(dims, "…", "outputs", "inputs")))
.shape(|op, _, dims| {
    attributes!(op, Op::Fp8Linear { to });
    if !to.is_float() {
        return Err(op.refuse(format!("{to} is no floating-point type")));
    }
    dims.set_float(TypeVar::T, to);
    Ok(())
});

pub(super) static FP8_GRAD_WEIGHT: Spec = row(
    "fp8_grad_weight",
    &[fp8("dy", "outputs batch seq"), UNIT_A, fp8("x", "inputs batch seq"), UNIT_B],
    &[accumulator("dw", "outputs inputs")],
    |batch| {
        let s = shapes(batch);
        let of = |dy| {
            let dims = |features| [features, s.b(), s.s()];
            sample(Op::Fp8GradWeight, [bytes(dy, dims(outputs())), unit(), bytes(DType::E4M3, dims(inputs())), unit()])
        };
        vec![of(DType::E5M2), of(DType::E4M3)]
    },
)
.sums(0)
.splits(&["batch", "seq", "outputs", "inputs"])
.flops(|_, dims, _| Flops::all(2 * dims.product("batch seq outputs inputs")))
.multiplies(&[0, 2], |_, dims, call| {
    Cost::Matmul(Matmuls::of_weights(1, dims, dims.product("batch seq") as u64, call))
});
