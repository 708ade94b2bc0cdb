//! The training loop: data → program → metrics → checkpoint; and what a trained model is for: text and its loss.
//!
//! This crate owns the order of a run: what is prepared, planned, loaded, stepped, measured and saved, and what a run
//! directory holds. It computes nothing itself (executors do) and prints nothing (it reports [`Event`]s).
#![forbid(unsafe_code)]

mod account;
pub mod bench;
mod changes;
mod checkpoints;
mod compare;
mod data;
mod device;
mod dry_run;
mod error;
mod evaluate;
mod event;
mod feed;
mod fit;
mod formulas;
mod generate;
mod groups;
mod hf;
mod inherited;
mod initial;
mod loss_scale;
mod noise;
mod plan;
mod profile;
mod rank_parts;
mod run;
mod run_dir;
mod sample;
mod sampling;
mod schedule;
mod session;
mod shell;
mod state;
mod text;
mod timeline;
mod trained;

pub use account::{Account, PolicyCost, Scaling, account};
pub use changes::Changed;
pub use checkpoints::{CheckpointSummary, checkpoints};
pub use compare::{Comparison, Criterion, Promise, compare, shrink};
pub use data::{Existing, RunCorpus, RunData, data_folder, prepare_data};
pub use device::Device;
pub use dry_run::{DryData, DryRun, dry_run};
pub use error::TrainError;
pub use evaluate::{CorpusEvaluation, EvaluateProgress, Evaluation, Score, Text, evaluate};
pub use event::{Event, GpuMetrics, StepMetrics};
pub use fit::{
    LargestMicroBatch, LayoutCost, Room, Saving, Verdict, largest_micro_batches, layout_costs, settled,
    with_fitting_micro_batch,
};
pub use formulas::Formula;
pub use generate::{Generated, Generator, Stop, generate, generation_program};
pub use hf::{ExportOptions, Exported, Imported, export, import};
pub use inherited::inherited;
pub use noise::Measured;
pub use plan::{Architecture, Plan, plan, plan_with};
pub use profile::{OpTime, Profile};
pub use run::{Outcome, RunOptions, run};
pub use run_dir::RunDir;
pub use sample::Sample;
pub use sampling::Sampling;
pub use schedule::learning_rate;
pub use session::{QueuedStep, Session, StepResult};
pub use shell::shell_quoted;
pub use state::{Part, Weights, parts};
pub use text::{TextStream, Tokenizer};
pub use timeline::{Clock, Mark, MemoryTimeline, observed_timeline, planned_timeline};
pub use trained::Trained;
