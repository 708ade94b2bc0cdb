//! Where a rank is in its program, and what can end a run.

use lockstep_ir::units;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Where a rank is in its program: for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramPlace {
    /// The op's name.
    pub op: &'static str,
    /// The layer that the op belongs to, if any.
    pub layer: Option<usize>,
    /// The micro-batch that it works on.
    pub micro_batch: usize,
}

impl ProgramPlace {
    /// Something that no program has: a rank saves, or waits to hear whether all are to stop.
    pub const fn outside(op: &'static str) -> Self {
        Self { op, layer: None, micro_batch: usize::MAX }
    }

    /// Op and layer, without the micro-batch.
    fn brief(&self) -> String {
        self.layer.map_or_else(|| self.op.to_owned(), |layer| format!("{}, layer {layer}", self.op))
    }
}

impl fmt::Display for ProgramPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.micro_batch {
            usize::MAX => f.write_str(&self.brief()),
            micro_batch => write!(f, "{}, micro-batch {micro_batch}", self.brief()),
        }
    }
}

/// What ended the run. All ranks get the same one.
#[derive(Clone, Debug, PartialEq, thiserror::Error, lockstep_ir::Hint, Serialize, Deserialize)]
pub enum CommError {
    /// A rank cannot go on.
    #[error(
        "rank {rank}{} failed {}: {reason}",
        .host.as_ref().map_or_else(String::new, |host| format!(" on host {host}")), at(.place)
    )]
    // A process that failed has said more.
    #[hint(host.as_ref().map_or_else(|| hint.as_deref().map(str::to_owned), |_| Some(format!("look at the messages of rank {rank}"))))]
    Failed {
        /// The rank that failed.
        rank: usize,
        /// Its host, where ranks are processes.
        host: Option<String>,
        /// Where it was; `None` before its first op.
        place: Option<ProgramPlace>,
        /// What it said.
        reason: String,
        /// What to do about it, where the rank is a thread.
        #[serde(skip)]
        hint: Option<Box<str>>,
    },
    /// The process of a rank has ended without a word, or cannot be reached any more.
    #[error("rank {rank} on host {host} is gone: {reason}; it was last heard of {}{}", at(.place), seen_by(.seen))]
    #[hint(
        "look at the messages of rank {rank} and of its host (out of memory?); the run goes on from its last \
         checkpoint"
    )]
    Lost {
        /// The rank.
        rank: usize,
        /// Its host.
        host: String,
        /// Where it was, as far as is known.
        place: Option<ProgramPlace>,
        /// How that was noticed.
        reason: String,
        /// The rank that tells of it, and where it was.
        seen: Option<Box<(usize, ProgramPlace)>>,
    },
    /// Two ranks that live have lost their connection.
    #[error(
        "rank {} on host {} and rank {} on host {} cannot reach each other any more, and both live: {reason}",
        .ranks.0, .hosts[0], .ranks.1, .hosts[1]
    )]
    #[hint("look at the network between these hosts (a link, a firewall); the run goes on from its last checkpoint")]
    Cut {
        /// The one that noticed it, and the other.
        ranks: (usize, usize),
        /// Their hosts.
        hosts: Box<[String; 2]>,
        /// How that was noticed.
        reason: String,
    },
    /// A rank waits for one that shows no sign of life.
    #[error(
        "rank {rank} waits in {}, for rank {other}, which has been {}, for {}{}",
        .place.brief(), briefly(.other_place), units::seconds(f64::from(*.seconds)), waiting(.other_waits_for)
    )]
    #[hint("look at the messages of rank {other}")]
    Stalled {
        /// The rank that waits.
        rank: usize,
        /// Where it waits.
        place: ProgramPlace,
        /// The rank that it waits for.
        other: usize,
        /// Where that one is; `None` before its first op.
        other_place: Option<ProgramPlace>,
        /// How long that one has been there.
        seconds: f32,
        /// The rank that the other waits for in turn: they wait in a circle.
        other_waits_for: Option<usize>,
    },
    /// A rank waits for one that will not come.
    #[error("rank {rank} waits in {}, for rank {other}, but rank {other} has ended its program", .place.brief())]
    #[hint("the ranks run different programs; start all of them with the same config and the same build")]
    Left {
        /// The rank that waits.
        rank: usize,
        /// Where it waits.
        place: ProgramPlace,
        /// The rank that has ended its program.
        other: usize,
    },
    /// Two ranks want different things of each other.
    #[error("ranks {} and {} do not agree: {first} against {second}", .ranks.0, .ranks.1)]
    #[hint("the ranks run different programs; start all of them with the same config and the same build")]
    Mismatch {
        /// The two ranks.
        ranks: (usize, usize),
        /// What the first wants.
        first: String,
        /// What the second wants.
        second: String,
    },
    /// A rank asks for something that no communicator can do.
    #[error("rank {rank} asks in {place} for what cannot be done: {reason}")]
    #[hint("this is a bug in Lockstep, please report it with your config")]
    Refused {
        /// The rank that asks.
        rank: usize,
        /// Where it asks.
        place: ProgramPlace,
        /// Why not.
        reason: String,
    },
}

/// The error for a message of `theirs` bytes from a rank to one that expects `ours`.
pub fn other_size((from, to): (usize, usize), theirs: usize, ours: usize, place: ProgramPlace) -> CommError {
    CommError::Mismatch {
        ranks: (from, to),
        first: format!("a message of {} bytes", units::thousands(theirs as u64)),
        second: format!("receive of {} bytes in {place}", units::thousands(ours as u64)),
    }
}

fn at(place: &Option<ProgramPlace>) -> String {
    place.map_or_else(|| "before its first op".to_owned(), |p| format!("in {p}"))
}

fn seen_by(by: &Option<Box<(usize, ProgramPlace)>>) -> String {
    by.as_deref().map_or_else(String::new, |(rank, place)| format!("; rank {rank} waited in {}", place.brief()))
}

fn briefly(place: &Option<ProgramPlace>) -> String {
    place.map_or_else(|| "before its first op".to_owned(), |p| format!("in {}", p.brief()))
}

fn waiting(other: &Option<usize>) -> String {
    other.map_or_else(String::new, |other| format!(", waiting for rank {other}"))
}
