//! The graph: what is computed, in global shapes, before anything is placed.
//!
//! Gradients, moments and master weights refer to their parameter by value; names are for people. A parameter has
//! one name, one for each of its sections, or those of every entry of a stack (experts). Several uses of a
//! parameter each sum into an accumulator of their own (`State::Gradient`), and the optimizer adds them once per
//! step in one order.

use crate::{Init, MeshAxis, Op, Placement, Sharding, TensorType, TypeError};
use std::fmt::Write;

/// Index of a value in its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub usize);

/// Which part of a training step a node belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Once per step, before the first micro-batch: weights in the form in which matmuls read them.
    Prepare,
    /// Forward.
    Forward,
    /// Backward, input gradients: what the layer below waits for (B).
    InputGrad,
    /// Backward, weight gradients: not needed before the optimizer (W).
    WeightGrad,
    /// Once per step, as soon as the last micro-batch's weight gradients of a layer are there: sums over ranks.
    Reduce,
    /// Once per step, after the first micro-batch: looks at its gradients.
    Probe,
    /// Once per step, after the last micro-batch.
    Update,
}

impl Phase {
    /// As messages name it.
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Prepare => "the quantisation of weights",
            Phase::Forward => "forward",
            Phase::InputGrad | Phase::WeightGrad => "backward",
            Phase::Reduce => "the reduction of gradients",
            Phase::Probe => "the noise scale",
            Phase::Update => "the update",
        }
    }

    /// One letter, as schedules write it.
    pub const fn letter(self) -> char {
        match self {
            Phase::Prepare => 'Q',
            Phase::Forward => 'F',
            Phase::InputGrad => 'B',
            Phase::WeightGrad => 'W',
            Phase::Reduce => 'R',
            Phase::Probe => 'P',
            Phase::Update => 'U',
        }
    }
}

/// A tensor that outlives a step.
#[derive(Clone, Debug, PartialEq)]
pub enum State {
    /// A trained tensor.
    Parameter(Parameter),
    /// An accumulator of a parameter's gradient: every use of the parameter has one.
    Gradient {
        /// The parameter.
        of: ValueId,
    },
    /// A moment of the optimizer.
    Moment {
        /// The parameter.
        of: ValueId,
        /// Which moment; checkpoints use this.
        which: &'static str,
    },
    /// The f32 master weights of a parameter that is stored in bf16 or fp16.
    Master {
        /// The parameter.
        of: ValueId,
    },
    /// The units of a parameter's rows, where its weights are bytes ([`rows8`](crate::rows8)).
    Unit {
        /// The parameter.
        of: ValueId,
    },
    /// The sum of something else over the micro-batches of a step. Every stage has it, and where none of its nodes adds to it it
    /// stays 0.
    Total(Tally),
    /// What the last steps have left for the next: filled once before the first, and in checkpoints.
    History(Init),
    /// Filled once before the first step.
    Constant(Init),
    /// Written by the host before every step: learning rate, counts.
    Scalars,
    /// Keys and values of the positions seen so far. What was never written is never read.
    Cache,
}

/// What is counted over the micro-batches of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tally {
    /// Losses.
    Losses,
    /// Tokens of experts.
    Loads,
    /// What rounding to fp8 lost of a tensor.
    Fp8(Fp8Class),
}

/// Tensors that matmuls in fp8 read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fp8Class {
    /// Parameters.
    Weights,
    /// What forward makes.
    Activations,
    /// What backward makes.
    Gradients,
}

impl Fp8Class {
    /// All.
    pub const ALL: [Fp8Class; 3] = [Fp8Class::Weights, Fp8Class::Activations, Fp8Class::Gradients];

    /// As metrics call it.
    pub const fn name(self) -> &'static str {
        match self {
            Fp8Class::Weights => "weights",
            Fp8Class::Activations => "activations",
            Fp8Class::Gradients => "gradients",
        }
    }
}

/// How a parameter is stored, named, started and treated by the optimizer.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Initial values, drawn per part.
    pub init: Init,
    /// The unpacked tensors' names, in storage order; checkpoints use these. One is that of the whole tensor; as many as the outermost
    /// dimension has sections are those of its sections. More are those of a stack, such as one of experts: every entry of the outermost dimension
    /// has as many, one or those of the sections of the next.
    pub parts: Vec<String>,
    /// Whether weight decay applies.
    pub decay: bool,
    /// Whether it stays in f32 where others are rounded to the compute type.
    pub exact: bool,
    /// Of a bias of the router's choice, which has no gradient: how far it moves per step against what experts get.
    pub balance: Option<f32>,
    /// Whether training leaves it as it is: it has no gradient, no moments and no place in checkpoints.
    pub frozen: bool,
}

