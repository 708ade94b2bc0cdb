//! The search over layouts: which of all that fit a model, a batch and a number of GPUs is the fastest.
//!
//! Every choice has a bound on its step time, and is looked at more closely only while that bound could still put it among the
//! fastest ([`best_first`]). First all choices with the same kernels (a key) share one: the time of their kernels alone, without
//! communication, bubble or recomputation. Then a small program of the key is compiled ([`proxy`]), and formulas over its layers bound
//! every pipeline of it; then the schedule of a pipeline is run with these costs, and each of its choices adds the collectives of its data
//! parallelism and its bytes ([`bound`]). Then a small program of the choice itself is composed to an estimate. What is still among the
//! fastest is compiled whole and simulated: only such choices are results. At last those that almost fit recompute as little as lets them
//! ([`budget`]), and those that do not fit have as little optimizer state in the memory of the host as lets them ([`offload`]). The order does not depend on threads.
//!
//! Where bounds cannot tell choices apart, as on slow networks, the search ends after this many programs with the best so far, and says so.
//!
//! Which values divide is asked of `lockstep_config::legal`, and stages are cut by the compiler's own function.
//! Another framework is a `Trainer`. A test holds the results against an exhaustive search.

mod best_first;
mod bound;
mod budget;
mod choice;
mod offload;
mod proxy;
mod queue;
mod request;
mod simple;
mod space;
mod tally;
mod whole;

pub use choice::LayoutChoice;
pub use request::{RankedLayout, SearchRequest, SearchResult, Trainer};
pub use simple::SIMPLER;
pub use tally::{Rejection, SearchCounts};
pub use whole::{at_layout, every_choice};

use crate::Result;
use best_first::Search;

/// Finds the fastest layouts. `progress` hears how many small programs and how many whole ones are compiled.
pub fn search(request: &SearchRequest, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<SearchResult> {
    let mut search = Search::new(request);
    search.begin(progress)?;
    while !search.is_spent() && search.round(progress)? {}
    search.under_budgets(progress)?;
    search.offloaded(progress)?;
    search.end()
}
