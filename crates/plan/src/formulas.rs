//! Analytical formulas of the literature beside what the program has. They are written from the config alone, so that a program which
//! strays from them, or a formula which forgets a term, shows.

use crate::{Plan, Result};
use lockstep_config::{
    AttentionMethod, Config, Features, GradientPrecision, LatentAttention, MasterPrecision, ModelConfig,
    MomentPrecision, NormPlaces, OptimizerName, PrecisionPolicy, QkNorm,
};
use lockstep_ir::account::{self, Communication};
use lockstep_ir::graph::{Phase, State};
use lockstep_ir::program::{Buffer, Lifetime, Role};
use lockstep_ir::{Axis, ContextParallel, DType, Graph, MeshAxis, Op, StepProgram};
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
        // The literature's formulas are of models without modules that predict further tokens.
        return Ok(Vec::new());
    }
    let layer = LayerFlops::of(derived, m.dense_layers)?;
    let sizes = Sizes::of(m);
    let projections = sizes.attention_matrices();
    let Sizes { d, q, k, o, ffn, layers, dense, wide, products, experts, top, shared, latent, .. } = sizes;
    let s = config.train.seq as f64;
    let sequences = config.round() as f64;
    let per_sequence = |flops: u128| flops as f64 / sequences;
    // Keys that a query counts, in the layer that is looked at and in the mean of all.
    let keys = |layer: usize| m.layer_parts(layer).window.map_or(s, |w| s.min(w as f64));
    let seen = keys(m.dense_layers);
    let mean = (0..m.layers).map(keys).sum::<f64>() / layers;
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
            6.0 * (layers * (projections + d * (products * (top + shared) * ffn + experts)) + head)
                + dense * rest / s
                + 6.0 * layers * mean * (q + o),
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

fn form(name: &'static str, formula: String, closed: f64, program: f64) -> Formula {
    Formula { name, formula, closed, program, note: None }
}

/// The extents of a model, as formulas name them.
struct Sizes {
    /// Width of the residual stream.
    d: f64,
    /// Widths of all queries, of all keys, of all values, and of what attention gives.
    q: f64,
    k: f64,
    v: f64,
    o: f64,
    /// The sizes of latent attention, where it is.
    latent: Option<LatentAttention>,
    ffn: f64,
    layers: f64,
    heads: f64,
    kv_heads: f64,
    /// Matrices of an MLP: three where it is gated.
    products: f64,
    /// Experts of a layer, none where it has an MLP, those of a token, and those of all tokens.
    experts: f64,
    top: f64,
    shared: f64,
    /// First layers without experts where others have some, and their hidden units.
    dense: f64,
    wide: f64,
}

impl Sizes {
    fn of(m: &ModelConfig) -> Self {
        let ffn = m.expert_ffn.unwrap_or(m.ffn);
        let [d, ffn, layers, heads, kv_heads] = [m.dim, ffn, m.layers, m.heads, m.kv_heads].map(|n| n as f64);
        let [experts, top] = [m.experts.unwrap_or(0), m.experts_per_token.unwrap_or(1)].map(|n| n as f64);
        let [q, k] = [m.heads, m.kv_heads].map(|n| (n * m.head_dim) as f64);
        let [o, v] = [m.heads, m.kv_heads].map(|n| (n * m.value_dim()) as f64);
        let latent = m.latent();
        let products = if m.architecture.features().gpt2_block { 2.0 } else { 3.0 };
        let [shared, dense, wide] = [m.shared_experts.unwrap_or(0), m.dense_layers, m.ffn].map(|n| n as f64);
        Self { d, q, k, v, o, latent, ffn, layers, heads, kv_heads, products, experts, top, shared, dense, wide }
    }

