//! Shard: gives every value its sharding over the ranks of a stage, and inserts the collectives that follow.
//!
//! One sweep in order. Seeds: inputs are split by sequences, and by positions over context-parallel ranks; a parameter with heads, hidden units or vocabulary entries is
//! split along them; the residual stream is whole on every tensor-parallel rank, or split by positions with sequence
//! parallelism. Everything else follows from the op table: a dimension that is split in one operand is split in all, and a split
//! dimension that an output lacks leaves partial sums, which are reduced at once (activations) or after the last micro-batch
//! (gradients). Where two dimensions would be split over the same ranks, positions give way and are gathered; backward gathers
//! what forward saved split again. Rows that go to experts give way to these: an all-to-all makes parts of the experts of parts of
//! the rows, once for forward and backward.
//!
//! Three things are rewritten first: the chunked output head, since the loss needs statistics of all parts of the vocabulary (`vocab.rs`), norms
//! over all of Q and K, since they need sums over all heads (`whole_norm.rs`), and attention over context-parallel ranks, since queries see
//! keys of other parts of the sequence (`context.rs`).
//!
//! Partial sums are reduced before they are used, so a bias that follows them is added once. The gradient of QK
//! norm is a partial sum over tensor-parallel ranks, which is right as it stands where neighbours share a key head.

use super::{context, experts, vocab, whole_norm};
use crate::Context;
use lockstep_ir::graph::{Node, Phase, Source, State, Value};
use lockstep_ir::op::{Operand, PartialSums, Split};
use lockstep_ir::{Axes, Axis, Dim, Graph, MeshAxis, Op, Placement, Sharding, TensorType, TypeError, ValueId};
use std::collections::BTreeMap;

pub(super) fn shard(graph: &Graph, context: &Context) -> Result<Graph, TypeError> {
    let mesh = context.layout.mesh;
    if mesh.size(Axes::STAGE) == 1 {
        return Ok(graph.clone());
    }
    let mut g = graph.clone();
    let partial = match mesh.size(MeshAxis::Cp) {
        1 => BTreeMap::new(),
        _ => context::split_attention(&mut g, &context.layout)?,
    };
    if mesh.size(MeshAxis::Tp) > 1 {
        vocab::split_head(&mut g, context)?;
        whole_norm::split_norms(&mut g, mesh.size(MeshAxis::Tp))?;
    }
    // Parts that are gathered are of one size: where logits are read whole and the vocabulary does not divide, all ranks have all of it.
    let reads_logits = g.nodes.iter().any(|node| matches!(node.op, Op::Argmax { .. }));
    for value in &mut g.values {
        let uneven = |d: &Dim| d.sections[0].axis == Axis::Vocab && !d.size().is_multiple_of(mesh.size(MeshAxis::Tp));
        let keeps_whole = reads_logits && value.ty.dims.iter().any(uneven);
        value.sharding = if keeps_whole { Sharding::REPLICATED } else { seed(&value.source, &value.ty, context) };
    }
    let nodes = std::mem::take(&mut g.nodes);
    let now = (0..g.values.len()).map(ValueId).collect();
    let mut sweep = Sweep { context, now, gathered: BTreeMap::new(), moved: BTreeMap::new(), partial };
    for node in nodes {
        sweep.node(&mut g, node)?;
    }
    for o in 0..g.outputs.len() {
        let (before, now) = (g.outputs[o], sweep.now[g.outputs[o].0]);
        if before != now {
            // The host knows an output by its name.
            let name = g.get(before).name.clone();
            g.values[before.0].name = format!("{name}.partial");
            g.values[now.0].name = name;
            g.outputs[o] = now;
        }
    }
    Ok(g)
}

