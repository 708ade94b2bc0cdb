//! A schedule that no config names: any legal order.

use lockstep_compile::SEND_BUFFER_COPIES;
use lockstep_ir::counter;
use lockstep_ir::schedule::{Generator, PipeRank, PipeSlot, Work};
use std::ops::RangeInclusive;

/// Any order that can run: what is ready is drawn.
pub struct Random {
    pub seed: u64,
    pub chunks: usize,
    /// Whether B and W are separate.
    pub separate: bool,
    /// Whether every other chunk runs through the ranks backwards, so that two virtual stages in a row are on one rank.
    pub turns: bool,
}

impl Generator for Random {
    fn chunks(&self) -> RangeInclusive<usize> {
        self.chunks..=self.chunks
    }

    fn separates_weight_grads(&self) -> bool {
        self.separate
    }

    fn virtual_stage(&self, ranks: usize, rank: usize, chunk: usize) -> usize {
        let back = self.turns && chunk % 2 == 1;
        chunk * ranks + if back { ranks - 1 - rank } else { rank }
    }

    fn slots(&self, PipeRank { ranks, rank, micro_batches, .. }: PipeRank) -> Vec<PipeSlot> {
        let stages = ranks * self.chunks;
        let mut place = vec![(0, 0); stages];
        for (rank, chunk) in (0..ranks).flat_map(|r| (0..self.chunks).map(move |c| (r, c))) {
            place[self.virtual_stage(ranks, rank, chunk)] = (rank, chunk);
        }
        // Micro-batches that each virtual stage has done, of each kind of work.
        let (mut f, mut b, mut w) = (vec![0; stages], vec![0; stages], vec![0; stages]);
        let mut slots = Vec::new();
        for draw in 0.. {
            let mut ready: Vec<(usize, Work)> = Vec::new();
            for s in 0..stages {
                let room = s + 1 == stages || f[s] - f[s + 1] < SEND_BUFFER_COPIES;
                if f[s] < micro_batches && (s == 0 || f[s - 1] > f[s]) && room {
                    ready.push((s, Work::Forward));
                }
                let room = s == 0 || b[s] - b[s - 1] < SEND_BUFFER_COPIES;
                if b[s] < f[s] && (s + 1 == stages || b[s + 1] > b[s]) && room {
                    ready.push((s, if self.separate { Work::InputGrad } else { Work::Backward }));
                }
                if self.separate && w[s] < b[s] {
                    ready.push((s, Work::WeightGrad));
                }
            }
            if ready.is_empty() {
                break;
            }
            let (s, work) = ready[(counter::bits(self.seed, draw) % ready.len() as u64) as usize];
            let done = match work {
                Work::Forward => &mut f[s],
                Work::Backward | Work::InputGrad => &mut b[s],
                Work::WeightGrad => &mut w[s],
            };
            if place[s].0 == rank {
                slots.push(PipeSlot { chunk: place[s].1, work, micro_batch: *done });
            }
            *done += 1;
        }
        slots
    }
}
