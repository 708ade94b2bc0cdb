//! A rank among others: threads that share its device, or processes with a device each.

use crate::CudaError;
use crate::device_queue::{CaptureTurn, DeviceQueue};
use crate::driver::{Address, Event, Graph, Stream};
use crate::gpu::Gpu;
use crate::nccl_queue::{NcclQueue, QueueUse};
use crate::nccl_world::NcclWorld;
use crate::progress::Progress;
use lockstep_exec::ExecError;
use lockstep_exec::comm::processes::ProcessCommunicator;
use lockstep_exec::comm::{
    CommunicationCalls, CommunicationQueue, Communicator, Connection, Link, ProgramPlace, ThreadCommunicator,
    communication_calls,
};
use lockstep_ir::program::{self, Slot};
use lockstep_ir::{Coordinates, StepProgram};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The ranks beside one.
pub enum Neighbours {
    /// Threads of this process that share the device, and the turn of their world.
    Threads(Link<ThreadCommunicator>, CaptureTurn),
    /// Processes with a device each, and the connections of all of them.
    Processes(Link<ProcessCommunicator>, Vec<Connection>),
}

impl Neighbours {
    /// Where the rank stands.
    pub fn coordinates(&self) -> Coordinates {
        match self {
            Neighbours::Threads(link, _) => link.coordinates,
            Neighbours::Processes(link, _) => link.coordinates,
        }
    }
}

/// A rank's connection.
pub struct Linked {
    coordinates: Coordinates,
    calls: CommunicationCalls,
    kind: Kind,
}

/// The queues of the program's streams: that of kernels, and those of [`program::Stream::BESIDE`] that the program uses.
struct Queues<Q> {
    compute: Q,
    beside: [Option<Q>; program::Stream::BESIDE.len()],
}

impl<Q> Queues<Q> {
    fn of(&mut self, on: program::Stream) -> &mut Q {
        on.beside().and_then(|at| self.beside[at].as_mut()).unwrap_or(&mut self.compute)
    }

    fn each(&mut self) -> impl Iterator<Item = &mut Q> {
        std::iter::once(&mut self.compute).chain(self.beside.iter_mut().flatten())
    }
}

enum Kind {
    Threads(Arc<ThreadCommunicator>, Box<Queues<DeviceQueue>>),
    Processes(Box<Queues<NcclQueue>>, Arc<NcclWorld>),
}

