//! Instructions that are done as one: the program says what is computed, the device may do neighbours in one pass.

use super::norm::{self, Kind};
use super::{elements, issue, linear, optimizer};
use crate::CudaError;
use crate::call::Call;
use crate::matmul::{Epilogue, MatmulShape};
use lockstep_exec::bound::Bound;
use lockstep_ir::Op;
use lockstep_ir::graph::Phase;
use lockstep_ir::program::{Arg, BufferId, Instr, StepProgram};

/// Of every instruction of a segment: those that are done with it as one, itself the first; none where it is done with another.
pub type Groups = Vec<Vec<usize>>;

/// What is done as one in each segment of a program. `worth` says whether a matmul takes less time with an epilogue than a kernel
/// behind it.
pub fn groups(
    program: &StepProgram,
    segments: &[Vec<Bound>],
    worth: &dyn Fn(MatmulShape) -> Result<bool, CudaError>,
) -> Result<Vec<Groups>, CudaError> {
    // A matmul that fuses GELU applies it to its f32 sums, a kernel of what was stored, and the sums themselves may be another plan's: where one
    // is recomputed, or its input, all are left to the kernel, so that they come out as the first time.
    let gelu = !program.segments.iter().any(|s| recomputes_gelu(&s.instrs));
    program
        .segments
        .iter()
        .zip(segments)
        .map(|(s, bounds)| of_segment(program, &s.instrs, bounds, gelu, worth))
        .collect()
}

/// Whether a GELU is recomputed, or only the biased sum that is its input or that of its gradient.
fn recomputes_gelu(instrs: &[Instr]) -> bool {
    let reads = |i: &Instr, sum| match i.op {
        Op::Gelu => value(i, 0) == Some(sum),
        Op::GeluGrad => value(i, 1) == Some(sum),
        _ => false,
    };
    let recomputed = |i: &Instr| match (i.op, i.outputs.first()) {
        (Op::Gelu, _) => true,
        (Op::AddBias, Some(Some(sum))) => instrs.iter().any(|other| reads(other, sum.value)),
        _ => false,
    };
    instrs.iter().any(|i| i.phase != Phase::Forward && recomputed(i))
}

fn of_segment(
    program: &StepProgram,
    instrs: &[Instr],
    bounds: &[Bound],
    gelu: bool,
    worth: &dyn Fn(MatmulShape) -> Result<bool, CudaError>,
) -> Result<Groups, CudaError> {
    let worth = |at: usize, epilogue| linear::with_epilogue(&bounds[at], epilogue).map_or(Ok(false), worth);
    let mut groups: Groups = vec![Vec::new(); instrs.len()];
    let mut done = vec![false; instrs.len()];
    for at in 0..instrs.len() {
        if done[at] {
            continue;
        }
        let derivative = gelu_gradient_of(instrs, at);
        groups[at] = match derivative {
            _ if gelu && product_with_gelu(program, &instrs[at..]) && worth(at, Epilogue::BiasGelu)? => {
                (at..at + 3).collect()
            }
            Some(derivative) if worth(at, Epilogue::GeluDerivative)? => vec![at, derivative],
            _ => (at..at + count(program, &instrs[at..])).collect(),
        };
        // What another stream makes is there once it has been waited for: at the first, or not at all.
        if groups[at][1..].iter().any(|i| !instrs[*i].waits.is_empty()) {
            groups[at].truncate(1);
        }
        groups[at].iter().for_each(|i| done[*i] = true);
    }
    Ok(groups)
}

/// How many instructions, from the first on, are done as one.
fn count(program: &StepProgram, instrs: &[Instr]) -> usize {
    match instrs {
        [gemm, bias, ..] if matmul_with_bias(gemm, bias) => 2,
        [gelu, bias, ..] if gelu_and_bias_gradients(program, gelu, bias) => 2,
        [weight, rest @ ..] if norm_gradients(program, weight, rest).is_some() => {
            let input = norm_gradients(program, weight, rest).unwrap_or(0);
            let joins = |after: &Instr| sums_rows_of(after, &rest[input]) && spares_scratch(program, weight, after);
            let after = rest.get(input + 1).is_some_and(joins);
            2 + input + usize::from(after)
        }
        [first, ..] => instrs.iter().take_while(|next| updates_alike(first, next)).count().max(1),
        [] => 1,
    }
}

