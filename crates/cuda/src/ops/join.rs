//! Instructions that are done as one: the program says what is computed, the device may do neighbours in one pass.

use super::norm::{self, Kind};
use super::{elements, issue, linear, optimizer};
use crate::CudaError;
use crate::call::Call;
use lockstep_ir::Op;
use lockstep_ir::program::{Arg, BufferId, Instr, StepProgram};

/// How many instructions, from `at` on, are done as one.
pub fn count(program: &StepProgram, instrs: &[Instr], at: usize) -> usize {
    match &instrs[at..] {
        [product, bias, ..] if bias.op == Op::AddBias && product.op == Op::Linear && in_place(product, bias) => 2,
        [gelu, bias, ..] if gelu_and_bias_gradients(program, gelu, bias) => 2,
        [weight, rest @ ..] if norm_gradients(program, weight, rest).is_some() => {
            let input = norm_gradients(program, weight, rest).unwrap_or(0);
            let after = rest.get(input + 1).is_some_and(|after| sums_rows_of(after, &rest[input]));
            2 + input + usize::from(after)
        }
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

/// Whether this is the gradient of a bias: the sum over rows of all that the other has made.
fn sums_rows_of(bias: &Instr, of: &Instr) -> bool {
    let (Some(Some(made)), Some(read)) = (of.outputs.first(), bias.inputs.first()) else { return false };
    bias.op == Op::BiasGrad && made.value == read.value && !made.part && !read.part && wanted(bias)
}

/// Whether two buffers share memory.
fn overlap(program: &StepProgram, a: BufferId, b: BufferId) -> bool {
    let range = |b: BufferId| {
        let from = program.address(b, 0, 0);
        from..from + program.buffers[b.0].bytes
    };
    let (a, b) = (range(a), range(b));
    a.start < b.end && b.start < a.end
}

/// Whether these are the gradients of a GELU and of the bias before it, and may be computed together: the scratch of the second must
/// be free while the first reads.
fn gelu_and_bias_gradients(program: &StepProgram, gelu: &Instr, bias: &Instr) -> bool {
    let free = |scratch: BufferId| gelu.inputs.iter().all(|read| !overlap(program, scratch, read.buffer));
    gelu.op == Op::GeluGrad && sums_rows_of(bias, gelu) && wanted(gelu) && bias.workspace.is_some_and(free)
}

/// Where the gradient of a norm's input stands behind that of its weight, if they may be computed together: next to it, or behind
/// that of its bias.
fn norm_gradients(program: &StepProgram, weight: &Instr, rest: &[Instr]) -> Option<usize> {
    match rest {
        [input, ..] if of_one_norm(program, weight, input) => Some(0),
        [bias, input, ..]
            if bias.op == Op::BiasGrad
                && value(bias, 0) == value(weight, 0)
                && wanted(bias)
                && of_one_norm(program, weight, input) =>
        {
            Some(1)
        }
        _ => None,
    }
}

/// Whether these are the gradients of one norm, of its weight and of its input, and may be computed together.
fn of_one_norm(program: &StepProgram, weight: &Instr, input: &Instr) -> bool {
    let Some((of, _, _)) = norm_gradient(&input.op) else { return false };
    // The weight itself stands between the operands that both have.
    let same = (0..weight.inputs.len()).all(|w| value(weight, w) == value(input, if w < 2 { w } else { w + 1 }));
    // The scratch of the first must be free while the last writes.
    let apart = weight
        .workspace
        .is_some_and(|scratch| input.outputs.iter().flatten().all(|out| !overlap(program, scratch, out.buffer)));
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
            [gelu, bias] if gelu.bound.op == Op::GeluGrad => elements::gelu_bias_grad(*gelu, *bias),
            [weight, rest @ ..] => {
                let none = || CudaError::Internal(format!("{} joins nothing", weight.bound.op.name()));
                let input = rest.iter().position(|c| norm_gradient(&c.bound.op).is_some()).ok_or_else(none)?;
                let (_, kind, add) = norm_gradient(&rest[input].bound.op).ok_or_else(none)?;
                let (bias, after) = (rest[..input].first().copied(), rest.get(input + 1).copied());
                norm::grad_all(*weight, bias, (rest[input], kind, add), after)
            }
            [] => Ok(()),
        }
    }
}
