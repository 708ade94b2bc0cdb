//! Join: finds what the device does as one, and lets it stand side by side. The last pass before memory.
//!
//! What a device can fuse is data in its profile, and so is for which matmuls an epilogue with GELU was measured to be faster than
//! a kernel after them. A group is one moment for memory: what any of its instructions reads, writes or has as scratch stands apart
//! until all are done. So no instruction needs to look at where others stand, and an executor runs groups as it finds them.
//!
//! Copies of activations to and from the host's memory never stand between what is fused.
//!
//! Where a program has no backward pass, what stands between a matmul of few rows and its neighbours need not exist: nothing else reads it.
//!
//! To find out which matmuls are faster with GELU in their epilogue, the caller compiles once, times
//! `fusable_matmuls` and compiles again. Where a GELU is recomputed, none is fused, so that both have the same
//! bits.

use crate::lower::Unplaced;
use lockstep_ir::graph::Phase;
use lockstep_ir::program::{Arg, Instr, Segment, Stream};
use lockstep_ir::{DeviceProfile, Dim, FEW_ROWS, FusedGroup, FusedMatmul, Fusion, Op, StepProgram};

pub(crate) fn join(mut unplaced: Unplaced, device: &DeviceProfile) -> Unplaced {
    let how = Allowed {
        gelu: !recomputes_gelu(&unplaced.segments),
        unstored: unplaced.segments.iter().flat_map(|s| &s.instrs).all(|i| i.phase == Phase::Forward),
    };
    unplaced.segments = unplaced.segments.into_iter().map(|s| joined(s, device, how)).collect();
    unplaced
}

/// What a program allows.
#[derive(Clone, Copy)]
struct Allowed {
    /// A GELU in the epilogue of a matmul.
    gelu: bool,
    /// Values that are read by one instruction alone need not be stored: there is no backward pass.
    unstored: bool,
}

/// Matmuls of programs that could fuse GELU or its gradient into their epilogue, each once: what a device may time, so that the
/// profile says for which of them it is worth it. The programs are those of a profile that says so of none.
pub fn fusable_matmuls(programs: &[StepProgram]) -> Vec<FusedMatmul> {
    let mut found: Vec<FusedMatmul> = Vec::new();
    for program in programs {
        let gelu = !recomputes_gelu(&program.segments);
        for segment in &program.segments {
            let instrs = &without(&segment.instrs, &split(&segment.instrs).1);
            for at in 0..instrs.len() {
                let forward = gelu && matmul_bias_gelu(&instrs[at..]);
                let backward = gelu_gradient_of(instrs, at).is_some();
                let fusions = [(forward, Fusion::MatmulBiasGelu), (backward, Fusion::MatmulGeluGradient)];
                let new = fusions.into_iter().filter(|(can, _)| *can).map(|(_, f)| fused_matmul(f, &instrs[at]));
                new.for_each(|matmul| {
                    if !found.contains(&matmul) {
                        found.push(matmul);
                    }
                });
            }
        }
    }
    found
}

fn fused_matmul(fusion: Fusion, matmul: &Instr) -> FusedMatmul {
    FusedMatmul { fusion, op: matmul.op, inputs: matmul.inputs.iter().map(|a| a.ty.clone()).collect() }
}

/// A matmul that fuses GELU applies it to its f32 sums, a kernel to what was stored, and the sums themselves may be another plan's: where a
/// GELU is recomputed, or only the biased sum that is its input or that of its gradient, all are left to the kernel, so that they come out as
/// the first time.
fn recomputes_gelu(segments: &[Segment]) -> bool {
    let reads = |i: &Instr, sum| {
        (i.op == Op::Gelu && value(i, 0) == Some(sum)) || (i.op == Op::GeluGrad && value(i, 1) == Some(sum))
    };
    let recomputed = |s: &Segment, i: &Instr| {
        let sum = i.outputs.first().and_then(Option::as_ref).filter(|_| i.op == Op::AddBias);
        i.op == Op::Gelu || sum.is_some_and(|sum| s.instrs.iter().any(|other| reads(other, sum.value)))
    };
    segments.iter().any(|s| s.instrs.iter().any(|i| i.phase != Phase::Forward && recomputed(s, i)))
}

