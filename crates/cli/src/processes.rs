//! How a process finds the others of its run: by the variables that whoever started it has set.

use crate::failure::{Failure, Result};
use crate::terminal::printable;
use lockstep_cuda::{Device, Gpu};
use lockstep_exec::ExecError;
use lockstep_exec::comm::processes::{Board, JobSecret, MpiLibrary, Start, Waiting, end_early, end_mpi};
use std::hash::Hasher;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Set for processes that `lockstep launch` started: their standard input is a pipe, on which they hear that they are to stop.
pub const LAUNCHED: &str = "LOCKSTEP_LAUNCHED";

/// Set for processes that come to an elastic run which has begun without them.
pub const LATE: &str = "LOCKSTEP_JOINS_LATE";

/// Names the MPI library, where it is not found by itself or another one is; `none` for no MPI.
const LIBRARY: &str = "LOCKSTEP_MPI_LIBRARY";

/// The secret by which the processes of a job know each other; `lockstep launch` makes one.
pub const SECRET: &str = "LOCKSTEP_JOB_SECRET";

/// The file in which rank 0 says how it is found, in the run directory.
const BOARD: &str = ".rendezvous";

/// What a launcher writes to a process that is to stop, and where another has ended before all had come.
pub const STOP: u8 = b's';
pub const ABANDONED: u8 = b'a';

/// The port where none is given, as with torchrun.
const PORT: u16 = 29500;

/// One process of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessPlace {
    /// Which it is.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
    /// Where the first listens.
    pub address: String,
    /// Which of the processes of its host it is, where that is said.
    pub local: Option<usize>,
    /// The MPI that started it, if one did.
    pub mpi: Option<MpiLibrary>,
    /// The secret of the job, if whoever started it gave one.
    pub secret: Option<JobSecret>,
    /// What tells its job from others of the same folder.
    pub job: String,
}

/// Where this process stands among others; `None` if it is alone.
pub fn place() -> Result<Option<ProcessPlace>> {
    find(&|name| std::env::var(name).ok())
}

