//! A graph as one rank of a stage sees it: local shapes, padded buffers, views.

use crate::Context;
use lockstep_ir::Mesh;
use lockstep_ir::graph::{Node, Source};
use lockstep_ir::op::Rows;
use lockstep_ir::{Graph, Op, Placement, Sharding, TensorType, ValueId};

pub(crate) struct Local<'a> {
    pub(crate) graph: &'a Graph,
    mesh: Mesh,
    /// Buffers that hold flat ranges of all data-parallel ranks, with their padding.
    padded: Vec<bool>,
    /// Views: this rank's range of another value.
    range_of: Vec<Option<ValueId>>,
    /// Values that live in this rank's range of a state.
    in_range: Vec<bool>,
    here: Vec<bool>,
}

impl<'a> Local<'a> {
    pub(crate) fn new(graph: &'a Graph, context: &Context) -> Self {
        let mesh = context.layout.mesh;
        let count = graph.values.len();
        let (mut padded, mut in_range) = (vec![false; count], vec![false; count]);
        let mut range_of = vec![None; count];
        let mut here = vec![mesh.pp == 1; count];
        for node in &graph.nodes {
            match node.op {
                Op::AllGather { dim: None, .. } => node.outputs.iter().flatten().for_each(|v| padded[v.0] = true),
                Op::ReduceScatter { dim: None, .. } => node.inputs.iter().for_each(|v| padded[v.0] = true),
                Op::Shard { .. } => {
                    padded[node.inputs[0].0] = true;
                    node.outputs.iter().flatten().for_each(|v| range_of[v.0] = Some(node.inputs[0]));
                }
                _ => {}
            }
            for v in node.inputs.iter().chain(node.outputs.iter().flatten()) {
                here[v.0] = true;
                if let Source::Node { into: Some(state) } = graph.get(*v).source {
                    here[state.0] = true;
                }
            }
        }
        for (state, value) in &graph.parts {
            padded[state.0] = true;
            in_range[value.0] = true;
        }
        // What lives in one buffer is padded alike.
        for node in graph.nodes.iter().rev().filter(|n| n.op.spec().each() && !n.op.spec().in_place.is_empty()) {
            for (x, y) in node.inputs.iter().zip(&node.outputs) {
                padded[x.0] |= y.is_some_and(|y| padded[y.0]);
            }
        }
        for (state, value) in &graph.updates {
            let any = padded[state.0] || padded[value.0];
            (padded[state.0], padded[value.0]) = (any, any);
        }
        for i in 0..count {
            if let Source::Node { into: Some(sum) } = graph.values[i].source {
                padded[i] = padded[sum.0];
            }
        }
        Self { graph, mesh, padded, range_of, in_range, here }
    }

    /// Whether this stage has anything to do with a value.
    pub(crate) fn is_here(&self, value: usize) -> bool {
        self.here[value]
    }

    /// Element type and shape on this rank.
    pub(crate) fn ty(&self, v: ValueId) -> TensorType {
        let value = self.graph.get(v);
        match value.source {
            // What is added to a sum has the sum's type.
            Source::Node { into: Some(sum) } => self.ty(sum),
            _ => value.sharding.local(&value.ty, &self.mesh),
        }
    }

    /// Bytes of the buffer that holds a value.
    pub(crate) fn bytes(&self, v: ValueId) -> u64 {
        let value = self.graph.get(v);
        match self.padded[v.0] && value.sharding.dp != Placement::Flat {
            false => self.ty(v).bytes(),
            true => {
                let range = Sharding { dp: Placement::Flat, ..value.sharding };
                range.local(&value.ty, &self.mesh).bytes() * self.mesh.dp as u64
            }
        }
    }

    /// The value whose buffer is meant, and whether only this rank's range of it.
    pub(crate) fn meant(&self, v: ValueId) -> (ValueId, bool) {
        if let Some(whole) = self.range_of[v.0] {
            return (whole, true);
        }
        match self.graph.get(v).source {
            Source::Node { into: Some(sum) } => (sum, false),
            _ => (v, self.in_range[v.0]),
        }
    }

    /// A node's op with the attributes of this rank.
    pub(crate) fn op(&self, node: &Node) -> Op {
        let here = |rows: Rows| Rows { ranks: 1, ..rows };
        match node.op {
            Op::EmbeddingGrad { .. } => match node.outputs[0] {
                Some(table) => Op::EmbeddingGrad { vocab: self.ty(table).dims[0].size() },
                None => node.op,
            },
            Op::VocabLogits { rows, .. } => Op::VocabLogits { rows: here(rows), parts: 1 },
            Op::VocabGrad { rows } => Op::VocabGrad { rows: here(rows) },
            op => op,
        }
    }

    /// Entries of the whole vocabulary, where this rank works on a part.
    pub(crate) fn vocab(&self, node: &Node) -> Option<usize> {
        let table = match node.op {
            Op::Embedding | Op::VocabLogits { .. } => node.inputs[1],
            Op::VocabGrad { .. } => node.inputs[3],
            Op::EmbeddingGrad { .. } => node.outputs[0]?,
            _ => return None,
        };
        let table = match self.graph.get(table).source {
            Source::Node { into: Some(sum) } => self.graph.get(sum),
            _ => self.graph.get(table),
        };
        matches!(table.sharding.tp, Placement::Split(_)).then(|| table.ty.dims[0].size())
    }
}
