//! The cache of `huggingface_hub`, for one repository:
//!
//! ```text
//! models--org--name/refs/main                      a commit
//! models--org--name/snapshots/<commit>/<file>      a link: ../../blobs/<checksum>
//! models--org--name/blobs/<checksum>               a file, whole and checked; with .incomplete appended, the beginning of one
//! models--org--name/.lockstep/<commit>.json        which files the hub has there; ours, others pass over it
//! .locks/models--org--name/<name>.lock             who downloads
//! ```

use crate::listing::{HubFile, Listing};
use crate::name::{is_commit, is_hex};
use crate::{HubError, HubName};
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The folder of a repository in the cache.
pub(crate) struct RepositoryCache {
    folder: PathBuf,
    locks: PathBuf,
}

impl RepositoryCache {
    pub fn of(cache: &Path, name: &HubName) -> Self {
        Self { folder: cache.join(name.folder()), locks: cache.join(".locks").join(name.folder()) }
    }

    /// The commit of a revision, where it is known.
    pub fn commit(&self, name: &HubName) -> Option<String> {
        if let Some(commit) = name.commit() {
            return Some(commit.to_owned());
        }
        let text = fs::read_to_string(self.folder.join("refs").join(name.revision())).ok()?;
        Some(text.trim().to_owned()).filter(|text| is_commit(text))
    }

    /// Says that a revision is a commit.
    pub fn put_commit(&self, name: &HubName, commit: &str) -> Result<(), HubError> {
        if name.commit().is_some() {
            return Ok(());
        }
        write_whole(&self.folder.join("refs").join(name.revision()), commit.as_bytes())
    }

    /// The folder of a commit.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// Which files a commit has, as the hub said.
    pub fn listing(&self, commit: &str) -> Option<Listing> {
        let bytes = fs::read(self.listing_path(commit)).ok()?;
        Listing::read(&serde_json::from_slice(&bytes).ok()?).ok().filter(|listing| listing.commit == commit)
    }

    pub fn put_listing(&self, listing: &Listing) -> Result<(), HubError> {
        write_whole(&self.listing_path(&listing.commit), listing.to_json().to_string().as_bytes())
    }

    fn listing_path(&self, commit: &str) -> PathBuf {
        self.folder.join(".lockstep").join(format!("{commit}.json"))
    }

    /// The files of a commit that are here, where nothing says which there are on the hub.
    pub fn listing_of_snapshot(&self, commit: &str) -> Listing {
        let mut files = Vec::new();
        self.walk(&self.snapshot(commit), "", &mut files);
        Listing { commit: commit.to_owned(), files: files.into_iter().map(|file| (file.name.clone(), file)).collect() }
    }

    fn walk(&self, folder: &Path, before: &str, files: &mut Vec<HubFile>) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let (path, name) = (entry.path(), format!("{before}{name}"));
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                self.walk(&path, &format!("{name}/"), files);
            } else if path.is_file() {
                files.push(HubFile { checksum: blob_of(&path), name, bytes: None });
            }
        }
    }

    /// Whether a file of a commit is here, as long as it must be. Its content was checked before it came here.
    pub fn has(&self, commit: &str, file: &HubFile) -> bool {
        let path = self.snapshot(commit).join(&file.name);
        let length = path.metadata().ok().filter(|metadata| metadata.is_file()).map(|metadata| metadata.len());
        length.is_some_and(|length| file.bytes.is_none_or(|bytes| bytes == length))
    }

    /// The checksum of a file that is here, where its link tells it.
    pub fn checksum(&self, commit: &str, file: &str) -> Option<String> {
        blob_of(&self.snapshot(commit).join(file))
    }

    /// Where a file with a checksum is, or comes.
    pub fn blob(&self, checksum: &str) -> PathBuf {
        self.folder.join("blobs").join(checksum)
    }

    /// Makes the link of a commit's file to its blob.
    pub fn link(&self, commit: &str, file: &str, checksum: &str) -> Result<(), HubError> {
        let path = self.snapshot(commit).join(file);
        let up = "../".repeat(2 + file.matches('/').count());
        let target = format!("{up}blobs/{checksum}");
        create_parent(&path)?;
        match std::os::unix::fs::symlink(&target, &path) {
            // One that leads nowhere, or to an older file.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                fs::remove_file(&path).and_then(|()| std::os::unix::fs::symlink(&target, &path)).at(&path)
            }
            made => made.at(&path),
        }
    }

    /// Waits until no other process downloads under this name, and keeps others waiting until the file is dropped. None where the
    /// file system has no locks: checksums still find what two writers do to a file.
    pub fn lock(&self, name: &str, waiting: &mut dyn FnMut()) -> Result<Option<File>, HubError> {
        let path = self.locks.join(format!("{name}.lock"));
        create_parent(&path)?;
        let file = File::options().create(true).append(true).open(&path).at(&path)?;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(file)),
                Err(TryLockError::WouldBlock) => {
                    waiting();
                    std::thread::sleep(Duration::from_millis(100));
                }
                Err(TryLockError::Error(_)) => return Ok(None),
            }
        }
    }
}

/// The checksum that a link to a blob tells by the blob's name.
fn blob_of(path: &Path) -> Option<String> {
    let target = fs::read_link(path).ok()?;
    let name = target.file_name()?.to_str()?;
    ([40, 64].contains(&name.len()) && is_hex(name)).then(|| name.to_owned())
}

/// Writes a small file so that others see all of it or nothing.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), HubError> {
    create_parent(path)?;
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}.new", std::process::id()));
    let beside = PathBuf::from(beside);
    let write = || {
        File::create(&beside)?.write_all(bytes)?;
        fs::rename(&beside, path)
    };
    write().at(path)
}

pub(crate) fn create_parent(path: &Path) -> Result<(), HubError> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).at(parent)
}

/// Says where an I/O error happened.
pub(crate) trait AtPath<T> {
    fn at(self, path: &Path) -> Result<T, HubError>;
}

impl<T> AtPath<T> for io::Result<T> {
    fn at(self, path: &Path) -> Result<T, HubError> {
        self.map_err(|cause| HubError::Cache { path: path.to_owned(), cause })
    }
}
