//! Autodiff: appends the backward pass, derived from one rule per op.
//!
//! Gradients are those of the weighted *sum* of token losses; the optimizer divides by the counted targets of the global batch,
//! so no micro-batch needs to know of the others. Nodes that the layer below waits for are tagged B, weight gradients W;
//! each W stands right behind the B that feeds it. Every use of a parameter gets an accumulator of its own (those of a
//! tied table are added once, by the optimizer pass), named `grad.<parameter>`, `grad.<parameter>.2` and so on.
//!
//! In f16, and where gradients are summed in fixed point, they start with the step's loss scale instead of 1; the optimizer
//! takes it out again.

use crate::{Context, Precision};
use lockstep_ir::graph::{Loss, Node, Phase, Source, State};
use lockstep_ir::op::Saved;
use lockstep_ir::{DType, Graph, Op, StepScalars, TensorType, TypeError, ValueId};
use std::collections::BTreeMap;

/// Runs the pass.
pub fn autodiff(graph: &Graph, context: &Context) -> Result<Graph, TypeError> {
    let mut g = graph.clone();
    let Precision { compute, gradients } = context.precision;
    let scalars = match compute == DType::F16 || gradients == DType::Fixed64 {
        true => Some(scale(&mut g)?),
        false => None,
    };
    let forward = g.nodes.clone();
    let mut backward = Backward {
        grads: vec![None; g.values.len()],
        slices: BTreeMap::new(),
        losses: g.losses.clone(),
        accumulator: context.precision.gradients,
        casts: widening_casts(&g),
        scalars,
    };
    for node in forward.iter().rev() {
        backward.node(&mut g, node)?;
    }
    Ok(g.without_dead_code())
}

struct Backward {
    /// The gradient of each forward value, as far as it has been summed up.
    grads: Vec<Option<ValueId>>,
    losses: Vec<Loss>,
    /// Gradients of sections of forward values: the first section, how many, and their gradient.
    slices: BTreeMap<ValueId, Vec<(usize, usize, ValueId)>>,
    accumulator: DType,
    /// What forward casts to a wider type, and how.
    casts: BTreeMap<ValueId, (Op, ValueId)>,
    /// Those of the step, where gradients start with its loss scale.
    scalars: Option<ValueId>,
}

