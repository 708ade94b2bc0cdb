//! Runs whose world changes: ranks are lost, and others come.
//!
//! A run is a row of worlds. Each has a layout for as many ranks as it has, and goes on from the newest state that its ranks
//! hold in memory, or from the last checkpoint where that is newer. When a rank is lost, or one waits to join, the world ends and the next
//! one is agreed on (`host/src/elastic.rs`).

use crate::elastic::layout::{changes_bits, fitting};
use crate::elastic::{ElasticRun, Gathered, Goodput, Memory, RecoveryParts, WorldChange, rounded};
use crate::event::{Event, Show};
use crate::run::{places, run_in};
use crate::{Outcome, Result, RunOptions, TrainError};
use lockstep_checkpoint::list;
use lockstep_config::Config;
use lockstep_exec::ExecError;
use lockstep_exec::comm::processes::{ProcessCommunicator, Start, join};
use lockstep_exec::comm::{Communicator, ProgramPlace};
use lockstep_host::{Devices, Elastic, HostError, Membership, Processes, Rejoined};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// How this process comes to an elastic run.
pub struct ElasticStart<'a> {
    /// How it finds the others. It has the secret of the job where it comes late.
    pub start: &'a Start,
    /// Which of the processes of its host it is, if that is known.
    pub local: Option<usize>,
    /// How many may train together.
    pub bounds: Elastic,
    /// Whether the run has begun without it.
    pub late: bool,
}

/// Trains as one rank of worlds that change. As [`run`](crate::run()), but the devices are found here, anew for every world.
pub fn run_elastic(
    process: &ElasticStart<'_>,
    config: &Config,
    options: &RunOptions,
    stop: &AtomicBool,
    show: Show,
) -> Result<Outcome> {
    let ElasticStart { start, local, bounds, late } = process;
    if start.mpi.is_some() {
        return Err(TrainError::ElasticMpi);
    }
    let usable = |ranks: usize| fitting(config, ranks.min(bounds.most)).map_or(0, |(_, used)| used);
    let goodput = Mutex::new(Goodput::new());
    let mut memory = Memory::default();
    let mut ended: Option<Ended> = None;
    let mut options = options.clone();
    // One that comes late finds a run that has begun.
    let mut begun = *late;
    let text = config.resolved_toml();
    let (mut membership, mut world) = if *late {
        let secret = start.secret.clone().ok_or(TrainError::NoJobSecret)?;
        (Membership::late(&options.dir, (*bounds, &text), start, secret), None)
    } else {
        let comm = join(start).map_err(HostError::from)?;
        let membership = Membership::first(&options.dir, (*bounds, &text), start, &comm)?;
        (membership, Some(Rejoined { comm, epoch: 0, gone: Vec::new(), joined: 0 }))
    };
    loop {
        let meets = Instant::now();
        let Rejoined { comm, epoch, gone, joined } = match world.take() {
            Some(world) => world,
            None => {
                let cause = ended.as_ref().and_then(|ended| ended.cause.as_deref());
                membership.meet(&start.waiting, &mut || show(Event::LeftOut { cause }))?
            }
        };
        // Of a spare, others may have begun without it.
        begun |= membership.has_begun();
        if begun {
            // What the first world has done once.
            (options.fresh, options.resume_from, options.change) = (false, None, Vec::new());
            options.given.clear();
        }
        let one = World { config, process, membership, memory, comm, epoch, gone, joined, meets, goodput: &goodput };
        let (back, has_begun, result) = one.train(&options, &usable, ended.take(), *local, stop, show);
        (membership, memory) = back;
        begun |= has_begun;
        let error = match result {
            Ok(Some(outcome)) => {
                if outcome.finished {
                    membership.end();
                }
                return Ok(outcome);
            }
            // A spare: it waits for the next world.
            Ok(None) => continue,
            Err(error) => error,
        };
        let cause = match &error {
            TrainError::WorldChanges => None,
            error if error.is_loss() => Some(error.to_string()),
            _ => return Err(error),
        };
        let noticed_s = goodput.lock().unwrap_or_else(PoisonError::into_inner).since_last();
        ended = Some(Ended { at: Instant::now(), cause, noticed_s });
    }
}

/// How a world came to its end.
struct Ended {
    at: Instant,
    /// What was lost; none where somebody joins.
    cause: Option<String>,
    /// Seconds from its last step until then.
    noticed_s: f64,
}

