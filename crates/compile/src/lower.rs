//! Lower: cuts the graphs into segments, decides what shares memory and how long it lives, and writes the schedule.
//!
//! Here shapes become those of one rank. Everything is known after this but the offsets.
//!
//! An evaluation is an entry of the same program, whose temporaries overlay what training saves. The smaller steps of
//! a batch ramp are entries too: schedules of fewer micro-batches.

mod buffers;
mod evaluation;
mod waits;

pub(crate) use buffers::UnplacedBuffer;

use crate::local::Local;
use crate::slots::{WorkSegment, Works, allot, phases};
use crate::stage::RankGraph;
use crate::{Context, Evaluation};
use buffers::{Buffers, Part, Places, produced_in};
use evaluation::shared_states;
use lockstep_ir::graph::{Node, Phase, Source, State};
use lockstep_ir::program::{
    Arg, BufferId, Class, Entry, Instr, Lifetime, Role, Saved, Segment, Slot, StepProgram, Sum, Tensor,
};
use lockstep_ir::schedule::{PipeRank, Work};
use lockstep_ir::{Axes, Graph, Op, Placement, TypeError, ValueId};
use std::collections::BTreeMap;
use waits::{stream, wait};

/// A program whose buffers have no offsets yet.
pub(crate) struct Unplaced {
    pub stage: usize,
    pub buffers: Vec<UnplacedBuffer>,
    pub values: Vec<String>,
    pub tensors: Vec<Tensor>,
    pub segments: Vec<Segment>,
    pub entries: Vec<Entry>,
    pub micro_batches: usize,
    /// Regions of saved buffers, and the copies of each.
    pub saved: Vec<(Saved, usize)>,
}

/// Messages that a stage may have on the way to another before it waits.
pub const SEND_BUFFER_COPIES: usize = 2;