impl Backward {
    fn node(&mut self, g: &mut Graph, node: &Node) -> Result<(), TypeError> {
        for v in node.outputs.iter().flatten() {
            self.join_slices(g, *v, node.layer)?;
        }
        let Some(reads) = node.op.spec().gradient_reads else { return Ok(()) };
        let input = |i: usize| {
            debug_assert!(reads.contains(&Saved::Input(i)), "{} saves no input {i}", node.op.name());
            node.inputs[i]
        };
        let given = |i: usize| (i < node.inputs.len()).then(|| input(i));
        let output = |i: usize| {
            debug_assert!(reads.contains(&Saved::Output(i)), "{} saves no output {i}", node.op.name());
            node.outputs[i].unwrap_or_else(|| panic!("{}: a gradient needs output {i}", node.op.name()))
        };
        let dy = |b: &Backward, i: usize| node.outputs[i].and_then(|v| b.grads[v.0]);
        let layer = node.layer;
        let name = |g: &Graph, i: usize| format!("d.{}", g.get(node.inputs[i]).name);
        match node.op {
            Op::Embedding => {
                let Some(dx) = dy(self, 0) else { return Ok(()) };
                let vocab = g.ty(node.inputs[1]).dims[0].size();
                self.weight(g, Op::EmbeddingGrad { vocab }, &[dx, input(0)], node.inputs[1], layer)
            }
            Op::Linear => {
                let Some(dy) = dy(self, 0) else { return Ok(()) };
                let dx = self.input(g, Op::LinearGradInput, &[dy, input(1)], &name(g, 0), layer)?;
                let x = self.cast_again(g, input(0), layer)?;
                self.weight(g, Op::LinearGradWeight, &[dy, x], node.inputs[1], layer)?;
                self.add(g, node.inputs[0], dx, layer)
            }
            Op::AddBias => {
                let Some(dy) = dy(self, 0) else { return Ok(()) };
                self.weight(g, Op::BiasGrad, &[dy], node.inputs[1], layer)?;
                self.add(g, node.inputs[0], dy, layer)
            }
            Op::RmsNorm { .. } => {
                let Some(dy) = dy(self, 0) else { return Ok(()) };
                self.weight(g, Op::RmsNormGradWeight, &[dy, input(0), output(1)], node.inputs[1], layer)?;
                // What has reached `x` on the residual path is added by the same kernel.
                let before = self.grads[node.inputs[0].0].take();
                let reads = [dy, input(0), input(1), output(1)];
                let dx = self.norm_input(g, &reads, before, &name(g, 0), layer)?;
                self.add(g, node.inputs[0], dx, layer)
            }
            Op::LayerNorm { .. } => {
                let Some(dy) = dy(self, 0) else { return Ok(()) };
                let reads = [dy, input(0), output(1), output(2)];
                self.weight(g, Op::LayerNormGradWeight, &reads, node.inputs[1], layer)?;
                self.weight(g, Op::BiasGrad, &[dy], node.inputs[2], layer)?;
                let before = self.grads[node.inputs[0].0].take();
                let reads = [dy, input(0), input(1), output(1), output(2)];
                let dx = self.norm_input(g, &reads, before, &name(g, 0), layer)?;
                self.add(g, node.inputs[0], dx, layer)
            }
            Op::AddRmsNorm { .. } => {
                let (dsum, dy) = (dy(self, 0), dy(self, 1));
                let dx = match dy {
                    None => dsum,
                    Some(dy) => {
                        self.weight(g, Op::RmsNormGradWeight, &[dy, output(0), output(2)], node.inputs[2], layer)?;
                        let reads = [dy, output(0), input(2), output(2)];
                        Some(self.norm_input(g, &reads, dsum, &name(g, 0), layer)?)
                    }
                };
                let Some(dx) = dx else { return Ok(()) };
                self.add(g, node.inputs[0], dx, layer)?;
                self.add(g, node.inputs[1], dx, layer)
            }
            Op::QkNorm { .. } => {
                let Some(dy) = dy(self, 0) else { return Ok(()) };
                self.weight(g, Op::QkNormGradWeight, &[dy, input(0), output(1)], node.inputs[1], layer)?;
                let reads = [dy, input(0), input(1), output(1)];
                let dx = self.input(g, Op::QkNormGrad, &reads, &name(g, 0), layer)?;
                self.add(g, node.inputs[0], dx, layer)
            }
            Op::AddLayerNorm { .. } => {
                let (dsum, dy) = (dy(self, 0), dy(self, 1));
                let dx = match dy {
                    None => dsum,
                    Some(dy) => {
                        let reads = [dy, output(0), output(2), output(3)];
                        self.weight(g, Op::LayerNormGradWeight, &reads, node.inputs[2], layer)?;
                        self.weight(g, Op::BiasGrad, &[dy], node.inputs[3], layer)?;
                        let reads = [dy, output(0), input(2), output(2), output(3)];
                        Some(self.norm_input(g, &reads, dsum, &name(g, 0), layer)?)
                    }
                };
                let Some(dx) = dx else { return Ok(()) };
                self.add(g, node.inputs[0], dx, layer)?;
                self.add(g, node.inputs[1], dx, layer)
            }
            Op::AddPositions { seq } => {
                let Some(dy) = dy(self, 0) else { return Ok(()) };
                let rows = g.ty(node.inputs[1]).dims[0].size();
                let reads: Vec<ValueId> = [dy].into_iter().chain(given(2)).collect();
                self.weight(g, Op::PositionsGrad { rows, seq }, &reads, node.inputs[1], layer)?;
                self.add(g, node.inputs[0], dy, layer)
            }
            Op::Rope { inverse } => {
                let Some(dy) = dy(self, 0) else { return Ok(()) };
                let reads: Vec<ValueId> = [dy, input(1)].into_iter().chain(given(2)).collect();
                let dx = self.input(g, Op::Rope { inverse: !inverse }, &reads, &name(g, 0), layer)?;
                self.add(g, node.inputs[0], dx, layer)
            }
            Op::Attention { window } => {
                let Some(dy) = dy(self, 0) else { return Ok(()) };
                let reads: Vec<ValueId> = [dy, input(0), output(0), output(1)].into_iter().chain(given(1)).collect();
                let dx = self.input(g, Op::AttentionGrad { window }, &reads, &name(g, 0), layer)?;
                self.add(g, node.inputs[0], dx, layer)
            }
            Op::AttentionScores { window } => {
                let Some(dp) = dy(self, 0) else { return Ok(()) };
                let reads = [dp, output(0), input(0)];
                let dx = self.input(g, Op::AttentionScoresGrad { window }, &reads, &name(g, 0), layer)?;
                self.add(g, node.inputs[0], dx, layer)
            }
            Op::AttentionMix { window } => {
                let Some(dy) = dy(self, 0) else { return Ok(()) };
                let (op, reads) = (Op::AttentionMixGrad { window }, [dy, input(0), input(1)]);
                let grads = g.node(op, &reads, &name(g, 0), Phase::InputGrad, layer)?;
                self.add(g, node.inputs[0], grads[0], layer)?;
                self.add(g, node.inputs[1], grads[1], layer)
            }
            Op::SwiGlu => {
                let Some(dy) = dy(self, 0) else { return Ok(()) };
                let dx = self.input(g, Op::SwiGluGrad, &[dy, input(0)], &name(g, 0), layer)?;
                self.add(g, node.inputs[0], dx, layer)
            }
            Op::Route { how } | Op::RouteTo { how } => {
                let Some(dweights) = dy(self, 0) else { return Ok(()) };
                let reads = [dweights, input(0), output(1)];
                let dlogits = self.input(g, Op::RouteGrad { how }, &reads, &name(g, 0), layer)?;
                self.add(g, node.inputs[0], dlogits, layer)
            }
            // Counts do not change with what is chosen a little more.
            Op::ExpertCounts { .. } => Ok(()),
            Op::RouterLoss { balance, z } => {
                let Some(weight) = self.weight_of(node.outputs[0]) else { return Ok(()) };
                let op = Op::RouterLossGrad { balance: weight * balance, z: weight * z };
                let reads: Vec<ValueId> = [input(0), input(1)].into_iter().chain(self.scalars).collect();
                let dlogits = self.input(g, op, &reads, &name(g, 0), layer)?;
                self.add(g, node.inputs[0], dlogits, layer)
            }
            Op::GroupedLinear => {
                let Some(dy) = dy(self, 0) else { return Ok(()) };
                let experts = g.ty(node.inputs[1]).dims[0].size();
                let (reads, each) = ([dy, input(1), input(2)], format!("{}.each", name(g, 0)));
                let each = self.input(g, Op::GroupedGradInput, &reads, &each, layer)?;
                let reads = [dy, input(0), input(2)];
                self.weight(g, Op::GroupedGradWeight { experts }, &reads, node.inputs[1], layer)?;
                let dx = self.input(g, Op::SumChoices, &[each], &name(g, 0), layer)?;
                self.add(g, node.inputs[0], dx, layer)
            }
            Op::GroupedLinearEach => {
                let Some(dy) = dy(self, 0) else { return Ok(()) };
                let experts = g.ty(node.inputs[1]).dims[0].size();
                let reads = [dy, input(1), input(2)];
                let dx = self.input(g, Op::GroupedGradInput, &reads, &name(g, 0), layer)?;
                let reads = [dy, input(0), input(2)];
                self.weight(g, Op::GroupedGradWeightEach { experts }, &reads, node.inputs[1], layer)?;
                self.add(g, node.inputs[0], dx, layer)
            }
            // Where rows go does not change with them.
            Op::ExpertSlots { .. } => Ok(()),
            Op::SendRows { blocks } => {
                let Some(drows) = dy(self, 0) else { return Ok(()) };
                let each = format!("{}.each", name(g, 0));
                let each = self.input(g, Op::TakeRows { blocks }, &[drows, input(1)], &each, layer)?;
                let dx = self.input(g, Op::SumChoices, &[each], &name(g, 0), layer)?;
                self.add(g, node.inputs[0], dx, layer)
            }
            Op::RowsLinear { blocks } => {
                let Some(dy) = dy(self, 0) else { return Ok(()) };
                let experts = g.ty(node.inputs[1]).dims[0].size();
                let reads = [dy, input(1), input(2)];
                let dx = self.input(g, Op::RowsGradInput { blocks }, &reads, &name(g, 0), layer)?;
                let reads = [dy, input(0), input(2)];
                self.weight(g, Op::RowsGradWeight { experts, blocks }, &reads, node.inputs[1], layer)?;
                self.add(g, node.inputs[0], dx, layer)
            }
            Op::TakeRows { blocks } => {
                let Some(dy) = dy(self, 0) else { return Ok(()) };
                let drows = self.input(g, Op::SendRowsEach { blocks }, &[dy, input(1)], &name(g, 0), layer)?;
                self.add(g, node.inputs[0], drows, layer)
            }
            Op::Combine => {
                let Some(dout) = dy(self, 0) else { return Ok(()) };
                let reads = [dout, input(0), input(1)];
                let grads = g.node(Op::CombineGrad, &reads, &name(g, 0), Phase::InputGrad, layer)?;
                self.add(g, node.inputs[0], grads[0], layer)?;
                self.add(g, node.inputs[1], grads[1], layer)
            }
            Op::Gelu => {
                let Some(dy) = dy(self, 0) else { return Ok(()) };
                let dx = self.input(g, Op::GeluGrad, &[dy, input(0)], &name(g, 0), layer)?;
                self.add(g, node.inputs[0], dx, layer)
            }
            Op::Dropout { .. } => {
                let Some(dy) = dy(self, 0) else { return Ok(()) };
                let dx = self.input(g, node.op, &[dy, input(1)], &name(g, 0), layer)?;
                self.add(g, node.inputs[0], dx, layer)
            }
            Op::Add => {
                let Some(dy) = dy(self, 0) else { return Ok(()) };
                self.add(g, node.inputs[0], dy, layer)?;
                self.add(g, node.inputs[1], dy, layer)
            }
            Op::Cast { .. } => {
                let Some(dy) = dy(self, 0) else { return Ok(()) };
                let to = g.ty(node.inputs[0]).dtype;
                let dx = self.input(g, Op::Cast { to }, &[dy], &name(g, 0), layer)?;
                self.add(g, node.inputs[0], dx, layer)
            }
            Op::Slice { first, count } => {
                let Some(dy) = dy(self, 0) else { return Ok(()) };
                let name = name(g, 0);
                let slices = self.slices.entry(node.inputs[0]).or_default();
                match slices.iter_mut().find(|known| (known.0, known.1) == (first, count)) {
                    None => slices.push((first, count, dy)),
                    Some(known) => known.2 = g.node(Op::Add, &[known.2, dy], &name, Phase::InputGrad, layer)?[0],
                }
                Ok(())
            }
            Op::Concat => {
                let Some(dy) = dy(self, 0) else { return Ok(()) };
                let mut first = 0;
                for (i, v) in node.inputs.iter().enumerate() {
                    let count = g.ty(*v).dims.last().map_or(0, |dim| dim.sections.len());
                    let dx = self.input(g, Op::Slice { first, count }, &[dy], &name(g, i), layer)?;
                    self.add(g, *v, dx, layer)?;
                    first += count;
                }
                Ok(())
            }
            // A loss is where gradients start: its own gradient is its weight.
            Op::CrossEntropy => {
                let Some(weight) = self.weight_of(node.outputs[0]) else { return Ok(()) };
                let reads = [input(0), input(1), output(1)];
                let dx = self.input(g, Op::CrossEntropyGrad { weight }, &reads, &name(g, 0), layer)?;
                self.add(g, node.inputs[0], dx, layer)
            }
            Op::LinearCrossEntropy { .. } => {
                match self.weight_of(node.outputs[0]) {
                    None => return Ok(()),
                    Some(1.0) => {}
                    Some(weight) => {
                        let reason = format!("makes gradients of a loss of weight 1, not {weight}");
                        return Err(TypeError { op: node.op.name(), reason });
                    }
                }
                let (dx, dw) = (output(1), output(2));
                self.sum_into_state(g, dw, node.inputs[1]);
                self.add(g, node.inputs[0], dx, layer)
            }
            Op::EmbeddingGrad { .. }
            | Op::LinearGradInput
            | Op::LinearGradWeight
            | Op::BiasGrad
            | Op::RmsNormGrad
            | Op::AddRmsNormGrad
            | Op::RmsNormGradWeight
            | Op::QkNormGrad
            | Op::QkNormGradWeight
            | Op::LayerNormGrad
            | Op::AddLayerNormGrad
            | Op::LayerNormGradWeight
            | Op::AddPositionsAt
            | Op::PositionsGrad { .. }
            | Op::RopeAt
            | Op::AttentionGrad { .. }
            | Op::AttentionScoresGrad { .. }
            | Op::AttentionMixGrad { .. }
            | Op::CachedAttention { .. }
            | Op::LastPosition
            | Op::SwiGluGrad
            | Op::RouteGrad { .. }
            | Op::RouterLossGrad { .. }
            | Op::GroupedGradInput
            | Op::GroupedGradWeight { .. }
            | Op::GroupedGradWeightEach { .. }
            | Op::SendRowsEach { .. }
            | Op::RowsGradInput { .. }
            | Op::RowsGradWeight { .. }
            | Op::SumChoices
            | Op::CombineGrad
            | Op::ExpertLoad { .. }
            | Op::StackLoads
            | Op::MoveBias { .. }
            | Op::GeluGrad
            | Op::CrossEntropyGrad { .. }
            | Op::AddState
            | Op::Accumulate
            | Op::SquareSum { .. }
            | Op::MergeSums
            | Op::LossSum
            | Op::GradientNorm
            | Op::AdamW { .. }
            | Op::Lion { .. }
            | Op::Sgd { .. }
            | Op::Momentum { .. }
            | Op::Orthogonalise
            | Op::Descend { .. }
            | Op::LinearScore { .. }
            | Op::VocabLogits { .. }
            | Op::VocabLoss
            | Op::VocabMisses { .. }
            | Op::VocabGrad { .. }
            | Op::JoinRows
            | Op::AllReduce { .. }
            | Op::RingAttention { .. }
            | Op::RingAttentionGrad { .. }
            | Op::AttentionMerge
            | Op::GatheredAttention { .. }
            | Op::SplitHeads { .. }
            | Op::JoinHeads { .. }
            | Op::GatheredAttentionGrad { .. }
            | Op::Shift { .. }
            | Op::AllToAll { .. }
            | Op::SumShared { .. }
            | Op::ReduceScatter { .. }
            | Op::AllGather { .. }
            | Op::Shard { .. }
            | Op::Part { .. }
            | Op::Send { .. }
            | Op::Receive { .. } => Ok(()),
        }
    }

