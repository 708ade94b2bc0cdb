//! Losses without a step: of validation, of tasks, in two formats side by side, and of ranks that are compared with each other.

use super::Session;
use crate::Result;
use crate::cross_check::{self, Rotated, Suspects};
use crate::metrics::ShadowMetrics;
use lockstep_data::Sampler;
use lockstep_infer::feed::{Scored, Sequences, TextScore, losses};
use lockstep_infer::{InferError, Request};
use lockstep_ir::StepProgram;
use std::sync::atomic::AtomicBool;

impl Session {
    /// Mean loss per target that counts over the first `sequences` samples of `data`; `None` if `stop` came before the last.
    /// `progress` hears how many are done.
    pub fn evaluate(
        &mut self,
        data: &Sampler,
        sequences: u64,
        stop: &AtomicBool,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Option<f64>> {
        let (mut sum, mut targets, seq) = (0.0, 0, self.feed.seq());
        let executor = self.executor.as_mut();
        let add = &mut |scored: Scored<'_>| {
            sum += scored.loss;
            let (stream, offset) = scored.source;
            targets += stream.counted_targets(offset, seq);
            progress(scored.index + 1);
        };
        let whole = self.feed.evaluate(executor, StepProgram::EVALUATE, sequences, data, stop, add)?;
        data.require_read()?;
        Ok(whole.then(|| sum / targets.max(1) as f64))
    }

    /// The losses of the micro-batch that begins with the sample `first`, in bf16 and in fp8. The plan is that of a config that
    /// compares them. Nothing where experts have too little room in either: losses that lack rows say nothing of fp8, and a step
    /// that lacks them ends the run.
    pub(crate) fn shadow(&mut self, data: &Sampler, first: u64) -> Result<ShadowMetrics> {
        let Self { feed, executor, .. } = self;
        let targets = feed.load(executor.as_mut(), 0, data, first, u64::MAX)?.max(1);
        let mut loss = |entry| -> Result<Option<f64>> {
            executor.run(entry)?;
            let bytes = executor.read(feed.loss(), 0)?;
            match feed.require_room(executor.as_ref(), &bytes) {
                Err(InferError::EvaluationBound { .. }) => return Ok(None),
                room => room?,
            }
            Ok(Some(losses(&bytes).sum::<f64>() / targets as f64))
        };
        let (bf16, fp8) = (loss(StepProgram::EVALUATE_BF16)?, loss(StepProgram::EVALUATE)?);
        Ok(bf16.zip(fp8).map(|(bf16, fp8)| ShadowMetrics::of(bf16, fp8)).unwrap_or_default())
    }

    /// Compares what ranks hold and what they compute, on the samples from `first` on, between two steps. All processes call this together.
    pub(crate) fn cross_check(&mut self, data: &Sampler, first: u64) -> Result<Vec<Suspects>> {
        let mesh = self.executor.mesh();
        let mut found = cross_check::state(self.executor.as_ref(), &self.tensors)?;
        let (round, copies) = (self.feed.batch() as u64, cross_check::copies_of(&mesh) as u64);
        if copies > 1 {
            let rotated = Rotated { data, first, round, by: round / copies };
            if let (Some(own), Some(rotated)) = (self.losses_of(data, first)?, self.losses_of(&rotated, first)?) {
                found.extend(cross_check::losses(&mesh, &own, &rotated));
            }
        }
        Ok(found)
    }

    /// The losses of the sequences of the micro-batches that begin with the sample `first`; nothing where experts have too little room.
    pub(super) fn losses_of(&mut self, data: &dyn Sequences, first: u64) -> Result<Option<Vec<f64>>> {
        let Self { feed, executor, .. } = self;
        feed.load(executor.as_mut(), 0, data, first, u64::MAX)?;
        executor.run(StepProgram::EVALUATE)?;
        let bytes = executor.read(feed.loss(), 0)?;
        match feed.require_room(executor.as_ref(), &bytes) {
            Err(InferError::EvaluationBound { .. }) => Ok(None),
            room => room.map(|()| Some(losses(&bytes).collect())).map_err(Into::into),
        }
    }

    /// The scores of the ends of texts, which fit into its sequences; `None` if `stop` came before the last. `progress` hears how
    /// many are done. The plan is that of a config with tasks.
    pub(crate) fn score(
        &mut self,
        texts: &[Request],
        stop: &AtomicBool,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Option<Vec<TextScore>>> {
        let mut scores = Vec::with_capacity(texts.len());
        let executor = self.executor.as_mut();
        let whole = self.feed.score(executor, StepProgram::EVALUATE, texts, stop, &mut |score| {
            scores.push(score);
            progress(scores.len() as u64);
        })?;
        Ok(whole.then_some(scores))
    }
}
