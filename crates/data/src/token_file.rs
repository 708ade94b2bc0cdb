//! What the files that tokens are read from have in common.

use std::fmt;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use crate::{DataError, Result};

/// Tokens on the disk, in documents: a [`Shard`](crate::Shard), or a part of Megatron's files
/// ([`IndexedTokens`](crate::IndexedTokens)).
pub trait TokenFile: fmt::Debug + Send + Sync {
    /// The file.
    fn path(&self) -> &Path;

    /// Number of tokens.
    fn len(&self) -> u64;

    /// Whether there is no token.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of documents in the table; those with several prompts are there with each.
    fn documents(&self) -> u64;

    /// The document at a place in the table.
    ///
    /// # Panics
    ///
    /// If there is none.
    fn document(&self, index: u64) -> Document;

    /// The offset of the first token of the document at a place in the table.
    ///
    /// # Panics
    ///
    /// If there is none.
    fn start_of(&self, index: u64) -> u64;

    /// The place in the table of the first document that starts at or after a token.
    fn first_document_from(&self, offset: u64) -> u64 {
        let (mut low, mut high) = (0, self.documents());
        while low < high {
            let middle = low + (high - low) / 2;
            if self.start_of(middle) < offset { low = middle + 1 } else { high = middle }
        }
        low
    }

    /// Whether a document has no token. Shards have none such.
    fn is_empty_document(&self, index: u64) -> bool {
        let next = if index + 1 < self.documents() { self.start_of(index + 1) } else { self.len() };
        self.start_of(index) == next
    }

    /// Whether documents may begin with a prompt.
    fn has_prompts(&self) -> bool;

    /// A number that differs where tokens or documents differ.
    fn hash(&self) -> u64;

    /// Whether it is in a bucket, where reading takes a connection and may fail.
    fn is_remote(&self) -> bool {
        false
    }

    /// Says that tokens will be copied soon. What is on the disk needs no such word.
    fn expect(&self, _offset: u64, _count: u64) {}

    /// Why something that was read since the last call did not come. Until it was asked for, whatever is read of the file is made of
    /// ones, so readers of what [`is_remote`](Self::is_remote) ask before they use what they have.
    fn failure(&self) -> Option<DataError> {
        None
    }

    /// Bytes that [`verify_with`](Self::verify_with) reads.
    fn payload_bytes(&self) -> u64;

    /// Checks what can be checked: the hash and the document table. `read` hears of the bytes of every piece, some milliseconds
    /// apart; `stop` ends it with [`DataError::Interrupted`](crate::DataError::Interrupted).
    fn verify_with(&self, stop: &AtomicBool, read: &mut dyn FnMut(u64)) -> Result<()>;

    /// Copies the tokens from `offset` on until `tokens` is full. Does not allocate.
    ///
    /// # Panics
    ///
    /// If the range ends after the last token.
    fn copy(&self, offset: u64, tokens: &mut [u32]);
}

/// The file and record that a document came from, packed into 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The file's place in the reading order, from 0.
    pub file: u64,
    /// The line or row in the file, from 1; 0 where the file is one document.
    pub record: u64,
}

impl Origin {
    const RECORD_BITS: u32 = 38;

    pub(crate) fn pack(self) -> u64 {
        debug_assert!(self.record >> Self::RECORD_BITS == 0 && self.file >> (64 - Self::RECORD_BITS) == 0);
        self.file << Self::RECORD_BITS | self.record
    }

    pub(crate) fn unpack(bits: u64) -> Self {
        Origin { file: bits >> Self::RECORD_BITS, record: bits & ((1 << Self::RECORD_BITS) - 1) }
    }
}

/// A document of a shard or of a [`TokenStream`](crate::TokenStream).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Document {
    /// The offset of its first token.
    pub start: u64,
    /// Where it came from.
    pub origin: Origin,
    /// Whether it began earlier: in the shard before, so that `start` is only where this shard has it, or with another prompt.
    pub continued: bool,
    /// Tokens from `start` on that are a prompt: they are read and not predicted.
    pub prompt: u64,
}

/// Panics if a range of tokens ends after the last.
pub(crate) fn check_range(offset: u64, count: usize, len: u64) {
    let end = offset.checked_add(count as u64);
    assert!(end.is_some_and(|end| end <= len), "{count} tokens from {offset} on are outside {len}");
}