/// The sharding of a value before any op has been looked at.
fn seed(source: &Source, ty: &TensorType, context: &Context) -> Sharding {
    let mesh = context.layout.mesh;
    match source {
        Source::Input => {
            let whole = Sharding::REPLICATED.with(mesh.wide(Axes::SEQUENCES), Placement::Split(0));
            let find = |axis: Axis| ty.dims.iter().position(|d| d.sections[0].axis == axis);
            // Choices of experts are where routers make them.
            let routed = context.layout.sequence_parallel && find(Axis::Choices).is_some();
            let over = if routed { Axes::of(&[MeshAxis::Cp, MeshAxis::Tp]) } else { MeshAxis::Cp.into() };
            find(Axis::Seq).map_or(whole, |dim| whole.with(mesh.wide(over), Placement::Split(dim)))
        }
        Source::State(State::Parameter(_) | State::Unit { .. } | State::Gradient { .. }) => {
            let parallel = |axis| matches!(axis, Axis::Heads | Axis::KvHeads | Axis::Ffn | Axis::Vocab);
            let dim = ty.dims.iter().position(|d| d.sections.iter().any(|s| parallel(s.axis)));
            let place = |dim: Option<usize>| dim.map_or(Placement::Replicated, Placement::Split);
            Sharding::REPLICATED
                .with(mesh.wide(MeshAxis::Tp.into()), place(dim))
                .with(mesh.wide(MeshAxis::Ep.into()), place(experts::stacked(ty)))
        }
        // Keys and values are where the heads are that read them.
        Source::State(State::Cache) => {
            let dim = ty.dims.iter().position(|d| d.sections.iter().any(|s| s.axis == Axis::KvHeads));
            let place = dim.map_or(Placement::Replicated, Placement::Split);
            Sharding::REPLICATED.with(mesh.wide(MeshAxis::Tp.into()), place)
        }
        Source::State(_) | Source::Node { .. } | Source::Sum => Sharding::REPLICATED,
    }
}

struct Sweep<'a> {
    context: &'a Context,
    /// The value that stands for each: itself, or its sum over ranks.
    now: Vec<ValueId>,
    /// Gathered values, by phase: forward and backward each gather for themselves.
    gathered: BTreeMap<(ValueId, MeshAxis, bool), ValueId>,
    /// Values that an all-to-all has split along another dimension: backward reads what forward has got.
    moved: BTreeMap<(ValueId, MeshAxis, usize), ValueId>,
    /// Whether these values stay partial sums until something reads them that cannot; else they are reduced where they are made. Of others the
    /// op says so.
    partial: BTreeMap<ValueId, bool>,
}

