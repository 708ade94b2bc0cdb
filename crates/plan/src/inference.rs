//! Generation by arithmetic: what the KV cache takes, and what bounds reading prompts and decoding on a GPU.
//!
//! Reading a prompt multiplies every weight with many rows and is bound by matmuls. Decoding multiplies it with one row of every text: weights, keys and values
//! are read for each token, so it is bound by memory, up to the batch at which matmuls take as long as reading weights.

use crate::Result;
use crate::device::Machine;
use crate::forward::{GenerationShape, cache_plan, forward_context, forward_threads};
use crate::plan::adapted;
use lockstep_compile::in_bytes;
use lockstep_config::Config;
use lockstep_ir::graph::{Source, State};
use lockstep_ir::{DType, MatmulType, Op, ValueId, units};
use lockstep_model::{Form, build_form};
use lockstep_sim::GpuSpec;
use serde::Serialize;

/// What generation takes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct InferenceAccount {
    /// Most tokens of a text.
    pub context: usize,
    /// Bytes of weights.
    pub weight_bytes: u64,
    /// FLOPs of a token, attention aside.
    pub token_flops: f64,
    /// FLOPs of attention for a token that sees one position.
    pub position_flops: f64,
    /// The KV cache by kind of attention, the model's own first.
    pub kinds: Vec<CacheKind>,
    /// Bytes of the cache of one text of `context` tokens; with sliding windows less than its tokens' together.
    pub text_bytes: u64,
    /// On the GPUs that were asked for.
    pub gpus: Option<InferenceOnGpu>,
}

/// A kind of attention, and what it keeps of a token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CacheKind {
    /// What it is called, with its sizes.
    pub name: String,
    /// Bytes of a token, in all layers.
    pub token_bytes: u64,
    /// Whether the model has it, and generation keeps it.
    pub kept: bool,
}

/// The same on GPUs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct InferenceOnGpu {
    /// Which.
    pub gpu: String,
    /// The fewest that hold the weights and one text, each with a part of every weight (tensor parallelism): a power of two.
    pub gpus: usize,
    /// Texts of `context` tokens whose cache fits beside the weights.
    pub texts: u64,
    /// Tokens of prompts read in a second at the peak rate of matmuls.
    pub prefill_tokens_per_s: f64,
    /// Texts at once from which matmuls take longer than reading weights.
    pub balanced_texts: f64,
    /// Decoding for some numbers of texts.
    pub decode: Vec<DecodeBound>,
}

/// What bounds decoding.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DecodeBound {
    /// Texts at once.
    pub texts: u64,
    /// The least seconds from a token to the next.
    pub seconds: f64,
    /// Tokens a second of all texts.
    pub tokens_per_s: f64,
    /// The share of the bytes that are keys and values.
    pub cache_share: f64,
    /// Whether memory bounds it, rather than matmuls.
    pub by_memory: bool,
}

/// Counts what generation of a model takes, for texts of this many tokens, half of them there on average where it counts.
pub fn inference_account(
    machine: &dyn Machine,
    config: &Config,
    context: usize,
    gpu: Option<&GpuSpec>,
) -> Result<InferenceAccount> {
    let cache = cache_plan(machine, config, &GenerationShape::one(context))?;
    let (_, multiplies) = forward_threads(machine, config);
    let compute = match multiplies {
        MatmulType::Stored(dtype) => dtype,
        MatmulType::Tf32 => DType::F32,
    };
    let form = Form::NextToken { batch: 1, positions: 1, cache: cache.shape, known: 1 };
    let graph = adapted(build_form(&config.model, form)?, &config.lora)?;
    let mut weight_bytes = 0;
    let frozen = forward_context(machine, config).0.precision.frozen;
    for (i, value) in graph.values.iter().enumerate() {
        if let Source::State(State::Parameter(parameter)) = &value.source {
            let (elements, rows) = (value.ty.elements(), value.ty.dims[0].size());
            let bytes = match frozen.filter(|_| in_bytes(&graph, ValueId(i))) {
                Some(format) => elements * format.bytes() + rows * DType::F32.bytes(),
                None if parameter.exact => elements * DType::F32.bytes(),
                None => elements * compute.bytes(),
            };
            weight_bytes += bytes as u64;
        }
    }
    let (mut token_flops, mut position_flops) = (0.0, 0.0);
    for node in &graph.nodes {
        let used: Vec<bool> = node.outputs.iter().map(Option::is_some).collect();
        let flops = node.op.flops(&graph.input_types(node), &used)?.hardware as f64;
        match node.op {
            Op::CachedAttention { window, .. } => {
                position_flops += flops / window.unwrap_or(usize::MAX).min(cache.shape.context()) as f64;
            }
            _ => token_flops += flops,
        }
    }
    let kinds = cache_kinds(config, compute.bytes() as u64);
    let text_bytes = cache.bytes();
    let mut account =
        InferenceAccount { context, weight_bytes, token_flops, position_flops, kinds, text_bytes, gpus: None };
    account.gpus = gpu.map(|gpu| account.on(gpu, compute));
    Ok(account)
}

