//! Ranks that are processes, on one host or many.
//!
//! [`join`] finds the others. Bytes go over a `Transport`, TCP (`sockets`) or MPI (`mpi`), in frames, each of a stream; whoever receives them puts them into the
//! inbox and never waits, so that sends always end. A failure channel (`control`) beside it notices who is gone or stalls, and
//! settles for all what ended the run.
//!
//! **Collectives.** Every member sends every other what it is to add or to have, with what it asks for in front; nothing is touched
//! before all of these have come and agree. `AllReduce` adds one slice per member, in the order of the group, and sends it round;
//! a small one is sent whole and added by everybody.
//!
//! **Messages** are kept by the receiver, which tells the sender when it takes one; so no more are on their way than the send buffer
//! has room for, which itself is not used.
//!
//! Sums are taken in rank order and have the bits of threads. `MPI_Allreduce` promises no order, so it is not used.

mod board;
mod collective;
mod conformance;
mod control;
mod copies;
mod inbox;
mod join;
mod measure;
mod mpi;
mod over;
mod secret;
mod sockets;
mod start;
#[cfg(test)]
mod tests;
mod transport;
mod wire;

pub use board::Board;
pub use conformance::conform;
pub use join::{end_early, host_at, join};
pub use measure::{Link, measure_link};
pub use mpi::{MpiLibrary, end as end_mpi};
pub use over::Over;
pub use secret::JobSecret;
pub use start::{JoinError, Member, Start, Waiting, host};

use crate::comm::buffer::Buffer;
use crate::comm::collective::copy;
use crate::comm::error::other_size;
use crate::comm::peers::Peers;
use crate::comm::{Action, Collective, CommError, Communicator, HostCommunicator, Piece, ProgramPlace, RankGroup};
use crate::sync::{MutexGuard, std_lock};
use collective::Channel;
use control::Control;
use inbox::{Inbox, State, Stream};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, TryLockError};
use std::time::Duration;
use transport::Transport;
use wire::written;

/// How often a thread that waits looks after the transport before it sleeps.
const LOOKS: usize = 200;

/// One rank that is this process.
pub struct ProcessCommunicator {
    rank: usize,
    inbox: Arc<Inbox>,
    /// None when it has been closed.
    transport: Option<Box<dyn Transport>>,
    over: Over,
    control: Arc<Control>,
    members: Vec<Member>,
    channels: Mutex<HashMap<RankGroup, Arc<Mutex<Channel>>>>,
    /// Keeps two threads from talking to all ranks at once.
    exchanging: Mutex<()>,
    /// What tells latecomers that all have come; the first rank's.
    gate: Option<Arc<AtomicBool>>,
    /// What the first rank has posted for the others.
    notice: Option<board::Notice>,
    /// What all of them know.
    secret: JobSecret,
    device: Mutex<Option<DevicePlace>>,
    /// How long a device may take to be done after the run has failed, where the process goes on without the ranks that are lost.
    goes_on: OnceLock<Duration>,
}

/// Says where in the program a device waits, if it does.
pub type DevicePlace = Box<dyn Fn() -> Option<ProgramPlace> + Send + Sync>;

impl ProcessCommunicator {
    /// After a failure this process goes on, with the ranks that are left: what runs on its device may take this long to end.
    pub fn goes_on_within(&self, time: Duration) {
        // Said once.
        let _ = self.goes_on.set(time);
    }

    /// How long what runs on the device may take to end after a failure, where the process goes on then.
    pub fn goes_on(&self) -> Option<Duration> {
        self.goes_on.get().copied()
    }

    /// The processes, by rank.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// What bytes to the others go over.
    pub fn over(&self) -> &Over {
        &self.over
    }

