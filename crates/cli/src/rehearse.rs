//! `lockstep rehearse`: a whole run in small, before the real one.

use crate::explain::compare::placed;
use crate::explain::forecast::Predicted;
use crate::failure::{Failure, Result};
use crate::progress::Progress;
use crate::table::wrapped;
use crate::train::on_interrupt;
use crate::{ConfigArgs, Format, style};
use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_infer::{ExportOptions, export};
use lockstep_ir::Hint;
use lockstep_ir::units::{self, thousands};
use lockstep_plan::{Plan, Rates, plan, ways_to_fit};
use lockstep_train::{RehearsalData, check_beginnings, check_places, check_tokenizer, other_layout};
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    /// The run directory that the real run will have, as `train` takes it: nothing is left there.
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Where the files of the small run go, and stay; a temporary folder if not given.
    #[arg(long, value_name = "DIR")]
    work: Option<PathBuf>,
    /// The accelerator that the real run will have, one for each rank: whether the layout fits, and what the run costs. a100, h100, …
    #[arg(long, value_name = "NAME", conflicts_with = "cluster")]
    gpu: Option<String>,
    /// The cluster that the real run is for: the same with its GPUs, nodes and network. leonardo, lumi, …
    #[arg(long, value_name = "NAME")]
    cluster: Option<String>,
    /// How to print it.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

/// Steps of the small run. Where it is done before it could be killed, there are four times as many, so often.
const STEPS: u64 = 24;
const TRIES: u32 = 3;

/// How often it is looked how far a small run is.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Lines of a process that has failed that are shown.
const LINES_SHOWN: usize = 12;

pub fn run(args: Args) -> Result<()> {
    let config = args.config.load()?;
    let run_dir = args.config.run_dir(args.run_dir.clone());
    let stop = on_interrupt()?;
    let temporary = tempfile::tempdir()?;
    let work = args.work.as_deref().unwrap_or(temporary.path());
    std::fs::create_dir_all(work)?;
    if work.join("run").exists() {
        return Err(Failure::request(
            format!("{} has a rehearsal already", work.display()),
            "name another folder with --work, or remove it",
        ));
    }
    let passing = args.work.is_none().then(|| temporary.path().display().to_string());
    let mut list = List { text: args.format == Format::Text, items: Vec::new(), stop: &stop, passing };
    let devices = Devices::of(&config);
    let hardware = crate::hardware::named(args.gpu.as_deref(), args.cluster.as_deref(), None)?;
    let mut predicted = None;
    let real = list.prove("layout", || {
        let (config, room) = placed(&devices, config.clone(), hardware.as_ref())?;
        let plan = plan(&devices, &config)?;
        predicted = match &hardware {
            Some(hardware) => Some(Predicted::new(&config, &plan, hardware)?),
            None => Predicted::here(&devices, &plan)?,
        };
        let verdict = room.as_ref().map(|room| room.verdict(&plan.stages, plan.layout.mesh.ranks()));
        if let (Some(verdict), Some(room)) = (verdict.as_ref().filter(|verdict| !verdict.fits), &room) {
            let rates = hardware.as_ref().map(Rates::Catalogue);
            let ways = ways_to_fit(&devices, &config, room, rates)?;
            let elsewhere = "if the run is for another machine, name it: --gpu h100, or --cluster leonardo";
            let hint = hardware.is_none().then(|| elsewhere.to_owned());
            return Err(Failure::failed(format!("{} {verdict}\n{ways}", plan.layout), hint));
        }
        let fits = verdict.map_or(String::new(), |verdict| format!("; {verdict}"));
        let ranks = plan.layout.mesh.ranks();
        let named = if ranks == 1 { "one rank".to_owned() } else { format!("{ranks} ranks ({})", plan.layout) };
        Ok((format!("{} parameters on {named}{fits}", units::count(plan.parameters)), plan))
    })?;
    list.prove("tokenizer", || Ok((check_tokenizer(&config)?, ())))?;
    let data = list.prove("data", || {
        let mut progress = Progress::new(0);
        let data = RehearsalData::look(&config, &run_dir, work, &stop, &mut |done, total| {
            progress.work("reading data", done, total, units::bytes);
        });
        progress.clear();
        let data = data?;
        Ok((data.found.clone(), data))
    })?;
    if let Some(data) = &data {
        list.prove("validation", || Ok((data.validation(&config)?, ())))?;
    }
    list.prove("checkpoint folder", || {
        let bytes = real.as_ref().map_or(0, Plan::checkpoint_bytes);
        let warn = &mut |text: &str| crate::warn(&[text.to_owned()]);
        Ok((check_places(&config, &run_dir, bytes, warn)?, ()))
    })?;
    if !config.task_paths().is_empty() || config.train.init_from.is_some() {
        list.prove("beginnings", || Ok((check_beginnings(&config)?.unwrap_or_default(), ())))?;
    }
    // What is wrong with the real run ends its rehearsal: a small one would say it once more, or hide it.
    if let (Some(data), 0) = (&data, list.faults()) {
        Small { config: &config, data, work, stop: &stop }.go(&mut list)?;
    }
    let cost = real.as_ref().map(|plan| cost(&config, plan, predicted.as_ref()));
    args.format.print(
        || json!({ "faults": list.faults(), "proven": list.items, "predicted": cost.as_ref().map(|cost| &cost.value) }),
        || cost.as_ref().map_or(String::new(), |cost| wrapped(&cost.text, "  ")),
    )?;
    match list.faults() {
        0 => Ok(()),
        faults => {
            let names: Vec<&str> = list
                .items
                .iter()
                .filter(|item| item["fault"].is_string())
                .filter_map(|item| item["what"].as_str())
                .collect();
            let count = if faults == 1 { "1 fault".to_owned() } else { format!("{faults} faults") };
            Err(Failure::run(
                format!("{count}: {}", names.join(", ")),
                "mend what is said above and rehearse again; the real run would have met it",
            ))
        }
    }
}