    /// Elements of the matrices of an attention, by the length of their rows: into it, and out of it.
    fn attention(&self) -> Vec<(f64, f64)> {
        let &Self { d, q, k, v, o, heads, .. } = self;
        let into = match self.latent {
            None => vec![(d * (q + k + v), d)],
            Some(LatentAttention { q_rank, kv_rank, nope, rope, value }) => {
                let [rank, shared, expanded] = [kv_rank, rope, nope + value].map(|n| n as f64);
                let queries = match q_rank.map(|rank| rank as f64) {
                    None => vec![(d * q, d)],
                    Some(rank) => vec![(d * rank, d), (rank * q, rank)],
                };
                queries.into_iter().chain([(d * (rank + shared), d), (rank * heads * expanded, rank)]).collect()
            }
        };
        into.into_iter().chain([(o * d, o)]).collect()
    }

    fn attention_matrices(&self) -> f64 {
        self.attention().iter().map(|(elements, _)| elements).sum()
    }

    /// Widths of the latents, each of which has a norm, and how many there are.
    fn latents(&self) -> (f64, f64) {
        let ranks = self
            .latent
            .map(|latent| (latent.q_rank.unwrap_or(0) + latent.kv_rank, 1 + u8::from(latent.q_rank.is_some())));
        ranks.map_or((0.0, 0.0), |(width, norms)| (width as f64, f64::from(norms)))
    }
}

/// Elements of the matrices of latent attention: R is the width of a latent, H the heads, N, P and V the elements of a head without
/// position, with RoPE, and of values.
fn latent_matrices(latent: Option<LatentAttention>) -> &'static str {
    match latent.is_some_and(|latent| latent.q_rank.is_some()) {
        true => "D · (R_q + R_kv + P + O) + R_q · Q + R_kv · H · (N + V)",
        false => "D · (Q + R_kv + P + O) + R_kv · H · (N + V)",
    }
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
        ContextParallel::Ring | ContextParallel::Gather => false,
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

/// Bytes of an element of a weight or an activation.
fn compute_bytes(config: &Config) -> f64 {
    match config.precision.policy {
        PrecisionPolicy::Fp32 | PrecisionPolicy::Tf32 => 4.0,
        PrecisionPolicy::Bf16 | PrecisionPolicy::Fp16 | PrecisionPolicy::Fp8 => 2.0,
    }
}

/// Bytes of an element of a gradient accumulator.
fn gradient_bytes(config: &Config) -> f64 {
    match (config.train.reproducible, config.precision.gradients) {
        (true, GradientPrecision::Fp32 | GradientPrecision::Bf16) => 8.0,
        (false, GradientPrecision::Fp32) => 4.0,
        (false, GradientPrecision::Bf16) => 2.0,
    }
}

/// Bytes of a moment of a matrix with rows of this length.
fn moment_bytes(config: &Config, row: f64) -> f64 {
    let block = DType::Signed8.numbers() as f64;
    match config.precision.moments {
        MomentPrecision::Fp32 => 4.0,
        MomentPrecision::Int8 if row % block == 0.0 => DType::Signed8.bytes() as f64 / block,
        // Rows that are no whole blocks stay in bf16.
        MomentPrecision::Bf16 | MomentPrecision::Int8 => 2.0,
    }
}

/// Bytes of the master weights of a matrix, where it needs some.
fn master_bytes(config: &Config) -> f64 {
    match config.precision.master {
        MasterPrecision::Fp32 => 4.0,
        MasterPrecision::Bf16 => 0.0,
    }
}

/// What states of matrices take less than in f32, with this many moments, where these and master weights are in fewer bits: `master` bytes of a
/// parameter are saved besides where weights are their own.
pub(crate) fn fewer_bytes(config: &Config, moments: f64, master: f64) -> f64 {
    let saved =
        |row: f64| moments * (4.0 - moment_bytes(config, row)) + if master_bytes(config) == 0.0 { master } else { 0.0 };
    matrices(&config.model).iter().map(|(elements, row)| elements * saved(*row)).sum()
}

