//! Communication over NCCL, enqueued on a stream of the device.
//!
//! Sums are NCCL's where their order does not matter; where bits are promised ranks send each other their parts and add them in the
//! order of the group, with the kernels' bits. Parts that do not lie one after the other are cut into, or joined from, scratch of
//! the queue.
//!
//! A message is copied to the send buffer and sent on a stream of its own, so that the sender goes on; before its room is used again
//! the queue's stream waits for it. A message of a rank to itself is copied out of the send buffer again, without NCCL.

mod members;

use crate::CudaError;
use crate::driver::{Address, Event, Memory, Priority, Stream};
use crate::gpu::Gpu;
use crate::kernels::Launcher;
use crate::nccl::{Ask, NcclComm, SumType};
use crate::nccl_world::NcclWorld;
use crate::progress::Lane;
use crate::send_buffer::{MessageStream, SendBuffer};
use lockstep_exec::comm::{
    Action, Collective, CommError, CommunicationCall, CommunicationQueue, Communicator, Connection, Enqueued, Piece,
    ProgramPlace, RankGroup,
};
use lockstep_ir::Movement;
use lockstep_ir::program::Slot;
use members::Members;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Tensors of this many bytes together are sent whole and added by everybody: one round instead of two.
const SMALL: usize = 64 << 10;

/// The queue of one of a rank's streams.
pub struct NcclQueue {
    gpu: Arc<Gpu>,
    world: Arc<NcclWorld>,
    stream: Arc<Stream>,
    lane: Lane,
    /// Whether sums are taken in the order of the group.
    ordered: bool,
    /// The last is large enough for what was asked for so far; those before it may be used by graphs.
    scratch: Vec<Memory>,
    sending: BTreeMap<MessageStream, Sending>,
    /// Messages of this rank to itself, by tag.
    own: BTreeMap<u32, OwnMessages>,
    pieces: Vec<Piece>,
    /// What is run, for messages.
    entry: Option<Arc<str>>,
}

// SAFETY: `pieces` holds addresses while a call is enqueued; nobody looks at them afterwards.
unsafe impl Send for NcclQueue {}

/// What a queue is used for.
#[derive(Clone, Copy)]
pub struct QueueUse {
    /// Whether it promises the bits of sums in the order of the group.
    pub ordered: bool,
    /// Whether kernels wait when it does.
    pub holds_kernels: bool,
}

/// A stream of messages.
struct Sending {
    stream: Stream,
    lane: Lane,
    buffer: SendBuffer,
    sent: usize,
    /// After those that the queue's stream has not waited for, oldest first.
    under_way: VecDeque<Arc<Event>>,
}

/// A stream of messages of a rank to itself.
#[derive(Default)]
struct OwnMessages {
    sent: usize,
    /// Addresses in the send buffer and bytes of those that were not received yet, oldest first.
    waiting: VecDeque<(Address, usize)>,
}

impl NcclQueue {
    /// The queue of a rank on the stream of the program's kernels or one of its own.
    pub fn new(
        gpu: &Arc<Gpu>,
        world: &Arc<NcclWorld>,
        stream: &Arc<Stream>,
        QueueUse { ordered, holds_kernels }: QueueUse,
    ) -> Result<Self, CudaError> {
        Ok(Self {
            gpu: gpu.clone(),
            world: world.clone(),
            stream: stream.clone(),
            lane: world.progress.lane(holds_kernels)?,
            ordered,
            scratch: Vec::new(),
            sending: BTreeMap::new(),
            own: BTreeMap::new(),
            pieces: Vec::new(),
            entry: None,
        })
    }

    /// Says what is run.
    pub fn begin(&mut self, entry: &Arc<str>) {
        self.entry = Some(entry.clone());
    }

    /// Lets the stream wait until all messages have been sent.
    pub fn settle(&mut self) -> Result<(), CommError> {
        self.own.clear();
        let last = self.sending.values_mut().filter_map(|sending| {
            sending.sent = 0;
            sending.under_way.drain(..).next_back()
        });
        let last: Vec<_> = last.collect();
        self.told(last.iter().try_for_each(|event| self.stream.wait_for(event)))
    }

    /// An error of the device ends the run for all ranks; one of the run is the others' already.
    fn told<T>(&self, result: Result<T, CudaError>) -> Result<T, CommError> {
        result.map_err(|error| error.told(self.world.comm.as_ref(), self.entry.as_deref()))
    }

