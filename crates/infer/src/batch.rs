//! Many texts at once: continuous batching over a cache of pages.
//!
//! Each call of the model takes one step: a chunk of a prompt that is not read yet, or the next token of every text that is. Texts come in as slots and
//! pages are free and leave when they end. Where no page is left for a text to grow, the youngest gives its pages back and is read again later. What a text
//! becomes does not depend on the others: tokens are drawn by the text's own seed, and on the CPU a row's bits do not depend on the rows beside it.

mod call;
mod flight;
mod room;

use crate::generate::loaded;
use crate::pages::{Free, Prefixes};
use crate::state::{self, Weights};
use crate::{InferError, Result, Sampling, Stop};
use call::Row;
use flight::Flight;
use lockstep_config::Config;
use lockstep_exec::{Executor, Timing};
use lockstep_host::Devices;
use lockstep_ir::op::NO_ROW;
use lockstep_ir::{DType, StepProgram, bf16, f16};
use lockstep_model::names;
use lockstep_plan::{CachePlan, GenerationShape, PAGE, Target, cache_plan, decode_sizes, generation_program};
use std::collections::VecDeque;
use std::ops::ControlFlow;

/// A text to continue.
#[derive(Clone, Debug)]
pub struct TextRequest {
    /// Its tokens.
    pub prompt: Vec<u32>,
    /// Most tokens to write.
    pub max_tokens: usize,
    /// How they are drawn.
    pub sampling: Sampling,
    /// Tokens that end it.
    pub ends: Vec<u32>,
    /// Whether the log-probability of each token is wanted.
    pub logprobs: bool,
}

/// A text that has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Written {
    /// The new tokens, without one that ended it.
    pub tokens: Vec<u32>,
    /// Their log-probabilities by the model, in nats, where they were asked for.
    pub logprobs: Vec<f32>,
    /// Why there are no more.
    pub stop: Stop,
}

/// What a batch has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchCounts {
    /// Tokens of prompts that were read, those that were read again included.
    pub read: u64,
    /// Tokens of prompts whose keys and values another text had left.
    pub shared: u64,
    /// Tokens that were written.
    pub written: u64,
    /// Times that a text gave its pages back and had to be read again.
    pub recomputed: u64,
}

/// A text under way.
struct Text {
    id: u64,
    request: TextRequest,
    tokens: Vec<u32>,
    logprobs: Vec<f32>,
    /// Tokens whose keys and values are in the cache.
    cached: usize,
    slot: usize,
    /// By kind of layers: the page of each block. Those of the first blocks are shared where `shared` has them.
    pages: [Vec<Option<u32>>; 2],
    shared: Vec<usize>,
    /// Whether the beginnings of other texts were looked at.
    looked: bool,
}

impl Text {
    fn remaining(&self) -> usize {
        self.tokens.len() - self.cached
    }
}

/// The table of pages of one kind of layers.
struct Table {
    name: &'static str,
    pages: Vec<u32>,
    changed: bool,
}

/// A model in memory that continues many texts at once.
pub struct TextBatch {
    executor: Box<dyn Executor>,
    program: StepProgram,
    cache: CachePlan,
    context: usize,
    chunk: usize,
    /// Whether prompts are read by `decode`, a row for each token: so that bits do not depend on how a prompt was cut.
    by_rows: bool,
    sizes: &'static [(usize, &'static str)],
    vocabulary: usize,
    /// The type of logits.
    compute: DType,
    /// Tokens that may be drawn.
    known: usize,
    tables: Vec<(usize, Table)>,
    free: [Free; 2],
    prefixes: Prefixes,
    slots: Vec<usize>,
    waiting: VecDeque<Text>,
    /// In the order in which they came in.
    running: Vec<Text>,
    counts: BatchCounts,
    /// The step of decoding that is queued and whose tokens were not looked at.
    flight: Option<Flight>,
}

/// A result of a text, with the number it was submitted under.
pub type Ended = (u64, Result<Written>);

