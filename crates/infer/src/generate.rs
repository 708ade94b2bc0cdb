//! Text from a model: a loaded generation program, and the loop from prompt to last token.

use crate::batch::{as_f32, logits_type};
use crate::state::{self, Weights};
use crate::{InferError, Result, RunTokenizer, Sampling};
use lockstep_config::Config;
use lockstep_exec::Executor;
use lockstep_host::Devices;
use lockstep_ir::{DType, StepProgram};
use lockstep_model::names;
use lockstep_plan::{GenerationShape, Target, cache_plan, generation_program};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// A generation program in memory, on as many ranks as it is for.
pub(crate) fn loaded(
    devices: &Devices,
    config: &Config,
    program: &StepProgram,
    threads: usize,
) -> Result<Box<dyn Executor>> {
    let timeout = Duration::from_secs_f64(config.parallel.timeout);
    Ok(devices.load_all(Target::of(devices, config), vec![program.clone()], threads, timeout)?)
}

/// A model in memory that reads tokens and says what may come next.
pub struct Generator {
    executor: Box<dyn Executor>,
    context: usize,
    chunk: usize,
    position: usize,
    bytes: Vec<u8>,
    logits: Vec<f32>,
    compute: DType,
}

impl Generator {
    /// Loads the generation program of a config, for texts of up to `context` tokens.
    pub fn new(devices: &Devices, config: &Config, context: usize, weights: Weights) -> Result<Self> {
        Self::shared(devices, config, (context, 1), weights)
    }

    /// The same over tensor-parallel ranks.
    pub fn shared(devices: &Devices, config: &Config, (context, tp): (usize, usize), weights: Weights) -> Result<Self> {
        let mut cache = cache_plan(devices, config, &GenerationShape { tp, ..GenerationShape::one(context) })?;
        // The only text has every block, in its order, and reads one token or a chunk.
        (cache.rows, cache.by_rows) = (1, false);
        cache.shape.window_pages = cache.shape.window_pages.max(cache.shape.blocks);
        let (program, threads) = generation_program(devices, config, &cache)?;
        let mut executor = loaded(devices, config, &program, threads)?;
        state::load(&program.tensors, executor.as_mut(), weights, config.train.seed)?;
        let pages: Vec<u8> = (0..cache.shape.blocks as u32).flat_map(u32::to_le_bytes).collect();
        for table in [names::PAGES, names::WINDOW_PAGES].into_iter().filter(|name| program.tensor(name).is_some()) {
            executor.write(table, 0, &pages)?;
        }
        let chunk = cache.chunk;
        let logits = vec![0.0; config.model.vocab_size];
        let compute = logits_type(&program);
        Ok(Self { executor, context, chunk, position: 0, bytes: Vec::new(), logits, compute })
    }

    /// Most tokens of a text.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Tokens read so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Bytes allocated.
    pub fn arena_bytes(&self) -> u64 {
        self.executor.arena_bytes()
    }

    /// Starts a new text.
    pub fn forget(&mut self) {
        self.position = 0;
    }

    /// Reads tokens and gives the logits of the token after them.
    pub fn read(&mut self, tokens: &[u32]) -> Result<&[f32]> {
        let all = self.position + tokens.len();
        if tokens.is_empty() {
            return Err(InferError::EmptyPrompt);
        }
        if all > self.context {
            return Err(InferError::ContextFull { tokens: all, context: self.context });
        }
        for chunk in tokens.chunks(self.chunk) {
            match chunk {
                [one] => self.call(StepProgram::DECODE[0].1, std::slice::from_ref(one), 1)?,
                _ => self.call(StepProgram::PREFILL, chunk, self.chunk)?,
            }
        }
        Ok(&self.logits)
    }

    fn call(&mut self, entry: &'static str, tokens: &[u32], room: usize) -> Result<()> {
        // What follows the tokens is not looked at.
        let padding = std::iter::repeat_n(&0, room - tokens.len());
        self.bytes.clear();
        self.bytes.extend(tokens.iter().chain(padding).flat_map(|t| t.to_le_bytes()));
        let name = |n: &str| StepProgram::name_in(entry, n);
        self.executor.write(&name(names::TOKENS), 0, &self.bytes)?;
        self.executor.write(&name(names::START), 0, &(self.position as u32).to_le_bytes())?;
        self.executor.write(&name(names::COUNT), 0, &(tokens.len() as u32).to_le_bytes())?;
        self.executor.write(&name(names::SLOT), 0, &0u32.to_le_bytes())?;
        self.executor.run(entry)?;
        self.position += tokens.len();
        let logits = self.executor.read(&name(names::LOGITS), 0)?;
        self.logits = as_f32(&logits, self.compute);
        Ok(())
    }
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    /// The model ended the document.
    #[serde(rename = "separator")]
    Eos,
    /// As many tokens as were asked for.
    MaxTokens,
    /// The context is full.
    Context,
    /// Whoever listens has heard enough.
    Listener,
}

/// A generated text.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// The new tokens, without an EOS token.
    pub tokens: Vec<u32>,
    /// Why there are no more.
    pub stop: Stop,
    /// Seconds to read the prompt.
    pub prompt_s: f64,
    /// Seconds from then to the last token.
    pub generate_s: f64,
}

/// Continues a prompt by up to `max_tokens` tokens, each shown to `listen` as it comes, or up to one of the tokens `ends`. Prompt
/// and continuation together never leave the context.
pub fn generate(
    generator: &mut Generator,
    tokenizer: &RunTokenizer,
    ends: &[u32],
    prompt: &[u32],
    max_tokens: usize,
    sampling: &Sampling,
    listen: &mut dyn FnMut(u32) -> ControlFlow<()>,
) -> Result<Generated> {
    sampling.check()?;
    generator.forget();
    if prompt.is_empty() {
        return Err(InferError::EmptyPrompt);
    }
    if prompt.len() >= generator.context {
        return Err(InferError::ContextFull { tokens: prompt.len(), context: generator.context });
    }
    let begun = Instant::now();
    generator.read(prompt)?;
    let prompt_s = begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    let mut tokens = Vec::new();
    let stop = loop {
        if tokens.len() == max_tokens {
            break Stop::MaxTokens;
        }
        let position = prompt.len() + tokens.len();
        if position == generator.context {
            break Stop::Context;
        }
        if let Some(last) = tokens.last() {
            generator.read(&[*last])?;
        }
        let known = (tokenizer.vocabulary() as usize).min(generator.logits.len());
        let text = [prompt, &tokens].concat();
        let Some(token) = sampling.choose(&generator.logits[..known], position as u64, &text) else {
            let what = format!("the model's logits at position {position} are");
            return Err(InferError::NotFinite { what });
        };
        if ends.contains(&token) {
            break Stop::Eos;
        }
        tokens.push(token);
        if listen(token).is_break() {
            break Stop::Listener;
        }
    };
    Ok(Generated { tokens, stop, prompt_s, generate_s: begun.elapsed().as_secs_f64() })
}