fn find(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<ProcessPlace>> {
    let number = |name: &str| -> Result<Option<usize>> {
        let wrong = |value: &str| {
            let what = if value.is_empty() { "is set and empty" } else { "is no number" };
            Failure::request(format!("{name}={} {what}", printable(value)), "unset it, or set it right")
        };
        get(name).map(|value| value.parse().map_err(|_| wrong(&value))).transpose()
    };
    let text = |name: &str| get(name).filter(|value| !value.is_empty());
    let host = text("MASTER_ADDR");
    // srun's plugins for MPI are PMIx, which Open MPI speaks, and PMI-2, which MPICH speaks.
    let (pmix, pmi) = (get("PMIX_RANK").map(|_| MpiLibrary::OpenMpi), get("PMI_FD").map(|_| MpiLibrary::Mpich));
    let open_mpi = ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"];
    // By torchrun and `lockstep launch`; by srun, whose batch shell has no step; by Open MPI; by MPICH and its relatives.
    let started = [
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", None, None),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", get("SLURM_LAUNCH_NODE_IPADDR"), pmix.or(pmi)),
        (
            open_mpi[0],
            open_mpi[1],
            "OMPI_COMM_WORLD_LOCAL_RANK",
            local(get, open_mpi[2], open_mpi[1]),
            Some(MpiLibrary::OpenMpi),
        ),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", local(get, "MPI_LOCALNRANKS", "PMI_SIZE"), Some(MpiLibrary::Mpich)),
    ];
    for (rank_name, ranks_name, local_name, first, mpi) in started {
        let (rank, ranks) = match (number(rank_name)?, number(ranks_name)?) {
            (Some(rank), Some(ranks)) => (rank, ranks),
            // One of the two says nothing where it stands alone, and torchrun sets both.
            (Some(rank), None) if rank_name == "RANK" => {
                return Err(Failure::request(
                    format!("RANK={rank} is set and WORLD_SIZE is not"),
                    "set WORLD_SIZE to the number of processes, or unset RANK to train alone",
                ));
            }
            (None, Some(ranks)) if rank_name == "RANK" && ranks > 1 => {
                return Err(Failure::request(
                    format!("WORLD_SIZE={ranks} is set and RANK is not"),
                    format!("give every process a RANK from 0 to {}, or unset WORLD_SIZE to train alone", ranks - 1),
                ));
            }
            _ => continue,
        };
        if rank >= ranks {
            return Err(match ranks {
                0 => Failure::request(
                    format!("{ranks_name}=0 leaves no process"),
                    "set it to the number of processes, or unset it",
                ),
                _ => Failure::request(
                    format!("{rank_name}={rank} is not a rank of {ranks_name}={ranks}"),
                    format!("ranks go from 0 to {}", ranks - 1),
                ),
            });
        }
        if ranks == 1 {
            return Ok(None);
        }
        let port = match get("MASTER_PORT") {
            None => None,
            Some(port) => Some(port.parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(|| {
                let port = printable(&port);
                Failure::request(
                    format!("MASTER_PORT={port} is no port"),
                    "set it to a number from 1 to 65535, or unset it",
                )
            })?),
        };
        // Jobs that share a host need ports of their own.
        let job = match rank_name {
            "SLURM_PROCID" => number("SLURM_JOB_ID")?,
            "OMPI_COMM_WORLD_RANK" => get("PMIX_NAMESPACE").map(|name| xxh3_64(name.as_bytes()) as usize),
            _ => None,
        };
        let port = port.or_else(|| job.map(|job| 20000 + (job % 10000) as u16)).unwrap_or(PORT);
        let Some(host) = host.or(first) else {
            return Err(Failure::request(
                format!(
                    "{rank_name}={rank} and {ranks_name}={ranks} say that this is one process of several, and \
                 MASTER_ADDR does not say where rank 0 is"
                ),
                format!("set MASTER_ADDR to the host of rank 0, or unset {rank_name} to train alone"),
            ));
        };
        let address = format!("{host}:{port}");
        let secret = match text(SECRET) {
            None => None,
            Some(secret) => Some(JobSecret::from_hex(&secret).ok_or_else(|| {
                Failure::request(
                    format!("{SECRET} is not 64 hexadecimal digits"),
                    "unset it, or give all ranks what `openssl rand -hex 32` prints",
                )
            })?),
        };
        // Whatever names a job; where nothing does, the address that its processes were given.
        let names = ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID"];
        let of = |name: &&str| text(name).map(|value| format!("{name}={value} "));
        let job = names.iter().filter_map(of).chain([address.clone()]).collect();
        let mpi = mpi.and_then(|mpi| match text(LIBRARY) {
            None => Some(mpi),
            Some(none) if none == "none" => None,
            Some(file) => Some(MpiLibrary::File(file.into())),
        });
        return Ok(Some(ProcessPlace { rank, ranks, address, local: number(local_name)?, mpi, secret, job }));
    }
    Ok(None)
}

/// This host, if all processes are on it.
fn local(get: &dyn Fn(&str) -> Option<String>, here: &str, all: &str) -> Option<String> {
    (get(here)? == get(all)?).then(|| "127.0.0.1".to_owned())
}

impl ProcessPlace {
    /// How it joins the others, and how long it waits for them. They share the run directory `dir`; where there is none, the folder
    /// that they were started in.
    pub fn start(&self, timeout: Duration, dir: Option<&Path>, waiting: Waiting) -> Result<Start> {
        let ProcessPlace { rank, ranks, address, mpi, secret, job, .. } = self.clone();
        let path = match dir {
            Some(dir) => dir.join(BOARD),
            None => PathBuf::from(format!(".lockstep-rendezvous-{:016x}", xxh3_64(job.as_bytes()))),
        };
        let board = Some(Board { path, job });
        Ok(Start { rank, ranks, address, timeout, build: build()?, mpi, secret, board, waiting })
    }

    /// Tells the others that this process ends before it could join them. A launcher tells them itself.
    pub fn end_early(&self, dir: &Path, failure: &Failure) {
        if std::env::var_os(LAUNCHED).is_none()
            && let Ok(start) = self.start(Duration::from_secs(60), Some(dir), Waiting::default())
        {
            end_early(&start, &failure.to_string());
        }
    }

    /// Its GPU; where there are fewer than processes they share.
    pub fn gpu(&self) -> Result<Arc<Gpu>, ExecError> {
        let local = self.local.unwrap_or(self.rank) % Device::count()?.max(1);
        Ok(Gpu::open(local, false)?)
    }
}

