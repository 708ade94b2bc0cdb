//! What a layout promises, and whether it is kept: every number that is compared, with its bound.

use super::{Step, Stored, Trace};
use lockstep_config::{Config, GradientPrecision, PrecisionPolicy};
use lockstep_exec::cpu;
use lockstep_ir::graph::State;
use lockstep_ir::{Axes, DType, Layout, MeshAxis};
use serde::Serialize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// What a layout promises about one rank's numbers, step by step from the same state.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Promise {
    /// The same bits.
    Identical,
    /// Sums are taken in another order: differences stay below these shares.
    Close {
        /// Of the loss, in training and evaluation.
        loss: f64,
        /// Of a gradient tensor's largest element, and of norms.
        gradient: f64,
        /// Of the update of an element, where both have the same gradient.
        update: f64,
        /// Of a tensor's elements, those that may have another update.
        other_updates: f64,
    },
}

impl Promise {
    /// What a layout promises for a config.
    pub fn of(layout: &Layout, config: &Config) -> Self {
        // Ranks that split what a sum is over, inside a sequence.
        let inside = layout.mesh.size(Axes::of(&[MeshAxis::Cp, MeshAxis::Tp]));
        let same_sums = inside == 1 && (layout.mesh.size(Axes::SEQUENCES) == 1 || config.train.reproducible);
        let rounds =
            config.precision.policy != PrecisionPolicy::Fp32 || config.precision.gradients == GradientPrecision::Bf16;
        match (same_sums, rounds) {
            (true, _) => Promise::Identical,
            (false, false) => Promise::Close { loss: 1e-5, gradient: 1e-4, update: 0.1, other_updates: 0.02 },
            (false, true) => Promise::Close { loss: 2e-3, gradient: 5e-2, update: 0.5, other_updates: 0.1 },
        }
    }
}

/// One thing that is compared, where it comes closest to its bound or leaves it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Criterion {
    /// What is compared.
    pub name: &'static str,
    /// How far apart it is.
    pub found: f64,
    /// How far apart it may be.
    pub bound: f64,
    /// What is promised.
    pub promised: f64,
    /// Whether the bound is more than that, because one rank alone differs by a part of it when its weights
    /// change in the last bit.
    pub raised: bool,
    /// The step, from 1 on, and where it is of tensors, which.
    pub at: String,
}

impl Criterion {
    /// Whether it is inside its bound.
    pub fn is_kept(&self) -> bool {
        self.found <= self.bound
    }
}

/// What one layout gave, beside one rank.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The layout, in short.
    pub layout: String,
    /// Its ranks.
    pub ranks: usize,
    /// Losses of one rank and of the layout, step by step, in nats per token.
    pub losses: Vec<(f64, f64)>,
    /// The largest difference of a loss, as a share of one rank's.
    pub loss_difference: f64,
    /// The largest difference of a gradient element, as a share of its tensor's largest element.
    pub gradient_difference: f64,
    /// Whether every loss, norm, gradient, parameter and moment has the same bits.
    pub identical: bool,
    /// What the layout promises.
    pub promise: Promise,
    /// All that is compared.
    pub criteria: Vec<Criterion>,
    /// Whether the layout keeps its promise: all of them are inside their bounds.
    pub kept: bool,
    /// Bytes of the arena of a rank of each stage.
    pub arena_bytes: Vec<u64>,
}

/// What is compared. The order is that of reports.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Loss,
    Gradient,
    Norm,
    Moment,
    Update,
    Evaluation,
}

impl Kind {
    const ALL: [Kind; 6] = [Kind::Loss, Kind::Gradient, Kind::Norm, Kind::Moment, Kind::Update, Kind::Evaluation];

    fn name(self) -> &'static str {
        match self {
            Kind::Loss => "loss",
            Kind::Gradient => "gradients",
            Kind::Norm => "gradient norm",
            Kind::Moment => "optimizer state",
            Kind::Update => "updates",
            Kind::Evaluation => "evaluation loss",
        }
    }
}

/// Differences of one rank from itself with weights that were changed in their last bit, for the promise that they were measured by.
#[derive(Default)]
pub(super) struct Natural(Option<(Promise, Vec<Difference>)>);

