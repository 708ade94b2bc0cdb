//! Bytes of states, and of what backward reads.

use super::sizes::Sizes;
use super::{Formula, biases, form, layer_norms, router_biases, sinks};
use crate::Plan;
use lockstep_config::{
    AttentionMethod, Config, GradientPrecision, MasterPrecision, ModelConfig, MomentPrecision, NormPlaces,
    OptimizerName, PrecisionPolicy, QkNorm,
};
use lockstep_ir::graph::{Phase, State};
use lockstep_ir::program::{Buffer, Instr, Lifetime, Role};
use lockstep_ir::{DType, Op, StepProgram};

/// Bytes of an element of a weight or an activation.
pub(super) fn compute_bytes(config: &Config) -> f64 {
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
pub(super) fn states(config: &Config, plan: &Plan, none: &StepProgram) -> Option<Formula> {
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
pub(super) fn activations(config: &Config, none: &StepProgram) -> Vec<Formula> {
    let m = &config.model;
    let sizes = Sizes::of(m);
    let Sizes { d, q, k, v, o, ffn, heads, kv_heads, products, experts, top, shared, latent, .. } = sizes;
    let features = m.architecture.features();
    let (c, s) = (compute_bytes(config), config.train.seq as f64);
    let positions = config.train.micro_batch as f64 * s;
    let middle = (m.layers / 2).max(m.dense_layers);
    let saved = |b: &&Buffer| {
        let lifetime = none.regions[b.region].lifetime;
        matches!(lifetime, Lifetime::Saved(_) | Lifetime::SavedInHost(_)) && b.layer == Some(middle)
    };
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
    // In fp8 a byte of each element of what norms and the MLP's activation give, and of each matmul a unit; of the attention's output what its unit
    // follows from. Of a weight that is quantised in every micro-batch its unit, and what that follows from.
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
    let once = |i: &Instr| i.phase == Phase::Prepare;
    let (units, units_text) = match none.segments.iter().flat_map(|s| &s.instrs).any(once) {
        _ if bytes == 0.0 => (0.0, ""),
        true => (4.0 * 4.0 + 4.0, ", less 2 · D + F for bytes, + 20"),
        false => (4.0 * 12.0 + 4.0, ", less 2 · D + F for bytes, + 52"),
    };
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
