//! What a layout promises, and whether it is kept: every number that is compared, with its bound.

use super::numbers::{Stored, apart, blocks, largest, most_apart, parts};
use super::replay::flipped;
use super::{Evaluated, Step, Trace};
use lockstep_config::{Config, GradientPrecision, MomentPrecision, PrecisionPolicy};
use lockstep_ir::graph::State;
use lockstep_ir::{Axes, DType, Layout, MeshAxis};
use serde::Serialize;

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
        /// Of the choices of experts in a step, those that may be others where all before them are the same.
        choices: f64,
    },
}

impl Promise {
    /// What a layout promises for a config.
    pub fn of(layout: &Layout, config: &Config) -> Self {
        // Ranks that split what a sum is over, inside a sequence, or that sum over the tokens of several.
        let inside = layout.mesh.size(Axes::of(&[MeshAxis::Cp, MeshAxis::Ep, MeshAxis::Tp]));
        let same_sums = inside == 1 && (layout.mesh.size(Axes::SEQUENCES) == 1 || config.train.reproducible);
        let rounds = config.precision.policy != PrecisionPolicy::Fp32
            || config.precision.gradients == GradientPrecision::Bf16
            || config.precision.moments != MomentPrecision::Fp32;
        let fp8 = config.precision.policy == PrecisionPolicy::Fp8;
        match (same_sums, rounds) {
            (true, _) => Promise::Identical,
            // A sum that is rounded the other way may become another byte, a sixteenth away.
            (false, true) if fp8 => {
                Promise::Close { loss: 5e-3, gradient: 0.25, update: 0.5, other_updates: 0.25, choices: 0.1 }
            }
            (false, false) => {
                Promise::Close { loss: 1e-5, gradient: 1e-4, update: 0.1, other_updates: 0.02, choices: 5e-3 }
            }
            (false, true) => {
                Promise::Close { loss: 2e-3, gradient: 5e-2, update: 0.5, other_updates: 0.1, choices: 5e-2 }
            }
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
    /// Where the model has experts: choices that went to another expert than on one rank, and all choices, of all steps and the
    /// evaluation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flipped_choices: Option<(u64, u64)>,
    /// Where some did though only rounding differs: what the layout gave with its own choices. All else here is of a second run, in
    /// which one rank's choices were replayed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub own_choices: Option<OwnChoices>,
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

/// How far a layout is from one rank while its tokens go to other experts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OwnChoices {
    /// As in [`Comparison`].
    pub loss_difference: f64,
    /// As in [`Comparison`].
    pub gradient_difference: f64,
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
    Choices,
}

impl Kind {
    const ALL: [Kind; 7] =
        [Kind::Loss, Kind::Gradient, Kind::Norm, Kind::Moment, Kind::Update, Kind::Evaluation, Kind::Choices];

    fn name(self) -> &'static str {
        match self {
            Kind::Loss => "loss",
            Kind::Gradient => "gradients",
            Kind::Norm => "gradient norm",
            Kind::Moment => "optimizer state",
            Kind::Update => "updates",
            Kind::Evaluation => "evaluation loss",
            Kind::Choices => "choices of experts",
        }
    }
}

/// A difference, of the kinds that [`Kind`] has.
pub(super) struct Difference {
    kind: Kind,
    step: usize,
    tensor: String,
    value: f64,
}

/// What a run has shown beside one rank so far.
pub(super) struct Found {
    /// Always in the same order.
    differences: Vec<Difference>,
    /// Of one rank and of the run.
    losses: Vec<(f64, f64)>,
    /// Choices of experts that differ, and all of them.
    flipped: (u64, u64),
    /// Of the run before, with its own choices.
    own: Option<OwnChoices>,
    identical: bool,
    /// What differences are measured by.
    measure: Promise,
}

impl Found {
    /// Nothing yet.
    pub fn new(promise: Promise) -> Self {
        let loose = Promise::Close { loss: 0.0, gradient: 1e-4, update: 0.1, other_updates: 0.0, choices: 0.0 };
        let measure = if promise == Promise::Identical { loose } else { promise };
        Self { differences: Vec::new(), losses: Vec::new(), flipped: (0, 0), own: None, identical: true, measure }
    }

    /// Choices of experts that are others than one rank's.
    pub fn flipped(&self) -> u64 {
        self.flipped.0
    }

