//! Which process takes which GPU.

use crate::{HostError, Result};
use lockstep_config::{Config, DeviceChoice};
use lockstep_cuda::{CudaError, Device, Gpu, LibraryName, NOT_FOUND, check_nccl};
use lockstep_exec::ExecError;
use lockstep_exec::comm::processes::ProcessCommunicator;
use lockstep_exec::comm::{Communicator, ProgramPlace};
use lockstep_ir::Hint;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The GPU of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GpuOfRank {
    /// Its number in this process.
    pub ordinal: usize,
    /// GPUs of all processes.
    pub of_all: usize,
    /// Whether a rank before it has the same one.
    pub shared: bool,
}

/// Set to something else for every process of a host: ranks may share a GPU then. NCCL takes them for processes of several hosts.
pub const SHARES: &str = "NCCL_HOSTID";

/// What a process tells the others of its GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Told {
    /// It wants none.
    None,
    /// It has this one.
    Found { ordinal: usize, bus: String, count: usize, shares: Option<String> },
    /// It finds none that it can use; whether that is worth telling where none is asked for.
    Missing { problem: String, hint: String, tell: bool },
}

/// The GPU of this process, if all have one; else why not, if that is worth telling. Where the config asks for GPUs, that is an error.
pub(crate) fn seats(
    comm: &ProcessCommunicator,
    config: &Config,
    local: Option<usize>,
) -> Result<Result<GpuOfRank, Option<String>>> {
    let members = comm.members();
    let hosts: Vec<&str> = members.iter().map(|member| member.host.as_str()).collect();
    let before = hosts[..comm.rank()].iter().filter(|host| **host == hosts[comm.rank()]).count();
    let mine = match config.train.device {
        DeviceChoice::Cpu => Told::None,
        DeviceChoice::Auto | DeviceChoice::Cuda => find(config.train.gpu, local.unwrap_or(before)),
    };
    let place = ProgramPlace { op: "find GPUs", layer: None, micro_batch: 0 };
    comm.at(place);
    let text = serde_json::to_vec(&mine).unwrap_or_default();
    let all = comm.exchange(place, &text).map_err(ExecError::from)?;
    // What others tell that have another config is no answer; they hear of that soon.
    let all: Vec<Told> = all.iter().map(|text| serde_json::from_slice(text).unwrap_or(Told::None)).collect();
    let asked_for = config.train.device == DeviceChoice::Cuda;
    settle(&all, &hosts, comm.rank()).or_else(|error| match (asked_for, &error) {
        (true, _) => Err(error),
        (false, HostError::NoGpu { problem, .. }) => {
            let tell = all.iter().any(|told| matches!(told, Told::Missing { tell: true, .. }));
            Ok(Err(tell.then(|| problem.clone())))
        }
        (false, _) => Ok(Err(error.to_string().lines().next().map(str::to_owned))),
    })
}

/// Looks for the GPU of the process that is the `local`-th of its host.
fn find(first: usize, local: usize) -> Told {
    let look = || {
        Gpu::check()?;
        check_nccl()?;
        let count = Device::count()?;
        let shares = std::env::var(SHARES).ok().filter(|id| !id.is_empty());
        let ordinal = match (&shares, first + local) {
            // Whoever started it shows it its own.
            _ if count == 1 && first == 0 => 0,
            (Some(_), wanted) => wanted % count,
            (None, wanted) => wanted,
        };
        // One that is not there is told from one that another has.
        let bus = if ordinal < count { Device::bus_id(ordinal)? } else { String::new() };
        Ok(Told::Found { ordinal, bus, count, shares })
    };
    look().unwrap_or_else(|error: CudaError| {
        let hint = error.hint().unwrap_or_default();
        let tell =
            !matches!(&error, CudaError::Library { library: LibraryName::Driver, problem } if problem == NOT_FOUND);
        Told::Missing { problem: error.to_string(), hint, tell }
    })
}

fn settle(all: &[Told], hosts: &[&str], rank: usize) -> Result<Result<GpuOfRank, Option<String>>> {
    let mut taken = BTreeSet::new();
    for (other, told) in all.iter().enumerate() {
        let host = hosts[other];
        match told {
            Told::None => return Ok(Err(None)),
            Told::Missing { problem, hint, .. } => {
                let (problem, hint) = (problem.clone(), hint.clone());
                return Err(HostError::NoGpu { rank: other, host: host.to_owned(), problem, hint });
            }
            Told::Found { ordinal, bus, count, shares } => {
                if ordinal >= count || !taken.insert((host, bus, shares)) {
                    let ranks = hosts.iter().filter(|other| **other == host).count();
                    return Err(HostError::FewGpus { host: host.to_owned(), ranks, gpus: *count });
                }
            }
        }
    }
    let gpus: BTreeSet<_> = taken.iter().map(|(host, bus, _)| (host, bus)).collect();
    match &all[rank] {
        Told::Found { ordinal, bus, .. } => {
            let same = |(told, host): (&Told, &&str)| match told {
                Told::Found { bus: other, .. } => other == bus && *host == hosts[rank],
                Told::None | Told::Missing { .. } => false,
            };
            let shared = all[..rank].iter().zip(hosts).any(same);
            Ok(Ok(GpuOfRank { ordinal: *ordinal, of_all: gpus.len(), shared }))
        }
        Told::None | Told::Missing { .. } => Ok(Err(None)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(ordinal: usize, count: usize, shares: Option<&str>) -> Told {
        Told::Found { ordinal, bus: format!("0000:{ordinal}"), count, shares: shares.map(str::to_owned) }
    }

    #[test]
    fn every_rank_has_a_gpu_or_none_has() {
        let two = [found(0, 2, None), found(1, 2, None)];
        assert_eq!(settle(&two, &["a", "a"], 1).unwrap(), Ok(GpuOfRank { ordinal: 1, of_all: 2, shared: false }));
        // Processes that see one each, on two hosts.
        let one = [found(0, 1, None), found(0, 1, None)];
        assert_eq!(settle(&one, &["a", "b"], 1).unwrap(), Ok(GpuOfRank { ordinal: 0, of_all: 2, shared: false }));
        // On one host it is the same.
        let text = settle(&one, &["a", "a"], 0).unwrap_err().with_hint();
        assert_eq!(text, "host a has 1 GPU for 2 ranks");
        let shared = [found(0, 1, Some("x")), found(0, 1, Some("y"))];
        assert_eq!(settle(&shared, &["a", "a"], 1).unwrap(), Ok(GpuOfRank { ordinal: 0, of_all: 1, shared: true }));
        let few = [found(0, 2, None), found(1, 2, None), found(2, 2, None)];
        let text = settle(&few, &["a"; 3], 0).unwrap_err().with_hint();
        assert!(text.starts_with("host a has 2 GPUs for 3 ranks"), "{text}");
        assert_eq!(settle(&[found(0, 1, None), Told::None], &["a", "a"], 0).unwrap(), Err(None));
        let missing = Told::Missing { problem: "NCCL was not found".into(), hint: "install it".into(), tell: true };
        let text = settle(&[found(0, 1, None), missing], &["a", "b"], 0).unwrap_err().with_hint();
        assert!(text.starts_with("rank 1 on host b cannot use a GPU: NCCL was not found\nhint: install it"), "{text}");
    }
}
