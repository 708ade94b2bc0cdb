//! Layouts against one rank: the same model, batch and steps, and how far apart losses, gradients and updates are.
//!
//! Every step of a layout starts from one rank's state before that step, so that a difference is of that step and not of what grew
//! from earlier ones. How far apart two right programs may be depends on the state: one rank is also run from weights that are
//! changed in their last bit, and where that alone moves a number a lot, a layout may move it too.

mod judge;

pub use judge::{Comparison, Criterion, Promise};

use crate::schedule::step_scalars;
use crate::{Devices, Session, TrainError, feed};
use judge::{Natural, each, judge};
use lockstep_config::Config;
use lockstep_exec::ExecError;
use lockstep_ir::graph::State;
use lockstep_ir::op::IGNORED_TARGET;
use lockstep_ir::program::{Role, Tensor};
use lockstep_ir::{Axes, DType, Layout, MeshAxis, StepProgram, StepScalars, ValueId, bf16, counter, f16, fixed};
use lockstep_model::names;
use lockstep_plan::plan;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A model and batch small enough to run many times, with what was made smaller: `model.layers 32 -> 4`. What fits these
/// layouts before fits them after; query heads per key head stay, and so does accumulation up to a bound.
pub fn shrink(config: &Config, layouts: &[Layout]) -> (Config, Vec<String>) {
    let most = |size: fn(&Layout) -> usize| layouts.iter().map(size).fold(1, |a, b| a / gcd(a, b) * b);
    let (tp, dp) = (most(|l| l.mesh.size(MeshAxis::Tp)), most(|l| l.mesh.size(Axes::SEQUENCES)));
    let stages = layouts.iter().map(Layout::stages).max().unwrap_or(1);
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
    m.layers = m.layers.min(stages.max(4));
    if m.layers != config.model.layers {
        small.parallel.stages.clear();
    }
    m.vocab_size = m.vocab_size.min(509.max(tp * tp));
    m.ffn = fit(m.ffn, 192, tp);
    // Chunks of context-parallel ranks, in which sequence-parallel ranks have parts.
    let chunks = most(|l| if l.mesh.size(MeshAxis::Cp) == 1 { 1 } else { 2 * l.mesh.size(MeshAxis::Cp) });
    t.seq = fit(t.seq, 64, tp * chunks);
    // What was shorter than a sequence stays so.
    let share = |window: usize| (window * t.seq / config.train.seq).max(1);
    m.sliding_window = m.sliding_window.map(|w| if w < config.train.seq { share(w) } else { w });
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
        ("model.sliding_window", config.model.sliding_window.unwrap_or(0), small.model.sliding_window.unwrap_or(0)),
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

/// What a run gave.
#[derive(Clone)]
struct Trace {
    steps: Vec<Step>,
    /// Parameters, master weights and moments before each step, and after the last. Of a run that starts its steps from another's
    /// states: those that it started from.
    starts: Vec<States>,
    /// The norm above which gradients are clipped.
    clip: f64,
    /// The sum of losses of an evaluation, from the last state.
    evaluated: f64,
    arena_bytes: Vec<u64>,
}

#[derive(Clone)]
struct Step {
    loss: f64,
    norm: f32,
    /// As they were when the optimizer read them; of tied uses, their sum.
    gradients: Vec<Stored>,
    /// Parameters, master weights and moments after the step.
    after: States,
}

/// Shared, since they are the largest part of a run of the whole model.
type States = Arc<Vec<Stored>>;

/// A tensor as a device has it.
#[derive(Clone)]
struct Stored {
    name: String,
    value: ValueId,
    state: State,
    dtype: DType,
    bytes: Vec<u8>,
}

impl Stored {
    /// How many numbers it has.
    fn len(&self) -> usize {
        self.bytes.len() / self.dtype.bytes()
    }

    /// One of them.
    #[inline]
    fn number(&self, i: usize) -> f64 {
        let bytes = &self.bytes;
        match self.dtype {
            DType::F32 => f64::from(f32::from_le_bytes(bytes.as_chunks().0[i])),
            DType::BF16 => f64::from(bf16::to_f32(u16::from_le_bytes(bytes.as_chunks().0[i]))),
            DType::F16 => f64::from(f16::to_f32(u16::from_le_bytes(bytes.as_chunks().0[i]))),
            DType::F64 => f64::from_le_bytes(bytes.as_chunks().0[i]),
            DType::U32 => f64::from(u32::from_le_bytes(bytes.as_chunks().0[i])),
            DType::Fixed64 => f64::from(fixed::to_f32(i64::from_le_bytes(bytes.as_chunks().0[i]))),
        }
    }

    /// The same with every number moved by about one unit in its last place, up or down: what forward and backward read.
    fn disturbed(&self) -> Self {
        let mut moved = self.clone();
        if !matches!(self.state, State::Parameter(_)) {
            return moved;
        }
        let key = counter::key(0, &self.name);
        let up = |i: usize| counter::bits(key, i as u64).is_multiple_of(2);
        match self.dtype {
            DType::F32 => {
                for (i, b) in moved.bytes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    let x = f32::from_le_bytes(*b);
                    *b = (x * if up(i) { 1.0 + f32::EPSILON } else { 1.0 - f32::EPSILON }).to_le_bytes();
                }
            }
            DType::BF16 | DType::F16 => {
                for (i, b) in moved.bytes.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    // The bits of neighbours are neighbours; zero and what is not finite stay.
                    let bits = u16::from_le_bytes(*b);
                    let mask = if self.dtype == DType::BF16 { 0x7f80 } else { 0x7c00 };
                    if bits & 0x7fff != 0 && bits & mask != mask {
                        *b = (if up(i) { bits ^ 1 } else { bits }).to_le_bytes();
                    }
                }
            }
            DType::F64 | DType::U32 | DType::Fixed64 => {}
        }
        moved
    }
}

