//! One run, from its config to its last checkpoint.

use crate::event::{Event, StepMetrics};
use crate::session::Session;
use crate::{Existing, Plan, RunData, RunDir, TrainError, data_folder, learning_rate, plan};
use lockstep_checkpoint::{latest, list, save};
use lockstep_config::Config;
use lockstep_data::Sampler;
use lockstep_exec::cpu;
use lockstep_ir::StepScalars;
use serde_json::json;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// How a run is started.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// Where its files go.
    pub dir: PathBuf,
    /// Set a run that is there aside and start over.
    pub fresh: bool,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Steps finished.
    pub step: u64,
    /// Whether all steps of the config are done; if not, the run was interrupted.
    pub finished: bool,
    /// Held-out loss before the first step of this call, if it was taken.
    pub first_val_loss: Option<f64>,
    /// Last held-out loss.
    pub last_val_loss: Option<f64>,
    /// The last checkpoint.
    pub checkpoint: Option<PathBuf>,
}

/// Steps in a row whose gradients may be non-finite before the run gives up.
const MOST_SKIPPED: u64 = 3;

/// Trains, or resumes where the last call stopped. `stop` ends the run after the current step, with a checkpoint.
pub fn run(
    config: &Config,
    options: &RunOptions,
    stop: &AtomicBool,
    show: &mut dyn FnMut(Event),
) -> Result<Outcome, TrainError> {
    config.require_data()?;
    let mut dir = RunDir::open(&options.dir)?;
    if options.fresh {
        dir.set_aside()?;
    }
    refuse_changes(config, &dir)?;
    // A run with checkpoints keeps the data it started with.
    let started = list(&dir.checkpoints()).is_ok_and(|l| !l.is_empty());
    let existing = if started { Existing::Keep } else { Existing::Reuse };
    let folder = data_folder(config, dir.path());
    let data = RunData::prepare(config, &folder, existing, &mut |_, p| show(Event::Preparing(p)))?;
    let train = data.train(config)?;
    let plan = plan(config)?;
    let mut session = Session::new(config, &plan)?;

    let found = latest(&dir.checkpoints())?;
    found.warnings.iter().for_each(|w| show(Event::Warning(w)));
    let mut step = 0;
    let mut checkpoint = None;
    if let Some(loaded) = found.loaded {
        if loaded.state["data"] != json!(format!("{:016x}", data.fingerprint())) {
            return Err(TrainError::DataChanged { dir: folder });
        }
        session.restore(&loaded)?;
        step = loaded.step;
        checkpoint = Some(loaded.path);
    }
    dir.begin(&config.resolved_toml(), &plan, step)?;
    let ceiling = cpu::matmul_ceiling(plan.threads);
    let train_tokens = data.train_tokens();
    show(Event::Started { plan: &plan, ceiling, train_tokens, from_step: step, dir: dir.path() });
    dir.event("start", json!({ "step": step, "device": plan.device, "ceiling_flops": ceiling }))?;

    let held_out = data.held_out(config, &mut |text| show(Event::Warning(text)));
    let held_out = held_out.map(|(sampler, samples)| (sampler, samples.min(config.train.validation_sequences as u64)));
    let outcome =
        Outcome { step, finished: step >= config.train.steps, first_val_loss: None, last_val_loss: None, checkpoint };
    Run { config, plan: &plan, session, dir, train, held_out, ceiling, data: data.fingerprint(), outcome }
        .go(stop, show)
}

struct Run<'a> {
    config: &'a Config,
    plan: &'a Plan,
    session: Session,
    dir: RunDir,
    train: Sampler,
    /// Held-out samples and how many of them one validation reads.
    held_out: Option<(Sampler, u64)>,
    ceiling: f64,
    data: u64,
    outcome: Outcome,
}

