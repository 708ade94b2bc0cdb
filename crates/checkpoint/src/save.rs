//! Writing a checkpoint so that it is either there in full or not there.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use lockstep_ir::DType;
use xxhash_rust::xxh3::xxh3_128;

use crate::bytes::TensorBytes;
use crate::error::{AtPath, CheckpointError, Result};
use crate::folder;
use crate::keep::{Keep, prune};
use crate::manifest::{self, FileEntry, Manifest, WHOLE, WHOLE_WITH_BLOCKS};
use crate::slice::Slice;
use crate::tensor_file::{self, Item, TensorFile};

/// A tensor to be saved: row-major, little-endian bytes.
#[derive(Debug, Clone)]
pub struct TensorRef<'a> {
    /// Its name, once in a group.
    pub name: String,
    /// The type of its elements. [`DType::Fixed64`] is stored as safetensors' `I64`, blocks of 8 bits as `I8` and `U8` with
    /// 260 to a block, the others under their own name.
    pub dtype: DType,
    /// Its dims, outermost first; a scalar has none.
    pub shape: Vec<usize>,
    /// Its elements.
    pub data: TensorBytes<'a>,
}

/// Tensors that share a file, `<name>.safetensors`.
#[derive(Debug, Clone)]
pub struct TensorGroup<'a> {
    /// Letters, digits, `-` and `_`.
    pub name: &'a str,
    /// In any order.
    pub tensors: Vec<TensorRef<'a>>,
}

/// What a checkpoint holds besides tensors.
#[derive(Debug, Clone, Copy)]
pub struct About<'a> {
    /// What its writer wants to know of it.
    pub state: &'a serde_json::Value,
    /// Files with their names, `tokenizer.json` say.
    pub attachments: &'a [(&'a str, &'a [u8])],
}

impl<'a> From<&'a serde_json::Value> for About<'a> {
    fn from(state: &'a serde_json::Value) -> Self {
        Self { state, attachments: &[] }
    }
}

/// Writes the checkpoint of `step` into `dir`, removes those that `keep` does not keep, and returns the new one's path.
///
/// The checkpoint appears under its name only when every byte of it is on the disk; one of the same step is replaced.
/// Tensors stream from where they are in chunks of at most 1 MiB, and `progress` hears the bytes written so far and the
/// bytes in all after each. After an error `dir` holds the checkpoints it held before.
///
/// The checkpoint just written always stays, so a `keep` of 0 acts as 1. Only checkpoints with a sound manifest and
/// files of the right length count towards `keep` and are ever removed; their contents are not read again for it.
///
/// One writer at a time: temporary folders in `dir` are taken for those of killed writers and removed. A kill in the
/// instant between the two renames of a *replacement* leaves neither of that step's checkpoints, and others untouched.
pub fn save<'a>(
    dir: &Path,
    step: u64,
    groups: &[TensorGroup<'_>],
    about: impl Into<About<'a>>,
    keep: impl Into<Keep>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<PathBuf> {
    let refused = |cause| CheckpointError::Refused { dir: dir.to_owned(), step, cause };
    let About { state, attachments } = about.into();
    let blocks = groups.iter().flat_map(|group| &group.tensors).any(|tensor| tensor.dtype.is_block());
    let format = if blocks { WHOLE_WITH_BLOCKS } else { WHOLE };
    let mut manifest = Manifest { format, step, files: Vec::new(), attachments: Vec::new(), state: state.clone() };
    manifest.seal().map_err(refused)?;
    let files = lay_out(groups).map_err(refused)?;

    let temporary = TemporaryFolder::create(dir, step)?;

    let total = files.iter().map(|(_, file)| file.bytes()).sum();
    let mut done = 0;
    for (name, file) in &files {
        let path = temporary.path.join(name);
        let mut wrote = |bytes| {
            done += bytes;
            progress(done, total);
        };
        let xxh3_128 = write_synced(&path, |to| file.write(to, &mut wrote))?;
        manifest.files.push(FileEntry { name: name.clone(), bytes: file.bytes(), xxh3_128 });
    }
    manifest.attachments = temporary.attach(attachments)?;
    temporary.finish(dir, &manifest, &keep.into())
}

/// Every group's file by ascending name.
fn lay_out<'a>(groups: &'a [TensorGroup<'a>]) -> Result<Vec<(String, TensorFile<'a>)>, String> {
    let mut files = Vec::with_capacity(groups.len());
    for group in groups {
        let name = tensor_file::file_name(group.name)
            .ok_or_else(|| format!("group name {:?} is not made of letters, digits, `-` and `_`", group.name))?;
        let file = TensorFile::new(group.tensors.iter().map(whole).collect())
            .map_err(|cause| format!("group `{}`: {cause}", group.name))?;
        files.push((name, file));
    }
    files.sort_by(|a, b| a.0.cmp(&b.0));
    match files.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        Some(pair) => Err(format!("two groups would be written to {}", pair[0].0)),
        None => Ok(files),
    }
}

