//! The checkpoints of a run: in the background where there is memory for a snapshot, and while steps wait where not; when they are due,
//! which stay, and where else they go.

use super::{Run, RunOptions};
use crate::checkpoint::{SaveEnd, SaveFailure, SaveRequest};
use crate::elastic::SnapshotState;
use crate::event::{Event, Show};
use crate::{Result, TrainError};
use lockstep_bucket::is_address;
use lockstep_checkpoint::{
    BucketMirror, CheckpointError, Keep, free_bytes, latest, list, require_space, set_aside_from,
};
use lockstep_config::Config;
use lockstep_infer::{ATTACHMENT, BASE, InferError, TOKENIZER};
use lockstep_ir::units;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// The places of a run's checkpoints: that in the run directory, and the mirror if there is one.
pub(crate) fn places(config: &Config, run_dir: &Path) -> Vec<PathBuf> {
    let dir = std::path::absolute(run_dir).unwrap_or_else(|_| run_dir.to_owned());
    let mirror = config.mirror_dir().map(|mirror| mirror.join(dir.file_name().unwrap_or("run".as_ref())));
    [Some(run_dir.join("checkpoints")), mirror].into_iter().flatten().collect()
}

/// Brings the checkpoint that a run goes on from out of a mirror in a bucket, where the run directory has none as new. The first
/// process does this, before all look for one.
pub(super) fn bring_back(config: &Config, options: &RunOptions, show: Show) -> Result<(), CheckpointError> {
    let places = places(config, &options.dir);
    let Some(mirror) = places.get(1).and_then(|mirror| BucketMirror::of(mirror)).filter(|_| !options.fresh) else {
        return Ok(());
    };
    let own = match options.resume_from {
        Some(step) => list(&places[0])?.into_iter().map(|(saved, _)| saved).find(|saved| *saved == step),
        None => match latest(&places[0]) {
            Ok(found) => found.loaded.map(|loaded| loaded.step),
            // All that are there are damaged: the mirror is what is left.
            Err(CheckpointError::NoneWhole { .. }) => None,
            Err(error) => return Err(error),
        },
    };
    let found = mirror.and_then(|mirror| mirror.steps().map(|steps| (mirror, steps)));
    let (mirror, steps) = match found {
        Ok(found) => found,
        // Without one of its own, a run would begin again what the mirror has.
        Err(error) if own.is_none() => return Err(error),
        Err(error) => {
            show(Event::Warning(&format!("the mirror cannot be read: {error}")));
            return Ok(());
        }
    };
    let wanted = |step: &&u64| match options.resume_from {
        Some(wanted) => **step == wanted && own.is_none(),
        None => own.is_none_or(|own| **step > own),
    };
    let mut damaged = None;
    for step in steps.iter().rev().filter(wanted) {
        match mirror.fetch(*step, &places[0]) {
            Ok(_) => {
                let place = places[1].display();
                show(Event::Warning(&format!(
                    "the run directory has no checkpoint as new as the mirror's; using step {step} of {place}"
                )));
                return Ok(());
            }
            Err(error @ CheckpointError::Damaged { .. }) => {
                show(Event::Warning(&error.to_string()));
                damaged.get_or_insert(error);
            }
            Err(error) => return Err(error),
        }
    }
    damaged.filter(|_| own.is_none()).map_or(Ok(()), Err)
}

/// The places that are folders. A bucket is read by [`bring_back`], and is never written to but from the run directory.
pub(super) fn folders(mut places: Vec<PathBuf>) -> Vec<PathBuf> {
    places.retain(|place| !is_address(place));
    places
}

/// Looks at the disk before a run starts: one checkpoint must fit, and those that stay at a time should.
pub(crate) fn look_at_disk(places: &[PathBuf], bytes: u64, config: &Config, show: Show) -> Result<()> {
    for (place, dir) in places.iter().enumerate().filter(|(_, dir)| !is_address(dir)) {
        match require_space(dir, bytes) {
            Err(error) if place == 0 => return Err(error.into()),
            Err(error) => show(Event::Warning(&error.to_string())),
            Ok(()) => {}
        }
        let keep = config.checkpoint.keep as u64;
        let there = list(dir).map_or(0, |there| there.len() as u64).min(keep);
        // One more than stay, while the next is written.
        let needed = (keep + 1 - there).saturating_mul(bytes);
        if let Ok(free) = free_bytes(dir)
            && free < needed
        {
            let [needed, free] = [needed, free].map(units::bytes);
            show(Event::Warning(&format!(
                "checkpoint.keep = {keep} takes {needed} more in {}, where {free} are free",
                dir.display()
            )));
        }
    }
    Ok(())
}

