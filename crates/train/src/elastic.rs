//! What a run whose ranks come and go knows beyond one world of ranks: snapshots in memory, the layout for as many as there are, and how much of its time
//! counted. `worlds.rs` has the row of worlds.

pub(crate) mod layout;
mod memory;

pub(crate) use memory::{Gathered, HeldTogether, Keeper, Memory, SnapshotState};

use lockstep_checkpoint::Loaded;
use lockstep_exec::comm::Communicator;
use lockstep_exec::comm::processes::ProcessCommunicator;
use lockstep_host::Membership;
use lockstep_ir::units;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A world of an elastic run that others came before, for whoever shows it: a line of the run's history.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorldChange {
    /// Its number; the one that was started is 0.
    pub epoch: u64,
    /// Ranks of the world before that are gone.
    pub gone: Vec<usize>,
    /// Why, as the ranks that are left saw it; none where somebody joins.
    pub cause: Option<String>,
    /// Processes that have joined.
    pub joined: usize,
    /// Ranks that train now, and those that wait as spares.
    pub ranks: usize,
    /// Those that wait.
    pub spares: usize,
    /// How the work is split now.
    pub layout: String,
    /// Whether the split changes the bits of the losses.
    pub changes_bits: bool,
    /// The step that the state is of, and whether it was in memory.
    pub step: u64,
    /// Whether the state came from the memory of the ranks, not from a checkpoint.
    pub from_memory: bool,
    /// Steps that are done again.
    pub lost_steps: u64,
    /// Seconds from the end of the world before until this one is about to step.
    pub recovery_s: f64,
    /// Where they went.
    #[serde(flatten)]
    pub parts: RecoveryParts,
}

/// Where the time of a recovery goes, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RecoveryParts {
    /// Until the loss was noticed, from the last step on: what this process did of the next step is in it. Not part of the recovery.
    pub noticed_s: f64,
    /// To agree on a world and to connect.
    pub agreed_s: f64,
    /// To bring snapshots together.
    pub gathered_s: f64,
    /// To plan and compile the program.
    pub compiled_s: f64,
    /// To take memory, and to write the state into it.
    pub loaded_s: f64,
}

/// What an elastic run knows beyond one world.
pub(crate) struct ElasticRun<'a> {
    pub(crate) memory: Memory,
    pub(crate) membership: Mutex<Membership>,
    pub(crate) comm: Arc<ProcessCommunicator>,
    /// Ranks that would train if one more came.
    pub(crate) usable: &'a (dyn Fn(usize) -> usize + Sync),
    pub(crate) every: u64,
    /// Whether others came before this world.
    pub(crate) is_later: bool,
    /// Whether this world has begun: what the command line asks for once is done.
    pub(crate) begun: AtomicBool,
    /// What the world before has left.
    pub(crate) found: Mutex<Option<Loaded>>,
    /// Who holds that.
    pub(crate) held: Option<Arc<HeldTogether>>,
    pub(crate) change: Mutex<Option<(WorldChange, Instant)>>,
    /// When the ranks had agreed on this world and held its state.
    pub(crate) made: Instant,
    pub(crate) goodput: &'a Mutex<Goodput>,
}

/// Time in steps that counted, against all time.
pub(crate) struct Goodput {
    begun: Instant,
    /// When the last of them was done.
    last: Option<Instant>,
    /// Steps that this process has seen, with their seconds.
    steps: Vec<(u64, f64)>,
}

impl Goodput {
    /// Of a run that begins now.
    pub(crate) fn new() -> Self {
        Self { begun: Instant::now(), last: None, steps: Vec::new() }
    }

    /// A step is done: the share of all time so far that was in steps which count.
    fn step(&mut self, step: u64, seconds: f64) -> f64 {
        self.steps.retain(|(before, _)| *before < step);
        self.steps.push((step, seconds));
        self.last = Some(Instant::now());
        self.steps.iter().map(|(_, seconds)| seconds).sum::<f64>() / self.begun.elapsed().as_secs_f64().max(1e-9)
    }

