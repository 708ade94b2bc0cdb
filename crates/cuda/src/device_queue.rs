//! Communication of ranks that are threads of this process and share a device, enqueued on a stream of it.
//!
//! A collective: each rank marks on its stream where its tensors are ready. The ranks meet on the host, and the last to come queues
//! one kernel for all after all marks; every rank's stream goes on after that kernel. So nobody overwrites what is read, nothing
//! waits on the device for something that is not queued, and the host waits for no device.
//!
//! A message: the sender's stream copies it into the send buffer, the receiver's stream copies it out after the sender's mark, and
//! the sender's stream waits for the receiver's mark before the room is used again.

use crate::driver::{Event, Stream};
use crate::gpu::Gpu;
use crate::send_buffer::{MessageStream, SendBuffer};
use crate::{CudaError, collectives};
use lockstep_exec::comm::{
    Action, CommError, CommunicationCall, CommunicationQueue, Communicator, Enqueued, Piece, ProgramPlace,
    ThreadCommunicator,
};
use lockstep_ir::program::Slot;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The queue of one of a rank's streams.
pub struct DeviceQueue {
    gpu: Arc<Gpu>,
    comm: Arc<ThreadCommunicator>,
    stream: Arc<Stream>,
    /// By receiver and tag.
    sending: BTreeMap<MessageStream, Sending>,
    pieces: Vec<Piece>,
    /// What is run, for messages.
    entry: Option<Arc<str>>,
    capturing: bool,
    turn: CaptureTurn,
}

// SAFETY: `pieces` holds addresses while a call is enqueued; nobody looks at them afterwards.
unsafe impl Send for DeviceQueue {}

/// Messages of one stream of messages that are in the send buffer.
struct Sending {
    buffer: SendBuffer,
    /// Messages that this buffer has had, and those of them that are under way.
    sent: usize,
    under_way: usize,
    place: ProgramPlace,
}

/// What a receiver hears of a message.
struct Message {
    at: u64,
    bytes: usize,
    ready: Arc<Event>,
}

/// What the ranks of one world share while they capture one graph together: they queue one thing at a time, since a graph is not made
/// for several threads.
#[derive(Clone, Default)]
pub struct CaptureTurn(Arc<Mutex<()>>);

