//! `lockstep launch`: the ranks of a run as processes of this machine.

use crate::failure::{Failure, INTERRUPTED, RECURS, Result};
use crate::processes::{ABANDONED, LATE, LAUNCHED, SECRET, STOP};
use crate::{slurm, style, train, warn};
use lockstep_config::DeviceChoice;
use lockstep_cuda::{Device, Gpu, check_nccl};
use lockstep_exec::ExecError;
use lockstep_exec::comm::processes::{JobSecret, host};
use lockstep_host::{HostError, SHARES_GPUS, has_begun};
use lockstep_ir::Hint;
use std::ffi::OsString;
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

// Those of `train` are a group of this name.
#[derive(clap::Args)]
#[group(skip)]
pub struct Args {
    #[command(flatten)]
    train: train::Args,
    /// Processes to start, one per rank. As many as the layout of the config has ranks if not given, and no other number; with
    /// parallel.layout = "auto", as many as it is to be planned for.
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// When a rank fails, start all again from the last checkpoint, up to N times.
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with_all = ["fresh", "resume_from", "change"])]
    restarts: u32,
    /// Go on with fewer ranks when some are lost, and with more when some join: the fewest and the most that may train, such as 2..4.
    /// Sets cluster.elastic. With --restarts, ranks that are lost are started again, and join.
    #[arg(long, value_name = "LEAST..MOST")]
    elastic: Option<String>,
    /// Let ranks share GPUs where there are fewer: to check a layout, slowly.
    #[arg(long, conflicts_with = "slurm")]
    share_gpus: bool,
    #[command(flatten)]
    slurm: slurm::Args,
}

/// The ranks that are left when one has failed end by themselves within 10 s; then they are killed.
const ENDS_WITHIN: Duration = Duration::from_secs(12);
/// How long a process may be stopped by a signal when others have ended.
const STOPPED_FOR: Duration = Duration::from_secs(8);
/// When rank 0 has ended well, the others have nothing left to do; those that are there after so long are killed.
const LAST_WITHIN: Duration = Duration::from_secs(60);
/// What to do when ranks have failed.
const AGAIN: &str = "the same command again goes on from the last checkpoint; --restarts N does so by itself";
/// And where that helps nothing.
const CHANGE: &str =
    "change what the message above says: the same command again would end the same way, so no restart helps";
/// How often processes are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);

