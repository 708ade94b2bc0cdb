//! What a run has recorded, for people and for other programs: metrics as columns, TensorBoard event files, CSV, MLflow, Weights & Biases, a
//! page of charts.
//!
//! Everything here is made from what a run directory has, numbers from lines of `metrics.jsonl`, so that every reader and every sink has the same keys and the same
//! numbers. This crate does not know what a run is or how one is trained.
#![forbid(unsafe_code)]

mod columns;
mod csv;
mod event_file;
mod files;
mod keys;
mod mlflow;
mod page;
mod queue;
mod scalars;
mod shadow;
mod sink;
mod sinks;
mod wandb;

pub use columns::MetricColumns;
pub use csv::csv;
pub use files::{MOST_LINE_BYTES, each_line, open_file, read_file, refuse_special};
pub use keys::unit;
pub use page::{RunPage, random_text};
pub use scalars::each_scalar;
pub use shadow::LossComparisons;
pub use sink::{RunEnd, SinkAddress, SinkProblem, SinkRun};
pub use sinks::{SINKS, SinkNews, SinkSpec, Sinks, check_sinks};