    /// Calls `act` with what ends the run, as soon as that is known: the process may be ended before it gets further. What comes
    /// after this rank has left does not concern it.
    pub fn on_failure(&self, act: impl Fn(&CommError) + Send + Sync + 'static) {
        let (peers, rank) = (Arc::downgrade(&self.inbox.peers), self.rank);
        self.peers().on_end(move |error| {
            if peers.upgrade().is_some_and(|peers| !peers.has_left(rank)) {
                act(error);
            }
        });
    }

    /// Every rank gives some bytes, as many as it likes, and all get everybody's, by rank.
    pub fn exchange(&self, place: ProgramPlace, mine: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        self.call(place, || {
            let _turn = std_lock(&self.exchanging);
            for i in 1..self.ranks() {
                self.post((self.rank + i) % self.ranks(), Stream::EXCHANGE, mine, place)?;
            }
            let others = |rank: &usize| *rank != self.rank;
            let mut state = self.wait_for(place, (0..self.ranks()).filter(others), Stream::EXCHANGE)?;
            let taken: Vec<_> = (0..self.ranks()).map(|rank| state.pop(rank, Stream::EXCHANGE)).collect();
            drop(state);
            let bytes = |frame: Option<Buffer>| match frame {
                Some(frame) => {
                    let bytes = frame.bytes().to_vec();
                    self.inbox.recycle(frame);
                    bytes
                }
                None => mine.to_vec(),
            };
            Ok(taken.into_iter().map(bytes).collect())
        })
    }

    /// `place` says where in the program this rank's device waits, if it does: the host may be ahead of it when the run ends.
    pub fn device_waits(&self, place: Option<DevicePlace>) {
        *std_lock(&self.device) = place;
    }

    /// Says whom this rank's device waits for and where, if it does. No sign of life.
    pub fn awaits(&self, waits: Option<(usize, ProgramPlace)>) {
        self.peers().awaits(self.rank, waits);
    }

    /// Waits until the others have taken everything that this rank has sent, or the run has ended.
    pub fn drain(&self) {
        // An error is the run's, which others see as well.
        let _ = self.flush(ProgramPlace::outside("drain"));
    }

    /// What ended the run, if anything did, as this rank tells it that was at `place`.
    pub fn failure_at(&self, place: ProgramPlace) -> Option<CommError> {
        self.end(Err::<(), _>(self.peers().failure()?.clone()), place).err()
    }

    /// Every call goes through here.
    fn call<T>(&self, place: ProgramPlace, act: impl FnOnce() -> Result<T, CommError>) -> Result<T, CommError> {
        self.end(self.peers().begin(self.rank, place).and_then(|()| act()), place)
    }

    /// And ends here.
    fn end<T>(&self, result: Result<T, CommError>, place: ProgramPlace) -> Result<T, CommError> {
        match result {
            Ok(value) => {
                self.peers().alive(self.rank);
                Ok(value)
            }
            Err(CommError::Lost { rank, host, place: last, reason, .. }) => {
                let device = std_lock(&self.device);
                let place = device.as_ref().and_then(|device| device()).unwrap_or(place);
                Err(CommError::Lost { rank, host, place: last, reason, seen: Some(Box::new((self.rank, place))) })
            }
            Err(error) => Err(error),
        }
    }

    fn refuse(&self, place: ProgramPlace, reason: impl Into<String>) -> CommError {
        self.peers().refuse(self.rank, place, reason)
    }

