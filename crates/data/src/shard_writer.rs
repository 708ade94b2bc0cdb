//! Writing shards.

use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::new_file::NewFile;
use crate::output::hexadecimal;
use crate::shard::{GOES_ON, HEADER_BYTES, Header, Width};
use crate::{DataError, Origin, Result};

const BUFFER_BYTES: usize = 1 << 20;

/// What one shard holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardSummary {
    /// The shard's name in its folder.
    pub file: String,
    /// Documents that begin in it.
    pub documents: u64,
    /// Bytes of text, without the EOS tokens.
    pub bytes: u64,
    /// Tokens, the EOS tokens among them.
    pub tokens: u64,
    /// The hash of tokens and documents. In JSON it is 16 hexadecimal digits, since many JSON readers round large numbers.
    #[serde(with = "hexadecimal")]
    pub xxh3: u64,
    /// The hash of samples of them, in the same form: what a shard over 64 MiB is known by when it is opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampled: Option<String>,
}

/// A shard under way. Dropped before it is published, it leaves nothing behind.
pub(crate) struct ShardWriter {
    out: BufWriter<NewFile>,
    name: String,
    width: Width,
    hasher: Box<Xxh3>,
    bytes: u64,
    tokens: u64,
    /// The document table so far, as it will stand in the file.
    table: Vec<u8>,
    entries: u64,
    /// Documents that begin in it.
    documents: u64,
    continued: bool,
    /// Whether the table says how long prompts are.
    prompts: bool,
}

impl ShardWriter {
    /// Starts the shard `folder/name`.
    pub(crate) fn create(folder: &Path, name: &str, width: Width, prompts: bool) -> Result<Self> {
        let out = BufWriter::with_capacity(BUFFER_BYTES, NewFile::create(folder, name)?);
        let mut writer = ShardWriter {
            out,
            name: name.to_owned(),
            width,
            hasher: Box::default(),
            bytes: 0,
            tokens: 0,
            table: Vec::new(),
            entries: 0,
            documents: 0,
            continued: false,
            prompts,
        };
        writer.write(&[0; HEADER_BYTES])?;
        Ok(writer)
    }

    /// Begins a document, with this many tokens of a prompt, or goes on with one (`continued`): with the first tokens of a shard, or
    /// with another prompt.
    pub(crate) fn document(&mut self, origin: Origin, continued: bool, prompt: u64) {
        debug_assert!(
            !continued || self.tokens == 0 || self.prompts,
            "only the first document of a shard is continued"
        );
        let goes_on = if continued && self.tokens > 0 { GOES_ON } else { 0 };
        self.continued |= continued && self.tokens == 0;
        self.entries += 1;
        self.documents += u64::from(!continued);
        self.table.extend(self.tokens.to_le_bytes());
        self.table.extend(origin.pack().to_le_bytes());
        if self.prompts {
            self.table.extend((prompt | goes_on).to_le_bytes());
        }
    }

    /// Bytes per token.
    pub(crate) fn width(&self) -> Width {
        self.width
    }

    /// Appends tokens, as bytes of the shard's width, that `text_bytes` bytes of text became.
    pub(crate) fn tokens(&mut self, tokens: &[u8], text_bytes: u64) -> Result<()> {
        self.hasher.update(tokens);
        self.tokens += (tokens.len() / self.width as usize) as u64;
        self.bytes += text_bytes;
        self.write(tokens)
    }

    /// Whether nothing was written yet.
    pub(crate) fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// Bytes that the shard takes so far.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.tokens * self.width as u64 + self.table.len() as u64
    }

    /// Bytes that wait in memory for the end.
    pub(crate) fn table_bytes(&self) -> u64 {
        self.table.len() as u64
    }

    /// Writes table and header and brings everything to the disk, still under the temporary name.
    pub(crate) fn finish(mut self) -> Result<(NewFile, ShardSummary)> {
        let table = std::mem::take(&mut self.table);
        self.hasher.update(&table);
        self.write(&table)?;
        let header = Header {
            width: self.width,
            tokens: self.tokens,
            hash: self.hasher.digest(),
            documents: self.entries,
            continued: self.continued,
            prompts: self.prompts,
        };
        let summary = ShardSummary {
            file: self.name,
            documents: self.documents,
            bytes: self.bytes,
            tokens: self.tokens,
            xxh3: header.hash,
            sampled: None,
        };
        let target = self.out.get_ref().target().to_owned();
        let unwritable = |cause| DataError::unwritable(&target, cause);

        let mut new = self.out.into_inner().map_err(|error| unwritable(error.into_error()))?;
        new.file.seek(SeekFrom::Start(0)).map_err(unwritable)?;
        new.write_all(&header.to_bytes()).map_err(unwritable)?;
        new.sync()?;
        Ok((new, summary))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(|cause| DataError::unwritable(self.out.get_ref().target(), cause))
    }
}
