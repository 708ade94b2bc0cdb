//! What a run was started with: a line of `starts.jsonl` for every start, and the config file as it was given.

use crate::checkpoints::lines;
use crate::{Changed, Result};
use lockstep_telemetry::open_file;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// A line per start.
pub(crate) const STARTS: &str = "starts.jsonl";
/// The config file as it was given last.
pub(crate) const GIVEN: &str = "given.toml";

/// What a binary was built from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Build {
    /// Of Lockstep.
    pub version: String,
    /// The commit of its sources, where they were in a repository.
    pub commit: Option<String>,
    /// Whether they had changes that were not committed.
    pub dirty: Option<bool>,
    /// The build profile and the target.
    pub profile: String,
    /// The compiler.
    pub rustc: String,
}

/// What a run took from the Hugging Face Hub, or from its local cache.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakenFromHub {
    /// The repository, `hf:org/name`.
    pub name: String,
    /// The commit.
    pub revision: String,
    /// Checksums of its files: `sha256:…`, or `git-sha1:…` for small ones; empty where the cache does not tell.
    pub files: BTreeMap<String, String>,
}

/// Who starts a run, as far as the run cannot know by itself.
#[derive(Clone, Debug, Default)]
pub struct StartedBy {
    /// The binary.
    pub build: Build,
    /// Checksum of the binary's bytes (xxh3, 128 bits).
    pub binary_xxh3: Option<String>,
    /// The command line.
    pub command: Vec<String>,
    /// The text of the config file.
    pub given: Option<String>,
    /// What the names in it were found to be.
    pub hub: Vec<TakenFromHub>,
}

/// One start of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunStart {
    /// When, in seconds since 1970.
    pub unix_s: f64,
    /// Steps that it had done.
    pub step: u64,
    /// Why it was started: a new run, an interrupt before it, a failure.
    pub reason: String,
    /// Keys that have another value from here on.
    #[serde(default)]
    pub changed: Vec<Value>,
    /// The binary.
    pub build: Build,
    /// Checksum of the binary's bytes (xxh3, 128 bits).
    pub binary_xxh3: Option<String>,
    /// The command line.
    pub command: Vec<String>,
    /// The folder in which it was given.
    pub folder: Option<PathBuf>,
    /// Hosts, each once.
    pub hosts: Vec<String>,
    /// What computes.
    pub device: String,
    /// How ranks that are processes talk to each other.
    pub world: Option<String>,
    /// Variables of the Slurm job, if it is one.
    pub slurm: BTreeMap<String, String>,
    /// What it took from the Hugging Face Hub.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hub: Vec<TakenFromHub>,
    /// Fingerprint of the prepared data.
    pub data: String,
    /// How they were checked: `full`, every byte; `sampled`, lengths, headers and samples.
    #[serde(default)]
    pub data_check: String,
    /// Fingerprint of the program.
    pub program: String,
}

/// What a run knows of its own start.
pub struct StartCircumstances<'a> {
    /// Steps that it has done.
    pub step: u64,
    /// Whether it was asked to go back to that step.
    pub taken_back: bool,
    /// Whether it was asked to start over.
    pub fresh: bool,
    /// Keys that have another value from here on.
    pub changed: &'a [Changed],
    /// Hosts, each once.
    pub hosts: Vec<String>,
    /// What computes.
    pub device: &'a str,
    /// How ranks that are processes talk to each other.
    pub world: Option<String>,
    /// Fingerprint of the prepared data.
    pub data: u64,
    /// How they were checked.
    pub data_check: &'a str,
    /// Fingerprint of the program.
    pub program: u64,
}

impl RunStart {
    /// The line of a start in `dir`, whose files are still as the last one left them.
    pub fn new(dir: &Path, by: &StartedBy, about: StartCircumstances<'_>) -> Self {
        let StartedBy { build, binary_xxh3, command, hub, given: _ } = by.clone();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
        let slurm = ["SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT"];
        let slurm = slurm.iter().filter_map(|name| Some(((*name).to_owned(), std::env::var(name).ok()?)));
        Self {
            unix_s: (now * 1e3).round() / 1e3,
            step: about.step,
            reason: reason(dir, &about),
            changed: about.changed.iter().filter_map(|changed| serde_json::to_value(changed).ok()).collect(),
            build,
            binary_xxh3,
            command,
            folder: std::env::current_dir().ok(),
            hosts: about.hosts,
            device: about.device.to_owned(),
            world: about.world,
            slurm: slurm.collect(),
            hub,
            data: format!("{:016x}", about.data),
            data_check: about.data_check.to_owned(),
            program: format!("{:016x}", about.program),
        }
    }
}

/// Why a run starts, from how it ended before.
fn reason(dir: &Path, about: &StartCircumstances<'_>) -> String {
    if about.taken_back {
        return format!("taken back to step {}", about.step);
    }
    if about.fresh {
        return "started over".into();
    }
    match (last_event(dir).as_deref(), about.step) {
        (None, 0) => "new run".into(),
        (None, _) => "resumed in another folder".into(),
        (Some("finish"), _) => "resumed after it had finished".into(),
        (Some("interrupt"), _) => "resumed after an interrupt".into(),
        (Some(_), 0) => "started again after a failure or a kill before the first checkpoint".into(),
        (Some(_), _) => "resumed after a failure or a kill".into(),
    }
}

/// The kind of the last event that a run has recorded.
fn last_event(dir: &Path) -> Option<String> {
    let last = tail(&dir.join("events.jsonl")).into_iter().next_back()?;
    last["event"].as_str().map(str::to_owned)
}

/// The last objects of a file of lines: those of its last 64 KiB.
pub(crate) fn tail(path: &Path) -> Vec<Value> {
    const BYTES: u64 = 64 << 10;
    use std::io::{Read, Seek, SeekFrom};
    let read = || {
        let mut file = open_file(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(BYTES)))?;
        let mut bytes = Vec::new();
        file.take(BYTES).read_to_end(&mut bytes)?;
        Ok::<_, std::io::Error>(bytes)
    };
    let bytes = read().unwrap_or_default();
    // A first line that was cut is no object.
    bytes.split(|b| *b == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

/// The starts of a run, in order.
pub fn starts(run: &Path) -> Result<Vec<RunStart>> {
    let path = run.join(STARTS);
    // A torn last line is dropped.
    lines(&path)
}
