//! Ranks that are processes with a GPU each, connected by NCCL.
//!
//! Every group of ranks that a program names, and every stream of messages, has a communicator of its own: operations of one
//! communicator run one after the other, and nothing may wait for what it has nothing to do with. Identifiers go over the
//! connections that the processes have already.
//!
//! Communicators are made in one order on all ranks when a program is loaded. Streams of messages are connected
//! then too, since NCCL connects two ranks only when both have come to their first message, and a send must hold up
//! nothing but its send buffer. The host polls instead of synchronizing, and reads from pinned memory how far the
//! device is (`progress.rs`).

use crate::CudaError;
use crate::driver::{Device, Event, Memory, Priority, Stream, end_if_abandoned};
use crate::gpu::Gpu;
use crate::nccl::{Ask, Nccl, NcclComm, UniqueId};
use crate::progress::Progress;
use lockstep_exec::ExecError;
use lockstep_exec::comm::processes::ProcessCommunicator;
use lockstep_exec::comm::{Communicator, Connection, ProgramPlace};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// How often the host looks whether a first message has come.
const LOOK_EVERY: Duration = Duration::from_micros(100);
/// How long communicators may take to be aborted where the process is about to end, and how long after that it may take to end.
const ABORTED_WITHIN: Duration = Duration::from_millis(1500);
const ENDED_WITHIN: Duration = Duration::from_secs(3);

/// A rank's communicators.
pub struct NcclWorld {
    /// The connections to the other processes.
    pub comm: Arc<ProcessCommunicator>,
    /// How far this rank has come.
    pub progress: Arc<Progress>,
    communicators: BTreeMap<Connection, Arc<NcclComm>>,
    device: Arc<Device>,
    given_up: AtomicBool,
}

impl NcclWorld {
    /// Connects this rank with all that it has a connection of `all` with. Every rank calls it with the same ones. From then on
    /// whoever waits for the device looks whether the others are still there.
    pub fn connect(gpu: &Arc<Gpu>, comm: &Arc<ProcessCommunicator>, all: &[Connection]) -> Result<Self, ExecError> {
        let nccl = Nccl::get()?;
        let place = ProgramPlace { op: "connect", layer: None, micro_batch: 0 };
        comm.at(place);
        let mut mine = Vec::new();
        for connection in all.iter().filter(|c| c.ranks()[0] == comm.rank()) {
            debug_assert!(connection.ranks().len() > 1);
            mine.extend(nccl.unique_id()?.0);
        }
        let given = comm.exchange(place, &mine)?;
        let mut ids: Vec<_> = given.iter().map(|ids| ids.as_chunks::<{ UniqueId::BYTES }>().0.iter()).collect();
        gpu.device.enter()?;
        let progress = Arc::new(Progress::new(&gpu.device, comm)?);
        let mut world = Self {
            comm: comm.clone(),
            progress: progress.clone(),
            communicators: BTreeMap::new(),
            device: gpu.device.clone(),
            given_up: AtomicBool::new(false),
        };
        // In one order on all ranks: each comes about when all of its members have come to it.
        for connection in all {
            let ranks = connection.ranks();
            let short = || ExecError::Internal("ranks do not name the same connections".into());
            let id = UniqueId(*ids[ranks[0]].next().ok_or_else(short)?);
            let Some(index) = ranks.iter().position(|rank| *rank == comm.rank()) else { continue };
            comm.at(place);
            let other = ranks[(index + 1) % ranks.len()];
            let watch = || {
                comm.awaits(Some((other, place)));
                comm.failure_at(place).map_or(Ok(()), |error| Err(CudaError::Ranks(error)))
            };
            // One that never comes about is aborted with the others.
            let joining = Arc::new(NcclComm::begin(nccl, id, index, ranks.len())?);
            world.communicators.insert(connection.clone(), joining.clone());
            if let Err(error) = joining.joined(&watch) {
                // Where no rank is lost it is the library that cannot join them, and there is nothing to close.
                if !world.has_failed() {
                    world.communicators.remove(connection);
                }
                return Err(error.into());
            }
        }
        comm.at(place);
        world.connect_messages(all, place)?;
        let waits = progress.clone();
        comm.device_waits(Some(Box::new(move || waits.waits_in())));
        gpu.device.watch_with(Some(Arc::new(move |_| progress.look())));
        Ok(world)
    }