/// Elements of all matrices but embeddings and routers, by the length of their rows.
fn matrices(m: &ModelConfig) -> Vec<(f64, f64)> {
    let sizes = Sizes::of(m);
    let Sizes { d, ffn, layers, products, experts, shared, dense, wide, .. } = sizes;
    let (into, routed) = (products - 1.0, layers - dense);
    let each = if experts > 0.0 { experts } else { 1.0 };
    let head = if m.tied_embeddings { 0.0 } else { m.vocab_size as f64 * d };
    let attention = sizes.attention().into_iter().map(|(elements, row)| (layers * elements, row));
    let others = [
        (head, d),
        (routed * into * d * ffn * (each + shared), d),
        (routed * d * ffn * each, ffn),
        (routed * d * ffn * shared, shared * ffn),
        (dense * into * d * wide, d),
        (dense * d * wide, wide),
    ];
    attention.chain(others).collect()
}

/// Weights, gradients, and what AdamW has of each: two moments in f32, and the f32 master weights of 16-bit weights; of matrices less, where the
/// config says so.
fn states(config: &Config, plan: &Plan, none: &StepProgram) -> Option<Formula> {
    let m = &config.model;
    let moments = if compute_bytes(config) == 4.0 { 8.0 } else { 12.0 };
    let per_parameter = compute_bytes(config) + gradient_bytes(config) + moments;
    let tied = if m.tied_embeddings { (m.dim * m.vocab_size) as f64 * gradient_bytes(config) } else { 0.0 };
    // A router's weights, its biases and sinks stay in f32: they are their own master.
    let Sizes { d, layers, dense, experts, .. } = Sizes::of(m);
    let exact = [
        ((layers - dense) * d * experts, " - 2 · L · D · experts"),
        (router_biases(m), " - 2 · L · experts"),
        (sinks(m), " - 2 · L · heads"),
    ];
    let exact = exact.iter().filter(|(elements, _)| compute_bytes(config) != 4.0 && *elements > 0.0);
    let less: f64 = exact.clone().map(|(elements, _)| 2.0 * elements).sum();
    let routers: String = exact.map(|(_, text)| *text).collect();
    let (still, moved) = match biases(m) {
        0.0 => (0.0, String::new()),
        biases => ((per_parameter - 4.0) * biases, format!(" - {} · biases of choices", per_parameter - 4.0)),
    };
    let fewer = fewer_bytes(config, 2.0, 4.0);
    let shorter = if fewer == 0.0 { "" } else { " - what matrices keep in fewer bits" };
    let closed = per_parameter * plan.parameters as f64 - less - still - fewer;
    let program = state_bytes(none) as f64 - tied;
    let text = format!("{per_parameter} · parameters{routers}{moved}{shorter}");
    let mut states = form("bytes of states", text, closed, program);
    states.note = (tied > 0.0).then_some("the second accumulator of the tied table is left out");
    (config.optimizer.name == OptimizerName::AdamW).then_some(states)
}

