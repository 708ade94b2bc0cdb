//! `checkpoint.every = "auto"`: the interval that loses the least time, from what the run has measured or what is predicted.

use crate::{Result, StepMetrics};
use lockstep_config::{Config, SaveEvery};
use lockstep_host::{Devices, predict};
use lockstep_ir::units;
use lockstep_plan::{FailureRate, Plan};
use lockstep_rundir::lines;
use serde_json::Value;
use std::path::Path;

/// The config with the steps between checkpoints that `"auto"` stands for, and a line that says how they were found; none where they
/// were given. Of several processes the first finds them.
pub(crate) fn with_checkpoint_interval(
    devices: &Devices,
    config: &Config,
    plan: &Plan,
    dir: &Path,
) -> Result<Option<(Config, String)>> {
    let SaveEvery::Auto = config.checkpoint.every else { return Ok(None) };
    let (steps, how) = devices.group().told("checkpoint interval", || found(devices, plan, dir))?;
    let line = format!("checkpoint.every = {steps}: {how}");
    Ok(Some((config.with_checkpoint_every(steps, &how), line)))
}

fn found(devices: &Devices, plan: &Plan, dir: &Path) -> Result<(u64, String)> {
    let rate = FailureRate::builtin();
    let nodes = devices.nodes();
    let (step_s, step_by) = match (measured_step(dir), predict(devices, plan)) {
        (Some(seconds), _) => (seconds, "measured"),
        (None, Ok(Some(prediction))) => (prediction.forecast.step_s, "predicted"),
        // Half of the peak is as much as most steps reach.
        (None, Ok(None) | Err(_)) => (
            2.0 * plan.step_flops.hardware as f64 / devices.matmul_peak(plan)?.flops_per_s,
            "estimated at half of the matmul peak",
        ),
    };
    let bytes = plan.checkpoint_bytes();
    let (save_s, save_by) = match measured_save(dir) {
        Some(seconds) => (seconds, "measured"),
        None => (rate.save_s(bytes, nodes), "predicted"),
    };
    let interval = rate.interval(nodes, save_s);
    let (steps, lost) = interval.steps(step_s);
    let [work, step, save] = [steps as f64 * step_s, step_s, save_s].map(units::seconds);
    let (days, plural, lost) = (interval.mtbf_s / 86_400.0, if nodes == 1 { "" } else { "s" }, 100.0 * lost);
    let how = format!(
        "{work} of work, with steps of {step} ({step_by}), saves of {save} ({save_by}) and a failure in {days:.0} days of {nodes} \
         node{plural} (published); {lost:.2}% of the time lost"
    );
    Ok((steps, how))
}

/// Seconds of a step of the run so far, in the median of the last hundred; none where it has taken none.
fn measured_step(dir: &Path) -> Option<f64> {
    let steps: Vec<StepMetrics> = lines(&dir.join("metrics.jsonl")).unwrap_or_default();
    median(steps.iter().rev().filter(|m| m.step > 1).map(|m| m.step_s).take(100).collect())
}

/// Seconds that steps waited for a save of the run so far, in the median; none where none was timed.
fn measured_save(dir: &Path) -> Option<f64> {
    let events: Vec<Value> = lines(&dir.join("events.jsonl")).unwrap_or_default();
    let save = |event: &Value| (event["event"] == "checkpoint").then(|| event["stall_s"].as_f64())?;
    median(events.iter().rev().filter_map(save).take(20).collect())
}

fn median(mut seconds: Vec<f64>) -> Option<f64> {
    seconds.retain(|s| s.is_finite() && *s > 0.0);
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied()
}
