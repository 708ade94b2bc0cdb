//! Memory-mapped files of tokens.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use memmap2::{Mmap, MmapOptions};
use xxhash_rust::xxh3::xxh3_64;

use crate::{DataError, ShardFault};

pub(crate) const HEADER_BYTES: usize = 64;
const MAGIC: [u8; 8] = *b"LKSHARD1";
const VERSION: u32 = 1;

/// Payloads below this are hashed whenever they are opened; it takes a few milliseconds.
const VERIFY_ON_OPEN_BYTES: usize = 64 << 20;

/// One open file of tokens, mapped into memory.
///
/// # Format, version 1
///
/// A header of 64 bytes, then the tokens. All numbers are little endian.
///
/// | bytes | what |
/// |---|---|
/// | 0..8 | the magic `LKSHARD1` |
/// | 8..12 | format version, u32: 1 |
/// | 12..16 | bytes per token, u32: 1, 2 or 4 |
/// | 16..24 | number of tokens, u64 |
/// | 24..32 | xxh3-64 of the payload, u64 |
/// | 32..64 | zero |
/// | 64.. | the payload: the tokens, nothing after them |
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    map: Mmap,
    width: Width,
    tokens: u64,
    hash: u64,
}

impl Shard {
    /// Opens a shard and checks its header against the file's length; a payload under 64 MiB is verified as well.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let unreadable = |cause| DataError::unreadable(path, cause);
        let fault = |fault| DataError::shard(path, fault);

        let mut file = File::open(path).map_err(|cause| match cause.kind() {
            io::ErrorKind::NotFound => fault(ShardFault::Missing),
            _ => unreadable(cause),
        })?;
        let bytes = file.metadata().map_err(unreadable)?.len();
        if bytes < HEADER_BYTES as u64 {
            return Err(fault(ShardFault::NoHeader { bytes }));
        }
        let mut header = [0; HEADER_BYTES];
        file.read_exact(&mut header).map_err(unreadable)?;
        let header = Header::parse(&header).map_err(fault)?;
        let expected = header.file_bytes().map_err(fault)?;
        if expected as u64 != bytes {
            return Err(fault(ShardFault::Length { expected: expected as u64, found: bytes }));
        }

        // SAFETY: The map is read-only and any byte is a valid u8. Shards are written under another name and renamed,
        // never changed in place, so the bytes under the map stay as they are.
        let map = unsafe { MmapOptions::new().len(expected).map(&file) }.map_err(unreadable)?;
        let Header { width, tokens, hash } = header;
        let shard = Shard { path: path.to_owned(), map, width, tokens, hash };
        if shard.payload().len() < VERIFY_ON_OPEN_BYTES {
            shard.verify()?;
        }
        Ok(shard)
    }

    /// Reads the whole payload and compares its hash with the header's.
    pub fn verify(&self) -> Result<(), DataError> {
        match xxh3_64(self.payload()) {
            found if found == self.hash => Ok(()),
            found => Err(DataError::shard(&self.path, ShardFault::Hash { expected: self.hash, found })),
        }
    }

    /// Number of tokens.
    pub fn len(&self) -> u64 {
        self.tokens
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The hash of the payload that the header holds.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Copies the tokens from `offset` on until `tokens` is full. Does not allocate.
    ///
    /// # Panics
    ///
    /// If the range ends after the last token.
    pub fn copy(&self, offset: u64, tokens: &mut [u32]) {
        let end = offset.checked_add(tokens.len() as u64);
        assert!(
            end.is_some_and(|end| end <= self.tokens),
            "{} tokens from {offset} on are outside a shard of {}",
            tokens.len(),
            self.tokens
        );
        let width = self.width as usize;
        // In range of the map, so of usize.
        let source = &self.payload()[offset as usize * width..][..tokens.len() * width];
        match self.width {
            Width::One => {
                for (token, &byte) in tokens.iter_mut().zip(source) {
                    *token = u32::from(byte);
                }
            }
            Width::Two => {
                for (token, bytes) in tokens.iter_mut().zip(source.as_chunks().0) {
                    *token = u32::from(u16::from_le_bytes(*bytes));
                }
            }
            Width::Four => {
                for (token, bytes) in tokens.iter_mut().zip(source.as_chunks().0) {
                    *token = u32::from_le_bytes(*bytes);
                }
            }
        }
    }

    fn payload(&self) -> &[u8] {
        &self.map[HEADER_BYTES..]
    }
}

/// Bytes per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    One = 1,
    Two = 2,
    Four = 4,
}

/// The part of the header that differs between shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) width: Width,
    pub(crate) tokens: u64,
    pub(crate) hash: u64,
}

impl Header {
    pub(crate) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.width as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.tokens.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.hash.to_le_bytes());
        bytes
    }

    fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, ShardFault> {
        if bytes[..8] != MAGIC {
            return Err(ShardFault::Magic);
        }
        let version = u32::from_le_bytes(field(bytes, 8));
        if version != VERSION {
            return Err(ShardFault::Version { version });
        }
        let width = match u32::from_le_bytes(field(bytes, 12)) {
            1 => Width::One,
            2 => Width::Two,
            4 => Width::Four,
            width => return Err(ShardFault::Width { width }),
        };
        let tokens = u64::from_le_bytes(field(bytes, 16));
        let hash = u64::from_le_bytes(field(bytes, 24));
        Ok(Header { width, tokens, hash })
    }

    /// The length of a file with this header.
    fn file_bytes(self) -> Result<usize, ShardFault> {
        usize::try_from(self.tokens)
            .ok()
            .and_then(|tokens| tokens.checked_mul(self.width as usize))
            .and_then(|payload| payload.checked_add(HEADER_BYTES))
            .ok_or(ShardFault::Count { tokens: self.tokens })
    }
}

fn field<const N: usize>(header: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    std::array::from_fn(|i| header[at + i])
}