/// The segment with its groups, each where the first of its instructions stood.
fn joined(segment: Segment, device: &DeviceProfile, allowed: Allowed) -> Segment {
    let Segment { name, chunk, instrs, .. } = segment;
    let (copies, others) = split(&instrs);
    // Copies of activations stand aside: what is fused, and so every bit, is as without them.
    let (order, groups) = match copies.is_empty() {
        true => grouped(&instrs, device, allowed),
        false => {
            let (order, groups) = grouped(&without(&instrs, &others), device, allowed);
            beside(&instrs, &copies, order.into_iter().map(|i| others[i]).collect(), groups)
        }
    };
    let mut place = vec![0; instrs.len()];
    order.iter().enumerate().for_each(|(to, from)| place[*from] = to);
    let mut old: Vec<Option<Instr>> = instrs.into_iter().map(Some).collect();
    let mut instrs: Vec<Instr> = order.iter().filter_map(|from| old[*from].take()).collect();
    instrs.iter_mut().flat_map(|i| &mut i.waits).for_each(|w| *w = place[*w]);
    if !copies.is_empty() {
        groups.iter().for_each(|group| wait_first(&mut instrs, group));
    }
    Segment { name, chunk, instrs, groups }
}

/// The instructions in their new order, by their index so far, and the groups.
fn grouped(instrs: &[Instr], device: &DeviceProfile, allowed: Allowed) -> (Vec<usize>, Vec<FusedGroup>) {
    let mut order: Vec<usize> = Vec::new();
    let mut groups = Vec::new();
    let mut done = vec![false; instrs.len()];
    for at in 0..instrs.len() {
        if done[at] {
            continue;
        }
        let first = order.len();
        match group(instrs, at, device, allowed) {
            None => order.push(at),
            Some((fusion, members)) => {
                members.iter().for_each(|i| done[*i] = true);
                order.extend(members);
                groups.push(FusedGroup { fusion, instrs: first..order.len() });
            }
        }
    }
    (order, groups)
}

/// Which instructions copy activations to or from the host's memory, and all others.
fn split(instrs: &[Instr]) -> (Vec<usize>, Vec<usize>) {
    (0..instrs.len()).partition(|i| instrs[*i].stream.copies() && instrs[*i].phase != Phase::Update)
}

/// Some of the instructions, which wait for each other alone.
fn without(instrs: &[Instr], some: &[usize]) -> Vec<Instr> {
    let mut place = vec![None; instrs.len()];
    some.iter().enumerate().for_each(|(to, from)| place[*from] = Some(to));
    let alone = |i: &usize| {
        let waits = instrs[*i].waits.iter().filter_map(|w| place[*w]).collect();
        Instr { waits, ..instrs[*i].clone() }
    };
    some.iter().map(alone).collect()
}

/// The order of all instructions where that of the others is known: a copy to the host after all that stood before it, and a copy from the host
/// before all that stood after it, both outside of groups.
fn beside(
    instrs: &[Instr],
    copies: &[usize],
    order: Vec<usize>,
    groups: Vec<FusedGroup>,
) -> (Vec<usize>, Vec<FusedGroup>) {
    let inside = |at: usize| groups.iter().find(|g| g.instrs.start < at && at < g.instrs.end).map(|g| &g.instrs);
    let mut before: Vec<Vec<usize>> = vec![Vec::new(); order.len() + 1];
    for &copy in copies {
        let at = match instrs[copy].stream {
            Stream::Offload => {
                let at = order.iter().rposition(|i| *i < copy).map_or(0, |last| last + 1);
                inside(at).map_or(at, |group| group.end)
            }
            _ => {
                let at = order.iter().position(|i| *i > copy).unwrap_or(order.len());
                inside(at).map_or(at, |group| group.start)
            }
        };
        before[at].push(copy);
    }
    let mut whole = Vec::with_capacity(instrs.len());
    let mut moved = vec![0; order.len()];
    for (at, before) in before.into_iter().enumerate() {
        whole.extend(before);
        if let Some(i) = order.get(at) {
            moved[at] = whole.len();
            whole.push(*i);
        }
    }
    let shifted = |g: FusedGroup| {
        let start = moved[g.instrs.start];
        FusedGroup { instrs: start..start + g.instrs.len(), ..g }
    };
    (whole, groups.into_iter().map(shifted).collect())
}

/// Lets the first of a group wait for the copies that any of it reads: they stand before the group.
fn wait_first(instrs: &mut [Instr], group: &FusedGroup) {
    let all: Vec<usize> = instrs[group.instrs.clone()].iter().flat_map(|i| i.waits.iter().copied()).collect();
    let last = |stream| all.iter().copied().filter(|w| instrs[*w].stream == stream).max();
    let waits = Stream::BESIDE.into_iter().filter_map(last).collect();
    instrs[group.instrs.clone()].iter_mut().for_each(|i| i.waits.clear());
    instrs[group.instrs.start].waits = waits;
}

