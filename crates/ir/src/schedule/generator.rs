//! What a schedule is made of: the slots of a rank, and the trait that makes them.

use std::ops::RangeInclusive;

/// What a rank does with a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Work {
    /// The forward pass of a chunk's layers.
    Forward,
    /// Their input gradients and their weight gradients, in one.
    Backward,
    /// Their input gradients alone (B): what the chunk before waits for.
    InputGrad,
    /// Their weight gradients alone (W): any time after B.
    WeightGrad,
}

impl Work {
    /// All kinds, in their order.
    pub const ALL: [Work; 4] = [Work::Forward, Work::Backward, Work::InputGrad, Work::WeightGrad];

    /// The letter in pictures and messages.
    pub const fn letter(self) -> char {
        match self {
            Work::Forward => 'F',
            Work::Backward | Work::InputGrad => 'B',
            Work::WeightGrad => 'W',
        }
    }

    /// Whether a micro-batch's gradients are summed here.
    pub const fn sums_gradients(self) -> bool {
        matches!(self, Work::Backward | Work::WeightGrad)
    }
}

/// One piece of a rank's work. Prints as `F3`, `B3` or `W3`, of a chunk other than the first as `F3.1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PipeSlot {
    /// Which of the rank's chunks.
    pub chunk: usize,
    /// What is done.
    pub work: Work,
    /// The micro-batch it is done with.
    pub micro_batch: usize,
}

impl PipeSlot {
    /// The forward pass of a micro-batch.
    pub const fn forward(chunk: usize, micro_batch: usize) -> Self {
        Self { chunk, work: Work::Forward, micro_batch }
    }

    /// The backward pass of a micro-batch, input and weight gradients in one.
    pub const fn backward(chunk: usize, micro_batch: usize) -> Self {
        Self { chunk, work: Work::Backward, micro_batch }
    }

    /// The input gradients of a micro-batch.
    pub const fn input_grad(chunk: usize, micro_batch: usize) -> Self {
        Self { chunk, work: Work::InputGrad, micro_batch }
    }

    /// The weight gradients of a micro-batch.
    pub const fn weight_grad(chunk: usize, micro_batch: usize) -> Self {
        Self { chunk, work: Work::WeightGrad, micro_batch }
    }
}

impl std::fmt::Display for PipeSlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.work.letter(), self.micro_batch)?;
        if self.chunk > 0 { write!(f, ".{}", self.chunk) } else { Ok(()) }
    }
}

/// A rank of a pipeline, and the work that all ranks have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PipeRank {
    /// Ranks of the pipeline.
    pub ranks: usize,
    /// Which of them.
    pub rank: usize,
    /// Chunks of layers that every rank has.
    pub chunks: usize,
    /// Micro-batches of a step.
    pub micro_batches: usize,
}

impl PipeRank {
    /// Ranks after it.
    pub(crate) fn behind(&self) -> usize {
        self.ranks - self.rank - 1
    }
}

/// Makes the slots of a schedule.
///
/// The layers are cut into as many virtual stages as ranks × chunks; a micro-batch passes them in order. A rank computes the
/// weight gradients of a chunk in ascending order of micro-batches, so all schedules give the same bits.
pub trait Generator: Sync {
    /// The numbers of chunks of layers that a rank may have; the least is the usual one.
    fn chunks(&self) -> RangeInclusive<usize> {
        1..=1
    }

    /// The virtual stage that a rank's chunk is.
    fn virtual_stage(&self, ranks: usize, rank: usize, chunk: usize) -> usize {
        chunk * ranks + rank
    }

    /// What a rank does, in order: for every chunk and micro-batch either a forward and a backward pass, or a forward pass, input
    /// gradients and weight gradients.
    fn slots(&self, of: PipeRank) -> Vec<PipeSlot>;

    /// The memory bound: the most forward passes of all its chunks that a rank may have run and whose gradients are not yet
    /// summed. Held against the slots whenever they are made.
    fn most_in_flight(&self, of: PipeRank) -> usize {
        of.chunks * of.micro_batches
    }

    /// Whether some rank computes weight gradients (W) apart from input gradients (B). Held against the slots whenever they are made.
    fn separates_weight_grads(&self) -> bool {
        false
    }

    /// The bubble that it leaves at least, as a share of that of 1F1B, with this many chunks and equal times of F, B and W.
    fn least_bubble(&self, _chunks: usize) -> f64 {
        0.0
    }
}
