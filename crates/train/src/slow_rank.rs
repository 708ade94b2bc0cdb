//! Which rank computes for longer than those that do the same: all wait for it.

use std::time::{Duration, Instant};

/// Steps that are looked at together.
const WINDOW: usize = 16;
/// A rank stands out whose typical step takes so much longer than the others'.
const FACTOR: f64 = 1.15;
/// How long until the same rank is named again.
const AGAIN_AFTER: Duration = Duration::from_secs(600);

/// A rank that stands out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Slow {
    pub(crate) rank: usize,
    /// Seconds that it computes in a step, the median.
    pub(crate) busy_s: f64,
    /// The same of the ranks that it is compared with.
    pub(crate) others_s: f64,
    /// Whether those are of the same pipeline stage, which do the same work.
    pub(crate) same_stage: bool,
}

/// Watches the ranks of a run.
pub(crate) struct SlowRanks {
    /// The pipeline stage of each rank.
    stages: Vec<usize>,
    steps: Vec<Vec<f64>>,
    named: Option<(usize, Instant)>,
}

impl SlowRanks {
    pub(crate) fn new(stages: Vec<usize>) -> Self {
        Self { stages, steps: Vec::with_capacity(WINDOW), named: None }
    }

    /// Takes the seconds that each rank computed in a step, and says which stands out, if it was not said lately.
    pub(crate) fn step(&mut self, busy_s: &[f64], now: Instant) -> Option<Slow> {
        if busy_s.len() != self.stages.len() || busy_s.len() < 2 {
            return None;
        }
        self.steps.push(busy_s.to_vec());
        if self.steps.len() < WINDOW {
            return None;
        }
        let slow = self.slowest();
        self.steps.clear();
        let slow = slow.filter(|slow| {
            self.named.is_none_or(|(rank, when)| rank != slow.rank || now.duration_since(when) >= AGAIN_AFTER)
        })?;
        self.named = Some((slow.rank, now));
        Some(slow)
    }

    /// The rank that stands out most: nearly all of its steps take longer than nearly all of the others'.
    fn slowest(&self) -> Option<Slow> {
        let found = (0..self.stages.len()).filter_map(|rank| {
            let others = |same: bool| -> Vec<usize> {
                let is = |r: &usize| *r != rank && (!same || self.stages[*r] == self.stages[rank]);
                (0..self.stages.len()).filter(is).collect()
            };
            // One that is alone in its stage can only be compared with those of other stages.
            let (compared, same_stage) = match others(true) {
                none if none.is_empty() => (others(false), false),
                some => (some, true),
            };
            let times = |ranks: &[usize]| sorted(self.steps.iter().flat_map(|s| ranks.iter().map(|r| s[*r])).collect());
            let (own, theirs) = (times(&[rank]), times(&compared));
            let (busy_s, others_s) = (quantile(&own, 2), quantile(&theirs, 2));
            let apart = quantile(&own, 1) > quantile(&theirs, 3);
            (apart && busy_s > FACTOR * others_s).then_some(Slow { rank, busy_s, others_s, same_stage })
        });
        found.max_by(|a, b| (a.busy_s / a.others_s).total_cmp(&(b.busy_s / b.others_s)))
    }
}

fn sorted(mut x: Vec<f64>) -> Vec<f64> {
    x.sort_by(f64::total_cmp);
    x
}

/// The first, second or third quartile of sorted numbers.
fn quantile(x: &[f64], quarter: usize) -> f64 {
    x.get((x.len() * quarter / 4).min(x.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_ir::counter;

    /// What is said of steps that take these times, give or take a few percent, and some of them much longer.
    fn said(stages: &[usize], times: &[f64], steps: usize) -> Vec<Slow> {
        let mut ranks = SlowRanks::new(stages.to_vec());
        let start = Instant::now();
        let step = |i: usize| {
            let time = |(rank, time): (usize, &f64)| {
                let noise = counter::bits(rank as u64, i as u64) % 1000;
                time * (1.0 + noise as f64 * 1e-4) * if noise.is_multiple_of(17) { 5.0 } else { 1.0 }
            };
            let times: Vec<f64> = times.iter().enumerate().map(time).collect();
            ranks.step(&times, start + Duration::from_secs(i as u64))
        };
        (0..steps).filter_map(step).collect()
    }

    #[test]
    fn the_rank_that_all_wait_for_is_named_and_not_every_time() {
        let found = said(&[0; 4], &[1.0, 1.0, 1.3, 1.0], 599);
        let [Slow { rank: 2, busy_s, others_s, same_stage: true }] = found[..] else { panic!("{found:?}") };
        assert!((1.3..1.5).contains(&busy_s) && (1.0..1.15).contains(&others_s), "{found:?}");
        assert_eq!(said(&[0; 4], &[1.0, 1.0, 1.3, 1.0], 1300).len(), 3);
    }

    #[test]
    fn ranks_that_do_the_same_in_about_the_same_time_are_not_named() {
        assert_eq!(said(&[0; 4], &[1.0, 1.02, 0.98, 1.05], 400), []);
        assert_eq!(said(&[0], &[1.0], 400), []);
        // Stages may have different work.
        assert_eq!(said(&[0, 0, 1, 1], &[1.0, 1.0, 2.0, 2.0], 400), []);
        assert_eq!(said(&[0, 0, 1, 1], &[1.0, 1.0, 2.0, 2.6], 400)[0].rank, 3);
        let alone = said(&[0, 1], &[1.0, 2.0], 400);
        assert!(matches!(alone[0], Slow { rank: 1, same_stage: false, .. }));
    }
}
