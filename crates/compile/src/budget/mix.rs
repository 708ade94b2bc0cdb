//! Two sets in one model: the first layers of a stage recompute more, so that the others need not.
//!
//! Arenas are largest where the last layer ends, and the layers that backward comes to last are those whose values are live
//! longest. Pairs of sets are taken in order of what they cost at least; for each the fewest first layers that fit are found by
//! binary search. The search ends where no pair can be cheaper than the best so far, or after [`MIXING`] nodes.

use super::{Search, Set, StageMemory};
use crate::CompileError;
use crate::settings::{Recompute, Recomputed};

/// Nodes that the search may place.
const MIXING: usize = 1 << 14;

/// Sets that are paired; of more, some between the cheapest and the smallest are left out.
const PAIRED: usize = 64;

/// FLOPs, then bytes moved.
type Cost = (u128, u128);

/// A policy of two sets that fits and is cheaper than `sets[alike]`, which fits by all layers.
pub(super) fn cheaper(
    search: &mut Search,
    sets: &[Set],
    alike: usize,
    budget: u64,
) -> Result<Option<Recompute>, CompileError> {
    let front: Vec<usize> = search.front(sets);
    let front: Vec<usize> = front.iter().copied().step_by(front.len().div_ceil(PAIRED).max(1)).collect();
    let layers = search.stages.iter().map(|s| s.kinds.len()).max().unwrap_or(0);
    let mut best: (Cost, Option<(usize, usize, usize)>) = ((sets[alike].flops, sets[alike].moved), None);
    let mut pairs = Vec::new();
    for (f, &rest) in front.iter().enumerate().filter(|(_, s)| **s < alike) {
        for &first in &front[f + 1..] {
            let pair = (&sets[first], &sets[rest]);
            let fits = |count: usize| search.stages.iter().all(|s| s.mixed_bound(pair, count) <= budget);
            let count = least(0, layers, |count| Ok::<_, CompileError>(fits(count)))?;
            if count <= layers {
                pairs.push((cost(search, pair, count), rest, first, count));
            }
        }
    }
    pairs.sort_unstable();
    let limit = search.work + MIXING;
    for (at_least, rest, first, count) in pairs {
        if at_least >= best.0 || search.work >= limit {
            break;
        }
        let count = least(count, layers, |count| {
            let policy = policy(search, (&sets[first], &sets[rest]), count);
            let programs = search.estimator.programs(policy)?;
            search.work += search.estimator.derived.nodes.len();
            Ok::<_, CompileError>(programs.iter().all(|p| p.arena_bytes <= budget))
        })?;
        let cost = cost(search, (&sets[first], &sets[rest]), count);
        if count <= layers && cost < best.0 {
            best = (cost, Some((rest, first, count)));
        }
    }
    Ok(best.1.map(|(rest, first, count)| policy(search, (&sets[first], &sets[rest]), count)))
}

/// The least of `from..=to` that is enough, where everything above is, too; one more than `to` if none is.
fn least<E>(from: usize, to: usize, mut enough: impl FnMut(usize) -> Result<bool, E>) -> Result<usize, E> {
    let (mut from, mut to) = (from, to + 1);
    while from < to {
        let middle = (from + to) / 2;
        match enough(middle)? {
            true => to = middle,
            false => from = middle + 1,
        }
    }
    Ok(from)
}

/// What the first `count` layers of every stage and the others recompute.
fn cost(search: &Search, (first, rest): (&Set, &Set), count: usize) -> Cost {
    let (mut flops, mut moved) = (0, 0);
    for (k, kind) in search.kinds.iter().enumerate() {
        let layers = || search.stages.iter().flat_map(|s| s.kinds.iter().enumerate()).filter(|(_, of)| **of == k);
        let by_first = layers().filter(|(position, _)| *position < count).count() as u128;
        for (set, layers) in [(first, by_first), (rest, layers().count() as u128 - by_first)] {
            let (f, m) = kind.cost_of_one(set.recomputed[k]);
            (flops, moved) = (flops + f * layers, moved + m * layers);
        }
    }
    (flops, moved)
}

fn policy(search: &Search, (first, rest): (&Set, &Set), count: usize) -> Recompute {
    Recompute::Values(Recomputed { first: count, by_first: search.values(first), by_rest: search.values(rest) })
}

impl StageMemory {
    /// Bytes that the arena has at least, where the first layers recompute another set.
    fn mixed_bound(&self, (first, rest): (&Set, &Set), count: usize) -> u64 {
        let freed = |kind: usize| {
            let positions = || self.kinds.iter().enumerate().filter(|(_, of)| **of == kind);
            let by_first = positions().filter(|(position, _)| *position < count).count() as u64;
            let layers = positions().count() as u64;
            let one = |set: &Set| self.freed(kind, set.recomputed[kind]) / layers.max(1);
            by_first * one(first) + (layers - by_first) * one(rest)
        };
        self.bound - (0..self.frees.len()).map(freed).sum::<u64>()
    }
}
