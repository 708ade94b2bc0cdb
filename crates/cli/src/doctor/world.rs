//! `lockstep doctor --world`: the processes of a job.

use crate::failure::Failure;
use crate::processes::{self, Place};
use lockstep_cuda::{Device, Gpu};
use lockstep_exec::ExecError;
use lockstep_exec::comm::processes::{Over, ProcessCommunicator, conform, join};
use lockstep_exec::comm::{Communicator, conformance};
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

/// How long processes wait for each other.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Looks at the processes; where `conformance` names a device, checks how they communicate there.
pub fn run(conformance: Option<&str>) -> Result<(), Failure> {
    let Some(place) = processes::place()? else {
        return Err(Failure::request(
            "no other processes were started with this one\nhint: start it as `mpirun -n 4 lockstep doctor --world`, or with \
             srun or torchrun"
                .to_owned(),
        ));
    };
    let rank = place.rank;
    let result =
        of_rank(&place, conformance).map_err(|failure| if rank == 0 { failure } else { failure.of_rank(rank) });
    processes::end_well(result)
}

fn of_rank(place: &Place, conformance: Option<&str>) -> Result<(), Failure> {
    let start = place.start(TIMEOUT)?;
    let failed = |error: String| match error.contains("\nhint: ") {
        true => Failure::run(error),
        false => Failure::run(format!("{error}\nhint: please report this with the output of `lockstep doctor`")),
    };
    let comm = Arc::new(join(&start).map_err(|e| failed(e.to_string()))?);
    let ranks = comm.ranks();
    let mut said = Vec::new();
    match conformance {
        None => {}
        Some("cuda") => {
            for (ordered, how) in [(true, "in rank order"), (false, "in NCCL's order")] {
                over_nccl(place, &comm, ordered).map_err(|e| failed(e.to_string()))?;
                said.push(format!("collectives (sums {how}) and messages of {ranks} processes over NCCL hold"));
            }
        }
        Some(_) => {
            conform(&comm, &start).map_err(failed)?;
            said.push(format!("collectives and messages of up to {ranks} processes over {} hold", over(&comm)));
        }
    }
    if comm.rank() == 0 {
        said.iter().try_for_each(|line| writeln!(std::io::stdout(), "{line}"))?;
    }
    Ok(())
}

/// Checks communication between the GPUs of the processes.
fn over_nccl(place: &Place, comm: &Arc<ProcessCommunicator>, ordered: bool) -> Result<(), ExecError> {
    let all = conformance::rank_connections(comm.ranks());
    let local = place.local.unwrap_or(place.rank) % Device::count()?.max(1);
    let subject = lockstep_cuda::conformance_process(&Gpu::open(local, false)?, comm.clone(), &all, ordered)?;
    conformance::check_rank(&subject).map_err(|problem| match comm.failure() {
        Some(failure) => failure.into(),
        None => ExecError::Internal(problem),
    })
}

/// What bytes go over, and why not MPI.
fn over(comm: &ProcessCommunicator) -> String {
    match comm.over() {
        Over::Mpi(name) => name.clone(),
        Over::Tcp(None) => "TCP".to_owned(),
        Over::Tcp(Some(why)) => format!("TCP (no MPI: {why})"),
    }
}
