//! `lockstep verify`: layouts against one rank, by running both.

use crate::explain::compare::{parse, split};
use crate::failure::{Failure, Result};
use crate::processes::{self, ProcessPlace};
use crate::table::{table, wrapped};
use crate::{ConfigArgs, Format, launch};
use lockstep_config::{Config, DeviceChoice, ModelConfig, TrainConfig, legal};
use lockstep_exec::comm::processes::Waiting;
use lockstep_host::{Devices, Processes};
use lockstep_ir::units::thousands;
use lockstep_ir::{Axes, Layout};
use lockstep_train::{Comparison, Criterion, Promise, compare, shrink};
use serde_json::json;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    /// A layout to check, such as dp=2,zero=1,tp=2,sp,pp=2; several separated by semicolons, or given several times. By default the config's own, or, where
    /// that is one rank, every kind of layout that fits the model on up to 12 ranks.
    #[arg(long = "layouts", value_name = "LAYOUT")]
    layouts: Vec<String>,
    /// Steps to compare.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1000))]
    steps: u64,
    /// Where ranks run: threads of this machine, or a GPU that they share.
    #[arg(long, value_enum, default_value = "cpu")]
    device: Where,
    /// Ranks as processes of this machine instead of threads: over TCP, or with --device cuda over NCCL. Where torchrun, srun or mpirun started this,
    /// ranks are theirs, and layouts of as many ranks are checked.
    #[arg(long)]
    processes: bool,
    /// Let processes share GPUs where there are fewer.
    #[arg(long, requires = "processes")]
    share_gpus: bool,
    /// Check the model as it is, however large.
    #[arg(long)]
    full_size: bool,
    /// How to print it.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Where {
    Cpu,
    Cuda,
}

impl Where {
    fn choice(self) -> DeviceChoice {
        match self {
            Where::Cpu => DeviceChoice::Cpu,
            Where::Cuda => DeviceChoice::Cuda,
        }
    }
}

/// What is tried by default. `a` is the least size of an axis that fits the model, `b` the next.
const KINDS: [&str; 47] = [
    "dp=a",
    "dp=a,zero=1",
    "dp=a,zero=2",
    "dp=a,zero=3",
    "dp=b,zero=3",
    "dp=a,zero=3,no-reshard",
    "dp_replicate=a,dp=a,zero=1",
    "dp_replicate=a,dp=a,zero=3",
    "tp=a",
    "tp=a,sp",
    "tp=b,sp",
    "pp=a",
    "pp=a,gpipe",
    "pp=a,interleaved,virtual=2",
    "pp=a,zb-h1",
    "pp=a,zb-v",
    "pp=b",
    "dp=a,tp=a",
    "dp=a,zero=1,tp=a,sp",
    "dp=a,zero=3,tp=a,sp",
    "dp=a,zero=1,pp=a",
    "dp=a,zero=2,pp=a",
    "dp=a,zero=3,pp=a",
    "dp_replicate=a,dp=a,zero=1,pp=a",
    "tp=a,sp,pp=a",
    "dp=a,tp=a,pp=a",
    "dp=a,zero=1,tp=a,sp,pp=a,gpipe",
    "cp=a",
    "cp=b,context=gather",
    "cp=a,context=latent",
    "cp=a,context=latent,tp=a,sp,pp=a",
    "cp=a,context=a2a",
    "cp=a,context=a2a,tp=a,sp,pp=a",
    "dp=a,zero=3,cp=a",
    "cp=a,tp=a,sp,pp=a",
    "ep=a",
    "ep=b",
    "ep=a,zero=1",
    "dp=a,ep=a",
    "dp=a,zero=1,ep=a",
    "dp=a,zero=2,ep=a",
    "dp=a,zero=3,ep=a",
    "dp_replicate=a,zero=3,ep=a",
    "ep=a,tp=a,sp",
    "ep=a,pp=a",
    "dp=a,zero=1,ep=a,tp=a,sp,pp=a",
    "cp=a,ep=a",
];

/// Largest size of an axis, and most ranks, of what is tried.
const LARGEST_AXIS: usize = 8;
const MOST_RANKS: usize = 12;