/// The instructions that the device does as one with this one, itself the first.
fn group(instrs: &[Instr], at: usize, device: &DeviceProfile, allowed: Allowed) -> Option<(Fusion, Vec<usize>)> {
    let behind = &instrs[at..];
    let side_by_side = |count: usize| (at..at + count).collect::<Vec<_>>();
    let worth = |fusion| device.faster.contains(&fused_matmul(fusion, &instrs[at]));
    let chain = |fusion: Fusion, rows: usize, count: usize| {
        (allowed.unstored && only_the_last_is_read(fusion, instrs, at, count, rows)).then(|| side_by_side(count))
    };
    let members = |fusion: Fusion| match fusion {
        Fusion::MatmulBias => matmul_bias(behind).then(|| side_by_side(2)),
        Fusion::MatmulBiasGelu => (allowed.gelu && matmul_bias_gelu(behind) && worth(fusion)).then(|| side_by_side(3)),
        Fusion::MatmulGeluGradient => {
            gelu_gradient_of(instrs, at).filter(|_| worth(fusion)).map(|gradient| vec![at, gradient])
        }
        Fusion::NormGradients => norm_gradients(behind).map(side_by_side),
        Fusion::GeluBiasGradients => gelu_bias_gradients(behind).then(|| side_by_side(2)),
        Fusion::SwiGluAmax => swiglu_amax(behind).then(|| side_by_side(2)),
        Fusion::MatmulSwiGlu => chain(fusion, FEW_ROWS, 2),
        // A bias is the matmul's.
        Fusion::NormMatmul if behind.get(1..).is_some_and(matmul_bias) => None,
        Fusion::NormMatmul => chain(fusion, Fusion::NORM_ROWS, 2),
        Fusion::NormMatmulSwiGlu => chain(fusion, Fusion::NORM_ROWS, 3),
        Fusion::RopeAttention => chain(fusion, FEW_ROWS, 2).filter(|_| is_decoding(&behind[0])),
        Fusion::AdamW => {
            let count = behind.iter().take_while(|next| updates_alike(&behind[0], next)).count();
            (count > 1).then(|| side_by_side(count))
        }
    };
    // What another stream makes is there once it has been waited for: at the first, or not at all.
    let waits = |members: &[usize]| members[1..].iter().any(|i| !instrs[*i].waits.is_empty());
    let found = device.fusions.iter().filter_map(|fusion| Some((*fusion, members(*fusion)?)));
    // Of several that begin here, the one that does most.
    found.filter(|(_, members)| !waits(members)).max_by_key(|(_, members)| members.len())
}

/// Whether a matmul is followed by its bias, in place.
fn matmul_bias(instrs: &[Instr]) -> bool {
    let [matmul, bias, ..] = instrs else { return false };
    Fusion::MatmulBias.fits(&[matmul.op, bias.op]) && in_place(matmul, bias)
}

/// Whether a matmul and its bias are followed by a GELU that may be written while they are computed: it is not in place of what they
/// use.
fn matmul_bias_gelu(instrs: &[Instr]) -> bool {
    let [matmul, bias, gelu, ..] = instrs else { return false };
    let (Some(Some(stored)), Some(read), Some(Some(out))) =
        (bias.outputs.first(), gelu.inputs.first(), gelu.outputs.first())
    else {
        return false;
    };
    let mut used = matmul.inputs.iter().chain(&bias.inputs).chain([stored]);
    matmul_bias(instrs)
        && Fusion::MatmulBiasGelu.fits(&[matmul.op, bias.op, gelu.op])
        && stored.value == read.value
        && whole(read)
        && whole(out)
        && used.all(|a| a.buffer != out.buffer)
}

/// The gradient of the GELU before a matmul, further on, if the matmul may compute it: it changes in place what the matmul has
/// made, nothing reads that in between, and what else it reads is there already.
fn gelu_gradient_of(instrs: &[Instr], at: usize) -> Option<usize> {
    let matmul = &instrs[at];
    if matmul.op != Op::LinearGradInput {
        return None;
    }
    let made = matmul.outputs.first()?.as_ref()?.value;
    let reads = |i: &Instr| i.inputs.iter().any(|a| a.value == made);
    let gelu = at + 1 + instrs[at + 1..].iter().position(reads)?;
    let stored = value(&instrs[gelu], 1)?;
    let there = !instrs[at..gelu].iter().any(|i| i.outputs.iter().flatten().any(|o| o.value == stored));
    let waits = instrs[at + 1..=gelu].iter().any(|i| !i.waits.is_empty());
    (instrs[gelu].op == Op::GeluGrad && in_place(matmul, &instrs[gelu]) && there && !waits).then_some(gelu)
}

