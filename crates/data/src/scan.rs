//! Which files a spec names, in which order.
//!
//! A run knows its text by content and not by an absolute path, so that both can be moved.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::{self, FileType};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use lockstep_bucket::{BucketAddress, Buckets};
use xxhash_rust::xxh3::Xxh3;

use crate::output::{DATA_JSON, TRAIN_SHARD, is_output};
use crate::source::Input;
use crate::stop::go_on;
use crate::{DataError, PrepareSpec, Result};

/// Folders that hold what tools made, not what people wrote.
const SKIPPED_FOLDERS: [&str; 3] = ["target", "node_modules", "runs"];

/// Files that stand together only in a folder that Lockstep made: prepared data, a run.
const MARKERS: [&[&str]; 2] = [&[DATA_JSON, TRAIN_SHARD], &["run.toml", "plan.json", "events.jsonl"]];

/// What a run writes into its folder, beside the prepared data.
const RUN_ENTRIES: [&str; 8] = [
    "run.toml",
    "plan.json",
    "changes.json",
    "metrics.jsonl",
    "events.jsonl",
    "starts.jsonl",
    "given.toml",
    "checkpoints",
];

/// The text that a spec names.
#[derive(Debug)]
pub(crate) struct Found {
    /// Files with at least one byte, in reading order.
    pub(crate) files: Vec<SourceFile>,
    /// Files without.
    pub(crate) empty_files: u64,
}

/// One file to read.
#[derive(Debug)]
pub(crate) struct SourceFile {
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
    pub(crate) form: Form,
}

/// What a file holds, by its extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// One document, whatever its bytes.
    Text,
    /// A JSON object per line, a document in one field of each.
    Lines { compressed: bool },
    /// A Parquet table, a document in one column of each row.
    Rows,
}

impl Form {
    fn of(path: &Path) -> Self {
        let is = |extension| has_extension(path, extension);
        if is("jsonl") || is("ndjson") {
            Form::Lines { compressed: false }
        } else if is("jsonl.zst") || is("ndjson.zst") {
            Form::Lines { compressed: true }
        } else if is("parquet") {
            Form::Rows
        } else {
            Form::Text
        }
    }

    /// Whether it is text as it stands, so that its beginning up to the end of a line is a file of the same form.
    pub(crate) fn is_plain(self) -> bool {
        matches!(self, Form::Text | Form::Lines { compressed: false })
    }
}

/// What is read of a long file to tell whether it is the same: the number of blocks and their bytes, evenly over the file. Multiples of a
/// token's bytes.
const SAMPLE_BLOCKS: u64 = 4;
const SAMPLE_BYTES: u64 = 16 << 10;

impl SourceFile {
    /// Adds its form, its length and samples of its content; short files count in full. Gives its first bytes.
    fn sample(&self, hasher: &mut Xxh3) -> io::Result<[u8; 6]> {
        let form = match self.form {
            Form::Text => 0,
            Form::Lines { compressed: false } => 1,
            Form::Lines { compressed: true } => 2,
            Form::Rows => 3,
        };
        hasher.update(&[form]);
        hasher.update(&self.bytes.to_le_bytes());
        let mut file = Input::open(&self.path)?;
        let (mut block, mut begins) = (Vec::new(), [0; 6]);
        for (from, length) in sample_blocks(self.bytes) {
            file.seek(SeekFrom::Start(from))?;
            block.clear();
            file.by_ref().take(length).read_to_end(&mut block)?;
            hasher.update(&block);
            if from == 0 {
                begins.iter_mut().zip(&block).for_each(|(to, byte)| *to = *byte);
            }
        }
        Ok(begins)
    }

    /// Refuses a compressed file where text is expected: its bytes would be trained on.
    fn refuse_compressed(&self, begins: &[u8; 6]) -> Result<()> {
        let Some((name, _)) = COMPRESSED.iter().find(|(_, magic)| begins.starts_with(magic)) else { return Ok(()) };
        match self.form {
            form if form.is_plain() => Err(DataError::source(
                &self.path,
                format!("the file is compressed ({name}), and is read as text"),
                "decompress it; of compressed files, JSON lines in zstd (.jsonl.zst) and Parquet are read",
            )),
            Form::Lines { compressed: true } if *name != "zstd" => Err(DataError::source(
                &self.path,
                format!("the file is compressed by {name}, and its name says zstd"),
                "compress it with zstd, or decompress it and call it .jsonl",
            )),
            _ => Ok(()),
        }
    }
}

