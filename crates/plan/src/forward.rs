//! Programs without a training step: text from a model, and the loss of text.

use crate::device::{Machine, Target, threads};
use crate::plan::{adapted, training_context};
use crate::{PlanError, Result};
use lockstep_compile::{Context, Precision, Steps, compile_forward};
use lockstep_config::{Config, LoraConfig, ModelConfig};
use lockstep_ir::{DType, Layout, StepProgram};
use lockstep_model::{Form, build_form};

/// Most tokens that one call of `prefill` reads.
pub const GENERATION_CHUNK: usize = 128;

/// Whole sequences, and the tokens left over behind them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Sequences.
    pub sequences: u64,
    /// Tokens.
    pub rest: usize,
}

/// Refuses texts that are longer than the positions which a model has learned.
pub fn check_positions(config: &Config, tokens: usize) -> Result<()> {
    match config.model.positions {
        Some(positions) if tokens > positions => Err(PlanError::Positions { tokens, positions }),
        _ => Ok(()),
    }
}

/// What the passes of a forward program need to know, and the threads it will run on: those of one rank, whatever the layout.
fn forward_context(machine: &dyn Machine, config: &Config) -> (Context, usize) {
    let (context, _) = training_context(machine, config);
    let threads = threads(machine, config, 1);
    let precision = Precision::of(context.precision.compute, DType::F32);
    let device = machine.profile(Target::of(machine, config), threads, precision);
    (Context { device, layout: Layout::single(1), precision, steps: Steps::default(), ..context }, threads)
}

/// The program with the entries `prefill` and `decode`, and the threads it was compiled for.
pub fn generation_program(machine: &dyn Machine, config: &Config, context: usize) -> Result<(StepProgram, usize)> {
    check_positions(config, context)?;
    let (compile_context, threads) = forward_context(machine, config);
    let graph =
        |positions| adapted(build_form(&config.model, Form::NextToken { batch: 1, positions, context })?, &config.lora);
    let prefill = graph(GENERATION_CHUNK.min(context))?;
    let entries = [(StepProgram::PREFILL, prefill), (StepProgram::DECODE, graph(1)?)];
    Ok((compile_forward(&entries, &compile_context)?, threads))
}

/// The program with the entries that a cut needs, `batch` sequences of `seq` tokens at a time, and the threads it was compiled
/// for. `misses` as in [`Steps`].
pub fn evaluation_program(
    machine: &dyn Machine,
    config: &Config,
    (batch, seq): (usize, usize),
    cut: Cut,
    misses: bool,
) -> Result<(StepProgram, usize)> {
    let (mut context, threads) = forward_context(machine, config);
    context.steps.misses = misses;
    let model = ModelConfig { dropout: 0.0, ..config.model.clone() };
    let lora = LoraConfig { dropout: 0.0, ..config.lora.clone() };
    let graph = |batch, tokens| {
        let form = Form::Loss { batch, seq: tokens, context: seq, documents: config.data.document_mask };
        adapted(build_form(&model, form)?, &lora)
    };
    let mut entries = Vec::new();
    if cut.sequences > 0 {
        entries.push((StepProgram::EVALUATE, graph(batch, seq)?));
    }
    if cut.rest > 0 {
        entries.push((StepProgram::EVALUATE_REST, graph(1, cut.rest)?));
    }
    Ok((compile_forward(&entries, &context)?, threads))
}
