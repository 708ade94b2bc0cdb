//! ZB-V of the Zero Bubble paper's sequel (arXiv 2405.15362): two chunks per rank, the first on the way down the ranks, the second on the
//! way back up, so that a rank's first forward pass and its last backward pass belong together. With equal times of F, B and W no
//! rank waits between its first and its last slot, in the memory of 1F1B's first rank.

use super::{Generator, PipeRank, PipeSlot};
use std::ops::RangeInclusive;

pub(super) struct ZbV;

/// The slots of a rank, and the next micro-batch of every kind of work by chunk.
#[derive(Default)]
struct Order {
    slots: Vec<PipeSlot>,
    forward: [usize; 2],
    input_grad: [usize; 2],
    weight_grad: [usize; 2],
}

impl Order {
    fn f(&mut self, chunk: usize) {
        self.slots.push(PipeSlot::forward(chunk, self.forward[chunk]));
        self.forward[chunk] += 1;
    }

    fn b(&mut self, chunk: usize) {
        self.slots.push(PipeSlot::input_grad(chunk, self.input_grad[chunk]));
        self.input_grad[chunk] += 1;
    }

    fn w(&mut self, chunk: usize) {
        self.slots.push(PipeSlot::weight_grad(chunk, self.weight_grad[chunk]));
        self.weight_grad[chunk] += 1;
    }
}

impl Generator for ZbV {
    fn chunks(&self) -> RangeInclusive<usize> {
        2..=2
    }

    fn virtual_stage(&self, ranks: usize, rank: usize, chunk: usize) -> usize {
        if chunk == 0 { rank } else { 2 * ranks - 1 - rank }
    }

    fn slots(&self, of: PipeRank) -> Vec<PipeSlot> {
        let PipeRank { ranks, rank, micro_batches, .. } = of;
        // If there are fewer micro-batches than fill the pipeline, we generate the order for a full pipeline and drop the missing ones.
        let all = micro_batches.max(2 * ranks - 1);
        let mut order = Order::default();
        // The first micro-batches go down and come back up.
        (0..2 * (ranks - rank) - 1).for_each(|_| order.f(0));
        for _ in 0..rank {
            order.f(1);
            order.f(0);
        }
        for _ in rank..ranks {
            order.f(1);
            order.b(1);
            order.w(1);
        }
        // All six in turn, until there are no more forward passes.
        while order.forward[1] < all {
            if order.forward[0] < all {
                order.f(0);
            }
            order.b(0);
            order.w(0);
            order.f(1);
            order.b(1);
            order.w(1);
        }
        // What others wait for first; weight gradients fill the rest.
        for _ in 0..rank {
            order.b(0);
            order.b(1);
        }
        for _ in rank..ranks {
            order.b(0);
            order.w(0);
        }
        for chunk in [1, 0] {
            (order.weight_grad[chunk]..all).for_each(|_| order.w(chunk));
        }
        order.slots.retain(|slot| slot.micro_batch < micro_batches);
        order.slots
    }

    fn most_in_flight(&self, of: PipeRank) -> usize {
        2 * of.ranks
    }

    fn separates_weight_grads(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use crate::schedule::PipeRank;
    use crate::schedule::tests::{named, printed};

    fn zb_v(rank: usize, micro_batches: usize) -> String {
        printed(named("zb-v"), PipeRank { ranks: 2, rank, chunks: 2, micro_batches })
    }

    #[test]
    fn a_micro_batch_goes_down_the_ranks_and_comes_back() {
        assert_eq!(zb_v(0, 3), "F0 F1 F2 F0.1 B0.1 W0.1 F1.1 B1.1 W1.1 B0 W0 F2.1 B2.1 W2.1 B1 W1 B2 W2");
        assert_eq!(zb_v(1, 3), "F0 F0.1 F1 F1.1 B0.1 W0.1 F2 B0 W0 F2.1 B1.1 W1.1 B1 B2.1 B2 W1 W2.1 W2");
        assert_eq!(zb_v(0, 1), "F0 F0.1 B0.1 W0.1 B0 W0");
        assert_eq!(named("zb-v").virtual_stages(3, 2), [[0, 5], [1, 4], [2, 3]]);
    }

    #[test]
    fn a_rank_has_at_most_twice_as_many_chunks_in_flight_as_there_are_ranks() {
        for (p, m) in (1..=8).flat_map(|p| (2 * p..=3 * p).map(move |m| (p, m))) {
            assert_eq!(named("zb-v").pipeline(p, 2, m).in_flight(), vec![2 * p; p], "p = {p}, m = {m}");
        }
    }
}