impl Parameter {
    /// A trained matrix, as most are.
    pub fn new(init: Init, parts: Vec<String>) -> Self {
        Self { init, parts, decay: true, exact: false, balance: None, frozen: false }
    }
}

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// Written by the host for every micro-batch.
    Input,
    /// A tensor that outlives the step.
    State(State),
    /// An output of a node; with `into`, it goes into that sum: over micro-batches if it is a state, inside one if it is
    /// [`Source::Sum`].
    Node {
        /// What this value is added to.
        into: Option<ValueId>,
    },
    /// The sum of the values that go into it, inside one micro-batch.
    Sum,
}

/// One tensor of the graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Name, for people and for checkpoints.
    pub name: String,
    /// Element type and global shape.
    pub ty: TensorType,
    /// Where it comes from.
    pub source: Source,
    /// Its sharding over the mesh.
    pub sharding: Sharding,
}

/// One operation of the graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// What is computed.
    pub op: Op,
    /// Inputs, in the op table's order.
    pub inputs: Vec<ValueId>,
    /// Outputs, in the op table's order; `None` where unused.
    pub outputs: Vec<Option<ValueId>>,
    /// Which part of the step it belongs to.
    pub phase: Phase,
    /// The layer that it belongs to, for reports and cuts.
    pub layer: Option<usize>,
    /// Whether its matmul may round operands of f32 to TF32.
    pub tf32: bool,
    /// Whether it computes for this rank what the model needs once, and another rank computes: its FLOPs are the hardware's alone.
    pub repeated: bool,
}

/// A value whose sum is trained to be small.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Loss {
    /// The loss of every sequence.
    pub value: ValueId,
    /// How much it counts beside others.
    pub weight: f32,
}

/// A pure, ordered program over named values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    /// All values; a node's inputs stand before its outputs.
    pub values: Vec<Value>,
    /// All nodes, in execution order.
    pub nodes: Vec<Node>,
    /// Values that the host reads.
    pub outputs: Vec<ValueId>,
    /// Where gradients start: those of the weighted sum of these.
    pub losses: Vec<Loss>,
    /// (state, value): after the step the state holds the value.
    pub updates: Vec<(ValueId, ValueId)>,
    /// (state, value): the value is this rank's flat range of the state and lives there.
    pub parts: Vec<(ValueId, ValueId)>,
    /// Layer that nodes are added to now.
    layer: Option<usize>,
}

impl Graph {
    /// An empty graph.
    pub fn new() -> Self {
        Self::default()
    }

    /// Nodes added from here on belong to this layer.
    pub fn enter_layer(&mut self, layer: Option<usize>) {
        self.layer = layer;
    }

    /// The layer that nodes are added to.
    pub fn layer(&self) -> Option<usize> {
        self.layer
    }

    /// A value that the host writes for every micro-batch.
    pub fn input(&mut self, name: impl Into<String>, ty: TensorType) -> ValueId {
        self.value(name, ty, Source::Input)
    }

    /// A tensor that outlives the step.
    pub fn state(&mut self, name: impl Into<String>, ty: TensorType, state: State) -> ValueId {
        self.value(name, ty, Source::State(state))
    }

    /// Adds a forward node; output `i` is called `name` or `name.operand` where there are several.
    pub fn op(&mut self, op: Op, inputs: &[ValueId], name: &str) -> Result<Vec<ValueId>, TypeError> {
        self.node(op, inputs, name, Phase::Forward, self.layer)
    }

    /// Adds a node of any phase.
    pub fn node(
        &mut self,
        op: Op,
        inputs: &[ValueId],
        name: &str,
        phase: Phase,
        layer: Option<usize>,
    ) -> Result<Vec<ValueId>, TypeError> {
        let types: Vec<&TensorType> = inputs.iter().map(|v| &self.values[v.0].ty).collect();
        let outputs = op.infer(&types)?;
        let ids: Vec<ValueId> = outputs
            .into_iter()
            .enumerate()
            .map(|(i, ty)| {
                let name = if i == 0 { name.to_owned() } else { format!("{name}.{}", op.output(i).name) };
                self.value(name, ty, Source::Node { into: None })
            })
            .collect();
        let outputs = ids.iter().copied().map(Some).collect();
        self.nodes.push(Node { op, inputs: inputs.to_vec(), outputs, phase, layer, tf32: false, repeated: false });
        Ok(ids)
    }

