//! Reading one checkpoint, verified in full before any of it is believed.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lockstep_ir::DType;
use memmap2::Mmap;
use xxhash_rust::xxh3::Xxh3;

use crate::error::{AtPath, CheckpointError, Result};
use crate::folder;
use crate::manifest::{self, FileEntry, Manifest, checksum, damaged, open_regular};
use crate::stored::{self, Piece, Stored};
use crate::tensor_file::{self, TensorPlace};

/// A verified checkpoint, its tensors mapped from disk, or held in memory. It stays readable if the folder is removed meanwhile.
#[derive(Debug)]
pub struct Loaded {
    /// The step it was saved at.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
    /// The state that its writer gave.
    pub state: serde_json::Value,
    files: Vec<FileBytes>,
    attachments: Vec<FileBytes>,
    groups: BTreeMap<String, BTreeMap<String, Stored>>,
    /// What has the bytes of its files, where they are in the memory of several processes.
    held: Option<Arc<dyn HeldByMany>>,
}

/// The files of a checkpoint in the memory of several processes. What is read of them is read by all of these together, in the same order.
pub trait HeldByMany: Debug + Send + Sync {
    /// The bytes of these ranges of files, in their order. After a failure any bytes: who reads asks for it at the end.
    fn read(&self, wanted: &[(usize, Range<usize>)]) -> Vec<Vec<u8>>;
}

/// A tensor of a [`Loaded`] checkpoint: whole, in however many files its elements lie.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// The type of its elements.
    pub dtype: DType,
    /// Its dims, outermost first.
    pub shape: &'a [usize],
    pieces: &'a [Piece],
    files: &'a [FileBytes],
    held: Option<&'a dyn HeldByMany>,
}

/// A file of a checkpoint.
#[derive(Debug)]
pub(crate) struct FileBytes {
    pub(crate) name: String,
    pub(crate) bytes: Bytes,
}

/// Where the bytes of a file are.
#[derive(Debug)]
pub(crate) enum Bytes {
    Mapped(Mmap),
    Held(Vec<u8>),
    /// Those who hold it are asked.
    Elsewhere,
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Held(bytes) => bytes,
            Bytes::Elsewhere => &[],
        }
    }
}

impl<'a> TensorView<'a> {
    /// Its elements: row-major, little-endian bytes at any alignment. Borrowed where one file has them in order.
    pub fn bytes(&self) -> Cow<'a, [u8]> {
        match self.pieces {
            [piece] if piece.slices.len() <= 1 => self.contents().swap_remove(0),
            pieces => {
                let mut bytes = vec![0; pieces.iter().map(|piece| piece.range.len()).sum()];
                self.copy_to(&mut bytes);
                Cow::Owned(bytes)
            }
        }
    }

    /// Copies its elements to `bytes`, which must be as long as they are.
    pub fn copy_to(&self, bytes: &mut [u8]) {
        let width = self.dtype.bytes();
        for (piece, contents) in self.pieces.iter().zip(self.contents()) {
            let mut from = &contents[..];
            for slice in &piece.slices {
                for start in slice.starts() {
                    let (run, rest) = from.split_at(slice.len * width);
                    bytes[start * width..][..run.len()].copy_from_slice(run);
                    from = rest;
                }
            }
        }
    }

    /// Copies the elements from `start` on to `bytes`, which must not reach beyond the last.
    pub(crate) fn copy_range(&self, start: usize, bytes: &mut [u8]) {
        let width = self.dtype.bytes();
        let end = start + bytes.len() / width;
        for (piece, all) in self.pieces.iter().zip(self.contents()) {
            let mut before = 0;
            for slice in &piece.slices {
                let first = start.saturating_sub(slice.start) / slice.stride;
                for n in first..slice.count {
                    let run = slice.start + n * slice.stride;
                    let (from, to) = (run.max(start), (run + slice.len).min(end));
                    if run >= end {
                        break;
                    }
                    if from < to {
                        let at = (before + n * slice.len + from - run) * width;
                        let into = (from - start) * width;
                        bytes[into..][..(to - from) * width].copy_from_slice(&all[at..][..(to - from) * width]);
                    }
                }
                before += slice.len * slice.count;
            }
        }
    }

    /// The name of the file with its first element, for messages.
    pub fn file(&self) -> &'a str {
        self.pieces.first().map_or("", |piece| &self.files[piece.file].name)
    }

    /// The bytes of its pieces.
    fn contents(&self) -> Vec<Cow<'a, [u8]>> {
        match self.held {
            Some(held) => {
                let wanted: Vec<_> = self.pieces.iter().map(|piece| (piece.file, piece.range.clone())).collect();
                held.read(&wanted).into_iter().map(Cow::Owned).collect()
            }
            None => {
                let of = |piece: &Piece| Cow::Borrowed(&self.files[piece.file].bytes[piece.range.clone()]);
                self.pieces.iter().map(of).collect()
            }
        }
    }
}

