//! The loss of a trained model on text, by a program that holds parameters and nothing of training.

use crate::feed::{Feed, Scored, Sequences, Stretch, counted};
use crate::generate::loaded;
use crate::text::with_tokens_of;
use crate::{InferError, Result, RunData, RunTokenizer, Trained, state};
use lockstep_config::{Config, DataFormat};
use lockstep_data::{DataError, PrepareSpec, Progress, Sampler, TokenStream, TokenizerSpec, prepare};
use lockstep_exec::Executor;
use lockstep_host::Devices;
use lockstep_ir::StepProgram;
use lockstep_ir::op::IGNORED_TARGET;
use lockstep_plan::{Cut, check_positions, evaluation_program};
use lockstep_rundir::RunDirError;
use serde::Serialize;
use serde_json::json;
use std::path::{Path, PathBuf};
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

/// How a model is evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvaluationShape {
    /// Most tokens that a prediction sees; `None` for those of the model's training.
    pub seq: Option<usize>,
    /// Tensor-parallel ranks that share the model.
    pub tp: usize,
}

impl EvaluationShape {
    /// Sequences as in training, on one rank.
    pub const OF_TRAINING: Self = Self { seq: None, tp: 1 };

    /// Sequences of this many tokens, on one rank.
    pub fn of(seq: usize) -> Self {
        Self { seq: Some(seq), ..Self::OF_TRAINING }
    }

    pub(crate) fn seq_of(&self, config: &Config) -> usize {
        self.seq.unwrap_or(config.train.seq).max(1)
    }
}

/// How a model does on a text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// On the whole text.
    #[serde(flatten)]
    pub score: Score,
    /// Most tokens that a prediction has seen.
    pub seq: usize,
    /// On each of `data.corpora`, where the run has them and its own validation was asked for.
    pub corpora: Vec<CorpusEvaluation>,
    /// Bytes allocated.
    pub arena_bytes: u64,
}

/// How a model does on one of several corpora.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CorpusEvaluation {
    /// The corpus.
    pub name: String,
    /// On its text.
    #[serde(flatten)]
    pub score: Score,
}

/// Loss in three units.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Score {
    /// Tokens that were predicted.
    pub tokens: u64,
    /// Bytes of text that they stand for.
    pub bytes: u64,
    /// Mean loss per token, in nats.
    pub loss: f64,
    /// Its exponential.
    pub perplexity: f64,
    /// Loss of the whole text in bits, per byte.
    pub bits_per_byte: f64,
}

/// A score that grows.
#[derive(Clone, Copy, Default)]
struct Sum {
    tokens: u64,
    bytes: i64,
    loss: f64,
}

impl Sum {
    fn add(&mut self, tokens: u64, bytes: i64, loss: f64) {
        self.tokens += tokens;
        self.bytes += bytes;
        self.loss += loss;
    }

    fn score(self) -> Score {
        let Sum { tokens, bytes, loss: sum } = self;
        let (loss, bytes) = (sum / tokens as f64, bytes.max(0) as u64);
        let bits_per_byte = sum / std::f64::consts::LN_2 / bytes as f64;
        Score { tokens, bytes, loss, perplexity: loss.exp(), bits_per_byte }
    }
}

/// How far an evaluation has come.
#[derive(Clone, Copy, Debug)]
pub enum EvaluateProgress<'a> {
    /// Something is left out.
    Warning(&'a str),
    /// Text is being packed.
    Preparing(Progress),
    /// Texts of tasks are being scored.
    Scoring {
        /// Texts done.
        done: u64,
        /// Texts in all.
        total: u64,
    },
    /// Questions of tasks are being answered.
    Answering {
        /// Questions done.
        done: u64,
        /// Questions in all.
        total: u64,
    },
    /// Tokens are being predicted.
    Evaluating {
        /// Tokens done.
        done: u64,
        /// Tokens in all.
        total: u64,
    },
}

