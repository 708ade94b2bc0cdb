//! `lockstep metrics`: what a run has recorded at each step.

use crate::failure::{Failure, Result};
use crate::table::table;
use crate::terminal::{escaped, printable};
use clap::ValueEnum;
use lockstep_telemetry::{MetricColumns, csv, unit};
use serde_json::{Map, Value, json};
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    /// A run directory.
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Only these keys, beside step: --keys loss,val_loss.
    #[arg(long, value_name = "KEY", value_delimiter = ',', num_args = 1..)]
    keys: Vec<String>,
    /// How to print them.
    #[arg(long, value_enum, default_value = "text")]
    format: MetricsFormat,
}

#[derive(Clone, Copy, ValueEnum)]
enum MetricsFormat {
    /// Each key with its first, last, least and greatest value.
    Text,
    /// A line per step, a column per key.
    Csv,
    /// An object with an array per key.
    Json,
}

pub fn run(args: &Args) -> Result<()> {
    let metrics = open(&args.run)?;
    if metrics.skipped() > 0 {
        let skipped = metrics.skipped();
        crate::warn(&[format!("{skipped} lines of metrics.jsonl are no objects of up to 1 MiB and are left out")]);
    }
    let keys: Vec<&str> = match args.keys.is_empty() {
        true => metrics.keys().collect(),
        false => {
            ["step"].into_iter().chain(args.keys.iter().map(String::as_str).filter(|key| *key != "step")).collect()
        }
    };
    let mut columns = Vec::new();
    for key in keys {
        let Some(values) = metrics.get(key) else {
            let known: Vec<&str> = metrics.keys().collect();
            let text = format!("{}: there is no metric `{key}`", args.run.display());
            return Err(Failure::request(text, format!("there is {}", known.join(", "))));
        };
        columns.push((key, values));
    }
    let mut out = BufWriter::new(std::io::stdout().lock());
    match args.format {
        MetricsFormat::Csv => {
            let names: Vec<_> = columns.iter().map(|(key, values)| (printable(key), *values)).collect();
            csv(&mut out, &names.iter().map(|(key, values)| (key.as_ref(), *values)).collect::<Vec<_>>())?;
        }
        MetricsFormat::Json => {
            // What is not finite is null.
            let all: Map<String, Value> =
                columns.iter().map(|(key, values)| ((*key).to_owned(), json!(values))).collect();
            writeln!(out, "{}", json!({ "columns": all }))?;
        }
        MetricsFormat::Text => {
            let rows: Vec<_> = columns.iter().filter(|(key, _)| *key != "step").map(|(key, v)| row(key, v)).collect();
            let steps = columns.first().map_or(&[][..], |(_, values)| values);
            if let (Some(first), Some(last)) = (steps.first(), steps.last()) {
                writeln!(out, "steps {first} to {last}, {} lines\n", metrics.rows())?;
            }
            write!(out, "{}", table(&["metric", "first", "last", "least", "greatest", "unit", "~steps"], &rows))?;
        }
    }
    out.flush()?;
    Ok(())
}

/// The metrics of a run directory.
pub fn open(run: &Path) -> Result<MetricColumns> {
    let path = run.join("metrics.jsonl");
    let metrics = MetricColumns::open(&path).map_err(|error| {
        let hint = match error.kind() {
            ErrorKind::NotFound if run.join("run.toml").exists() => "the run has not taken a step yet",
            ErrorKind::NotFound | ErrorKind::NotADirectory => {
                "give a run directory; `lockstep runs DIR` lists those of a folder"
            }
            ErrorKind::InvalidInput => "put back the file that the run has written",
            _ => "check its permissions",
        };
        Failure::request(format!("cannot read {}: {error}", path.display()), hint)
    })?;
    match metrics.rows() {
        0 => Err(Failure::request(format!("{} has no steps yet", path.display()), "wait for the first")),
        _ => Ok(metrics),
    }
}

fn row(key: &str, values: &[f64]) -> Vec<String> {
    let there = || values.iter().copied().filter(|value| value.is_finite());
    let of = |value: Option<f64>| value.map_or("-".to_owned(), short);
    vec![
        escaped(key).into_owned(),
        of(there().next()),
        of(there().next_back()),
        of(there().reduce(f64::min)),
        of(there().reduce(f64::max)),
        unit(key).to_owned(),
        there().count().to_string(),
    ]
}

/// A number with five digits, or as a power where it is very small or large.
fn short(value: f64) -> String {
    let size = value.abs();
    match size {
        _ if value.fract() == 0.0 && size < 1e15 => format!("{value}"),
        _ if !(1e-3..1e7).contains(&size) => format!("{value:.4e}"),
        _ => {
            let digits = (4 - size.log10().floor() as i32).clamp(0, 8) as usize;
            format!("{value:.digits$}")
        }
    }
}
