//! `lockstep runs`: the runs of a folder; `lockstep diff`: what differs between two.

use crate::Format;
use crate::failure::Failure;
use crate::table::table;
use lockstep_config::{Config, schema};
use lockstep_ir::units;
use lockstep_train::{RunStart, RunSummary, run_summary, runs, starts};
use serde_json::{Value, json};
use std::io::Write;
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

pub fn list(args: &RunsArgs) -> Result<(), Failure> {
    let found = runs(&args.dir)?;
    let mut out = std::io::stdout().lock();
    match args.format {
        Format::Json => writeln!(out, "{:#}", json!({ "runs": found }))?,
        Format::Text if found.is_empty() => writeln!(out, "{}: no runs", args.dir.display())?,
        Format::Text => {
            let header = ["run", "state", "step", "loss", "val loss", "tokens/s"];
            let row = |run: &RunSummary| row(run, &args.dir);
            write!(out, "{}", table(&header, &found.iter().map(row).collect::<Vec<_>>()))?;
        }
    }
    Ok(())
}

fn row(run: &RunSummary, dir: &Path) -> Vec<String> {
    let number = |x: Option<f64>| x.map_or("-".to_owned(), |x| format!("{x:.4}"));
    let name = run.path.strip_prefix(dir).ok().filter(|name| !name.as_os_str().is_empty()).unwrap_or(&run.path);
    let steps = run.steps.map_or(String::new(), |steps| format!("/{steps}"));
    vec![
        name.display().to_string(),
        run.state.to_string(),
        format!("{}{steps}", run.step),
        number(run.loss),
        number(run.val_loss),
        run.tokens_per_s.map_or("-".into(), |speed| units::count(speed as u64)),
    ]
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

fn said(run: &Path) -> Result<Said, Failure> {
    let read = |name: &str| std::fs::read_to_string(run.join(name));
    let text = read("run.toml").map_err(|error| {
        Failure::request(format!(
            "{} is no run directory: run.toml: {error}\nhint: `lockstep runs DIR` lists those of a folder",
            run.display()
        ))
    })?;
    let lines = read("metrics.jsonl").unwrap_or_default();
    Ok(Said {
        config: Config::parse(&text, "run.toml", &[])?,
        start: starts(run)?.pop(),
        plan: read("plan.json").ok().and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default(),
        metrics: lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect(),
    })
}

pub fn diff(args: &DiffArgs) -> Result<(), Failure> {
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

fn show(args: &DiffArgs, found: &[Difference]) -> Result<(), Failure> {
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
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let row = |d: &Difference| vec![d.of.to_owned(), d.what.clone(), text(&d.values[0]), text(&d.values[1])];
    let [first, second] = [&args.first, &args.second].map(|run| run.display().to_string());
    write!(out, "{}", table(&["", "", &first, &second], &found.iter().map(row).collect::<Vec<_>>()))?;
    Ok(())
}