/// Runs `steps` steps on random tokens with one rank and with each layout.
pub fn compare(
    devices: &Devices,
    config: &Config,
    layouts: &[Layout],
    steps: usize,
    show: &mut dyn FnMut(&Comparison),
) -> Result<Vec<Comparison>, TrainError> {
    // A layout is checked for its sums, and those take any number of micro-batches.
    let mut config = config.clone();
    config.train.batch_ramp.clear();
    config.train.noise_scale = false;
    let alone = config.at(&Layout::single(1));
    let single = trace(devices, &alone, steps, None)?;
    // Only where bits may differ is it of interest how much.
    let mut disturbed = None;
    if layouts.iter().any(|layout| Promise::of(layout, &config.at(layout)) != Promise::Identical) {
        disturbed = Some(trace(devices, &alone, steps, Some(disturb(&single.starts)))?);
    }
    // The same for all layouts.
    let mut natural = Natural::default();
    let mut result = Vec::new();
    for layout in layouts {
        let config = config.at(layout);
        let parallel = trace(devices, &config, steps, Some(single.starts.clone()))?;
        let comparison =
            judge(layout, Promise::of(layout, &config), &single, (disturbed.as_ref(), &mut natural), &parallel);
        show(&comparison);
        result.push(comparison);
    }
    Ok(result)
}

fn disturb(starts: &[States]) -> Vec<States> {
    starts.iter().map(|states| Arc::new(each(states.len(), |i| states[i].disturbed()))).collect()
}

