//! What a run does otherwise from a step on: `--change key=value` on resume, kept in the run directory.

use crate::{TrainError, learning_rate};
use lockstep_checkpoint::Loaded;
use lockstep_config::{Change, Config, Difference};
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

/// The config that a run goes on with.
#[derive(Debug)]
pub(crate) struct Course {
    pub(crate) config: Config,
    /// All changes that count, in order.
    pub(crate) changes: Vec<Change>,
    /// What is changed by this call.
    pub(crate) new: Vec<Changed>,
    /// Earlier changes that come after the step from which the run goes on: they count no more.
    pub(crate) undone: Vec<Change>,
    /// What the user should know of the config with its changes, and not of the one without.
    pub(crate) warnings: Vec<String>,
    /// Learning rate of the next step, before and after, where what is changed by this call changes it.
    pub(crate) rates: Option<(f64, f64)>,
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

fn read(dir: &Path) -> Result<Vec<Change>, TrainError> {
    let path = dir.join(CHANGES);
    let text = match std::fs::read(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.map_err(|e| TrainError::io("read", &path, e))?,
    };
    let file: File = serde_json::from_slice(&text).map_err(|e| TrainError::io("read", &path, e.into()))?;
    Ok(file.changes)
}

/// The config of a run in `dir` that goes on from `checkpoint`: as given, with the changes made before and the `new` ones.
///
/// Whatever else differs from what the checkpoint was made with is refused, and so is a change that would corrupt the run.
pub(crate) fn course(
    config: &Config,
    dir: &Path,
    checkpoint: Option<&Loaded>,
    new: &[String],
) -> Result<Course, TrainError> {
    let Some(checkpoint) = checkpoint else {
        return match new.is_empty() {
            true => Ok(Course {
                config: config.clone(),
                changes: vec![],
                new: vec![],
                undone: vec![],
                warnings: vec![],
                rates: None,
            }),
            false => Err(TrainError::NothingToChange { dir: dir.to_owned() }),
        };
    };
    let step = checkpoint.step;
    let before = Config::parse(checkpoint.state["config"].as_str().unwrap_or_default(), "checkpoint", &[])?;
    let (mut changes, undone): (Vec<Change>, Vec<Change>) = read(dir)?.into_iter().partition(|c| c.step <= step);
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
    // A command that is repeated changes nothing.
    let same = |c: &Change| [&earlier, &before].iter().all(|other| other.value(c.key()) == now.value(c.key()));
    given.retain(|change| !same(change));
    changes.extend(given.iter().cloned());
    let kept = KEPT.iter().filter(|key| !now.is_given(key) && now.value(key) != before.value(key));
    let kept: Vec<Change> = kept.map(|key| Change { step, text: format!("{key}={}", before.value(key)) }).collect();
    if !changes.is_empty() {
        changes.extend(kept);
    }
    now = with(&changes)?;

    let differences = now.differences(&before);
    let is_given = |d: &Difference| given.iter().any(|change| change.key() == d.path);
    if let Some(fixed) = differences.iter().find(|d| !d.changeable && is_given(d)) {
        return Err(TrainError::CannotChange {
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
        is_changed("train.steps")
            && ["optimizer.warmup_steps", "optimizer.decay_steps"].contains(&d.path)
            && scheduled == steps
    };
    let accounted =
        |d: &Difference| d.changeable && (is_changed(d.path) || (d.follows && !changes.is_empty()) || was_cut(d));
    let others: Vec<Difference> = differences.iter().filter(|d| !accounted(d)).cloned().collect();
    if !others.is_empty() {
        return Err(TrainError::ConfigChanged { dir: dir.to_owned(), differences: others });
    }
    if now.train.steps < step {
        return Err(TrainError::StepsDone { steps: now.train.steps, step });
    }
    if now.batches().at(step).first_sample != before.batches().at(step).first_sample {
        let [before, now] = [&before, &now].map(|config| config.value(RAMP));
        return Err(TrainError::CannotChange { key: RAMP, before, now });
    }
    let of = |key: &str, follows| {
        let was = if unsaved.iter().any(|changed| changed == key) { &earlier } else { &before };
        Changed { key: key.to_owned(), before: was.value(key), now: now.value(key), follows }
    };
    let mut new: Vec<Changed> = given.iter().map(|change| of(change.key(), false)).collect();
    if !given.is_empty() {
        let rest = differences.iter().filter(|d| !is_given(d)).map(|d| of(d.path, true));
        new.extend(rest.filter(|changed| changed.before != changed.now));
    }
    let [rate_before, rate_now] = [&before, &now].map(|config| learning_rate(config, step));
    let rates = (!given.is_empty() && rate_before != rate_now).then_some((rate_before, rate_now));
    let mut warnings: Vec<String> =
        now.warnings().iter().filter(|text| !config.warnings().contains(text)).cloned().collect();
    // What was changed before wins over the config, which may say something new by now.
    for change in changes.iter().filter(|c| c.step < step && config.is_given(c.key())) {
        let (key, counts, given) = (change.key(), now.value(change.key()), config.value(change.key()));
        let text =
            format!("{key} = {counts} since --change at step {}; {given} in the config does not count", change.step);
        if counts != given && !warnings.contains(&text) && !asked.contains(&key) {
            warnings.push(text);
        }
    }
    Ok(Course { config: now, changes, new, undone, warnings, rates })
}

/// Keys whose defaults follow the number of steps and must not grow with it: warmup lies behind a run that goes on, and its
/// validation losses are to be compared.
const KEPT: [&str; 2] = ["optimizer.warmup_steps", "train.validation_sequences"];
const RAMP: &str = "train.batch_ramp";