    /// Sends a first message on every stream of messages: the library connects sender and receiver only then, and the host of the
    /// sender would wait for the receiver to come.
    fn connect_messages(&self, all: &[Connection], place: ProgramPlace) -> Result<(), ExecError> {
        const BYTES: usize = 4;
        let stream = Stream::with_priority(&self.device, Priority::Messages)?;
        let memory = Memory::new(&self.device, BYTES as u64)?;
        let rank = self.comm.rank();
        for connection in all {
            let Connection::Messages { from, to, .. } = *connection else { continue };
            let (ask, other) = match (from == rank, to == rank) {
                (true, false) => (Ask::Send { input: memory.base, bytes: BYTES, to: 1 }, to),
                (false, true) => (Ask::Receive { output: memory.base, bytes: BYTES, from: 0 }, from),
                _ => continue,
            };
            let watch = || {
                self.comm.awaits(Some((other, place)));
                self.comm.failure_at(place).map_or(Ok(()), |error| Err(CudaError::Ranks(error)))
            };
            self.comm.at(place);
            // SAFETY: the memory has as many bytes, and is freed when the stream has come so far.
            unsafe { self.communicator(connection)?.queue(&stream, &[ask], &watch)? };
            let done = Event::mark(&stream)?;
            while !done.has_come()? {
                watch()?;
                std::thread::sleep(LOOK_EVERY);
            }
        }
        self.comm.at(place);
        Ok(())
    }

    /// The communicator of a connection.
    pub fn communicator(&self, connection: &Connection) -> Result<&Arc<NcclComm>, CudaError> {
        let unknown = || CudaError::Internal(format!("no communicator for {connection:?}"));
        self.communicators.get(connection).ok_or_else(unknown)
    }

    /// After the run has failed somewhere: aborts the communicators, and with them what waits on the device for others. `graphs` are those that
    /// the communicators were captured in. Where the process goes on, the device is free then. Else, or where this takes too long, nothing of the
    /// device is freed any more, and the process ends: by itself, or shortly after.
    pub fn give_up(&self, graphs: impl Send + 'static) {
        if self.given_up.swap(true, Ordering::SeqCst) {
            return;
        }
        let goes_on = self.comm.goes_on();
        let within = goes_on.unwrap_or(ABORTED_WITHIN);
        // All at once: one may wait for what runs on behalf of another, and each waits for the graphs.
        let mut work: Vec<Box<dyn FnOnce() + Send>> = vec![Box::new(move || drop(graphs))];
        for communicator in self.communicators.values() {
            let communicator = communicator.clone();
            work.push(Box::new(move || communicator.abort()));
        }
        let aborted = self.in_threads(work, within);
        let device = self.device.clone();
        if aborted && goes_on.is_some() && self.in_threads(vec![Box::new(move || drop(device.wait()))], within) {
            return;
        }
        self.device.abandon();
        let end = || {
            std::thread::sleep(ENDED_WITHIN);
            end_if_abandoned(1);
        };
        let _ = std::thread::Builder::new().name("lockstep-end".into()).spawn(end);
    }

    /// Does all of this at once, with the device's context; whether it was done in this time.
    fn in_threads(&self, work: Vec<Box<dyn FnOnce() + Send>>, within: Duration) -> bool {
        let (doing, done) = mpsc::channel::<()>();
        let mut all = true;
        for one in work {
            let (device, doing) = (self.device.clone(), doing.clone());
            let work = move || {
                if device.enter().is_ok() {
                    one();
                }
                drop(doing);
            };
            // Where there is no thread to be had, the end of the process does it.
            all &= std::thread::Builder::new().name("lockstep-abort".into()).spawn(work).is_ok();
        }
        drop(doing);
        // Nobody sends anything: the channel is closed when all are done.
        all && done.recv_timeout(within) == Err(RecvTimeoutError::Disconnected)
    }

    /// Whether the run has failed somewhere.
    pub fn has_failed(&self) -> bool {
        self.comm.failure().is_some()
    }
}

impl Drop for NcclWorld {
    fn drop(&mut self) {
        if self.has_failed() {
            self.give_up(());
        } else if self.device.enter().is_ok() {
            let watch = || self.progress.look();
            self.communicators.values().for_each(|communicator| communicator.close(&watch));
        }
        self.device.watch_with(None);
        self.comm.device_waits(None);
    }
}
