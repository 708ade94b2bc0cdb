//! One step: given to the executor, and what came of it.

use super::Run;
use crate::analysis::MeasuredStep;
use crate::loads::ExpertMetrics;
use crate::loss_scale::LossScale;
use crate::metrics::{GpuMetrics, ShadowMetrics, StepMetrics};
use crate::noise::Measured;
use crate::profile::ProfiledStep;
use crate::schedule::{learning_rate, step_scalars};
use crate::session::QueuedStep;
use crate::{Result, TrainError};
use lockstep_config::Batch;
use lockstep_cuda::Gpu;
use lockstep_exec::DeviceTime;
use lockstep_ir::{StepLimits, StepScalars};
use std::collections::BTreeMap;
use std::time::Instant;

/// A step that the executor has, with what it was given.
pub(super) struct Queued {
    /// Its number, from 1 on.
    pub(super) step: u64,
    pub(super) work: QueuedStep,
    /// When the host began with it, and when the executor had it.
    pub(super) start: Instant,
    pub(super) queued: Instant,
    /// Whether the executor had another to finish then.
    pub(super) behind: bool,
    pub(super) batch: Batch,
    /// Whether none of its targets counts.
    pub(super) prompts_alone: bool,
    pub(super) loss_scale: Option<LossScale>,
    pub(super) limits: StepLimits,
    pub(super) lr: f64,
    /// Seconds that it waited for its samples.
    pub(super) data_wait_s: f64,
    /// Its losses in bf16 and fp8, where they were compared.
    pub(super) shadow: ShadowMetrics,
}

/// A finished step.
pub(super) struct Step {
    pub(super) step: u64,
    pub(super) applied: bool,
    /// Whether gradients that are not finite are the loss scale's fault.
    pub(super) searched: bool,
    pub(super) line: StepMetrics,
    /// Seconds that each rank computed, where they are processes that tell.
    pub(super) rank_busy_s: Vec<f64>,
}