/// What was tried, in order.
struct List<'a> {
    text: bool,
    items: Vec<Value>,
    stop: &'a AtomicBool,
    /// A folder that is gone when the command ends: nobody is sent there.
    passing: Option<String>,
}

impl List<'_> {
    /// What went wrong, without the folder that will be gone: its files by their names, and how to keep them.
    fn lasting(&self, failure: Failure) -> Failure {
        let Some(folder) = self.passing.as_ref().filter(|folder| failure.with_hint().contains(*folder)) else {
            return failure;
        };
        let short = |text: String| text.replace(&format!("{folder}/"), "").replace(folder, "the rehearsal's folder");
        let keeps = "--work DIR keeps the files of the small run";
        failure.reworded(|text, hint| {
            let hint = hint.map_or_else(|| keeps.to_owned(), |hint| format!("{}; {keeps}", short(hint)));
            (short(text), Some(hint))
        })
    }

    /// Tries something, and says what came of it and how long it took. Gives nothing where it found a fault.
    fn prove<T>(&mut self, what: &str, f: impl FnOnce() -> Result<(String, T)>) -> Result<Option<T>> {
        if self.stop.load(Ordering::SeqCst) {
            return Err(Failure::run("interrupted", "rehearse again; nothing of the real run was touched"));
        }
        let start = Instant::now();
        let (found, value) = match f() {
            Ok((found, value)) => (Ok(found), Some(value)),
            Err(failure) => (Err(self.lasting(failure).with_hint()), None),
        };
        let seconds = start.elapsed().as_secs_f64();
        if self.text {
            let mut out = std::io::stdout().lock();
            let (good, text) = match &found {
                Ok(text) => (true, text),
                Err(text) => (false, text),
            };
            let verdict = style::verdict(good, if good { "proven" } else { "FAULT " });
            let mut lines = text.lines();
            let first = lines.next().unwrap_or_default();
            write!(
                out,
                "{}",
                wrapped(&format!("{verdict}  {what}: {first} ({})", units::seconds(seconds)), "        ")
            )?;
            lines.try_for_each(|line| write!(out, "{}", wrapped(&format!("        {line}"), "          ")))?;
        }
        let mut item = json!({ "what": what, "seconds": seconds });
        match found {
            Ok(text) => item["proven"] = json!(text),
            Err(text) => item["fault"] = json!(text),
        }
        self.items.push(item);
        Ok(value)
    }

    fn faults(&self) -> usize {
        self.items.iter().filter(|item| item["fault"].is_string()).count()
    }
}

/// The small run.
struct Small<'a> {
    config: &'a Config,
    data: &'a RehearsalData,
    work: &'a Path,
    stop: &'a AtomicBool,
}

