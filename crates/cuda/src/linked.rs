//! A rank among others that share the device.

use crate::device_queue::{CaptureTurn, DeviceQueue};
use crate::driver::{Event, Stream};
use crate::gpu::Gpu;
use lockstep_exec::ExecError;
use lockstep_exec::comm::{Communicator, ProgramPlace, ThreadCommunicator};
use lockstep_exec::communication::{CommunicationCalls, CommunicationQueue, Link, communication_calls};
use lockstep_ir::program::{self, Slot};
use lockstep_ir::{Coordinates, StepProgram};
use std::sync::Arc;

/// A rank's connection.
pub struct Linked {
    link: Link<ThreadCommunicator>,
    calls: CommunicationCalls,
    /// Of the program's streams: that of kernels, and the other where the program uses it.
    compute: DeviceQueue,
    communication: Option<DeviceQueue>,
}

/// What a rank can do with an entry, and what all do then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// It has run once.
    pub ran: bool,
    /// Its CUDA graph is there, which is the first rank's.
    pub captured: bool,
    /// Plans have changed: no graph is good any more.
    pub changed: bool,
}

impl Ready {
    /// What all ranks together can do.
    pub fn together(all: &[Self]) -> Self {
        let changed = all.iter().any(|one| one.changed);
        Self {
            ran: !changed && all.iter().all(|one| one.ran),
            captured: !changed && all.iter().any(|one| one.captured),
            changed,
        }
    }
}

const START: ProgramPlace = ProgramPlace { op: "the start of a run", layer: None, micro_batch: 0 };

impl Linked {
    /// Connects a rank that runs `program` on these streams.
    pub fn new(
        gpu: &Arc<Gpu>,
        program: &StepProgram,
        link: Link<ThreadCommunicator>,
        (stream, second): (&Arc<Stream>, Option<&Arc<Stream>>),
        turn: &CaptureTurn,
    ) -> Self {
        let calls = communication_calls(program, link.coordinates);
        let queue = |stream| DeviceQueue::new(gpu, &link.comm, stream, turn);
        let (compute, communication) = (queue(stream), second.map(queue));
        Self { link, calls, compute, communication }
    }

    /// Where the rank stands.
    pub fn coordinates(&self) -> Coordinates {
        self.link.coordinates
    }

    /// Whether it is the first rank, which has the CUDA graphs of all.
    pub fn leads(&self) -> bool {
        self.link.comm.rank() == 0
    }

    /// Tells the others where this rank is.
    pub fn at(&self, op: &'static str, layer: Option<usize>, micro_batch: usize) {
        self.link.comm.at(ProgramPlace { op, layer, micro_batch });
    }

    /// What all ranks do with an entry.
    pub fn agree(&self, mine: Ready) -> Result<Ready, ExecError> {
        self.link.comm.at(START);
        Ok(self.link.comm.meet(START, mine, |all| Ready::together(&all))?)
    }

    /// Shows all ranks the marks of those that have one.
    pub fn share(&self, mark: Option<Arc<Event>>) -> Result<Arc<[Arc<Event>]>, ExecError> {
        Ok(self.link.comm.meet(START, mark, |all| all.into_iter().flatten().collect())?)
    }

    /// Says what is run, and whether it is captured.
    pub fn begin(&mut self, entry: &Arc<str>, capturing: bool) {
        [Some(&mut self.compute), self.communication.as_mut()]
            .into_iter()
            .flatten()
            .for_each(|queue| queue.begin(entry, capturing));
    }

    /// Enqueues an instruction if ranks run it together, and says whether they do.
    ///
    /// # Safety
    /// `base` is the arena of the program.
    pub unsafe fn enqueue(
        &mut self,
        base: u64,
        (slot, instr): (Slot, usize),
        on: program::Stream,
    ) -> Result<bool, ExecError> {
        let Some(call) = &self.calls[slot.segment][instr] else { return Ok(false) };
        let queue = match (on, &mut self.communication) {
            (program::Stream::Communication, Some(queue)) => queue,
            _ => &mut self.compute,
        };
        // SAFETY: the caller vouches for the arena, the verifier for the operands; arenas go when the device does nothing more.
        unsafe { queue.enqueue(call, base as usize as *mut u8, slot)? };
        Ok(true)
    }

    /// Lets the streams wait until all messages have been taken.
    pub fn settle(&mut self) -> Result<(), ExecError> {
        self.compute.settle()?;
        Ok(self.communication.as_mut().map_or(Ok(()), DeviceQueue::settle)?)
    }
}

#[cfg(test)]
mod tests {
    use super::Ready;

    #[test]
    fn ranks_replay_what_none_of_them_has_changed() {
        let first = Ready { ran: true, captured: true, changed: false };
        let other = Ready { captured: false, ..first };
        assert_eq!(Ready::together(&[first, other]), first);
        assert_eq!(Ready::together(&[other, Ready { ran: false, ..other }]), Ready { ran: false, ..other });
        let changed = Ready { ran: false, captured: false, changed: true };
        assert_eq!(Ready::together(&[first, Ready { changed: true, ..other }]), changed);
    }
}
