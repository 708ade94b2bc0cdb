//! Bytes between processes over MPI, by whatever network it drives.
//!
//! The [engine](engine) calls MPI from one thread at a time: whoever sends or waits moves what there is to be moved, and a thread of its own
//! does so when all compute. It lives as long as the process, since MPI starts once; communicators come and go, and their frames carry
//! their number. What failed ranks leave behind is the [failure channel](super::control)'s business: MPI says nothing, or ends the
//! process.
//!
//! MPI is found when the program runs, not linked, and only moves bytes. mpirun kills the survivors of a failure,
//! so what ended a run is written to `failures.jsonl` at once.

mod engine;
mod library;

pub use library::MpiLibrary;

use super::Transport;
use super::inbox::{Inbox, Stream};
use engine::{Engine, SMALL};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// The MPI of this process, once it was started or could not be.
static MPI: OnceLock<Result<Engine, String>> = OnceLock::new();

/// The name and version of the library that is there, without starting it.
pub fn found(which: &MpiLibrary) -> Result<String, String> {
    library::Library::open(which).map(|library| library.name)
}

/// One communicator's end.
pub struct Mpi {
    token: u64,
    engine: &'static Engine,
}

impl Mpi {
    /// Starts MPI if it has not been, which all ranks do together. From then on what comes for communicator `token` goes to the
    /// inbox.
    pub fn attach(
        which: &MpiLibrary,
        rank: usize,
        ranks: usize,
        token: u64,
        inbox: &Arc<Inbox>,
        deadline: Instant,
    ) -> Result<Self, String> {
        let engine = MPI.get_or_init(|| Engine::start(which, deadline)).as_ref().map_err(Clone::clone)?;
        // A library other than the one that started the processes takes each for the only one.
        if engine.place != (rank, ranks) && engine.place == (0, 1) {
            return Err(format!("{} is not the library that started this process", engine.name));
        }
        // Communicators of some of the ranks have the first of them.
        if engine.place.0 != rank || engine.place.1 < ranks {
            let (rank, ranks) = engine.place;
            return Err(format!("{} counts this as rank {rank} of {ranks}", engine.name));
        }
        engine.attach(token, inbox)?;
        Ok(Self { token, engine })
    }
}

impl Transport for Mpi {
    fn send(&self, to: usize, stream: Stream, frame: &[u8], goes_on: &dyn Fn() -> bool) -> Result<(), String> {
        match frame.len() <= SMALL {
            true => self.engine.send_copy(self.token, to, stream, frame),
            false => self.engine.send_in_place(self.token, to, stream, frame, goes_on),
        }
    }

    fn progress(&self) -> bool {
        self.engine.progress();
        true
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        self.engine.detach(self.token);
    }
}

/// Ends this process's part in MPI, if it has one; the last that a process does. A run that ended well ends MPI together with the
/// others, and waits for them; one that failed leaves it to `mpirun` to end what is left.
pub fn end(well: bool) -> Result<(), String> {
    let Some(Ok(engine)) = MPI.get() else { return Ok(()) };
    if well {
        return engine.finish();
    }
    engine.stop();
    Ok(())
}
