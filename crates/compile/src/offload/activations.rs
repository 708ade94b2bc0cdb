//! Activations in the memory of the host: what forward saves for backward goes there after its last use in forward, and comes back ahead of
//! the first node that reads it in backward.
//!
//! What is saved is the recompute policy's decision, and is made before; this moves it. A moved value is three values: the one that forward
//! makes, which lives in the frame of its segment until the copy to the host has ended; the host's, which waits there with as many copies as
//! there are micro-batches in flight; and for each kind of work that reads it (B and W, where the schedule separates them) one that is copied
//! back into the frame of that segment. What lives inside a segment shares memory with all else that does, so the arena falls by what moves,
//! less a window in each direction.
//!
//! Both windows are bytes of a layer, as [`window`] counts them. Backward copies that far ahead of its readers, and forward waits for the
//! oldest copies when more than that is on its way ([`bounded`], after instructions have been joined). A segment ends when its copies have:
//! so where backward follows its own forward pass at once, what it reads until it has done the last layer stays on the device.
//!
//! What enters layers moves first, then the largest values, each kind in all layers: copies stand evenly over a pass. Small values (statistics
//! of norms and attention, scales) stay: a copy of few bytes holds the link longer than its bytes take.

use super::{copy, copy_of, starts, window};
use crate::Context;
use crate::local::Local;
use crate::slots::{Works, copies, phases};
use crate::stage::RankGraph;
use lockstep_ir::graph::{Node, Phase, Source};
use lockstep_ir::op::Transfer;
use lockstep_ir::program::{Instr, Saved, Segment, Stream};
use lockstep_ir::schedule::{PipeSlot, Work};
use lockstep_ir::{Op, TypeError, ValueId};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// A value with fewer bytes than this part of the largest one stays on the device.
const SMALL: u64 = 32;

/// What a rank saves from one kind of work for others.
struct Candidate {
    value: ValueId,
    chunk: usize,
    /// Bytes of its buffer.
    bytes: u64,
    region: Saved,
    /// Whether it enters a layer.
    enters: bool,
    /// The node that makes it.
    maker: usize,
    /// The last node of the same work that makes or reads it.
    last: usize,
    /// Its readers in later work, in order.
    readers: BTreeMap<Work, Vec<usize>>,
}

/// What comes back for one kind of work.
struct Coming<'a> {
    /// Its first reader there.
    reader: usize,
    host: ValueId,
    of: &'a Candidate,
}

/// The rank's graph with copies of as much of what it saves as the context says.
pub(super) fn offload(train: RankGraph, context: &Context, rank: usize) -> Result<RankGraph, TypeError> {
    if context.offload.activations == 0 {
        return Ok(train);
    }
    let slots = &context.layout.pipeline().slots[rank];
    let works = Works::new(slots);
    let work: Vec<Option<Work>> = phases(&train.graph)?.into_iter().map(|phase| works.of_phase(phase)).collect();
    let moved = chosen(candidates(&train, context, &work, works, slots), context, copies(slots));
    Ok(if moved.is_empty() { train } else { with_copies(train, &moved, &work) })
}

/// Everything that is saved and may move.
fn candidates(
    train: &RankGraph,
    context: &Context,
    work: &[Option<Work>],
    works: Works,
    slots: &[PipeSlot],
) -> Vec<Candidate> {
    let (g, chunks) = (&train.graph, &train.chunks);
    let local = Local::new(g, context);
    let mut makers: Vec<Option<usize>> = vec![None; g.values.len()];
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); g.values.len()];
    // What is a view of another value, or has one, and what the host reads.
    let mut stays = vec![false; g.values.len()];
    for (n, node) in g.nodes.iter().enumerate() {
        node.outputs.iter().flatten().for_each(|v| makers[v.0] = Some(n));
        node.inputs.iter().for_each(|v| readers[v.0].push(n));
        if node.op.spec().is_view() {
            node.inputs.iter().chain(node.outputs.iter().flatten()).for_each(|v| stays[v.0] = true);
        }
    }
    g.outputs.iter().for_each(|v| stays[v.0] = true);
    g.updates.iter().chain(&g.parts).for_each(|(a, b)| (stays[a.0], stays[b.0]) = (true, true));
    let candidate = |i: usize| {
        let (value, maker) = (ValueId(i), makers[i]?);
        let (node, from, chunk) = (&g.nodes[maker], work[maker]?, chunks[maker]);
        // Weights that are gathered are no activations.
        let weights = matches!(node.op.transfer(), Some(Transfer::AllGather { dim: None, .. }));
        let whole = local.bytes(value) == local.ty(value).bytes();
        if stays[i] || weights || !whole || g.values[i].source != (Source::Node { into: None }) {
            return None;
        }
        let mut later: BTreeMap<Work, Vec<usize>> = BTreeMap::new();
        let mut last = maker;
        for &reader in &readers[i] {
            if chunks[reader] != chunk {
                return None;
            }
            if work[reader]? == from { last = reader } else { later.entry(work[reader]?).or_default().push(reader) }
        }
        let region = works.region(Some(from), Some(*later.last_key_value()?.0));
        let layer_of = |n: &usize| g.nodes[*n].layer;
        let received = matches!(node.op.transfer(), Some(Transfer::Receive { .. }));
        let crosses = readers[i].iter().any(|n| work[*n] == Some(from) && layer_of(n) != node.layer);
        let enters = from == Work::Forward && (received || crosses);
        let bytes = context.device.align(local.bytes(value));
        Some(Candidate { value, chunk, bytes, region, enters, maker, last, readers: later })
    };
    let mut all: Vec<Candidate> = (0..g.values.len()).filter_map(candidate).collect();
    let largest = all.iter().map(|c| c.bytes).max().unwrap_or(0);
    all.retain(|c| c.bytes * SMALL >= largest);
    let at_once = |chunk: usize| follows_at_once(slots, chunk);
    all.retain(|c| !(at_once(c.chunk) && is_read_first(train, work, c)));
    all
}

