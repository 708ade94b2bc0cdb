//! A run directory: the resolved config, the plan, metrics, events, prepared data and checkpoints.

use crate::{Plan, StepMetrics, TrainError};
use serde::Serialize;
use serde_json::{Value, json};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// An open run directory, locked against other processes.
pub struct RunDir {
    path: PathBuf,
    metrics: Option<File>,
    events: Option<File>,
    _lock: File,
}

/// Files and folders of a run.
const OURS: [&str; 6] = [CONFIG, PLAN, METRICS, EVENTS, "data", "checkpoints"];

/// A run that was moved out of the way.
pub struct Aside {
    from: PathBuf,
    to: PathBuf,
}

impl Aside {
    /// Moves it back over what a failed start has made since. Best effort: whatever cannot be moved stays where it is.
    pub fn undo(self) {
        for name in OURS.iter().filter(|name| self.to.join(name).exists()) {
            let place = self.from.join(name);
            let _ = if place.is_dir() { fs::remove_dir_all(&place) } else { fs::remove_file(&place) };
            let _ = fs::rename(self.to.join(name), place);
        }
        let _ = fs::remove_dir(&self.to);
    }
}

const PLAN: &str = "plan.json";
const CONFIG: &str = "run.toml";
const METRICS: &str = "metrics.jsonl";
const EVENTS: &str = "events.jsonl";
const LOCK: &str = ".lock";

impl RunDir {
    /// Opens or makes a run directory.
    pub fn open(path: &Path) -> Result<Self, TrainError> {
        fs::create_dir_all(path).map_err(|e| TrainError::io("create", path, e))?;
        let lock_path = path.join(LOCK);
        let lock = File::create(&lock_path).map_err(|e| TrainError::io("create", &lock_path, e))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(TrainError::Locked { dir: path.to_owned() }),
            Err(TryLockError::Error(e)) => return Err(TrainError::io("lock", &lock_path, e)),
        }
        Ok(Self { path: path.to_owned(), metrics: None, events: None, _lock: lock })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Folder of checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    /// Moves a run that is here (our own files, nothing else) into a folder `old-1`, `old-2` … inside.
    pub fn set_aside(&self) -> Result<Aside, TrainError> {
        let ours = OURS.map(|name| self.path.join(name));
        let moved: Vec<PathBuf> = ours.into_iter().filter(|p| p.exists()).collect();
        let free = (1..).map(|n| self.path.join(format!("old-{n}"))).find(|p| !p.exists());
        let aside = Aside { from: self.path.clone(), to: free.unwrap_or_else(|| self.path.join("old")) };
        if moved.is_empty() {
            return Ok(aside);
        }
        fs::create_dir(&aside.to).map_err(|e| TrainError::io("create", &aside.to, e))?;
        for from in moved {
            let name = from.file_name().unwrap_or_default();
            fs::rename(&from, aside.to.join(name)).map_err(|e| TrainError::io("move", &from, e))?;
        }
        Ok(aside)
    }

    /// Writes `run.toml` and `plan.json`, cuts `metrics.jsonl` back to `step`, and opens the logs.
    pub fn begin(&mut self, resolved: &str, plan: &Plan, step: u64) -> Result<(), TrainError> {
        self.replace(CONFIG, resolved.as_bytes())?;
        let summary = json!({
            "lockstep": env!("CARGO_PKG_VERSION"),
            "program": format!("{:016x}", plan.program().fingerprint()),
            "device": plan.device,
            "parameters": plan.parameters,
            "tokens_per_step": plan.tokens_per_step,
            "model_flops_per_token": plan.model_flops_per_token(),
            "memory": plan.memory,
        });
        self.replace(PLAN, format!("{summary:#}\n").as_bytes())?;
        let metrics = self.path.join(METRICS);
        if metrics.exists() {
            let text = fs::read(&metrics).map_err(|e| TrainError::io("read", &metrics, e))?;
            self.replace(METRICS, &lines_up_to(&text, step))?;
        }
        let events = self.path.join(EVENTS);
        if events.exists() {
            let mut text = fs::read(&events).map_err(|e| TrainError::io("read", &events, e))?;
            // A torn last line is dropped.
            text.truncate(text.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1));
            self.replace(EVENTS, &text)?;
        }
        let append = |name: &str| {
            let path = self.path.join(name);
            OpenOptions::new().create(true).append(true).open(&path).map_err(|e| TrainError::io("open", &path, e))
        };
        (self.metrics, self.events) = (Some(append(METRICS)?), Some(append(EVENTS)?));
        Ok(())
    }

    /// Adds a line to `metrics.jsonl`.
    pub fn metric(&mut self, metrics: &StepMetrics) -> Result<(), TrainError> {
        append(&self.path, METRICS, &mut self.metrics, metrics)
    }

    /// Adds a line to `events.jsonl`, with the time.
    pub fn event(&mut self, kind: &str, mut fields: Value) -> Result<(), TrainError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
        fields["event"] = json!(kind);
        fields["unix_s"] = json!((now * 1e3).round() / 1e3);
        append(&self.path, EVENTS, &mut self.events, &fields)
    }

    /// Writes a file so that it is either the old or the new one, never half.
    fn replace(&self, name: &str, data: &[u8]) -> Result<(), TrainError> {
        let path = self.path.join(name);
        let temporary = self.path.join(format!(".{name}.new"));
        let write = || {
            let mut file = File::create(&temporary)?;
            file.write_all(data)?;
            file.sync_all()?;
            fs::rename(&temporary, &path)
        };
        write().map_err(|e| {
            // The old file is still in place; a half-written new one is of no use.
            let _ = fs::remove_file(&temporary);
            TrainError::io("write", &path, e)
        })
    }
}

fn append(dir: &Path, name: &str, file: &mut Option<File>, line: &impl Serialize) -> Result<(), TrainError> {
    let Some(file) = file else { return Ok(()) };
    let mut text = serde_json::to_string(line).map_err(|e| TrainError::io("write", &dir.join(name), e.into()))?;
    text.push('\n');
    file.write_all(text.as_bytes()).map_err(|e| TrainError::io("write", &dir.join(name), e))
}

/// The whole lines of a metrics file that are about steps up to `step`: later ones will be made again, and a torn last line
/// is dropped.
fn lines_up_to(text: &[u8], step: u64) -> Vec<u8> {
    let whole = text.split_inclusive(|b| *b == b'\n').filter(|line| line.ends_with(b"\n"));
    let kept = whole.filter(|line| {
        let value: Option<Value> = serde_json::from_slice(line).ok();
        value.and_then(|v| v["step"].as_u64()).is_some_and(|s| s <= step)
    });
    kept.flatten().copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_cut_back_to_the_step_that_a_run_resumes_from() {
        let text = b"{\"step\":1}\n{\"step\":2}\nnonsense\n{\"step\":3}\n{\"step\":2";
        assert_eq!(lines_up_to(text, 2), b"{\"step\":1}\n{\"step\":2}\n");
    }
}
