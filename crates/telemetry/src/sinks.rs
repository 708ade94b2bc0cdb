//! Where lines of metrics go besides `metrics.jsonl`.
//!
//! A sink is a row of [`SINKS`], a file of its own, and the switch of `[telemetry]` in the config that has its key.

use crate::csv::CsvFile;
use crate::event_file::EventFile;
use crate::mlflow;
use crate::sink::{Opening, RunEnd, Sink, SinkAddress, SinkProblem, SinkRun};
use crate::wandb;
use std::io;
use std::path::Path;

/// Every sink.
pub static SINKS: &[SinkSpec] = &[
    SinkSpec {
        key: "tensorboard",
        name: "tensorboard",
        check: |_| Ok(()),
        open: |opening| Ok(Box::new(EventFile::create(&opening.place, opening.step)?)),
    },
    SinkSpec {
        key: "csv",
        name: "metrics.csv",
        check: |_| Ok(()),
        open: |opening| Ok(Box::new(CsvFile::open(opening.place, opening.metrics.to_owned())?)),
    },
    SinkSpec { key: "mlflow", name: "mlflow", check: mlflow::check, open: mlflow::open },
    SinkSpec { key: "wandb", name: "wandb", check: |_| wandb::check(), open: wandb::open },
];

/// A kind of sink.
pub struct SinkSpec {
    /// The switch of `[telemetry]` that turns it on.
    pub key: &'static str,
    /// Its file or folder in a run directory.
    pub name: &'static str,
    /// Whether this machine has what it needs.
    check: fn(&SinkAddress) -> Result<(), SinkProblem>,
    open: fn(Opening) -> io::Result<Box<dyn Sink>>,
}

/// The open sinks of a run.
#[derive(Default)]
pub struct Sinks {
    open: Vec<(&'static str, Box<dyn Sink>)>,
    /// Those that have failed: they are told how the run ends, and nothing else.
    failed: Vec<(&'static str, Box<dyn Sink>)>,
}

/// What is to be told of a sink.
#[derive(Debug)]
pub enum SinkNews {
    /// It gets nothing more.
    Failed {
        /// Its name, in the run directory.
        name: &'static str,
        /// Why.
        error: io::Error,
    },
    /// It says this.
    Note(String),
}

/// Whether this machine has what the sinks with these keys need: the first that lacks something, and what.
pub fn check_sinks(keys: &[&str], to: &SinkAddress) -> Result<(), (&'static str, SinkProblem)> {
    let mut asked = SINKS.iter().filter(|spec| keys.contains(&spec.key));
    asked.try_for_each(|spec| (spec.check)(to).map_err(|problem| (spec.key, problem)))
}

impl Sinks {
    /// Opens those of the sinks with these keys that are not open, of a run that goes on after `step`, up to which `metrics` has lines.
    pub fn open(&mut self, run: &SinkRun, metrics: &Path, step: u64, keys: &[&str]) -> Vec<SinkNews> {
        let mut news = Vec::new();
        for spec in SINKS.iter().filter(|spec| keys.contains(&spec.key)) {
            if self.open.iter().any(|(name, _)| *name == spec.name) {
                continue;
            }
            // What it has is read by the next one.
            self.failed.retain(|(name, _)| *name != spec.name);
            match (spec.open)(Opening { place: run.dir.join(spec.name), metrics, step, run }) {
                Ok(sink) => self.open.push((spec.name, sink)),
                Err(error) => news.push(SinkNews::Failed { name: spec.name, error }),
            }
        }
        news
    }

    /// Closes those that are opened again when metrics are cut back.
    pub fn close_files(&mut self) {
        self.open.retain(|(_, sink)| sink.stays());
    }

    /// Gives a line that `metrics.jsonl` has got to all sinks, and what is to be told of them back.
    pub fn write(&mut self, line: &str) -> Vec<SinkNews> {
        let mut news = self.each(|sink| sink.write(line));
        news.extend(self.open.iter_mut().flat_map(|(_, sink)| sink.notes()).map(SinkNews::Note));
        news
    }

    /// The same of a line of `events.jsonl`.
    pub fn event(&mut self, line: &str) -> Vec<SinkNews> {
        self.each(|sink| sink.event(line))
    }

    fn each(&mut self, mut give: impl FnMut(&mut dyn Sink) -> io::Result<()>) -> Vec<SinkNews> {
        let mut news = Vec::new();
        for (name, mut sink) in std::mem::take(&mut self.open) {
            match give(sink.as_mut()) {
                Ok(()) => self.open.push((name, sink)),
                Err(error) => {
                    news.push(SinkNews::Failed { name, error });
                    self.failed.push((name, sink));
                }
            }
        }
        news
    }

    /// Ends all of them: waits a while for those that still send. Gives what is to be told.
    pub fn end(&mut self, how: RunEnd) -> Vec<String> {
        let Self { open, failed } = std::mem::take(self);
        open.into_iter().chain(failed).filter_map(|(_, mut sink)| sink.end(how)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Full(usize);

    impl Sink for Full {
        fn write(&mut self, _: &str) -> io::Result<()> {
            self.0 -= 1;
            if self.0 == 0 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
        }

        fn end(&mut self, how: RunEnd) -> Option<String> {
            Some(format!("{how:?}"))
        }
    }

    fn csv(folder: &Path, step: u64) -> Sinks {
        let mut sinks = Sinks::default();
        let run = SinkRun { dir: folder.to_owned(), ..SinkRun::default() };
        assert!(sinks.open(&run, &folder.join("metrics.jsonl"), step, &["csv"]).is_empty());
        sinks
    }

    #[test]
    fn a_sink_that_fails_is_told_of_once_and_the_others_go_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let mut sinks = csv(folder.path(), 0);
        sinks.open.insert(0, ("full", Box::new(Full(2))));
        let mut told = Vec::new();
        let mut text = String::new();
        for step in 1..=4 {
            let line = format!("{{\"step\":{step}}}");
            text += &format!("{line}\n");
            std::fs::write(path("metrics.jsonl"), &text).unwrap();
            told.extend(sinks.write(&line).into_iter().map(|news| match news {
                SinkNews::Failed { name, .. } => (step, name),
                SinkNews::Note(text) => panic!("{text}"),
            }));
        }
        assert_eq!(told, [(2, "full")]);
        assert_eq!(std::fs::read_to_string(path("metrics.csv")).unwrap(), "step\n1\n2\n3\n4\n");
        // It hears how the run ends.
        assert_eq!(sinks.end(RunEnd::Interrupted), ["Interrupted"]);
    }

    #[test]
    fn a_new_key_is_a_new_column_of_the_csv() {
        let folder = tempfile::tempdir().unwrap();
        let metrics = folder.path().join("metrics.jsonl");
        let mut text = "{\"step\":1,\"loss\":2.5}\n".to_owned();
        std::fs::write(&metrics, &text).unwrap();
        let mut sinks = csv(folder.path(), 1);
        for line in
            ["{\"step\":2,\"loss\":2.25}", "{\"step\":3,\"loss\":2,\"val_loss\":2.5}", "{\"step\":4,\"loss\":null}"]
        {
            text += &format!("{line}\n");
            std::fs::write(&metrics, &text).unwrap();
            assert!(sinks.write(line).is_empty());
        }
        let csv = std::fs::read_to_string(folder.path().join("metrics.csv")).unwrap();
        assert_eq!(csv, "step,loss,val_loss\n1,2.5,\n2,2.25,\n3,2,2.5\n4,,\n");
    }
}