    /// How much this counts as a loss, if it is one.
    fn weight_of(&self, output: Option<ValueId>) -> Option<f32> {
        self.losses.iter().find(|loss| Some(loss.value) == output).map(|loss| loss.weight)
    }

    /// A value for backward: where it is another in a wider type, that one is saved, and cast once more.
    fn cast_again(&self, g: &mut Graph, value: ValueId, layer: Option<usize>) -> Result<ValueId, TypeError> {
        let Some(&(op, from)) = self.casts.get(&value) else { return Ok(value) };
        let name = format!("{}.again", g.get(value).name);
        Ok(g.node(op, &[from], &name, Phase::InputGrad, layer)?[0])
    }

    /// Appends a B node and returns its first output.
    fn input(
        &self,
        g: &mut Graph,
        op: Op,
        reads: &[ValueId],
        name: &str,
        layer: Option<usize>,
    ) -> Result<ValueId, TypeError> {
        Ok(g.node(op, reads, name, Phase::InputGrad, layer)?[0])
    }

    /// The input gradient of a norm (a layer norm if it reads a mean too), plus `dsum` where another path has reached the same
    /// value.
    fn norm_input(
        &self,
        g: &mut Graph,
        reads: &[ValueId],
        dsum: Option<ValueId>,
        name: &str,
        layer: Option<usize>,
    ) -> Result<ValueId, TypeError> {
        let op = match (reads.len() == 5, dsum.is_some()) {
            (false, false) => Op::RmsNormGrad,
            (false, true) => Op::AddRmsNormGrad,
            (true, false) => Op::LayerNormGrad,
            (true, true) => Op::AddLayerNormGrad,
        };
        let reads: Vec<ValueId> = reads.iter().copied().chain(dsum).collect();
        self.input(g, op, &reads, name, layer)
    }

