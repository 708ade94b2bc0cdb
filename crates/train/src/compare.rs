//! Layouts against one rank: the same model, batch and steps, and how far apart losses and gradients are.

use crate::{Session, TrainError, plan};
use lockstep_config::Config;
use lockstep_ir::graph::State;
use lockstep_ir::program::{Role, Tensor};
use lockstep_ir::{DType, Layout, StepScalars, bf16, counter, fixed};
use lockstep_model::names;
use serde::Serialize;

/// What a layout promises about one rank's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Promise {
    /// The same bits.
    Identical,
    /// Sums are taken in another order: differences stay below these shares.
    Close {
        /// Of the loss, at every step.
        loss: f64,
        /// Of a gradient tensor's largest element, after the first step.
        gradient: f64,
    },
}

impl Promise {
    /// What a layout promises for a config.
    pub fn of(layout: &Layout, config: &Config) -> Self {
        let same_sums = layout.mesh.tp == 1 && (layout.mesh.dp == 1 || config.train.reproducible);
        let rounds = config.precision.policy == "bf16" || config.precision.gradients == "bf16";
        match (same_sums, rounds) {
            (true, _) => Promise::Identical,
            (false, false) => Promise::Close { loss: 1e-5, gradient: 1e-4 },
            (false, true) => Promise::Close { loss: 2e-3, gradient: 5e-2 },
        }
    }
}

/// What one layout gave, beside one rank.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The layout, in short.
    pub layout: String,
    /// Its ranks.
    pub ranks: usize,
    /// Losses of one rank and of the layout, step by step, in nats per token.
    pub losses: Vec<(f64, f64)>,
    /// The largest difference of a loss, as a share of one rank's.
    pub loss_difference: f64,
    /// The largest difference of a gradient element, as a share of its tensor's largest element.
    pub gradient_difference: f64,
    /// The tensor with that difference.
    pub worst_gradient: String,
    /// Whether every loss, norm and gradient has the same bits.
    pub identical: bool,
    /// What the layout promises.
    pub promise: Promise,
    /// Whether it keeps the promise.
    pub kept: bool,
    /// Bytes of the arena of a rank of each stage.
    pub arena_bytes: Vec<u64>,
}

/// A model and batch small enough to run many times, with what was made smaller: `model.layers 32 -> 4`. Ratios that layouts
/// look at stay: query heads per key head, accumulation.
pub fn shrink(config: &Config) -> (Config, Vec<String>) {
    let mut small = config.clone();
    let (m, t) = (&mut small.model, &mut small.train);
    let group = (m.heads / m.kv_heads).min(4);
    m.kv_heads = m.kv_heads.min(4);
    m.heads = m.kv_heads * group;
    let plain = config.model.dim == config.model.heads * config.model.head_dim;
    m.head_dim = m.head_dim.min(16);
    m.dim = if plain { m.heads * m.head_dim } else { m.dim.min(128) };
    (m.layers, m.vocab_size, m.ffn) = (m.layers.min(4), m.vocab_size.min(509), m.ffn.min(192));
    t.seq = t.seq.min(64);
    t.global_batch = 8;
    t.micro_batch = if config.train.global_batch > config.train.micro_batch { 1 } else { 2 };
    let all = [
        ("model.layers", config.model.layers, small.model.layers),
        ("model.dim", config.model.dim, small.model.dim),
        ("model.heads", config.model.heads, small.model.heads),
        ("model.kv_heads", config.model.kv_heads, small.model.kv_heads),
        ("model.head_dim", config.model.head_dim, small.model.head_dim),
        ("model.ffn", config.model.ffn, small.model.ffn),
        ("model.vocab_size", config.model.vocab_size, small.model.vocab_size),
        ("train.seq", config.train.seq, small.train.seq),
        ("train.global_batch", config.train.global_batch, small.train.global_batch),
        ("train.micro_batch", config.train.micro_batch, small.train.micro_batch),
    ];
    let changed = all.iter().filter(|(_, from, to)| from != to);
    (small, changed.map(|(key, from, to)| format!("{key} {from} -> {to}")).collect())
}

/// Losses, gradient norms and first gradients of a run.
struct Trace {
    losses: Vec<f64>,
    norms: Vec<f32>,
    gradients: Vec<(String, Vec<f64>)>,
    arena_bytes: Vec<u64>,
}

/// Runs `steps` steps on random tokens with one rank and with each layout.
pub fn compare(
    config: &Config,
    layouts: &[Layout],
    steps: usize,
    show: &mut dyn FnMut(&Comparison),
) -> Result<Vec<Comparison>, TrainError> {
    let single = trace(&config.at(&Layout::single(1)), steps)?;
    let mut result = Vec::new();
    for layout in layouts {
        let config = config.at(layout);
        let comparison = judge(layout, &config, &single, &trace(&config, steps)?);
        show(&comparison);
        result.push(comparison);
    }
    Ok(result)
}

