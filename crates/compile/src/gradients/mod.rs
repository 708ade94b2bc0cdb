//! The gradient of every op that has one: a rule per kind, in the file of its family.
//!
//! A rule appends the nodes of backward that its op asks for. The op table says what it may read (`Spec::gradient_reads`).

mod attention;
mod dispatch;
mod embedding;
mod experts;
mod head;
mod linear;
mod norm;
mod pointwise;
mod position;
mod section;

use lockstep_ir::graph::{Loss, Node, Phase, Source, State};
use lockstep_ir::op::Saved;
use lockstep_ir::{DType, Graph, Op, OpKind, TensorType, TypeError, ValueId};
use std::collections::BTreeMap;

/// Appends the nodes of backward that an op asks for.
type Rule = fn(&mut At) -> Result<(), Stop>;
/// The rules of a family.
type Rules = &'static [(OpKind, Rule)];

const FAMILIES: [Rules; 10] = [
    attention::RULES,
    dispatch::RULES,
    embedding::RULES,
    experts::RULES,
    head::RULES,
    linear::RULES,
    norm::RULES,
    pointwise::RULES,
    position::RULES,
    section::RULES,
];

/// The attributes of an op, in its own rule.
macro_rules! attributes {
    ($at:expr, $pattern:pat) => {
        let $pattern = $at.node.op else { unreachable!("{} in the rule of another op", $at.node.op.name()) };
    };
}
use attributes;

/// Why a rule ends early.
enum Stop {
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
    grads: Vec<Option<ValueId>>,
    losses: Vec<Loss>,
    /// Gradients of sections of forward values: the first section, how many, and their gradient.
    slices: BTreeMap<ValueId, Vec<(usize, usize, ValueId)>>,
    accumulator: DType,
    /// Forward casts to a wider type: the op and what it reads, by what it makes.
    casts: BTreeMap<ValueId, (Op, ValueId)>,
    /// Those of the step, where gradients start with its loss scale.
    scalars: Option<ValueId>,
    rules: BTreeMap<OpKind, Rule>,
}

impl Gradients {
    /// None yet.
    pub fn new(g: &Graph, accumulator: DType, scalars: Option<ValueId>) -> Self {
        let rules = FAMILIES.into_iter().flatten().copied().collect();
        let (grads, losses) = (vec![None; g.values.len()], g.losses.clone());
        Self { grads, losses, slices: BTreeMap::new(), accumulator, casts: widening_casts(g), scalars, rules }
    }

    /// Appends what backward has for a node of forward. Nodes come from the last to the first.
    pub fn node(&mut self, g: &mut Graph, node: &Node) -> Result<(), TypeError> {
        let mut at = At { all: self, g, node };
        for v in node.outputs.iter().flatten() {
            at.join_slices(*v)?;
        }
        let Some(rule) = at.all.rules.get(&node.op.kind()) else { return Ok(()) };
        match rule(&mut at) {
            Ok(()) | Err(Stop::Unreached) => Ok(()),
            Err(Stop::Refused(error)) => Err(error),
        }
    }
}

/// A node of forward, whose rule runs.
struct At<'a> {
    all: &'a mut Gradients,
    g: &'a mut Graph,
    node: &'a Node,
}