    /// Lets the node that was added last round to TF32 as the one that it comes from, where it is a matmul too.
    pub fn keep_tf32(&mut self, from: bool) {
        if let Some(last) = self.nodes.last_mut() {
            last.tf32 = from && !last.op.spec().multiplies.is_empty();
        }
    }

    /// A partial sum that a node reads and that must be reduced first. Reductions, ops that pass it on and those that look at a rank's own part may
    /// read one.
    pub fn unreduced(&self, node: &Node) -> Option<ValueId> {
        if node.phase == Phase::Probe {
            return None;
        }
        let partial = node.op.spec().partial;
        let over = |v: &ValueId, axis| self.get(*v).sharding.over(axis);
        MeshAxis::ALL.into_iter().find_map(|axis| {
            let found = node.inputs.iter().find(|v| over(v, axis) == Placement::Partial)?;
            let may = partial.may_be_read(node.inputs.iter().map(|v| over(v, axis)));
            (!may).then_some(*found)
        })
    }

    /// Adds a node that changes the sharding of values; its outputs are called `<input>.<suffix>`.
    pub fn relay(
        &mut self,
        op: Op,
        inputs: &[ValueId],
        suffix: &str,
        phase: Phase,
        layer: Option<usize>,
    ) -> Result<Vec<ValueId>, TypeError> {
        let outputs = self.node(op, inputs, "", phase, layer)?;
        for (&from, &to) in inputs.iter().zip(&outputs) {
            let before = self.get(from).sharding;
            self.values[to.0].name = format!("{}.{suffix}", self.get(from).name);
            self.values[to.0].sharding = before.after(&op)?;
        }
        Ok(outputs)
    }

    /// The value of an id.
    pub fn get(&self, id: ValueId) -> &Value {
        &self.values[id.0]
    }

    /// The type of a value.
    pub fn ty(&self, id: ValueId) -> &TensorType {
        &self.values[id.0].ty
    }

    /// Input types of a node.
    pub fn input_types(&self, node: &Node) -> Vec<&TensorType> {
        node.inputs.iter().map(|&v| self.ty(v)).collect()
    }

    /// What a state holds at the end of a step: this rank's range of it, if that is all that counts.
    pub fn latest(&self, state: ValueId) -> ValueId {
        let after = |pairs: &[(ValueId, ValueId)], v| pairs.iter().rev().find(|(s, _)| *s == v).map(|(_, next)| *next);
        if let Some(range) = after(&self.parts, state) {
            return range;
        }
        let mut now = state;
        while let Some(next) = after(&self.updates, now).filter(|next| *next != now) {
            now = next;
        }
        now
    }

    /// The parameters, in the order in which the model declared them.
    pub fn parameters(&self) -> impl Iterator<Item = (ValueId, &Value, &Parameter)> {
        self.values.iter().enumerate().filter_map(|(i, v)| match &v.source {
            Source::State(State::Parameter(p)) => Some((ValueId(i), v, p)),
            _ => None,
        })
    }

    /// The accumulators of a parameter's gradient, one per use, in the order in which backward meets them.
    pub fn gradients_of(&self, parameter: ValueId) -> Vec<ValueId> {
        let is = |v: &Value| matches!(v.source, Source::State(State::Gradient { of }) if of == parameter);
        (0..self.values.len()).filter(|i| is(&self.values[*i])).map(ValueId).collect()
    }

    /// For every value, the nodes that read it, in order.
    pub fn readers(&self) -> Vec<Vec<usize>> {
        let mut readers = vec![Vec::new(); self.values.len()];
        for (n, node) in self.nodes.iter().enumerate() {
            for v in &node.inputs {
                if readers[v.0].last() != Some(&n) {
                    readers[v.0].push(n);
                }
            }
        }
        readers
    }