impl Sweep<'_> {
    fn node(&mut self, g: &mut Graph, mut node: Node) -> Result<(), TypeError> {
        node.inputs = node.inputs.iter().map(|v| self.now[v.0]).collect();
        if node.op.reshards() {
            for (x, y) in node.inputs.iter().zip(node.outputs.iter().flatten()) {
                g.values[y.0].sharding = g.get(*x).sharding.after(&node.op)?;
            }
            g.nodes.push(node);
            return Ok(());
        }
        let (phase, layer) = (node.phase, node.layer);
        // Chunks that something else reads than what joins them.
        while let Some(v) = g.unreduced(&node) {
            let whole = self.reduced(g, v, phase, layer)?;
            if whole == v {
                break;
            }
            self.now[v.0] = whole;
            node.inputs.iter_mut().filter(|input| **input == v).for_each(|input| *input = whole);
        }
        for axis in self.context.layout.mesh.wide(Axes::STAGE).iter() {
            self.shard(g, &mut node, axis)?;
        }
        let made: Vec<ValueId> = node.outputs.iter().flatten().copied().collect();
        // What comes of such chunks is reduced where they would be.
        let spec = node.op.spec();
        let waits = spec.chunks || matches!(spec.partial, PartialSums::Together | PartialSums::One);
        g.nodes.push(node);
        for v in made {
            if let Source::Node { into: Some(state) } = g.get(v).source {
                g.values[state.0].sharding = g.get(v).sharding;
                continue;
            }
            if !self.partial.get(&v).copied().unwrap_or(waits) {
                self.now[v.0] = self.reduced(g, v, phase, layer)?;
            }
        }
        Ok(())
    }

    /// The value, summed over ranks where it is a partial sum.
    fn reduced(&self, g: &mut Graph, v: ValueId, phase: Phase, layer: Option<usize>) -> Result<ValueId, TypeError> {
        let mut now = v;
        for axis in [MeshAxis::Cp, MeshAxis::Tp] {
            if g.get(now).sharding.over(axis) == Placement::Partial {
                let (op, suffix) = self.reduction(g.ty(now), axis);
                now = g.relay(op, &[now], suffix, phase, layer)?[0];
            }
        }
        Ok(now)
    }

    /// What makes a partial sum whole: parts of the positions over ranks that have those, where it has positions.
    fn reduction(&self, ty: &TensorType, axis: MeshAxis) -> (Op, &'static str) {
        let over = axis.into();
        let positions = ty.dims.iter().position(|d| d.sections[0].axis == Axis::Seq);
        // A number of each position is needed whole.
        let positions = positions.filter(|dim| *dim + 1 < ty.dims.len() || axis == MeshAxis::Cp);
        match positions.filter(|_| axis == MeshAxis::Cp || self.context.layout.sequence_parallel) {
            Some(dim) => (Op::ReduceScatter { over, dim: Some(dim) }, "scattered"),
            None => (Op::AllReduce { over }, "reduced"),
        }
    }

    /// Chooses the dimension along which this node is sharded over `axis`, gathers inputs that are split otherwise, and
    /// gives the outputs their placement.
    fn shard(&mut self, g: &mut Graph, node: &mut Node, axis: MeshAxis) -> Result<(), TypeError> {
        let spec = node.op.spec();
        let count = node.inputs.len();
        // What it may be: an operand may leave open whether its rows are split by sequences or by positions.
        let mut may: Vec<Split> = Vec::new();
        let mut consider = |operand: &Operand, value: &Value| {
            let Placement::Split(dim) = value.sharding.over(axis) else { return };
            let mut splits = spec.splits_of(operand, value.ty.dims.len(), dim);
            if axis == MeshAxis::Tp {
                splits.retain(|split| !spec.same_over_tp.iter().any(|group| *split == Split::Group(group)));
            }
            let both: Vec<Split> = may.iter().filter(|split| splits.contains(split)).copied().collect();
            if !both.is_empty() {
                may = both;
            } else if !splits.is_empty() && may.iter().all(Split::gives_way) {
                may = splits;
            }
        };
        for (o, v) in node.outputs.iter().enumerate() {
            if let Some(v) = v
                && let Source::Node { into: Some(state) } = g.get(*v).source
            {
                consider(node.op.output(o), g.get(state));
            }
        }
        for (i, v) in node.inputs.iter().enumerate() {
            consider(node.op.input(i, count), g.get(*v));
        }
        let chosen = may.first().copied();
        // Which dimension of an operand is split.
        let split = |operand: &Operand, v: ValueId, g: &Graph| {
            chosen.and_then(|split| operand.dim_of(split, g.ty(v).dims.len()))
        };
        let mut partial = false;
        for i in 0..count {
            let v = node.inputs[i];
            match g.get(v).sharding.over(axis) {
                Placement::Split(dim) => match split(node.op.input(i, count), v, g) {
                    Some(wanted) if wanted == dim => {}
                    Some(wanted) => node.inputs[i] = self.exchange(g, v, axis, (dim, wanted), node)?,
                    None => node.inputs[i] = self.gather(g, v, axis, dim, node)?,
                },
                Placement::Partial => partial = true,
                Placement::Replicated | Placement::Flat => {}
            }
        }
        for (o, v) in node.outputs.iter().enumerate() {
            let Some(v) = v else { continue };
            let placement = match split(node.op.output(o), *v, g) {
                Some(dim) => Placement::Split(dim),
                None if spec.own.contains(&o) => Placement::Replicated,
                None if chosen.is_some() || partial => Placement::Partial,
                None => Placement::Replicated,
            };
            g.values[v.0].sharding = g.get(*v).sharding.with(axis, placement);
        }
        Ok(())
    }

    /// Parts of one dimension instead of another, as soon as there is something to send.
    fn exchange(
        &mut self,
        g: &mut Graph,
        v: ValueId,
        axis: MeshAxis,
        (from, to): (usize, usize),
        reader: &Node,
    ) -> Result<ValueId, TypeError> {
        if let Some(known) = self.moved.get(&(v, axis, to)) {
            return Ok(*known);
        }
        let made = g.nodes.iter().rposition(|n| n.outputs.contains(&Some(v)));
        let behind = made.filter(|n| (g.nodes[*n].phase == Phase::Forward) == (reader.phase == Phase::Forward));
        let phase = if reader.phase == Phase::Forward { Phase::Forward } else { Phase::InputGrad };
        let op = Op::AllToAll { over: axis.into(), from, to };
        let moved = g.relay(op, &[v], "sent", phase, reader.layer)?[0];
        if let Some(behind) = behind {
            g.nodes[behind + 1..].rotate_right(1);
        }
        self.moved.insert((v, axis, to), moved);
        Ok(moved)
    }

    fn gather(
        &mut self,
        g: &mut Graph,
        v: ValueId,
        axis: MeshAxis,
        dim: usize,
        reader: &Node,
    ) -> Result<ValueId, TypeError> {
        // Parts of parts are joined first.
        let inner = |other: &MeshAxis| *other > axis && g.get(v).sharding.over(*other) == Placement::Split(dim);
        if let Some(inner) = self.context.layout.mesh.wide(Axes::STAGE).iter().filter(inner).max() {
            let joined = self.gather(g, v, inner, dim, reader)?;
            return self.gather(g, joined, axis, dim, reader);
        }
        let forward = reader.phase == Phase::Forward;
        if let Some(known) = self.gathered.get(&(v, axis, forward)) {
            return Ok(*known);
        }
        let op = Op::AllGather { over: axis.into(), dim: Some(dim) };
        let gathered = g.relay(op, &[v], "gathered", reader.phase, reader.layer)?[0];
        self.gathered.insert((v, axis, forward), gathered);
        Ok(gathered)
    }
}

