//! Queues of communication: an executor enqueues an instruction and goes on.
//!
//! On the CPU a queue is the thread itself or a communication thread. On a GPU it is a stream. All forms pass one
//! conformance suite (`comm/conformance.rs`).

use super::{CommError, CommunicationCall, HostCommunicator, Piece};
use lockstep_ir::program::Slot;
use std::sync::Arc;

/// The number of an instruction in its queue, from 1 on; 0 where it has ended, or where the queue waits for all alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Enqueued(pub u64);

/// A rank's queue of communication. What is enqueued ends in this order. Where the memory is on the host, [`Inline`] runs an
/// instruction while it is enqueued, and [`CommunicationThread`](super::CommunicationThread) beside kernels; on a device it is a
/// stream of the device.
pub trait CommunicationQueue: Send {
    /// Enqueues an instruction. Operands are in the arena that starts at `base`, in the memory that the queue is of.
    ///
    /// # Safety
    /// The arena is that of the program that the call was made for. It stays valid, and nobody else touches the operands, until
    /// the call has ended; an arena from which messages are sent stays valid until [`finish`](Self::finish) has returned.
    unsafe fn enqueue(
        &mut self,
        call: &Arc<CommunicationCall>,
        base: *mut u8,
        slot: Slot,
    ) -> Result<Enqueued, CommError>;

    /// Returns when this instruction has ended, and all before it.
    fn wait(&mut self, number: Enqueued) -> Result<(), CommError>;

    /// Returns when all have ended, and what was sent may be overwritten as far as this queue has to do with it.
    fn finish(&mut self) -> Result<(), CommError>;
}

/// Runs instructions on the host's memory, on the thread that enqueues them.
pub struct Inline {
    comm: Arc<dyn HostCommunicator>,
    pieces: Vec<Piece>,
}

// SAFETY: `pieces` holds addresses while an instruction runs; nobody looks at them afterwards.
unsafe impl Send for Inline {}

impl Inline {
    /// The queue of the rank whose communicator this is.
    pub fn new(comm: Arc<dyn HostCommunicator>) -> Self {
        Self { comm, pieces: Vec::new() }
    }
}

impl CommunicationQueue for Inline {
    unsafe fn enqueue(
        &mut self,
        call: &Arc<CommunicationCall>,
        base: *mut u8,
        slot: Slot,
    ) -> Result<Enqueued, CommError> {
        // SAFETY: the caller vouches.
        unsafe { call.run(self.comm.as_ref(), base, slot, &mut self.pieces)? };
        Ok(Enqueued::default())
    }

    fn wait(&mut self, _: Enqueued) -> Result<(), CommError> {
        Ok(())
    }

    fn finish(&mut self) -> Result<(), CommError> {
        Ok(())
    }
}
