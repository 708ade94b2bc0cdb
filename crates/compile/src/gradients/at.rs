//! What a rule is given: a node of forward, and the gradients as far as backward has come.

use lockstep_ir::graph::{Loss, Node, Phase, Source, State};
use lockstep_ir::op::Saved;
use lockstep_ir::{DType, Graph, Op, OpKind, TensorType, TypeError, ValueId};
use std::collections::BTreeMap;

/// Appends the nodes of backward that an op asks for.
pub(super) type Rule = fn(&mut At) -> Result<(), Stop>;
/// The rules of a family.
pub(super) type Rules = &'static [(OpKind, Rule)];

/// The attributes of an op, in its own rule.
macro_rules! attributes {
    ($at:expr, $pattern:pat) => {
        let $pattern = $at.node.op else { unreachable!("{} in the rule of another op", $at.node.op.name()) };
    };
}
pub(super) use attributes;

/// Why a rule ends early.
pub(super) enum Stop {
    /// No gradient reaches the op, so it passes none on.
    Unreached,
    /// The rule made an op that refuses its inputs.
    Refused(TypeError),
}

impl From<TypeError> for Stop {
    fn from(error: TypeError) -> Self {
        Stop::Refused(error)
    }
}

/// The gradients of a graph, as far as backward has come.
pub struct Gradients {
    /// The gradient of each forward value, as far as it has been summed up.
    pub(super) grads: Vec<Option<ValueId>>,
    pub(super) losses: Vec<Loss>,
    /// Gradients of sections of forward values: the first section, how many, and their gradient.
    pub(super) slices: BTreeMap<ValueId, Vec<(usize, usize, ValueId)>>,
    pub(super) accumulator: DType,
    /// Forward casts to a wider type: the op and what it reads, by what it makes.
    pub(super) casts: BTreeMap<ValueId, (Op, ValueId)>,
    /// Those of the step, where gradients start with its loss scale.
    pub(super) scalars: Option<ValueId>,
    pub(super) rules: BTreeMap<OpKind, Rule>,
}

/// A node of forward, whose rule runs.
pub(super) struct At<'a> {
    pub all: &'a mut Gradients,
    pub g: &'a mut Graph,
    pub node: &'a Node,
}

