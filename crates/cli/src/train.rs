//! `lockstep train`.

use crate::ConfigArgs;
use crate::failure::Failure;
use crate::progress::Progress;
use lockstep_train::{Outcome, RunOptions};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io::Write;
use std::path::PathBuf;
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
    let name = args.config.config.file_stem().map(PathBuf::from).unwrap_or_else(|| PathBuf::from("run"));
    let dir = args.run_dir.unwrap_or_else(|| PathBuf::from("runs").join(name));
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // A second signal ends the process at once; the last checkpoint stays whole.
        signal_hook::flag::register_conditional_default(signal, stop.clone())?;
        signal_hook::flag::register(signal, stop.clone())?;
    }
    let options = RunOptions { dir: dir.clone(), fresh: args.fresh };
    let mut progress = Progress::new(config.train.steps);
    let result = lockstep_train::run(&config, &options, &stop, &mut |event| progress.show(event));
    progress.clear();
    let outcome = result?;
    writeln!(std::io::stdout(), "{}", summary(&outcome, &config, &dir))?;
    Ok(())
}

fn summary(outcome: &Outcome, config: &lockstep_config::Config, dir: &std::path::Path) -> String {
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
    format!("{losses}finished {steps} steps; checkpoint {checkpoint}, metrics {}", dir.join("metrics.jsonl").display())
}
