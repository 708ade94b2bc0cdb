//! Closed forms of the literature beside what the program has. They are written from the config alone, so that a program which
//! strays from them, or a formula which forgets a term, shows.

use crate::plan::internal;
use crate::{Plan, TrainError};
use lockstep_config::{Config, ModelConfig};
use lockstep_ir::graph::{Phase, State};
use lockstep_ir::program::{Lifetime, Role};
use lockstep_ir::{Axis, Graph, StepProgram};
use serde::Serialize;

/// A count that is known twice.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClosedForm {
    /// What is counted.
    pub name: &'static str,
    /// The formula.
    pub formula: String,
    /// What it gives.
    pub closed: f64,
    /// What the program has.
    pub program: f64,
    /// What the difference, if any, consists of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<&'static str>,
}

/// The counts of a config, with `none`: the programs that recompute nothing, and the FLOPs that full recomputation adds to a
/// step.
pub(crate) fn closed_forms(
    config: &Config,
    plan: &Plan,
    derived: &Graph,
    none: &[StepProgram],
    full_flops: f64,
) -> Result<Vec<ClosedForm>, TrainError> {
    let m = &config.model;
    let layer = LayerFlops::of(derived).map_err(internal)?;
    let s = config.train.seq as f64;
    let [d, ffn, layers] = [m.dim, m.ffn, m.layers].map(|n| n as f64);
    let [q, kv] = [m.heads, m.kv_heads].map(|n| (n * m.head_dim) as f64);
    let sequences = (config.train.micro_batch * plan.layout.mesh.dp) as f64;
    let per_sequence = |flops: u128| flops as f64 / sequences;
    let (attention, mlp) = (12.0 * s * d * (q + kv) + 12.0 * s * s * q, 18.0 * s * d * ffn);
    let head = (m.dim * m.vocab_size) as f64;
    let mut forms = vec![
        form("parameters", parameters_text(m), parameters(m), plan.parameters as f64),
        form(
            "model FLOPs per token",
            "6 · matmul parameters + 12 · layers · seq · heads · head_dim".into(),
            6.0 * (layers * (d * (2.0 * q + 2.0 * kv) + 3.0 * d * ffn) + head) + 12.0 * layers * s * q,
            plan.model_flops_per_token(),
        ),
        form(
            "attention FLOPs of a layer and sequence",
            match q == kv && q == d {
                true => "24 · S · D² + 12 · S² · D".into(),
                false => "12 · S · D · (Q + KV) + 12 · S² · Q".into(),
            },
            attention,
            per_sequence(layer.attention),
        ),
        form("MLP FLOPs of a layer and sequence", "18 · S · D · F".into(), mlp, per_sequence(layer.mlp)),
        form("of both, in the forward pass", "a third".into(), (attention + mlp) / 3.0, per_sequence(layer.forward)),
        form(
            "FLOPs that full recomputation adds to them",
            "a third less the last product, 2 · S · D · F".into(),
            (attention + mlp) / 3.0 - 2.0 * s * d * ffn,
            full_flops / (layers * sequences * plan.layout.micro_batches as f64),
        ),
    ];
    if plan.layout.mesh.ranks() == 1 {
        // Weights and gradients; two moments in f32, and the f32 originals of bf16 weights.
        let moments = if config.precision.policy == "bf16" { 12.0 } else { 8.0 };
        let per_parameter = compute_bytes(config) + gradient_bytes(config) + moments;
        let tied = if m.tied_embeddings { head * gradient_bytes(config) } else { 0.0 };
        let mut state = form(
            "bytes of states",
            format!("{per_parameter} · parameters"),
            per_parameter * plan.parameters as f64,
            state_bytes(&none[0]) as f64 - tied,
        );
        if tied > 0.0 {
            state.note = Some("the second accumulator of the tied table is left out");
        }
        forms.push(state);
        forms.push(activations(config, &none[0]));
    }
    Ok(forms)
}

fn form(name: &'static str, formula: String, closed: f64, program: f64) -> ClosedForm {
    ClosedForm { name, formula, closed, program, note: None }
}