impl At<'_> {
    /// The gradient that has reached an output.
    pub fn dy(&self, output: usize) -> Result<ValueId, Stop> {
        self.node.outputs[output].and_then(|v| self.all.grads[v.0]).ok_or(Stop::Unreached)
    }

    /// How much an output counts as a loss.
    pub fn loss_weight(&self, output: usize) -> Result<f32, Stop> {
        let of = |loss: &&Loss| Some(loss.value) == self.node.outputs[output];
        self.all.losses.iter().find(of).map(|loss| loss.weight).ok_or(Stop::Unreached)
    }

    pub fn saves(&self, what: Saved) {
        let reads = self.node.op.spec().gradient_reads;
        debug_assert!(reads.is_some_and(|r| r.contains(&what)), "{} does not save {what:?}", self.node.op.name());
    }

    /// An input that is saved.
    pub fn input(&self, i: usize) -> ValueId {
        self.saves(Saved::Input(i));
        self.node.inputs[i]
    }

    /// An optional input that is saved, where it is given.
    pub fn given(&self, i: usize) -> Option<ValueId> {
        (i < self.node.inputs.len()).then(|| self.input(i))
    }

    /// An output that is saved.
    pub fn output(&self, i: usize) -> ValueId {
        self.saves(Saved::Output(i));
        self.node.outputs[i].unwrap_or_else(|| panic!("{}: a gradient needs output {i}", self.node.op.name()))
    }

    /// Size of the first dimension of an input.
    pub fn first_dim(&self, input: usize) -> usize {
        self.g.ty(self.node.inputs[input]).dims[0].size()
    }

    /// An input for backward: where it is another value in a wider type, that one is saved, and cast once more.
    pub fn cast_again(&mut self, input: usize) -> Result<ValueId, Stop> {
        let value = self.input(input);
        let Some(&(op, from)) = self.all.casts.get(&value) else { return Ok(value) };
        let name = format!("{}.again", self.g.get(value).name);
        Ok(self.append(op, &[from], &name)?[0])
    }

    /// Appends a B node.
    pub fn append(&mut self, op: Op, reads: &[ValueId], name: &str) -> Result<Vec<ValueId>, TypeError> {
        let made = self.g.node(op, reads, name, Phase::InputGrad, self.node.layer)?;
        self.g.keep_tf32(self.node.tf32);
        Ok(made)
    }

    pub fn name(&self, value: ValueId) -> String {
        format!("d.{}", self.g.get(value).name)
    }

    /// Appends a B node whose first output is the gradient of an input, which is not added to it yet.
    pub fn make(&mut self, op: Op, reads: &[ValueId], input: usize) -> Result<ValueId, Stop> {
        let name = self.name(self.node.inputs[input]);
        Ok(self.append(op, reads, &name)?[0])
    }

    /// Appends a B node whose outputs are the gradients of these inputs.
    pub fn pass(&mut self, op: Op, reads: &[ValueId], inputs: &[usize]) -> Result<(), Stop> {
        let name = self.name(self.node.inputs[inputs[0]]);
        let made = self.append(op, reads, &name)?;
        inputs.iter().zip(made).try_for_each(|(input, grad)| self.add(*input, grad))
    }

    /// Adds `grad` to what has reached an input so far.
    pub fn add(&mut self, input: usize, grad: ValueId) -> Result<(), Stop> {
        Ok(self.add_to(self.node.inputs[input], grad)?)
    }

    pub fn add_to(&mut self, value: ValueId, grad: ValueId) -> Result<(), TypeError> {
        let sum = match self.all.grads[value.0] {
            None => grad,
            Some(before) => self.append(Op::Add, &[before, grad], &self.name(value))?[0],
        };
        self.all.grads[value.0] = Some(sum);
        Ok(())
    }

    /// The node of forward that makes an input.
    pub fn made(&self, input: usize) -> Option<Node> {
        self.maker(self.node.inputs[input]).cloned()
    }

    fn maker(&self, value: ValueId) -> Option<&Node> {
        self.g.nodes.iter().find(|n| n.outputs.contains(&Some(value)))
    }

    /// Whether the gradient of the op that makes a value reads it.
    pub fn is_saved_anyway(&self, value: ValueId) -> bool {
        let reads = |node: &Node, o: usize| {
            node.outputs[o] == Some(value)
                && node.op.spec().gradient_reads.is_some_and(|reads| reads.contains(&Saved::Output(o)))
        };
        self.maker(value).is_some_and(|node| (0..node.outputs.len()).any(|o| reads(node, o)))
    }

    /// Appends a W node that sums into an accumulator of the parameter which an input is.
    pub fn weight(&mut self, op: Op, reads: &[ValueId], input: usize) -> Result<(), Stop> {
        self.weight_of(op, reads, self.node.inputs[input])
    }

    /// The same of the parameter that is named.
    pub fn weight_of(&mut self, op: Op, reads: &[ValueId], parameter: ValueId) -> Result<(), Stop> {
        if !self.is_trained(parameter) {
            return Ok(());
        }
        let name = format!("dw.{}", self.g.get(parameter).name);
        let dw = self.g.node(op, reads, &name, Phase::WeightGrad, self.node.layer)?[0];
        self.g.keep_tf32(self.node.tf32);
        self.sum_into_state(dw, parameter);
        Ok(())
    }

    /// Whether a value is a parameter that wants a gradient.
    pub fn is_trained(&self, value: ValueId) -> bool {
        matches!(&self.g.get(value).source, Source::State(State::Parameter(parameter)) if !parameter.frozen)
    }

    /// Sums into an accumulator that this use of the parameter has for itself.
    pub fn sum_into_state(&mut self, dw: ValueId, parameter: ValueId) {
        let (g, accumulator) = (&mut *self.g, self.all.accumulator);
        let ty = TensorType::new(accumulator, g.ty(parameter).dims.clone());
        let base = gradient_name(&g.get(parameter).name);
        let name = match g.gradients_of(parameter).len() {
            0 => base,
            before => format!("{base}.{}", before + 1),
        };
        let state = g.state(name, ty, State::Gradient { of: parameter });
        g.values[dw.0].ty.dtype = accumulator;
        g.values[dw.0].source = Source::Node { into: Some(state) };
    }

    /// The gradient of a value from those of its sections, which slices must have read one by one and all.
    pub fn join_slices(&mut self, value: ValueId) -> Result<(), TypeError> {
        let Some(mut slices) = self.all.slices.remove(&value) else { return Ok(()) };
        slices.sort();
        let sections = self.g.ty(value).dims.last().map_or(0, |dim| dim.sections.len());
        let end = slices.iter().try_fold(0, |next, (first, count, _)| (*first == next).then_some(next + count));
        if end != Some(sections) {
            let name = &self.g.get(value).name;
            let reason = format!("slices of `{name}` must read each of its {sections} sections, and none twice");
            return Err(TypeError { op: "slice", reason });
        }
        let parts: Vec<ValueId> = slices.into_iter().map(|(_, _, grad)| grad).collect();
        let grad = self.append(Op::Concat, &parts, &self.name(value))?[0];
        self.add_to(value, grad)
    }
}

/// The name of the first accumulator of a parameter's gradient.
fn gradient_name(parameter: &str) -> String {
    format!("grad.{parameter}")
}
