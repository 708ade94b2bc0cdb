//! Recompute: gives up forward values that backward reads, and computes them again where backward needs them.
//!
//! What a layer keeps is its keep-set; the stream that enters it is always kept. A value that is not kept is computed again right
//! before the first node that reads it, from kept values, by the same ops: losses and gradients have the same bits under every
//! policy. Values of `every = k` layers are given up together, and a block never crosses two pipeline stages.

use super::fuse;
use crate::Context;
use crate::stage;
use lockstep_ir::graph::{Node, Phase, Source, Value};
use lockstep_ir::{Graph, TypeError, ValueId};
use std::collections::BTreeMap;

/// What is computed again in backward.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing: everything that backward reads is kept.
    #[default]
    None,
    /// What the op table calls cheap: norms and activation functions, which cost no matrix product, and the weights of naive
    /// attention, which cost one and are large.
    Selective,
    /// All of a layer but what enters it.
    Full,
    /// All of so many layers but what enters the first.
    Every(usize),
    /// As `Every`, with the square root of the number of layers.
    Sqrt,
}

pub(super) fn recompute(graph: &Graph, context: &Context) -> Result<Graph, TypeError> {
    let layers = graph.nodes.iter().filter_map(|n| n.layer).max().map_or(0, |l| l + 1);
    let block = match context.recompute {
        Recompute::None => return Ok(graph.clone()),
        Recompute::Selective | Recompute::Full => 1,
        Recompute::Every(k) => k.max(1),
        Recompute::Sqrt => ((layers as f64).sqrt().round() as usize).max(1),
    };
    // A block ends where a stage does.
    let cuts = stage::cut(graph, context.layout.mesh.pp)?;
    let mut block_of = Vec::new();
    let (mut count, mut first) = (0, 0);
    for layer in 0..layers {
        if layer > 0 && (layer - first >= block || cuts.contains(&layer)) {
            (count, first) = (count + 1, layer);
        }
        block_of.push(count);
    }
    let selective = context.recompute == Recompute::Selective;
    let mut again = Again { made: BTreeMap::new(), copies: BTreeMap::new(), block_of, selective };
    for (n, node) in graph.nodes.iter().enumerate().filter(|(_, n)| n.phase == Phase::Forward) {
        node.outputs.iter().flatten().for_each(|v| {
            again.made.insert(*v, n);
        });
    }
    let mut g = graph.clone();
    g.nodes.clear();
    for node in &graph.nodes {
        let mut node = node.clone();
        if node.phase != Phase::Forward && node.layer.is_some() {
            for v in &mut node.inputs {
                *v = again.value(graph, &mut g, *v, node.layer)?;
            }
        }
        g.nodes.push(node);
    }
    Ok(g.without_dead_code())
}

struct Again {
    /// The forward node that makes a value.
    made: BTreeMap<ValueId, usize>,
    /// Values that have been computed again.
    copies: BTreeMap<ValueId, ValueId>,
    block_of: Vec<usize>,
    selective: bool,
}

impl Again {
    /// The value to read in backward: itself if it is kept, else a copy that is computed here if it has not been before.
    fn value(&mut self, graph: &Graph, g: &mut Graph, v: ValueId, reader: Option<usize>) -> Result<ValueId, TypeError> {
        if let Some(copy) = self.copies.get(&v) {
            return Ok(*copy);
        }
        let Some(&n) = self.made.get(&v) else { return Ok(v) };
        let node = &graph.nodes[n];
        let (Some(layer), Some(reader)) = (node.layer, reader) else { return Ok(v) };
        if self.block_of[layer] != self.block_of[reader] || self.keeps(graph, node, v) {
            return Ok(v);
        }
        // A norm whose sum is kept starts from the sum.
        let (op, inputs, outputs) = match (fuse::not_adding(node.op), &node.inputs[..], &node.outputs[..]) {
            (Some(norm), [_, _, vectors @ ..], [Some(sum), normed @ ..]) if self.keeps(graph, node, *sum) => {
                (norm, [&[*sum], vectors].concat(), normed.to_vec())
            }
            (_, inputs, outputs) => (node.op, inputs.to_vec(), outputs.to_vec()),
        };
        let mut reads = Vec::new();
        for x in inputs {
            reads.push(self.value(graph, g, x, Some(layer))?);
        }
        let mut copies = Vec::new();
        for output in outputs {
            copies.push(output.map(|v| {
                let value = graph.get(v);
                let name = format!("{}.again", value.name);
                g.values.push(Value { name, source: Source::Node { into: None }, ..value.clone() });
                let copy = ValueId(g.values.len() - 1);
                self.copies.insert(v, copy);
                copy
            }));
        }
        g.nodes.push(Node { op, inputs: reads, outputs: copies, phase: Phase::InputGrad, layer: Some(layer) });
        Ok(self.copies.get(&v).copied().unwrap_or(v))
    }

    /// Whether a layer keeps a value that it makes.
    fn keeps(&self, graph: &Graph, node: &Node, v: ValueId) -> bool {
        let cheap = |o: usize| node.op.spec().cheap.contains(&o);
        let given_up = !self.selective || node.outputs.iter().position(|o| *o == Some(v)).is_some_and(cheap);
        // What leaves the block is what enters the next.
        !given_up || self.leaves(graph, node, v)
    }

    /// Whether a forward node of another block reads a value.
    fn leaves(&self, graph: &Graph, node: &Node, v: ValueId) -> bool {
        let block = node.layer.map(|l| self.block_of[l]);
        let other = |n: &Node| n.phase == Phase::Forward && n.layer.map(|l| self.block_of[l]) != block;
        graph.outputs.contains(&v) || graph.nodes.iter().any(|n| other(n) && n.inputs.contains(&v))
    }
}