pub fn run(mut args: Args) -> Result<ExitCode> {
    if let Some(bounds) = &args.elastic {
        args.train.config.set.push(format!("cluster.elastic={bounds:?}"));
    }
    let given = args.train.config.set.clone();
    // What is given with --set wins over what a cluster of this name has.
    args.train.config.set.splice(0..0, args.slurm.cluster_overrides(&args.train.config.file())?);
    args.train.config.set.extend(args.slurm.overrides());
    // What is on the hub is downloaded here: compute nodes may reach nothing.
    let (config, _) = args.train.load(false)?;
    if args.slurm.slurm {
        warn(config.warnings());
        if let Some(site) = args.slurm.site()? {
            warn(&site.warnings(config.cluster.account.as_deref()));
        }
    }
    // The job takes them from its script.
    args.train.config.set = given;
    let Some(ranks) = config.ranks().or(args.ranks) else {
        let text = "parallel.layout = \"auto\" needs to know for how many ranks";
        return Err(Failure::request(text, "give --ranks N, or set parallel.ranks"));
    };
    if let Some(processes) = args.ranks.filter(|processes| *processes != ranks) {
        return Err(HostError::OtherRanks { layout: config.layout().to_string(), ranks, processes }.into());
    }
    let elastic = train::elastic_bounds(&config)?.is_some();
    if args.slurm.slurm {
        slurm::run(&args.slurm, args.train, &config, ranks)?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.train.dry_run {
        return train::run(args.train);
    }
    let processes = ranks + config.cluster.spares;
    if config.train.device == DeviceChoice::Cuda {
        require_gpus(processes, config.train.gpu, args.share_gpus)?;
    }
    if args.share_gpus {
        tell("warning: ranks share GPUs: good to check a layout, slower to train than one rank per GPU");
    }
    let signals = train::on_interrupt()?;
    for attempt in 0..=args.restarts {
        let arguments = [vec!["train".into()], args.train.arguments()].concat();
        let mut launched = LaunchedRanks::start(&arguments, processes, args.share_gpus)?;
        if elastic {
            launched.elastic(args.restarts - attempt, args.train.run_dir());
        }
        let end = launched.wait(&signals)?;
        let again = attempt < args.restarts && !end.recurs && end.failed.is_some() && !end.asked_to_stop;
        if let Some(failure) = &end.failed {
            tell(&format!("error: {}", failure.with_hint()));
        }
        if !again {
            return Ok(ExitCode::from(end.code));
        }
        tell(&format!("starting again from the last checkpoint, {} of {} restarts", attempt + 1, args.restarts));
    }
    Ok(ExitCode::SUCCESS)
}

/// Refuses what no rank could do, before there are ranks to refuse it.
pub fn require_gpus(ranks: usize, first: usize, share: bool) -> Result<()> {
    let found =
        Gpu::check().and_then(|()| if ranks > 1 { check_nccl() } else { Ok(()) }).and_then(|()| Device::count());
    let gpus = found.map_err(ExecError::from)?.saturating_sub(first);
    if ranks > gpus && !share { Err(HostError::FewGpus { host: host(), ranks, gpus }.into()) } else { Ok(()) }
}

/// Runs this program with these arguments as this many ranks, which end with this process.
pub fn run_ranks(arguments: &[OsString], ranks: usize, share_gpus: bool) -> Result<ExitCode> {
    let end = LaunchedRanks::start(arguments, ranks, share_gpus)?.wait(&AtomicBool::new(false))?;
    if let Some(failure) = &end.failed {
        tell(&format!("error: {failure}"));
    }
    Ok(ExitCode::from(end.code))
}

/// Says something on stderr. Where nobody listens, the exit code still tells.
fn tell(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", style::message(text));
}

/// The processes of one attempt, by rank. Those that still run when this goes are killed.
struct LaunchedRanks {
    children: Vec<Child>,
    ended: Vec<Option<ExitStatus>>,
    /// Which of them were killed here, and why.
    killed: Vec<Option<Killed>>,
    /// Since when each is stopped by a signal while others have ended.
    stopped: Vec<Option<Instant>>,
    start: StartOfRank,
    /// Where the others go on without ranks that are lost: how many more may be started for those.
    elastic: Option<u32>,
}

/// How each process is started.
struct StartOfRank {
    arguments: Vec<OsString>,
    ranks: usize,
    port: u16,
    secret: JobSecret,
    share_gpus: bool,
    /// Where an elastic run says that it has begun.
    run_dir: PathBuf,
}

impl StartOfRank {
    /// Starts one; `late` if the others have begun without it.
    fn spawn(&self, rank: usize, late: bool) -> Result<Child> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(&self.arguments).stdin(Stdio::piped()).env(LAUNCHED, "1").env(SECRET, self.secret.to_hex());
        // Ctrl-C comes here and is passed on once; twice would end them without a checkpoint.
        command.process_group(0);
        for (name, value) in [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", self.ranks)] {
            command.env(name, value.to_string());
        }
        if self.share_gpus {
            command.env(SHARES_GPUS, format!("lockstep-{}-{rank}", std::process::id()));
        }
        if late {
            command.env(LATE, "1");
        }
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", self.port.to_string());
        Ok(command.spawn()?)
    }
}

/// Why a process had to be killed when others had failed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Killed {
    /// It was stopped by a signal, so the others could not wait for it.
    Stopped,
    /// It did not end.
    StillThere,
}

/// How an attempt ended.
struct End {
    code: u8,
    /// The same again would end the same way.
    recurs: bool,
    /// Which rank failed, and how.
    failed: Option<Failure>,
    asked_to_stop: bool,
}

impl LaunchedRanks {
    /// Starts this program again with these arguments, once for every rank.
    fn start(arguments: &[OsString], ranks: usize, share_gpus: bool) -> Result<Self> {
        // Free now; should somebody else take it before rank 0 does, that tells the others of another.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let secret = JobSecret::random()?;
        let (ended, killed, stopped) = (vec![None; ranks], vec![None; ranks], vec![None; ranks]);
        let start =
            StartOfRank { arguments: arguments.to_vec(), ranks, port, secret, share_gpus, run_dir: PathBuf::new() };
        let mut launched = Self { children: Vec::new(), ended, killed, stopped, start, elastic: None };
        for rank in 0..ranks {
            launched.children.push(launched.start.spawn(rank, false)?);
        }
        Ok(launched)
    }

