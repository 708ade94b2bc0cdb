//! Update rules.

use super::row::{Operand, Samples, Spec, accumulator, f32, rounded, row};
use super::sample::{Draw, Shapes, embed, ffn, floats, normal, sample, scalars};
use super::{Cost, Flops, Matmuls, Op, newton_schulz};
use crate::{Axis, Dim, TensorType};

fn state() -> (TensorType, Draw) {
    normal([ffn(), embed()])
}

fn stats() -> (TensorType, Draw) {
    (floats([Dim::new(Axis::Scalar, 2)]), Draw::Stats)
}

pub(super) static ADAMW: Spec = row(
    "adamw",
    &[f32("w", "*"), accumulator("grad", "*"), f32("m", "*"), f32("v", "*"), f32("scalars", "z"), f32("stats", "y")],
    &[f32("w", "*"), f32("m", "*"), f32("v", "*"), rounded("copy", "*")],
    |_| {
        let op = Op::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.1, lr_scale: 0.5 };
        let second = (floats([ffn(), embed()]), Draw::Positive);
        vec![sample(op, [state(), state(), state(), second, scalars(), stats()])]
    },
)
.always_in_place(&[(0, 0), (2, 1), (3, 2)])
.cost(|_, _, _| Cost::Optimizer);

/// An update by one moment.
const fn by_moment(name: &'static str, samples: Samples) -> Spec {
    const INPUTS: &[Operand] =
        &[f32("w", "*"), accumulator("grad", "*"), f32("m", "*"), f32("scalars", "z"), f32("stats", "y")];
    const OUTPUTS: &[Operand] = &[f32("w", "*"), f32("m", "*"), rounded("copy", "*")];
    row(name, INPUTS, OUTPUTS, samples).always_in_place(&[(0, 0), (2, 1)]).cost(|_, _, _| Cost::Optimizer)
}

pub(super) static LION: Spec = by_moment("lion", |_| {
    let op = Op::Lion { beta1: 0.9, beta2: 0.99, decay: 0.1, lr_scale: 0.5 };
    vec![sample(op, [state(), state(), state(), scalars(), stats()])]
});

pub(super) static SGD: Spec = by_moment("sgd", |_| {
    let op = Op::Sgd { momentum: 0.9, decay: 0.1, lr_scale: 0.5 };
    vec![sample(op, [state(), state(), state(), scalars(), stats()])]
});

pub(super) static MOMENTUM: Spec = row(
    "momentum",
    &[accumulator("grad", "*"), f32("m", "*"), f32("stats", "y")],
    &[f32("m", "*"), f32("update", "*")],
    |_| vec![sample(Op::Momentum { momentum: 0.95 }, [state(), state(), stats()])],
)
.always_in_place(&[(1, 0)])
.cost(|_, _, _| Cost::Optimizer);

pub(super) static ORTHOGONALISE: Spec =
    row("orthogonalise", &[f32("update", "nk")], &[f32("orthogonal", "nk")], |batch| {
        // A section with more rows than columns, and one with fewer.
        let rows = [Shapes::new(batch).heads().sections, ffn().sections].concat();
        vec![sample(Op::Orthogonalise, [normal([Dim::packed(rows), embed()])])]
    })
    .in_place(&[(0, 0)])
    .shape(|_, _, dims| {
        let (rows, columns) = (dims.get('n').cloned(), dims.size('k'));
        let short = rows.iter().flat_map(|n| &n.sections).map(|s| s.size().min(columns)).max();
        dims.set('a', &Dim::new(Axis::Embed, short.unwrap_or(0)));
        Ok(())
    })
    // Not the model's.
    .flops(|_, dims, _| {
        let sections = dims.get('n').into_iter().flat_map(|n| &n.sections);
        let hardware = sections.map(|s| newton_schulz::flops(s.size(), dims.size('k'))).sum();
        Flops { hardware, ..Flops::default() }
    })
    // Matmuls of its shorter side, whose operands are far from the matrix units.
    .multiplies(&[0], |op, dims, call| {
        let (rows, inner) = (dims.size('n').min(dims.size('k')) as u64, dims.size('n').max(dims.size('k')) as u64);
        let hardware = (op.spec().flops)(op, dims, call.wanted).hardware as u64;
        let calls = hardware.div_ceil((2 * rows * rows * inner).max(1));
        Cost::Matmul(Matmuls { calls, passes: 5, ..Matmuls::one(rows, rows, inner) })
    });

pub(super) static DESCEND: Spec = row(
    "descend",
    &[f32("w", "*"), f32("update", "*"), f32("scalars", "z"), f32("stats", "y")],
    &[f32("w", "*"), rounded("copy", "*")],
    |_| vec![sample(Op::Descend { decay: 0.1, lr_scale: 0.5 }, [state(), state(), scalars(), stats()])],
)
.always_in_place(&[(0, 0)])
.cost(|_, _, _| Cost::Optimizer);
