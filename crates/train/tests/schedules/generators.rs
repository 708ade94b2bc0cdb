//! Schedules that no config names, as one would add them: interleaved 1F1B, ZB-H1, and any legal order.

use lockstep_compile::SEND_BUFFER_COPIES;
use lockstep_ir::counter;
use lockstep_ir::schedule::{Generator, PipeSlot, Work};

/// Interleaved 1F1B: micro-batches in groups of as many as there are ranks, a group passes chunk after chunk.
pub struct Interleaved {
    pub chunks: usize,
}

impl Generator for Interleaved {
    fn chunks(&self) -> usize {
        self.chunks
    }

    fn slots(&self, ranks: usize, rank: usize, micro_batches: usize) -> Vec<PipeSlot> {
        assert!(micro_batches.is_multiple_of(ranks), "whole groups");
        let total = micro_batches * self.chunks;
        let chunk = |k: usize| k / ranks % self.chunks;
        let micro_batch = |k: usize| k / (ranks * self.chunks) * ranks + k % ranks;
        let forward = |k: usize| PipeSlot::forward(chunk(k), micro_batch(k));
        let backward = |k: usize| PipeSlot::backward(self.chunks - 1 - chunk(k), micro_batch(k));
        let ahead = total.min(2 * (ranks - rank - 1) + (self.chunks - 1) * ranks);
        let both = (ahead..total).flat_map(|k| [forward(k), backward(k - ahead)]);
        (0..ahead).map(forward).chain(both).chain((total - ahead..total).map(backward)).collect()
    }
}

/// ZB-H1: 1F1B whose weight gradients wait until as many micro-batches are in flight as there are ranks.
pub struct ZbH1;

impl Generator for ZbH1 {
    fn slots(&self, ranks: usize, rank: usize, micro_batches: usize) -> Vec<PipeSlot> {
        let mut slots = Vec::new();
        let (mut f, mut b, mut w) = (0, 0, 0);
        while w < micro_batches {
            let ahead = f - b > ranks - rank - 1;
            let slot = match f < micro_batches {
                true if f - w == ranks && b > w => PipeSlot::weight_grad(0, w),
                true if !ahead => PipeSlot::forward(0, f),
                true => PipeSlot::input_grad(0, b),
                // B and W in turn, until only W are left.
                false if b < micro_batches && slots.last().is_none_or(|s: &PipeSlot| s.work != Work::InputGrad) => {
                    PipeSlot::input_grad(0, b)
                }
                false => PipeSlot::weight_grad(0, w),
            };
            match slot.work {
                Work::Forward => f += 1,
                Work::InputGrad => b += 1,
                Work::Backward | Work::WeightGrad => w += 1,
            }
            slots.push(slot);
        }
        slots
    }
}

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
    fn chunks(&self) -> usize {
        self.chunks
    }

    fn virtual_stage(&self, ranks: usize, rank: usize, chunk: usize) -> usize {
        let back = self.turns && chunk % 2 == 1;
        chunk * ranks + if back { ranks - 1 - rank } else { rank }
    }

    fn slots(&self, ranks: usize, rank: usize, micro_batches: usize) -> Vec<PipeSlot> {
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
