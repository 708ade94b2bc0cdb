//! Which checkpoints stay when another is saved.

use std::path::Path;

use crate::error::Result;
use crate::folder;
use crate::save::looks_whole;

/// Which checkpoints stay: the one just written and those of these rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Keep {
    /// How many of the latest; at least one stays.
    pub last: usize,
    /// Every multiple of this many steps, for ever; 0 for none.
    pub every: u64,
    /// That of this step, the best one so far, say.
    pub best: Option<u64>,
}

impl From<usize> for Keep {
    /// The latest alone.
    fn from(last: usize) -> Self {
        Keep { last, ..Keep::default() }
    }
}

impl Keep {
    /// The steps of `all`, ascending, that no rule keeps.
    pub fn surplus(&self, all: &[u64]) -> Vec<u64> {
        let latest = all.len().saturating_sub(self.last.max(1));
        let stays = |step: u64| Some(step) == self.best || (self.every > 0 && step.is_multiple_of(self.every));
        all[..latest].iter().copied().filter(|step| !stays(*step)).collect()
    }
}

/// Removes the checkpoints in `dir` that no rule keeps, never the one of `written`, and gives their steps. Only those with a sound
/// manifest and files of the right length count and are ever removed.
pub fn prune(dir: &Path, written: Option<u64>, keep: &Keep) -> Result<Vec<u64>> {
    let mut whole = folder::list(dir)?;
    whole.retain(|(step, path)| Some(*step) == written || looks_whole(path));
    // The one just written counts as the latest, even where a run has gone back.
    let mut steps: Vec<u64> = whole.into_iter().map(|(step, _)| step).filter(|step| Some(*step) != written).collect();
    steps.extend(written);
    let surplus = keep.surplus(&steps);
    for step in &surplus {
        if let Some(trash) = folder::set_aside(dir, *step)? {
            folder::sync(dir)?;
            folder::discard(&trash);
        }
    }
    Ok(surplus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_add_up() {
        let all = [10, 20, 30, 40, 50, 60];
        let check = |keep: Keep, expected: &[u64]| assert_eq!(keep.surplus(&all), expected, "{keep:?}");
        check(2.into(), &[10, 20, 30, 40]);
        check(0.into(), &[10, 20, 30, 40, 50]);
        check(9.into(), &[]);
        check(Keep { last: 1, every: 30, best: None }, &[10, 20, 40, 50]);
        check(Keep { last: 1, every: 0, best: Some(20) }, &[10, 30, 40, 50]);
        check(Keep { last: 2, every: 40, best: Some(10) }, &[20, 30]);
    }
}
