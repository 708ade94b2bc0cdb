//! Update rules.

use super::row::{Elem, Operand, Samples, Spec, accumulator, f32, moment, rounded, row, u32, weight};
use super::sample::{Draw, Sample, Shapes, embed, ffn, floats, normal, rounding, sample, scalars};
use super::{Cost, Flops, Matmuls, Op, ROUNDING, TypeError, newton_schulz};
use crate::{Axis, DType, Dim, TensorType, dynamic8};

fn state() -> (TensorType, Draw) {
    normal([ffn(), embed()])
}

fn stats() -> (TensorType, Draw) {
    (floats([Dim::new(Axis::Scalar, 2)]), Draw::Stats)
}

/// What says how moments and weights of fewer bits are rounded, where they are.
const KEY: Operand = u32(ROUNDING, "words");

/// Moments in blocks have a block for every 256 weights of a row.
fn fits(op: &Op, inputs: &[&TensorType], first: usize, moments: usize) -> Result<(), TypeError> {
    let numbers = |ty: &TensorType| ty.elements() * ty.dtype.numbers();
    let of = inputs[0];
    let given = inputs.len();
    let rounds = (0..given).any(|i| op.input(i, given).name == ROUNDING);
    let fewer = |(i, ty): (usize, &&TensorType)| {
        matches!(op.input(i, given).elem, Elem::Weight | Elem::Moment) && ty.dtype != DType::F32
    };
    if !rounds && inputs.iter().enumerate().any(fewer) {
        return Err(op.refuse(format!("what is kept in fewer bits than f32 needs `{ROUNDING}`")));
    }
    match inputs[first..first + moments].iter().find(|ty| numbers(ty) != of.elements()) {
        Some(ty) => Err(op.refuse(format!("{ty} is no moment of {of}"))),
        None => Ok(()),
    }
}

/// The samples of an update: in f32, and with weights and moments in fewer bits. `moments` are indices of first and of second moments.
fn stored(op: Op, inputs: &[(TensorType, Draw)], moments: &[(usize, DType)], weights: bool) -> Vec<Sample> {
    let with = |weight: DType, moment: Option<DType>| {
        let mut inputs = inputs.to_vec();
        inputs.push(rounding());
        // Rows of whole blocks, and more elements than a block of threads has.
        for (ty, _) in inputs.iter_mut().filter(|(ty, _)| ty.dims.len() == 2) {
            ty.dims = vec![Dim::new(Axis::Ffn, 7), Dim::new(Axis::Embed, 3 * dynamic8::BLOCK)];
        }
        if weights {
            inputs[0].0.dtype = weight;
        }
        for (m, blocks) in moments {
            let ty = &mut inputs[*m].0;
            *ty = match moment {
                Some(dtype) => TensorType::new(dtype, ty.dims.clone()),
                None => dynamic8::blocks(ty, *blocks).unwrap_or_else(|| ty.clone()),
            };
        }
        sample(op, inputs)
    };
    let mut samples = vec![sample(op, inputs)];
    if weights {
        samples.push(with(DType::BF16, Some(DType::F32)));
    }
    if !moments.is_empty() {
        samples.extend([with(DType::F32, Some(DType::BF16)), with(DType::F32, None)]);
    }
    if weights && !moments.is_empty() {
        samples.extend([with(DType::BF16, Some(DType::BF16)), with(DType::BF16, None)]);
    }
    samples
}

pub(super) static ADAMW: Spec = row(
    "adamw",
    &[
        weight("w"),
        accumulator("grad", "*"),
        moment("m"),
        moment("v"),
        f32("scalars", "scalars"),
        f32("stats", "stats"),
        KEY,
    ],
    &[weight("w"), moment("m"), moment("v"), rounded("copy", "*")],
    |_| {
        let op = Op::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.1, lr_scale: 0.5 };
        let second = (floats([ffn(), embed()]), Draw::Positive);
        let inputs = [state(), state(), state(), second, scalars(), stats()];
        stored(op, &inputs, &[(2, DType::Signed8), (3, DType::Unsigned8)], true)
    },
)
.optional(1)
.shape(|op, inputs, _| fits(op, inputs, 2, 2))
.always_in_place(&[(0, 0), (2, 1), (3, 2)])
.cost(|_, _, _| Cost::Optimizer);

