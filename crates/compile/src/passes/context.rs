//! Attention over context-parallel ranks, each of which has a part of every sequence.
//!
//! *Ring*: keys and values go around. In step i a rank has those of the rank i before it, and merges attention over them into what it
//! has by log-sum-exp; those of the next step are on their way meanwhile. Backward, keys and values go around again, and so do
//! their gradients, in f32: every rank adds its share and passes them on, the last hop is to their owner.
//!
//! *Latent*: a ring of the latent of latent attention (`context/latent.rs`), of which every rank rebuilds keys and values.
//!
//! *Gather*: every rank has all keys and values for the moment; the sweep of `shard` gathers them, and scatters the sum of their
//! gradients.
//!
//! *All-to-all* (Ulysses): every rank has the whole sequence of some of the heads for the moment, and computes attention as one rank does.
//! Packed Q·K·V goes there, attention's output comes back, and so do their gradients in backward, which reads what forward has sent.
//! Sinks are of heads: there they are applied before the output comes back, and so those of every position go there too, a number of each head.
//! Where heads are all here, sinks follow what a ring has merged, and stay as they are.
//!
//! One program serves all ranks, since kernels find from positions what the mask leaves. In global shapes a shift
//! changes nothing: other ranks have the parts.

mod latent;

use latent::{Latents, Origin};
use lockstep_ir::graph::{Node, Phase};
use lockstep_ir::op::Ring;
use lockstep_ir::{ContextParallel, DType, Graph, Layout, MeshAxis, Op, TypeError, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// Rewrites every attention: of the forward pass, recomputed ones, and gradients. Returns values of which it says whether they stay
/// partial sums over tensor-parallel ranks: for as long as they go around, and not where they arrive.
pub(super) fn split_attention(g: &mut Graph, layout: &Layout) -> Result<BTreeMap<ValueId, bool>, TypeError> {
    let parts = layout.mesh.size(MeshAxis::Cp);
    let of_sinks = |node: &Node| matches!(node.op, Op::AttentionSink { .. }).then(|| node.inputs[0]);
    let mut sent = Sent { before_sinks: g.nodes.iter().filter_map(of_sinks).collect(), ..Sent::default() };
    if layout.context == ContextParallel::Latent {
        sent.latents = Latents::of(g);
    }
    for node in std::mem::take(&mut g.nodes) {
        let name = node.outputs.first().copied().flatten().map_or(String::new(), |v| g.get(v).name.clone());
        let rewrite = |g, window, sent| Rewrite { g, phase: node.phase, layer: node.layer, name, window, parts, sent };
        if let Op::Attention { window } = node.op {
            let rewrite = rewrite(&mut *g, window, &mut sent);
            match layout.context {
                ContextParallel::Ring | ContextParallel::Latent => rewrite.ring(&node)?,
                ContextParallel::Gather => rewrite.gather(&node)?,
                ContextParallel::AllToAll => rewrite.of_heads(&node)?,
            }
        } else if let Op::AttentionGrad { window } = node.op {
            let rewrite = rewrite(&mut *g, window, &mut sent);
            match layout.context {
                ContextParallel::Ring | ContextParallel::Latent => rewrite.ring_grad(&node)?,
                ContextParallel::Gather => rewrite.gather_grad(&node)?,
                ContextParallel::AllToAll => rewrite.of_heads_grad(&node)?,
            }
        } else if let (ContextParallel::AllToAll, Op::AttentionSink { .. }) = (layout.context, node.op) {
            rewrite(&mut *g, None, &mut sent).sinks(&node)?;
        } else if let (ContextParallel::AllToAll, Op::AttentionSinkGrad { .. }) = (layout.context, node.op) {
            rewrite(&mut *g, None, &mut sent).sinks_grad(&node)?;
        } else {
            sent.latents.add_what_arrived(g, node)?;
        }
    }
    Ok(sent.latents.partial)
}

/// What ranks have sent each other for attention over some of the heads.
#[derive(Default)]
struct Sent {
    /// Values of which ranks have heads at all positions, by those of which they have positions of all heads.
    heads: BTreeMap<ValueId, ValueId>,
    /// Outputs of attention that sinks are applied to, and nothing else reads.
    before_sinks: BTreeSet<ValueId>,
    /// Packed Q·K·V at a rank's positions, by such an output.
    packed: BTreeMap<ValueId, ValueId>,
    /// Sinks of a rank's heads at all positions, by the output that has them.
    sinks: BTreeMap<ValueId, ValueId>,
    /// Starts of documents at all positions, by layer and whether they are of the forward pass: layers may be on other stages.
    starts: BTreeMap<(ValueId, Option<usize>, bool), ValueId>,
    /// Of latent attention whose latent goes around.
    latents: Latents,
}

/// What a rank has of another in a step of a ring: packed K·V, or the latent and the shared key that it is built from.
type Parcel = Vec<ValueId>;

/// One attention that is rewritten.
struct Rewrite<'a> {
    g: &'a mut Graph,
    phase: Phase,
    layer: Option<usize>,
    name: String,
    window: Option<usize>,
    parts: usize,
    sent: &'a mut Sent,
}