/// The loss of a model on a text, cut into sequences.
pub fn evaluate(
    devices: &Devices,
    trained: &Trained,
    text: &Text,
    shape: EvaluationShape,
    show: &mut dyn FnMut(EvaluateProgress<'_>),
) -> Result<Evaluation> {
    let config = &trained.config;
    let tokenizer = trained.tokenizer()?;
    let seq = shape.seq_of(config);
    check_positions(config, seq)?;
    // Removed when this function returns; an open shard stays readable.
    let folder = tempfile::tempdir().map_err(|e| RunDirError::io("create", &std::env::temp_dir(), e))?;
    let material = match text {
        Text::Validation => Material::validation(trained, seq, &mut |text| show(EvaluateProgress::Warning(text)))?,
        Text::Paths(paths) => {
            let extensions = config.data.extensions.clone();
            let spec = PrepareSpec {
                paths: paths.clone(),
                extensions,
                text_field: config.data.text_field.clone(),
                prompt_field: config.data.prompt_field.clone(),
                chat: if config.data.format == DataFormat::Chat { trained.chat_spec()? } else { None },
                tokenizer: tokenizer_spec(&tokenizer, config, folder.path())?,
                validation_fraction: 0.0,
                seed: 0,
            };
            let prepared = prepare(&spec, &folder.path().join("data"), &mut |p| show(EvaluateProgress::Preparing(p)))?;
            Material::Text(prepared.train().clone())
        }
    };
    if matches!(&material, Material::Text(tokens) if tokens.len() < 2) {
        return Err(nothing_to_predict("the text is empty"));
    }
    // Special tokens are known as such; no token ends a conversation but what its template writes.
    let by_place = config.data.format == DataFormat::Text && !tokenizer.is_special(tokenizer.eos());
    let cut = material.cut(config, seq);
    let total = cut.sequences * seq as u64 + cut.rest as u64;
    let mut all = Sum::default();
    let mut corpora = vec![Sum::default(); material.names().len()];
    let mut done = 0;
    let mut scored = |Scored { index, loss, targets, source: (stream, from) }: Scored<'_>| {
        let (tokens, bytes) = (counted(targets), text_bytes(&tokenizer, stream, from + 1, targets, by_place));
        all.add(tokens, bytes, loss);
        done += targets.len() as u64;
        if let Material::Validation { samples, .. } = &material {
            corpora[samples.locate(index).corpus].add(tokens, bytes, loss);
        }
        show(EvaluateProgress::Evaluating { done, total });
    };
    let mut model = Model::load(devices, trained, (seq, shape.tp), cut)?;
    model.score(&material, cut, &mut scored)?;
    material.require_read()?;
    if all.tokens == 0 {
        return Err(nothing_to_predict("no token of the text counts in the loss"));
    }
    let named = material.names().iter().zip(corpora).filter(|(name, sum)| !name.is_empty() && sum.tokens > 0);
    let corpora = named.map(|(name, sum)| CorpusEvaluation { name: name.clone(), score: sum.score() }).collect();
    let arena_bytes = model.executor.arena_bytes();
    Ok(Evaluation { score: all.score(), seq, corpora, arena_bytes })
}

fn nothing_to_predict(why: &str) -> InferError {
    let problem = format!("there is nothing to predict: {why}");
    InferError::Unusable {
        problem,
        hint: "name files whose records have text; data.text_field names their field".into(),
    }
}

/// The tokenizer of a model for preparing text in a folder of its own.
fn tokenizer_spec(tokenizer: &RunTokenizer, config: &Config, folder: &Path) -> Result<TokenizerSpec> {
    let Some(json) = tokenizer.source() else { return Ok(TokenizerSpec::Bytes) };
    let path = folder.join("tokenizer.json");
    std::fs::write(&path, json).map_err(|e| RunDirError::io("write", &path, e))?;
    Ok(with_tokens_of(config, TokenizerSpec::file(&path, None)?))
}

/// Bytes of text of the targets that count, which are the tokens of a stream from `from` on. BOS and EOS tokens are none; with
/// `by_place`, the EOS token is the last of each document.
fn text_bytes(tokenizer: &RunTokenizer, stream: &TokenStream, from: u64, targets: &[u32], by_place: bool) -> i64 {
    let mut lasts = Vec::new();
    stream.last_places(from, targets.len() as u64, |at| lasts.push(at as usize));
    // Where the text of each document ends, and where the next document begins.
    let documents = lasts.into_iter().map(|last| (last + usize::from(!by_place), last + 1));
    let mut bytes = 0;
    let mut start = 0;
    for (end, next) in documents.chain([(targets.len(), targets.len())]) {
        let mut at = start.min(end);
        for run in targets[at..end].split(|target| *target == IGNORED_TARGET) {
            bytes += tokenizer.byte_count(&before(stream, from + at as u64), run);
            at += run.len() + 1;
        }
        start = next;
    }
    bytes
}

/// The last few tokens of a document before a place in it, without which those after it may read otherwise: a character may have
/// several tokens.
fn before(stream: &TokenStream, at: u64) -> Vec<u32> {
    const FEW: u64 = 16;
    if at == 0 || at >= stream.len() {
        return Vec::new();
    }
    let mut tokens = vec![0; at.saturating_sub(stream.document_at(at).start.max(at.saturating_sub(FEW))) as usize];
    stream.copy(at - tokens.len() as u64, &mut tokens);
    tokens
}

