//! The runs of a folder, for whoever looks for one.

use crate::checkpoints::lines;
use crate::provenance::{RunStart, starts, tail};
use crate::{Result, RunDirError};
use lockstep_config::Config;
use lockstep_telemetry::{each_line, open_file, refuse_special};
use serde::Serialize;
use serde_json::Value;
use std::fs::TryLockError;
use std::path::{Path, PathBuf};

/// One run directory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunSummary {
    /// The run directory.
    pub path: PathBuf,
    /// How it stands.
    pub state: RunState,
    /// Steps done.
    pub step: u64,
    /// Steps of its config; none where that cannot be read.
    pub steps: Option<u64>,
    /// Loss of the last step, in nats per token.
    pub loss: Option<f64>,
    /// Last validation loss, in nats per token.
    pub val_loss: Option<f64>,
    /// All validation losses, in their order.
    pub validations: Vec<Validation>,
    /// Hours that it was worked on: of each start up to the last event, and the steps that were done after that.
    pub hours: f64,
    /// The same times the GPUs that worked on it; none on a CPU.
    pub gpu_hours: Option<f64>,
    /// Tokens per second, the median of the last steps.
    pub tokens_per_s: Option<f64>,
    /// When its last event was, in seconds since 1970.
    pub unix_s: Option<f64>,
}

/// A validation of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Validation {
    /// Steps done.
    pub step: u64,
    /// The loss, in nats per token.
    pub val_loss: f64,
}

impl RunSummary {
    /// The lowest validation loss, the first of equal ones.
    pub fn best_validation(&self) -> Option<&Validation> {
        self.validations.iter().min_by(|a, b| a.val_loss.total_cmp(&b.val_loss))
    }
}

/// How a run stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RunState {
    /// A process has it.
    Running,
    /// All steps are done.
    Finished,
    /// It was asked to stop, and saved.
    Interrupted,
    /// It ended without saying so: it failed or was killed.
    Ended,
    /// It has no step yet.
    New,
}

impl std::fmt::Display for RunState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            RunState::Running => "running",
            RunState::Finished => "finished",
            RunState::Interrupted => "interrupted",
            RunState::Ended => "failed or killed",
            RunState::New => "new",
        })
    }
}

/// How deep run directories are looked for.
const DEPTH: usize = 3;

/// The runs in a folder and in its folders, by name; the folder itself, if it is one.
pub fn runs(dir: &Path) -> Result<Vec<RunSummary>> {
    let mut found = Vec::new();
    look(dir, DEPTH, &mut found).map_err(|e| RunDirError::io("list", dir, e))?;
    found.sort();
    Ok(found.iter().map(|path| run_summary(path)).collect())
}

fn look(dir: &Path, depth: usize, found: &mut Vec<PathBuf>) -> std::io::Result<()> {
    if dir.join("run.toml").exists() && dir.join("events.jsonl").exists() {
        found.push(dir.to_owned());
        return Ok(());
    }
    for entry in dir.read_dir()? {
        let entry = entry?;
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if depth > 0 && !hidden && entry.file_type()?.is_dir() {
            // What cannot be read holds nothing that could be shown.
            let _ = look(&entry.path(), depth - 1, found);
        }
    }
    Ok(())
}

/// How a run stands, from its events and the end of its metrics.
pub fn run_summary(run: &Path) -> RunSummary {
    let metrics = tail(&run.join("metrics.jsonl"));
    let events: Vec<Value> = lines(&run.join("events.jsonl")).unwrap_or_default();
    let last = metrics.last();
    let number = |value: Option<&Value>, key: &str| value.and_then(|v| v[key].as_f64());
    let mut speeds: Vec<f64> = metrics.iter().rev().take(32).filter_map(|v| v["tokens_per_s"].as_f64()).collect();
    speeds.sort_by(f64::total_cmp);
    let validated = |v: &&Value| v["val_loss"].is_number();
    let config = read_config(&run.join("run.toml")).ok();
    let steps = config.as_ref().map(|config| config.train.steps);
    let step = last.and_then(|v| v["step"].as_u64()).unwrap_or(0);
    let state = match events.last().and_then(|v| v["event"].as_str()) {
        _ if is_locked(run) => RunState::Running,
        Some("finish") => RunState::Finished,
        Some("interrupt") => RunState::Interrupted,
        _ if step == 0 => RunState::New,
        _ => RunState::Ended,
    };
    let validation = |v: &Value| Some(Validation { step: v["step"].as_u64()?, val_loss: v["val_loss"].as_f64()? });
    let validations = events.iter().filter(|v| v["event"] == "validation").filter_map(validation).collect();
    let mut pace: Vec<f64> = metrics.iter().rev().take(32).filter_map(|v| v["step_s"].as_f64()).collect();
    pace.sort_by(f64::total_cmp);
    let hours = hours(&events, step, pace.get(pace.len() / 2).copied().unwrap_or(0.0));
    let start = starts(run).unwrap_or_default().pop();
    // Ranks that are threads share a device.
    let ranks = |start: &RunStart| match start.world {
        Some(_) => config.as_ref().and_then(Config::ranks),
        None => Some(1),
    };
    let gpus = start.filter(|start| !start.device.starts_with("cpu")).and_then(|start| ranks(&start));
    RunSummary {
        path: run.to_owned(),
        state,
        step,
        steps,
        loss: number(last, "loss"),
        val_loss: number(metrics.iter().rev().find(validated), "val_loss")
            .or_else(|| number(events.iter().rev().find(validated), "val_loss")),
        validations,
        hours,
        gpu_hours: gpus.map(|gpus| gpus as f64 * hours),
        tokens_per_s: speeds.get(speeds.len() / 2).copied(),
        unix_s: number(events.last(), "unix_s"),
    }
}

