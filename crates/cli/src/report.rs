//! `lockstep report`: runs as one file, for a colleague or an appendix.

use crate::drawing::escaped;
use crate::failure::{Failure, Result};
use crate::timeline::{memory_picture, wrote};
use crate::watch::run_dirs;
use crate::{explain, machine};
use lockstep_host::Devices;
use lockstep_ir::graph::Fp8Class;
use lockstep_ir::{Hint, units};
use lockstep_plan::{plan, planned_timeline};
use lockstep_rundir::read_config;
use lockstep_telemetry::{LossComparisons, MetricColumns, RunPage};
use lockstep_train::{WorldChange, analyze, settled};
use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    /// Run directories, or folders of them.
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// The file to write.
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    output: PathBuf,
}

pub fn run(args: &Args) -> Result<()> {
    let runs = run_dirs(&args.runs)?;
    let mut more = String::from("<section class=\"more\" aria-label=\"how the runs were made\">");
    for run in &runs {
        let name = run.canonicalize().unwrap_or_else(|_| run.clone());
        let name = name.file_name().map_or_else(|| "run".into(), |name| name.to_string_lossy().into_owned());
        more += &planned(&name, run);
        more += &recorded(&name, run);
    }
    more += "</section>";
    let hint = "give a file in a folder that is there and can be written: -o report.html";
    let refuse = |e| Failure::request(format!("cannot write {}: {e}", args.output.display()), hint);
    std::fs::write(&args.output, RunPage::new(&runs).file(&more)).map_err(refuse)?;
    wrote("the report, for any browser", &args.output);
    Ok(())
}

fn card(title: &str, inside: &str) -> String {
    format!("<div class=\"card wide\"><h2>{}</h2>{inside}</div>", escaped(title))
}

fn preformatted(text: &str) -> String {
    format!("<pre>{}</pre>", escaped(text.trim_end()))
}

/// What the plan says of a run: the account of a step, memory over time, the pipeline. A machine that cannot plan the run has
/// nothing to say of it.
fn planned(name: &str, run: &Path) -> String {
    let made = || -> Result<String> {
        let config = read_config(&run.join("run.toml"))?;
        let devices = Devices::of(&config);
        let config = settled(&devices, &config, Some(run), &mut |_, _| {})?;
        let plan = plan(&devices, &config)?;
        let mut inside = String::new();
        let several = plan.compiled.programs.len() > 1;
        for program in &plan.compiled.programs {
            let of = if several { format!(", stage {}", program.stage) } else { String::new() };
            let title = format!("planned memory of two steps, {} parameters{of}", units::count(plan.parameters));
            inside += &memory_picture(&title, &planned_timeline(program, 2, None)?);
        }
        inside += &explain::pipeline_picture(&plan).unwrap_or_default();
        inside += &preformatted(&explain::account_text(&devices, &config, &plan)?);
        Ok(inside)
    };
    let inside = made().unwrap_or_else(|failure| {
        format!("<p class=\"hint\">This machine cannot plan the run: {}</p>", escaped(&failure.with_hint()))
    });
    card(&format!("{name}: memory over time, pipeline, account"), &inside)
}

/// What the run directory says: predicted beside measured, the config and where its values came from, versions, changes, failures.
fn recorded(name: &str, run: &Path) -> String {
    let mut out = String::new();
    if let Ok(analysis) = analyze(run) {
        out += &card(&format!("{name}: predicted and measured"), &preformatted(&machine::analysis_text(&analysis)));
    }
    if let Some(text) = MetricColumns::open(&run.join("metrics.jsonl")).ok().and_then(|columns| energy(&columns)) {
        out += &card(&format!("{name}: energy"), &format!("<p>{text}</p>"));
    }
    let text: String = in_fp8(run).iter().map(|text| format!("<p>{text}</p>")).collect();
    if !text.is_empty() {
        out += &card(&format!("{name}: fp8 beside bf16"), &text);
    }
    let text: String = worlds(run).iter().map(|text| format!("<p>{}</p>", escaped(text))).collect();
    if !text.is_empty() {
        out += &card(&format!("{name}: ranks lost and joined"), &text);
    }
    let mut inside = String::new();
    for (file, title) in FILES {
        let Ok(bytes) = lockstep_telemetry::read_file(&run.join(file)) else { continue };
        let text = String::from_utf8_lossy(&bytes);
        if text.trim().is_empty() {
            continue;
        }
        let cut: String = text.chars().take(MOST_CHARACTERS).collect();
        // Writing to a string does not fail.
        let _ = write!(inside, "<details><summary>{title} ({file})</summary>{}</details>", preformatted(&cut));
    }
    out + &card(&format!("{name}: provenance"), &inside)
}

