//! The program that scores the ends of many texts over a cache of pages.

use crate::device::{Machine, Target};
use crate::forward::{PAGE, check_latent, check_ranks, tensor_parallel_context};
use crate::plan::adapted;
use crate::{Result, check_positions};
use lockstep_compile::compile_forward;
use lockstep_config::{Config, LoraConfig, ModelConfig};
use lockstep_ir::StepProgram;
use lockstep_model::{CacheShape, Form, build_form};

/// Most tokens of a run: answers have few, and a question is several runs.
const RUN: usize = 16;

/// Tokens that a call reads at most: as many as keep a CPU's units busy, on a GPU more.
const TOKENS: usize = 512;
const CUDA_TOKENS: usize = 2048;

/// What scoring has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoringShape {
    /// Most tokens that are read of a text.
    pub context: usize,
    /// Questions that are under way at once.
    pub slots: usize,
    /// Pages of the cache.
    pub pages: usize,
    /// Runs of a call, and most tokens of each.
    pub runs: (usize, usize),
    /// Tensor-parallel ranks that share the model.
    pub tp: usize,
}

impl ScoringShape {
    /// The cache. Layers with a sliding window have all pages too: what a question has read is looked at again for each of its answers.
    fn cache(&self) -> CacheShape {
        let blocks = self.context.div_ceil(PAGE);
        let (slots, pages) = (self.slots, self.pages);
        // Several runs of a call may be of one text.
        CacheShape { slots, blocks, page: PAGE, pages, window_pages: pages, apart: false }
    }
}

/// How many runs a call has where there are `tokens` in all, and most tokens of each.
pub fn scoring_runs(machine: &dyn Machine, config: &Config, tokens: usize) -> (usize, usize) {
    let most = match Target::of(machine, config) {
        Target::Cpu => TOKENS,
        Target::Cuda { .. } => CUDA_TOKENS,
    };
    (most.min(tokens).div_ceil(RUN).max(1), RUN)
}

/// The program with the entry `score`, which says of every token besides its loss whether greedy decoding misses it, and the threads
/// it was compiled for.
pub fn scoring_program(machine: &dyn Machine, config: &Config, shape: &ScoringShape) -> Result<(StepProgram, usize)> {
    check_positions(config, shape.context)?;
    check_latent(machine, config)?;
    let (mut context, threads) = tensor_parallel_context(machine, config, shape.tp);
    check_ranks(config, &context.layout)?;
    context.steps.misses = true;
    let model = ModelConfig { dropout: 0.0, ..config.model.clone() };
    let lora = LoraConfig { dropout: 0.0, ..config.lora.clone() };
    let (batch, positions) = shape.runs;
    let graph = adapted(build_form(&model, Form::Score { batch, positions, cache: shape.cache() })?, &lora)?;
    Ok((compile_forward(&[(StepProgram::SCORE, graph)], &context)?, threads))
}