    /// Appends a W node that sums into an accumulator of the parameter.
    fn weight(
        &self,
        g: &mut Graph,
        op: Op,
        reads: &[ValueId],
        parameter: ValueId,
        layer: Option<usize>,
    ) -> Result<(), TypeError> {
        if !matches!(g.get(parameter).source, Source::State(State::Parameter(_))) {
            return Ok(());
        }
        let name = format!("dw.{}", g.get(parameter).name);
        let dw = g.node(op, reads, &name, Phase::WeightGrad, layer)?[0];
        self.sum_into_state(g, dw, parameter);
        Ok(())
    }

    /// Sums into an accumulator that this use of the parameter has for itself.
    fn sum_into_state(&self, g: &mut Graph, dw: ValueId, parameter: ValueId) {
        let ty = TensorType::new(self.accumulator, g.ty(parameter).dims.clone());
        let base = gradient_name(&g.get(parameter).name);
        let name = match g.gradients_of(parameter).len() {
            0 => base,
            before => format!("{base}.{}", before + 1),
        };
        let state = g.state(name, ty, State::Gradient { of: parameter });
        g.values[dw.0].ty.dtype = self.accumulator;
        g.values[dw.0].source = Source::Node { into: Some(state) };
    }

    /// The gradient of a value from those of its sections, which slices must have read one by one and all.
    fn join_slices(&mut self, g: &mut Graph, value: ValueId, layer: Option<usize>) -> Result<(), TypeError> {
        let Some(mut slices) = self.slices.remove(&value) else { return Ok(()) };
        slices.sort();
        let sections = g.ty(value).dims.last().map_or(0, |dim| dim.sections.len());
        let end = slices.iter().try_fold(0, |next, (first, count, _)| (*first == next).then_some(next + count));
        if end != Some(sections) {
            let reason =
                format!("slices of `{}` must read each of its {sections} sections, and none twice", g.get(value).name);
            return Err(TypeError { op: "slice", reason });
        }
        let parts: Vec<ValueId> = slices.into_iter().map(|(_, _, grad)| grad).collect();
        let name = format!("d.{}", g.get(value).name);
        let grad = self.input(g, Op::Concat, &parts, &name, layer)?;
        self.add(g, value, grad, layer)
    }