/// Whether every backward pass of a chunk follows the forward pass of the same micro-batch at once.
fn follows_at_once(slots: &[PipeSlot], chunk: usize) -> bool {
    let backward = |s: &PipeSlot| s.chunk == chunk && matches!(s.work, Work::Backward | Work::InputGrad);
    (0..slots.len()).filter(|i| backward(&slots[*i])).all(|i| {
        let before =
            i.checked_sub(1).map(|before| (slots[before].work, slots[before].chunk, slots[before].micro_batch));
        before == Some((Work::Forward, chunk, slots[i].micro_batch))
    })
}

/// Whether backward reads it before it has come to the last layer but one.
fn is_read_first(train: &RankGraph, work: &[Option<Work>], c: &Candidate) -> bool {
    let Some((first_work, readers)) = c.readers.first_key_value() else { return false };
    let of_backward = |n: &usize| work[*n] == Some(*first_work) && train.chunks[*n] == c.chunk;
    let layer = |n: usize| train.graph.nodes[n].layer;
    let mut nodes = (0..train.graph.nodes.len()).filter(of_backward);
    let Some(last_layer) = nodes.find_map(layer) else { return true };
    let mut nodes = (0..train.graph.nodes.len()).filter(of_backward);
    let next = nodes.find(|n| layer(*n).is_some_and(|layer| layer != last_layer));
    *first_work != Work::WeightGrad && next.is_none_or(|next| readers[0] < next)
}

/// Those that move: as many as there is room for in the memory of the host. Of a kind that has room in part, layers far apart move first: their
/// copies have the kernels of those between to themselves.
fn chosen(mut all: Vec<Candidate>, context: &Context, copies: [usize; Saved::ALL.len()]) -> Vec<Candidate> {
    let order = |c: &Candidate| (!c.enters, Reverse(c.bytes), c.chunk, c.maker, c.value);
    all.sort_by_key(order);
    let mut counts: BTreeMap<(bool, Reverse<u64>), usize> = BTreeMap::new();
    let mut turn = |c: Candidate| {
        let kind = (!c.enters, Reverse(c.bytes));
        let count = counts.entry(kind).or_default();
        *count += 1;
        // 0, a half, a quarter, three quarters …
        ((kind, (*count - 1).reverse_bits()), c)
    };
    let mut in_turn: Vec<_> = all.into_iter().map(&mut turn).collect();
    in_turn.sort_by_key(|(turn, _)| *turn);
    let mut all: Vec<Candidate> = in_turn.into_iter().map(|(_, c)| c).collect();
    // By region and chunk: bytes of one copy. Chunks share copies, so the largest counts.
    let mut taken: BTreeMap<(Saved, usize), u64> = BTreeMap::new();
    let total = |taken: &BTreeMap<(Saved, usize), u64>| -> u64 {
        let largest = |saved: Saved| taken.iter().filter(|((s, _), _)| *s == saved).map(|(_, bytes)| *bytes).max();
        Saved::ALL.into_iter().map(|saved| largest(saved).unwrap_or(0) * copies[saved as usize] as u64).sum()
    };
    all.retain(|c| {
        let own = |taken: &mut BTreeMap<(Saved, usize), u64>, more: bool| {
            let bytes = taken.entry((c.region, c.chunk)).or_default();
            *bytes = if more { *bytes + c.bytes } else { *bytes - c.bytes };
        };
        own(&mut taken, true);
        let fits = total(&taken) <= context.offload.activations;
        if !fits {
            own(&mut taken, false);
        }
        fits
    });
    all.sort_by_key(order);
    all
}