/// The version and a checksum of this binary.
fn build() -> Result<String> {
    let mut file = std::fs::File::open("/proc/self/exe").or_else(|_| std::fs::File::open(std::env::current_exe()?))?;
    let (mut hasher, mut chunk) = (Xxh3::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut chunk)? {
            0 => break,
            bytes => hasher.write(&chunk[..bytes]),
        }
    }
    Ok(format!("{} (binary {:016x})", env!("CARGO_PKG_VERSION"), hasher.finish()))
}

/// Sets `stop` when whoever launched this process asks for it, or is gone. Gives what ends the waiting for other processes.
pub fn stop_with_launcher(stop: &Arc<AtomicBool>) -> Result<Waiting> {
    let waiting = Waiting { stop: Some(stop.clone()), abandoned: None };
    if std::env::var_os(LAUNCHED).is_none() {
        return Ok(waiting);
    }
    let (stop, abandoned) = (stop.clone(), Arc::new(AtomicBool::new(false)));
    let told = abandoned.clone();
    std::thread::Builder::new().name("lockstep-launcher".into()).spawn(move || {
        let mut word = [STOP];
        while matches!(std::io::stdin().read(&mut word), Ok(1..)) && word == [ABANDONED] {
            told.store(true, Ordering::SeqCst);
        }
        // Whatever else comes, and the end of the pipe, means the same.
        stop.store(true, Ordering::SeqCst);
    })?;
    Ok(Waiting { abandoned: Some(abandoned), ..waiting })
}

/// Whether the run has begun without this process.
pub fn joins_late() -> bool {
    std::env::var_os(LATE).is_some()
}

/// Whether Lockstep itself started this process for one of several ranks.
pub fn is_launched() -> bool {
    std::env::var_os(LAUNCHED).is_some()
}

/// Ends this process when whoever launched it is gone.
pub fn end_with_launcher() -> Result<()> {
    if std::env::var_os(LAUNCHED).is_some() {
        std::thread::Builder::new().name("lockstep-launcher".into()).spawn(move || {
            let mut word = [STOP];
            while matches!(std::io::stdin().read(&mut word), Ok(1..)) && word == [ABANDONED] {}
            std::process::exit(1);
        })?;
    }
    Ok(())
}

/// The last that a process does: MPI ends with all ranks together, or where something failed is left to whoever started it.
pub fn end_well<T>(result: Result<T>) -> Result<T> {
    match end_mpi(result.is_ok()) {
        Err(reason) if result.is_ok() => {
            Err(Failure::run(reason, "the run itself has ended well; LOCKSTEP_MPI_LIBRARY=none does without MPI"))
        }
        _ => result,
    }
}

