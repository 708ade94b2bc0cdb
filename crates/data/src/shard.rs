//! Memory-mapped files of tokens.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};

use lockstep_bucket::{BucketError, BucketFile};
use memmap2::{Mmap, MmapOptions};
use xxhash_rust::xxh3::Xxh3;

use crate::scan::sample_blocks;
use crate::stop::{NEVER, go_on};
use crate::token_file::check_range;
use crate::{DataError, Document, Origin, Result, ShardFault, TokenFile};

pub(crate) const HEADER_BYTES: usize = 64;
const MAGIC: [u8; 8] = *b"LKSHARD1";
const VERSION: u32 = 2;
/// Bytes of one entry of the document table: its start and its origin, and where there are prompts the prompt's tokens.
pub(crate) const fn entry_bytes(prompts: bool) -> usize {
    if prompts { 24 } else { 16 }
}

/// Set in the prompt of an entry that goes on with the document before it.
pub(crate) const GOES_ON: u64 = 1 << 63;

/// Payloads below this are hashed whenever they are opened; it takes a few milliseconds.
const VERIFY_ON_OPEN_BYTES: usize = 64 << 20;

/// Bytes that are hashed between two looks at whether to go on.
const VERIFY_PIECE_BYTES: usize = 16 << 20;

/// One open file of tokens: mapped into memory, or in a bucket.
///
/// # Format, version 2
///
/// A header of 64 bytes, then the tokens, then the document table. All numbers are little endian.
///
/// | bytes | what |
/// |---|---|
/// | 0..8 | the magic `LKSHARD1` |
/// | 8..12 | format version, u32: 2 |
/// | 12..16 | bytes per token, u32: 1, 2 or 4 |
/// | 16..24 | number of tokens, u64 |
/// | 24..32 | xxh3-64 of everything after the header, u64 |
/// | 32..40 | number of entries of the document table, u64 |
/// | 40..44 | 1 if the first document began in the shard before, else 0, u32 |
/// | 44..48 | 1 if the table says how long prompts are, else 0, u32 |
/// | 48..64 | zero |
/// | 64.. | the tokens |
/// | after them | per document: the offset of its first token, u64, its [`Origin`], u64, and where there are prompts the number of its tokens that are prompt, u64; nothing after that |
///
/// A document's tokens run up to the next one's first. The first document starts at 0 and no two start together. Where the highest bit
/// of a prompt's number is set, the entry is no document of its own: the one before it goes on there with another prompt, as a
/// conversation does.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    content: Content,
    header: Header,
}

/// Where the bytes of a shard are.
#[derive(Debug)]
enum Content {
    Mapped(Mmap),
    Remote(Box<Remote>),
}

/// A shard in a bucket, and why a read of it failed, for all who read it from then on. What did not come is made of ones, and may be read as a token: whoever
/// uses what was read asks first whether all of it came.
#[derive(Debug)]
struct Remote {
    file: BucketFile,
    failure: Mutex<Option<BucketError>>,
}

impl Remote {
    fn read(&self, at: u64, into: &mut [u8]) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if failure.is_none() {
            drop(failure);
            let Err(error) = self.file.read_at(at, into) else { return };
            failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
            failure.get_or_insert(error);
        }
        into.fill(0xff);
    }
}

impl Shard {
    /// Opens a shard and checks its header against the file's length; a payload under 64 MiB is verified as well.
    pub fn open(path: &Path) -> Result<Self> {
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
        let shard = Shard { path: path.to_owned(), content: Content::Mapped(map), header };
        if shard.is_verified() {
            shard.verify()?;
        }
        Ok(shard)
    }

    /// Opens a shard in a bucket and checks its header against its length.
    pub(crate) fn remote(file: BucketFile) -> Result<Self> {
        let path = file.address().path();
        let fault = |fault| DataError::shard(&path, fault);
        let bytes = file.len();
        if bytes < HEADER_BYTES as u64 {
            return Err(fault(ShardFault::NoHeader { bytes }));
        }
        let mut header = [0; HEADER_BYTES];
        file.read_at(0, &mut header)?;
        let header = Header::parse(&header).map_err(fault)?;
        let expected = header.file_bytes().map_err(fault)? as u64;
        if expected != bytes {
            return Err(fault(ShardFault::Length { expected, found: bytes }));
        }
        let content = Content::Remote(Box::new(Remote { file, failure: Mutex::new(None) }));
        Ok(Shard { path, content, header })
    }

