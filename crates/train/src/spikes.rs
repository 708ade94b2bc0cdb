//! Loss spikes: how far loss and gradient norm of a step may be above those before it, the updates that were skipped in a row, and
//! the samples that roll-backs have left out.
//!
//! Limits of a step are of results up to that of the step before the last: a GPU is given a step while the one before it still runs, and
//! all devices decide alike. They are made by additions, multiplications, divisions and square roots alone, which have the same bits on all hosts.
//!
//! The device decides: a program with limits sums its losses as an exact integer (`LossSum`), and `GradientNorm`
//! gives no factor where loss or norm is beyond the `StepLimits` that the host writes with every step.

use crate::metrics::number_or_nan;
use lockstep_config::SpikesConfig;
use lockstep_ir::StepLimits;
use lockstep_rundir::{ROLL_BACKS, RunDirError};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::fmt::{self, Display};
use std::path::Path;

/// From the median absolute deviation to the standard deviation of a normal distribution.
const DEVIATION: f64 = 1.4826;

/// The least deviation of losses that counts, of the median.
const LEAST: f64 = 0.01;

/// The least ratio of gradient norms that counts as a deviation.
const LEAST_RATIO: f64 = 1.17;

/// A step whose update was not applied.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SkippedStep {
    /// Which.
    pub step: u64,
    /// Its loss.
    #[serde(deserialize_with = "number_or_nan")]
    pub loss: f64,
    /// The norm of its gradient.
    #[serde(deserialize_with = "number_or_nan")]
    pub grad_norm: f32,
    /// What its loss could have been, where that is limited.
    pub loss_limit: Option<f32>,
    /// What the norm could have been.
    pub grad_norm_limit: Option<f32>,
}

impl Display for SkippedStep {
    /// Why it was skipped.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { loss, grad_norm, .. } = *self;
        match (self.loss_limit, self.grad_norm_limit) {
            _ if !grad_norm.is_finite() => write!(f, "the gradient is not finite"),
            (Some(limit), _) if loss > f64::from(limit) => write!(f, "the loss of {loss:.4} is above {limit:.4}"),
            (_, Some(limit)) => write!(f, "the gradient norm of {grad_norm:.4} is above {limit:.4}"),
            (_, None) => write!(f, "the loss of {loss:.4} is too high"),
        }
    }
}

/// A roll-back, and the samples that it left out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RollBack {
    /// The how-manieth of the run, from 1.
    pub number: u64,
    /// Steps finished at the checkpoint that the run went back to; 0 for its beginning.
    pub to: u64,
    /// Steps finished before, the skipped ones included.
    pub from: u64,
    /// The first sample that was left out, in the order of the run.
    pub first_sample: u64,
    /// How many: those of all steps that the run went back over.
    pub samples: u64,
    /// The steps in a row whose updates were skipped.
    pub skipped: Vec<SkippedStep>,
}

impl Display for RollBack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { to, from, samples, .. } = self;
        let causes: Vec<String> = self.skipped.iter().map(|s| format!("step {}: {s}", s.step)).collect();
        write!(f, "from step {from} to step {to}, {samples} sequences left out ({})", causes.join("; "))
    }
}

/// The contents of `roll_backs.json`.
#[derive(Default, Serialize, Deserialize)]
struct File {
    roll_backs: Vec<RollBack>,
}

/// The text of `roll_backs.json`.
pub(crate) fn written(roll_backs: &[RollBack]) -> String {
    let file = serde_json::to_string_pretty(&File { roll_backs: roll_backs.to_vec() });
    file.unwrap_or_default() + "\n"
}

/// The roll-backs that count for a run that goes on after `step`: those of its directory, or, where that was lost, of its checkpoint.
pub(crate) fn read(dir: &Path, checkpoint: Option<&Value>, step: u64) -> Result<Vec<RollBack>, RunDirError> {
    let path = dir.join(ROLL_BACKS);
    let mut all: Vec<RollBack> = match lockstep_telemetry::read_file(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let saved = checkpoint.map(|state| serde_json::from_value(state["spikes"]["roll_backs"].clone()));
            saved.and_then(Result::ok).unwrap_or_default()
        }
        text => {
            let text = text.map_err(|e| RunDirError::io("read", &path, e))?;
            serde_json::from_slice::<File>(&text).map_err(|e| RunDirError::io("read", &path, e.into()))?.roll_backs
        }
    };
    all.retain(|roll_back| roll_back.to <= step);
    Ok(all)
}

/// Samples that roll-backs of the run in `dir` have left out before the step after the first `before`.
pub fn left_out(dir: &Path, before: u64) -> Result<u64, RunDirError> {
    Ok(Spikes { roll_backs: read(dir, None, before)?, ..Spikes::default() }.left_out(before))
}

/// A step whose update was applied: bits, so that a checkpoint gives back what it took.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Seen {
    step: u64,
    loss: u64,
    grad_norm: u32,
}

/// What is known of the steps of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Spikes {
    seen: VecDeque<Seen>,
    /// In a row, up to the last step.
    pub(crate) skipped: Vec<SkippedStep>,
    pub(crate) roll_backs: Vec<RollBack>,
}