impl Rewrite<'_> {
    /// Adds a node; the first of its outputs is called after the attention.
    fn node(&mut self, op: Op, inputs: &[ValueId], what: &str) -> Result<Vec<ValueId>, TypeError> {
        self.g.node(op, inputs, &format!("{}.{what}", self.name), self.phase, self.layer)
    }

    fn one(&mut self, op: Op, inputs: &[ValueId], what: &str) -> Result<ValueId, TypeError> {
        Ok(self.node(op, inputs, what)?[0])
    }

    /// Lets an output of the last node be a value that was there before, or unused.
    fn last_is(&mut self, output: usize, value: Option<ValueId>) {
        if let Some(last) = self.g.nodes.last_mut() {
            last.outputs[output] = value;
        }
    }

    /// Packed K·V of packed Q·K·V.
    fn keys_and_values(&mut self, qkv: ValueId) -> Result<ValueId, TypeError> {
        self.one(Op::Slice { first: 1, count: 2 }, &[qkv], "kv")
    }

    /// Sends values to the next rank, and receives as many of the one before.
    fn shift(&mut self, values: &[ValueId], what: &str) -> Result<Vec<ValueId>, TypeError> {
        self.node(Op::Shift { over: MeshAxis::Cp.into() }, values, what)
    }

    /// What a rank sends on, of step 0: its own.
    fn own(&mut self, qkv: ValueId, origin: Option<&Origin>) -> Result<Parcel, TypeError> {
        match origin {
            None => Ok(vec![self.keys_and_values(qkv)?]),
            Some(origin) => self.message(qkv, origin),
        }
    }

    /// What comes in the next step, having sent on that of this one.
    fn send_on(&mut self, parcel: &[ValueId], step: usize) -> Result<Option<Parcel>, TypeError> {
        let next = step + 1;
        (next < self.parts).then(|| self.shift(parcel, &format!("kv.{next}"))).transpose()
    }

    /// Keys and values of a step.
    fn keys_of(
        &mut self,
        (qkv, parcel): (ValueId, &[ValueId]),
        origin: Option<&Origin>,
        step: usize,
    ) -> Result<ValueId, TypeError> {
        match origin {
            None => Ok(parcel[0]),
            Some(_) if step == 0 => self.keys_and_values(qkv),
            Some(origin) => self.rebuilt(origin, parcel, step),
        }
    }

    /// In another type, where it is not of that type.
    fn cast(&mut self, v: ValueId, to: DType, what: &str) -> Result<ValueId, TypeError> {
        if self.g.ty(v).dtype == to { Ok(v) } else { self.one(Op::Cast { to }, &[v], what) }
    }

    fn ring(mut self, node: &Node) -> Result<(), TypeError> {
        let ([qkv, starts @ ..], [o, lse]) = (&node.inputs[..], &node.outputs[..]) else { return Ok(()) };
        let (window, parts) = (self.window, self.parts);
        let origin = self.sent.latents.origin(*qkv)?;
        let mut next = Some(self.own(*qkv, origin.as_ref())?);
        let mut sum: Option<[ValueId; 2]> = None;
        for step in 0..parts {
            let Some(parcel) = next else { break };
            next = self.send_on(&parcel, step)?;
            let kv = self.keys_of((*qkv, &parcel), origin.as_ref(), step)?;
            let reads = [&[*qkv, kv], starts].concat();
            let made = self.node(
                Op::PartAttention { window, ring: Some(Ring { step, parts }) },
                &reads,
                &format!("step.{step}"),
            )?;
            sum = Some(match sum {
                None => [made[0], made[1]],
                Some([o, lse]) => {
                    let merged = self.node(Op::AttentionMerge, &[o, lse, made[0], made[1]], &format!("sum.{step}"))?;
                    [merged[0], merged[1]]
                }
            });
        }
        self.last_is(1, *lse);
        let (Some([sum, _]), Some(o)) = (sum, o) else { return Ok(()) };
        let to = self.g.ty(*o).dtype;
        if to != DType::F32 {
            self.cast(sum, to, "rounded")?;
        }
        self.last_is(0, Some(*o));
        Ok(())
    }

    fn ring_grad(mut self, node: &Node) -> Result<(), TypeError> {
        let [dout, qkv, o, lse, starts @ ..] = &node.inputs[..] else { return Ok(()) };
        let (window, parts) = (self.window, self.parts);
        let origin = self.sent.latents.origin(*qkv)?;
        let mut next = Some(self.own(*qkv, origin.as_ref())?);
        let (mut own, mut dq, mut on_the_way): (Option<ValueId>, Option<ValueId>, Option<Parcel>) = Default::default();
        for step in 0..parts {
            let Some(parcel) = next else { break };
            next = self.send_on(&parcel, step)?;
            let kv = self.keys_of((*qkv, &parcel), origin.as_ref(), step)?;
            let reads = [&[*dout, *qkv, kv, *o, *lse], starts].concat();
            let grad = Op::PartAttentionGrad { window, ring: Some(Ring { step, parts }) };
            let made = self.node(grad, &reads, &format!("dq.{step}"))?;
            if step == 0 {
                own = Some(made[1]);
            } else {
                let mut share = match &origin {
                    None => vec![made[1]],
                    Some(origin) => self.gradients(origin, &parcel, made[1], step)?,
                };
                let names = ["dkv", "dshared"];
                for ((share, others), name) in share.iter_mut().zip(on_the_way.iter().flatten()).zip(names) {
                    *share = self.one(Op::Add, &[*others, *share], &format!("{name}.sum.{step}"))?;
                }
                on_the_way = Some(self.shift(&share, &format!("dkv.{step}"))?);
            }
            dq = Some(match dq {
                None => made[0],
                Some(dq) => self.one(Op::Add, &[dq, made[0]], &format!("dq.sum.{step}"))?,
            });
        }
        let (Some(dq), Some(own)) = (dq, own) else { return Ok(()) };
        let dkv = match (on_the_way, origin) {
            (None, _) => own,
            (Some(others), None) => self.one(Op::Add, &[others[0], own], "dkv")?,
            // What comes of a rank's own keys and values goes the way of one rank, on which what arrives is added to it.
            (Some(others), Some(origin)) => {
                self.sent.latents.arrives(node.outputs[0], origin, &others);
                own
            }
        };
        self.join(dq, dkv, node)
    }

    fn gather(mut self, node: &Node) -> Result<(), TypeError> {
        let [qkv, starts @ ..] = &node.inputs[..] else { return Ok(()) };
        let kv = self.keys_and_values(*qkv)?;
        let reads = [&[*qkv, kv], starts].concat();
        self.node(Op::PartAttention { window: self.window, ring: None }, &reads, "o")?;
        (0..2).for_each(|output| self.last_is(output, node.outputs[output]));
        Ok(())
    }

    fn gather_grad(mut self, node: &Node) -> Result<(), TypeError> {
        let [dout, qkv, o, lse, starts @ ..] = &node.inputs[..] else { return Ok(()) };
        let kv = self.keys_and_values(*qkv)?;
        let reads = [&[*dout, *qkv, kv, *o, *lse], starts].concat();
        let made = self.node(Op::PartAttentionGrad { window: self.window, ring: None }, &reads, "dq")?;
        self.join(made[0], made[1], node)
    }

    fn of_heads(mut self, node: &Node) -> Result<(), TypeError> {
        let ([qkv, starts @ ..], [o, lse]) = (&node.inputs[..], &node.outputs[..]) else { return Ok(()) };
        let reads = [vec![self.heads_of(*qkv, "qkv")?], self.all_starts(starts)?].concat();
        let made = self.one(Op::Attention { window: self.window }, &reads, "heads")?;
        self.last_is(1, *lse);
        let Some(o) = *o else { return Ok(()) };
        self.sent.heads.insert(o, made);
        if self.sent.before_sinks.contains(&o) {
            self.sent.packed.insert(o, *qkv);
            return Ok(());
        }
        self.positions_of(made, "o")?;
        self.last_is(0, Some(o));
        Ok(())
    }

    /// Applies sinks to attention's output where the heads are.
    fn sinks(mut self, node: &Node) -> Result<(), TypeError> {
        let ([before, lse, sink], [o, sum]) = (&node.inputs[..], &node.outputs[..]) else { return Ok(()) };
        let (Some(attended), Some(qkv)) = (self.sent.heads.get(before), self.sent.packed.get(before)) else {
            let reason = "sinks are of attention, and this is the output of another op".to_owned();
            return Err(TypeError { op: node.op.name(), reason });
        };
        let (attended, qkv) = (*attended, *qkv);
        let sinks = self.one(Op::ExpandSinks, &[qkv, *sink], "sinks")?;
        let sinks = self.heads_of(sinks, "sinks")?;
        let made = self.one(Op::AttentionSink { each: true }, &[attended, *lse, sinks], "with_sinks")?;
        self.last_is(1, *sum);
        let Some(o) = *o else { return Ok(()) };
        self.sent.heads.insert(o, made);
        self.sent.sinks.insert(o, sinks);
        self.positions_of(made, "o")?;
        self.last_is(0, Some(o));
        Ok(())
    }

    /// What every position adds to the gradients of sinks comes back to the positions of a rank.
    fn sinks_grad(mut self, node: &Node) -> Result<(), TypeError> {
        let &[dout, o, lse, sink] = &node.inputs[..] else { return Ok(()) };
        let sinks = self.sent.sinks.get(&o).copied().unwrap_or(sink);
        let reads = [self.heads_of(dout, "do")?, self.heads_of(o, "o")?, lse, sinks];
        let made = self.one(Op::AttentionSinkGrad { each: true }, &reads, "heads")?;
        self.positions_of(made, "dsinks")?;
        self.last_is(0, node.outputs[0]);
        Ok(())
    }

    fn of_heads_grad(mut self, node: &Node) -> Result<(), TypeError> {
        let [dout, qkv, o, lse, starts @ ..] = &node.inputs[..] else { return Ok(()) };
        let of_heads = [self.heads_of(*dout, "do")?, self.heads_of(*qkv, "qkv")?, self.heads_of(*o, "o")?, *lse];
        let reads = [of_heads.to_vec(), self.all_starts(starts)?].concat();
        let made = self.one(Op::AttentionGrad { window: self.window }, &reads, "heads")?;
        self.positions_of(made, "dqkv")?;
        self.last_is(0, node.outputs[0]);
        Ok(())
    }

    /// Where documents start, of the whole sequence.
    fn all_starts(&mut self, starts: &[ValueId]) -> Result<Vec<ValueId>, TypeError> {
        let Some(starts) = starts.first() else { return Ok(Vec::new()) };
        let key = (*starts, self.layer, self.phase == Phase::Forward);
        if let Some(known) = self.sent.starts.get(&key) {
            return Ok(vec![*known]);
        }
        let gather = Op::AllGather { over: MeshAxis::Cp.into(), dim: Some(1) };
        let all = self.one(gather, &[*starts], "starts")?;
        self.sent.starts.insert(key, all);
        Ok(vec![all])
    }

    /// Heads at all positions, of positions of all heads: what was sent once is there.
    fn heads_of(&mut self, v: ValueId, what: &str) -> Result<ValueId, TypeError> {
        if let Some(known) = self.sent.heads.get(&v) {
            return Ok(*known);
        }
        let blocks = self.one(Op::SplitHeads { parts: self.parts, ranks: 1 }, &[v], &format!("{what}.parts"))?;
        let all_to_all = Op::AllToAll { over: MeshAxis::Cp.into(), from: 1, to: 0 };
        let blocks = self.one(all_to_all, &[blocks], &format!("{what}.sent"))?;
        let heads = self.one(Op::JoinHeads { ranks: self.parts }, &[blocks], &format!("{what}.heads"))?;
        self.sent.heads.insert(v, heads);
        Ok(heads)
    }

    /// The reverse.
    fn positions_of(&mut self, v: ValueId, what: &str) -> Result<ValueId, TypeError> {
        let split = Op::SplitHeads { parts: self.parts, ranks: self.parts };
        let blocks = self.one(split, &[v], &format!("{what}.parts"))?;
        let all_to_all = Op::AllToAll { over: MeshAxis::Cp.into(), from: 0, to: 1 };
        let blocks = self.one(all_to_all, &[blocks], &format!("{what}.sent"))?;
        self.one(Op::JoinHeads { ranks: 1 }, &[blocks], &format!("{what}.positions"))
    }

    /// Packed Q·K·V of gradients.
    fn join(&mut self, dq: ValueId, dkv: ValueId, node: &Node) -> Result<(), TypeError> {
        let Some(dqkv) = node.outputs[0] else { return Ok(()) };
        let to = self.g.ty(dqkv).dtype;
        let (dq, dkv) = (self.cast(dq, to, "dq.rounded")?, self.cast(dkv, to, "dkv.rounded")?);
        self.node(Op::Concat, &[dq, dkv], "joined")?;
        self.last_is(0, Some(dqkv));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::Context;
    use crate::passes::shard::shard;
    use crate::passes::tests::{lines, small_model};
    use lockstep_ir::graph::{Parameter, Phase, State};
    use lockstep_ir::{Axis, DType, Dim, Graph, Init, Layout, Op, Section, TensorType};

    /// Attention of packed Q·K·V and its gradient, sharded.
    fn sharded(layout: &str, dtype: DType) -> Graph {
        let mut g = Graph::new();
        let heads = |axis, count| Section { axis, count, unit: 2 };
        let [b, s] = [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, 12)];
        let act = |sections: &[Section]| TensorType::new(dtype, [b.clone(), s.clone(), Dim::packed(sections.to_vec())]);
        let (q, kv) = (heads(Axis::Heads, 4), heads(Axis::KvHeads, 2));
        let qkv = g.input("qkv", act(&[q, kv, kv]));
        let dout = g.input("do", act(&[q]));
        let made = g.node(Op::Attention { window: None }, &[qkv], "o", Phase::Forward, Some(3)).unwrap();
        let reads = [dout, qkv, made[0], made[1]];
        g.node(Op::AttentionGrad { window: None }, &reads, "d.qkv", Phase::InputGrad, Some(3)).unwrap();
        let layout: Layout = layout.parse().unwrap();
        shard(&g, &Context { layout, ..small_model().1 }).unwrap()
    }

    /// What is computed from what, without types.
    fn short(g: &Graph) -> String {
        let calls = lines(g, &[" = "], false);
        calls.lines().map(|line| line.replace(" @(cp: split 1)", "").replace(" @(cp: split 2)", "") + "\n").collect()
    }

    #[test]
    fn keys_of_the_next_step_are_sent_before_those_of_this_one_are_used() {
        assert_eq!(
            short(&sharded("cp=3", DType::F32)),
            "\
F o.kv = slice(qkv) { first: 1, count: 2 }
F o.kv.1 = shift(o.kv) { over: cp }
F o.step.0, o.step.0.lse = ring_attention(qkv, o.kv) { window: None, ring: Some(Ring { step: 0, parts: 3 }) }
F o.kv.2 = shift(o.kv.1) { over: cp }
F o.step.1, o.step.1.lse = ring_attention(qkv, o.kv.1) { window: None, ring: Some(Ring { step: 1, parts: 3 }) }
F o.sum.1, o.sum.1.lse = attention_merge(o.step.0, o.step.0.lse, o.step.1, o.step.1.lse)
F o.step.2, o.step.2.lse = ring_attention(qkv, o.kv.2) { window: None, ring: Some(Ring { step: 2, parts: 3 }) }
F o, o.lse = attention_merge(o.sum.1, o.sum.1.lse, o.step.2, o.step.2.lse)
B d.qkv.kv = slice(qkv) { first: 1, count: 2 }
B d.qkv.kv.1 = shift(d.qkv.kv) { over: cp }
B d.qkv.dq.0, d.qkv.dq.0.dkv = ring_attention_grad(do, qkv, d.qkv.kv, o, o.lse) { window: None, ring: Some(Ring { step: 0, parts: 3 }) }
B d.qkv.kv.2 = shift(d.qkv.kv.1) { over: cp }
B d.qkv.dq.1, d.qkv.dq.1.dkv = ring_attention_grad(do, qkv, d.qkv.kv.1, o, o.lse) { window: None, ring: Some(Ring { step: 1, parts: 3 }) }
B d.qkv.dkv.1 = shift(d.qkv.dq.1.dkv) { over: cp }
B d.qkv.dq.sum.1 = add(d.qkv.dq.0, d.qkv.dq.1)
B d.qkv.dq.2, d.qkv.dq.2.dkv = ring_attention_grad(do, qkv, d.qkv.kv.2, o, o.lse) { window: None, ring: Some(Ring { step: 2, parts: 3 }) }
B d.qkv.dkv.sum.2 = add(d.qkv.dkv.1, d.qkv.dq.2.dkv)
B d.qkv.dkv.2 = shift(d.qkv.dkv.sum.2) { over: cp }
B d.qkv.dq.sum.2 = add(d.qkv.dq.sum.1, d.qkv.dq.2)
B d.qkv.dkv = add(d.qkv.dkv.2, d.qkv.dq.0.dkv)
B d.qkv = concat(d.qkv.dq.sum.2, d.qkv.dkv)
"
        );
    }

    #[test]
    fn heads_are_sent_once_and_backward_reads_them() {
        assert_eq!(
            lines(&sharded("cp=2,context=a2a", DType::BF16), &[" = "], true),
            "\
F o.qkv.parts: bf16[parts:2, rows:12, batch:1, heads:2×2+kv_heads:1×2+kv_heads:1×2] @(cp: split 1) = split_heads(qkv) { parts: 2, ranks: 1 }
F o.qkv.sent: bf16[parts:2, rows:12, batch:1, heads:2×2+kv_heads:1×2+kv_heads:1×2] @(cp: split 0) = all_to_all(o.qkv.parts) { over: cp, from: 1, to: 0 }
F o.qkv.heads: bf16[batch:1, seq:12, heads:4×2+kv_heads:2×2+kv_heads:2×2] @(cp: split 2) = join_heads(o.qkv.sent) { ranks: 2 }
F o.heads: bf16[batch:1, seq:12, heads:4×2] @(cp: split 2), o.lse: f32[batch:1, heads:4, seq:12] @(cp: split 1) = attention(o.qkv.heads) { window: None }
F o.o.parts: bf16[parts:2, rows:12, batch:1, heads:2×2] @(cp: split 0) = split_heads(o.heads) { parts: 2, ranks: 2 }
F o.o.sent: bf16[parts:2, rows:12, batch:1, heads:2×2] @(cp: split 1) = all_to_all(o.o.parts) { over: cp, from: 0, to: 1 }
F o: bf16[batch:1, seq:12, heads:4×2] @(cp: split 1) = join_heads(o.o.sent) { ranks: 1 }
B d.qkv.do.parts: bf16[parts:2, rows:12, batch:1, heads:2×2] @(cp: split 1) = split_heads(do) { parts: 2, ranks: 1 }
B d.qkv.do.sent: bf16[parts:2, rows:12, batch:1, heads:2×2] @(cp: split 0) = all_to_all(d.qkv.do.parts) { over: cp, from: 1, to: 0 }
B d.qkv.do.heads: bf16[batch:1, seq:12, heads:4×2] @(cp: split 2) = join_heads(d.qkv.do.sent) { ranks: 2 }
B d.qkv.heads: bf16[batch:1, seq:12, heads:4×2+kv_heads:2×2+kv_heads:2×2] @(cp: split 2) = attention_grad(d.qkv.do.heads, o.qkv.heads, o.heads, o.lse) { window: None }
B d.qkv.dqkv.parts: bf16[parts:2, rows:12, batch:1, heads:2×2+kv_heads:1×2+kv_heads:1×2] @(cp: split 0) = split_heads(d.qkv.heads) { parts: 2, ranks: 2 }
B d.qkv.dqkv.sent: bf16[parts:2, rows:12, batch:1, heads:2×2+kv_heads:1×2+kv_heads:1×2] @(cp: split 1) = all_to_all(d.qkv.dqkv.parts) { over: cp, from: 0, to: 1 }
B d.qkv: bf16[batch:1, seq:12, heads:4×2+kv_heads:2×2+kv_heads:2×2] @(cp: split 1) = join_heads(d.qkv.dqkv.sent) { ranks: 1 }
"
        );
    }

    #[test]
    fn gathered_keys_are_gathered_again_and_their_gradients_scattered_in_f32() {
        assert_eq!(
            lines(&sharded("cp=2,context=gather", DType::BF16), &[" = "], true),
            "\
F o.kv: bf16[batch:1, seq:12, kv_heads:2×2+kv_heads:2×2] @(cp: split 1) = slice(qkv) { first: 1, count: 2 }
F o.kv.gathered: bf16[batch:1, seq:12, kv_heads:2×2+kv_heads:2×2] = all_gather(o.kv) { over: cp, dim: Some(1) }
F o: bf16[batch:1, seq:12, heads:4×2] @(cp: split 1), o.lse: f32[batch:1, heads:4, seq:12] @(cp: split 2) = gathered_attention(qkv, o.kv.gathered) { window: None, ring: None }
B d.qkv.kv: bf16[batch:1, seq:12, kv_heads:2×2+kv_heads:2×2] @(cp: split 1) = slice(qkv) { first: 1, count: 2 }
B d.qkv.kv.gathered: bf16[batch:1, seq:12, kv_heads:2×2+kv_heads:2×2] = all_gather(d.qkv.kv) { over: cp, dim: Some(1) }
B d.qkv.dq: bf16[batch:1, seq:12, heads:4×2] @(cp: split 1), d.qkv.dq.dkv: f32[batch:1, seq:12, kv_heads:2×2+kv_heads:2×2] @(cp: partial) = gathered_attention_grad(do, qkv, d.qkv.kv.gathered, o, o.lse) { window: None, ring: None }
B d.qkv.dq.dkv.scattered: f32[batch:1, seq:12, kv_heads:2×2+kv_heads:2×2] @(cp: split 1) = reduce_scatter(d.qkv.dq.dkv) { over: cp, dim: Some(1) }
B d.qkv.dkv.rounded: bf16[batch:1, seq:12, kv_heads:2×2+kv_heads:2×2] @(cp: split 1) = cast(d.qkv.dq.dkv.scattered) { to: BF16 }
B d.qkv: bf16[batch:1, seq:12, heads:4×2+kv_heads:2×2+kv_heads:2×2] @(cp: split 1) = concat(d.qkv.dq, d.qkv.dkv.rounded)
"
        );
    }

    /// Attention with sinks and its gradients, sharded.
    fn with_sinks(layout: &str) -> String {
        let mut g = Graph::new();
        let heads = |axis| Section { axis, count: 4, unit: 2 };
        let act = |sections: &[Section]| {
            let [b, s] = [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, 12)];
            TensorType::new(DType::F32, [b, s, Dim::packed(sections.to_vec())])
        };
        let (q, kv) = (heads(Axis::Heads), heads(Axis::KvHeads));
        let qkv = g.input("qkv", act(&[q, kv, kv]));
        let dout = g.input("do", act(&[q]));
        let sink = TensorType::new(DType::F32, [Dim::new(Axis::Heads, 4)]);
        let sink = g.state("sink", sink, State::Parameter(Parameter::new(Init::Zeros, vec!["sink".into()])));
        let made = g.node(Op::Attention { window: None }, &[qkv], "a", Phase::Forward, Some(3)).unwrap();
        let op = Op::AttentionSink { each: false };
        let o = g.node(op, &[made[0], made[1], sink], "o", Phase::Forward, Some(3)).unwrap();
        let op = Op::AttentionSinkGrad { each: false };
        let rows = g.node(op, &[dout, o[0], o[1], sink], "dsinks", Phase::InputGrad, Some(3)).unwrap();
        g.node(Op::BiasGrad, &rows, "dsink", Phase::WeightGrad, Some(3)).unwrap();
        let op = Op::AttentionGrad { window: None };
        g.node(op, &[dout, qkv, o[0], o[1]], "d.qkv", Phase::InputGrad, Some(3)).unwrap();
        let layout: Layout = layout.parse().unwrap();
        let sharded = shard(&g, &Context { layout, ..small_model().1 }).unwrap();
        let text = short(&sharded);
        let about = |line: &&str| ["sink", " = attention", "merge"].iter().any(|what| line.contains(what));
        text.lines().filter(about).map(|line| format!("{line}\n")).collect()
    }

    #[test]
    fn sinks_follow_what_a_ring_has_merged() {
        assert_eq!(
            with_sinks("cp=2"),
            "\
F a, a.lse = attention_merge(a.step.0, a.step.0.lse, a.step.1, a.step.1.lse)
F o, o.lse = attention_sink(a, a.lse, sink)
B dsinks = attention_sink_grad(do, o, o.lse, sink)
W dsink @(cp: partial) = bias_grad(dsinks)
W dsink.reduced = all_reduce(dsink) { over: cp }
"
        );
    }

    #[test]
    fn sinks_are_applied_where_the_heads_are_and_sent_there_once() {
        let text = with_sinks("cp=2,context=a2a");
        for line in [
            "F a.heads, a.lse = attention(a.qkv.heads) { window: None }",
            "F o.sinks = expand_sinks(qkv, sink)",
            "F o.with_sinks, o.lse = attention_sink_each(a.heads, a.lse, o.sinks.heads)",
            "B dsinks.heads = attention_sink_each_grad(dsinks.do.heads, o.with_sinks, o.lse, o.sinks.heads)",
            "W dsink @(cp: partial) = bias_grad(dsinks)",
            "B d.qkv.heads = attention_grad(dsinks.do.heads, a.qkv.heads, o.with_sinks, o.lse) { window: None }",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
        assert_eq!(text.matches("all_to_all(o.sinks").count(), 1, "{text}");
    }
}