/// Runs steps, each from the state that `starts` has for it, or from where the last one ended.
fn trace(devices: &Devices, config: &Config, steps: usize, starts: Option<Vec<States>>) -> Result<Trace, TrainError> {
    let plan = devices.tuned(config, plan(devices, config)?)?;
    let mut session = Session::new(devices, config, &plan)?;
    let positions = config.round() * config.train.seq;
    let mut ran = Vec::new();
    let mut own = Vec::new();
    if starts.is_none() {
        own.push(Arc::new(states(&mut session, is_kept)?));
    }
    for step in 0..steps {
        if let Some(starts) = &starts {
            write(&mut session, &starts[step])?;
        }
        for m in 0..plan.layout.micro_batches {
            fill(&mut session, config, step as u64, m, m * positions, positions)?;
        }
        let scalars = step_scalars(config, step as u64, step as u64, plan.tokens_per_step);
        let result = session.run_step(StepScalars { lr: config.optimizer.lr as f32, ..scalars })?;
        let gradients = gradients(&mut session)?;
        let after = Arc::new(states(&mut session, is_kept)?);
        if starts.is_none() {
            own.push(after.clone());
        }
        ran.push(Step { loss: result.loss, norm: result.grad_norm, gradients, after });
    }
    let starts = starts.unwrap_or(own);
    write(&mut session, &starts[steps])?;
    // The same sequences in every layout: as many micro-batches of one rank as a layout has ranks that share them.
    let mut evaluated = 0.0;
    let sequences = config.train.global_batch;
    for first in (0..sequences).step_by(config.round()) {
        fill(&mut session, config, u64::MAX, 0, first * config.train.seq, positions)?;
        session.executor().run(StepProgram::EVALUATE)?;
        let losses = session.executor().read(names::LOSS, 0)?;
        evaluated = losses.as_chunks().0.iter().fold(evaluated, |sum, b| sum + f64::from_le_bytes(*b));
    }
    let clip = step_scalars(config, 0, 0, 1).clip.into();
    let arena_bytes = plan.stages.iter().map(|m| m.total_bytes).collect();
    Ok(Trace { steps: ran, starts, clip, evaluated, arena_bytes })
}

/// What a step starts from and changes.
fn is_kept(tensor: &Tensor) -> bool {
    matches!(tensor.role, Role::State(State::Parameter(_) | State::Master { .. } | State::Moment { .. }))
}

fn write(session: &mut Session, states: &[Stored]) -> Result<(), TrainError> {
    let known = session.tensors().iter().filter(|t| is_kept(t)).count();
    if known != states.len() {
        let text = format!("one rank has {} states, a layout of the same model {known}", states.len());
        return Err(ExecError::Internal(text).into());
    }
    states.iter().try_for_each(|state| Ok(session.executor().write(&state.name, 0, &state.bytes)?))
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
            // Documents of another length in every sequence, about eight where it is long.
            let length = 3 + seq / 8 + (first + i) / seq % 5;
            (i % seq / length * length) as u32
        };
        let bytes: Vec<u8> = (0..positions).flat_map(|i| start(i).to_le_bytes()).collect();
        session.executor().write(names::DOCUMENT_STARTS, micro_batch, &bytes)?;
    }
    Ok(())
}

/// The gradient of every parameter: the sum over its uses lives in the accumulator of the first.
fn gradients(session: &mut Session) -> Result<Vec<Stored>, TrainError> {
    let mut first: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    for tensor in session.tensors() {
        if let Role::State(State::Gradient { of }) = tensor.role {
            first.entry(of).and_modify(|v| *v = tensor.value.min(*v)).or_insert(tensor.value);
        }
    }
    states(session, |t| first.values().any(|v| *v == t.value))
}

/// Some of the states, whole.
fn states(session: &mut Session, wanted: impl Fn(&Tensor) -> bool) -> Result<Vec<Stored>, TrainError> {
    let mut result = Vec::new();
    for tensor in session.tensors().iter().filter(|t| wanted(t)) {
        let Role::State(state) = &tensor.role else { continue };
        let (name, value, state, dtype) = (tensor.name.clone(), tensor.value, state.clone(), tensor.whole.dtype);
        result.push(Stored { name, value, state, dtype, bytes: Vec::new() });
    }
    for stored in &mut result {
        stored.bytes = session.executor().read(&stored.name, 0)?.into_owned();
    }
    Ok(result)
}

#[cfg(test)]
mod tests;
