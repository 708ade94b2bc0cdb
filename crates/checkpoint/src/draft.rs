//! A checkpoint that several ranks write at once.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use lockstep_ir::DType;
use serde::{Deserialize, Serialize};

use crate::bytes::TensorBytes;
use crate::error::{CheckpointError, Result};
use crate::keep::Keep;
use crate::manifest::{FileEntry, IN_PARTS, IN_PARTS_WITH_BLOCKS, Manifest};
use crate::save::{About, TemporaryFolder, write_synced};
use crate::slice::Slice;
use crate::stored;
use crate::tensor_file::{Item, TensorFile, TensorPlace, rank_file_name};

/// What one rank has of a tensor.
#[derive(Debug, Clone)]
pub struct PartRef<'a> {
    /// The tensor's name, once in a group of a rank.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Dims of the whole tensor, outermost first.
    pub shape: Vec<usize>,
    /// Which elements these are.
    pub slices: Vec<Slice>,
    /// Their little-endian bytes in the order of the slices, in as many pieces as they lie in.
    pub data: Vec<TensorBytes<'a>>,
}

/// A checkpoint being written. It exists from [`publish`](Draft::publish) on; a draft that is dropped leaves nothing.
#[derive(Debug)]
pub struct Draft {
    dir: PathBuf,
    step: u64,
    temporary: TemporaryFolder,
    written: Mutex<Vec<Written>>,
}

/// A finished file.
#[derive(Debug, Serialize, Deserialize)]
struct Written {
    entry: FileEntry,
    group: String,
    places: BTreeMap<String, TensorPlace>,
}

impl Draft {
    /// Begins the checkpoint of `step` in `dir`. One writer at a time, as for [`save`](crate::save).
    pub fn begin(dir: &Path, step: u64) -> Result<Draft> {
        let temporary = TemporaryFolder::create(dir, step)?;
        Ok(Draft { dir: dir.to_owned(), step, temporary, written: Mutex::default() })
    }

    /// Where its files are until it is published. Other processes may write there too, see [`Draft::join`].
    pub fn folder(&self) -> &Path {
        &self.temporary.path
    }

    /// The draft of `step` in `dir` that another process has begun in `folder`. What is written here is
    /// [handed over](Draft::hand_over) to that process, which publishes it; dropping this one removes nothing.
    pub fn join(dir: &Path, step: u64, folder: &Path) -> Draft {
        let temporary = TemporaryFolder::of_another(folder);
        Draft { dir: dir.to_owned(), step, temporary, written: Mutex::default() }
    }

    /// Waits until the folder that another process has made is seen here.
    pub fn await_seen(&self) {
        self.temporary.await_seen();
    }

    /// What was written here, for the process that publishes.
    pub fn hand_over(self) -> Result<Vec<u8>> {
        let written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        serde_json::to_vec(&*written).map_err(|e| self.refused(e.to_string()))
    }

    /// Takes what another process has written to this draft's folder.
    pub fn take_over(&self, handed_over: &[u8]) -> Result<()> {
        let theirs: Vec<Written> = serde_json::from_slice(handed_over).map_err(|e| self.refused(e.to_string()))?;
        self.written.lock().unwrap_or_else(PoisonError::into_inner).extend(theirs);
        Ok(())
    }

    /// Writes what `rank` has of a group, and makes it durable; where it has nothing, there is no file. Ranks may write at
    /// once. Elements stream from their slices in chunks of at most 1 MiB, and `wrote` hears the bytes of each.
    pub fn write(&self, rank: usize, group: &str, parts: &[PartRef<'_>], wrote: &mut dyn FnMut(u64)) -> Result<()> {
        if parts.is_empty() {
            return Ok(());
        }
        let name = rank_file_name(group, rank)
            .ok_or_else(|| self.refused(format!("group name {group:?} is not made of letters, digits, `-` and `_`")))?;
        let item = |part: &PartRef<'_>| (part.name.clone(), place(part));
        let places = parts.iter().map(item).collect();
        let file = TensorFile::new(parts.iter().map(Item::from).collect())
            .map_err(|cause| self.refused(format!("group `{group}` of rank {rank}: {cause}")))?;
        let mut header = file.header_bytes();
        let mut beyond_header = |bytes: u64| {
            let of_header = header.min(bytes);
            header -= of_header;
            wrote(bytes - of_header);
        };
        self.await_seen();
        let xxh3_128 = write_synced(&self.temporary.path.join(&name), |to| file.write(to, &mut beyond_header))?;
        let entry = FileEntry { name, bytes: file.bytes(), xxh3_128 };
        let written = Written { entry, group: group.to_owned(), places };
        self.written.lock().unwrap_or_else(PoisonError::into_inner).push(written);
        Ok(())
    }

    /// Gives the checkpoint its name, if its parts make up every tensor, removes those that `keep` does not keep, and returns its
    /// path. `about` and `keep` are as for [`save`](crate::save).
    pub fn publish<'a>(mut self, about: impl Into<About<'a>>, keep: impl Into<Keep>) -> Result<PathBuf> {
        let written = self.written.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut written = std::mem::take(written);
        written.sort_by(|a, b| a.entry.name.cmp(&b.entry.name));
        let mut contents = Vec::with_capacity(written.len());
        let mut files = Vec::with_capacity(written.len());
        let mut format = IN_PARTS;
        for Written { entry, group, places } in &mut written {
            if places.values().any(|place| place.dtype.is_block()) {
                format = IN_PARTS_WITH_BLOCKS;
            }
            contents.push((group.as_str(), std::mem::take(places)));
            files.push(entry.clone());
        }
        stored::join(contents).map_err(|(file, cause)| self.refused(format!("{}: {cause}", files[file].name)))?;
        let About { state, attachments } = about.into();
        let attachments = self.temporary.attach(attachments)?;
        let manifest = Manifest { format, step: self.step, files, attachments, state: state.clone() };
        self.temporary.finish(&self.dir, &manifest, &keep.into())
    }

    fn refused(&self, cause: String) -> CheckpointError {
        CheckpointError::Refused { dir: self.dir.clone(), step: self.step, cause }
    }
}

impl<'a> From<&'a PartRef<'_>> for Item<'a> {
    fn from(part: &'a PartRef<'_>) -> Item<'a> {
        let PartRef { name, dtype, shape, slices, data } = part;
        Item { name, dtype: *dtype, shape, slices: slices.clone(), data: data.iter().collect() }
    }
}

/// The part as a reader will see it; where it stands in the file does not matter here.
fn place(part: &PartRef<'_>) -> TensorPlace {
    TensorPlace { dtype: part.dtype, shape: part.shape.clone(), slices: part.slices.clone(), range: 0..0 }
}
