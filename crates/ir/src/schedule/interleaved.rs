//! Interleaved 1F1B, as Megatron-LM orders it: micro-batches in groups of as many as there are ranks; a group passes chunk after
//! chunk, so that every rank has some of the first work and some of the last, and waits less.

use super::{Generator, PipeRank, PipeSlot};
use std::ops::RangeInclusive;

pub(super) struct Interleaved;

impl Generator for Interleaved {
    fn chunks(&self) -> RangeInclusive<usize> {
        2..=usize::MAX
    }

    fn slots(&self, of: PipeRank) -> Vec<PipeSlot> {
        let PipeRank { ranks, chunks, micro_batches, .. } = of;
        // The last group may lack micro-batches: the order is that of whole groups without them.
        let total = micro_batches.next_multiple_of(ranks) * chunks;
        let chunk = |k: usize| k / ranks % chunks;
        let micro_batch = |k: usize| k / (ranks * chunks) * ranks + k % ranks;
        let forward = |k: usize| PipeSlot::forward(chunk(k), micro_batch(k));
        let backward = |k: usize| PipeSlot::backward(chunks - 1 - chunk(k), micro_batch(k));
        let ahead = total.min(2 * of.behind() + (chunks - 1) * ranks);
        let both = (ahead..total).flat_map(|k| [forward(k), backward(k - ahead)]);
        let all = (0..ahead).map(forward).chain(both).chain((total - ahead..total).map(backward));
        all.filter(|slot| slot.micro_batch < micro_batches).collect()
    }

    fn most_in_flight(&self, of: PipeRank) -> usize {
        2 * of.behind() + (of.chunks - 1) * of.ranks + 1
    }

    fn least_bubble(&self, chunks: usize) -> f64 {
        1.0 / chunks as f64
    }
}

#[cfg(test)]
mod tests {
    use crate::schedule::PipeRank;
    use crate::schedule::tests::{named, printed};

    fn interleaved(ranks: usize, rank: usize, chunks: usize, micro_batches: usize) -> String {
        printed(named("interleaved"), PipeRank { ranks, rank, chunks, micro_batches })
    }

    #[test]
    fn a_group_passes_chunk_after_chunk() {
        assert_eq!(interleaved(2, 0, 2, 4), "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3");
        assert_eq!(interleaved(2, 1, 2, 4), "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3");
    }

    #[test]
    fn micro_batches_that_are_no_whole_group_run_in_the_order_of_one() {
        assert_eq!(interleaved(2, 0, 2, 3), "F0 F1 F0.1 F1.1 F2 B0.1 B1.1 F2.1 B0 B1 B2.1 B2");
        assert_eq!(interleaved(4, 1, 2, 1), "F0 F0.1 B0.1 B0");
    }

    #[test]
    fn as_many_chunks_are_in_flight_as_megatron_has() {
        for (p, v, groups) in [(2, 2, 3), (4, 2, 3), (4, 3, 2), (8, 2, 3), (16, 4, 3)] {
            let theory = |r: usize| 2 * (p - 1 - r) + (v - 1) * p + 1;
            let found = named("interleaved").pipeline(p, v, groups * p).in_flight();
            assert_eq!(found, (0..p).map(theory).collect::<Vec<_>>(), "p = {p}, v = {v}");
        }
    }
}
