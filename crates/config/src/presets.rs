//! Published models by name. A preset is a `[model]` table, read by the same reader as the user's, and what such a model is
//! trained with: the sequence length of its pre-training, in bf16.

/// The names that `model.preset` accepts.
pub fn presets() -> impl Iterator<Item = &'static str> {
    NAMES.iter().copied()
}

struct Preset {
    name: &'static str,
    /// Tokens per sequence in pre-training, before any extension to a longer context.
    seq: u32,
    /// `vocab_size`, `layers`, `dim`, `heads` and `ffn`.
    sizes: [u32; 5],
    /// Other keys of `[model]`, as in an inline table.
    keys: &'static [&'static str],
}

const TIED: &str = "tied_embeddings = true";
const UNTIED: &str = "tied_embeddings = false";
const LLAMA_2: &str = "tied_embeddings = false, rope_theta = 10000.0";
const LLAMA_3: &str = "kv_heads = 8, rope_theta = 500000.0";
const SCALED_8: &str =
    "rope_scaling = { factor = 8.0, low_freq_factor = 1.0, high_freq_factor = 4.0, original_context = 8192 }";
const SCALED_32: &str =
    "rope_scaling = { factor = 32.0, low_freq_factor = 1.0, high_freq_factor = 4.0, original_context = 8192 }";
const GPT2: &str = "architecture = 'gpt2', tied_embeddings = true, positions = 1024";
const QWEN: &str = "rope_theta = 1000000.0, norm_eps = 1e-6";
const QWEN3: &str = "architecture = 'qwen3', kv_heads = 8, head_dim = 128";
const MISTRAL: &str = "architecture = 'mistral', kv_heads = 8, sliding_window = 4096";
const QWEN3_MOE: &str = "architecture = 'qwen3_moe', tied_embeddings = false, kv_heads = 4, head_dim = 128, experts = 128, experts_per_token = 8";
const MIXTRAL: &str = "architecture = 'mixtral', tied_embeddings = false, kv_heads = 8, experts = 8, experts_per_token = 2, rope_theta = 1000000.0";
const OLMOE: &str = "architecture = 'olmoe', kv_heads = 16, experts = 64, experts_per_token = 8, norm_topk = false";
const DEEPSEEK: &str = "architecture = 'deepseek', kv_heads = 16, expert_ffn = 1408, experts = 64, experts_per_token = 6, \
                        shared_experts = 2, dense_layers = 1, norm_topk = false, norm_eps = 1e-6";
const SMOLLM3: &str = "architecture = 'smollm3', kv_heads = 4, rope_theta = 5000000.0, norm_eps = 1e-6";
const OLMO2: &str = "architecture = 'olmo2', rope_theta = 500000.0, norm_eps = 1e-6";
const GEMMA3: &str = "architecture = 'gemma3_text', kv_heads = 1, head_dim = 256, sliding_window = 512, \
                      rope_theta = 1000000.0, norm_eps = 1e-6";
/// The layers of DeepSeek-V3 with multi-head attention in place of its latent attention, so of more parameters than it.
const DEEPSEEK_V3_MHA: &str = "architecture = 'dots1', kv_heads = 128, head_dim = 128, expert_ffn = 2048, experts = 256, \
                               experts_per_token = 8, shared_experts = 1, dense_layers = 3, router_scale = 2.5, \
                               expert_groups = 8, expert_top_groups = 4, norm_eps = 1e-6";

const MLA: &str =
    "kv_lora_rank = 512, qk_nope_head_dim = 128, qk_rope_head_dim = 64, v_head_dim = 128, norm_eps = 1e-6";
const DEEPSEEK_V2_LITE: &str = "architecture = 'deepseek_v2', expert_ffn = 1408, experts = 64, experts_per_token = 6, \
                                shared_experts = 2, dense_layers = 1, rope_scaling = { type = 'yarn', factor = 40.0, \
                                original_context = 4096, attention_factor = 1.0, mscale_all_dim = 0.707 }";
