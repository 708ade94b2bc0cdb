//! Communication of ranks that are threads of this process and share a device, enqueued on a stream of it.
//!
//! A collective: each rank marks on its stream where its tensors are ready. The ranks meet on the host, and the last to come queues
//! one kernel for all behind all marks; every rank's stream goes on behind that kernel. So nobody overwrites what is read, nothing
//! waits on the device for something that is not queued, and the host waits for no device.
//!
//! A message: the sender's stream copies it into the send buffer, the receiver's stream copies it out behind the sender's mark, and
//! the sender's stream waits for the receiver's mark before the room is used again.

use crate::driver::{Event, Stream};
use crate::gpu::Gpu;
use crate::send_buffer::{MessageStream, SendBuffer};
use crate::{CudaError, collectives};
use lockstep_exec::comm::{CommError, Communicator, Piece, ProgramPlace, ThreadCommunicator};
use lockstep_exec::communication::{Action, CommunicationCall, CommunicationQueue, Enqueued};
use lockstep_ir::Hint;
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
    enqueued: u64,
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
            enqueued: 0,
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
                self.reclaim(to, sending)?;
            }
        }
        Ok(())
    }

    /// An error of the device ends the run for all ranks.
    fn told<T>(&self, result: Result<T, CudaError>) -> Result<T, CommError> {
        result.map_err(|error| {
            let error = error.behind(self.entry.as_deref());
            self.comm.fail_with(&error.to_string(), error.hint());
            self.failure()
        })
    }

    fn failure(&self) -> CommError {
        let (rank, reason) = (self.comm.rank(), "the device failed".to_owned());
        self.comm.failure().unwrap_or(CommError::Failed { rank, host: None, place: None, reason, hint: None })
    }

    /// Waits for the oldest message under way to be taken.
    fn reclaim(&self, to: MessageStream, sending: &mut Sending) -> Result<(), CommError> {
        let taken: Arc<Event> = self.comm.fetch(to.other, 2 * to.tag + 1, sending.place)?;
        let _turn = self.turn.take(self.capturing);
        self.told(self.stream.wait_for(&taken))?;
        sending.under_way -= 1;
        Ok(())
    }

    fn send(
        &mut self,
        to: MessageStream,
        piece: &Piece,
        buffer: SendBuffer,
        place: ProgramPlace,
    ) -> Result<(), CommError> {
        if buffer.copies == 0 {
            self.comm.fail("a message without a send buffer");
            return Err(self.failure());
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
        let queue = || {
            let _turn = self.turn.take(self.capturing);
            // SAFETY: who enqueues vouches for the piece and the send buffer; what was in this part has been taken.
            unsafe { self.stream.copy(at, piece.input as u64, bytes)? };
            Event::mark(&self.stream)
        };
        let ready = self.told(queue())?;
        self.comm.post(to.other, 2 * to.tag, Message { at, bytes, ready }, place)?;
        (sending.sent, sending.under_way) = (sending.sent + 1, sending.under_way + 1);
        self.sending.insert(to, sending);
        Ok(())
    }

    fn receive(&mut self, from: MessageStream, piece: &Piece, place: ProgramPlace) -> Result<(), CommError> {
        let message: Message = self.comm.fetch(from.other, 2 * from.tag, place)?;
        if message.bytes != piece.bytes() {
            return Err(self.comm.refuse_size(from.other, message.bytes, piece.bytes(), place));
        }
        let queue = || {
            let _turn = self.turn.take(self.capturing);
            self.stream.wait_for(&message.ready)?;
            // SAFETY: who enqueues vouches for the piece; the sender leaves the message alone until it is taken.
            unsafe { self.stream.copy(piece.output as u64, message.at, message.bytes)? };
            Event::mark(&self.stream)
        };
        let taken = self.told(queue())?;
        self.comm.post(from.other, 2 * from.tag + 1, taken, place)
    }

    fn transfer(&mut self, call: &CommunicationCall, base: *mut u8, slot: Slot) -> Result<(), CommError> {
        let mut pieces = std::mem::take(&mut self.pieces);
        let (transfer, place) = call.resolve(base, slot, &mut pieces);
        self.comm.at(place);
        self.told(self.gpu.device.enter())?;
        let zero = || {
            let _turn = self.turn.take(self.capturing);
            for (at, bytes) in call.padding(base, slot).filter(|(_, bytes)| *bytes > 0) {
                // SAFETY: who enqueues vouches for the arena.
                unsafe { self.stream.fill(at as u64, 0, bytes)? };
            }
            Ok(())
        };
        self.told(zero())?;
        match transfer {
            Action::Together(kind, group) => {
                let mark = || {
                    let _turn = self.turn.take(self.capturing);
                    Event::mark(&self.stream)
                };
                let ready = self.told(mark())?;
                let done = self.comm.agree((kind, group), &pieces, place, ready, |all| {
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
                self.told(self.stream.wait_for(&done))?;
            }
            Action::Send { to, tag, send_buffer, copies } => {
                for piece in &pieces {
                    let buffer = SendBuffer { at: send_buffer as u64, bytes: piece.bytes(), copies };
                    self.send(MessageStream { other: to, tag }, piece, buffer, place)?;
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
        self.transfer(call, base, slot)?;
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
