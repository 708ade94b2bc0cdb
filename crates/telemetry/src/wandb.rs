//! Weights & Biases, by its own client: a Python process that reads lines and gives them to `wandb`.
//!
//! The client decides what it does with them, by its own variables: `WANDB_MODE`, `WANDB_PROJECT`, `WANDB_ENTITY`, `WANDB_API_KEY`. A
//! process that dies is started again, and gets what it had not acknowledged a second time, and what it had just before: the client
//! writes a little later.

use crate::queue::{LONGEST_PAUSE, Record, SendError, SendQueue, Transport};
use crate::random_text;
use crate::sink::{Opening, Sink, SinkProblem, SinkRun};
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

const HELPER: &str = include_str!("wandb/helper.py");

/// The Python in whose packages the client is.
const PYTHON: &str = "python3";

/// Lines that were given earlier than this are in the client's file.
const WRITTEN_WITHIN: Duration = Duration::from_secs(10);

/// What the process prints, in the folder of its files.
const LOG: &str = "helper.log";

/// Bytes at the end of the log in which its last line is looked for.
const LOG_END: u64 = 64 << 10;

/// The longest pause before the next start of a process that takes nothing.
const LONGEST_PAUSE_BEFORE_START: Duration = Duration::from_secs(600);

/// Whether the client is there.
pub(crate) fn check() -> Result<(), SinkProblem> {
    let script = "import wandb; wandb.init, wandb.__version__";
    let output = Command::new(PYTHON).args(["-c", script]).stdin(Stdio::null()).output();
    let output = output.map_err(|error| SinkProblem::NoPython(error.to_string()))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(SinkProblem::NoModule(last_line(&String::from_utf8_lossy(&output.stderr)))),
    }
}

/// Opens the queue of a run.
pub(crate) fn open(opening: Opening<'_>) -> io::Result<Box<dyn Sink>> {
    let folder = opening.place.clone();
    SendQueue::open(&opening.place, opening.run.start.clone(), |state| Wandb::new(opening.run, state, folder))
}

fn last_line(text: &str) -> String {
    text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it says nothing").trim().to_owned()
}

/// The last line of a log.
fn last_line_of(log: &Path) -> String {
    let end = || -> io::Result<Vec<u8>> {
        let mut file = File::open(log)?;
        let from = file.metadata()?.len().saturating_sub(LOG_END);
        file.seek(SeekFrom::Start(from))?;
        let mut end = Vec::new();
        file.take(LOG_END).read_to_end(&mut end)?;
        Ok(end)
    };
    last_line(&String::from_utf8_lossy(&end().unwrap_or_default()))
}

struct Wandb {
    folder: PathBuf,
    /// What the client begins with.
    init: Value,
    id: String,
    helper: Option<Helper>,
    /// Whether the last process that failed had taken nothing.
    took_nothing: bool,
    asked: u64,
    /// What was acknowledged of late.
    given: VecDeque<(Instant, Vec<Value>)>,
}

/// The process.
struct Helper {
    child: Child,
    input: BufWriter<ChildStdin>,
    answers: BufReader<ChildStdout>,
    /// Whether it has taken something.
    took: bool,
}

impl Wandb {
    fn new(run: &SinkRun, state: &Value, folder: PathBuf) -> io::Result<Self> {
        let id = match state["id"].as_str() {
            Some(id) => id.to_owned(),
            None => random_text()?[..12].to_owned(),
        };
        let config: Map<String, Value> = run.parameters().into_iter().map(|(key, value)| (key, typed(value))).collect();
        // The client puts its files into a folder `wandb` of this one.
        let dir = std::path::absolute(folder.parent().unwrap_or(&folder))?;
        let mut init = json!({ "id": id, "name": run.name(), "config": config, "dir": dir });
        let project = run.to.experiment.clone();
        let unnamed = project.is_none() && std::env::var_os("WANDB_PROJECT").is_none();
        if let Some(project) = project.or(unnamed.then(|| "lockstep".into())) {
            init["project"] = json!(project);
        }
        Ok(Self { folder, init, id, helper: None, took_nothing: false, asked: 0, given: VecDeque::new() })
    }