    /// Adds `grad` to what has reached `value` so far.
    fn add(&mut self, g: &mut Graph, value: ValueId, grad: ValueId, layer: Option<usize>) -> Result<(), TypeError> {
        let sum = match self.grads[value.0] {
            None => grad,
            Some(before) => {
                let name = format!("d.{}", g.get(value).name);
                g.node(Op::Add, &[before, grad], &name, Phase::InputGrad, layer)?[0]
            }
        };
        self.grads[value.0] = Some(sum);
        Ok(())
    }
}

/// Values that are another one in a wider type.
fn widening_casts(g: &Graph) -> BTreeMap<ValueId, (Op, ValueId)> {
    let cast = |node: &Node| match (node.op, node.outputs[0]) {
        (op @ Op::Cast { to }, Some(output)) if to.bytes() > g.ty(node.inputs[0]).dtype.bytes() => {
            Some((output, (op, node.inputs[0])))
        }
        (_, _) => None,
    };
    g.nodes.iter().filter_map(cast).collect()
}

/// The scalars of a step, which a graph has once.
pub(super) fn scalars(g: &mut Graph) -> ValueId {
    let known = g.values.iter().position(|v| v.name == StepScalars::NAME).map(ValueId);
    known.unwrap_or_else(|| g.state(StepScalars::NAME, StepScalars::ty(), State::Scalars))
}