fn whole<'a>(tensor: &'a TensorRef<'_>) -> Item<'a> {
    let TensorRef { name, dtype, shape, data } = tensor;
    // A shape that is too large is refused where the file is laid out.
    let elements = shape.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim));
    Item { name, dtype: *dtype, shape, slices: Slice::whole(elements.unwrap_or(0)), data: vec![data] }
}

pub(crate) fn write_synced<T>(path: &Path, write: impl FnOnce(&mut File) -> io::Result<T>) -> Result<T> {
    let mut file = File::create_new(path).at("create", path)?;
    let result = write(&mut file).at("write", path)?;
    file.sync_all().at("sync", path)?;
    Ok(result)
}

/// Whether a checkpoint has a sound manifest and files of the right length; their contents are not read.
pub fn looks_whole(path: &Path) -> bool {
    let right_length = |file: &FileEntry| fs::metadata(path.join(&file.name)).is_ok_and(|m| m.len() == file.bytes);
    Manifest::read(path).is_ok_and(|m| m.files.iter().chain(&m.attachments).all(right_length))
}

/// A folder that is gone when this value is, unless it was published or is another process's.
#[derive(Debug)]
pub(crate) struct TemporaryFolder {
    pub(crate) path: PathBuf,
    stays: bool,
}

impl TemporaryFolder {
    /// Makes the folder in `dir`, which is made too where it is missing, and removes what killed writers left there.
    pub(crate) fn create(dir: &Path, step: u64) -> Result<TemporaryFolder> {
        folder::create(dir)?;
        folder::sweep(dir)?;
        let path = folder::temporary_path(dir, step);
        fs::create_dir(&path).at("create", &path)?;
        Ok(TemporaryFolder { path, stays: false })
    }

    /// One that another process has made, and publishes.
    pub(crate) fn of_another(path: &Path) -> TemporaryFolder {
        TemporaryFolder { path: path.to_owned(), stays: true }
    }

    /// Waits until a folder that another process has made is seen here.
    pub(crate) fn await_seen(&self) {
        if self.stays {
            folder::await_seen(&self.path);
        }
    }

    /// Writes files that hold no tensors, and makes them durable.
    pub(crate) fn attach(&self, attachments: &[(&str, &[u8])]) -> Result<Vec<FileEntry>> {
        let mut entries = Vec::with_capacity(attachments.len());
        for (name, bytes) in attachments {
            write_synced(&self.path.join(name), |to| to.write_all(bytes))?;
            let xxh3_128 = manifest::checksum(xxh3_128(bytes));
            entries.push(FileEntry { name: (*name).to_owned(), bytes: bytes.len() as u64, xxh3_128 });
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// Adds the manifest to the files, gives the folder its name and removes the checkpoints that `keep` does not keep.
    pub(crate) fn finish(self, dir: &Path, manifest: &Manifest, keep: &Keep) -> Result<PathBuf> {
        let step = manifest.step;
        let refused = |cause| CheckpointError::Refused { dir: dir.to_owned(), step, cause };
        let sealed = manifest.seal().map_err(refused)?;
        write_synced(&self.path.join(manifest::NAME), |to| to.write_all(&sealed))?;
        folder::sync(&self.path)?;
        let path = self.publish(dir, step)?;
        prune(dir, Some(step), keep)?;
        Ok(path)
    }

    /// Gives the folder the name of `step`'s checkpoint, in the place of an older one.
    fn publish(mut self, dir: &Path, step: u64) -> Result<PathBuf> {
        let path = dir.join(folder::step_name(step));
        let replaced = folder::set_aside(dir, step)?;
        if let Err(cause) = fs::rename(&self.path, &path) {
            if let Some(replaced) = replaced {
                fs::rename(&replaced, &path).at("restore", &path)?;
            }
            return Err(cause).at("rename", &self.path);
        }
        self.stays = true;
        folder::sync(dir)?;
        if let Some(replaced) = replaced {
            folder::discard(&replaced);
        }
        Ok(path)
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        if !self.stays {
            folder::discard(&self.path);
        }
    }
}
