use lockstep_checkpoint::{CheckpointError, WeightsFolder};
use lockstep_config::{ConfigError, Difference};
use std::path::{Path, PathBuf};

/// What a run directory gives, or why it does not.
pub type Result<T, E = RunDirError> = std::result::Result<T, E>;

/// Why a run directory cannot be used as it is asked for.
#[derive(Debug, thiserror::Error, lockstep_ir::Hint)]
pub enum RunDirError {
    /// A config in it is wrong, or a change of one.
    #[error("{0}")]
    #[hint(_0.hint())]
    Config(#[from] ConfigError),
    /// Its checkpoints cannot be listed.
    #[error("{0}")]
    #[hint(_0.hint())]
    Checkpoint(#[from] CheckpointError),
    /// Metrics cannot go where the config wants them.
    #[error("{key}: {text}")]
    #[hint("{hint}")]
    Sink {
        /// The switch.
        key: String,
        /// Why.
        text: String,
        /// What to do.
        hint: &'static str,
    },
    /// A path is neither a run directory nor a checkpoint.
    #[error(
        "{}: {}",
        path.display(),
        if path.exists() { "neither a run directory nor a checkpoint" } else { "no such run or checkpoint" }
    )]
    #[hint(
        "{}",
        match WeightsFolder::is_hugging_face(path) {
            true => "it is a Hugging Face model: make a run directory of it with `lockstep checkpoint import`",
            false => "name a run directory (runs/quickstart, say) or a checkpoint in it (checkpoints/step-…)",
        }
    )]
    NotTrained {
        /// The path.
        path: PathBuf,
    },
    /// The run directory holds a run with another config.
    #[error("{} holds a run with another config:{}", dir.display(), list(differences))]
    ConfigChanged {
        /// The run directory.
        dir: PathBuf,
        /// What differs.
        differences: Vec<Difference>,
        /// Steps that the run has done.
        step: u64,
        /// Whether these are all of its steps, with the new config too.
        stays_finished: bool,
    },
    /// Changes were asked for where no step is left that they could have an effect on.
    #[error(
        "the run in {} is finished, all {step} steps are done: it would have no effect, and nothing \
         was recorded",
        dir.display()
    )]
    FinishedRun {
        /// The run directory.
        dir: PathBuf,
        /// Steps done.
        step: u64,
        /// What was asked for, as `table.key=value`.
        changes: Vec<String>,
    },
    /// A run may not take on another value of this key.
    #[error("a run that has begun cannot go from {before} to {now}")]
    CannotChange {
        /// `table.key`.
        key: &'static str,
        /// Its value in the run.
        before: String,
        /// The value that was asked for.
        now: String,
    },
    /// Changes were asked for where there is no run to change.
    #[error("{} has no checkpoint, so there is no run to change", dir.display())]
    NothingToChange {
        /// The run directory.
        dir: PathBuf,
    },
    /// A run is to have fewer steps than it has done.
    #[error("train.steps = {steps} is less than the {step} steps that the run has done")]
    StepsDone {
        /// Asked for.
        steps: u64,
        /// Done.
        step: u64,
    },
    /// Another process trains in this directory.
    #[error("{} is in use by another process", dir.display())]
    Locked {
        /// The run directory.
        dir: PathBuf,
    },
    /// A file of the run directory cannot be read or written.
    #[error("cannot {action} {}: {cause}", path.display())]
    #[hint("{}", hint(cause))]
    Io {
        /// What was being done.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: std::io::Error,
    },
}

impl RunDirError {
    /// What the system said of a file.
    pub fn io(action: &'static str, path: &Path, cause: std::io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), cause }
    }

    /// Whether the request was wrong, rather than the directory.
    pub fn is_request(&self) -> bool {
        match self {
            Self::Io { .. } => false,
            Self::Checkpoint(error) => matches!(error, CheckpointError::Unfit { .. }),
            _ => true,
        }
    }
}

fn list(differences: &[Difference]) -> String {
    differences.iter().map(|d| format!("\n  {}: {} before, {} now", d.path, d.theirs, d.ours)).collect()
}

fn hint(cause: &std::io::Error) -> &'static str {
    match cause.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::FileTooLarge | std::io::ErrorKind::QuotaExceeded => {
            "free some space and run the same command again: it resumes from the last checkpoint"
        }
        _ => "check the path; the same command resumes from the last checkpoint",
    }
}