/// Lowers what one rank of the pipeline runs of a training graph, and of the evaluations that share its states.
pub(crate) fn lower(
    train: &RankGraph,
    evaluations: &[Evaluation<RankGraph>],
    context: &Context,
    rank: usize,
) -> Result<Unplaced, TypeError> {
    let mut lowering = Lowering::new(context);
    let local = Local::new(&train.graph, context);
    let persistent = lowering.buffers.persistent(&local);
    let layout = &context.layout;
    let pipeline = layout.pipeline();
    let works = Works::new(&pipeline.slots[rank]);
    let chunks = &pipeline.virtual_stages[rank];
    let runs_with = phases(&train.graph)?;
    let of = |chunk: Option<usize>, phases: &[Phase]| {
        let nodes = train.graph.nodes.iter().zip(&train.chunks).zip(&runs_with);
        let wanted = nodes.filter(|((_, c), phase)| phases.contains(phase) && chunk.is_none_or(|chunk| chunk == **c));
        wanted.map(|((n, _), _)| n).collect::<Vec<_>>()
    };
    let mut parts: Vec<Part> = Vec::new();
    let nodes = of(None, &[Phase::Prepare]);
    let prepares = !nodes.is_empty();
    if prepares {
        // No micro-batch has saved anything yet.
        parts.push(Part { name: "prepare", chunk: 0, work: None, temporary: Lifetime::Overlay, nodes });
    }
    let first = parts.len();
    for chunk in 0..chunks.len() {
        let part = |s: &WorkSegment| Part {
            name: s.name,
            chunk,
            work: Some(s.work),
            temporary: Lifetime::Frame,
            nodes: of(Some(chunk), s.phases),
        };
        parts.extend(works.segments().iter().map(part));
    }
    // What looks at the gradients of the first micro-batch, after the work that makes them: by then no other has been added.
    let mut probes: BTreeMap<(usize, Work), usize> = BTreeMap::new();
    let summed = summed_in(&train.graph, &runs_with, works);
    for (chunk, (k, kind)) in (0..chunks.len()).flat_map(|c| works.segments().iter().enumerate().map(move |k| (c, k))) {
        let all = train.graph.nodes.iter().zip(&train.chunks);
        let behind = |n: &Node| n.inputs.iter().map(|v| summed[v.0]).max() == Some(k);
        let mine = all.filter(|(n, c)| n.phase == Phase::Probe && **c == chunk && behind(n));
        let nodes: Vec<&Node> = mine.map(|(n, _)| n).collect();
        if !nodes.is_empty() {
            probes.insert((chunk, kind.work), parts.len());
            parts.push(Part { name: "probe", chunk, work: None, temporary: Lifetime::Frame, nodes });
        }
    }
    let nodes = of(None, &[Phase::Update]);
    // What is saved for backward has been read by then: its memory is free for state that comes from the host.
    let temporary = if nodes.iter().any(|n| n.op == Op::Fetch) { Lifetime::Overlay } else { Lifetime::Frame };
    parts.push(Part { name: "update", chunk: 0, work: None, temporary, nodes });
    let update = parts.len() - 1;
    let mut segments = lowering.segments(&local, &persistent, &parts, works, 0)?;
    // By chunk and work: the segment of most micro-batches, and that of the last.
    let mut runs: BTreeMap<(usize, Work), [usize; 2]> = BTreeMap::new();
    let all = (0..chunks.len()).flat_map(|c| works.segments().iter().map(move |k| (c, k)));
    for (s, (chunk, kind)) in (first..).zip(all) {
        let plain = without_reductions(&segments[s]);
        let first = if plain.is_some() { segments.len() } else { s };
        if plain.is_some() {
            segments[s].name = kind.last;
        }
        segments.extend(plain);
        runs.insert((chunk, kind.work), [first, s]);
    }
    let mut values: Vec<String> = train.graph.values.iter().map(|v| v.name.clone()).collect();
    let mut known = tensors(&local, &persistent);
    let mut in_order: Vec<usize> = (0..chunks.len()).collect();
    in_order.sort_by_key(|chunk| chunks[*chunk]);
    let mut evaluate: Vec<(String, Vec<Slot>)> = Vec::new();
    for (name, RankGraph { graph, chunks }) in evaluations {
        let first = values.len();
        let evaluation = Local::new(graph, context);
        let mut shared = shared_states(&train.graph, graph, &persistent);
        known.extend(lowering.outputs_alone(&evaluation, &mut shared, first));
        let nodes = |chunk: usize| {
            let nodes = graph.nodes.iter().zip(chunks);
            nodes.filter(|(_, c)| **c == chunk).map(|(n, _)| n).collect()
        };
        let temporary = Lifetime::Overlay;
        let part = |&chunk: &usize| Part { name, chunk, work: None, temporary, nodes: nodes(chunk) };
        let parts: Vec<Part> = in_order.iter().map(part).collect();
        let mut evaluated = lowering.segments(&evaluation, &shared.places, &parts, works, first)?;
        shared.rename(&mut evaluated, first);
        values.extend(graph.values.iter().map(|v| v.name.clone()));
        let slots = (segments.len()..segments.len() + evaluated.len()).map(|s| Slot::new(s, 0)).collect();
        evaluate.push(((*name).to_owned(), slots));
        segments.append(&mut evaluated);
    }

    let mut saved: Vec<(Saved, usize)> = works.saved().iter().map(|saved| (*saved, 1)).collect();
    let mut step_of = |micro_batches: usize| {
        let (ranks, chunks) = (pipeline.slots.len(), layout.chunks);
        let slots = layout.schedule.slots(PipeRank { ranks, rank, chunks, micro_batches });
        let copies = allot(&slots);
        for (saved, most) in &mut saved {
            *most = copies.iter().map(|c| c[*saved as usize] + 1).fold(*most, usize::max);
        }
        let mut schedule: Vec<Slot> = if prepares { vec![Slot::new(0, 0)] } else { Vec::new() };
        for (slot, saved) in slots.iter().zip(copies) {
            let [plain, last] = runs[&(slot.chunk, slot.work)];
            let segment = if slot.micro_batch + 1 == micro_batches { last } else { plain };
            schedule.push(Slot { segment, micro_batch: slot.micro_batch, saved });
            let probe = probes.get(&(slot.chunk, slot.work)).filter(|_| slot.micro_batch == 0);
            schedule.extend(probe.map(|&segment| Slot { segment, micro_batch: 0, saved }));
        }
        schedule.push(Slot::new(update, 0));
        schedule
    };
    let whole = (StepProgram::TRAIN.to_owned(), step_of(layout.micro_batches));
    let smaller: Vec<_> =
        context.steps.smaller.iter().map(|count| (StepProgram::train_of(*count), step_of(*count))).collect();
    let entries = [whole].into_iter().chain(smaller).chain(evaluate);
    Ok(Unplaced {
        stage: rank,
        buffers: lowering.buffers.all,
        values,
        tensors: known,
        segments,
        entries: entries.map(|(name, schedule)| Entry { name: name.into(), schedule }).collect(),
        micro_batches: layout.micro_batches,
        saved,
    })
}