impl At<'_> {
    /// The gradient that has reached an output.
    fn dy(&self, output: usize) -> Result<ValueId, Stop> {
        self.node.outputs[output].and_then(|v| self.all.grads[v.0]).ok_or(Stop::Unreached)
    }

    /// How much an output counts as a loss.
    fn loss_weight(&self, output: usize) -> Result<f32, Stop> {
        let of = |loss: &&Loss| Some(loss.value) == self.node.outputs[output];
        self.all.losses.iter().find(of).map(|loss| loss.weight).ok_or(Stop::Unreached)
    }

    fn saves(&self, what: Saved) {
        let reads = self.node.op.spec().gradient_reads;
        debug_assert!(reads.is_some_and(|r| r.contains(&what)), "{} does not save {what:?}", self.node.op.name());
    }

    /// An input that is saved.
    fn input(&self, i: usize) -> ValueId {
        self.saves(Saved::Input(i));
        self.node.inputs[i]
    }

    /// An optional input that is saved, where it is given.
    fn given(&self, i: usize) -> Option<ValueId> {
        (i < self.node.inputs.len()).then(|| self.input(i))
    }

    /// An output that is saved.
    fn output(&self, i: usize) -> ValueId {
        self.saves(Saved::Output(i));
        self.node.outputs[i].unwrap_or_else(|| panic!("{}: a gradient needs output {i}", self.node.op.name()))
    }

    /// Size of the first dimension of an input.
    fn first_dim(&self, input: usize) -> usize {
        self.g.ty(self.node.inputs[input]).dims[0].size()
    }

    /// An input for backward: where it is another value in a wider type, that one is saved, and cast once more.
    fn cast_again(&mut self, input: usize) -> Result<ValueId, Stop> {
        let value = self.input(input);
        let Some(&(op, from)) = self.all.casts.get(&value) else { return Ok(value) };
        let name = format!("{}.again", self.g.get(value).name);
        Ok(self.append(op, &[from], &name)?[0])
    }

    /// Appends a B node.
    fn append(&mut self, op: Op, reads: &[ValueId], name: &str) -> Result<Vec<ValueId>, TypeError> {
        self.g.node(op, reads, name, Phase::InputGrad, self.node.layer)
    }

    fn name(&self, value: ValueId) -> String {
        format!("d.{}", self.g.get(value).name)
    }

    /// Appends a B node whose first output is the gradient of an input, which is not added to it yet.
    fn make(&mut self, op: Op, reads: &[ValueId], input: usize) -> Result<ValueId, Stop> {
        let name = self.name(self.node.inputs[input]);
        Ok(self.append(op, reads, &name)?[0])
    }

    /// Appends a B node whose outputs are the gradients of these inputs.
    fn pass(&mut self, op: Op, reads: &[ValueId], inputs: &[usize]) -> Result<(), Stop> {
        let name = self.name(self.node.inputs[inputs[0]]);
        let made = self.append(op, reads, &name)?;
        inputs.iter().zip(made).try_for_each(|(input, grad)| self.add(*input, grad))
    }

    /// Adds `grad` to what has reached an input so far.
    fn add(&mut self, input: usize, grad: ValueId) -> Result<(), Stop> {
        Ok(self.add_to(self.node.inputs[input], grad)?)
    }

    fn add_to(&mut self, value: ValueId, grad: ValueId) -> Result<(), TypeError> {
        let sum = match self.all.grads[value.0] {
            None => grad,
            Some(before) => self.append(Op::Add, &[before, grad], &self.name(value))?[0],
        };
        self.all.grads[value.0] = Some(sum);
        Ok(())
    }

    /// Appends a W node that sums into an accumulator of the parameter which an input is.
    fn weight(&mut self, op: Op, reads: &[ValueId], input: usize) -> Result<(), Stop> {
        let parameter = self.node.inputs[input];
        if !matches!(self.g.get(parameter).source, Source::State(State::Parameter(_))) {
            return Ok(());
        }
        let name = format!("dw.{}", self.g.get(parameter).name);
        let dw = self.g.node(op, reads, &name, Phase::WeightGrad, self.node.layer)?[0];
        self.sum_into_state(dw, parameter);
        Ok(())
    }

    /// Sums into an accumulator that this use of the parameter has for itself.
    fn sum_into_state(&mut self, dw: ValueId, parameter: ValueId) {
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
    fn join_slices(&mut self, value: ValueId) -> Result<(), TypeError> {
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

/// The name of the first accumulator of a parameter's gradient.
fn gradient_name(parameter: &str) -> String {
    format!("grad.{parameter}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_op_with_a_gradient_has_one_rule() {
        let mut ruled: Vec<OpKind> = FAMILIES.into_iter().flatten().map(|(kind, _)| *kind).collect();
        ruled.sort();
        let with_gradient = OpKind::ALL.iter().filter(|kind| kind.spec().gradient_reads.is_some());
        let mut with_gradient: Vec<OpKind> = with_gradient.copied().collect();
        with_gradient.sort();
        assert_eq!(ruled, with_gradient);
    }
}