/// What a rank can do with an entry, and what all do then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// It has run once.
    pub ran: bool,
    /// Its CUDA graph is there; that of threads is the first rank's.
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
    /// Connects a rank that runs `program` on these streams; `ordered` promises the bits of sums.
    pub fn new(
        gpu: &Arc<Gpu>,
        program: &StepProgram,
        neighbours: Neighbours,
        stream: &Arc<Stream>,
        beside: [Option<&Arc<Stream>>; program::Stream::BESIDE.len()],
        ordered: bool,
    ) -> Result<Self, ExecError> {
        let coordinates = neighbours.coordinates();
        let calls = communication_calls(program, coordinates);
        let kind = match neighbours {
            Neighbours::Threads(link, turn) => {
                let queue = |stream| DeviceQueue::new(gpu, &link.comm, stream, &turn);
                let queues = Queues { compute: queue(stream), beside: beside.map(|stream| stream.map(queue)) };
                Kind::Threads(link.comm, Box::new(queues))
            }
            Neighbours::Processes(link, connections) => {
                let world = Arc::new(NcclWorld::connect(gpu, &link.comm, &connections)?);
                let queue =
                    |stream, holds_kernels| NcclQueue::new(gpu, &world, stream, QueueUse { ordered, holds_kernels });
                let mut queues = Queues { compute: queue(stream, true)?, beside: [const { None }; _] };
                for (made, stream) in queues.beside.iter_mut().zip(beside) {
                    *made = stream.map(|stream| queue(stream, false)).transpose()?;
                }
                Kind::Processes(Box::new(queues), world)
            }
        };
        Ok(Self { coordinates, calls, kind })
    }

    /// Where the rank stands.
    pub fn coordinates(&self) -> Coordinates {
        self.coordinates
    }

    /// Whether ranks are threads that share the device.
    pub fn shares_the_device(&self) -> bool {
        matches!(self.kind, Kind::Threads(..))
    }

    /// Whether it has CUDA graphs: of threads the first rank has those of all.
    pub fn leads(&self) -> bool {
        match &self.kind {
            Kind::Threads(comm, _) => comm.rank() == 0,
            Kind::Processes(..) => true,
        }
    }

    /// Tells the others where this rank is.
    pub fn at(&self, op: &'static str, layer: Option<usize>, micro_batch: usize) {
        let place = ProgramPlace { op, layer, micro_batch };
        match &self.kind {
            Kind::Threads(comm, _) => comm.at(place),
            Kind::Processes(_, world) => world.comm.at(place),
        }
    }

    /// What all ranks do with an entry. Processes come to the same by themselves, unless plans may change on one.
    pub fn agree(&self, mine: Ready, may_change: bool) -> Result<Ready, ExecError> {
        match &self.kind {
            Kind::Threads(comm, _) => {
                comm.at(START);
                Ok(comm.meet(START, mine, |all| Ready::together(&all))?)
            }
            Kind::Processes(_, world) if may_change => {
                world.comm.at(START);
                let all = world.comm.exchange(START, &[u8::from(mine.changed)])?;
                let changed = all.iter().any(|changed| changed[..] != [0]);
                Ok(Ready::together(&[Ready { changed, ..mine }]))
            }
            Kind::Processes(..) => Ok(Ready::together(&[mine])),
        }
    }

    /// Shows all ranks that share the device the marks of those that have one.
    pub fn share(&self, mark: Option<Arc<Event>>) -> Result<Arc<[Arc<Event>]>, ExecError> {
        match &self.kind {
            Kind::Threads(comm, _) => Ok(comm.meet(START, mark, |all| all.into_iter().flatten().collect())?),
            Kind::Processes(..) => Ok(Arc::new([])),
        }
    }

    /// Says what is run, and whether it is captured.
    pub fn begin(&mut self, entry: &Arc<str>, capturing: bool) {
        match &mut self.kind {
            Kind::Threads(_, queues) => queues.each().for_each(|queue| queue.begin(entry, capturing)),
            Kind::Processes(queues, _) => queues.each().for_each(|queue| queue.begin(entry)),
        }
    }

    /// Enqueues an instruction if ranks run it together, and says whether they do.
    ///
    /// # Safety
    /// `base` is the arena of the program.
    pub unsafe fn enqueue(
        &mut self,
        base: Address,
        slot: Slot,
        instr: usize,
        on: program::Stream,
    ) -> Result<bool, ExecError> {
        let Some(call) = &self.calls[slot.segment][instr] else { return Ok(false) };
        let queue: &mut dyn CommunicationQueue = match &mut self.kind {
            Kind::Threads(_, queues) => queues.of(on),
            Kind::Processes(queues, _) => queues.of(on),
        };
        // SAFETY: the caller vouches for the arena, the verifier for the operands; arenas go when the device does nothing more.
        unsafe { queue.enqueue(call, base as usize as *mut u8, slot)? };
        Ok(true)
    }

    /// Lets the streams wait until all messages have been taken.
    pub fn settle(&mut self) -> Result<(), ExecError> {
        match &mut self.kind {
            Kind::Threads(_, queues) => Ok(queues.each().try_for_each(DeviceQueue::settle)?),
            Kind::Processes(queues, _) => Ok(queues.each().try_for_each(NcclQueue::settle)?),
        }
    }

    /// How far processes have come: nothing is known of threads that share the device.
    pub fn progress(&self) -> Option<&Progress> {
        match &self.kind {
            Kind::Threads(..) => None,
            Kind::Processes(_, world) => Some(&world.progress),
        }
    }

    /// Where another process has failed: gives up what the device does, which may never end, and these graphs of it.
    pub fn give_up(&self, graphs: &mut BTreeMap<Arc<str>, Graph>) {
        if let Kind::Processes(_, world) = &self.kind
            && world.has_failed()
        {
            world.give_up(std::mem::take(graphs));
        }
    }
}

/// Whether ranks that are processes can be connected.
pub fn check_nccl() -> Result<(), CudaError> {
    crate::nccl::version().map(|_| ())
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
