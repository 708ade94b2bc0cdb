//! `lockstep train`.

use crate::ConfigArgs;
use crate::failure::Failure;
use crate::progress::Progress;
use lockstep_train::{Outcome, RunOptions};
use signal_hook::consts::{SIGINT, SIGTERM};
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
}

pub fn run(args: Args) -> Result<(), Failure> {
    let config = args.config.load()?;
    let dir = args.config.run_dir(args.run_dir);
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // A second signal ends the process at once; the last checkpoint stays whole.
        signal_hook::flag::register_conditional_default(signal, stop.clone())?;
        signal_hook::flag::register(signal, stop.clone())?;
    }
    let options = RunOptions { dir: dir.clone(), fresh: args.fresh };
    let mut progress = Progress::new(config.train.steps);
    let result = lockstep_train::run(&config, &options, &stop, &mut |event| progress.show(event));
    progress.clear();
    let outcome = result?;
    println!("{}", summary(&outcome, &config, &dir));
    Ok(())
}

/// `runs/` and the name of the config.
pub fn default_run_dir(config: &Path) -> PathBuf {
    PathBuf::from("runs").join(config.file_stem().unwrap_or("run".as_ref()))
}

fn summary(outcome: &Outcome, config: &lockstep_config::Config, dir: &Path) -> String {
    let steps = config.train.steps;
    let checkpoint = outcome.checkpoint.as_ref().map_or("none".to_owned(), |p| p.display().to_string());
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
    format!("{losses}finished {steps} steps; checkpoint {checkpoint}, metrics {}", dir.join("metrics.jsonl").display())
}