    /// The same for a run that replayed choices, after one that made its own.
    pub fn after(self, own: &Found) -> Self {
        let [loss_difference, gradient_difference] = [Kind::Loss, Kind::Gradient].map(|kind| own.largest(kind));
        Self { flipped: own.flipped, own: Some(OwnChoices { loss_difference, gradient_difference }), ..self }
    }

    fn largest(&self, kind: Kind) -> f64 {
        self.differences.iter().filter(|d| d.kind == kind).map(|d| d.value).fold(0.0, f64::max)
    }

    /// How far apart the run is.
    pub fn differences(self) -> Vec<Difference> {
        self.differences
    }

    fn add(&mut self, kind: Kind, step: usize, tensor: &str, value: f64) {
        self.differences.push(Difference { kind, step, tensor: tensor.to_owned(), value });
    }

    /// Adds a number, as a share of one rank's.
    fn add_number(&mut self, kind: Kind, step: usize, (ours, theirs): (f64, f64)) {
        self.identical &= apart(ours, theirs) == 0.0;
        self.add(kind, step, "", apart(ours, theirs) / ours.abs().max(f64::MIN_POSITIVE));
    }

    /// Adds a step that began with `before`.
    pub fn add_step(&mut self, single: &Trace, step: usize, before: &[Stored], theirs: &Step) {
        let ours = &single.steps[step];
        self.losses.push((ours.loss, theirs.loss));
        let (differ, all) = flipped(&ours.chosen, &theirs.chosen, single.tokens);
        self.flipped = (self.flipped.0 + differ, self.flipped.1 + all);
        if all > 0 {
            self.add(Kind::Choices, step, "", differ as f64 / all as f64);
        }
        self.add_number(Kind::Loss, step, (ours.loss, theirs.loss));
        self.add_number(Kind::Norm, step, (ours.norm.into(), theirs.norm.into()));
        // A tensor whose gradient is nothing but rounding has no size of its own.
        let sizes = all_largest(&ours.gradients);
        let least = 1e-3 * sizes.iter().copied().fold(0.0, f64::max);
        let distances = distances(&ours.gradients, &theirs.gradients);
        for ((gradient, largest), distance) in ours.gradients.iter().zip(&sizes).zip(&distances) {
            self.identical &= *distance == 0.0;
            self.add(Kind::Gradient, step, &gradient.name, share(*distance, largest.max(least)));
        }
        let after = single.starts[step + 1].as_slice();
        let is_moment = |s: &&Stored| matches!(s.state, State::Moment { .. });
        let moments: Vec<&Stored> = after.iter().filter(is_moment).collect();
        let distances = distances_of(&moments, &theirs.after);
        for (moment, distance) in moments.iter().zip(&distances) {
            self.identical &= *distance == 0.0;
            let largest = if *distance == 0.0 { 0.0 } else { all_largest(std::slice::from_ref(*moment))[0] };
            self.add(Kind::Moment, step, &moment.name, share(*distance, largest));
        }
        // Whether parameters have the same bits is of interest only where all else has.
        if self.identical {
            let others: Vec<&Stored> = after.iter().filter(|s| !is_moment(s)).collect();
            self.identical = distances_of(&others, &theirs.after).iter().all(|distance| *distance == 0.0);
        }
        // As the rule reads them: clipped.
        let factor = |norm: f32| (single.clip / f64::from(norm)).min(1.0);
        let (mut names, mut pairs) = (Vec::new(), Vec::new());
        for state in after {
            let Some((parameter, rounding)) = updated(state, after) else { continue };
            let of = |g: &Stored| matches!(g.state, State::Gradient { of } if of == parameter.value);
            let index = ours.gradients.iter().position(of);
            let gradient = index.map(|i| &ours.gradients[i]);
            let other = gradient.and_then(|g| find(&theirs.gradients, &g.name));
            let ours = Update::of(state, &single.starts[step], after, gradient, factor(ours.norm));
            let theirs = Update::of(state, before, &theirs.after, other, factor(theirs.norm));
            let largest = index.map_or(0.0, |i| sizes[i]).max(least) * ours.as_ref().map_or(0.0, |u| u.factor);
            names.push(&parameter.name);
            pairs.push(ours.zip(theirs).map(|(ours, theirs)| UpdatePair { ours, theirs, largest, rounding }));
        }
        for (name, value) in names.into_iter().zip(other_updates(&pairs, self.measure)) {
            self.add(Kind::Update, step, name, value);
        }
    }