impl Natural {
    fn of(&mut self, single: &Trace, disturbed: Option<&Trace>, promise: Promise) -> &[Difference] {
        if self.0.as_ref().is_none_or(|(of, _)| *of != promise) {
            self.0 = disturbed.map(|disturbed| (promise, differences(single, disturbed, promise)));
        }
        self.0.as_ref().map_or(&[], |(_, found)| found)
    }
}

/// A difference, of the kinds that [`Kind`] has.
struct Difference {
    kind: Kind,
    step: usize,
    tensor: String,
    value: f64,
}

/// A layout may move a number this many times as far as a change of the weights in their last bit does.
const CHAOS: f64 = 32.0;
/// Elements that may have another update, however small the tensor: where momentum and gradient cancel, a rule that looks at signs
/// goes either way.
const FREE: usize = 2;

pub(super) fn judge(
    layout: &Layout,
    promise: Promise,
    single: &Trace,
    (disturbed, natural): (Option<&Trace>, &mut Natural),
    parallel: &Trace,
) -> Comparison {
    let identical = same_bits(single, parallel);
    let loose = Promise::Close { loss: 0.0, gradient: 1e-4, update: 0.1, other_updates: 0.0 };
    let measure = if promise == Promise::Identical { loose } else { promise };
    let found = differences(single, parallel, measure);
    let largest = |kind: Kind| found.iter().filter(|d| d.kind == kind).map(|d| d.value).fold(0.0, f64::max);
    let criteria = match promise {
        Promise::Identical => {
            let differing = if identical { 0.0 } else { 1.0 };
            let at = found.iter().find(|d| d.value > 0.0).map(at).unwrap_or_default();
            vec![Criterion { name: "bits", found: differing, bound: 0.0, promised: 0.0, raised: false, at }]
        }
        Promise::Close { .. } => {
            let natural = natural.of(single, disturbed, promise);
            Kind::ALL.into_iter().filter_map(|kind| criterion(kind, promise, &found, natural)).collect()
        }
    };
    Comparison {
        layout: layout.to_string(),
        ranks: layout.mesh.ranks(),
        losses: single.steps.iter().zip(&parallel.steps).map(|(a, b)| (a.loss, b.loss)).collect(),
        loss_difference: largest(Kind::Loss),
        gradient_difference: largest(Kind::Gradient),
        identical,
        promise,
        kept: criteria.iter().all(Criterion::is_kept),
        criteria,
        arena_bytes: parallel.arena_bytes.clone(),
    }
}

fn at(d: &Difference) -> String {
    match (d.kind, d.tensor.as_str()) {
        (Kind::Evaluation, _) => "after the last step".to_owned(),
        (_, "") => format!("step {}", d.step + 1),
        (_, tensor) => format!("step {}, {tensor}", d.step + 1),
    }
}

/// The difference of a kind that comes closest to its bound. `natural` has the same list for one rank whose weights were changed in
/// the last bit.
fn criterion(kind: Kind, promise: Promise, found: &[Difference], natural: &[Difference]) -> Option<Criterion> {
    let Promise::Close { loss, gradient, other_updates, .. } = promise else { return None };
    let promised = match kind {
        Kind::Loss | Kind::Evaluation => loss,
        Kind::Gradient | Kind::Norm => gradient,
        // Squares of gradients, and the norm that clips them.
        Kind::Moment => 4.0 * gradient,
        Kind::Update => other_updates,
    };
    let criteria = found.iter().enumerate().filter(|(_, d)| d.kind == kind).map(|(i, d)| {
        let chaos = natural.get(i).map_or(0.0, |n| CHAOS * n.value);
        let (found, bound, raised) = (d.value, promised.max(chaos), chaos > promised);
        Criterion { name: kind.name(), found, bound, promised, raised, at: at(d) }
    });
    // What is farthest outside, or closest to the border.
    let share = |c: &Criterion| if c.found == 0.0 { 0.0 } else { c.found / c.bound };
    criteria.max_by(|a, b| {
        let kept = |c: &Criterion| !c.is_kept();
        kept(a).cmp(&kept(b)).then(share(a).total_cmp(&share(b)))
    })
}