/// Hours from every start to the last event before the next one, and of the steps of `pace` seconds after the last event.
fn hours(events: &[Value], step: u64, pace: f64) -> f64 {
    let (mut seconds, mut before) = (0.0, None);
    for event in events {
        let at = event["unix_s"].as_f64();
        if let (Some(before), Some(at), false) = (before, at, event["event"] == "start") {
            seconds += f64::max(at - before, 0.0);
        }
        before = at.or(before);
    }
    let told = events.iter().rev().find_map(|event| event["step"].as_u64()).unwrap_or(0);
    (seconds + step.saturating_sub(told) as f64 * pace) / 3600.0
}

/// The largest number that the metrics and events of a run have under a key; nothing where they have none.
pub fn largest_recorded(run: &Path, key: &str) -> Option<f64> {
    let (name, mut largest) = (format!("\"{key}\":"), None);
    let mut look = |line: &[u8]| {
        // Most lines have nothing to parse.
        if str::from_utf8(line).is_ok_and(|line| line.contains(&name)) {
            let value: Value = serde_json::from_slice(line).unwrap_or_default();
            let found = value[key].as_f64().into_iter().chain(largest);
            largest = found.reduce(f64::max);
        }
    };
    for file in ["metrics.jsonl", "events.jsonl"] {
        // A file that is not there has no number.
        let _ = each_line(&run.join(file), &mut look);
    }
    largest
}

/// The config of a run directory, at `path`; what is not a regular file is refused.
pub fn read_config(path: &Path) -> Result<Config> {
    refuse_special(path).map_err(|e| RunDirError::io("read", path, e))?;
    Ok(Config::load(path, &[])?)
}

/// Whether a process has a run. Nothing is made or written.
fn is_locked(run: &Path) -> bool {
    let lock = open_file(&run.join(".lock"));
    lock.is_ok_and(|lock| matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_largest_number_is_found_in_metrics_and_events() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(largest_recorded(folder.path(), "energy_kwh"), None);
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write(
            "metrics.jsonl",
            "{\"step\":1,\"energy_kwh\":0.5}\n{\"step\":2}\n{\"step\":3,\"energy_kwh\":0.75}\n{\"ener",
        );
        write("events.jsonl", "{\"event\":\"start\",\"energy_kwh\":null}\n");
        assert_eq!(largest_recorded(folder.path(), "energy_kwh"), Some(0.75));
        write("events.jsonl", "{\"event\":\"start\",\"energy_kwh\":1.5}\n{\"event\":\"x\"}\n");
        assert_eq!(largest_recorded(folder.path(), "energy_kwh"), Some(1.5));
    }

    #[test]
    fn hours_leave_out_the_time_between_two_starts() {
        let event =
            |kind: &str, hour: f64, step: u64| json!({ "event": kind, "unix_s": 1e9 + 3600.0 * hour, "step": step });
        let events = [
            event("start", 0.0, 0),
            event("checkpoint", 1.0, 10),
            event("start", 5.0, 10),
            event("checkpoint", 5.5, 20),
        ];
        // Ten more steps of six minutes.
        assert!((hours(&events, 30, 360.0) - 2.5).abs() < 1e-9);
        assert_eq!(hours(&[], 0, 0.0), 0.0);
    }
}
