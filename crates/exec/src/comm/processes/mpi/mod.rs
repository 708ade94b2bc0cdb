//! Bytes between processes over MPI, by whatever network it drives.
//!
//! One [thread](engine) of the process calls MPI and nobody else, so that any library will do, whatever it thinks of threads. It lives
//! as long as the process, since MPI starts once; communicators come and go, and their frames carry their number. What failed ranks
//! leave behind is the [failure channel](super::control)'s business: MPI itself says nothing, or ends the process.

mod engine;
mod library;

pub use library::MpiLibrary;

use super::Transport;
use super::inbox::{Inbox, Stream};
use engine::{Engine, SMALL, Ticket};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The MPI of this process, once it was started or could not be.
static MPI: OnceLock<Result<Engine, String>> = OnceLock::new();

/// MPI that does not return for so long after the end of the run never will.
const RETURNS_WITHIN: Duration = Duration::from_secs(5);
/// How long a frame that is under way when the run ends may still take to arrive.
const GRACE: Duration = Duration::from_millis(500);
/// How often a blocked sender looks whether the run has ended.
const LOOK_EVERY: Duration = Duration::from_millis(100);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

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
        (rank, ranks): (usize, usize),
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
        engine.shared.with(|state| {
            if state.stopped {
                return Err(format!("{} was given up", engine.name));
            }
            state.inboxes.push((token, inbox.clone()));
            Ok(Self { token, engine })
        })
    }
}

impl Transport for Mpi {
    fn send(&self, to: usize, stream: Stream, frame: &[u8], goes_on: &dyn Fn() -> bool) -> Result<(), String> {
        if frame.len() <= SMALL {
            return self.engine.send_copy(self.token, to, stream, frame);
        }
        let ticket = Arc::new(Ticket::default());
        // SAFETY: this waits below until the engine is done with the frame.
        unsafe { self.engine.send_in_place(self.token, to, stream, frame, &ticket) }?;
        let mut ended: Option<Instant> = None;
        let mut done = lock(&ticket.done);
        loop {
            if let Some(result) = done.take() {
                // Where the run has ended, whether a frame arrived is of no interest.
                return if ended.is_some() { Ok(()) } else { result };
            }
            done = ticket.changed.wait_timeout(done, LOOK_EVERY).unwrap_or_else(PoisonError::into_inner).0;
            if ended.is_none() && !goes_on() {
                ended = Some(Instant::now());
            }
            match ended.map(|since| since.elapsed()) {
                Some(time) if time > RETURNS_WITHIN => {
                    // MPI holds memory that is about to go, and does not return.
                    eprintln!("error: MPI does not return\nhint: the run has ended before; look for its cause");
                    std::process::abort();
                }
                Some(time) if time > GRACE => self.engine.stop(),
                Some(_) | None => {}
            }
        }
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        // What was sent still goes out.
        self.engine.shared.with(|state| state.inboxes.retain(|(token, _)| *token != self.token));
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
