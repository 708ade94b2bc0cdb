//! Analytical formulas of the literature beside what the program has. They are written from the config alone, so that a program which
//! strays from them, or a formula which forgets a term, shows.

mod bytes;
mod sizes;

pub(crate) use bytes::fewer_bytes;

use self::bytes::{activations, compute_bytes, states};
use self::sizes::{Sizes, latent_matrices};
use crate::{Plan, Result};
use lockstep_config::{Config, Features, LatentAttention, ModelConfig, NormPlaces, QkNorm};
use lockstep_ir::account::{self, Communication};
use lockstep_ir::graph::Phase;
use lockstep_ir::{Axis, ContextParallel, Graph, MeshAxis, StepProgram};
use serde::Serialize;

/// A count that is known twice.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Formula {
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
pub(crate) fn formulas(
    config: &Config,
    plan: &Plan,
    derived: &Graph,
    none: &[StepProgram],
    full_flops: f64,
) -> Result<Vec<Formula>> {
    let m = &config.model;
    if m.mtp_depth > 0 {
        return Ok(with_modules(m, config.train.seq, plan));
    }
    let layer = LayerFlops::of(derived, m.dense_layers)?;
    let sizes = Sizes::of(m);
    let projections = sizes.attention_matrices();
    let Sizes { d, q, k, o, ffn, layers, dense, wide, products, experts, top, shared, latent, .. } = sizes;
    let s = config.train.seq as f64;
    let sequences = config.round() as f64;
    let per_sequence = |flops: u128| flops as f64 / sequences;
    // Keys that a query counts, in the layer that is looked at and in the mean of all.
    let (seen, mean) = (keys(m, m.dense_layers, config.train.seq), mean_keys(m, config.train.seq));
    let windowed = seen < s;
    // A token uses some of the experts, and the router looks at all of them.
    let (attention, mlp) =
        (6.0 * s * projections + 6.0 * s * seen * (q + o), 6.0 * s * d * (products * (top + shared) * ffn + experts));
    // What first layers without experts have more than the others.
    let rest = 6.0 * s * d * products * wide - mlp;
    let head = (m.dim * m.vocab_size) as f64;
    if config.lora.rank.is_some() {
        let frozen = plan.parameters - plan.trained_parameters;
        let matmuls = layers * (projections + d * (products * (top + shared) * ffn + experts)) + head;
        let flops = Formula {
            note: Some("backward ends at the first adapter: nothing below it needs a gradient"),
            ..form(
                "model FLOPs per token",
                format!("4 · matmul parameters + 6 · adapters + {}", scores_of_layers("seq", latent)),
                4.0 * (matmuls + dense * rest / (6.0 * s))
                    + 6.0 * plan.trained_parameters as f64
                    + 6.0 * layers * mean * (q + o),
                plan.model_flops_per_token(),
            )
        };
        let mut forms = vec![parameters(m, frozen)];
        // Of adapters of experts a token uses some.
        forms.extend(Some(flops).filter(|_| experts == 0.0));
        return Ok(forms);
    }
    let mut forms = vec![
        parameters(m, plan.parameters),
        form(
            "model FLOPs per token",
            format!(
                "6 · {}matmul parameters + {}",
                if experts > 0.0 { "active " } else { "" },
                scores_of_layers(
                    match (mean < s, mean == seen) {
                        (false, _) => "seq",
                        (true, true) => "window",
                        (true, false) => "mean of windows",
                    },
                    latent
                )
            ),
            model_flops(m, config.train.seq),
            plan.model_flops_per_token(),
        ),
        form(
            "attention FLOPs of a layer and sequence",
            match (q == k && q == d, windowed) {
                _ if latent.is_some() => format!(
                    "6 · S · ({}) + 6 · S{} · (Q + O)",
                    latent_matrices(latent),
                    if windowed { " · W" } else { "²" }
                ),
                (_, true) => "12 · S · D · (Q + KV) + 12 · S · W · Q".into(),
                (true, false) => "24 · S · D² + 12 · S² · D".into(),
                (false, false) => "12 · S · D · (Q + KV) + 12 · S² · Q".into(),
            },
            attention,
            per_sequence(layer.attention),
        ),
        form(
            "MLP FLOPs of a layer and sequence",
            match (experts > 0.0, shared > 0.0) {
                (true, true) => format!("6 · S · D · ({products} · (top_k + shared) · F + experts)"),
                (true, false) => format!("6 · S · D · ({products} · top_k · F + experts)"),
                (false, _) => format!("{} · S · D · F", 6.0 * products),
            },
            mlp,
            per_sequence(layer.mlp),
        ),
        form("of both, in the forward pass", "a third".into(), (attention + mlp) / 3.0, per_sequence(layer.forward)),
        form(
            "FLOPs that full recomputation adds to them",
            // What experts give is read by the gradient of their weights, and what is normed by that of the norm.
            match (experts > 0.0, shared > 0.0, dense > 0.0) {
                _ if norms_after(m) => "in the mean of layers, a third".into(),
                (true, false, _) => "a third".into(),
                (true, true, false) => "a third less the last matmul of shared experts, 2 · S · D · shared · F".into(),
                (true, true, true) => "in the mean of layers, a third less the last matmul of MLPs".into(),
                (false, ..) => "a third less the last matmul, 2 · S · D · F".into(),
            },
            {
                let last = match (norms_after(m), experts > 0.0) {
                    (true, _) => 0.0,
                    (false, true) => shared * ffn,
                    (false, false) => ffn,
                };
                let wide = if norms_after(m) { 0.0 } else { wide };
                let of_dense = dense / layers * (rest / 3.0 - 2.0 * s * d * (wide - last));
                let attention = attention + 6.0 * s * (mean - seen) * (q + o);
                (attention + mlp) / 3.0 - 2.0 * s * d * last + of_dense
            },
            full_flops / (layers * sequences * plan.layout.micro_batches as f64),
        ),
    ];
    forms.extend(by_all_to_all(config, plan, none));
    if plan.layout.mesh.ranks() == 1 {
        forms.extend(states(config, plan, &none[0]));
        forms.extend(activations(config, &none[0]));
    }
    Ok(forms)
}

