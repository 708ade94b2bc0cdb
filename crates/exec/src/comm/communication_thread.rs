//! The thread that runs collectives while kernels go on.

use super::peers::has_waited;
use super::{CommError, CommunicationCall, CommunicationQueue, Enqueued, HostCommunicator};
use crate::sync::{self, Condvar, JoinHandle, Mutex, lock, spawn, wait};
use lockstep_ir::program::Slot;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

/// A thread that runs communication on the host's memory while kernels go on, in the order in which it is enqueued.
pub struct CommunicationThread {
    shared: sync::Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    enqueued: u64,
    done: u64,
    failed: Option<CommError>,
    ends: bool,
}

struct Job {
    call: Arc<CommunicationCall>,
    base: *mut u8,
    slot: Slot,
}

// SAFETY: who enqueues vouches for the arena.
unsafe impl Send for Job {}

/// Jobs that fit in before the queue grows.
const ROOM: usize = 64;

impl CommunicationThread {
    /// Starts the thread.
    pub fn start(comm: Arc<dyn HostCommunicator>) -> std::io::Result<Self> {
        let state = State { jobs: VecDeque::with_capacity(ROOM), ..State::default() };
        let shared = sync::Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let (theirs, name) = (shared.clone(), format!("lockstep-comm-{}", comm.rank()));
        let thread = spawn(name, move || serve(&theirs, comm.as_ref()))?;
        Ok(Self { shared, thread: Some(thread) })
    }
}

/// The thread's life.
fn serve(shared: &Shared, comm: &dyn HostCommunicator) {
    let mut pieces = Vec::new();
    loop {
        let mut state = lock(&shared.state);
        while state.jobs.is_empty() && !state.ends {
            state = wait(&shared.changed, state);
        }
        let Some(Job { call, base, slot }) = state.jobs.pop_front() else { return };
        drop(state);
        // SAFETY: who enqueued it vouches for the arena, the verifier for what overlaps.
        let work = AssertUnwindSafe(|| unsafe { call.run(comm, base, slot, &mut pieces) });
        let result = catch_unwind(work).unwrap_or_else(|_| {
            comm.fail("panicked");
            comm.failure().map_or(Ok(()), Err)
        });
        let mut state = lock(&shared.state);
        state.done += 1;
        state.failed = state.failed.take().or(result.err());
        drop(state);
        shared.changed.notify_all();
    }
}

impl CommunicationQueue for CommunicationThread {
    unsafe fn enqueue(
        &mut self,
        call: &Arc<CommunicationCall>,
        base: *mut u8,
        slot: Slot,
    ) -> Result<Enqueued, CommError> {
        let mut state = lock(&self.shared.state);
        state.jobs.push_back(Job { call: call.clone(), base, slot });
        state.enqueued += 1;
        let number = Enqueued(state.enqueued);
        drop(state);
        self.shared.changed.notify_all();
        Ok(number)
    }

    fn wait(&mut self, Enqueued(number): Enqueued) -> Result<(), CommError> {
        let mut state = lock(&self.shared.state);
        let mut began = None;
        while state.done < number {
            began.get_or_insert_with(Instant::now);
            state = wait(&self.shared.changed, state);
        }
        has_waited(began);
        state.failed.clone().map_or(Ok(()), Err)
    }

    fn finish(&mut self) -> Result<(), CommError> {
        let all = lock(&self.shared.state).enqueued;
        self.wait(Enqueued(all))
    }
}

impl Drop for CommunicationThread {
    fn drop(&mut self) {
        lock(&self.shared.state).ends = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // Panics there end the run like other failures.
            let _ = thread.join();
        }
    }
}
