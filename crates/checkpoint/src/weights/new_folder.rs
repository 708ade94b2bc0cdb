//! A folder that is whole or not there.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::error::{AtPath, CheckpointError, Result};
use crate::folder;
use crate::save::write_synced;

/// A folder that is being filled beside the place where it is to be. It is there from [`publish`](NewFolder::publish) on; one
/// that is dropped leaves nothing.
#[derive(Debug)]
pub struct NewFolder {
    path: PathBuf,
    temporary: PathBuf,
    published: bool,
}

impl NewFolder {
    /// Begins a folder, in whose place there must be nothing, or an empty folder.
    pub fn begin(path: &Path) -> Result<NewFolder> {
        let whole = std::path::absolute(path).at("find", path)?;
        let (Some(parent), Some(name)) = (whole.parent(), whole.file_name()) else {
            return Err(CheckpointError::unfit(path, "not a place for a folder", "give --out another path"));
        };
        if path.symlink_metadata().is_ok() && fs::read_dir(path).at("list", path)?.next().is_some() {
            return Err(CheckpointError::unfit(path, "there is something in this folder", "give --out another path"));
        }
        fs::create_dir_all(parent).at("create", parent)?;
        let temporary = parent.join(format!(".tmp-{}-{}", name.display(), std::process::id()));
        fs::create_dir(&temporary).at("create", &temporary)?;
        Ok(NewFolder { path: path.to_owned(), temporary, published: false })
    }

    /// Where its files are written to.
    pub fn contents(&self) -> &Path {
        &self.temporary
    }

    /// Writes a file of it, or of a folder in it.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.temporary.join(name);
        if let Some(folder) = path.parent().filter(|folder| *folder != self.temporary) {
            fs::create_dir_all(folder).at("create", folder)?;
        }
        write_synced(&path, |to| to.write_all(bytes))
    }

    /// Gives the folder its name.
    pub fn publish(mut self) -> Result<()> {
        folder::sync(&self.temporary)?;
        if self.path.is_dir() {
            fs::remove_dir(&self.path).at("replace", &self.path)?;
        }
        fs::rename(&self.temporary, &self.path).at("rename", &self.temporary)?;
        self.published = true;
        Ok(())
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        if !self.published {
            folder::discard(&self.temporary);
        }
    }
}
