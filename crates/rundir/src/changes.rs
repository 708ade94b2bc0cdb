//! What a run does otherwise from a step on: `key=value` on resume, kept in the run directory.
//!
//! A change is a layer over the config of the run. The schema says of every key whether a run may take on another
//! value.

use crate::{Result, RunDirError};
use lockstep_checkpoint::Loaded;
use lockstep_config::{Change, Config, Difference};
use lockstep_telemetry::read_file;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The file in a run directory that lists what was changed, with the step.
pub(crate) const CHANGES: &str = "changes.json";

/// A key whose value is another from here on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Changed {
    /// `table.key`.
    pub key: String,
    /// Its value up to here, as TOML.
    pub before: String,
    /// Its value from here on.
    pub now: String,
    /// Whether it was not given but follows from what was.
    pub follows: bool,
}

/// A key that was changed before and that the config gives another value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overruled {
    /// `table.key`.
    pub key: String,
    /// The step at which it was changed.
    pub step: u64,
    /// The value that counts, as TOML.
    pub counts: String,
    /// The value in the config, which does not.
    pub given: String,
}

/// The config that a run goes on with.
#[derive(Debug)]
pub struct ResumePlan {
    /// As given, with all changes that count.
    pub config: Config,
    /// All changes that count, in order.
    pub changes: Vec<Change>,
    /// What is changed by this call.
    pub new: Vec<Changed>,
    /// Earlier changes that do not count any more: those after the step from which the run goes on, and where it was asked to go
    /// back to that step, those that were made at it.
    pub undone: Vec<Change>,
    /// What the user should know of the config with its changes, and not of the one without.
    pub warnings: Vec<String>,
    /// What the config says of keys that were changed before.
    pub overruled: Vec<Overruled>,
    /// The config without what is changed by this call, where something is.
    pub before: Option<Config>,
}

/// The contents of `changes.json`.
#[derive(Default, Serialize, Deserialize)]
struct File {
    changes: Vec<Change>,
}

/// The text of `changes.json`.
pub(crate) fn written(changes: &[Change]) -> String {
    let file = serde_json::to_string_pretty(&File { changes: changes.to_vec() });
    file.unwrap_or_default() + "\n"
}

fn read(dir: &Path) -> Result<Vec<Change>> {
    let path = dir.join(CHANGES);
    let text = match read_file(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.map_err(|e| RunDirError::io("read", &path, e))?,
    };
    let file: File = serde_json::from_slice(&text).map_err(|e| RunDirError::io("read", &path, e.into()))?;
    Ok(file.changes)
}

