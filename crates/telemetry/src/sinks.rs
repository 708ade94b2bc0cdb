//! Where lines of metrics go besides `metrics.jsonl`.
//!
//! A sink is a row of [`SINKS`], a file of its own, and the switch of `[telemetry]` in the config that has its key.

use crate::csv::CsvFile;
use crate::event_file::EventFile;
use std::io;
use std::path::{Path, PathBuf};

/// Every sink.
pub static SINKS: &[SinkSpec] = &[
    SinkSpec {
        key: "tensorboard",
        name: "tensorboard",
        open: |opening| Ok(Box::new(EventFile::create(&opening.place, opening.step)?)),
    },
    SinkSpec {
        key: "csv",
        name: "metrics.csv",
        open: |opening| Ok(Box::new(CsvFile::open(opening.place, opening.metrics.to_owned())?)),
    },
];

/// A kind of sink.
pub struct SinkSpec {
    /// The switch of `[telemetry]` that turns it on.
    pub key: &'static str,
    /// Its file or folder in a run directory.
    pub name: &'static str,
    open: fn(Opening) -> io::Result<Box<dyn Sink>>,
}

/// What a sink is opened with.
struct Opening<'a> {
    /// Its file or folder.
    place: PathBuf,
    /// `metrics.jsonl`, which has lines up to `step`.
    metrics: &'a Path,
    /// The step after which the run goes on.
    step: u64,
}

/// Something that takes lines of metrics.
pub(crate) trait Sink {
    /// Adds a line.
    fn write(&mut self, line: &str) -> io::Result<()>;
}

/// The open sinks of a run. One that fails is not written to any more.
#[derive(Default)]
pub struct Sinks(Vec<(&'static str, Box<dyn Sink>)>);

/// A sink that gets nothing more.
#[derive(Debug)]
pub struct FailedSink {
    /// Its name, in the run directory.
    pub name: &'static str,
    /// Why.
    pub error: io::Error,
}

impl Sinks {
    /// Opens the sinks with these keys, of a run that goes on after `step`, up to which `metrics` has lines.
    pub fn open(dir: &Path, metrics: &Path, step: u64, keys: &[&str]) -> (Self, Vec<FailedSink>) {
        let (mut sinks, mut failed) = (Self::default(), Vec::new());
        for spec in SINKS.iter().filter(|spec| keys.contains(&spec.key)) {
            match (spec.open)(Opening { place: dir.join(spec.name), metrics, step }) {
                Ok(sink) => sinks.0.push((spec.name, sink)),
                Err(error) => failed.push(FailedSink { name: spec.name, error }),
            }
        }
        (sinks, failed)
    }

    /// Gives a line that `metrics.jsonl` has got to all sinks, and those back that have failed with it.
    pub fn write(&mut self, line: &str) -> Vec<FailedSink> {
        let mut failed = Vec::new();
        self.0.retain_mut(|(name, sink)| match sink.write(line) {
            Ok(()) => true,
            Err(error) => {
                failed.push(FailedSink { name, error });
                false
            }
        });
        failed
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
    }

    #[test]
    fn a_sink_that_fails_is_told_of_once_and_the_others_go_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (mut sinks, failed) = Sinks::open(folder.path(), &path("metrics.jsonl"), 0, &["csv"]);
        assert!(failed.is_empty());
        sinks.0.insert(0, ("full", Box::new(Full(2))));
        let mut told = Vec::new();
        let mut text = String::new();
        for step in 1..=4 {
            let line = format!("{{\"step\":{step}}}");
            text += &format!("{line}\n");
            std::fs::write(path("metrics.jsonl"), &text).unwrap();
            told.extend(sinks.write(&line).into_iter().map(|failed| (step, failed.name)));
        }
        assert_eq!(told, [(2, "full")]);
        assert_eq!(std::fs::read_to_string(path("metrics.csv")).unwrap(), "step\n1\n2\n3\n4\n");
    }

    #[test]
    fn a_new_key_is_a_new_column_of_the_csv() {
        let folder = tempfile::tempdir().unwrap();
        let metrics = folder.path().join("metrics.jsonl");
        let mut text = "{\"step\":1,\"loss\":2.5}\n".to_owned();
        std::fs::write(&metrics, &text).unwrap();
        let (mut sinks, _) = Sinks::open(folder.path(), &metrics, 1, &["csv"]);
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