impl Loaded {
    /// A checkpoint of these files and attachments, whose tensors were found to be whole.
    pub(crate) fn assembled(
        step: u64,
        path: PathBuf,
        state: serde_json::Value,
        (files, attachments): (Vec<FileBytes>, Vec<FileBytes>),
        groups: BTreeMap<String, BTreeMap<String, Stored>>,
    ) -> Loaded {
        Loaded { step, path, state, files, attachments, groups, held: None }
    }

    /// With those who have the bytes of its files.
    pub(crate) fn held_by(self, held: Arc<dyn HeldByMany>) -> Loaded {
        Loaded { held: Some(held), ..self }
    }

    /// Whether it is no folder: its files are in memory.
    pub fn is_in_memory(&self) -> bool {
        self.held.is_some()
    }

    /// The tensor `name` of `group`.
    pub fn tensor(&self, group: &str, name: &str) -> Result<TensorView<'_>> {
        let tensors = self.group(group)?;
        let Some(Stored { dtype, shape, pieces }) = tensors.get(name) else {
            let hint = format!("group `{group}` has {} tensors of other names", tensors.len());
            return Err(self.absent(format!("tensor `{name}` in group `{group}`"), hint));
        };
        Ok(TensorView { dtype: *dtype, shape, pieces, files: &self.files, held: self.held.as_deref() })
    }

    /// Whether `group` is there and has a tensor of this name.
    pub fn has(&self, group: &str, name: &str) -> bool {
        self.groups.get(group).is_some_and(|tensors| tensors.contains_key(name))
    }

    /// The bytes of a file that was saved with it, if it has one of this name.
    pub fn attachment(&self, name: &str) -> Option<&[u8]> {
        self.attachments.iter().find(|file| file.name == name).map(|file| &file.bytes[..])
    }

    /// The names of the tensors of `group`, ascending.
    pub fn names(&self, group: &str) -> Result<Vec<&str>> {
        Ok(self.group(group)?.keys().map(String::as_str).collect())
    }

    fn group(&self, group: &str) -> Result<&BTreeMap<String, Stored>> {
        self.groups.get(group).ok_or_else(|| {
            let present: Vec<_> = self.groups.keys().map(String::as_str).collect();
            self.absent(format!("group `{group}`"), format!("its groups are: {}", present.join(", ")))
        })
    }

    fn absent(&self, what: String, hint: String) -> CheckpointError {
        CheckpointError::Absent { path: self.path.clone(), what, hint }
    }
}

/// Opens the checkpoint in the folder `path`, whatever the folder is called, and verifies all of it: every length and
/// checksum, every header, and that the parts of every tensor make it up.
pub fn open(path: &Path) -> Result<Loaded> {
    fs::read_dir(path).at("open", path)?;
    let manifest = Manifest::read(path)?;
    let named = path.file_name().and_then(|name| folder::parse_step_name(name.to_str()?));
    if named.is_some_and(|step| step != manifest.step) {
        return Err(damaged(path, manifest::NAME, format!("it belongs to step {}", manifest.step)));
    }
    let mut files = Vec::with_capacity(manifest.files.len());
    let mut contents = Vec::with_capacity(manifest.files.len());
    for entry in &manifest.files {
        // `Manifest::read` lets no other names pass.
        let Some(group) = manifest.group_of(entry) else { continue };
        let (file, places) = open_file(path, entry)?;
        files.push(file);
        contents.push((group, places));
    }
    let attachments = manifest.attachments.iter().map(|entry| open_mapped(path, entry)).collect::<Result<_, _>>()?;
    let groups = stored::join(contents).map_err(|(file, cause)| damaged(path, &files[file].name, cause))?;
    Ok(Loaded::assembled(manifest.step, path.to_owned(), manifest.state, (files, attachments), groups))
}

