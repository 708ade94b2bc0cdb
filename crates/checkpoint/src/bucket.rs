//! A second place for checkpoints, in a bucket.
//!
//! ```text
//! s3://bucket/key/step-00000100/model.safetensors   the files of a checkpoint, as they are in its folder
//! s3://bucket/key/step-00000100/manifest.json       comes last: without it there is no checkpoint
//! s3://bucket/key/old-1/step-…                      those of a run that was begun anew
//! ```
//!
//! There are no renames in a bucket, so the manifest says that a checkpoint is whole: it comes after all other files, and goes before them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use lockstep_bucket::{BucketAddress, BucketFault, Buckets, Listed, Reads};
use xxhash_rust::xxh3::Xxh3;

use crate::error::{CheckpointError, Result};
use crate::folder;
use crate::keep::Keep;
use crate::manifest::{self, Manifest, checksum, damaged, open_regular};
use crate::mirror::require_space;
use crate::save::{TemporaryFolder, write_synced};

/// Bytes that are read at a time.
const CHUNK: usize = 1 << 20;
/// What is said of a copy that nobody waits for.
const ABANDONED: &str = "the copy was abandoned, as the run has ended";
/// The longest manifest.
const MOST_MANIFEST_BYTES: u64 = 64 << 20;

/// What stands for a folder of checkpoints in a bucket.
#[derive(Clone, Debug)]
pub struct BucketMirror {
    buckets: Buckets,
    place: BucketAddress,
}

/// The objects of steps, by step: those that have a manifest are checkpoints.
type Steps = BTreeMap<u64, Vec<Listed>>;

impl BucketMirror {
    /// The checkpoints at an address.
    pub fn new(buckets: Buckets, place: BucketAddress) -> Self {
        Self { buckets, place }
    }

    /// That of a path which is an address; none where it is a folder.
    pub fn of(path: &Path) -> Option<Result<Self>> {
        let address = BucketAddress::of(path)?;
        let mirror = || Ok(Self::new(Buckets::of_process()?, address?));
        Some(mirror().map_err(CheckpointError::bucket))
    }

    /// The steps of its whole checkpoints, ascending.
    pub fn steps(&self) -> Result<Vec<u64>> {
        Ok(self.all()?.into_iter().filter(|(_, objects)| is_whole(objects)).map(|(step, _)| step).collect())
    }

    fn all(&self) -> Result<Steps> {
        let mut steps = Steps::new();
        let before = self.place.key().len() + usize::from(!self.place.key().is_empty());
        for listed in self.buckets.list(&self.place).map_err(CheckpointError::bucket)? {
            let inside = &listed.address.key()[before..];
            let step = inside.split_once('/').filter(|(_, name)| !name.contains('/'));
            if let Some(step) = step.and_then(|(step, _)| folder::parse_step_name(step)) {
                steps.entry(step).or_default().push(listed);
            }
        }
        Ok(steps)
    }

    /// Copies the checkpoint in the folder `from` there, and removes those that `keep` does not keep. What is copied is checked against
    /// its checksums, so that damage does not spread. Where it is abandoned meanwhile, it ends soon, and there is no copy.
    pub fn copy(&self, from: &Path, keep: &Keep, given_up: &AtomicBool) -> Result<()> {
        let manifest = Manifest::read(from)?;
        let to = self.place.join(&folder::step_name(manifest.step));
        // One of the same step is none from here on.
        self.buckets.remove(&to.join(manifest::NAME)).map_err(CheckpointError::bucket)?;
        for entry in manifest.files.iter().chain(&manifest.attachments) {
            let (file, bytes) = open_regular(from, &entry.name)?;
            if bytes != entry.bytes {
                return Err(damaged(from, &entry.name, format!("{bytes} bytes instead of {}", entry.bytes)));
            }
            let mut reader = Hashed { file, hash: Xxh3::new(), given_up };
            self.buckets.upload(&to.join(&entry.name), &mut reader, bytes).map_err(CheckpointError::bucket)?;
            if checksum(reader.hash.digest128()) != entry.xxh3_128 {
                return Err(damaged(from, &entry.name, "checksum differs"));
            }
        }
        let refused = |cause| CheckpointError::Refused { dir: self.place.path(), step: manifest.step, cause };
        let sealed = manifest.seal().map_err(refused)?;
        if given_up.load(Ordering::Acquire) {
            return Err(refused(ABANDONED.to_owned()));
        }
        self.buckets.write(&to.join(manifest::NAME), &sealed).map_err(CheckpointError::bucket)?;
        self.prune(manifest.step, keep)
    }

    /// Removes checkpoints that no rule keeps, and what uploads that ended early have left: objects without a manifest, and parts.
    fn prune(&self, written: u64, keep: &Keep) -> Result<()> {
        self.buckets.remove_unfinished(&self.place);
        let all = self.all()?;
        // The one just written counts as the latest, even where a run has gone back.
        let mut whole: Vec<u64> = all
            .iter()
            .filter(|(step, objects)| **step != written && is_whole(objects))
            .map(|(step, _)| *step)
            .collect();
        whole.push(written);
        let surplus = keep.surplus(&whole);
        for (step, objects) in &all {
            if *step != written && (surplus.contains(step) || !is_whole(objects)) {
                self.remove(objects)?;
            }
        }
        Ok(())
    }

