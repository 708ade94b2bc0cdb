//! The processes of a run: which of them prepares and writes, and what all of them must agree on.
//!
//! Every process runs the whole driver in lockstep on its own rank. Whatever could differ between them is either told by the first
//! or compared: the config, the program, the checkpoint, the data, and when to stop.
//!
//! The first process writes the run directory, and publishes a checkpoint when all have written their parts.

use crate::gpus::{self, GpuOfRank};
use crate::{HostError, Result, clock};
use lockstep_config::Config;
use lockstep_exec::ExecError;
use lockstep_exec::comm::processes::{Member, Over, ProcessCommunicator, Start, join};
use lockstep_exec::comm::{CommError, Communicator, ProgramPlace};
use lockstep_ir::counter;
use lockstep_rundir::{FAILURES, RunDirError};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The processes that run together, of which this is one.
pub struct Processes {
    comm: Arc<ProcessCommunicator>,
    gpu: Result<GpuOfRank, Option<String>>,
}

impl Processes {
    /// Finds the others. There must be as many as the config has ranks, unless its layout is planned for as many as there are. They agree on who takes which GPU: `local`
    /// is where this one stands on its host, if whoever started it says so.
    pub fn join(start: &Start, config: &Config, local: Option<usize>) -> Result<Self> {
        let (layout, processes) = (config.layout(), start.ranks);
        let ranks = config.ranks().unwrap_or(processes);
        if ranks != processes {
            return Err(HostError::OtherRanks { layout: layout.to_string(), ranks, processes });
        }
        Self::of(Arc::new(join(start)?), config, local)
    }

    /// Processes that have found each other.
    pub fn of(comm: Arc<ProcessCommunicator>, config: &Config, local: Option<usize>) -> Result<Self> {
        let gpu = gpus::seats(&comm, config, local)?;
        Ok(Self { comm, gpu })
    }

    /// The GPU of this process, if all have one.
    pub(crate) fn gpu(&self) -> Option<&GpuOfRank> {
        self.gpu.as_ref().ok()
    }

    /// Why they have none, if that is worth telling.
    pub(crate) fn no_gpus(&self) -> Option<&str> {
        self.gpu.as_ref().err()?.as_deref()
    }

    /// Which rank this process is.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// How many there are.
    pub fn ranks(&self) -> usize {
        self.comm.ranks()
    }

    /// What they talk over.
    pub fn comm(&self) -> &Arc<ProcessCommunicator> {
        &self.comm
    }

    /// The host of a rank.
    pub fn host(&self, rank: usize) -> &str {
        &self.member(rank).host
    }

    fn member(&self, rank: usize) -> &Member {
        &self.comm.members()[rank]
    }

    /// Ranks on this one's host.
    pub(crate) fn local_ranks(&self) -> usize {
        let host = &self.member(self.rank()).host;
        self.comm.members().iter().filter(|member| member.host == *host).count()
    }

    /// Whether no rank before this one is on its host.
    pub(crate) fn is_first_of_host(&self) -> bool {
        let (rank, members) = (self.rank(), self.comm.members());
        !members[..rank].iter().any(|other| other.host == members[rank].host)
    }

    /// Cores of all hosts.
    pub(crate) fn cores(&self) -> usize {
        let members = self.comm.members();
        let first = |(i, m): &(usize, &Member)| !members[..*i].iter().any(|other| other.host == m.host);
        members.iter().enumerate().filter(first).map(|(_, member)| member.cores).sum()
    }

    /// The hosts of all, each once, by name.
    pub fn hosts(&self) -> Vec<String> {
        let mut hosts: Vec<String> = self.comm.members().iter().map(|member| member.host.clone()).collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }

    /// How many there are, where, and what they talk over.
    pub fn summary(&self) -> String {
        let (members, hosts) = (self.comm.members(), self.hosts());
        let hosts = if hosts.len() == 1 { "1 host".to_owned() } else { format!("{} hosts", hosts.len()) };
        let over = match self.comm.over() {
            Over::Mpi(name) => format!("MPI ({name})"),
            Over::Tcp(None) => "TCP".to_owned(),
            Over::Tcp(Some(why)) => format!("TCP, not MPI: {why}"),
        };
        format!("{} processes on {hosts}, over {over}", members.len())
    }

    /// Shows the others signs of life while this process does something that may take long and that no program has.
    pub fn busy<T>(&self, op: &'static str, work: impl FnOnce() -> T) -> T {
        busy(&self.comm, op, work)
    }

