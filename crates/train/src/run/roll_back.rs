//! What a run does about steps whose updates were skipped: it tells, rolls back, and stops at last.
//!
//! A roll-back is a resume inside the process: it is recorded first, then the state is restored. Samples that it
//! leaves out shift all later ones.

use super::status::RunStatus;
use super::step::Step;
use super::{Run, start};
use crate::energy::ENERGY_KWH;
use crate::event::{Event, Show};
use crate::spikes::{self, RollBack, SkippedStep};
use crate::{Result, TrainError};
use lockstep_checkpoint::{latest_of, set_aside_from};
use lockstep_infer::InitialWeights;
use serde_json::json;

/// Steps in a row whose gradients may be non-finite before a run without a spike policy gives up.
const MOST_SKIPPED: u64 = 3;

impl Run<'_> {
    /// Takes in whether a step's update was applied, and tells where it was not. Gives whether that was once too often.
    pub(super) fn look_for_spikes(&mut self, done: &Step, show: Show) -> Result<bool> {
        let rules = &self.config.spikes;
        let (loss, grad_norm) = (done.line.loss, done.line.grad_norm);
        if done.applied {
            self.status.spikes.applied(rules, done.step, loss, grad_norm);
            return Ok(false);
        }
        let (loss_limit, grad_norm_limit) = (done.line.loss_limit, done.line.grad_norm_limit);
        let skipped = SkippedStep { step: done.step, loss, grad_norm, loss_limit, grad_norm_limit };
        show(Event::Skipped(&skipped));
        // JSON has no NaN, and here it is to be seen.
        let [loss, grad_norm] = [loss.to_string(), grad_norm.to_string()];
        let fields = json!({ "step": done.step, "loss": loss, "grad_norm": grad_norm, "reason": skipped.to_string() });
        self.dir.event("skipped", fields)?;
        // A loss scale that is being searched explains gradients that are not finite.
        if !done.searched {
            self.status.spikes.skipped.push(skipped);
        }
        let most = if rules.skip { rules.skips } else { MOST_SKIPPED };
        Ok(self.status.spikes.skipped.len() as u64 >= most)
    }

    /// Goes on from the newest checkpoint before the skipped steps, and leaves out the samples of all steps since. Ends a run that has
    /// no spike policy, or has rolled back as often as it may.
    ///
    /// A kill at any moment of this changes nothing: until the roll-back is recorded, the run comes from the checkpoint to the same steps
    /// again, and from then on it goes on from there as it does here.
    pub(super) fn roll_back(&mut self, show: Show) -> Result<()> {
        let (step, skipped, before) =
            (self.outcome.step, self.status.spikes.skipped.clone(), self.status.spikes.roll_backs.clone());
        let (Some(first), Some(last)) = (skipped.first(), skipped.last()) else { return Ok(()) };
        if !self.config.spikes.skip {
            let (steps, loss, grad_norm) = (skipped.len() as u64, last.loss, last.grad_norm);
            return Err(TrainError::Diverged { steps, step, loss, grad_norm });
        }
        let number = before.last().map_or(0, |last| last.number);
        if number >= self.config.spikes.roll_backs {
            return Err(TrainError::Spikes { step, roll_backs: before, skipped });
        }
        let group = self.devices.group();
        let first = first.step;
        let sample = |steps: u64| self.batches.at(steps).first_sample + self.status.spikes.left_out(steps);
        // With those before it that count where the run goes on.
        let with = |to: u64| {
            let (first_sample, samples) = (sample(to), sample(step) - sample(to));
            let this = RollBack { number: number + 1, to, from: step, first_sample, samples, skipped: skipped.clone() };
            before.iter().filter(|earlier| earlier.to <= to).cloned().chain([this]).collect::<Vec<_>>()
        };
        let found = start::found_by_first(group, &self.checkpoints.places, || {
            // An interrupt may have saved in the middle of these steps.
            for place in &self.checkpoints.places {
                set_aside_from(place, first)?;
            }
            let latest = latest_of(&self.checkpoints.places)?;
            latest.warnings.iter().for_each(|text| show(Event::Warning(text)));
            let to = latest.loaded.as_ref().map_or(0, |loaded| loaded.step);
            let roll_backs = with(to);
            self.dir.roll_backs(!roll_backs.is_empty(), &spikes::written(&roll_backs))?;
            Ok(latest)
        })?;
        let found = found.loaded;
        let roll_backs = with(found.as_ref().map_or(0, |loaded| loaded.step));
        match &found {
            Some(loaded) => {
                let converted = self.session.restore(loaded)?;
                converted.iter().for_each(|kind| show(Event::Converted(kind)));
            }
            None => {
                self.session.restart(self.config.train.seed)?;
                self.session.begin_from(self.config, InitialWeights::open(self.config)?.as_ref())?;
            }
        }
        if let Some((_, keeper)) = &mut self.elastic {
            // Those in memory are of the steps that are undone.
            keeper.forget()?;
        }
        let step = found.as_ref().map_or(0, |loaded| loaded.step);
        self.status =
            RunStatus { pending: self.status.pending.take(), ..RunStatus::of(found.as_ref(), self.config, roll_backs) };
        (self.outcome.step, self.checkpoints.validated, self.checkpoints.timed) = (step, None, None);
        self.outcome.checkpoint = found.map(|loaded| loaded.path);
        let failed = self.dir.go_back(self.config, step)?;
        start::warn_of_sinks(&mut self.dir, failed, step, show)?;
        let Some(done) = self.status.spikes.roll_backs.last() else { return Ok(()) };
        show(Event::RolledBack(done));
        let RollBack { to, from, first_sample, samples, .. } = done;
        let mut fields = json!({ "step": to, "from": from, "first_sample": first_sample, "samples": samples, "first_skipped": first });
        // The lines of these steps are gone, their energy is not.
        if let Some(kwh) = self.energy.total_kwh() {
            fields[ENERGY_KWH] = json!(kwh);
        }
        Ok(self.dir.event("roll_back", fields)?)
    }
}
