//! What a run has recorded, for people and for other programs: metrics as columns, TensorBoard event files, CSV.
//!
//! Everything here is made from lines of `metrics.jsonl`, so that every reader and every sink has the same keys and the same
//! numbers. This crate does not know what a run is or how one is trained.
#![forbid(unsafe_code)]

mod columns;
mod csv;
mod event_file;
mod keys;
mod scalars;
mod sinks;

pub use columns::MetricColumns;
pub use csv::csv;
pub use keys::unit;
pub use scalars::each_scalar;
pub use sinks::{FailedSink, SinkChoice, Sinks};