    /// Every process gives some bytes, and all get everybody's, by rank. They say for what, so that ranks which are elsewhere in the
    /// program do not take one thing for another.
    fn exchange(&self, op: &'static str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let place = ProgramPlace::outside(op);
        self.comm.at(place);
        let named = [op.as_bytes(), &[0], mine].concat();
        let all = self.comm.exchange(place, &named).map_err(ExecError::from)?;
        let part = |(rank, bytes): (usize, &Vec<u8>)| {
            let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
            if &bytes[..end] != op.as_bytes() {
                let (first, second) = (op.to_owned(), String::from_utf8_lossy(&bytes[..end]).into_owned());
                return Err(ExecError::from(CommError::Mismatch { ranks: (self.rank(), rank), first, second }).into());
            }
            Ok(bytes[end + 1..].to_vec())
        };
        all.iter().enumerate().map(part).collect()
    }
}

/// Shows the others signs of life while this process does something that may take long and that no program has.
pub fn busy<T>(comm: &ProcessCommunicator, op: &'static str, work: impl FnOnce() -> T) -> T {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let beats = std::thread::Builder::new().name("lockstep-busy".into()).spawn_scoped(scope, || {
            while !done.load(Ordering::Acquire) {
                comm.at(ProgramPlace::outside(op));
                std::thread::park_timeout(BEAT_EVERY);
            }
        });
        let result = work();
        done.store(true, Ordering::Release);
        if let Ok(beats) = &beats {
            beats.thread().unpark();
        }
        result
    })
}

/// The processes of a run, if there are several: everything that they do in turns or together.
#[derive(Clone, Copy)]
pub struct ProcessGroup<'a>(pub Option<&'a Processes>);

impl<'a> ProcessGroup<'a> {
    /// Whether this process is the one that shows and writes what concerns all.
    pub fn is_first(self) -> bool {
        self.0.is_none_or(|p| p.rank() == 0)
    }

    /// Refuses processes that do not have the same text for `what`; the error names both sides of the first difference.
    pub fn agree(self, what: &'static str, mine: &str) -> Result<()> {
        let Some(processes) = self.0 else { return Ok(()) };
        let all = processes.exchange(what, mine.as_bytes())?;
        let Some(rank) = all.iter().position(|text| *text != all[0]) else { return Ok(()) };
        let text = |rank: usize| String::from_utf8_lossy(&all[rank]).into_owned();
        let (first, other) = difference(&text(0), &text(rank));
        let host = |rank: usize| processes.member(rank).host.clone();
        Err(HostError::Disagree { what, rank, hosts: Box::new([host(0), host(rank)]), first, other })
    }

    /// Refuses processes that were told different things, by config, options `given` as the user spelled them, or variables: the error
    /// names what differs, with both values.
    pub fn agree_on_start(self, config: &Config, given: &[(String, String)]) -> Result<()> {
        let Some(processes) = self.0 else { return Ok(()) };
        let mine = serde_json::to_vec(&told(config, given)).unwrap_or_default();
        let all = processes.exchange("start", &mine)?;
        let all: Vec<BTreeMap<String, String>> =
            all.iter().map(|text| serde_json::from_slice(text).unwrap_or_default()).collect();
        let Some(rank) = all.iter().position(|theirs| *theirs != all[0]) else { return Ok(()) };
        let names: BTreeSet<&String> = all[0].keys().chain(all[rank].keys()).collect();
        let value = |rank: usize, name: &str| all[rank].get(name).map_or("none", String::as_str).to_owned();
        let differ = names.iter().filter(|name| all[0].get(**name) != all[rank].get(**name));
        let text = |name: &&&String| format!("{name}: {} against {}", value(0, name), value(rank, name));
        let hosts = Box::new([0, rank].map(|rank| processes.member(rank).host.clone()));
        Err(HostError::ToldOtherwise { rank, hosts, differences: differ.take(MOST_SHOWN).map(|n| text(&n)).collect() })
    }

    /// Refuses hosts whose clocks are far apart. All look at theirs at once, after they have met.
    pub fn agree_on_clock(self) -> Result<()> {
        let Some(processes) = self.0 else { return Ok(()) };
        self.meet("clock")?;
        let all = processes.exchange("clock", &clock::now().to_le_bytes())?;
        let all: Vec<f64> = all.iter().map(|time| time[..].try_into().map_or(0.0, f64::from_le_bytes)).collect();
        let apart = |(rank, time): (usize, &f64)| clock::far_apart(time - all[0]).map(|apart| (rank, apart));
        let Some((rank, apart)) = all.iter().enumerate().find_map(apart) else { return Ok(()) };
        let hosts = Box::new([0, rank].map(|rank| processes.member(rank).host.clone()));
        Err(HostError::OtherClock { rank, hosts, apart })
    }

