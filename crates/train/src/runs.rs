//! The runs of a folder, for whoever looks for one.

use crate::TrainError;
use crate::provenance::tail;
use lockstep_config::Config;
use serde::Serialize;
use serde_json::Value;
use std::fs::{File, TryLockError};
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
    /// Tokens per second, the median of the last steps.
    pub tokens_per_s: Option<f64>,
    /// When its last event was, in seconds since 1970.
    pub unix_s: Option<f64>,
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
pub fn runs(dir: &Path) -> Result<Vec<RunSummary>, TrainError> {
    let mut found = Vec::new();
    look(dir, DEPTH, &mut found).map_err(|e| TrainError::io("list", dir, e))?;
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

/// How a run stands, from the ends of its files.
pub fn run_summary(run: &Path) -> RunSummary {
    let [metrics, events] = ["metrics.jsonl", "events.jsonl"].map(|name| tail(&run.join(name)));
    let last = metrics.last();
    let number = |value: Option<&Value>, key: &str| value.and_then(|v| v[key].as_f64());
    let mut speeds: Vec<f64> = metrics.iter().rev().take(32).filter_map(|v| v["tokens_per_s"].as_f64()).collect();
    speeds.sort_by(f64::total_cmp);
    let validated = |v: &&Value| v["val_loss"].is_number();
    let steps = std::fs::read_to_string(run.join("run.toml")).ok();
    let steps = steps.and_then(|text| Config::parse(&text, "run.toml", &[]).ok()).map(|config| config.train.steps);
    let step = last.and_then(|v| v["step"].as_u64()).unwrap_or(0);
    let state = match events.last().and_then(|v| v["event"].as_str()) {
        _ if is_locked(run) => RunState::Running,
        Some("finish") => RunState::Finished,
        Some("interrupt") => RunState::Interrupted,
        _ if step == 0 => RunState::New,
        _ => RunState::Ended,
    };
    RunSummary {
        path: run.to_owned(),
        state,
        step,
        steps,
        loss: number(last, "loss"),
        val_loss: number(metrics.iter().rev().find(validated), "val_loss")
            .or_else(|| number(events.iter().rev().find(validated), "val_loss")),
        tokens_per_s: speeds.get(speeds.len() / 2).copied(),
        unix_s: number(events.last(), "unix_s"),
    }
}

/// Whether a process has a run. Nothing is made or written.
fn is_locked(run: &Path) -> bool {
    let lock = File::open(run.join(".lock"));
    lock.is_ok_and(|lock| matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock)))
}