/// What a run has taken, where anything tells.
fn energy(columns: &MetricColumns) -> Option<String> {
    let known = |key: &str| columns.get(key).into_iter().flatten().copied().filter(|value| value.is_finite());
    let mean = |key: &str| {
        let (sum, count) = known(key).fold((0.0, 0), |(sum, count), value| (sum + value, count + 1));
        (count > 0).then(|| sum / f64::from(count))
    };
    let kwh = known("energy_kwh").reduce(f64::max)?;
    let mut text = format!("{} kWh over all starts", four_digits(kwh));
    for (key, unit) in [
        ("power_w", "W"),
        ("gpu_energy_j", "J a step by GPUs"),
        ("cpu_energy_j", "J a step by CPUs"),
        ("energy_per_token_j", "J a token"),
        ("gpu_utilisation_percent", "% GPU utilisation"),
    ] {
        text += &mean(key).map_or_else(String::new, |mean| format!(", {} {unit}", four_digits(mean)));
    }
    Some(text + " (means of all readings).")
}

fn four_digits(value: f64) -> String {
    let digits = if value == 0.0 { 0 } else { (3 - value.abs().log10().floor() as i32).clamp(0, 12) };
    format!("{value:.*}", digits as usize)
}

/// What has become of the ranks of an elastic run, and the share of its time that counted.
fn worlds(run: &Path) -> Vec<String> {
    let events = lockstep_telemetry::read_file(&run.join("events.jsonl")).unwrap_or_default();
    let text = String::from_utf8_lossy(&events).into_owned();
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let world = |event: Value| serde_json::from_value::<WorldChange>(event).ok();
    let mut said: Vec<String> = lines
        .filter(|event| event["event"] == "world")
        .filter_map(world)
        .map(|change| match &change.cause {
            Some(cause) => format!("{change}. {cause}"),
            None => change.to_string(),
        })
        .collect();
    let mut columns = MetricColumns::default();
    let goodput = columns.follow(&run.join("metrics.jsonl")).ok().and_then(|_| columns.get("goodput")?.last().copied());
    said.extend(goodput.map(|share| format!("Goodput: {:.1}% of the time was in steps that count.", 100.0 * share)));
    said
}

/// What fp8 does to a run that has it.
fn in_fp8(run: &Path) -> Vec<String> {
    let mut columns = MetricColumns::default();
    match columns.follow(&run.join("metrics.jsonl")) {
        Ok(_) => [compared(&columns), lost(&columns)].into_iter().flatten().collect(),
        Err(_) => Vec::new(),
    }
}

/// Elements that rounding to fp8 lost in the last step.
fn lost(columns: &MetricColumns) -> Option<String> {
    let shares = |key: &str| {
        let share = |class: Fp8Class| {
            let last = *columns.get(&format!("{key}/{}", class.name()))?.last()?;
            last.is_finite().then(|| format!("{:.4}% of {}", 100.0 * last, class.name()))
        };
        let all: Vec<String> = Fp8Class::ALL.into_iter().filter_map(share).collect();
        (!all.is_empty()).then(|| all.join(", "))
    };
    let (small, large) = (shares("fp8_underflow")?, shares("fp8_overflow")?);
    Some(format!("Elements in the last step that became 0: {small}; that were too large for their scale: {large}."))
}

/// How far losses in fp8 are from those in bf16, where a run has compared them.
fn compared(columns: &MetricColumns) -> Option<String> {
    let all = LossComparisons::of(columns)?;
    let at = |(step, share): (f64, f64)| format!("{:+.4}% at step {step}", 100.0 * share);
    let mut text = format!("Loss in fp8 from that in bf16 on the same tokens, {} comparisons", all.count);
    if let (Some(mean), Some(last), Some(largest)) = (all.mean(), all.differences.last(), all.largest()) {
        text += &format!(": mean {:+.4}%, last {}, largest {}", 100.0 * mean, at(*last), at(largest));
    }
    if all.not_finite > 0 {
        text += &format!("; at {} of them the loss in fp8 was not finite", all.not_finite);
    }
    Some(text + ".")
}

/// Files of a run directory that say how it was made, and what they are.
const FILES: [(&str, &str); 5] = [
    ("run.toml", "config, with the origin of each value"),
    ("plan.json", "plan: program, device, version, memory"),
    ("starts.jsonl", "each start: versions, machine, inputs"),
    ("changes.json", "changes while it ran"),
    ("failures.jsonl", "failures"),
];

/// Most characters of a file that are shown.
const MOST_CHARACTERS: usize = 200_000;
