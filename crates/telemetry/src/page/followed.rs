//! A run directory as others see it: what it is, how far it is, what has happened.

use crate::{LossComparisons, MetricColumns, each_line, read_file};
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// A run whose files are read as they grow.
pub(crate) struct FollowedRun {
    dir: PathBuf,
    name: String,
    pub(crate) columns: MetricColumns,
    /// Changes whenever there is something new.
    pub(crate) version: u64,
    /// Bytes of `events.jsonl` that were read, and when `run.toml` was written.
    events_read: u64,
    config_written: Option<SystemTime>,
    events: Vec<Value>,
    config: Map<String, Value>,
    plan: Value,
}

/// Most events that are shown; the latest.
const MOST_EVENTS: usize = 1000;

impl FollowedRun {
    pub(crate) fn new(dir: &Path, name: String) -> Self {
        let mut run = Self {
            dir: dir.to_owned(),
            name,
            columns: MetricColumns::default(),
            version: 0,
            events_read: 0,
            config_written: None,
            events: Vec::new(),
            config: Map::new(),
            plan: Value::Null,
        };
        run.follow();
        run
    }

    /// Reads what is new. What cannot be read now is read later.
    pub(crate) fn follow(&mut self) {
        let mut changed = self.columns.follow(&self.dir.join("metrics.jsonl")).unwrap_or(false);
        let events = self.dir.join("events.jsonl");
        let length = fs::metadata(&events).map_or(0, |file| file.len());
        if length != self.events_read {
            self.events_read = length;
            self.events = shown_events(&events);
            changed = true;
        }
        let config = self.dir.join("run.toml");
        let written = fs::metadata(&config).and_then(|file| file.modified()).ok();
        if written != self.config_written {
            self.config_written = written;
            let config = read_file(&config).unwrap_or_default();
            self.config = flattened(&String::from_utf8_lossy(&config));
            let plan = read_file(&self.dir.join("plan.json")).unwrap_or_default();
            self.plan = serde_json::from_slice(&plan).unwrap_or(Value::Null);
            changed = true;
        }
        self.version += u64::from(changed);
    }

    /// The last step, 0 before the first.
    pub(crate) fn last_step(&self) -> f64 {
        self.columns.get("step").and_then(<[f64]>::last).copied().unwrap_or(0.0)
    }

    /// The first step that has a line.
    pub(crate) fn first_step(&self) -> f64 {
        self.columns.get("step").and_then(<[f64]>::first).copied().unwrap_or(0.0)
    }

    /// What of it is small and changes at every step.
    pub(crate) fn status(&self) -> Value {
        let last: Map<String, Value> = self
            .columns
            .keys()
            .filter_map(|key| {
                // The last that there is: validation losses are not in every line.
                let value = self.columns.get(key)?.iter().rev().find(|value| value.is_finite())?;
                Some((key.to_owned(), json!(value)))
            })
            .collect();
        let compared = LossComparisons::of(&self.columns).map(|all| {
            let last = all.differences.last().map(|(_, share)| share);
            json!({ "count": all.count, "not_finite": all.not_finite, "difference": last })
        });
        let modified = fs::metadata(self.dir.join("metrics.jsonl")).and_then(|file| file.modified()).ok();
        let age = modified.and_then(|at| SystemTime::now().duration_since(at).ok()).map(|age| age.as_secs_f64());
        json!({
            "name": self.name,
            "version": self.version,
            "first_step": self.first_step(),
            "last_step": self.last_step(),
            "last": last,
            "fp8_compared": compared,
            "age_s": age,
            "ended": self.events.last().map(|event| &event["event"]).filter(|kind| *kind == "finish" || *kind == "interrupt"),
        })
    }

    /// All of it but the numbers.
    pub(crate) fn description(&self) -> Value {
        json!({
            "name": self.name,
            "dir": self.dir.display().to_string(),
            "keys": self.columns.keys().collect::<Vec<_>>(),
            "config": self.config,
            "plan": self.plan,
            "events": self.events,
        })
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

/// The latest events; none of a file that cannot be read. Validations are in the metrics.
fn shown_events(path: &Path) -> Vec<Value> {
    let mut events = VecDeque::new();
    let _ = each_line(path, &mut |line| {
        let value = serde_json::from_slice::<Value>(line).ok();
        if let Some(value) = value.filter(|value| value.is_object() && value["event"] != "validation") {
            events.push_back(value);
            events.drain(..events.len().saturating_sub(MOST_EVENTS));
        }
    });
    events.into()
}

/// The keys of a resolved config with their values as they are written, without where they came from, by `table.key`.
fn flattened(text: &str) -> Map<String, Value> {
    let mut all = Map::new();
    let Ok(tables) = text.parse::<toml::Table>() else { return all };
    for (table, keys) in tables {
        match keys {
            toml::Value::Table(keys) => {
                all.extend(keys.into_iter().map(|(key, value)| (format!("{table}.{key}"), json!(value.to_string()))));
            }
            value => {
                all.insert(table, json!(value.to_string()));
            }
        }
    }
    all
}
