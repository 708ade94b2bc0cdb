//! The thread that runs collectives while kernels go on.

use super::call::Ptr;
use crate::comm::{CommError, Communicator};
use crate::communication::{CommunicationCall, CommunicationCalls};
use lockstep_ir::program::Slot;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// A thread that runs collectives while kernels go on, in the order in which they are handed over.
pub struct CommunicationThread {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<(usize, Slot)>,
    handed: u64,
    done: u64,
    failed: Option<CommError>,
    ends: bool,
}

fn lock(shared: &Shared) -> MutexGuard<'_, State> {
    shared.state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CommunicationThread {
    /// Starts the thread.
    ///
    /// # Safety
    /// `base` stays valid until the communication thread is dropped.
    pub unsafe fn start(
        communication_calls: Arc<CommunicationCalls>,
        comm: Arc<dyn Communicator>,
        base: *mut u8,
    ) -> std::io::Result<Self> {
        let most = communication_calls.iter().map(Vec::len).max().unwrap_or(0);
        let state = State { jobs: VecDeque::with_capacity(most), ..State::default() };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let room = communication_calls.iter().flatten().flatten().map(CommunicationCall::pieces).max().unwrap_or(0);
        let (theirs, base) = (shared.clone(), Ptr(base));
        let name = format!("lockstep-comm-{}", comm.rank());
        let work = move || {
            let mut pieces = Vec::with_capacity(room);
            loop {
                let mut state = lock(&theirs);
                while state.jobs.is_empty() && !state.ends {
                    state = theirs.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                let Some((instr, slot)) = state.jobs.pop_front() else { return };
                drop(state);
                let work = AssertUnwindSafe(|| match &communication_calls[slot.segment][instr] {
                    // SAFETY: the caller of `start` vouches for the arena, the verifier for what overlaps.
                    Some(call) => unsafe { call.run(comm.as_ref(), base.get(), slot, &mut pieces) },
                    None => Ok(()),
                });
                let result = catch_unwind(work).unwrap_or_else(|_| {
                    comm.fail("panicked");
                    comm.failure().map_or(Ok(()), Err)
                });
                let mut state = lock(&theirs);
                state.done += 1;
                state.failed = state.failed.take().or(result.err());
                drop(state);
                theirs.changed.notify_all();
            }
        };
        let thread = std::thread::Builder::new().name(name).spawn(work)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Hands over an instruction and returns its number.
    pub fn hand(&self, instr: usize, slot: Slot) -> u64 {
        let mut state = lock(&self.shared);
        state.jobs.push_back((instr, slot));
        state.handed += 1;
        let number = state.handed;
        drop(state);
        self.shared.changed.notify_all();
        number
    }

    /// Instructions handed over so far.
    pub fn handed(&self) -> u64 {
        lock(&self.shared).handed
    }

    /// Waits until the instruction with this number, and all before it, have ended.
    pub fn wait(&self, number: u64) -> Result<(), CommError> {
        let mut state = lock(&self.shared);
        while state.done < number {
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.failed.clone().map_or(Ok(()), Err)
    }
}

impl Drop for CommunicationThread {
    fn drop(&mut self) {
        lock(&self.shared).ends = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // Panics there end the run like other failures.
            let _ = thread.join();
        }
    }
}
