//! The search over layouts: which of all that fit a model, a batch and a number of GPUs is the fastest.

mod space;

pub use space::LayoutChoice;

use crate::parallel::in_parallel;
use crate::{Evaluated, Machine, NoLayout, PlanError, Rates, Room, evaluate};
use lockstep_config::Config;
use lockstep_sim::Hardware;
use space::Space;
use std::sync::{Mutex, PoisonError};

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

/// How a search went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct SearchCounts {
    /// Choices that divide model, batch and GPUs.
    pub legal: u64,
    /// Choices that were compiled and simulated.
    pub compiled: u64,
}

/// What a search found.
#[derive(Clone, Debug)]
pub struct SearchResult {
    /// The fastest that fit, in order.
    pub best: Vec<RankedLayout>,
    /// How many were looked at.
    pub counts: SearchCounts,
    /// Keys that the config fixes.
    pub fixed: Vec<&'static str>,
}

/// Choices that are compiled.
const MOST_COMPILED: usize = 48;

/// Finds the fastest layouts. `progress` hears how many of how many are compiled.
pub fn search(request: &SearchRequest, progress: &(dyn Fn(usize, usize) + Sync)) -> Result<SearchResult, PlanError> {
    let space = Space::new(request.config, request.gpus, request.free);
    let mut all: Vec<(f64, LayoutChoice)> = Vec::new();
    for split in space.splits() {
        for pipe in space.pipes(request.gpus / (split.tp * split.cp)) {
            let ranks = request.gpus / (split.tp * split.cp * pipe.pp);
            for micro_batch in space.micro_batches(ranks) {
                for data in space.data(ranks, split.cp) {
                    for recompute in space.policies() {
                        for gradients in space.gradients() {
                            let choice = space.choice(split, pipe, data, micro_batch, recompute, gradients);
                            all.push((guess(request, &choice), choice));
                        }
                    }
                }
            }
        }
    }
    let legal = all.len() as u64;
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all.truncate(MOST_COMPILED);
    let found: Vec<Mutex<Option<Result<Evaluated, PlanError>>>> = all.iter().map(|_| Mutex::new(None)).collect();
    let one = |i: usize| {
        let evaluated = evaluate(request.machine, &all[i].1.config(request.config), Rates::Catalogue(request.hardware));
        *found[i].lock().unwrap_or_else(PoisonError::into_inner) = Some(evaluated);
    };
    in_parallel(all.len(), request.threads, &one, &|done| progress(done, all.len()));
    let mut best = Vec::new();
    for ((_, choice), found) in all.iter().zip(found) {
        let Some(found) = found.into_inner().unwrap_or_else(PoisonError::into_inner) else { continue };
        let evaluated = found?;
        if request.room.verdict(&evaluated.stages, request.gpus).fits {
            best.push(RankedLayout { choice: *choice, evaluated });
        }
    }
    best.sort_by(|a, b| a.evaluated.forecast.step_s.total_cmp(&b.evaluated.forecast.step_s));
    best.truncate(request.wanted);
    let counts = SearchCounts { legal, compiled: all.len() as u64 };
    if best.is_empty() {
        let reason = format!("none of {legal} layouts on {} GPUs fits", request.gpus);
        let hint = "give more GPUs, or a smaller model, batch or sequence".to_owned();
        return Err(PlanError::NoLayout(Box::new(NoLayout { reason, hint })));
    }
    Ok(SearchResult { best, counts, fixed: space.fixed })
}

/// A rough order: FLOPs with recomputation and the bubble, and what state does not fit.
fn guess(request: &SearchRequest, choice: &LayoutChoice) -> f64 {
    use lockstep_config::RecomputePolicy;
    use lockstep_ir::{Axes, MeshAxis};
    let size = |axis: MeshAxis| choice.layout.mesh.size(axis);
    let model = &request.config.model;
    let layer = 4 * model.dim * model.dim + 3 * model.dim * model.ffn;
    let parameters = (model.layers * layer + 2 * model.vocab_size * model.dim) as f64;
    let own = parameters / (size(MeshAxis::Tp) * size(MeshAxis::Pp)) as f64;
    let shards = choice.layout.mesh.size(Axes::ZERO) as f64;
    let states = own
        * match choice.layout.zero {
            0 => 18.0,
            1 => 6.0 + 12.0 / shards,
            2 => 2.0 + 16.0 / shards,
            _ => 18.0 / shards,
        };
    let tokens = (choice.micro_batch * request.config.train.seq) as f64
        / (size(MeshAxis::Cp) * if choice.layout.sequence_parallel { size(MeshAxis::Tp) } else { 1 }) as f64;
    let (kept, more) = match choice.recompute {
        RecomputePolicy::None => (34.0, 1.0),
        RecomputePolicy::Selective | RecomputePolicy::List | RecomputePolicy::Budget => (24.0, 1.02),
        RecomputePolicy::Full | RecomputePolicy::EveryK | RecomputePolicy::Sqrt => (2.0, 1.33),
    };
    let activations = tokens * kept * (model.dim * model.layers) as f64;
    let over = (states + activations) / request.room.bytes as f64;
    let (pp, m) = (size(MeshAxis::Pp) as f64, choice.layout.micro_batches as f64);
    let bubble = (pp - 1.0) / (m * choice.layout.chunks as f64);
    let small = 1.0 + 0.1 * (size(MeshAxis::Tp) as f64).log2() + 0.02 * choice.layout.zero as f64;
    more * (1.0 + bubble) * small * if over > 0.9 { 1e3 * over } else { 1.0 }
}
