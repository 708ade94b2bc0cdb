//! Programs without a training step: text from a model, and the loss of text.

use crate::device::{Machine, Target, threads};
use crate::plan::{adapted, training_context};
use crate::{PlanError, Result};
use lockstep_compile::{Context, Precision, Steps, compile_forward};
use lockstep_config::legal::{self, Extents};
use lockstep_config::{Config, LoraConfig, ModelConfig};
use lockstep_ir::{DType, FEW_ROWS, Layout, MatmulType, Mesh, MeshAxis, Op, StepProgram};
use lockstep_model::{CacheShape, Form, build_form};

/// Most tokens that one call of `prefill` reads: on a CPU as many as keep its units busy, on a GPU more.
const CHUNK: usize = 128;
const CUDA_CHUNK: usize = 1024;

/// Positions of a page of the KV cache: a tile of keys of the CPU's kernels.
pub const PAGE: usize = 96;

/// What generation has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GenerationShape {
    /// Most tokens of a text.
    pub context: usize,
    /// Texts that are under way at once.
    pub texts: usize,
    /// Bytes of the KV cache; `None` for as many as all texts have at their longest.
    pub cache: Option<u64>,
    /// Tokens that may be written, where they are fewer than the model's vocabulary.
    pub known: Option<usize>,
    /// Tensor-parallel ranks that share the model: each has a part of the heads, hidden units and vocabulary, and of the cache.
    pub tp: usize,
}

impl GenerationShape {
    /// One text.
    pub fn one(context: usize) -> Self {
        Self { context, texts: 1, cache: None, known: None, tp: 1 }
    }
}

/// The pages of a cache, and what they take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachePlan {
    /// Slots, blocks and pages.
    pub shape: CacheShape,
    /// Bytes of a page, in all layers that see all positions.
    pub page_bytes: u64,
    /// The same in all layers with a sliding window.
    pub window_page_bytes: u64,
    /// The longest sliding window.
    pub window: Option<usize>,
    /// Pages with windows that one text has at most.
    pub window_blocks: usize,
    /// Rows that `decode` takes at most.
    pub rows: usize,
    /// Whether prompts are read by `decode`, a row for each token: so that bits do not depend on how a prompt was cut, on a GPU either.
    pub by_rows: bool,
    /// Most tokens that a call of `prefill` reads.
    pub chunk: usize,
    /// Tokens that may be written.
    pub known: usize,
    /// Tensor-parallel ranks, of which each has these bytes.
    pub tp: usize,
}

impl CachePlan {
    /// Bytes of all pages.
    pub fn bytes(&self) -> u64 {
        self.shape.pages as u64 * self.page_bytes + self.shape.window_pages as u64 * self.window_page_bytes
    }
}

/// Whole sequences, and the tokens left over after them.
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

/// Elements of the widest latent with its key that the kernels of GPUs take over a cache.
const WIDEST_LATENT: usize = 1024;

/// Refuses latents that no kernel of the device takes over a cache.
pub(crate) fn check_latent(machine: &dyn Machine, config: &Config) -> Result<()> {
    let Some(latent) = config.model.latent() else { return Ok(()) };
    match Target::of(machine, config) {
        device @ Target::Cuda { .. } if latent.kv_rank + latent.rope > WIDEST_LATENT => {
            let (key, width, most) = ("model.kv_lora_rank", latent.kv_rank, WIDEST_LATENT.saturating_sub(latent.rope));
            Err(PlanError::HeadTooWide { key, width, most, device: device.name() })
        }
        _ => Ok(()),
    }
}

/// What the passes of a forward program need to know, and the threads it will run on: those of one rank, whatever the layout.
pub(crate) fn forward_context(machine: &dyn Machine, config: &Config) -> (Context, usize) {
    tensor_parallel_context(machine, config, 1)
}

/// The same of a program that tensor-parallel ranks share.
pub(crate) fn tensor_parallel_context(machine: &dyn Machine, config: &Config, tp: usize) -> (Context, usize) {
    let (context, _) = training_context(machine, config);
    let threads = threads(machine, config, tp);
    let layout = Layout { mesh: Mesh::ONE.with(MeshAxis::Tp, tp), ..Layout::single(1) };
    let Precision { compute, frozen, .. } = context.precision;
    let precision = Precision { frozen, ..Precision::of(compute, DType::F32) };
    let device = machine.profile(Target::of(machine, config), threads, precision);
    (Context { device, layout, precision, steps: Steps::default(), ..context }, threads)
}

/// The threads of a forward program, and the type that it multiplies.
pub fn forward_threads(machine: &dyn Machine, config: &Config) -> (usize, MatmulType) {
    let (context, threads) = forward_context(machine, config);
    (threads, context.precision.multiplies())
}

/// Refuses more ranks than the heads, hidden units or vocabulary of a model can be split over.
pub(crate) fn check_ranks(config: &Config, layout: &Layout) -> Result<()> {
    let extents = Extents { global_batch: 1, micro_batch: 1, ..config.extents() };
    match legal::check(layout, &extents).into_iter().next() {
        Some(refusal) => Err(PlanError::GenerationRanks(Box::new(refusal))),
        None => Ok(()),
    }
}

