//! What a run evaluates between its steps: validation, tasks, its loss in bf16 beside that in fp8, and what ranks compute beside each other.

use super::{LOOK_EVERY, Run};
use crate::cross_check::Compared;
use crate::event::{Event, Show};
use crate::metrics::{ShadowMetrics, StepMetrics};
use crate::{Result, TrainError};
use lockstep_data::Sampler;
use lockstep_exec::comm::processes::host;
use lockstep_host::StopSignal;
use lockstep_infer::{InferError, TaskFile, TaskRequests};
use serde_json::json;

/// What a run is evaluated on.
pub(super) struct Evaluations {
    /// Validation samples and how many of them one validation reads; none where there is no validation.
    pub(super) samples: Option<(Sampler, u64)>,
    /// Tasks, and their texts.
    pub(super) tasks: Vec<TaskFile>,
    pub(super) requests: TaskRequests,
}

impl Run<'_> {
    pub(super) fn validates(&self, step: u64) -> bool {
        self.evaluations.samples.is_some() && self.due(step, self.config.train.validate_every)
    }

    pub(super) fn scores_tasks(&self, step: u64) -> bool {
        !self.evaluations.tasks.is_empty() && self.due(step, self.config.eval.every)
    }

    /// Whether fp8 is compared with bf16 before this step.
    pub(super) fn compares(&self, step: u64) -> bool {
        let every = self.config.precision.shadow_every;
        every > 0 && (step == 1 || step.is_multiple_of(every))
    }

    /// What comes of comparing them, if this is a step before which they are, on the first micro-batch of its samples.
    pub(super) fn compare(&mut self, step: u64, first_sample: u64) -> Result<ShadowMetrics> {
        if !self.compares(step) {
            return Ok(ShadowMetrics::default());
        }
        let compared = self.session.shadow(&self.train, first_sample);
        compared.map_err(|error| self.in_step(step, error))
    }

    /// Whether ranks are compared after this step.
    pub(super) fn cross_checks(&self, step: u64) -> bool {
        let every = self.config.cluster.cross_check;
        every > 0 && step.is_multiple_of(every)
    }

    /// Compares ranks after a step, if it is one after which they are, and names those that do not have or compute the same as others.
    pub(super) fn cross_check(&mut self, step: u64, show: Show) -> Result<()> {
        if !self.cross_checks(step) {
            return Ok(());
        }
        let first = self.batches.at(step - 1).first_sample + self.status.spikes.left_out(step - 1);
        let found = self.session.cross_check(&self.train, first).map_err(|error| self.in_step(step, error))?;
        let processes = self.devices.group().0;
        let host = |rank: usize| processes.map_or_else(host, |processes| processes.host(rank).to_owned());
        for suspects in found {
            let text = suspects.text(&host);
            show(Event::Warning(&format!("step {step}: {text}; memory or arithmetic there is wrong")));
            let hosts: Vec<String> = suspects.ranks.iter().map(|rank| host(*rank)).collect();
            let tensors = match &suspects.of {
                Compared::State(names) => Some(names),
                Compared::Losses => None,
            };
            let fields = json!({
                "step": step,
                "ranks": suspects.ranks,
                "hosts": hosts,
                "certain": suspects.certain,
                "tensors": tensors,
            });
            self.dir.event("cross_check", fields)?;
        }
        Ok(())
    }

    /// Scores the tasks after a step, if it is one after which they are; false if the run is to stop before that is done.
    pub(super) fn score_tasks(&mut self, line: &mut StepMetrics, stop: &StopSignal<'_>, show: Show) -> Result<bool> {
        if !self.scores_tasks(line.step) {
            return Ok(true);
        }
        let (mut looked, total) = (Ok(false), self.evaluations.requests.rows.len() as u64);
        let mut heard = |done: u64| {
            show(Event::EvaluatingTasks { done, total });
            if done.is_multiple_of(LOOK_EVERY) && looked.is_ok() {
                looked = stop.look();
            }
        };
        let scores = match self.session.score(&self.evaluations.requests.rows, stop.flag(), &mut heard) {
            Ok(None) => {
                looked?;
                return Ok(false);
            }
            Ok(Some(scores)) => Ok(scores),
            // Texts of tasks are not those that the bound is for.
            Err(error @ TrainError::Infer(InferError::EvaluationBound { .. })) => Err(error),
            Err(error) => return Err(error),
        };
        looked?;
        let Evaluations { requests, tasks, .. } = &self.evaluations;
        match scores.and_then(|scores| Ok(requests.reports(tasks, &scores)?)) {
            Ok(reports) => {
                line.tasks = reports.iter().map(|report| (report.name.clone(), report.scores())).collect();
                show(Event::EvaluatedTasks { step: line.step, tasks: &line.tasks });
            }
            // What has diverged shows in the losses too.
            Err(error) => {
                show(Event::Trouble { what: &format!("no scores at step {}: ", line.step), error: &error });
            }
        }
        Ok(true)
    }

    /// Validates after a step, and says in its line what came of it: nothing if the run is to stop before that is done. Where experts have too little room for
    /// what is validated, the step, which had enough, is saved first.
    pub(super) fn validate_after(&mut self, line: &mut StepMetrics, stop: &StopSignal<'_>, show: Show) -> Result<()> {
        let validated = self.validate(stop, show);
        if let Err(TrainError::Infer(InferError::EvaluationBound { rows, .. })) = validated {
            line.rows_beyond = Some(rows);
            self.record(line, show)?;
            show(Event::Stepped(line));
            self.await_save(show)?;
            self.save_now(show)?;
        }
        line.val_loss = validated?;
        Ok(())
    }

    pub(super) fn validate(&mut self, stop: &StopSignal<'_>, show: Show) -> Result<Option<f64>> {
        let Some((sampler, sequences)) = &self.evaluations.samples else { return Ok(None) };
        let seq = self.config.train.seq as u64;
        let total = sequences * seq;
        let mut looked = Ok(false);
        let mut heard = |done: u64| {
            show(Event::Validating { done: done * seq, total });
            if done.is_multiple_of(LOOK_EVERY) && looked.is_ok() {
                looked = stop.look();
            }
        };
        let loss = self.session.evaluate(sampler, *sequences, stop.flag(), &mut heard);
        looked?;
        let loss = loss.map_err(|error| self.in_step(self.outcome.step, error))?;
        let Some(loss) = loss else { return Ok(None) };
        let step = self.outcome.step;
        self.outcome.last_val_loss = Some(loss);
        self.checkpoints.validated = Some((step, loss));
        show(Event::Validated { step, loss });
        self.dir.event("validation", json!({ "step": step, "val_loss": loss }))?;
        Ok(Some(loss))
    }
}