/// How compressed files begin.
const COMPRESSED: [(&str, &[u8]); 6] = [
    ("gzip", &[0x1f, 0x8b]),
    ("zstd", &[0x28, 0xb5, 0x2f, 0xfd]),
    ("xz", &[0xfd, b'7', b'z', b'X', b'Z', 0]),
    ("bzip2", b"BZh"),
    ("lz4", &[0x04, 0x22, 0x4d, 0x18]),
    ("zip", b"PK\x03\x04"),
];

/// Where the samples of this many bytes begin, and how long each is; all of it where it is short.
pub(crate) fn sample_blocks(bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let (blocks, length) = match bytes <= SAMPLE_BLOCKS * SAMPLE_BYTES {
        true => (1, bytes),
        false => (SAMPLE_BLOCKS, SAMPLE_BYTES),
    };
    let from = move |n| (u128::from(bytes - length) * u128::from(n) / u128::from(blocks.max(2) - 1)) as u64;
    (0..blocks).map(move |n| (from(n), length))
}

impl Found {
    /// A number that differs where other text would be read, by the forms, lengths and samples of the content of all files in
    /// order. Where they are and what they are called does not matter.
    pub(crate) fn content(&self, stop: &AtomicBool) -> Result<u64> {
        let mut hasher = Xxh3::new();
        for file in &self.files {
            go_on(stop)?;
            let begins = file.sample(&mut hasher).map_err(|cause| DataError::unreadable(&file.path, cause))?;
            file.refuse_compressed(&begins)?;
        }
        Ok(hasher.digest())
    }

    /// A number that differs where another file would be read, or a file of another length.
    pub(crate) fn listing(&self) -> u64 {
        let mut hasher = Xxh3::new();
        for file in &self.files {
            hasher.update(file.path.as_os_str().as_encoded_bytes());
            hasher.update(&[0]);
            hasher.update(&file.bytes.to_le_bytes());
        }
        hasher.digest()
    }

    /// The same, and differs where a file was written since.
    pub(crate) fn state(&self) -> u64 {
        let mut hasher = Xxh3::new();
        hasher.update(&self.listing().to_le_bytes());
        for file in &self.files {
            // A file that has gone since is an error as soon as it is read.
            let modified = fs::metadata(&file.path).and_then(|metadata| metadata.modified()).ok();
            let since = modified.and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
            hasher.update(&since.map_or(0, |since| since.as_nanos()).to_le_bytes());
        }
        hasher.digest()
    }
}

/// Lists the files of `spec` in the order they will be read: paths as given, folders depth first by name.
///
/// A file that is reached twice counts once, so that overlapping paths do not put the same text into both splits. What
/// an earlier `prepare` left in `out` is not text, nor is what other runs and preparations left in their folders.
pub(crate) fn scan(spec: &PrepareSpec, out: &Path, stop: &AtomicBool) -> Result<Found> {
    if spec.paths.is_empty() {
        return Err(DataError::NoPaths);
    }
    let mut walk = Walk {
        extensions: spec.extensions.iter().map(|extension| extension.trim_start_matches('.')).collect(),
        // Where there is no such folder yet, nothing in it can be met.
        out: out.canonicalize().ok(),
        seen: BTreeSet::new(),
        found: Found { files: Vec::new(), empty_files: 0 },
        stop,
    };
    for path in &spec.paths {
        walk.root(path)?;
    }
    let found = walk.found;
    match (found.files.is_empty(), found.empty_files) {
        (false, _) => Ok(found),
        (true, 0) => Err(DataError::NoFiles { paths: spec.paths.clone(), extensions: spec.extensions.clone() }),
        (true, files) => Err(DataError::AllEmpty { paths: spec.paths.clone(), files }),
    }
}

struct Walk<'a> {
    extensions: Vec<&'a str>,
    out: Option<PathBuf>,
    seen: BTreeSet<PathBuf>,
    found: Found,
    stop: &'a AtomicBool,
}

