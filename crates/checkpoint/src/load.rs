//! Reading one checkpoint, verified in full before any of it is believed.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use lockstep_ir::DType;
use memmap2::Mmap;
use xxhash_rust::xxh3::Xxh3;

use crate::error::{AtPath, CheckpointError};
use crate::folder;
use crate::manifest::{self, FileEntry, Manifest, checksum, damaged, open_regular};
use crate::tensor_file::{self, Place};

/// A verified checkpoint, its tensors mapped from disk. It stays readable if the folder is removed meanwhile.
#[derive(Debug)]
pub struct Loaded {
    /// The step it was saved at.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
    /// The state that its writer gave.
    pub state: serde_json::Value,
    groups: BTreeMap<String, MappedFile>,
}

/// A tensor of a [`Loaded`] checkpoint.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TensorView<'a> {
    /// The type of its elements.
    pub dtype: DType,
    /// Its dims, outermost first.
    pub shape: &'a [usize],
    /// Its elements: row-major, little-endian bytes at any alignment, to be copied out.
    pub data: &'a [u8],
}

#[derive(Debug)]
struct MappedFile {
    map: Mmap,
    places: BTreeMap<String, Place>,
}

impl Loaded {
    /// The tensor `name` of `group`.
    pub fn tensor(&self, group: &str, name: &str) -> Result<TensorView<'_>, CheckpointError> {
        let file = self.group(group)?;
        let Some(Place { dtype, shape, range }) = file.places.get(name) else {
            let hint = format!("group `{group}` has {} tensors of other names", file.places.len());
            return Err(self.absent(format!("tensor `{name}` in group `{group}`"), hint));
        };
        Ok(TensorView { dtype: *dtype, shape, data: &file.map[range.clone()] })
    }

    /// The names of the tensors of `group`, ascending.
    pub fn names(&self, group: &str) -> Result<Vec<&str>, CheckpointError> {
        Ok(self.group(group)?.places.keys().map(String::as_str).collect())
    }

    fn group(&self, group: &str) -> Result<&MappedFile, CheckpointError> {
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
/// checksum, and every header.
pub fn open(path: &Path) -> Result<Loaded, CheckpointError> {
    fs::read_dir(path).at("open", path)?;
    let manifest = Manifest::read(path)?;
    let named = path.file_name().and_then(|name| folder::parse_step_name(name.to_str()?));
    if named.is_some_and(|step| step != manifest.step) {
        return Err(damaged(path, manifest::NAME, format!("it belongs to step {}", manifest.step)));
    }
    let mut groups = BTreeMap::new();
    for entry in &manifest.files {
        // `Manifest::read` lets no other names pass.
        let Some(group) = tensor_file::group_of(&entry.name) else { continue };
        groups.insert(group.to_owned(), open_file(path, entry)?);
    }
    Ok(Loaded { step: manifest.step, path: path.to_owned(), state: manifest.state, groups })
}

fn open_file(folder: &Path, entry: &FileEntry) -> Result<MappedFile, CheckpointError> {
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
    let places = tensor_file::read_header(&map).map_err(wrong)?;
    Ok(MappedFile { map, places })
}

/// Reads rather than maps: a disk error is then an error, not a signal.
fn hash(file: &mut File, path: &Path) -> Result<String, CheckpointError> {
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
    use crate::manifest::FORMAT;
    use xxhash_rust::xxh3::xxh3_128;

    /// A hostile writer knows the checksums: they all fit, and the header must be refused for what it says.
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
            let folder = tempfile::tempdir().unwrap();
            let name = "model.safetensors".to_owned();
            fs::write(folder.path().join(&name), &bytes).unwrap();
            let entry = FileEntry { name, bytes: bytes.len() as u64, xxh3_128: checksum(xxh3_128(&bytes)) };
            let manifest = Manifest { format: FORMAT, step: 1, files: vec![entry], state: ().into() };
            fs::write(folder.path().join(manifest::NAME), manifest.seal().unwrap()).unwrap();

            let error = open(folder.path()).unwrap_err().to_string();
            assert!(error.contains("model.safetensors") && error.contains(expected), "{error}");
        }
    }
}
