//! The training loop: data → program → metrics → checkpoint.
//!
//! This crate owns the order of a run: what is prepared, planned, loaded, stepped, measured and saved, and what a run
//! directory holds. It computes nothing itself (executors do) and prints nothing (it reports [`Event`]s).
#![forbid(unsafe_code)]

mod data;
mod error;
mod event;
mod plan;
mod run;
mod run_dir;
mod schedule;
mod session;
mod state;

pub use data::{Existing, RunCorpus, RunData, data_folder, prepare_data};
pub use error::TrainError;
pub use event::{Event, StepMetrics};
pub use plan::{Plan, plan};
pub use run::{Outcome, RunOptions, run};
pub use run_dir::RunDir;
pub use schedule::learning_rate;
pub use session::Session;
pub use state::{Part, parts};
