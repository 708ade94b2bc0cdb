//! The buffers of a rank's values: which of them share one, and how long each lives.

use crate::in_place::Freed;
use crate::local::Local;
use crate::slots::Works;
use lockstep_ir::graph::{Node, Phase, Source, State};
use lockstep_ir::op::Transfer;
use lockstep_ir::program::{BufferId, Class, Lifetime};
use lockstep_ir::schedule::Work;
use lockstep_ir::{DeviceProfile, Dim, Fusion, Graph, Op, ValueId};
use std::collections::{BTreeMap, BTreeSet};

pub(crate) struct UnplacedBuffer {
    pub name: String,
    pub class: Class,
    pub layer: Option<usize>,
    /// The chunk of layers that has it; 0 for what is none's.
    pub chunk: usize,
    pub lifetime: Lifetime,
    pub bytes: u64,
    /// Of what lives for a step in memory of another buffer: which, and how many bytes after its start.
    pub within: Option<(BufferId, u64)>,
}

/// Nodes that become a segment.
pub(super) struct Part<'a> {
    pub name: &'static str,
    pub chunk: usize,
    /// What of a micro-batch's work it is; `None` for what is done once.
    pub work: Option<Work>,
    /// Where what lives inside it goes.
    pub temporary: Lifetime,
    pub nodes: Vec<&'a Node>,
}

/// Buffers of the values that have one, by value index.
pub(super) type Places = Vec<Option<BufferId>>;

/// The buffers that there are so far.
pub(super) struct Buffers<'a> {
    pub all: Vec<UnplacedBuffer>,
    pub device: &'a DeviceProfile,
}

impl Buffers<'_> {
    pub(super) fn add(
        &mut self,
        name: &str,
        class: Class,
        layer: Option<usize>,
        lifetime: Lifetime,
        bytes: u64,
    ) -> BufferId {
        self.all.push(UnplacedBuffer { name: name.to_owned(), class, layer, chunk: 0, lifetime, bytes, within: None });
        BufferId(self.all.len() - 1)
    }

    /// Gives states, inputs and outputs their buffers, states in class order so that a class is one range.
    pub(super) fn persistent(&mut self, local: &Local) -> Places {
        let g = local.graph;
        let layers = layers_of(g);
        let from_host: BTreeSet<ValueId> =
            g.nodes.iter().filter(|n| n.op == Op::Fetch).flat_map(|n| n.inputs.iter().copied()).collect();
        let mut wanted: Vec<(Class, Lifetime, usize)> = Vec::new();
        for (i, value) in g.values.iter().enumerate().filter(|(i, _)| local.is_here(*i)) {
            match &value.source {
                Source::Input => wanted.push((Class::Activations, Lifetime::MicroBatch, i)),
                Source::State(state) => {
                    let lifetime = if from_host.contains(&ValueId(i)) { Lifetime::Host } else { Lifetime::Run };
                    wanted.push((class_of(state), lifetime, i));
                }
                Source::Node { .. } | Source::Sum => {}
            }
        }
        for v in &g.outputs {
            wanted.push(match produced_in(g, *v) {
                Phase::Update | Phase::Probe => (Class::Optimizer, Lifetime::Run, v.0),
                _ => (Class::Activations, Lifetime::MicroBatch, v.0),
            });
        }
        wanted.sort();
        let mut result = vec![None; g.values.len()];
        for (class, lifetime, i) in wanted {
            let name = &g.values[i].name;
            result[i] = Some(self.add(name, class, layers[i], lifetime, local.bytes(ValueId(i))));
        }
        // A state's next value, a rank's range of it and a sum over micro-batches live where the state does.
        for &(state, next) in g.updates.iter().chain(&g.parts) {
            result[next.0] = result[state.0];
        }
        for i in 0..g.values.len() {
            if let Source::Node { into: Some(state) } = g.values[i].source {
                result[i] = result[state.0];
            }
        }
        result
    }

    /// Whether a matmul may make this norm (see [`crate::join`]): its blocks read what is added up while one of them stores the sum.
    fn is_read_while_summed(&self, local: &Local, node: &Node) -> bool {
        let rows = || local.ty(node.inputs[0]).dims.iter().rev().skip(1).map(Dim::size).product::<usize>();
        matches!(node.op, Op::Norm { residual: true, .. })
            && local.graph.losses.is_empty()
            && self.device.fusions.contains(&Fusion::NormMatmul)
            && rows() <= Fusion::NORM_ROWS
    }

    /// A buffer for every value: its own, or that of an input which dies in the call that makes it.
    pub(super) fn share(
        &mut self,
        local: &Local,
        persistent: &Places,
        parts: &[Part],
        order: &[(usize, &Node)],
        works: Works,
    ) -> Places {
        let g = local.graph;
        // The segment in which each buffer is first written.
        let mut begun: BTreeMap<BufferId, usize> = BTreeMap::new();
        let mut first = vec![None; g.values.len()];
        let mut last = vec![0; g.values.len()];
        for (t, (_, node)) in order.iter().enumerate() {
            node.inputs.iter().for_each(|v| last[local.meant(*v).0.0] = t);
            for v in node.outputs.iter().flatten().map(|v| local.meant(*v).0) {
                first[v.0] = first[v.0].or(Some(t));
                last[v.0] = last[v.0].max(t);
            }
        }
        let mut place: Places = persistent.clone();
        let mut freed = Freed::default();
        for (t, (segment, node)) in order.iter().enumerate() {
            let prepares = node.phase == Phase::Prepare;
            let frees = prepares && (node.op.quantises_weight() || node.op == Op::Accumulate);
            let mut home = if frees { freed.pass(local, node, &place) } else { None };
            let mut taken: Vec<ValueId> = Vec::new();
            for (o, output) in node.outputs.iter().enumerate() {
                let Some(v) = output.map(|v| local.meant(v).0) else { continue };
                if place[v.0].is_some() {
                    continue;
                }
                let until = order[last[v.0]].0;
                let spec = node.op.spec();
                let pair = |to: usize| if spec.each() { o } else { to };
                let read_on = self.is_read_while_summed(local, node);
                let donors = spec.in_place.iter().filter(|(_, to)| pair(*to) == o && !read_on);
                let donor = donors.map(|(i, _)| node.inputs[if spec.each() { o } else { *i }]).find(|x| {
                    let computed = first[x.0].is_some() && persistent.get(x.0).is_none_or(Option::is_none);
                    let once = node.inputs.iter().filter(|y| *y == x).count() == 1;
                    // What is made once per step is read in every micro-batch.
                    let stays = |b: BufferId| matches!(self.all[b.0].lifetime, Lifetime::Run | Lifetime::Step);
                    let computed = computed && !place[x.0].is_some_and(stays);
                    let same = local.ty(*x) == local.ty(v) && local.bytes(*x) >= local.bytes(v);
                    computed && once && last[x.0] == t && !taken.contains(x) && same
                });
                let buffer = match donor.and_then(|x| place[x.0].map(|b| (x, b))) {
                    Some((x, buffer)) => {
                        taken.push(x);
                        buffer
                    }
                    None => {
                        let name = &g.get(v).name;
                        let class = match node.op {
                            Op::Fetch if node.phase == Phase::Update => Class::Optimizer,
                            _ if is_gathered(node) => Class::Communication,
                            _ => Class::Activations,
                        };
                        self.add(name, class, node.layer, parts[*segment].temporary, local.bytes(v))
                    }
                };
                let from = *begun.entry(buffer).or_insert(*segment);
                if until != *segment && prepares {
                    let own = &mut self.all[buffer.0];
                    let bytes = local.ty(v).dtype.is_fp8().then_some(own.bytes);
                    own.within = bytes.and_then(|bytes| home.as_mut()?.take(bytes, self.device));
                    own.lifetime = if own.within.is_some() { Lifetime::Step } else { Lifetime::Run };
                    own.class = Class::Parameters;
                } else if until != *segment {
                    let saved = works.region(parts[from].work, parts[until].work);
                    let in_host = node.op == Op::Offload;
                    let lifetime = if in_host { Lifetime::SavedInHost(saved) } else { Lifetime::Saved(saved) };
                    (self.all[buffer.0].lifetime, self.all[buffer.0].chunk) = (lifetime, parts[from].chunk);
                }
                place[v.0] = Some(buffer);
            }
        }
        place
    }
}