#[cfg(test)]
mod tests {
    use crate::passes::tests::{check, derived, lines};
    use lockstep_ir::{Layout, Mesh, MeshAxis};

    const COLLECTIVES: [&str; 3] = [" = all_", " = reduce_", " = sum_"];

    #[test]
    fn sequences_are_split_and_gradients_are_partial_sums() {
        let (before, context) = derived("dp=2".parse().unwrap(), 4);
        check(
            &super::shard(&before, &context).unwrap(),
            "\
input     tokens: u32[batch:4, seq:4] @(dp: split 0)
input     targets: u32[batch:4, seq:4] @(dp: split 0)
parameter table: f32[vocab:8, embed:2]
parameter w1: f32[embed:2]
parameter w2: f32[embed:2]
gradient  grad.table: f32[vocab:8, embed:2] @(dp: partial)
gradient  grad.w2: f32[embed:2] @(dp: partial)
gradient  grad.w1: f32[embed:2] @(dp: partial)
gradient  grad.table.2: f32[vocab:8, embed:2] @(dp: partial)
F x: f32[batch:4, seq:4, embed:2] @(dp: split 0) = embedding(tokens, table)
F n1: f32[batch:4, seq:4, embed:2] @(dp: split 0), n1.rstd: f32[batch:4, seq:4] @(dp: split 0) = rms_norm(x, w1) { eps: 1e-5 }
F mid: f32[batch:4, seq:4, embed:2] @(dp: split 0), n2: f32[batch:4, seq:4, embed:2] @(dp: split 0), n2.rstd: f32[batch:4, seq:4] @(dp: split 0) = add_rms_norm(x, n1, w2) { eps: 1e-5 }
F y: f32[batch:4, seq:4, embed:2] @(dp: split 0) = add(mid, n2)
F loss: f64[batch:4] @(dp: split 0), loss.dx: f32[batch:4, seq:4, embed:2] @(dp: split 0), loss.dw: f32[vocab:8, embed:2] @(dp: partial) += grad.table = linear_cross_entropy(y, table, targets) { rows: 8 }
W dw.w2: f32[embed:2] @(dp: partial) += grad.w2 = rms_norm_grad_weight(loss.dx, mid, n2.rstd)
B d.x: f32[batch:4, seq:4, embed:2] @(dp: split 0) = add_rms_norm_grad(loss.dx, mid, w2, n2.rstd, loss.dx)
W dw.w1: f32[embed:2] @(dp: partial) += grad.w1 = rms_norm_grad_weight(d.x, x, n1.rstd)
B d.x: f32[batch:4, seq:4, embed:2] @(dp: split 0) = add_rms_norm_grad(d.x, x, w1, n1.rstd, d.x)
W dw.table: f32[vocab:8, embed:2] @(dp: partial) += grad.table.2 = embedding_grad(d.x, tokens) { vocab: 8 }
return    loss
"
        );
    }

    #[test]
    fn what_tensor_parallel_ranks_compute_in_parts_is_reduced_where_it_is_made() {
        let (before, context) = derived("tp=2".parse().unwrap(), 4);
        assert_eq!(
            lines(&super::shard(&before, &context).unwrap(), &COLLECTIVES, true),
            "\
F x.reduced: f32[batch:2, seq:4, embed:2] = all_reduce(x) { over: tp }
F logits.0.statistics.gathered: f32[parts:2, seq:8, scalar:3] = all_gather(logits.0.statistics) { over: tp, dim: Some(0) }
F loss.dx.reduced: f32[batch:2, seq:4, embed:2] = all_reduce(loss.dx) { over: tp }
"
        );
    }

    #[test]
    fn sequence_parallel_ranks_scatter_and_gather_positions() {
        let (before, context) = derived("tp=2,sp".parse().unwrap(), 4);
        assert_eq!(
            lines(&super::shard(&before, &context).unwrap(), &COLLECTIVES, true),
            "\
F x.scattered: f32[batch:2, seq:4, embed:2] @(tp: split 1) = reduce_scatter(x) { over: tp, dim: Some(1) }
F y.gathered: f32[batch:2, seq:4, embed:2] = all_gather(y) { over: tp, dim: Some(1) }
F logits.0.statistics.gathered: f32[parts:2, seq:8, scalar:3] = all_gather(logits.0.statistics) { over: tp, dim: Some(0) }
F loss.dx.scattered: f32[batch:2, seq:4, embed:2] @(tp: split 1) = reduce_scatter(loss.dx) { over: tp, dim: Some(1) }
W d.x.gathered: f32[batch:2, seq:4, embed:2] = all_gather(d.x) { over: tp, dim: Some(1) }
"
        );
    }

