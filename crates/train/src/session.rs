//! A loaded program and the numbers that a host exchanges with it: one step in, one loss out.

use crate::{Plan, TrainError, state};
use lockstep_compile::STATS;
use lockstep_config::Config;
use lockstep_data::Sampler;
use lockstep_exec::cpu::{self, CpuExecutor};
use lockstep_exec::{ExecError, Executor};
use lockstep_ir::{StepProgram, StepScalars};
use lockstep_model::names;
use std::sync::atomic::{AtomicBool, Ordering};

/// A program in memory, ready to step.
pub struct Session {
    program: StepProgram,
    executor: Box<dyn Executor>,
    micro_batch: usize,
    micro_batches: usize,
    seq: usize,
    tokens: Vec<u32>,
    targets: Vec<u32>,
    bytes: Vec<u8>,
}

/// What a step gave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepResult {
    /// Mean loss per token of the global batch.
    pub loss: f64,
    /// Norm of the mean gradient.
    pub grad_norm: f32,
    /// Whether the update was applied: all gradients were finite.
    pub applied: bool,
}

impl Session {
    /// Loads a plan and gives every parameter its initial value.
    pub fn new(config: &Config, plan: &Plan) -> Result<Self, TrainError> {
        let program = plan.program().clone();
        if let Some(available) = cpu::available_bytes()
            && plan.memory.total_bytes > available
        {
            return Err(TrainError::DoesNotFit { memory: Box::new(plan.memory.clone()), available });
        }
        let executor = CpuExecutor::load(program.clone(), plan.threads)?;
        // One program, many readers: what was predicted is what was allocated.
        assert_eq!(executor.arena_bytes(), plan.memory.total_bytes, "the arena is not what the plan says");
        let positions = config.train.micro_batch * config.train.seq;
        let mut session = Self {
            program,
            executor: Box::new(executor),
            micro_batch: config.train.micro_batch,
            micro_batches: config.accumulation_steps(),
            seq: config.train.seq,
            tokens: vec![0; positions],
            targets: vec![0; positions],
            bytes: Vec::with_capacity(positions * 4),
        };
        state::initialise(&session.program, session.executor.as_mut(), config.train.seed)?;
        Ok(session)
    }

    /// Bytes allocated.
    pub fn arena_bytes(&self) -> u64 {
        self.executor.arena_bytes()
    }

    /// The executor, for whoever reads or writes tensors by name.
    pub fn executor(&mut self) -> &mut dyn Executor {
        self.executor.as_mut()
    }

    /// Replaces parameters and moments by a checkpoint's.
    pub(crate) fn restore(&mut self, checkpoint: &lockstep_checkpoint::Loaded) -> Result<(), TrainError> {
        state::restore(&self.program, self.executor.as_mut(), checkpoint)
    }

    /// Parameters and moments, for a checkpoint.
    pub(crate) fn groups(&self) -> Result<Vec<lockstep_checkpoint::Group<'_>>, TrainError> {
        state::groups(&self.program, self.executor.as_ref())
    }

    /// One training step on the samples `first_sample ..` of the global order.
    pub fn step(&mut self, data: &Sampler, first_sample: u64, scalars: StepScalars) -> Result<StepResult, TrainError> {
        for m in 0..self.micro_batches {
            let first = first_sample + (m * self.micro_batch) as u64;
            self.load(data, m, |b| first + b as u64)?;
        }
        self.run_step(scalars)
    }

    /// One training step on the inputs that the executor holds already.
    pub fn run_step(&mut self, scalars: StepScalars) -> Result<StepResult, TrainError> {
        let mut data = [0; 20];
        data.as_chunks_mut().0.iter_mut().zip(scalars.to_array()).for_each(|(to, x)| *to = x.to_le_bytes());
        self.executor.write(StepScalars::NAME, 0, &data)?;
        self.executor.run(StepProgram::TRAIN)?;
        let mut sum = 0.0;
        for m in 0..self.micro_batches {
            sum = self.add_losses(sum, m, self.micro_batch)?;
        }
        let stats = self.executor.read(STATS, 0)?;
        let ([norm, factor], []) = stats.as_chunks() else {
            return Err(ExecError::Internal(format!("`{STATS}` has {} bytes", stats.len())).into());
        };
        let [grad_norm, factor] = [norm, factor].map(|b| f32::from_le_bytes(*b));
        let tokens = (self.micro_batches * self.micro_batch * self.seq) as f64;
        Ok(StepResult { loss: sum / tokens, grad_norm, applied: !factor.is_nan() })
    }

    /// Mean loss per token over the first `sequences` samples of `data`; `None` if `stop` came before the last.
    pub fn evaluate(&mut self, data: &Sampler, sequences: u64, stop: &AtomicBool) -> Result<Option<f64>, TrainError> {
        let mut sum = 0.0;
        let mut first = 0;
        while first < sequences {
            if stop.load(Ordering::SeqCst) {
                return Ok(None);
            }
            // The last micro-batch is filled up with copies of the last sample, whose losses are not counted.
            self.load(data, 0, |b| (first + b as u64).min(sequences - 1))?;
            self.executor.run(StepProgram::EVALUATE)?;
            let counted = (sequences - first).min(self.micro_batch as u64) as usize;
            sum = self.add_losses(sum, 0, counted)?;
            first += counted as u64;
        }
        Ok(Some(sum / (sequences * self.seq as u64) as f64))
    }

    fn load(&mut self, data: &Sampler, micro_batch: usize, sample: impl Fn(usize) -> u64) -> Result<(), TrainError> {
        for b in 0..self.micro_batch {
            let range = b * self.seq..(b + 1) * self.seq;
            data.fill(sample(b), &mut self.tokens[range.clone()], &mut self.targets[range]);
        }
        for (name, ids) in [(names::TOKENS, &self.tokens), (names::TARGETS, &self.targets)] {
            self.bytes.clear();
            self.bytes.extend(ids.iter().flat_map(|x| x.to_le_bytes()));
            self.executor.write(name, micro_batch, &self.bytes)?;
        }
        Ok(())
    }

    /// `sum` plus the losses of the first `count` sequences of a micro-batch, in order.
    fn add_losses(&self, sum: f64, micro_batch: usize, count: usize) -> Result<f64, TrainError> {
        let bytes = self.executor.read(names::LOSS, micro_batch)?;
        let losses = bytes.as_chunks().0.iter().take(count);
        Ok(losses.fold(sum, |sum, b| sum + f64::from_le_bytes(*b)))
    }
}
