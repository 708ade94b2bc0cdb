//! `lockstep train`.

use crate::failure::{Failure, INTERRUPTED, Result};
use crate::host_memory::in_host;
use crate::processes::{self, ProcessPlace};
use crate::profile::{as_text, write_trace};
use crate::progress::{Progress, change};
use crate::provenance::started_by;
use crate::shell::shell_quoted;
use crate::terminal::printable;
use crate::{ConfigArgs, remedies, style, warn};
use lockstep_checkpoint::list;
use lockstep_config::{Config, DataFormat};
use lockstep_exec::comm::processes::Waiting;
use lockstep_host::{Devices, Elastic, Processes};
use lockstep_infer::HubNeed;
use lockstep_ir::units;
use lockstep_rundir::{StartedBy, TakenFromHub, read_config};
use lockstep_train::{DryData, DryRun, ElasticStart, Event, Outcome, RunOptions, dry_run};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use std::ffi::OsString;
use std::io::Write;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub config: RunSource,
    /// Where the run's files go; `runs/` and the name of the config if not given.
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Start over: what the run directory holds is moved to a folder inside it.
    #[arg(long)]
    fresh: bool,
    /// Profile these steps, first and last: 5:8. Prints the time per op and writes a Chrome trace into the run directory.
    #[arg(long, value_name = "FIRST:LAST", value_parser = steps)]
    profile_steps: Option<RangeInclusive<u64>>,
    /// Resume from the checkpoint of this step instead of the latest. Later checkpoints and the metrics as they were are
    /// moved to a folder inside the run directory; `checkpoint list` shows which steps there are.
    #[arg(long, value_name = "STEP", conflicts_with = "fresh")]
    resume_from: Option<u64>,
    /// Resume with another value from here on: --change train.steps=2000, --change optimizer.lr=1e-4. The run directory
    /// records it with its step, and later resumes keep it. What would corrupt the run is refused: the shape of the model,
    /// the order of the data.
    #[arg(long, value_name = "KEY=VALUE", conflicts_with = "fresh")]
    change: Vec<String>,
    /// Look at all that every op makes, and end with the first number that is NaN or infinite: its tensor, op, layer and micro-batch.
    /// Slower; on a GPU without CUDA graphs.
    #[arg(long)]
    debug_nans: bool,
    /// Show nothing but warnings, errors and the final line.
    #[arg(long)]
    quiet: bool,
    /// Check the config, the run directory, the data's paths and the memory, say what would be done, and start nothing.
    #[arg(long)]
    pub dry_run: bool,
}

/// The config of a run: a file, or another run.
#[derive(clap::Args)]
pub struct RunSource {
    /// Config file.
    #[arg(value_name = "RUN.TOML", required_unless_present = "from")]
    config: Option<PathBuf>,
    /// Repeat a run: its config as it was resolved and its prepared data, in a new run directory. On the same machine it gives
    /// the same losses to the bit.
    #[arg(long, value_name = "RUN", conflicts_with = "config", requires = "run_dir")]
    from: Option<PathBuf>,
    /// Override a key: --set train.steps=100.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

impl RunSource {
    /// The config file.
    pub fn file(&self) -> PathBuf {
        match (&self.config, &self.from) {
            (Some(config), _) => config.clone(),
            (None, Some(run)) => run.join("run.toml"),
            (None, None) => PathBuf::new(),
        }
    }

    fn args(&self) -> ConfigArgs {
        // What the other run prepared is not prepared again.
        let own = self.from.as_ref().is_some_and(|run| run.join("data").is_dir());
        let set = own.then(|| "data.prepared=data".to_owned()).into_iter().chain(self.set.iter().cloned()).collect();
        ConfigArgs { config: self.file(), set }
    }

    /// A run that was changed on its way has no config that is its own from the first step to the last.
    fn refuse_changed(&self) -> Result<()> {
        let Some(run) = &self.from else { return Ok(()) };
        if !run.join("run.toml").is_file() {
            let text = format!("{} is no run directory", run.display());
            return Err(Failure::request(text, "`lockstep runs DIR` lists those of a folder"));
        }
        let text = std::fs::read_to_string(run.join("changes.json")).unwrap_or_default();
        let changes: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        let Some(first) = changes["changes"].as_array().and_then(|changes| changes.first()) else { return Ok(()) };
        let (step, change) = (&first["step"], first["text"].as_str().unwrap_or_default());
        Err(Failure::request(
            format!("{} was changed at step {step} ({change}): no one config is that of all its steps", run.display()),
            format!("train its given.toml up to step {step}, then resume with the same --change"),
        ))
    }
}

impl Args {
    /// Where the run's files go.
    pub fn run_dir(&self) -> PathBuf {
        self.config.args().run_dir(self.run_dir.clone())
    }

