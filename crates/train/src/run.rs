//! One run, from its config to its last checkpoint.

mod checkpoint;
mod evaluate;
mod input;
mod roll_back;
mod start;
mod status;
mod step;
#[cfg(test)]
mod tests;

pub(crate) use checkpoint::{look_at_disk, places};
pub(crate) use start::resume;

use self::checkpoint::Checkpoints;
use self::evaluate::Evaluations;
use self::status::RunStatus;
use self::step::{Queued, Step};
use crate::checkpoint::with_checkpoint_interval;
use crate::elastic::{ElasticRun, Keeper};
use crate::energy::{ENERGY_KWH, RunEnergy};
use crate::event::{Event, Show};
use crate::metrics::StepMetrics;
use crate::profile::{MeasuredPeaks, Profile, ProfiledStep, profile};
use crate::sample::{Sample, sample};
use crate::session::Session;
use crate::slow_rank::{Slow, SlowRanks};
use crate::{Result, TrainError, settled};
use lockstep_checkpoint::list;
use lockstep_config::{Batches, Config, SaveEvery};
use lockstep_data::{DataError, Sampler};
use lockstep_exec::ExecError;
use lockstep_host::{Devices, Peak, StopSignal};
use lockstep_infer::{InferError, RunTokenizer, limit_buckets};
use lockstep_ir::units;
use lockstep_plan::{LayoutChoice, Plan, plan};
use lockstep_rundir::{RunDir, RunDirError, StartedBy, require_sinks};
use lockstep_telemetry::RunEnd;
use serde_json::json;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How a run is started.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Where its files go.
    pub dir: PathBuf,
    /// Set a run that is there aside and start over.
    pub fresh: bool,
    /// The step whose checkpoint a run goes on from; the latest if not given. Later ones are set aside.
    pub resume_from: Option<u64>,
    /// What a run that goes on does otherwise from here on, as `table.key=value`.
    pub change: Vec<String>,
    /// Most tokens of the sample that a finished run gives; 0 for none.
    pub sample_tokens: usize,
    /// Steps to profile, from 1 on, the last included.
    pub profile_steps: Option<RangeInclusive<u64>>,
    /// Look at all that every op makes, and end with the first number that is not finite.
    pub debug_nans: bool,
    /// The same options as the user spelled them, with their values: all processes of a run must be given the same.
    pub given: Vec<(String, String)>,
    /// Who starts it, for the run directory.
    pub started_by: StartedBy,
}

/// How a run ended.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Steps finished.
    pub step: u64,
    /// Whether all steps of the config are done; if not, the run was interrupted.
    pub finished: bool,
    /// Steps of the run, as it was changed.
    pub steps: u64,
    /// Validation loss before the first step of this call, if it was taken.
    pub first_val_loss: Option<f64>,
    /// Last validation loss.
    pub last_val_loss: Option<f64>,
    /// Gradient noise scale, in sequences, where it is asked for and known.
    pub noise_scale: Option<f64>,
    /// The last checkpoint.
    pub checkpoint: Option<PathBuf>,
    /// A text by the trained model, if the run is finished and one was asked for.
    pub sample: Option<Sample>,
    /// Where the time of the steps went that were to be profiled, if the run came to them.
    pub profile: Option<Profile>,
}

impl Outcome {
    /// Interrupted while data were prepared or checked: the run is where its last checkpoint left it.
    fn before_the_first_step(options: &RunOptions, steps: u64) -> Self {
        let last = if options.fresh { None } else { list(&options.dir.join("checkpoints")).unwrap_or_default().pop() };
        Self {
            step: last.as_ref().map_or(0, |(step, _)| *step),
            steps,
            checkpoint: last.map(|(_, path)| path),
            ..Self::default()
        }
    }
}

/// This many steps faster than the measured peak are no chance.
const STEPS_BEYOND_PEAK: u32 = 20;
/// Sequences of a validation after which it is seen whether the run is to stop.
const LOOK_EVERY: u64 = 16;

/// Trains, or resumes where the last call stopped. `stop` ends the run after the current step, with a checkpoint; before
/// the first one it ends what is under way, and the next call goes on with it.
///
/// Where ranks are processes, all of them call this with the same config and options. They stop after the same step, whichever of
/// them is asked to; the first writes the run directory.
pub fn run(devices: &Devices, config: &Config, options: &RunOptions, stop: &AtomicBool, show: Show) -> Result<Outcome> {
    run_in(devices, config, options, None, stop, show)
}