/// FLOPs of a token in a step, forward and backward.
fn model_flops(m: &ModelConfig, seq: usize) -> f64 {
    let sizes = Sizes::of(m);
    let Sizes { d, q, o, ffn, layers, dense, wide, products, experts, top, shared, .. } = sizes;
    let block = d * (products * (top + shared) * ffn + experts);
    let matmuls = layers * (sizes.attention_matrices() + block)
        + dense * (d * products * wide - block)
        + (m.dim * m.vocab_size) as f64;
    6.0 * matmuls + 6.0 * layers * mean_keys(m, seq) * (q + o)
}

/// Keys that a query counts in a layer.
fn keys(m: &ModelConfig, layer: usize, seq: usize) -> f64 {
    m.layer_parts(layer).window.map_or(seq, |window| seq.min(window)) as f64
}

/// Keys that a query counts, in the mean of layers.
fn mean_keys(m: &ModelConfig, seq: usize) -> f64 {
    (0..m.layers).map(|layer| keys(m, layer, seq)).sum::<f64>() / m.layers as f64
}

/// What is known of a model with modules that predict further tokens. Each has a layer, a matrix that joins what comes in, three norms, and
/// uses the output head once more.
fn with_modules(m: &ModelConfig, seq: usize, plan: &Plan) -> Vec<Formula> {
    let (modules, d, head) = (m.mtp_depth as f64, m.dim as f64, (m.dim * m.vocab_size) as f64);
    let whole = ModelConfig { layers: m.layers + m.mtp_depth, ..m.clone() };
    let of_layers = parameters(&whole, plan.parameters);
    vec![
        Formula {
            formula: format!("{} + modules · (2 · D² + 3 · D), L = layers + modules", of_layers.formula),
            closed: of_layers.closed + modules * (2.0 * d * d + 3.0 * d),
            ..of_layers
        },
        form(
            "model FLOPs per token",
            "those of layers + modules, + 6 · modules · (2 · D² + V · D)".into(),
            model_flops(&whole, seq) + 6.0 * modules * (2.0 * d * d + head),
            plan.model_flops_per_token(),
        ),
    ]
}

fn form(name: &'static str, formula: String, closed: f64, program: f64) -> Formula {
    Formula { name, formula, closed, program, note: None }
}