    /// What the first process finds out, told to all.
    pub fn told<T: Serialize + DeserializeOwned, E: From<HostError>>(
        self,
        op: &'static str,
        find: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let Some(processes) = self.0 else { return find() };
        let wrong = |error: serde_json::Error| HostError::from(ExecError::Internal(format!("{op}: {error}")));
        let mine = match self.is_first() {
            true => serde_json::to_vec(&processes.busy(op, find)?).map_err(wrong)?,
            false => Vec::new(),
        };
        Ok(serde_json::from_slice(&processes.exchange(op, &mine)?[0]).map_err(wrong)?)
    }

    /// Whether something holds for all.
    pub fn all(self, op: &'static str, mine: bool) -> Result<bool> {
        let Some(processes) = self.0 else { return Ok(mine) };
        Ok(processes.exchange(op, &[u8::from(mine)])?.iter().all(|theirs| theirs[..] == [1]))
    }

    /// Waits until all are here.
    pub fn meet(self, op: &'static str) -> Result<()> {
        self.0.map_or(Ok(()), |processes| processes.exchange(op, &[]).map(|_| ()))
    }

    /// Refuses a folder that the processes do not share: the first leaves a file there, and the others must find it.
    pub fn require_shared(self, folder: &Path) -> Result<()> {
        let Some(processes) = self.0 else { return Ok(()) };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
        let path = folder.join(SHARED);
        let mark = self.told::<_, HostError>("share", || {
            let mark = counter::bits(now, u64::from(std::process::id())).to_string();
            std::fs::write(&path, &mark).map_err(|e| RunDirError::io("write", &path, e))?;
            Ok(mark)
        })?;
        let there = || std::fs::read(&path).is_ok_and(|text| text == mark.as_bytes());
        let found = processes.busy("share", || {
            let until = Instant::now() + SEEN_WITHIN;
            while !there() && Instant::now() < until {
                std::thread::sleep(LOOK_EVERY);
            }
            there()
        });
        // With where each is, for the error.
        let real = folder
            .canonicalize()
            .or_else(|_| std::path::absolute(folder))
            .unwrap_or_else(|_| folder.to_owned())
            .display()
            .to_string();
        let all = processes.exchange("share", &[&[u8::from(found)], real.as_bytes()].concat())?;
        if self.is_first() {
            // Where it cannot be removed, it does no harm.
            let _ = std::fs::remove_file(&path);
        }
        match all.iter().position(|found| found.first() != Some(&1)) {
            None => Ok(()),
            Some(rank) => {
                let hosts = Box::new([0, rank].map(|rank| processes.member(rank).host.clone()));
                let dirs =
                    Box::new([0, rank].map(|rank| String::from_utf8_lossy(all[rank].get(1..).unwrap_or(&[])).into()));
                Err(HostError::NotShared { rank, hosts, dirs })
            }
        }
    }

    /// Has what ends the run written into its directory as soon as this process knows: whoever started it may kill it next.
    pub fn record_failures(self, dir: &Path) {
        let Some(processes) = self.0 else { return };
        let (path, rank) = (dir.join(FAILURES), processes.rank());
        let host = processes.member(rank).host.clone();
        processes.comm.on_failure(move |error| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
            let (unix_s, error) = ((now * 1e3).round() / 1e3, error.to_string());
            let line = json!({ "unix_s": unix_s, "rank": rank, "host": host, "error": error });
            // In one piece, as others write there. Where it cannot be written, the messages of the ranks are left.
            let text = format!("{line}\n");
            let file = OpenOptions::new().create(true).append(true).open(&path);
            let _ = file.and_then(|mut file| file.write_all(text.as_bytes()));
        });
    }

    /// Tells the others that this process cannot go on, and why.
    pub fn fail(self, why: &str) {
        if let Some(processes) = self.0 {
            processes.comm.fail(why);
        }
    }
}

/// Differences that are shown.
const MOST_SHOWN: usize = 4;