    #[test]
    fn several_axes_split_the_sequences() {
        let mesh = Mesh::ONE.with(MeshAxis::DpReplicate, 2).with(MeshAxis::DpShard, 2).with(MeshAxis::Ep, 2);
        let (before, context) = derived(Layout { mesh, ..Layout::single(2) }, 4);
        let after = super::shard(&before, &context).unwrap();
        assert_eq!(
            lines(&after, &["input ", "gradient "], true),
            "\
input     tokens: u32[batch:16, seq:4] @(dp_replicate: split 0, dp: split 0, ep: split 0)
input     targets: u32[batch:16, seq:4] @(dp_replicate: split 0, dp: split 0, ep: split 0)
gradient  grad.table: f32[vocab:8, embed:2] @(dp_replicate: partial, dp: partial, ep: partial)
gradient  grad.w2: f32[embed:2] @(dp_replicate: partial, dp: partial, ep: partial)
gradient  grad.w1: f32[embed:2] @(dp_replicate: partial, dp: partial, ep: partial)
gradient  grad.table.2: f32[vocab:8, embed:2] @(dp_replicate: partial, dp: partial, ep: partial)
"
        );
    }

    #[test]
    fn context_parallel_ranks_split_positions_and_add_up_losses() {
        let (before, context) = derived("cp=2".parse().unwrap(), 4);
        let after = super::shard(&before, &context).unwrap();
        assert_eq!(
            lines(&after, &["input ", "gradient ", " = all_", " = linear_cross", "return"], true),
            "\
input     tokens: u32[batch:2, seq:4] @(cp: split 1)
input     targets: u32[batch:2, seq:4] @(cp: split 1)
gradient  grad.table: f32[vocab:8, embed:2] @(cp: partial)
gradient  grad.w2: f32[embed:2] @(cp: partial)
gradient  grad.w1: f32[embed:2] @(cp: partial)
gradient  grad.table.2: f32[vocab:8, embed:2] @(cp: partial)
F loss.partial: f64[batch:2] @(cp: partial), loss.dx: f32[batch:2, seq:4, embed:2] @(cp: split 1), loss.dw: f32[vocab:8, embed:2] @(cp: partial) += grad.table = linear_cross_entropy(y, table, targets) { rows: 8 }
F loss: f64[batch:2] = all_reduce(loss.partial) { over: cp }
return    loss
"
        );
    }

    #[test]
    fn context_parallel_parts_of_a_chunk_are_split_by_positions() {
        let (before, context) = derived("dp=2,cp=2,tp=2,sp".parse().unwrap(), 8);
        let after = super::shard(&before, &context).unwrap();
        assert_eq!(
            lines(&after, &[" = vocab_logits", " = join", " = all_", " = reduce_"], true),
            "\
F x.scattered: f32[batch:4, seq:8, embed:2] @(dp: split 0, cp: split 1, tp: split 1) = reduce_scatter(x) { over: tp, dim: Some(1) }
F y.gathered: f32[batch:4, seq:8, embed:2] @(dp: split 0, cp: split 1) = all_gather(y) { over: tp, dim: Some(1) }
F logits.0: f32[seq:32, vocab:8] @(dp: split 0, cp: split 0, tp: split 1), logits.0.statistics: f32[parts:2, seq:32, scalar:3] @(dp: split 1, cp: split 1, tp: split 0) = vocab_logits(y.gathered, table, targets) { rows: Rows { first: 0, count: 8, ranks: 4 }, parts: 2 }
F logits.0.statistics.gathered: f32[parts:2, seq:32, scalar:3] @(dp: split 1, cp: split 1) = all_gather(logits.0.statistics) { over: tp, dim: Some(0) }
F loss: f64[batch:4] @(dp: split 0) = all_reduce(loss.partial) { over: cp }
F loss.dx: f32[batch:4, seq:8, embed:2] @(dp: split 0, cp: split 1, tp: partial) = join_rows(d.logits.0, targets)
F loss.dx.scattered: f32[batch:4, seq:8, embed:2] @(dp: split 0, cp: split 1, tp: split 1) = reduce_scatter(loss.dx) { over: tp, dim: Some(1) }
W d.x.gathered: f32[batch:4, seq:8, embed:2] @(dp: split 0, cp: split 1) = all_gather(d.x) { over: tp, dim: Some(1) }
"
        );
    }
}
