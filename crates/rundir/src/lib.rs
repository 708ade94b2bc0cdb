//! A run directory: which files a run keeps, who holds it, what is changed on resume, and what its files tell afterwards.
//!
//! This crate owns the names of the files and when they are written, cut back or set aside. It knows nothing of executors, programs
//! or training: what stands in a line of metrics or in the plan comes from whoever trains.
#![forbid(unsafe_code)]

mod changes;
mod checkpoints;
mod error;
mod provenance;
mod run_dir;
mod runs;

pub use changes::{Changed, Overruled, ResumePlan, resume_plan};
pub use checkpoints::{CheckpointSummary, checkpoints, lines};
pub use error::{Result, RunDirError};
pub use provenance::{Build, RunStart, StartCircumstances, StartedBy, TakenFromHub, starts};
pub use run_dir::{Aside, FAILURES, MEASURED, OpenSinks, ROLL_BACKS, RunDir, require_sinks};
pub use runs::{RunState, RunSummary, Validation, largest_recorded, read_config, run_summary, runs};
