//! What a checkpoint knows of a run besides its tensors.

use crate::StepMetrics;
use crate::loss_scale::LossScale;
use crate::noise::{Noise, NoiseBits};
use crate::spikes::{RollBack, Spikes};
use lockstep_checkpoint::Loaded;
use lockstep_config::Config;
use serde_json::Value;

/// What a run has come to so far, besides its tensors.
pub(super) struct RunStatus {
    /// Steps that changed parameters: those with gradients that are not finite do not. Of a step that is queued it is not known
    /// yet, and counted as if it did.
    pub(super) updates: u64,
    /// The line of the last step, where its validation was interrupted.
    pub(super) pending: Option<StepMetrics>,
    pub(super) noise: Noise,
    /// In fp16.
    pub(super) loss_scale: Option<LossScale>,
    pub(super) spikes: Spikes,
    /// Step and validation loss of the best checkpoint.
    pub(super) best: Option<(u64, f64)>,
}

impl RunStatus {
    /// That of a run which goes on from a checkpoint, or which begins, after these roll-backs.
    pub(super) fn of(checkpoint: Option<&Loaded>, config: &Config, roll_backs: Vec<RollBack>) -> Self {
        let mut loss_scale = LossScale::new(config);
        let Some(Loaded { step, state, .. }) = checkpoint else {
            let (noise, spikes) = (Noise::default(), Spikes::of(&Value::Null, roll_backs));
            return Self { updates: 0, pending: None, noise, loss_scale, spikes, best: None };
        };
        if loss_scale.is_some() {
            // A checkpoint of a run in another precision has none.
            let saved: Option<LossScale> = serde_json::from_value(state["loss_scale"].clone()).unwrap_or(None);
            loss_scale = saved.or(loss_scale);
        }
        Self {
            updates: state["updates"].as_u64().unwrap_or(*step),
            pending: serde_json::from_value(state["pending_metrics"].clone()).unwrap_or(None),
            // A checkpoint of a run that did not measure has none.
            noise: serde_json::from_value(state["noise"].clone()).map_or(Noise::default(), NoiseBits::into),
            loss_scale,
            spikes: Spikes::of(state, roll_backs),
            best: serde_json::from_value(state["best"].clone()).unwrap_or(None),
        }
    }
}