/// The same, in a world of an elastic run.
pub(crate) fn run_in(
    devices: &Devices,
    config: &Config,
    options: &RunOptions,
    elastic: Option<&ElasticRun<'_>>,
    stop: &AtomicBool,
    show: Show,
) -> Result<Outcome> {
    run_here(devices, config, (options, elastic), stop, show).inspect_err(|error| {
        // What all find out by themselves needs no telling.
        let known = match error {
            TrainError::Host(error) => error.is_known_to_all(),
            error => matches!(error, TrainError::WorldChanges),
        };
        if !known {
            devices.group().fail(&error.to_string());
        }
    })
}

fn run_here(
    devices: &Devices,
    config: &Config,
    (options, elastic): (&RunOptions, Option<&ElasticRun<'_>>),
    stop: &AtomicBool,
    show: Show,
) -> Result<Outcome> {
    let group = devices.group();
    config.require_data()?;
    limit_buckets(config)?;
    group.agree_on_start(config, &options.given)?;
    // Those that join an elastic run later were asked before.
    if elastic.is_none_or(|elastic| !elastic.is_later) {
        group.agree_on_clock()?;
    }
    let mut planning = |small, whole| show(Event::Planning { small, whole });
    let config = &settled(devices, config, Some(options.dir.as_path()).filter(|_| !options.fresh), &mut planning)?;
    if let Some(how) = config.layout_planned() {
        let chosen = LayoutChoice::of(config);
        show(Event::Warning(&format!("parallel.layout = \"auto\": {chosen}: {how}")));
    }
    if let Some(how) = config.micro_batch_found() {
        show(Event::Warning(&format!("train.micro_batch = {}: {how}", config.train.micro_batch)));
    }
    // What can be refused without touching the directory is refused first.
    if group.is_first() && elastic.is_none_or(|elastic| !elastic.is_later) {
        require_sinks(config)?;
    }
    let unchanged = plan(devices, config)?;
    let dir =
        if group.is_first() { open_dir(devices, config, options, elastic)? } else { RunDir::follow(&options.dir) };
    group.require_shared(&options.dir)?;
    group.record_failures(&options.dir);
    let in_memory = elastic.and_then(ElasticRun::take_found);
    if in_memory.is_none() {
        group.told::<_, TrainError>("checkpoint", || Ok(checkpoint::bring_back(config, options, show)?))?;
    }
    let (found, mut course) = resume(devices, config, options, in_memory)?;
    let resumed = found.loaded.as_ref().map_or("none".to_owned(), |loaded| format!("step {}", loaded.step));
    group.agree("checkpoint", &resumed)?;
    let plan = if course.changes.is_empty() { unchanged } else { plan(devices, &course.config)? };
    let plan = devices.tuned(&course.config, plan)?;
    let programs: Vec<String> = plan.compiled.programs.iter().map(|p| format!("{:016x}", p.fingerprint())).collect();
    group.agree("program", &programs.join(" "))?;
    if let Some((config, line)) = with_checkpoint_interval(devices, &course.config, &plan, &options.dir)? {
        show(Event::Warning(&line));
        course.config = config;
    }
    let aside = if options.fresh && group.is_first() { Some(dir.set_aside()?) } else { None };
    group.meet("begin")?;
    if let Some(elastic) = elastic {
        // Those of a world before are there already.
        if !elastic.is_later {
            devices.require_elastic_memory(&plan)?;
        }
        elastic.compiled();
        elastic.begin(group.is_first());
    }
    let somebody_waits = || elastic.is_some_and(ElasticRun::somebody_waits);
    let stop = &StopSignal::new(stop, group).or_change(elastic.map(|_| &somebody_waits as &dyn Fn() -> bool));
    let error = match start::start(&course, (&plan, devices), dir, found, (options, elastic), stop, show) {
        Ok(mut run) => {
            if run.debug_nans && !run.session.executor().check_numbers() {
                return Err(ExecError::Internal("this executor does not look at numbers".into()).into());
            }
            let sinks = run.dir.sinks();
            let result = run.go(stop, show);
            // A run whose world changes goes on with other sinks, in this process or in another one.
            let how = match &result {
                Ok(outcome) if outcome.finished => RunEnd::Finished,
                Ok(_) => RunEnd::Interrupted,
                Err(TrainError::WorldChanges) => RunEnd::Continues,
                Err(error) if elastic.is_some() && error.is_loss() => RunEnd::Continues,
                Err(_) => RunEnd::Failed,
            };
            sinks.end(how).iter().for_each(|text| show(Event::Warning(text)));
            return result;
        }
        Err(error) => error,
    };
    if let Some(aside) = aside {
        aside.undo();
    }
    match error {
        TrainError::Infer(InferError::Data(DataError::Interrupted)) => {
            Ok(Outcome::before_the_first_step(options, course.config.train.steps))
        }
        error => Err(error),
    }
}

/// Whether data in a bucket did not come.
fn is_of_bucket(error: &TrainError) -> bool {
    match error {
        TrainError::InStep { error, .. } => is_of_bucket(error),
        error => matches!(error, TrainError::Infer(InferError::Data(DataError::Bucket { .. }))),
    }
}

/// Opens the run directory. In a run whose ranks come and go, one that was taken for lost may still have it, until it ends.
fn open_dir(
    devices: &Devices,
    config: &Config,
    options: &RunOptions,
    elastic: Option<&ElasticRun<'_>>,
) -> Result<RunDir> {
    let until = Instant::now() + Duration::from_secs_f64(config.parallel.timeout);
    let open = || loop {
        match RunDir::open(&options.dir) {
            Err(RunDirError::Locked { .. }) if elastic.is_some() && Instant::now() < until => {
                std::thread::sleep(LOCKED_FOR);
            }
            opened => return opened,
        }
    };
    Ok(match devices.group().0 {
        Some(processes) => processes.busy("open the run directory", open)?,
        None => open()?,
    })
}

/// How often a run directory is tried again that another process has.
const LOCKED_FOR: Duration = Duration::from_millis(200);

struct Run<'a> {
    devices: &'a Devices,
    config: &'a Config,
    plan: &'a Plan,
    batches: Batches,
    status: RunStatus,
    pace: Pace,
    energy: RunEnergy,
    session: Session,
    dir: RunDir,
    train: Arc<Sampler>,
    evaluations: Evaluations,
    checkpoints: Checkpoints,
    tokenizer: RunTokenizer,
    sample_tokens: usize,
    outcome: Outcome,
    profiling: Profiling,
    debug_nans: bool,
    /// Where ranks come and go: what is known beyond this world, and what takes snapshots in memory.
    elastic: Option<(&'a ElasticRun<'a>, Keeper)>,
    /// Whether the state of the last step is on the disk.
    is_saved: bool,
    /// Whether it was said that a step had prompts only.
    warned_of_prompts: bool,
}

