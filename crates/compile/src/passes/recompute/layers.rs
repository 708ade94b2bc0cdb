//! Layers as recomputation sees them: which are alike, what backward reads of each, what leaves it.

use crate::settings::{Candidate, Recompute, Recomputed};
use lockstep_ir::graph::{Node, Phase};
use lockstep_ir::{Graph, Op, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// The layers of a graph with a backward pass.
#[derive(Clone, Debug)]
pub(crate) struct Layers {
    /// Forward nodes of every layer.
    pub(crate) nodes: Vec<Vec<usize>>,
    /// Kind of every layer: layers with the same ops and types are of one kind.
    pub(crate) kind_of: Vec<usize>,
    /// How many layers of its pipeline stage come before each.
    pub(crate) in_stage: Vec<usize>,
    /// Layers that are recomputed together.
    block_of: Vec<usize>,
    /// The forward node that makes a value.
    made: Vec<Option<usize>>,
    /// Values that a node outside their block reads: what enters the next.
    leaves: Vec<bool>,
    /// Values that backward reads inside their block.
    read: Vec<bool>,
}

impl Layers {
    /// Looks at blocks of `block` layers that end where a pipeline stage does, too: before the layers `cuts`.
    pub(crate) fn new(graph: &Graph, block: usize, cuts: &[usize]) -> Self {
        let count = graph.nodes.iter().filter_map(|n| n.layer).max().map_or(0, |l| l + 1);
        let mut block_of = Vec::new();
        let (mut blocks, mut first) = (0, 0);
        for layer in 0..count {
            if layer > 0 && (layer - first >= block || cuts.contains(&layer)) {
                (blocks, first) = (blocks + 1, layer);
            }
            block_of.push(blocks);
        }
        let stage_start = |layer: usize| cuts.iter().copied().filter(|cut| *cut <= layer).max().unwrap_or(0);
        let in_stage = (0..count).map(|layer| layer - stage_start(layer)).collect();
        let mut nodes = vec![Vec::new(); count];
        let mut made = vec![None; graph.values.len()];
        for (n, node) in graph.nodes.iter().enumerate().filter(|(_, n)| n.phase == Phase::Forward) {
            node.outputs.iter().flatten().for_each(|v| made[v.0] = Some(n));
            if let Some(layer) = node.layer {
                nodes[layer].push(n);
            }
        }
        let (mut leaves, mut read) = (vec![false; graph.values.len()], vec![false; graph.values.len()]);
        graph.outputs.iter().for_each(|v| leaves[v.0] = true);
        let block = |layer: Option<usize>| layer.map(|l| block_of[l]);
        for node in &graph.nodes {
            for v in &node.inputs {
                let Some(maker) = made[v.0].map(|n| &graph.nodes[n]) else { continue };
                let here = block(maker.layer) == block(node.layer);
                match node.phase == Phase::Forward {
                    true => leaves[v.0] |= !here,
                    false => read[v.0] |= here && maker.layer.is_some(),
                }
            }
        }
        let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
        let kind_of = nodes.iter().map(|nodes| {
            let next = kinds.len();
            *kinds.entry(signature(graph, nodes)).or_insert(next)
        });
        Self { kind_of: kind_of.collect(), nodes, in_stage, block_of, made, leaves, read }
    }

    /// The forward node that makes a value, where a reader of this layer may recompute it.
    pub(super) fn made_here<'a>(&self, graph: &'a Graph, v: ValueId, reader: Option<usize>) -> Option<&'a Node> {
        let node = &graph.nodes[self.made[v.0]?];
        (self.block_of[node.layer?] == self.block_of[reader?]).then_some(node)
    }

    /// Which values every layer saves: what leaves it, and what backward reads of the rest unless the policy recomputes it.
    pub(super) fn saved(&self, graph: &Graph, policy: &Recompute) -> Vec<bool> {
        let mut saved = self.leaves.clone();
        for (layer, nodes) in self.nodes.iter().enumerate() {
            for (position, &n) in nodes.iter().enumerate() {
                let node = &graph.nodes[n];
                for (output, v) in node.outputs.iter().enumerate().filter_map(|(o, v)| Some((o, (*v)?))) {
                    let recomputed = match policy {
                        Recompute::None => false,
                        Recompute::Selective => node.op.spec().cheap.contains(&output),
                        Recompute::Full | Recompute::Every(_) | Recompute::Sqrt => true,
                        Recompute::Ops(ops) => ops.iter().any(|op| op == node.op.name()),
                        Recompute::Values(Recomputed { first, by_first, by_rest }) => {
                            let values = if self.in_stage[layer] < *first { by_first } else { by_rest };
                            values.contains(&Candidate { kind: self.kind_of[layer], node: position, output })
                        }
                    };
                    saved[v.0] |= self.read[v.0] && !recomputed;
                }
            }
        }
        saved
    }

    /// The values that the layers of all kinds may recompute: what backward reads of them and no other layer does.
    pub(crate) fn candidates(&self, graph: &Graph) -> BTreeMap<Candidate, ValueId> {
        let mut all = BTreeMap::new();
        for (kind, layer) in self.representatives() {
            for (position, &n) in self.nodes[layer].iter().enumerate() {
                for (output, v) in graph.nodes[n].outputs.iter().enumerate() {
                    if let Some(v) = v.filter(|v| self.read[v.0] && !self.leaves[v.0]) {
                        all.insert(Candidate { kind, node: position, output }, v);
                    }
                }
            }
        }
        all
    }

    /// The first layer of each kind.
    pub(crate) fn representatives(&self) -> impl Iterator<Item = (usize, usize)> {
        let kinds = self.kind_of.iter().max().map_or(0, |k| k + 1);
        (0..kinds).filter_map(|kind| Some((kind, self.kind_of.iter().position(|k| *k == kind)?)))
    }

    /// Names of the ops whose outputs some layer may recompute.
    pub(crate) fn ops(&self, graph: &Graph) -> BTreeSet<&'static str> {
        let name = |v: &ValueId| self.made[v.0].map(|n| graph.nodes[n].op.name());
        self.candidates(graph).values().filter_map(name).collect()
    }

    /// Whether a value leaves its layer, or backward reads it.
    pub(crate) fn is_wanted(&self, v: ValueId) -> (bool, bool) {
        (self.leaves[v.0], self.read[v.0])
    }
}