    /// Bytes of the file.
    fn bytes(&self) -> u64 {
        match &self.content {
            Content::Mapped(map) => map.len() as u64,
            Content::Remote(remote) => remote.file.len(),
        }
    }

    /// Gives the bytes of a range to `see`.
    fn with<T>(&self, from: u64, bytes: usize, see: impl FnOnce(&[u8]) -> T) -> T {
        match &self.content {
            Content::Mapped(map) => see(&map[from as usize..][..bytes]),
            Content::Remote(remote) => {
                let mut read = vec![0; bytes];
                remote.read(from, &mut read);
                see(&read)
            }
        }
    }

    /// Reads everything, compares its hash with the header's and checks the document table.
    pub fn verify(&self) -> Result<()> {
        self.verify_with(&NEVER, &mut |_| ())
    }

    /// Whether it was read in full when it was opened.
    pub(crate) fn is_verified(&self) -> bool {
        matches!(&self.content, Content::Mapped(map) if map.len() < VERIFY_ON_OPEN_BYTES)
    }

    /// A hash of samples of tokens and documents, for what is too long to be read whenever it is opened.
    pub(crate) fn sampled(&self) -> u64 {
        let mut hasher = Xxh3::new();
        for (from, length) in sample_blocks(self.payload_bytes()) {
            self.with(HEADER_BYTES as u64 + from, length as usize, |block| hasher.update(block));
        }
        hasher.digest()
    }

    fn prompt(&self, index: u64) -> u64 {
        if self.header.prompts { self.entry(index, 16) & !GOES_ON } else { 0 }
    }

    fn goes_on(&self, index: u64) -> bool {
        match index {
            0 => self.header.continued,
            _ => self.header.prompts && self.entry(index, 16) & GOES_ON != 0,
        }
    }

    fn entry(&self, index: u64, field: usize) -> u64 {
        assert!(index < self.documents(), "document {index} is outside a table of {}", self.documents());
        let each = entry_bytes(self.header.prompts);
        let table = self.bytes() - self.header.documents * each as u64;
        let at = table + index * each as u64 + field as u64;
        let mut entry = [0; 8];
        match &self.content {
            Content::Mapped(map) => entry.copy_from_slice(&map[at as usize..][..8]),
            Content::Remote(remote) => remote.read(at, &mut entry),
        }
        u64::from_le_bytes(entry)
    }
}

impl TokenFile for Shard {
    fn path(&self) -> &Path {
        &self.path
    }

    fn len(&self) -> u64 {
        self.header.tokens
    }

    fn documents(&self) -> u64 {
        self.header.documents
    }

    fn document(&self, index: u64) -> Document {
        let (start, origin, prompt) = (self.start_of(index), Origin::unpack(self.entry(index, 8)), self.prompt(index));
        Document { start, origin, continued: self.goes_on(index), prompt }
    }

    fn start_of(&self, index: u64) -> u64 {
        self.entry(index, 0)
    }

    fn has_prompts(&self) -> bool {
        self.header.prompts
    }

    fn hash(&self) -> u64 {
        self.header.hash
    }

    fn payload_bytes(&self) -> u64 {
        self.bytes() - HEADER_BYTES as u64
    }

    fn verify_with(&self, stop: &AtomicBool, read: &mut dyn FnMut(u64)) -> Result<()> {
        let mut hasher = Xxh3::new();
        let (mut at, end) = (HEADER_BYTES as u64, self.bytes());
        while at < end {
            go_on(stop)?;
            let piece = (end - at).min(VERIFY_PIECE_BYTES as u64);
            if let Content::Remote(remote) = &self.content {
                remote.file.expect(at, 2 * piece);
            }
            self.with(at, piece as usize, |piece| hasher.update(piece));
            self.failure().map_or(Ok(()), Err)?;
            read(piece);
            at += piece;
        }
        let (expected, found) = (self.header.hash, hasher.digest());
        if found != expected {
            return Err(DataError::shard(&self.path, ShardFault::Hash { expected, found }));
        }
        let mut starts = (0..self.documents()).map(|index| self.start_of(index));
        let first = starts.next();
        let sound = match first {
            None => self.is_empty(),
            Some(first) => first == 0 && starts.try_fold(0, |last, next| (next > last).then_some(next)).is_some(),
        };
        let within = |index: u64| {
            let end = if index + 1 < self.documents() { self.start_of(index + 1) } else { self.len() };
            self.start_of(index) < end && self.prompt(index) <= end - self.start_of(index)
        };
        let sound = sound && (0..self.documents()).all(within);
        self.failure().map_or(Ok(()), Err)?;
        if sound {
            return Ok(());
        }
        Err(DataError::shard(&self.path, ShardFault::Documents))
    }

