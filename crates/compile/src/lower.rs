//! Lower: cuts the graphs into segments, decides what shares memory and how long it lives, and writes the schedule.
//!
//! Here shapes become those of one rank. Everything is known after this but the offsets.
//!
//! An evaluation is an entry of the same program, whose temporaries overlay what training saves. The smaller steps of
//! a batch ramp are entries too: schedules of fewer micro-batches.

mod evaluation;

use crate::in_place::Freed;
use crate::local::Local;
use crate::offload::window;
use crate::slots::{WorkSegment, Works, allot, phases};
use crate::stage::RankGraph;
use crate::{Context, Evaluation};
use evaluation::shared_states;
use lockstep_ir::graph::{Node, Phase, Source, State};
use lockstep_ir::op::Transfer;
use lockstep_ir::program::{
    Arg, BufferId, Class, Entry, Instr, Lifetime, Role, Saved, Segment, Slot, StepProgram, Stream, Sum, Tensor,
};
use lockstep_ir::schedule::{PipeRank, Work};
use lockstep_ir::{Axes, Dim, Fusion, Graph, Op, Placement, TypeError, ValueId};
use std::collections::{BTreeMap, BTreeSet};

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

pub(crate) struct UnplacedBuffer {
    pub name: String,
    pub class: Class,
    pub layer: Option<usize>,
    /// The chunk of layers that has it; 0 for what is none's.
    pub chunk: usize,
    pub lifetime: Lifetime,
    pub bytes: u64,
    /// Of what lives for a step in memory of another buffer: which, and how many bytes after its start.
    pub within: Option<(BufferId, u64)>,
}

/// Messages that a stage may have on the way to another before it waits.
pub const SEND_BUFFER_COPIES: usize = 2;

/// Nodes that become a segment.
struct Part<'a> {
    name: &'static str,
    chunk: usize,
    /// What of a micro-batch's work it is; `None` for what is done once.
    work: Option<Work>,
    /// Where what lives inside it goes.
    temporary: Lifetime,
    nodes: Vec<&'a Node>,
}

/// Lowers what one rank of the pipeline runs of a training graph, and of the evaluations that share its states.
pub(crate) fn lower(
    train: &RankGraph,
    evaluations: &[Evaluation<RankGraph>],
    context: &Context,
    rank: usize,
) -> Result<Unplaced, TypeError> {
    let mut lowering = Lowering { buffers: Vec::new(), send_buffers: BTreeMap::new(), context };
    let local = Local::new(&train.graph, context);
    let persistent = lowering.persistent(&local);
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
        buffers: lowering.buffers,
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
    let mut lowering = Lowering { buffers: Vec::new(), send_buffers: BTreeMap::new(), context };
    let local = Local::new(g, context);
    let persistent = lowering.persistent(&local);
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
        buffers: lowering.buffers,
        values: g.values.iter().map(|v| v.name.clone()).collect(),
        tensors: tensors(&local, &persistent),
        segments,
        entries,
        micro_batches: 1,
        saved: works.saved().iter().map(|saved| (*saved, 1)).collect(),
    })
}

/// Buffers of the values that have one, by value index.
type Places = Vec<Option<BufferId>>;

struct Lowering<'a> {
    buffers: Vec<UnplacedBuffer>,
    /// Where messages wait, by stage, tag and size.
    send_buffers: BTreeMap<(usize, u32), BufferId>,
    context: &'a Context,
}

