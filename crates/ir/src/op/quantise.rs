//! fp8: tensors as bytes of one unit, and matmuls of them.
//!
//! Matrix units of before 2024 take operands in fp8 only where the summed dimension is contiguous in both. So what is quantised is stored a second
//! time as its transpose where a gradient asks for that: one kernel makes both.

use super::cost::CostRule;
use super::row::{
    FlopsRule, LocalRule, Operand, Samples, ShapeRule, Spec, TypeVar, accumulator, f32, f64, float, fp8, row,
};
use super::sample::{Draw, Shapes, floats, normal, sample};
use super::{Cost, Flops, Matmuls, Op, Sample, attributes};
use crate::{Axis, DType, Dim, Seen, TensorType};

/// What is quantised: rows of activations and gradients, or weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Factor {
    /// Rows of tokens.
    Tokens,
    /// Rows of each of a token's experts.
    Choices,
    /// Rows in blocks of experts.
    Blocks,
    /// A weight.
    Weight,
    /// A weight of every expert, each in its own unit.
    Stack,
}

impl Factor {
    /// Whether it is a parameter.
    pub const fn is_weight(self) -> bool {
        matches!(self, Factor::Weight | Factor::Stack)
    }

    /// Whether its transpose is made with it: rows of experts are sorted where they are transposed, by what sums over them.
    pub const fn transposes(self) -> bool {
        !matches!(self, Factor::Choices | Factor::Blocks)
    }

    /// Which output of [`Op::Quantise`] its unit is; what rounding lost is the next.
    pub const fn unit(self) -> usize {
        1 + self.transposes() as usize
    }
}

impl Op {
    /// Whether it makes bytes of a weight.
    pub fn quantises_weight(&self) -> bool {
        match self {
            Op::Quantise { of, .. } => of.is_weight(),
            Op::QuantiseFine { weight, .. } => *weight,
            _ => false,
        }
    }
}

/// One matmul.
const MATMUL: FlopsRule = |_, dims, _| Flops::all(2 * dims.product("… outputs inputs"));

/// A unit.
pub(super) fn one() -> Dim {
    Dim::new(Axis::Scalar, 1)
}

fn parts(count: usize) -> Dim {
    Dim::new(Axis::Scalar, count)
}

/// As many largest magnitudes as the op says.
const COUNTED: ShapeRule = |op, _, dims| {
    attributes!(op, Op::Amax { parts: count, .. });
    dims.set("counted", &parts(count));
    Ok(())
};

