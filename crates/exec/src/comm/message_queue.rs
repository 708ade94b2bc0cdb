//! Messages from one rank to another.

use super::collective::copy;
use super::error::other_size;
use super::peers::{Gate, Peers};
use super::{CommError, Piece, ProgramPlace};

/// One stream of messages.
pub struct MessageQueue {
    pub from: usize,
    pub to: usize,
    gate: Gate<State>,
}

/// Messages `taken..offered` are in the sender's send buffer.
struct State {
    send_buffer: SendBuffer,
    /// The first message that went into this send buffer.
    first: u64,
    offered: u64,
    taken: u64,
    /// The sender writes into its send buffer.
    writing: bool,
    /// The receiver reads from it.
    reading: bool,
    /// The sender's memory may be gone.
    closed: bool,
}

/// Memory of the sender, of `copies` parts of `bytes` bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
struct SendBuffer {
    memory: *mut u8,
    bytes: usize,
    copies: usize,
}

// SAFETY: the flags of `State` say who may use the memory.
unsafe impl Send for SendBuffer {}

impl State {
    /// Where a message of the current send buffer is.
    ///
    /// # Safety
    /// The send buffer is valid.
    unsafe fn part(&self, message: u64) -> *mut u8 {
        let part = (message - self.first) as usize % self.send_buffer.copies;
        // SAFETY: one of the parts.
        unsafe { self.send_buffer.memory.add(part * self.send_buffer.bytes) }
    }
}

impl MessageQueue {
    pub fn new(from: usize, to: usize) -> Self {
        let send_buffer = SendBuffer { memory: std::ptr::null_mut(), bytes: 0, copies: 1 };
        let state =
            State { send_buffer, first: 0, offered: 0, taken: 0, writing: false, reading: false, closed: false };
        Self { from, to, gate: Gate::new(state) }
    }

    /// Puts a message into the send buffer when there is room.
    ///
    /// # Safety
    /// As a `Send` of `HostCommunicator::act`.
    pub unsafe fn send(
        &self,
        peers: &Peers,
        piece: &Piece,
        copies: usize,
        place: ProgramPlace,
    ) -> Result<(), CommError> {
        let send_buffer = SendBuffer { memory: piece.output, bytes: piece.bytes(), copies };
        let state = self.gate.lock();
        let room = |state: &State| {
            let under_way = (state.offered - state.taken) as usize;
            under_way == 0 || (state.send_buffer == send_buffer && under_way < send_buffer.copies)
        };
        let (mut state, result) = peers.wait(
            self.from,
            place,
            &self.gate,
            state,
            |state| room(state) || state.closed,
            |_, rank| rank == self.to,
        );
        result?;
        if state.closed || state.writing {
            drop(state);
            return Err(self.refuse(peers, self.from, place));
        }
        state.writing = true;
        if state.send_buffer != send_buffer {
            (state.send_buffer, state.first) = (send_buffer, state.offered);
        }
        // SAFETY: the caller vouches for the send buffer.
        let part = unsafe { state.part(state.offered) };
        drop(state);
        // SAFETY: the caller vouches for the ranges; what was in this part has been taken.
        unsafe { copy(piece.input, part, send_buffer.bytes) };
        let mut state = self.gate.lock();
        state.writing = false;
        if state.closed {
            drop(state);
            return Err(self.refuse(peers, self.from, place));
        }
        state.offered += 1;
        self.gate.announce();
        Ok(())
    }

    /// Takes the next message when it is there.
    ///
    /// # Safety
    /// As a `Receive` of `HostCommunicator::act`.
    pub unsafe fn receive(&self, peers: &Peers, piece: &Piece, place: ProgramPlace) -> Result<(), CommError> {
        let bytes = piece.bytes();
        let state = self.gate.lock();
        let there = |state: &State| state.offered > state.taken && !state.closed;
        let (mut state, result) = peers.wait(self.to, place, &self.gate, state, there, |_, rank| rank == self.from);
        result?;
        if state.reading {
            drop(state);
            return Err(self.refuse(peers, self.to, place));
        }
        if state.send_buffer.bytes != bytes {
            let theirs = state.send_buffer.bytes;
            drop(state);
            return Err(peers.end(other_size((self.from, self.to), theirs, bytes, place)));
        }
        state.reading = true;
        // SAFETY: the send buffer stays valid while a message is there and the message queue is not closed.
        let part = unsafe { state.part(state.taken) };
        drop(state);
        // SAFETY: the caller vouches for its memory; the sender leaves this part alone until it is taken.
        unsafe { copy(part, piece.output, bytes) };
        let mut state = self.gate.lock();
        state.reading = false;
        state.taken += 1;
        self.gate.announce();
        Ok(())
    }

    /// Waits until everything is taken.
    pub fn flush(&self, peers: &Peers, place: ProgramPlace) -> Result<(), CommError> {
        let state = self.gate.lock();
        let empty = |state: &State| state.offered == state.taken || state.closed;
        peers.wait(self.from, place, &self.gate, state, empty, |_, rank| rank == self.to).1
    }

    /// Keeps the receiver away from the send buffer from now on.
    pub fn close(&self) {
        let mut state = self.gate.lock();
        state.closed = true;
        self.gate.announce();
        while state.reading {
            state = self.gate.sleep(state);
        }
    }

    /// For streams that two threads of a rank use at once, or that are used after the rank's end.
    fn refuse(&self, peers: &Peers, rank: usize, place: ProgramPlace) -> CommError {
        peers.refuse(rank, place, "a stream of messages that another thread uses, or that has ended")
    }
}