    /// The others go on when some are lost; up to this many are started again, to join them.
    fn elastic(&mut self, restarts: u32, run_dir: PathBuf) {
        self.elastic = Some(restarts);
        self.start.run_dir = run_dir;
    }

    /// Whether others go on without a rank that is lost: they have met.
    fn goes_on(&self) -> bool {
        self.elastic.is_some() && has_begun(&self.start.run_dir, &self.start.secret)
    }

    /// Starts a process in the place of each that was lost, as long as others go on and some may be started.
    fn start_again(&mut self, asked_to_stop: bool) -> Result<()> {
        let done = self.ended.iter().flatten().any(|status| !is_lost(*status));
        if asked_to_stop || done || self.ended.iter().all(Option::is_some) || self.ended.iter().all(Option::is_none) {
            return Ok(());
        }
        for rank in 0..self.children.len() {
            let Some(left @ 1..) = self.elastic else { return Ok(()) };
            if let Some(status) = self.ended[rank] {
                let how = status.signal().map_or_else(
                    || format!("ended with exit code {}", status.code().unwrap_or(1)),
                    |signal| format!("was killed by signal {signal}"),
                );
                tell(&format!("rank {rank} {how}: another process is started to join the run, {} left", left - 1));
                self.children[rank] = self.start.spawn(rank, true)?;
                (self.ended[rank], self.elastic) = (None, Some(left - 1));
            }
        }
        Ok(())
    }