/// Takes checkpoints of the mirror out of the way that a run which starts over, or goes back, would find there later.
pub(super) fn set_mirror_aside(mirror: &Path, options: &RunOptions) -> Result<(), CheckpointError> {
    let first = if options.fresh { Some(0) } else { options.resume_from.map(|step| step + 1) };
    match (first, BucketMirror::of(mirror)) {
        (None, _) => Ok(()),
        (Some(first), None) => set_aside_from(mirror, first).map(|_| ()),
        (Some(first), Some(bucket)) => bucket?.set_aside_from(first),
    }
}

/// Where and when a run saves its checkpoints, and what they hold of its origin.
pub(super) struct Checkpoints {
    /// Where they go: the run directory, and the mirror if there is one.
    pub(super) places: Vec<PathBuf>,
    /// Whether one could not be written in the background: it is made up for while steps wait.
    pub(super) again: bool,
    /// When the last one was begun, and the step after which the next is due because of the time since.
    pub(super) last: Instant,
    pub(super) timed: Option<u64>,
    /// Step and loss of the last validation.
    pub(super) validated: Option<(u64, f64)>,
    /// Fingerprint of the data.
    pub(super) data: u64,
    /// The way from the run directory to data that it shares.
    pub(super) prepared: Option<PathBuf>,
    /// What came beside the weights of the Hugging Face model that it started from, as an attachment.
    pub(super) kept: Option<Vec<u8>>,
    /// Fingerprint of the weights that adapters stand beside.
    pub(super) base: Option<String>,
}

