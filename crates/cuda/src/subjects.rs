//! Ranks that share a device or have one each, to be tried out: by the conformance suite of communicators, by measurements.

use crate::CudaError;
use crate::device_queue::{CaptureTurn, DeviceQueue};
use crate::driver::{ALIGNMENT, Address, Memory, Pinned, Priority, Stream};
use crate::gpu::Gpu;
use crate::nccl_queue::{NcclQueue, QueueUse};
use crate::nccl_world::NcclWorld;
use lockstep_exec::ExecError;
use lockstep_exec::comm::processes::ProcessCommunicator;
use lockstep_exec::comm::{CommunicationQueue, Connection, Memory as RankMemory, Subject, threads};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// As many ranks that share a device.
pub fn subjects(gpu: &Arc<Gpu>, count: usize, timeout: Duration) -> Result<Vec<Subject>, ExecError> {
    let subject = |comm| {
        let queue = || -> Result<Box<dyn CommunicationQueue>, ExecError> {
            Ok(Box::new(DeviceQueue::new(gpu, &comm, &Arc::new(Stream::new(&gpu.device)?), &CaptureTurn::default())))
        };
        let (queues, slab) = ([queue()?, queue()?], Slab::new(gpu)?);
        Ok(Subject::new(comm, queues, move |bytes| Box::new(slab.part(bytes))))
    };
    threads(count, timeout).into_iter().map(subject).collect()
}

/// This process as a rank of several over NCCL, with the connections that it will use; `ordered` promises the bits of sums.
pub fn process_subject(
    gpu: &Arc<Gpu>,
    comm: Arc<ProcessCommunicator>,
    connections: &[Connection],
    ordered: bool,
) -> Result<Subject, ExecError> {
    let world = Arc::new(NcclWorld::connect(gpu, &comm, connections)?);
    let queue = || -> Result<Box<dyn CommunicationQueue>, ExecError> {
        let stream = Arc::new(Stream::with_priority(&gpu.device, Priority::Collectives)?);
        Ok(Box::new(NcclQueue::new(gpu, &world, &stream, QueueUse { ordered, holds_kernels: false })?))
    };
    let (queues, slab) = ([queue()?, queue()?], Slab::new(gpu)?);
    let subject = Subject::new(comm, queues, move |bytes| Box::new(slab.part(bytes)));
    Ok(if ordered { subject } else { subject.in_any_order() })
}

/// Memory that tensors get parts of. The suite takes and gives back many, and while messages are under way nothing may be freed:
/// that waits for all that the device does.
struct Slab {
    gpu: Arc<Gpu>,
    stream: Stream,
    state: Mutex<Parts>,
}

struct Parts {
    /// What goes to the device and comes from there passes through.
    pinned: Pinned,
    /// The last is the one that parts are taken of, and so much of it is taken.
    memory: Vec<Memory>,
    used: u64,
    /// Parts that were given back, by size.
    free: BTreeMap<u64, Vec<Address>>,
}

/// Bytes that are taken of the device at least, and those that are copied at a time.
const SLAB: u64 = 256 << 20;
const PINNED: usize = 1 << 20;

impl Slab {
    fn new(gpu: &Arc<Gpu>) -> Result<Arc<Self>, CudaError> {
        let memory = vec![Memory::new(&gpu.device, SLAB)?];
        let parts = Parts { pinned: Pinned::new(&gpu.device, PINNED)?, memory, used: 0, free: BTreeMap::new() };
        Ok(Arc::new(Self { gpu: gpu.clone(), stream: Stream::new(&gpu.device)?, state: Mutex::new(parts) }))
    }

    fn state(&self) -> MutexGuard<'_, Parts> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// There is no use for a device that fails.
    fn part(self: &Arc<Self>, bytes: usize) -> DeviceMemory {
        let room = (bytes as u64).next_power_of_two().max(ALIGNMENT);
        let mut state = self.state();
        let base = state.free.get_mut(&room).and_then(Vec::pop).unwrap_or_else(|| state.take(&self.gpu, room));
        drop(state);
        DeviceMemory { slab: self.clone(), base, bytes, room }
    }
}

impl Parts {
    fn take(&mut self, gpu: &Gpu, room: u64) -> Address {
        if self.memory.last().is_none_or(|last| self.used + room > last.bytes) {
            let memory = Memory::new(&gpu.device, SLAB.max(room));
            self.memory.push(memory.unwrap_or_else(|error| panic!("{error}")));
            self.used = 0;
        }
        self.used += room;
        self.memory[self.memory.len() - 1].base + self.used - room
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

impl RankMemory for DeviceMemory {
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
