//! A second place for checkpoints.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use rustix::fs::statvfs;
use xxhash_rust::xxh3::Xxh3;

use crate::error::{AtPath, CheckpointError, Result};
use crate::keep::Keep;
use crate::manifest::{Manifest, checksum, damaged, open_regular};
use crate::save::{TemporaryFolder, write_synced};

/// Bytes that are copied at a time.
const CHUNK: usize = 1 << 20;

/// Copies the checkpoint in the folder `from` into `dir`, under the same guarantees as [`save`](crate::save), and returns its path. What is
/// copied is checked against its checksums, so that damage does not spread.
pub fn mirror(from: &Path, dir: &Path, keep: &Keep) -> Result<PathBuf> {
    let manifest = Manifest::read(from)?;
    let temporary = TemporaryFolder::create(dir, manifest.step)?;
    let mut chunk = vec![0; CHUNK];
    for entry in manifest.files.iter().chain(&manifest.attachments) {
        let (mut file, _) = open_regular(from, &entry.name)?;
        let mut hash = Xxh3::new();
        let mut bytes = 0;
        write_synced(&temporary.path.join(&entry.name), |to: &mut File| {
            loop {
                match file.read(&mut chunk)? {
                    0 => return Ok(()),
                    read => {
                        hash.update(&chunk[..read]);
                        bytes += read as u64;
                        to.write_all(&chunk[..read])?;
                    }
                }
            }
        })?;
        if bytes != entry.bytes || checksum(hash.digest128()) != entry.xxh3_128 {
            return Err(damaged(from, &entry.name, "checksum differs"));
        }
    }
    temporary.finish(dir, &manifest, keep)
}

/// Bytes that are free on the disk of `dir`, which need not be there yet. Quotas are not seen.
pub fn free_bytes(dir: &Path) -> Result<u64> {
    let mut at = dir;
    loop {
        match statvfs(if at.as_os_str().is_empty() { Path::new(".") } else { at }) {
            Ok(found) => return Ok(found.f_bavail.saturating_mul(found.f_frsize)),
            Err(error) => match (std::io::Error::from(error), at.parent()) {
                (cause, Some(parent)) if cause.kind() == ErrorKind::NotFound => at = parent,
                (cause, _) => return Err(cause).at("look at the disk of", dir),
            },
        }
    }
}

/// Refuses to begin a checkpoint of this many bytes where they are not free.
pub fn require_space(dir: &Path, bytes: u64) -> Result<()> {
    match free_bytes(dir) {
        Ok(free) if free < bytes => Err(CheckpointError::NoSpace { dir: dir.to_owned(), bytes, free }),
        // Where nothing can be known, writing will tell.
        Ok(_) | Err(_) => Ok(()),
    }
}