    /// Seconds since the last step; 0 before the first.
    pub(crate) fn since_last(&self) -> f64 {
        self.last.map_or(0.0, |last| last.elapsed().as_secs_f64())
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ElasticRun<'_> {
    /// The number of this world.
    pub(crate) fn epoch(&self) -> u64 {
        lock(&self.membership).epoch()
    }

    /// Whether a snapshot is taken after this step.
    pub(crate) fn is_due(&self, step: u64) -> bool {
        step.is_multiple_of(self.every)
    }

    /// Whether somebody waits to join who would train.
    pub(crate) fn somebody_waits(&self) -> bool {
        let ranks = self.comm.ranks();
        // Looks once a second at most; which layout there would be is found out only when somebody is there. One alone may have no place where two have.
        let waiting = lock(&self.membership).waiting();
        waiting > 0 && (self.usable)(ranks + waiting) > ranks
    }

    /// The run has begun, in a run directory that is this one's alone.
    pub(crate) fn begin(&self, is_first: bool) {
        self.begun.store(true, Ordering::Release);
        if is_first {
            lock(&self.membership).clear_others();
            lock(&self.membership).begin();
        }
    }

    /// The state that the ranks held in memory; once.
    pub(crate) fn take_found(&self) -> Option<Loaded> {
        lock(&self.found).take()
    }

    /// Refuses what was read of it if not all of it came.
    pub(crate) fn require_read(&self) -> crate::Result<()> {
        self.held.as_ref().map_or(Ok(()), |held| held.require_read())
    }

    /// The program of this world is compiled.
    pub(crate) fn compiled(&self) {
        if let Some((change, _)) = &mut *lock(&self.change) {
            change.parts.compiled_s = rounded(self.made.elapsed().as_secs_f64());
        }
    }

    /// What has changed, once, when the state of `step` is there; with the last step that this process knows to have been done.
    pub(crate) fn take_change(&self, step: u64, from_memory: bool) -> Option<WorldChange> {
        let (mut change, since) = lock(&self.change).take()?;
        let done = lock(self.goodput).steps.last().map_or(step, |(last, _)| *last);
        (change.step, change.from_memory) = (step, from_memory);
        change.lost_steps = done.saturating_sub(step);
        change.recovery_s = rounded(since.elapsed().as_secs_f64());
        change.parts.loaded_s = rounded(self.made.elapsed().as_secs_f64() - change.parts.compiled_s);
        Some(change)
    }

    /// A step is done: the run's goodput so far.
    pub(crate) fn goodput(&self, step: u64, seconds: f64) -> f64 {
        lock(self.goodput).step(step, seconds)
    }
}

/// Seconds to the millisecond.
pub(crate) fn rounded(seconds: f64) -> f64 {
    (seconds * 1e3).round() / 1e3
}

impl std::fmt::Display for WorldChange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { gone, joined, ranks, spares, layout, step, from_memory, lost_steps, recovery_s, parts, .. } = self;
        let RecoveryParts { agreed_s, gathered_s, compiled_s, loaded_s, .. } = parts;
        match (&gone[..], joined) {
            ([], 0) => write!(f, "the ranks met again")?,
            ([], joined) => {
                write!(f, "{joined} more {} joined", if *joined == 1 { "process has" } else { "processes have" })?
            }
            (gone, 0) => write!(f, "{} {} gone", units::ranks(gone), if gone.len() == 1 { "is" } else { "are" })?,
            (gone, joined) => write!(f, "{} gone, {joined} joined", units::ranks(gone))?,
        }
        let spares = if *spares > 0 { format!(", {spares} waiting") } else { String::new() };
        let from = match (step, from_memory) {
            (step, true) => format!("from step {step} in memory"),
            (0, false) => "from the first step".to_owned(),
            (step, false) => format!("from the checkpoint of step {step}"),
        };
        let again = if *lost_steps == 1 { "1 step is".to_owned() } else { format!("{lost_steps} steps are") };
        let ranks = if *ranks == 1 { "1 rank goes".to_owned() } else { format!("{ranks} ranks go") };
        write!(f, "; {ranks} on ({layout}{spares}) {from}: {again} done again, {recovery_s:.1} s lost")?;
        write!(f, " ({agreed_s:.1} s to agree, {gathered_s:.1} s to gather the state, ")?;
        write!(f, "{compiled_s:.1} s to compile, {loaded_s:.1} s to load)")?;
        match self.changes_bits {
            true => write!(f, "; this layout changes the bits of losses"),
            false => Ok(()),
        }
    }
}
