use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why processes cannot go on together.
#[derive(Debug, thiserror::Error, lockstep_ir::Hint)]
pub enum ElasticError {
    /// Those that are left are too few.
    #[error("{here} of {before} ranks are left, and cluster.elastic asks for {least} at least")]
    #[hint("the same command again goes on from the last checkpoint")]
    TooFew {
        /// How many are left.
        here: usize,
        /// How many there were.
        before: usize,
        /// How many it takes.
        least: usize,
    },
    /// The others may go on elsewhere.
    #[error(
        "{here} of {before} ranks reach each other, which is not more than half: the others may go on, so these ranks end"
    )]
    #[hint("look at the network between the hosts; the same command again goes on from the last checkpoint")]
    NoMajority {
        /// How many reach each other.
        here: usize,
        /// How many there were.
        before: usize,
    },
    /// The run has ended while this process waited.
    #[error("the run has ended while this process waited to join it")]
    Ended,
    /// This process is asked to stop while it waits.
    #[error("interrupted while waiting for the others")]
    Stopped,
    /// No epoch has come.
    #[error("no other rank has agreed on a world with this one within {} s", within.as_secs())]
    #[hint("look at the messages of the other ranks; the same command again goes on from the last checkpoint")]
    Alone {
        /// How long it waited.
        within: Duration,
    },
    /// The process is of another build.
    #[error("the run is Lockstep {theirs}, and this process is Lockstep {ours}: it cannot join")]
    #[hint("start all ranks from the same binary")]
    OtherBuild {
        /// The run's.
        theirs: String,
        /// This one's.
        ours: String,
    },
    /// The process has another config.
    #[error("the run was started with another config than this process: it cannot join")]
    #[hint(
        "start all ranks with the same config file and options; the run has its own in run.toml of the run directory"
    )]
    OtherConfig,
    /// The clock of this host is another than the run's.
    #[error("the clock of this host differs from the run's by {apart}: it cannot join")]
    #[hint("set the clocks of all hosts by NTP or chrony, and start this rank again")]
    OtherClock {
        /// By how much: with a plus where it is ahead.
        apart: String,
    },
    /// The folder cannot be used.
    #[error("cannot {action} {}: {cause}", path.display())]
    #[hint("the run directory must be one that all hosts can read and write")]
    Folder {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
}
