//! 1F1B: as few forward passes as keep the ranks after it busy, then a forward and a backward pass in turn.

use super::{Generator, PipeRank, PipeSlot};

pub(super) struct OneForwardOneBackward;

impl Generator for OneForwardOneBackward {
    fn slots(&self, of: PipeRank) -> Vec<PipeSlot> {
        let micro_batches = of.micro_batches;
        let ahead = micro_batches.min(of.behind());
        let first = (0..ahead).map(|m| PipeSlot::forward(0, m));
        let both = (ahead..micro_batches).flat_map(|m| [PipeSlot::forward(0, m), PipeSlot::backward(0, m - ahead)]);
        let rest = (micro_batches - ahead..micro_batches).map(|m| PipeSlot::backward(0, m));
        first.chain(both).chain(rest).collect()
    }

    fn most_in_flight(&self, of: PipeRank) -> usize {
        of.ranks - of.rank
    }

    fn least_bubble(&self, chunks: usize) -> f64 {
        1.0 / chunks as f64
    }
}

#[cfg(test)]
mod tests {
    use crate::schedule::tests::printed;
    use crate::schedule::{PipeRank, Schedule};

    fn usual(ranks: usize, rank: usize, micro_batches: usize) -> String {
        printed(Schedule::USUAL, PipeRank { ranks, rank, chunks: 1, micro_batches })
    }

    #[test]
    fn a_rank_runs_ahead_by_the_ranks_after_it() {
        let printed = |rank| usual(4, rank, 5);
        assert_eq!(printed(0), "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4");
        assert_eq!(printed(2), "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4");
        assert_eq!(printed(3), "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4");
    }

    #[test]
    fn there_may_be_fewer_micro_batches_than_ranks() {
        assert_eq!(usual(8, 0, 2), "F0 F1 B0 B1");
        assert_eq!(usual(8, 7, 2), "F0 B0 F1 B1");
        assert_eq!(usual(8, 0, 0), "");
    }
}
