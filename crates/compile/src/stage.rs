//! Stages: cuts a graph between layers into what each pipeline stage runs.
//!
//! The residual stream and its gradient are what crosses a cut; they are sent and received by the stages on both sides. A
//! parameter that two stages use (a tied table) is held and updated by both: they send each other its gradient sums and add them in the
//! same order.

use lockstep_ir::graph::{Node, Phase, Source, State, Value};
use lockstep_ir::{Graph, Op, TypeError, ValueId};
use std::collections::BTreeSet;

/// Streams of messages between two stages.
const ACTIVATIONS: u32 = 0;
const GRADIENTS: u32 = 1;
const TIED: u32 = 2;

/// The first layer of each stage after the first: stages as equal as can be in FLOPs, embedding and head included.
pub(crate) fn cut(g: &Graph, stages: usize) -> Result<Vec<usize>, TypeError> {
    if stages == 1 {
        return Ok(Vec::new());
    }
    let layers = g.nodes.iter().filter_map(|n| n.layer).max().map_or(0, |l| l + 1);
    let mut costs = vec![0.0f64; layers];
    let mut place = LayerOf::new(layers.saturating_sub(1));
    for node in &g.nodes {
        let wanted: Vec<bool> = node.outputs.iter().map(Option::is_some).collect();
        let flops = node.op.flops(&g.input_types(node), &wanted)?.hardware as f64;
        if let Some(cost) = costs.get_mut(place.of(node)) {
            *cost += flops;
        }
    }
    // best[s][n]: the least that the heaviest of s stages over the first n layers can be, and where the last begins.
    let mut sums = vec![0.0];
    for cost in &costs {
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
    Ok(cuts)
}

/// Says which layer a node goes with: what stands before the layers with the first, what stands behind with the last.
struct LayerOf {
    last: usize,
    /// Whether a layer has been seen in this direction.
    inside: bool,
    forward: bool,
}

impl LayerOf {
    fn new(last: usize) -> Self {
        Self { last, inside: false, forward: true }
    }

    fn of(&mut self, node: &Node) -> usize {
        let forward = node.phase == Phase::Forward;
        if forward != self.forward {
            (self.forward, self.inside) = (forward, false);
        }
        self.inside |= node.layer.is_some();
        match node.layer {
            Some(layer) => layer,
            None if self.inside == forward => self.last,
            None => 0,
        }
    }
}

/// The last layer, and for every node the layer that it goes with.
pub(crate) fn layers(g: &Graph) -> (usize, Vec<usize>) {
    let last = g.nodes.iter().filter_map(|n| n.layer).max().unwrap_or(0);
    let mut place = LayerOf::new(last);
    (last, g.nodes.iter().map(|n| place.of(n)).collect())
}

/// What one stage runs. Values keep their ids.
pub(crate) fn extract(g: &Graph, cuts: &[usize], stage: usize) -> Result<Graph, TypeError> {
    if cuts.is_empty() {
        return Ok(g.clone());
    }
    let stage_of = |layer: usize| cuts.iter().filter(|first| **first <= layer).count();
    let stages: Vec<usize> = layers(g).1.into_iter().map(stage_of).collect();
    let mut made_in: Vec<Option<usize>> = vec![None; g.values.len()];
    for (node, &s) in g.nodes.iter().zip(&stages).filter(|(n, _)| n.phase != Phase::Update) {
        node.outputs.iter().flatten().for_each(|v| made_in[v.0] = Some(s));
    }
    let mut out = g.clone();
    out.nodes.clear();
    // What this stage has: values that it makes or receives, and states that its nodes touch.
    let mut has: BTreeSet<ValueId> = BTreeSet::new();
    let mut nodes: Vec<Node> = Vec::new();
    let mut sends: Vec<(ValueId, usize)> = Vec::new();
    for (node, &s) in g.nodes.iter().zip(&stages).filter(|(n, _)| n.phase != Phase::Update) {
        let tag = if node.phase == Phase::Forward { ACTIVATIONS } else { GRADIENTS };
        for &v in &node.inputs {
            let Some(from) = made_in[v.0].filter(|from| *from != s) else { continue };
            if s == stage && has.insert(v) {
                let op = Op::Receive { stage: from, tag };
                nodes.push(Node { op, inputs: vec![], outputs: vec![Some(v)], phase: node.phase, layer: node.layer });
            }
            if from == stage && !sends.contains(&(v, s)) {
                sends.push((v, s));
                let op = Op::Send { stage: s, tag };
                // Sent as soon as it is made, in the phase that made it.
                let made = nodes.iter().rposition(|n| n.outputs.contains(&Some(v))).unwrap_or(nodes.len() - 1);
                let (phase, layer) = (nodes[made].phase, nodes[made].layer);
                nodes.insert(made + 1, Node { op, inputs: vec![v], outputs: vec![], phase, layer });
            }
        }
        if s == stage {
            has.extend(node.inputs.iter().copied());
            for v in node.outputs.iter().flatten() {
                has.insert(*v);
                if let Source::Node { into: Some(state) } = g.get(*v).source {
                    has.insert(state);
                }
            }
            nodes.push(node.clone());
        }
    }
    out.nodes = nodes;
    update(g, &mut out, &mut has, stage, &made_in)?;
    let owned = |v: &ValueId| has.contains(v);
    out.outputs.retain(owned);
    out.updates.retain(|(state, v)| has.contains(state) && has.contains(v));
    out.parts.retain(|(state, v)| has.contains(state) && has.contains(v));
    Ok(out)
}

/// The part of the update that concerns what the stage has.
fn update(
    g: &Graph,
    out: &mut Graph,
    has: &mut BTreeSet<ValueId>,
    stage: usize,
    made_in: &[Option<usize>],
) -> Result<(), TypeError> {
    for node in g.nodes.iter().filter(|n| n.phase == Phase::Update) {
        let mut node = node.clone();
        let optimizer = |v: &ValueId| {
            let source = &g.get(*v).source;
            matches!(source, Source::State(State::Scalars | State::Moment { .. } | State::Master { .. }))
        };
        let known = |has: &BTreeSet<ValueId>, v: &ValueId| has.contains(v) || optimizer(v);
        if node.op == Op::AddState {
            sum_tied_gradients(g, out, has, &mut node, stage, made_in);
        }
        let spec = node.op.spec();
        if spec.variadic {
            // Of several tensors, those that the stage has.
            let keep: Vec<bool> = node.inputs.iter().map(|v| known(has, v)).collect();
            let kept = |i: usize| keep.get(i).copied().unwrap_or(true);
            if spec.each {
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

/// Where other stages have summed gradients of the same parameter: sends ours, receives theirs, so that all add the same in the
/// same order.
fn sum_tied_gradients(
    g: &Graph,
    out: &mut Graph,
    has: &mut BTreeSet<ValueId>,
    node: &mut Node,
    stage: usize,
    made_in: &[Option<usize>],
) {
    let maker = |state: ValueId| {
        let sums = |i: usize| g.values[i].source == (Source::Node { into: Some(state) });
        (0..made_in.len()).find(|i| sums(*i)).and_then(|i| made_in[i])
    };
    // The second operand is the accumulator of one use, the first that of the first use or the sum so far.
    let Source::State(State::Gradient { of }) = g.get(node.inputs[1]).source else { return };
    let holders: BTreeSet<usize> = g.gradients_of(of).into_iter().filter_map(maker).collect();
    if !holders.contains(&stage) {
        return;
    }
    let message = |op, inputs, outputs| Node { op, inputs, outputs, phase: Phase::Update, layer: None };
    let others = || holders.iter().copied().filter(|s| *s != stage);
    for &ours in node.inputs.iter().filter(|v| maker(**v) == Some(stage)) {
        let send = |other| message(Op::Send { stage: other, tag: TIED }, vec![ours], vec![]);
        out.nodes.extend(others().map(send));
    }
    // What lives in a state of this stage: what was received, and sums of it alone, are temporary.
    let stays = |v: &ValueId| {
        let mut at = *v;
        while let Some((state, _)) = out.updates.iter().find(|(_, sum)| *sum == at) {
            at = *state;
        }
        maker(at) == Some(stage)
    };
    let home = node.inputs.iter().copied().find(stays);
    let (first, sum) = (node.inputs[0], node.outputs[0]);
    for input in &mut node.inputs {
        let Some(other) = maker(*input).filter(|s| *s != stage) else { continue };
        let value = g.get(*input);
        let name = format!("{}.received", value.name);
        out.values.push(Value { name, source: Source::Node { into: None }, ..value.clone() });
        let received = ValueId(out.values.len() - 1);
        out.nodes.push(message(Op::Receive { stage: other, tag: TIED }, vec![], vec![Some(received)]));
        has.insert(received);
        *input = received;
    }
    // A sum lives where its first operand does; where that is no state of this stage, where its second does.
    let Some(home) = home.filter(|home| *home != first) else { return };
    for pair in out.updates.iter_mut().filter(|(state, value)| *state == first && Some(*value) == sum) {
        pair.0 = home;
    }
    // A rank's range of the sum over ranks lives there as well.
    if let Some(accumulator) = g.gradients_of(of).first() {
        out.parts.iter_mut().filter(|(state, _)| state == accumulator).for_each(|pair| pair.0 = home);
    }
}