/// Lets gradients start with the loss scale.
fn scale(g: &mut Graph) -> Result<ValueId, TypeError> {
    let scalars = scalars(g);
    for node in &mut g.nodes {
        if let Op::LinearCrossEntropy { .. } = node.op {
            node.inputs.push(scalars);
        }
        if node.op == Op::CrossEntropy {
            let reason =
                "has no loss scale where it stands alone: f16 and fixed point need it fused with the output head"
                    .into();
            return Err(TypeError { op: node.op.name(), reason });
        }
    }
    Ok(scalars)
}

/// What people call the first accumulator of a parameter's gradient.
pub(super) fn gradient_name(parameter: &str) -> String {
    format!("grad.{parameter}")
}

#[cfg(test)]
mod tests {
    use crate::passes::tests::{check, small_model, used_thrice};

    #[test]
    fn each_weight_gradient_stands_behind_what_feeds_it_and_tied_uses_sum_apart() {
        let (before, context) = small_model();
        let fused = crate::fuse(&before, &context).unwrap();
        let after = super::autodiff(&fused, &context).unwrap();
        let backward: String = after
            .to_string()
            .lines()
            .filter(|l| l.starts_with(['B', 'W']))
            .fold(String::new(), |text, line| text + line + "\n");
        assert_eq!(
            backward,
            "\
W dw.w2: f32[embed:2] += grad.w2 = rms_norm_grad_weight(loss.dx, mid, n2.rstd)
B d.x: f32[batch:1, seq:4, embed:2] = add_rms_norm_grad(loss.dx, mid, w2, n2.rstd, loss.dx)
W dw.w1: f32[embed:2] += grad.w1 = rms_norm_grad_weight(d.x, x, n1.rstd)
B d.x: f32[batch:1, seq:4, embed:2] = add_rms_norm_grad(d.x, x, w1, n1.rstd, d.x)
W dw.table: f32[vocab:8, embed:2] += grad.table.2 = embedding_grad(d.x, tokens) { vocab: 8 }
"
        );
        assert!(after.to_string().contains("loss.dw: f32[vocab:8, embed:2] += grad.table = "));
    }

    #[test]
    fn every_use_of_a_parameter_sums_apart_however_many_there_are() {
        let (graph, context) = used_thrice();
        let after = super::autodiff(&graph, &context).unwrap();
        let table = after.parameters().next().unwrap().0;
        let names: Vec<&str> = after.gradients_of(table).iter().map(|v| after.get(*v).name.as_str()).collect();
        assert_eq!(names, ["grad.table", "grad.table.2", "grad.table.3"]);
    }

    #[test]
    fn a_graph_without_a_loss_gets_no_backward_pass() {
        let (mut before, context) = small_model();
        before.nodes.pop();
        before.outputs.clear();
        before.losses.clear();
        let x = before.values.iter().position(|v| v.name == "logits").unwrap();
        before.outputs.push(lockstep_ir::ValueId(x));
        let after = super::autodiff(&before, &context).unwrap();
        assert_eq!(after.nodes.len(), before.nodes.len());
        check(&after, &before.without_dead_code().to_string());
    }
}
