//! Instructions that are done as one: the program says what is computed, the device may do neighbours in one pass.

use super::norm::{self, Kind};
use super::{issue, linear, optimizer};
use crate::CudaError;
use crate::call::Call;
use lockstep_ir::Op;
use lockstep_ir::program::{Arg, BufferId, Instr, StepProgram};

/// How many instructions, from `at` on, are done as one.
pub fn count(program: &StepProgram, instrs: &[Instr], at: usize) -> usize {
    match &instrs[at..] {
        [product, bias, ..] if bias.op == Op::AddBias && product.op == Op::Linear && in_place(product, bias) => 2,
        [weight, bias, input, ..]
            if bias.op == Op::BiasGrad
                && value(bias, 0) == value(weight, 0)
                && wanted(bias)
                && norm_gradients(program, weight, input) =>
        {
            3
        }
        [weight, input, ..] if norm_gradients(program, weight, input) => 2,
        [first, ..] => instrs[at..].iter().take_while(|next| updates_alike(first, next)).count().max(1),
        [] => 1,
    }
}

/// Whether two updates by AdamW may be one: they touch tensors of their own, with constants and numbers in common.
fn updates_alike(a: &Instr, b: &Instr) -> bool {
    let (Op::AdamW { beta1, beta2, eps, .. }, Op::AdamW { beta1: b1, beta2: b2, eps: e, .. }) = (a.op, b.op) else {
        return false;
    };
    let gradient = |i: &Instr| i.inputs.get(1).map(|g| g.ty.dtype);
    (beta1, beta2, eps) == (b1, b2, e)
        && gradient(a) == gradient(b)
        && [4, 5].iter().all(|input| value(a, *input) == value(b, *input))
}

fn value(instr: &Instr, input: usize) -> Option<usize> {
    instr.inputs.get(input).map(|a| a.value)
}

fn wanted(instr: &Instr) -> bool {
    instr.outputs.iter().all(Option::is_some)
}

/// Whether the second changes what the first has made, where it stands.
fn in_place(first: &Instr, second: &Instr) -> bool {
    let (Some(Some(made)), Some(read), Some(Some(changed))) =
        (first.outputs.first(), second.inputs.first(), second.outputs.first())
    else {
        return false;
    };
    let whole = |a: &Arg| !a.part;
    made.value == read.value && made.buffer == changed.buffer && [made, read, changed].into_iter().all(whole)
}

/// Whether these are the gradients of one norm, of its weight and of its input, and may be computed together.
fn norm_gradients(program: &StepProgram, weight: &Instr, input: &Instr) -> bool {
    let Some((of, _, _)) = norm_gradient(&input.op) else { return false };
    // The weight itself stands between the operands that both have.
    let same = (0..weight.inputs.len()).all(|w| value(weight, w) == value(input, if w < 2 { w } else { w + 1 }));
    // The scratch of the first must be free while the last writes.
    let range = |b: BufferId| {
        let from = program.address(b, 0, 0);
        from..from + program.buffers[b.0].bytes
    };
    let apart = match (weight.workspace, input.outputs.first().and_then(Option::as_ref)) {
        (Some(scratch), Some(out)) => {
            let (a, b) = (range(scratch), range(out.buffer));
            a.end <= b.start || b.end <= a.start
        }
        _ => false,
    };
    weight.op == of && same && apart && wanted(weight) && wanted(input)
}

/// Of the input gradient of a norm: the op of its weight's gradient, which norm, and whether it adds.
fn norm_gradient(op: &Op) -> Option<(Op, Kind, bool)> {
    match op {
        Op::RmsNormGrad => Some((Op::RmsNormGradWeight, Kind::Rms, false)),
        Op::AddRmsNormGrad => Some((Op::RmsNormGradWeight, Kind::Rms, true)),
        Op::LayerNormGrad => Some((Op::LayerNormGradWeight, Kind::Layer, false)),
        Op::AddLayerNormGrad => Some((Op::LayerNormGradWeight, Kind::Layer, true)),
        _ => None,
    }
}

/// Queues instructions that [`count`] says are done as one.
///
/// # Safety
/// As for [`issue`].
pub unsafe fn issue_joined(calls: &[Call]) -> Result<(), CudaError> {
    // SAFETY: the caller vouches.
    unsafe {
        match calls {
            [call] => issue(*call),
            [first, ..] if matches!(first.bound.op, Op::AdamW { .. }) => optimizer::adamw_many(calls),
            [product, bias] if product.bound.op == Op::Linear => linear::forward_with_bias(*product, *bias),
            [weight, rest @ ..] => match rest.last().and_then(|last| Some((last, norm_gradient(&last.bound.op)?))) {
                Some((input, (_, kind, add))) => {
                    let bias = (rest.len() > 1).then(|| rest[0]);
                    norm::grad_both(*weight, bias, *input, kind, add)
                }
                None => Err(CudaError::Internal(format!("{} joins nothing", weight.bound.op.name()))),
            },
            [] => Ok(()),
        }
    }
}
