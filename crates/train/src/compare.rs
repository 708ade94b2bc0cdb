//! Layouts against one rank: the same model, batch and steps, and how far apart losses, gradients and updates are.
//!
//! Every step of a layout starts from one rank's state before that step, so that a difference is of that step and not of what grew
//! from earlier ones. How far apart two right programs may be depends on the state: one rank is also run from weights that are
//! changed in their last bit, and where that alone moves a number a lot, a layout may move it too.
//!
//! Rounding may send a token to another expert, which is more than rounding from there on. Where it does, the layout is run again with
//! one rank's choices replayed: experts are given, and how much each counts still follows from the layout's own logits.
//!
//! A step is compared in parts on all cores as it goes, and its buffers are used again. A GPU that has the memory
//! runs several layouts at once.

mod judge;
mod numbers;
mod replay;
mod shrink;

pub use judge::{Comparison, Criterion, OwnChoices, Promise};
pub use shrink::shrink;

use crate::schedule::step_scalars;
use crate::{Result, Session};
use judge::{Found, judge};
use lockstep_config::Config;
use lockstep_exec::{ExecError, copy};
use lockstep_host::Devices;
use lockstep_infer::{feed, state};
use lockstep_ir::graph::State;
use lockstep_ir::op::IGNORED_TARGET;
use lockstep_ir::program::{Role, Tensor};
use lockstep_ir::{DType, Layout, MeshAxis, StepProgram, StepScalars, ValueId, counter};
use lockstep_model::names;
use lockstep_plan::{Plan, PlanError, plan_with};
use numbers::{Spare, Stored, disturbed};
use replay::Choices;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

/// A plan whose programs tell where tokens go, where there are experts.
fn plan(devices: &Devices, config: &Config) -> Result<Plan, PlanError> {
    plan_with(devices, config, |model, form| Ok(replay::telling(lockstep_model::build_form(model, form)?)))
}

/// The same for programs whose tokens go where the host says.
fn replaying_plan(devices: &Devices, config: &Config) -> Result<Plan, PlanError> {
    plan_with(devices, config, |model, form| {
        replay::replaying(replay::telling(lockstep_model::build_form(model, form)?))
    })
}

/// What one rank gave.
struct Trace {
    steps: Vec<SingleStep>,
    /// Parameters, master weights and moments before each step, and after the last.
    starts: Vec<Vec<Stored>>,
    /// The norm above which gradients are clipped.
    clip: f64,
    /// Tokens of a step.
    tokens: usize,
    /// From the last state.
    evaluated: Evaluated,
}

/// A step of one rank, whose states are in its trace.
struct SingleStep {
    loss: f64,
    norm: f32,
    gradients: Vec<Stored>,
    chosen: Choices,
}

/// What a step gave.
struct Step {
    loss: f64,
    norm: f32,
    /// As they were when the optimizer read them; of tied uses, their sum.
    gradients: Vec<Stored>,
    /// Parameters, master weights and moments after the step.
    after: Vec<Stored>,
    chosen: Choices,
}

/// What an evaluation gave.
struct Evaluated {
    /// The sum of losses.
    loss: f64,
    chosen: Choices,
}

