//! Lower: cuts the graphs into segments, decides what shares memory and how long it lives, and writes the schedule.
//!
//! Everything is known after this but the offsets.

use crate::Context;
use lockstep_ir::graph::{Node, Phase, Source, State};
use lockstep_ir::program::{Arg, BufferId, Class, Entry, Instr, Lifetime, Role, Segment, Slot, StepProgram, Tensor};
use lockstep_ir::{Graph, TypeError, ValueId};
use std::collections::BTreeMap;

/// A program whose buffers have no offsets yet.
pub(crate) struct Unplaced {
    pub buffers: Vec<UnplacedBuffer>,
    pub values: Vec<String>,
    pub tensors: Vec<Tensor>,
    pub segments: Vec<Segment>,
    pub entries: Vec<Entry>,
    pub micro_batches: usize,
    pub saved_slots: usize,
}

pub(crate) struct UnplacedBuffer {
    pub name: String,
    pub class: Class,
    pub layer: Option<usize>,
    pub lifetime: Lifetime,
    pub bytes: u64,
}

const FORWARD: usize = 0;
const BACKWARD: usize = 1;
const UPDATE: usize = 2;
const EVALUATE: usize = 3;

/// Lowers a training graph and the evaluation graph that it grew out of (its values are the first of the training
/// graph's).
pub(crate) fn lower(train: &Graph, evaluate: &Graph, context: &Context) -> Result<Unplaced, TypeError> {
    let mut lowering = Lowering { buffers: Vec::new(), context };
    let persistent = lowering.persistent(train);
    let of = |phases: &[Phase]| train.nodes.iter().filter(|n| phases.contains(&n.phase)).collect::<Vec<_>>();
    let parts: [(&'static str, Vec<&Node>); 3] = [
        ("forward", of(&[Phase::Forward])),
        ("backward", of(&[Phase::InputGrad, Phase::WeightGrad])),
        ("update", of(&[Phase::Update])),
    ];
    let mut segments = lowering.segments(train, &persistent, &parts, Lifetime::Frame)?;
    let evaluation = [("evaluate", evaluate.nodes.iter().collect::<Vec<_>>())];
    segments.extend(lowering.segments(evaluate, &persistent, &evaluation, Lifetime::Overlay)?);

    let micro_batches = context.layout.micro_batches;
    let slot = |segment, micro_batch| Slot { segment, micro_batch, saved_slot: 0 };
    let mut schedule: Vec<Slot> = (0..micro_batches).flat_map(|m| [slot(FORWARD, m), slot(BACKWARD, m)]).collect();
    schedule.push(slot(UPDATE, 0));
    Ok(Unplaced {
        buffers: lowering.buffers,
        values: train.values.iter().map(|v| v.name.clone()).collect(),
        tensors: tensors(train, &persistent),
        segments,
        entries: vec![
            Entry { name: StepProgram::TRAIN, schedule },
            Entry { name: StepProgram::EVALUATE, schedule: vec![slot(EVALUATE, 0)] },
        ],
        micro_batches,
        saved_slots: 1,
    })
}

/// Lowers forward passes that stand one behind the other in a graph, each with its number of nodes, to an entry each.
/// They share states and the frame.
pub(crate) fn lower_forward(
    g: &Graph,
    entries: &[(&'static str, usize)],
    context: &Context,
) -> Result<Unplaced, TypeError> {
    let mut lowering = Lowering { buffers: Vec::new(), context };
    let persistent = lowering.persistent(g);
    let mut nodes = g.nodes.iter();
    let parts: Vec<(&'static str, Vec<&Node>)> =
        entries.iter().map(|(name, count)| (*name, nodes.by_ref().take(*count).collect())).collect();
    let segments = lowering.segments(g, &persistent, &parts, Lifetime::Frame)?;
    let once = |segment| vec![Slot { segment, micro_batch: 0, saved_slot: 0 }];
    let entries = entries.iter().enumerate().map(|(s, (name, _))| Entry { name, schedule: once(s) }).collect();
    Ok(Unplaced {
        buffers: lowering.buffers,
        values: g.values.iter().map(|v| v.name.clone()).collect(),
        tensors: tensors(g, &persistent),
        segments,
        entries,
        micro_batches: 1,
        saved_slots: 1,
    })
}

/// Buffers of the values that the host knows by name, by value index.
type Persistent = Vec<Option<BufferId>>;

struct Lowering<'a> {
    buffers: Vec<UnplacedBuffer>,
    context: &'a Context,
}

impl Lowering<'_> {
    fn buffer(&mut self, name: &str, class: Class, layer: Option<usize>, lifetime: Lifetime, bytes: u64) -> BufferId {
        self.buffers.push(UnplacedBuffer { name: name.to_owned(), class, layer, lifetime, bytes });
        BufferId(self.buffers.len() - 1)
    }

    /// Gives states, inputs and outputs their buffers, states in class order so that a class is one range.
    fn persistent(&mut self, g: &Graph) -> Persistent {
        let layers = layers_of(g);
        let mut wanted: Vec<(Class, Lifetime, usize)> = Vec::new();
        for (i, value) in g.values.iter().enumerate() {
            match &value.source {
                Source::Input => wanted.push((Class::Activations, Lifetime::MicroBatch, i)),
                Source::State(state) => wanted.push((class_of(state), Lifetime::Run, i)),
                Source::Node { .. } => {}
            }
        }
        for v in &g.outputs {
            wanted.push(match produced_in(g, *v) {
                Phase::Update => (Class::Optimizer, Lifetime::Run, v.0),
                _ => (Class::Activations, Lifetime::MicroBatch, v.0),
            });
        }
        wanted.sort();
        let mut result = vec![None; g.values.len()];
        for (class, lifetime, i) in wanted {
            let value = &g.values[i];
            result[i] = Some(self.buffer(&value.name, class, layers[i], lifetime, value.ty.bytes()));
        }
        // A state's next value, and a sum over micro-batches, live where the state does.
        for &(state, next) in &g.updates {
            result[next.0] = result[state.0];
        }
        for i in 0..g.values.len() {
            if let Source::Node { into: Some(state) } = g.values[i].source {
                result[i] = result[state.0];
            }
        }
        result
    }

    fn segments(
        &mut self,
        g: &Graph,
        persistent: &Persistent,
        parts: &[(&'static str, Vec<&Node>)],
        temporary: Lifetime,
    ) -> Result<Vec<Segment>, TypeError> {
        let order: Vec<(usize, &Node)> =
            parts.iter().enumerate().flat_map(|(s, (_, nodes))| nodes.iter().map(move |n| (s, *n))).collect();
        let place = self.share(g, persistent, &order, temporary);
        let mut segments: Vec<Segment> = parts.iter().map(|(name, _)| Segment { name, instrs: Vec::new() }).collect();
        for (s, node) in order {
            let types = g.input_types(node);
            let arg = |v: ValueId| {
                let (state, accumulate) = match g.get(v).source {
                    Source::Node { into: Some(state) } => (state, true),
                    _ => (v, false),
                };
                let buffer = place[v.0].unwrap_or_else(|| panic!("`{}` has no buffer", g.get(v).name));
                Arg { buffer, value: state.0, ty: g.ty(state).clone(), accumulate }
            };
            let scratch = self.context.device.workspace(&node.op, &types)?;
            let inputs = node.inputs.iter().map(|&v| arg(v)).collect();
            let outputs = node.outputs.iter().map(|o| o.map(arg)).collect();
            let name = format!("scratch of {}", node.op.name());
            let workspace = (scratch > 0).then(|| self.buffer(&name, Class::Workspace, node.layer, temporary, scratch));
            let Node { op, phase, layer, .. } = *node;
            segments[s].instrs.push(Instr { op, inputs, outputs, workspace, phase, layer });
        }
        Ok(segments)
    }

    /// A buffer for every value: its own, or that of an input which dies in the call that makes it.
    fn share(
        &mut self,
        g: &Graph,
        persistent: &Persistent,
        order: &[(usize, &Node)],
        temporary: Lifetime,
    ) -> Persistent {
        let mut first = vec![None; g.values.len()];
        let mut last = vec![0; g.values.len()];
        for (t, (_, node)) in order.iter().enumerate() {
            node.inputs.iter().for_each(|v| last[v.0] = t);
            for v in node.outputs.iter().flatten() {
                first[v.0] = Some(t);
                last[v.0] = last[v.0].max(t);
            }
        }
        let mut place: Persistent = vec![None; g.values.len()];
        place[..persistent.len().min(g.values.len())]
            .copy_from_slice(&persistent[..persistent.len().min(g.values.len())]);
        for (t, (segment, node)) in order.iter().enumerate() {
            let mut taken: Vec<ValueId> = Vec::new();
            for (o, output) in node.outputs.iter().enumerate() {
                let Some(v) = *output else { continue };
                if place[v.0].is_some() {
                    continue;
                }
                let saved = order[last[v.0]].0 != *segment;
                let donor =
                    node.op.spec().in_place.iter().filter(|(_, to)| *to == o).map(|(i, _)| node.inputs[*i]).find(|x| {
                        let computed = first[x.0].is_some() && persistent.get(x.0).is_none_or(Option::is_none);
                        let once = node.inputs.iter().filter(|y| *y == x).count() == 1;
                        computed && once && last[x.0] == t && !taken.contains(x) && g.ty(*x) == g.ty(v)
                    });
                let buffer = match donor.and_then(|x| place[x.0].map(|b| (x, b))) {
                    Some((x, buffer)) => {
                        taken.push(x);
                        if saved {
                            self.buffers[buffer.0].lifetime = Lifetime::Saved;
                        }
                        buffer
                    }
                    None => {
                        let lifetime = if saved { Lifetime::Saved } else { temporary };
                        let name = &g.get(v).name;
                        self.buffer(name, Class::Activations, node.layer, lifetime, g.ty(v).bytes())
                    }
                };
                place[v.0] = Some(buffer);
            }
        }
        place
    }
}

fn tensors(g: &Graph, persistent: &Persistent) -> Vec<Tensor> {
    let known = g.values.iter().enumerate().filter_map(|(i, value)| {
        let role = match &value.source {
            Source::Input => Role::Input,
            Source::State(state) => Role::State(state.clone()),
            Source::Node { .. } if g.outputs.contains(&ValueId(i)) => match produced_in(g, ValueId(i)) {
                Phase::Update => Role::StepOutput,
                _ => Role::Output,
            },
            Source::Node { .. } => return None,
        };
        Some(Tensor { name: value.name.clone(), ty: value.ty.clone(), buffer: persistent[i]?, role })
    });
    known.collect()
}

fn produced_in(g: &Graph, v: ValueId) -> Phase {
    g.nodes.iter().find(|n| n.outputs.contains(&Some(v))).map_or(Phase::Forward, |n| n.phase)
}

fn class_of(state: &State) -> Class {
    match state {
        State::Parameter(_) | State::Constant(_) => Class::Parameters,
        State::Gradient => Class::Gradients,
        State::Moment { .. } | State::Master { .. } | State::Scalars => Class::Optimizer,
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
    let by_name: BTreeMap<&str, Option<usize>> =
        g.values.iter().zip(&layers).map(|(v, layer)| (v.name.as_str(), *layer)).collect();
    let follow = g.values.iter().enumerate().filter_map(|(i, value)| match &value.source {
        Source::State(State::Moment { of, .. } | State::Master { of }) => Some((i, by_name.get(of.as_str())?)),
        _ => None,
    });
    let follow: Vec<(usize, Option<usize>)> = follow.map(|(i, layer)| (i, *layer)).collect();
    follow.into_iter().for_each(|(i, layer)| layers[i] = layer);
    layers
}
