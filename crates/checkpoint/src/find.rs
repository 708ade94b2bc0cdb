//! Finding the checkpoint to go on from.

use std::path::{Path, PathBuf};

use crate::error::{CheckpointError, Result};
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
pub fn latest(dir: &Path) -> Result<LatestCheckpoint> {
    latest_of(&[dir.to_owned()])
}

/// The newest whole checkpoint of several places that hold the same run's, the first of them where both have one of a step.
///
/// As [`latest`]; and where there is another place, one that cannot be read gives a warning instead of an error.
pub fn latest_of(places: &[PathBuf]) -> Result<LatestCheckpoint> {
    let mut passed_over = Vec::new();
    let (mut found, mut aside) = (Vec::new(), Vec::new());
    for (place, dir) in places.iter().enumerate() {
        match list(dir) {
            Ok(there) => found.extend(there.into_iter().map(|(step, path)| (step, place, path))),
            Err(error) if place > 0 => aside.push(format!("the mirror cannot be read: {error}")),
            Err(error) if places.len() > 1 => passed_over.push((u64::MAX, error.to_string())),
            Err(error) => return Err(error),
        }
    }
    // The newest first, and of one step that of the first place.
    found.sort_by_key(|(step, place, _)| (std::cmp::Reverse(*step), *place));
    let mut loaded = None;
    for (step, place, path) in found {
        match open(&path) {
            Ok(checkpoint) => {
                loaded = Some((checkpoint, place));
                break;
            }
            Err(CheckpointError::Damaged { file, cause, .. }) => {
                passed_over.push((step, format!("checkpoint step {step} is damaged ({file}: {cause})")));
            }
            Err(error) if places.len() > 1 => passed_over.push((step, error.to_string())),
            Err(error) => return Err(error),
        }
    }
    if loaded.is_none() && !passed_over.is_empty() {
        let dir = places.first().cloned().unwrap_or_default();
        return Err(CheckpointError::NoneWhole {
            dir,
            causes: passed_over.into_iter().map(|(_, cause)| cause).collect(),
        });
    }
    for (step, name) in places.first().map_or(Ok(Vec::new()), |dir| unfinished(dir)).unwrap_or_default() {
        if loaded.as_ref().is_none_or(|(checkpoint, _)| step > checkpoint.step) {
            passed_over.push((step, format!("checkpoint step {step} is unfinished ({name})")));
        }
    }
    passed_over.sort_by(|a, b| b.cmp(a));
    let instead = match &loaded {
        Some((checkpoint, 0)) => format!("using step {}", checkpoint.step),
        Some((checkpoint, _)) => format!("using step {} of the mirror, {}", checkpoint.step, checkpoint.path.display()),
        None => "there is none before it".to_owned(),
    };
    // A first place that is gone has nothing to pass over.
    if let Some((_, 1..)) = &loaded
        && passed_over.is_empty()
    {
        passed_over.push((0, format!("{} has no checkpoint as new as the mirror's", places[0].display())));
    }
    let warnings = passed_over.into_iter().map(|(_, cause)| format!("{cause}; {instead}")).chain(aside).collect();
    Ok(LatestCheckpoint { loaded: loaded.map(|(checkpoint, _)| checkpoint), warnings })
}
