//! What a process is told of the others, and why it did not find them.

use super::board::Board;
use super::mpi::MpiLibrary;
use super::secret::JobSecret;
use super::wire::plain;
use lockstep_ir::units;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How a process finds the others.
#[derive(Clone, Debug)]
pub struct Start {
    /// Which rank it is.
    pub rank: usize,
    /// Ranks in all.
    pub ranks: usize,
    /// Where the first rank listens: `host:port`.
    pub address: String,
    /// How long it waits for the others to come, and later for one that shows no sign of life.
    pub timeout: Duration,
    /// What all must have in common to understand each other: the version and the binary.
    pub build: String,
    /// The MPI library that it may use: whoever started it was an MPI.
    pub mpi: Option<MpiLibrary>,
    /// The secret of the job, where whoever started the processes gave them one; else the first rank makes one, and posts it.
    pub secret: Option<JobSecret>,
    /// Where the first rank posts what the others were not given: the secret, and its port where that is another.
    pub board: Option<Board>,
    /// Ends the waiting for others.
    pub waiting: Waiting,
}

/// What ends a process's waiting for the others before its time.
#[derive(Clone, Debug, Default)]
pub struct Waiting {
    /// It is asked to stop.
    pub stop: Option<Arc<AtomicBool>>,
    /// Another process has ended, so that there will never be all.
    pub abandoned: Option<Arc<AtomicBool>>,
}

impl Waiting {
    pub(super) fn check(&self, rank: usize) -> Result<(), JoinError> {
        let set = |flag: &Option<Arc<AtomicBool>>| flag.as_ref().is_some_and(|flag| flag.load(Ordering::Acquire));
        match (set(&self.abandoned), set(&self.stop)) {
            (true, _) => Err(JoinError::Abandoned { rank }),
            (false, true) => Err(JoinError::Stopped),
            (false, false) => Ok(()),
        }
    }
}

/// A process of a run, as the others know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The name of its host.
    pub host: String,
    /// Its number there.
    pub pid: u32,
    /// Cores that it may use.
    pub cores: usize,
}

/// Why processes did not find each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, lockstep_ir::Hint)]
pub enum JoinError {
    /// The first rank cannot listen.
    #[error("rank 0 cannot listen at {address}: {cause}")]
    #[hint("{}", if *in_use { PORT_IN_USE } else { "MASTER_ADDR must be an address of the host of rank 0" })]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        cause: String,
        /// Whether another process has the port.
        in_use: bool,
    },
    /// The first rank does not answer.
    #[error("rank {rank} found no rank 0 at {address} within {}: {cause}", units::seconds(.within.as_secs_f64()))]
    #[hint("is rank 0 running, and are MASTER_ADDR and MASTER_PORT those of its host? A firewall may be between them")]
    NoAnswer {
        /// The rank that looked.
        rank: usize,
        /// Where.
        address: String,
        /// What the system said last.
        cause: String,
        /// How long it looked.
        within: Duration,
    },
    /// Some have not come.
    #[error(
        "{} of {ranks} {} not come within {}",
        units::ranks(.missing),
        if .missing.len() == 1 { "has" } else { "have" },
        units::seconds(.within.as_secs_f64())
    )]
    #[hint("look at their messages; were as many processes started as there are ranks?")]
    Missing {
        /// Who.
        missing: Vec<usize>,
        /// Ranks in all.
        ranks: usize,
        /// How long they were waited for.
        within: Duration,
    },
    /// Two processes are the same rank.
    #[error(
        "rank {rank} came twice: as process {} on host {} and as process {} on host {}",
        .first.pid, .first.host, .second.pid, .second.host
    )]
    #[hint("every process needs a rank of its own (RANK, SLURM_PROCID …); two runs may use the same MASTER_PORT")]
    Twice {
        /// The rank.
        rank: usize,
        /// Who came first.
        first: Member,
        /// Who came then.
        second: Member,
    },
    /// A process counts other ranks than the first.
    #[error(
        "process {} on host {} is rank {rank} of {theirs}, and rank 0 counts {ours} ranks",
        .member.pid, .member.host
    )]
    #[hint("start all processes with the same WORLD_SIZE, and ranks from 0 to one less")]
    OtherSize {
        /// The process.
        member: Member,
        /// The rank that it says it is.
        rank: usize,
        /// The ranks that it counts.
        theirs: usize,
        /// The ranks that the first counts.
        ours: usize,
    },
    /// A process is of another build.
    #[error("rank 0 on host {first} is Lockstep {ours}, rank {rank} on host {host} is Lockstep {theirs}")]
    #[hint("start all ranks from the same binary")]
    OtherBuild {
        /// The host of the first rank.
        first: String,
        /// The rank.
        rank: usize,
        /// Its host.
        host: String,
        /// The build of the first rank.
        ours: String,
        /// Its build.
        theirs: String,
    },
    /// A process has ended before all had come.
    #[error(
        "rank {rank}{} has ended before all had come: {reason}",
        host.as_ref().map_or_else(String::new, |host| format!(" on host {host}"))
    )]
    #[hint("look at the messages of rank {rank}")]
    Early {
        /// The rank.
        rank: usize,
        /// Its host, where that is known.
        host: Option<String>,
        /// What it said.
        reason: String,
    },
    /// Whoever started the processes says that one of them has ended.
    #[error("rank {rank} waits no longer: another rank has ended before all had come")]
    #[hint("look at the messages of the other ranks")]
    Abandoned {
        /// The rank that waited.
        rank: usize,
    },
    /// The process is asked to stop.
    #[error("interrupted before all ranks had come")]
    #[hint("the same command again starts the run, or goes on with it")]
    Stopped,
    /// There is no secret, and no folder to keep one in.
    #[error("rank {rank} cannot prove to the others that it is of their job: {cause}")]
    #[hint(
        "choose a folder that all ranks can use, or give all the same LOCKSTEP_JOB_SECRET: 64 hexadecimal digits, \
         as `openssl rand -hex 32` prints"
    )]
    NoSecret {
        /// The rank.
        rank: usize,
        /// What is wrong.
        cause: String,
    },
    /// The first rank has found something wrong.
    #[error("{0}")]
    Refused(String),
    /// Ranks cannot reach each other.
    #[error("rank {rank}: {cause}")]
    #[hint("every host must reach every other, on any port; look for a firewall between them")]
    Unconnected {
        /// The rank that says so.
        rank: usize,
        /// What is wrong.
        cause: String,
    },
    /// A rank was lost while MPI was started.
    #[error("MPI does not start: {failed}")]
    #[hint("look at the messages of that rank; LOCKSTEP_MPI_LIBRARY=none goes over TCP")]
    MpiStart {
        /// Who, where, and what is wrong.
        failed: String,
    },
    /// The system lacks something.
    #[error("rank {rank} cannot join the others: {cause}")]
    #[hint("check the limits of threads and open files (ulimit -u, -n)")]
    System {
        /// The rank.
        rank: usize,
        /// What it said.
        cause: String,
    },
}

const PORT_IN_USE: &str = "another process uses this port, and there is no folder in which to tell the other ranks of another: \
                           choose another MASTER_PORT";

/// The name of this host.
pub fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "unknown".to_owned() } else { plain(name) }
}

/// The kind of the note that says why a process is not let in.
pub(super) const REFUSAL: u8 = 22;
