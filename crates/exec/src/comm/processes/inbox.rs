//! What has come from other processes and was not taken yet, and what of ours they have taken.

use super::wire::read;
use crate::comm::CommError;
use crate::comm::buffer::Buffer;
use crate::comm::peers::{Gate, Peers};
use crate::sync::std_lock;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// What a frame belongs to, between two ranks: frames of one stream come out in the order in which they went in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub u64);

impl Stream {
    /// The rank has ended its program; nothing but [`taken`](Self::taken) comes after it.
    pub const LEFT: Stream = Stream(0);
    /// What all ranks tell each other.
    pub const EXCHANGE: Stream = Stream(1);
    /// The rank ends because the run has ended, with what ended it: it is not missed for itself.
    pub const ENDED: Stream = Stream(2);
    /// Copies of state that a rank leaves with another.
    pub const COPY: Stream = Stream(3);
    const KIND: u32 = 62;

    /// Messages with a tag.
    pub fn message(tag: u32) -> Self {
        Self(1 << Self::KIND | u64::from(tag))
    }

    /// The receiver has taken a message with this tag.
    pub fn taken(tag: u32) -> Self {
        Self(2 << Self::KIND | u64::from(tag))
    }

    /// Collectives of a group that has this number.
    pub fn group(number: u64) -> Self {
        Self(3 << Self::KIND | number >> 2)
    }

    fn is_taken(self) -> Option<u32> {
        (self.0 >> Self::KIND == 2).then_some(self.0 as u32)
    }
}

/// A stream of messages that this rank sends.
#[derive(Default)]
pub struct Outgoing {
    /// Bytes of a message and send buffer, whose change waits until all is taken.
    pub shape: (usize, usize, usize),
    pub offered: u64,
    pub taken: u64,
    /// A thread is sending.
    pub sending: bool,
}

#[derive(Default)]
pub struct State {
    /// By sender.
    frames: HashMap<(usize, Stream), VecDeque<Buffer>>,
    /// By receiver and tag.
    pub outgoing: HashMap<(usize, u32), Outgoing>,
}

impl State {
    /// Whether something has come.
    pub fn has(&self, from: usize, stream: Stream) -> bool {
        self.frames.get(&(from, stream)).is_some_and(|frames| !frames.is_empty())
    }

    pub fn peek(&self, from: usize, stream: Stream) -> Option<&Buffer> {
        self.frames.get(&(from, stream))?.front()
    }

    pub fn pop(&mut self, from: usize, stream: Stream) -> Option<Buffer> {
        self.frames.get_mut(&(from, stream))?.pop_front()
    }
}

/// The inbox of a rank that is this process. Whoever reads from the network delivers here and never waits.
pub struct Inbox {
    rank: usize,
    pub peers: Arc<Peers>,
    pub gate: Gate<State>,
    hosts: Vec<String>,
    /// By rank: whether there is a connection for frames. A transport of somebody else has none that could be seen to end.
    connected: Vec<AtomicBool>,
    /// Buffers to be used again, so that a step allocates nothing.
    free: Mutex<Vec<Buffer>>,
}

/// Buffers that are kept for later.
const KEPT: usize = 64;

impl Inbox {
    pub fn new(rank: usize, peers: Arc<Peers>, hosts: Vec<String>) -> Self {
        let connected = hosts.iter().map(|_| AtomicBool::new(false)).collect();
        Self { rank, peers, gate: Gate::new(State::default()), hosts, connected, free: Mutex::default() }
    }

    /// A buffer of this many bytes: the smallest that is free and large enough.
    pub fn buffer(&self, bytes: usize) -> Buffer {
        let mut buffer = self.fitting(bytes);
        buffer.resize(bytes);
        buffer
    }

    /// A buffer for a frame that another process announces; none where there is no memory for it.
    pub fn buffer_for(&self, bytes: usize) -> Option<Buffer> {
        let mut buffer = self.fitting(bytes);
        buffer.try_resize(bytes).then_some(buffer)
    }

    fn fitting(&self, bytes: usize) -> Buffer {
        let mut free = std_lock(&self.free);
        let fits = |(_, buffer): &(usize, &Buffer)| buffer.room() >= bytes;
        let best = free.iter().enumerate().filter(fits).min_by_key(|(_, buffer)| buffer.room()).map(|(i, _)| i);
        best.map_or_else(Buffer::default, |i| free.swap_remove(i))
    }

    /// Gives a buffer back.
    pub fn recycle(&self, buffer: Buffer) {
        let mut free = std_lock(&self.free);
        if free.len() < KEPT {
            free.push(buffer);
        }
    }

    /// Something has come.
    pub fn deliver(&self, from: usize, stream: Stream, frame: Buffer) {
        if stream == Stream::LEFT {
            self.peers.leave(from);
            let _state = self.gate.lock();
            self.gate.announce();
            return;
        }
        if stream == Stream::ENDED {
            // The first rank settles what it hears of; for others it is settled.
            match read(frame.bytes()) {
                Some(error) if self.rank == 0 => drop(self.peers.end(error)),
                Some(error) => self.peers.conclude(error),
                None => {}
            }
            self.peers.leave(from);
            return;
        }
        let mut state = self.gate.lock();
        match stream.is_taken() {
            Some(tag) => state.outgoing.entry((from, tag)).or_default().taken += 1,
            None => state.frames.entry((from, stream)).or_default().push_back(frame),
        }
        self.gate.announce();
    }

    /// The host of a rank.
    pub fn host(&self, rank: usize) -> &str {
        &self.hosts[rank]
    }

    /// A connection for frames of a rank is open, or has ended.
    pub fn set_connected(&self, rank: usize, connected: bool) {
        self.connected[rank].store(connected, Ordering::Release);
    }

    /// Whether frames of a rank still may come.
    pub fn is_connected(&self, rank: usize) -> bool {
        self.connected[rank].load(Ordering::Acquire)
    }

    /// Nothing more will come from a rank.
    pub fn cut(&self, from: usize, reason: String) {
        if !self.peers.has_left(from) {
            self.peers.end(self.lost(from, reason));
        }
    }

    /// Ends the run because this rank cannot go on.
    pub fn fail(&self, rank: usize, reason: &str) {
        self.peers.fail(rank, Some(&self.hosts[rank]), reason, None);
    }

    /// An error that another rank has noticed, with what only this one knows: it may hear where ranks are, and the other not.
    pub fn completed(&self, error: CommError) -> CommError {
        match error {
            CommError::Lost { rank, host, place: None, reason, seen } if rank < self.hosts.len() => {
                CommError::Lost { rank, host, place: self.peers.place(rank), reason, seen }
            }
            error => error,
        }
    }

    /// The error for a rank whose process is gone.
    pub fn lost(&self, rank: usize, reason: String) -> CommError {
        CommError::Lost { rank, host: self.hosts[rank].clone(), place: self.peers.place(rank), reason, seen: None }
    }
}