/// The phase of a copy back for this kind of work.
fn phase_of(work: Work) -> Phase {
    match work {
        Work::Forward => Phase::Forward,
        Work::Backward | Work::InputGrad => Phase::InputGrad,
        Work::WeightGrad => Phase::WeightGrad,
    }
}

/// The graph with copies of what moves, to the host and back.
fn with_copies(train: RankGraph, moved: &[Candidate], work: &[Option<Work>]) -> RankGraph {
    let RankGraph { mut graph, chunks } = train;
    let mut nodes = std::mem::take(&mut graph.nodes);
    // By node: the copies before it, and those after it.
    let (mut before, mut behind): (BTreeMap<usize, Vec<Node>>, BTreeMap<usize, Vec<Node>>) = Default::default();
    // By chunk and work: what comes back, by its first reader.
    let mut comes: BTreeMap<(usize, Work), Vec<Coming>> = BTreeMap::new();
    for c in moved {
        let host = copy_of(&mut graph, c.value, "host");
        let (phase, layer) = (work[c.maker].map_or(Phase::Forward, phase_of), nodes[c.maker].layer);
        behind.entry(c.last).or_default().push(copy(Op::Offload, c.value, host, phase, layer));
        for (reading, readers) in &c.readers {
            let coming = Coming { reader: readers[0], host, of: c };
            comes.entry((c.chunk, *reading)).or_default().push(coming);
        }
    }
    for ((chunk, reading), mut comes) in comes {
        comes.sort_by_key(|coming| (coming.reader, coming.host));
        let sizes: Vec<u64> = comes.iter().map(|coming| coming.of.bytes).collect();
        let by_layer = bytes_by_layer(comes.iter().map(|coming| (nodes[coming.reader].layer, coming.of.bytes)));
        let starts = starts(&sizes, window(&by_layer));
        let begin = (0..nodes.len()).find(|n| work[*n] == Some(reading) && chunks[*n] == chunk).unwrap_or(0);
        for (k, Coming { reader, host, of }) in comes.iter().enumerate() {
            let from = if starts[k] == 0 { begin } else { comes[starts[k]].reader };
            let here = copy_of(&mut graph, of.value, "here");
            let node = copy(Op::Fetch, *host, here, phase_of(reading), nodes[*reader].layer);
            before.entry(from).or_default().push(node);
            for reader in &of.readers[&reading] {
                nodes[*reader].inputs.iter_mut().filter(|v| **v == of.value).for_each(|v| *v = here);
            }
        }
    }
    let mut all: Vec<(Node, usize)> = Vec::new();
    for (n, (node, chunk)) in nodes.into_iter().zip(chunks).enumerate() {
        all.extend(before.remove(&n).into_iter().flatten().map(|copy| (copy, chunk)));
        all.push((node, chunk));
        all.extend(behind.remove(&n).into_iter().flatten().map(|copy| (copy, chunk)));
    }
    let chunks;
    (graph.nodes, chunks) = all.into_iter().unzip();
    RankGraph { graph, chunks }
}

fn bytes_by_layer(all: impl Iterator<Item = (Option<usize>, u64)>) -> Vec<u64> {
    let mut by_layer: BTreeMap<Option<usize>, u64> = BTreeMap::new();
    all.for_each(|(layer, bytes)| *by_layer.entry(layer).or_default() += bytes);
    by_layer.into_values().collect()
}

/// Lets kernels wait for the oldest copies to the host where more than a window of bytes is on its way: what they copy gives its memory
/// back. A group waits before it begins.
pub(crate) fn bounded(segments: &mut [Segment]) {
    segments.iter_mut().for_each(bound);
}

fn bound(segment: &mut Segment) {
    let leaves = |i: &&Instr| i.stream == Stream::Offload && i.phase != Phase::Update;
    let sizes = segment.instrs.iter().filter(leaves).map(|i| (i.layer, i.inputs[0].ty.bytes()));
    let window = window(&bytes_by_layer(sizes));
    // What is on its way: which instruction, and how many bytes.
    let mut sent: Vec<(usize, u64)> = Vec::new();
    for t in 0..segment.instrs.len() {
        let instr = &segment.instrs[t];
        if leaves(&instr) {
            sent.push((t, instr.inputs[0].ty.bytes()));
        }
        let first = segment.group_of(t).is_none_or(|group| group.instrs.start == t);
        if instr.stream != Stream::Compute || !first {
            continue;
        }
        let mut behind = 0;
        let ended = sent.iter().rposition(|(_, bytes)| {
            let over = behind > window;
            behind += bytes;
            over
        });
        if let Some(ended) = ended {
            segment.instrs[t].waits.push(sent[ended].0);
            sent.drain(..=ended);
        }
    }
}

#[cfg(test)]
mod tests;