impl Small<'_> {
    fn go(&self, list: &mut List<'_>) -> Result<()> {
        let Some((run, config, killed)) = list.prove("train, save, kill", || self.train_and_kill())? else {
            return Ok(());
        };
        let resumed = list.prove("resume on another layout", || {
            let other = other_layout(&config);
            let file = self.write(&other, "other.toml")?;
            let status = self.start(&file, &run)?.wait()?;
            self.require_success(status)?;
            let (lines, starts) = (read_lines(&run.join("metrics.jsonl")), read_lines(&run.join("starts.jsonl")));
            let last = lines.last().cloned().unwrap_or_default();
            let from = starts.last().and_then(|start| start["step"].as_u64()).unwrap_or(0);
            let steps: Vec<u64> = lines.iter().filter_map(|line| line["step"].as_u64()).collect();
            if from == 0 || steps != (1..=config.train.steps).collect::<Vec<_>>() {
                return Err(Failure::run(
                    format!(
                        "killed after step {killed}, it began at step {from} and has {} of {} steps",
                        steps.len(),
                        config.train.steps
                    ),
                    "this is a bug in Lockstep, please report it with your config",
                ));
            }
            let (first, loss) = (&lines[0]["loss"], &last["loss"]);
            let losses = match (first.as_f64(), loss.as_f64()) {
                (Some(first), Some(loss)) => format!("loss {first:.3} -> {loss:.3}"),
                _ => {
                    return Err(Failure::run(
                        "the loss is not finite",
                        "lower optimizer.lr, or set precision.policy = \"bf16\"",
                    ));
                }
            };
            let (from_layout, to) = (config.layout(), other.layout());
            Ok((format!("{from_layout} -> {to}, from step {from} to {}; {losses}", config.train.steps), lines))
        })?;
        let Some(lines) = resumed else { return Ok(()) };
        if config.train.validation_sequences > 0 && self.data.validation(self.config).is_ok() {
            list.prove("validate", || {
                let losses: Vec<f64> = lines.iter().filter_map(|line| line["val_loss"].as_f64()).collect();
                match (losses.first(), losses.last()) {
                    (Some(first), Some(last)) => {
                        Ok((format!("{} times, validation loss {first:.3} -> {last:.3}", losses.len()), ()))
                    }
                    // A small excerpt may hold out less than a sequence.
                    _ if self.data.partial => Ok(("the excerpt is too short for it".into(), ())),
                    _ => {
                        Err(Failure::run("no validation loss was taken", "raise data.validation_fraction, or add text"))
                    }
                }
            })?;
        }
        list.prove("export", || {
            let out = self.work.join("hf");
            // The weights beside adapters are not those of the real run: merging shows nothing.
            let adapter = self.config.lora.rank.is_some();
            let exported = export(&run, &out, ExportOptions { adapter, ..ExportOptions::default() }, &mut |_, _| ())?;
            let what = if adapter { "PEFT folder of adapters" } else { "Hugging Face folder" };
            Ok((format!("{what} of step {}", exported.step), ()))
        })?;
        Ok(())
    }

    /// Trains in a process that is killed once it has saved a checkpoint. Gives the run, its config, and the steps it was seen to
    /// have done.
    fn train_and_kill(&self) -> Result<(String, (PathBuf, Config, u64))> {
        for attempt in 0..TRIES {
            let (config, changed) = self.data.small_run(STEPS << (2 * attempt));
            let file = self.write(&config, "small.toml")?;
            let run = self.work.join(if attempt == 0 { "run".to_owned() } else { format!("run-{attempt}") });
            let mut child = self.start(&file, &run)?;
            let killed = loop {
                if let Some(status) = child.try_wait()? {
                    self.require_success(status)?;
                    break None;
                }
                if self.stop.load(Ordering::SeqCst) {
                    child.kill()?;
                    child.wait()?;
                    return Err(Failure::run("interrupted", "rehearse again"));
                }
                let saved = std::fs::read_dir(run.join("checkpoints")).is_ok_and(|folder| {
                    folder.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("step-"))
                });
                if saved {
                    // SIGKILL: it cannot be caught.
                    child.kill()?;
                    let status = child.wait()?;
                    break (!status.success()).then(|| read_lines(&run.join("metrics.jsonl")).len() as u64);
                }
                std::thread::sleep(LOOK_EVERY);
            };
            if let Some(steps) = killed {
                let ranks = config.layout().mesh.ranks();
                let on =
                    if ranks == 1 { "one rank".to_owned() } else { format!("{ranks} ranks ({})", config.layout()) };
                let smaller =
                    if changed.is_empty() { String::new() } else { format!("; made smaller: {}", changed.join(", ")) };
                let found = format!("{steps} steps on {on}, a checkpoint, SIGKILL{smaller}");
                return Ok((found, (run, config, steps)));
            }
        }
        Err(Failure::run(
            "the small run was done before it could be killed",
            "rehearse on a machine that is less quick, or report this",
        ))
    }

    /// Writes a config as it is resolved.
    fn write(&self, config: &Config, name: &str) -> Result<PathBuf> {
        let mut config = config.clone();
        // The real run's is not touched.
        config.checkpoint.mirror =
            config.checkpoint.mirror.map(|_| absolute(self.work).join("mirror").display().to_string());
        let path = self.work.join(name);
        std::fs::write(&path, config.resolved_toml())?;
        Ok(path)
    }

    /// Starts a training process of its own.
    fn start(&self, config: &Path, run: &Path) -> Result<Child> {
        let log = File::create(self.work.join("train.log"))?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("train").arg(config).arg("--run-dir").arg(run).arg("--quiet");
        Ok(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn()?)
    }

    /// Says what a process said that has failed.
    fn require_success(&self, status: ExitStatus) -> Result<()> {
        if status.success() {
            return Ok(());
        }
        let log = std::fs::read_to_string(self.work.join("train.log")).unwrap_or_default();
        let from = log.find("error: ").map_or(0, |at| at + "error: ".len());
        let mut lines: Vec<&str> = log[from..].lines().take(LINES_SHOWN).collect();
        let hint = lines.iter().position(|line| line.starts_with("hint: ")).map(|at| lines.split_off(at).join("\n"));
        Err(Failure::failed(lines.join("\n"), hint.map(|hint| hint["hint: ".len()..].to_owned())))
    }
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// The objects of a file of JSON lines. One that was not written to its end is none.
fn read_lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// What the real run will cost.
struct RunCost {
    text: String,
    value: Value,
}

