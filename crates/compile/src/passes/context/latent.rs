//! The ring of the latent: what goes around in latent attention is what keys and values of all heads expand from.
//!
//! A message is the latent of a rank's positions and the key that all heads share, which its owner has rotated: 576 numbers a token in
//! DeepSeek-V3 instead of 40,960. A rank attends over its own keys and values as one rank would, and rebuilds those of others: a matmul by the
//! same weight, and then heads. Backward sends the messages around again and rebuilds once more. The gradient of a step goes back through the
//! heads and the matmul where it arises: to the weight, where it stays and is reduced with the rest, and to the message, whose gradient goes
//! around in f32. What arrives is added to the gradients of the owner's latent and shared key.
//!
//! Where linear layers multiply in fp8, the rebuilt matmuls multiply in the type of the latent: they have no units of their own, and their
//! gradients add to what a rank has of its own.
//!
//! Tensor-parallel ranks rebuild their heads, so gradients of messages are partial sums over them. They stay so on their way, and are reduced
//! together with what the owner has itself.

use super::{Parcel, Rewrite};
use lockstep_ir::graph::{Node, Phase, Source, Value};
use lockstep_ir::{DType, Graph, Op, TypeError, ValueId};
use std::collections::BTreeMap;

/// Where packed Q·K·V of latent attention comes from.
#[derive(Clone, Debug)]
pub(super) struct Origin {
    latent: ValueId,
    /// The matmul by which the latent expands: the op, its gradient by the input, and what both read beside that.
    expand: Op,
    expand_back: Op,
    weight: Vec<ValueId>,
    tf32: bool,
    /// The key that all heads share, before RoPE; the table of RoPE and starts of documents, where there are some.
    shared: ValueId,
    angles: Vec<ValueId>,
    /// Elements of a head with RoPE, and of one of V.
    rope: usize,
    value: usize,
}

/// Gradients that arrive at the owner of a latent.
#[derive(Debug)]
struct Arrival {
    origin: Origin,
    /// Of the latent and of the shared key, in f32.
    others: [ValueId; 2],
}

/// What is known of latent attention in a graph.
#[derive(Default)]
pub(super) struct Latents {
    /// By packed Q·K·V that attention reads; none where keys and values go around as they are.
    origins: Option<BTreeMap<ValueId, Origin>>,
    /// The latent and the rotated shared key, by packed Q·K·V.
    messages: BTreeMap<ValueId, [ValueId; 2]>,
    arrivals: Vec<Arrival>,
    /// Which of them is to be added: by gradients of packed Q·K·V, and of what the latent expands to.
    of_heads: BTreeMap<ValueId, usize>,
    of_expanded: BTreeMap<ValueId, usize>,
    /// Whether these values stay partial sums over tensor-parallel ranks, or are reduced where they are made.
    pub partial: BTreeMap<ValueId, bool>,
}

impl Latents {
    /// Finds what attention reads: in the forward pass, and recomputed.
    pub fn of(g: &Graph) -> Self {
        let made = |node: &Node| node.outputs.iter().flatten().copied().collect::<Vec<_>>();
        let makers: BTreeMap<ValueId, &Node> =
            g.nodes.iter().flat_map(|node| made(node).into_iter().map(move |v| (v, node))).collect();
        let read = g.nodes.iter().filter_map(|node| match node.op {
            Op::Attention { .. } => Some(node.inputs[0]),
            Op::AttentionGrad { .. } => Some(node.inputs[1]),
            _ => None,
        });
        let origins = read.filter_map(|qkv| Some((qkv, origin(g, &makers, qkv)?))).collect();
        Self { origins: Some(origins), ..Self::default() }
    }

    /// Where packed Q·K·V comes from, if the latent goes around.
    pub fn origin(&self, qkv: ValueId) -> Result<Option<Origin>, TypeError> {
        let Some(origins) = &self.origins else { return Ok(None) };
        let reason = || "the ring of the latent takes keys and values that one matmul expands from a latent".to_owned();
        origins.get(&qkv).cloned().map(Some).ok_or_else(|| TypeError { op: "attention", reason: reason() })
    }

    /// Notes what has arrived for the gradient of packed Q·K·V.
    pub fn arrives(&mut self, dqkv: Option<ValueId>, origin: Origin, others: &[ValueId]) {
        if let (Some(dqkv), &[latent, shared]) = (dqkv, others) {
            self.of_heads.insert(dqkv, self.arrivals.len());
            self.arrivals.push(Arrival { origin, others: [latent, shared] });
        }
    }