impl TextBatch {
    /// Loads the generation program of a config for texts of a shape. Where no size of the cache is given, it is what
    /// all texts may need, as far as that is free.
    pub fn new(devices: &Devices, config: &Config, shape: GenerationShape, weights: Weights) -> Result<Self> {
        let target = Target::of(devices, config);
        let device = devices.device(target)?;
        let mut cache = cache_plan(devices, config, &shape)?;
        let (mut program, mut threads) = generation_program(devices, config, &cache)?;
        // Ranks that are threads share the memory.
        let sharers = if devices.processes().is_some() { 1 } else { shape.tp as u64 };
        if shape.cache.is_none()
            && let Some(free) = device.available_bytes()?.map(|free| free / sharers)
            && program.arena_bytes > free - free / 16
        {
            let least = cache_plan(devices, config, &GenerationShape { texts: 1, ..shape })?.bytes();
            let room = (free - free / 16).saturating_sub(program.arena_bytes - cache.bytes());
            cache = cache_plan(devices, config, &GenerationShape { cache: Some(room.max(least)), ..shape })?;
            (program, threads) = generation_program(devices, config, &cache)?;
        }
        let kinds = [names::PAGES, names::WINDOW_PAGES].into_iter().enumerate();
        let here = kinds.filter(|(_, name)| program.tensor(name).is_some());
        let entries = cache.shape.slots * cache.shape.blocks;
        let tables = here.map(|(kind, name)| (kind, Table { name, pages: vec![0; entries], changed: true })).collect();
        let mut executor = loaded(devices, config, &program, threads)?;
        state::load(&program.tensors, executor.as_mut(), weights, config.train.seed)?;
        Ok(Self {
            executor,
            compute: logits_type(&program),
            program,
            cache,
            context: shape.context,
            chunk: cache.chunk,
            by_rows: cache.by_rows,
            sizes: decode_sizes(&cache),
            vocabulary: config.model.vocab_size,
            known: cache.known,
            tables,
            free: [cache.shape.pages, cache.shape.window_pages].map(Free::new),
            prefixes: Prefixes::default(),
            slots: (0..cache.shape.slots).rev().collect(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            counts: BatchCounts::default(),
            flight: None,
        })
    }

    /// Bytes allocated.
    pub fn arena_bytes(&self) -> u64 {
        self.executor.arena_bytes()
    }

    /// The pages of the cache.
    pub fn cache(&self) -> &CachePlan {
        &self.cache
    }

    /// What was done so far.
    pub fn counts(&self) -> BatchCounts {
        self.counts
    }

    /// Texts that are in the cache, and texts that wait.
    pub fn texts(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    /// The share of the pages that texts have.
    pub fn filled(&self) -> f64 {
        let CachePlan { page_bytes, window_page_bytes, .. } = self.cache;
        let free = (self.free[0].count() + self.prefixes.unread()) as u64 * page_bytes;
        let free = free + self.free[1].count() as u64 * window_page_bytes;
        1.0 - free as f64 / self.cache.bytes() as f64
    }

    /// Takes a text up under a number of the caller's.
    pub fn submit(&mut self, id: u64, request: TextRequest) -> Result<()> {
        request.sampling.check()?;
        if request.prompt.is_empty() {
            return Err(InferError::EmptyPrompt);
        }
        if request.prompt.len() >= self.context {
            return Err(InferError::ContextFull { tokens: request.prompt.len(), context: self.context });
        }
        let tokens = request.prompt.clone();
        let (slot, pages, shared) = (usize::MAX, [Vec::new(), Vec::new()], Vec::new());
        let text = Text { id, request, tokens, logprobs: Vec::new(), cached: 0, slot, pages, shared, looked: false };
        self.waiting.push_back(text);
        Ok(())
    }

    /// One call of the model for a prompt, and one for all texts whose prompts are read. Every new token goes to `listen` with the number of its text, which
    /// ends where that says so. Gives the texts that have ended.
    pub fn step(&mut self, listen: &mut dyn FnMut(u64, u32) -> ControlFlow<()>) -> Result<Vec<Ended>> {
        let mut ended = Vec::new();
        if let Some(flight) = self.flight.take() {
            self.fly_on(flight, listen, &mut ended)?;
            return Ok(ended);
        }
        self.admit(&mut ended);
        self.read_a_prompt(listen, &mut ended)?;
        self.decode(listen, &mut ended)?;
        Ok(ended)
    }

    /// Gives up all texts.
    pub fn forget(&mut self) -> Result<()> {
        self.let_go()?;
        self.waiting.clear();
        while let Some(mut text) = self.running.pop() {
            self.release(&mut text);
        }
        Ok(())
    }

    /// Reads the prompts of all texts that have a slot, and writes no more than the first token of each.
    pub fn read_prompts(&mut self) -> Result<()> {
        self.admit(&mut Vec::new());
        let listen = &mut |_, _| ControlFlow::Continue(());
        while self.running.iter().any(|text| text.remaining() > 1) {
            self.read_a_prompt(listen, &mut Vec::new())?;
        }
        Ok(())
    }

    /// The program.
    pub fn program(&self) -> &StepProgram {
        &self.program
    }

    /// The entry that decodes all texts that have a slot.
    pub fn decode_entry(&self) -> &'static str {
        self.entry(self.running.len())
    }

    /// Runs an entry on what it ran on last, and says when each instruction ran.
    pub fn profile(&mut self, entry: &str) -> Result<Vec<Timing>> {
        Ok(self.executor.profile(entry)?)
    }

    /// Whether nothing is left to do.
    pub fn is_done(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Gives waiting texts a slot, as long as there are pages for all that is known of them.
    fn admit(&mut self, ended: &mut Vec<Ended>) {
        while let Some(text) = self.waiting.front() {
            if text.request.max_tokens == 0 {
                let written = Written { tokens: Vec::new(), logprobs: Vec::new(), stop: Stop::MaxTokens };
                ended.push((text.id, Ok(written)));
                self.waiting.pop_front();
                continue;
            }
            let blocks = (text.tokens.len() + 1).div_ceil(PAGE);
            let there = [self.free[0].count() + self.prefixes.unread(), self.free[1].count()];
            let needed = [blocks, blocks.min(self.cache.window_blocks)];
            let fits = self.tables.iter().all(|(kind, _)| there[*kind] >= needed[*kind]);
            if self.slots.is_empty() || !(fits || self.running.is_empty()) {
                return;
            }
            let (Some(slot), Some(mut text)) = (self.slots.pop(), self.waiting.pop_front()) else { return };
            text.slot = slot;
            self.running.push(text);
        }
    }

    /// Reads a chunk of the oldest prompt that is not read.
    fn read_a_prompt(
        &mut self,
        listen: &mut dyn FnMut(u64, u32) -> ControlFlow<()>,
        ended: &mut Vec<Ended>,
    ) -> Result<()> {
        let Some(i) = self.running.iter().position(|text| text.remaining() > 1) else { return Ok(()) };
        self.share(i);
        let most = if self.by_rows { self.sizes[self.sizes.len() - 1].0 } else { self.chunk };
        let count = self.running[i].remaining().min(most);
        if !self.make_room(i, count)? {
            return Ok(());
        }
        let text = &self.running[i];
        let (start, slot) = (text.cached, text.slot);
        let tokens = text.tokens[start..start + count].to_vec();
        if self.by_rows {
            let rows: Vec<Row> =
                (start..).zip(&tokens).map(|(start, token)| Row { token: *token, start, slot }).collect();
            self.call_rows(&rows)?;
        } else {
            self.call(StepProgram::PREFILL, &[(&tokens, start, slot)], self.chunk)?;
        }
        self.counts.read += count as u64;
        let entry = if self.by_rows { self.entry(count) } else { StepProgram::PREFILL };
        let row = if self.by_rows { count - 1 } else { 0 };
        self.running[i].cached += count;
        self.keep_beginning(i);
        if self.running[i].remaining() == 0 {
            let given = self.given(entry, &[i])?;
            self.take_token(i, given.row(row), listen, ended);
            self.leave_ended();
        }
        Ok(())
    }

    /// The next token of every text whose prompt is read.
    fn decode(&mut self, listen: &mut dyn FnMut(u64, u32) -> ControlFlow<()>, ended: &mut Vec<Ended>) -> Result<()> {
        // Those that give way are the last ones.
        let mut i = 0;
        while i < self.running.len() {
            if self.running[i].remaining() == 1 && !self.make_room(i, 1)? {
                break;
            }
            i += 1;
        }
        let ready: Vec<usize> = (0..self.running.len()).filter(|i| self.running[*i].remaining() == 1).collect();
        let most = self.sizes[self.sizes.len() - 1].0;
        for rows in ready.chunks(most) {
            let row = |i: &usize| {
                let text = &self.running[*i];
                Row { token: text.tokens[text.cached], start: text.cached, slot: text.slot }
            };
            self.call_rows(&rows.iter().map(row).collect::<Vec<_>>())?;
            if ready.len() <= most && rows.iter().all(|i| is_greedy(&self.running[*i].request)) {
                let texts = rows.iter().map(|i| self.running[*i].id).collect();
                self.flight = self.taken_off(texts, self.entry(rows.len()))?;
                if self.flight.is_some() {
                    return Ok(());
                }
            }
            let given = self.given(self.entry(rows.len()), rows)?;
            for (row, &i) in rows.iter().enumerate() {
                self.running[i].cached += 1;
                self.take_token(i, given.row(row), listen, ended);
            }
        }
        self.leave_ended();
        Ok(())
    }

    /// Draws the next token of a text. One that has ended has no request to go on with, and leaves.
    fn take_token(
        &mut self,
        i: usize,
        (best, logits): (u32, &[f32]),
        listen: &mut dyn FnMut(u64, u32) -> ControlFlow<()>,
        ended: &mut Vec<Ended>,
    ) {
        let text = &mut self.running[i];
        let position = text.tokens.len();
        let request = &text.request;
        let drawn = match is_greedy(request) {
            true => Some(best).filter(|token| *token != NO_ROW),
            false => request.sampling.choose(logits, position as u64, &text.tokens),
        };
        let Some(token) = drawn else {
            let what = format!("the model's logits at position {position} are");
            ended.push((text.id, Err(InferError::NotFinite { what })));
            text.id = ENDED;
            return;
        };
        self.counts.written += 1;
        let mut stop = request.ends.contains(&token).then_some(Stop::Eos);
        if stop.is_none() {
            if request.logprobs {
                text.logprobs.push(Sampling::log_probability(logits, token));
            }
            text.tokens.push(token);
            let written = text.tokens.len() - request.prompt.len();
            stop = if listen(text.id, token).is_break() {
                Some(Stop::Listener)
            } else if written == request.max_tokens {
                Some(Stop::MaxTokens)
            } else {
                (text.tokens.len() == self.context).then_some(Stop::Context)
            };
        }
        if let Some(stop) = stop {
            let tokens = text.tokens.split_off(text.request.prompt.len());
            ended.push((text.id, Ok(Written { tokens, logprobs: std::mem::take(&mut text.logprobs), stop })));
            text.id = ENDED;
        }
    }

    fn leave_ended(&mut self) {
        while let Some(i) = self.running.iter().position(|text| text.id == ENDED) {
            let mut text = self.running.remove(i);
            self.release(&mut text);
        }
    }
}

/// Whether the most probable token is taken, whatever the text, and nothing else is wanted of the logits.
fn is_greedy(request: &TextRequest) -> bool {
    request.sampling.temperature == 0.0 && request.sampling.repetition_penalty == 1.0 && !request.logprobs
}

/// The number of a text that has ended.
const ENDED: u64 = u64::MAX;

/// The type of a generation program's logits.
pub(crate) fn logits_type(program: &StepProgram) -> DType {
    let logits = program.tensor(&StepProgram::name_in(StepProgram::PREFILL, names::LOGITS));
    logits.map_or(DType::F32, |tensor| tensor.ty.dtype)
}

/// Numbers of the type that the model computes in, as f32.
pub(crate) fn as_f32(bytes: &[u8], dtype: DType) -> Vec<f32> {
    let halves = |to_f32: fn(u16) -> f32| bytes.as_chunks().0.iter().map(|b| to_f32(u16::from_le_bytes(*b))).collect();
    match dtype {
        DType::BF16 => halves(bf16::to_f32),
        DType::F16 => halves(f16::to_f32),
        _ => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
    }
}
