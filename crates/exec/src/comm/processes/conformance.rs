//! The conformance suite on processes.

use super::{JoinError, ProcessCommunicator, Start, host_at, join};
use crate::comm::conformance::check_apart;
use crate::comm::{Communicator, ProgramPlace, Subject};
use std::net::{TcpListener, ToSocketAddrs};
use std::sync::Arc;

const PLACE: ProgramPlace = ProgramPlace { op: "conformance", layer: None, micro_batch: 0 };

/// Holds the ranks that are these processes to what every communicator must do, with fresh communicators of up to as many ranks.
/// All processes call it.
pub fn conform(all: &ProcessCommunicator, start: &Start) -> Result<(), String> {
    let inline = |comm| Ok(Subject::inline(Arc::new(comm)));
    let beside = |comm| Subject::beside(Arc::new(comm)).map_err(|e| format!("no more threads: {e}"));
    let make: [&dyn Fn(ProcessCommunicator) -> Result<Subject, String>; 2] = [&inline, &beside];
    make.iter().try_for_each(|make| {
        check_apart(all.ranks(), &|ranks| {
            let subject = fresh(all, start, ranks).and_then(|comm| comm.map(make).transpose());
            subject.unwrap_or_else(|reason| {
                all.fail(&reason);
                None
            })
        })?;
        // Whoever lacks a rank has passed nothing.
        all.failure().map_or(Ok(()), |error| Err(error.to_string()))
    })
}

/// This process's end of a communicator of this many ranks, if it is one of them.
fn fresh(all: &ProcessCommunicator, start: &Start, ranks: usize) -> Result<Option<ProcessCommunicator>, String> {
    let door = if start.rank == 0 { Some(door(start)?) } else { None };
    let address = match &door {
        Some(door) => door.local_addr().map_err(|e| e.to_string())?.to_string(),
        None => String::new(),
    };
    let told = all.exchange(PLACE, address.as_bytes()).map_err(|e| e.to_string())?;
    let address = String::from_utf8_lossy(&told[0]).into_owned();
    let start = Start { ranks, address, secret: Some(all.secret.clone()), board: None, ..start.clone() };
    let joined = match door {
        Some(door) => host_at(&start, door).map(Some),
        None if start.rank < ranks => join(&start).map(Some),
        None => Ok(None),
    };
    let joined = joined.map_err(|e: JoinError| e.to_string())?;
    // Some programs under test end at once, and nobody is to come too late for them.
    all.exchange(PLACE, &[]).map_err(|e| e.to_string())?;
    Ok(joined)
}

/// A listener of the first rank at its address, on any port.
fn door(start: &Start) -> Result<TcpListener, String> {
    let first = start.address.to_socket_addrs().ok().and_then(|mut at| at.next());
    let ip = first.ok_or_else(|| format!("{} has no address", start.address))?.ip();
    TcpListener::bind((ip, 0)).map_err(|e| format!("cannot listen at {ip}: {e}"))
}
