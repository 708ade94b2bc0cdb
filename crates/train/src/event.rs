//! What happens in a run, for whoever shows it.

use crate::TrainError;
use crate::elastic::WorldChange;
use crate::metrics::StepMetrics;
use crate::spikes::{RollBack, SkippedStep};
use lockstep_config::Change;
use lockstep_exec::Note;
use lockstep_host::Peak;
use lockstep_infer::TaskScores;
use lockstep_infer::state::Converted;
use lockstep_plan::Plan;
use lockstep_rundir::{Changed, Overruled};
use std::collections::BTreeMap;
use std::path::Path;

/// Hears of a run's events.
pub type Show<'a> = &'a mut dyn FnMut(Event<'_>);

/// What happens in a run, for whoever shows it.
#[derive(Debug)]
pub enum Event<'a> {
    /// A layout is being searched for.
    Planning {
        /// Small programs that have been compiled.
        small: u64,
        /// Whole ones.
        whole: u64,
    },
    /// Text is being packed.
    Preparing(lockstep_data::Progress),
    /// Prepared data are being read to see that they are what was prepared.
    Checking {
        /// Bytes read.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// A key has another value from this step on.
    Changed {
        /// Steps finished.
        step: u64,
        /// The key and its values.
        changed: &'a Changed,
    },
    /// What was changed changes the learning rate of the next step: the new schedule counts from here on.
    RateChanged {
        /// As it would have been.
        before: f64,
        /// As it is.
        now: f64,
    },
    /// The run goes back to an earlier step, and what came after it was moved out of the way.
    SetAside {
        /// Steps finished, again.
        step: u64,
        /// Steps of the checkpoints that were moved.
        later: &'a [u64],
        /// The folder that has them now, and the metrics.
        to: &'a Path,
    },
    /// Something is off but the run goes on.
    Warning(&'a str),
    /// An error that does not end the run; `what` stands before it.
    Trouble {
        /// What the run goes on without.
        what: &'a str,
        /// Why.
        error: &'a TrainError,
    },
    /// A change that was made before at a step that the run has yet to reach, or goes back to: it does not count.
    Undone {
        /// The change.
        change: &'a Change,
        /// Whether the run goes back to its very step.
        goes_back: bool,
    },
    /// A change that was made before counts, and another value in the config does not.
    Overruled(&'a Overruled),
    /// The policy of precision is that of the weights that a new run begins with.
    PrecisionInherited(&'a str),
    /// Tensors of the checkpoint are kept in another type from here on.
    Converted(&'a Converted),
    /// What the executor says of the program that it has loaded.
    Note(&'a Note),
    /// A new run has the weights that the config names.
    Initialised {
        /// Where they came from.
        from: &'a Path,
    },
    /// The program is loaded and the first step is next.
    Started {
        /// The program and its account.
        plan: &'a Plan,
        /// What MFU is a share of.
        peak: &'a Peak,
        /// Where ranks are processes: how many, where, and what they talk over.
        processes: Option<String>,
        /// Bytes of the arenas of all ranks.
        arena_bytes: u64,
        /// Bytes of host memory, of all ranks, in which snapshots wait to be written as checkpoints; none where steps wait.
        snapshot_bytes: Option<u64>,
        /// Bytes of a GPU's memory that are taken besides arenas, where they were measured.
        context_bytes: Option<u64>,
        /// Training tokens that the data hold.
        train_tokens: u64,
        /// Steps of the run.
        steps: u64,
        /// Step that the run resumes from; 0 for a new run.
        from_step: u64,
        /// Where the run's files are.
        dir: &'a Path,
    },
    /// The world that this process is in, of a run whose ranks come and go.
    InWorld {
        /// Its rank.
        rank: usize,
        /// How many there are.
        ranks: usize,
    },
    /// The others of an elastic run have gone on without this process, which waits to join them.
    LeftOut {
        /// What it has lost before.
        cause: Option<&'a str>,
    },
    /// Ranks were lost or have joined, and the run goes on.
    WorldChanged(&'a WorldChange),
    /// A validation is under way.
    Validating {
        /// Tokens done.
        done: u64,
        /// Tokens in all.
        total: u64,
    },
    /// A validation loss was taken.
    Validated {
        /// Steps finished.
        step: u64,
        /// Mean loss per token, in nats.
        loss: f64,
    },
    /// Tasks are being evaluated.
    EvaluatingTasks {
        /// Texts done.
        done: u64,
        /// Texts in all.
        total: u64,
    },
    /// Tasks were evaluated.
    EvaluatedTasks {
        /// Steps finished.
        step: u64,
        /// Each task's scores.
        tasks: &'a BTreeMap<String, TaskScores>,
    },
    /// A step is done.
    Stepped(&'a StepMetrics),
    /// A step's update was not applied: its gradient was not finite, or it or the loss was beyond what the spike policy allows.
    Skipped(&'a SkippedStep),
    /// Updates were skipped in a row, and the run goes on from an earlier checkpoint with later data.
    RolledBack(&'a RollBack),
    /// A checkpoint is being written.
    Saving {
        /// Bytes written.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// A checkpoint is on disk.
    Saved {
        /// Steps finished.
        step: u64,
        /// Where.
        path: &'a Path,
    },
}
