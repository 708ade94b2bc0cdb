//! Messages from one rank to another.

use super::meeting::{copy, thousands};
use super::world::{Gate, World};
use super::{CommError, Place};

/// One stream of messages.
pub struct Mailbox {
    pub from: usize,
    pub to: usize,
    gate: Gate<Post>,
}

/// Messages `taken..offered` lie in the sender's outbox.
struct Post {
    outbox: Outbox,
    /// The first message that went into this outbox.
    first: u64,
    offered: u64,
    taken: u64,
    /// The sender writes into its outbox.
    writing: bool,
    /// The receiver reads from it.
    reading: bool,
    /// The sender's memory may be gone.
    closed: bool,
}

/// Memory of the sender, of `copies` parts of `bytes` bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Outbox {
    pub memory: *mut u8,
    pub bytes: usize,
    pub copies: usize,
}

// SAFETY: the flags of `Post` say who may use the memory.
unsafe impl Send for Outbox {}

impl Post {
    /// Where a message of the current outbox lies.
    ///
    /// # Safety
    /// The outbox is valid.
    unsafe fn part(&self, message: u64) -> *mut u8 {
        let part = (message - self.first) as usize % self.outbox.copies;
        // SAFETY: one of the parts.
        unsafe { self.outbox.memory.add(part * self.outbox.bytes) }
    }
}

impl Mailbox {
    pub fn new(from: usize, to: usize) -> Self {
        let outbox = Outbox { memory: std::ptr::null_mut(), bytes: 0, copies: 1 };
        let post = Post { outbox, first: 0, offered: 0, taken: 0, writing: false, reading: false, closed: false };
        Self { from, to, gate: Gate::new(post) }
    }

    /// Puts a message into the outbox when there is room.
    ///
    /// # Safety
    /// As `Communicator::send`.
    pub unsafe fn send(&self, world: &World, data: *const u8, outbox: Outbox, place: Place) -> Result<(), CommError> {
        let post = self.gate.lock();
        let room = |post: &Post| {
            let under_way = (post.offered - post.taken) as usize;
            under_way == 0 || (post.outbox == outbox && under_way < outbox.copies)
        };
        let (mut post, result) = world.wait(
            (self.from, place),
            &self.gate,
            post,
            |post| room(post) || post.closed,
            |_, rank| rank == self.to,
        );
        result?;
        if post.closed || post.writing {
            drop(post);
            return Err(self.refuse(world, self.from, place));
        }
        post.writing = true;
        if post.outbox != outbox {
            (post.outbox, post.first) = (outbox, post.offered);
        }
        // SAFETY: the caller vouches for the outbox.
        let part = unsafe { post.part(post.offered) };
        drop(post);
        // SAFETY: the caller vouches for the ranges; what was in this part has been taken.
        unsafe { copy(data, part, outbox.bytes) };
        let mut post = self.gate.lock();
        post.writing = false;
        if post.closed {
            drop(post);
            return Err(self.refuse(world, self.from, place));
        }
        post.offered += 1;
        self.gate.announce();
        Ok(())
    }

    /// Takes the next message when it is there.
    ///
    /// # Safety
    /// As `Communicator::receive`.
    pub unsafe fn receive(&self, world: &World, data: *mut u8, bytes: usize, place: Place) -> Result<(), CommError> {
        let post = self.gate.lock();
        let there = |post: &Post| post.offered > post.taken && !post.closed;
        let (mut post, result) = world.wait((self.to, place), &self.gate, post, there, |_, rank| rank == self.from);
        result?;
        if post.reading {
            drop(post);
            return Err(self.refuse(world, self.to, place));
        }
        if post.outbox.bytes != bytes {
            let (ours, theirs) = (thousands(bytes), thousands(post.outbox.bytes));
            drop(post);
            return Err(world.end(CommError::Mismatch {
                ranks: (self.from, self.to),
                first: format!("a message of {theirs} bytes"),
                second: format!("receive of {ours} bytes in {place}"),
            }));
        }
        post.reading = true;
        // SAFETY: the outbox stays valid while a message is there and the mailbox is not closed.
        let part = unsafe { post.part(post.taken) };
        drop(post);
        // SAFETY: the caller vouches for its memory; the sender leaves this part alone until it is taken.
        unsafe { copy(part, data, bytes) };
        let mut post = self.gate.lock();
        post.reading = false;
        post.taken += 1;
        self.gate.announce();
        Ok(())
    }

    /// Waits until everything is taken.
    pub fn flush(&self, world: &World, place: Place) -> Result<(), CommError> {
        let post = self.gate.lock();
        let empty = |post: &Post| post.offered == post.taken || post.closed;
        world.wait((self.from, place), &self.gate, post, empty, |_, rank| rank == self.to).1
    }

    /// Keeps the receiver away from the outbox from now on.
    pub fn close(&self) {
        let mut post = self.gate.lock();
        post.closed = true;
        self.gate.announce();
        while post.reading {
            post = self.gate.sleep(post);
        }
    }

    /// For streams that two threads of a rank use at once, or that are used after the rank's end.
    fn refuse(&self, world: &World, rank: usize, place: Place) -> CommError {
        let reason = "a stream of messages that another thread uses, or that has ended".to_owned();
        world.end(CommError::Refused { rank, place, reason })
    }
}
