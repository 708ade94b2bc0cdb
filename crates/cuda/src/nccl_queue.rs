//! Communication over NCCL, enqueued on a stream of the device.
//!
//! Sums are NCCL's where their order does not matter; where bits are promised ranks send each other their parts and add them in the
//! order of the group, with the kernels' bits. Parts that do not lie one behind the other are cut into, or joined from, scratch of
//! the queue.
//!
//! A message is copied to the send buffer and sent on a stream of its own, so that the sender goes on; before its room is used again
//! the queue's stream waits for it. A message of a rank to itself is copied out of the send buffer again, without NCCL.

use crate::collectives::{self, Sent};
use crate::driver::{ALIGNMENT, Address, Event, Memory, Priority, Stream};
use crate::gpu::Gpu;
use crate::nccl::{Ask, NcclComm, SumType};
use crate::nccl_world::NcclWorld;
use crate::progress::Lane;
use crate::{CudaError, collectives::add_sent};
use lockstep_exec::comm::{Collective, CommError, Communicator, Order, Piece, ProgramPlace, RankGroup, slice_of};
use lockstep_exec::communication::{Action, CommunicationCall, CommunicationQueue, Connection, Enqueued};
use lockstep_ir::program::Slot;
use lockstep_ir::{DType, Hint};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Tensors of so many bytes together are sent whole and added by everybody: one round instead of two.
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
    /// By receiver and tag.
    sending: BTreeMap<(usize, u32), Sending>,
    /// Messages of this rank to itself, by tag.
    own: BTreeMap<u32, OwnMessages>,
    enqueued: u64,
    pieces: Vec<Piece>,
    /// What is run, for messages.
    entry: Option<Arc<str>>,
}

// SAFETY: `pieces` holds addresses while a call is enqueued; nobody looks at them afterwards.
unsafe impl Send for NcclQueue {}

/// A stream of messages.
struct Sending {
    stream: Stream,
    lane: Lane,
    /// Address of the send buffer, bytes of a message, how many fit in.
    room: (Address, usize, usize),
    sent: usize,
    /// Behind those that the queue's stream has not waited for, oldest first.
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
    /// The queue of a rank on the stream of the program's kernels or one of its own; `ordered` promises the bits of sums in the
    /// order of the group.
    pub fn new(
        gpu: &Arc<Gpu>,
        world: &Arc<NcclWorld>,
        stream: &Arc<Stream>,
        (ordered, holds_kernels): (bool, bool),
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
            enqueued: 0,
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
        result.map_err(|error| match error {
            CudaError::Ranks(error) => error,
            error => {
                let comm = &self.world.comm;
                let error = error.behind(self.entry.as_deref());
                comm.fail_with(&error.to_string(), error.hint());
                let (rank, reason) = (comm.rank(), "the device failed".to_owned());
                comm.failure().unwrap_or(CommError::Failed { rank, host: None, place: None, reason, hint: None })
            }
        })
    }