/// Runs `steps` steps on random tokens with one rank and with each layout. Where ranks are processes every one of them runs one rank by
/// itself, and all find the same.
pub fn compare(
    devices: &Devices,
    config: &Config,
    layouts: &[Layout],
    steps: usize,
    show: &mut dyn FnMut(&Comparison),
) -> Result<Vec<Comparison>> {
    // A layout is checked for its sums, and those take any number of micro-batches.
    let mut config = config.clone();
    config.train.batch_ramp.clear();
    config.train.noise_scale = false;
    config.spikes.skip = false;
    let alone = config.at(&Layout::single(1));
    let configs: Vec<Config> = layouts.iter().map(|layout| config.at(layout)).collect();
    let single_plan = devices.tuned(&alone, plan(devices, &alone)?)?;
    let plans = plan_all(devices, &configs)?;
    let single = trace(Run::new(devices, &alone, &single_plan, true)?, steps)?;
    let promises: Vec<Promise> = layouts.iter().zip(&configs).map(|(l, c)| Promise::of(l, c)).collect();
    let mut tasks = Vec::new();
    // Only where bits may differ is it of interest how much. The bounds are the same for all layouts. Choices that flip are no
    // excuse: they are replayed.
    let replaying = (!single.evaluated.chosen.is_empty()).then(|| replaying_plan(devices, &alone)).transpose()?;
    if let Some(promise) = promises.iter().find(|promise| **promise != Promise::Identical) {
        let plan = replaying.as_ref().unwrap_or(&single_plan);
        tasks.push(Task { config: &alone, plan, promise: *promise, replays: replaying.is_some(), disturbs: true });
    }
    let first = tasks.len();
    let all = configs.iter().zip(&plans).zip(&promises);
    let task = |((config, plan), promise): ((_, _), &Promise)| Task {
        config,
        plan,
        promise: *promise,
        replays: false,
        disturbs: false,
    };
    tasks.extend(all.map(task));
    let (mut natural, mut result) = (Vec::new(), Vec::new());
    follow_all(devices, &tasks, &single, &mut |i, found| {
        let Some(i) = i.checked_sub(first) else { return natural = found.differences() };
        let comparison = judge(&layouts[i], promises[i], found, &natural, arena_bytes(&plans[i]));
        show(&comparison);
        result.push(comparison);
    })?;
    Ok(result)
}

/// The plans of all layouts.
fn plan_all(devices: &Devices, configs: &[Config]) -> Result<Vec<Plan>> {
    let plans: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = configs.iter().map(|config| scope.spawn(|| plan(devices, config))).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });
    let stopped = |_| ExecError::Internal("planning stopped".into());
    let tuned = |(config, plan): (_, Result<_, _>)| Ok(devices.tuned(config, plan.map_err(stopped)??)?);
    configs.iter().zip(plans).map(tuned).collect()
}

fn arena_bytes(plan: &Plan) -> Vec<u64> {
    plan.stages.iter().map(|m| m.total_bytes).collect()
}

/// A run that is to be compared with one rank.
struct Task<'a> {
    config: &'a Config,
    plan: &'a Plan,
    promise: Promise,
    /// Whether tokens go where one rank sent them: then the plan is one that replays.
    replays: bool,
    /// Whether it starts from weights that are changed in their last bit.
    disturbs: bool,
}

/// How many of these runs go on at the same time. A GPU that has memory for several waits less for the host then; on the CPU one run has
/// all cores, and processes do the same in the same order.
fn at_once(devices: &Devices, tasks: &[Task]) -> Result<usize> {
    let Some(Task { plan, .. }) = tasks.first().filter(|_| devices.processes().is_none()) else { return Ok(1) };
    let device = devices.device(plan.target)?;
    let free = device.available_bytes()?.unwrap_or(0);
    let bytes = |task: &Task| {
        let mesh = task.plan.layout.mesh;
        arena_bytes(task.plan).iter().sum::<u64>() * (mesh.ranks() / mesh.size(MeshAxis::Pp)) as u64
    };
    let largest = tasks.iter().map(bytes).max().unwrap_or(0);
    Ok((1..=device.at_once()).rev().find(|count| *count as u64 * largest <= free / 2).unwrap_or(1))
}

/// Runs the tasks; `done` hears of them in their order.
fn follow_all(devices: &Devices, tasks: &[Task], single: &Trace, done: &mut dyn FnMut(usize, Found)) -> Result<()> {
    let next = AtomicUsize::new(0);
    let (sender, receiver) = mpsc::channel();
    let work = |sender: mpsc::Sender<_>| {
        let spare = &mut Spare::default();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(task) = tasks.get(i) else { break };
            // Nobody listens any more once another has failed.
            if sender.send((i, follow_routed(devices, task, single, spare))).is_err() {
                break;
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..at_once(devices, tasks)? {
            let sender = sender.clone();
            scope.spawn(move || work(sender));
        }
        drop(sender);
        let (mut early, mut told) = (BTreeMap::new(), 0);
        for (i, found) in receiver {
            early.insert(i, found?);
            while let Some(found) = early.remove(&told) {
                done(told, found);
                told += 1;
            }
        }
        Ok(())
    })
}