/// Bytes of an element of a weight or an activation.
fn compute_bytes(config: &Config) -> f64 {
    if config.precision.policy == "bf16" { 2.0 } else { 4.0 }
}

/// Bytes of an element of a gradient accumulator.
fn gradient_bytes(config: &Config) -> f64 {
    match (config.train.reproducible, config.precision.gradients.as_str()) {
        (true, _) => 8.0,
        (false, "bf16") => 2.0,
        (false, _) => 4.0,
    }
}

fn parameters(m: &ModelConfig) -> f64 {
    let [d, ffn, v, layers] = [m.dim, m.ffn, m.vocab_size, m.layers].map(|n| n as f64);
    let [q, kv] = [m.heads, m.kv_heads].map(|n| (n * m.head_dim) as f64);
    let tables = if m.tied_embeddings { 1.0 } else { 2.0 };
    tables * v * d + layers * (d * (2.0 * q + 2.0 * kv) + 3.0 * d * ffn + 2.0 * d) + d
}

fn parameters_text(m: &ModelConfig) -> String {
    let tables = if m.tied_embeddings { "V · D" } else { "2 · V · D" };
    format!("{tables} + L · (2 · D · (Q + KV) + 3 · D · F + 2 · D) + D")
}

/// What backward reads of a layer in the middle, with its residual stream.
fn activations(config: &Config, none: &StepProgram) -> ClosedForm {
    let m = &config.model;
    let c = compute_bytes(config);
    let positions = (config.train.micro_batch * config.train.seq) as f64;
    let [d, ffn, heads] = [m.dim, m.ffn, m.heads].map(|n| n as f64);
    let [q, kv] = [m.heads, m.kv_heads].map(|n| (n * m.head_dim) as f64);
    let saved = |b: &&lockstep_ir::program::Buffer| none.regions[b.region].lifetime == Lifetime::Saved;
    let program: u64 =
        none.buffers.iter().filter(saved).filter(|b| b.layer == Some(m.layers / 2)).map(|b| b.bytes).sum();
    form(
        "bytes that a layer keeps for backward",
        format!("b · s · ({c} · (4 · D + 2 · Q + 2 · KV + 3 · F) + 4 · (heads + 2))"),
        positions * (c * (4.0 * d + 2.0 * q + 2.0 * kv + 3.0 * ffn) + 4.0 * (heads + 2.0)),
        program as f64,
    )
}

/// Bytes of parameters, gradients and optimizer states.
fn state_bytes(program: &StepProgram) -> u64 {
    let kept = |role: &Role| {
        matches!(role, Role::State(State::Parameter(_) | State::Gradient | State::Moment { .. } | State::Master { .. }))
    };
    program.tensors.iter().filter(|t| kept(&t.role)).map(|t| t.ty.bytes()).sum()
}

/// Model FLOPs of one layer and a micro-batch.
struct LayerFlops {
    attention: u128,
    mlp: u128,
    /// Of both, those of the forward pass.
    forward: u128,
}

impl LayerFlops {
    /// Of the first layer; what has a hidden unit of the MLP in it belongs to the MLP.
    fn of(graph: &Graph) -> Result<Self, lockstep_ir::TypeError> {
        let mut sums = Self { attention: 0, mlp: 0, forward: 0 };
        for node in graph.nodes.iter().filter(|n| n.layer == Some(0)) {
            let types = graph.input_types(node);
            let wanted: Vec<bool> = node.outputs.iter().map(Option::is_some).collect();
            let flops = node.op.flops(&types, &wanted)?.model;
            let values = node.inputs.iter().chain(node.outputs.iter().flatten());
            let in_mlp = values
                .into_iter()
                .any(|v| graph.ty(*v).dims.iter().any(|dim| dim.sections.iter().any(|s| s.axis == Axis::Ffn)));
            *(if in_mlp { &mut sums.mlp } else { &mut sums.attention }) += flops;
            sums.forward += if node.phase == Phase::Forward { flops } else { 0 };
        }
        Ok(sums)
    }
}