/// The kinds of layouts in sizes that divide this model and batch.
fn kinds(config: &Config) -> Vec<Layout> {
    let sizes = |axis: &str, fits: &dyn Fn(&usize) -> bool| -> Vec<(String, String)> {
        let found: Vec<usize> = (2..=LARGEST_AXIS).filter(fits).take(2).collect();
        ["a", "b"].iter().zip(found).map(|(name, size)| (format!("{axis}={name}"), format!("{axis}={size}"))).collect()
    };
    let (extents, batch) = (config.extents(), config.train.global_batch);
    let legal = |text: String| text.parse::<Layout>().is_ok_and(|l| legal::check(&l, &extents).is_empty());
    let all = [
        // Micro-batches are made to fit.
        sizes("dp", &|dp| batch.is_multiple_of(*dp)),
        sizes("dp_replicate", &|dp| batch.is_multiple_of(*dp)),
        sizes("cp", &|cp| legal(format!("cp={cp}"))),
        sizes("ep", &|ep| extents.experts.is_some_and(|all| all.is_multiple_of(*ep)) && batch.is_multiple_of(*ep)),
        sizes("tp", &|tp| legal(format!("tp={tp}"))),
        sizes("pp", &|pp| legal(format!("pp={pp}"))),
    ]
    .concat();
    let named = |kind: &&str| {
        let text = all.iter().fold(kind.to_string(), |text, (name, size)| text.replace(name, size));
        text.parse::<Layout>().ok().filter(|layout| layout.mesh.ranks() <= MOST_RANKS)
    };
    KINDS.iter().filter_map(named).collect()
}

