//! Where messages wait until they are sent.

use crate::driver::Address;
use lockstep_exec::comm::Piece;

/// A stream of messages between this rank and another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MessageStream {
    pub other: usize,
    pub tag: u32,
}

/// The send buffer of a stream of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendBuffer {
    pub at: Address,
    /// Bytes of a message.
    pub bytes: usize,
    /// Messages that fit in.
    pub copies: usize,
}

impl SendBuffer {
    /// That of a message.
    pub fn of(piece: &Piece, copies: usize) -> Self {
        Self { at: piece.output as u64, bytes: piece.bytes(), copies }
    }

    /// Where the message of this number goes.
    pub fn place_of(&self, number: usize) -> Address {
        self.at + (number % self.copies * self.bytes) as u64
    }
}
