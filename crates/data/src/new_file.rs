//! Files that appear whole or not at all.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::{DataError, Result};

/// A file under a temporary name in its final folder, removed on drop unless it was published.
///
/// The temporary name is hidden, so a walk over the folder does not take it for text, and carries the process id, so
/// that two processes that prepare the same folder do not write into one file.
pub(crate) struct NewFile {
    pub(crate) file: File,
    temporary: PathBuf,
    target: PathBuf,
    published: bool,
}

impl NewFile {
    /// Starts the file `folder/name`.
    pub(crate) fn create(folder: &Path, name: &str) -> Result<Self> {
        let target = folder.join(name);
        let temporary = temporary_path(folder, name);
        let file = File::create(&temporary).map_err(|cause| DataError::unwritable(&target, cause))?;
        Ok(NewFile { file, temporary, target, published: false })
    }

    /// The name the file will have.
    pub(crate) fn target(&self) -> &Path {
        &self.target
    }

    /// Brings the contents to the disk.
    pub(crate) fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(|cause| DataError::unwritable(&self.target, cause))
    }

    /// Gives the file its name, replacing what had it before. The name is on the disk once the folder is synced.
    pub(crate) fn publish(mut self) -> Result<()> {
        fs::rename(&self.temporary, &self.target).map_err(|cause| DataError::unwritable(&self.target, cause))?;
        self.published = true;
        Ok(())
    }
}

impl Write for NewFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.published {
            // Already on the way out of an error, which says more than a failure to clean up would.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Removes a file that may not be there, and makes that last.
pub(crate) fn remove_if_present(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Ok(()) => sync_folder_of(path),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(cause) => Err(DataError::unwritable(path, cause)),
    }
}

/// The name of `folder/name` until it is published.
pub(crate) fn temporary_path(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!(".{name}.{}.tmp", std::process::id()))
}

/// A rename is on the disk only once its folder is.
fn sync_folder_of(path: &Path) -> Result<()> {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    sync_folder(folder)
}

/// Brings the names in a folder to the disk.
pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|opened| opened.sync_all()).map_err(|cause| DataError::unwritable(folder, cause))
}
