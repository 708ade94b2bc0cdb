//! A run directory: the resolved config, the plan, metrics, events, prepared data and checkpoints.

use crate::changes::{self, CHANGES};
use crate::provenance::{GIVEN, RunStart, STARTS};
use crate::{Result, RunDirError};
use lockstep_checkpoint::list;
use lockstep_config::{Change, Config};
use lockstep_telemetry::{
    RunEnd, SINKS, SinkAddress, SinkNews, SinkProblem, SinkRun, Sinks, check_sinks, each_line, refuse_special,
};
use serde::Serialize;
use serde_json::{Value, json};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// An open run directory, locked against other processes.
pub struct RunDir {
    path: PathBuf,
    metrics: Option<File>,
    events: Option<File>,
    sinks: OpenSinks,
    /// What they are opened with: the resolved config and this start.
    resolved: String,
    start: Value,
    /// What is to be told of sinks since the last line of metrics.
    news: Vec<SinkNews>,
    /// None where another process has it, and writes all files.
    lock: Option<Arc<File>>,
}

/// Files and folders of a run.
fn ours() -> impl Iterator<Item = &'static str> {
    records().chain(["data", CHECKPOINTS])
}

/// Those that say what a run was, without its weights and its data.
fn records() -> impl Iterator<Item = &'static str> {
    let files = [CONFIG, PLAN, CHANGES, ROLL_BACKS, METRICS, EVENTS, FAILURES, MEASURED, STARTS, GIVEN];
    files.into_iter().chain(SINKS.iter().map(|sink| sink.name))
}

const CHECKPOINTS: &str = "checkpoints";

/// The open sinks of a run, for whoever ends them when its directory is closed.
#[derive(Clone, Default)]
pub struct OpenSinks {
    sinks: Arc<Mutex<Sinks>>,
    /// They write in the run directory until they have ended, so it stays locked.
    _lock: Option<Arc<File>>,
}

impl OpenSinks {
    /// Ends them, and waits a while for what is still sent. Gives what is to be told.
    pub fn end(&self, how: RunEnd) -> Vec<String> {
        self.with(|sinks| sinks.end(how))
    }