impl CaptureTurn {
    /// Keeps other ranks that capture from queueing, if this one captures.
    pub(crate) fn take(&self, capturing: bool) -> Option<MutexGuard<'_, ()>> {
        capturing.then(|| self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl DeviceQueue {
    /// The queue of a rank on a stream of its own.
    pub fn new(gpu: &Arc<Gpu>, comm: &Arc<ThreadCommunicator>, stream: &Arc<Stream>, turn: &CaptureTurn) -> Self {
        Self {
            gpu: gpu.clone(),
            comm: comm.clone(),
            stream: stream.clone(),
            sending: BTreeMap::new(),
            pieces: Vec::new(),
            entry: None,
            capturing: false,
            turn: turn.clone(),
        }
    }

    /// Says what is run, and whether it is captured.
    pub fn begin(&mut self, entry: &Arc<str>, capturing: bool) {
        (self.entry, self.capturing) = (Some(entry.clone()), capturing);
    }

    /// Lets the stream wait until all messages have been taken. The host waits until their receivers have queued that.
    pub fn settle(&mut self) -> Result<(), CommError> {
        let mut sending = std::mem::take(&mut self.sending);
        for (&to, sending) in &mut sending {
            while sending.under_way > 0 {
                self.told(self.reclaim(to, sending))?;
            }
        }
        Ok(())
    }

    /// An error of the device ends the run for all ranks.
    fn told<T>(&self, result: Result<T, CudaError>) -> Result<T, CommError> {
        result.map_err(|error| error.told(self.comm.as_ref(), self.entry.as_deref()))
    }

    /// Waits for the oldest message under way to be taken.
    fn reclaim(&self, to: MessageStream, sending: &mut Sending) -> Result<(), CudaError> {
        let taken: Arc<Event> = self.comm.fetch(to.other, 2 * to.tag + 1, sending.place)?;
        let _turn = self.turn.take(self.capturing);
        self.stream.wait_for(&taken)?;
        sending.under_way -= 1;
        Ok(())
    }

    fn send(
        &mut self,
        to: MessageStream,
        piece: &Piece,
        buffer: SendBuffer,
        place: ProgramPlace,
    ) -> Result<(), CudaError> {
        if buffer.copies == 0 {
            return Err(CudaError::Internal("a message without a send buffer".into()));
        }
        let fresh = Sending { buffer, sent: 0, under_way: 0, place };
        let mut sending = self.sending.remove(&to).unwrap_or(fresh);
        sending.place = place;
        while sending.under_way > 0 && (sending.buffer != buffer || sending.under_way == buffer.copies) {
            self.reclaim(to, &mut sending)?;
        }
        if sending.buffer != buffer {
            (sending.buffer, sending.sent) = (buffer, 0);
        }
        let (at, bytes) = (buffer.place_of(sending.sent), buffer.bytes);
        let ready = {
            let _turn = self.turn.take(self.capturing);
            // SAFETY: who enqueues vouches for the piece and the send buffer; what was in this part has been taken.
            unsafe { self.stream.copy(at, piece.input as u64, bytes)? };
            Event::mark(&self.stream)?
        };
        self.comm.post(to.other, 2 * to.tag, Message { at, bytes, ready }, place)?;
        (sending.sent, sending.under_way) = (sending.sent + 1, sending.under_way + 1);
        self.sending.insert(to, sending);
        Ok(())
    }

    fn receive(&mut self, from: MessageStream, piece: &Piece, place: ProgramPlace) -> Result<(), CudaError> {
        let message: Message = self.comm.fetch(from.other, 2 * from.tag, place)?;
        if message.bytes != piece.bytes() {
            return Err(self.comm.refuse_size(from.other, message.bytes, piece.bytes(), place).into());
        }
        let taken = {
            let _turn = self.turn.take(self.capturing);
            self.stream.wait_for(&message.ready)?;
            // SAFETY: who enqueues vouches for the piece; the sender leaves the message alone until it is taken.
            unsafe { self.stream.copy(piece.output as u64, message.at, message.bytes)? };
            Event::mark(&self.stream)?
        };
        Ok(self.comm.post(from.other, 2 * from.tag + 1, taken, place)?)
    }

    fn transfer(&mut self, call: &CommunicationCall, base: *mut u8, slot: Slot) -> Result<(), CudaError> {
        let mut pieces = std::mem::take(&mut self.pieces);
        let (action, place) = call.resolve(base, slot, &mut pieces);
        self.comm.at(place);
        self.gpu.device.enter()?;
        {
            let _turn = self.turn.take(self.capturing);
            for (at, bytes) in call.padding(base, slot).filter(|(_, bytes)| *bytes > 0) {
                // SAFETY: who enqueues vouches for the arena.
                unsafe { self.stream.fill(at as u64, 0, bytes)? };
            }
        }
        match *action {
            Action::Together(kind, _) => {
                let mark = || {
                    let _turn = self.turn.take(self.capturing);
                    Event::mark(&self.stream)
                };
                let ready = mark()?;
                let done = self.comm.agree(action, &pieces, place, ready, |all| {
                    let queue = || {
                        let _turn = self.turn.take(self.capturing);
                        all.iter().try_for_each(|(_, ready)| self.stream.wait_for(ready))?;
                        let pieces: Vec<_> = all.into_iter().map(|(pieces, _)| pieces).collect();
                        // SAFETY: those who enqueue vouch for their pieces; the ranks have agreed on them.
                        unsafe { collectives::queue(self.gpu.kernels.on(&self.stream), kind, &pieces)? };
                        Event::mark(&self.stream)
                    };
                    self.told(queue())
                })??;
                let _turn = self.turn.take(self.capturing);
                self.stream.wait_for(&done)?;
            }
            Action::Send { to, tag, copies } => {
                for piece in &pieces {
                    self.send(MessageStream { other: to, tag }, piece, SendBuffer::of(piece, copies), place)?;
                }
            }
            Action::Receive { from, tag } => {
                pieces.iter().try_for_each(|piece| self.receive(MessageStream { other: from, tag }, piece, place))?;
            }
        }
        self.pieces = pieces;
        Ok(())
    }
}

impl CommunicationQueue for DeviceQueue {
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