    /// Adds the evaluation after the last step.
    pub fn add_evaluation(&mut self, single: &Trace, evaluated: &Evaluated) {
        let ours = &single.evaluated;
        let (differ, all) = flipped(&ours.chosen, &evaluated.chosen, single.tokens);
        self.flipped = (self.flipped.0 + differ, self.flipped.1 + all);
        self.add_number(Kind::Evaluation, single.steps.len(), (ours.loss, evaluated.loss));
    }
}

/// A layout may move a number this many times as far as a change of the weights in their last bit does.
const CHAOS: f64 = 32.0;
/// Elements that may have another update, however small the tensor: where momentum and gradient cancel, a rule that looks at signs
/// goes either way.
const FREE: usize = 2;

/// What is said of a layout that gave this. `natural` are the differences of one rank from itself with weights that were changed in
/// their last bit.
pub(super) fn judge(
    layout: &Layout,
    promise: Promise,
    found: Found,
    natural: &[Difference],
    arena_bytes: Vec<u64>,
) -> Comparison {
    let [loss_difference, gradient_difference] = [Kind::Loss, Kind::Gradient].map(|kind| found.largest(kind));
    let Found { differences: found, losses, flipped, own, identical, .. } = found;
    let criteria = match promise {
        Promise::Identical => {
            let differing = if identical { 0.0 } else { 1.0 };
            let at = found.iter().find(|d| d.value > 0.0).map(at).unwrap_or_default();
            vec![Criterion { name: "bits", found: differing, bound: 0.0, promised: 0.0, raised: false, at }]
        }
        Promise::Close { .. } => {
            Kind::ALL.into_iter().filter_map(|kind| criterion(kind, promise, &found, natural)).collect()
        }
    };
    Comparison {
        layout: layout.to_string(),
        ranks: layout.mesh.ranks(),
        losses,
        flipped_choices: Some(flipped).filter(|(_, all)| *all > 0),
        own_choices: own,
        loss_difference,
        gradient_difference,
        identical,
        promise,
        kept: criteria.iter().all(Criterion::is_kept),
        criteria,
        arena_bytes,
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
    let Promise::Close { loss, gradient, other_updates, choices, .. } = promise else { return None };
    let promised = match kind {
        Kind::Loss | Kind::Evaluation => loss,
        Kind::Gradient | Kind::Norm => gradient,
        // Squares of gradients, and the norm that clips them.
        Kind::Moment => 4.0 * gradient,
        Kind::Update => other_updates,
        Kind::Choices => choices,
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

fn find<'a>(states: &'a [Stored], name: &str) -> Option<&'a Stored> {
    states.iter().find(|s| s.name == name)
}

/// A distance as a share of a size; of none, however small the size.
fn share(distance: f64, size: f64) -> f64 {
    if distance == 0.0 { 0.0 } else { distance / size }
}

/// The largest number of each tensor, without its sign.
fn all_largest(tensors: &[Stored]) -> Vec<f64> {
    let sizes: Vec<usize> = tensors.iter().map(Stored::len).collect();
    let found = parts(&sizes, |i, range| largest(&tensors[i], range));
    found.into_iter().map(|parts| parts.into_iter().fold(0.0, f64::max)).collect()
}

/// The largest difference of an element of each tensor from that of the same name. What is not there is infinitely far.
fn distances(ours: &[Stored], theirs: &[Stored]) -> Vec<f64> {
    distances_of(&ours.iter().collect::<Vec<_>>(), theirs)
}

fn distances_of(ours: &[&Stored], theirs: &[Stored]) -> Vec<f64> {
    let others: Vec<_> = ours.iter().map(|x| find(theirs, &x.name).filter(|y| y.len() == x.len())).collect();
    let sizes: Vec<usize> = ours.iter().map(|x| x.len()).collect();
    let found = parts(&sizes, |i, range| others[i].map_or(f64::INFINITY, |y| most_apart(ours[i], y, range)));
    found.into_iter().map(|parts| parts.into_iter().fold(0.0, f64::max)).collect()
}

/// The parameter that a state is the one updated of, and the rounding of its numbers: the master weights where there are
/// some, else the parameter itself.
fn updated<'a>(state: &'a Stored, all: &'a [Stored]) -> Option<(&'a Stored, f64)> {
    let rounding = match state.dtype {
        DType::BF16 => 2f64.powi(-7),
        DType::F16 => 2f64.powi(-10),
        DType::E4M3 => 2f64.powi(-3),
        DType::E5M2 => 2f64.powi(-2),
        DType::Int8 | DType::Signed8 | DType::Unsigned8 => 2f64.powi(-6),
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

/// A parameter before and after a step, and what the rule read.
struct Update<'a> {
    before: &'a Stored,
    after: &'a Stored,
    gradient: &'a Stored,
    /// What clips the gradient.
    factor: f64,
}

impl<'a> Update<'a> {
    /// That of a state, if all that it takes is there.
    fn of(
        state: &Stored,
        before: &'a [Stored],
        after: &'a [Stored],
        gradient: Option<&'a Stored>,
        factor: f64,
    ) -> Option<Self> {
        let (before, after, gradient) = (find(before, &state.name)?, find(after, &state.name)?, gradient?);
        let same = [before, after, gradient].iter().all(|x| x.len() == state.len());
        same.then_some(Self { before, after, gradient, factor })
    }

    /// Whether both go from the same bits to the same.
    fn is_same(&self, other: &Self) -> bool {
        let same = |a: &Stored, b: &Stored| std::ptr::eq(a, b) || (a.dtype == b.dtype && a.bytes == b.bytes);
        same(self.before, other.before) && same(self.after, other.after)
    }
}

/// One rank's update and another of the same parameter.
struct UpdatePair<'a> {
    ours: Update<'a>,
    theirs: Update<'a>,
    /// The largest gradient that counts as one.
    largest: f64,
    /// Of the parameter's numbers.
    rounding: f64,
}

/// For each parameter the share of elements with another update, of those whose gradient is the same and well away from zero: rules that
/// look at signs turn the rounding of a gradient that is zero into a whole step. Whether gradients are the same is judged elsewhere.
fn other_updates(pairs: &[Option<UpdatePair>], promise: Promise) -> Vec<f64> {
    let Promise::Close { gradient: bound, update, .. } = promise else { return vec![0.0; pairs.len()] };
    let differing: Vec<_> = pairs.iter().map(|p| p.as_ref().filter(|p| !p.ours.is_same(&p.theirs))).collect();
    let sizes: Vec<usize> = differing.iter().map(|p| p.map_or(0, |p| p.ours.after.len())).collect();
    let squares = parts(&sizes, |i, range| {
        let mut sum = 0.0;
        if let Some(UpdatePair { ours, .. }) = differing[i] {
            blocks([ours.before, ours.after], range, |[before, after]| {
                sum += before.iter().zip(after).map(|(b, a)| (a - b) * (a - b)).sum::<f64>();
            });
        }
        sum
    });
    let root = |(sums, size): (&Vec<f64>, &usize)| (sums.iter().sum::<f64>() / (*size).max(1) as f64).sqrt();
    let usual: Vec<f64> = squares.iter().zip(&sizes).map(root).collect();
    let counts = parts(&sizes, |i, range| {
        let (mut counted, mut other) = (0usize, 0usize);
        let Some(UpdatePair { ours, theirs, largest, rounding }) = differing[i] else { return (counted, other) };
        let away = (100.0 * bound).min(0.2) * largest;
        let tensors = [ours.before, ours.after, ours.gradient, theirs.before, theirs.after, theirs.gradient];
        blocks(tensors, range, |[before, after, gradient, other_before, other_after, other_gradient]| {
            for k in 0..before.len() {
                let (gradient, other_gradient) = (gradient[k] * ours.factor, other_gradient[k] * theirs.factor);
                let same = apart(gradient, other_gradient) <= (10.0 * bound).min(0.1) * gradient.abs();
                if !same || gradient.abs() < away || away == 0.0 {
                    continue;
                }
                counted += 1;
                let change = after[k] - before[k];
                let accepted = update * change.abs().max(usual[i]) + rounding * after[k].abs();
                let difference = apart(change, other_after[k] - other_before[k]);
                other += usize::from(difference > accepted || (difference > 0.0 && accepted.is_nan()));
            }
        });
        (counted, other)
    });
    let share = |(pair, counts): (&Option<UpdatePair>, Vec<(usize, usize)>)| {
        let all = counts.into_iter().fold((0, 0), |sum, count| (sum.0 + count.0, sum.1 + count.1));
        if pair.is_some() { all.1.saturating_sub(FREE) as f64 / all.0.max(1) as f64 } else { f64::INFINITY }
    };
    pairs.iter().zip(counts).map(share).collect()
}
