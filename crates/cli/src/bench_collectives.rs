//! `lockstep bench collectives`: how fast ranks talk to each other.

use crate::failure::{Failure, Result};
use crate::table::table;
use crate::{Format, launch, processes};
use lockstep_cuda::Gpu;
use lockstep_exec::ExecError;
use lockstep_exec::comm::measure::{MeasureError, Measured, Pattern, connections, measure};
use lockstep_exec::comm::processes::{Over, Waiting, host, join};
use lockstep_exec::comm::{Communicator, Subject, threads};
use lockstep_ir::{Hint, units};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

#[derive(clap::Args)]
pub struct Args {
    /// Ranks, as threads of this process; 2 if not given. Where torchrun, srun or mpirun started this, it is one of theirs.
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Ranks as processes of this machine instead of threads.
    #[arg(long, requires = "ranks")]
    processes: bool,
    /// Whose memory they communicate from: processes with a GPU each do over NCCL, threads share a GPU.
    #[arg(long, value_parser = ["cpu", "cuda"], default_value = "cpu")]
    device: String,
    /// Let processes share GPUs where there are fewer: to try it, slowly.
    #[arg(long, requires = "processes")]
    share_gpus: bool,
    /// The smallest size, in bytes or as 1KiB; each further one is four times as large.
    #[arg(long, value_name = "SIZE", default_value = "1KiB", value_parser = size)]
    from: usize,
    /// The largest size.
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = size)]
    to: usize,
    /// What to measure: all_reduce, reduce_scatter, all_gather, shift, send_receive; all of them if not given.
    #[arg(long, value_name = "NAME", value_parser = pattern)]
    only: Vec<Pattern>,
    /// Seconds for each size of each.
    #[arg(long, default_value_t = 0.1, value_parser = seconds)]
    seconds: f64,
    /// Seconds that a rank waits for another one that shows no sign of life.
    #[arg(long, default_value_t = 60.0, value_parser = seconds)]
    timeout: f64,
    /// How to print it.
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

/// The most ranks that are threads or processes of one machine.
const MOST_RANKS: usize = 1024;

fn size(text: &str) -> Result<usize, String> {
    let wrong = || "give bytes, or a size such as 64KiB or 1MiB, up to 4GiB".to_owned();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let scale = match text[digits..].trim() {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return Err(wrong()),
    };
    let bytes = text[..digits].parse::<usize>().ok().and_then(|n| n.checked_mul(scale));
    bytes.filter(|bytes| (4..=4 << 30).contains(bytes)).ok_or_else(wrong)
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|s| *s > 0.0 && *s <= 86400.0);
    seconds.ok_or_else(|| "give seconds, more than 0 and at most a day".to_owned())
}

fn pattern(text: &str) -> Result<Pattern, String> {
    let names = || Pattern::ALL.map(Pattern::name).join(", ");
    Pattern::ALL.into_iter().find(|pattern| pattern.name() == text).ok_or_else(|| format!("choose one of {}", names()))
}

/// A world that was measured.
struct World {
    /// `threads`, `tcp`, `mpi` or `nccl`.
    kind: &'static str,
    /// The same with the name of the library.
    name: String,
    ranks: usize,
    /// Hosts, each once, and how many ranks they have.
    hosts: Vec<(String, usize)>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if args.from > args.to {
        return Err(Failure::request(format!("--from {} is more than --to {}", args.from, args.to), "sizes go up"));
    }
    if let Some(place) = processes::place()? {
        processes::end_with_launcher()?;
        let of_rank = |failure: Failure| failure.of_rank(place.rank);
        if let Some(ranks) = args.ranks.filter(|ranks| *ranks != place.ranks) {
            let text = format!("--ranks {ranks}, and {} processes were started", place.ranks);
            return Err(of_rank(Failure::request(text, "leave --ranks out where others start the ranks")));
        }
        return processes::end_well(one_of_several(args, &place).map_err(of_rank));
    }
    let ranks = args.ranks.unwrap_or(2);
    if !(2..=MOST_RANKS).contains(&ranks) {
        let text = format!("--ranks {ranks} is not between 2 and {MOST_RANKS}");
        return Err(Failure::request(text, "--ranks 2 is the least that can talk"));
    }
    if args.processes {
        if args.on_gpus() {
            launch::require_gpus(ranks, 0, args.share_gpus)?;
        }
        return launch::run_ranks(&args.arguments(), ranks, args.share_gpus);
    }
    on_threads(args, ranks)?;
    Ok(ExitCode::SUCCESS)
}

