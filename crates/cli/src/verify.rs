//! `lockstep verify`: layouts against one rank, by running both.

use crate::explain::compare::{parse, split};
use crate::failure::Failure;
use crate::table::table;
use crate::{ConfigArgs, Format};
use lockstep_config::Config;
use lockstep_ir::{Layout, legal};
use lockstep_train::{Comparison, Promise, compare, shrink};
use serde_json::json;
use std::io::Write;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    /// A layout to check, such as dp=2,zero=1,tp=2,sp,pp=2; several behind semicolons, or given several times. By default the config's own, or, where
    /// that is one rank, every kind of layout that fits the model on up to 8 ranks.
    #[arg(long = "layouts", value_name = "LAYOUT")]
    layouts: Vec<String>,
    /// Steps to compare.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1000))]
    steps: u64,
    /// Where ranks run: threads of this machine, or a GPU that they share.
    #[arg(long, value_parser = ["cpu", "cuda"], default_value = "cpu")]
    device: String,
    /// Check the model as it is, however large.
    #[arg(long)]
    full_size: bool,
    /// How to print it.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

/// What is tried where nobody says otherwise.
const KINDS: [&str; 18] = [
    "dp=2",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "dp=4,zero=3",
    "tp=2",
    "tp=2,sp",
    "tp=4,sp",
    "pp=2",
    "pp=2,gpipe",
    "pp=4",
    "dp=2,tp=2",
    "dp=2,zero=1,tp=2,sp",
    "dp=2,zero=3,tp=2,sp",
    "dp=2,zero=1,pp=2",
    "tp=2,sp,pp=2",
    "dp=2,tp=2,pp=2",
    "dp=2,zero=1,tp=2,sp,pp=2,gpipe",
];

pub fn run(args: Args) -> Result<(), Failure> {
    let mut config = divided(args.config.load()?, &args.layouts)?;
    config.train.device = args.device;
    // Bits are compared.
    config.train.deterministic = config.train.device == "cuda";
    let layouts = layouts(&args.layouts, &config)?;
    let (config, smaller) = if args.full_size { (config, Vec::new()) } else { shrink(&config, &layouts) };
    // Nothing may be left out of what is said to be checked.
    for layout in &layouts {
        fit(*layout, &config).map_err(|_| {
            let text = format!("{layout} fits the model, but not the smaller one that is run for this check");
            Failure::request(format!("{text}\nhint: add --full-size"))
        })?;
    }
    if layouts.is_empty() {
        let text = "no layout of several ranks fits this model and batch\nhint: raise train.global_batch, or name one with --layouts";
        return Err(Failure::request(text.into()));
    }
    let mut out = std::io::stdout().lock();
    let text = args.format == Format::Text;
    if text {
        let m = &config.model;
        writeln!(
            out,
            "{} layers, dim {}, {} heads, {} kv heads, ffn {}, vocabulary {}; {} sequences of {} tokens, {} at a time, {}, {} steps on {}",
            m.layers,
            m.dim,
            m.heads,
            m.kv_heads,
            m.ffn,
            m.vocab_size,
            config.train.global_batch,
            config.train.seq,
            config.train.micro_batch,
            config.precision.policy,
            args.steps,
            config.train.device
        )?;
        if !smaller.is_empty() {
            writeln!(out, "made smaller for this check: {} (--full-size keeps them)", smaller.join(", "))?;
        }
    }
    let total = layouts.len();
    let mut done = 0;
    let results = compare(&config, &layouts, args.steps as usize, &mut |c| {
        done += 1;
        eprintln!("{done} of {total}: {}", c.layout);
    })?;
    match args.format {
        Format::Text => write!(out, "{}", as_text(&results))?,
        Format::Json => {
            let kept = results.iter().all(|c| c.kept);
            writeln!(
                out,
                "{:#}",
                json!({ "kept": kept, "smaller": smaller, "steps": args.steps, "layouts": results })
            )?;
        }
    }
    match results.iter().filter(|c| !c.kept).count() {
        0 => Ok(()),
        broken => Err(Failure::run(format!(
            "{broken} of {total} layouts do not compute what one rank computes\nhint: this is a bug in Lockstep, please report it with \
             your config and this table"
        ))),
    }
}

/// The config with micro-batches that all data-parallel layouts can share the batch in: a layout is checked for its sums, and
/// those take any accumulation.
pub(crate) fn divided(mut config: Config, given: &[String]) -> Result<Config, Failure> {
    let kinds = KINDS.iter().map(|kind| kind.to_string());
    let all: Vec<String> = if given.is_empty() { kinds.collect() } else { split(given) };
    let parsed = all.iter().map(|text| parse(text)).collect::<Result<Vec<_>, _>>()?;
    let global = config.train.global_batch;
    let dps: Vec<usize> = parsed.iter().map(|l| l.mesh.dp).filter(|dp| global.is_multiple_of(*dp)).collect();
    let fits = |micro: &usize| dps.iter().all(|dp| global.is_multiple_of(dp * micro));
    if let Some(micro) = (1..=config.train.micro_batch).rev().find(fits) {
        config.train.micro_batch = micro;
    }
    Ok(config)
}

/// The layouts that were named, checked.
pub(crate) fn named(given: &[String], config: &Config) -> Result<Vec<Layout>, Failure> {
    split(given).iter().map(|text| fit(parse(text)?, config)).collect()
}

/// The layouts that were asked for, checked; or all kinds that fit.
fn layouts(given: &[String], config: &Config) -> Result<Vec<Layout>, Failure> {
    let shape = config.shape();
    let own = config.layout();
    if given.is_empty() && own.mesh.ranks() > 1 {
        return fit(own, config).map(|layout| vec![layout]);
    }
    if given.is_empty() {
        let all = KINDS.iter().filter_map(|kind| kind.parse::<Layout>().ok());
        return Ok(all.filter(|layout| legal::check(layout, &shape).is_empty()).collect());
    }
    named(given, config)
}

fn fit(layout: Layout, config: &Config) -> Result<Layout, Failure> {
    match legal::check(&layout, &config.shape()).first() {
        None => Ok(layout),
        Some(refusal) => Err(Failure::request(format!("{layout}: {refusal}"))),
    }
}

fn as_text(results: &[Comparison]) -> String {
    let row = |c: &Comparison| {
        let promise = match c.promise {
            Promise::Identical => "same bits".to_owned(),
            Promise::Close { loss, gradient, .. } => format!("loss {loss:.0e}, gradients {gradient:.0e}"),
        };
        let share = |x: f64| if x == 0.0 { "0".to_owned() } else { format!("{x:.1e}") };
        let verdict = if c.kept { "kept" } else { "BROKEN" };
        vec![
            c.layout.clone(),
            c.ranks.to_string(),
            share(c.loss_difference),
            share(c.gradient_difference),
            if c.identical { "-".to_owned() } else { c.worst_gradient.clone() },
            promise,
            verdict.to_owned(),
        ]
    };
    let rows: Vec<Vec<String>> = results.iter().map(row).collect();
    let header = ["layout", "ranks", "loss differs by", "gradients by", "most in", "promised", ""];
    format!(
        "{}differences are shares: of one rank's loss, and of the largest element of a gradient tensor\n",
        table(&header, &rows)
    )
}
