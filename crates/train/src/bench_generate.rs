//! Measures generation: reading prompts, which is bound by matmuls, and decoding, which is bound by memory.

use crate::Result;
use crate::profile::{MeasuredPeaks, Profile, ProfiledStep, profile};
use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_infer::{Sampling, TextBatch, TextRequest, Weights};
use lockstep_ir::graph::State;
use lockstep_ir::program::Role;
use lockstep_ir::{Op, StepProgram, counter};
use lockstep_model::names;
use lockstep_plan::{GenerationShape, PAGE, PlanError, Target, forward_threads};
use serde::Serialize;
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::time::Instant;

/// What is measured.
pub struct GenerationSpec {
    /// The model, in random weights.
    pub config: Config,
    /// Texts at once.
    pub texts: usize,
    /// Tokens of each prompt.
    pub prompt: usize,
    /// Tokens that are written for each.
    pub tokens: usize,
    /// Whether to say where the time of a step of decoding goes.
    pub profile: bool,
}

/// What generation took.
#[derive(Clone, Debug, Serialize)]
pub struct GenerationResult {
    /// What computes.
    pub device: &'static str,
    /// Texts at once.
    pub texts: usize,
    /// Tokens of each prompt.
    pub prompt: usize,
    /// Tokens that were written for each.
    pub tokens: usize,
    /// Tokens of prompts read in a second.
    pub prefill_tokens_per_s: f64,
    /// FLOPs in a second of that.
    pub prefill_tflops: f64,
    /// That as a share of the measured peak of matmuls.
    pub prefill_share: f64,
    /// Tokens written in a second, of all texts.
    pub tokens_per_s: f64,
    /// Seconds from a token to the next: the median, and what 90 and 99 of 100 tokens take at most.
    pub latency_s: [f64; 3],
    /// The least seconds of a token: bytes of weights and of keys and values that are read, by the measured bandwidth.
    pub bound_s: f64,
    /// That as a share of the median.
    pub share: f64,
    /// Bytes of weights that a step of decoding reads.
    pub weight_bytes: u64,
    /// Bytes of keys and values that it reads, in the middle of the texts.
    pub cache_read_bytes: u64,
    /// Measured bytes per second of memory, read and written by a copy.
    pub bandwidth: f64,
    /// Bytes of the KV cache.
    pub cache_bytes: u64,
    /// Bytes of the arena, the cache included.
    pub arena_bytes: u64,
    /// Where the time of a step of decoding goes.
    pub profile: Option<Profile>,
}

/// Steps of decoding that are not counted: the first ones capture CUDA graphs.
const WARM_UP: usize = 4;

