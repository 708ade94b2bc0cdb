//! Architectures as graph builders.
//!
//! An architecture is one file that writes down its forward pass with global shapes. It holds no gradient, no parallel
//! code and no memory management: passes derive those. Parameters carry the names that Hugging Face checkpoints use.
#![forbid(unsafe_code)]

pub mod adapters;
mod architectures;
mod decoder;
mod form;
mod further;
pub mod hf;
mod latent;
mod mixture;
pub mod parameters;

// An architecture reads the same inside this crate and outside.
extern crate self as lockstep_model;

pub use form::{AskedLogits, CacheShape, Form, FormInputs};

use lockstep_config::ModelConfig;
use lockstep_ir::{Graph, TypeError};

/// Names of the values that every model's graph has.
pub mod names {
    /// Input: token ids.
    pub const TOKENS: &str = "tokens";
    /// Input: the token that follows each position.
    pub const TARGETS: &str = "targets";
    /// Input of models that keep documents apart: where in its sequence the document of each position starts.
    pub const DOCUMENT_STARTS: &str = "document_starts";
    /// Input of models with dropout: a random key of two words for each sequence, a function of seed and sample.
    pub const DROPOUT_KEYS: &str = "dropout_keys";
    /// Output: sum of the token losses of each sequence.
    pub const LOSS: &str = "loss";
    /// Input of generation: how many tokens of each sequence are in the cache.
    pub const START: &str = "start";
    /// Input of generation: how many tokens of each sequence are new.
    pub const COUNT: &str = "count";
    /// Input of generation: which row of the tables of pages each sequence has.
    pub const SLOT: &str = "slot";
    /// State of generation: the pages of the cache that each row's blocks are in.
    pub const PAGES: &str = "pages";
    /// The same for layers with a sliding window.
    pub const WINDOW_PAGES: &str = "window_pages";
    /// The logits, where a pass has not fused them away. In generation an output: those after the last new token.
    pub const LOGITS: &str = "logits";
    /// One of these of a module that predicts further tokens (MTP): `tokens.further.1` are the tokens that follow each position, `targets.further.1`
    /// those after them, which the first module predicts, and `loss.further.1` its losses, an output of training.
    pub fn further(name: &str, depth: usize) -> String {
        format!("{name}.further.{depth}")
    }
    /// Output of generation: the first of the most probable tokens after the last new one.
    pub const NEXT: &str = "next_token";
}

/// Writes down the forward graph of a model, in any form: what an architecture is.
pub type ModelBuilder = fn(&ModelConfig, Form) -> Result<Graph, TypeError>;

/// The forward graph of a model over one micro-batch of `batch` sequences of `seq` tokens: its loss.
pub fn build(model: &ModelConfig, batch: usize, seq: usize) -> Result<Graph, TypeError> {
    build_form(model, Form::Loss { batch, seq, context: seq, documents: false })
}

/// The forward graph of a model in any form.
pub fn build_form(model: &ModelConfig, form: Form) -> Result<Graph, TypeError> {
    architectures::builder(model.architecture)(model, form)
}
