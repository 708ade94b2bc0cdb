//! Experts: where ranks have parts of the experts (expert parallelism), rows of tokens go to the rank of their expert, and what it gives
//! comes back.
//!
//! A token's matmul by its experts becomes a matmul of [blocks of rows](Blocks), one block for each part of the experts. The sweep of
//! `shard` splits rows by tokens before it and by experts in it, which makes two all-to-alls, and two more in backward. What stands
//! between two such matmuls works on blocks too. Rows are sent as soon as they have experts and taken when they are needed, so
//! that whatever stands between (shared experts) is computed meanwhile.
//!
//! Autodiff and recomputation see ordinary ops.

use crate::Context;
use lockstep_ir::graph::Node;
use lockstep_ir::op::Blocks;
use lockstep_ir::{Axes, Axis, Graph, MeshAxis, Op, TensorType, TypeError, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// Rows of a block are a multiple of this: context-parallel ranks have two equal halves of what they share.
const ROWS: usize = 8;

/// Outputs whose names begin so are of every sequence the rows that found no place in a block: a step that has any changes nothing.
pub const ROWS_BEYOND: &str = "rows_beyond";

/// The dimension that counts experts, of a matrix of every expert or of the biases of its hidden units: of what a rank of the expert works with.
/// Routers, and biases of what experts give, are where tokens are.
pub(super) fn stacked(ty: &TensorType) -> Option<usize> {
    let axis = |dim: usize| ty.dims.get(dim).map(|dim| dim.sections[0].axis);
    let hidden = ty.dims.len() == 3 || axis(1) == Some(Axis::Ffn);
    (axis(0) == Some(Axis::Experts) && hidden).then_some(0)
}

pub(super) fn experts(graph: &Graph, context: &Context) -> Result<Graph, TypeError> {
    let mut g = graph.clone();
    if context.layout.mesh.size(MeshAxis::Ep) == 1 {
        return Ok(g);
    }
    let nodes = std::mem::take(&mut g.nodes);
    let mut rewrite = Rewrite {
        context,
        senders: senders(&nodes),
        places: BTreeMap::new(),
        sent: BTreeMap::new(),
        taken: Vec::new(),
        blocks: BTreeMap::new(),
        combined: combined(&nodes),
    };
    for (at, node) in nodes.into_iter().enumerate() {
        rewrite.node(&mut g, node)?;
        for sender in rewrite.senders.remove(&at).unwrap_or_default() {
            rewrite.send(&mut g, &sender)?;
        }
    }
    rewrite.taken.drain(..).for_each(|node| g.nodes.push(node));
    Ok(g)
}

/// Matmuls of rows that experts are chosen for, by the node after which there is both: the rows, and the choice.
fn senders(nodes: &[Node]) -> BTreeMap<usize, Vec<Node>> {
    let made = |v: &ValueId| nodes.iter().position(|node| node.outputs.contains(&Some(*v)));
    let mut senders: BTreeMap<usize, Vec<Node>> = BTreeMap::new();
    for node in nodes.iter().filter(|node| node.op == Op::GroupedLinear { each: false }) {
        if let Some(at) = made(&node.inputs[0]).max(made(&node.inputs[2])) {
            senders.entry(at).or_default().push(node.clone());
        }
    }
    senders
}

/// Values whose rows are added up by token, at once or with a bias first.
fn combined(nodes: &[Node]) -> BTreeSet<ValueId> {
    let read = |node: &Node| matches!(node.op, Op::Combine { .. }).then(|| node.inputs[0]);
    let mut combined: BTreeSet<ValueId> = nodes.iter().filter_map(read).collect();
    for node in nodes.iter().filter(|node| matches!(node.op, Op::GroupedBias { .. })) {
        if node.outputs[0].is_some_and(|y| combined.contains(&y)) {
            combined.insert(node.inputs[0]);
        }
    }
    combined
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
    senders: BTreeMap<usize, Vec<Node>>,
    /// By what was chosen.
    places: BTreeMap<ValueId, Places>,
    /// Rows in blocks, by what they were and by what was chosen.
    sent: BTreeMap<(ValueId, ValueId), ValueId>,
    /// What takes rows from blocks, until it is needed.
    taken: Vec<Node>,
    /// Values that are blocks of rows now, with what was chosen.
    blocks: BTreeMap<ValueId, ValueId>,
    /// Values whose rows are added up by token, at once or with a bias first.
    combined: BTreeSet<ValueId>,
}

impl Rewrite<'_> {
    fn node(&mut self, g: &mut Graph, node: Node) -> Result<(), TypeError> {
        let (phase, layer) = (node.phase, node.layer);
        let needed = |taken: &mut Node| taken.outputs.iter().any(|y| y.is_some_and(|y| node.inputs.contains(&y)));
        g.nodes.extend(self.taken.extract_if(.., needed));
        if let (Op::GroupedLinear { each: false }, &[_, w, chosen], &[Some(y)]) =
            (node.op, &node.inputs[..], &node.outputs[..])
        {
            let Places { owners, blocks, .. } = self.places(g, &node, chosen, w)?;
            let rows = self.send(g, &node)?;
            let matmul = Node { op: Op::RowsLinear { blocks }, inputs: vec![rows, w, owners], ..node };
            return self.push(g, matmul, &[(y, chosen)]);
        }
        if let (Op::GroupedLinear { each: true }, &[x, w, chosen], &[Some(y)]) =
            (node.op, &node.inputs[..], &node.outputs[..])
        {
            let Places { slots, owners, blocks } = self.places(g, &node, chosen, w)?;
            if !self.combined.contains(&y) {
                let matmul = Node { op: Op::RowsLinear { blocks }, inputs: vec![x, w, owners], ..node };
                return self.push(g, matmul, &[(y, chosen)]);
            }
            let name = format!("{}.rows", g.get(y).name);
            let rows = g.node(Op::RowsLinear { blocks }, &[x, w, owners], &name, phase, layer)?[0];
            self.taken.push(Node { op: Op::TakeRows { blocks }, inputs: vec![rows, slots], ..node });
            return Ok(());
        }
        let Some(chosen) = node.inputs.iter().find_map(|v| self.blocks.get(v)).copied() else {
            return self.push(g, node, &[]);
        };
        if let (Op::Combine { .. }, Some(Places { slots, blocks, .. })) = (node.op, self.places.get(&chosen).copied()) {
            let mut node = node;
            let name = format!("{}.taken", g.get(node.inputs[0]).name);
            node.inputs[0] = g.node(Op::TakeRows { blocks }, &[node.inputs[0], slots], &name, phase, layer)?[0];
            return self.push(g, node, &[]);
        }
        let made: Vec<_> = node.outputs.iter().flatten().map(|y| (*y, chosen)).collect();
        if let (Op::GroupedBias { rows: false }, &[x, bias, chosen]) = (node.op, &node.inputs[..])
            && let Some(Places { owners, .. }) = self.places.get(&chosen).copied()
        {
            let node = Node { op: Op::GroupedBias { rows: true }, inputs: vec![x, bias, owners], ..node };
            return self.push(g, node, &made);
        }
        self.push(g, node, &made)
    }

    /// The rows of a matmul in blocks.
    fn send(&mut self, g: &mut Graph, node: &Node) -> Result<ValueId, TypeError> {
        let (x, w, chosen) = (node.inputs[0], node.inputs[1], node.inputs[2]);
        if let Some(rows) = self.sent.get(&(x, chosen)) {
            return Ok(*rows);
        }
        let Places { slots, blocks, .. } = self.places(g, node, chosen, w)?;
        let name = format!("{}.rows", g.get(x).name);
        let rows = g.node(Op::SendRows { each: false, blocks }, &[x, slots], &name, node.phase, node.layer)?[0];
        self.sent.insert((x, chosen), rows);
        Ok(rows)
    }

    /// Adds a node some of whose outputs are blocks now.
    fn push(&mut self, g: &mut Graph, node: Node, made: &[(ValueId, ValueId)]) -> Result<(), TypeError> {
        if !made.is_empty() {
            let types = node.op.infer(&g.input_types(&node))?;
            for (y, ty) in node.outputs.iter().zip(types).filter_map(|(y, ty)| Some(((*y)?, ty))) {
                g.values[y.0].ty = ty;
            }
        }
        self.blocks.extend(made.iter().copied());
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

#[cfg(test)]
mod tests {
    use crate::Context;
    use crate::passes::TRAINING_PASSES;
    use crate::passes::tests::{lines, small_model};
    use crate::settings::{Fp8, Precision};
    use lockstep_ir::graph::{Loss, Node, Parameter, State};
    use lockstep_ir::op::Routing;
    use lockstep_ir::{Axis, DType, Dim, Graph, Init, Layout, Op, TensorType};

    fn sharded(layout: &str) -> Graph {
        sharded_with(layout, false)
    }

    /// One layer of four experts between an embedding and a head, with an expert that all tokens share or without, after the passes
    /// up to ZeRO.
    fn sharded_with(layout: &str, shared: bool) -> Graph {
        sharded_in(layout, shared, (2, 6), Precision::FP32)
    }

    fn sharded_in(layout: &str, shared: bool, (embed, ffn): (usize, usize), precision: Precision) -> Graph {
        let mut g = Graph::new();
        let (embed, ffn, experts) =
            (Dim::new(Axis::Embed, embed), Dim::new(Axis::Ffn, ffn), Dim::new(Axis::Experts, 4));
        let vocab = Dim::new(Axis::Vocab, 8);
        let ids = TensorType::new(DType::U32, [Dim::new(Axis::Batch, 4), Dim::new(Axis::Seq, 4)]);
        let (tokens, targets) = (g.input("tokens", ids.clone()), g.input("targets", ids));
        let mut parameter = |name: &str, dims: Vec<Dim>| {
            let parameter = Parameter { exact: name == "router", ..Parameter::new(Init::Ones, vec![name.to_owned()]) };
            g.state(name, TensorType::new(DType::F32, dims), State::Parameter(parameter))
        };
        let table = parameter("table", vec![vocab, embed.clone()]);
        let router = parameter("router", vec![experts.clone(), embed.clone()]);
        let up = parameter("up", vec![experts.clone(), ffn.clone(), embed.clone()]);
        let down = parameter("down", vec![experts, embed.clone(), ffn.clone()]);
        let always = shared
            .then(|| (parameter("wide", vec![ffn.clone(), embed.clone()]), parameter("narrow", vec![embed, ffn])));
        let x = g.op(Op::Embedding, &[tokens, table], "x").unwrap()[0];
        g.enter_layer(Some(0));
        let mut op = |op, inputs: &[_], name| g.op(op, inputs, name).unwrap();
        let exact = op(Op::Cast { to: DType::F32 }, &[x], "exact")[0];
        let logits = op(Op::Linear, &[exact, router], "logits")[0];
        let routed = op(Op::Route { given: false, how: Routing::top(2) }, &[logits], "routed");
        let wide = always.map(|(w, _)| op(Op::Linear, &[x, w], "shared_hidden")[0]);
        let hidden = op(Op::GroupedLinear { each: false }, &[x, up, routed[1]], "hidden")[0];
        let hidden = op(Op::Gelu, &[hidden], "gelu")[0];
        let y = op(Op::GroupedLinear { each: true }, &[hidden, down, routed[1]], "y")[0];
        let always = always.zip(wide).map(|((_, w), wide)| op(Op::Linear, &[wide, w], "shared_out")[0]);
        let mut out = op(Op::Combine { weighted: true }, &[y, routed[0]], "out")[0];
        if let Some(always) = always {
            out = op(Op::Add, &[out, always], "both")[0];
        }
        g.enter_layer(None);
        let mut op = |op, inputs: &[_], name| g.op(op, inputs, name).unwrap();
        let scores = op(Op::Linear, &[out, table], "scores")[0];
        let loss = op(Op::CrossEntropy, &[scores, targets], "loss")[0];
        g.outputs.push(loss);
        g.losses.push(Loss { value: loss, weight: 1.0 });
        let layout: Layout = layout.parse().unwrap();
        let context = Context { layout, precision, ..small_model().1 };
        let passes = TRAINING_PASSES.iter().filter(|pass| !["fuse", "optimizer"].contains(&pass.name));
        passes.fold(g, |g, pass| (pass.run)(&g, &context).unwrap())
    }

    #[test]
    fn rows_go_to_their_experts_and_back_once_in_either_direction() {
        assert_eq!(
            lines(&sharded("ep=2"), &[" = all_to_all"], false).trim_start(),
            "\
 @(ep: split 0) = all_to_all(routed.chosen.slots.owners) { over: ep, from: 1, to: 0 }
F x.rows.sent @(ep: split 0) = all_to_all(x.rows) { over: ep, from: 1, to: 0 }
F y.rows.sent @(ep: split 1) = all_to_all(y.rows) { over: ep, from: 0, to: 1 }
B d.y.rows.sent @(ep: split 0) = all_to_all(d.y.rows) { over: ep, from: 1, to: 0 }
B d.x.rows.sent @(ep: split 1) = all_to_all(d.x.rows) { over: ep, from: 0, to: 1 }
"
        );
        assert!(lines(&sharded("dp=2"), &["all_to_all", "rows"], false).is_empty());
    }

    #[test]
    fn in_fp8_rows_travel_as_bytes_of_a_unit_that_all_ranks_agree_on() {
        let fp8 = Precision { fp8: Some(Fp8::default()), ..Precision::of(DType::BF16, DType::F32) };
        let text = lines(&sharded_in("ep=2", false, (128, 256), fp8), &[" = all_to_all", "blocks_amax"], true);
        let sent: Vec<&str> = text.lines().filter(|line| line.contains("all_to_all")).collect();
        for (line, what) in
            sent[1..].iter().zip(["F x.rows.fp8.sent: e4m3", "F y.rows.sent: bf16", "d.y.rows.fp8.sent: e5m2"])
        {
            assert!(line.contains(what), "{text}");
        }
        // Of what comes from tokens every rank gives its largest magnitude; hidden units are their expert's alone.
        assert!(text.contains("x.rows.amax: f32[scalar:2] @(ep: split 0)"), "{text}");
        assert!(text.contains("gelu.amax: f32[scalar:2] = blocks_amax"), "{text}");
    }

    #[test]
    fn rows_travel_while_shared_experts_work() {
        let g = sharded_with("ep=2", true);
        let mut meanwhile = Vec::new();
        for (at, node) in g.nodes.iter().enumerate().filter(|(_, node)| matches!(node.op, Op::AllToAll { .. })) {
            let reads = |other: &Node| other.inputs.iter().any(|v| node.outputs.contains(&Some(*v)));
            let until = g.nodes[at..].iter().position(reads).map_or(g.nodes.len(), |n| at + n);
            let made =
                g.nodes[at + 1..until].iter().filter(|node| node.op == Op::Linear || node.op == Op::LinearGradInput);
            meanwhile.push(made.map(|node| node.op.name()).collect::<Vec<_>>());
        }
        assert_eq!(
            meanwhile,
            [vec!["linear"], vec!["linear"], vec!["linear"], vec!["linear_grad_input"], vec!["linear_grad_input"]]
        );
    }

    #[test]
    fn what_is_of_experts_is_reduced_over_other_data_parallel_ranks_alone() {
        let reduced = |layout: &str| lines(&sharded(layout), &["R grad"], false);
        assert_eq!(
            reduced("dp=2,ep=2"),
            "\
R grad.down.summed @(ep: split 0), grad.up.summed @(ep: split 0) = all_reduce(grad.down, grad.up) { over: dp }
R grad.router.summed = all_reduce(grad.router) { over: dp×ep }
"
        );
        // Nobody else has them.
        assert!(!reduced("ep=2,zero=1").contains("grad.up"));
        let scattered = lines(&sharded("dp=2,zero=2,ep=2"), &["= reduce_scatter"], false);
        assert!(scattered.contains("(grad.down.here, grad.up.here) { over: dp, dim: None }"), "{scattered}");
        assert!(!lines(&sharded("ep=2,zero=3"), &["= all_gather"], false).contains("up"));
    }

    #[test]
    fn with_a_bound_blocks_are_smaller_and_what_is_beyond_it_is_told() {
        let slots = |layout: &str| lines(&sharded(layout), &[" = expert_slots", "return"], false);
        assert!(slots("ep=2").contains("rows: 16, choices: 16, ranks: 2"));
        assert!(!slots("ep=2").contains("rows_beyond"));
        let bound = slots("ep=2,bound=1");
        assert!(bound.contains("rows: 8, choices: 16, ranks: 2"), "{bound}");
        assert!(bound.contains("return    loss, rows_beyond.routed.chosen"), "{bound}");
    }
}
