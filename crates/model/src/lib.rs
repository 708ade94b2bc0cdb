//! Architectures as graph builders.
//!
//! An architecture is one file that writes down its forward pass with global shapes. It holds no gradient, no parallel
//! code and no memory management: passes derive those. Parameters carry the names that Hugging Face checkpoints use.
#![forbid(unsafe_code)]

mod decoder;
mod form;
mod gpt2;
pub mod hf;
mod llama;
mod mistral;
pub mod parameters;
mod qwen2;
mod qwen3;

pub use form::{Form, Side};

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
    /// The logits, where a pass has not fused them away. In generation an output: those after the last new token.
    pub const LOGITS: &str = "logits";
}

/// The forward graph of a model over one micro-batch of `batch` sequences of `seq` tokens: its loss.
pub fn build(model: &ModelConfig, batch: usize, seq: usize) -> Result<Graph, TypeError> {
    build_form(model, Form::Loss { batch, seq, context: seq, documents: false })
}

/// The forward graph of a model in any form.
pub fn build_form(model: &ModelConfig, form: Form) -> Result<Graph, TypeError> {
    match model.architecture.as_str() {
        "gpt2" => gpt2::build(model, form),
        "qwen2" => qwen2::QWEN2.build(model, form),
        "qwen3" => qwen3::QWEN3.build(model, form),
        "mistral" => mistral::MISTRAL.build(model, form),
        _ => llama::LLAMA.build(model, form),
    }
}

/// Whether Hugging Face checkpoints of the model hold this matrix as [in, out], where the graph's is [out, in].
pub fn hf_transposed(model: &ModelConfig, name: &str) -> bool {
    model.architecture == "gpt2" && gpt2::transposed(name)
}
