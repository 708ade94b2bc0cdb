//! Parameters and model FLOPs by projection: what each matrix of the model has and costs. Both are read off the model's graphs, so
//! that they sum to all parameters and to all model FLOPs; what no rule here knows is a line of its own.

use crate::{Plan, Result};
use lockstep_ir::graph::{Source, State};
use lockstep_ir::{Axis, Graph, TensorType, ValueId};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// What one projection has and costs, in all layers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Projection {
    /// The part of the model that it belongs to: embedding, attention, MLP, norms or head.
    pub part: &'static str,
    /// Its name: `q`, `expert up`.
    pub name: &'static str,
    /// Elements of its parameters, biases included.
    pub parameters: u64,
    /// Of them, those that a token uses.
    pub active_parameters: u64,
    /// Model FLOPs of a step, forward and backward.
    #[serde(skip)]
    pub step_flops: u128,
    /// The same for one token.
    pub flops_per_token: f64,
}

/// Projections in the order in which they are shown.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Embedding,
    Positions,
    Query,
    Key,
    Value,
    QueryLatent,
    KeyValueLatent,
    KeyValue,
    Output,
    Scores,
    Gate,
    Up,
    Down,
    Router,
    ExpertGate,
    ExpertUp,
    ExpertDown,
    SharedGate,
    SharedUp,
    SharedDown,
    Norms,
    Head,
    Other,
}

impl Kind {
    /// Its part of the model, and its name.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Kind::Embedding => ("embedding", "token embedding"),
            Kind::Positions => ("embedding", "learned positions"),
            Kind::Query => ("attention", "q"),
            Kind::Key => ("attention", "k"),
            Kind::Value => ("attention", "v"),
            Kind::QueryLatent => ("attention", "q latent"),
            Kind::KeyValueLatent => ("attention", "k·v latent, shared k"),
            Kind::KeyValue => ("attention", "k·v"),
            Kind::Output => ("attention", "o"),
            Kind::Scores => ("attention", "scores (QKᵀ, PV)"),
            Kind::Gate => ("MLP", "gate"),
            Kind::Up => ("MLP", "up"),
            Kind::Down => ("MLP", "down"),
            Kind::Router => ("MLP", "router"),
            Kind::ExpertGate => ("MLP", "expert gate"),
            Kind::ExpertUp => ("MLP", "expert up"),
            Kind::ExpertDown => ("MLP", "expert down"),
            Kind::SharedGate => ("MLP", "shared expert gate"),
            Kind::SharedUp => ("MLP", "shared expert up"),
            Kind::SharedDown => ("MLP", "shared expert down"),
            Kind::Norms => ("norms", "norms"),
            Kind::Head => ("head", "head"),
            Kind::Other => ("other", "other"),
        }
    }
}

/// Parameters, active parameters and FLOPs.
type Sums = BTreeMap<Kind, (u64, u64, u128)>;

/// The projections of a plan, of which `derived` is the graph with its gradients.
pub(crate) fn projections(plan: &Plan, derived: &Graph, experts_per_token: usize) -> Result<Vec<Projection>> {
    let mut sums = Sums::new();
    parameters(&plan.forward, experts_per_token, &mut sums);
    flops(derived, plan.layout.micro_batches as u128, &mut sums)?;
    let row = |(kind, (parameters, active_parameters, step_flops)): (Kind, (u64, u64, u128))| {
        let (part, name) = kind.names();
        let flops_per_token = step_flops as f64 / plan.tokens_per_step as f64;
        Projection { part, name, parameters, active_parameters, step_flops, flops_per_token }
    };
    Ok(sums.into_iter().map(row).collect())
}

/// What the rows of a weight, or the elements of its bias, are of: packed projections stand one after the other.
fn kinds(ty: &TensorType, beside_experts: bool) -> Vec<(Kind, usize)> {
    let axis = |dim: usize| ty.dims.get(dim).map(|dim| dim.sections[0].axis);
    let stacked = ty.dims.len() == 3 && axis(0) == Some(Axis::Experts);
    let rows = &ty.dims[usize::from(stacked)];
    let [gate, up, down] = match (stacked, beside_experts) {
        (true, _) => [Kind::ExpertGate, Kind::ExpertUp, Kind::ExpertDown],
        (false, true) => [Kind::SharedGate, Kind::SharedUp, Kind::SharedDown],
        (false, false) => [Kind::Gate, Kind::Up, Kind::Down],
    };
    let names: &[Kind] = match (rows.sections[0].axis, axis(usize::from(stacked) + 1), rows.sections.len()) {
        (Axis::Heads, _, 3) => &[Kind::Query, Kind::Key, Kind::Value],
        (Axis::Heads, _, 1) => &[Kind::Query],
        (Axis::KvHeads, _, 1) => &[Kind::KeyValue],
        (Axis::Latent, _, 1) => &[Kind::QueryLatent],
        (Axis::Latent, _, 2) => return vec![(Kind::KeyValueLatent, rows.size())],
        (Axis::Embed, Some(Axis::Heads), 1) => &[Kind::Output],
        (Axis::Ffn, _, 2) => &[gate, up],
        (Axis::Ffn, _, 1) => &[up],
        (Axis::Embed, Some(Axis::Ffn), 1) => &[down],
        (Axis::Experts, _, 1) => &[Kind::Router],
        (Axis::Vocab, _, 1) => &[Kind::Head],
        _ => return vec![(Kind::Other, rows.size())],
    };
    names.iter().copied().zip(rows.sections.iter().map(|section| section.size())).collect()
}