/// Runs one rank from the state that it has.
fn trace(mut run: Run, steps: usize) -> Result<Trace> {
    let (config, spare) = (run.config, &mut Spare::default());
    let mut starts = vec![run.states(is_kept, spare)?];
    let mut all = Vec::new();
    for step in 0..steps {
        let Step { loss, norm, gradients, after, chosen } = run.step(step, None, spare)?;
        all.push(SingleStep { loss, norm, gradients, chosen });
        starts.push(after);
    }
    let clip = step_scalars(config, 0, 0, 1).clip.into();
    let tokens = config.train.global_batch * config.train.seq;
    Ok(Trace { steps: all, starts, clip, tokens, evaluated: run.evaluate(None)? })
}

/// Runs a task, and again with one rank's choices where some flipped though only rounding differs.
fn follow_routed(devices: &Devices, task: &Task, single: &Trace, spare: &mut Spare) -> Result<Found> {
    let found = follow(devices, task, single, spare)?;
    if task.replays || task.promise == Promise::Identical || found.flipped() == 0 {
        return Ok(found);
    }
    let plan = replaying_plan(devices, task.config)?;
    let again = follow(devices, &Task { plan: &plan, replays: true, ..*task }, single, spare)?;
    Ok(again.after(&found))
}

/// Runs each of one rank's steps from the state that it had before.
fn follow(devices: &Devices, task: &Task, single: &Trace, spare: &mut Spare) -> Result<Found> {
    let mut run = Run::new(devices, task.config, task.plan, false)?;
    let mut found = Found::new(task.promise);
    for (step, start) in single.starts.iter().enumerate() {
        let moved = task.disturbs.then(|| disturbed(start, spare));
        let before = moved.as_ref().unwrap_or(start);
        run.write(before)?;
        let replayed = |chosen| task.replays.then_some(chosen);
        if let Some(ours) = single.steps.get(step) {
            let ran = run.step(step, replayed(&ours.chosen), spare)?;
            found.add_step(single, step, before, &ran);
            spare.keep(ran.gradients);
            spare.keep(ran.after);
        } else {
            found.add_evaluation(single, &run.evaluate(replayed(&single.evaluated.chosen))?);
        }
        spare.keep(moved.unwrap_or_default());
    }
    Ok(found)
}

/// A program that runs steps.
struct Run<'a> {
    session: Session,
    config: &'a Config,
    plan: &'a Plan,
    /// Of a micro-batch of all ranks.
    positions: usize,
    /// The outputs that tell where tokens go, in the order of choices.
    routers: Vec<String>,
}

impl<'a> Run<'a> {
    /// Loads a config; `draws` says whether parameters get their initial values, which others write else.
    fn new(devices: &Devices, config: &'a Config, plan: &'a Plan, draws: bool) -> Result<Self> {
        let session = if draws { Session::new(devices, config, plan)? } else { Session::blank(devices, config, plan)? };
        let positions = config.round() * config.train.seq;
        let routers = replay::routers(session.tensors());
        Ok(Self { session, config, plan, positions, routers })
    }