const DEEPSEEK_V3: &str = "architecture = 'deepseek_v3', q_lora_rank = 1536, expert_ffn = 2048, experts = 256, \
                           experts_per_token = 8, shared_experts = 1, dense_layers = 3, router_scale = 2.5, expert_groups = 8, \
                           expert_top_groups = 4, rope_scaling = { type = 'yarn', factor = 40.0, original_context = 4096, \
                           attention_factor = 1.0, mscale_all_dim = 1.0 }";

const GPT_OSS: &str = "architecture = 'gpt_oss', tied_embeddings = false, kv_heads = 8, head_dim = 64, experts_per_token = 4, \
                       sliding_window = 128, rope_theta = 150000.0, rope_scaling = { type = 'yarn', factor = 32.0, \
                       original_context = 4096, truncate = false }";

const fn preset(name: &'static str, seq: u32, sizes: [u32; 5], keys: &'static [&'static str]) -> Preset {
    Preset { name, seq, sizes, keys }
}

const PRESETS: [Preset; 43] = [
    preset("llama-15m", 256, [32000, 6, 288, 6, 768], &[TIED, "kv_heads = 6"]),
    preset("llama-29m", 512, [8192, 8, 512, 8, 1536], &[TIED, "kv_heads = 4"]),
    preset("llama-124m", 1024, [50304, 12, 768, 12, 2048], &[TIED, "kv_heads = 12"]),
    preset("llama-2-7b", 4096, [32000, 32, 4096, 32, 11008], &[LLAMA_2, "kv_heads = 32"]),
    preset("llama-2-13b", 4096, [32000, 40, 5120, 40, 13824], &[LLAMA_2, "kv_heads = 40"]),
    preset("llama-2-70b", 4096, [32000, 80, 8192, 64, 28672], &[LLAMA_2, "kv_heads = 8"]),
    preset("llama-3.2-1b", 8192, [128256, 16, 2048, 32, 8192], &[TIED, LLAMA_3, SCALED_32, "head_dim = 64"]),
    preset("llama-3.2-3b", 8192, [128256, 28, 3072, 24, 8192], &[TIED, LLAMA_3, SCALED_32, "head_dim = 128"]),
    preset("llama-3-8b", 8192, [128256, 32, 4096, 32, 14336], &[UNTIED, LLAMA_3]),
    preset("llama-3-70b", 8192, [128256, 80, 8192, 64, 28672], &[UNTIED, LLAMA_3]),
    preset("llama-3-405b", 8192, [128256, 126, 16384, 128, 53248], &[UNTIED, LLAMA_3, SCALED_8]),
    preset("llama-3.1-8b", 8192, [128256, 32, 4096, 32, 14336], &[UNTIED, LLAMA_3, SCALED_8]),
    preset("llama-3.1-70b", 8192, [128256, 80, 8192, 64, 28672], &[UNTIED, LLAMA_3, SCALED_8]),
    preset("llama-3.1-405b", 8192, [128256, 126, 16384, 128, 53248], &[UNTIED, LLAMA_3, SCALED_8]),
    preset("gpt2", 1024, [50257, 12, 768, 12, 3072], &[GPT2]),
    preset("gpt2-medium", 1024, [50257, 24, 1024, 16, 4096], &[GPT2]),
    preset("gpt2-large", 1024, [50257, 36, 1280, 20, 5120], &[GPT2]),
    preset("gpt2-xl", 1024, [50257, 48, 1600, 25, 6400], &[GPT2]),
    preset("qwen2.5-0.5b", 4096, [151936, 24, 896, 14, 4864], &[TIED, QWEN, "architecture = 'qwen2', kv_heads = 2"]),
    preset("qwen2.5-1.5b", 4096, [151936, 28, 1536, 12, 8960], &[TIED, QWEN, "architecture = 'qwen2', kv_heads = 2"]),
    preset("qwen2.5-7b", 4096, [152064, 28, 3584, 28, 18944], &[UNTIED, QWEN, "architecture = 'qwen2', kv_heads = 4"]),
    preset("qwen3-0.6b", 4096, [151936, 28, 1024, 16, 3072], &[TIED, QWEN, QWEN3]),
    preset("qwen3-4b", 4096, [151936, 36, 2560, 32, 9728], &[TIED, QWEN, QWEN3]),
    preset("qwen3-8b", 4096, [151936, 36, 4096, 32, 12288], &[UNTIED, QWEN, QWEN3]),
    preset("qwen3-14b", 4096, [151936, 40, 5120, 40, 17408], &[UNTIED, QWEN, QWEN3]),
    preset("qwen3-32b", 4096, [151936, 64, 5120, 64, 25600], &[UNTIED, QWEN, QWEN3]),
    preset("mistral-7b", 8192, [32000, 32, 4096, 32, 14336], &[LLAMA_2, MISTRAL]),
    preset("mixtral-8x7b", 4096, [32000, 32, 4096, 32, 14336], &[MIXTRAL]),
    preset("mixtral-8x22b", 4096, [32000, 56, 6144, 48, 16384], &[MIXTRAL]),
    preset("qwen3-30b-a3b", 4096, [151936, 48, 2048, 32, 6144], &[QWEN, QWEN3_MOE, "expert_ffn = 768"]),
    preset("qwen3-235b-a22b", 4096, [151936, 94, 4096, 64, 12288], &[QWEN, QWEN3_MOE, "expert_ffn = 1536"]),
    preset("olmoe-1b-7b", 4096, [50304, 16, 2048, 16, 1024], &[LLAMA_2, OLMOE]),
    preset("deepseek-moe-16b", 4096, [102400, 28, 2048, 16, 10944], &[LLAMA_2, DEEPSEEK]),
    preset("deepseek-v3-mha", 4096, [129280, 61, 7168, 128, 18432], &[LLAMA_2, DEEPSEEK_V3_MHA]),
    preset("deepseek-v2-lite", 4096, [102400, 27, 2048, 16, 10944], &[LLAMA_2, MLA, DEEPSEEK_V2_LITE]),
    preset("deepseek-v3", 4096, [129280, 61, 7168, 128, 18432], &[LLAMA_2, MLA, DEEPSEEK_V3]),
    preset("gpt-oss-20b", 4096, [201088, 24, 2880, 64, 2880], &[GPT_OSS, "experts = 32"]),
    preset("gpt-oss-120b", 4096, [201088, 36, 2880, 64, 2880], &[GPT_OSS, "experts = 128"]),
    preset("smollm3-3b", 4096, [128256, 36, 2048, 16, 11008], &[TIED, SMOLLM3]),
    preset("olmo-2-7b", 4096, [100352, 32, 4096, 32, 11008], &[UNTIED, OLMO2, "kv_heads = 32"]),
    preset("olmo-2-32b", 4096, [100352, 64, 5120, 40, 27648], &[UNTIED, OLMO2, "kv_heads = 8"]),
    preset("gemma-3-270m", 8192, [262144, 18, 640, 4, 2048], &[TIED, GEMMA3]),
    preset("gemma-3-1b", 8192, [262144, 26, 1152, 4, 6912], &[TIED, GEMMA3]),
];

/// The names of [`PRESETS`], in its order.
pub(crate) const NAMES: [&str; PRESETS.len()] = {
    let mut names = [""; PRESETS.len()];
    let mut i = 0;
    while i < names.len() {
        names[i] = PRESETS[i].name;
        i += 1;
    }
    names
};

/// What a preset gives, as TOML; none for a name that is not one.
pub(crate) fn text(name: &str) -> Option<String> {
    let Preset { seq, sizes: [vocab, layers, dim, heads, ffn], keys, .. } = PRESETS.iter().find(|p| p.name == name)?;
    let sizes = format!("vocab_size = {vocab}, layers = {layers}, dim = {dim}, heads = {heads}, ffn = {ffn}");
    let model = format!("model = {{ {sizes}, {} }}", keys.join(", "));
    Some(format!("{model}\n[train]\nseq = {seq}\n[precision]\npolicy = \"bf16\"\n"))
}
