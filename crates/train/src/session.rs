//! A loaded program and the numbers that a host exchanges with it: one step in, one loss out.

mod checkpoint;
mod evaluate;
#[cfg(test)]
mod tests;

use crate::Result;
use crate::checkpoint::Saver;
use crate::fp8::{Fp8Metrics, fp8_class};
use crate::noise::Measured;
use crate::read_ahead::ReadAhead;
use lockstep_compile::{FIRST_STATS, LOADS, ROWS_BEYOND, SEEN, STATS};
use lockstep_config::{Batch, Config};
use lockstep_data::Sampler;
use lockstep_exec::{DeviceTime, ExecError, Executor, Note, Ticket, Timing, World};
use lockstep_host::Devices;
use lockstep_infer::feed::{DataWait, Feed, losses};
use lockstep_infer::state::{self, Weights};
use lockstep_ir::graph::Fp8Class;
use lockstep_ir::program::Tensor;
use lockstep_ir::{Axes, StepLimits, StepProgram, StepRounding, StepScalars};
use lockstep_model::names;
use lockstep_plan::Plan;
use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A program in memory, ready to step.
pub struct Session {
    tensors: Vec<Tensor>,
    executor: Box<dyn World>,
    micro_batches: usize,
    /// Entries of smaller steps, by their micro-batches.
    smaller: Vec<(usize, String)>,
    first: Option<First>,
    /// Whether the program counts the tokens of experts.
    loads: bool,
    /// What the program counts the losses of rounding to fp8 of, row by row.
    rounded: Vec<Fp8Class>,
    /// Whether gradients are summed in fixed point, with no loss scale but this session's.
    fixed_point: bool,
    /// Whether updates are skipped beyond limits.
    limits: bool,
    /// Whether updates round by random bits, which are those of the run's seed.
    rounds: bool,
    seed: u64,
    feed: Feed,
    /// What is read of a step, each with its micro-batches, in the order in which `result` asks for it.
    results: Vec<(String, usize)>,
    /// Scalars of losses that do not count once, and how much each counts.
    weighted: Vec<(String, f32)>,
    /// Targets that count in the step whose inputs the executor holds.
    targets: u64,
    /// Whether none counts: all tokens are prompts.
    prompts_alone: bool,
    /// What reads the samples of the steps to come, and how long the last step waited for it.
    read_ahead: Option<ReadAhead>,
    data_wait: Duration,
    /// Where checkpoints are written in the background.
    saver: Option<Saver>,
}

/// Sums of gradients in fixed point reach 2²⁶. A step whose sums leave that range is run again with a loss scale that is this
/// factor smaller, up to N times: then the largest sums of f32 fit. Both are exact, and what is lost below the unit is
/// less than 2⁻⁴⁰ of the largest sum.
const NARROWER: f32 = 1.0 / (1 << 21) as f32;
const NARROWINGS: usize = 5;

/// What the gradients of the first micro-batch are of.
#[derive(Clone, Copy)]
struct First {
    /// Groups of ranks that have one each.
    ranks: usize,
    /// Sequences of one.
    sequences: usize,
}

/// What a step gave.
#[derive(Clone, Debug, PartialEq)]
pub struct StepResult {
    /// Mean loss per target that counts of the global batch.
    pub loss: f64,
    /// Of modules that predict further tokens (MTP), the first first: the sum of their losses per target that counts of the global batch.
    pub further: Vec<f64>,
    /// Norm of the mean gradient.
    pub grad_norm: f32,
    /// Whether the update was applied: all gradients were finite, and loss and norm within [their limits](Session::limit).
    pub applied: bool,
    /// Where it was asked for: the squared norm of the mean gradient over the first micro-batch, in the mean over ranks where
    /// each has its own, and the sequences that one such gradient is of.
    pub first: Option<Measured>,
    /// Of a model with experts: the tokens of every expert, layer by layer of those that have some; else nothing.
    pub loads: Vec<f64>,
    /// Of a run in fp8: what rounding lost.
    pub fp8: Fp8Metrics,
    /// Rows of tokens that found no place with their experts: if there are any, the update was not applied.
    pub beyond: u64,
    /// When it was done, where the device has a clock.
    pub time: Option<DeviceTime>,
}

/// A step that was given to the executor.
pub struct QueuedStep(Queued);

