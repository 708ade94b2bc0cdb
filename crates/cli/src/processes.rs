//! How a process finds the others of its run: by the variables that whoever started it has set.

use crate::failure::Failure;
use lockstep_cuda::{Device, Gpu};
use lockstep_exec::ExecError;
use lockstep_exec::comm::processes::{MpiLibrary, Start, end_mpi};
use std::hash::Hasher;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Set for processes that `lockstep launch` started: their standard input is a pipe, on which they hear that they are to stop.
pub const LAUNCHED: &str = "LOCKSTEP_LAUNCHED";

/// Names the MPI library, where it is not found by itself or another one is; `none` for no MPI.
const LIBRARY: &str = "LOCKSTEP_MPI_LIBRARY";

/// The port where none is given, as with torchrun.
const PORT: &str = "29500";

/// One process of several.
#[derive(Debug, PartialEq, Eq)]
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
}

/// Where this process stands among others; `None` if it is alone.
pub fn place() -> Result<Option<ProcessPlace>, Failure> {
    find(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
}

fn find(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<ProcessPlace>, Failure> {
    let number = |name: &str| -> Result<Option<usize>, Failure> {
        let wrong =
            |value: &str| Failure::request(format!("{name}={value} is no number\nhint: unset it, or set it right"));
        get(name).map(|value| value.parse().map_err(|_| wrong(&value))).transpose()
    };
    let address = |host: Option<String>, port: String| host.map(|host| format!("{host}:{port}"));
    let (host, port) = (get("MASTER_ADDR"), get("MASTER_PORT"));
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
        let (Some(rank), Some(ranks)) = (number(rank_name)?, number(ranks_name)?) else { continue };
        if ranks <= 1 {
            return Ok(None);
        }
        // Jobs that share a host need ports of their own.
        let job = match rank_name {
            "SLURM_PROCID" => number("SLURM_JOB_ID")?,
            "OMPI_COMM_WORLD_RANK" => get("PMIX_NAMESPACE").map(|name| xxh3_64(name.as_bytes()) as usize),
            _ => None,
        };
        let port = port.or_else(|| job.map(|job| (20000 + job % 10000).to_string())).unwrap_or(PORT.to_owned());
        let Some(address) = address(host.or(first), port) else {
            return Err(Failure::request(format!(
                "{rank_name}={rank} and {ranks_name}={ranks} say that this is one process of several, and MASTER_ADDR does not \
                 say where rank 0 is\nhint: set MASTER_ADDR to the host of rank 0, or unset {rank_name} to train alone"
            )));
        };
        let mpi = mpi.and_then(|mpi| match get(LIBRARY) {
            None => Some(mpi),
            Some(none) if none == "none" => None,
            Some(file) => Some(MpiLibrary::File(file.into())),
        });
        return Ok(Some(ProcessPlace { rank, ranks, address, local: number(local_name)?, mpi }));
    }
    Ok(None)
}

/// This host, if all processes are on it.
fn local(get: &dyn Fn(&str) -> Option<String>, here: &str, all: &str) -> Option<String> {
    (get(here)? == get(all)?).then(|| "127.0.0.1".to_owned())
}

impl ProcessPlace {
    /// How it joins the others, and how long it waits for them.
    pub fn start(&self, timeout: Duration) -> Result<Start, Failure> {
        let ProcessPlace { rank, ranks, address, mpi, .. } = self;
        let (address, mpi) = (address.clone(), mpi.clone());
        Ok(Start { rank: *rank, ranks: *ranks, address, timeout, build: build()?, mpi })
    }

    /// Its GPU; where there are fewer than processes they share.
    pub fn gpu(&self) -> Result<Arc<Gpu>, ExecError> {
        let local = self.local.unwrap_or(self.rank) % Device::count()?.max(1);
        Ok(Gpu::open(local, false)?)
    }
}

/// The version and a checksum of this binary.
fn build() -> Result<String, Failure> {
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

/// Sets `stop` when whoever launched this process asks for it, or is gone.
pub fn stop_with_launcher(stop: &Arc<AtomicBool>) -> Result<(), Failure> {
    if std::env::var_os(LAUNCHED).is_none() {
        return Ok(());
    }
    let stop = stop.clone();
    std::thread::Builder::new().name("lockstep-launcher".into()).spawn(move || {
        // Whatever comes, and the end of the pipe, means the same.
        let _ = std::io::stdin().read(&mut [0]);
        stop.store(true, Ordering::SeqCst);
    })?;
    Ok(())
}

/// Ends this process when whoever launched it is gone.
pub fn end_with_launcher() -> Result<(), Failure> {
    if std::env::var_os(LAUNCHED).is_some() {
        std::thread::Builder::new().name("lockstep-launcher".into()).spawn(move || {
            let _ = std::io::stdin().read(&mut [0]);
            std::process::exit(1);
        })?;
    }
    Ok(())
}

/// The last that a process does: MPI ends with all ranks together, or where something failed is left to whoever started it.
pub fn end_well<T>(result: Result<T, Failure>) -> Result<T, Failure> {
    match end_mpi(result.is_ok()) {
        Err(reason) if result.is_ok() => Err(Failure::run(format!(
            "{reason}\nhint: the run itself has ended well; LOCKSTEP_MPI_LIBRARY=none does without MPI"
        ))),
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
        let expected = ProcessPlace { rank, ranks, address: address.to_owned(), local, mpi: place.mpi.clone() };
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
        assert!(text.contains("MASTER_ADDR") && text.contains("hint: "), "{text}");
        let text =
            found(&[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")]);
        assert!(text.unwrap_err().contains("MASTER_ADDR"));
        assert!(found(&[("RANK", "one"), ("WORLD_SIZE", "4")]).unwrap_err().contains("RANK=one is no number"));
    }
}