/// FLOPs of scores and of sums of values for a token that sees this many keys.
fn scores_of_layers(keys: &str, latent: Option<LatentAttention>) -> String {
    match latent {
        None => format!("12 · layers · {keys} · heads · head_dim"),
        Some(_) => format!("6 · layers · {keys} · heads · (head_dim + v_head_dim)"),
    }
}

/// What a rank sends to have heads instead of positions for attention: Q·K·V there and the output back, and their gradients.
fn by_all_to_all(config: &Config, plan: &Plan, none: &[StepProgram]) -> Option<Formula> {
    let size = |axis: MeshAxis| plan.layout.mesh.size(axis) as f64;
    let (cp, tp) = (size(MeshAxis::Cp), size(MeshAxis::Tp));
    let sends = match plan.layout.context {
        ContextParallel::Ring | ContextParallel::Gather | ContextParallel::Latent => false,
        ContextParallel::AllToAll => cp > 1.0,
    };
    if !sends {
        return None;
    }
    let (Sizes { q, k, v, o, layers, latent, .. }, c) = (Sizes::of(&config.model), compute_bytes(config));
    let tokens = (config.train.micro_batch * config.train.seq) as f64;
    let entries = none.iter().filter_map(|program| Some((program, program.entry(StepProgram::TRAIN)?)));
    let all = entries.flat_map(|(program, entry)| account::communication(program, entry));
    let mine = |e: &Communication| (e.op, e.axis.as_str()) == ("all_to_all", MeshAxis::Cp.name());
    let sent: u64 = all.filter(mine).map(|e| e.sent_bytes).sum();
    Some(form(
        "bytes that a rank sends for the attention of a layer by all-to-all",
        match latent {
            None => format!("b · S · {c} · 4 · (Q + KV) · (cp - 1) / (cp² · tp)"),
            Some(_) => format!("b · S · {c} · 4 · (Q + O) · (cp - 1) / (cp² · tp)"),
        },
        tokens * c * 2.0 * (q + k + v + o) * (cp - 1.0) / (cp * cp * tp),
        sent as f64 / (layers * plan.layout.micro_batches as f64),
    ))
}

/// Elements of all parameters.
fn parameters(m: &ModelConfig, program: u64) -> Formula {
    let sizes = Sizes::of(m);
    let Sizes { d, q, k, v, ffn, layers, products, experts, shared, dense, wide, latent, .. } = sizes;
    let tables = if m.tied_embeddings { 1.0 } else { 2.0 } * m.vocab_size as f64 * d;
    let biases = (biases(m) + router_biases(m)) / (layers - dense);
    let routed = products * d * ffn * (experts + shared) + d * experts + biases;
    let block = if experts > 0.0 { routed } else { products * d * ffn };
    let matrices = sizes.attention_matrices() + block;
    let (first, of_first) = match dense > 0.0 {
        true => (
            dense * (products * d * wide - block),
            ", of which the first dense layers have 3 · D · FFN instead of experts",
        ),
        false => (0.0, ""),
    };
    let table = if m.tied_embeddings { "V · D" } else { "2 · V · D" };
    let Features { gpt2_block, qkv_bias, block_bias, learned_positions, sigmoid_router, .. } =
        m.architecture.features();
    let (positions, learned) = match learned_positions {
        true => (m.positions.unwrap_or(0) as f64 * d, " + positions · D"),
        false => (0.0, ""),
    };
    let (rest, behind, formula) = match gpt2_block {
        true => {
            // Of every product a bias; of two norms a weight and a bias.
            let rest = q + k + v + d + ffn + d + 4.0 * d;
            let text = match q == d && k == d && ffn == 4.0 * d {
                true => "L · (12 · D² + 13 · D)",
                false => "L · (2 · D · (Q + KV) + 2 · D · F + Q + 2 · KV + F + 6 · D)",
            };
            (rest, 2.0 * d + positions, format!("{table}{learned} + {text} + 2 · D"))
        }
        false => {
            let (bias, biased) = match (qkv_bias, block_bias) {
                (false, _) => (0.0, ""),
                (true, false) => (q + k + v, " + Q + 2 · KV"),
                // Of the output projection and of experts too; a router's are counted with its weights.
                (true, true) => {
                    (q + k + v + d + experts * (2.0 * ffn + d), " + Q + 2 · KV + D + experts · (2 · F + D)")
                }
            };
            let sinks = sinks(m) / layers;
            let with_sinks = if sinks > 0.0 { " + heads" } else { "" };
            let (norms, normed) = match m.qk_norm {
                QkNorm::Head => (2.0 * m.head_dim as f64, " + 2 · head_dim"),
                QkNorm::Whole => (q + k, " + Q + KV"),
                QkNorm::None => match latent {
                    None => (0.0, ""),
                    Some(LatentAttention { q_rank: None, .. }) => (sizes.latents().0, " + R_kv"),
                    Some(_) => (sizes.latents().0, " + R_q + R_kv"),
                },
            };
            let attention = if latent.is_some() { latent_matrices(latent) } else { "2 · D · (Q + KV)" };
            let wide = layer_norms(m);
            let mlp = match (experts > 0.0, shared > 0.0, sigmoid_router || block_bias) {
                (true, false, false) => "experts · (3 · D · F + D)",
                (true, false, true) => "experts · (3 · D · F + D + 1)",
                (true, true, false) => "experts · (3 · D · F + D) + shared · 3 · D · F",
                (true, true, true) => "experts · (3 · D · F + D + 1) + shared · 3 · D · F",
                (false, ..) => "3 · D · F",
            };
            let formula = format!(
                "{table}{learned} + L · ({attention} + {mlp} + {wide} · D{biased}{with_sinks}{normed}) + D{of_first}"
            );
            (wide * d + bias + sinks + norms, d + positions, formula)
        }
    };
    form("parameters", formula, tables + layers * (matrices + rest) + first + behind, program as f64)
}