impl Lowering<'_> {
    fn buffer(&mut self, name: &str, class: Class, layer: Option<usize>, lifetime: Lifetime, bytes: u64) -> BufferId {
        self.buffers.push(UnplacedBuffer {
            name: name.to_owned(),
            class,
            layer,
            chunk: 0,
            lifetime,
            bytes,
            within: None,
        });
        BufferId(self.buffers.len() - 1)
    }

    /// Gives states, inputs and outputs their buffers, states in class order so that a class is one range.
    fn persistent(&mut self, local: &Local) -> Places {
        let g = local.graph;
        let layers = layers_of(g);
        let from_host: BTreeSet<ValueId> =
            g.nodes.iter().filter(|n| n.op == Op::Fetch).flat_map(|n| n.inputs.iter().copied()).collect();
        let mut wanted: Vec<(Class, Lifetime, usize)> = Vec::new();
        for (i, value) in g.values.iter().enumerate().filter(|(i, _)| local.is_here(*i)) {
            match &value.source {
                Source::Input => wanted.push((Class::Activations, Lifetime::MicroBatch, i)),
                Source::State(state) => {
                    let lifetime = if from_host.contains(&ValueId(i)) { Lifetime::Host } else { Lifetime::Run };
                    wanted.push((class_of(state), lifetime, i));
                }
                Source::Node { .. } | Source::Sum => {}
            }
        }
        for v in &g.outputs {
            wanted.push(match produced_in(g, *v) {
                Phase::Update | Phase::Probe => (Class::Optimizer, Lifetime::Run, v.0),
                _ => (Class::Activations, Lifetime::MicroBatch, v.0),
            });
        }
        wanted.sort();
        let mut result = vec![None; g.values.len()];
        for (class, lifetime, i) in wanted {
            let name = &g.values[i].name;
            result[i] = Some(self.buffer(name, class, layers[i], lifetime, local.bytes(ValueId(i))));
        }
        // A state's next value, a rank's range of it and a sum over micro-batches live where the state does.
        for &(state, next) in g.updates.iter().chain(&g.parts) {
            result[next.0] = result[state.0];
        }
        for i in 0..g.values.len() {
            if let Source::Node { into: Some(state) } = g.values[i].source {
                result[i] = result[state.0];
            }
        }
        result
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
        let place = self.share(local, persistent, parts, &order, works);
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
                let buffer = &mut self.buffers[known.0];
                buffer.bytes = buffer.bytes.max(bytes);
                return Ok(Some(*known));
            }
            let name = format!("send buffer to stage {stage}");
            let send_buffer = self.buffer(&name, Class::Communication, None, Lifetime::Run, bytes);
            self.send_buffers.insert((stage, tag), send_buffer);
            return Ok(Some(send_buffer));
        }
        if op.communicates() {
            return Ok(None);
        }
        let types: Vec<_> = inputs.iter().map(|a| &a.ty).collect();
        let scratch = self.context.device.workspace(&op, &types)?;
        let name = format!("scratch of {}", op.name());
        Ok((scratch > 0).then(|| self.buffer(&name, Class::Workspace, node.layer, temporary, scratch)))
    }

    /// Whether a matmul may make this norm (see [`crate::join`]): its blocks read what is added up while one of them stores the sum.
    fn is_read_while_summed(&self, local: &Local, node: &Node) -> bool {
        let rows = || local.ty(node.inputs[0]).dims.iter().rev().skip(1).map(Dim::size).product::<usize>();
        matches!(node.op, Op::Norm { residual: true, .. })
            && local.graph.losses.is_empty()
            && self.context.device.fusions.contains(&Fusion::NormMatmul)
            && rows() <= Fusion::NORM_ROWS
    }

    /// A buffer for every value: its own, or that of an input which dies in the call that makes it.
    fn share(
        &mut self,
        local: &Local,
        persistent: &Places,
        parts: &[Part],
        order: &[(usize, &Node)],
        works: Works,
    ) -> Places {
        let g = local.graph;
        // The segment in which each buffer is first written.
        let mut begun: BTreeMap<BufferId, usize> = BTreeMap::new();
        let mut first = vec![None; g.values.len()];
        let mut last = vec![0; g.values.len()];
        for (t, (_, node)) in order.iter().enumerate() {
            node.inputs.iter().for_each(|v| last[local.meant(*v).0.0] = t);
            for v in node.outputs.iter().flatten().map(|v| local.meant(*v).0) {
                first[v.0] = first[v.0].or(Some(t));
                last[v.0] = last[v.0].max(t);
            }
        }
        let mut place: Places = persistent.clone();
        let mut freed = Freed::default();
        for (t, (segment, node)) in order.iter().enumerate() {
            let prepares = node.phase == Phase::Prepare;
            let frees = prepares && (node.op.quantises_weight() || node.op == Op::Accumulate);
            let mut home = if frees { freed.pass(local, node, &place) } else { None };
            let mut taken: Vec<ValueId> = Vec::new();
            for (o, output) in node.outputs.iter().enumerate() {
                let Some(v) = output.map(|v| local.meant(v).0) else { continue };
                if place[v.0].is_some() {
                    continue;
                }
                let until = order[last[v.0]].0;
                let spec = node.op.spec();
                let pair = |to: usize| if spec.each() { o } else { to };
                let read_on = self.is_read_while_summed(local, node);
                let donors = spec.in_place.iter().filter(|(_, to)| pair(*to) == o && !read_on);
                let donor = donors.map(|(i, _)| node.inputs[if spec.each() { o } else { *i }]).find(|x| {
                    let computed = first[x.0].is_some() && persistent.get(x.0).is_none_or(Option::is_none);
                    let once = node.inputs.iter().filter(|y| *y == x).count() == 1;
                    // What is made once per step is read in every micro-batch.
                    let stays = |b: BufferId| matches!(self.buffers[b.0].lifetime, Lifetime::Run | Lifetime::Step);
                    let computed = computed && !place[x.0].is_some_and(stays);
                    let same = local.ty(*x) == local.ty(v) && local.bytes(*x) >= local.bytes(v);
                    computed && once && last[x.0] == t && !taken.contains(x) && same
                });
                let buffer = match donor.and_then(|x| place[x.0].map(|b| (x, b))) {
                    Some((x, buffer)) => {
                        taken.push(x);
                        buffer
                    }
                    None => {
                        let name = &g.get(v).name;
                        let class = match node.op {
                            Op::Fetch if node.phase == Phase::Update => Class::Optimizer,
                            _ if is_gathered(node) => Class::Communication,
                            _ => Class::Activations,
                        };
                        self.buffer(name, class, node.layer, parts[*segment].temporary, local.bytes(v))
                    }
                };
                let from = *begun.entry(buffer).or_insert(*segment);
                if until != *segment && prepares {
                    let own = &mut self.buffers[buffer.0];
                    let bytes = local.ty(v).dtype.is_fp8().then_some(own.bytes);
                    own.within = bytes.and_then(|bytes| home.as_mut()?.take(bytes, &self.context.device));
                    own.lifetime = if own.within.is_some() { Lifetime::Step } else { Lifetime::Run };
                    own.class = Class::Parameters;
                } else if until != *segment {
                    let saved = works.region(parts[from].work, parts[until].work);
                    let in_host = node.op == Op::Offload;
                    let lifetime = if in_host { Lifetime::SavedInHost(saved) } else { Lifetime::Saved(saved) };
                    (self.buffers[buffer.0].lifetime, self.buffers[buffer.0].chunk) = (lifetime, parts[from].chunk);
                }
                place[v.0] = Some(buffer);
            }
        }
        place
    }
}

