//! Layouts under the budget policy: those that would be faster than all that fit, and need a little too much where nothing is recomputed.
//!
//! A search tries none, selective and full for all choices. What lies between them is tried for the most promising ones alone, since
//! the cheapest set of activations is found by placing many.

use super::best_first::Search;
use super::bound::Bound;
use super::whole::exact;
use super::{LayoutChoice, RankedLayout, SIMPLER};
use crate::{PlanError, Result};
use lockstep_config::RecomputePolicy;

/// Choices that are estimated under all policies, and those of them that are compiled under a budget.
pub(super) const MOST_TIGHT: usize = 24;
const MOST_COMPILED: usize = 4;

/// Of a forward pass and a backward pass of twice its time: what recomputing all of the forward pass adds.
const WHOLE_FORWARD: f64 = 1.0 / 3.0;

impl Search<'_> {
    /// Keeps the most promising of what did not fit: as fast as they are at least, and the more above the memory, the more is recomputed.
    pub(super) fn nearest(&mut self) {
        let room = self.request.room.bytes as f64;
        let about = |Bound { seconds, bytes }: &Bound| seconds * (1.0 + WHOLE_FORWARD * (bytes / room - 1.0).max(0.0));
        self.tight.sort_by(|(a, _), (b, _)| about(a).total_cmp(&about(b)));
        self.tight.truncate(MOST_TIGHT);
    }

    /// Ranks what is faster under a budget than the best that fits without one.
    pub fn under_budgets(&mut self, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<()> {
        let searched = self.request.trainer.is_none() && !self.space.is_fixed("recompute.policy");
        let Some(best) = self.best.first().filter(|_| searched) else { return Ok(()) };
        let to_beat = best.evaluated.forecast.step_s * (1.0 - SIMPLER);
        self.nearest();
        let room = self.request.room;
        let each = if room.shared { self.request.gpus as u64 } else { 1 };
        let near: Vec<LayoutChoice> =
            self.tight.iter().filter(|(bound, _)| bound.seconds < to_beat).map(|(_, choice)| *choice).collect();
        let between = |i: usize| {
            let policies = [RecomputePolicy::None, RecomputePolicy::Selective, RecomputePolicy::Full];
            let bounds = policies.map(|recompute| self.estimate(&LayoutChoice { recompute, ..near[i] }));
            let [none, selective, full] = bounds;
            Ok(interpolated(&[none?, selective?, full?], room.bytes as f64))
        };
        let before = self.small_programs();
        let estimates: Vec<Option<f64>> = self.in_rounds(near.len(), progress, &between)?;
        self.tally.counts.small += self.small_programs() - before;
        let mut promising: Vec<(f64, LayoutChoice)> =
            estimates.into_iter().zip(near).filter_map(|(seconds, choice)| Some((seconds?, choice))).collect();
        promising.retain(|(seconds, _)| *seconds < to_beat);
        promising.sort_by(|a, b| a.0.total_cmp(&b.0));
        // A whole number of MiB, as a person would write it.
        let budget = Some((room.bytes / each) >> 20 << 20);
        let tried: Vec<LayoutChoice> = promising
            .into_iter()
            .take(MOST_COMPILED)
            .map(|(_, choice)| LayoutChoice { recompute: RecomputePolicy::Budget, budget, ..choice })
            .collect();
        let compiled = |i: usize| match exact(self.request, &tried[i]) {
            Err(PlanError::OverBudget { .. }) => Ok(None),
            found => found.map(Some),
        };
        let found = self.in_rounds(tried.len(), progress, &compiled)?;
        for (choice, evaluated) in tried.into_iter().zip(found) {
            self.tally.counts.legal += 1;
            self.tally.counts.compiled += 1;
            match evaluated.filter(|e| room.verdict(&e.stages, self.request.gpus).fits) {
                Some(evaluated) => self.rank(RankedLayout { choice, evaluated }),
                None => self.tally.counts.too_large += 1,
            }
        }
        Ok(())
    }
}

/// The time at this many bytes, of policies that need less and take longer: layers mix them. None where not even the last fits.
fn interpolated(policies: &[Bound], room: f64) -> Option<f64> {
    let fit = policies.iter().filter(|b| b.bytes <= room);
    let mixed = fit.flat_map(|low| {
        let above = policies.iter().filter(|b| b.bytes > room);
        let mix = above.map(|high| {
            let share = (high.bytes - room) / (high.bytes - low.bytes);
            high.seconds + share * (low.seconds - high.seconds)
        });
        mix.chain([low.seconds])
    });
    mixed.min_by(f64::total_cmp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn between_policies_time_follows_the_bytes_that_are_missing() {
        let bound = |seconds: f64, bytes: f64| Bound { seconds, bytes };
        let [none, selective, full] = [bound(1.0, 100.0), bound(1.02, 80.0), bound(1.3, 20.0)];
        let at = |room: f64| interpolated(&[none, selective, full], room);
        assert_eq!([at(100.0), at(80.0), at(20.0)], [Some(1.0), Some(1.02), Some(1.3)]);
        assert_eq!(at(90.0), Some(1.01));
        let half = at(50.0).unwrap();
        assert!((half - 1.16).abs() < 1e-12, "{half}");
        assert_eq!(at(19.0), None);
    }
}