impl Args {
    /// The same again for one of several processes.
    fn arguments(&self) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec!["bench".into(), "collectives".into()];
        let mut add = |flag: &str, value: String| arguments.extend([flag.into(), value.into()]);
        add("--from", self.from.to_string());
        add("--to", self.to.to_string());
        add("--seconds", self.seconds.to_string());
        add("--timeout", self.timeout.to_string());
        add("--device", self.device.clone());
        self.only.iter().for_each(|pattern| add("--only", pattern.to_string()));
        add("--format", if self.format == Format::Json { "json" } else { "text" }.to_owned());
        arguments
    }

    fn on_gpus(&self) -> bool {
        self.device == "cuda"
    }

    fn measure(&self, subject: &Subject) -> Result<Vec<Measured>, MeasureError> {
        let patterns = if self.only.is_empty() { &Pattern::ALL } else { &self.only[..] };
        let sizes: Vec<usize> = std::iter::successors(Some(self.from), |size| size.checked_mul(4))
            .take_while(|size| *size <= self.to)
            .collect();
        let mut progress = Progress { done: 0, all: patterns.len() * sizes.len(), shows: subject.comm().rank() == 0 };
        let result = measure(subject, patterns, &sizes, self.seconds, &mut |m| progress.show(m));
        if let Err(error @ MeasureError::Wrong { .. }) = &result {
            subject.comm().fail(&error.to_string());
        }
        subject.leave();
        result
    }

    fn timeout(&self) -> Duration {
        Duration::from_secs_f64(self.timeout)
    }
}

/// Says on a terminal what is being measured.
struct Progress {
    done: usize,
    all: usize,
    shows: bool,
}

impl Progress {
    fn show(&mut self, measured: &Measured) {
        self.done += 1;
        if self.shows && std::io::stderr().is_terminal() {
            let end = if self.done == self.all { "\r\x1b[K" } else { "" };
            let (what, size) = (measured.pattern, units::bytes(measured.bytes as u64));
            let _ = write!(std::io::stderr(), "\r\x1b[K{}/{} {what} {size}{end}", self.done, self.all);
        }
    }
}

