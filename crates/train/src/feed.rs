//! Sequences into a program's inputs, losses out of it.

use crate::TrainError;
use lockstep_exec::Executor;
use lockstep_ir::StepProgram;
use lockstep_model::names;
use std::sync::atomic::{AtomicBool, Ordering};

/// The tokens and targets of a micro-batch on their way to an executor.
pub(crate) struct Feed {
    names: [String; 3],
    batch: usize,
    seq: usize,
    tokens: Vec<u32>,
    targets: Vec<u32>,
    bytes: Vec<u8>,
}

impl Feed {
    /// For micro-batches of `batch` sequences of `seq` tokens; `entry` where the program has inputs of its own for it.
    pub(crate) fn new(entry: Option<&str>, batch: usize, seq: usize) -> Self {
        let name = |n: &str| entry.map_or(n.to_owned(), |entry| StepProgram::name_in(entry, n));
        let positions = batch * seq;
        Self {
            names: [names::TOKENS, names::TARGETS, names::LOSS].map(name),
            batch,
            seq,
            tokens: vec![0; positions],
            targets: vec![0; positions],
            bytes: Vec::with_capacity(positions * 4),
        }
    }

    /// Sequences of a micro-batch.
    pub(crate) fn batch(&self) -> usize {
        self.batch
    }

    /// Tokens of a sequence.
    pub(crate) fn seq(&self) -> usize {
        self.seq
    }

    /// Writes a micro-batch; `fill` gives the tokens and targets of its `b`-th sequence.
    pub(crate) fn load(
        &mut self,
        executor: &mut dyn Executor,
        micro_batch: usize,
        fill: impl Fn(usize, &mut [u32], &mut [u32]),
    ) -> Result<(), TrainError> {
        for b in 0..self.batch {
            let range = b * self.seq..(b + 1) * self.seq;
            fill(b, &mut self.tokens[range.clone()], &mut self.targets[range]);
        }
        for (name, ids) in self.names.iter().zip([&self.tokens, &self.targets]) {
            self.bytes.clear();
            self.bytes.extend(ids.iter().flat_map(|x| x.to_le_bytes()));
            executor.write(name, micro_batch, &self.bytes)?;
        }
        Ok(())
    }

    /// `sum` plus the losses of the first `count` sequences of a micro-batch that has run, in order.
    pub(crate) fn add_losses(
        &self,
        sum: f64,
        executor: &dyn Executor,
        micro_batch: usize,
        count: usize,
    ) -> Result<f64, TrainError> {
        let bytes = executor.read(&self.names[2], micro_batch)?;
        let losses = bytes.as_chunks().0.iter().take(count);
        Ok(losses.fold(sum, |sum, b| sum + f64::from_le_bytes(*b)))
    }

    /// The sum of the token losses of `sequences` sequences, added in order; `None` if `stop` came before the last. `fill`
    /// gives the n-th; `counted` is shown the targets of every micro-batch that has run.
    pub(crate) fn evaluate(
        &mut self,
        executor: &mut dyn Executor,
        entry: &str,
        sequences: u64,
        fill: impl Fn(u64, &mut [u32], &mut [u32]),
        stop: &AtomicBool,
        counted: &mut dyn FnMut(&[u32]),
    ) -> Result<Option<f64>, TrainError> {
        let mut sum = 0.0;
        let mut first = 0;
        while first < sequences {
            if stop.load(Ordering::SeqCst) {
                return Ok(None);
            }
            // The last micro-batch is filled up with copies of the last sequence, whose losses are not counted.
            self.load(executor, 0, |b, x, y| fill((first + b as u64).min(sequences - 1), x, y))?;
            executor.run(entry)?;
            let count = (sequences - first).min(self.batch as u64) as usize;
            sum = self.add_losses(sum, executor, 0, count)?;
            counted(&self.targets[..count * self.seq]);
            first += count as u64;
        }
        Ok(Some(sum))
    }
}
