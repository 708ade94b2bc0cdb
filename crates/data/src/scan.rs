//! Which files a spec names, in which order.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, FileType};
use std::io;
use std::path::{Path, PathBuf};

use crate::prepared::OUTPUT_NAMES;
use crate::{DataError, PrepareSpec};

/// Folders that hold what tools made, not what people wrote.
const SKIPPED_FOLDERS: [&str; 3] = ["target", "node_modules", "runs"];

/// The text that a spec names.
#[derive(Debug)]
pub(crate) struct Found {
    /// Files with at least one byte, in reading order.
    pub(crate) documents: Vec<Document>,
    /// Files without.
    pub(crate) empty_files: u64,
}

/// One file of text.
#[derive(Debug)]
pub(crate) struct Document {
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
}

/// Lists the files of `spec` in the order they will be read: paths as given, folders depth first by name.
///
/// A file that is reached twice counts once, so that overlapping paths do not put the same text into both splits. What
/// an earlier `prepare` left in `out` is not text.
pub(crate) fn scan(spec: &PrepareSpec, out: &Path) -> Result<Found, DataError> {
    if spec.paths.is_empty() {
        return Err(DataError::NoPaths);
    }
    let mut walk = Walk {
        extensions: spec.extensions.iter().map(|extension| extension.trim_start_matches('.')).collect(),
        // Where there is no such folder yet, nothing in it can be met.
        out: out.canonicalize().ok(),
        seen: BTreeSet::new(),
        found: Found { documents: Vec::new(), empty_files: 0 },
    };
    for path in &spec.paths {
        walk.root(path)?;
    }
    let found = walk.found;
    match (found.documents.is_empty(), found.empty_files) {
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
}

impl Walk<'_> {
    fn root(&mut self, path: &Path) -> Result<(), DataError> {
        if path.to_str().is_none() {
            return Err(DataError::PathNotUtf8 { path: path.to_owned() });
        }
        let metadata = fs::metadata(path).map_err(|cause| match cause.kind() {
            io::ErrorKind::NotFound => DataError::MissingPath { path: path.to_owned() },
            _ => DataError::unreadable(path, cause),
        })?;
        if metadata.is_dir() {
            self.folder(path)
        } else if metadata.is_file() {
            self.file(path)
        } else {
            Err(DataError::NotAFile { path: path.to_owned() })
        }
    }

    fn folder(&mut self, folder: &Path) -> Result<(), DataError> {
        let entries = sorted_entries(folder).map_err(|cause| DataError::unreadable(folder, cause))?;
        let is_out = self.out.is_some() && folder.canonicalize().ok() == self.out;
        for (name, kind) in entries {
            let path = folder.join(&name);
            let name = name.to_string_lossy();
            let ours = is_out && OUTPUT_NAMES.contains(&name.as_ref());
            if name.starts_with('.') || ours {
                continue;
            }
            if kind.is_dir() && !SKIPPED_FOLDERS.contains(&name.as_ref()) {
                self.folder(&path)?;
            } else if kind.is_file() && self.has_wanted_extension(&path) {
                self.file(&path)?;
            }
        }
        Ok(())
    }

    fn has_wanted_extension(&self, path: &Path) -> bool {
        let extension = path.extension().and_then(OsStr::to_str).unwrap_or_default();
        self.extensions.is_empty() || self.extensions.iter().any(|e| e.eq_ignore_ascii_case(extension))
    }

    fn file(&mut self, path: &Path) -> Result<(), DataError> {
        let unreadable = |cause| DataError::unreadable(path, cause);
        if !self.seen.insert(path.canonicalize().map_err(unreadable)?) {
            return Ok(());
        }
        match fs::metadata(path).map_err(unreadable)?.len() {
            0 => self.found.empty_files += 1,
            bytes => self.found.documents.push(Document { path: path.to_owned(), bytes }),
        }
        Ok(())
    }
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
