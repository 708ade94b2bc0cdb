//! Offload: what waits in the memory of the host, and comes to the device where it is read. Optimizer state is here, activations are in
//! [`activations`].
//!
//! A state that is offloaded is read by a copy from the host alone, and its next value is written by a copy back. Copies run beside
//! kernels, those from the host ahead of the update that reads them: while one parameter is updated, the state of the next ones comes and
//! that of the last ones goes. Here they begin with the update's own work, since no parameter moves before the norm of all gradients is known;
//! `ahead` then moves the first of those from the host up into the last backward pass.
//!
//! How far ahead state comes, and how long it may be on its way back, is counted in bytes: as many as a large update has. With that both
//! directions of the link are busy all the time, whatever the order of large and small parameters is.

mod activations;

pub(crate) use activations::bounded;

use crate::Context;
use crate::local::Local;
use crate::stage::RankGraph;
use lockstep_ir::graph::{Node, Phase, Source, State, Value};
use lockstep_ir::{Graph, Op, TypeError, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// What is read next comes at least this many readers ahead.
const AHEAD: usize = 2;

/// Bytes that may come ahead of who reads them, or be on their way to the host, of the bytes that each reader (an update, a layer) has: as
/// many as one has that is as large as most bytes are part of. A few larger ones, of embeddings, do not count.
pub(crate) fn window(updates: &[u64]) -> u64 {
    let mut sizes = updates.to_vec();
    sizes.sort_unstable();
    let (total, mut sum) = (sizes.iter().sum::<u64>(), 0);
    let half = |bytes: &u64| {
        sum += bytes;
        2 * sum >= total
    };
    sizes.into_iter().find(half).unwrap_or(0)
}

/// Of readers with these bytes each, in order: before which of them the bytes of each start to come. Those between the two that have
/// come by then are within the window.
fn starts(sizes: &[u64], window: u64) -> Vec<usize> {
    let start = |k: usize| {
        let mut ahead = 0;
        let within = |earlier: &usize| {
            ahead += sizes[*earlier];
            ahead <= window || k - earlier <= AHEAD
        };
        (0..k).rev().take_while(within).last().unwrap_or(k)
    };
    (0..sizes.len()).map(start).collect()
}

/// What one rank of the pipeline runs, with as much of what it saves for backward and of its optimizer state in the memory of the host as
/// the context says.
pub(crate) fn offload(train: RankGraph, context: &Context, rank: usize) -> Result<RankGraph, TypeError> {
    Ok(optimizer(activations::offload(train, context, rank)?, context))
}

fn optimizer(train: RankGraph, context: &Context) -> RankGraph {
    let away = chosen(&train.graph, context);
    if away.is_empty() {
        return train;
    }
    let RankGraph { mut graph, chunks } = train;
    let mut nodes = std::mem::take(&mut graph.nodes);
    let begin = nodes.iter().position(|n| n.phase == Phase::Update).unwrap_or(nodes.len());
    let reads = |n: &Node| n.phase == Phase::Update && n.inputs.iter().any(|v| away.contains(v));
    let readers: Vec<usize> = (0..nodes.len()).filter(|i| reads(&nodes[*i])).collect();
    let local = Local::new(&graph, context);
    let size = |n: &Node| n.inputs.iter().filter(|v| away.contains(v)).map(|v| local.bytes(*v)).sum::<u64>();
    let sizes: Vec<u64> = readers.iter().map(|at| size(&nodes[*at])).collect();
    let starts = starts(&sizes, window(&sizes));
    // By node: the copies before it, and those after it.
    let (mut before, mut behind): (BTreeMap<usize, Vec<Node>>, BTreeMap<usize, Vec<Node>>) = Default::default();
    for (k, &at) in readers.iter().enumerate() {
        let from = if starts[k] == 0 { begin } else { readers[starts[k]] };
        let node = &mut nodes[at];
        for state in node.inputs.clone().into_iter().filter(|v| away.contains(v)) {
            let here = copy_of(&mut graph, state, "here");
            before.entry(from).or_default().push(copy(Op::Fetch, state, here, Phase::Update, None));
            node.inputs.iter_mut().filter(|v| **v == state).for_each(|v| *v = here);
            let changed =
                graph.updates.iter().position(|(of, next)| *of == state && node.outputs.contains(&Some(*next)));
            let Some(changed) = changed else { continue };
            let next = graph.updates[changed].1;
            graph.updates[changed].1 = copy_of(&mut graph, next, "kept");
            behind.entry(at).or_default().push(copy(Op::Offload, next, graph.updates[changed].1, Phase::Update, None));
        }
    }
    let mut with_copies: Vec<(Node, usize)> = Vec::new();
    for (i, (node, chunk)) in nodes.into_iter().zip(chunks).enumerate() {
        // Copies are no chunk's, as updates are.
        with_copies.extend(before.remove(&i).into_iter().flatten().map(|copy| (copy, 0)));
        with_copies.push((node, chunk));
        with_copies.extend(behind.remove(&i).into_iter().flatten().map(|copy| (copy, 0)));
    }
    let chunks;
    (graph.nodes, chunks) = with_copies.into_iter().unzip();
    RankGraph { graph, chunks }
}

/// The moments and master weights that go to the host: those of layers before others, which are larger, up to as many bytes as may.
fn chosen(g: &Graph, context: &Context) -> BTreeSet<ValueId> {
    let mut left = context.offload.optimizer;
    if left == 0 {
        return BTreeSet::new();
    }
    let local = Local::new(g, context);
    let in_layer = |of: &ValueId| g.nodes.iter().any(|n| n.layer.is_some() && n.inputs.contains(of));
    let mut states: Vec<(bool, ValueId)> = Vec::new();
    for i in (0..g.values.len()).filter(|i| local.is_here(*i)) {
        if let Source::State(State::Moment { of, .. } | State::Master { of }) = &g.values[i].source {
            states.push((!in_layer(of), ValueId(i)));
        }
    }
    states.sort();
    let mut fits = |v: &ValueId| {
        let rest = left.checked_sub(context.device.align(local.bytes(*v)));
        left = rest.unwrap_or(left);
        rest.is_some()
    };
    states.into_iter().map(|(_, v)| v).filter(|v| fits(v)).collect()
}

/// A value like another, in other memory.
fn copy_of(g: &mut Graph, v: ValueId, place: &str) -> ValueId {
    let Value { name, ty, sharding, .. } = g.get(v).clone();
    g.values.push(Value { name: format!("{name}.{place}"), ty, source: Source::Node { into: None }, sharding });
    ValueId(g.values.len() - 1)
}

fn copy(op: Op, from: ValueId, to: ValueId, phase: Phase, layer: Option<usize>) -> Node {
    Node { op, inputs: vec![from], outputs: vec![Some(to)], phase, layer, tf32: false, repeated: false }
}
