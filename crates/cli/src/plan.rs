//! `lockstep plan`: the fastest layouts of a run on some GPUs, and what they cost.

mod ranking;

use crate::failure::Failure;
use crate::progress::Progress;
use crate::{ConfigArgs, Format, hardware};
use lockstep_config::count;
use lockstep_exec::cpu;
use lockstep_plan::{Room, SearchRequest, Target, search};
use lockstep_train::Devices;
use std::io::Write;
use std::sync::{Mutex, PoisonError};

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    /// The accelerator to plan for: a100, h100, … (any wrong name lists them).
    #[arg(long, value_name = "NAME", conflicts_with = "cluster", required_unless_present = "cluster")]
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
    /// How many layouts to show.
    #[arg(long, value_name = "COUNT", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=100))]
    top: u16,
    /// Also search keys that the config gives: those of [parallel], train.micro_batch, recompute.policy and precision.gradients.
    #[arg(long)]
    free: bool,
    /// How to print it.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

pub fn run(args: Args) -> Result<(), Failure> {
    let request = |what: String, hint: &str| Failure::request(format!("{what}\nhint: {hint}"));
    if args.gpus == Some(0) {
        return Err(request("--gpus 0 trains nothing".into(), "give a number from 1"));
    }
    let named = hardware::named(args.gpu.as_deref(), args.cluster.as_deref(), args.gpus)?;
    let found = named.ok_or_else(|| request("plan needs to know for what".into(), "add --cluster or --gpu"))?;
    let tokens =
        match &args.tokens {
            None => None,
            Some(text) => Some(count(text).filter(|n| *n > 0).ok_or_else(|| {
                request(format!("--tokens {text} is not a count"), "give a count such as 300B or 15T")
            })?),
        };
    let config = Target::on_gpus(args.config.load()?);
    let gpus = args.gpus.map_or(config.layout().mesh.ranks(), |gpus| gpus as usize);
    let devices = Devices::of(&config);
    let room = Room::of(&found.gpu);
    let asked = SearchRequest {
        machine: &devices,
        config: &config,
        gpus,
        hardware: &found,
        room: &room,
        free: args.free,
        wanted: usize::from(args.top),
        threads: cpu::cores(),
    };
    let progress = Mutex::new(Progress::new(0));
    let result = search(&asked, &|done, total| {
        let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.work("layouts compiled", done as u64, total as u64, |n| n.to_string());
    });
    progress.lock().unwrap_or_else(PoisonError::into_inner).clear();
    let ranking = ranking::Ranking::new(result?, &found, gpus, tokens, args.price);
    let mut out = std::io::stdout().lock();
    match args.format {
        Format::Json => writeln!(out, "{:#}", ranking.as_json())?,
        Format::Text => write!(out, "{}", ranking.as_text())?,
    }
    Ok(())
}
