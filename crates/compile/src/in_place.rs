//! Weights that are quantised in their own memory: the order in which that is done, and which memory each takes.
//!
//! The bytes of a weight and their transpose have the size of the weight in bf16. Of weights of one size the first is copied, so that its memory is
//! free; the second is quantised into that of the first, the third into that of the second, and the first, out of its copy, into that of the last.
//! So one weight of each size is moved, and one copy at a time is there, while there are no activations yet.

use crate::Context;
use crate::local::Local;
use crate::stage::RankGraph;
use lockstep_ir::graph::{Node, Phase, Source, Value};
use lockstep_ir::program::BufferId;
use lockstep_ir::{DeviceProfile, Op, ValueId};
use std::collections::BTreeMap;

/// What one rank of the pipeline runs, where weights are quantised before the first micro-batch in the order in which they can be in place. All
/// largest magnitudes come first, and are gathered at once.
pub(crate) fn in_place(train: RankGraph, context: &Context) -> RankGraph {
    let RankGraph { mut graph, mut chunks } = train;
    let count = graph.nodes.iter().take_while(|n| n.phase == Phase::Prepare).count();
    if count == 0 {
        return RankGraph { graph, chunks };
    }
    let prepared: Vec<Node> = graph.nodes.drain(..count).collect();
    chunks.drain(..count);
    let (gathers, rest): (Vec<Node>, Vec<Node>) = prepared.into_iter().partition(|n| n.op.communicates());
    let (mut nodes, quantised): (Vec<Node>, Vec<Node>) =
        rest.into_iter().partition(|n| matches!(n.op, Op::Amax { .. }));
    nodes.extend(together(gathers));
    let local = Local::new(&graph, context);
    let mut by_size: BTreeMap<u64, Vec<Node>> = BTreeMap::new();
    for node in quantised {
        by_size.entry(local.ty(node.inputs[0]).bytes()).or_default().push(node);
    }
    for mut alike in by_size.into_values().rev() {
        let mut first = alike.remove(0);
        let weight = first.inputs[0];
        let Value { name, ty, sharding, .. } = graph.get(weight).clone();
        graph.values.push(Value { name: format!("{name}.copy"), ty, source: Source::Node { into: None }, sharding });
        let copy = ValueId(graph.values.len() - 1);
        let (phase, layer) = (first.phase, first.layer);
        nodes.push(Node {
            op: Op::Accumulate,
            inputs: vec![weight],
            outputs: vec![Some(copy)],
            phase,
            layer,
            tf32: false,
            repeated: false,
        });
        nodes.append(&mut alike);
        first.inputs[0] = copy;
        nodes.push(first);
    }
    chunks.splice(..0, nodes.iter().map(|_| 0));
    graph.nodes.splice(..0, nodes);
    RankGraph { graph, chunks }
}

/// Collectives of the same kind as one.
fn together(gathers: Vec<Node>) -> Vec<Node> {
    let mut all: Vec<Node> = Vec::new();
    for node in gathers {
        match all.iter_mut().find(|other| other.op == node.op) {
            Some(other) => {
                other.inputs.extend(node.inputs);
                other.outputs.extend(node.outputs);
                other.layer = None;
            }
            None => all.push(node),
        }
    }
    all
}

/// The memory of weights that have been copied or quantised, by size.
#[derive(Default)]
pub(crate) struct Freed(BTreeMap<u64, BufferId>);

/// Memory that what is made of a weight takes.
pub(crate) struct Home {
    buffer: BufferId,
    bytes: u64,
    used: u64,
}

impl Freed {
    /// A node has read a weight for the last time, whose memory is free from now on: returns what was free for what it makes.
    pub fn pass(&mut self, local: &Local, node: &Node, places: &[Option<BufferId>]) -> Option<Home> {
        let read = node.inputs[0];
        // Without padding, which copies have not.
        let bytes = local.ty(read).bytes();
        let home = if node.op == Op::Accumulate { None } else { self.0.remove(&bytes) };
        if let (Source::State(_), Some(buffer)) = (&local.graph.get(read).source, places[read.0]) {
            self.0.insert(bytes, buffer);
        }
        home.map(|buffer| Home { buffer, bytes, used: 0 })
    }
}

impl Home {
    /// Where the next `bytes` go, if there is room: in which buffer, and how many bytes after its start.
    pub fn take(&mut self, bytes: u64, device: &DeviceProfile) -> Option<(BufferId, u64)> {
        let at = device.align(self.used);
        (at + bytes <= self.bytes).then(|| {
            self.used = at + bytes;
            (self.buffer, at)
        })
    }
}