/// As [`open`], of a checkpoint that another process has found: it is waited for where a network file system shows it here later.
pub fn open_found_by_another(path: &Path) -> Result<Loaded> {
    folder::await_seen(path);
    open(path)
}

fn open_file(folder: &Path, entry: &FileEntry) -> Result<(FileBytes, BTreeMap<String, TensorPlace>)> {
    let file = open_mapped(folder, entry)?;
    let places = tensor_file::read_header(&file.bytes).map_err(|cause| damaged(folder, &entry.name, cause))?;
    Ok((file, places))
}

/// A file whose length and checksum are those of its entry.
fn open_mapped(folder: &Path, entry: &FileEntry) -> Result<FileBytes> {
    let (mut file, bytes) = open_regular(folder, &entry.name)?;
    let wrong = |cause: String| damaged(folder, &entry.name, cause);
    if bytes != entry.bytes {
        return Err(wrong(format!("{bytes} bytes instead of {}", entry.bytes)));
    }
    let path = folder.join(&entry.name);
    if hash(&mut file, &path)? != entry.xxh3_128 {
        return Err(wrong("checksum differs".to_owned()));
    }
    let map = map(&file).at("map", &path)?;
    Ok(FileBytes { name: entry.name.clone(), bytes: Bytes::Mapped(map) })
}

/// Reads rather than maps: a disk error is then an error, not a signal.
fn hash(file: &mut File, path: &Path) -> Result<String> {
    let mut hasher = Xxh3::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(checksum(hasher.digest128())),
            Ok(count) => hasher.update(&buffer[..count]),
            Err(cause) if cause.kind() == ErrorKind::Interrupted => {}
            Err(cause) => return Err(cause).at("read", path),
        }
    }
}