/// A number beside none is infinitely far from it.
fn apart(a: f64, b: f64) -> f64 {
    match (a.is_nan(), b.is_nan()) {
        (true, true) => 0.0,
        (false, false) if a == b => 0.0,
        (false, false) => Some((a - b).abs()).filter(|x| x.is_finite()).unwrap_or(f64::INFINITY),
        _ => f64::INFINITY,
    }
}

fn same_bits(a: &Trace, b: &Trace) -> bool {
    let same = |a: f64, b: f64| a == b || (a.is_nan() && b.is_nan());
    let all_same = |a: &[Stored], b: &[Stored]| {
        a.len() == b.len()
            && a.iter().all(|a| {
                find(b, &a.name).is_some_and(|b| {
                    a.bytes == b.bytes || { a.len() == b.len() && (0..a.len()).all(|i| same(a.number(i), b.number(i))) }
                })
            })
    };
    let step = |(a, b): (&Step, &Step)| {
        same(a.loss, b.loss)
            && same(a.norm.into(), b.norm.into())
            && all_same(&a.gradients, &b.gradients)
            && all_same(&a.after, &b.after)
    };
    same(a.evaluated, b.evaluated) && a.steps.iter().zip(&b.steps).all(step)
}

fn find<'a>(states: &'a [Stored], name: &str) -> Option<&'a Stored> {
    states.iter().find(|s| s.name == name)
}

fn largest(x: &Stored) -> f64 {
    (0..x.len()).fold(0.0, |m: f64, i| m.max(x.number(i).abs()))
}