impl Spikes {
    /// As a checkpoint has them.
    pub(crate) fn to_json(&self) -> Value {
        json!({ "seen": self.seen, "skipped": self.skipped, "roll_backs": self.roll_backs })
    }

    /// From a checkpoint's state, and with these roll-backs. A checkpoint of before there were any has no steps.
    pub(crate) fn of(state: &Value, roll_backs: Vec<RollBack>) -> Self {
        let seen = serde_json::from_value(state["spikes"]["seen"].clone()).unwrap_or_default();
        let skipped = serde_json::from_value(state["spikes"]["skipped"].clone()).unwrap_or_default();
        Self { seen, skipped, roll_backs }
    }

    /// What loss and gradient norm of a step, counted from 1, may be.
    pub(crate) fn limits(&self, rules: &SpikesConfig, step: u64) -> StepLimits {
        let known: Vec<&Seen> = self.seen.iter().filter(|seen| seen.step + 1 < step).collect();
        match known.len().checked_sub(rules.window) {
            Some(first) if rules.skip => StepLimits {
                loss: loss_limit(known[first..].iter().map(|seen| f64::from_bits(seen.loss)).collect(), rules.z),
                grad_norm: norm_limit(
                    known[first..].iter().map(|seen| f64::from(f32::from_bits(seen.grad_norm))).collect(),
                    rules.z,
                ),
            },
            _ => StepLimits::NONE,
        }
    }

    /// Takes in a step whose update was applied.
    pub(crate) fn applied(&mut self, rules: &SpikesConfig, step: u64, loss: f64, grad_norm: f32) {
        self.skipped.clear();
        if rules.skip {
            self.seen.push_back(Seen { step, loss: loss.to_bits(), grad_norm: grad_norm.to_bits() });
            // One more than count: the newest does not yet.
            let surplus = self.seen.len().saturating_sub(rules.window + 1);
            self.seen.drain(..surplus);
        }
    }

    /// Samples that were left out before the step after the first `before`.
    pub(crate) fn left_out(&self, before: u64) -> u64 {
        self.roll_backs.iter().filter(|r| r.to <= before).map(|r| r.samples).sum()
    }
}

/// The median, and this many robust standard deviations.
fn loss_limit(mut x: Vec<f64>, z: f64) -> f32 {
    let center = median(&mut x);
    x.iter_mut().for_each(|x| *x = (*x - center).abs());
    let deviation = (DEVIATION * median(&mut x)).max(LEAST * center.abs());
    (center + z * deviation) as f32
}

/// The same of logarithms: gradient norms vary by factors, and one of many times the median is no rare thing where they vary much. The median of
/// ratios to the median, which is that of the logarithms' deviations, to a power.
fn norm_limit(mut x: Vec<f64>, z: f64) -> f32 {
    let center = median(&mut x);
    if center <= 0.0 {
        return f32::INFINITY;
    }
    x.iter_mut().for_each(|x| *x = (*x / center).max(center / *x));
    (center * power(median(&mut x).max(LEAST_RATIO), DEVIATION * z)) as f32
}

/// A base of at least 1 to a power that is not negative: whole powers by squaring, the rest by 32 square roots.
fn power(base: f64, exponent: f64) -> f64 {
    let (mut whole, mut rest) = (exponent.min(f64::from(u32::MAX)) as u32, exponent.fract());
    let (mut result, mut square, mut root) = (1.0, base, base);
    while whole > 0 {
        if whole % 2 == 1 {
            result *= square;
        }
        (whole, square) = (whole / 2, square * square);
    }
    for _ in 0..32 {
        (rest, root) = (2.0 * rest, root.sqrt());
        if rest >= 1.0 {
            (rest, result) = (rest - 1.0, result * root);
        }
    }
    result
}

fn median(x: &mut [f64]) -> f64 {
    x.sort_by(f64::total_cmp);
    match x.len() {
        0 => f64::INFINITY,
        n if n % 2 == 1 => x[n / 2],
        n => 0.5 * (x[n / 2 - 1] + x[n / 2]),
    }
}

/// How often a run has rolled back.
pub(crate) fn rolled_back(roll_backs: &[RollBack]) -> u64 {
    roll_backs.last().map_or(0, |last| last.number)
}