/// The pages that a cache has: as many as all texts need at their longest, or as fit into the bytes given, those of one text at least.
pub fn cache_plan(machine: &dyn Machine, config: &Config, shape: &GenerationShape) -> Result<CachePlan> {
    check_positions(config, shape.context)?;
    check_latent(machine, config)?;
    let (context, _) = tensor_parallel_context(machine, config, shape.tp);
    check_ranks(config, &context.layout)?;
    let known = shape.known;
    let (slots, blocks) = (shape.texts, shape.context.div_ceil(PAGE));
    let chunk = match Target::of(machine, config) {
        Target::Cpu => CHUNK,
        Target::Cuda { .. } => CUDA_CHUNK,
    };
    let chunk = chunk.min(blocks * PAGE);
    let by_rows = matches!(Target::of(machine, config), Target::Cuda { deterministic: true });
    let one = CacheShape { slots, blocks, page: PAGE, pages: 1, window_pages: 1, apart: !by_rows };
    let graph = build_form(&config.model, Form::NextToken { batch: 1, positions: 1, cache: one, known: 1 })?;
    let mut bytes = [0; 2];
    let mut longest = None;
    for node in &graph.nodes {
        let Op::CachedAttention { window, .. } = node.op else { continue };
        let pages = graph.ty(node.inputs[1]);
        // Ranks that are more than there are heads of keys share them.
        let heads = pages.dims.last().and_then(|kv| kv.sections.first()).map_or(1, |keys| keys.count) as u64;
        let of_rank = pages.elements() as u64 / heads * heads.div_ceil(shape.tp as u64);
        bytes[usize::from(window.is_some())] += of_rank * context.precision.compute.bytes() as u64;
        longest = longest.max(window);
    }
    // What a window reaches after the first of a chunk, the chunk, and the parts of pages at both ends.
    let window_blocks = longest.map_or(0, |w| ((w + chunk) / PAGE + 2).min(blocks));
    let full_blocks = if bytes[0] > 0 { blocks } else { 0 };
    let text = full_blocks as u64 * bytes[0] + window_blocks as u64 * bytes[1];
    let all = text * slots as u64;
    let given = shape.cache.unwrap_or(all).min(all);
    if given < text {
        return Err(PlanError::Cache { given, text, context: shape.context });
    }
    let of = |blocks: usize| (u128::from(given) * (blocks * slots) as u128 / u128::from(all.max(1))) as usize;
    let pages = |blocks: usize| of(blocks).max(blocks).max(1);
    let (tp, shape) = (shape.tp, CacheShape { pages: pages(full_blocks), window_pages: pages(window_blocks), ..one });
    let [page_bytes, window_page_bytes] = bytes;
    // Rows that are always computed together, where bits must not depend on what is beside a text: as many as kernels for few rows take.
    let rows = if by_rows { FEW_ROWS } else { slots };
    let known = known.unwrap_or(usize::MAX).min(config.model.vocab_size);
    Ok(CachePlan {
        shape,
        page_bytes,
        window_page_bytes,
        window: longest,
        window_blocks,
        rows,
        by_rows,
        chunk,
        known,
        tp,
    })
}

/// The sizes of `decode` that a program has: up to as many rows as it takes. With bits that do not depend on what is beside a text, one size alone.
pub fn decode_sizes(cache: &CachePlan) -> &'static [(usize, &'static str)] {
    let all = &StepProgram::DECODE;
    let enough = all.iter().position(|(rows, _)| *rows >= cache.rows).unwrap_or(all.len() - 1);
    if cache.by_rows { &all[enough..=enough] } else { &all[..=enough] }
}

/// The program with the entry `prefill` and those of `decode`, and the threads it was compiled for.
pub fn generation_program(machine: &dyn Machine, config: &Config, cache: &CachePlan) -> Result<(StepProgram, usize)> {
    let &CachePlan { shape, chunk, known, tp, .. } = cache;
    let (compile_context, threads) = tensor_parallel_context(machine, config, tp);
    let graph = |batch, positions| {
        adapted(build_form(&config.model, Form::NextToken { batch, positions, cache: shape, known })?, &config.lora)
    };
    let mut entries = vec![(StepProgram::PREFILL, graph(1, chunk)?)];
    for (rows, name) in decode_sizes(cache) {
        entries.push((name, graph(*rows, 1)?));
    }
    Ok((compile_forward(&entries, &compile_context)?, threads))
}

/// The program with the entries that a cut needs, `batch` sequences of `seq` tokens at a time, for `tp` tensor-parallel ranks that share the
/// model, and the threads it was compiled for. `misses` as in [`Steps`].
pub fn evaluation_program(
    machine: &dyn Machine,
    config: &Config,
    (batch, seq, tp): (usize, usize, usize),
    cut: Cut,
    misses: bool,
) -> Result<(StepProgram, usize)> {
    let (mut context, threads) = tensor_parallel_context(machine, config, tp);
    check_ranks(config, &context.layout)?;
    context.steps.misses = misses;
    let model = ModelConfig { dropout: 0.0, mtp_depth: 0, ..config.model.clone() };
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
