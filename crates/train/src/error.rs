use lockstep_checkpoint::CheckpointError;
use lockstep_compile::CompileError;
use lockstep_config::{ConfigError, Difference};
use lockstep_data::DataError;
use lockstep_exec::ExecError;
use std::path::{Path, PathBuf};

/// Why a run did not start or did not finish. Nothing that was saved is lost by any of these.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The config is wrong.
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// The data are missing, empty, too short or damaged.
    #[error("{0}")]
    Data(#[from] DataError),
    /// A checkpoint cannot be written or read.
    #[error("{0}")]
    Checkpoint(#[from] CheckpointError),
    /// A bug in the compiler.
    #[error("{0}")]
    Compile(#[from] CompileError),
    /// The executor cannot load or run the program.
    #[error("{0}")]
    Exec(#[from] ExecError),
    /// The vocabulary is too small for the tokenizer.
    #[error(
        "model.vocab_size is {vocab}, the tokenizer \"{tokenizer}\" makes tokens up to {}\nhint: set model.vocab_size = \
         {needed}",
        needed - 1
    )]
    Vocabulary {
        /// The model's vocabulary.
        vocab: usize,
        /// The tokenizer, as the config has it.
        tokenizer: String,
        /// The smallest vocabulary that would do.
        needed: u32,
    },
    /// A shared folder holds other data than the config asks for.
    #[error(
        "{} holds data that were prepared with other settings\nhint: choose another data.prepared, or delete the folder \
         if nothing else uses it",
        dir.display()
    )]
    SharedData {
        /// The folder of prepared data.
        dir: PathBuf,
    },
    /// The run directory holds a run with another config.
    #[error(
        "{} holds a run with another config:{}\nhint: undo these changes to resume it, choose another --run-dir, or \
         give --fresh to start over (the old run is kept in a folder beside)",
        dir.display(),
        list(differences)
    )]
    ConfigChanged {
        /// The run directory.
        dir: PathBuf,
        /// What differs.
        differences: Vec<Difference>,
    },
    /// Another process trains in this directory.
    #[error("{} is in use by another process\nhint: wait for it, or choose another --run-dir", dir.display())]
    Locked {
        /// The run directory.
        dir: PathBuf,
    },
    /// The checkpoint was made from other data than those in the run directory.
    #[error(
        "the prepared data in {} are not those that the checkpoint was trained on\nhint: restore the folder, or give \
         --fresh to start over",
        dir.display()
    )]
    DataChanged {
        /// The folder of prepared data.
        dir: PathBuf,
    },
    /// Losses or gradients are not finite.
    #[error(
        "the loss is not finite for {steps} steps in a row (last at step {step}: loss {loss}, gradient norm {grad_norm})\n\
         hint: lower optimizer.lr or raise optimizer.warmup_steps; no weight was changed in these steps, and the last \
         checkpoint is kept"
    )]
    Diverged {
        /// Consecutive bad steps.
        steps: u64,
        /// The last of them.
        step: u64,
        /// Its loss.
        loss: f64,
        /// Its gradient norm.
        grad_norm: f32,
    },
    /// A file of the run directory cannot be read or written.
    #[error("cannot {action} {}: {cause}\nhint: {}", path.display(), hint(cause))]
    Io {
        /// What was being done.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: std::io::Error,
    },
}

impl TrainError {
    pub(crate) fn io(action: &'static str, path: &Path, cause: std::io::Error) -> Self {
        TrainError::Io { action, path: path.to_owned(), cause }
    }

    /// Whether the request was wrong, rather than the run.
    pub fn is_request(&self) -> bool {
        matches!(
            self,
            TrainError::Config(_)
                | TrainError::Data(_)
                | TrainError::Vocabulary { .. }
                | TrainError::SharedData { .. }
                | TrainError::ConfigChanged { .. }
                | TrainError::Locked { .. }
        )
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
        std::io::ErrorKind::PermissionDenied => "choose a --run-dir that you may write to",
        _ => "check the path; the same command resumes from the last checkpoint",
    }
}