/// Says a line of a rank that is not the first.
pub fn say(rank: usize, text: &str) {
    // Where nobody listens, nobody is told.
    let _ = std::io::stderr().write_all(format!("rank {rank}: {text}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(variables: &[(&str, &str)]) -> Result<Option<ProcessPlace>, String> {
        let get = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
        find(&get).map_err(|failure| format!("{failure:?}"))
    }

    fn check(variables: &[(&str, &str)], rank: usize, ranks: usize, address: &str) -> Option<MpiLibrary> {
        let place = found(variables).unwrap().unwrap();
        let local = variables.iter().find(|(n, _)| n.contains("LOCAL_RANK") || n.contains("LOCALID"));
        let local = local.map(|(_, value)| value.parse().unwrap());
        let expected = ProcessPlace { rank, ranks, address: address.to_owned(), local, ..place.clone() };
        assert_eq!(place, expected, "{variables:?}");
        place.mpi
    }

    #[test]
    fn processes_are_found_by_the_variables_of_whoever_started_them() {
        let master = [("MASTER_ADDR", "n1"), ("MASTER_PORT", "4321")];
        let with = |more: &[(&'static str, &'static str)]| [&master[..], more].concat();
        let mpi = check(&with(&[("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")]), 3, 4, "n1:4321");
        assert_eq!(mpi, None);
        let slurm =
            [("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_LOCALID", "0"), ("SLURM_JOB_ID", "70012")];
        assert_eq!(check(&with(&slurm), 1, 2, "n1:4321"), None);
        let by_pmix = [&slurm[..], &[("PMIX_RANK", "1")]].concat();
        assert_eq!(check(&with(&by_pmix), 1, 2, "n1:4321"), Some(MpiLibrary::OpenMpi));
        let by_pmi = [&slurm[..], &[("PMI_FD", "6"), ("PMI_RANK", "1")]].concat();
        assert_eq!(check(&with(&by_pmi), 1, 2, "n1:4321"), Some(MpiLibrary::Mpich));
        check(&[&slurm[..], &[("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.7")]].concat(), 1, 2, "10.0.0.7:20012");
        let open_mpi = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "4")];
        check(&with(&open_mpi), 0, 4, "n1:4321");
        check(&with(&[&open_mpi[..], &[("OMPI_COMM_WORLD_LOCAL_RANK", "3")]].concat()), 0, 4, "n1:4321");
        let here = [&open_mpi[..], &[("OMPI_COMM_WORLD_LOCAL_SIZE", "4")]].concat();
        assert_eq!(check(&here, 0, 4, "127.0.0.1:29500"), Some(MpiLibrary::OpenMpi));
        // Jobs of one host have ports of their own.
        let job = |name| found(&[&here[..], &[("PMIX_NAMESPACE", name)]].concat()).unwrap().unwrap().address;
        assert!(job("1") != job("2") && job("1").starts_with("127.0.0.1:2"));
        let mpich = [("PMI_RANK", "2"), ("PMI_SIZE", "3"), ("MPI_LOCALNRANKS", "3")];
        assert_eq!(check(&mpich, 2, 3, "127.0.0.1:29500"), Some(MpiLibrary::Mpich));
        let named = |name| found(&[&mpich[..], &[("LOCKSTEP_MPI_LIBRARY", name)]].concat()).unwrap().unwrap().mpi;
        assert_eq!(named("none"), None);
        assert_eq!(named("/opt/libmpi.so"), Some(MpiLibrary::File("/opt/libmpi.so".into())));
    }

    #[test]
    fn a_process_alone_is_alone() {
        assert_eq!(found(&[]), Ok(None));
        assert_eq!(found(&[("RANK", "0"), ("WORLD_SIZE", "1")]), Ok(None));
        // A batch script is no task of a step.
        assert_eq!(found(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "7")]), Ok(None));
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let text = found(&[("RANK", "1"), ("WORLD_SIZE", "4")]).unwrap_err();
        assert!(text.contains("MASTER_ADDR") && text.contains("hint: Some("), "{text}");
        let text =
            found(&[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")]);
        assert!(text.unwrap_err().contains("MASTER_ADDR"));
        let check = |variables: &[(&str, &str)], expected: &str| {
            let with = [&[("MASTER_ADDR", "n1")], variables].concat();
            let text = found(&with).unwrap_err();
            assert!(text.contains(expected) && text.contains("hint: Some(") && text.contains("code: 2"), "{text}");
        };
        check(&[("RANK", "one"), ("WORLD_SIZE", "4")], "RANK=one is no number");
        check(&[("RANK", ""), ("WORLD_SIZE", "4")], "RANK= is set and empty");
        check(&[("RANK", "2"), ("WORLD_SIZE", "2")], "RANK=2 is not a rank of WORLD_SIZE=2");
        check(&[("RANK", "0"), ("WORLD_SIZE", "0")], "WORLD_SIZE=0 leaves no process");
        check(&[("RANK", "0")], "RANK=0 is set and WORLD_SIZE is not");
        check(&[("WORLD_SIZE", "2")], "WORLD_SIZE=2 is set and RANK is not");
        for port in ["99999", "x", "", "0", "-1", "80 "] {
            let set = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", port)];
            check(&set, &format!("MASTER_PORT={port} is no port"));
        }
        let secret = [("RANK", "0"), ("WORLD_SIZE", "2"), (SECRET, "tea for two")];
        check(&secret, "LOCKSTEP_JOB_SECRET is not 64 hexadecimal digits");
        assert!(!found(&[&[("MASTER_ADDR", "n1")], &secret[..]].concat()).unwrap_err().contains("tea"));
    }
}