    /// Sends a frame; to this rank itself it is delivered at once.
    fn post(&self, to: usize, stream: Stream, frame: &[u8], place: ProgramPlace) -> Result<(), CommError> {
        if to == self.rank {
            let mut copy = self.inbox.buffer(0);
            copy.push(frame);
            self.inbox.deliver(to, stream, copy);
            return Ok(());
        }
        let goes_on = || self.peers().failure().is_none();
        let sent = match &self.transport {
            Some(transport) => transport.send(to, stream, frame, &goes_on),
            None => return Err(self.refuse(place, "this rank has ended its program")),
        };
        if let Err(reason) = sent {
            self.inbox.set_connected(to, false);
            // One that has left may have closed its end, and needs nothing more.
            return match self.peers().has_left(to) {
                true => Err(self.peers().end(CommError::Left { rank: self.rank, place, other: to })),
                false => Err(self.peers().end(self.inbox.lost(to, reason))),
            };
        }
        self.peers().failure().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Waits until a frame has come from each of these ranks.
    fn wait_for(
        &self,
        place: ProgramPlace,
        from: impl Iterator<Item = usize> + Clone,
        stream: Stream,
    ) -> Result<MutexGuard<'_, State>, CommError> {
        let state = self.inbox.gate.lock();
        let ready = |state: &State| from.clone().all(|rank| state.has(rank, stream));
        let missing = |state: &State, rank: usize| from.clone().any(|r| r == rank) && !state.has(rank, stream);
        let state = self.look_for(state, ready);
        let (state, result) = self.peers().wait(self.rank, place, &self.inbox.gate, state, ready, missing);
        result.map(|()| state)
    }

    /// Looks after the transport for a while, as long as it is not `ready`.
    fn look_for<'g>(
        &'g self,
        mut state: MutexGuard<'g, State>,
        ready: impl Fn(&State) -> bool,
    ) -> MutexGuard<'g, State> {
        let Some(transport) = &self.transport else { return state };
        for _ in 0..LOOKS {
            if ready(&state) || self.peers().failure().is_some() {
                break;
            }
            drop(state);
            let helps = transport.progress();
            if helps {
                std::thread::yield_now();
            }
            state = self.inbox.gate.lock();
            if !helps {
                break;
            }
        }
        state
    }

    /// Waits until everything that was sent is taken.
    fn flush(&self, place: ProgramPlace) -> Result<(), CommError> {
        let state = self.inbox.gate.lock();
        let waits_for = |state: &State, rank: Option<usize>| {
            state.outgoing.iter().any(|((to, _), s)| s.offered > s.taken && rank.is_none_or(|rank| rank == *to))
        };
        let done = |state: &State| !waits_for(state, None);
        let missing = |state: &State, rank| waits_for(state, Some(rank));
        self.peers().wait(self.rank, place, &self.inbox.gate, state, done, missing).1
    }

    /// Ends as a process does that is killed.
    #[cfg(test)]
    fn die(mut self) {
        // It says nothing any more, to nobody.
        self.peers().leave(self.rank);
        self.control.cut();
        self.transport = None;
    }

    /// Closes the connections: nobody misses this rank any more.
    fn close(&mut self) {
        self.control.close();
        self.transport = None;
        if let Some(gate) = &self.gate {
            gate.store(true, Ordering::Release);
        }
        self.notice = None;
    }
}

impl Communicator for ProcessCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn peers(&self) -> &Peers {
        &self.inbox.peers
    }

    fn leave(&self) {
        if self.peers().has_left(self.rank) {
            return;
        }
        self.peers().leave(self.rank);
        // Where the run has ended, others may learn of it from this rank's end before they learn of the cause.
        let (stream, last) = match self.peers().failure() {
            Some(error) => (Stream::ENDED, written(error)),
            None => (Stream::LEFT, Vec::new()),
        };
        for other in (0..self.ranks()).filter(|&other| other != self.rank) {
            if let Some(transport) = &self.transport {
                // Who cannot be reached has left before, or is missed by others.
                let _ = transport.send(other, stream, &last, &|| self.peers().failure().is_none());
            }
        }
        self.drain();
    }

    fn fail_with(&self, reason: &str, _: Option<String>) {
        self.inbox.fail(self.rank, reason);
    }
}

