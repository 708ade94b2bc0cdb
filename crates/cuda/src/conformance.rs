//! Ranks that share a device or have one each, for the conformance suite of communicators.

use crate::device_queue::{CaptureTurn, DeviceQueue};
use crate::driver::{Memory, Stream};
use crate::gpu::Gpu;
use crate::nccl_queue::NcclQueue;
use crate::nccl_world::NcclWorld;
use lockstep_exec::ExecError;
use lockstep_exec::comm::conformance::{self, Subject};
use lockstep_exec::comm::processes::ProcessCommunicator;
use lockstep_exec::comm::threads;
use lockstep_exec::communication::{CommunicationQueue, Connection};
use std::sync::Arc;
use std::time::Duration;

/// As many ranks that share a device, for [`conformance::check`].
pub fn ranks(gpu: &Arc<Gpu>, count: usize, timeout: Duration) -> Result<Vec<Subject>, ExecError> {
    let subject = |comm| {
        let queue = || -> Result<Box<dyn CommunicationQueue>, ExecError> {
            Ok(Box::new(DeviceQueue::new(gpu, &comm, &Arc::new(Stream::new(&gpu.device)?), &CaptureTurn::default())))
        };
        let queues = [queue()?, queue()?];
        let gpu = gpu.clone();
        Ok(Subject::new(comm, queues, move |bytes| Box::new(DeviceMemory::new(&gpu, bytes))))
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
        Ok(Box::new(NcclQueue::new(gpu, &world, &Arc::new(Stream::new(&gpu.device)?), ordered)?))
    };
    let (queues, gpu) = ([queue()?, queue()?], gpu.clone());
    let subject = Subject::new(comm, queues, move |bytes| Box::new(DeviceMemory::new(&gpu, bytes)));
    Ok(if ordered { subject } else { subject.in_any_order() })
}

struct DeviceMemory {
    stream: Stream,
    memory: Memory,
}

impl DeviceMemory {
    /// The suite has no use for a device that fails.
    fn new(gpu: &Arc<Gpu>, bytes: usize) -> Self {
        let memory = Stream::new(&gpu.device).and_then(|s| Ok((s, Memory::new(&gpu.device, bytes as u64)?)));
        let (stream, memory) = memory.unwrap_or_else(|error| panic!("{error}"));
        Self { stream, memory }
    }
}

impl conformance::Memory for DeviceMemory {
    fn pointer(&self) -> *mut u8 {
        self.memory.base as usize as *mut u8
    }

    fn write(&mut self, at: usize, data: &[u8]) {
        assert!(at + data.len() <= self.memory.bytes as usize);
        // SAFETY: inside the memory; the copy is waited for.
        let copied = unsafe { self.stream.to_device(self.memory.base + at as u64, data) };
        copied.and_then(|()| self.stream.wait()).unwrap_or_else(|error| panic!("{error}"));
    }

    fn read(&self) -> Vec<u8> {
        let mut data = vec![0; self.memory.bytes as usize];
        // SAFETY: as many bytes; the copy is waited for.
        let copied = unsafe { self.stream.to_host(&mut data, self.memory.base) };
        copied.and_then(|()| self.stream.wait()).unwrap_or_else(|error| panic!("{error}"));
        data
    }
}