/// Whether norms stand after attention and MLP.
fn norms_after(m: &ModelConfig) -> bool {
    match m.norms {
        NormPlaces::Pre => false,
        NormPlaces::Post | NormPlaces::Sandwich => true,
    }
}

/// Norms of a layer that are as wide as the residual stream.
fn layer_norms(m: &ModelConfig) -> f64 {
    match m.norms {
        NormPlaces::Pre | NormPlaces::Post => 2.0,
        NormPlaces::Sandwich => 4.0,
    }
}

/// Elements of the biases of routers' choices, which have neither gradients nor moments.
fn biases(m: &ModelConfig) -> f64 {
    let layers = if m.architecture.features().sigmoid_router { m.layers - m.dense_layers } else { 0 };
    (layers * m.experts.unwrap_or(0)) as f64
}

/// Elements of the biases of routers' logits.
fn router_biases(m: &ModelConfig) -> f64 {
    if m.architecture.features().block_bias { (m.layers * m.experts.unwrap_or(0)) as f64 } else { 0.0 }
}

/// Attention sinks of all layers.
fn sinks(m: &ModelConfig) -> f64 {
    if m.attention_sinks { (m.layers * m.heads) as f64 } else { 0.0 }
}

/// Model FLOPs of one layer and a micro-batch.
struct LayerFlops {
    attention: u128,
    mlp: u128,
    /// Of both, those of the forward pass.
    forward: u128,
}

impl LayerFlops {
    /// Of a layer; what has a hidden unit of the MLP or an expert in it belongs to the MLP.
    fn of(graph: &Graph, layer: usize) -> Result<Self, lockstep_ir::TypeError> {
        let mut sums = Self { attention: 0, mlp: 0, forward: 0 };
        for node in graph.nodes.iter().filter(|n| n.layer == Some(layer)) {
            let types = graph.input_types(node);
            let wanted: Vec<bool> = node.outputs.iter().map(Option::is_some).collect();
            let flops = node.op.flops(&types, &wanted)?.model;
            let values = node.inputs.iter().chain(node.outputs.iter().flatten());
            let in_mlp = values.into_iter().any(|v| {
                graph
                    .ty(*v)
                    .dims
                    .iter()
                    .any(|dim| dim.sections.iter().any(|s| matches!(s.axis, Axis::Ffn | Axis::Experts)))
            });
            *(if in_mlp { &mut sums.mlp } else { &mut sums.attention }) += flops;
            sums.forward += if node.phase == Phase::Forward { flops } else { 0 };
        }
        Ok(sums)
    }
}
