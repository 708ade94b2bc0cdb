//! A rank that is tried out: its communicator, its queues, and the memory that it communicates from.

use super::buffer::Buffer;
use super::{
    Action, CommError, CommunicationCall, CommunicationQueue, CommunicationThread, Communicator, Enqueued,
    HostCommunicator, Inline, Piece, ProgramPlace,
};
use crate::sync::std_lock;
use lockstep_ir::program::Slot;
use std::sync::{Arc, Mutex, MutexGuard};

/// A rank that is tried out, whatever carries its bytes.
pub struct Subject {
    comm: Arc<dyn Communicator>,
    /// By channel.
    queues: [Mutex<Box<dyn CommunicationQueue>>; 2],
    memory: Box<dyn Fn(usize) -> Box<dyn Memory> + Send + Sync>,
    /// Whether sums may be taken in any order.
    any_order: bool,
}

/// Memory that a rank communicates from.
pub trait Memory: Send {
    /// Where it starts, as the rank's queues know it.
    fn pointer(&self) -> *mut u8;

    /// Copies from the host to `at`.
    fn write(&mut self, at: usize, data: &[u8]);

    /// All of it, copied to the host.
    fn read(&self) -> Vec<u8>;
}

impl Subject {
    /// A rank with a queue per channel; `memory` gives this many bytes.
    pub fn new(
        comm: Arc<dyn Communicator>,
        queues: [Box<dyn CommunicationQueue>; 2],
        memory: impl Fn(usize) -> Box<dyn Memory> + Send + Sync + 'static,
    ) -> Self {
        Self { comm, queues: queues.map(Mutex::new), memory: Box::new(memory), any_order: false }
    }

    /// The same, whose sums may be taken in any order: it is tested on numbers whose sum does not depend on that.
    pub fn in_any_order(self) -> Self {
        Self { any_order: true, ..self }
    }

    pub(in crate::comm) fn any_order(&self) -> bool {
        self.any_order
    }

    /// A rank that communicates on the thread that asks for it.
    pub fn inline(comm: Arc<dyn HostCommunicator>) -> Self {
        let queue = || Box::new(Inline::new(comm.clone())) as Box<dyn CommunicationQueue>;
        Self::new(comm.clone(), [queue(), queue()], host_memory)
    }

    /// A rank with threads that communicate beside it.
    pub fn beside(comm: Arc<dyn HostCommunicator>) -> std::io::Result<Self> {
        let queue = || -> std::io::Result<Box<dyn CommunicationQueue>> {
            Ok(Box::new(CommunicationThread::start(comm.clone())?))
        };
        let queues = [queue()?, queue()?];
        Ok(Self::new(comm, queues, host_memory))
    }

    /// Its communicator.
    pub fn comm(&self) -> &dyn Communicator {
        self.comm.as_ref()
    }

    /// This many bytes of its memory.
    pub(in crate::comm) fn memory(&self, bytes: usize) -> Box<dyn Memory> {
        (self.memory)(bytes)
    }

    /// Does it, and returns when it has ended.
    pub(in crate::comm) fn act(&self, action: Action, pieces: &[Piece], place: ProgramPlace) -> Result<(), CommError> {
        let queue = match &action {
            Action::Together(_, group) => group.channel as usize,
            Action::Send { .. } | Action::Receive { .. } => 0,
        };
        let call = Arc::new(CommunicationCall::absolute(action, pieces, place));
        let number = self.enqueue(queue, &call, place)?;
        self.wait(queue, number)
    }

    /// Enqueues a call of pieces of its memory.
    pub(in crate::comm) fn enqueue(
        &self,
        queue: usize,
        call: &Arc<CommunicationCall>,
        place: ProgramPlace,
    ) -> Result<Enqueued, CommError> {
        let slot = Slot::new(0, place.micro_batch);
        // SAFETY: buffers live until the rank has left, and nobody else uses them; they overlap only as allowed.
        unsafe { self.queue(queue).enqueue(call, std::ptr::null_mut(), slot) }
    }

    /// Returns when it has ended, and all before it.
    pub(in crate::comm) fn wait(&self, queue: usize, number: Enqueued) -> Result<(), CommError> {
        self.queue(queue).wait(number)
    }

    fn queue(&self, queue: usize) -> MutexGuard<'_, Box<dyn CommunicationQueue>> {
        std_lock(&self.queues[queue])
    }

    /// Returns when what it sent is taken, or the run has ended.
    pub(in crate::comm) fn finish(&self) {
        // An error is the run's, which others see as well.
        (0..self.queues.len()).for_each(|queue| drop(self.queue(queue).finish()));
    }

    /// Ends the rank's program.
    pub fn leave(&self) {
        self.finish();
        self.comm.leave();
    }
}

impl Memory for Buffer {
    fn pointer(&self) -> *mut u8 {
        Buffer::pointer(self)
    }

    fn write(&mut self, at: usize, data: &[u8]) {
        self.bytes_mut()[at..at + data.len()].copy_from_slice(data);
    }

    fn read(&self) -> Vec<u8> {
        self.bytes().to_vec()
    }
}

/// This many bytes of the host, all of them zero.
fn host_memory(bytes: usize) -> Box<dyn Memory> {
    let mut buffer = Buffer::default();
    buffer.resize(bytes);
    Box::new(buffer)
}
