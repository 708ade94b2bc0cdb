//! GPipe: all forward passes, then all backward passes.

use super::{Generator, PipeRank, PipeSlot};

pub(super) struct GPipe;

impl Generator for GPipe {
    fn slots(&self, of: PipeRank) -> Vec<PipeSlot> {
        let forward = (0..of.micro_batches).map(|m| PipeSlot::forward(0, m));
        forward.chain((0..of.micro_batches).map(|m| PipeSlot::backward(0, m))).collect()
    }

    fn least_bubble(&self, chunks: usize) -> f64 {
        1.0 / chunks as f64
    }
}

#[cfg(test)]
mod tests {
    use crate::schedule::PipeRank;
    use crate::schedule::tests::{GPIPE, printed};

    #[test]
    fn all_forward_passes_run_first() {
        for rank in 0..3 {
            let of = PipeRank { ranks: 3, rank, chunks: 1, micro_batches: 3 };
            assert_eq!(printed(GPIPE, of), "F0 F1 F2 B0 B1 B2");
        }
    }
}