    /// Waits for all. A signal is passed on to them: they stop after the same step.
    fn wait(mut self, signals: &AtomicBool) -> Result<End> {
        let mut asked_to_stop = false;
        let (mut deadline, mut first_ended): (Option<Instant>, Option<Instant>) = (None, None);
        while self.ended.iter().any(Option::is_none) {
            if !asked_to_stop && signals.load(Ordering::SeqCst) {
                asked_to_stop = true;
                self.tell_all(STOP);
            }
            for (child, ended) in self.children.iter_mut().zip(&mut self.ended) {
                if ended.is_none() {
                    *ended = child.try_wait()?;
                }
            }
            if deadline.is_none() && self.ended.iter().any(Option::is_some) && self.goes_on() {
                self.start_again(asked_to_stop)?;
            }
            // Of an elastic run, those that are left end by themselves, or go on.
            let has_failed = self.ended.iter().flatten().any(|status| failed(*status));
            let for_good = self.ended.iter().flatten().any(|status| failed(*status) && !is_lost(*status));
            if deadline.is_none() && has_failed && (for_good || !self.goes_on()) {
                deadline = Some(Instant::now() + ENDS_WITHIN);
                // Those that still wait for all to come wait for nothing.
                self.tell_all(ABANDONED);
            }
            if let Some(deadline) = deadline {
                self.clear_away_failed(Instant::now() > deadline);
            }
            let well = |status: &ExitStatus| self.elastic.is_none() || status.success();
            if first_ended.is_none() && self.ended.iter().take(self.first()).flatten().any(well) {
                first_ended = Some(Instant::now());
            }
            if self.ended.iter().any(Option::is_some) && (self.elastic.is_none() || first_ended.is_some()) {
                self.clear_away_stopped();
                self.clear_away(first_ended.is_some_and(|since| since.elapsed() > LAST_WITHIN));
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(self.end(asked_to_stop))
    }

    /// How many processes may be the first: all, where others may take its place.
    fn first(&self) -> usize {
        if self.elastic.is_some() { self.ended.len() } else { 1 }
    }

    fn end(&self, asked_to_stop: bool) -> End {
        // What was lost on the way does not matter where others have finished the run.
        if self.elastic.is_some() {
            let any = |code: u8| self.ended.iter().flatten().any(|status| status.code() == Some(i32::from(code)));
            if let Some(code) = [0, INTERRUPTED].into_iter().find(|code| any(*code)) {
                return End { code, recurs: false, failed: None, asked_to_stop };
            }
        }
        let ends = || self.ended.iter().enumerate().filter_map(|(rank, status)| Some((rank, (*status)?)));
        let failures: Vec<_> = ends().filter(|(_, status)| failed(*status)).collect();
        // One that was killed is the cause, then one that was stopped: the others only follow.
        let signalled = failures.iter().filter(|(_, status)| status.signal().is_some());
        if let Some((rank, status)) = signalled.min_by_key(|(rank, _)| (self.killed[*rank], *rank)) {
            let pid = self.children[*rank].id();
            let how = match self.killed[*rank] {
                None => format!("was killed by signal {}", status.signal().unwrap_or(0)),
                Some(Killed::Stopped) => "was stopped by a signal; it was killed when the others had ended".to_owned(),
                Some(Killed::StillThere) => "did not end when the others had, and was killed".to_owned(),
            };
            let failure = Failure::run(format!("rank {rank} (process {pid}) {how}"), AGAIN);
            return End { code: 1, recurs: false, failed: Some(failure), asked_to_stop };
        }
        // Of those that ended by themselves, one that says that the request was wrong tells most.
        if let Some(code) = failures.iter().filter_map(|(_, status)| status.code()).max() {
            let who: Vec<usize> = failures.iter().map(|(rank, _)| *rank).collect();
            let recurs = [2, i32::from(RECURS)].contains(&code);
            let code = if code == i32::from(RECURS) { 1 } else { code };
            let hint = if recurs { CHANGE } else { AGAIN };
            let text = format!("{} ended with exit code {code}, see above", lockstep_ir::units::ranks(&who));
            let failed = Some(Failure::run(text, hint));
            return End { code: u8::try_from(code).unwrap_or(1), recurs, failed, asked_to_stop };
        }
        let interrupted = ends().any(|(_, status)| status.code() == Some(i32::from(INTERRUPTED)));
        End { code: if interrupted { INTERRUPTED } else { 0 }, recurs: false, failed: None, asked_to_stop }
    }

    /// Writes a word to all of them.
    fn tell_all(&mut self, word: u8) {
        for child in &mut self.children {
            if let Some(pipe) = &mut child.stdin {
                // One that has ended needs no word.
                let _ = pipe.write_all(&[word]);
            }
        }
    }

    /// When others have ended well: kills processes that have been stopped for a while, which never end by themselves.
    fn clear_away_stopped(&mut self) {
        for (rank, child) in self.children.iter_mut().enumerate() {
            if self.ended[rank].is_some() || !is_stopped(child.id()) {
                self.stopped[rank] = None;
                continue;
            }
            let since = self.stopped[rank].get_or_insert_with(Instant::now);
            if self.killed[rank].is_none() && since.elapsed() > STOPPED_FOR && child.kill().is_ok() {
                self.killed[rank] = Some(Killed::Stopped);
            }
        }
    }

    /// When others have failed: kills processes that are stopped, which nothing else ends, and when it is `late` all that are left.
    fn clear_away_failed(&mut self, late: bool) {
        for (child, killed) in self.left() {
            let why = match (late, is_stopped(child.id())) {
                (_, true) => Killed::Stopped,
                (true, false) => Killed::StillThere,
                (false, false) => continue,
            };
            // One that ends by itself meanwhile is as good.
            if child.kill().is_ok() {
                *killed = Some(why);
            }
        }
    }

    /// When rank 0 has ended well and it is `late`: kills all that are left.
    fn clear_away(&mut self, late: bool) {
        for (child, killed) in self.left().filter(|_| late) {
            if child.kill().is_ok() {
                *killed = Some(Killed::StillThere);
            }
        }
    }

    /// Those that have neither ended nor been killed.
    fn left(&mut self) -> impl Iterator<Item = (&mut Child, &mut Option<Killed>)> {
        let all = self.children.iter_mut().zip(&self.ended).zip(&mut self.killed);
        all.filter(|((_, ended), killed)| ended.is_none() && killed.is_none())
            .map(|((child, _), killed)| (child, killed))
    }

    fn kill(&mut self) {
        for (child, ended) in self.children.iter_mut().zip(&self.ended) {
            if ended.is_none() {
                // One that ends by itself meanwhile is as good.
                let _ = child.kill();
            }
        }
    }
}

/// Whether a process is stopped, as by SIGSTOP. Where the system does not tell, it is not.
fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Its name, in parentheses, may hold anything.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
}

/// Whether a process ended neither well nor because it was asked to.
fn failed(status: ExitStatus) -> bool {
    !status.success() && status.code() != Some(i32::from(INTERRUPTED))
}

/// Whether another process may take the place of one that ended so: nothing says that it would end the same way.
fn is_lost(status: ExitStatus) -> bool {
    status.signal().is_some() || status.code() == Some(1)
}

impl Drop for LaunchedRanks {
    fn drop(&mut self) {
        self.kill();
        for child in &mut self.children {
            let _ = child.wait();
        }
    }
}
