//! Experts: where ranks have parts of the experts (expert parallelism), rows of tokens go to the rank of their expert, and what it gives
//! comes back.
//!
//! A token's matmul by its experts becomes a matmul of [blocks of rows](Blocks), one block for each part of the experts. The sweep of
//! `shard` splits rows by tokens before it and by experts in it, which makes two all-to-alls, and two more in backward. What stands
//! between two such matmuls works on blocks too.

use crate::Context;
use lockstep_ir::graph::Node;
use lockstep_ir::op::Blocks;
use lockstep_ir::{Axes, Axis, Graph, MeshAxis, Op, TensorType, TypeError, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// Rows of a block are a multiple of this: context-parallel ranks have two equal halves of what they share.
const ROWS: usize = 8;

/// Outputs whose names begin so are of every sequence the rows that found no place in a block: a step that has any changes nothing.
pub const ROWS_BEYOND: &str = "rows_beyond";

/// The dimension of a matrix of every expert that counts these.
pub(super) fn stacked(ty: &TensorType) -> Option<usize> {
    (ty.dims.len() == 3 && ty.dims[0].sections[0].axis == Axis::Experts).then_some(0)
}

pub(super) fn experts(graph: &Graph, context: &Context) -> Result<Graph, TypeError> {
    let mut g = graph.clone();
    if context.layout.mesh.size(MeshAxis::Ep) == 1 {
        return Ok(g);
    }
    let nodes = std::mem::take(&mut g.nodes);
    let mut rewrite = Rewrite { context, places: BTreeMap::new(), blocks: BTreeSet::new() };
    for node in nodes {
        rewrite.node(&mut g, node)?;
    }
    Ok(g)
}

/// Where the rows of a choice go.
#[derive(Clone, Copy)]
struct Places {
    slots: ValueId,
    owners: ValueId,
    blocks: Blocks,
}

struct Rewrite<'a> {
    context: &'a Context,
    /// By what was chosen.
    places: BTreeMap<ValueId, Places>,
    /// Values that are blocks of rows now.
    blocks: BTreeSet<ValueId>,
}

impl Rewrite<'_> {
    fn node(&mut self, g: &mut Graph, node: Node) -> Result<(), TypeError> {
        let (phase, layer) = (node.phase, node.layer);
        if let (Op::GroupedLinear, &[x, w, chosen], &[Some(y)]) = (node.op, &node.inputs[..], &node.outputs[..]) {
            let Places { slots, owners, blocks } = self.places(g, &node, chosen, w)?;
            let name = format!("{}.rows", g.get(x).name);
            let rows = g.node(Op::SendRows { blocks }, &[x, slots], &name, phase, layer)?[0];
            let matmul = Node { op: Op::RowsLinear { blocks }, inputs: vec![rows, w, owners], ..node };
            return self.push(g, matmul, &[y]);
        }
        if let (Op::GroupedLinearEach, &[x, w, chosen], &[Some(y)]) = (node.op, &node.inputs[..], &node.outputs[..]) {
            let Places { slots, owners, blocks } = self.places(g, &node, chosen, w)?;
            let name = format!("{}.rows", g.get(y).name);
            let rows = g.node(Op::RowsLinear { blocks }, &[x, w, owners], &name, phase, layer)?[0];
            g.nodes.push(Node { op: Op::TakeRows { blocks }, inputs: vec![rows, slots], ..node });
            return Ok(());
        }
        let changed = node.inputs.iter().any(|v| self.blocks.contains(v));
        let made: Vec<ValueId> = node.outputs.iter().flatten().copied().filter(|_| changed).collect();
        self.push(g, node, &made)
    }

    /// Adds a node some of whose outputs are blocks now.
    fn push(&mut self, g: &mut Graph, node: Node, made: &[ValueId]) -> Result<(), TypeError> {
        if !made.is_empty() {
            let types = node.op.infer(&g.input_types(&node))?;
            for (y, ty) in node.outputs.iter().zip(types).filter_map(|(y, ty)| Some(((*y)?, ty))) {
                g.values[y.0].ty = ty;
            }
        }
        self.blocks.extend(made);
        g.nodes.push(node);
        Ok(())
    }

    fn places(&mut self, g: &mut Graph, node: &Node, chosen: ValueId, w: ValueId) -> Result<Places, TypeError> {
        if let Some(known) = self.places.get(&chosen) {
            return Ok(*known);
        }
        let mesh = self.context.layout.mesh;
        let (parts, ranks) = (mesh.size(MeshAxis::Ep), mesh.size(Axes::TOKENS));
        let choices = g.ty(chosen).elements() / ranks;
        // All of a rank may go to one part.
        let even = |percent: usize| (choices * percent).div_ceil(100 * parts).min(choices);
        let most = self.context.layout.expert_bound.map_or(choices, even);
        let blocks = Blocks { parts, rows: most.next_multiple_of(ROWS), choices, ranks };
        let op = Op::ExpertSlots { experts: g.ty(w).dims[0].size(), blocks };
        let name = format!("{}.slots", g.get(chosen).name);
        let made = g.node(op, &[chosen], &name, node.phase, node.layer)?;
        if blocks.rows < choices {
            g.values[made[2].0].name = format!("{ROWS_BEYOND}.{}", g.get(chosen).name);
            g.outputs.push(made[2]);
        }
        let places = Places { slots: made[0], owners: made[1], blocks };
        self.places.insert(chosen, places);
        Ok(places)
    }
}