    /// So many bytes, which the next instruction of the stream may overwrite.
    fn scratch(&mut self, bytes: u64) -> Result<Address, CudaError> {
        if let Some(last) = self.scratch.last().filter(|last| last.bytes >= bytes) {
            return Ok(last.base);
        }
        let memory = Memory::new(&self.gpu.device, bytes)?;
        let base = memory.base;
        self.scratch.push(memory);
        Ok(base)
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
            for piece in pieces.iter().filter(|p| p.input != p.output.cast_const()) {
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
        world.progress.around((&gpu.kernels, &stream), lane, (place, other), || {
            let mut group = Members { queue: self, communicator: &communicator, me, n };
            // Two numbers have one sum.
            let ours = |p: &Piece| SumType::of(p.dtype).is_none() || (group.queue.ordered && n > 2);
            let (ours, theirs): (Vec<Piece>, Vec<Piece>) = pieces.iter().partition(|p| kind.sums() && ours(p));
            match kind {
                Collective::Shift => group.shift(&theirs),
                Collective::AllToAll => group.all_to_all(&theirs),
                Collective::AllGather => group.gather(&theirs),
                Collective::AllReduce => {
                    group.all_reduce(&theirs)?;
                    match ours.iter().map(Piece::bytes).sum::<usize>() <= SMALL {
                        true => group.add_whole(&ours),
                        false => group.add_slices(&ours),
                    }
                }
                Collective::ReduceScatter => {
                    group.reduce_scatter(&theirs)?;
                    group.add_parts(&ours)
                }
            }
        })
    }

    fn send(
        &mut self,
        (to, tag): (usize, u32),
        piece: &Piece,
        room: (Address, usize, usize),
        place: ProgramPlace,
    ) -> Result<(), CudaError> {
        let (buffer, bytes, copies) = room;
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
            let at = buffer + (own.sent % copies * bytes) as u64;
            own.waiting.push_back((at, bytes));
            own.sent += 1;
            // SAFETY: who enqueues vouches for the piece and the send buffer; what was in this part was received.
            return unsafe { self.stream.copy(at, piece.input as u64, bytes) };
        }
        let communicator = self.world.communicator(&Connection::Messages { from, to, tag })?.clone();
        let mut sending = match self.sending.remove(&(to, tag)) {
            Some(sending) => sending,
            None => {
                let stream = Stream::with_priority(&self.gpu.device, Priority::Messages)?;
                let lane = self.world.progress.lane(false)?;
                Sending { stream, lane, room, sent: 0, under_way: VecDeque::new() }
            }
        };
        let full = |s: &Sending| !s.under_way.is_empty() && (s.room != room || s.under_way.len() == copies);
        while full(&sending) {
            if let Some(oldest) = sending.under_way.pop_front() {
                self.stream.wait_for(&oldest)?;
            }
        }
        if sending.room != room {
            (sending.room, sending.sent) = (room, 0);
        }
        let at = buffer + (sending.sent % copies * bytes) as u64;
        // SAFETY: who enqueues vouches for the piece and the send buffer; what was in this part has been sent.
        unsafe { self.stream.copy(at, piece.input as u64, bytes)? };
        sending.stream.wait_for(&*Event::mark(&self.stream)?)?;
        let note = (place, to);
        self.world.progress.around((&self.gpu.kernels, &sending.stream), sending.lane, note, || {
            self.queue(&communicator, &sending.stream, &[Ask::Send { input: at, bytes, to: 1 }])
        })?;
        sending.under_way.push_back(Event::mark(&sending.stream)?);
        sending.sent += 1;
        self.sending.insert((to, tag), sending);
        Ok(())
    }

    fn receive(&mut self, (from, tag): (usize, u32), piece: &Piece, place: ProgramPlace) -> Result<(), CudaError> {
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
        self.world.progress.around((&self.gpu.kernels, &self.stream), self.lane, (place, from), || {
            self.queue(communicator, &self.stream, &[ask])
        })
    }

    fn transfer(&mut self, call: &CommunicationCall, base: *mut u8, slot: Slot) -> Result<(), CudaError> {
        let mut pieces = std::mem::take(&mut self.pieces);
        let (transfer, place) = call.resolve(base, slot, &mut pieces);
        self.world.comm.at(place);
        if let Some(error) = self.world.comm.failure_at(place) {
            return Err(CudaError::Ranks(error));
        }
        self.gpu.device.enter()?;
        for (at, bytes) in call.padding(base, slot).filter(|(_, bytes)| *bytes > 0) {
            // SAFETY: who enqueues vouches for the arena.
            unsafe { self.stream.fill(at as u64, 0, bytes)? };
        }
        match transfer {
            Action::Together(kind, group) => self.collective(kind, group, &pieces, place)?,
            Action::Send { to, tag, send_buffer, copies } => {
                for piece in pieces.iter().filter(|p| p.bytes() > 0) {
                    self.send((to, tag), piece, (send_buffer as u64, piece.bytes(), copies), place)?;
                }
            }
            Action::Receive { from, tag } => {
                let mut full = pieces.iter().filter(|p| p.bytes() > 0);
                full.try_for_each(|piece| self.receive((from, tag), piece, place))?;
            }
        }
        self.pieces = pieces;
        Ok(())
    }
}