/// Of every sum over micro-batches, and of what is counted from some: after which of the segments of a chunk it has the first one's
/// gradient.
fn summed_in(g: &Graph, runs_with: &[Phase], works: Works) -> Vec<usize> {
    let mut place = vec![0; g.values.len()];
    for (node, phase) in g.nodes.iter().zip(runs_with) {
        let counts = node.phase == Phase::Probe;
        let here = match counts {
            true => node.inputs.iter().map(|v| place[v.0]).max(),
            false => works.segments().iter().position(|s| s.phases.contains(phase)),
        };
        let Some(here) = here else { continue };
        for v in node.outputs.iter().flatten() {
            if let Source::Node { into: Some(sum) } = g.get(*v).source {
                place[sum.0] = place[sum.0].max(here);
            } else if counts {
                place[v.0] = here;
            }
        }
    }
    place
}

/// Of a segment with sums over ranks, which belong to the last micro-batch of a step only: what the others run.
fn without_reductions(segment: &Segment) -> Option<Segment> {
    let reduces = |i: &Instr| i.phase == Phase::Reduce;
    segment.instrs.iter().any(reduces).then(|| {
        let mut plain = segment.clone();
        plain.instrs.retain(|i| !reduces(i));
        plain.instrs.iter_mut().for_each(|i| i.waits.clear());
        wait(&mut plain);
        plain
    })
}

