//! `lockstep runs`: the runs of a folder; `lockstep diff`: what differs between two.

use crate::Format;
use crate::failure::{Failure, Result};
use crate::table::table;
use crate::terminal::escaped;
use lockstep_config::{Config, schema};
use lockstep_ir::units;
use lockstep_rundir::{RunStart, RunSummary, lines, run_summary, runs, starts};
use lockstep_telemetry::{read_file, refuse_special};
use serde_json::{Value, json};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct RunsArgs {
    /// A folder of run directories.
    #[arg(value_name = "DIR", default_value = "runs")]
    dir: PathBuf,
    /// How to print them.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

#[derive(clap::Args)]
pub struct DiffArgs {
    /// A run directory.
    #[arg(value_name = "RUN")]
    first: PathBuf,
    /// Another.
    #[arg(value_name = "RUN")]
    second: PathBuf,
    /// How to print it.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

pub fn list(args: &RunsArgs) -> Result<()> {
    let found = runs(&args.dir)?;
    for run in &found {
        crate::warn(&special_files(&run.path));
    }
    let text = || {
        if found.is_empty() {
            return format!("{}: no runs\n", args.dir.display());
        }
        let header = ["run", "state", "step", "loss", "val loss", "~best (step)", "tokens/s", "~hours", "~GPU-hours"];
        // Without a GPU, there is nothing to count.
        let columns = if found.iter().any(|run| run.gpu_hours.is_some()) { header.len() } else { header.len() - 1 };
        let rows: Vec<Vec<String>> = found.iter().map(|run| row(run, &args.dir)).collect();
        table(&header[..columns], &rows)
    };
    args.format.print(|| json!({ "runs": found }), text)
}

/// The files of a run directory that nothing is read from, since they are not regular ones, and why.
pub fn special_files(run: &Path) -> Vec<String> {
    let files = ["run.toml", "plan.json", "metrics.jsonl", "events.jsonl", "starts.jsonl"].map(|name| run.join(name));
    let of = |path: &PathBuf| match refuse_special(path) {
        Err(error) if error.kind() == ErrorKind::InvalidInput => Some(format!("{}: {error}", path.display())),
        _ => None,
    };
    files.iter().filter_map(of).collect()
}

fn row(run: &RunSummary, dir: &Path) -> Vec<String> {
    let number = |x: Option<f64>| x.map_or("-".to_owned(), |x| format!("{x:.4}"));
    let name = run.path.strip_prefix(dir).ok().filter(|name| !name.as_os_str().is_empty()).unwrap_or(&run.path);
    let steps = run.steps.map_or(String::new(), |steps| format!("/{steps}"));
    vec![
        escaped(&name.display().to_string()).into_owned(),
        run.state.to_string(),
        format!("{}{steps}", run.step),
        number(run.loss),
        number(run.val_loss),
        run.best_validation().map_or("-".into(), |best| format!("{:.4} ({})", best.val_loss, best.step)),
        run.tokens_per_s.map_or("-".into(), |speed| units::count(speed as u64)),
        hours(run.hours),
        run.gpu_hours.map_or("-".into(), hours),
    ]
}

/// Hours with three digits.
fn hours(hours: f64) -> String {
    match hours {
        _ if hours < 9.995 => format!("{hours:.2}"),
        _ if hours < 99.95 => format!("{hours:.1}"),
        _ => format!("{hours:.0}"),
    }
}

/// What two runs have different values of.
struct Difference {
    /// `config`, `data`, `code` or `result`.
    of: &'static str,
    what: String,
    values: [Value; 2],
}

/// What a run directory says of itself.
struct Said {
    config: Config,
    start: Option<RunStart>,
    plan: Value,
    metrics: Vec<Value>,
}

fn said(run: &Path) -> Result<Said> {
    let read = |name: &str| read_file(&run.join(name));
    let text = read("run.toml").map_err(|error| {
        Failure::request(
            format!("{} is no run directory: run.toml: {error}", run.display()),
            "`lockstep runs DIR` lists those of a folder",
        )
    })?;
    Ok(Said {
        config: Config::parse(&String::from_utf8_lossy(&text), "run.toml", &[])?,
        start: starts(run)?.pop(),
        plan: read("plan.json").ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default(),
        metrics: lines(&run.join("metrics.jsonl"))?,
    })
}

pub fn diff(args: &DiffArgs) -> Result<()> {
    let (a, b) = (said(&args.first)?, said(&args.second)?);
    let mut found = Vec::new();
    let mut compare = |of, what: &str, values: [Value; 2]| {
        if values[0] != values[1] {
            found.push(Difference { of, what: what.to_owned(), values });
        }
    };
    for key in schema() {
        compare("config", key.path, [&a, &b].map(|run| json!(run.config.value(key.path))));
    }
    let start = |run: &Said| serde_json::to_value(&run.start).unwrap_or_default();
    let [first, second] = [&a, &b].map(start);
    compare("data", "fingerprint", [first["data"].clone(), second["data"].clone()]);
    for what in ["version", "commit", "dirty", "profile", "rustc"] {
        compare("code", what, [&first, &second].map(|start| start["build"][what].clone()));
    }
    compare("code", "binary_xxh3", [&first, &second].map(|start| start["binary_xxh3"].clone()));
    for what in ["program", "device"] {
        compare("code", what, [&a, &b].map(|run| run.plan[what].clone()));
    }
    // The first step whose loss is another, where both have one.
    let differs = |(x, y): &(&Value, &Value)| x["step"] == y["step"] && x["loss"] != y["loss"];
    if let Some((x, y)) = a.metrics.iter().zip(&b.metrics).find(differs) {
        compare(
            "result",
            &format!("loss at step {}, the first that differs", x["step"]),
            [&x, &y].map(|v| v["loss"].clone()),
        );
    }
    let ends = [&args.first, &args.second].map(|run| run_summary(run));
    compare("result", "steps done", [&ends[0], &ends[1]].map(|run| json!(run.step)));
    compare("result", "validation loss", [&ends[0], &ends[1]].map(|run| json!(run.val_loss)));
    show(args, &found)
}

fn show(args: &DiffArgs, found: &[Difference]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if args.format == Format::Json {
        let value = |d: &Difference| json!({ "of": d.of, "what": d.what, "first": d.values[0], "second": d.values[1] });
        return Ok(writeln!(out, "{:#}", json!({ "differences": found.iter().map(value).collect::<Vec<_>>() }))?);
    }
    if found.is_empty() {
        return Ok(writeln!(out, "no difference in config, data, code or result")?);
    }
    let text = |value: &Value| match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => escaped(text).into_owned(),
        other => other.to_string(),
    };
    let row =
        |d: &Difference| vec![d.of.to_owned(), escaped(&d.what).into_owned(), text(&d.values[0]), text(&d.values[1])];
    let [first, second] = [&args.first, &args.second].map(|run| escaped(&run.display().to_string()).into_owned());
    write!(out, "{}", table(&["", "", &first, &second], &found.iter().map(row).collect::<Vec<_>>()))?;
    Ok(())
}
