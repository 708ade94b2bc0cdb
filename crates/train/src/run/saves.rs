//! The checkpoints of a run: in the background where there is memory for a snapshot, and while steps wait where not.

use super::Run;
use crate::TrainError;
use crate::event::Event;
use crate::hf::ATTACHMENT;
use crate::saver::{SaveEnd, SaveRequest};
use crate::trained::TOKENIZER;
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

impl Run<'_> {
    /// What the checkpoint of the last step holds besides tensors, and where it goes.
    fn request(&self) -> SaveRequest {
        let step = self.outcome.step;
        let state = json!({
            "tokens": self.tokens_before(step),
            "data": format!("{:016x}", self.data),
            "prepared": self.prepared,
            "config": self.config.resolved_toml(),
            "lockstep": env!("CARGO_PKG_VERSION"),
            "pending_metrics": self.pending,
            "noise": self.noise.to_bits(),
            "loss_scale": self.loss_scale,
            "updates": self.updates,
        });
        // A checkpoint needs nothing around it to be used.
        let attachments = [(TOKENIZER, self.tokenizer.json()), (ATTACHMENT, self.kept.as_deref())];
        let attachments = attachments.into_iter().filter_map(|(name, file)| Some((name, file?.to_vec()))).collect();
        SaveRequest { dir: self.dir.checkpoints(), step, state, attachments, keep: self.config.checkpoint.keep }
    }

    /// Saves the last step. Where there is a snapshot, steps wait for that one alone, and for the save before it.
    pub(super) fn save(&mut self, show: &mut dyn FnMut(Event)) -> Result<(), TrainError> {
        self.await_save(show)?;
        // What could not be written in the background is written here, or ends the run.
        if self.save_again || self.session.snapshot_bytes().is_none() {
            return self.save_now(show);
        }
        self.session.begin_save(self.request())
    }

    /// Saves the last step while steps wait.
    pub(super) fn save_now(&mut self, show: &mut dyn FnMut(Event)) -> Result<(), TrainError> {
        let begun = Instant::now();
        let request = self.request();
        let progress = &mut |done, total| show(Event::Saving { done, total });
        let SaveRequest { dir, step, keep, .. } = &request;
        let path = request.about(|about| self.session.save(dir, *step, about, *keep, progress))?;
        self.save_again = false;
        let seconds = begun.elapsed().as_secs_f64();
        self.saved(*step, path, (seconds, seconds), show)
    }

    /// Waits for the save under way, if there is one.
    pub(super) fn await_save(&mut self, show: &mut dyn FnMut(Event)) -> Result<(), TrainError> {
        let end = self.session.wait_save(&mut |done, total| show(Event::Saving { done, total }))?;
        end.map_or(Ok(()), |end| self.save_ended(end, show))
    }

    /// Tells what came of a save in the background.
    pub(super) fn save_ended(&mut self, end: SaveEnd, show: &mut dyn FnMut(Event)) -> Result<(), TrainError> {
        match end {
            SaveEnd::Saved { step, path, stall_s, save_s } => self.saved(step, path, (stall_s, save_s), show),
            SaveEnd::Failed { step, cause } => {
                self.save_again = true;
                show(Event::Warning(&format!(
                    "step {step} was not saved: {cause}; the run saves once more, and steps wait for it"
                )));
                self.dir.event("checkpoint_failed", json!({ "step": step, "error": cause }))
            }
        }
    }

    fn saved(
        &mut self,
        step: u64,
        path: PathBuf,
        (stall_s, save_s): (f64, f64),
        show: &mut dyn FnMut(Event),
    ) -> Result<(), TrainError> {
        let [stall_s, save_s] = [stall_s, save_s].map(|seconds| (seconds * 1e6).round() / 1e6);
        self.dir.event("checkpoint", json!({ "step": step, "stall_s": stall_s, "save_s": save_s }))?;
        show(Event::Saved { step, path: &path });
        self.outcome.checkpoint = Some(path);
        Ok(())
    }
}