impl Run<'_> {
    fn go(mut self, stop: &AtomicBool, show: &mut dyn FnMut(Event)) -> Result<Outcome, TrainError> {
        let steps = self.config.train.steps;
        if !self.outcome.finished {
            self.outcome.first_val_loss = self.validate(show)?;
        }
        let mut saved = self.outcome.step;
        let mut skipped = 0;
        while self.outcome.step < steps && !stop.load(Ordering::SeqCst) {
            let mut metrics = self.step()?;
            let step = metrics.step;
            if metrics.applied {
                skipped = 0;
            } else {
                skipped += 1;
                show(Event::Skipped { step });
                let (loss, norm) = (metrics.line.loss.to_string(), metrics.line.grad_norm.to_string());
                self.dir.event("skipped", json!({ "step": step, "loss": loss, "grad_norm": norm }))?;
            }
            if skipped == MOST_SKIPPED {
                let StepMetrics { loss, grad_norm, .. } = metrics.line;
                return Err(TrainError::Diverged { steps: skipped, step, loss, grad_norm });
            }
            let due = |every: u64| step == steps || (every > 0 && step.is_multiple_of(every));
            if due(self.config.train.validate_every) {
                metrics.line.val_loss = self.validate(show)?;
            }
            self.dir.metric(&metrics.line)?;
            show(Event::Stepped(&metrics.line));
            // A checkpoint in the middle of skipped steps would be of a run that is about to fail.
            if due(self.config.checkpoint.every) && skipped == 0 {
                self.save(show)?;
                saved = step;
            }
        }
        if saved != self.outcome.step {
            self.save(show)?;
        }
        self.outcome.finished = self.outcome.step >= steps;
        let kind = if self.outcome.finished { "finish" } else { "interrupt" };
        self.dir.event(kind, json!({ "step": self.outcome.step }))?;
        Ok(self.outcome)
    }

    fn step(&mut self) -> Result<Step, TrainError> {
        let start = Instant::now();
        let step = self.outcome.step;
        let (train, o) = (&self.config.train, &self.config.optimizer);
        let lr = learning_rate(self.config, step);
        let bias = |beta: f64| (1.0 - beta.powf((step + 1) as f64)) as f32;
        let scalars = StepScalars {
            lr: lr as f32,
            inverse_count: 1.0 / self.plan.tokens_per_step as f32,
            clip: if o.grad_clip > 0.0 { o.grad_clip as f32 } else { f32::INFINITY },
            bias1: bias(o.beta1),
            bias2: bias(o.beta2),
        };
        let result = self.session.step(&self.train, step * train.global_batch as u64, scalars)?;
        self.outcome.step += 1;
        let step_s = start.elapsed().as_secs_f64();
        let tokens_per_s = self.plan.tokens_per_step as f64 / step_s;
        let line = StepMetrics {
            step: self.outcome.step,
            tokens: self.outcome.step * self.plan.tokens_per_step,
            loss: result.loss,
            grad_norm: result.grad_norm,
            lr,
            step_s,
            tokens_per_s,
            mfu: self.plan.model_flops_per_token() * tokens_per_s / self.ceiling,
            arena_bytes: self.session.arena_bytes(),
            val_loss: None,
        };
        Ok(Step { step: line.step, applied: result.applied, line })
    }

    fn validate(&mut self, show: &mut dyn FnMut(Event)) -> Result<Option<f64>, TrainError> {
        let Some((sampler, sequences)) = &self.held_out else { return Ok(None) };
        let loss = self.session.evaluate(sampler, *sequences)?;
        let step = self.outcome.step;
        self.outcome.last_val_loss = Some(loss);
        show(Event::Validated { step, loss });
        self.dir.event("validation", json!({ "step": step, "val_loss": loss }))?;
        Ok(Some(loss))
    }

    fn save(&mut self, show: &mut dyn FnMut(Event)) -> Result<(), TrainError> {
        let step = self.outcome.step;
        let state = json!({
            "tokens": step * self.plan.tokens_per_step,
            "data": format!("{:016x}", self.data),
            "config": self.config.resolved_toml(),
            "lockstep": env!("CARGO_PKG_VERSION"),
        });
        let groups = self.session.groups()?;
        let progress = &mut |done, total| show(Event::Saving { done, total });
        let path = save(&self.dir.checkpoints(), step, &groups, &state, self.config.checkpoint.keep, progress)?;
        self.dir.event("checkpoint", json!({ "step": step }))?;
        show(Event::Saved { step, path: &path });
        self.outcome.checkpoint = Some(path);
        Ok(())
    }
}

/// A finished step.
struct Step {
    step: u64,
    applied: bool,
    line: StepMetrics,
}

/// Refuses to continue a run whose config has changed.
fn refuse_changes(config: &Config, dir: &RunDir) -> Result<(), TrainError> {
    let Some(path) = dir.config().filter(|_| list(&dir.checkpoints()).is_ok_and(|l| !l.is_empty())) else {
        return Ok(());
    };
    let before = Config::load(&path, &[])?;
    let mut differences = config.differences(&before);
    if config.train.reproducible && before.train.reproducible {
        // Accumulation does not change a reproducible run.
        differences.retain(|d| d.path != "train.micro_batch");
    }
    if differences.is_empty() {
        Ok(())
    } else {
        Err(TrainError::ConfigChanged { dir: dir.path().to_owned(), differences })
    }
}