    /// Appends a node, and where it gives the gradient of a latent or of a shared key, adds what has arrived to it.
    pub fn add_what_arrived(&mut self, g: &mut Graph, node: Node) -> Result<(), TypeError> {
        let find = |known: &BTreeMap<ValueId, usize>| node.inputs.iter().find_map(|v| known.get(v).copied());
        let (heads, expanded) = (find(&self.of_heads), find(&self.of_expanded));
        match (node.op, heads, expanded) {
            (Op::Rope { inverse: true }, Some(at), _) => {
                self.of_heads.extend(node.outputs.iter().flatten().map(|v| (*v, at)));
            }
            (Op::LatentHeadsGrad { .. }, Some(at), _) => {
                self.of_expanded.extend(node.outputs[1].map(|v| (v, at)));
                let Arrival { origin, others: [_, shared] } = &self.arrivals[at];
                let reads = [&[*shared], &origin.angles[..]].concat();
                return add(g, (node, 2), &mut self.partial, |g, (name, phase, layer)| {
                    Ok(g.node(Op::SharedKey { inverse: true }, &reads, &format!("{name}.others"), phase, layer)?[0])
                });
            }
            (_, _, Some(at)) if node.phase == Phase::InputGrad => {
                let Arrival { origin, others: [latent, _] } = &self.arrivals[at];
                let dims = &g.ty(origin.latent).dims;
                let gradient = node.outputs.iter().position(|v| v.is_some_and(|v| g.ty(v).dims == *dims));
                if let Some(output) = gradient {
                    let latent = *latent;
                    // Nothing that follows is of it.
                    self.of_expanded.retain(|_, other| *other != at);
                    return add(g, (node, output), &mut self.partial, |_, _| Ok(latent));
                }
                // In fp8 it is measured and quantised first.
                self.of_expanded.extend(node.outputs.iter().flatten().map(|v| (*v, at)));
            }
            _ => {}
        }
        g.nodes.push(node);
        Ok(())
    }
}

/// Name, phase and layer of what is added.
type Of<'a> = (&'a str, Phase, Option<usize>);

/// Appends a node to whose output a value in f32 is added. Over tensor-parallel ranks both are partial sums, which are reduced together.
fn add(
    g: &mut Graph,
    (mut node, output): (Node, usize),
    partial: &mut BTreeMap<ValueId, bool>,
    other: impl FnOnce(&mut Graph, Of) -> Result<ValueId, TypeError>,
) -> Result<(), TypeError> {
    let Some(sum) = node.outputs[output] else {
        g.nodes.push(node);
        return Ok(());
    };
    let Value { name, ty, .. } = g.get(sum).clone();
    let (phase, layer) = (node.phase, node.layer);
    let value = Value { name: format!("{name}.own"), source: Source::Node { into: None }, ..g.get(sum).clone() };
    g.values.push(value);
    let own = ValueId(g.values.len() - 1);
    node.outputs[output] = Some(own);
    partial.extend([(own, true), (sum, false)]);
    g.nodes.push(node);
    let mut other = other(g, (&name, phase, layer))?;
    if ty.dtype != DType::F32 {
        other = g.node(Op::Cast { to: ty.dtype }, &[other], &format!("{name}.rounded"), phase, layer)?[0];
    }
    g.node(Op::Add, &[own, other], &name, phase, layer)?;
    if let Some(last) = g.nodes.last_mut() {
        last.outputs[0] = Some(sum);
    }
    Ok(())
}

/// Where packed Q·K·V comes from, if that is a latent and one matmul.
fn origin(g: &Graph, makers: &BTreeMap<ValueId, &Node>, qkv: ValueId) -> Option<Origin> {
    let (heads, angles) = match makers.get(&qkv)? {
        Node { op: Op::Rope { inverse: false }, inputs, .. } => (*makers.get(&inputs[0])?, inputs[1..].to_vec()),
        node => (*node, Vec::new()),
    };
    let Node { op: Op::LatentHeads { absorbed: false, .. }, inputs, .. } = heads else { return None };
    let &[_, expanded, shared] = &inputs[..] else { return None };
    let matmul = makers.get(&expanded)?;
    // What was quantised.
    let before = |v: ValueId| match makers.get(&v)? {
        Node { op: Op::Quantise { .. } | Op::QuantiseFine { .. }, inputs, .. } => Some(inputs[0]),
        _ => None,
    };
    let (expand, expand_back, latent, weight) = match (matmul.op, &matmul.inputs[..]) {
        (Op::Linear, &[latent, w]) => (Op::Linear, Op::LinearGradInput, latent, vec![w]),
        (Op::ByteLinear, &[latent, w, unit]) => (Op::ByteLinear, Op::ByteLinearGradInput, latent, vec![w, unit]),
        (Op::Fp8Linear { .. } | Op::FineLinear { .. }, &[x, _, w, _]) => {
            (Op::Linear, Op::LinearGradInput, before(x)?, vec![before(w)?])
        }
        _ => return None,
    };
    let (rope, value) = (g.ty(shared).dims.last()?.size(), g.ty(qkv).dims.last()?.sections.get(2)?.unit);
    Some(Origin { latent, expand, expand_back, weight, tf32: matmul.tf32, shared, angles, rope, value })
}