/// The config of a run in `dir` that goes on from `checkpoint`: as given, with the changes made before and the `new` ones. A run
/// that was asked to go back (`goes_back`) is as it was before the changes at that step.
///
/// Whatever else differs from what the checkpoint was made with is refused, and so is a change that would corrupt the run or, since
/// all steps are done, would have no effect.
pub fn resume_plan(
    config: &Config,
    dir: &Path,
    checkpoint: Option<&Loaded>,
    goes_back: bool,
    new: &[String],
) -> Result<ResumePlan> {
    let Some(checkpoint) = checkpoint else {
        return match new.is_empty() {
            true => Ok(ResumePlan {
                config: config.clone(),
                changes: vec![],
                new: vec![],
                undone: vec![],
                warnings: vec![],
                overruled: vec![],
                before: None,
            }),
            false => Err(RunDirError::NothingToChange { dir: dir.to_owned() }),
        };
    };
    let step = checkpoint.step;
    let before = Config::parse(checkpoint.state["config"].as_str().unwrap_or_default(), "checkpoint", &[])?;
    let counts = |c: &Change| c.step < step || (c.step == step && !goes_back);
    let (mut changes, undone): (Vec<Change>, Vec<Change>) = read(dir)?.into_iter().partition(counts);
    let with = |changes: &[Change]| match changes {
        [] => Ok(config.clone()),
        changes => config.with_changes(changes),
    };
    let earlier = with(&changes)?;
    // Of changes that were made at this very step, the checkpoint does not know yet.
    let unsaved: Vec<String> =
        changes.iter().filter(|change| change.step == step).map(|change| change.key().to_owned()).collect();
    let asked: Vec<&str> = new.iter().filter_map(|text| text.split('=').next()).map(str::trim).collect();
    let mut given: Vec<Change> = new.iter().map(|text| Change { step, text: text.clone() }).collect();
    let mut now = with(&[&changes[..], &given].concat())?;
    let is_unsaved = |key: &str| unsaved.iter().any(|changed| changed == key);
    // A command that is repeated changes nothing, and of several values of a key the last one counts.
    let same =
        |key: &str| earlier.value(key) == now.value(key) && (before.value(key) == now.value(key) || is_unsaved(key));
    let keys: Vec<String> = given.iter().map(|change| change.key().to_owned()).collect();
    let mut at = 0..;
    given.retain(|change| {
        let later = at.next().and_then(|index: usize| keys.get(index + 1..)).unwrap_or_default();
        !same(change.key()) && !later.iter().any(|key| key == change.key())
    });
    changes.extend(given.iter().cloned());
    let kept = [
        (WARMUP, now.optimizer.warmup_steps != before.optimizer.warmup_steps),
        (VALIDATION, now.train.validation_sequences < before.train.validation_sequences),
    ];
    let kept = kept.iter().filter(|(key, differs)| *differs && !now.is_given(key));
    let kept: Vec<Change> =
        kept.map(|(key, _)| Change { step, text: format!("{key}={}", before.value(key)) }).collect();
    if !changes.is_empty() {
        changes.extend(kept);
    }
    now = with(&changes)?;

    let differences = now.differences(&before);
    let is_given = |d: &Difference| given.iter().any(|change| change.key() == d.path);
    if let Some(fixed) = differences.iter().find(|d| !d.changeable && is_given(d)) {
        return Err(RunDirError::CannotChange {
            key: fixed.path,
            before: fixed.theirs.clone(),
            now: fixed.ours.clone(),
        });
    }
    let is_changed = |path: &str| changes.iter().any(|change| change.key() == path);
    // With more steps there is room again for what a short run had to cut.
    let was_cut = |d: &Difference| {
        let (o, steps) = (&before.optimizer, before.train.steps);
        let scheduled = o.warmup_steps + o.decay_steps.unwrap_or(0);
        is_changed(STEPS) && [WARMUP, "optimizer.decay_steps"].contains(&d.path) && scheduled == steps
    };
    let accounted =
        |d: &Difference| d.changeable && (is_changed(d.path) || (d.follows && !changes.is_empty()) || was_cut(d));
    let others: Vec<Difference> = differences.iter().filter(|d| !accounted(d)).cloned().collect();
    let steps_before = if is_unsaved(STEPS) { &earlier } else { &before }.train.steps;
    let stays_finished = steps_before.max(now.train.steps) <= step;
    if !others.is_empty() {
        return Err(RunDirError::ConfigChanged { dir: dir.to_owned(), differences: others, step, stays_finished });
    }
    if now.train.steps < step {
        return Err(RunDirError::StepsDone { steps: now.train.steps, step });
    }
    if stays_finished && !given.is_empty() {
        let changes = given.iter().map(|change| change.text.clone()).collect();
        return Err(RunDirError::FinishedRun { dir: dir.to_owned(), step, changes });
    }
    if now.batches().at(step).first_sample != before.batches().at(step).first_sample {
        let [before, now] = [&before, &now].map(|config| config.value(RAMP));
        return Err(RunDirError::CannotChange { key: RAMP, before, now });
    }
    let of = |key: &str, follows| {
        let was = if is_unsaved(key) { &earlier } else { &before };
        Changed { key: key.to_owned(), before: was.value(key), now: now.value(key), follows }
    };
    let mut new: Vec<Changed> = given.iter().map(|change| of(change.key(), false)).collect();
    if !given.is_empty() {
        let rest = differences.iter().filter(|d| !is_given(d)).map(|d| d.path);
        let validation = (!given.iter().any(|change| change.key() == VALIDATION)).then_some(VALIDATION);
        let rest = rest.chain(validation).map(|key| of(key, true));
        new.extend(rest.filter(|changed| changed.before != changed.now));
    }
    let other_schedule = [WARMUP, "optimizer.decay_steps"].iter().any(|key| now.value(key) != before.value(key));
    // Of a schedule that was cut before this call, the user was told then.
    let is_news = |text: &String| match now.cut_schedule().contains(text) {
        true => other_schedule,
        false => !config.warnings().contains(text),
    };
    let warnings: Vec<String> = now.warnings().iter().filter(|text| is_news(text)).cloned().collect();
    let mut overruled = Vec::new();
    // What was changed before wins over the config, which may say something new by now.
    for change in changes.iter().filter(|c| c.step < step && config.is_given(c.key())) {
        let (key, counts, given) = (change.key(), now.value(change.key()), config.value(change.key()));
        let text = Overruled { key: key.to_owned(), step: change.step, counts, given };
        if text.counts != text.given && !overruled.contains(&text) && !asked.contains(&key) {
            overruled.push(text);
        }
    }
    let before = (!given.is_empty()).then_some(before);
    Ok(ResumePlan { config: now, changes, new, undone, warnings, overruled, before })
}

const STEPS: &str = "train.steps";
/// Its default follows the number of steps and must not change with it: warmup is over in a run that goes on.
const WARMUP: &str = "optimizer.warmup_steps";
/// Its default follows the number of steps and must not shrink with it. It grows: the few sequences of a smoke test say little of a run.
const VALIDATION: &str = "train.validation_sequences";
const RAMP: &str = "train.batch_ramp";