impl Walk<'_> {
    fn root(&mut self, path: &Path) -> Result<()> {
        if path.to_str().is_none() {
            return Err(DataError::PathNotUtf8 { path: path.to_owned() });
        }
        if let Some(address) = BucketAddress::of(path) {
            return self.bucket(&address?);
        }
        let metadata = fs::metadata(path).map_err(|cause| match cause.kind() {
            io::ErrorKind::NotFound => DataError::MissingPath { path: path.to_owned() },
            _ => DataError::unreadable(path, cause),
        })?;
        if metadata.is_dir() {
            self.folder(path, true)
        } else if metadata.is_file() {
            self.file(path)
        } else {
            Err(DataError::NotAFile { path: path.to_owned() })
        }
    }

    /// A folder that Lockstep made is left out; of one that the spec itself names, what Lockstep made in it.
    fn folder(&mut self, folder: &Path, named: bool) -> Result<()> {
        let entries = sorted_entries(folder).map_err(|cause| DataError::unreadable(folder, cause))?;
        let has = |name: &&str| entries.iter().any(|(entry, kind)| kind.is_file() && entry == name);
        let is_made = MARKERS.iter().any(|files| files.iter().all(has));
        if is_made && !named {
            return Ok(());
        }
        let is_out = self.out.is_some() && folder.canonicalize().ok() == self.out;
        for (name, kind) in entries {
            let path = folder.join(&name);
            let name = name.to_string_lossy();
            let ours = (is_out || is_made) && is_output(&name) || is_made && RUN_ENTRIES.contains(&name.as_ref());
            if name.starts_with('.') || ours {
                continue;
            }
            if kind.is_dir() && !SKIPPED_FOLDERS.contains(&name.as_ref()) {
                self.folder(&path, false)?;
            } else if kind.is_file() && self.has_wanted_extension(&path) {
                self.file(&path)?;
            }
        }
        Ok(())
    }

    /// An object, or all objects in what stands for a folder: those that a folder with the same files would give, in its order.
    fn bucket(&mut self, address: &BucketAddress) -> Result<()> {
        let buckets = Buckets::of_process()?;
        if !address.key().is_empty()
            && let Some((bytes, _)) = buckets.look(address)?
        {
            self.found(&address.path(), bytes);
            return Ok(());
        }
        let listed = buckets.list(address)?;
        if listed.is_empty() {
            return Err(DataError::MissingPath { path: address.path() });
        }
        let before = address.key().len() + usize::from(!address.key().is_empty());
        let mut inside: Vec<(Vec<&str>, u64)> =
            listed.iter().map(|listed| (listed.address.key()[before..].split('/').collect(), listed.bytes)).collect();
        // As folders are walked: by the names of the folders first.
        inside.sort();
        let mut names: BTreeMap<Vec<&str>, BTreeSet<&str>> = BTreeMap::new();
        for (parts, _) in &inside {
            let (name, folder) = parts.split_last().unwrap_or((&"", &[]));
            names.entry(folder.to_vec()).or_default().insert(name);
        }
        let is_made = |folder: &[&str]| {
            let names = names.get(folder);
            names.is_some_and(|names| MARKERS.iter().any(|files| files.iter().all(|file| names.contains(file))))
        };
        for (parts, bytes) in &inside {
            go_on(self.stop)?;
            let depth = parts.len() - 1;
            let made_above = (1..=depth).any(|depth| is_made(&parts[..depth]));
            let hidden = parts.iter().any(|name| name.starts_with('.'));
            let skipped = parts[..depth].iter().any(|name| SKIPPED_FOLDERS.contains(name));
            let ours = is_made(&[]) && (depth == 0 && is_output(parts[0]) || RUN_ENTRIES.contains(&parts[0]));
            let path = address.join(&parts.join("/")).path();
            if !(made_above || hidden || skipped || ours) && self.has_wanted_extension(&path) {
                self.found(&path, *bytes);
            }
        }
        Ok(())
    }

    /// A file of a bucket.
    fn found(&mut self, path: &Path, bytes: u64) {
        if !self.seen.insert(path.to_owned()) {
            return;
        }
        match bytes {
            0 => self.found.empty_files += 1,
            bytes => self.found.files.push(SourceFile { path: path.to_owned(), bytes, form: Form::of(path) }),
        }
    }

    fn has_wanted_extension(&self, path: &Path) -> bool {
        self.extensions.is_empty() || self.extensions.iter().any(|extension| has_extension(path, extension))
    }

    fn file(&mut self, path: &Path) -> Result<()> {
        go_on(self.stop)?;
        let unreadable = |cause| DataError::unreadable(path, cause);
        if !self.seen.insert(path.canonicalize().map_err(unreadable)?) {
            return Ok(());
        }
        match fs::metadata(path).map_err(unreadable)?.len() {
            0 => self.found.empty_files += 1,
            bytes => self.found.files.push(SourceFile { path: path.to_owned(), bytes, form: Form::of(path) }),
        }
        Ok(())
    }
}

/// Whether a name ends with a dot and `extension`, in any case, and has something before it.
fn has_extension(path: &Path, extension: &str) -> bool {
    let name = path.file_name().map(OsStr::as_encoded_bytes).unwrap_or_default();
    let Some(at) = name.len().checked_sub(extension.len() + 1) else { return false };
    at > 0 && name[at] == b'.' && name[at + 1..].eq_ignore_ascii_case(extension.as_bytes())
}

/// What is directly in `folder`, by name; the kind of a symbolic link is "symbolic link".
fn sorted_entries(folder: &Path) -> io::Result<Vec<(OsString, FileType)>> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        entries.push((entry.file_name(), entry.file_type()?));
    }
    entries.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(entries)
}
