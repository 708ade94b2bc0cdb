//! What evaluation shares with a training step, and what it has alone.

use super::{Lowering, Places};
use crate::local::Local;
use lockstep_ir::graph::{Source, Value};
use lockstep_ir::program::{Class, Lifetime, Role, Segment, Tensor};
use lockstep_ir::{Axes, Graph, ValueId};
use std::collections::BTreeMap;

/// The states, inputs and outputs of one graph as another knows them.
pub(super) struct Shared {
    pub places: Places,
    /// Index in the other graph.
    known: Vec<Option<usize>>,
}

/// Finds the values of `evaluate` that the host knows by name among those of `train`.
pub(super) fn shared_states(train: &Graph, evaluate: &Graph, persistent: &Places) -> Shared {
    let host = |g: &Graph, i: usize| !matches!(g.values[i].source, Source::Node { .. } | Source::Sum);
    let by_name: BTreeMap<&str, usize> = (0..train.values.len())
        .filter(|i| host(train, *i) || train.outputs.contains(&ValueId(*i)))
        .map(|i| (train.values[i].name.as_str(), i))
        .collect();
    let find = |i: usize| match host(evaluate, i) || evaluate.outputs.contains(&ValueId(i)) {
        true => by_name.get(evaluate.values[i].name.as_str()).copied(),
        false => None,
    };
    let known: Vec<Option<usize>> = (0..evaluate.values.len()).map(find).collect();
    Shared { places: known.iter().map(|k| k.and_then(|k| persistent[k])).collect(), known }
}

impl Shared {
    /// Lets instructions speak of shared values by their index in the other graph.
    pub fn rename(&self, segments: &mut [Segment], first: usize) {
        for instr in segments.iter_mut().flat_map(|s| &mut s.instrs) {
            for arg in instr.inputs.iter_mut().chain(instr.outputs.iter_mut().flatten()) {
                if let Some(known) = self.known[arg.value - first] {
                    arg.value = known;
                }
            }
        }
    }
}

impl Lowering<'_> {
    /// Gives outputs that evaluation alone has a buffer: one for all micro-batches, since it evaluates them one by one.
    pub(super) fn outputs_alone(&mut self, evaluation: &Local, shared: &mut Shared, first: usize) -> Vec<Tensor> {
        let g = evaluation.graph;
        let alone: Vec<ValueId> = g.outputs.iter().copied().filter(|v| shared.known[v.0].is_none()).collect();
        let tensor = |v: ValueId| {
            let Value { name, ty, sharding, .. } = g.get(v);
            let bytes = evaluation.bytes(v);
            let buffer = self.buffers.add(name, Class::Activations, None, Lifetime::Run, bytes);
            shared.places[v.0] = Some(buffer);
            Tensor {
                name: name.clone(),
                value: ValueId(first + v.0),
                ty: evaluation.ty(v),
                whole: ty.clone(),
                sharding: *sharding,
                buffer,
                part: Axes::NONE,
                role: Role::StepOutput,
            }
        };
        alone.into_iter().map(tensor).collect()
    }
}