    /// Gives the process some lines, and waits until it has them all.
    fn give(&mut self, lines: &[Value]) -> io::Result<()> {
        self.asked += 1;
        let (ack, mut answer) = (json!({ "ack": self.asked }), String::new());
        let begun = self.helper.is_some();
        if !begun {
            self.helper = Some(Helper::start(&self.folder)?);
        }
        let init = (!begun).then(|| json!({ "init": self.init }));
        let Some(helper) = &mut self.helper else { return Ok(()) };
        let again = self.given.iter().flat_map(|(_, lines)| lines).filter(|_| !begun);
        for line in init.iter().chain(again).chain(lines).chain([&ack]) {
            writeln!(helper.input, "{line}")?;
        }
        helper.input.flush()?;
        helper.answers.read_line(&mut answer)?;
        match serde_json::from_str::<Value>(&answer).is_ok_and(|answer| answer == ack) {
            true => {
                helper.took = true;
                Ok(())
            }
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

impl Helper {
    fn start(folder: &Path) -> io::Result<Self> {
        let log = File::options().create(true).append(true).open(folder.join(LOG))?;
        let mut command = Command::new(PYTHON);
        // What interrupts a run must not interrupt what is sent of it.
        command.args(["-c", HELPER]).process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
        // Nor has the client anything of Lockstep's to catch.
        command.env("WANDB_CONSOLE", "off");
        Self::of(command.spawn()?)
    }

    fn of(mut child: Child) -> io::Result<Self> {
        let (Some(input), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        Ok(Self { child, input: BufWriter::new(input), answers: BufReader::new(answers), took: false })
    }

    /// Lets it end: it gets nothing more.
    fn end(mut self) -> io::Result<()> {
        drop(self.input);
        self.child.wait().map(|_| ())
    }
}

impl Transport for Wandb {
    fn name(&self) -> String {
        "the client of Weights & Biases".into()
    }

    fn state(&self) -> Value {
        json!({ "id": self.id })
    }

    fn longest_pause(&self) -> Duration {
        if self.took_nothing { LONGEST_PAUSE_BEFORE_START } else { LONGEST_PAUSE }
    }

    fn send(&mut self, records: &[Record]) -> Result<(), SendError> {
        let lines: Vec<Value> = records.iter().filter_map(|record| serde_json::to_value(record).ok()).collect();
        let ends = records.last().is_some_and(Record::is_end);
        let mut given = self.give(&lines);
        if given.is_ok() {
            self.given.retain(|(at, _)| at.elapsed() < WRITTEN_WITHIN);
            self.given.push_back((Instant::now(), lines));
        }
        if given.is_ok() && ends {
            // It has written everything when it is gone.
            self.given.clear();
            given = self.helper.take().map_or(Ok(()), Helper::end);
        }
        given.map_err(|error| {
            self.took_nothing = self.helper.as_ref().is_none_or(|helper| !helper.took);
            let why = self.helper.take().map(|mut helper| {
                // It may still live, and its answers are not understood.
                let _ = helper.child.kill();
                helper.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string())
            });
            let said = last_line_of(&self.folder.join(LOG));
            SendError::Later(format!("{}: {said}", why.unwrap_or_else(|| error.to_string())))
        })
    }
}

impl Drop for Wandb {
    fn drop(&mut self) {
        if let Some(helper) = self.helper.take() {
            // It ends by itself when it has nothing more to read.
            drop(helper.input);
        }
    }
}

/// A value of the config as a number, a truth or a list, where it is one.
fn typed(text: String) -> Value {
    serde_json::from_str(&text).unwrap_or(Value::String(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue::What;

    /// A process that answers with what it gets.
    fn echo() -> Helper {
        Helper::of(Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()).unwrap()
    }

    #[test]
    fn a_process_that_takes_nothing_is_started_again_after_longer_pauses() {
        let folder = tempfile::tempdir().unwrap();
        let mut wandb = Wandb::new(&SinkRun::default(), &Value::Null, folder.path().to_owned()).unwrap();
        wandb.helper = Some(echo());
        // Without lines, what it answers with is the acknowledgement.
        wandb.send(&[]).unwrap();
        wandb.helper.as_mut().unwrap().child.kill().unwrap();
        wandb.helper.as_mut().unwrap().child.wait().unwrap();
        wandb.send(&[]).unwrap_err();
        assert_eq!(wandb.longest_pause(), LONGEST_PAUSE);
        wandb.helper = Some(echo());
        wandb.send(&[Record { unix_ms: 1, what: What::Metrics(json!({})) }]).unwrap_err();
        assert_eq!(wandb.longest_pause(), LONGEST_PAUSE_BEFORE_START);
    }

    #[test]
    fn the_last_line_of_a_long_log_is_found_at_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join(LOG);
        assert_eq!(last_line_of(&log), "it says nothing");
        std::fs::write(&log, "x".repeat(3 * LOG_END as usize) + "\nlast\n\n").unwrap();
        assert!(last_line_of(&log) == "last");
        std::fs::write(&log, "x".repeat(3 * LOG_END as usize)).unwrap();
        assert_eq!(last_line_of(&log).len() as u64, LOG_END);
    }
}
