//! The loss of a trained model on text, by a program that holds parameters and nothing of training.

use crate::feed::Feed;
use crate::plan::forward_context;
use crate::state::{self, Weights};
use crate::{Tokenizer, TrainError, Trained, data};
use lockstep_compile::{CompileError, compile_forward};
use lockstep_config::Config;
use lockstep_data::{PrepareSpec, Prepared, Progress, Sampler, TokenStream, prepare};
use lockstep_exec::cpu::CpuExecutor;
use lockstep_ir::StepProgram;
use lockstep_model::{Form, build_form};
use serde::Serialize;
use serde_json::json;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// What to evaluate on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Text {
    /// Files and folders, all of them.
    Paths(Vec<PathBuf>),
    /// The sequences that the run's own validation reads.
    Validation,
}

/// How a model does on a text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// Tokens that were predicted.
    pub tokens: u64,
    /// Bytes of text that they stand for.
    pub bytes: u64,
    /// Most tokens that a prediction has seen.
    pub seq: usize,
    /// Mean loss per token, in nats.
    pub loss: f64,
    /// Its exponential.
    pub perplexity: f64,
    /// Loss of the whole text in bits, per byte.
    pub bits_per_byte: f64,
    /// Bytes allocated.
    pub arena_bytes: u64,
}

/// How far an evaluation has come.
#[derive(Clone, Copy, Debug)]
pub enum EvaluateProgress {
    /// Text is being packed.
    Preparing(Progress),
    /// Tokens are being predicted.
    Evaluating {
        /// Tokens done.
        done: u64,
        /// Tokens in all.
        total: u64,
    },
}

/// The loss of a model on a text, cut into sequences of `seq` tokens (by default those of its training).
pub fn evaluate(
    trained: &Trained,
    text: &Text,
    seq: Option<usize>,
    show: &mut dyn FnMut(EvaluateProgress),
) -> Result<Evaluation, TrainError> {
    let config = &trained.config;
    let tokenizer = Tokenizer::of(config)?;
    let seq = seq.unwrap_or(config.train.seq).max(1);
    // Removed when this function returns; an open shard stays readable.
    let folder = tempfile::tempdir().map_err(|e| TrainError::io("create", &std::env::temp_dir(), e))?;
    let (shard, cut) = match text {
        Text::Validation => {
            let shard = held_out(trained)?;
            let sequences = Sampler::in_order(shard.clone(), seq)?.sequences();
            (shard, Cut { sequences: sequences.min(config.train.validation_sequences as u64), rest: 0 })
        }
        Text::Paths(paths) => {
            let extensions = config.data.extensions.clone();
            let spec = PrepareSpec {
                paths: paths.clone(),
                extensions,
                text_field: config.data.text_field.clone(),
                tokenizer: data::tokenizer_spec(config)?,
                validation_fraction: 0.0,
                seed: 0,
            };
            let prepared = prepare(&spec, folder.path(), &mut |p| show(EvaluateProgress::Preparing(p)))?;
            let shard = prepared.train().clone();
            // A document has a byte and a separator at least, so there is something to predict.
            let targets = shard.len() - 1;
            (shard, Cut { sequences: targets / seq as u64, rest: (targets % seq as u64) as usize })
        }
    };
    let total = cut.sequences * seq as u64 + cut.rest as u64;
    let (mut done, mut bytes) = (0, 0);
    let mut counted = |targets: &[u32]| {
        done += targets.len() as u64;
        bytes += tokenizer.byte_count(targets);
        show(EvaluateProgress::Evaluating { done, total });
    };
    let mut model = Model::load(trained, seq, cut)?;
    let sum = model.sum(&shard, cut, &mut counted)?;
    let loss = sum / total as f64;
    Ok(Evaluation {
        tokens: total,
        bytes,
        seq,
        loss,
        perplexity: loss.exp(),
        bits_per_byte: sum / std::f64::consts::LN_2 / bytes as f64,
        arena_bytes: lockstep_exec::Executor::arena_bytes(&model.executor),
    })
}

/// Whole sequences, and the tokens left over behind them.
#[derive(Clone, Copy)]
struct Cut {
    sequences: u64,
    rest: usize,
}

struct Model {
    executor: CpuExecutor,
    whole: Option<Feed>,
    rest: Option<Feed>,
}

impl Model {
    fn load(trained: &Trained, seq: usize, cut: Cut) -> Result<Self, TrainError> {
        let config = &trained.config;
        // As many tokens at a time as in training.
        let batch = (config.train.micro_batch * config.train.seq / seq).clamp(1, cut.sequences.max(1) as usize);
        let (program, threads) = evaluation_program(config, (batch, seq), cut)?;
        let mut executor = CpuExecutor::load(program.clone(), threads)?;
        state::load(&program.tensors, &mut executor, Weights::Checkpoint(&trained.checkpoint), config.train.seed)?;
        let feed = |entry, batch, seq| Feed::new(Some(entry), batch, seq);
        Ok(Self {
            executor,
            whole: (cut.sequences > 0).then(|| feed(StepProgram::EVALUATE, batch, seq)),
            rest: (cut.rest > 0).then(|| feed(StepProgram::EVALUATE_REST, 1, cut.rest)),
        })
    }

    /// The sum of all token losses.
    fn sum(&mut self, shard: &TokenStream, cut: Cut, counted: &mut dyn FnMut(&[u32])) -> Result<f64, TrainError> {
        let copy = |at: u64, tokens: &mut [u32], targets: &mut [u32]| {
            shard.copy(at, tokens);
            shard.copy(at + 1, targets);
        };
        // An interrupt ends the process at once: nothing is lost.
        let never = AtomicBool::new(false);
        let mut sum = 0.0;
        let mut end = 0;
        if let Some(feed) = &mut self.whole {
            let seq = feed.seq() as u64;
            let fill = |n: u64, x: &mut [u32], y: &mut [u32]| copy(n * seq, x, y);
            sum = feed
                .evaluate(&mut self.executor, StepProgram::EVALUATE, cut.sequences, fill, &never, counted)?
                .unwrap_or(0.0);
            end = cut.sequences * seq;
        }
        if let Some(feed) = &mut self.rest {
            let fill = |_: u64, x: &mut [u32], y: &mut [u32]| copy(end, x, y);
            sum +=
                feed.evaluate(&mut self.executor, StepProgram::EVALUATE_REST, 1, fill, &never, counted)?.unwrap_or(0.0);
        }
        Ok(sum)
    }
}

/// The program with the entries that a cut needs, and the threads it was compiled for.
fn evaluation_program(
    config: &Config,
    (batch, seq): (usize, usize),
    cut: Cut,
) -> Result<(StepProgram, usize), TrainError> {
    let (context, threads) = forward_context(config);
    let graph = |batch, tokens| {
        build_form(&config.model, Form::Loss { batch, seq: tokens, context: seq }).map_err(CompileError::Type)
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

/// The held-out shard of the run that a checkpoint belongs to.
fn held_out(trained: &Trained) -> Result<Arc<TokenStream>, TrainError> {
    let missing = || TrainError::NoHeldOut { dir: trained.data.clone() };
    let data = Prepared::open(&trained.data)?.ok_or_else(missing)?;
    if trained.checkpoint.state["data"] != json!(format!("{:016x}", data.fingerprint())) {
        return Err(TrainError::DataChanged { dir: trained.data.clone() });
    }
    data.validation().cloned().ok_or_else(missing)
}