    /// The config, and what was taken from the hub. A run that goes on keeps the revisions that it was begun with.
    pub fn load(&self, quiet: bool) -> Result<(Config, Vec<TakenFromHub>)> {
        self.config.refuse_changed()?;
        let dir = self.run_dir();
        let need = if self.goes_on() { HubNeed::Resume } else { HubNeed::Start };
        let begun = if self.goes_on() { read_config(&dir.join("run.toml")).ok() } else { None };
        let progress = if quiet || self.quiet { Progress::new(0).quiet() } else { Progress::new(0) };
        Ok(self.config.args().open(need, begun.as_ref(), progress)?)
    }

    /// Whether the run has a checkpoint to go on from.
    fn goes_on(&self) -> bool {
        !self.fresh && list(&self.run_dir().join("checkpoints")).is_ok_and(|there| !there.is_empty())
    }

    /// The same again, as arguments of another process.
    pub fn arguments(&self) -> Vec<OsString> {
        let mut arguments: Vec<OsString> =
            self.config.config.iter().map(|file| file.clone().into_os_string()).collect();
        let mut add = |flag: &str, value: OsString| arguments.extend([flag.into(), value]);
        self.config.from.iter().for_each(|run| add("--from", run.into()));
        self.config.set.iter().for_each(|set| add("--set", set.into()));
        self.run_dir.iter().for_each(|dir| add("--run-dir", dir.into()));
        self.profile_steps.iter().for_each(|s| add("--profile-steps", format!("{}:{}", s.start(), s.end()).into()));
        self.resume_from.iter().for_each(|step| add("--resume-from", step.to_string().into()));
        self.change.iter().for_each(|change| add("--change", change.into()));
        let switches = [
            ("--fresh", self.fresh),
            ("--quiet", self.quiet),
            ("--dry-run", self.dry_run),
            ("--debug-nans", self.debug_nans),
        ];
        for (flag, given) in switches {
            arguments.extend(given.then(|| flag.into()));
        }
        arguments
    }
}

/// The options that change what a run computes, for the other processes of a run to compare with theirs.
fn given_options(args: &Args) -> Vec<(String, String)> {
    let given = |flag: bool| flag.then(|| "given".to_owned());
    let options = [
        ("--fresh", given(args.fresh)),
        ("--resume-from", args.resume_from.map(|step| step.to_string())),
        ("--change", (!args.change.is_empty()).then(|| args.change.join(", "))),
        ("--profile-steps", args.profile_steps.as_ref().map(|s| format!("{}:{}", s.start(), s.end()))),
        ("--debug-nans", given(args.debug_nans)),
    ];
    options.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

/// `5:8`, or one step alone.
fn steps(text: &str) -> Result<RangeInclusive<u64>, String> {
    let (first, last) = text.split_once(':').unwrap_or((text, text));
    match (first.trim().parse(), last.trim().parse()) {
        (Ok(first), Ok(last)) if 1 <= first && first <= last => Ok(first..=last),
        _ => Err("give the first and the last step, counted from 1, such as 5:8".into()),
    }
}

/// Trains; where other processes were started for the same run, as one rank of it.
pub fn run(args: Args) -> Result<ExitCode> {
    // A run that is not started needs no others.
    let place = if args.dry_run { None } else { processes::place()? };
    let rank = place.as_ref().map_or(0, |place| place.rank);
    processes::end_well(run_rank(args, place).map_err(|failure| failure.of_rank(rank)))
}

fn run_rank(args: Args, place: Option<ProcessPlace>) -> Result<ExitCode> {
    let first = place.as_ref().is_none_or(|place| place.rank == 0);
    let dir = args.run_dir();
    let loaded = args.load(!first);
    let (config, taken) =
        loaded.inspect_err(|failure| place.iter().for_each(|place| place.end_early(&dir, failure)))?;
    if first {
        let goes_on = args.goes_on();
        let is_news = |text: &&String| !goes_on || !config.cut_schedule().contains(text);
        warn(&config.warnings().iter().filter(is_news).cloned().collect::<Vec<_>>());
    }
    let stop = on_interrupt()?;
    let waiting = processes::stop_with_launcher(&stop)?;
    if let (Some(place), Some(bounds)) = (&place, elastic_bounds(&config)?)
        && !args.dry_run
    {
        return run_elastic(&args, place, &config, taken, (bounds, waiting), &stop);
    }
    let devices = match &place {
        Some(place) => {
            let timeout = Duration::from_secs_f64(config.parallel.timeout);
            let start = place.start(timeout, Some(&dir), waiting)?;
            Devices::of_processes(Processes::join(&start, &config, place.local)?)
        }
        None => Devices::of(&config),
    };
    let options = run_options(&args, if first { started_by(&args.config.file(), taken) } else { StartedBy::default() });
    if args.dry_run {
        let dry = dry_run(&devices, &config, &options, &stop)?;
        warn(&dry.warnings);
        warn(&dry.overruled.iter().map(remedies::overruled).collect::<Vec<_>>());
        write!(std::io::stdout(), "{}", dry_summary(&dry, &dir))?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(place) = place.filter(|_| !first) {
        return follow(&place, &devices, &config, &options, &stop);
    }
    let steps = config.train.steps;
    let mut progress = if args.quiet { Progress::new(steps).quiet() } else { Progress::new(steps) };
    let result = lockstep_train::run(&devices, &config, &options, &stop, &mut |event| progress.show(event));
    progress.clear();
    finish(&args, &config, &result?)
}

fn run_options(args: &Args, started_by: StartedBy) -> RunOptions {
    RunOptions {
        dir: args.run_dir(),
        fresh: args.fresh,
        resume_from: args.resume_from,
        change: args.change.clone(),
        sample_tokens: if args.quiet { 0 } else { SAMPLE_TOKENS },
        profile_steps: args.profile_steps.clone(),
        debug_nans: args.debug_nans,
        given: given_options(args),
        started_by,
    }
}

/// How many ranks may train, where that may change.
pub fn elastic_bounds(config: &Config) -> Result<Option<Elastic>> {
    let spares = config.cluster.spares;
    let Some(text) = &config.cluster.elastic else {
        return match spares {
            0 => Ok(None),
            _ => Err(Failure::request(
                format!("cluster.spares = {spares}, and the run is not elastic: nobody's place would be taken"),
                "set cluster.elastic, or leave out cluster.spares",
            )),
        };
    };
    let bounds = Elastic::parse(text).ok_or_else(|| {
        Failure::request(
            format!("cluster.elastic = {text:?} is not two numbers of ranks"),
            "write the fewest and the most ranks that may train, such as \"2..4\"",
        )
    })?;
    match config.ranks() {
        _ if config.plans_layout() => Err(Failure::request(
            "cluster.elastic does not go with parallel.layout = \"auto\": every world would have another layout",
            "set parallel.dp and the other axes; `lockstep plan` finds them",
        )),
        Some(ranks) if ranks < bounds.least => Err(Failure::request(
            format!("cluster.elastic = {text:?} needs at least {} ranks, and the layout has {ranks}", bounds.least),
            format!("set parallel.dp or another axis, or cluster.elastic = \"{ranks}..{}\"", bounds.most),
        )),
        Some(ranks) if ranks > bounds.most => Err(Failure::request(
            format!("cluster.elastic = {text:?} allows at most {} ranks, and the layout has {ranks}", bounds.most),
            format!("set cluster.elastic = \"{}..{ranks}\", or a smaller layout", bounds.least.min(ranks)),
        )),
        Some(ranks) if ranks < bounds.most && spares > 0 => Err(Failure::request(
            format!(
                "cluster.spares = {spares}, and cluster.elastic = {text:?} lets more than the {ranks} ranks of the layout train: none would wait"
            ),
            format!("set cluster.elastic = \"{}..{ranks}\", or leave out cluster.spares", bounds.least.min(ranks)),
        )),
        _ => Ok(Some(bounds)),
    }
}

/// One rank of a run whose ranks come and go. Whoever is the first at a time shows how it gets on.
fn run_elastic(
    args: &Args,
    place: &ProcessPlace,
    config: &Config,
    taken: Vec<TakenFromHub>,
    (bounds, waiting): (Elastic, Waiting),
    stop: &AtomicBool,
) -> Result<ExitCode> {
    let dir = args.run_dir();
    let start = place.start(Duration::from_secs_f64(config.parallel.timeout), Some(&dir), waiting)?;
    let late = processes::joins_late();
    let process = ElasticStart { start: &start, local: place.local, bounds, late };
    let options = run_options(args, started_by(&args.config.file(), taken));
    let mut progress = Progress::new(config.train.steps);
    if args.quiet {
        progress = progress.quiet();
    }
    let mut is_first = place.rank == 0 && !late;
    let result = lockstep_train::run_elastic(&process, config, &options, stop, &mut |event| {
        if let Event::InWorld { rank, .. } = event {
            is_first = rank == 0;
        }
        if let Event::LeftOut { cause } = event {
            let cause = cause.map(|cause| format!("{cause}; ")).unwrap_or_default();
            let text = format!("warning: {cause}the others go on without this process, which waits to join them");
            processes::say(place.rank, &text);
        } else if is_first {
            progress.show(event);
        }
    });
    progress.clear();
    match result {
        // It came for nothing, and nothing is wrong.
        Err(error) if error.has_ended_meanwhile() => Ok(ExitCode::SUCCESS),
        result => {
            let outcome = result?;
            match is_first {
                true => finish(args, config, &outcome),
                false => Ok(if outcome.finished { ExitCode::SUCCESS } else { ExitCode::from(INTERRUPTED) }),
            }
        }
    }
}

/// Says how a run ended.
fn finish(args: &Args, config: &Config, outcome: &Outcome) -> Result<ExitCode> {
    let dir = args.run_dir();
    if let Some(steps) = &args.profile_steps {
        show_profile(steps, outcome, &dir)?;
    }
    let (details, last) = summary(outcome, config, &dir);
    let mut out = std::io::stdout();
    if !args.quiet {
        write!(out, "{details}")?;
    }
    writeln!(out, "{last}")?;
    if !outcome.finished {
        let without = if args.resume_from.is_some() { " without --resume-from" } else { "" };
        let what = if outcome.checkpoint.is_some() { "resumes" } else { "starts the run" };
        if !args.quiet {
            writeln!(out, "the same command again{without} {what}")?;
        }
        return Ok(ExitCode::from(INTERRUPTED));
    }
    if !args.quiet {
        let _ = write!(std::io::stderr(), "{}", afterwards(outcome, config, &dir));
    }
    Ok(ExitCode::SUCCESS)
}

/// The part of a rank that is not the first, which speaks for all: nothing is shown but what this one waits for.
fn follow(
    place: &ProcessPlace,
    devices: &Devices,
    config: &Config,
    options: &RunOptions,
    stop: &AtomicBool,
) -> Result<ExitCode> {
    let mut show = |event: Event<'_>| match event {
        Event::Preparing(progress) if progress.waiting => {
            processes::say(place.rank, "waiting for rank 0, which prepares the data");
        }
        _ => {}
    };
    let outcome = lockstep_train::run(devices, config, options, stop, &mut show)?;
    Ok(if outcome.finished { ExitCode::SUCCESS } else { ExitCode::from(INTERRUPTED) })
}

/// Prints where the time of the profiled steps went, and writes their trace.
fn show_profile(steps: &RangeInclusive<u64>, outcome: &Outcome, dir: &Path) -> Result<()> {
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

/// A flag that an interrupt sets. Ctrl-C a second time ends the process at once; what is on the disk stays whole. Schedulers send other
/// signals more than once and mean the same. Where the caller has SIGHUP ignored (`nohup`), it stays ignored.
pub fn on_interrupt() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let hangup = (ignored_signals() >> (SIGHUP - 1) & 1 == 0).then_some(SIGHUP);
    let before = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register_conditional_default(SIGINT, before.clone())?;
    signal_hook::flag::register(SIGINT, before)?;
    for signal in [SIGINT, SIGTERM, SIGUSR1].into_iter().chain(hangup) {
        signal_hook::flag::register(signal, stop.clone())?;
    }
    Ok(stop)
}

/// The signals that this process ignores, a bit each; none where the system does not tell.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Most tokens of the sample at the end of a run.
const SAMPLE_TOKENS: usize = 200;

/// A context in which a prompt of a word leaves room for more.
const ROOM: usize = 16;

/// What the model writes now, and what to try next. On stderr: the result of the command is the summary.
fn afterwards(outcome: &Outcome, config: &Config, dir: &Path) -> String {
    let mut text = String::new();
    let mut prompt = (config.train.seq >= ROOM).then(|| "The".to_owned());
    if let Some(sample) = &outcome.sample {
        text = format!(
            "\na sample: the model continues {:?} from the data\n{}\n",
            sample.prompt,
            printable(sample.text.trim_end())
        );
        prompt = first_words(&sample.prompt).or(prompt);
    }
    // What a chat begins with is written by its template.
    let is_chat = config.data.format == DataFormat::Chat;
    let how = if is_chat { "--chat --prompt" } else { "--prompt" };
    let prompt = prompt.map(|prompt| if is_chat { "Hello".to_owned() } else { prompt });
    // As it was called, so that the lines can be copied.
    let lockstep = shell_quoted(&std::env::args().next().unwrap_or_else(|| "lockstep".to_owned()));
    let quoted = |path: &Path| shell_quoted(&path.display().to_string());
    text += "\ntry next:\n";
    if let Some(prompt) = prompt {
        text += &format!("  {lockstep} generate {} {how} {}\n", quoted(dir), shell_quoted(&prompt));
    }
    if outcome.last_val_loss.is_some() {
        text += &format!("  {lockstep} eval {} --validation\n", quoted(dir));
    }
    // As resolved: it needs none of the options of this call.
    text + &format!("  {lockstep} explain {}\n", quoted(&dir.join("run.toml")))
}

/// The beginning of a text that is easy to type.
fn first_words(text: &str) -> Option<String> {
    let plain = text.trim_start().split(|c: char| c.is_control() || "'!\\".contains(c)).next()?.trim_end();
    (!plain.is_empty()).then(|| plain.to_owned())
}

/// `1 step`, `2 steps`.
fn count(n: u64, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// How a run ended: what there is to know, and in one line.
fn summary(outcome: &Outcome, config: &Config, dir: &Path) -> (String, String) {
    let steps = outcome.steps;
    let Some(path) = &outcome.checkpoint else {
        return (String::new(), format!("interrupted before the first step of {steps}"));
    };
    let checkpoint = path.display();
    if !outcome.finished {
        let step = outcome.step;
        return (String::new(), format!("interrupted after step {step} of {steps}; checkpoint {checkpoint}"));
    }
    let losses = match (outcome.first_val_loss, outcome.last_val_loss) {
        (Some(first), Some(last)) => format!("validation loss {first:.3} -> {last:.3} nats per token\n"),
        _ => String::new(),
    };
    let noise = outcome.noise_scale.map_or(String::new(), |sequences| {
        let tokens = units::count((sequences * config.train.seq as f64).round() as u64);
        format!("gradient noise scale {sequences:.1} sequences: a critical batch of {tokens} tokens\n")
    });
    let metrics = dir.join("metrics.jsonl");
    let last = format!("finished {}; checkpoint {checkpoint}, metrics {}", count(steps, "step"), metrics.display());
    (losses + &noise, last)
}

/// What a run would do.
fn dry_summary(dry: &DryRun, dir: &Path) -> String {
    let DryRun { config, plan, from_step, .. } = dry;
    let (steps, seq) = (config.train.steps, config.train.seq);
    let begin = match from_step {
        0 => "would start".to_owned(),
        step => format!("would resume at step {step}"),
    };
    let mut lines = vec![("run", format!("{}: {begin}", dir.display()))];
    lines.extend(dry.changed.iter().map(|changed| ("change", change(changed))));
    if !dry.later.is_empty() {
        lines.push(("", format!("{} would be set aside", count(dry.later.len() as u64, "later checkpoint"))));
    }
    lines.push(("model", format!("{}, {} parameters", config.model.architecture, units::count(plan.parameters))));
    let folder = dry.data_folder.display();
    lines.push((
        "data",
        match dry.data {
            DryData::Prepared { train_tokens } => {
                format!("{folder}: prepared, {} training tokens", units::count(train_tokens))
            }
            DryData::Text { files, bytes } => {
                format!("{}, {}, to be prepared in {folder}", count(files, "file"), units::bytes(bytes))
            }
        },
    ));
    let tokens = |steps: u64| units::count(config.batches().at(steps).first_sample.saturating_mul(seq as u64));
    let left = steps.saturating_sub(*from_step);
    lines.push(("steps", format!("{left} of {steps}, in sequences of {seq} tokens; {} tokens in all", tokens(steps))));
    let free = dry.available_bytes.map_or(String::new(), |free| format!("; {} are free", units::bytes(free)));
    lines.push(("memory", format!("arena {} ({} bytes){free}", units::bytes(dry.arena_bytes), dry.arena_bytes)));
    let classes = plan.memory.classes.iter().filter(|(_, bytes)| **bytes > 0);
    lines.extend(classes.map(|(class, bytes)| ("", format!("{class:<13} {}", units::bytes(*bytes)))));
    if plan.host_bytes() > 0 {
        let what = in_host(plan.host_bytes(), plan.host_activation_bytes());
        lines.push(("", format!("in the host: {} of {what}", units::bytes(plan.host_bytes()))));
    }
    lines.push(("device", plan.device.clone()));
    let text: String = lines.iter().map(|(name, text)| format!("{name:<8}{text}\n")).collect();
    text + "dry run: nothing was started or written\n"
}