/// What backward reads of a layer in the middle, with its residual stream.
fn activations(config: &Config, none: &StepProgram) -> Vec<Formula> {
    let m = &config.model;
    let sizes = Sizes::of(m);
    let Sizes { d, q, k, v, o, ffn, heads, kv_heads, products, experts, top, shared, latent, .. } = sizes;
    let features = m.architecture.features();
    let (c, s) = (compute_bytes(config), config.train.seq as f64);
    let positions = config.train.micro_batch as f64 * s;
    let middle = (m.layers / 2).max(m.dense_layers);
    let saved = |b: &&Buffer| matches!(none.regions[b.region].lifetime, Lifetime::Saved(_)) && b.layer == Some(middle);
    let program = none.buffers.iter().filter(saved).map(|b| b.bytes).sum::<u64>() as f64;
    let naive = m.attention == AttentionMethod::Naive;
    // Statistics in f32: one or two of each norm, one of each head of attention, or the weights of naive attention as a matrix.
    let norms = if features.gpt2_block { 4.0 } else { layer_norms(m) };
    let (weights, scores, shown) = match naive {
        true => (heads * s, 0.0, (" + heads · S", format!("{norms}"))),
        false => (0.0, heads, ("", format!("(heads + {norms})"))),
    };
    // What a norm of heads reads of Q·K·V before it, and its statistics.
    let (normed, turned, text) = match m.qk_norm {
        QkNorm::Head => (q + k + v, heads + kv_heads, " + Q + 2 · KV, + 4 · (heads + kv_heads)"),
        QkNorm::Whole => (q + k, 2.0, " + Q + KV, + 4 · 2"),
        // Latents before their norms and after them.
        QkNorm::None => {
            let (width, norms) = sizes.latents();
            let text = match norms as u8 {
                0 => "",
                1 => " + 2 · R_kv, + 4 · 1",
                _ => " + 2 · (R_q + R_kv), + 4 · 2",
            };
            (2.0 * width, norms, text)
        }
    };
    // The residual stream before both blocks, and what norms read or give.
    let stream = if m.norms == NormPlaces::Sandwich { 6.0 } else { 4.0 };
    // Of every expert of a token its hidden units and what it gives; the router's logits, and the choice and its weights.
    let (mlp, routed, hidden) = match experts > 0.0 {
        true => {
            let always = if shared > 0.0 { format!(" + shared · {products} · F") } else { String::new() };
            let mlp = top * (products * ffn + d) + shared * products * ffn;
            (mlp, experts + 2.0 * top, format!("top_k · ({products} · F + D){always}"))
        }
        false => (products * ffn, 0.0, format!("{products} · F")),
    };
    let routing = if experts > 0.0 { " + 4 · (experts + 2 · top_k + experts / S)" } else { "" };
    // In fp8 a byte of each element of what norms and the MLP's activation give, and of each matmul two units and what a weight's follows from; of the
    // attention's output what its unit follows from.
    let apart = |op: &Op| matches!(op, Op::Linear | Op::FineLinear { .. });
    let bytes = match config.precision.policy == PrecisionPolicy::Fp8 {
        true => none.segments.iter().flat_map(|s| &s.instrs).all(|i| !apart(&i.op)).then_some(2.0 * d + ffn),
        false => Some(0.0),
    };
    let plain = experts == 0.0 && m.norms == NormPlaces::Pre && latent.is_none();
    let Some(bytes) = bytes.filter(|_| plain || config.precision.policy != PrecisionPolicy::Fp8) else {
        // Some in one type and some in another, or in many units: what a formula would say of it is what the program says.
        return Vec::new();
    };
    let (units, units_text) =
        if bytes > 0.0 { (4.0 * 12.0 + 4.0, ", less 2 · D + F for bytes, + 52") } else { (0.0, "") };
    let elements = stream * d + q + k + v + o + mlp + weights + normed - bytes / 2.0;
    // Of each sequence, how many tokens an expert gets.
    let counted = if m.balance_loss + m.z_loss > 0.0 { 4.0 * config.train.micro_batch as f64 * experts } else { 0.0 };
    let closed = positions * (c * elements + 4.0 * (scores + norms + turned + routed)) + counted + units;
    let formula = format!(
        "b · S · ({c} · ({stream} · D + 2 · Q + 2 · {} + {hidden}{}{text}) + 4 · {}{routing}){units_text}",
        if latent.is_some() { "O" } else { "KV" },
        shown.0,
        shown.1
    );
    let mut forms = vec![form("bytes that a layer saves for backward", formula, closed, program)];
    if features.gpt2_block && naive && c == 2.0 {
        forms.push(Formula {
            note: Some(
                "less 2 · S · b · D for two masks of dropout, which are recomputed from their keys; less 3 · heads · S² · b \
                 for dropout of attention weights, which there is none of; more 16 · S · b for statistics of norms in f32",
            ),
            ..form(
                "the same by Korthikanti et al.",
                "S · b · D · (34 + 5 · heads · S / D)".into(),
                positions * d * (34.0 + 5.0 * heads * s / d),
                program,
            )
        });
    }
    forms
}

/// Bytes of parameters, gradients and optimizer states.
fn state_bytes(program: &StepProgram) -> u64 {
    let kept = |role: &Role| {
        matches!(
            role,
            Role::State(State::Parameter(_) | State::Gradient { .. } | State::Moment { .. } | State::Master { .. })
        )
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
