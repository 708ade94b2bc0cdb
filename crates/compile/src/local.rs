//! A graph as one rank of a stage sees it: local shapes, padded buffers, views.

use crate::Context;
use lockstep_ir::graph::{Node, Source};
use lockstep_ir::op::Transfer;
use lockstep_ir::program::Offsets;
use lockstep_ir::{Axes, Graph, Mesh, MeshAxis, Op, Placement, Sharding, TensorType, ValueId};

pub(crate) struct Local<'a> {
    pub(crate) graph: &'a Graph,
    mesh: Mesh,
    /// Buffers that hold the flat ranges of all ranks along these axes, with their padding.
    padded: Vec<Axes>,
    /// Views: this rank's range of another value.
    range_of: Vec<Option<(ValueId, Axes)>>,
    /// Values that live in this rank's range of a state.
    in_range: Vec<Axes>,
    here: Vec<bool>,
}

impl<'a> Local<'a> {
    pub(crate) fn new(graph: &'a Graph, context: &Context) -> Self {
        let mesh = context.layout.mesh;
        let count = graph.values.len();
        let (mut padded, mut in_range) = (vec![Axes::NONE; count], vec![Axes::NONE; count]);
        let mut range_of = vec![None; count];
        let mut here = vec![mesh.size(MeshAxis::Pp) == 1; count];
        for node in &graph.nodes {
            match node.op.transfer() {
                Some(Transfer::AllGather { over, dim: None }) => {
                    node.outputs.iter().flatten().for_each(|v| padded[v.0] = over);
                }
                Some(Transfer::ReduceScatter { over, dim: None }) => {
                    node.inputs.iter().for_each(|v| padded[v.0] = over);
                }
                // Others have no flat ranges.
                Some(_) | None => {}
            }
            if let Op::Shard { over } = node.op {
                padded[node.inputs[0].0] = over;
                node.outputs.iter().flatten().for_each(|v| range_of[v.0] = Some((node.inputs[0], over)));
            }
            for v in node.inputs.iter().chain(node.outputs.iter().flatten()) {
                here[v.0] = true;
                if let Source::Node { into: Some(state) } = graph.get(*v).source {
                    here[state.0] = true;
                }
            }
        }
        for (state, value) in &graph.parts {
            let over = graph.get(*value).sharding.axes(Placement::Flat);
            padded[state.0] = over;
            in_range[value.0] = over;
        }
        // What lives in one buffer is padded alike.
        for node in graph.nodes.iter().rev().filter(|n| n.op.spec().each() && !n.op.spec().in_place.is_empty()) {
            for (x, y) in node.inputs.iter().zip(&node.outputs) {
                padded[x.0] = padded[x.0].and(y.map_or(Axes::NONE, |y| padded[y.0]));
            }
        }
        for (state, value) in &graph.updates {
            let any = padded[state.0].and(padded[value.0]);
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

    /// Sharding of what is there: of a sum, for what is added to it.
    pub(crate) fn sharding(&self, v: ValueId) -> Sharding {
        let value = self.graph.get(v);
        match value.source {
            Source::Node { into: Some(sum) } => self.sharding(sum),
            Source::Node { into: None } | Source::Input | Source::State(_) | Source::Sum => value.sharding,
        }
    }

    /// Bytes of the buffer that holds a value.
    pub(crate) fn bytes(&self, v: ValueId) -> u64 {
        let value = self.graph.get(v);
        let over = self.padded[v.0];
        if over.is_empty() || !value.sharding.axes(Placement::Flat).is_empty() {
            return self.ty(v).bytes();
        }
        let range = value.sharding.with(over, Placement::Flat);
        range.local(&value.ty, &self.mesh).bytes() * self.mesh.size(over) as u64
    }

    /// The value whose buffer is meant, and where only this rank's range of it is, over which axes.
    pub(crate) fn meant(&self, v: ValueId) -> (ValueId, Axes) {
        if let Some(range) = self.range_of[v.0] {
            return range;
        }
        match self.graph.get(v).source {
            Source::Node { into: Some(sum) } => (sum, Axes::NONE),
            _ => (v, self.in_range[v.0]),
        }
    }

    /// A node's op with the attributes of this rank.
    pub(crate) fn op(&self, node: &Node) -> Op {
        let outputs: Vec<Option<TensorType>> = node.outputs.iter().map(|v| v.map(|v| self.ty(v))).collect();
        (node.op.spec().local)(&node.op, &outputs)
    }

    /// Where the parts of ranks start, for an op that must know.
    pub(crate) fn offsets(&self, node: &Node) -> Option<Offsets> {
        self.starts(node, node.op.numbered(node.inputs.len())?)
    }

    /// The same of the second dimension that it numbers.
    pub(crate) fn counted(&self, node: &Node) -> Option<Offsets> {
        self.starts(node, node.op.counted(node.inputs.len())?)
    }

    fn starts(&self, node: &Node, (input, at, dim): (bool, usize, usize)) -> Option<Offsets> {
        let v = if input { node.inputs[at] } else { node.outputs[at]? };
        Offsets::new(self.graph.ty(v), &self.sharding(v), dim, &self.mesh)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::TRAINING_PASSES;
    use crate::passes::tests::derived;
    use lockstep_ir::Layout;
    use std::fmt::Write;

    /// Every value of the update as a rank has it: shape, bytes of its buffer, and whose buffer that is.
    fn local(layout: Layout, names: &[&str]) -> String {
        let (before, context) = derived(layout, 4);
        let rest = TRAINING_PASSES.iter().skip_while(|pass| pass.name != "shard");
        let g = rest.fold(before, |g, pass| (pass.run)(&g, &context).unwrap());
        let local = Local::new(&g, &context);
        let mut text = String::new();
        for (i, value) in g.values.iter().enumerate().filter(|(_, value)| names.contains(&value.name.as_str())) {
            let v = ValueId(i);
            let (meant, part) = local.meant(v);
            let (name, bytes) = (&value.name, local.bytes(v));
            writeln!(text, "{name}: {}, {bytes} bytes in {} over {part:?}", local.ty(v), g.get(meant).name).unwrap();
        }
        text
    }

    #[test]
    fn a_whole_that_ranges_are_cut_from_has_room_for_all_of_them() {
        let names = ["table", "grad.table", "m.table", "table.range", "table.next", "table.next.whole"];
        assert_eq!(
            local("dp=2".parse().unwrap(), &names),
            "\
table: f32[vocab:8, embed:2], 64 bytes in table over none
grad.table: f32[vocab:8, embed:2], 64 bytes in grad.table over none
m.table: f32[vocab:8, embed:2], 64 bytes in m.table over none
table.next: f32[vocab:8, embed:2], 64 bytes in table.next over none
"
        );
        assert_eq!(
            local("dp=2,zero=1".parse().unwrap(), &names),
            "\
table: f32[vocab:8, embed:2], 512 bytes in table over none
grad.table: f32[vocab:8, embed:2], 512 bytes in grad.table over none
m.table: f32[flat:64], 256 bytes in m.table over none
table.range: f32[flat:64], 256 bytes in table over dp
table.next: f32[flat:64], 256 bytes in table.next over dp
table.next.whole: f32[vocab:8, embed:2], 512 bytes in table.next.whole over none
"
        );
        assert_eq!(
            local("dp=2,zero=3".parse().unwrap(), &names),
            "\
table: f32[flat:64], 256 bytes in table over none
grad.table: f32[flat:64], 256 bytes in grad.table over none
m.table: f32[flat:64], 256 bytes in m.table over none
table.next: f32[flat:64], 256 bytes in table.next over none
"
        );
    }

    #[test]
    fn ops_over_parts_know_where_they_start() {
        let (before, context) = derived("dp=2,tp=2".parse().unwrap(), 4);
        let rest = TRAINING_PASSES.iter().skip_while(|pass| pass.name != "shard");
        let g = rest.fold(before, |g, pass| (pass.run)(&g, &context).unwrap());
        let local = Local::new(&g, &context);
        let numbered = g.nodes.iter().filter_map(|node| Some((node.op.name(), local.offsets(node)?)));
        for (op, offsets) in numbered {
            assert_eq!(
                format!("{:?} {:?} of {}", offsets.over, offsets.parts, offsets.whole),
                "tp [0, 4] of 8",
                "{op}"
            );
        }
        let rows = g.nodes.iter().find_map(|node| match local.op(node) {
            Op::VocabLogits { rows, parts } => Some((rows.count, rows.ranks, parts)),
            _ => None,
        });
        assert_eq!(rows, Some((8, 1, 1)));
    }
}