enum Queued {
    /// The executor runs steps to their end.
    Done(StepResult),
    /// The step runs, or waits for those before it.
    Later { micro_batches: usize, targets: u64, ticket: Ticket },
}

impl QueuedStep {
    /// A step that has run already.
    pub(crate) fn done(result: StepResult) -> Self {
        Self(Queued::Done(result))
    }

    /// Whether it has run already. Else another step may be queued after it before its result is taken.
    pub fn is_done(&self) -> bool {
        matches!(self.0, Queued::Done(_))
    }
}

impl Session {
    /// Loads a plan and gives every parameter its initial value.
    pub fn new(devices: &Devices, config: &Config, plan: &Plan) -> Result<Self> {
        let mut session = Self::load(devices, config, plan)?;
        state::load(&session.tensors, session.executor.as_mut(), Weights::Initial, config.train.seed)?;
        Ok(session)
    }

    /// Loads a plan, whose parameters a checkpoint replaces: those that none holds get their initial values.
    pub(crate) fn to_restore(devices: &Devices, config: &Config, plan: &Plan) -> Result<Self> {
        let mut session = Self::load(devices, config, plan)?;
        let Self { tensors, executor, .. } = &mut session;
        match state::are_all_stored(tensors) {
            true => state::constants(tensors, executor.as_mut(), config.train.seed)?,
            false => state::load(tensors, executor.as_mut(), Weights::Initial, config.train.seed)?,
        }
        Ok(session)
    }

    /// Loads a plan, whose parameters others write.
    pub(crate) fn blank(devices: &Devices, config: &Config, plan: &Plan) -> Result<Self> {
        let mut session = Self::load(devices, config, plan)?;
        state::constants(&session.tensors, session.executor.as_mut(), config.train.seed)?;
        Ok(session)
    }

    fn load(devices: &Devices, config: &Config, plan: &Plan) -> Result<Self> {
        let total = devices.require_memory(config, plan)?;
        // What one has allocated is not free for the others to see.
        devices.group().meet("load")?;
        let programs = plan.compiled.programs.clone();
        let tensors = state::tensors(&programs);
        let timeout = std::time::Duration::from_secs_f64(config.parallel.timeout);
        let executor = devices.load_all(plan.target, programs, plan.threads, timeout)?;
        // One program, many readers: what was predicted is what was allocated.
        assert_eq!(executor.arena_bytes(), total, "the arena is not what the plan says");
        assert_eq!(executor.host_bytes(), plan.host_bytes(), "the host's memory is not what the plan says");
        let batch = config.round();
        // Ranks that sum for every micro-batch have one gradient together.
        let together = if plan.layout.zero < 2 { Axes::NONE } else { Axes::SEQUENCES.within(Axes::ZERO) };
        let sequences = config.train.micro_batch * plan.layout.mesh.size(together);
        let ranks = plan.layout.mesh.size(Axes::SEQUENCES.without(together));
        let mut session = Self {
            first: config.train.noise_scale.then_some(First { ranks, sequences }),
            loads: tensors.iter().any(|tensor| tensor.name == LOADS),
            rounded: tensors.iter().filter_map(fp8_class).collect(),
            limits: config.spikes.skip,
            rounds: tensors.iter().any(|tensor| tensor.name == StepRounding::NAME),
            seed: config.train.seed,
            fixed_point: config.train.reproducible && config.precision.loss_scale.is_none(),
            feed: Feed::new(
                &tensors,
                None,
                (batch, config.train.seq),
                (config.train.seed, config.model.vocab_size),
                &|name, elements| executor.has(name, elements),
            )
            .bounded(config.parallel.ep_bound)
            .awaiting(DataWait::of(config, devices.group())),
            results: Vec::new(),
            weighted: (1..=config.model.mtp_depth)
                .map(|depth| format!("{}.{}", StepScalars::NAME, names::further(names::LOSS, depth)))
                .filter(|name| tensors.iter().any(|tensor| tensor.name == *name))
                .filter(|name| executor.has(name, 0..StepScalars::ty().elements()))
                .map(|name| (name, (config.model.mtp_loss / config.model.mtp_depth as f64) as f32))
                .collect(),
            tensors,
            executor,
            micro_batches: plan.layout.micro_batches,
            targets: plan.tokens_per_step,
            prompts_alone: false,
            smaller: plan.smaller_steps.iter().map(|count| (*count, StepProgram::train_of(*count))).collect(),
            read_ahead: None,
            data_wait: Duration::ZERO,
            saver: None,
        };
        let seen = (!session.rounded.is_empty()).then_some(SEEN);
        let once = [Some(STATS), session.first.map(|_| FIRST_STATS), session.loads.then_some(LOADS), seen];
        let once = once.into_iter().flatten().map(|name| (name.to_owned(), 1));
        let beyond = session.feed.beyond().iter().map(|name| (name.clone(), session.micro_batches));
        let losses = [session.feed.loss().to_owned()].into_iter().chain(session.feed.further_losses());
        let losses = losses.map(|name| (name, session.micro_batches));
        session.results = losses.chain(once).chain(beyond).collect();
        session.limit(StepLimits::NONE)?;
        session.round_as_in(0)?;
        Ok(session)
    }