/// The matmuls that a group needs, so that they can be planned before anything runs.
pub fn shapes(bounds: &[Bound], group: &[usize]) -> Vec<MatmulShape> {
    let ops: Vec<Op> = group.iter().map(|i| bounds[*i].op).collect();
    let epilogue = match ops[..] {
        [Op::Linear, Op::AddBias] => Some(Epilogue::Bias),
        [Op::Linear, Op::AddBias, Op::Gelu] => Some(Epilogue::BiasGelu),
        [Op::LinearGradInput, Op::GeluGrad] => Some(Epilogue::GeluDerivative),
        _ => None,
    };
    match (epilogue, group) {
        (Some(epilogue), [gemm, ..]) => linear::with_epilogue(&bounds[*gemm], epilogue).into_iter().collect(),
        _ => group.iter().flat_map(|i| linear::shapes(&bounds[*i])).collect(),
    }
}

/// Whether a matmul is followed by its bias, in place.
fn matmul_with_bias(gemm: &Instr, bias: &Instr) -> bool {
    bias.op == Op::AddBias && gemm.op == Op::Linear && in_place(gemm, bias)
}

/// Whether a matmul and its bias are followed by a GELU that may be written while they are computed: it stands apart from all that
/// they use.
fn product_with_gelu(program: &StepProgram, instrs: &[Instr]) -> bool {
    let [gemm, bias, gelu, ..] = instrs else { return false };
    let (Some(Some(kept)), Some(read), Some(Some(out))) =
        (bias.outputs.first(), gelu.inputs.first(), gelu.outputs.first())
    else {
        return false;
    };
    let used = gemm.inputs.iter().chain(&bias.inputs).map(|a| a.buffer).chain(gemm.workspace);
    matmul_with_bias(gemm, bias)
        && gelu.op == Op::Gelu
        && kept.value == read.value
        && read.part.is_empty()
        && out.part.is_empty()
        && used.chain([kept.buffer]).all(|buffer| !overlap(program, buffer, out.buffer))
}

/// The gradient of the GELU before a matmul, further on, if the matmul may compute it: it changes in place what the matmul has
/// made, nothing reads that in between, and what else it reads is there already.
fn gelu_gradient_of(instrs: &[Instr], at: usize) -> Option<usize> {
    let gemm = &instrs[at];
    let made = gemm.outputs.first()?.as_ref()?.value;
    if gemm.op != Op::LinearGradInput {
        return None;
    }
    let reads = |i: &Instr, v: usize| i.inputs.iter().any(|a| a.value == v);
    let gelu = at + 1 + instrs[at + 1..].iter().position(|i| reads(i, made))?;
    let kept = value(&instrs[gelu], 1)?;
    let there = !instrs[at..gelu].iter().any(|i| i.outputs.iter().flatten().any(|o| o.value == kept));
    let waits = instrs[at + 1..=gelu].iter().any(|i| !i.waits.is_empty());
    (instrs[gelu].op == Op::GeluGrad && in_place(gemm, &instrs[gelu]) && there && !waits).then_some(gelu)
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
    let whole = |a: &Arg| a.part.is_empty();
    made.value == read.value && made.buffer == changed.buffer && [made, read, changed].into_iter().all(whole)
}

/// Whether this is the gradient of a bias: the sum over rows of all that the other has made.
fn sums_rows_of(bias: &Instr, of: &Instr) -> bool {
    let (Some(Some(made)), Some(read)) = (of.outputs.first(), bias.inputs.first()) else { return false };
    bias.op == Op::BiasGrad && made.value == read.value && made.part.is_empty() && read.part.is_empty() && wanted(bias)
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
                && spares_scratch(program, weight, bias)
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
    weight.op == of && same && spares_scratch(program, weight, input) && wanted(weight) && wanted(input)
}

/// Whether what `with` writes stands apart from the scratch of the first: that is in use until all of them are done.
fn spares_scratch(program: &StepProgram, first: &Instr, with: &Instr) -> bool {
    let writes = |scratch| with.outputs.iter().flatten().any(|out| overlap(program, scratch, out.buffer));
    first.workspace.is_some_and(|scratch| !writes(scratch))
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

/// Queues instructions that are done as one: a group of [`groups`].
///
/// # Safety
/// As for [`issue`].
pub unsafe fn issue_joined(calls: &[Call]) -> Result<(), CudaError> {
    // SAFETY: the caller vouches.
    unsafe {
        match calls {
            [call] => issue(*call),
            [first, ..] if matches!(first.bound.op, Op::AdamW { .. }) => optimizer::adamw_many(calls),
            [gemm, bias] if gemm.bound.op == Op::Linear => linear::forward_with_bias(*gemm, *bias),
            [gemm, bias, gelu] if gemm.bound.op == Op::Linear => linear::forward_with_gelu(*gemm, *bias, *gelu),
            [gemm, gelu] if gemm.bound.op == Op::LinearGradInput => linear::grad_input_of_gelu(*gemm, *gelu),
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

#[cfg(test)]
mod tests;