impl Rewrite<'_> {
    /// The latent and the rotated shared key: those of forward, where attention has read the same there.
    pub(super) fn message(&mut self, qkv: ValueId, origin: &Origin) -> Result<Parcel, TypeError> {
        if let Some(message) = self.sent.latents.messages.get(&qkv) {
            return Ok(message.to_vec());
        }
        let reads = [&[origin.shared], &origin.angles[..]].concat();
        let message = [origin.latent, self.one(Op::SharedKey { inverse: false }, &reads, "shared_key")?];
        self.sent.latents.messages.insert(qkv, message);
        Ok(message.to_vec())
    }

    /// Keys and values of what another rank has sent.
    pub(super) fn rebuilt(&mut self, origin: &Origin, parcel: &[ValueId], step: usize) -> Result<ValueId, TypeError> {
        let reads = [&parcel[..1], &origin.weight].concat();
        let expanded = self.repeated(origin, origin.expand, &reads, &format!("expanded.{step}"))?;
        self.one(Op::LatentKeys { value: origin.value }, &[expanded, parcel[1]], &format!("rebuilt.{step}"))
    }

    /// Gradients, in f32, of what another rank has sent, by those of its keys and values. That of the weight stays.
    pub(super) fn gradients(
        &mut self,
        origin: &Origin,
        parcel: &[ValueId],
        dkv: ValueId,
        step: usize,
    ) -> Result<Parcel, TypeError> {
        let dkv = self.cast(dkv, self.g.ty(origin.latent).dtype, &format!("dkv.{step}.rounded"))?;
        let made = self.node(Op::LatentKeysGrad { rope: origin.rope }, &[dkv], &format!("dexpanded.{step}"))?;
        let reads = [&made[..1], &origin.weight].concat();
        let dlatent = self.repeated(origin, origin.expand_back, &reads, &format!("dlatent.{step}"))?;
        if let Some(&sum) = self.g.gradients_of(origin.weight[0]).first() {
            let name = format!("dw.{step}.{}", self.g.get(origin.weight[0]).name);
            let dw = self.g.node(Op::LinearGradWeight, &[made[0], parcel[0]], &name, Phase::WeightGrad, self.layer)?[0];
            self.mark_repeated(origin);
            let accumulator = self.g.ty(sum).dtype;
            let value = &mut self.g.values[dw.0];
            (value.source, value.ty.dtype) = (Source::Node { into: Some(sum) }, accumulator);
        }
        self.sent.latents.partial.insert(dlatent, true);
        [(dlatent, "dlatent"), (made[1], "dshared")]
            .into_iter()
            .map(|(v, what)| self.cast(v, DType::F32, &format!("{what}.{step}.f32")))
            .collect()
    }

    /// A matmul of the model that this rank does for positions of another.
    fn repeated(&mut self, origin: &Origin, op: Op, reads: &[ValueId], what: &str) -> Result<ValueId, TypeError> {
        let made = self.one(op, reads, what)?;
        self.mark_repeated(origin);
        Ok(made)
    }

    fn mark_repeated(&mut self, origin: &Origin) {
        self.g.keep_tf32(origin.tf32);
        if let Some(last) = self.g.nodes.last_mut() {
            last.repeated = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::passes::shard::shard;
    use crate::passes::tests::{lines, small_model};
    use crate::{Context, passes};
    use lockstep_ir::graph::{Loss, Parameter, State};
    use lockstep_ir::{Axis, DType, Dim, Graph, Init, Layout, Op, TensorType};

    /// Attention of two heads whose keys and values expand from a latent of 3: a part of 1 element without position, 2 with RoPE, V of 4.
    fn sharded(layout: &str, dtype: DType) -> Graph {
        let mut g = Graph::new();
        let [b, s] = [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, 12)];
        let act = |dim| TensorType::new(dtype, [b.clone(), s.clone(), dim]);
        let (latent, rope) = (Dim::new(Axis::Latent, 3), Dim::new(Axis::HeadDim, 2));
        let expanded = Dim::grouped(Axis::KvHeads, 2, 5);
        let parameter = |g: &mut Graph, name: &str, dims: Vec<Dim>| {
            let parameter = Parameter::new(Init::Ones, vec![name.into()]);
            g.state(name, TensorType::new(dtype, dims), State::Parameter(parameter))
        };
        let x = g.input("x", act(latent.clone()));
        let norm = parameter(&mut g, "norm", vec![latent.clone()]);
        let w = parameter(&mut g, "w", vec![expanded, latent]);
        let wo = parameter(&mut g, "wo", vec![Dim::new(Axis::Embed, 3), Dim::grouped(Axis::Heads, 2, 4)]);
        let out = parameter(&mut g, "out", vec![Dim::new(Axis::Vocab, 4), Dim::new(Axis::Embed, 3)]);
        let table = TensorType::new(DType::F32, [Dim::new(Axis::Seq, 12), rope.clone()]);
        let table = g.state("table", table, State::Constant(Init::RopeTable { theta: 1e4, scaling: None }));
        let q = parameter(&mut g, "wq", vec![Dim::grouped(Axis::Heads, 2, 3), Dim::new(Axis::Latent, 3)]);
        let shared = parameter(&mut g, "ws", vec![rope, Dim::new(Axis::Latent, 3)]);
        let ids = TensorType::new(DType::U32, [b, s]);
        let targets = g.input("targets", ids);
        g.enter_layer(Some(0));
        let mut op = |op, inputs: &[_], name| g.op(op, inputs, name).unwrap()[0];
        let c = op(Op::rms_norm(1e-6), &[x, norm], "c");
        let kv = op(Op::Linear, &[c, w], "kv");
        let q = op(Op::Linear, &[x, q], "q");
        let key = op(Op::Linear, &[x, shared], "key");
        let qkv = op(Op::LatentHeads { absorbed: false, scale: 1.0 }, &[q, kv, key], "qkv");
        let rotated = op(Op::Rope { inverse: false }, &[qkv, table], "rotated");
        let o = op(Op::Attention { window: None }, &[rotated], "o");
        let y = op(Op::Linear, &[o, wo], "y");
        g.enter_layer(None);
        let logits = g.op(Op::Linear, &[y, out], "logits").unwrap()[0];
        let loss = g.op(Op::CrossEntropy, &[logits, targets], "loss").unwrap()[0];
        g.outputs.push(loss);
        g.losses.push(Loss { value: loss, weight: 1.0 });
        let layout: Layout = layout.parse().unwrap();
        let context = Context { layout, ..small_model().1 };
        let fused = passes::fuse(&g, &context).unwrap();
        shard(&passes::autodiff(&fused, &context).unwrap(), &context).unwrap()
    }

    /// What is sent, rebuilt and added, without types.
    fn short(g: &Graph) -> String {
        let words = ["shift", "shared_key", "latent_", "repeated", "sum.2", "dshared", "d.c", "merge", "kv", "ring_"];
        let calls = lines(g, &words, false);
        let left_out = ["dq.sum", "F kv", "F qkv", "F rotated", "norm", "W dw.ws"];
        let is_shown = |line: &&str| line.contains(" = ") && !left_out.iter().any(|word| line.contains(word));
        let calls = calls.lines().filter(is_shown);
        let cut =
            |line: &str| [" @(cp: split 1)", " @(cp: split 2)"].iter().fold(line.to_owned(), |l, at| l.replace(at, ""));
        calls.map(|line| cut(line) + "\n").collect()
    }

    #[test]
    fn the_latent_and_the_rotated_key_go_around_and_their_gradients_come_back() {
        assert_eq!(
            short(&sharded("cp=3,context=latent", DType::F32)),
            "\
F o.shared_key = shared_key(key, table) { inverse: false }
F o.kv.1, o.kv.1.x = shift(c, o.shared_key) { over: cp }
F o.kv = slice(rotated) { first: 1, count: 2 }
F o.step.0, o.step.0.lse = ring_attention(rotated, o.kv) { window: None, ring: Some(Ring { step: 0, parts: 3 }) }
F o.kv.2, o.kv.2.x = shift(o.kv.1, o.kv.1.x) { over: cp }
F o.expanded.1 = linear(o.kv.1, w) repeated
F o.rebuilt.1 = latent_keys(o.expanded.1, o.kv.1.x) { value: 4 }
F o.step.1, o.step.1.lse = ring_attention(rotated, o.rebuilt.1) { window: None, ring: Some(Ring { step: 1, parts: 3 }) }
F o.sum.1, o.sum.1.lse = attention_merge(o.step.0, o.step.0.lse, o.step.1, o.step.1.lse)
F o.expanded.2 = linear(o.kv.2, w) repeated
F o.rebuilt.2 = latent_keys(o.expanded.2, o.kv.2.x) { value: 4 }
F o.step.2, o.step.2.lse = ring_attention(rotated, o.rebuilt.2) { window: None, ring: Some(Ring { step: 2, parts: 3 }) }
F o, o.lse = attention_merge(o.sum.1, o.sum.1.lse, o.step.2, o.step.2.lse)
B d.rotated.kv.1, d.rotated.kv.1.x = shift(c, o.shared_key) { over: cp }
B d.rotated.kv = slice(rotated) { first: 1, count: 2 }
B d.rotated.dq.0, d.rotated.dq.0.dkv = ring_attention_grad(d.o, rotated, d.rotated.kv, o, o.lse) { window: None, ring: Some(Ring { step: 0, parts: 3 }) }
B d.rotated.kv.2, d.rotated.kv.2.x = shift(d.rotated.kv.1, d.rotated.kv.1.x) { over: cp }
B d.rotated.expanded.1 = linear(d.rotated.kv.1, w) repeated
B d.rotated.rebuilt.1 = latent_keys(d.rotated.expanded.1, d.rotated.kv.1.x) { value: 4 }
B d.rotated.dq.1, d.rotated.dq.1.dkv = ring_attention_grad(d.o, rotated, d.rotated.rebuilt.1, o, o.lse) { window: None, ring: Some(Ring { step: 1, parts: 3 }) }
B d.rotated.dexpanded.1, d.rotated.dexpanded.1.dshared = latent_keys_grad(d.rotated.dq.1.dkv) { rope: 2 }
B d.rotated.dlatent.1 = linear_grad_input(d.rotated.dexpanded.1, w) repeated
W dw.1.w @(cp: partial) += grad.w = linear_grad_weight(d.rotated.dexpanded.1, d.rotated.kv.1) repeated
B d.rotated.dkv.1, d.rotated.dkv.1.x = shift(d.rotated.dlatent.1, d.rotated.dexpanded.1.dshared) { over: cp }
B d.rotated.expanded.2 = linear(d.rotated.kv.2, w) repeated
B d.rotated.rebuilt.2 = latent_keys(d.rotated.expanded.2, d.rotated.kv.2.x) { value: 4 }
B d.rotated.dq.2, d.rotated.dq.2.dkv = ring_attention_grad(d.o, rotated, d.rotated.rebuilt.2, o, o.lse) { window: None, ring: Some(Ring { step: 2, parts: 3 }) }
B d.rotated.dexpanded.2, d.rotated.dexpanded.2.dshared = latent_keys_grad(d.rotated.dq.2.dkv) { rope: 2 }
B d.rotated.dlatent.2 = linear_grad_input(d.rotated.dexpanded.2, w) repeated
W dw.2.w @(cp: partial) += grad.w = linear_grad_weight(d.rotated.dexpanded.2, d.rotated.kv.2) repeated
B d.rotated.dkv.sum.2 = add(d.rotated.dkv.1, d.rotated.dlatent.2)
B d.rotated.dshared.sum.2 = add(d.rotated.dkv.1.x, d.rotated.dexpanded.2.dshared)
B d.rotated.dkv.2, d.rotated.dkv.2.x = shift(d.rotated.dkv.sum.2, d.rotated.dshared.sum.2) { over: cp }
B d.qkv = rope(d.rotated, table) { inverse: true }
B d.q, d.q.dkv, d.q.dshared.own = latent_heads_grad(d.qkv) { rope: 2, scale: 1.0 }
B d.q.dshared.others = shared_key(d.rotated.dkv.2.x, table) { inverse: true }
B d.q.dshared = add(d.q.dshared.own, d.q.dshared.others)
B d.c.own = linear_grad_input(d.q.dkv, w)
B d.c = add(d.c.own, d.rotated.dkv.2)
W dw.w @(cp: partial) += grad.w = linear_grad_weight(d.q.dkv, c)
"
        );
    }

    #[test]
    fn gradients_go_around_in_f32_as_partial_sums_over_heads_and_are_reduced_where_they_arrive() {
        let g = sharded("cp=2,tp=2,context=latent", DType::BF16);
        let about = ["dlatent.", "dshared", "d.rotated.dkv.1", "d.c", "shared_key(", "shift("];
        let calls = lines(&g, &about, true);
        let ends = calls.lines().filter(|line| line.starts_with("B ") && line.contains(" = "));
        let types = |line: &str| line.replace("batch:1, seq:12, ", "").replace("cp: split 1", "cp");
        assert_eq!(
            ends.map(|line| types(line) + "\n").collect::<String>(),
            "\
B d.rotated.kv.1: bf16[latent:3] @(cp), d.rotated.kv.1.x: bf16[head_dim:2] @(cp) = shift(c, o.shared_key) { over: cp }
B d.rotated.dkv.1.rounded: bf16[kv_heads:2×3+kv_heads:2×4] @(cp, tp: split 2) = cast(d.rotated.dq.1.dkv) { to: BF16 }
B d.rotated.dexpanded.1: bf16[kv_heads:2×5] @(cp, tp: split 2), d.rotated.dexpanded.1.dshared: bf16[head_dim:2] @(cp, tp: partial) = latent_keys_grad(d.rotated.dkv.1.rounded) { rope: 2 }
B d.rotated.dlatent.1: bf16[latent:3] @(cp, tp: partial) = linear_grad_input(d.rotated.dexpanded.1, w) repeated
B d.rotated.dlatent.1.f32: f32[latent:3] @(cp, tp: partial) = cast(d.rotated.dlatent.1) { to: F32 }
B d.rotated.dshared.1.f32: f32[head_dim:2] @(cp, tp: partial) = cast(d.rotated.dexpanded.1.dshared) { to: F32 }
B d.rotated.dkv.1: f32[latent:3] @(cp, tp: partial), d.rotated.dkv.1.x: f32[head_dim:2] @(cp, tp: partial) = shift(d.rotated.dlatent.1.f32, d.rotated.dshared.1.f32) { over: cp }
B d.q: bf16[heads:2×3] @(cp, tp: split 2), d.q.dkv: bf16[kv_heads:2×5] @(cp, tp: split 2), d.q.dshared.own: bf16[head_dim:2] @(cp, tp: partial) = latent_heads_grad(d.qkv) { rope: 2, scale: 1.0 }
B d.q.dshared.others: f32[head_dim:2] @(cp, tp: partial) = shared_key(d.rotated.dkv.1.x, table) { inverse: true }
B d.q.dshared.rounded: bf16[head_dim:2] @(cp, tp: partial) = cast(d.q.dshared.others) { to: BF16 }
B d.q.dshared: bf16[head_dim:2] @(cp, tp: partial) = add(d.q.dshared.own, d.q.dshared.rounded)
B d.q.dshared.reduced: bf16[head_dim:2] @(cp) = all_reduce(d.q.dshared) { over: tp }
B d.c.own: bf16[latent:3] @(cp, tp: partial) = linear_grad_input(d.q.dkv, w)
B d.c.rounded: bf16[latent:3] @(cp, tp: partial) = cast(d.rotated.dkv.1) { to: BF16 }
B d.c: bf16[latent:3] @(cp, tp: partial) = add(d.c.own, d.c.rounded)
B d.c.reduced: bf16[latent:3] @(cp) = all_reduce(d.c) { over: tp }
"
        );
    }

    #[test]
    fn keys_and_values_that_do_not_expand_from_a_latent_are_refused() {
        let mut g = Graph::new();
        let act = TensorType::new(
            DType::F32,
            [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, 12), {
                let heads = |axis| lockstep_ir::Section { axis, count: 2, unit: 2 };
                Dim::packed([heads(Axis::Heads), heads(Axis::KvHeads), heads(Axis::KvHeads)])
            }],
        );
        let qkv = g.input("qkv", act);
        g.op(Op::Attention { window: None }, &[qkv], "o").unwrap();
        let layout: Layout = "cp=2,context=latent".parse().unwrap();
        let error = shard(&g, &Context { layout, ..small_model().1 }).unwrap_err().to_string();
        assert!(error.contains("one matmul expands from a latent"), "{error}");
    }
}