#[allow(unsafe_code)]
fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the map stays valid as long as nobody writes to or truncates the file. No file of a checkpoint is ever
    // opened for writing after its folder was renamed into place, and removing one keeps the bytes of its maps.
    unsafe { Mmap::map(file) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{IN_PARTS, WHOLE};
    use lockstep_ir::Hint;
    use xxhash_rust::xxh3::xxh3_128;

    /// Opens a checkpoint of these files. A hostile writer knows the checksums: they all fit.
    fn open_files(format: u64, files: &[(&str, Vec<u8>)]) -> Result<Loaded, String> {
        let folder = tempfile::tempdir().unwrap();
        let mut entries = Vec::new();
        for (name, bytes) in files {
            fs::write(folder.path().join(name), bytes).unwrap();
            let xxh3_128 = checksum(xxh3_128(bytes));
            entries.push(FileEntry { name: (*name).to_owned(), bytes: bytes.len() as u64, xxh3_128 });
        }
        let manifest = Manifest { format, step: 1, files: entries, attachments: Vec::new(), state: ().into() };
        fs::write(folder.path().join(manifest::NAME), manifest.seal().unwrap()).unwrap();
        open(folder.path()).map_err(|error| error.with_hint())
    }

    #[test]
    fn a_hostile_header_under_fitting_checksums_is_refused() {
        let sound = br#"{"a":{"dtype":"U32","shape":[1],"data_offsets":[0,4]}}"#;
        let length = (sound.len() as u64).to_le_bytes();
        let cases: [(Vec<u8>, &str); 4] = [
            (Vec::new(), "too short"),
            (u64::MAX.to_le_bytes().to_vec(), "length is out of range"),
            ([&length, sound.as_slice(), &[0; 3]].concat(), "describes 4 bytes, 3 follow"),
            ([&length, sound.as_slice(), &[0; 5]].concat(), "describes 4 bytes, 5 follow"),
        ];
        for (bytes, expected) in cases {
            let error = open_files(WHOLE, &[("model.safetensors", bytes)]).unwrap_err();
            assert!(error.contains("model.safetensors") && error.contains(expected), "{error}");
        }
    }

    /// A file whose tensor `a` is, or has these slices of, a tensor of this shape; every element is its own position.
    fn part(dtype: &str, shape: &[usize], slices: &[[usize; 4]]) -> Vec<u8> {
        let positions = slices.iter().flat_map(|&[start, len, stride, count]| {
            (0..count).flat_map(move |n| (0..len).map(move |i| (start + n * stride + i) as u32))
        });
        let data: Vec<u8> = positions.flat_map(u32::to_le_bytes).collect();
        let parts = serde_json::json!({ "a": { "shape": shape, "slices": slices } }).to_string();
        let header = serde_json::json!({
            "__metadata__": { "lockstep.parts": parts },
            "a": { "dtype": dtype, "shape": [data.len() / 4], "data_offsets": [0, data.len()] },
        })
        .to_string();
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
    }

    #[test]
    fn parts_are_read_as_the_whole_tensor() {
        let left = part("U32", &[3, 4], &[[0, 2, 4, 3]]);
        let right = part("U32", &[3, 4], &[[10, 2, 2, 1], [2, 2, 4, 2]]);
        let files = [("m-00000.safetensors", left), ("m-00007.safetensors", right)];
        let loaded = open_files(IN_PARTS, &files).unwrap();
        let view = loaded.tensor("m", "a").unwrap();
        let expected: Vec<u8> = (0..12u32).flat_map(u32::to_le_bytes).collect();
        assert_eq!((view.dtype, view.shape, &*view.bytes()), (DType::U32, &[3, 4][..], &*expected));
        assert_eq!((loaded.names("m").unwrap(), view.file()), (vec!["a"], "m-00000.safetensors"));
        for (start, end) in (0..12).flat_map(|start| (start..=12).map(move |end| (start, end))) {
            let mut some = vec![0; (end - start) * 4];
            view.copy_range(start, &mut some);
            assert_eq!(some, expected[start * 4..end * 4], "{start}..{end}");
        }
    }

    #[test]
    fn parts_that_do_not_make_up_a_tensor_are_refused_with_its_name_and_a_file() {
        let left = || part("U32", &[3, 4], &[[0, 2, 4, 3]]);
        let check = |right: Vec<u8>, file: &str, expected: &str| {
            let files = [("m-00000.safetensors", left()), ("m-00001.safetensors", right)];
            let error = open_files(IN_PARTS, &files).unwrap_err();
            assert!(error.contains(&format!("({file}: tensor `a`")) && error.contains(expected), "{error}");
            assert_eq!(error.matches("\nhint: ").count(), 1, "{error}");
        };
        let (first, second) = ("m-00000.safetensors", "m-00001.safetensors");
        check(part("U32", &[3, 4], &[[2, 2, 4, 2]]), first, "its files have 10 of 12 elements");
        check(part("U32", &[3, 4], &[[1, 2, 4, 3]]), second, "element 1 is there a second time");
        check(part("U32", &[3, 4], &[[0, 12, 12, 1]]), second, "element 0 is there a second time");
        check(part("U32", &[3, 4], &[[2, 2, 4, 3], [3, 1, 1, 1]]), second, "element 3 is there a second time");
        check(part("U32", &[4, 3], &[[2, 2, 4, 3]]), second, "u32 [4, 3] here and u32 [3, 4] in another file");
        check(part("F32", &[3, 4], &[[2, 2, 4, 3]]), second, "f32 [3, 4] here and u32 [3, 4] in another file");
        check(part("U32", &[3, 4], &[[2, 2, 4, 4]]), second, "[2, 2, 4, 4] is no slice of 12 elements");
        // A tensor that would not fit any memory is refused before any is taken.
        let huge = part("U32", &[1 << 40, 1 << 20], &[[0, 4, 4, 1]]);
        let error = open_files(IN_PARTS, &[("m-00000.safetensors", huge)]).unwrap_err();
        assert!(error.contains("its files have 4 of 1152921504606846976 elements"), "{error}");
    }
}
