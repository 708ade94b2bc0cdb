//! What can go wrong, each with the file, the cause and one hint.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use lockstep_bucket::BucketError;
use lockstep_ir::units;

use crate::manifest::{IN_PARTS_WITH_BLOCKS, WHOLE};

/// What a checkpoint gives, or why it does not.
pub type Result<T, E = CheckpointError> = std::result::Result<T, E>;

/// Why a checkpoint could not be saved, found or read.
#[derive(Debug, thiserror::Error, lockstep_ir::Hint)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The operating system refused: disk full, permission, a file in place of a folder.
    #[error("cannot {action} {}: {cause}", path.display())]
    #[hint("{}", io_hint(cause))]
    Io {
        /// What was being done, as a verb: `write`, `read`, `create`.
        action: &'static str,
        /// The file or folder it was done to.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },

    /// The checkpoint is not what its writer wrote.
    #[error("checkpoint {} is damaged ({file}: {cause})", path.display())]
    #[hint("move this folder away to fall back on the checkpoint before it, or restore it from a copy")]
    Damaged {
        /// The checkpoint's folder.
        path: PathBuf,
        /// The name of the file in it that is wrong.
        file: String,
        /// What is wrong with it.
        cause: String,
    },

    /// The checkpoint is of another version of the format.
    #[error(
        "checkpoint {} has format {found}, this build reads formats {WHOLE} to {IN_PARTS_WITH_BLOCKS} (manifest.json)",
        path.display()
    )]
    #[hint("use the version of lockstep that wrote it")]
    UnknownFormat {
        /// The checkpoint's folder.
        path: PathBuf,
        /// The version that its manifest names.
        found: u64,
    },

    /// There are checkpoints and every one of them is damaged.
    #[error("no checkpoint in {} is whole: {}", dir.display(), causes.join("; "))]
    #[hint("nothing was removed; restore one from a copy, or start over in another run directory")]
    NoneWhole {
        /// The folder of checkpoints.
        dir: PathBuf,
        /// One line for each checkpoint, newest first.
        causes: Vec<String>,
    },

    /// A sound checkpoint does not hold what was asked of it.
    #[error("checkpoint {} holds no {what}", path.display())]
    #[hint("{hint}")]
    Absent {
        /// The checkpoint's folder.
        path: PathBuf,
        /// The group or tensor that was asked for.
        what: String,
        /// What it holds instead.
        hint: String,
    },

    /// Weights of another program, or a checkpoint, that cannot be taken for what is wanted.
    #[error("{}: {cause}", path.display())]
    #[hint("{hint}")]
    Unfit {
        /// The folder or file.
        path: PathBuf,
        /// What is wrong with it.
        cause: String,
        /// What to do about it.
        hint: String,
    },

    /// What ranks hold of a checkpoint in memory does not make one up.
    #[error("the part of group `{group}` that is in the memory of rank {rank} cannot be used: {cause}")]
    #[hint("the run goes on from its last checkpoint on the disk")]
    Memory {
        /// The group.
        group: String,
        /// The rank.
        rank: usize,
        /// What is wrong.
        cause: String,
    },

    /// The disk has no room for a checkpoint; nothing was written.
    #[error(
        "No space left on device for a checkpoint in {}: it takes {}, {} are free",
        dir.display(), units::bytes(*bytes), units::bytes(*free)
    )]
    #[hint(
        "free some space, or keep fewer checkpoints (`lockstep checkpoint prune`); earlier checkpoints are \
         untouched"
    )]
    NoSpace {
        /// The folder of checkpoints.
        dir: PathBuf,
        /// What a checkpoint takes.
        bytes: u64,
        /// What is free.
        free: u64,
    },

    /// A bucket cannot be read or written.
    #[error("{error}")]
    #[hint("{}", error.hint())]
    Bucket {
        /// What the bucket or the connection said.
        error: BucketError,
    },

    /// [`save`](crate::save) was asked for something that could not be read back; nothing was written.
    #[error("cannot save step {step} in {}: {cause}", dir.display())]
    #[hint("this is a mistake in the caller, not in the run; earlier checkpoints are untouched")]
    Refused {
        /// The folder of checkpoints.
        dir: PathBuf,
        /// The step that was to be saved.
        step: u64,
        /// What is wrong with the request.
        cause: String,
    },
}

impl CheckpointError {
    pub(crate) fn bucket(error: BucketError) -> Self {
        CheckpointError::Bucket { error }
    }

    /// What a reader of an object met.
    pub(crate) fn of_reader(cause: io::Error, path: &Path) -> Self {
        match cause.get_ref().and_then(|inner| inner.downcast_ref::<BucketError>()) {
            Some(error) => Self::bucket(error.clone()),
            None => CheckpointError::Io { action: "read", path: path.to_owned(), cause },
        }
    }

    pub(crate) fn unfit(path: &Path, cause: impl Into<String>, hint: impl Into<String>) -> Self {
        CheckpointError::Unfit { path: path.to_owned(), cause: cause.into(), hint: hint.into() }
    }
}

/// Gives an I/O result the path and the verb that its error lacks.
pub(crate) trait AtPath<T> {
    fn at(self, action: &'static str, path: &Path) -> Result<T>;
}

impl<T> AtPath<T> for io::Result<T> {
    fn at(self, action: &'static str, path: &Path) -> Result<T> {
        self.map_err(|cause| CheckpointError::Io { action, path: path.to_owned(), cause })
    }
}

fn io_hint(cause: &io::Error) -> &'static str {
    match cause.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "free some space, or keep fewer checkpoints; earlier checkpoints are untouched"
        }
        ErrorKind::FileTooLarge => {
            "raise the file size limit (`ulimit -f`) or use another file system; earlier checkpoints are untouched"
        }
        ErrorKind::NotADirectory | ErrorKind::AlreadyExists => {
            "a file stands where a folder is needed: move it, or choose another run directory"
        }
        ErrorKind::NotFound => "check the path; `checkpoints/step-…` of a run directory is a checkpoint",
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => "check the owner and the mode of this path",
        _ => "check the disk and its mount; earlier checkpoints are untouched",
    }
}