/// Whether a node's outputs are copies of what other ranks hold.
fn is_gathered(node: &Node) -> bool {
    match node.op.transfer() {
        Some(Transfer::AllGather { .. } | Transfer::Shift { .. } | Transfer::Receive { .. }) => true,
        Some(
            Transfer::AllReduce { .. }
            | Transfer::SumShared { .. }
            | Transfer::ReduceScatter { .. }
            | Transfer::AllToAll { .. }
            | Transfer::Send { .. },
        )
        | None => false,
    }
}

pub(super) fn produced_in(g: &Graph, v: ValueId) -> Phase {
    g.nodes.iter().find(|n| n.outputs.contains(&Some(v))).map_or(Phase::Forward, |n| n.phase)
}

fn class_of(state: &State) -> Class {
    match state {
        State::Parameter(_) | State::Unit { .. } | State::Constant(_) => Class::Parameters,
        State::Gradient { .. } => Class::Gradients,
        State::Moment { .. } | State::Master { .. } | State::Scalars | State::Total(_) | State::History(_) => {
            Class::Optimizer
        }
        State::Cache => Class::Activations,
    }
}

/// The layer of each state: that of the first forward or backward node that reads or sums into it, and for moments that of their parameter.
fn layers_of(g: &Graph) -> Vec<Option<usize>> {
    let mut layers = vec![None; g.values.len()];
    let mut seen = vec![false; g.values.len()];
    for node in &g.nodes {
        let sums = node.outputs.iter().flatten().filter_map(|v| match g.get(*v).source {
            Source::Node { into } => into,
            _ => None,
        });
        let layer = node.layer;
        for v in node.inputs.iter().copied().chain(sums) {
            let shared = matches!(g.get(v).source, Source::State(State::Constant(_)));
            if !std::mem::replace(&mut seen[v.0], true) && !shared {
                layers[v.0] = layer;
            }
        }
    }
    for (i, value) in g.values.iter().enumerate() {
        if let Source::State(State::Moment { of, .. } | State::Master { of }) = value.source {
            layers[i] = layers[of.0];
        }
    }
    layers
}
