//! Writing shards of byte tokens.

use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

use crate::new_file::NewFile;
use crate::shard::{HEADER_BYTES, Header, Width};
use crate::{DataError, SEPARATOR, SplitSummary};

const BUFFER_BYTES: usize = 1 << 20;

/// A shard of byte tokens under way. Dropped before it is published, it leaves nothing behind.
pub(crate) struct ShardWriter {
    out: BufWriter<NewFile>,
    hasher: Box<Xxh3>,
    bytes: u64,
    documents: u64,
}

impl ShardWriter {
    /// Starts the shard `folder/name`.
    pub(crate) fn create(folder: &Path, name: &str) -> Result<Self, DataError> {
        let out = BufWriter::with_capacity(BUFFER_BYTES, NewFile::create(folder, name)?);
        let mut writer = ShardWriter { out, hasher: Box::default(), bytes: 0, documents: 0 };
        writer.write(&[0; HEADER_BYTES])?;
        Ok(writer)
    }

    /// Appends text to the document under way.
    pub(crate) fn text(&mut self, text: &[u8]) -> Result<(), DataError> {
        self.hasher.update(text);
        self.bytes += text.len() as u64;
        self.write(text)
    }

    /// Ends the document under way with a separator.
    pub(crate) fn end_document(&mut self) -> Result<(), DataError> {
        self.hasher.update(&[SEPARATOR]);
        self.documents += 1;
        self.write(&[SEPARATOR])
    }

    /// Writes the header and brings everything to the disk, still under the temporary name.
    pub(crate) fn finish(self) -> Result<(NewFile, SplitSummary), DataError> {
        let summary = SplitSummary {
            documents: self.documents,
            bytes: self.bytes,
            tokens: self.bytes + self.documents,
            xxh3: self.hasher.digest(),
        };
        let header = Header { width: Width::One, tokens: summary.tokens, hash: summary.xxh3 };
        let target = self.out.get_ref().target().to_owned();
        let unwritable = |cause| DataError::unwritable(&target, cause);

        let mut new = self.out.into_inner().map_err(|error| unwritable(error.into_error()))?;
        new.file.seek(SeekFrom::Start(0)).map_err(unwritable)?;
        new.write_all(&header.to_bytes()).map_err(unwritable)?;
        new.sync()?;
        Ok((new, summary))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        self.out.write_all(bytes).map_err(|cause| DataError::unwritable(self.out.get_ref().target(), cause))
    }
}