    /// Removes the objects of a step, its manifest first.
    fn remove(&self, objects: &[Listed]) -> Result<()> {
        let (manifests, others) = manifests_and_others(objects);
        for listed in manifests.into_iter().chain(others) {
            self.buckets.remove(&listed.address).map_err(CheckpointError::bucket)?;
        }
        Ok(())
    }

    /// Brings the checkpoint of a step into the folder `dir`, under the guarantees of [`save`](crate::save), and gives its path.
    pub fn fetch(&self, step: u64, dir: &Path) -> Result<PathBuf> {
        let from = self.place.join(&folder::step_name(step));
        let path = from.path();
        // An object that is gone, or is written while it is read: an earlier checkpoint may be whole.
        let judged = |error: CheckpointError, file: &str| match error {
            CheckpointError::Bucket { error }
                if [BucketFault::Missing, BucketFault::Changed].contains(&error.fault) =>
            {
                damaged(&path, file, error.problem)
            }
            error => error,
        };
        let of_bucket = |error, file: &str| judged(CheckpointError::bucket(error), file);
        let sealed = self.buckets.read(&from.join(manifest::NAME), MOST_MANIFEST_BYTES);
        let sealed = sealed.map_err(|error| of_bucket(error, manifest::NAME))?;
        let sealed = sealed.ok_or_else(|| damaged(&path, manifest::NAME, "missing"))?;
        let manifest = Manifest::unseal(&sealed).map_err(|reason| reason.at(&path))?;
        if manifest.step != step {
            return Err(damaged(&path, manifest::NAME, format!("it belongs to step {}", manifest.step)));
        }
        let files = || manifest.files.iter().chain(&manifest.attachments);
        require_space(dir, files().map(|entry| entry.bytes).sum())?;
        let temporary = TemporaryFolder::create(dir, step)?;
        let mut chunk = vec![0; CHUNK];
        for entry in files() {
            // The manifest lets no names pass but those of files in its folder.
            let object = self.buckets.open(&from.join(&entry.name), Reads::InOrder);
            let object = object.map_err(|error| of_bucket(error, &entry.name))?;
            if object.len() != entry.bytes {
                return Err(damaged(&path, &entry.name, format!("{} bytes instead of {}", object.len(), entry.bytes)));
            }
            let (mut reader, mut hash, mut failed) = (object.reader(0), Xxh3::new(), None);
            write_synced(&temporary.path.join(&entry.name), |to: &mut File| {
                loop {
                    match reader.read(&mut chunk) {
                        Ok(0) => return Ok(()),
                        Ok(read) => {
                            hash.update(&chunk[..read]);
                            to.write_all(&chunk[..read])?;
                        }
                        Err(error) => {
                            failed = Some(error);
                            return Ok(());
                        }
                    }
                }
            })?;
            if let Some(error) = failed {
                return Err(judged(CheckpointError::of_reader(error, &path), &entry.name));
            }
            if checksum(hash.digest128()) != entry.xxh3_128 {
                return Err(damaged(&path, &entry.name, "checksum differs"));
            }
        }
        // Others stay: it is the run that decides which.
        temporary.finish(dir, &manifest, &Keep { last: usize::MAX, ..Keep::default() })
    }

    /// Moves the checkpoints from `first` on to `old-1`, `old-2` … inside, so that a run that goes on before them does not find them. There too,
    /// a manifest comes last.
    pub fn set_aside_from(&self, first: u64) -> Result<()> {
        let all = self.all()?;
        let later: Vec<&Vec<Listed>> = all.range(first..).map(|(_, objects)| objects).collect();
        if later.is_empty() {
            return Ok(());
        }
        let mut n = 1;
        while !self.buckets.list(&self.place.join(&format!("old-{n}"))).map_err(CheckpointError::bucket)?.is_empty() {
            n += 1;
        }
        let before = self.place.key().len() + usize::from(!self.place.key().is_empty());
        for objects in later {
            let (manifests, others) = manifests_and_others(objects);
            for listed in others.into_iter().chain(manifests) {
                let to = self.place.join(&format!("old-{n}/{}", &listed.address.key()[before..]));
                self.buckets.copy(&listed.address, &to, listed.bytes).map_err(CheckpointError::bucket)?;
            }
            self.remove(objects)?;
        }
        Ok(())
    }
}

fn is_manifest(listed: &Listed) -> bool {
    listed.address.key().ends_with(&format!("/{}", manifest::NAME))
}

fn manifests_and_others(objects: &[Listed]) -> (Vec<&Listed>, Vec<&Listed>) {
    objects.iter().partition(|listed| is_manifest(listed))
}

fn is_whole(objects: &[Listed]) -> bool {
    objects.iter().any(is_manifest)
}

/// Hashes what is read of a file.
struct Hashed<'a> {
    file: File,
    hash: Xxh3,
    given_up: &'a AtomicBool,
}

impl Read for Hashed<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.given_up.load(Ordering::Acquire) {
            return Err(io::Error::other(ABANDONED));
        }
        let read = self.file.read(into)?;
        self.hash.update(&into[..read]);
        Ok(read)
    }
}