    /// This many bytes, which the next instruction of the stream may overwrite.
    fn scratch(&mut self, bytes: u64) -> Result<Address, CudaError> {
        if let Some(last) = self.scratch.last().filter(|last| last.bytes >= bytes) {
            return Ok(last.base);
        }
        let memory = Memory::new(&self.gpu.device, bytes)?;
        let base = memory.base;
        self.scratch.push(memory);
        Ok(base)
    }

    /// Kernels on its stream.
    fn on(&self) -> Launcher<'_> {
        self.gpu.kernels.on(&self.stream)
    }

    fn queue(&self, communicator: &NcclComm, stream: &Stream, asks: &[Ask]) -> Result<(), CudaError> {
        // SAFETY: who enqueues vouches for the pieces, the program for what all members ask for; scratch is the queue's.
        unsafe { communicator.queue(stream, asks, &|| self.world.progress.look()) }
    }

    fn collective(
        &mut self,
        kind: Collective,
        group: &RankGroup,
        pieces: &[Piece],
        place: ProgramPlace,
    ) -> Result<(), CudaError> {
        let n = group.ranks.len();
        let pieces: Vec<Piece> = pieces.iter().filter(|p| p.rows * p.elements > 0).copied().collect();
        let rank = self.world.comm.rank();
        let Some(me) = group.ranks.iter().position(|member| *member == rank) else {
            return Err(CudaError::Internal(format!("{kind} of the ranks {:?} on rank {rank}", group.ranks)));
        };
        if n == 1 {
            for piece in pieces.iter().filter(|p| p.input != p.output) {
                // SAFETY: who enqueues vouches for the piece; where they overlap they are the same.
                unsafe { self.stream.copy(piece.output as u64, piece.input as u64, piece.bytes())? };
            }
            return Ok(());
        }
        if pieces.is_empty() {
            return Ok(());
        }
        let communicator = self.world.communicator(&Connection::Group(group.clone()))?.clone();
        let (gpu, stream, world, lane) = (self.gpu.clone(), self.stream.clone(), self.world.clone(), self.lane);
        let other = group.ranks[(me + 1) % n];
        world.progress.around(gpu.kernels.on(&stream), lane, place, other, || {
            let mut group = Members { queue: self, communicator: &communicator, me, n };
            // Two numbers have one sum.
            let ours = |p: &Piece| SumType::of(p.dtype).is_none() || (group.queue.ordered && n > 2);
            let (ours, theirs): (Vec<Piece>, Vec<Piece>) = pieces.iter().partition(|p| kind.sums() && ours(p));
            match kind.movement() {
                Movement::Copies(rule) => group.copies(&theirs, rule),
                Movement::Gathers => group.gather(&theirs),
                Movement::SumsWhole => {
                    group.all_reduce(&theirs)?;
                    match ours.iter().map(Piece::bytes).sum::<usize>() <= SMALL {
                        true => group.add_whole(&ours),
                        false => group.add_slices(&ours),
                    }
                }
                Movement::SumsParts => {
                    group.reduce_scatter(&theirs)?;
                    group.add_parts(&ours)
                }
            }
        })
    }

    fn send(
        &mut self,
        stream: MessageStream,
        piece: &Piece,
        buffer: SendBuffer,
        place: ProgramPlace,
    ) -> Result<(), CudaError> {
        let (MessageStream { other: to, tag }, SendBuffer { bytes, copies, .. }) = (stream, buffer);
        if copies == 0 {
            return Err(CudaError::Internal("a message without a send buffer".into()));
        }
        let from = self.world.comm.rank();
        if from == to {
            let own = self.own.entry(tag).or_default();
            if own.waiting.len() == copies {
                return Err(CudaError::Internal(format!(
                    "the send buffer of message {tag} to the rank itself is full"
                )));
            }
            let at = buffer.place_of(own.sent);
            own.waiting.push_back((at, bytes));
            own.sent += 1;
            // SAFETY: who enqueues vouches for the piece and the send buffer; what was in this part was received.
            return unsafe { self.stream.copy(at, piece.input as u64, bytes) };
        }
        let communicator = self.world.communicator(&Connection::Messages { from, to, tag })?.clone();
        let mut sending = match self.sending.remove(&stream) {
            Some(sending) => sending,
            None => {
                let stream = Stream::with_priority(&self.gpu.device, Priority::Messages)?;
                let lane = self.world.progress.lane(false)?;
                Sending { stream, lane, buffer, sent: 0, under_way: VecDeque::new() }
            }
        };
        let full = |s: &Sending| !s.under_way.is_empty() && (s.buffer != buffer || s.under_way.len() == copies);
        while full(&sending) {
            if let Some(oldest) = sending.under_way.pop_front() {
                self.stream.wait_for(&oldest)?;
            }
        }
        if sending.buffer != buffer {
            (sending.buffer, sending.sent) = (buffer, 0);
        }
        let at = buffer.place_of(sending.sent);
        // SAFETY: who enqueues vouches for the piece and the send buffer; what was in this part has been sent.
        unsafe { self.stream.copy(at, piece.input as u64, bytes)? };
        sending.stream.wait_for(&*Event::mark(&self.stream)?)?;
        self.world.progress.around(self.gpu.kernels.on(&sending.stream), sending.lane, place, to, || {
            self.queue(&communicator, &sending.stream, &[Ask::Send { input: at, bytes, to: 1 }])
        })?;
        sending.under_way.push_back(Event::mark(&sending.stream)?);
        sending.sent += 1;
        self.sending.insert(stream, sending);
        Ok(())
    }

    fn receive(&mut self, stream: MessageStream, piece: &Piece, place: ProgramPlace) -> Result<(), CudaError> {
        let MessageStream { other: from, tag } = stream;
        let to = self.world.comm.rank();
        if from == to {
            let sent = self.own.get_mut(&tag).and_then(|own| own.waiting.pop_front());
            let (at, bytes) = sent.filter(|(_, bytes)| *bytes == piece.bytes()).ok_or_else(|| {
                CudaError::Internal(format!("message {tag} of the rank to itself was not sent, or with other bytes"))
            })?;
            // SAFETY: who enqueues vouches for the piece; the message was copied there on the same stream.
            return unsafe { self.stream.copy(piece.output as u64, at, bytes) };
        }
        let communicator = self.world.communicator(&Connection::Messages { from, to, tag })?;
        let ask = Ask::Receive { output: piece.output as u64, bytes: piece.bytes(), from: 0 };
        self.world.progress.around(self.on(), self.lane, place, from, || self.queue(communicator, &self.stream, &[ask]))
    }

    fn transfer(&mut self, call: &CommunicationCall, base: *mut u8, slot: Slot) -> Result<(), CudaError> {
        let mut pieces = std::mem::take(&mut self.pieces);
        let (action, place) = call.resolve(base, slot, &mut pieces);
        self.world.comm.at(place);
        if let Some(error) = self.world.comm.failure_at(place) {
            return Err(CudaError::Ranks(error));
        }
        self.gpu.device.enter()?;
        for (at, bytes) in call.padding(base, slot).filter(|(_, bytes)| *bytes > 0) {
            // SAFETY: who enqueues vouches for the arena.
            unsafe { self.stream.fill(at as u64, 0, bytes)? };
        }
        match *action {
            Action::Together(kind, ref group) => self.collective(kind, group, &pieces, place)?,
            Action::Send { to, tag, copies } => {
                for piece in pieces.iter().filter(|p| p.bytes() > 0) {
                    self.send(MessageStream { other: to, tag }, piece, SendBuffer::of(piece, copies), place)?;
                }
            }
            Action::Receive { from, tag } => {
                let mut full = pieces.iter().filter(|p| p.bytes() > 0);
                full.try_for_each(|piece| self.receive(MessageStream { other: from, tag }, piece, place))?;
            }
        }
        self.pieces = pieces;
        Ok(())
    }
}

impl CommunicationQueue for NcclQueue {
    unsafe fn enqueue(
        &mut self,
        call: &Arc<CommunicationCall>,
        base: *mut u8,
        slot: Slot,
    ) -> Result<Enqueued, CommError> {
        let queued = self.transfer(call, base, slot);
        self.told(queued).map(|()| Enqueued::default())
    }

    fn wait(&mut self, _: Enqueued) -> Result<(), CommError> {
        self.told(self.gpu.device.enter().and_then(|()| self.stream.wait()))
    }

    fn finish(&mut self) -> Result<(), CommError> {
        self.told(self.gpu.device.enter())?;
        self.settle()?;
        self.told(self.stream.wait())
    }
}
