//! Architectures as graph builders.
//!
//! An architecture is one file that writes down its forward pass with global shapes. It holds no gradient, no parallel
//! code and no memory management: passes derive those. Parameters carry the names that Hugging Face checkpoints use.
#![forbid(unsafe_code)]

mod llama;

use lockstep_config::ModelConfig;
use lockstep_ir::{Graph, TypeError};

/// Names of the values that every model's graph has.
pub mod names {
    /// Input: token ids.
    pub const TOKENS: &str = "tokens";
    /// Input: the token that follows each position.
    pub const TARGETS: &str = "targets";
    /// Output: sum of the token losses of each sequence.
    pub const LOSS: &str = "loss";
    /// The logits, where a pass has not fused them away.
    pub const LOGITS: &str = "logits";
}

/// The forward graph of a model over one micro-batch of `batch` sequences of `seq` tokens.
pub fn build(model: &ModelConfig, batch: usize, seq: usize) -> Result<Graph, TypeError> {
    llama::build(model, batch, seq)
}
