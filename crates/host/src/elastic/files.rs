//! The folder in which processes of an elastic run meet: who has registered, and the epochs that were agreed on.

use super::{ElasticError, Epoch, Membership, Registered};
use crate::{HostError, clock};
use lockstep_exec::comm::processes::JobSecret;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

/// The folder of epochs in a run directory.
pub(super) const FOLDER: &str = ".elastic";

/// The file that says that a world has begun.
pub(super) const BEGUN: &str = "begun";

/// The file that says that the run has ended.
pub(super) const ENDED: &str = "ended";

/// Whether the run of a job has begun: processes that come now join it later.
pub fn has_begun(run_dir: &Path, secret: &JobSecret) -> bool {
    job_folder(run_dir, secret).join("epoch-0.json").exists()
}

/// Whoever does not know the secret does not find the folder of the job among those of others.
pub(super) fn job_folder(run_dir: &Path, secret: &JobSecret) -> PathBuf {
    run_dir.join(FOLDER).join(format!("{:016x}", xxh3_64(secret.to_hex().as_bytes())))
}

impl Membership {
    /// The newest epoch that has appeared.
    pub(super) fn newest_there(&self) -> u64 {
        let names = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let number = |name: String| name.strip_prefix("epoch-")?.strip_suffix(".json")?.parse().ok();
        names.filter_map(|entry| number(entry.file_name().into_string().ok()?)).max().unwrap_or(0)
    }

    /// The others that have registered for an epoch.
    pub(super) fn registered(&self, number: u64) -> Vec<Registered> {
        let prefix = format!("here-{number}-");
        let names = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let is_one = |name: &str| name.starts_with(&prefix) && name.ends_with(".json");
        let read = |entry: fs::DirEntry| -> Option<Registered> {
            entry.file_name().to_str().filter(|name| is_one(name))?;
            serde_json::from_slice(&fs::read(entry.path()).ok()?).ok()
        };
        let mut all: Vec<Registered> = names.filter_map(read).filter(|other| other.seat.id != self.me.id).collect();
        all.retain(|other| !other.seat.is_proven_dead(&self.me));
        all
    }

    pub(super) fn write_registration(&self, number: u64, mine: &Registered) -> Result<(), HostError> {
        let path = self.folder.join(format!("here-{number}-{}.json", self.me.id));
        let text = serde_json::to_vec(mine).unwrap_or_default();
        let new = self.folder.join(format!(".here-{}", self.me.id));
        let written = write_private(&new, &text).and_then(|()| fs::rename(&new, &path));
        written.map_err(|cause| self.failed("write", &path, cause))
    }

    pub(super) fn read_epoch(&self, number: u64) -> Option<Epoch> {
        serde_json::from_slice(&fs::read(self.epoch_path(number)).ok()?).ok()
    }

    pub(super) fn epoch_path(&self, number: u64) -> PathBuf {
        self.folder.join(format!("epoch-{number}.json"))
    }

    /// Has an epoch appear, in one piece. Where there is one of its number already, that one counts.
    pub(super) fn publish(&self, epoch: &Epoch) -> Result<(), HostError> {
        let (new, path) = (self.folder.join(format!(".epoch-{}", self.me.id)), self.epoch_path(epoch.epoch));
        let text = serde_json::to_vec(&Epoch { written: clock::now(), ..epoch.clone() }).unwrap_or_default();
        let linked = write_private(&new, &text).and_then(|()| match fs::hard_link(&new, &path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            linked => linked,
        });
        let _ = fs::remove_file(&new);
        linked.map_err(|cause| self.failed("write", &path, cause))
    }

    pub(super) fn make_folder(&self) -> Result<(), HostError> {
        fs::create_dir_all(&self.folder).map_err(|cause| self.failed("create", &self.folder, cause))
    }

    pub(super) fn failed(&self, action: &'static str, path: &Path, cause: io::Error) -> HostError {
        ElasticError::Folder { action, path: path.to_owned(), cause }.into()
    }
}

/// Writes a file anew.
pub(super) fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let _ = fs::remove_file(path);
    let mut file = fs::OpenOptions::new().write(true).create_new(true).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}