/// One world of a run.
struct World<'a> {
    config: &'a Config,
    process: &'a ElasticStart<'a>,
    membership: Membership,
    memory: Memory,
    comm: ProcessCommunicator,
    epoch: u64,
    gone: Vec<usize>,
    joined: usize,
    /// When this process set out to meet the others.
    meets: Instant,
    goodput: &'a Mutex<Goodput>,
}

impl World<'_> {
    /// Trains in this world to its end; nothing where this process is a spare.
    fn train(
        self,
        options: &RunOptions,
        usable: &(dyn Fn(usize) -> usize + Sync),
        ended: Option<Ended>,
        local: Option<usize>,
        stop: &AtomicBool,
        show: Show,
    ) -> ((Membership, Memory), bool, Result<Option<Outcome>>) {
        let Self { config, process, mut membership, memory, comm, epoch, gone, joined, meets, goodput } = self;
        let agreed_s = meets.elapsed().as_secs_f64();
        let ranks = comm.ranks();
        let Some((at, used)) =
            fitting(config, ranks.min(process.bounds.most)).filter(|(_, used)| *used >= process.bounds.least)
        else {
            let error = TrainError::NoLayout { ranks, least: process.bounds.least };
            return ((membership, memory), false, Err(error));
        };
        let found = match epoch {
            0 => Ok(None),
            _ => from_memory((&comm, used), &memory, config, options),
        };
        let found = match found {
            Ok(found) => found,
            Err(error) => return ((membership, memory), false, Err(error)),
        };
        let gathered_s = meets.elapsed().as_secs_f64() - agreed_s;
        // Those that the layout has no place for wait for the next world.
        let comm = match membership.narrow(comm, used, &process.start.waiting) {
            Ok(Some(comm)) => Arc::new(comm),
            Ok(None) => return ((membership, memory), false, Ok(None)),
            Err(error) => return ((membership, memory), false, Err(error.into())),
        };
        comm.goes_on_within(process.start.timeout);
        let made = Instant::now();
        let agreed_s = (made - meets).as_secs_f64() - gathered_s;
        let parts = ended.as_ref().map_or_else(RecoveryParts::default, |ended| RecoveryParts {
            noticed_s: rounded(ended.noticed_s),
            agreed_s: rounded(agreed_s),
            gathered_s: rounded(gathered_s),
            ..RecoveryParts::default()
        });
        // One that joins has lost no time.
        let joins = Ended { at: made, cause: None, noticed_s: 0.0 };
        let change = ended.or((epoch > 0).then_some(joins)).map(|Ended { at: since, cause, .. }| {
            let change = WorldChange {
                epoch,
                gone,
                cause,
                joined,
                ranks: used,
                spares: ranks - used,
                layout: at.layout().to_string(),
                changes_bits: changes_bits(config, &at),
                step: 0,
                from_memory: false,
                lost_steps: 0,
                recovery_s: 0.0,
                parts,
            };
            (change, since)
        });
        if let Some(found) = &found {
            found.held.read_over(&comm);
        }
        show(Event::InWorld { rank: comm.rank(), ranks: used });
        let run = ElasticRun {
            memory,
            membership: Mutex::new(membership),
            comm: comm.clone(),
            usable,
            every: config.cluster.snapshot_every,
            is_later: epoch > 0,
            begun: AtomicBool::new(false),
            held: found.as_ref().map(|found| found.held.clone()),
            found: Mutex::new(found.map(|found| found.loaded)),
            change: Mutex::new(change),
            made,
            goodput,
        };
        let result = Processes::of(comm, &at, local)
            .map_err(TrainError::from)
            .and_then(|processes| run_in(&Devices::of_processes(processes), &at, options, Some(&run), stop, show));
        let ElasticRun { memory, membership, begun, .. } = run;
        let back = (membership.into_inner().unwrap_or_else(PoisonError::into_inner), memory);
        (back, begun.into_inner(), result.map(Some))
    }
}

/// The newest state that the ranks of a world hold, if there is none as new on the disk.
fn from_memory(
    (comm, used): (&ProcessCommunicator, usize),
    memory: &Memory,
    config: &Config,
    options: &RunOptions,
) -> Result<Option<Gathered>> {
    let newest = |place| list(place).unwrap_or_default().last().map_or(0, |(step, _)| *step);
    // Rank 0 looks for all: others may see a file later.
    let there = places(config, &options.dir).iter().map(|place| newest(place)).max().unwrap_or(0);
    let told =
        comm.exchange(ProgramPlace::outside("gather snapshots"), &there.to_le_bytes()).map_err(ExecError::from)?;
    let there = told[0][..].try_into().map_or(0, u64::from_le_bytes);
    memory.gather((comm, used), Some(there), &options.dir.join("checkpoints"))
}
