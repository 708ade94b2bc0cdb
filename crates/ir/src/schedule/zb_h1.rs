//! ZB-H1 of the Zero Bubble paper (arXiv 2401.10241): 1F1B whose weight gradients fill what would be idle time at the end. Rank r
//! keeps r of them back, so that every rank has as many micro-batches in flight as 1F1B's first.

use super::{Generator, PipeRank, PipeSlot};

pub(super) struct ZbH1;

impl Generator for ZbH1 {
    fn slots(&self, of: PipeRank) -> Vec<PipeSlot> {
        let micro_batches = of.micro_batches;
        let ahead = micro_batches.min(of.behind());
        let mut slots: Vec<PipeSlot> = (0..ahead).map(|m| PipeSlot::forward(0, m)).collect();
        let mut summed = 0;
        for m in 0..micro_batches {
            slots.extend((ahead + m < micro_batches).then(|| PipeSlot::forward(0, ahead + m)));
            if of.rank == 0 {
                // Both in one: nobody waits for its input gradients.
                slots.push(PipeSlot::backward(0, m));
                continue;
            }
            slots.push(PipeSlot::input_grad(0, m));
            if m + 1 - summed > of.rank {
                slots.push(PipeSlot::weight_grad(0, summed));
                summed += 1;
            }
        }
        if of.rank > 0 {
            slots.extend((summed..micro_batches).map(|m| PipeSlot::weight_grad(0, m)));
        }
        slots
    }

    fn most_in_flight(&self, of: PipeRank) -> usize {
        of.ranks
    }

    fn separates_weight_grads(&self) -> bool {
        true
    }

    fn least_bubble(&self, _chunks: usize) -> f64 {
        1.0 / 3.0
    }
}

#[cfg(test)]
mod tests {
    use crate::schedule::PipeRank;
    use crate::schedule::tests::{named, printed};

    #[test]
    fn later_ranks_keep_more_weight_gradients_back() {
        let printed = |rank| printed(named("zb-h1"), PipeRank { ranks: 3, rank, chunks: 1, micro_batches: 4 });
        assert_eq!(printed(0), "F0 F1 F2 B0 F3 B1 B2 B3");
        assert_eq!(printed(1), "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3");
        assert_eq!(printed(2), "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3");
    }

    #[test]
    fn as_many_are_in_flight_as_there_are_ranks() {
        for (p, m) in (1..=8).flat_map(|p| (1..=16).map(move |m| (p, m))) {
            assert_eq!(named("zb-h1").pipeline(p, 1, m).in_flight(), vec![p.min(m); p], "p = {p}, m = {m}");
        }
    }
}
