//! Finding the checkpoint to go on from.

use std::path::Path;

use crate::error::CheckpointError;
use crate::folder::{list, unfinished};
use crate::load::{Loaded, open};

/// What [`latest`] came upon.
#[derive(Debug)]
pub struct LatestCheckpoint {
    /// The newest whole checkpoint, if there is any.
    pub loaded: Option<Loaded>,
    /// One line for each newer one that was passed over, newest first.
    pub warnings: Vec<String>,
}

/// The newest whole checkpoint in `dir`.
///
/// A newer one that is damaged, or that a killed writer left unfinished, gives a warning. Where none was ever finished,
/// or there is no `dir`, nothing is found. It is an error when checkpoints exist and none is whole, and when one cannot
/// be judged (no permission, a disk error, a later format): going back further than needed is the user's decision.
pub fn latest(dir: &Path) -> Result<LatestCheckpoint, CheckpointError> {
    let mut passed_over = Vec::new();
    let mut loaded = None;
    for (step, path) in list(dir)?.into_iter().rev() {
        match open(&path) {
            Ok(checkpoint) => {
                loaded = Some(checkpoint);
                break;
            }
            Err(CheckpointError::Damaged { file, cause, .. }) => {
                passed_over.push((step, format!("checkpoint step {step} is damaged ({file}: {cause})")));
            }
            Err(error) => return Err(error),
        }
    }
    if loaded.is_none() && !passed_over.is_empty() {
        let causes = passed_over.into_iter().map(|(_, cause)| cause).collect();
        return Err(CheckpointError::NoneWhole { dir: dir.to_owned(), causes });
    }
    for (step, name) in unfinished(dir)? {
        if loaded.as_ref().is_none_or(|checkpoint| step > checkpoint.step) {
            passed_over.push((step, format!("checkpoint step {step} is unfinished ({name})")));
        }
    }
    passed_over.sort_by(|a, b| b.cmp(a));
    let instead = match &loaded {
        Some(checkpoint) => format!("using step {}", checkpoint.step),
        None => "there is none before it".to_owned(),
    };
    let warnings = passed_over.into_iter().map(|(_, cause)| format!("{cause}; {instead}")).collect();
    Ok(LatestCheckpoint { loaded, warnings })
}
