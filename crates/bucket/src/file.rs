//! One object, read like a file.

use crate::blocks::Key;
use crate::{BucketAddress, BucketError, Buckets};
use std::io::{self, Read, Seek, SeekFrom};
use std::sync::Arc;

/// How an object is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// Here and there, again and again: small blocks, which the cache keeps.
    Scattered,
    /// From front to back, once: large blocks, which are only held in memory.
    InOrder,
}

impl Reads {
    fn block_bytes(self) -> u64 {
        match self {
            Reads::Scattered => 256 << 10,
            Reads::InOrder => 2 << 20,
        }
    }
}

/// How many blocks are fetched ahead of a reader.
const AHEAD: u64 = 6;

/// An object as it was when it was opened: one that changes is an error.
#[derive(Clone, Debug)]
pub struct BucketFile {
    buckets: Buckets,
    object: Arc<Object>,
}

/// What is known of an object.
#[derive(Debug)]
pub(crate) struct Object {
    pub address: BucketAddress,
    pub bytes: u64,
    pub etag: String,
    pub reads: Reads,
}

impl Object {
    /// The first byte of a block, and its length.
    pub fn block(&self, index: u64) -> (u64, u64) {
        let from = index * self.reads.block_bytes();
        (from, self.reads.block_bytes().min(self.bytes.saturating_sub(from)))
    }
}

impl BucketFile {
    pub(crate) fn new(buckets: &Buckets, address: &BucketAddress, (bytes, etag): (u64, String), reads: Reads) -> Self {
        let object = Arc::new(Object { address: address.clone(), bytes, etag, reads });
        Self { buckets: buckets.clone(), object }
    }

    /// Where it is.
    pub fn address(&self) -> &BucketAddress {
        &self.object.address
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.object.bytes
    }

    /// Whether it has no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `into` with the bytes from `at` on, all of which must be there.
    ///
    /// # Panics
    ///
    /// If the range ends after the last byte.
    pub fn read_at(&self, mut at: u64, mut into: &mut [u8]) -> Result<(), BucketError> {
        let end = at.checked_add(into.len() as u64);
        assert!(
            end.is_some_and(|end| end <= self.len()),
            "{} bytes from {at} on are outside {}",
            into.len(),
            self.len()
        );
        while !into.is_empty() {
            let index = at / self.object.reads.block_bytes();
            let block = self.buckets.blocks.get(&self.buckets, &Key::new(&self.object, index))?;
            let from = (at - self.object.block(index).0) as usize;
            let here = into.len().min(block.len() - from);
            let (now, rest) = into.split_at_mut(here);
            now.copy_from_slice(&block[from..from + here]);
            at += here as u64;
            into = rest;
        }
        Ok(())
    }

    /// Says that a range will be read soon. What cannot be fetched now is an error when it is read.
    pub fn expect(&self, at: u64, bytes: u64) {
        let each = self.object.reads.block_bytes();
        let end = at.saturating_add(bytes).min(self.len());
        for index in at / each..end.div_ceil(each) {
            self.buckets.blocks.expect(&self.buckets, Key::new(&self.object, index));
        }
    }

    /// Reads it from a place on.
    pub fn reader(&self, at: u64) -> BucketReader {
        BucketReader { file: self.clone(), at }
    }
}

/// Reads an object from front to back, some blocks ahead.
#[derive(Debug)]
pub struct BucketReader {
    file: BucketFile,
    at: u64,
}

impl BucketReader {
    /// The object.
    pub fn file(&self) -> &BucketFile {
        &self.file
    }
}

impl Read for BucketReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let here = (into.len() as u64).min(self.file.len().saturating_sub(self.at)) as usize;
        if here == 0 {
            return Ok(0);
        }
        if self.file.object.reads == Reads::InOrder {
            self.file.expect(self.at, AHEAD * Reads::InOrder.block_bytes());
        }
        self.file.read_at(self.at, &mut into[..here]).map_err(io::Error::other)?;
        self.at += here as u64;
        Ok(here)
    }
}

impl Seek for BucketReader {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.file.len().checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = at.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(self.at)
    }
}