    /// What loss and gradient norm of the steps that are queued from here on may be; nothing where the config has no spike policy.
    pub fn limit(&mut self, limits: StepLimits) -> Result<()> {
        if !self.limits {
            return Ok(());
        }
        Ok(self.executor.write(StepLimits::NAME, 0, limits.to_array().map(f32::to_le_bytes).as_flattened())?)
    }

    /// Which step the random bits are of by which the steps that are queued from here on round; nothing where none do.
    pub fn round_as_in(&mut self, step: u64) -> Result<()> {
        if !self.rounds {
            return Ok(());
        }
        let key = StepRounding::new(self.seed, step).to_array();
        Ok(self.executor.write(StepRounding::NAME, 0, key.map(u32::to_le_bytes).as_flattened())?)
    }

    /// Has a thread read the samples of `data` that steps will ask for, from `first` on, a step ahead: the next step's are read while
    /// one runs. Gives the bytes that it takes, once.
    pub fn read_ahead(&mut self, data: &Arc<Sampler>, first: u64) -> Result<u64> {
        let ahead = ReadAhead::start(self.feed.reading().clone(), data, first, self.micro_batches)?;
        let bytes = ahead.bytes();
        self.read_ahead = Some(ahead);
        Ok(bytes)
    }

    /// Seconds that the last step waited for its samples.
    pub fn data_wait_s(&self) -> f64 {
        self.data_wait.as_secs_f64()
    }

    /// Bytes allocated.
    pub fn arena_bytes(&self) -> u64 {
        self.executor.arena_bytes()
    }

    /// As [`World::rank_busy_s`], of the last step or evaluation.
    pub(crate) fn rank_busy_s(&self) -> Vec<f64> {
        self.executor.rank_busy_s()
    }

    /// What the executor wants to be known.
    pub fn notes(&self) -> &[Note] {
        self.executor.notes()
    }

    /// The tensors that the program knows by name.
    pub(crate) fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// All ranks.
    pub(crate) fn world(&self) -> &dyn World {
        self.executor.as_ref()
    }

    /// The executor, for whoever reads or writes tensors by name.
    pub fn executor(&mut self) -> &mut dyn Executor {
        self.executor.as_mut()
    }

    /// The session on another executor, made from its own.
    #[cfg(test)]
    pub(crate) fn with_executor(self, make: impl FnOnce(Box<dyn Executor>) -> Box<dyn Executor>) -> Self {
        let program = self.executor.programs()[0].clone();
        Self { executor: Box::new(lockstep_exec::Alone::new(make(self.executor), program)), ..self }
    }

