//! Writing Megatron's `.bin` and `.idx` files.

use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use crate::indexed::{HEADER_BYTES, MAGIC, VERSION};
use crate::new_file::{NewFile, sync_folder};
use crate::shard::Width;
use crate::stop::go_on;
use crate::{DataError, Document, Result, TokenStream};

/// Tokens that are written between two looks at whether to go on.
const PIECE: u64 = 1 << 20;

/// Vocabularies from this size on have tokens of four bytes, as Megatron itself chooses.
const LARGE_VOCABULARY: u32 = 65_500;

/// What [`export`] wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportedTokens {
    /// The `.idx`; the `.bin` is beside it.
    pub index: PathBuf,
    /// Documents, each one sequence.
    pub documents: u64,
    /// Tokens.
    pub tokens: u64,
    /// Bytes of both files.
    pub bytes: u64,
}

/// Writes the tokens of a stream as `folder/name.bin` and `folder/name.idx`, as Megatron's own tool would: a document is a sequence,
/// the tokens have 2 bytes (uint16), or 4 (int32) where the vocabulary has 65,500 or more. What was there under these names is
/// replaced. `progress` hears how many tokens are written; `stop` ends it with [`DataError::Interrupted`].
pub fn export(
    tokens: &TokenStream,
    vocabulary: u32,
    folder: &Path,
    name: &str,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(u64),
) -> Result<ExportedTokens> {
    fs::create_dir_all(folder).map_err(|cause| DataError::unwritable(folder, cause))?;
    let (width, code) = if vocabulary < LARGE_VOCABULARY { (Width::Two, 8u8) } else { (Width::Four, 4) };
    let mut bin = Out::create(folder, &format!("{name}.bin"))?;
    let (mut ids, mut bytes) = (vec![0; PIECE.min(tokens.len()) as usize], Vec::new());
    let mut at = 0;
    while at < tokens.len() {
        go_on(stop)?;
        let ids = &mut ids[..PIECE.min(tokens.len() - at) as usize];
        tokens.expect(at, 2 * PIECE);
        tokens.copy(at, ids);
        tokens.require_read()?;
        bytes.clear();
        width.append(ids, &mut bytes);
        bin.write(&bytes)?;
        at += ids.len() as u64;
        progress(at);
    }

    let mut documents = 0u64;
    each_start(tokens, |_| documents += 1);
    let mut index = Out::create(folder, &format!("{name}.idx"))?;
    index.write(&MAGIC)?;
    index.write(&VERSION.to_le_bytes())?;
    index.write(&[code])?;
    index.write(&documents.to_le_bytes())?;
    index.write(&(documents + 1).to_le_bytes())?;
    let (mut result, mut last) = (Ok(()), None);
    let length = |last: Option<u64>, next: u64, index: &mut Out| {
        let Some(last) = last else { return Ok(()) };
        let length = i32::try_from(next - last).map_err(|_| {
            let problem =
                format!("the document from token {last} on has {} tokens, more than the format holds", next - last);
            DataError::source(tokens.path(), problem, "cut the document into several before it is prepared")
        })?;
        index.write(&length.to_le_bytes())
    };
    each_start(tokens, |start| {
        if result.is_ok() {
            result = length(last, start, &mut index);
        }
        last = Some(start);
    });
    result.and_then(|()| length(last, tokens.len(), &mut index))?;
    let mut result = Ok(());
    each_start(tokens, |start| {
        if result.is_ok() {
            result = index.write(&(start * width as u64).to_le_bytes());
        }
    });
    result?;
    for document in 0..=documents {
        index.write(&document.to_le_bytes())?;
    }
    tokens.require_read()?;
    // The index is what a pair is known by, so it comes last.
    bin.publish()?;
    let path = index.publish()?;
    sync_folder(folder)?;
    let bytes = tokens.len() * width as u64 + HEADER_BYTES as u64 + 12 * documents + 8 * (documents + 1);
    Ok(ExportedTokens { index: path, documents, tokens: tokens.len(), bytes })
}

/// Calls `visit` with the first token of every document; the stream begins with one.
fn each_start(tokens: &TokenStream, mut visit: impl FnMut(u64)) {
    if !tokens.is_empty() {
        visit(0);
        tokens.documents_beginning_in(1, tokens.len(), |Document { start, .. }| visit(start));
    }
}

struct Out(BufWriter<NewFile>);

impl Out {
    fn create(folder: &Path, name: &str) -> Result<Self> {
        Ok(Out(BufWriter::with_capacity(1 << 20, NewFile::create(folder, name)?)))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.0.write_all(bytes).map_err(|cause| DataError::unwritable(self.0.get_ref().target(), cause))
    }

    fn publish(self) -> Result<PathBuf> {
        let target = self.0.get_ref().target().to_owned();
        let new = self.0.into_inner().map_err(|error| DataError::unwritable(&target, error.into_error()))?;
        new.sync()?;
        new.publish()?;
        Ok(target)
    }
}