fn cost(config: &Config, plan: &Plan, predicted: Option<&Predicted>) -> RunCost {
    let tokens = config.batches().at(config.train.steps).first_sample * config.train.seq as u64;
    let flops = plan.model_flops_per_token() * tokens as f64;
    let mut text = format!(
        "the real run: {} steps, {} tokens, {flops:.2e} model FLOPs",
        thousands(config.train.steps),
        units::count(tokens)
    );
    let mut value = json!({ "steps": config.train.steps, "tokens": tokens, "model_flops": flops });
    match predicted {
        None => {
            text.push_str("; how long it takes is not known: name --gpu or --cluster, or measure this machine (lockstep bench --save NAME)");
        }
        Some(predicted) => {
            let (step_s, speed) = (predicted.forecast.step_s, predicted.forecast.tokens_per_s);
            let (seconds, ranks) = (tokens as f64 / speed, plan.layout.mesh.ranks() as u64);
            let hours = seconds / 3600.0 * ranks as f64;
            let (step, rate, days) = (units::seconds(step_s), units::count(speed as u64), seconds / 86_400.0);
            let (on, used) = (format!("{} × {}", thousands(ranks), predicted.place()), thousands(hours.round() as u64));
            text += &format!("; predicted {step} a step, {rate} tokens/s, {days:.1} days on {on}: {used} GPU-hours");
            value["step_s"] = json!(step_s);
            value["tokens_per_s"] = json!(speed);
            value["days"] = json!(seconds / 86_400.0);
            value["gpu_hours"] = json!(hours);
            value["ranks"] = json!(ranks);
            value["place"] = json!(predicted.place());
        }
    }
    RunCost { text: text + "\n", value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_will_be_gone_is_not_named() {
        let stop = AtomicBool::new(false);
        let mut list = List { text: false, items: Vec::new(), stop: &stop, passing: Some("/tmp/.x1".into()) };
        let said = || Failure::run("/tmp/.x1/run is in use", "wait for it, or choose another --run-dir");
        let shown = "run is in use\nhint: wait for it, or choose another --run-dir; --work DIR keeps the files of the small run";
        assert_eq!(list.lasting(said()).with_hint(), shown);
        assert_eq!(list.lasting(Failure::failed("no such file", None)).with_hint(), "no such file");
        list.passing = None;
        assert_eq!(list.lasting(said()).with_hint(), said().with_hint());
    }
}