/// Whether a node's outputs are copies of what other ranks hold.
fn is_gathered(node: &Node) -> bool {
    match node.op.transfer() {
        Some(Transfer::AllGather { .. } | Transfer::Shift { .. } | Transfer::Receive { .. }) => true,
        Some(
            Transfer::AllReduce { .. }
            | Transfer::SumShared { .. }
            | Transfer::ReduceScatter { .. }
            | Transfer::AllToAll { .. }
            | Transfer::Send { .. },
        )
        | None => false,
    }
}

/// Collectives over ranks that have other tokens overlap with the kernels of a pass; others are waited for at once.
fn stream(node: &Node) -> Stream {
    let overlaps = !node.op.over().within(Axes::TOKENS).is_empty() && node.phase != Phase::Update;
    match (node.op, node.op.transfer()) {
        (Op::Fetch, _) => Stream::Fetch,
        (Op::Offload, _) => Stream::Offload,
        (_, Some(Transfer::AllToAll { .. })) if overlaps => Stream::Exchange,
        _ if overlaps => Stream::Communication,
        _ => Stream::Compute,
    }
}

/// What runs beside kernels on one stream: by buffer the last instruction that made it, and the last that touched it.
#[derive(Default)]
struct Beside {
    made: BTreeMap<usize, usize>,
    touched: BTreeMap<usize, usize>,
    /// The last that a kernel has waited for.
    ended: Option<usize>,
}

