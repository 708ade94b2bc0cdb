//! GPipe: all forward passes, then all backward passes.

use super::{Generator, PipeSlot};

pub(super) struct GPipe;

impl Generator for GPipe {
    fn slots(&self, _ranks: usize, _rank: usize, micro_batches: usize) -> Vec<PipeSlot> {
        let forward = (0..micro_batches).map(|m| PipeSlot::forward(0, m));
        forward.chain((0..micro_batches).map(|m| PipeSlot::backward(0, m))).collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::schedule::tests::{GPIPE, printed};

    #[test]
    fn all_forward_passes_run_first() {
        for rank in 0..3 {
            assert_eq!(printed(GPIPE, 3, rank, 3), "F0 F1 F2 B0 B1 B2");
        }
    }
}