/// What the spike policy did, a line each.
pub(crate) fn spike_report(roll_backs: &[RollBack], skipped: &[SkippedStep]) -> String {
    let done = roll_backs.iter().map(|roll_back| format!("\n  rolled back {roll_back}"));
    done.chain(skipped.iter().map(|s| format!("\n  step {}: {s}", s.step))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(window: usize) -> SpikesConfig {
        SpikesConfig { skip: true, z: 10.0, window, skips: 3, roll_backs: 3 }
    }

    #[test]
    fn a_limit_is_so_many_robust_deviations_above_the_median() {
        // Median 4, absolute deviations 0 1 1 2 96.
        let expected = 4.0 + 10.0 * 1.4826;
        assert!((f64::from(loss_limit(vec![5.0, 2.0, 100.0, 3.0, 4.0], 10.0)) - expected).abs() < 1e-5);
        // What does not vary at all may vary by 1%.
        assert_eq!(loss_limit(vec![2.0; 6], 10.0), 2.2);
        assert_eq!(median(&mut [1.0, 4.0, 2.0, 3.0]), 2.5);
    }

    #[test]
    fn a_limit_of_gradient_norms_is_so_many_deviations_of_their_logarithms() {
        // Median 4, ratios 1, 1.25, 4/3, 2, 25.
        let expected = 4.0 * (4.0f64 / 3.0).powf(3.0 * DEVIATION);
        let found = f64::from(norm_limit(vec![5.0, 2.0, 100.0, 3.0, 4.0], 3.0));
        assert!((found / expected - 1.0).abs() < 1e-6, "{found} {expected}");
        // What does not vary may become ten times as large, and what is scaled has its limit scaled.
        let even = norm_limit(vec![3.0; 6], 10.0);
        assert!((30.0..31.0).contains(&even), "{even}");
        assert_eq!(norm_limit(vec![1.5; 6], 10.0), even / 2.0);
        // Where there is no gradient at all, nothing is known.
        assert_eq!(norm_limit(vec![0.0; 6], 10.0), f32::INFINITY);
        assert!(norm_limit(vec![1.0, 0.0, 1e30, 1.0, 1e-30, 7.0], 10.0) == f32::INFINITY);
    }

    #[test]
    fn powers_are_those_of_the_library() {
        for base in [1.0, 1.05, 1.3, 2.0, 7.5] {
            for exponent in [0.0, 0.25, 0.999, 1.0, 3.7, 14.826, 100.5] {
                let expected = f64::powf(base, exponent);
                assert!((power(base, exponent) / expected - 1.0).abs() < 1e-9, "{base}^{exponent}");
            }
        }
        assert_eq!(power(2.0, 1e12), f64::INFINITY);
        assert_eq!(power(1.0, 1e12), 1.0);
    }

    #[test]
    fn limits_are_of_a_whole_window_of_steps_up_to_the_one_before_the_last() {
        let (rules, mut spikes) = (rules(4), Spikes::default());
        for step in 1..=4 {
            spikes.applied(&rules, step, 2.0, 1.0);
        }
        assert_eq!(spikes.limits(&rules, 5), StepLimits::NONE);
        let four = spikes.limits(&rules, 6);
        assert_eq!(four, StepLimits { loss: 2.2, grad_norm: norm_limit(vec![1.0; 4], 10.0) });
        // Whether the step before it is known already changes nothing.
        spikes.applied(&rules, 5, 50.0, 1.0);
        assert_eq!(spikes.limits(&rules, 6), four);
        let saved = Spikes::of(&json!({ "spikes": spikes.to_json() }), Vec::new());
        assert_eq!(saved, spikes);
        assert_eq!(spikes.limits(&SpikesConfig { skip: false, ..rules }, 6), StepLimits::NONE);
        (6..60).for_each(|step| spikes.applied(&rules, step, 2.0, 1.0));
        assert_eq!(spikes.seen.len(), 5);
    }

    #[test]
    fn roll_backs_leave_samples_out_from_their_step_on() {
        let roll_back =
            |to, samples| RollBack { number: 1, to, from: to + 3, first_sample: 0, samples, skipped: Vec::new() };
        let spikes = Spikes { roll_backs: vec![roll_back(10, 12), roll_back(20, 8)], ..Spikes::default() };
        assert_eq!([9, 10, 19, 20, 99].map(|before| spikes.left_out(before)), [0, 12, 12, 20, 20]);
        let dir = tempfile::tempdir().unwrap();
        let state = json!({ "spikes": spikes.to_json() });
        assert_eq!(read(dir.path(), Some(&state), 15).unwrap(), spikes.roll_backs[..1]);
        std::fs::write(dir.path().join(ROLL_BACKS), written(&spikes.roll_backs[1..])).unwrap();
        assert_eq!(read(dir.path(), Some(&state), 20).unwrap(), spikes.roll_backs[1..]);
        std::fs::write(dir.path().join(ROLL_BACKS), "{").unwrap();
        assert!(read(dir.path(), None, 20).is_err());
    }

    #[test]
    fn a_skipped_step_says_why() {
        let step =
            SkippedStep { step: 7, loss: 9.0, grad_norm: 3.0, loss_limit: Some(4.0), grad_norm_limit: Some(2.0) };
        assert_eq!(step.to_string(), "the loss of 9.0000 is above 4.0000");
        let norm = SkippedStep { loss: 1.0, ..step };
        assert_eq!(norm.to_string(), "the gradient norm of 3.0000 is above 2.0000");
        let lost = SkippedStep { grad_norm: f32::NAN, ..step };
        assert_eq!(lost.to_string(), "the gradient is not finite");
        let text = serde_json::to_string(&lost).unwrap();
        assert!(serde_json::from_str::<SkippedStep>(&text).unwrap().grad_norm.is_nan());
    }
}