/// Lowers forward passes that stand one after the other in a graph, each with its number of nodes, to an entry each.
/// They share states and the frame.
pub(crate) fn lower_forward(
    g: &Graph,
    entries: &[(&'static str, usize)],
    context: &Context,
) -> Result<Unplaced, TypeError> {
    let mut lowering = Lowering::new(context);
    let local = Local::new(g, context);
    let persistent = lowering.buffers.persistent(&local);
    let mut nodes = g.nodes.iter();
    let part = |(name, count): &(&'static str, usize)| Part {
        name,
        chunk: 0,
        work: None,
        temporary: Lifetime::Frame,
        nodes: nodes.by_ref().take(*count).collect(),
    };
    let parts: Vec<Part> = entries.iter().map(part).collect();
    let works = Works::new(&[]);
    let segments = lowering.segments(&local, &persistent, &parts, works, 0)?;
    let once = |segment| vec![Slot::new(segment, 0)];
    let entries =
        entries.iter().enumerate().map(|(s, (name, _))| Entry { name: (*name).into(), schedule: once(s) }).collect();
    Ok(Unplaced {
        stage: 0,
        buffers: lowering.buffers.all,
        values: g.values.iter().map(|v| v.name.clone()).collect(),
        tensors: tensors(&local, &persistent),
        segments,
        entries,
        micro_batches: 1,
        saved: works.saved().iter().map(|saved| (*saved, 1)).collect(),
    })
}

struct Lowering<'a> {
    buffers: Buffers<'a>,
    /// Where messages wait, by stage, tag and size.
    send_buffers: BTreeMap<(usize, u32), BufferId>,
    context: &'a Context,
}

impl<'a> Lowering<'a> {
    fn new(context: &'a Context) -> Self {
        let buffers = Buffers { all: Vec::new(), device: &context.device };
        Self { buffers, send_buffers: BTreeMap::new(), context }
    }

    /// Lowers nodes to segments; values are called by their index plus `first`.
    fn segments(
        &mut self,
        local: &Local,
        persistent: &Places,
        parts: &[Part],
        works: Works,
        first: usize,
    ) -> Result<Vec<Segment>, TypeError> {
        let g = local.graph;
        let order: Vec<(usize, &Node)> =
            parts.iter().enumerate().flat_map(|(s, part)| part.nodes.iter().map(move |n| (s, *n))).collect();
        let place = self.buffers.share(local, persistent, parts, &order, works);
        let segment = |part: &Part| Segment { name: part.name, chunk: part.chunk, instrs: vec![], groups: vec![] };
        let mut segments: Vec<Segment> = parts.iter().map(segment).collect();
        let mut begun = vec![false; g.values.len()];
        for (s, node) in order.into_iter().filter(|(_, node)| !node.op.spec().is_view()) {
            let mut arg = |v: ValueId, output: bool| {
                let (value, part) = local.meant(v);
                let sum = match (&g.get(v).source, output) {
                    // Once per step, so there is nothing to add to.
                    _ if node.phase == Phase::Prepare => Sum::No,
                    (Source::Node { into: Some(state) }, true) => {
                        match (std::mem::replace(&mut begun[state.0], true), &g.get(*state).source) {
                            (true, _) => Sum::Always,
                            (false, Source::Sum) => Sum::No,
                            (false, _) => Sum::AfterFirst,
                        }
                    }
                    _ => Sum::No,
                };
                let buffer = place[value.0].unwrap_or_else(|| panic!("`{}` has no buffer", g.get(v).name));
                let sharding = local.sharding(v);
                Arg { buffer, value: first + value.0, ty: local.ty(v), sum, sharding, part }
            };
            let inputs: Vec<Arg> = node.inputs.iter().map(|&v| arg(v, false)).collect();
            let outputs = node.outputs.iter().map(|o| o.map(|v| arg(v, true))).collect();
            let op = local.op(node);
            let workspace = self.workspace(local, node, op, &inputs, parts[s].temporary)?;
            let Node { phase, layer, tf32, repeated, .. } = *node;
            let (stream, offsets, counted) = (stream(node), local.offsets(node), local.counted(node));
            segments[s].instrs.push(Instr {
                op,
                inputs,
                outputs,
                workspace,
                phase,
                layer,
                stream,
                waits: vec![],
                tf32,
                repeated,
                offsets,
                counted,
            });
        }
        segments.iter_mut().for_each(wait);
        Ok(segments)
    }

    /// Scratch of a kernel, or where a message waits to be taken.
    fn workspace(
        &mut self,
        local: &Local,
        node: &Node,
        op: Op,
        inputs: &[Arg],
        temporary: Lifetime,
    ) -> Result<Option<BufferId>, TypeError> {
        if let Op::Send { stage, tag } = op {
            let bytes = SEND_BUFFER_COPIES as u64 * node.inputs.iter().map(|v| local.bytes(*v)).sum::<u64>();
            if let Some(known) = self.send_buffers.get(&(stage, tag)) {
                let buffer = &mut self.buffers.all[known.0];
                buffer.bytes = buffer.bytes.max(bytes);
                return Ok(Some(*known));
            }
            let name = format!("send buffer to stage {stage}");
            let send_buffer = self.buffers.add(&name, Class::Communication, None, Lifetime::Run, bytes);
            self.send_buffers.insert((stage, tag), send_buffer);
            return Ok(Some(send_buffer));
        }
        if op.communicates() {
            return Ok(None);
        }
        let types: Vec<_> = inputs.iter().map(|a| &a.ty).collect();
        let scratch = self.context.device.workspace(&op, &types)?;
        let name = format!("scratch of {}", op.name());
        Ok((scratch > 0).then(|| self.buffers.add(&name, Class::Workspace, node.layer, temporary, scratch)))
    }
}

fn tensors(local: &Local, persistent: &Places) -> Vec<Tensor> {
    let g = local.graph;
    let known = g.values.iter().enumerate().filter_map(|(i, value)| {
        let role = match &value.source {
            Source::Input => Role::Input,
            Source::State(state) => Role::State(state.clone()),
            Source::Node { .. } if g.outputs.contains(&ValueId(i)) => match produced_in(g, ValueId(i)) {
                Phase::Update | Phase::Probe => Role::StepOutput,
                _ => Role::Output,
            },
            Source::Node { .. } | Source::Sum => return None,
        };
        // A gradient is what it has become at the end of a step.
        let id = ValueId(i);
        let shown = if let Role::State(State::Gradient { .. }) = role { g.latest(id) } else { id };
        let sharding = g.get(shown).sharding;
        let part = if g.parts.contains(&(id, shown)) { sharding.axes(Placement::Flat) } else { Axes::NONE };
        Some(Tensor {
            name: value.name.clone(),
            value: id,
            ty: local.ty(shown),
            whole: value.ty.clone(),
            sharding,
            buffer: persistent[i]?,
            part,
            role,
        })
    });
    known.collect()
}

#[cfg(test)]
mod tests;
