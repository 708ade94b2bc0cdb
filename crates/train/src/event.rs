use crate::Plan;
use lockstep_exec::Note;
use serde::{Deserialize, Deserializer, Serialize};
use std::path::Path;

/// What one step gave: a line of `metrics.jsonl`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Steps finished, this one included.
    pub step: u64,
    /// Tokens seen, this step's included.
    pub tokens: u64,
    /// Mean loss per token of the global batch, in nats; null where it is not finite.
    #[serde(deserialize_with = "number_or_nan")]
    pub loss: f64,
    /// Norm of the mean gradient, before clipping; null where it is not finite.
    #[serde(deserialize_with = "number_or_nan")]
    pub grad_norm: f32,
    /// Learning rate.
    pub lr: f64,
    /// Seconds.
    pub step_s: f64,
    /// Tokens per second.
    pub tokens_per_s: f64,
    /// Model FLOPs per second as a share of the device's matmul ceiling.
    pub mfu: f64,
    /// Bytes of the arena.
    pub arena_bytes: u64,
    /// Loss scale of this step, in fp16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Gradient noise scale, in sequences, where it is asked for and known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub noise_scale: Option<f64>,
    /// The same in tokens: the size of steps above which more tokens help little.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub critical_batch_tokens: Option<f64>,
    /// Mean held-out loss per token, in nats, where it was taken after this step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub val_loss: Option<f64>,
}

/// JSON has no NaN: it is written as null.
fn number_or_nan<'de, D: Deserializer<'de>, T: Deserialize<'de> + From<f32>>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_else(|| T::from(f32::NAN)))
}

/// What happens in a run, for whoever shows it.
#[derive(Debug)]
pub enum Event<'a> {
    /// Text is being packed.
    Preparing(lockstep_data::Progress),
    /// Prepared data are being read to see that they are what was prepared.
    Checking {
        /// Bytes read.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// Something is off but the run goes on.
    Warning(&'a str),
    /// What the executor says of the program that it has loaded.
    Note(&'a Note),
    /// A new run has the weights that the config names.
    Initialised {
        /// Where they came from.
        from: &'a Path,
    },
    /// The program is loaded and the first step is next.
    Started {
        /// The program and its account.
        plan: &'a Plan,
        /// FLOP per second of the device's matmul ceiling.
        ceiling: f64,
        /// Training tokens that the data hold.
        train_tokens: u64,
        /// Step that the run resumes from; 0 for a new run.
        from_step: u64,
        /// Where the run's files are.
        dir: &'a Path,
    },
    /// A held-out loss was taken.
    Validated {
        /// Steps finished.
        step: u64,
        /// Mean loss per token, in nats.
        loss: f64,
    },
    /// A step is done.
    Stepped(&'a StepMetrics),
    /// A step's gradient was not finite and its update was left out.
    Skipped {
        /// The step.
        step: u64,
    },
    /// A checkpoint is being written.
    Saving {
        /// Bytes written.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// A checkpoint is on disk.
    Saved {
        /// Steps finished.
        step: u64,
        /// Where.
        path: &'a Path,
    },
}