    /// The parameters as they are now, for another program.
    pub fn weights(&self) -> Weights<'_> {
        Weights::Live(self.executor.as_ref())
    }

    /// One training step on these samples of the global order.
    pub fn step(&mut self, data: &Sampler, batch: Batch, scalars: StepScalars) -> Result<StepResult> {
        let queued = self.queue_step(data, batch, &|_| scalars)?;
        self.finish(queued)
    }

    /// Gives the executor a training step on these samples of the global order. `scalars` are those of a step with this many targets
    /// that count. At most two steps are queued at a time.
    pub fn queue_step(
        &mut self,
        data: &Sampler,
        batch: Batch,
        scalars: &dyn Fn(u64) -> StepScalars,
    ) -> Result<QueuedStep> {
        let micro_batches = self.load_batch(data, batch)?;
        self.queue_micro_batches(micro_batches, scalars(self.targets))
    }

    /// Whether no target of the step that was queued last counts.
    pub(crate) fn has_prompts_alone(&self) -> bool {
        self.prompts_alone
    }

    /// Gives the executor the inputs of a step, and says in how many micro-batches.
    fn load_batch(&mut self, data: &Sampler, batch: Batch) -> Result<usize> {
        let micro_batches = batch.sequences / self.feed.batch();
        let Self { feed, executor, .. } = self;
        let (mut targets, mut waited) = (0, Duration::ZERO);
        let awaits = feed.awaits().clone();
        let mut ahead = self.read_ahead.as_mut().filter(|ahead| ahead.reads(data));
        for m in 0..micro_batches {
            let first = batch.first_sample + (m * feed.batch()) as u64;
            let (counted, wait) = match &mut ahead {
                Some(ahead) => {
                    awaits.by(|| ahead.take(first, |read| feed.give(executor.as_mut(), m, read, u64::MAX)))?
                }
                None => {
                    let start = Instant::now();
                    (feed.load(executor.as_mut(), m, data, first, u64::MAX)?, start.elapsed())
                }
            };
            targets += counted;
            waited += wait;
        }
        self.data_wait = waited;
        // A step of prompts alone has a loss and a gradient of 0.
        (self.targets, self.prompts_alone) = (targets.max(1), targets == 0);
        Ok(micro_batches)
    }

    /// Waits for a step and gives what came of it. Steps are finished in the order in which they were queued.
    pub fn finish(&mut self, step: QueuedStep) -> Result<StepResult> {
        match step.0 {
            Queued::Done(result) => Ok(result),
            Queued::Later { micro_batches, targets, ticket } => {
                let taken = self.executor.take(ticket)?;
                let mut tensors = taken.tensors.into_iter();
                let none = || ExecError::Internal("a queued reading gave too little".into());
                let result =
                    self.result(micro_batches, targets, |_, _| Ok(Cow::Owned(tensors.next().ok_or_else(none)?)))?;
                Ok(StepResult { time: taken.time, ..result })
            }
        }
    }

    /// One training step on the inputs that the executor holds already.
    pub fn run_step(&mut self, scalars: StepScalars) -> Result<StepResult> {
        let queued = self.queue_run(scalars)?;
        self.finish(queued)
    }

    /// As [`Session::queue_step`], on the inputs that the executor holds already.
    pub fn queue_run(&mut self, scalars: StepScalars) -> Result<QueuedStep> {
        self.queue_micro_batches(self.micro_batches, scalars)
    }

    /// As [`Session::run_step`], and tells when each instruction ran.
    pub fn profile_step(&mut self, scalars: StepScalars) -> Result<(StepResult, Vec<Timing>)> {
        self.profile_micro_batches(self.micro_batches, scalars)
    }

    /// As [`Session::step`], and tells when each instruction ran.
    pub fn profile_batch(
        &mut self,
        data: &Sampler,
        batch: Batch,
        scalars: &dyn Fn(u64) -> StepScalars,
    ) -> Result<(StepResult, Vec<Timing>)> {
        let micro_batches = self.load_batch(data, batch)?;
        self.profile_micro_batches(micro_batches, scalars(self.targets))
    }

    fn profile_micro_batches(
        &mut self,
        micro_batches: usize,
        mut scalars: StepScalars,
    ) -> Result<(StepResult, Vec<Timing>)> {
        let mut narrowings = 0;
        loop {
            self.write_scalars(scalars)?;
            let timings = self.executor.profile(entry(&self.smaller, micro_batches))?;
            let result = self.result(micro_batches, self.targets, |name, m| self.executor.read(name, m))?;
            if narrowings == NARROWINGS || !self.left_the_range(&result) {
                return Ok((result, timings));
            }
            scalars.loss_scale *= NARROWER;
            narrowings += 1;
        }
    }

    /// Whether a step was suppressed because sums in fixed point left their range. Weights and moments are as before.
    fn left_the_range(&self, result: &StepResult) -> bool {
        self.fixed_point && !result.grad_norm.is_finite() && result.loss.is_finite()
    }

    fn queue_micro_batches(&mut self, micro_batches: usize, mut scalars: StepScalars) -> Result<QueuedStep> {
        for _ in 0..NARROWINGS {
            let queued = self.queue_once(micro_batches, scalars)?;
            match &queued.0 {
                Queued::Done(result) if self.left_the_range(result) => scalars.loss_scale *= NARROWER,
                _ => return Ok(queued),
            }
        }
        self.queue_once(micro_batches, scalars)
    }

    fn queue_once(&mut self, micro_batches: usize, scalars: StepScalars) -> Result<QueuedStep> {
        self.write_scalars(scalars)?;
        self.executor.run(entry(&self.smaller, micro_batches))?;
        let further: Vec<String> = self.feed.further_losses().collect();
        let is_further = |name: &str| further.iter().any(|other| other == name);
        let counted = |name: &str| name == self.feed.loss() || is_further(name) || name.starts_with(ROWS_BEYOND);
        self.results.iter_mut().filter(|(name, _)| counted(name)).for_each(|(_, count)| *count = micro_batches);
        Ok(QueuedStep(match self.executor.read_later(&self.results)? {
            Some(ticket) => Queued::Later { micro_batches, targets: self.targets, ticket },
            None => Queued::Done(self.result(micro_batches, self.targets, |name, m| self.executor.read(name, m))?),
        }))
    }

    fn write_scalars(&mut self, scalars: StepScalars) -> Result<()> {
        let bytes = |scalars: StepScalars| scalars.to_array().map(f32::to_le_bytes);
        for (name, weight) in &self.weighted {
            let loss_scale = scalars.loss_scale * weight;
            self.executor.write(name, 0, bytes(StepScalars { loss_scale, ..scalars }).as_flattened())?;
        }
        Ok(self.executor.write(StepScalars::NAME, 0, bytes(scalars).as_flattened())?)
    }

    /// What came of a step, from the tensors that `read` gives.
    fn result<'a>(
        &self,
        micro_batches: usize,
        targets: u64,
        mut read: impl FnMut(&str, usize) -> Result<Cow<'a, [u8]>, ExecError>,
    ) -> Result<StepResult> {
        let mut sum = 0.0;
        for m in 0..micro_batches {
            losses(&read(self.feed.loss(), m)?).for_each(|loss| sum += loss);
        }
        let mut further = Vec::new();
        for name in self.feed.further_losses() {
            let mut sum = 0.0;
            for m in 0..micro_batches {
                sum += losses(&read(&name, m)?).sum::<f64>();
            }
            further.push(sum / targets as f64);
        }
        let [grad_norm, factor] = stats(STATS, &read(STATS, 0)?)?;
        let first = match self.first {
            None => None,
            Some(First { ranks, sequences }) => {
                let norm = f64::from(stats(FIRST_STATS, &read(FIRST_STATS, 0)?)?[0]);
                // The device divides by the targets of the whole step.
                let share = (micro_batches * self.feed.batch()) as f64 / sequences as f64;
                Some(Measured { sequences: sequences as f64, square: (norm * share).powi(2) / ranks as f64 })
            }
        };
        let loads = if self.loads { losses(&read(LOADS, 0)?).collect() } else { Vec::new() };
        let fp8 = match self.rounded.is_empty() {
            true => Fp8Metrics::default(),
            false => Fp8Metrics::of(&losses(&read(SEEN, 0)?).collect::<Vec<_>>(), &self.rounded),
        };
        let mut beyond = 0.0;
        for (name, m) in self.feed.beyond().iter().flat_map(|name| (0..micro_batches).map(move |m| (name, m))) {
            beyond += losses(&read(name, m)?).sum::<f64>();
        }
        let loss = sum / targets as f64;
        let applied = !factor.is_nan();
        Ok(StepResult { loss, further, grad_norm, applied, first, loads, fp8, beyond: beyond as u64, time: None })
    }
}

/// The entry of a step of this many micro-batches.
fn entry(smaller: &[(usize, String)], micro_batches: usize) -> &str {
    let smaller = smaller.iter().find(|(count, _)| *count == micro_batches);
    smaller.map_or(StepProgram::TRAIN, |(_, entry)| entry)
}

/// A norm and the factor on gradients.
fn stats(name: &str, bytes: &[u8]) -> Result<[f32; 2]> {
    let ([norm, factor], []) = bytes.as_chunks() else {
        return Err(ExecError::Internal(format!("`{name}` has {} bytes", bytes.len())).into());
    };
    Ok([norm, factor].map(|b| f32::from_le_bytes(*b)))
}