pub fn run(args: Args) -> Result<ExitCode> {
    let place = processes::place()?;
    if let Some(place) = &place {
        processes::end_with_launcher()?;
        let result = Check::new(&args, Some(place)).and_then(|check| check.run(&args, Some(place)));
        let result = result.map_err(|failure| failure.of_rank(place.rank));
        return processes::end_well(result.map(|()| ExitCode::SUCCESS));
    }
    let check = Check::new(&args, None)?;
    if !args.processes {
        return check.run(&args, None).map(|()| ExitCode::SUCCESS);
    }
    if args.format == Format::Json && check.sizes().len() > 1 {
        let text = "layouts of several numbers of ranks are checked by as many sets of processes, each of which prints a table";
        return Err(Failure::request(text, "leave --format json out, or name layouts of one number of ranks"));
    }
    for (ranks, layouts) in check.sizes() {
        if args.device == Where::Cuda {
            launch::require_gpus(ranks, check.config.train.gpu, args.share_gpus)?;
        }
        let code = launch::run_ranks(&args.arguments(&layouts), ranks, args.share_gpus)?;
        if code != ExitCode::SUCCESS {
            return Ok(code);
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl Args {
    /// The same again for one of several processes, with these layouts alone.
    fn arguments(&self, layouts: &[Layout]) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec!["verify".into(), self.config.config.clone().into()];
        let mut add = |flag: &str, value: String| arguments.extend([flag.into(), value.into()]);
        self.config.set.iter().for_each(|set| add("--set", set.clone()));
        layouts.iter().for_each(|layout| add("--layouts", layout.to_string().replace(' ', ",")));
        add("--steps", self.steps.to_string());
        add("--device", if self.device == Where::Cuda { "cuda" } else { "cpu" }.to_owned());
        add("--format", if self.format == Format::Json { "json" } else { "text" }.to_owned());
        arguments.extend(self.full_size.then(|| "--full-size".into()));
        arguments
    }
}

/// What is checked.
struct Check {
    config: Config,
    layouts: Vec<Layout>,
    /// What was made smaller for it.
    smaller: Vec<String>,
}

impl Check {
    /// What these arguments ask for; where this is one of several processes, of layouts of as many ranks. Whoever is asked first warns.
    fn new(args: &Args, place: Option<&ProcessPlace>) -> Result<Self> {
        let aloud = place.is_none_or(|place| place.rank == 0 && !processes::is_launched());
        let config = if aloud { args.config.load()? } else { args.config.load_quietly()? };
        let processes = place.map(|place| place.ranks);
        let mut config = divided(config, &args.layouts)?;
        config.train.device = args.device.choice();
        // Bits are compared.
        config.train.deterministic = args.device == Where::Cuda;
        let mut layouts = layouts(&args.layouts, &config)?;
        if let Some(processes) = processes {
            let named = !args.layouts.is_empty();
            if let Some(layout) = layouts.iter().find(|layout| named && layout.mesh.ranks() != processes) {
                let ranks = layout.mesh.ranks();
                let text = format!("{layout} has {ranks} ranks, and {processes} processes were started");
                return Err(Failure::request(
                    text,
                    format!("start {ranks} processes, or name layouts of {processes} ranks"),
                ));
            }
            layouts.retain(|layout| layout.mesh.ranks() == processes);
        }
        let (config, smaller) = if args.full_size { (config, Vec::new()) } else { shrink(&config, &layouts) };
        // Nothing may be left out of what is said to be checked.
        for layout in &layouts {
            fit(*layout, &config).map_err(|_| {
                let text = format!("{layout} fits the model, but not the smaller one that is run for this check");
                Failure::request(text, "add --full-size")
            })?;
        }
        if layouts.is_empty() {
            let text = match processes {
                None => "no layout of several ranks fits this model and batch".to_owned(),
                Some(processes) => format!("no layout of {processes} ranks fits this model and batch"),
            };
            let hint = "raise train.global_batch, or name one with --layouts";
            return Err(Failure::request(text, hint));
        }
        Ok(Self { config, layouts, smaller })
    }

    /// The layouts by their number of ranks.
    fn sizes(&self) -> BTreeMap<usize, Vec<Layout>> {
        let mut sizes: BTreeMap<usize, Vec<Layout>> = BTreeMap::new();
        self.layouts.iter().for_each(|layout| sizes.entry(layout.mesh.ranks()).or_default().push(*layout));
        sizes
    }

    /// Runs it; of several processes the first prints.
    fn run(&self, args: &Args, place: Option<&ProcessPlace>) -> Result<()> {
        let Self { config, layouts, smaller } = self;
        let (first, text) = (place.is_none_or(|place| place.rank == 0), args.format == Format::Text);
        let devices = match place {
            Some(place) => {
                let start = place.start(Duration::from_secs_f64(config.parallel.timeout), None, Waiting::default())?;
                Devices::of_processes(Processes::join(&start, &config.at(&layouts[0]), place.local)?)
            }
            None => Devices::of(config),
        };
        let mut out = std::io::stdout().lock();
        if first && text {
            write!(out, "{}", self.about(args, &devices))?;
        }
        let (total, mut done) = (layouts.len(), 0);
        let results = compare(&devices, config, layouts, args.steps as usize, &mut |c| {
            done += 1;
            if first {
                eprintln!("{done} of {total}: {}", c.layout);
            }
        })?;
        match args.format {
            Format::Text if first => write!(out, "{}", as_text(&results))?,
            Format::Json if first => {
                let kept = results.iter().all(|c| c.kept);
                let json = json!({ "kept": kept, "smaller": smaller, "steps": args.steps, "layouts": results });
                writeln!(out, "{json:#}")?;
            }
            Format::Text | Format::Json => {}
        }
        let hint = match layouts.iter().zip(&results).all(|(layout, c)| c.kept || layout.expert_bound.is_some()) {
            true => {
                "beyond a bound on the rows of experts nothing is computed: raise it (bound=X, parallel.ep_bound) or leave it out"
            }
            false => "this is a bug in Lockstep, please report it with your config and this table",
        };
        match results.iter().filter(|c| !c.kept).count() {
            0 => Ok(()),
            broken => {
                Err(Failure::run(format!("{broken} of {total} layouts do not compute what one rank computes"), hint))
            }
        }
    }

    /// The model, the batch and where it runs.
    fn about(&self, args: &Args, devices: &Devices) -> String {
        let ModelConfig { layers, dim, heads, kv_heads, ffn, vocab_size, .. } = &self.config.model;
        let TrainConfig { global_batch, seq, micro_batch, device, .. } = &self.config.train;
        let (policy, steps) = (self.config.precision.policy, args.steps);
        let processes = devices.processes_summary().map_or(String::new(), |summary| format!(", {summary}"));
        let about = format!(
            "{layers} layers, dim {dim}, {heads} heads, {kv_heads} kv heads, ffn {ffn}, vocabulary {vocab_size}; {global_batch} \
             sequences of {seq} tokens, {micro_batch} at a time, {policy}, {steps} steps on {device}{processes}"
        );
        let smaller = match self.smaller.is_empty() {
            true => String::new(),
            false => format!("made smaller for this check: {} (--full-size keeps them)", self.smaller.join(", ")),
        };
        wrapped(&about, "  ") + &if smaller.is_empty() { smaller } else { wrapped(&smaller, "  ") }
    }
}

/// The config with micro-batches that all data-parallel layouts can share the batch in: a layout is checked for its sums, and
/// those take any accumulation.
pub(crate) fn divided(mut config: Config, given: &[String]) -> Result<Config> {
    let all = match given {
        [] => kinds(&config),
        _ => split(given).iter().map(|text| parse(text)).collect::<Result<Vec<_>, _>>()?,
    };
    let global = config.train.global_batch;
    let dps: Vec<usize> =
        all.iter().map(|l| l.mesh.size(Axes::SEQUENCES)).filter(|dp| global.is_multiple_of(*dp)).collect();
    let fits = |micro: &usize| dps.iter().all(|dp| global.is_multiple_of(dp * micro));
    if let Some(micro) = (1..=config.train.micro_batch).rev().find(fits) {
        config.train.micro_batch = micro;
    }
    Ok(config)
}

/// The layouts that were named, checked.
pub(crate) fn named(given: &[String], config: &Config) -> Result<Vec<Layout>> {
    split(given).iter().map(|text| fit(parse(text)?, config)).collect()
}

/// The layouts that were asked for, checked; or all kinds that fit.
fn layouts(given: &[String], config: &Config) -> Result<Vec<Layout>> {
    let extents = config.extents();
    let own = config.layout();
    if given.is_empty() && own.mesh.ranks() > 1 {
        return fit(own, config).map(|layout| vec![layout]);
    }
    if given.is_empty() {
        return Ok(kinds(config).into_iter().filter(|layout| legal::check(layout, &extents).is_empty()).collect());
    }
    named(given, config)
}

fn fit(layout: Layout, config: &Config) -> Result<Layout> {
    match legal::check(&layout, &config.extents()).first() {
        None => Ok(layout),
        Some(refusal) => Err(Failure::refused(refusal).about(layout)),
    }
}

/// Every criterion of every layout, and its bound.
fn as_text(results: &[Comparison]) -> String {
    let share = |x: f64| if x == 0.0 { "0".to_owned() } else { format!("{x:.1e}") };
    let (mut rows, mut notes) = (Vec::new(), String::new());
    /// Short, so that layouts have room: the criteria, in their order. Choices of experts, which come last, stand below.
    const TITLES: [&str; 6] = ["loss", "grad", "norm", "state", "update", "eval"];
    let mut header = vec!["layout"];
    // What is promised stands once, in the first line; what is more, or broken, has a line of its own.
    match results.iter().find(|c| c.promise != Promise::Identical) {
        Some(close) => {
            header.extend(TITLES);
            let bounds = close.criteria.iter().take(TITLES.len()).map(|c| share(c.promised));
            rows.push(["at most".to_owned()].into_iter().chain(bounds).collect());
        }
        None => header.push("bits"),
    }
    header.push("");
    for c in results {
        let mut row = vec![c.layout.clone()];
        match c.promise {
            Promise::Identical => row.push(if c.identical { "same" } else { "other" }.to_owned()),
            Promise::Close { .. } => row.extend(c.criteria.iter().take(TITLES.len()).map(|c| share(c.found))),
        }
        row.resize(header.len() - 1, String::new());
        row.push(if c.kept { "kept" } else { "BROKEN" }.to_owned());
        rows.push(row);
        for criterion in c.criteria.iter().filter(|c| c.found > c.promised) {
            let Criterion { name, at, .. } = criterion;
            let (found, bound) = (share(criterion.found), share(criterion.bound));
            let verdict = match (criterion.is_kept(), criterion.raised) {
                (true, _) => "chaos",
                (false, true) => "BROKEN, though chaos counts",
                (false, false) => "BROKEN",
            };
            let text = format!("{}: {name} {found} at {at}, {bound} accepted; {verdict}", c.layout);
            notes.push_str(&wrapped(&text, "  "));
        }
    }
    let flips = |c: &Comparison| {
        let (flipped, _) = c.flipped_choices.filter(|(flipped, _)| *flipped > 0)?;
        let own = c.own_choices.map_or(String::new(), |own| {
            format!(" (loss {}, grad {})", share(own.loss_difference), share(own.gradient_difference))
        });
        Some(format!("{} {}{own}", c.layout, thousands(flipped)))
    };
    if let Some((_, all)) = results.iter().find_map(|c| c.flipped_choices) {
        let which: Vec<String> = results.iter().filter_map(flips).collect();
        let which = if which.is_empty() { "none".to_owned() } else { which.join("; ") };
        let text = format!("of {} choices of experts, those that differ from one rank's: {which}", thousands(all));
        notes.push_str(&wrapped(&text, "  "));
    }
    let replayed: Vec<&Comparison> = results.iter().filter(|c| c.own_choices.is_some()).collect();
    if let Some(Promise::Close { choices, .. }) = replayed.first().map(|c| c.promise) {
        let text = format!(
            "{} of {} layouts chose other experts because they round otherwise. They were run again with one rank's choices replayed, and \
             the table has that; in it at most {} of a step's choices would be others. What follows their number is what they gave \
             with their own.",
            replayed.len(),
            results.len(),
            share(choices)
        );
        notes.push_str(&wrapped(&text, "  "));
    }
    let mut text = table(&header, &rows) + &notes;
    text.push_str(&wrapped(
        "Every step starts from one rank's state. same: the same bits, which is promised there. Differences are shares: loss, norm and \
         eval (evaluation loss) of one rank's; grad and state (of the optimizer) of a tensor's largest element; update: elements of a \
         tensor that have another update with the same gradient.",
        "",
    ));
    if results.iter().flat_map(|c| &c.criteria).any(|c| c.raised && c.found > c.promised) {
        text.push_str(&wrapped(
            "Chaos: one rank alone differs by a 32nd of what is accepted, or more, when its weights change in their last bit.",
            "",
        ));
    }
    text
}