impl HostCommunicator for ProcessCommunicator {
    unsafe fn act(&self, action: &Action, pieces: &[Piece], place: ProgramPlace) -> Result<(), CommError> {
        self.call(place, || {
            let index = action.index(pieces, self.rank, self.ranks()).map_err(|reason| self.refuse(place, reason))?;
            // SAFETY: the caller vouches.
            unsafe {
                match *action {
                    Action::Together(kind, ref group) => self.collective(kind, group, index, pieces, place),
                    Action::Send { to, tag, copies } => {
                        pieces.iter().try_for_each(|piece| self.send(to, tag, piece, copies, place))
                    }
                    Action::Receive { from, tag } => {
                        pieces.iter().try_for_each(|piece| self.receive(from, tag, piece, place))
                    }
                }
            }
        })
    }
}

/// The parts of `HostCommunicator::act`, with its contract.
impl ProcessCommunicator {
    unsafe fn collective(
        &self,
        kind: Collective,
        group: &RankGroup,
        index: usize,
        pieces: &[Piece],
        place: ProgramPlace,
    ) -> Result<(), CommError> {
        let channel = {
            let mut channels = std_lock(&self.channels);
            match channels.get(group) {
                Some(channel) => channel.clone(),
                None => channels.entry(group.clone()).or_insert(Arc::new(Mutex::new(Channel::new(group)))).clone(),
            }
        };
        let mut channel = match channel.try_lock() {
            Ok(channel) => channel,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                return Err(self.refuse(place, "two collectives of one group at once on one channel"));
            }
        };
        // SAFETY: the caller vouches.
        unsafe { channel.act(self, index, kind, pieces, place) }
    }

    unsafe fn send(
        &self,
        to: usize,
        tag: u32,
        piece: &Piece,
        copies: usize,
        place: ProgramPlace,
    ) -> Result<(), CommError> {
        let shape = (piece.bytes(), piece.output as usize, copies);
        let room = |state: &State| {
            state.outgoing.get(&(to, tag)).is_none_or(|s| {
                let under_way = (s.offered - s.taken) as usize;
                under_way == 0 || (s.shape == shape && under_way < copies)
            })
        };
        let state = self.inbox.gate.lock();
        let missing = |_: &State, rank: usize| rank == to;
        let (mut state, result) = self.peers().wait(self.rank, place, &self.inbox.gate, state, room, missing);
        result?;
        let stream = state.outgoing.entry((to, tag)).or_default();
        if stream.sending {
            drop(state);
            return Err(self.refuse(place, "a stream of messages that another thread uses"));
        }
        (stream.shape, stream.sending) = (shape, true);
        stream.offered += 1;
        drop(state);
        // SAFETY: the caller vouches for the data.
        let message =
            unsafe { if piece.bytes() == 0 { &[] } else { std::slice::from_raw_parts(piece.input, piece.bytes()) } };
        let sent = self.post(to, Stream::message(tag), message, place);
        if let Some(stream) = self.inbox.gate.lock().outgoing.get_mut(&(to, tag)) {
            stream.sending = false;
        }
        sent
    }

    unsafe fn receive(&self, from: usize, tag: u32, piece: &Piece, place: ProgramPlace) -> Result<(), CommError> {
        let (stream, bytes) = (Stream::message(tag), piece.bytes());
        let mut state = self.wait_for(place, std::iter::once(from), stream)?;
        let theirs = state.peek(from, stream).map_or(0, |frame| frame.bytes().len());
        if theirs != bytes {
            drop(state);
            return Err(self.peers().end(other_size((from, self.rank), theirs, bytes, place)));
        }
        let frame = state.pop(from, stream);
        drop(state);
        let Some(frame) = frame else { return Err(self.refuse(place, "a message that another thread took")) };
        // SAFETY: the caller vouches for its memory; the message has as many bytes.
        unsafe { copy(frame.bytes().as_ptr(), piece.output, bytes) };
        self.inbox.recycle(frame);
        // One that has left does not wait to hear of it where it cannot be reached.
        match self.post(from, Stream::taken(tag), &[], place) {
            Err(_) if self.peers().has_left(from) && self.peers().failure().is_none() => Ok(()),
            sent => sent,
        }
    }
}