impl Run<'_> {
    /// Whether the result of this step must be known before the next begins.
    pub(super) fn needs_result(&self, step: u64) -> bool {
        let counts_updates = self.status.loss_scale.is_some() || self.config.train.deterministic;
        // What runs beside a profiled step would be in its times, and a comparison in those of the step after it.
        self.profiles(step + 1)
            || self.compares(step + 1)
            || counts_updates
            || self.cross_checks(step)
            || self.validates(step)
            || self.scores_tasks(step)
            || self.checkpoints.again
            || self.save_due(step)
            || self.remembers(step)
    }

    pub(super) fn profiles(&self, step: u64) -> bool {
        self.profiling.observed == Some(step)
            || self.profiling.asked.as_ref().is_some_and(|steps| steps.contains(&step))
    }

    /// Gives the executor the step after the first `before`; `behind` another that it has still to finish, or not.
    pub(super) fn queue(&mut self, before: u64, behind: bool) -> Result<Queued> {
        let mut batch = self.batches.at(before);
        batch.first_sample += self.status.spikes.left_out(before);
        let shadow = self.compare(before + 1, batch.first_sample)?;
        let start = Instant::now();
        let limits = self.status.spikes.limits(&self.config.spikes, before + 1);
        self.session.limit(limits)?;
        self.session.round_as_in(before + 1)?;
        let (config, updates, loss_scale) = (self.config, self.status.updates, self.status.loss_scale);
        let scalars = |targets| {
            let seed = loss_scale.map_or(1.0, |scale| scale.seed(targets));
            StepScalars { loss_scale: seed, ..step_scalars(config, before, updates, targets) }
        };
        let work = match self.profiles(before + 1) {
            false => {
                let queued = self.session.queue_step(&self.train, batch, &scalars);
                queued.map_err(|error| self.in_step(before + 1, error))?
            }
            true => {
                let (result, timings) = self.session.profile_batch(&self.train, batch, &scalars)?;
                if self.profiling.observed == Some(before + 1) {
                    let measured = MeasuredStep::new(self.devices, self.plan, before + 1, timings.clone())?;
                    self.dir.measured(&measured)?;
                }
                if self.profiling.asked.as_ref().is_some_and(|steps| steps.contains(&(before + 1))) {
                    self.profiling.taken.push(ProfiledStep { step: before + 1, timings });
                }
                QueuedStep::done(result)
            }
        };
        let data_wait_s = self.session.data_wait_s();
        // Where the next step is queued before this one is done, it takes this one's update as applied. If it was not, that one
        // step's bias correction counts one update too many.
        self.status.updates += 1;
        let (lr, queued) = (learning_rate(self.config, before), Instant::now());
        Ok(Queued {
            prompts_alone: self.session.has_prompts_alone(),
            step: before + 1,
            work,
            start,
            queued,
            behind,
            batch,
            loss_scale,
            limits,
            lr,
            data_wait_s,
            shadow,
        })
    }

    /// An error with the step that it came in, where numbers are looked at.
    pub(super) fn in_step(&self, step: u64, error: TrainError) -> TrainError {
        if self.debug_nans { TrainError::InStep { step, error: Box::new(error) } } else { error }
    }

    pub(super) fn finish(&mut self, queued: Queued) -> Result<Step> {
        let Queued { step, work, start, queued, behind, batch, loss_scale, limits, lr, data_wait_s, shadow, .. } =
            queued;
        let result = self.session.finish(work)?;
        self.outcome.step = step;
        self.status.updates -= u64::from(!result.applied);
        if let (Some(scale), Some(interval)) = (&mut self.status.loss_scale, self.config.precision.growth_interval) {
            scale.after(result.grad_norm.is_finite(), interval);
        }
        if let (Some(first), true) = (result.first, result.applied) {
            let sequences = batch.sequences as f64;
            self.status.noise.add(first, Measured { sequences, square: f64::from(result.grad_norm).powi(2) });
        }
        self.outcome.noise_scale = self.status.noise.scale().filter(|_| result.first.is_some());
        let now = Instant::now();
        let step_s = match (result.time, behind) {
            // The host looks at results when it has queued another step, and at once when there is none: only the device knows
            // when they were ready.
            (Some(DeviceTime { since_last: Some(seconds), .. }), true) => seconds,
            (Some(DeviceTime { since_begin, .. }), _) => (queued - start).as_secs_f64() + since_begin,
            // A step that was queued while another ran began when that one was done.
            (None, _) => (now - self.pace.last_result.map_or(start, |last| last.max(start))).as_secs_f64(),
        };
        self.pace.last_result = Some(now);
        let tokens = batch.sequences as u64 * self.config.train.seq as u64;
        let tokens_per_s = tokens as f64 / step_s;
        let achieved = self.plan.model_flops_per_token() * tokens_per_s;
        let rank_busy_s = self.session.rank_busy_s();
        let slowest = rank_busy_s.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(rank, _)| rank);
        let listed: &[f64] = if rank_busy_s.len() <= StepMetrics::RANKS_LISTED { &rank_busy_s } else { &[] };
        let last = step == self.config.train.steps;
        let energy = self.energy.stepped(self.session.world(), tokens, step_s, last)?;
        let device = self.devices.device(self.plan.target)?;
        let line = StepMetrics {
            rank_busy_s: listed.iter().map(|seconds| (seconds * 1e6).round() / 1e6).collect(),
            slowest_rank: slowest,
            goodput: self.elastic.as_ref().map(|(elastic, _)| elastic.goodput(step, step_s)),
            step,
            tokens: self.tokens_before(step),
            loss: result.loss,
            mtp_loss: (!result.further.is_empty())
                .then(|| result.further.iter().sum::<f64>() / result.further.len() as f64)
                .filter(|loss| loss.is_finite()),
            grad_norm: result.grad_norm,
            lr,
            step_s,
            data_wait_s: (data_wait_s * 1e6).round() / 1e6,
            tokens_per_s,
            mfu: achieved / self.pace.peak.flops_per_s,
            arena_bytes: self.session.arena_bytes(),
            gpu: device.gpu().and_then(Gpu::telemetry).map(GpuMetrics::from).unwrap_or_default(),
            energy,
            skipped: (!result.applied).then_some(1),
            rows_beyond: Some(result.beyond).filter(|rows| *rows > 0),
            loss_limit: Some(limits.loss).filter(|limit| limit.is_finite()),
            grad_norm_limit: Some(limits.grad_norm).filter(|limit| limit.is_finite()),
            loss_scale: loss_scale.map(|scale| scale.scale()),
            noise_scale: self.outcome.noise_scale,
            critical_batch_tokens: self.outcome.noise_scale.map(|n| n * self.config.train.seq as f64),
            experts: ExpertMetrics::of(&result.loads, &self.config.model),
            shadow,
            fp8: result.fp8.clone(),
            val_loss: None,
            tasks: BTreeMap::new(),
        };
        // A scale that is being searched explains gradients that are not finite.
        let searched = loss_scale.is_some_and(|scale| !scale.is_least()) && !result.grad_norm.is_finite();
        Ok(Step { step, applied: result.applied, searched, line, rank_busy_s })
    }
}
