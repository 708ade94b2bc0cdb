//! Ranks that share a device or have one each, for the conformance suite of communicators.

use crate::CudaError;
use crate::device_queue::{CaptureTurn, DeviceQueue};
use crate::driver::{ALIGNMENT, Address, Memory, Pinned, Priority, Stream};
use crate::gpu::Gpu;
use crate::nccl_queue::NcclQueue;
use crate::nccl_world::NcclWorld;
use lockstep_exec::ExecError;
use lockstep_exec::comm::conformance::{self, Subject};
use lockstep_exec::comm::processes::ProcessCommunicator;
use lockstep_exec::comm::threads;
use lockstep_exec::communication::{CommunicationQueue, Connection};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// As many ranks that share a device, for [`conformance::check`].
pub fn ranks(gpu: &Arc<Gpu>, count: usize, timeout: Duration) -> Result<Vec<Subject>, ExecError> {
    let subject = |comm| {
        let queue = || -> Result<Box<dyn CommunicationQueue>, ExecError> {
            Ok(Box::new(DeviceQueue::new(gpu, &comm, &Arc::new(Stream::new(&gpu.device)?), &CaptureTurn::default())))
        };
        let (queues, slab) = ([queue()?, queue()?], Slab::new(gpu)?);
        Ok(Subject::new(comm, queues, move |bytes| Box::new(slab.part(bytes))))
    };
    threads(count, timeout).into_iter().map(subject).collect()
}

/// This process as a rank of several over NCCL, for [`conformance::check_rank`], whose connections these are; `ordered` promises
/// the bits of sums.
pub fn process_rank(
    gpu: &Arc<Gpu>,
    comm: Arc<ProcessCommunicator>,
    connections: &[Connection],
    ordered: bool,
) -> Result<Subject, ExecError> {
    let world = Arc::new(NcclWorld::connect(gpu, &comm, connections)?);
    let queue = || -> Result<Box<dyn CommunicationQueue>, ExecError> {
        let stream = Arc::new(Stream::with_priority(&gpu.device, Priority::Collectives)?);
        Ok(Box::new(NcclQueue::new(gpu, &world, &stream, ordered)?))
    };
    let (queues, slab) = ([queue()?, queue()?], Slab::new(gpu)?);
    let subject = Subject::new(comm, queues, move |bytes| Box::new(slab.part(bytes)));
    Ok(if ordered { subject } else { subject.in_any_order() })
}

/// Memory that tensors get parts of. The suite takes and gives back many, and while messages are under way nothing may be freed:
/// that waits for all that the device does.
struct Slab {
    memory: Memory,
    stream: Stream,
    state: Mutex<Parts>,
}

struct Parts {
    /// What goes to the device and comes from there passes through.
    pinned: Pinned,
    /// Bytes that have been taken once.
    used: u64,
    /// Parts that were given back, by size.
    free: BTreeMap<u64, Vec<Address>>,
}

/// Bytes of one rank's, and those that are copied at a time.
const SLAB: u64 = 256 << 20;
const PINNED: usize = 1 << 20;

impl Slab {
    fn new(gpu: &Arc<Gpu>) -> Result<Arc<Self>, CudaError> {
        let (memory, stream) = (Memory::new(&gpu.device, SLAB)?, Stream::new(&gpu.device)?);
        let parts = Parts { pinned: Pinned::new(&gpu.device, PINNED)?, used: 0, free: BTreeMap::new() };
        Ok(Arc::new(Self { memory, stream, state: Mutex::new(parts) }))
    }

    fn state(&self) -> MutexGuard<'_, Parts> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The suite has no use for a device that fails.
    fn part(self: &Arc<Self>, bytes: usize) -> DeviceMemory {
        let room = (bytes as u64).next_power_of_two().max(ALIGNMENT);
        let mut state = self.state();
        let base = state.free.get_mut(&room).and_then(Vec::pop).unwrap_or_else(|| {
            state.used += room;
            assert!(state.used <= SLAB, "the suite takes more than {SLAB} bytes");
            self.memory.base + state.used - room
        });
        drop(state);
        DeviceMemory { slab: self.clone(), base, bytes, room }
    }
}

struct DeviceMemory {
    slab: Arc<Slab>,
    base: Address,
    bytes: usize,
    room: u64,
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.slab.state().free.entry(self.room).or_default().push(self.base);
    }
}

impl conformance::Memory for DeviceMemory {
    fn pointer(&self) -> *mut u8 {
        self.base as usize as *mut u8
    }

    fn write(&mut self, at: usize, data: &[u8]) {
        assert!(at + data.len() <= self.bytes);
        let (mut state, stream) = (self.slab.state(), &self.slab.stream);
        for (i, part) in data.chunks(PINNED).enumerate() {
            let (pinned, to) = (&mut state.pinned.slice()[..part.len()], self.base + (at + i * PINNED) as u64);
            pinned.copy_from_slice(part);
            // SAFETY: inside the memory; the copy is waited for.
            let copied = unsafe { stream.to_device(to, pinned) };
            copied.and_then(|()| stream.wait()).unwrap_or_else(|error| panic!("{error}"));
        }
    }

    fn read(&self) -> Vec<u8> {
        let mut data = vec![0; self.bytes];
        let (mut state, stream) = (self.slab.state(), &self.slab.stream);
        for (i, part) in data.chunks_mut(PINNED).enumerate() {
            let pinned = &mut state.pinned.slice()[..part.len()];
            // SAFETY: as many bytes; the copy is waited for.
            let copied = unsafe { stream.to_host(pinned, self.base + (i * PINNED) as u64) };
            copied.and_then(|()| stream.wait()).unwrap_or_else(|error| panic!("{error}"));
            part.copy_from_slice(pinned);
        }
        data
    }
}
