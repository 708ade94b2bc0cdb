//! The search over layouts: which of all that fit a model, a batch and a number of GPUs is the fastest.
//!
//! Every choice has a bound on its step time, and is looked at more closely only while that bound could still put it among the
//! fastest ([`best_first`]). First all choices with the same kernels (a key) share one: the time of their kernels alone, without
//! communication, bubble or recomputation. Then a small program of the key is compiled ([`proxy`]), and formulas over its layers bound
//! every pipeline of it; then the schedule of a pipeline is run with these costs, and each of its choices adds the collectives of its data
//! parallelism and its bytes ([`bound`]). Then a small program of the choice itself is composed to an estimate. What is still among the
//! fastest is compiled whole and simulated: only such choices are results. At last those that almost fit recompute as little as lets them
//! ([`budget`]). The order does not depend on threads.

mod best_first;
mod bound;
mod budget;
mod proxy;
mod queue;
mod simple;
mod space;
mod tally;
mod whole;

pub use simple::SIMPLER;
pub use space::LayoutChoice;
pub use tally::{Rejection, SearchCounts};
pub use whole::{at_layout, every_choice};

use crate::{Evaluated, Machine, PlanError, Room};
use best_first::Search;
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
    /// The fastest that fit, in order; first the simplest of those that are as fast within [`SIMPLER`].
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

    /// Layers of the stages of a pipeline of so many ranks, where it does not cut them as is done here.
    fn stages(&self, pp: usize) -> Option<Vec<usize>>;

    /// A choice compiled whole and simulated; the bytes of its stages are those that the framework needs.
    fn evaluate(&self, choice: &LayoutChoice) -> Result<Evaluated, PlanError>;
}

/// Finds the fastest layouts. `progress` hears how many small programs and how many whole ones are compiled.
pub fn search(request: &SearchRequest, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<SearchResult, PlanError> {
    let mut search = Search::new(request);
    search.begin(progress)?;
    while search.round(progress)? {}
    search.under_budgets(progress)?;
    search.end()
}
