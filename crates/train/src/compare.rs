//! Layouts against one rank: the same model, batch and steps, and how far apart losses and gradients are.

use crate::schedule::step_scalars;
use crate::{Session, TrainError, feed, plan};
use lockstep_config::Config;
use lockstep_ir::graph::State;
use lockstep_ir::op::IGNORED_TARGET;
use lockstep_ir::program::{Role, Tensor};
use lockstep_ir::{DType, Layout, StepProgram, StepScalars, bf16, counter, f16, fixed};
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
        /// Of a gradient tensor's largest element after the first step, and of norms.
        gradient: f64,
        /// Of how far the learning rate could have moved parameters, as the root of the mean square of a tensor.
        parameters: f64,
    },
}

impl Promise {
    /// What a layout promises for a config.
    pub fn of(layout: &Layout, config: &Config) -> Self {
        let same_sums = layout.mesh.tp == 1 && (layout.mesh.dp == 1 || config.train.reproducible);
        let rounds = config.precision.policy != "fp32" || config.precision.gradients == "bf16";
        match (same_sums, rounds) {
            (true, _) => Promise::Identical,
            (false, false) => Promise::Close { loss: 1e-5, gradient: 1e-4, parameters: 0.1 },
            (false, true) => Promise::Close { loss: 2e-3, gradient: 5e-2, parameters: 0.5 },
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
    /// The largest difference of a gradient norm, as a share of one rank's.
    pub norm_difference: f64,
    /// The largest difference of a parameter tensor after the last step: root of the mean square, as a share of how far the
    /// learning rate could have moved it.
    pub parameter_difference: f64,
    /// The difference of the loss of an evaluation after the last step, as a share of one rank's.
    pub evaluation_difference: f64,
    /// Whether every loss, norm, gradient and parameter has the same bits.
    pub identical: bool,
    /// What the layout promises.
    pub promise: Promise,
    /// Whether it keeps the promise.
    pub kept: bool,
    /// Bytes of the arena of a rank of each stage.
    pub arena_bytes: Vec<u64>,
}

/// A model and batch small enough to run many times, with what was made smaller: `model.layers 32 -> 4`. What fits these
/// layouts before fits them after; query heads per key head stay, and so does accumulation up to a bound.
pub fn shrink(config: &Config, layouts: &[Layout]) -> (Config, Vec<String>) {
    let most = |size: fn(&Layout) -> usize| layouts.iter().map(size).fold(1, |a, b| a / gcd(a, b) * b);
    let (tp, pp, dp) = (most(|l| l.mesh.tp), layouts.iter().map(|l| l.mesh.pp).max().unwrap_or(1), most(|l| l.mesh.dp));
    // The least multiple of `step` that is at least `wanted`, where the size was a multiple of it and larger.
    let fit = |size: usize, wanted: usize, step: usize| match size.is_multiple_of(step) {
        true => size.min(wanted.next_multiple_of(step)),
        false => size,
    };
    let mut small = config.clone();
    let (m, t) = (&mut small.model, &mut small.train);
    let group = m.heads / m.kv_heads;
    m.kv_heads = if m.kv_heads.is_multiple_of(tp) { fit(m.kv_heads, 4, tp) } else { m.kv_heads };
    // Fewer heads per key head, if all layouts still divide them.
    let fewer = (1..=group.min(4)).rev().find(|g| group.is_multiple_of(*g) && (m.kv_heads * g).is_multiple_of(tp));
    m.heads = m.kv_heads * fewer.unwrap_or(group);
    let plain = config.model.dim == config.model.heads * config.model.head_dim;
    m.head_dim = m.head_dim.min(16);
    m.dim = if plain { m.heads * m.head_dim } else { m.dim.min(128) };
    m.layers = m.layers.min(pp.max(4));
    m.vocab_size = m.vocab_size.min(509.max(tp * tp));
    m.ffn = fit(m.ffn, 192, tp);
    t.seq = fit(t.seq, 64, tp);
    // What was shorter than a sequence stays so.
    let share = |window: usize| (window * t.seq / config.train.seq).max(1);
    m.window = m.window.map(|w| if w < config.train.seq { share(w) } else { w });
    let rounds = config.train.global_batch / config.train.micro_batch;
    t.micro_batch = t.micro_batch.min(2);
    let least = fit(rounds, 8, dp).min(rounds);
    t.global_batch = t.micro_batch * least;
    let all = [
        ("model.layers", config.model.layers, small.model.layers),
        ("model.dim", config.model.dim, small.model.dim),
        ("model.heads", config.model.heads, small.model.heads),
        ("model.kv_heads", config.model.kv_heads, small.model.kv_heads),
        ("model.head_dim", config.model.head_dim, small.model.head_dim),
        ("model.ffn", config.model.ffn, small.model.ffn),
        ("model.vocab_size", config.model.vocab_size, small.model.vocab_size),
        ("model.window", config.model.window.unwrap_or(0), small.model.window.unwrap_or(0)),
        ("train.seq", config.train.seq, small.train.seq),
        ("train.global_batch", config.train.global_batch, small.train.global_batch),
        ("train.micro_batch", config.train.micro_batch, small.train.micro_batch),
    ];
    let changed = all.iter().filter(|(_, from, to)| from != to);
    (small, changed.map(|(key, from, to)| format!("{key} {from} -> {to}")).collect())
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Losses, gradient norms and first gradients of a run.
struct Trace {
    losses: Vec<f64>,
    norms: Vec<f32>,
    gradients: Vec<(String, Vec<f64>)>,
    parameters: Vec<(String, Vec<f64>)>,
    evaluated: f64,
    arena_bytes: Vec<u64>,
}

/// Runs `steps` steps on random tokens with one rank and with each layout.
pub fn compare(
    config: &Config,
    layouts: &[Layout],
    steps: usize,
    show: &mut dyn FnMut(&Comparison),
) -> Result<Vec<Comparison>, TrainError> {
    // A layout is checked for its sums, and those take any number of micro-batches.
    let mut config = config.clone();
    config.train.batch_ramp.clear();
    config.train.noise_scale = false;
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
    // A number beside none is infinitely far.
    let apart = |a: f64, b: f64, of: f64| match (a.is_nan(), b.is_nan()) {
        (true, true) => 0.0,
        (false, false) if a == b => 0.0,
        (false, false) => Some((a - b).abs() / of).filter(|x| x.is_finite()).unwrap_or(f64::INFINITY),
        _ => f64::INFINITY,
    };
    let worse = f64::max;
    let pairs = single.norms.iter().zip(&parallel.norms);
    let norm_difference = pairs.map(|(a, b)| apart(f64::from(*a), f64::from(*b), f64::from(a.abs()))).fold(0.0, worse);
    let evaluation_difference = apart(single.evaluated, parallel.evaluated, single.evaluated.abs());
    let loss_difference = losses.iter().map(|(a, b)| apart(*a, *b, a.abs())).fold(0.0, worse);
    let (mut gradient_difference, mut worst_gradient) = (0.0, String::new());
    for (name, ours) in &single.gradients {
        let theirs = parallel.gradients.iter().find(|(n, _)| n == name).map(|(_, g)| g.as_slice()).unwrap_or_default();
        let largest = ours.iter().fold(1e-30, |m: f64, x| m.max(x.abs()));
        let difference = match ours.len() == theirs.len() {
            true => ours.iter().zip(theirs).map(|(a, b)| apart(*a, *b, largest)).fold(0.0, worse),
            false => f64::INFINITY,
        };
        if difference > gradient_difference {
            (gradient_difference, worst_gradient) = (difference, name.clone());
        }
    }
    // Adam moves an element by its gradient's sign first, so single elements may differ by a step: the mean square counts.
    let far = config.optimizer.lr * single.losses.len() as f64;
    let mut parameter_difference = 0.0;
    for ((_, ours), (_, theirs)) in single.parameters.iter().zip(&parallel.parameters) {
        let squares: f64 = ours.iter().zip(theirs).map(|(a, b)| apart(*a, *b, far).powi(2)).sum();
        parameter_difference = worse(parameter_difference, (squares / ours.len().max(1) as f64).sqrt());
    }
    let differences =
        [loss_difference, gradient_difference, norm_difference, parameter_difference, evaluation_difference];
    let identical = differences == [0.0; 5];
    let promise = Promise::of(layout, config);
    let kept = match promise {
        Promise::Identical => identical,
        Promise::Close { loss, gradient, parameters } => {
            let losses = loss_difference.max(evaluation_difference);
            let moved = parameter_difference <= parameters;
            losses <= loss && gradient_difference.max(norm_difference) <= gradient && moved
        }
    };
    Comparison {
        layout: layout.to_string(),
        ranks: layout.mesh.ranks(),
        losses,
        loss_difference,
        gradient_difference,
        worst_gradient,
        norm_difference,
        parameter_difference,
        evaluation_difference,
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
        parameters: Vec::new(),
        evaluated: 0.0,
        arena_bytes: plan.stages.iter().map(|m| m.total_bytes).collect(),
    };
    for step in 0..steps {
        for m in 0..plan.layout.micro_batches {
            fill(&mut session, config, step as u64, m, m * positions, positions)?;
        }
        let scalars = step_scalars(config, step as u64, step as u64, plan.tokens_per_step);
        let result = session.run_step(StepScalars { lr: config.optimizer.lr as f32, ..scalars })?;
        trace.losses.push(result.loss);
        trace.norms.push(result.grad_norm);
        if step == 0 {
            trace.gradients =
                states(&mut session, |t| t.role == Role::State(State::Gradient) && !t.name.ends_with(".2"))?;
        }
    }
    trace.parameters = states(&mut session, |t| matches!(t.role, Role::State(State::Parameter(_))))?;
    // The same sequences in every layout: as many micro-batches of one rank as a layout has ranks that share them.
    let sequences = config.train.global_batch;
    let batch = config.train.micro_batch * plan.layout.mesh.dp;
    for first in (0..sequences).step_by(batch) {
        fill(&mut session, config, u64::MAX, 0, first * config.train.seq, positions)?;
        session.executor().run(StepProgram::EVALUATE)?;
        let losses = session.executor().read(names::LOSS, 0)?;
        trace.evaluated = losses.as_chunks().0.iter().fold(trace.evaluated, |sum, b| sum + f64::from_le_bytes(*b));
    }
    Ok(trace)
}

/// Writes random tokens to a micro-batch: those from `first` on of the step with this number, the same in every layout.
pub(crate) fn fill(
    session: &mut Session,
    config: &Config,
    step: u64,
    micro_batch: usize,
    first: usize,
    positions: usize,
) -> Result<(), TrainError> {
    let seq = config.train.seq;
    for name in [names::TOKENS, names::TARGETS] {
        let key = counter::key(step, name);
        let id = |i: usize| (counter::bits(key, (first + i) as u64) % config.model.vocab_size as u64) as u32;
        // A prompt of another length in every sequence, or none.
        let ignored = |i: usize| {
            let (sequence, position) = ((first + i) / seq, (first + i) % seq);
            config.data.prompt_field.is_some() && name == names::TARGETS && position < sequence % 4 * seq / 4
        };
        let id = |i: usize| if ignored(i) { IGNORED_TARGET } else { id(i) };
        let bytes: Vec<u8> = (0..positions).flat_map(|i| id(i).to_le_bytes()).collect();
        session.executor().write(name, micro_batch, &bytes)?;
    }
    if config.model.dropout > 0.0 && step != u64::MAX {
        let sample = |b: usize| step * config.train.global_batch as u64 + (first / seq + b) as u64;
        let keys = (0..positions / seq).flat_map(|b| feed::dropout_key(config.train.seed, sample(b)));
        let bytes: Vec<u8> = keys.flat_map(u32::to_le_bytes).collect();
        session.executor().write(names::DROPOUT_KEYS, micro_batch, &bytes)?;
    }
    if config.data.document_mask {
        let start = |i: usize| {
            // Documents of another length in every sequence.
            let length = 3 + (first + i) / seq % 5;
            (i % seq / length * length) as u32
        };
        let bytes: Vec<u8> = (0..positions).flat_map(|i| start(i).to_le_bytes()).collect();
        session.executor().write(names::DOCUMENT_STARTS, micro_batch, &bytes)?;
    }
    Ok(())
}

/// Some of the states, whole. Gradients are as they were when the optimizer read them; of tied uses, their sum.
fn states(session: &mut Session, wanted: impl Fn(&Tensor) -> bool) -> Result<Vec<(String, Vec<f64>)>, TrainError> {
    let tensors: Vec<(String, DType)> =
        session.tensors().iter().filter(|t| wanted(t)).map(|t| (t.name.clone(), t.whole.dtype)).collect();
    let mut result = Vec::new();
    for (name, dtype) in tensors {
        let bytes = session.executor().read(&name, 0)?;
        let data = match dtype {
            DType::BF16 => {
                bytes.as_chunks().0.iter().map(|b| f64::from(bf16::to_f32(u16::from_le_bytes(*b)))).collect()
            }
            DType::F16 => bytes.as_chunks().0.iter().map(|b| f64::from(f16::to_f32(u16::from_le_bytes(*b)))).collect(),
            DType::Fixed64 => {
                bytes.as_chunks().0.iter().map(|b| f64::from(fixed::to_f32(i64::from_le_bytes(*b)))).collect()
            }
            _ => bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
        };
        result.push((name, data));
    }
    Ok(result)
}