    /// Runs a step; where its program replays, with these choices.
    fn step(&mut self, step: usize, replayed: Option<&Choices>, spare: &mut Spare) -> Result<Step> {
        let config = self.config;
        for m in 0..self.plan.layout.micro_batches {
            fill(&mut self.session, config, step as u64, m, m * self.positions, self.positions)?;
            self.replay(replayed, m, m * self.positions)?;
        }
        let scalars = step_scalars(config, step as u64, step as u64, self.plan.tokens_per_step);
        self.session.round_as_in(step as u64)?;
        let result = self.session.run_step(StepScalars { lr: config.optimizer.lr as f32, ..scalars })?;
        let gradients = self.gradients(spare)?;
        let after = self.states(is_kept, spare)?;
        let mut chosen = vec![Vec::new(); self.routers.len()];
        (0..self.plan.layout.micro_batches).try_for_each(|m| self.read_choices(m, &mut chosen))?;
        Ok(Step { loss: result.loss, norm: result.grad_norm, gradients, after, chosen })
    }

    /// Adds where the tokens of a micro-batch went.
    fn read_choices(&mut self, micro_batch: usize, chosen: &mut Choices) -> Result<()> {
        for (name, chosen) in self.routers.iter().zip(chosen) {
            let bytes = self.session.executor().read(name, micro_batch)?;
            chosen.extend(bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)));
        }
        Ok(())
    }

    /// Says where the tokens of a micro-batch go, whose first is this one of all that the choices are of.
    fn replay(&mut self, chosen: Option<&Choices>, micro_batch: usize, first: usize) -> Result<()> {
        let tokens = self.config.train.global_batch * self.config.train.seq;
        for (name, chosen) in self.routers.iter().zip(chosen.into_iter().flatten()) {
            let each = chosen.len() / tokens;
            let bytes: Vec<u8> =
                chosen[first * each..][..self.positions * each].iter().flat_map(|e| e.to_le_bytes()).collect();
            self.session.executor().write(&replay::given(name), micro_batch, &bytes)?;
        }
        Ok(())
    }

    /// The sum of losses over the same sequences in every layout: as many micro-batches of one rank as a layout has ranks that share them.
    fn evaluate(&mut self, replayed: Option<&Choices>) -> Result<Evaluated> {
        let (mut loss, mut chosen) = (0.0, vec![Vec::new(); self.routers.len()]);
        let (config, positions) = (self.config, self.positions);
        for first in (0..config.train.global_batch).step_by(config.round()) {
            fill(&mut self.session, config, u64::MAX, 0, first * config.train.seq, positions)?;
            self.replay(replayed, 0, first * config.train.seq)?;
            self.session.executor().run(StepProgram::EVALUATE)?;
            let losses = self.session.executor().read(names::LOSS, 0)?;
            loss = losses.as_chunks().0.iter().fold(loss, |sum, b| sum + f64::from_le_bytes(*b));
            self.read_choices(0, &mut chosen)?;
        }
        Ok(Evaluated { loss, chosen })
    }

    fn write(&mut self, states: &[Stored]) -> Result<()> {
        let known = self.session.tensors().iter().filter(|t| is_kept(t)).count();
        if known != states.len() {
            let text = format!("one rank has {} states, a layout of the same model {known}", states.len());
            return Err(ExecError::Internal(text).into());
        }
        let types: BTreeMap<String, DType> =
            self.session.tensors().iter().map(|t| (t.name.clone(), t.whole.dtype)).collect();
        states.iter().try_for_each(|state| {
            // Where rows are cut through their blocks, a layout keeps a moment in another type.
            let other = types.get(&state.name).filter(|dtype| **dtype != state.dtype);
            let bytes = other.map(|to| state::converted(&state.bytes, state.dtype, *to));
            Ok(self.session.executor().write(&state.name, 0, bytes.as_ref().unwrap_or(&state.bytes))?)
        })
    }

    /// The gradient of every parameter: the sum over its uses lives in the accumulator of the first.
    fn gradients(&mut self, spare: &mut Spare) -> Result<Vec<Stored>> {
        let mut first: BTreeMap<ValueId, ValueId> = BTreeMap::new();
        for tensor in self.session.tensors() {
            if let Role::State(State::Gradient { of }) = tensor.role {
                first.entry(of).and_modify(|v| *v = tensor.value.min(*v)).or_insert(tensor.value);
            }
        }
        self.states(|t| first.values().any(|v| *v == t.value), spare)
    }

    /// Some of the states, whole.
    fn states(&mut self, wanted: impl Fn(&Tensor) -> bool, spare: &mut Spare) -> Result<Vec<Stored>> {
        let mut result = Vec::new();
        for tensor in self.session.tensors().iter().filter(|t| wanted(t)) {
            let Role::State(state) = &tensor.role else { continue };
            let (name, value, state, dtype) = (tensor.name.clone(), tensor.value, state.clone(), tensor.whole.dtype);
            let bytes = spare.take(tensor.whole.bytes() as usize);
            result.push(Stored { name, value, state, dtype, bytes });
        }
        let names: Vec<String> = result.iter().map(|stored| stored.name.clone()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        self.session.executor().read_all(&names, &mut |i, first, bytes| {
            copy(&mut result[i].bytes[first..first + bytes.len()], bytes);
        })?;
        Ok(result)
    }
}