/// What `f` gives for each of so many, in their order, on all cores: tensors do not depend on each other.
pub(super) fn each<R: Send>(count: usize, f: impl Fn(usize) -> R + Sync) -> Vec<R> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(count)));
    std::thread::scope(|scope| {
        for _ in 0..cpu::cores().min(count) {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= count {
                        break;
                    }
                    let result = f(i);
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((i, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Every difference of two runs of the same steps, always in the same order.
fn differences(a: &Trace, b: &Trace, promise: Promise) -> Vec<Difference> {
    let mut all = Vec::new();
    let relative = |a: f64, b: f64| apart(a, b) / a.abs().max(f64::MIN_POSITIVE);
    for (step, (ours, theirs)) in a.steps.iter().zip(&b.steps).enumerate() {
        let difference = |kind, tensor: &str, value| Difference { kind, step, tensor: tensor.to_owned(), value };
        all.push(difference(Kind::Loss, "", relative(ours.loss, theirs.loss)));
        all.push(difference(Kind::Norm, "", relative(ours.norm.into(), theirs.norm.into())));
        // A tensor whose gradient is nothing but rounding has no size of its own.
        let sizes = each(ours.gradients.len(), |i| largest(&ours.gradients[i]));
        let least = 1e-3 * sizes.into_iter().fold(0.0, f64::max);
        all.extend(each(ours.gradients.len(), |i| {
            let gradient = &ours.gradients[i];
            let value = most(gradient, find(&theirs.gradients, &gradient.name), least);
            difference(Kind::Gradient, &gradient.name, value)
        }));
        let of_state = |i: usize| {
            let state = &ours.after[i];
            if let State::Moment { .. } = &state.state {
                let value = most(state, find(&theirs.after, &state.name), 0.0);
                return Some(difference(Kind::Moment, &state.name, value));
            }
            let (parameter, rounding) = updated(state, &ours.after)?;
            let of = |g: &&Stored| matches!(g.state, State::Gradient { of } if of == parameter.value);
            // As the rule reads them: clipped.
            let factor = |norm: f32| (a.clip / f64::from(norm)).min(1.0);
            let update = |before, after, gradient, norm| {
                let (before, after, gradient) = (find(before, &state.name)?, find(after, &state.name)?, gradient?);
                let same = [before, after, gradient].iter().all(|x| x.len() == state.len());
                same.then_some(Update { before, after, gradient, factor: factor(norm) })
            };
            let gradient = ours.gradients.iter().find(of);
            let other = gradient.and_then(|g| find(&theirs.gradients, &g.name));
            let value = match (
                update(&a.starts[step], &ours.after, gradient, ours.norm),
                update(&b.starts[step], &theirs.after, other, theirs.norm),
            ) {
                (Some(x), Some(y)) => other_updates(&x, &y, least * factor(ours.norm), rounding, promise),
                _ => f64::INFINITY,
            };
            Some(difference(Kind::Update, &parameter.name, value))
        };
        all.extend(each(ours.after.len(), of_state).into_iter().flatten());
    }
    let step = a.steps.len();
    let value = relative(a.evaluated, b.evaluated);
    all.push(Difference { kind: Kind::Evaluation, step, tensor: String::new(), value });
    all
}

/// The largest difference of an element, as a share of the tensor's largest, or of `least` where that is more.
fn most(x: &Stored, other: Option<&Stored>, least: f64) -> f64 {
    let y = match other {
        Some(y) if y.len() == x.len() => y,
        _ => return f64::INFINITY,
    };
    let difference = (0..x.len()).map(|i| apart(x.number(i), y.number(i))).fold(0.0, f64::max);
    if difference == 0.0 { 0.0 } else { difference / largest(x).max(least) }
}

/// The parameter that a state is the one updated of, and the rounding of its numbers: the master weights where there are
/// some, else the parameter itself.
fn updated<'a>(state: &'a Stored, all: &'a [Stored]) -> Option<(&'a Stored, f64)> {
    let rounding = match state.dtype {
        DType::BF16 => 2f64.powi(-7),
        DType::F16 => 2f64.powi(-10),
        DType::F32 | DType::F64 | DType::U32 | DType::Fixed64 => 2f64.powi(-22),
    };
    match &state.state {
        State::Master { of } => Some((all.iter().find(|s| s.value == *of)?, rounding)),
        State::Parameter(_) => {
            let has_master = all.iter().any(|s| matches!(s.state, State::Master { of } if of == state.value));
            (!has_master).then_some((state, rounding))
        }
        _ => None,
    }
}

/// The share of elements with another update, of those whose gradient is the same and well away from zero: rules that look at
/// signs turn the rounding of a gradient that is zero into a whole step. Whether gradients are the same is judged elsewhere.
fn other_updates(ours: &Update, theirs: &Update, least: f64, rounding: f64, promise: Promise) -> f64 {
    let Promise::Close { gradient: bound, update, .. } = promise else { return 0.0 };
    let count = ours.after.len();
    let largest = (0..count).fold(0.0, |m: f64, i| m.max(ours.gradient(i).abs()));
    let away = (100.0 * bound).min(0.2) * largest.max(least);
    let usual = ((0..count).map(|i| ours.change(i)).map(|x| x * x).sum::<f64>() / count.max(1) as f64).sqrt();
    let (mut counted, mut other) = (0, 0);
    for i in 0..count {
        let gradient = ours.gradient(i);
        let same = apart(gradient, theirs.gradient(i)) <= (10.0 * bound).min(0.1) * gradient.abs();
        if !same || gradient.abs() < away || away == 0.0 {
            continue;
        }
        counted += 1;
        let change = ours.change(i);
        let accepted = update * change.abs().max(usual) + rounding * ours.after.number(i).abs();
        let difference = apart(change, theirs.change(i));
        other += usize::from(difference > accepted || (difference > 0.0 && accepted.is_nan()));
    }
    other.saturating_sub(FREE) as f64 / f64::from(counted.max(1))
}

/// A parameter before and after a step, and what the rule read.
struct Update<'a> {
    before: &'a Stored,
    after: &'a Stored,
    gradient: &'a Stored,
    /// What clips the gradient.
    factor: f64,
}

impl Update<'_> {
    #[inline]
    fn change(&self, i: usize) -> f64 {
        self.after.number(i) - self.before.number(i)
    }

    #[inline]
    fn gradient(&self, i: usize) -> f64 {
        self.gradient.number(i) * self.factor
    }
}