const COUNTED_HERE: LocalRule = |op, outputs| {
    attributes!(op, Op::Amax { of, parts });
    let last = |amax: &TensorType| amax.dims.last().map_or(parts, Dim::size);
    Op::Amax { of, parts: outputs[0].as_ref().map_or(parts, last) }
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

fn experts() -> Dim {
    Dim::new(Axis::Experts, 3)
}

/// Weights of three experts.
fn stack() -> (TensorType, Draw) {
    (floats([experts(), outputs(), inputs()]), Draw::Growing)
}

fn choices(batch: usize) -> (TensorType, Draw) {
    let mut ty = shapes(batch).act(Dim::new(Axis::Choices, 2));
    ty.dims.push(inputs());
    (ty, Draw::Normal)
}

fn blocks() -> (TensorType, Draw) {
    normal([Dim::new(Axis::Parts, 3), Dim::new(Axis::Rows, 32), inputs()])
}

/// Positions of which 16 times as many are there.
fn shapes(batch: usize) -> Shapes {
    Shapes::sized(batch, 64, 16)
}

/// As frameworks do it, with more or fewer reads of a tensor.
pub(super) const COST: CostRule = |_, _, _| Cost::Quantise;

const LARGEST: &[Operand] = &[f32("amax", "counted")];

/// The largest magnitude of rows.
const fn amax(name: &'static str, inputs: &'static [Operand], samples: Samples) -> Spec {
    row(name, inputs, LARGEST, samples).own(&[0]).forward().shape(COUNTED).cost(COST).local(COUNTED_HERE)
}

pub(super) static AMAX: Spec = amax("amax", &[float("x", "batch seq features")], |batch| {
    let of = |by| sample(Op::Amax { of: Factor::Tokens, parts: 3 }, [(shapes(batch).act(inputs()), Draw::Scaled(by))]);
    magnitudes(batch, of)
})
.splits(&["batch", "seq counted", "features counted"]);

pub(super) static CHOICES_AMAX: Spec = amax("choices_amax", &[float("x", "batch seq choices features")], |batch| {
    vec![sample(Op::Amax { of: Factor::Choices, parts: 2 }, [choices(batch)])]
})
.splits(&["batch", "seq counted", "features counted"]);

pub(super) static BLOCKS_AMAX: Spec = amax("blocks_amax", &[float("x", "parts rows features")], |_| {
    vec![sample(Op::Amax { of: Factor::Blocks, parts: 2 }, [blocks()])]
})
.splits(&["parts", "rows counted", "features counted"]);

pub(super) static WEIGHT_AMAX: Spec = row("weight_amax", &[float("w", "outputs inputs")], LARGEST, |_| {
    vec![sample(Op::Amax { of: Factor::Weight, parts: 2 }, [normal([outputs(), inputs()])])]
})
.splits(&["outputs counted", "inputs counted"])
.forward()
.shape(COUNTED)
.cost(COST)
.local(COUNTED_HERE);

pub(super) static STACK_AMAX: Spec =
    row("stack_amax", &[float("w", "experts outputs inputs")], &[f32("amax", "experts counted")], |_| {
        vec![sample(Op::Amax { of: Factor::Stack, parts: 2 }, [stack()])]
    })
    .splits(&["experts", "outputs counted", "inputs counted"])
    .forward()
    .shape(COUNTED)
    .cost(COST)
    .local(COUNTED_HERE);

/// The format that the op says, and a unit.
const FORMAT: ShapeRule = |op, _, dims| {
    attributes!(op, Op::Quantise { to, .. });
    if !to.is_fp8() {
        return Err(op.refuse(format!("{to} is no format of fp8")));
    }
    dims.set_float(TypeVar::U, to);
    dims.set("one", &one());
    dims.set("seen", &seen());
    Ok(())
};

/// What rounding lost, which sums over micro-batches and ranks count.
pub(super) const SEEN: Operand = f64("seen", "seen");

/// As many numbers as that is.
pub(super) fn seen() -> Dim {
    Dim::new(Axis::Scalar, Seen::COUNT)
}

/// A tensor and its largest magnitude.
fn with_amax(of: Factor, to: DType, measures: bool, x: (TensorType, Draw)) -> Sample {
    let experts = (of == Factor::Stack).then(|| x.0.dims[0].clone());
    let dims: Vec<Dim> = experts.into_iter().chain([parts(3)]).collect();
    let amax = (floats(dims), Draw::Of(Op::Amax { of, parts: 3 }, 0, &[0]));
    sample(Op::Quantise { of, to, measures }, [x, amax])
}

pub(super) static QUANTISE: Spec = row(
    "quantise",
    &[float("x", "batch seq features"), f32("amax", "?")],
    &[fp8("q", "batch seq features"), fp8("transposed", "features batch seq"), f32("unit", "one"), SEEN],
    |batch| {
        let of =
            |to, by, measures| with_amax(Factor::Tokens, to, measures, (shapes(batch).act(inputs()), Draw::Scaled(by)));
        let measured = [DType::E4M3, DType::E5M2].map(|to| of(to, 1.0, true));
        let gradient = of(DType::E5M2, 1.0, false);
        // In the unit of earlier steps some are too large; enough columns that one tile after the first is looked at.
        let wide = || {
            let x = (shapes(1).act(Dim::new(Axis::Embed, (Seen::EVERY + 2) * Seen::TILE)), Draw::Scaled(100.0));
            let op = Op::Quantise { of: Factor::Tokens, to: DType::E4M3, measures: true };
            sample(op, [x, normal([parts(16)])])
        };
        let alone = if batch == 1 { vec![wide()] } else { Vec::new() };
        let usual = magnitudes(batch, |by| of(DType::E4M3, by, false));
        [&measured[..], &[gradient], &usual, &alone].concat()
    },
)
.gradient(&[])
.splits(&["batch", "seq", "features"])
.cheap(&[0, 1])
.sums(3)
.own(&[2, 3])
.cost(COST)
.shape(FORMAT);

pub(super) static QUANTISE_CHOICES: Spec = row(
    "quantise_choices",
    &[float("x", "batch seq choices features"), f32("amax", "?")],
    &[fp8("q", "batch seq choices features"), f32("unit", "one"), SEEN],
    |batch| {
        [DType::E4M3, DType::E5M2].map(|to| with_amax(Factor::Choices, to, to == DType::E4M3, choices(batch))).into()
    },
)
.gradient(&[])
.splits(&["batch", "seq", "features"])
.cheap(&[0])
.sums(2)
.own(&[1, 2])
.cost(COST)
.shape(FORMAT);

pub(super) static QUANTISE_BLOCKS: Spec = row(
    "quantise_blocks",
    &[float("x", "parts rows features"), f32("amax", "?")],
    &[fp8("q", "parts rows features"), f32("unit", "one"), SEEN],
    |_| [DType::E4M3, DType::E5M2].map(|to| with_amax(Factor::Blocks, to, to == DType::E4M3, blocks())).into(),
)
.gradient(&[])
.splits(&["parts", "rows", "features"])
.cheap(&[0])
.sums(2)
.own(&[1, 2])
.cost(COST)
.shape(FORMAT);

pub(super) static QUANTISE_WEIGHT: Spec = row(
    "quantise_weight",
    &[float("w", "outputs inputs"), f32("amax", "?")],
    &[fp8("q", "outputs inputs"), fp8("transposed", "inputs outputs"), f32("unit", "one"), SEEN],
    |_| vec![with_amax(Factor::Weight, DType::E4M3, false, normal([outputs(), inputs()]))],
)
.splits(&["outputs", "inputs"])
.sums(3)
.own(&[2, 3])
.forward()
.cost(COST)
.shape(FORMAT);

pub(super) static QUANTISE_STACK: Spec = row(
    "quantise_stack",
    &[float("w", "experts outputs inputs"), f32("amax", "experts ?")],
    &[fp8("q", "experts outputs inputs"), fp8("transposed", "experts inputs outputs"), f32("units", "experts"), SEEN],
    |_| vec![with_amax(Factor::Stack, DType::E4M3, false, stack())],
)
.splits(&["experts", "outputs", "inputs"])
.sums(3)
.own(&[2, 3])
.forward()
.cost(COST)
.shape(FORMAT);

/// A tensor of bytes, drawn.
pub(super) fn bytes(dtype: DType, dims: impl Into<Vec<Dim>>) -> (TensorType, Draw) {
    (TensorType::new(dtype, dims), Draw::Normal)
}

/// Its unit.
pub(super) fn unit() -> (TensorType, Draw) {
    (floats([one()]), Draw::Powers)
}

pub(super) const UNIT_A: Operand = f32("a_unit", "one");
pub(super) const UNIT_B: Operand = f32("b_unit", "one");

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

/// What several tensors have lost.
fn of_tensors() -> (TensorType, Draw) {
    (TensorType::new(DType::F64, [Dim::new(Axis::Scalar, 3), seen()]), Draw::Below(2))
}

pub(super) static REMEMBER: Spec = row(
    "remember",
    &[f32("history", "steps"), f64("seen", "tensors seen"), f32("stats", "stats")],
    &[f32("next", "steps")],
    |_| {
        let stats = (floats([Dim::new(Axis::Scalar, 2)]), Draw::Stats);
        let history = normal([Dim::new(Axis::Scalar, 16)]);
        let of = |row| sample(Op::Remember { row }, [history.clone(), of_tensors(), stats.clone()]);
        [0, 1, 2].map(of).into()
    },
)
.in_place(&[(0, 0)])
.shape(|op, _, dims| {
    attributes!(op, Op::Remember { row });
    match row < dims.size("tensors") && dims.size("seen") == Seen::COUNT {
        true => Ok(()),
        false => Err(op.refuse(format!("row {row} of {} with {}", dims.size("tensors"), dims.size("seen")))),
    }
});
