//! What a sink is, and what it is told.

use serde_json::Value;
use std::io;
use std::path::{Path, PathBuf};

/// Something that takes lines of metrics.
pub(crate) trait Sink: Send {
    /// Adds a line.
    fn write(&mut self, line: &str) -> io::Result<()>;

    /// Hears of an event of the run: a checkpoint, a spike, another world.
    fn event(&mut self, _line: &str) -> io::Result<()> {
        Ok(())
    }

    /// Whether it stays open when metrics are cut back to an earlier step: what it was given cannot be taken back.
    fn stays(&self) -> bool {
        false
    }

    /// What the user should hear, each once.
    fn notes(&mut self) -> Vec<String> {
        Vec::new()
    }

    /// The run ends here, or this part of it. Gives what the user should hear.
    fn end(&mut self, _how: RunEnd) -> Option<String> {
        None
    }
}

/// How a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEnd {
    /// All steps are done.
    Finished,
    /// It was asked to stop, and can go on.
    Interrupted,
    /// Something went wrong.
    Failed,
    /// It goes on at once, with other ranks.
    Continues,
}

/// What sinks know of the run.
#[derive(Clone, Debug, Default)]
pub struct SinkRun {
    /// The folder of the run.
    pub dir: PathBuf,
    /// The resolved config.
    pub config: String,
    /// This start: versions, hosts, device.
    pub start: Value,
    /// Where they send to.
    pub to: SinkAddress,
}

/// Where sinks send to, as the config says; the environment names the rest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SinkAddress {
    /// The address of a tracking server.
    pub server: Option<String>,
    /// The experiment or project that the run is part of.
    pub experiment: Option<String>,
}

/// Why a sink cannot be used at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SinkProblem {
    /// No tracking server is named.
    NoServer,
    /// What is named is no address of one.
    BadServer(String),
    /// The certificates of the server cannot be read.
    Certificates(String),
    /// Python does not start.
    NoPython(String),
    /// Python has no such module, or cannot load it.
    NoModule(String),
}

/// What a sink is opened with.
pub(crate) struct Opening<'a> {
    /// Its file or folder.
    pub(crate) place: PathBuf,
    /// `metrics.jsonl`, which has lines up to `step`.
    pub(crate) metrics: &'a Path,
    /// The step after which the run goes on.
    pub(crate) step: u64,
    pub(crate) run: &'a SinkRun,
}

impl SinkRun {
    /// The name of the run.
    pub(crate) fn name(&self) -> String {
        let dir = std::path::absolute(&self.dir).unwrap_or_else(|_| self.dir.clone());
        dir.file_name().map_or_else(|| "run".into(), |name| name.to_string_lossy().into_owned())
    }

    /// The keys of the config with their values, as text.
    pub(crate) fn parameters(&self) -> Vec<(String, String)> {
        let mut all = Vec::new();
        for (table, keys) in self.config.parse::<toml::Table>().unwrap_or_default() {
            for (key, value) in keys.as_table().cloned().unwrap_or_default() {
                let text = match value {
                    toml::Value::String(text) if !text.is_empty() => text,
                    value => value.to_string(),
                };
                all.push((format!("{table}.{key}"), text));
            }
        }
        all
    }
}
