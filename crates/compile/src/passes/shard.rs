//! Shard: gives every value its sharding over the ranks of a stage, and inserts the collectives that follow.
//!
//! One sweep in order. Seeds: inputs are split by sequences; a parameter with heads, hidden units or vocabulary entries is
//! split along them; the residual stream is whole on every tensor-parallel rank, or split by positions with sequence
//! parallelism. Everything else follows from the op table: a letter that is split in one operand is split in all, and a split
//! letter that an output lacks leaves partial sums, which are reduced at once (activations) or after the last micro-batch
//! (gradients). Where two letters would be split over the same ranks, positions give way and are gathered; backward gathers
//! what forward saved split again.
//!
//! The chunked output head is rewritten first, since the loss needs statistics of all parts of the vocabulary (`vocab.rs`).

use super::vocab;
use crate::Context;
use lockstep_ir::graph::{Node, Phase, Source, State, Value};
use lockstep_ir::op::{Operand, Split};
use lockstep_ir::{Axes, Axis, Graph, MeshAxis, Op, Placement, Sharding, TensorType, TypeError, ValueId};
use std::collections::BTreeMap;

pub(super) fn shard(graph: &Graph, context: &Context) -> Result<Graph, TypeError> {
    let mesh = context.layout.mesh;
    if mesh.size(Axes::STAGE) == 1 {
        return Ok(graph.clone());
    }
    if mesh.size(MeshAxis::Cp) > 1 {
        return Err(TypeError { op: "shard", reason: "positions cannot be split over cp yet".into() });
    }
    let mut g = graph.clone();
    if mesh.size(MeshAxis::Tp) > 1 {
        vocab::split_head(&mut g, context)?;
    }
    for value in &mut g.values {
        value.sharding = seed(&value.source, &value.ty, context);
    }
    let nodes = std::mem::take(&mut g.nodes);
    let mut sweep = Sweep { context, now: (0..g.values.len()).map(ValueId).collect(), gathered: BTreeMap::new() };
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
        Source::Input => Sharding::REPLICATED.with(mesh.wide(Axes::SEQUENCES), Placement::Split(0)),
        Source::State(State::Parameter(_) | State::Gradient { .. }) => {
            let parallel = |axis| matches!(axis, Axis::Heads | Axis::KvHeads | Axis::Ffn | Axis::Vocab);
            let dim = ty.dims.iter().position(|d| d.sections.iter().any(|s| parallel(s.axis)));
            Sharding::REPLICATED
                .with(mesh.wide(MeshAxis::Tp.into()), dim.map_or(Placement::Replicated, Placement::Split))
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
}

impl Sweep<'_> {
    fn node(&mut self, g: &mut Graph, mut node: Node) -> Result<(), TypeError> {
        node.inputs = node.inputs.iter().map(|v| self.now[v.0]).collect();
        for axis in self.context.layout.mesh.wide(Axes::STAGE).iter() {
            self.shard(g, &mut node, axis)?;
        }
        let (phase, layer) = (node.phase, node.layer);
        let made: Vec<ValueId> = node.outputs.iter().flatten().copied().collect();
        // Chunks of dx are joined before they are reduced.
        let waits = matches!(node.op, Op::VocabGrad { .. });
        g.nodes.push(node);
        for v in made {
            if let Source::Node { into: Some(state) } = g.get(v).source {
                g.values[state.0].sharding = g.get(v).sharding;
            } else if g.get(v).sharding.over(MeshAxis::Tp) == Placement::Partial && !waits {
                let over = MeshAxis::Tp.into();
                let (op, suffix) = match self.context.layout.sequence_parallel {
                    true => (Op::ReduceScatter { over, dim: Some(1) }, "scattered"),
                    false => (Op::AllReduce { over }, "reduced"),
                };
                self.now[v.0] = g.relay(op, &[v], suffix, phase, layer)?[0];
            }
        }
        Ok(())
    }

    /// Chooses the dimension along which this node is sharded over `axis`, gathers inputs that are split otherwise, and
    /// gives the outputs their placement.
    fn shard(&mut self, g: &mut Graph, node: &mut Node, axis: MeshAxis) -> Result<(), TypeError> {
        let spec = node.op.spec();
        let count = node.inputs.len();
        let mut chosen: Option<Split> = None;
        let mut consider = |operand: &Operand, value: &Value| {
            if let Placement::Split(dim) = value.sharding.over(axis)
                && let Some(split) = spec.split_of(operand, value.ty.dims.len(), dim)
                && chosen.is_none_or(|chosen| chosen.gives_way())
            {
                chosen = Some(split);
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
        // Which dimension of an operand is split.
        let split = |operand: &Operand, v: ValueId, g: &Graph| {
            chosen.and_then(|split| operand.dim_of(split, g.ty(v).dims.len()))
        };
        let mut partial = false;
        for i in 0..count {
            let v = node.inputs[i];
            match g.get(v).sharding.over(axis) {
                Placement::Split(dim) if split(node.op.input(i, count), v, g) != Some(dim) => {
                    node.inputs[i] = self.gather(g, v, axis, dim, node)?;
                }
                Placement::Partial => partial = true,
                Placement::Replicated | Placement::Split(_) | Placement::Flat => {}
            }
        }
        for (o, v) in node.outputs.iter().enumerate() {
            let Some(v) = v else { continue };
            let placement = match split(node.op.output(o), *v, g) {
                Some(dim) => Placement::Split(dim),
                None if chosen.is_some() || partial => Placement::Partial,
                None => Placement::Replicated,
            };
            g.values[v.0].sharding = g.get(*v).sharding.with(axis, placement);
        }
        Ok(())
    }

    fn gather(
        &mut self,
        g: &mut Graph,
        v: ValueId,
        axis: MeshAxis,
        dim: usize,
        reader: &Node,
    ) -> Result<ValueId, TypeError> {
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
    fn positions_are_not_split_over_cp_yet() {
        let mesh = Mesh::ONE.with(MeshAxis::Cp, 2);
        let (before, context) = derived(Layout { mesh, ..Layout::single(2) }, 4);
        let refusal = super::shard(&before, &context).unwrap_err().to_string();
        assert_eq!(refusal, "shard: positions cannot be split over cp yet");
    }
}
