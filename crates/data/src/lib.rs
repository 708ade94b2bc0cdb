//! Text to packed tokens, and packed tokens to training samples.
//!
//! [`prepare`] reads files and writes a folder of two token shards and a `data.json`; [`Prepared`] opens such a folder;
//! [`Shard`] is one memory-mapped file of tokens; [`Sampler`] says which tokens the n-th sample of a run holds.
//!
//! Every choice here (which text is held out, which sample comes when) is a pure function of a seed and a logical
//! index, so any layout of ranks sees the same tokens in the same order.
//!
//! This crate knows nothing of models, of the training loop, of ranks or of `run.toml`.

#![deny(missing_docs)]

mod error;
mod holdout;
mod new_file;
mod prepare;
mod prepared;
mod sampler;
mod scan;
mod shard;
mod shard_writer;

pub use error::{DataError, ShardFault};
pub use prepare::{PrepareSpec, Progress, prepare};
pub use prepared::{Prepared, SplitSummary};
pub use sampler::Sampler;
pub use shard::Shard;

/// Number of distinct tokens of byte-level text.
pub const BYTE_VOCABULARY: u32 = 256;

/// The token after each document of byte-level text.
pub const SEPARATOR: u8 = 0;