/// All that a process was told and must have in common with the others, by name: keys of the config, options, variables.
fn told(config: &Config, given: &[(String, String)]) -> BTreeMap<String, String> {
    let (mut all, mut table) = (BTreeMap::new(), String::new());
    for line in config.resolved_toml().lines().map(str::trim) {
        match (line.strip_prefix('['), line.split_once(" = ")) {
            (Some(heading), _) => table = heading.trim_end_matches(']').to_owned(),
            (None, Some((key, value))) if !line.starts_with('#') => {
                // The origin of a value follows it.
                let value = value.split("  #").next().unwrap_or(value).trim();
                all.insert(format!("{table}.{key}"), value.to_owned());
            }
            _ => {}
        }
    }
    let mut option = |name: &str, value: Option<String>| all.extend(value.map(|value| (name.to_owned(), value)));
    given.iter().for_each(|(name, value)| option(name, Some(value.clone())));
    for name in VARIABLES {
        option(name, std::env::var(name).ok().filter(|value| !value.is_empty()));
    }
    all
}

/// Variables that change what ranks compute, or what NCCL expects of all of them.
const VARIABLES: [&str; 3] = ["LOCKSTEP_CPU", "NCCL_ALGO", "NCCL_PROTO"];

/// The file that shows that a folder is shared.
const SHARED: &str = ".shared";
/// A network file system may take a moment to show a new file.
const SEEN_WITHIN: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How often a busy process shows that it lives.
const BEAT_EVERY: Duration = Duration::from_millis(100);

/// The first lines in which two texts differ.
fn difference(first: &str, other: &str) -> (String, String) {
    let (mut a, mut b) = (first.lines(), other.lines());
    loop {
        match (a.next(), b.next()) {
            (Some(x), Some(y)) if x == y => {}
            (None, None) => return (first.to_owned(), other.to_owned()),
            (x, y) => return [x, y].map(|line| line.unwrap_or("nothing").trim().to_owned()).into(),
        }
    }
}

/// Whether a run is to stop: asked of any process, known to all of them at the same point of the program.
pub struct StopSignal<'a> {
    asked: &'a AtomicBool,
    agreed: AtomicBool,
    group: ProcessGroup<'a>,
    /// Whether the first process wants the world to end, for another one.
    changes: Option<&'a dyn Fn() -> bool>,
    changing: AtomicBool,
}

impl<'a> StopSignal<'a> {
    /// Of a run of these processes, of which this one is asked by a flag.
    pub fn new(asked: &'a AtomicBool, group: ProcessGroup<'a>) -> Self {
        Self { asked, agreed: AtomicBool::new(false), group, changes: None, changing: AtomicBool::new(false) }
    }

    /// The same, where the first process also says when the world is to end, for another one.
    pub fn or_change(self, changes: Option<&'a dyn Fn() -> bool>) -> Self {
        Self { changes, ..self }
    }

    /// Whether the world is to end, as it was found when all last looked.
    pub fn changes(&self) -> bool {
        self.changing.load(Ordering::SeqCst)
    }

    /// Looks whether any process was asked to stop. All must look at the same points.
    pub fn look(&self) -> Result<bool> {
        let Some(processes) = self.group.0 else { return Ok(self.asked.load(Ordering::SeqCst)) };
        if !self.agreed.load(Ordering::SeqCst) {
            let changes = self.group.is_first() && self.changes.is_some_and(|changes| changes());
            let mine = u8::from(self.asked.load(Ordering::SeqCst)) | u8::from(changes) << 1;
            let all = processes.exchange("stop", &[mine])?;
            let any = |bit: u8| all.iter().any(|asked| asked.first().is_none_or(|asked| asked & bit != 0));
            self.agreed.store(any(1), Ordering::SeqCst);
            self.changing.store(any(2), Ordering::SeqCst);
        }
        Ok(self.agreed.load(Ordering::SeqCst))
    }

    /// What was found when all last looked; with one process, what is asked of it.
    pub fn flag(&self) -> &AtomicBool {
        if self.group.0.is_some() { &self.agreed } else { self.asked }
    }

    /// What is asked of this process, for work that it does while the others wait.
    pub fn asked(&self) -> &AtomicBool {
        self.asked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_shown() {
        let check = |a: &str, b: &str, expected: (&str, &str)| {
            assert_eq!(difference(a, b), (expected.0.to_owned(), expected.1.to_owned()));
        };
        check("x = 1\n  y = 2\n", "x = 1\n  y = 3\n", ("y = 2", "y = 3"));
        check("x = 1", "x = 1\nz = 4", ("nothing", "z = 4"));
        check("00ff", "00fe", ("00ff", "00fe"));
    }
}