fn one_of_several(args: &Args, place: &processes::ProcessPlace) -> Result<ExitCode> {
    let start = place.start(args.timeout(), None, Waiting::default())?;
    let comm = Arc::new(join(&start).map_err(lockstep_host::HostError::from)?);
    let mut hosts: Vec<(String, usize)> = Vec::new();
    for member in comm.members() {
        match hosts.iter_mut().find(|(host, _)| *host == member.host) {
            Some((_, ranks)) => *ranks += 1,
            None => hosts.push((member.host.clone(), 1)),
        }
    }
    let (kind, name) = match comm.over() {
        _ if args.on_gpus() => ("nccl", "processes over NCCL".to_owned()),
        Over::Tcp(_) => ("tcp", "processes over TCP".to_owned()),
        Over::Mpi(library) => ("mpi", format!("processes over {library}")),
    };
    let subject = match args.on_gpus() {
        true => place
            .gpu()
            .and_then(|gpu| lockstep_cuda::process_subject(&gpu, comm.clone(), &connections(comm.ranks()), false))
            .map_err(lockstep_host::HostError::from)?,
        false => Subject::inline(comm.clone()),
    };
    let found = args.measure(&subject)?;
    if comm.rank() == 0 {
        report(args, &World { kind, name, ranks: comm.ranks(), hosts }, &found)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn on_threads(args: &Args, ranks: usize) -> Result<()> {
    let subjects = match args.on_gpus() {
        true => Gpu::open(0, false)
            .map_err(ExecError::from)
            .and_then(|gpu| lockstep_cuda::subjects(&gpu, ranks, args.timeout()))
            .map_err(lockstep_host::HostError::from)?,
        false => threads(ranks, args.timeout()).into_iter().map(|comm| Subject::inline(comm)).collect(),
    };
    let found = std::thread::scope(|scope| {
        let mut others = Vec::new();
        for (rank, subject) in subjects.iter().enumerate().skip(1) {
            let thread = std::thread::Builder::new().name(format!("lockstep-rank-{rank}"));
            match thread.spawn_scoped(scope, || args.measure(subject)) {
                Ok(thread) => others.push(thread),
                Err(error) => subjects[0].comm().fail(&format!("no thread for rank {rank}: {error}")),
            }
        }
        let first = args.measure(&subjects[0]);
        // What another found is told before that this one could not go on.
        let ended = others.into_iter().filter_map(|thread| thread.join().ok()).find_map(Result::err);
        match ended {
            Some(error @ MeasureError::Wrong { .. }) => Err(error),
            _ => first,
        }
    })?;
    let name = if args.on_gpus() { "threads that share a GPU" } else { "threads" }.to_owned();
    report(args, &World { kind: "threads", name, ranks, hosts: vec![(host(), ranks)] }, &found)
}

impl From<MeasureError> for Failure {
    fn from(error: MeasureError) -> Self {
        Failure::failed(error.to_string(), error.hint())
    }
}

fn report(args: &Args, world: &World, found: &[Measured]) -> Result<()> {
    args.format.print(|| as_json(world, found), || as_text(world, found))
}

fn as_json(world: &World, found: &[Measured]) -> Value {
    let row = |m: &Measured| {
        json!({
            "collective": m.pattern.name(), "bytes": m.bytes, "seconds": m.seconds, "repeats": m.repeats,
            "algorithm_bytes_per_s": m.algorithm_bytes_per_s(), "bus_bytes_per_s": m.bus_bytes_per_s(world.ranks),
        })
    };
    let hosts: Vec<Value> = world.hosts.iter().map(|(host, ranks)| json!({ "host": host, "ranks": ranks })).collect();
    json!({
        "world": world.kind, "ranks": world.ranks, "hosts": hosts, "type": "fp32",
        "collectives": found.iter().map(row).collect::<Vec<_>>(),
    })
}

fn as_text(world: &World, found: &[Measured]) -> String {
    let rate = |bytes: f64| format!("{:.3} GB/s", bytes / 1e9);
    let row = |m: &Measured| {
        vec![
            m.pattern.to_string(),
            units::bytes(m.bytes as u64),
            format!("{:.1} µs", m.seconds * 1e6),
            rate(m.algorithm_bytes_per_s()),
            rate(m.bus_bytes_per_s(world.ranks)),
        ]
    };
    let rows: Vec<Vec<String>> = found.iter().map(row).collect();
    let hosts: Vec<String> = world.hosts.iter().map(|(host, ranks)| format!("{ranks} on {host}")).collect();
    let who = format!("{} ranks as {} ({})", world.ranks, world.name, hosts.join(", "));
    let table = table(&["collective", "size", "time", "algorithm bandwidth", "bus bandwidth"], &rows);
    format!("{who}, fp32, results checked; sizes and bandwidths as NCCL's tests count them\n{table}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        assert_eq!(size("1KiB"), Ok(1024));
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("64 MiB"), Ok(64 << 20));
        for wrong in ["", "3", "5GiB", "1KB", "KiB", "99999999999999999999"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }
}