    /// Drops unused outputs, and nodes left without any.
    pub fn without_dead_code(mut self) -> Self {
        let mut wanted = vec![false; self.values.len()];
        let kept = self.updates.iter().chain(&self.parts).map(|(_, v)| v);
        for v in self.outputs.iter().chain(kept) {
            wanted[v.0] = true;
        }
        let keeps = |value: &Value| matches!(value.source, Source::Node { into: Some(_) });
        for node in self.nodes.iter_mut().rev() {
            let always = node.op.spec().always_made;
            let wants = |v: &ValueId| wanted[v.0] || keeps(&self.values[v.0]);
            if !node.outputs.iter().flatten().any(wants) {
                node.outputs.fill(None);
                continue;
            }
            for (o, output) in node.outputs.iter_mut().enumerate() {
                *output = output.filter(|v| always.contains(&o) || wants(v));
            }
            if node.outputs.iter().any(Option::is_some) {
                node.inputs.iter().for_each(|v| wanted[v.0] = true);
            }
        }
        self.nodes.retain(|n| n.outputs.iter().any(Option::is_some));
        self
    }

    /// Leaves out dropout, as evaluation does: what it reads stands for what it makes.
    pub fn without_dropout(mut self) -> Self {
        let mut now: Vec<ValueId> = (0..self.values.len()).map(ValueId).collect();
        for node in &mut self.nodes {
            node.inputs.iter_mut().for_each(|v| *v = now[v.0]);
            if let (Op::Dropout { .. }, Some(y)) = (node.op, node.outputs[0]) {
                now[y.0] = node.inputs[0];
            }
        }
        self.nodes.retain(|n| !matches!(n.op, Op::Dropout { .. }));
        self.outputs.iter_mut().for_each(|v| *v = now[v.0]);
        self
    }

    fn value(&mut self, name: impl Into<String>, ty: TensorType, source: Source) -> ValueId {
        self.values.push(Value { name: name.into(), ty, source, sharding: Sharding::REPLICATED });
        ValueId(self.values.len() - 1)
    }
}

/// A sharding after a type, where there is something to say.
struct At(Sharding);

impl std::fmt::Display for At {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0 == Sharding::REPLICATED { Ok(()) } else { write!(f, " @({})", self.0) }
    }
}

impl std::fmt::Display for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut line = String::new();
        let used = self.readers();
        for (i, v) in self.values.iter().enumerate() {
            let kind = match &v.source {
                Source::Input => "input",
                Source::State(State::Parameter(_)) => "parameter",
                Source::State(State::Gradient { .. }) => "gradient",
                Source::State(State::Moment { .. }) => "moment",
                Source::State(State::Master { .. }) => "master",
                Source::State(State::Unit { .. }) => "unit",
                Source::State(State::Total(_)) => "total",
                Source::State(State::History(_)) => "history",
                Source::State(State::Constant(_)) => "constant",
                Source::State(State::Scalars) => "scalars",
                Source::State(State::Cache) => "cache",
                Source::Node { .. } | Source::Sum => continue,
            };
            if !used[i].is_empty() || kind == "gradient" {
                writeln!(f, "{kind:<9} {}: {}{}", v.name, v.ty, At(v.sharding))?;
            }
        }
        for node in &self.nodes {
            line.clear();
            for (i, output) in node.outputs.iter().enumerate() {
                line.push_str(if i == 0 { "" } else { ", " });
                match output {
                    None => line.push('_'),
                    Some(v) => {
                        let value = self.get(*v);
                        write!(line, "{}: {}{}", value.name, value.ty, At(value.sharding))?;
                        if let Source::Node { into: Some(state) } = value.source {
                            write!(line, " += {}", self.get(state).name)?;
                        }
                    }
                }
            }
            let inputs: Vec<&str> = node.inputs.iter().map(|&v| self.get(v).name.as_str()).collect();
            let (name, attributes) = (node.op.name(), node.op.attributes());
            let tf32 = if node.tf32 { " in tf32" } else { "" };
            let repeated = if node.repeated { " repeated" } else { "" };
            writeln!(f, "{} {line} = {name}({}){attributes}{tf32}{repeated}", node.phase.letter(), inputs.join(", "))?;
        }
        for &(state, value) in &self.updates {
            writeln!(f, "update    {} <- {}", self.get(state).name, self.get(value).name)?;
        }
        for &(state, range) in &self.parts {
            writeln!(f, "range     {} <- {}", self.get(state).name, self.get(range).name)?;
        }
        let outputs: Vec<&str> = self.outputs.iter().map(|&v| self.get(v).name.as_str()).collect();
        writeln!(f, "return    {}", outputs.join(", "))
    }
}
