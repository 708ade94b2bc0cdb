//! `lockstep launch`: the ranks of a run as processes of this machine.

use crate::failure::{Failure, INTERRUPTED};
use crate::processes::LAUNCHED;
use crate::{slurm, style, train};
use lockstep_config::DeviceChoice;
use lockstep_cuda::{Device, Gpu, check_nccl};
use lockstep_exec::ExecError;
use lockstep_exec::comm::processes::host;
use lockstep_train::{SHARES_GPUS, TrainError};
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

// Those of `train` are a group of this name.
#[derive(clap::Args)]
#[group(skip)]
pub struct Args {
    #[command(flatten)]
    train: train::Args,
    /// Processes to start, one per rank. As many as the layout of the config has ranks if not given, and no other number.
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// When a rank fails, start all again from the last checkpoint, up to so many times.
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with_all = ["fresh", "resume_from", "change"])]
    restarts: u32,
    /// Let ranks share GPUs where there are fewer: to check a layout, slowly.
    #[arg(long, conflicts_with = "slurm")]
    share_gpus: bool,
    #[command(flatten)]
    slurm: slurm::Args,
}

/// The ranks that are left when one has failed end by themselves within 10 s; then they are killed.
const ENDS_WITHIN: Duration = Duration::from_secs(12);
/// How often processes are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);

pub fn run(mut args: Args) -> Result<ExitCode, Failure> {
    let given = args.train.config.set.len();
    args.train.config.set.extend(args.slurm.overrides());
    let config = if args.slurm.slurm { args.train.config.load()? } else { args.train.config.load_quietly()? };
    // The job takes them from its script.
    args.train.config.set.truncate(given);
    let layout = config.layout();
    let ranks = layout.mesh.ranks();
    if let Some(processes) = args.ranks.filter(|processes| *processes != ranks) {
        return Err(TrainError::OtherRanks { layout: layout.to_string(), ranks, processes }.into());
    }
    if args.slurm.slurm {
        slurm::run(&args.slurm, args.train, &config)?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.train.dry_run {
        return train::run(args.train);
    }
    if config.train.device == DeviceChoice::Cuda {
        require_gpus(ranks, config.train.gpu, args.share_gpus)?;
    }
    if args.share_gpus {
        tell("warning: ranks share GPUs: good to check a layout, slower to train than one rank per GPU");
    }
    let signals = train::on_interrupt()?;
    for attempt in 0..=args.restarts {
        let end = Team::start(&args.train, ranks, args.share_gpus)?.wait(&signals)?;
        let again = attempt < args.restarts && end.code != 2 && end.failed.is_some() && !end.asked_to_stop;
        if let Some(text) = &end.failed {
            tell(&format!("error: {text}"));
        }
        if !again {
            return Ok(ExitCode::from(end.code));
        }
        tell(&format!("starting again from the last checkpoint, {} of {} restarts", attempt + 1, args.restarts));
    }
    Ok(ExitCode::SUCCESS)
}

/// Refuses what no rank could do, before there are ranks to refuse it.
fn require_gpus(ranks: usize, first: usize, share: bool) -> Result<(), Failure> {
    let found =
        Gpu::check().and_then(|()| if ranks > 1 { check_nccl() } else { Ok(()) }).and_then(|()| Device::count());
    let gpus = found.map_err(|error| TrainError::from(ExecError::from(error)))?.saturating_sub(first);
    match ranks > gpus && !share {
        true => Err(TrainError::FewGpus { host: host(), ranks, gpus }.into()),
        false => Ok(()),
    }
}

/// Says something on stderr. Where nobody listens, the exit code still tells.
fn tell(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", style::message(text));
}

/// The processes of one attempt, by rank. Those that still run when this goes are killed.
struct Team {
    children: Vec<Child>,
    ended: Vec<Option<ExitStatus>>,
}

/// How an attempt ended.
struct End {
    code: u8,
    /// Which rank failed, and how.
    failed: Option<String>,
    asked_to_stop: bool,
}

impl Team {
    fn start(args: &train::Args, ranks: usize, share_gpus: bool) -> Result<Self, Failure> {
        // Free now; should somebody else take it before rank 0 does, that says so.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut team = Self { children: Vec::new(), ended: vec![None; ranks] };
        for rank in 0..ranks {
            let mut command = Command::new(std::env::current_exe()?);
            command.arg("train").args(args.arguments()).stdin(Stdio::piped()).env(LAUNCHED, "1");
            // Ctrl-C comes here and is passed on once; twice would end them without a checkpoint.
            command.process_group(0);
            for (name, value) in [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", ranks)] {
                command.env(name, value.to_string());
            }
            if share_gpus {
                command.env(SHARES_GPUS, format!("lockstep-{}-{rank}", std::process::id()));
            }
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
            team.children.push(command.spawn()?);
        }
        Ok(team)
    }

    /// Waits for all. A signal is passed on to them: they stop after the same step.
    fn wait(mut self, signals: &std::sync::atomic::AtomicBool) -> Result<End, Failure> {
        let mut asked_to_stop = false;
        let mut deadline: Option<Instant> = None;
        while self.ended.iter().any(Option::is_none) {
            if !asked_to_stop && signals.load(Ordering::SeqCst) {
                asked_to_stop = true;
                for child in &mut self.children {
                    if let Some(pipe) = &mut child.stdin {
                        // One that has ended needs no word.
                        let _ = pipe.write_all(b"s");
                    }
                }
            }
            for (child, ended) in self.children.iter_mut().zip(&mut self.ended) {
                if ended.is_none() {
                    *ended = child.try_wait()?;
                }
            }
            if deadline.is_none() && self.ended.iter().flatten().any(|status| failed(*status)) {
                deadline = Some(Instant::now() + ENDS_WITHIN);
            }
            if deadline.is_some_and(|until| Instant::now() > until) {
                self.kill();
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(self.end(asked_to_stop))
    }

    fn end(&self, asked_to_stop: bool) -> End {
        let ends = || self.ended.iter().enumerate().filter_map(|(rank, status)| Some((rank, (*status)?)));
        // One that was killed is the cause, and then one that says that the request was wrong: the others only follow.
        let cause = |(rank, status): &(usize, ExitStatus)| (status.signal().is_none(), status.code() != Some(2), *rank);
        if let Some((rank, status)) = ends().filter(|(_, status)| failed(*status)).min_by_key(cause) {
            let pid = self.children[rank].id();
            let how = match (status.signal(), status.code()) {
                (Some(signal), _) => format!("was killed by signal {signal}"),
                (None, code) => format!("ended with exit code {}", code.unwrap_or(1)),
            };
            let text = format!(
                "rank {rank} (process {pid}) {how}\nhint: the same command again goes on from the last checkpoint; --restarts N \
                 does so by itself"
            );
            let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
            return End { code, failed: Some(text), asked_to_stop };
        }
        let interrupted = ends().any(|(_, status)| status.code() == Some(i32::from(INTERRUPTED)));
        End { code: if interrupted { INTERRUPTED } else { 0 }, failed: None, asked_to_stop }
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

/// Whether a process ended neither well nor because it was asked to.
fn failed(status: ExitStatus) -> bool {
    !status.success() && status.code() != Some(i32::from(INTERRUPTED))
}

impl Drop for Team {
    fn drop(&mut self) {
        self.kill();
        for child in &mut self.children {
            let _ = child.wait();
        }
    }
}