    fn with<T>(&self, act: impl FnOnce(&mut Sinks) -> T) -> T {
        act(&mut self.sinks.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Where sinks send to.
fn address(config: &Config) -> SinkAddress {
    let telemetry = &config.telemetry;
    SinkAddress { server: telemetry.mlflow_uri.clone(), experiment: telemetry.experiment.clone() }
}

/// Refuses a config that asks for a sink which this machine lacks something for.
pub fn require_sinks(config: &Config) -> Result<()> {
    check_sinks(&config.switched_on(TELEMETRY), &address(config)).map_err(|(key, problem)| {
        let (text, hint) = match problem {
            SinkProblem::NoServer => ("no tracking server is named".into(), NAME_A_SERVER),
            SinkProblem::BadServer(server) => {
                (format!("{server:?} is not the address of a tracking server"), START_A_SERVER)
            }
            SinkProblem::Certificates(text) => (text, "name a file of PEM certificates, or none"),
            SinkProblem::NoPython(why) => (format!("python3 does not start: {why}"), ACTIVATE_PYTHON),
            SinkProblem::NoModule(why) => (format!("python3 cannot load the client: {why}"), INSTALL_WANDB),
        };
        RunDirError::Sink { key: format!("{TELEMETRY}.{key}"), text, hint }
    })
}

const NAME_A_SERVER: &str =
    "set telemetry.mlflow_uri or MLFLOW_TRACKING_URI, such as \"http://host:5000\"; `mlflow server` starts one";
const START_A_SERVER: &str = "telemetry.mlflow_uri and MLFLOW_TRACKING_URI begin with http:// or https://; for a folder or a database, \
    `mlflow server --backend-store-uri` starts a server";
const ACTIVATE_PYTHON: &str =
    "activate an environment with Python and wandb (`pip install wandb`), or set telemetry.wandb = false";
const INSTALL_WANDB: &str =
    "`pip install wandb` in the environment whose python3 comes first, or set telemetry.wandb = false";

/// The table of the config that has the switches of sinks.
const TELEMETRY: &str = "telemetry";

/// A run that was moved out of the way.
pub struct Aside {
    from: PathBuf,
    to: PathBuf,
}

impl Aside {
    /// Moves it back over what a failed start has made since. Best effort: whatever cannot be moved stays where it is.
    pub fn undo(self) {
        for name in ours().filter(|name| self.to.join(name).exists()) {
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
/// The file of the roll-backs of a run.
pub const ROLL_BACKS: &str = "roll_backs.json";
/// The file of the times of one step's ops.
pub const MEASURED: &str = "measured.json";
/// What ended attempts of several processes, by every one that noticed it.
pub const FAILURES: &str = "failures.jsonl";
const LOCK: &str = ".lock";

impl RunDir {
    /// Opens or makes a run directory.
    pub fn open(path: &Path) -> Result<Self> {
        fs::create_dir_all(path).map_err(|e| RunDirError::io("create", path, e))?;
        // Whatever is read or written here must end.
        for file in ours().chain([LOCK]).map(|name| path.join(name)) {
            match refuse_special(&file) {
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(RunDirError::io("use", &file, e)),
                _ => {}
            }
        }
        let lock_path = path.join(LOCK);
        let lock = File::create(&lock_path).map_err(|e| RunDirError::io("create", &lock_path, e))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(RunDirError::Locked { dir: path.to_owned() }),
            Err(TryLockError::Error(e)) => return Err(RunDirError::io("lock", &lock_path, e)),
        }
        Ok(Self::closed(path, Some(lock)))
    }

    /// A run directory that another process of the run has opened and writes to: what would be written here is not.
    pub fn follow(path: &Path) -> Self {
        Self::closed(path, None)
    }

    fn closed(path: &Path, lock: Option<File>) -> Self {
        let lock = lock.map(Arc::new);
        let (sinks, news) = (OpenSinks { _lock: lock.clone(), ..OpenSinks::default() }, Vec::new());
        let (resolved, start) = (String::new(), Value::Null);
        Self { path: path.to_owned(), metrics: None, events: None, sinks, resolved, start, news, lock }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Folder of checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join(CHECKPOINTS)
    }

    /// Moves a run that is here (our own files, nothing else) into a folder `old-1`, `old-2` … inside.
    pub fn set_aside(&self) -> Result<Aside> {
        let moved: Vec<PathBuf> = ours().map(|name| self.path.join(name)).filter(|p| p.exists()).collect();
        let aside = Aside { from: self.path.clone(), to: self.free_folder() };
        if moved.is_empty() {
            return Ok(aside);
        }
        fs::create_dir(&aside.to).map_err(|e| RunDirError::io("create", &aside.to, e))?;
        for from in moved {
            let name = from.file_name().unwrap_or_default();
            fs::rename(&from, aside.to.join(name)).map_err(|e| RunDirError::io("move", &from, e))?;
        }
        Ok(aside)
    }

    fn free_folder(&self) -> PathBuf {
        let free = (1..).map(|n| self.path.join(format!("old-{n}"))).find(|p| !p.exists());
        free.unwrap_or_else(|| self.path.join("old"))
    }

    /// Moves the checkpoints after `step` into a folder `old-1`, `old-2` … inside, with a copy of what else tells of the run,
    /// so that the folder is a run directory of its own. Gives their steps, and the folder if there were any.
    pub fn set_later_aside(&self, step: u64) -> Result<(Vec<u64>, Option<PathBuf>)> {
        if self.lock.is_none() {
            return Ok((Vec::new(), None));
        }
        let mut later = list(&self.checkpoints())?;
        later.retain(|(saved, _)| *saved > step);
        if later.is_empty() {
            return Ok((Vec::new(), None));
        }
        let aside = self.free_folder();
        let to = aside.join(CHECKPOINTS);
        fs::create_dir_all(&to).map_err(|e| RunDirError::io("create", &to, e))?;
        for name in records().filter(|name| self.path.join(name).exists()) {
            copy(&self.path.join(name), &aside.join(name))?;
        }
        // The latest goes first: whatever stops this, the run is one that could have been.
        for (_, from) in later.iter().rev() {
            let name = from.file_name().unwrap_or_default();
            fs::rename(from, to.join(name)).map_err(|e| RunDirError::io("move", from, e))?;
        }
        Ok((later.into_iter().map(|(saved, _)| saved).collect(), Some(aside)))
    }

    /// Writes `run.toml`, `plan.json` and `changes.json`, cuts `metrics.jsonl` back to `written`, and opens the logs of a run that goes
    /// on after `step`. Gives the steps from and to which `metrics.jsonl` should have lines and has none, where that is news.
    pub fn begin(
        &mut self,
        resolved: &str,
        changes: &[Change],
        plan: &Value,
        step: u64,
        written: u64,
    ) -> Result<Vec<(u64, u64)>> {
        if self.lock.is_none() {
            return Ok(Vec::new());
        }
        self.resolved = resolved.to_owned();
        self.replace(CONFIG, resolved.as_bytes())?;
        if !changes.is_empty() || self.path.join(CHANGES).exists() {
            self.replace(CHANGES, changes::written(changes).as_bytes())?;
        }
        self.replace(PLAN, format!("{plan:#}\n").as_bytes())?;
        let metrics = self.read(METRICS, |line| is_up_to(line, written))?;
        if let Some(text) = &metrics {
            self.replace(METRICS, text)?;
        }
        // A torn last line is dropped.
        let events = self.read(EVENTS, |_| true)?;
        if let Some(text) = &events {
            self.replace(EVENTS, text)?;
        }
        let mut gaps = gaps(&metrics.unwrap_or_default(), written);
        let known: Vec<Value> = values(&events.unwrap_or_default()).filter(|v| v["event"] == GAP).collect();
        gaps.retain(|(from, to)| !known.iter().any(|v| v["from"] == *from && v["to"] == *to));
        (self.metrics, self.events) = (Some(self.open_log(METRICS)?), Some(self.open_log(EVENTS)?));
        for (from, to) in &gaps {
            self.event(GAP, json!({ "step": step, "from": from, "to": to }))?;
        }
        Ok(gaps)
    }

    fn open_log(&self, name: &str) -> Result<File> {
        let path = self.path.join(name);
        OpenOptions::new().create(true).append(true).open(&path).map_err(|e| RunDirError::io("open", &path, e))
    }

    /// Writes `roll_backs.json`, where there are any or the file is there.
    pub fn roll_backs(&self, any: bool, text: &str) -> Result<()> {
        if self.lock.is_none() || !(any || self.path.join(ROLL_BACKS).exists()) {
            return Ok(());
        }
        self.replace(ROLL_BACKS, text.as_bytes())
    }

    /// Cuts metrics back to `step`, from which the run goes on. Gives the sinks that could not be opened again.
    pub fn go_back(&mut self, config: &Config, step: u64) -> Result<Vec<SinkNews>> {
        if self.lock.is_none() {
            return Ok(Vec::new());
        }
        self.metrics = None;
        self.sinks.with(Sinks::close_files);
        let text = self.read(METRICS, |line| is_up_to(line, step))?.unwrap_or_default();
        self.replace(METRICS, &text)?;
        self.metrics = Some(self.open_log(METRICS)?);
        Ok(self.open_sinks(config, step))
    }

    /// Some of the whole lines of one of its files; none where there is no such file.
    fn read(&self, name: &str, is_kept: impl Fn(&[u8]) -> bool) -> Result<Option<Vec<u8>>> {
        let (path, mut text) = (self.path.join(name), Vec::new());
        let mut add = |line: &[u8]| {
            if is_kept(line) {
                text.extend_from_slice(line);
            }
        };
        match each_line(&path, &mut add) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(RunDirError::io("read", &path, error)),
            Ok(()) => Ok(Some(text)),
        }
    }

    /// Adds a line to `starts.jsonl`, and keeps the config file as it was given in `given.toml`.
    pub fn started(&mut self, start: &RunStart, given: Option<&str>) -> Result<()> {
        if self.lock.is_none() {
            return Ok(());
        }
        self.start = json!(start);
        if let Some(text) = given {
            self.replace(GIVEN, text.as_bytes())?;
        }
        let path = self.path.join(STARTS);
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let mut file = Some(file.map_err(|e| RunDirError::io("open", &path, e))?);
        append(&self.path, STARTS, &mut file, start).map(|_| ())
    }

    /// Writes `measured.json`.
    pub fn measured(&self, measured: &impl Serialize) -> Result<()> {
        if self.lock.is_none() {
            return Ok(());
        }
        self.replace(MEASURED, format!("{:#}\n", json!(measured)).as_bytes())
    }

    /// Opens what else takes metrics by the config, from the step after `step` on. Gives what could not be opened.
    pub fn open_sinks(&mut self, config: &Config, step: u64) -> Vec<SinkNews> {
        if self.lock.is_none() {
            return Vec::new();
        }
        let run = SinkRun {
            dir: self.path.clone(),
            config: self.resolved.clone(),
            start: self.start.clone(),
            to: address(config),
        };
        let (metrics, keys) = (self.path.join(METRICS), config.switched_on(TELEMETRY));
        self.sinks.with(|sinks| sinks.open(&run, &metrics, step, &keys))
    }

    /// The open sinks, which outlive the directory: to be ended when it is known how the run ends.
    pub fn sinks(&self) -> OpenSinks {
        self.sinks.clone()
    }

    /// Adds a line to `metrics.jsonl`, and gives it to the other sinks; gives back what is to be told of them.
    pub fn metric(&mut self, metrics: &impl Serialize) -> Result<Vec<SinkNews>> {
        let line = append(&self.path, METRICS, &mut self.metrics, metrics)?;
        let mut news = std::mem::take(&mut self.news);
        if let Some(line) = line {
            news.extend(self.sinks.with(|sinks| sinks.write(line.trim_end())));
        }
        Ok(news)
    }

    /// Adds a line to `events.jsonl`, with the time.
    pub fn event(&mut self, kind: &str, mut fields: Value) -> Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
        fields["event"] = json!(kind);
        fields["unix_s"] = json!((now * 1e3).round() / 1e3);
        if let Some(line) = append(&self.path, EVENTS, &mut self.events, &fields)? {
            let news = self.sinks.with(|sinks| sinks.event(line.trim_end()));
            self.news.extend(news);
        }
        Ok(())
    }

    /// Writes a file so that it is either the old or the new one, never half.
    fn replace(&self, name: &str, data: &[u8]) -> Result<()> {
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
            RunDirError::io("write", &path, e)
        })
    }
}

/// Copies a file, or a folder with the files in it.
fn copy(from: &Path, to: &Path) -> Result<()> {
    if !from.is_dir() {
        return fs::copy(from, to).map(|_| ()).map_err(|e| RunDirError::io("copy", from, e));
    }
    fs::create_dir(to).map_err(|e| RunDirError::io("create", to, e))?;
    let read = |e| RunDirError::io("read", from, e);
    for file in fs::read_dir(from).map_err(read)? {
        let file = file.map_err(read)?;
        if file.file_type().is_ok_and(|kind| kind.is_symlink()) {
            // They name files beside them.
            continue;
        }
        copy(&file.path(), &to.join(file.file_name()))?;
    }
    Ok(())
}

/// Adds a line to a file that is open, and gives it.
fn append(dir: &Path, name: &str, file: &mut Option<File>, line: &impl Serialize) -> Result<Option<String>> {
    let Some(file) = file else { return Ok(None) };
    let mut text = serde_json::to_string(line).map_err(|e| RunDirError::io("write", &dir.join(name), e.into()))?;
    text.push('\n');
    file.write_all(text.as_bytes()).map_err(|e| RunDirError::io("write", &dir.join(name), e))?;
    Ok(Some(text))
}

/// The event of lines of metrics that are gone.
const GAP: &str = "metrics_gap";

/// The objects of a file of lines.
fn values(text: &[u8]) -> impl Iterator<Item = Value> {
    text.split(|b| *b == b'\n').filter_map(|line| serde_json::from_slice(line).ok())
}

/// The steps from 1 up to `last` that have no line, as ranges with both ends.
fn gaps(metrics: &[u8], last: u64) -> Vec<(u64, u64)> {
    let mut steps: Vec<u64> = values(metrics).filter_map(|v| v["step"].as_u64()).filter(|s| *s <= last).collect();
    steps.sort_unstable();
    let ends = [0].into_iter().chain(steps.iter().copied()).zip(steps.iter().copied().chain([last + 1]));
    ends.filter(|(before, after)| before + 1 < *after).map(|(before, after)| (before + 1, after - 1)).collect()
}

/// Whether a line of metrics is about a step up to `step`: later ones will be made again.
fn is_up_to(line: &[u8], step: u64) -> bool {
    let value: Option<Value> = serde_json::from_slice(line).ok();
    value.and_then(|v| v["step"].as_u64()).is_some_and(|s| s <= step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_cut_back_to_the_step_that_a_run_resumes_from() {
        let folder = tempfile::tempdir().unwrap();
        let text = b"{\"step\":1}\n{\"step\":2}\nnonsense\n{\"step\":3}\n{\"step\":2";
        fs::write(folder.path().join(METRICS), text).unwrap();
        let dir = RunDir::open(folder.path()).unwrap();
        let kept = dir.read(METRICS, |line| is_up_to(line, 2)).unwrap();
        assert_eq!(kept.unwrap(), b"{\"step\":1}\n{\"step\":2}\n");
        assert!(dir.read(EVENTS, |_| true).unwrap().is_none());
    }

    #[test]
    fn every_sink_has_a_switch_and_every_switch_a_sink() {
        let keys = lockstep_config::schema();
        let switches = keys.iter().filter(|key| key.default == "false");
        let mut switches: Vec<_> = switches.filter_map(|key| key.path.strip_prefix("telemetry.")).collect();
        let mut sinks: Vec<_> = SINKS.iter().map(|sink| sink.key).collect();
        switches.sort_unstable();
        sinks.sort_unstable();
        assert_eq!(switches, sinks);
    }

    #[test]
    fn steps_without_a_line_are_found() {
        let check = |steps: &[u64], last, expected: &[(u64, u64)]| {
            let text: String = steps.iter().map(|step| format!("{{\"step\":{step}}}\n")).collect();
            assert_eq!(gaps(text.as_bytes(), last), expected, "{steps:?} {last}");
        };
        check(&[1, 2, 3], 3, &[]);
        check(&[], 0, &[]);
        check(&[], 4, &[(1, 4)]);
        check(&[1, 2, 5, 7, 8], 10, &[(3, 4), (6, 6), (9, 10)]);
        check(&[1, 1, 2, 3], 2, &[]);
    }
}