/// How fast steps are, and what that is compared with.
struct Pace {
    /// When the last step's result came.
    last_result: Option<Instant>,
    /// What MFU is a share of.
    peak: Peak,
    /// Steps that were faster than that.
    beyond_peak: u32,
    slow_ranks: SlowRanks,
}

/// The steps whose instructions are timed.
struct Profiling {
    /// Those that the user asks for.
    asked: Option<RangeInclusive<u64>>,
    taken: Vec<ProfiledStep>,
    /// The one that is compared with what was predicted.
    observed: Option<u64>,
}

impl Run<'_> {
    fn go(mut self, stop: &StopSignal<'_>, show: Show) -> Result<Outcome> {
        let steps = self.config.train.steps;
        if !self.is_saved {
            // The world before has its snapshot; this one holds its own from its first step on.
            self.remember()?;
        }
        // In a run whose ranks come and go, a loss before the first step would be the last one again.
        let later_world = self.elastic.as_ref().is_some_and(|(elastic, _)| elastic.is_later);
        if self.status.pending.is_some() || (!self.outcome.finished && !later_world) {
            self.outcome.first_val_loss = self.validate(stop, show)?;
        }
        if let Some(mut line) = self.status.pending.take() {
            line.val_loss = self.outcome.first_val_loss;
            let whole = line.val_loss.is_some() || !self.validates(line.step);
            match whole && self.score_tasks(&mut line, stop, show)? {
                true => self.record(&line, show)?,
                false => self.status.pending = Some(line),
            }
        }
        self.energy.begin(self.session.world())?;
        let mut saved = self.is_saved.then_some(self.outcome.step);
        let mut ahead: Option<Queued> = None;
        let mut unread: Option<TrainError> = None;
        while ahead.is_some() || (self.outcome.step < steps && !stop.look()? && !stop.changes()) {
            let current = match ahead.take() {
                Some(queued) => queued,
                None => match unread.take().map_or_else(|| self.queue(self.outcome.step, false), Err) {
                    Err(error) if is_of_bucket(&error) => return self.without_data(error, saved, show),
                    queued => queued?,
                },
            };
            self.look_at_time(current.step)?;
            // A device that is given its next step before this one is done never waits for the host.
            if !current.work.is_done() && !self.needs_result(current.step) && !stop.look()? && !stop.changes() {
                match self.queue(current.step, true) {
                    // This step is computed all the same, and saved.
                    Err(error) if is_of_bucket(&error) => unread = Some(error),
                    queued => ahead = Some(queued?),
                }
            }
            let prompts_alone = current.prompts_alone;
            let mut metrics = self.finish(current)?;
            let step = metrics.step;
            if prompts_alone && !self.warned_of_prompts {
                self.warned_of_prompts = true;
                show(Event::Warning(&format!(
                    "step {step} has no target: all of its tokens are prompts, so its loss is 0 and nothing is learned from it; a longer \
                     train.seq or a larger train.global_batch holds completions too"
                )));
            }
            if let Some(rows) = metrics.line.rows_beyond {
                show(Event::Stepped(&metrics.line));
                self.record(&metrics.line, show)?;
                let bound = self.config.parallel.ep_bound.unwrap_or(1.0);
                return Err(TrainError::ExpertBound { step, rows, bound });
            }
            if self.look_for_spikes(&metrics, show)? {
                self.record(&metrics.line, show)?;
                self.await_save(show)?;
                if let Some(queued) = ahead.take() {
                    self.session.finish(queued.work)?;
                }
                self.roll_back(show)?;
                saved = Some(self.outcome.step);
                continue;
            }
            if self.validates(step) {
                match self.validate_after(&mut metrics.line, stop, show) {
                    // The step is done, and the next one was not queued.
                    Err(error) if is_of_bucket(&error) => {
                        self.record(&metrics.line, show)?;
                        show(Event::Stepped(&metrics.line));
                        return self.without_data(error, saved, show);
                    }
                    validated => validated?,
                }
                if metrics.line.val_loss.is_none() {
                    // Interrupted: the next call takes the validation and then writes the line.
                    self.status.pending = Some(metrics.line);
                    break;
                }
            }
            if !self.score_tasks(&mut metrics.line, stop, show)? {
                self.status.pending = Some(metrics.line);
                break;
            }
            self.record(&metrics.line, show)?;
            show(Event::Stepped(&metrics.line));
            match self.cross_check(step, show) {
                Err(error) if is_of_bucket(&error) => return self.without_data(error, saved, show),
                checked => checked?,
            }
            self.name_slow_rank(&metrics, show)?;
            self.name_low_peak(&metrics.line, show);
            if let Some(end) = self.session.poll_save()? {
                self.save_ended(end, show)?;
            }
            // A checkpoint in the middle of skipped steps would be of a run that is about to fail.
            let due = self.save_due(step) || (self.checkpoints.again && ahead.is_none());
            if due && self.status.spikes.skipped.is_empty() {
                self.save(show)?;
                saved = Some(step);
            }
            if self.remembers(step) && ahead.is_none() && self.status.spikes.skipped.is_empty() {
                self.remember()?;
            }
        }
        self.await_save(show)?;
        if stop.changes() && self.outcome.step < steps && !stop.flag().load(Ordering::SeqCst) {
            return self.end_world(show);
        }
        if saved != Some(self.outcome.step) || self.checkpoints.again {
            self.save_now(show)?;
        }
        self.outcome.finished = self.outcome.step >= steps;
        let kind = if self.outcome.finished { "finish" } else { "interrupt" };
        self.energy.begin(self.session.world())?;
        self.dir.event(kind, json!({ "step": self.outcome.step, ENERGY_KWH: self.energy.total_kwh() }))?;
        // Its memory is enough for the sample too, and for measuring peaks.
        drop(self.session);
        if !self.devices.group().is_first() {
            return Ok(self.outcome);
        }
        if let (Some(checkpoint), true) = (&self.outcome.checkpoint, self.outcome.finished) {
            let text = self.evaluations.samples.as_ref().map_or(self.train.as_ref(), |(samples, _)| samples);
            match sample(
                self.devices,
                self.config,
                &self.tokenizer,
                checkpoint,
                self.plan.parameters,
                text,
                self.sample_tokens,
            ) {
                Ok(sample) => self.outcome.sample = sample,
                // The run is done and saved: a sample that fails takes nothing from it.
                Err(error) => show(Event::Trouble { what: "no sample: ", error: &error }),
            }
        }
        if !self.profiling.taken.is_empty() {
            let peaks = MeasuredPeaks::of(self.devices.device(self.plan.target)?.as_ref(), self.plan)?;
            self.outcome.profile = Some(profile(self.plan.program(), &self.profiling.taken, &peaks)?);
        }
        Ok(self.outcome)
    }

    /// Ends a run whose data do not come: with a checkpoint of its last step, so that nothing is lost. Of several processes the others may
    /// wait for this one in the next step, so none is saved there.
    fn without_data(mut self, error: TrainError, saved: Option<u64>, show: Show) -> Result<Outcome> {
        if self.devices.group().0.is_none() && self.status.spikes.skipped.is_empty() {
            self.await_save(show)?;
            if saved != Some(self.outcome.step) || self.checkpoints.again {
                self.save_now(show)?;
            }
            self.dir.event("interrupt", json!({ "step": self.outcome.step }))?;
        }
        Err(error)
    }

    /// Whether a snapshot is taken after this step, in memory.
    fn remembers(&self, step: u64) -> bool {
        self.elastic.as_ref().is_some_and(|(elastic, _)| elastic.is_due(step))
    }

    /// Begins a snapshot of the last step in the memory of all ranks.
    fn remember(&mut self) -> Result<()> {
        let about = self.snapshot_state();
        let Some((_, keeper)) = &mut self.elastic else { return Ok(()) };
        keeper.take(self.devices.group(), self.session.world(), about)
    }

    /// Ends this world with the state of its last step in memory: another world goes on from there.
    fn end_world(mut self, show: Show) -> Result<Outcome> {
        self.await_save(show)?;
        let about = self.snapshot_state();
        if let Some((_, keeper)) = &mut self.elastic {
            // The one before must be done, or this one would be left out.
            keeper.wait()?;
            self.devices.group().meet("snapshot")?;
            keeper.take(self.devices.group(), self.session.world(), about)?;
            keeper.wait()?;
            self.devices.group().meet("snapshot")?;
        }
        Err(TrainError::WorldChanges)
    }

    /// Writes a line of metrics. A sink that fails is none any more, and that is said once.
    fn record(&mut self, line: &StepMetrics, show: Show) -> Result<()> {
        let failed = self.dir.metric(line)?;
        start::warn_of_sinks(&mut self.dir, failed, line.step, show)
    }

    /// Says which rank all wait for, if one stands out.
    fn name_slow_rank(&mut self, metrics: &Step, show: Show) -> Result<()> {
        let Some(processes) = self.devices.group().0 else { return Ok(()) };
        let Some(slow) = self.pace.slow_ranks.step(&metrics.rank_busy_s, Instant::now()) else { return Ok(()) };
        let Slow { rank, busy_s, others_s, same_stage } = slow;
        let (step, host) = (metrics.step, processes.host(rank));
        let whose = if same_stage { "the others of its pipeline stage" } else { "those of other pipeline stages" };
        show(Event::Warning(&format!(
            "rank {rank} on host {host} computes for {} in a step, {whose} for {}: all wait for it",
            units::seconds(busy_s),
            units::seconds(others_s)
        )));
        let fields = json!({ "step": step, "rank": rank, "host": host, "busy_s": busy_s, "others_s": others_s });
        Ok(self.dir.event("slow_rank", fields)?)
    }

    /// Says once that steps are faster than the peak that MFU is a share of: that was measured while the machine was busy.
    fn name_low_peak(&mut self, line: &StepMetrics, show: Show) {
        self.pace.beyond_peak += u32::from(line.mfu > 1.0);
        if line.mfu > 1.0 && self.pace.beyond_peak == STEPS_BEYOND_PEAK {
            show(Event::Warning(&format!(
                "MFU is {:.0}% of the {}: it was measured while the machine was busy; `lockstep bench` measures it again",
                100.0 * line.mfu,
                self.pace.peak.name
            )));
        }
    }

    /// Tokens of the first `steps` steps.
    fn tokens_before(&self, steps: u64) -> u64 {
        self.batches.at(steps).first_sample * self.config.train.seq as u64
    }

    /// Whether something that happens at a fixed interval of steps, and after the last, happens after this step.
    fn due(&self, step: u64, every: u64) -> bool {
        step == self.config.train.steps || (every > 0 && step.is_multiple_of(every))
    }

    fn saves(&self, step: u64) -> bool {
        match self.config.checkpoint.every {
            SaveEvery::Steps(every) => self.due(step, every),
            // Found when the run began.
            SaveEvery::Auto => false,
        }
    }
}