/// What a model is evaluated on.
enum Material {
    /// All of a text.
    Text(Arc<TokenStream>),
    /// Validation samples, how many of them there are, and the names of their corpora.
    Validation { samples: Sampler, count: u64, names: Vec<String> },
}

impl Material {
    /// The validation text of the run that a checkpoint belongs to.
    fn validation(trained: &Trained, seq: usize, warn: &mut dyn FnMut(&str)) -> Result<Self> {
        let missing = || InferError::NoValidationText { dir: trained.data.clone() };
        let data = RunData::open(&trained.config, &trained.data)?.ok_or_else(missing)?;
        let of_run = trained.checkpoint().map(|checkpoint| &checkpoint.state["data"]);
        if of_run != Some(&json!(format!("{:016x}", data.fingerprint()))) {
            return Err(InferError::DataChanged { dir: trained.data.clone() });
        }
        if let Some((samples, names)) = data.validation_samples(seq, warn) {
            let count = samples.samples_before_repeat();
            return Ok(Material::Validation { samples, count, names });
        }
        match data.corpora().iter().find_map(|corpus| corpus.data.validation()) {
            // Too short for one sequence: this says how short.
            Some(tokens) => Err(Sampler::in_order(tokens.clone(), seq).err().map_or_else(missing, InferError::Data)),
            None => Err(missing()),
        }
    }

    fn cut(&self, config: &Config, seq: usize) -> Cut {
        match self {
            Material::Validation { count, .. } => {
                // A run without validation has validation text all the same.
                let most = match config.train.validation_sequences {
                    0 => u64::MAX,
                    most => most as u64,
                };
                Cut { sequences: (*count).min(most), rest: 0 }
            }
            Material::Text(tokens) => {
                let targets = tokens.len().saturating_sub(1);
                Cut { sequences: targets / seq as u64, rest: (targets % seq as u64) as usize }
            }
        }
    }

    fn require_read(&self) -> Result<(), DataError> {
        match self {
            Material::Validation { samples, .. } => samples.require_read(),
            Material::Text(tokens) => tokens.require_read(),
        }
    }

    fn names(&self) -> &[String] {
        match self {
            Material::Text(_) => &[],
            Material::Validation { names, .. } => names,
        }
    }
}

/// A model in memory, for whole sequences and the rest of a text.
struct Model {
    executor: Box<dyn Executor>,
    whole: Option<Feed>,
    rest: Option<Feed>,
}

impl Model {
    /// For what is cut into sequences of `seq` tokens.
    fn load(devices: &Devices, trained: &Trained, (seq, tp): (usize, usize), cut: Cut) -> Result<Self> {
        let config = &trained.config;
        // As many tokens at a time as in training.
        let batch = (config.train.micro_batch * config.train.seq / seq).clamp(1, cut.sequences.max(1) as usize);
        let (program, threads) = evaluation_program(devices, config, (batch, seq, tp), cut, false)?;
        let mut executor = loaded(devices, config, &program, threads)?;
        state::load(&program.tensors, executor.as_mut(), trained.weights(), config.train.seed)?;
        let numbers = (config.train.seed, config.model.vocab_size);
        let feed = |entry, batch, seq| Feed::new(&program.tensors, Some(entry), (batch, seq), numbers, &|_, _| true);
        Ok(Self {
            executor,
            whole: (cut.sequences > 0).then(|| feed(StepProgram::EVALUATE, batch, seq)),
            rest: (cut.rest > 0).then(|| feed(StepProgram::EVALUATE_REST, 1, cut.rest)),
        })
    }

    /// Scores every sequence.
    fn score(&mut self, material: &Material, cut: Cut, scored: &mut dyn FnMut(Scored<'_>)) -> Result<()> {
        // An interrupt ends the process at once: nothing is lost.
        let never = AtomicBool::new(false);
        let executor = self.executor.as_mut();
        if let Some(feed) = &mut self.whole {
            let whole: &dyn Sequences = match material {
                Material::Validation { samples, .. } => samples,
                Material::Text(tokens) => &Stretch { tokens, from: 0, seq: feed.seq() },
            };
            feed.evaluate(executor, StepProgram::EVALUATE, cut.sequences, whole, &never, scored)?;
        }
        if let (Some(feed), Material::Text(tokens)) = (&mut self.rest, material) {
            let rest = Stretch { tokens, from: tokens.len() - 1 - cut.rest as u64, seq: cut.rest };
            feed.evaluate(executor, StepProgram::EVALUATE_REST, 1, &rest, &never, scored)?;
        }
        Ok(())
    }
}
