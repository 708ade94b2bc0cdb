//! Checkpoints: what each rank writes of one, a snapshot that is written while steps go on, how often one is due, and what it costs.

mod background;
mod bench;
mod interval;
pub(crate) mod rank_parts;
mod snapshot;

pub(crate) use background::Saver;
pub use background::{SaveEnd, SaveFailure, SaveRequest};
pub use bench::{CheckpointBench, bench_checkpoint};
pub(crate) use interval::with_checkpoint_interval;
pub(crate) use snapshot::Snapshot;