impl InferenceAccount {
    fn on(&self, gpu: &GpuSpec, compute: DType) -> InferenceOnGpu {
        let flops = if compute == DType::F32 { gpu.fp32_flops_per_s } else { gpu.peak_flops_per_s };
        let least = self.weight_bytes + self.text_bytes;
        let gpus =
            (0..16).map(|power| 1usize << power).find(|n| gpu.memory_bytes * *n as u64 >= least).unwrap_or(1 << 16);
        let (rate, bandwidth, memory) =
            (flops * gpus as f64, gpu.bytes_per_s * gpus as f64, gpu.memory_bytes * gpus as u64);
        let texts = memory.saturating_sub(self.weight_bytes) / self.text_bytes.max(1);
        let seen = self.context as f64 / 2.0;
        let of = |texts: u64| {
            let cache = texts as f64 * self.text_bytes as f64 / 2.0;
            let bytes = self.weight_bytes as f64 + cache;
            let matmuls = texts as f64 * (self.token_flops + self.position_flops * seen) / rate;
            let seconds = (bytes / bandwidth).max(matmuls);
            let by_memory = bytes / bandwidth >= matmuls;
            DecodeBound { texts, seconds, tokens_per_s: texts as f64 / seconds, cache_share: cache / bytes, by_memory }
        };
        let mut sizes: Vec<u64> = [1, 8, 32, 128, 512].into_iter().filter(|n| *n < texts).collect();
        sizes.push(texts.max(1));
        InferenceOnGpu {
            gpu: gpu.label().to_string(),
            gpus,
            texts,
            prefill_tokens_per_s: rate / (self.token_flops + self.position_flops * seen),
            balanced_texts: self.weight_bytes as f64 / bandwidth / (self.token_flops / rate),
            decode: sizes.into_iter().map(of).collect(),
        }
    }
}

/// What the model keeps of a token, and what it would with other kinds of attention and the same heads.
fn cache_kinds(config: &Config, bytes: u64) -> Vec<CacheKind> {
    let m = &config.model;
    let layers = m.layers as u64 * bytes;
    let of = |name: String, numbers: usize, kept| CacheKind { name, token_bytes: numbers as u64 * layers, kept };
    let heads = |n| units::counted(n, "head");
    let latent = m.kv_lora_rank.is_some();
    let (head, value) = (m.head_dim, m.v_head_dim.unwrap_or(m.head_dim));
    let mha =
        of(format!("MHA, {} of K and V", heads(m.heads)), m.heads * (head + value), !latent && m.kv_heads == m.heads);
    let some = if m.kv_heads < m.heads { m.kv_heads } else { (m.heads / 4).max(1) };
    let gqa = of(
        format!("GQA, {} of K and V for {} of Q", heads(some), m.heads),
        some * (head + value),
        m.kv_heads < m.heads,
    );
    let (rank, rope) = (m.kv_lora_rank.unwrap_or(4 * head), m.qk_rope_head_dim.unwrap_or(head / 2));
    let mla = of(format!("MLA, a latent of {rank} and a key of {rope}"), rank + rope, latent);
    let mut kinds = vec![mha, gqa, mla];
    kinds.sort_by_key(|kind| !kind.kept);
    kinds
}