impl Run<'_> {
    /// Decides whether a checkpoint is due after this step because of the time that has passed. All processes do this before the next
    /// step is queued.
    pub(super) fn look_at_time(&mut self, step: u64) -> Result<()> {
        let Some(minutes) = self.config.checkpoint.every_minutes else { return Ok(()) };
        let passed =
            self.checkpoints.last.elapsed() >= Duration::try_from_secs_f64(60.0 * minutes).unwrap_or(Duration::MAX);
        if self.devices.group().told::<_, TrainError>("save", || Ok(passed))? {
            self.checkpoints.timed = Some(step);
        }
        Ok(())
    }

    /// Whether a checkpoint is saved after this step.
    pub(super) fn save_due(&self, step: u64) -> bool {
        self.saves(step) || self.checkpoints.timed == Some(step)
    }

    /// What the checkpoint of the last step holds besides tensors, and where it goes.
    fn request(&mut self) -> SaveRequest {
        let step = self.outcome.step;
        let validated = self.checkpoints.validated.filter(|(at, _)| *at == step);
        if let Some((_, loss)) = validated
            && self.status.best.is_none_or(|(_, best)| loss < best)
        {
            self.status.best = validated;
        }
        let state = json!({
            "tokens": self.tokens_before(step),
            "data": format!("{:016x}", self.checkpoints.data),
            "prepared": self.checkpoints.prepared,
            "config": self.config.resolved_toml(),
            BASE: self.checkpoints.base,
            "lockstep": env!("CARGO_PKG_VERSION"),
            "pending_metrics": self.status.pending,
            "noise": self.status.noise.to_bits(),
            "loss_scale": self.status.loss_scale,
            "updates": self.status.updates,
            "spikes": self.status.spikes.to_json(),
            "val_loss": validated.map(|(_, loss)| loss),
            // Step and validation loss of the best checkpoint so far.
            "best": self.status.best,
        });
        // A checkpoint needs nothing around it to be used.
        let attachments = [(TOKENIZER, self.tokenizer.source()), (ATTACHMENT, self.checkpoints.kept.as_deref())];
        let attachments = attachments.into_iter().filter_map(|(name, file)| Some((name, file?.to_vec()))).collect();
        let rules = &self.config.checkpoint;
        let best = self.status.best.filter(|_| rules.keep_best).map(|(step, _)| step);
        // An interrupt in the middle of skipped steps leaves the checkpoint that is before them.
        let last = rules.keep + self.status.spikes.skipped.len();
        let keep = Keep { last, every: rules.keep_every, best };
        let (dir, mirror) = (self.checkpoints.places[0].clone(), self.checkpoints.places.get(1).cloned());
        SaveRequest { dir, step, state, attachments, keep, mirror }
    }

    /// What a snapshot of the last step in memory holds besides tensors: what a checkpoint of it would.
    pub(super) fn snapshot_state(&mut self) -> SnapshotState {
        let best = self.status.best;
        let SaveRequest { step, state, attachments, .. } = self.request();
        // A snapshot is no checkpoint that could be the best one.
        self.status.best = best;
        SnapshotState { step, state, attachments }
    }

    /// Saves the last step. Where there is a snapshot, steps wait for that one alone, and for the save before it.
    pub(super) fn save(&mut self, show: Show) -> Result<()> {
        self.await_save(show)?;
        // What could not be written in the background is written here, or ends the run.
        if self.checkpoints.again || self.session.snapshot_bytes().is_none() {
            return self.save_now(show);
        }
        let request = self.request();
        self.checkpoints.last = Instant::now();
        self.session.begin_save(request)
    }

    /// Saves the last step while steps wait: in the first place that takes it.
    pub(super) fn save_now(&mut self, show: Show) -> Result<()> {
        let (step, mut causes) = (self.outcome.step, Vec::new());
        self.checkpoints.last = Instant::now();
        // A bucket takes no parts of ranks: what it has comes from a folder.
        let places = folders(self.checkpoints.places.clone());
        let count = places.len();
        for place in places {
            let request = SaveRequest { dir: place, ..self.request() };
            match self.save_at(request, show)? {
                Ok(()) => return Ok(()),
                Err(cause) => causes.push(cause),
            }
            if count > causes.len() {
                show(Event::Warning(&format!("step {step} was not saved: {}; saving in the mirror", causes[0])));
            }
        }
        let SaveFailure { text: cause, hint } = causes.swap_remove(0);
        Err(TrainError::NotSaved { step, cause, hint })
    }

    /// Saves the last step in one place, or says why it cannot be.
    fn save_at(&mut self, request: SaveRequest, show: Show) -> Result<Result<(), SaveFailure>> {
        let begun = Instant::now();
        let step = request.step;
        let progress = &mut |done, total| show(Event::Saving { done, total });
        let (path, mirror_failed) = if self.session.snapshot_bytes().is_some() {
            self.session.begin_save(request)?;
            match self.session.wait_save(progress)? {
                Some(SaveEnd::Saved { path, mirror_failed, .. }) => (path, mirror_failed),
                Some(SaveEnd::Failed { rank, cause, .. }) => return Ok(Err(self.whose(rank, cause))),
                None => return Ok(Err("nothing was written".into())),
            }
        } else {
            let SaveRequest { dir, keep, .. } = &request;
            let saved = request.about(|about| self.session.save(dir, step, about, keep.clone(), progress));
            let group = self.devices.group();
            match saved {
                // Processes that wait for one that has failed hear of it when the run ends.
                Err(TrainError::Infer(InferError::Checkpoint(error))) if group.0.is_none() => {
                    return Ok(Err(error.into()));
                }
                Err(error) => return Err(error),
                Ok(path) => {
                    let failed = group.told::<_, TrainError>("save", || {
                        Ok(request.mirrored(path.clone(), &AtomicBool::new(false)).1)
                    })?;
                    (path, failed)
                }
            }
        };
        self.checkpoints.again = false;
        let seconds = begun.elapsed().as_secs_f64();
        self.saved(step, path, (seconds, seconds), mirror_failed, show)?;
        Ok(Ok(()))
    }

    /// Waits for the save under way, if there is one.
    pub(super) fn await_save(&mut self, show: Show) -> Result<()> {
        let end = self.session.wait_save(&mut |done, total| show(Event::Saving { done, total }))?;
        end.map_or(Ok(()), |end| self.save_ended(end, show))
    }

    /// Tells what came of a save in the background.
    pub(super) fn save_ended(&mut self, end: SaveEnd, show: Show) -> Result<()> {
        match end {
            SaveEnd::Saved { step, path, stall_s, save_s, mirror_failed } => {
                self.saved(step, path, (stall_s, save_s), mirror_failed, show)
            }
            SaveEnd::Failed { step, rank, cause } => {
                self.checkpoints.again = true;
                let cause = self.whose(rank, cause).text;
                show(Event::Warning(&format!(
                    "step {step} was not saved: {cause}; the run saves once more, and steps wait for it"
                )));
                Ok(self.dir.event("checkpoint_failed", json!({ "step": step, "error": cause }))?)
            }
        }
    }

    /// A cause with the process that it comes from.
    fn whose(&self, rank: Option<usize>, cause: SaveFailure) -> SaveFailure {
        match (rank, self.devices.group().0) {
            (Some(rank), Some(processes)) => {
                SaveFailure { text: format!("rank {rank} on host {}: {cause}", processes.host(rank)), ..cause }
            }
            _ => cause,
        }
    }

    fn saved(
        &mut self,
        step: u64,
        path: PathBuf,
        (stall_s, save_s): (f64, f64),
        mirror_failed: Option<String>,
        show: Show,
    ) -> Result<()> {
        let [stall_s, save_s] = [stall_s, save_s].map(|seconds| (seconds * 1e6).round() / 1e6);
        self.dir.event("checkpoint", json!({ "step": step, "stall_s": stall_s, "save_s": save_s }))?;
        show(Event::Saved { step, path: &path });
        self.outcome.checkpoint = Some(path);
        if let Some(cause) = mirror_failed {
            show(Event::Warning(&format!("the mirror has no copy of step {step}: {cause}")));
            self.dir.event("mirror_failed", json!({ "step": step, "error": cause }))?;
        }
        Ok(())
    }
}
