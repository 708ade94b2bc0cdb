//! `lockstep train`.

use crate::ConfigArgs;
use crate::failure::Failure;
use crate::profile::{as_text, write_trace};
use crate::progress::Progress;
use crate::style;
use crate::terminal::printable;
use lockstep_train::{Outcome, RunOptions};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io::Write;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    /// Where the run's files go; `runs/` and the name of the config if not given.
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Start over: what the run directory holds is moved to a folder inside it.
    #[arg(long)]
    fresh: bool,
    /// Profile these steps, first and last: 5:8. Prints the time per op and writes a Chrome trace into the run directory.
    #[arg(long, value_name = "FIRST:LAST", value_parser = steps)]
    profile_steps: Option<RangeInclusive<u64>>,
}

/// `5:8`, or one step alone.
fn steps(text: &str) -> Result<RangeInclusive<u64>, String> {
    let (first, last) = text.split_once(':').unwrap_or((text, text));
    match (first.trim().parse(), last.trim().parse()) {
        (Ok(first), Ok(last)) if 1 <= first && first <= last => Ok(first..=last),
        _ => Err("give the first and the last step, counted from 1, such as 5:8".into()),
    }
}

pub fn run(args: Args) -> Result<(), Failure> {
    let config = args.config.load()?;
    let dir = args.config.run_dir(args.run_dir);
    let stop = on_interrupt()?;
    let profile_steps = args.profile_steps.clone();
    let options = RunOptions { dir: dir.clone(), fresh: args.fresh, sample_tokens: SAMPLE_TOKENS, profile_steps };
    let mut progress = Progress::new(config.train.steps);
    let result = lockstep_train::run(&config, &options, &stop, &mut |event| progress.show(event));
    progress.clear();
    let outcome = result?;
    if let Some(steps) = &args.profile_steps {
        show_profile(steps, &outcome, &dir)?;
    }
    writeln!(std::io::stdout(), "{}", summary(&outcome, &config, &dir))?;
    if outcome.finished {
        let _ = write!(std::io::stderr(), "{}", afterwards(&outcome, &args.config.config, &dir));
    }
    Ok(())
}

/// Prints where the time of the profiled steps went, and writes their trace.
fn show_profile(steps: &RangeInclusive<u64>, outcome: &Outcome, dir: &Path) -> Result<(), Failure> {
    let (first, last) = (steps.start(), steps.end());
    let Some(profile) = &outcome.profile else {
        let text = format!("warning: no step from {first} to {last} was taken: nothing to profile");
        let _ = writeln!(std::io::stderr(), "{}", style::message(&text));
        return Ok(());
    };
    write_trace(profile, &dir.join(format!("profile-{first}-{last}.json")))?;
    let mean = if profile.steps == 1 { String::new() } else { format!(", mean of {} steps", profile.steps) };
    write!(std::io::stdout(), "time per op of a step{mean}\n{}", as_text(profile))?;
    Ok(())
}

/// A flag that an interrupt sets. A second one ends the process at once; what is on the disk stays whole.
pub fn on_interrupt() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register_conditional_default(signal, stop.clone())?;
        signal_hook::flag::register(signal, stop.clone())?;
    }
    Ok(stop)
}

/// Most tokens of the sample at the end of a run.
const SAMPLE_TOKENS: usize = 200;

/// What the model writes now, and what to try next. On stderr: the result of the command is the summary.
fn afterwards(outcome: &Outcome, config: &Path, dir: &Path) -> String {
    let mut text = String::new();
    let mut prompt = "The".to_owned();
    if let Some(sample) = &outcome.sample {
        text = format!(
            "\na sample: the model continues {:?} from the data\n{}\n",
            sample.prompt,
            printable(sample.text.trim_end())
        );
        prompt = first_words(&sample.prompt).unwrap_or(prompt);
    }
    // As it was called, so that the lines can be copied.
    let lockstep = std::env::args().next().unwrap_or_else(|| "lockstep".to_owned());
    let (config, dir) = (config.display(), dir.display());
    text + &format!(
        "\ntry next:\n  {lockstep} generate {dir} --prompt '{prompt}'\n  {lockstep} eval {dir} --validation\n  {lockstep} explain {config}\n"
    )
}

/// The beginning of a text as far as it can stand between single quotes on a command line.
fn first_words(text: &str) -> Option<String> {
    let plain = text.trim_start().split(|c: char| c.is_control() || "'!\\".contains(c)).next()?.trim_end();
    (!plain.is_empty()).then(|| plain.to_owned())
}

/// `runs/` and the name of the config.
pub fn default_run_dir(config: &Path) -> PathBuf {
    PathBuf::from("runs").join(config.file_stem().unwrap_or("run".as_ref()))
}

fn summary(outcome: &Outcome, config: &lockstep_config::Config, dir: &Path) -> String {
    let steps = config.train.steps;
    let Some(path) = &outcome.checkpoint else {
        return format!("interrupted before the first step of {steps}\nthe same command again starts the run");
    };
    let checkpoint = path.display();
    if !outcome.finished {
        return format!(
            "interrupted after step {} of {steps}; checkpoint {checkpoint}\nthe same command again resumes",
            outcome.step
        );
    }
    let losses = match (outcome.first_val_loss, outcome.last_val_loss) {
        (Some(first), Some(last)) => format!("held-out loss {first:.3} -> {last:.3} nats per token\n"),
        _ => String::new(),
    };
    let noise = outcome.noise_scale.map_or(String::new(), |sequences| {
        let tokens = lockstep_ir::units::count((sequences * config.train.seq as f64).round() as u64);
        format!("gradient noise scale {sequences:.1} sequences: a critical batch of {tokens} tokens\n")
    });
    format!(
        "{losses}{noise}finished {steps} steps; checkpoint {checkpoint}, metrics {}",
        dir.join("metrics.jsonl").display()
    )
}
