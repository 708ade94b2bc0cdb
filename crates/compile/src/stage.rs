//! Stages: cuts a graph between layers into virtual stages, and gives each rank of the pipeline its own.
//!
//! The residual stream and its gradient are what crosses a cut; they are sent and received by the ranks on both sides (by one to
//! itself, where it has both sides). A parameter that two ranks use (a tied table) is held and updated by both: they send each other
//! its gradient sums and add them in the same order.

use crate::Context;
use lockstep_ir::graph::{Node, Phase, Source, State, Value};
use lockstep_ir::schedule::Pipeline;
use lockstep_ir::{Axes, DType, Graph, Op, Sharding, TensorType, TypeError, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// Streams of messages between two ranks: those of a chunk, and what is sent once per step.
const ACTIVATIONS: u32 = 0;
const GRADIENTS: u32 = 1;
const TIED: u32 = 2;
const STREAMS: u32 = 3;

/// The first layer of each virtual stage after the first: as the context says, or stages as equal as can be in FLOPs, embedding and
/// head included.
pub(crate) fn cut(g: &Graph, context: &Context) -> Result<Vec<usize>, TypeError> {
    let stages = context.layout.stages();
    if stages == 1 {
        return Ok(Vec::new());
    }
    if let [given @ .., _] = &context.stages[..] {
        let ends = given.iter().scan(0, |end, layers| {
            *end += layers;
            Some(*end)
        });
        return Ok(ends.collect());
    }
    Ok(balanced(&layer_flops(g)?, stages))
}

/// The first layer that follows the output head, if one does: such layers (MTP) are on the last stage, all of them.
pub(crate) fn first_behind_head(g: &Graph) -> Option<usize> {
    let is_head = |n: &Node| matches!(n.op, Op::CrossEntropy | Op::LinearCrossEntropy { .. } | Op::VocabLoss);
    let behind = g.nodes.iter().skip_while(|n| !is_head(n));
    behind.filter(|n| n.phase == Phase::Forward).filter_map(|n| n.layer).min()
}

/// FLOPs of every layer, with what stands before the first and after the last. Layers after the output head (MTP) read what it reads: they are one
/// with it.
pub(crate) fn layer_flops(g: &Graph) -> Result<Vec<f64>, TypeError> {
    let layers = g.nodes.iter().filter_map(|n| n.layer).max().map_or(0, |l| l + 1);
    let mut costs = vec![0.0f64; layers];
    let mut place = LayerOf::new(g, layers.saturating_sub(1));
    for node in &g.nodes {
        let wanted: Vec<bool> = node.outputs.iter().map(Option::is_some).collect();
        let flops = node.op.flops(&g.input_types(node), &wanted)?.hardware as f64;
        if let Some(cost) = costs.get_mut(place.of(node)) {
            *cost += flops;
        }
    }
    if let Some(first) = first_behind_head(g).filter(|first| *first < costs.len()) {
        let further = costs.split_off(first + 1);
        costs[first] += further.iter().sum::<f64>();
    }
    Ok(costs)
}

/// The first layer of each stage after the first, so that the heaviest stage is as light as can be.
pub fn balanced(costs: &[f64], stages: usize) -> Vec<usize> {
    let layers = costs.len();
    // best[s][n]: the least that the heaviest of s stages over the first n layers can be, and where the last begins.
    let mut sums = vec![0.0];
    for cost in costs {
        sums.push(sums[sums.len() - 1] + cost);
    }
    let sum = |from: usize, to: usize| sums[to] - sums[from];
    let mut best = vec![vec![(f64::INFINITY, 0); layers + 1]; stages + 1];
    best[0][0].0 = 0.0;
    for s in 1..=stages {
        for n in s..=layers {
            for from in s - 1..n {
                let heaviest = best[s - 1][from].0.max(sum(from, n));
                if heaviest < best[s][n].0 {
                    best[s][n] = (heaviest, from);
                }
            }
        }
    }
    let mut cuts = vec![0; stages.saturating_sub(1)];
    let mut n = layers;
    for s in (2..=stages).rev() {
        n = best[s][n].1;
        cuts[s - 2] = n;
    }
    cuts
}

/// Says which layer a node goes with: what stands before the layers with the first, what follows with the last.
struct LayerOf {
    last: usize,
    /// Layers from this one on follow the head.
    behind_head: usize,
    /// Whether a layer has been seen in this direction.
    inside: bool,
    forward: bool,
}

impl LayerOf {
    fn new(g: &Graph, last: usize) -> Self {
        let behind_head = first_behind_head(g).unwrap_or(usize::MAX);
        Self { last, behind_head, inside: false, forward: true }
    }

    fn of(&mut self, node: &Node) -> usize {
        let forward = node.phase == Phase::Forward;
        if forward != self.forward {
            (self.forward, self.inside) = (forward, false);
        }
        self.inside |= node.layer.is_some_and(|layer| layer < self.behind_head);
        match node.layer {
            Some(layer) => layer,
            None if self.inside == forward => self.last,
            None => 0,
        }
    }
}

/// The last layer, and for every node the layer that it goes with. What ZeRO gathers and reduces stands ahead of or after its unit:
/// where it has no layer, a gather goes with who reads it, all else with who made what it reads.
pub(crate) fn layers(g: &Graph) -> (usize, Vec<usize>) {
    let last = g.nodes.iter().filter_map(|n| n.layer).max().unwrap_or(0);
    (last, layers_and(g, last))
}

/// The same, where what follows the layers goes with `behind`.
fn layers_and(g: &Graph, behind: usize) -> Vec<usize> {
    let mut place = LayerOf::new(g, behind);
    let moves = |n: &Node| n.op == Op::Accumulate || !n.op.over().within(Axes::TOKENS).is_empty();
    let mut layers: Vec<Option<usize>> =
        g.nodes.iter().map(|n| if moves(n) { n.layer } else { Some(place.of(n)) }).collect();
    let mut made: Vec<Option<usize>> = vec![None; g.values.len()];
    for (node, layer) in g.nodes.iter().zip(&mut layers) {
        *layer = layer.or_else(|| node.inputs.iter().find_map(|v| made[v.0]));
        for v in node.outputs.iter().flatten() {
            made[v.0] = *layer;
            if let Source::Node { into: Some(sum) } = g.get(*v).source {
                made[sum.0] = *layer;
            }
        }
    }
    let mut read: Vec<Option<usize>> = vec![None; g.values.len()];
    for (node, layer) in g.nodes.iter().zip(&mut layers).rev() {
        *layer = layer.or_else(|| node.outputs.iter().flatten().find_map(|v| read[v.0]));
        node.inputs.iter().for_each(|v| read[v.0] = *layer);
    }
    layers.into_iter().map(|layer| layer.unwrap_or(0)).collect()
}

/// What one rank of the pipeline runs.
pub(crate) struct RankGraph {
    /// Its nodes. Values keep their ids.
    pub(crate) graph: Graph,
    /// The chunk of every node; 0 for what is none's.
    pub(crate) chunks: Vec<usize>,
}

/// What one rank runs of a graph that is cut into the virtual stages of a pipeline.
pub(crate) fn extract(g: &Graph, cuts: &[usize], pipeline: &Pipeline, rank: usize) -> Result<RankGraph, TypeError> {
    if cuts.is_empty() {
        return Ok(RankGraph { graph: g.clone(), chunks: vec![0; g.nodes.len()] });
    }
    let places = pipeline.places();
    let stage_of = |layer: usize| cuts.iter().filter(|first| **first <= layer).count();
    // The head goes with the last layer, or is alone where the last stage has none.
    let count = g.nodes.iter().filter_map(|n| n.layer).max().map_or(0, |last| last + 1);
    let behind = if cuts.contains(&count) { count } else { count.saturating_sub(1) };
    let stages: Vec<usize> = layers_and(g, behind).into_iter().map(stage_of).collect();
    let mut made_in: Vec<Option<usize>> = vec![None; g.values.len()];
    for (node, &s) in g.nodes.iter().zip(&stages).filter(|(n, _)| n.phase != Phase::Update) {
        node.outputs.iter().flatten().for_each(|v| made_in[v.0] = Some(s));
    }
    let mut out = Graph::new();
    out.values = g.values.iter().map(|_| nothing()).collect();
    // What this rank has: values that it makes or receives, and states that its nodes touch.
    let mut has: BTreeSet<ValueId> = BTreeSet::new();
    let mut nodes: Vec<(Node, usize)> = Vec::new();
    // By value and the virtual stage that reads it.
    let mut sent: BTreeSet<(ValueId, usize)> = BTreeSet::new();
    let mut received: BTreeMap<(ValueId, usize), ValueId> = BTreeMap::new();
    for (node, &s) in g.nodes.iter().zip(&stages).filter(|(n, _)| n.phase != Phase::Update) {
        let kind = if node.phase == Phase::Forward { ACTIVATIONS } else { GRADIENTS };
        let (reader, chunk) = places[s];
        let crosses = |v: &ValueId| made_in[v.0].filter(|from| *from != s);
        let sends = |v: &ValueId| crosses(v).is_some_and(|from| places[from].0 == rank);
        if reader != rank && !node.inputs.iter().any(sends) {
            continue;
        }
        let mut node = node.clone();
        for v in &mut node.inputs {
            let Some(from) = crosses(v) else { continue };
            let (sender, sender_chunk) = places[from];
            let tag = STREAMS * sender_chunk as u32 + kind;
            if sender == rank && sent.insert((*v, s)) {
                let op = Op::Send { stage: reader, tag };
                // Sent as soon as it is made, in the phase that made it.
                let made = nodes.iter().rposition(|(n, _)| n.outputs.contains(&Some(*v))).unwrap_or(nodes.len() - 1);
                let (Node { phase, layer, .. }, chunk) = nodes[made];
                nodes.insert(
                    made + 1,
                    (Node { op, inputs: vec![*v], outputs: vec![], phase, layer, tf32: false, repeated: false }, chunk),
                );
            }
            if reader != rank {
                continue;
            }
            *v = *received.entry((*v, s)).or_insert_with(|| {
                let here = if sender == rank { copy(g, &mut out, *v) } else { *v };
                has.insert(here);
                let (op, outputs) = (Op::Receive { stage: sender, tag }, vec![Some(here)]);
                let Node { phase, layer, .. } = node;
                nodes.push((Node { op, inputs: vec![], outputs, phase, layer, tf32: false, repeated: false }, chunk));
                here
            });
        }
        if reader == rank {
            has.extend(node.inputs.iter().copied());
            for v in node.outputs.iter().flatten() {
                has.insert(*v);
                if let Source::Node { into: Some(state) } = g.get(*v).source {
                    has.insert(state);
                }
            }
            nodes.push((node, chunk));
        }
    }
    let mut chunks: Vec<usize>;
    (out.nodes, chunks) = nodes.into_iter().unzip();
    let made_on: Vec<Option<usize>> = made_in.iter().map(|s| s.map(|s| places[s].0)).collect();
    (out.updates, out.parts) = (g.updates.clone(), g.parts.clone());
    update(g, &mut out, &mut has, rank, &made_on)?;
    chunks.resize(out.nodes.len(), 0);
    out.outputs = g.outputs.iter().copied().filter(|v| has.contains(v)).collect();
    out.updates.retain(|(state, v)| has.contains(state) && has.contains(v));
    out.parts.retain(|(state, v)| has.contains(state) && has.contains(v));
    for v in has.iter().filter(|v| v.0 < g.values.len()) {
        out.values[v.0] = g.get(*v).clone();
    }
    Ok(RankGraph { graph: out, chunks })
}

/// What stands for a value that a rank does not have, so that others keep their ids.
fn nothing() -> Value {
    let ty = TensorType::new(DType::F32, []);
    Value { name: String::new(), ty, source: Source::Node { into: None }, sharding: Sharding::default() }
}

/// A value for what is received of `v`.
fn copy(g: &Graph, out: &mut Graph, v: ValueId) -> ValueId {
    let value = g.get(v);
    let source = Source::Node { into: None };
    let received = Value { name: format!("{}.received", value.name), source, ..value.clone() };
    out.values.push(received);
    ValueId(out.values.len() - 1)
}

/// The part of the update that concerns what the rank has.
fn update(
    g: &Graph,
    out: &mut Graph,
    has: &mut BTreeSet<ValueId>,
    rank: usize,
    made_on: &[Option<usize>],
) -> Result<(), TypeError> {
    for node in g.nodes.iter().filter(|n| n.phase == Phase::Update) {
        let optimizer = |v: &ValueId| {
            let source = &g.get(*v).source;
            matches!(source, Source::State(State::Scalars | State::Moment { .. } | State::Master { .. }))
        };
        let everywhere = |v: &ValueId| optimizer(v) || matches!(g.get(*v).source, Source::State(State::Total(_)));
        let known = |has: &BTreeSet<ValueId>, v: &ValueId| has.contains(v) || everywhere(v);
        let partly = node.op.spec().variadic || node.op == Op::AddState;
        if !partly && !node.inputs.iter().all(|v| known(has, v)) {
            continue;
        }
        let mut node = node.clone();
        if node.op == Op::AddState {
            sum_tied_gradients(g, out, has, &mut node, rank, made_on);
        }
        let spec = node.op.spec();
        if spec.variadic {
            // Of several tensors, those that the rank has.
            let keep: Vec<bool> = node.inputs.iter().map(|v| known(has, v)).collect();
            let kept = |i: usize| keep.get(i).copied().unwrap_or(true);
            if spec.each() {
                node.outputs = (0..node.outputs.len()).filter(|i| kept(*i)).map(|i| node.outputs[i]).collect();
            }
            node.inputs = (0..node.inputs.len()).filter(|i| kept(*i)).map(|i| node.inputs[i]).collect();
            if node.inputs.iter().all(optimizer) {
                continue;
            }
        } else if !node.inputs.iter().all(|v| known(has, v)) {
            continue;
        }
        has.extend(node.inputs.iter().chain(node.outputs.iter().flatten()).copied());
        out.nodes.push(node);
    }
    Ok(())
}

/// Where other ranks have summed gradients of the same parameter: sends ours, receives theirs, so that all add the same in the
/// same order.
fn sum_tied_gradients(
    g: &Graph,
    out: &mut Graph,
    has: &mut BTreeSet<ValueId>,
    node: &mut Node,
    rank: usize,
    made_on: &[Option<usize>],
) {
    let maker = |v: ValueId| {
        let sums = |i: usize| g.values[i].source == (Source::Node { into: Some(v) });
        made_on.get(v.0).copied().flatten().or_else(|| (0..made_on.len()).find(|i| sums(*i)).and_then(|i| made_on[i]))
    };
    // The second operand is the accumulator of one use, the first that of the first use or the sum so far; or both are copies of these.
    let makes = |n: &&Node| n.outputs.contains(&Some(node.inputs[1]));
    let copied = g.nodes.iter().find(makes).map(|n| n.inputs[0]);
    let Source::State(State::Gradient { of }) = g.get(copied.unwrap_or(node.inputs[1])).source else { return };
    let holders: BTreeSet<usize> = g.gradients_of(of).into_iter().filter_map(maker).collect();
    if !holders.contains(&rank) {
        return;
    }
    let (phase, layer) = (Phase::Update, None);
    let message = |op, inputs, outputs| Node { op, inputs, outputs, phase, layer, tf32: false, repeated: false };
    let others = || holders.iter().copied().filter(|r| *r != rank);
    for &ours in node.inputs.iter().filter(|v| maker(**v) == Some(rank)) {
        let send = |other| message(Op::Send { stage: other, tag: TIED }, vec![ours], vec![]);
        out.nodes.extend(others().map(send));
    }
    // What lives in a state of this rank: what was received, and sums of it alone, are temporary.
    let stays = |v: &ValueId| {
        let mut at = *v;
        while let Some((state, _)) = out.updates.iter().find(|(_, sum)| *sum == at) {
            at = *state;
        }
        maker(at) == Some(rank)
    };
    let home = node.inputs.iter().copied().find(stays);
    let (first, sum) = (node.inputs[0], node.outputs[0]);
    for input in &mut node.inputs {
        let Some(other) = maker(*input).filter(|r| *r != rank) else { continue };
        let received = copy(g, out, *input);
        out.nodes.push(message(Op::Receive { stage: other, tag: TIED }, vec![], vec![Some(received)]));
        has.insert(received);
        *input = received;
    }
    // A sum lives where its first operand does; where that is no state of this rank, where its second does. That of copies is temporary.
    let Some(home) = home.filter(|home| *home != first && copied.is_none()) else { return };
    for pair in out.updates.iter_mut().filter(|(state, value)| *state == first && Some(*value) == sum) {
        pair.0 = home;
    }
    // A rank's range of the sum over ranks lives there as well.
    if let Some(accumulator) = g.gradients_of(of).first() {
        out.parts.iter_mut().filter(|(state, _)| state == accumulator).for_each(|pair| pair.0 = home);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::tests::two_layers;
    use lockstep_ir::schedule::{Generator, PipeRank, PipeSlot};
    use lockstep_ir::{Layout, Mesh, MeshAxis, Schedule};

    /// Two virtual stages on one rank.
    struct Both;

    impl Generator for Both {
        fn chunks(&self) -> std::ops::RangeInclusive<usize> {
            2..=2
        }

        fn slots(&self, _of: PipeRank) -> Vec<PipeSlot> {
            let (forward, backward) = (PipeSlot::forward, PipeSlot::backward);
            vec![forward(0, 0), forward(1, 0), backward(1, 0), backward(0, 0)]
        }
    }

    /// The messages of a rank: phase, chunk, op and value.
    fn messages(layout: Layout, rank: usize) -> Vec<String> {
        let (graph, context) = two_layers(layout);
        let pipeline = context.layout.pipeline();
        let RankGraph { graph, chunks } = extract(&graph, &[1], &pipeline, rank).unwrap();
        let all = graph.nodes.iter().zip(chunks);
        let messages = all.filter(|(n, _)| matches!(n.op, Op::Send { .. } | Op::Receive { .. }));
        let printed = messages.map(|(n, chunk)| {
            let value = n.inputs.first().copied().or(n.outputs.first().copied().flatten()).unwrap();
            let name = &graph.get(value).name;
            format!("{} of chunk {chunk}: {}{} {name}", n.phase.letter(), n.op.name(), n.op.attributes())
        });
        printed.collect()
    }

    #[test]
    fn ranks_send_what_crosses_a_cut_and_the_gradient_sums_of_what_both_use() {
        let layout = Layout { mesh: Mesh::ONE.with(MeshAxis::Pp, 2), ..Layout::single(2) };
        assert_eq!(
            messages(layout, 0),
            [
                "F of chunk 0: send { stage: 1, tag: 0 } mid",
                "W of chunk 0: receive { stage: 1, tag: 1 } d.mid",
                "U of chunk 0: send { stage: 1, tag: 2 } grad.table.2",
                "U of chunk 0: receive { stage: 1, tag: 2 } grad.table.received",
            ]
        );
        assert_eq!(
            messages(layout, 1),
            [
                "F of chunk 0: receive { stage: 0, tag: 0 } mid",
                "B of chunk 0: send { stage: 0, tag: 1 } d.mid",
                "U of chunk 0: send { stage: 0, tag: 2 } grad.table",
                "U of chunk 0: receive { stage: 0, tag: 2 } grad.table.2.received",
            ]
        );
    }

    #[test]
    fn a_rank_sends_to_itself_what_its_other_chunk_reads() {
        let layout = Layout { schedule: Schedule::new("both", &Both), chunks: 2, ..Layout::single(1) };
        assert_eq!(
            messages(layout, 0),
            [
                "F of chunk 0: send { stage: 0, tag: 0 } mid",
                "F of chunk 1: receive { stage: 0, tag: 0 } mid.received",
                "B of chunk 1: send { stage: 0, tag: 4 } d.mid",
                "W of chunk 0: receive { stage: 0, tag: 4 } d.mid.received",
            ]
        );
    }
}