/// Layers that have a router.
fn layers_of_experts(graph: &Graph) -> BTreeSet<Option<usize>> {
    let routes = |v: &ValueId| {
        let dims = &graph.ty(*v).dims;
        is_parameter(graph, *v) && dims.len() == 2 && dims[0].sections[0].axis == Axis::Experts
    };
    graph.nodes.iter().filter(|node| node.inputs.iter().any(routes)).map(|node| node.layer).collect()
}

fn is_parameter(graph: &Graph, value: ValueId) -> bool {
    matches!(graph.values[value.0].source, Source::State(State::Parameter(_)))
}

fn parameters(forward: &Graph, experts_per_token: usize, sums: &mut Sums) {
    let routed = layers_of_experts(forward);
    for (value, v, parameter) in forward.parameters() {
        // A table that is also the head counts where it is read first.
        let node = forward.nodes.iter().find(|node| node.inputs.contains(&value));
        let name = node.map_or("", |node| node.op.name());
        let beside_experts = node.is_some_and(|node| routed.contains(&node.layer));
        let all = |kind: Kind| vec![(kind, 1)];
        let parts = match name {
            "embedding" => all(Kind::Embedding),
            "add_positions" => all(Kind::Positions),
            "attention_sink" => all(Kind::Other),
            "add_bias" | "grouped_bias" => {
                // A bias is that of the matmul before it.
                let before =
                    node.and_then(|node| forward.nodes.iter().find(|n| n.outputs.contains(&Some(node.inputs[0]))));
                let weight = before.and_then(|n| n.inputs.iter().find(|v| is_parameter(forward, **v)));
                weight.map_or_else(|| all(Kind::Other), |weight| kinds(forward.ty(*weight), beside_experts))
            }
            name if name.contains("norm") => all(Kind::Norms),
            _ => kinds(&v.ty, beside_experts),
        };
        let whole: usize = parts.iter().map(|(_, rows)| rows).sum();
        let experts = match &v.ty.dims[..] {
            [experts, ..] if experts.sections[0].axis == Axis::Experts && !parameter.exact => experts.size(),
            _ => 1,
        };
        for (kind, rows) in parts {
            let elements = (v.ty.elements() / whole * rows) as u64;
            let active = if experts > 1 { elements / experts as u64 * experts_per_token as u64 } else { elements };
            let sum = sums.entry(kind).or_default();
            (sum.0, sum.1) = (sum.0 + elements, sum.1 + active);
        }
    }
}

fn flops(derived: &Graph, micro_batches: u128, sums: &mut Sums) -> Result<()> {
    let routed = layers_of_experts(derived);
    // Bytes of weights, by value.
    let quantised = derived.nodes.iter().filter(|node| node.op.quantises_weight());
    let bytes_of = quantised.flat_map(|node| node.outputs.iter().flatten().map(|v| (*v, node.inputs[0])));
    let bytes_of: BTreeMap<ValueId, ValueId> = bytes_of.collect();
    for node in &derived.nodes {
        let wanted: Vec<bool> = node.outputs.iter().map(Option::is_some).collect();
        let flops = node.op.flops(&derived.input_types(node), &wanted)?.model * micro_batches;
        if flops == 0 {
            continue;
        }
        // A weight that is read, or whose gradient is made.
        let mut inputs = node.inputs.iter().map(|v| bytes_of.get(v).copied().unwrap_or(*v));
        let read = inputs.find(|v| is_parameter(derived, *v) && derived.ty(*v).dims.len() > 1);
        let made = node.outputs.iter().flatten().find_map(|v| match derived.values[v.0].source {
            Source::Node { into: Some(sum) } => match derived.values[sum.0].source {
                Source::State(State::Gradient { of }) => Some(of),
                _ => None,
            },
            _ => None,
        });
        let parts = match (read.or(made), node.layer) {
            (Some(weight), layer) => kinds(derived.ty(weight), routed.contains(&layer)),
            (None, Some(_)) => vec![(Kind::Scores, 1)],
            (None, None) => vec![(Kind::Other, 1)],
        };
        let whole: usize = parts.iter().map(|(_, rows)| rows).sum();
        for (kind, rows) in parts {
            sums.entry(kind).or_default().2 += flops / whole as u128 * rows as u128;
        }
    }
    Ok(())
}
