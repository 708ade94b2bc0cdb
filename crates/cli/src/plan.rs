//! `lockstep plan`: the fastest layouts of a run on some GPUs, and what they cost.

mod budget;
mod charts;
mod goodput;
mod measure;
mod notes;
mod ranking;
mod reasons;
mod saves;
mod scaling;
mod walk;
mod write;

use crate::failure::{Failure, Result};
use crate::progress::Progress;
use crate::table::wrapped;
use crate::{ConfigArgs, Format, hardware};
use lockstep_exec::cpu;
use lockstep_host::Devices;
use lockstep_plan::{PlanError, Room, SearchRequest, SearchResult, Target, search};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

#[derive(clap::Args)]
pub struct Args {
    /// Config file.
    #[arg(value_name = "RUN.TOML", required_unless_present = "budget")]
    config: Option<PathBuf>,
    /// Override a key: --set train.steps=100.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// The accelerator to plan for: a100, h100, … (any wrong name lists them).
    #[arg(long, value_name = "NAME", conflicts_with = "cluster", required_unless_present_any = ["cluster", "budget", "measure"])]
    gpu: Option<String>,
    /// The cluster to plan for, with its GPUs, nodes and network: leonardo, lumi, … (any wrong name lists them).
    #[arg(long, value_name = "NAME")]
    cluster: Option<String>,
    /// How many GPUs the run has. Without it, as many as the config's layout has ranks.
    #[arg(long, value_name = "COUNT")]
    gpus: Option<u64>,
    /// Tokens of the whole run, for days, GPU-hours and cost; K, M, B and T stand for powers of ten: 15T.
    #[arg(long, value_name = "COUNT")]
    tokens: Option<String>,
    /// What an hour of one GPU costs, in any currency.
    #[arg(long, value_name = "NUMBER", requires = "tokens")]
    price: Option<f64>,
    /// The longest that the run may take: 30d, 12h. With --tokens; where it cannot be met, the number of GPUs that meets it.
    #[arg(long, value_name = "TIME", requires = "tokens")]
    deadline: Option<String>,
    /// Also compare this layout with the first, term by term: "dp=64,zero=1,tp=8,sp". Its micro-batch and what is recomputed are the
    /// best for it.
    #[arg(long, value_name = "LAYOUT")]
    why: Option<String>,
    /// Also show what was left out, by reason.
    #[arg(long)]
    rejected: bool,
    /// Write the keys of the first layout into the config file, and checkpoint.every where it has none; everything else in it stays as it is.
    /// precision.gradients, which changes losses, is not searched then, unless --free lets it be.
    #[arg(long)]
    write: bool,
    /// How many layouts to show.
    #[arg(long, value_name = "COUNT", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=100))]
    top: u16,
    /// Also search keys that the config gives: those of the table parallel, train.micro_batch, recompute.policy and precision.gradients.
    #[arg(long)]
    free: bool,
    /// Instead, walk the usual recipe step by step with the numbers of this model: global batch, what must be sharded, micro-batch,
    /// recomputation, data-parallel ranks, accumulation.
    #[arg(long, conflicts_with_all = ["budget", "measure", "scaling"])]
    recipe: bool,
    /// Instead, show how the recipe scales: throughput and memory against GPUs (strong and weak), micro-batch and sequence length, and time
    /// against GPU-hours or cost.
    #[arg(long, conflicts_with_all = ["budget", "measure"])]
    scaling: bool,
    /// Instead, show how much of the time counts against failures, for the fastest layout on 512 to 16,384 GPUs: with restarts, and with elastic runs,
    /// snapshots in memory and spare nodes.
    #[arg(long, conflicts_with_all = ["budget", "measure", "scaling", "recipe", "why", "rejected", "write"])]
    goodput: bool,
    /// With --scaling: also draw it into this .html, a page of its own.
    #[arg(long, value_name = "FILE", requires = "scaling")]
    html: Option<PathBuf>,
    /// Instead, run micro-batches and recompute policies for a few steps each on this machine, beside what was predicted.
    #[arg(long, conflicts_with_all = ["budget", "gpu", "cluster", "gpus"])]
    measure: bool,
    /// Instead, show which model and how many tokens an amount of compute is best spent on: "2M GPU-hours", "500 GPU-days", "1e24 FLOPs".
    #[arg(long, value_name = "AMOUNT", conflicts_with = "tokens")]
    budget: Option<String>,
    /// With --budget: the share of the accelerator's peak that model FLOPs reach. If it is not given, that of the recipe of a config on
    /// --gpus, or without one 0.4.
    #[arg(long, value_name = "SHARE", requires = "budget")]
    mfu: Option<f64>,
    /// With --budget: the directory of a run that measured its gradient noise scale, for the batch that suits such a model.
    #[arg(long, value_name = "DIR", requires = "budget")]
    run: Option<PathBuf>,
    /// How to print it.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

pub fn run(args: Args) -> Result<()> {
    if args.gpus == Some(0) {
        return Err(Failure::request("--gpus 0 trains nothing", "give a number from 1"));
    }
    let named = hardware::named(args.gpu.as_deref(), args.cluster.as_deref(), args.gpus)?;
    if let Some(text) = &args.budget {
        let mfu = match (args.mfu, &args.config, &named) {
            (Some(mfu), ..) => Some(budget::Mfu::Given(mfu)),
            (None, Some(path), Some(hardware)) => {
                let config = ConfigArgs { config: path.clone(), set: args.set.clone() }.load_description()?;
                Some(budget::Mfu::Recipe(walk::mfu(&Target::on_gpus(config), hardware, args.gpus)?))
            }
            (None, ..) => None,
        };
        let budget = budget::Budget::parse(text, mfu, named.as_ref())?;
        return budget.show(args.run.as_deref(), args.format);
    }
    let config = args.config.clone().ok_or_else(|| Failure::request("plan needs a config", "name one: run.toml"))?;
    let config_args = ConfigArgs { config, set: args.set.clone() };
    if args.measure {
        let config = config_args.load()?;
        let devices = Devices::of(&config);
        let room = devices.room(&config);
        return measure::show(&config_args, &devices, &config, room.as_ref(), args.format);
    }
    let found = named.ok_or_else(|| Failure::request("plan needs to know for what", "add --cluster or --gpu"))?;
    let tokens = args.tokens.as_deref().map(hardware::tokens).transpose()?;
    let config = Target::on_gpus(config_args.load_description()?);
    let gpus = args.gpus.map_or(config.layout().mesh.ranks(), |gpus| gpus as usize);
    let devices = Devices::of(&config);
    let room = Room::of(&found.gpu);
    if args.scaling {
        let (hardware, room, price) = (&found, &room, args.price);
        let asked = scaling::Asked { devices: &devices, config: &config, hardware, room, gpus, tokens, price };
        return asked.show(args.html.as_deref(), args.format);
    }
    if args.recipe {
        return walk::show(&devices, &config, &found, &room, gpus, tokens, args.format);
    }
    let asked = SearchRequest {
        machine: &devices,
        config: &config,
        gpus,
        hardware: &found,
        room: &room,
        free: args.free,
        // What is written computes the same losses as the config, unless the user lets it change.
        fixed: if args.write && !args.free { &["precision.gradients"] } else { &[] },
        trainer: None,
        wanted: usize::from(args.top),
        threads: cpu::cores(),
    };
    let deadline = args.deadline.as_deref().map(reasons::days).transpose()?;
    let result = match searched(&asked) {
        Err(PlanError::NoLayout(why)) if why.too_large => return Err(reasons::nothing_fits(&asked, &why)),
        found => found?,
    };
    if let (Some(days), Some(tokens), Some(best)) = (deadline, tokens, result.best.first()) {
        reasons::meet(&asked, best, tokens, days)?;
    }
    if let (true, Some(best)) = (args.goodput, result.best.first()) {
        return goodput::show(&config, best, &found, gpus, args.format);
    }
    let why = args.why.as_deref().map(|text| reasons::why(&asked, text)).transpose()?;
    let saves = result.best.first().map(|best| saves::Saves::new(&config, &best.evaluated, &found, gpus));
    let notes = notes::of(&asked, &result.best);
    let ranking = ranking::Ranking::new(result, &config, &found, gpus, tokens, args.price);
    let mut out = std::io::stdout().lock();
    match args.format {
        Format::Json => {
            let mut value = ranking.as_json();
            value["checkpoint"] = json!(saves.as_ref().map(saves::Saves::as_json));
            value["notes"] = json!(notes);
            value["why"] = json!(why.as_ref().map(|other| ranking.layout_json(other)));
            writeln!(out, "{value:#}")?;
        }
        Format::Text => {
            write!(out, "{}", ranking.as_text())?;
            for note in &notes {
                write!(out, "\n{}", wrapped(note, "  "))?;
            }
            write!(out, "{}", saves.as_ref().map_or(String::new(), |saves| wrapped(&saves.as_text(), "  ")))?;
            if let (Some(other), Some(best)) = (&why, ranking.best()) {
                write!(out, "{}", reasons::compared(best, other, &room, gpus))?;
            }
            if args.rejected {
                write!(out, "{}", ranking.rejected())?;
            }
            let unbounded = config.model.experts.is_some() && config.parallel.ep_bound.is_none();
            if unbounded && !config.is_given("parallel.ep") {
                write!(out, "\n{}", wrapped(UNBOUNDED, "  "))?;
            }
        }
    }
    if let (true, Some(best)) = (args.write, ranking.best()) {
        write::keys(&config_args, &config, best, saves.as_ref().map(saves::Saves::steps))?;
    }
    Ok(())
}

const UNBOUNDED: &str = "parallel.ep_bound is not set: a layout with ep then has room for all tokens of a rank at any other, ep times an even share, \
                         and is slow. With --set parallel.ep_bound=2 it has room for twice an even share (docs/experts.md).";

/// Searches, and shows how far it is.
fn searched(asked: &SearchRequest) -> Result<SearchResult, PlanError> {
    let progress = Mutex::new(Progress::new(0));
    let result = search(asked, &|small, compiled| {
        let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.found("searching layouts: small programs", small, "whole programs", compiled);
    });
    progress.lock().unwrap_or_else(PoisonError::into_inner).clear();
    result
}