fn judge(layout: &Layout, config: &Config, single: &Trace, parallel: &Trace) -> Comparison {
    let losses: Vec<(f64, f64)> = single.losses.iter().copied().zip(parallel.losses.iter().copied()).collect();
    // NaN counts as infinitely far.
    let apart = |a: f64, b: f64, of: f64| if a == b { 0.0 } else { ((a - b).abs() / of).max(f64::MIN_POSITIVE) };
    let worse = |a: f64, b: f64| if b > a || b.is_nan() { b } else { a };
    let loss_difference = losses.iter().map(|(a, b)| apart(*a, *b, a.abs())).fold(0.0, worse);
    let (mut gradient_difference, mut worst_gradient) = (0.0, String::new());
    for (name, ours) in &single.gradients {
        let theirs = parallel.gradients.iter().find(|(n, _)| n == name).map(|(_, g)| g.as_slice()).unwrap_or_default();
        let largest = ours.iter().fold(1e-30, |m: f64, x| m.max(x.abs()));
        let difference = match ours.len() == theirs.len() {
            true => ours.iter().zip(theirs).map(|(a, b)| apart(*a, *b, largest)).fold(0.0, worse),
            false => f64::INFINITY,
        };
        if difference > gradient_difference || difference.is_nan() {
            (gradient_difference, worst_gradient) = (difference, name.clone());
        }
    }
    let identical = loss_difference == 0.0 && gradient_difference == 0.0 && single.norms == parallel.norms;
    let promise = Promise::of(layout, config);
    let kept = match promise {
        Promise::Identical => identical,
        Promise::Close { loss, gradient } => loss_difference <= loss && gradient_difference <= gradient,
    };
    Comparison {
        layout: layout.to_string(),
        ranks: layout.mesh.ranks(),
        losses,
        loss_difference,
        gradient_difference,
        worst_gradient,
        identical,
        promise,
        kept,
        arena_bytes: parallel.arena_bytes.clone(),
    }
}

fn trace(config: &Config, steps: usize) -> Result<Trace, TrainError> {
    let plan = plan(config)?;
    let mut session = Session::new(config, &plan)?;
    let positions = config.train.micro_batch * plan.layout.mesh.dp * config.train.seq;
    let mut trace = Trace {
        losses: Vec::new(),
        norms: Vec::new(),
        gradients: Vec::new(),
        arena_bytes: plan.stages.iter().map(|m| m.total_bytes).collect(),
    };
    for step in 0..steps {
        for m in 0..plan.layout.micro_batches {
            for name in [names::TOKENS, names::TARGETS] {
                // Each step sees other tokens, the same in every layout.
                let key = counter::key(step as u64, name);
                let id = |i: usize| {
                    let position = (m * positions + i) as u64;
                    (counter::bits(key, position) % config.model.vocab_size as u64) as u32
                };
                let bytes: Vec<u8> = (0..positions).flat_map(|i| id(i).to_le_bytes()).collect();
                session.executor().write(name, m, &bytes)?;
            }
            if config.data.document_mask {
                let seq = config.train.seq;
                let start = |i: usize| {
                    // Documents of another length in every sequence.
                    let length = 3 + (m * positions + i) / seq % 5;
                    (i % seq / length * length) as u32
                };
                let bytes: Vec<u8> = (0..positions).flat_map(|i| start(i).to_le_bytes()).collect();
                session.executor().write(names::DOCUMENT_STARTS, m, &bytes)?;
            }
        }
        let o = &config.optimizer;
        let bias = |beta: f64| (1.0 - beta.powi(step as i32 + 1)) as f32;
        let result = session.run_step(StepScalars {
            lr: o.lr as f32,
            inverse_count: 1.0 / plan.tokens_per_step as f32,
            clip: if o.grad_clip > 0.0 { o.grad_clip as f32 } else { f32::INFINITY },
            bias1: bias(o.beta1),
            bias2: bias(o.beta2),
        })?;
        trace.losses.push(result.loss);
        trace.norms.push(result.grad_norm);
        if step == 0 {
            trace.gradients = gradients(&mut session)?;
        }
    }
    Ok(trace)
}

/// Every gradient as it was when the optimizer read it; of tied uses, their sum.
fn gradients(session: &mut Session) -> Result<Vec<(String, Vec<f64>)>, TrainError> {
    let wanted = |t: &&Tensor| t.role == Role::State(State::Gradient) && !t.name.ends_with(".2");
    let tensors: Vec<(String, DType)> =
        session.tensors().iter().filter(wanted).map(|t| (t.name.clone(), t.whole.dtype)).collect();
    let mut result = Vec::new();
    for (name, dtype) in tensors {
        let bytes = session.executor().read(&name, 0)?;
        let data = match dtype {
            DType::BF16 => {
                bytes.as_chunks().0.iter().map(|b| f64::from(bf16::to_f32(u16::from_le_bytes(*b)))).collect()
            }
            DType::Fixed64 => {
                bytes.as_chunks().0.iter().map(|b| f64::from(fixed::to_f32(i64::from_le_bytes(*b)))).collect()
            }
            _ => bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
        };
        result.push((name, data));
    }
    Ok(result)
}