    fn copy(&self, offset: u64, tokens: &mut [u32]) {
        check_range(offset, tokens.len(), self.len());
        let width = self.header.width as usize;
        let from = HEADER_BYTES as u64 + offset * width as u64;
        self.with(from, tokens.len() * width, |source| self.header.width.read(source, tokens));
    }

    fn is_remote(&self) -> bool {
        matches!(self.content, Content::Remote(_))
    }

    fn expect(&self, offset: u64, count: u64) {
        let Content::Remote(remote) = &self.content else { return };
        let width = self.header.width as u64;
        remote.file.expect(HEADER_BYTES as u64 + offset * width, count * width);
    }

    fn failure(&self) -> Option<DataError> {
        let Content::Remote(remote) = &self.content else { return None };
        Some(remote.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()?.into())
    }
}

/// Bytes per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    One = 1,
    Two = 2,
    Four = 4,
}

impl Width {
    /// The smallest that holds tokens below `vocabulary`.
    pub(crate) fn of(vocabulary: u32) -> Self {
        match vocabulary {
            0..=0x100 => Width::One,
            0x101..=0x1_0000 => Width::Two,
            _ => Width::Four,
        }
    }

    /// Reads tokens of this width until `tokens` is full.
    pub(crate) fn read(self, source: &[u8], tokens: &mut [u32]) {
        match self {
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

    /// Appends tokens that fit.
    pub(crate) fn append(self, tokens: &[u32], bytes: &mut Vec<u8>) {
        match self {
            Width::One => bytes.extend(tokens.iter().map(|&token| token as u8)),
            Width::Two => bytes.extend(tokens.iter().flat_map(|&token| (token as u16).to_le_bytes())),
            Width::Four => bytes.extend(tokens.iter().flat_map(|&token| token.to_le_bytes())),
        }
    }
}

/// The part of the header that differs between shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) width: Width,
    pub(crate) tokens: u64,
    pub(crate) hash: u64,
    pub(crate) documents: u64,
    pub(crate) continued: bool,
    pub(crate) prompts: bool,
}

impl Header {
    pub(crate) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.width as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.tokens.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.hash.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.documents.to_le_bytes());
        bytes[40..44].copy_from_slice(&u32::from(self.continued).to_le_bytes());
        bytes[44..48].copy_from_slice(&u32::from(self.prompts).to_le_bytes());
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
        let documents = u64::from_le_bytes(field(bytes, 32));
        let flag = |at| match u32::from_le_bytes(field(bytes, at)) {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(ShardFault::Reserved),
        };
        let (continued, prompts) = (flag(40)?, flag(44)?);
        if bytes[48..].iter().any(|&byte| byte != 0) {
            return Err(ShardFault::Reserved);
        }
        Ok(Header { width, tokens, hash, documents, continued, prompts })
    }

    /// The length of a file with this header.
    fn file_bytes(self) -> Result<usize, ShardFault> {
        let bytes = |count: u64, each: usize| usize::try_from(count).ok()?.checked_mul(each);
        let tokens = bytes(self.tokens, self.width as usize).and_then(|tokens| tokens.checked_add(HEADER_BYTES));
        let tokens = tokens.ok_or(ShardFault::Count { tokens: self.tokens })?;
        bytes(self.documents, entry_bytes(self.prompts))
            .and_then(|table| table.checked_add(tokens))
            .ok_or(ShardFault::DocumentCount { documents: self.documents })
    }
}

fn field<const N: usize>(header: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    std::array::from_fn(|i| header[at + i])
}
