//! `lockstep doctor --world`: the processes of a job.

use crate::failure::Failure;
use crate::processes::{self, Place};
use lockstep_exec::comm::Communicator;
use lockstep_exec::comm::processes::{Over, ProcessCommunicator, conform, join};
use std::io::Write;
use std::time::Duration;

/// How long processes wait for each other.
const TIMEOUT: Duration = Duration::from_secs(60);

pub fn run(conformance: bool) -> Result<(), Failure> {
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

fn of_rank(place: &Place, conformance: bool) -> Result<(), Failure> {
    let start = place.start(TIMEOUT)?;
    let failed = |error: String| match error.contains("\nhint: ") {
        true => Failure::run(error),
        false => Failure::run(format!("{error}\nhint: please report this with the output of `lockstep doctor`")),
    };
    let comm = join(&start).map_err(|e| failed(e.to_string()))?;
    let first = comm.rank() == 0;
    if conformance {
        conform(&comm, &start).map_err(failed)?;
        if first {
            let (ranks, over) = (comm.ranks(), over(&comm));
            writeln!(std::io::stdout(), "collectives and messages of up to {ranks} processes over {over} hold")?;
        }
    }
    Ok(())
}

/// What bytes go over, and why not MPI.
fn over(comm: &ProcessCommunicator) -> String {
    match comm.over() {
        Over::Mpi(name) => name.clone(),
        Over::Tcp(None) => "TCP".to_owned(),
        Over::Tcp(Some(why)) => format!("TCP (no MPI: {why})"),
    }
}