/// What layers of one kind have in common.
fn signature(graph: &Graph, nodes: &[usize]) -> String {
    let node = |n: &usize| {
        let node = &graph.nodes[*n];
        let types: Vec<String> = graph.input_types(node).iter().map(ToString::to_string).collect();
        let wanted: Vec<bool> = node.outputs.iter().map(Option::is_some).collect();
        let mut op = node.op;
        if let Op::Dropout { site, .. } = &mut op {
            // Masks differ, what is computed does not.
            *site = 0;
        }
        format!("{op:?} {types:?} {wanted:?};")
    };
    nodes.iter().map(node).collect()
}

/// How a node is recomputed.
pub(crate) struct Recomputation {
    pub op: Op,
    pub inputs: Vec<ValueId>,
    pub outputs: Vec<Option<ValueId>>,
}

/// The node itself; a norm whose sum is saved starts from the sum.
pub(crate) fn recomputation(node: &Node, saved: &dyn Fn(ValueId) -> bool) -> Recomputation {
    let (inputs, outputs) = (&node.inputs[..], &node.outputs[..]);
    if let (Op::Norm { norm, residual: true, eps }, [_, _, vectors @ ..], [Some(sum), normed @ ..]) =
        (node.op, inputs, outputs)
        && saved(*sum)
    {
        let op = Op::Norm { norm, residual: false, eps };
        return Recomputation { op, inputs: [&[*sum], vectors].concat(), outputs: normed.to_vec() };
    }
    Recomputation { op: node.op, inputs: inputs.to_vec(), outputs: outputs.to_vec() }
}
