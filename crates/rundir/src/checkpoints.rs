//! The checkpoints of a run, for whoever looks for one.

use crate::{Result, RunDirError};
use lockstep_checkpoint::{list, looks_whole};
use lockstep_telemetry::each_line;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// One checkpoint of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CheckpointSummary {
    /// Steps finished.
    pub step: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// When it was saved, in seconds since 1970; none where nothing tells.
    pub unix_s: Option<f64>,
    /// Validation loss after its step, in nats per token, where one was taken.
    pub val_loss: Option<f64>,
    /// Whether all of its files are there, in their length; their contents are not read.
    pub whole: bool,
    /// Its folder.
    pub path: PathBuf,
}

/// The checkpoints of a run directory, by ascending step.
pub fn checkpoints(run: &Path) -> Result<Vec<CheckpointSummary>> {
    let folder = run.join("checkpoints");
    if !folder.exists() && !run.join("run.toml").exists() {
        return Err(RunDirError::NotTrained { path: run.to_owned() });
    }
    let (metrics, events) = (lines(&run.join("metrics.jsonl"))?, lines(&run.join("events.jsonl"))?);
    // The last line about a step counts: a run may have done it twice.
    let told = |lines: &[Value], step: u64, field: &str, event: Option<&str>| {
        let about = |v: &&Value| v["step"] == step && event.is_none_or(|event| v["event"] == event);
        lines.iter().rev().filter(about).find_map(|v| v[field].as_f64())
    };
    let summary = |(step, path): (u64, PathBuf)| CheckpointSummary {
        step,
        bytes: bytes(&path),
        unix_s: told(&events, step, "unix_s", Some("checkpoint")).or_else(|| modified(&path)),
        val_loss: told(&metrics, step, "val_loss", None)
            .or_else(|| told(&events, step, "val_loss", Some("validation"))),
        whole: looks_whole(&path),
        path,
    };
    Ok(list(&folder)?.into_iter().map(summary).collect())
}

/// The objects of a file of lines of a run directory, such as `events.jsonl`; none where there is no such file.
pub fn lines<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<Vec<T>> {
    let mut found = Vec::new();
    match each_line(path, &mut |line| found.extend(serde_json::from_slice(line).ok())) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(RunDirError::io("read", path, error)),
        _ => Ok(found),
    }
}

fn bytes(folder: &Path) -> u64 {
    let entries = folder.read_dir().into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).filter(|m| m.is_file()).map(|m| m.len()).sum()
}

fn modified(folder: &Path) -> Option<f64> {
    let time = folder.join("manifest.json").metadata().and_then(|m| m.modified()).ok()?;
    time.duration_since(UNIX_EPOCH).ok().map(|since| since.as_secs_f64())
}