/// Measures reading prompts, and decoding.
pub fn bench_generate(
    devices: &Devices,
    spec: &GenerationSpec,
    show: &mut dyn FnMut(&str),
) -> Result<GenerationResult> {
    let GenerationSpec { config, texts, prompt, tokens, .. } = spec;
    let target = Target::of(devices, config);
    let context = prompt + tokens + WARM_UP + 1;
    let shape = GenerationShape { context, texts: *texts, cache: None, known: None, tp: 1 };
    show("measuring the peaks of matmuls and memory");
    let (threads, compute) = forward_threads(devices, config);
    let peaks = MeasuredPeaks::measured(devices.device(target)?.as_ref(), threads, compute)?;
    show("loading");
    let vocabulary = config.model.vocab_size;
    let mut batch = TextBatch::new(devices, config, shape, Weights::Initial)?;
    let submit = |batch: &mut TextBatch, round: u64| {
        (0..*texts as u64).try_for_each(|id| {
            let token = |i: u64| (counter::bits(round << 32 | id, i) % vocabulary as u64) as u32;
            let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
            let prompt = (0..*prompt as u64).map(token).collect();
            let max_tokens = tokens + WARM_UP;
            batch.submit(id, TextRequest { prompt, max_tokens, sampling, ends: Vec::new(), logprobs: false })
        })
    };
    let listen = &mut |_: u64, _: u32| ControlFlow::Continue(());
    // Kernels are compiled, and graphs captured, by the first round.
    for round in 0..2 {
        submit(&mut batch, round)?;
        batch.read_prompts()?;
        for _ in 0..WARM_UP - 1 {
            batch.step(listen)?;
        }
        batch.forget()?;
    }
    submit(&mut batch, 2)?;
    show("reading prompts");
    let begun = Instant::now();
    batch.read_prompts()?;
    let prefill_s = begun.elapsed().as_secs_f64();
    show("decoding");
    let mut times = Vec::new();
    let entry = batch.decode_entry();
    let before = batch.counts().written;
    while times.len() < *tokens && !batch.is_done() {
        let begun = Instant::now();
        batch.step(listen)?;
        times.push(begun.elapsed().as_secs_f64());
    }
    let written = batch.counts().written - before;
    let program = batch.program().clone();
    let profile = match spec.profile {
        true => {
            let timings = batch.profile(entry)?;
            Some(profile(&program, &[ProfiledStep { step: 1, timings }], &peaks)?)
        }
        false => None,
    };
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
    let (matmul, bandwidth) = peaks.rates();
    let weight_bytes = weights_read(&program, entry);
    let cache = batch.cache();
    let position_bytes = (cache.page_bytes + cache.window_page_bytes) / cache.shape.page as u64;
    let cache_read_bytes = (*texts * (prompt + tokens / 2)) as u64 * position_bytes;
    let bound_s = (weight_bytes + cache_read_bytes) as f64 / bandwidth;
    let read = (texts * prompt) as f64;
    let flops = prefill_flops(&program, (batch.cache().chunk, *prompt), *texts)?;
    Ok(GenerationResult {
        device: target.name(),
        texts: *texts,
        prompt: *prompt,
        tokens: *tokens,
        prefill_tokens_per_s: read / prefill_s,
        prefill_tflops: flops / prefill_s / 1e12,
        prefill_share: flops / prefill_s / matmul,
        tokens_per_s: written as f64 / times.iter().sum::<f64>(),
        latency_s: [at(0.5), at(0.9), at(0.99)],
        bound_s,
        share: bound_s / at(0.5),
        weight_bytes,
        cache_read_bytes,
        bandwidth,
        cache_bytes: cache.bytes(),
        arena_bytes: batch.arena_bytes(),
        profile,
    })
}

/// Bytes of weights that an entry reads, each once; of an embedding table only the rows of its tokens, which is as good as nothing.
fn weights_read(program: &StepProgram, entry: &str) -> u64 {
    let is_weight = |tensor: &&lockstep_ir::program::Tensor| {
        matches!(tensor.role, Role::State(State::Parameter(_) | State::Unit { .. }))
    };
    let mut read = BTreeSet::new();
    for slot in program.entry(entry).iter().flat_map(|entry| &entry.schedule) {
        for instr in program.segments[slot.segment].instrs.iter().filter(|instr| instr.op != Op::Embedding) {
            read.extend(instr.inputs.iter().map(|input| input.buffer));
        }
    }
    program.tensors.iter().filter(is_weight).filter(|t| read.contains(&t.buffer)).map(|t| t.ty.bytes()).sum()
}

/// Model FLOPs of reading prompts: of matmuls as often as there are tokens, of attention over the positions before each.
fn prefill_flops(program: &StepProgram, (chunk, prompt): (usize, usize), texts: usize) -> Result<f64> {
    let Some(entry) = program.entry(StepProgram::PREFILL) else { return Ok(0.0) };
    let (mut matmuls, mut scores) = (0.0, 0.0);
    for slot in &entry.schedule {
        for instr in &program.segments[slot.segment].instrs {
            let flops = instr.cost().map_err(PlanError::from)?.flops.hardware as f64;
            match instr.op {
                Op::CachedAttention { .. } => scores += flops,
                _ => matmuls += flops,
            }
        }
    }
    // A chunk's attention counts over the whole context; a prompt sees half of itself.
    let context = program.tensor(names::PAGES).map_or(prompt, |table| table.ty.dims[1].size() * PAGE);
    let per_token = matmuls / chunk as f64 + scores / chunk as f64 * (prompt as f64 / 2.0) / context as f64;
    Ok(per_token * (prompt * texts) as f64)
}
