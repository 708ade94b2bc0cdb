//! How architectures declare their parameters.

use lockstep_ir::graph::{Parameter, State};
use lockstep_ir::{DType, Dim, Graph, Init, TensorType, ValueId};

/// A weight matrix: rows are outputs, columns inputs.
pub fn matrix<S: AsRef<str>>(g: &mut Graph, name: &str, dims: [Dim; 2], init: &Init, parts: &[S]) -> ValueId {
    parameter(g, name, dims.to_vec(), init.clone(), parts, (true, false))
}

/// A weight matrix that stays in f32 whatever the precision: a router's.
pub fn exact_matrix<S: AsRef<str>>(g: &mut Graph, name: &str, dims: [Dim; 2], init: &Init, parts: &[S]) -> ValueId {
    parameter(g, name, dims.to_vec(), init.clone(), parts, (true, true))
}

/// A weight matrix of every expert.
pub fn stack<S: AsRef<str>>(g: &mut Graph, name: &str, dims: [Dim; 3], init: &Init, parts: &[S]) -> ValueId {
    parameter(g, name, dims.to_vec(), init.clone(), parts, (true, false))
}

/// The weight of a norm that multiplies by it, or by 1 + it.
pub fn norm_weight<S: AsRef<str>>(g: &mut Graph, name: &str, dim: Dim, plus_one: bool, parts: &[S]) -> ValueId {
    if plus_one { zeros(g, name, dim, parts) } else { ones(g, name, dim, parts) }
}

/// A norm's weight.
pub fn ones<S: AsRef<str>>(g: &mut Graph, name: &str, dim: Dim, parts: &[S]) -> ValueId {
    parameter(g, name, vec![dim], Init::Ones, parts, (false, false))
}

/// A bias, or what a norm adds 1 to.
pub fn zeros<S: AsRef<str>>(g: &mut Graph, name: &str, dim: Dim, parts: &[S]) -> ValueId {
    parameter(g, name, vec![dim], Init::Zeros, parts, (false, false))
}

/// A vector that starts at 0 and stays in f32 whatever the precision: a router's bias, attention sinks.
pub fn exact_zeros<S: AsRef<str>>(g: &mut Graph, name: &str, dim: Dim, parts: &[S]) -> ValueId {
    parameter(g, name, vec![dim], Init::Zeros, parts, (false, true))
}

/// A bias of every expert.
pub fn expert_biases<S: AsRef<str>>(g: &mut Graph, name: &str, dims: [Dim; 2], parts: &[S]) -> ValueId {
    parameter(g, name, dims.to_vec(), Init::Zeros, parts, (false, false))
}

/// The bias of a router's choice: in f32, without a gradient, and moved by `rate` per step against what experts get.
pub fn bias_of_choice<S: AsRef<str>>(g: &mut Graph, name: &str, dim: Dim, rate: f32, parts: &[S]) -> ValueId {
    let parts = parts.iter().map(|p| p.as_ref().to_owned()).collect();
    let parameter = Parameter { decay: false, exact: true, balance: Some(rate), ..Parameter::new(Init::Zeros, parts) };
    g.state(name, TensorType::new(DType::F32, [dim]), State::Parameter(parameter))
}

fn parameter<S: AsRef<str>>(
    g: &mut Graph,
    name: &str,
    dims: Vec<Dim>,
    init: Init,
    parts: &[S],
    (decay, exact): (bool, bool),
) -> ValueId {
    let parts = parts.iter().map(|p| p.as_ref().to_owned()).collect();
    let ty = TensorType::new(DType::F32, dims);
    g.state(name, ty, State::Parameter(Parameter { decay, exact, ..Parameter::new(init, parts) }))
}