/// How many instructions are the gradients of one norm and of the bias before it: that of its weight, which comes first and
/// has scratch for all, of its bias where it has one, and of its input.
fn norm_gradients(instrs: &[Instr]) -> Option<usize> {
    let (weight, rest) = instrs.split_first()?;
    let bias = |b: &Instr| b.op == Op::BiasGrad && value(b, 0) == value(weight, 0) && wanted(b);
    let before = usize::from(rest.first().is_some_and(bias));
    let input = rest.get(before)?;
    // The weight itself stands between the operands that both have.
    let same = (0..weight.inputs.len()).all(|w| value(weight, w) == value(input, if w < 2 { w } else { w + 1 }));
    let one_norm = Fusion::NormGradients.fits(&[weight.op, input.op]);
    let ready = weight.workspace.is_some() && wanted(weight) && wanted(input);
    let after = rest.get(before + 1).is_some_and(|after| sums_rows_of(after, input));
    (one_norm && same && ready).then_some(2 + before + usize::from(after))
}

/// Whether these are the gradients of a GELU and of the bias before it.
fn gelu_bias_gradients(instrs: &[Instr]) -> bool {
    let [gelu, bias, ..] = instrs else { return false };
    gelu.op == Op::GeluGrad && sums_rows_of(bias, gelu) && wanted(gelu) && bias.workspace.is_some()
}

/// Whether a SwiGLU, or its gradient, is followed by the largest magnitude of all that it makes.
fn swiglu_amax(instrs: &[Instr]) -> bool {
    let [swiglu, amax, ..] = instrs else { return false };
    let (Some(Some(made)), Some(read)) = (swiglu.outputs.first(), amax.inputs.first()) else { return false };
    let ready = wanted(amax) && amax.workspace.is_some() && whole(made) && whole(read);
    Fusion::SwiGluAmax.fits(&[swiglu.op, amax.op]) && made.value == read.value && ready
}

/// Whether the instructions from `at` on are a chain of few rows, each of which reads first what the one before it has made, and nothing else reads that. The sum
/// that a norm makes besides stands apart from what it reads.
fn only_the_last_is_read(fusion: Fusion, instrs: &[Instr], at: usize, count: usize, rows: usize) -> bool {
    let Some(chain) = instrs.get(at..at + count) else { return false };
    let made = |i: &Instr| i.outputs.get(usize::from(is_residual(i.op))).and_then(Option::as_ref).cloned();
    let reads = |value: usize| instrs.iter().flat_map(|i| &i.inputs).filter(|a| a.value == value).count();
    let linked = chain.windows(2).all(|pair| {
        made(&pair[0]).is_some_and(|y| value(&pair[1], 0) == Some(y.value) && whole(&y) && reads(y.value) == 1)
    });
    let few = chain[0].inputs.first().is_some_and(|x| leading(x) <= rows);
    let sum = chain[0].outputs.first().and_then(Option::as_ref).filter(|_| is_residual(chain[0].op));
    let apart = sum.is_none_or(|sum| chain[0].inputs.iter().all(|x| x.buffer != sum.buffer));
    let statistics = matches!(chain[0].op, Op::Norm { .. }) && chain[0].outputs.last().is_some_and(Option::is_some);
    fusion.fits(&chain.iter().map(|i| i.op).collect::<Vec<_>>()) && linked && few && apart && !statistics
}

fn is_residual(op: Op) -> bool {
    matches!(op, Op::Norm { residual: true, .. })
}

/// Rows of an operand.
fn leading(arg: &Arg) -> usize {
    arg.ty.dims.iter().rev().skip(1).map(Dim::size).product()
}

/// Whether RoPE turns one position of each text.
fn is_decoding(rope: &Instr) -> bool {
    rope.inputs.first().is_some_and(|qkv| qkv.ty.dims.get(1).is_some_and(|seq| seq.size() == 1))
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

/// Whether the second changes what the first has made, where it stands.
fn in_place(first: &Instr, second: &Instr) -> bool {
    let (Some(Some(made)), Some(read), Some(Some(changed))) =
        (first.outputs.first(), second.inputs.first(), second.outputs.first())
    else {
        return false;
    };
    made.value == read.value && made.buffer == changed.buffer && [made, read, changed].into_iter().all(whole)
}

/// Whether this is the gradient of a bias: the sum over rows of all that the other has made.
fn sums_rows_of(bias: &Instr, of: &Instr) -> bool {
    let (Some(Some(made)), Some(read)) = (of.outputs.first(), bias.inputs.first()) else { return false };
    bias.op == Op::BiasGrad && made.value == read.value && whole(made) && whole(read) && wanted(bias)
}

fn value(instr: &Instr, input: usize) -> Option<usize> {
    instr.inputs.get(input).map(|a| a.value)
}

fn wanted(instr: &Instr) -> bool {
    instr.outputs.iter().all(Option::is_some)
}

fn whole(arg: &Arg) -> bool {
    arg.part.is_empty()
}

#[cfg(test)]
mod tests;