/// What a step starts from and changes.
fn is_kept(tensor: &Tensor) -> bool {
    let Role::State(state) = &tensor.role else { return false };
    matches!(state, State::Parameter(_) | State::Unit { .. } | State::Master { .. } | State::Moment { .. })
}

/// Writes random tokens to all micro-batches of the first step.
pub(crate) fn fill_all(session: &mut Session, config: &Config, plan: &Plan) -> Result<()> {
    let positions = config.round() * config.train.seq;
    (0..plan.layout.micro_batches).try_for_each(|m| fill(session, config, 0, m, m * positions, positions))
}

/// Writes random tokens to a micro-batch: those from `first` on of the step with this number, the same in every layout.
fn fill(
    session: &mut Session,
    config: &Config,
    step: u64,
    micro_batch: usize,
    first: usize,
    positions: usize,
) -> Result<()> {
    let seq = config.train.seq;
    let mut both = Vec::new();
    for name in [names::TOKENS, names::TARGETS] {
        let key = counter::key(step, name);
        let id = |i: usize| (counter::bits(key, (first + i) as u64) % config.model.vocab_size as u64) as u32;
        // A prompt of another length in every sequence, or none.
        let ignored = |i: usize| {
            let (sequence, position) = ((first + i) / seq, (first + i) % seq);
            config.leaves_targets_out() && name == names::TARGETS && position < sequence % 4 * seq / 4
        };
        let id = |i: usize| if ignored(i) { IGNORED_TARGET } else { id(i) };
        let ids: Vec<u32> = (0..positions).map(id).collect();
        session.executor().write(name, micro_batch, &bytes_of(&ids))?;
        both.push(ids);
    }
    if config.model.dropout > 0.0 && step != u64::MAX {
        let sample = |b: usize| step * config.train.global_batch as u64 + (first / seq + b) as u64;
        let keys = (0..positions / seq).flat_map(|b| feed::dropout_key(config.train.seed, sample(b)));
        let bytes: Vec<u8> = keys.flat_map(u32::to_le_bytes).collect();
        session.executor().write(names::DROPOUT_KEYS, micro_batch, &bytes)?;
    }
    let start = |i: usize| {
        // Documents of another length in every sequence, about eight where it is long.
        let length = 3 + seq / 8 + (first + i) / seq % 5;
        (i % seq / length * length) as u32
    };
    let starts: Option<Vec<u32>> = config.data.document_mask.then(|| (0..positions).map(start).collect());
    if let Some(starts) = &starts {
        session.executor().write(names::DOCUMENT_STARTS, micro_batch, &bytes_of(starts))?;
    }
    // Evaluation is without further tokens, and has room for them all the same.
    for depth in 1..=config.model.mtp_depth {
        let ids = feed::further((&both[0], &both[1]), starts.as_deref(), seq, depth);
        for (name, ids) in [names::TOKENS, names::TARGETS].into_iter().zip(ids) {
            session.executor().write(&names::further(name, depth), micro_batch, &bytes_of(&ids))?;
        }
    }
    Ok(())
}

fn bytes_of(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests;