/// Lets every instruction wait for what other streams have made of what it reads, or still do with what it writes. State that goes to the
/// host gives its memory back when an update waits for it: each update of what has come from there leaves the last bytes on their way, as many
/// as the [`window`] has. (For activations see [`crate::offload::bounded`].)
fn wait(segment: &mut Segment) {
    let mut streams = Stream::BESIDE.map(|stream| (stream, Beside::default()));
    let window = window(&updated_from_host(segment));
    // What has been sent back to the host: which instruction, and how many bytes.
    let mut sent: Vec<(usize, u64)> = Vec::new();
    for (t, instr) in segment.instrs.iter_mut().enumerate() {
        let reads: Vec<usize> = instr.inputs.iter().map(|a| a.buffer.0).collect();
        let writes: Vec<usize> = instr.outputs.iter().flatten().map(|a| a.buffer.0).collect();
        let has_come = |(stream, beside): &(Stream, Beside)| {
            *stream == Stream::Fetch && reads.iter().any(|b| beside.made.contains_key(b))
        };
        let updates = instr.stream == Stream::Compute && streams.iter().any(has_come);
        let mut on_the_way = 0;
        let room = sent.iter().rev().find(|(_, bytes)| {
            on_the_way += bytes;
            on_the_way > window + bytes
        });
        let room = room.filter(|_| updates).map(|(at, _)| *at);
        if instr.stream == Stream::Offload && instr.phase == Phase::Update {
            sent.push((t, instr.inputs[0].ty.bytes()));
        }
        for (stream, beside) in &mut streams {
            if instr.stream == *stream {
                beside.made.extend(writes.iter().map(|b| (*b, t)));
                beside.touched.extend(reads.iter().chain(&writes).map(|b| (*b, t)));
                continue;
            }
            let made = reads.iter().filter_map(|b| beside.made.get(b));
            let room = room.filter(|_| *stream == Stream::Offload);
            let last = made.chain(writes.iter().filter_map(|b| beside.touched.get(b))).copied().chain(room).max();
            if let Some(last) = last.filter(|last| beside.ended.is_none_or(|ended| ended < *last)) {
                instr.waits.push(last);
                if instr.stream == Stream::Compute {
                    beside.ended = Some(last);
                }
            }
        }
    }
}

/// Bytes that have come from the host, of every instruction that updates some.
fn updated_from_host(segment: &Segment) -> Vec<u64> {
    let come: BTreeMap<BufferId, u64> = segment
        .instrs
        .iter()
        .filter(|i| i.stream == Stream::Fetch)
        .flat_map(|i| i.outputs.iter().flatten().map(|a| (a.buffer, a.ty.bytes())))
        .collect();
    let kernels = segment.instrs.iter().filter(|i| i.stream == Stream::Compute);
    let bytes = kernels.map(|i| i.inputs.iter().filter_map(|a| come.get(&a.buffer)).sum());
    bytes.filter(|bytes| *bytes > 0).collect()
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

fn produced_in(g: &Graph, v: ValueId) -> Phase {
    g.nodes.iter().find(|n| n.outputs.contains(&Some(v))).map_or(Phase::Forward, |n| n.phase)
}

fn class_of(state: &State) -> Class {
    match state {
        State::Parameter(_) | State::Unit { .. } | State::Constant(_) => Class::Parameters,
        State::Gradient { .. } => Class::Gradients,
        State::Moment { .. } | State::Master { .. } | State::Scalars | State::Total(_) | State::History(_) => {
            Class::Optimizer
        }
        State::Cache => Class::Activations,
    }
}

/// The layer of each state: that of the first forward or backward node that reads or sums into it, and for moments that of their parameter.
fn layers_of(g: &Graph) -> Vec<Option<usize>> {
    let mut layers = vec![None; g.values.len()];
    let mut seen = vec![false; g.values.len()];
    for node in &g.nodes {
        let sums = node.outputs.iter().flatten().filter_map(|v| match g.get(*v).source {
            Source::Node { into } => into,
            _ => None,
        });
        let layer = node.layer;
        for v in node.inputs.iter().copied().chain(sums) {
            let shared = matches!(g.get(v).source, Source::State(State::Constant(_)));
            if !std::mem::replace(&mut seen[v.0], true) && !shared {
                layers[v.0] = layer;
            }
        }
    }
    for (i, value) in g.values.iter().enumerate() {
        if let Source::State(State::Moment { of, .. } | State::Master { of }) = value.source {
            layers[i] = layers[of.0];
        }
    }
    layers
}

#[cfg(test)]
mod tests;
