//! What a step gave, as `metrics.jsonl` has it.

use crate::energy::EnergyMetrics;
use crate::fp8::Fp8Metrics;
use crate::loads::ExpertMetrics;
use lockstep_cuda::Telemetry;
use lockstep_infer::TaskScores;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;

/// What one step gave: a line of `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Steps finished, this one included.
    pub step: u64,
    /// Tokens seen, this step's included.
    pub tokens: u64,
    /// Mean loss per token of the global batch, in nats; null where it is not finite.
    #[serde(deserialize_with = "number_or_nan")]
    pub loss: f64,
    /// With `model.mtp_depth`, the mean loss of the modules that predict further tokens, in nats per token of the global batch, before it is
    /// weighted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtp_loss: Option<f64>,
    /// Norm of the mean gradient, before clipping; null where it is not finite.
    #[serde(deserialize_with = "number_or_nan")]
    pub grad_norm: f32,
    /// Learning rate.
    pub lr: f64,
    /// Seconds.
    pub step_s: f64,
    /// Seconds of it in which the step waited for its samples to be read.
    #[serde(default)]
    pub data_wait_s: f64,
    /// Tokens per second.
    pub tokens_per_s: f64,
    /// Model FLOPs per second as a share of the peak that the run names at its start.
    pub mfu: f64,
    /// Bytes of the arena.
    pub arena_bytes: u64,
    /// Where ranks are processes, and at most [`RANKS_LISTED`](Self::RANKS_LISTED): seconds that each computed, without those in
    /// which it waited for others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rank_busy_s: Vec<f64>,
    /// The rank that computed longest, where ranks are processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slowest_rank: Option<usize>,
    /// Of an elastic run (`cluster.elastic`): seconds of steps that counted, as a share of all seconds since this rank began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goodput: Option<f64>,
    /// What the GPU did, where one trains.
    #[serde(flatten)]
    pub gpu: GpuMetrics,
    /// What steps took of all GPUs and hosts, where they were read after this one.
    #[serde(flatten)]
    pub energy: EnergyMetrics,
    /// 1 where its update was skipped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<u8>,
    /// Rows of tokens that found no place with their experts, in the step or in the validation after it, where there were any:
    /// `parallel.ep_bound` is too low.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows_beyond: Option<u64>,
    /// The largest loss with which its update was to be applied, with `spikes.skip` and once enough steps are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_limit: Option<f32>,
    /// The same of the gradient norm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grad_norm_limit: Option<f32>,
    /// Loss scale of this step, in fp16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Gradient noise scale, in sequences, where it is asked for and known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub noise_scale: Option<f64>,
    /// The same in tokens: the size of steps above which more tokens help little.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub critical_batch_tokens: Option<f64>,
    /// What experts got, in a model that has some.
    #[serde(flatten)]
    pub experts: ExpertMetrics,
    /// The losses in bf16 and in fp8, where they were compared before this step.
    #[serde(flatten)]
    pub shadow: ShadowMetrics,
    /// What rounding lost, in fp8.
    #[serde(flatten)]
    pub fp8: Fp8Metrics,
    /// Mean validation loss per token, in nats, where it was taken after this step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub val_loss: Option<f64>,
    /// Scores of `eval.tasks` by name, where they were taken after this step.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tasks: BTreeMap<String, TaskScores>,
}

impl StepMetrics {
    /// Most ranks whose times are in a line: those of thousands would be larger than everything else.
    pub const RANKS_LISTED: usize = 64;
}

/// The mean losses per token of a step's first micro-batch, in nats, by the weights before its update; null where they are
/// not finite. Nothing where experts had too little room for the micro-batch (`parallel.ep_bound`): that says nothing of fp8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ShadowMetrics {
    /// In bf16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadow_loss_bf16: Option<f64>,
    /// In fp8, as the step computes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadow_loss_fp8: Option<f64>,
    /// Their difference as a share of the loss in bf16: above 0 where fp8 has the larger loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadow_difference: Option<f64>,
}

impl ShadowMetrics {
    /// Of these losses.
    pub(crate) fn of(bf16: f64, fp8: f64) -> Self {
        Self {
            shadow_loss_bf16: Some(bf16),
            shadow_loss_fp8: Some(fp8),
            shadow_difference: Some((fp8 - bf16) / bf16).filter(|share| share.is_finite()),
        }
    }
}

/// What a GPU did at most a second before a step was done, as far as it tells; nothing on a CPU or without NVML.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuMetrics {
    /// Bytes of its memory in use, by all programs and the driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_memory_bytes: Option<u64>,
    /// Watts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_power_w: Option<f64>,
    /// Degrees Celsius.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_temperature_c: Option<u32>,
    /// Clock of its multiprocessors, in MHz.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_sm_clock_mhz: Option<u32>,
    /// Share of the last moments in which a kernel ran, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_utilisation_percent: Option<u32>,
}

impl From<Telemetry> for GpuMetrics {
    fn from(t: Telemetry) -> Self {
        Self {
            gpu_memory_bytes: t.used_bytes,
            gpu_power_w: t.power_w,
            gpu_temperature_c: t.temperature_c,
            gpu_sm_clock_mhz: t.clock_mhz,
            gpu_utilisation_percent: t.utilisation_percent,
        }
    }
}

/// JSON has no NaN: it is written as null.
pub(crate) fn number_or_nan<'de, D: Deserializer<'de>, T: Deserialize<'de> + From<f32>>(
    from: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_else(|| T::from(f32::NAN)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_that_are_not_finite_have_no_difference() {
        let text = |bf16, fp8| serde_json::to_string(&ShadowMetrics::of(bf16, fp8)).unwrap();
        assert_eq!(text(2.0, 1.5), r#"{"shadow_loss_bf16":2.0,"shadow_loss_fp8":1.5,"shadow_difference":-0.25}"#);
        assert_eq!(text(2.0, f64::NAN), r#"{"shadow_loss_bf16":2.0,"shadow_loss_fp8":null}"#);
        // A step of prompts alone.
        assert_eq!(text(0.0, 0.0), r#"{"shadow_loss_bf16":0.0,"shadow_loss_fp8":0.0}"#);
    }

    const LINE: &str = r#"{"step":3,"tokens":96,"loss":5.5,"grad_norm":null,"lr":0.001,"step_s":0.5,"data_wait_s":0.0,"tokens_per_s":64.0,"mfu":0.25,"arena_bytes":1024"#;

    #[test]
    fn a_line_has_what_a_gpu_tells_and_nothing_else_of_it() {
        let plain = format!("{LINE}}}");
        let line: StepMetrics = serde_json::from_str(&plain).unwrap();
        assert!(line.grad_norm.is_nan() && line.gpu == GpuMetrics::default());
        assert_eq!(serde_json::to_string(&line).unwrap(), plain);
        let told = Telemetry { used_bytes: Some(5 << 30), power_w: Some(690.5), ..Telemetry::default() };
        let line = StepMetrics { gpu: told.into(), ..line };
        let text = serde_json::to_string(&line).unwrap();
        assert_eq!(text, format!("{LINE},\"gpu_memory_bytes\":5368709120,\"gpu_power_w\":690.5}}"));
        assert_eq!(serde_json::from_str::<StepMetrics>(&text).unwrap().gpu, line.gpu);
    }
}