/// The members of a group, of which this rank is `me` of `n`.
struct Members<'a> {
    queue: &'a mut NcclQueue,
    communicator: &'a NcclComm,
    me: usize,
    n: usize,
}

/// Whether a rank's part of a tensor is of one piece in the whole.
fn in_one(piece: &Piece) -> bool {
    piece.rows == 1 && piece.order == Order::Group
}

/// Whole elements of a piece that lies in one.
fn flat(elements: usize, dtype: DType, parts: Address, stride: usize) -> Sent {
    Sent { rows: 1, elements, parts, stride: stride as u64, order: Order::Group, dtype }
}

impl Members<'_> {
    fn ask(&self, asks: &[Ask]) -> Result<(), CudaError> {
        self.queue.queue(self.communicator, &self.queue.stream, asks)
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, n) = (self.me, self.n);
        (1..n).map(move |i| (me + i) % n)
    }

    /// Room for so many bytes per piece, one behind the other: where each begins.
    fn room(&mut self, bytes: &[usize]) -> Result<Vec<Address>, CudaError> {
        let mut at = 0;
        let starts: Vec<u64> = bytes
            .iter()
            .map(|bytes| {
                let start = at;
                at += (*bytes as u64).next_multiple_of(ALIGNMENT);
                start
            })
            .collect();
        let base = self.queue.scratch(at)?;
        Ok(starts.into_iter().map(|start| base + start).collect())
    }

    /// Those of the pieces whose parts do not lie in one, with room for all parts of each.
    fn scattered(&mut self, pieces: &[Piece]) -> Result<Vec<(Sent, Piece)>, CudaError> {
        let (n, pieces): (_, Vec<&Piece>) = (self.n, pieces.iter().filter(|p| !in_one(p)).collect());
        let rooms = self.room(&pieces.iter().map(|p| p.bytes() * n).collect::<Vec<_>>())?;
        let sent = |(p, parts): (&&Piece, u64)| {
            let Piece { rows, elements, order, dtype, .. } = **p;
            (Sent { rows, elements, parts, stride: p.bytes() as u64, order, dtype }, **p)
        };
        Ok(pieces.iter().zip(rooms).map(sent).collect())
    }

    fn shift(&self, pieces: &[Piece]) -> Result<(), CudaError> {
        let (next, before) = ((self.me + 1) % self.n, (self.me + self.n - 1) % self.n);
        let both = |p: &Piece| {
            let bytes = p.bytes();
            [
                Ask::Send { input: p.input as u64, bytes, to: next },
                Ask::Receive { output: p.output as u64, bytes, from: before },
            ]
        };
        self.ask(&pieces.iter().flat_map(both).collect::<Vec<_>>())
    }

    fn all_to_all(&self, pieces: &[Piece]) -> Result<(), CudaError> {
        let part = |address: u64, member: usize, bytes: usize| address + (member * bytes) as u64;
        let mut asks = Vec::new();
        for piece in pieces {
            let (input, output, bytes) = (piece.input as u64, piece.output as u64, piece.bytes());
            for other in self.others() {
                asks.push(Ask::Send { input: part(input, other, bytes), bytes, to: other });
                asks.push(Ask::Receive { output: part(output, other, bytes), bytes, from: other });
            }
            // SAFETY: who enqueues vouches for the piece, whose input and output are apart.
            unsafe { self.queue.stream.copy(part(output, self.me, bytes), part(input, self.me, bytes), bytes)? };
        }
        self.ask(&asks)
    }

    fn gather(&mut self, pieces: &[Piece]) -> Result<(), CudaError> {
        let scattered = self.scattered(pieces)?;
        let gather = |p: &Piece, output| Ask::AllGather { input: p.input as u64, output, bytes: p.bytes() };
        let whole = pieces.iter().filter(|p| in_one(p)).map(|p| gather(p, p.output as u64));
        let asks: Vec<Ask> = whole.chain(scattered.iter().map(|(sent, p)| gather(p, sent.parts))).collect();
        self.ask(&asks)?;
        let wholes: Vec<_> = scattered.iter().map(|(sent, p)| (*sent, p.output as u64)).collect();
        // SAFETY: scratch has room for all parts, the output for the whole.
        unsafe { collectives::parts(&self.queue.gpu.kernels, &self.queue.stream, self.n, false, &wholes) }
    }

    fn all_reduce(&self, pieces: &[Piece]) -> Result<(), CudaError> {
        let sum = |p: &Piece| {
            let (input, output, elements) = (p.input as u64, p.output as u64, p.rows * p.elements);
            SumType::of(p.dtype).map(|of| Ask::AllReduce { input, output, elements, of })
        };
        self.ask(&pieces.iter().filter_map(sum).collect::<Vec<_>>())
    }

    /// Cuts inputs whose parts do not lie in one into parts that do.
    fn cut(&mut self, pieces: &[Piece]) -> Result<Vec<(Sent, Piece)>, CudaError> {
        let scattered = self.scattered(pieces)?;
        let wholes: Vec<_> = scattered.iter().map(|(sent, p)| (*sent, p.input as u64)).collect();
        // SAFETY: scratch has room for all parts, the input is the whole.
        unsafe { collectives::parts(&self.queue.gpu.kernels, &self.queue.stream, self.n, true, &wholes)? };
        Ok(scattered)
    }

    fn reduce_scatter(&mut self, pieces: &[Piece]) -> Result<(), CudaError> {
        let scattered = self.cut(pieces)?;
        let sum = |p: &Piece, input| {
            let (output, elements) = (p.output as u64, p.rows * p.elements);
            SumType::of(p.dtype).map(|of| Ask::ReduceScatter { input, output, elements, of })
        };
        let whole = pieces.iter().filter(|p| in_one(p)).map(|p| sum(p, p.input as u64));
        self.ask(&whole.chain(scattered.iter().map(|(sent, p)| sum(p, sent.parts))).flatten().collect::<Vec<_>>())
    }

    /// Sends every other member bytes of each piece, and receives as many: `give` says where a member's are. Gives where the first
    /// member's are, and what is added to them.
    fn swap(
        &mut self,
        rooms: &[Address],
        bytes: &[usize],
        give: impl Fn(usize, usize) -> Ask,
    ) -> Result<(), CudaError> {
        let mut asks = Vec::new();
        for other in self.others() {
            for (piece, (room, bytes)) in rooms.iter().zip(bytes).enumerate() {
                asks.push(give(piece, other));
                if *bytes > 0 {
                    asks.push(Ask::Receive { output: room + (other * bytes) as u64, bytes: *bytes, from: other });
                }
            }
        }
        asks.retain(|ask| !matches!(ask, Ask::Send { bytes: 0, .. }));
        self.ask(&asks)
    }

    /// As `all_reduce`, in the order of the group, of small pieces: all get all of them.
    fn add_whole(&mut self, pieces: &[Piece]) -> Result<(), CudaError> {
        let bytes: Vec<usize> = pieces.iter().map(Piece::bytes).collect();
        let rooms = self.room(&bytes.iter().map(|b| b * self.n).collect::<Vec<_>>())?;
        self.swap(&rooms, &bytes, |p, to| Ask::Send { input: pieces[p].input as u64, bytes: bytes[p], to })?;
        let sent = |(p, room): (&Piece, &Address)| {
            (flat(p.rows * p.elements, p.dtype, *room, p.bytes()), p.input as u64, p.output as u64)
        };
        self.add(&pieces.iter().zip(&rooms).map(sent).collect::<Vec<_>>())
    }

    /// As `all_reduce`, in the order of the group: every member adds a slice, and all get the slices of all.
    fn add_slices(&mut self, pieces: &[Piece]) -> Result<(), CudaError> {
        let (me, n) = (self.me, self.n);
        let slice = |p: &Piece, member: usize| {
            let ((start, elements), size) = (slice_of(member, n, p), p.dtype.bytes());
            ((start * size) as u64, elements * size)
        };
        let bytes: Vec<usize> = pieces.iter().map(|p| slice(p, me).1).collect();
        let rooms = self.room(&bytes.iter().map(|b| b * n).collect::<Vec<_>>())?;
        self.swap(&rooms, &bytes, |p, to| {
            let (start, bytes) = slice(&pieces[p], to);
            Ask::Send { input: pieces[p].input as u64 + start, bytes, to }
        })?;
        let sent = |(p, room): (&Piece, &Address)| {
            let (start, bytes) = slice(p, me);
            (flat(bytes / p.dtype.bytes(), p.dtype, *room, bytes), p.input as u64 + start, p.output as u64 + start)
        };
        self.add(&pieces.iter().zip(&rooms).map(sent).collect::<Vec<_>>())?;
        let mut asks = Vec::new();
        for (other, p) in self.others().flat_map(|other| pieces.iter().map(move |p| (other, p))) {
            let ((mine, bytes), (theirs, theirs_bytes)) = (slice(p, me), slice(p, other));
            let (send, receive) = (p.output as u64 + mine, p.output as u64 + theirs);
            asks.extend((bytes > 0).then_some(Ask::Send { input: send, bytes, to: other }));
            asks.extend((theirs_bytes > 0).then_some(Ask::Receive {
                output: receive,
                bytes: theirs_bytes,
                from: other,
            }));
        }
        self.ask(&asks)
    }

    /// As `reduce_scatter`, in the order of the group.
    fn add_parts(&mut self, pieces: &[Piece]) -> Result<(), CudaError> {
        let (me, n) = (self.me, self.n);
        // Of every piece room for all parts twice: those of this rank, where they do not lie in one, and those that are sent.
        let twice = pieces.iter().flat_map(|p| [if in_one(p) { 0 } else { p.bytes() * n }, p.bytes() * n]);
        let rooms = self.room(&twice.collect::<Vec<_>>())?;
        let mut cut = Vec::new();
        for (p, rooms) in pieces.iter().zip(rooms.as_chunks::<2>().0).filter(|(p, _)| !in_one(p)) {
            let Piece { rows, elements, order, dtype, .. } = *p;
            cut.push((
                Sent { rows, elements, parts: rooms[0], stride: p.bytes() as u64, order, dtype },
                p.input as u64,
            ));
        }
        // SAFETY: scratch has room for all parts, the input is the whole.
        unsafe { collectives::parts(&self.queue.gpu.kernels, &self.queue.stream, n, true, &cut)? };
        let bytes: Vec<usize> = pieces.iter().map(Piece::bytes).collect();
        let part = |p: usize, member: usize| {
            let first = if in_one(&pieces[p]) { pieces[p].input as u64 } else { rooms[2 * p] };
            first + (member * bytes[p]) as u64
        };
        let others: Vec<Address> = rooms.as_chunks::<2>().0.iter().map(|rooms| rooms[1]).collect();
        self.swap(&others, &bytes, |p, to| Ask::Send { input: part(p, to), bytes: bytes[p], to })?;
        let sent = |(i, p): (usize, &Piece)| {
            (flat(p.rows * p.elements, p.dtype, others[i], bytes[i]), part(i, me), p.output as u64)
        };
        self.add(&pieces.iter().enumerate().map(sent).collect::<Vec<_>>())
    }

    fn add(&self, tensors: &[(Sent, Address, Address)]) -> Result<(), CudaError> {
        // SAFETY: scratch has room for what all have sent; who enqueues vouches for the pieces.
        unsafe { add_sent(&self.queue.gpu.kernels, &self.queue.stream, (self.me, self.n), tensors) }
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
        self.told(queued)?;
        self.enqueued += 1;
        Ok(Enqueued(self.enqueued))
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