/// An update by one moment.
const fn by_moment(name: &'static str, samples: Samples) -> Spec {
    const INPUTS: &[Operand] =
        &[weight("w"), accumulator("grad", "*"), moment("m"), f32("scalars", "scalars"), f32("stats", "stats"), KEY];
    const OUTPUTS: &[Operand] = &[weight("w"), moment("m"), rounded("copy", "*")];
    row(name, INPUTS, OUTPUTS, samples)
        .optional(1)
        .shape(|op, inputs, _| fits(op, inputs, 2, 1))
        .always_in_place(&[(0, 0), (2, 1)])
        .cost(|_, _, _| Cost::Optimizer)
}

pub(super) static LION: Spec = by_moment("lion", |_| {
    let op = Op::Lion { beta1: 0.9, beta2: 0.99, decay: 0.1, lr_scale: 0.5 };
    stored(op, &[state(), state(), state(), scalars(), stats()], &[(2, DType::Signed8)], true)
});

pub(super) static SGD: Spec = by_moment("sgd", |_| {
    let op = Op::Sgd { momentum: 0.9, decay: 0.1, lr_scale: 0.5 };
    stored(op, &[state(), state(), state(), scalars(), stats()], &[(2, DType::Signed8)], true)
});

pub(super) static MOMENTUM: Spec = row(
    "momentum",
    &[accumulator("grad", "*"), moment("m"), f32("stats", "stats"), KEY],
    &[moment("m"), f32("update", "*")],
    |_| stored(Op::Momentum { momentum: 0.95 }, &[state(), state(), stats()], &[(1, DType::Signed8)], false),
)
.optional(1)
.shape(|op, inputs, _| fits(op, inputs, 1, 1))
.always_in_place(&[(1, 0)])
.cost(|_, _, _| Cost::Optimizer);

pub(super) static ORTHOGONALISE: Spec =
    row("orthogonalise", &[f32("update", "outputs inputs")], &[f32("orthogonal", "outputs inputs")], |batch| {
        // A section with more rows than columns, and one with fewer.
        let rows = [Shapes::new(batch).heads().sections, ffn().sections].concat();
        vec![sample(Op::Orthogonalise, [normal([Dim::packed(rows), embed()])])]
    })
    .in_place(&[(0, 0)])
    .shape(|_, _, dims| {
        let (rows, columns) = (dims.get("outputs").cloned(), dims.size("inputs"));
        let short = rows.iter().flat_map(|n| &n.sections).map(|s| s.size().min(columns)).max();
        dims.set("short", &Dim::new(Axis::Embed, short.unwrap_or(0)));
        Ok(())
    })
    // Not the model's.
    .flops(|_, dims, _| {
        let sections = dims.get("outputs").into_iter().flat_map(|n| &n.sections);
        let hardware = sections.map(|s| newton_schulz::flops(s.size(), dims.size("inputs"))).sum();
        Flops { hardware, ..Flops::default() }
    })
    // Matmuls of its shorter side, whose operands are far from the matrix units.
    .multiplies(&[0], |op, dims, call| {
        let (rows, inner) = (
            dims.size("outputs").min(dims.size("inputs")) as u64,
            dims.size("outputs").max(dims.size("inputs")) as u64,
        );
        let hardware = (op.spec().flops)(op, dims, call.wanted).hardware as u64;
        let calls = hardware.div_ceil((2 * rows * rows * inner).max(1));
        Cost::Matmul(Matmuls { calls, passes: 5, ..Matmuls::one(rows, rows, inner) })
    });

pub(super) static DESCEND: Spec = row(
    "descend",
    &[weight("w"), f32("update", "*"), f32("scalars", "scalars"), f32("stats", "stats"), KEY],
    &[weight("w"), rounded("copy", "*")],
    |_| stored(Op::Descend { decay: 0.1, lr_scale: 0.5 }, &[state(), state(), scalars(), stats()], &[], true),
)
.optional(1)
.shape(|op, inputs, _| fits(op, inputs, 0, 0))
.always_in_place(&[(0, 0)])
.cost(|_, _, _| Cost::Optimizer);
