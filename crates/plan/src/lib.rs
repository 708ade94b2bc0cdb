//! From a config to its programs, and what they cost: what `explain` prints and `train` runs.
//!
//! This crate runs no program. It needs no device: what the compiler must know of one comes as a
//! [`DeviceProfile`](lockstep_ir::DeviceProfile) from a [`Machine`], and the memory that a plan is held against as a [`Room`].
//! It does no I/O.
#![forbid(unsafe_code)]

mod account;
mod device;
mod error;
mod evaluate;
mod fit;
mod fitting;
mod formulas;
mod forward;
mod goodput;
mod groups;
mod inference;
pub mod laws;
mod offload;
mod parallel;
mod pipeline;
mod plan;
mod projections;
pub mod published;
mod recipe;
mod saves;
mod scoring;
mod search;
mod snapshot;
mod timeline;
mod ways;

pub use account::{Account, PolicyCost, ReshardCost, Scaling, account};
pub use device::{Machine, Target};
pub use error::{NoLayout, PlanError, Result};
pub use evaluate::{Evaluated, Rates, TimedWork, evaluate};
pub use fit::{
    LargestMicroBatch, LayoutCost, LengthCost, Room, Verdict, largest_micro_batches, layout_costs, length_costs,
    with_fitting_micro_batch, with_micro_batch,
};
pub use fitting::{FittingChange, MoreRanks, NearestMiss, WaysToFit};
pub use formulas::Formula;
pub use forward::{
    CachePlan, Cut, GenerationShape, PAGE, cache_plan, check_positions, decode_sizes, evaluation_program,
    forward_threads, generation_program,
};
pub use goodput::{Goodput, RunUnderFailures};
pub use inference::{CacheKind, DecodeBound, InferenceAccount, InferenceOnGpu, inference_account};
pub use offload::with_fitting_offload;
pub use pipeline::pipeline_timeline;
pub use plan::{Plan, parameters, plan, plan_measured, plan_with};
pub use projections::Projection;
pub use recipe::{Recipe, RecipeRung, RecipeSize, recipe};
pub use saves::{FailureRate, SaveInterval, Stalls, checkpoint_bytes};
pub use scoring::{ScoringShape, scoring_program, scoring_runs};
pub use search::{
    LayoutChoice, RankedLayout, Rejection, SIMPLER, SearchCounts, SearchRequest, SearchResult, Trainer, at_layout,
    every_choice, search,
};
pub use timeline::{Clock, Mark, MemoryTimeline, PhaseTime, StepPhase, planned_timeline};
pub use ways::ways_to_fit;
