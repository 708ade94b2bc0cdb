//! What whoever signs a plan should know besides its figures.

use super::searched;
use lockstep_config::PrecisionPolicy;
use lockstep_ir::MeshAxis;
use lockstep_ir::units::{self, counted};
use lockstep_plan::{RankedLayout, Rates, SIMPLER, SearchRequest, evaluate};

/// By how much fewer GPUs must be faster to be named.
const FASTER: f64 = 1.02;

/// The share of a step that GPUs wait from which on half of them are tried.
const MOSTLY: f64 = 0.4;

/// Notes on the layouts that were found, the best first.
pub(super) fn of(asked: &SearchRequest, best: &[RankedLayout]) -> Vec<String> {
    let Some(first) = best.first() else { return Vec::new() };
    [precision(asked, first), tensor_parallel(asked, first), ties(best), fewer(asked, first)]
        .into_iter()
        .flatten()
        .collect()
}

/// Without a precision of its own a run is in fp32: what bf16 would give.
fn precision(asked: &SearchRequest, first: &RankedLayout) -> Option<String> {
    let config = asked.config;
    if config.precision.policy != PrecisionPolicy::Fp32 || config.is_given("precision.policy") {
        return None;
    }
    let said = "precision.policy is not set: this is a plan in fp32";
    let mut mixed = first.choice.config(config);
    mixed.precision.policy = PrecisionPolicy::Bf16;
    let found = evaluate(asked.machine, &mixed, Rates::Catalogue(asked.hardware)).ok();
    Some(found.map_or(said.to_owned(), |found| {
        let (step, now) = (found.forecast.step_s, first.evaluated.forecast.step_s);
        let bytes = units::bytes(found.memory().total_bytes);
        let times = now / step;
        format!(
            "{said}; with --set precision.policy=bf16 the first layout takes {}, {times:.1} times as fast, in {bytes}",
            units::seconds(step)
        )
    }))
}

/// Tensor parallelism between nodes has the network in every layer.
fn tensor_parallel(asked: &SearchRequest, first: &RankedLayout) -> Option<String> {
    let (tp, per_node) = (first.choice.layout.mesh.size(MeshAxis::Tp), asked.hardware.cluster.gpus_per_node);
    (tp > per_node).then(|| {
        format!(
            "tp = {tp} goes beyond the {} of a node: its collectives, several in each layer, cross the network, whose figures decide this plan",
            counted(per_node, "GPU")
        )
    })
}

/// Layouts that are as fast as the fastest.
fn ties(best: &[RankedLayout]) -> Option<String> {
    let step = |layout: &RankedLayout| layout.evaluated.forecast.step_s;
    let fastest = best.iter().map(step).fold(f64::INFINITY, f64::min);
    let tied = best.iter().filter(|layout| step(layout) <= fastest * (1.0 + SIMPLER)).count();
    let share = 100.0 * SIMPLER;
    (tied > 1).then(|| {
        format!("{tied} of these are as fast as the fastest within {share:.1}%: the simplest of them is the first")
    })
}

/// Whether a step is spent waiting for other GPUs for the most part.
fn waits(layout: &RankedLayout) -> bool {
    let forecast = &layout.evaluated.forecast;
    forecast.exposed_communication_s / forecast.step_s + forecast.bubble > MOSTLY
}

/// The largest number below, and not far below, of which the only divisors are 2 and 3.
fn rounder(gpus: usize) -> Option<usize> {
    let round = |mut n: usize| {
        for prime in [2, 3] {
            while n.is_multiple_of(prime) {
                n /= prime;
            }
        }
        n == 1
    };
    if round(gpus) { None } else { (3 * gpus / 4..gpus).rev().find(|n| round(*n)) }
}

/// A number of GPUs that divides badly may lose to fewer, and so may one whose GPUs mostly wait.
fn fewer(asked: &SearchRequest, first: &RankedLayout) -> Option<String> {
    let gpus = rounder(asked.gpus).or_else(|| waits(first).then_some(asked.gpus / 2)).filter(|gpus| *gpus > 0)?;
    let found = searched(&SearchRequest { gpus, wanted: 1, ..asked.clone() }).ok()?;
    let other = found.best.first()?;
    let times = other.evaluated.forecast.tokens_per_s / first.evaluated.forecast.tokens_per_s;
    (times > FASTER).then(|| {
        format!(
            "{gpus} of the {} are {times:.1} times as fast: --gpus {gpus} ({})",
            counted(asked.gpus, "GPU"),
            other.choice
        )
    })
}

#[cfg(test)]
mod tests {
    use super::rounder;

    #[test]
    fn numbers_of_gpus_that_divide_badly_have_a_rounder_one_below() {
        assert_eq!([rounder(100), rounder(10), rounder(7)], [Some(96), Some(9), Some(6)]);
        assert_eq!([rounder(96), rounder(1), rounder(64)], [None, None, None]);
    }
}
