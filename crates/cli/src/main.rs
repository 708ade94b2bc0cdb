//! The `lockstep` command: parses what the user asks, calls the crates that do it, and shows what they report.
#![forbid(unsafe_code)]

mod bench;
mod bench_checkpoint;
mod bench_collectives;
mod bench_generate;
mod checkpoint;
mod checkpoint_list;
mod checkpoint_tools;
mod config_command;
mod data;
mod doctor;
mod drawing;
mod eval;
mod explain;
mod failure;
mod generate;
mod hardware;
mod host_memory;
mod init;
mod launch;
mod machine;
mod manual;
mod metrics;
mod options;
mod plan;
mod processes;
mod profile;
mod progress;
mod provenance;
mod ranks;
mod rehearse;
mod remedies;
mod report;
mod runs;
mod shell;
mod sites;
mod slurm;
mod style;
mod table;
mod terminal;
mod timeline;
mod train;
mod validate;
mod verify;
mod watch;

use clap::{CommandFactory, Parser, Subcommand};
use options::{ConfigArgs, Format, warn};
use std::process::ExitCode;

/// Trains large language models.
#[derive(Parser)]
#[command(name = "lockstep", version, max_term_width = 80, after_help = failure::EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Write a first config: asks for the task, the model, the data and the GPUs, or takes them as options.
    Init(init::Args),
    /// Train the model that a config describes; resumes by itself if the run directory has a checkpoint.
    #[command(after_help = failure::EXIT_CODES)]
    Train(train::Args),
    /// Train with every rank of the layout as a process of its own, on this machine or as a Slurm job; takes the options of train.
    #[command(after_help = failure::EXIT_CODES)]
    Launch(launch::Args),
    /// Continue a text with a trained model, as it comes.
    Generate(generate::Args),
    /// Loss, perplexity and bits per byte of a trained model on text, or its accuracy on tasks.
    Eval(eval::Args),
    /// Show runs on a live page in the browser, over each other: losses, speed, memory, events.
    Watch(watch::Args),
    /// Write runs into one HTML file that needs nothing else: the live page's charts, memory over time, pipeline, provenance.
    Report(report::Args),
    /// Show what a run has recorded at each step, or print it as CSV or JSON.
    Metrics(metrics::Args),
    /// List the runs of a folder: state, step, losses, speed, hours.
    Runs(runs::RunsArgs),
    /// Show what differs between two runs in config, data, code and result.
    Diff(runs::DiffArgs),
    /// Show what a training step will do and cost: memory, FLOPs, ops. Runs nothing.
    Explain(explain::Args),
    /// Find the fastest layout of a run on some GPUs: how its work is split, its micro-batch, what is recomputed. Runs nothing.
    Plan(plan::Args),
    /// Go through a whole run in small on this machine before the real one: data, steps, validation, a kill, another layout, export.
    Rehearse(rehearse::Args),
    /// Show by running that layouts compute what one rank computes.
    Verify(verify::Args),
    /// Compare predicted step times and memory with measurements that others have published.
    Validate(validate::Args),
    /// Measure this machine's peak matmul, memory and disk rates, the speed of a training step, or that of collectives.
    Bench(bench::Args),
    /// Show what this machine has to train on and what is missing; check kernels.
    Doctor(doctor::Args),
    /// Prepare data, and look at prepared data.
    #[command(subcommand)]
    Data(data::Command),
    /// List the checkpoints of a run; import a Hugging Face model, or export to one.
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
    /// List the config keys with type, default and meaning, or find some.
    Config(config_command::Args),
    /// Print a completion script for a shell: lockstep completions bash.
    Completions(manual::CompletionArgs),
    /// Print the manual page, or write those of all commands into a folder.
    Man(manual::ManArgs),
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    // Kernels and plans take the vector path for granted.
    if let Err(unusable) = lockstep_exec::cpu::Simd::chosen() {
        return failure::Failure::refused(unusable).report();
    }
    options::tell_of_buckets();
    let result = match command {
        Command::Train(args) => return reported(train::run(args)),
        Command::Bench(args) => return reported(bench::run(args)),
        Command::Launch(args) => return reported(launch::run(args)),
        Command::Verify(args) => return reported(verify::run(args)),
        Command::Generate(args) => return reported(generate::run(args)),
        Command::Eval(args) => return reported(eval::run(args)),
        Command::Init(args) => init::run(args),
        Command::Watch(args) => watch::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Metrics(args) => metrics::run(&args),
        Command::Runs(args) => runs::list(&args),
        Command::Diff(args) => runs::diff(&args),
        Command::Explain(args) => explain::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Rehearse(args) => rehearse::run(args),
        Command::Validate(args) => validate::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Data(command) => data::run(command),
        Command::Checkpoint(command) => checkpoint::run(command),
        Command::Config(args) => config_command::run(args),
        Command::Completions(args) => manual::completions(args, &mut Cli::command()),
        Command::Man(args) => manual::man(args, Cli::command()),
    };
    reported(result.map(|()| ExitCode::SUCCESS))
}

fn reported(result: failure::Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|failure| failure.report())
}
