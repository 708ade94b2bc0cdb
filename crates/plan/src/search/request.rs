//! What a search is asked for, and what it gives.

use super::{LayoutChoice, Rejection, SearchCounts};
use crate::{Evaluated, Machine, Result, Room};
use lockstep_config::Config;
use lockstep_ir::Layout;
use lockstep_sim::{Framework, Hardware, Terms};

/// What a search is for.
#[derive(Clone)]
pub struct SearchRequest<'a> {
    /// What compiles.
    pub machine: &'a dyn Machine,
    /// The run.
    pub config: &'a Config,
    /// How many GPUs it has.
    pub gpus: usize,
    /// The GPUs.
    pub hardware: &'a Hardware,
    /// Memory of each.
    pub room: &'a Room,
    /// Whether keys that the config gives are searched too.
    pub free: bool,
    /// Keys that are not searched whether the config gives them or not.
    pub fixed: &'a [&'static str],
    /// Who trains, where that is another framework.
    pub trainer: Option<&'a dyn Trainer>,
    /// How many layouts are wanted.
    pub wanted: usize,
    /// Threads that search.
    pub threads: usize,
}

/// A layout with what it costs.
#[derive(Clone, Debug)]
pub struct RankedLayout {
    /// What was chosen.
    pub choice: LayoutChoice,
    /// Its programs, simulated.
    pub evaluated: Evaluated,
}

/// What a search found.
#[derive(Clone, Debug)]
pub struct SearchResult {
    /// The fastest that fit, in order; first the simplest of those that are as fast within [`SIMPLER`](super::SIMPLER).
    pub best: Vec<RankedLayout>,
    /// How many were looked at.
    pub counts: SearchCounts,
    /// What was left out, by reason.
    pub rejected: Vec<Rejection>,
    /// Keys that the config fixes.
    pub fixed: Vec<&'static str>,
}

/// A framework other than this one, for which layouts are searched: what it has of what is searched, and what becomes of a choice there.
pub trait Trainer: Sync {
    /// How it runs a step.
    fn framework(&self) -> &Framework;

    /// The constants of the cost model for it.
    fn terms(&self) -> Terms;

    /// Whether it has all that a layout asks for, which may be one axis alone.
    fn has(&self, layout: &Layout) -> bool;

    /// Layers of the stages of a pipeline of this many ranks, where it does not cut them as is done here.
    fn stages(&self, pp: usize) -> Option<Vec<usize>>;

    /// A choice compiled whole and simulated; the bytes of its stages are those that the framework needs.
    fn evaluate(&self, choice: &LayoutChoice) -> Result<Evaluated>;
}
