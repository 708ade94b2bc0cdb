//! Architectures beside Llama, and naive attention: each layout against one rank, the same bits under every recompute policy.

mod common;

use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_infer::{Generator, Weights};
use lockstep_ir::program::{Buffer, Lifetime};
use lockstep_plan::plan;
use lockstep_train::{Comparison, compare};

const QWEN3: &str = "architecture = \"qwen3\"\nhead_dim = 10";
/// A window shorter than the sequences.
const MISTRAL: &str = "architecture = \"mistral\"\nsliding_window = 5";
/// Experts, and one for which tokens are few.
const MIXTRAL: &str = "architecture = \"mixtral\"\nexperts = 4";
const QWEN3_MOE: &str =
    "architecture = \"qwen3_moe\"\nexperts = 6\nexperts_per_token = 3\nexpert_ffn = 24\nnorm_topk = false";
/// Shared experts after a dense layer, and DeepSeek-V3's router, whose biases move.
const DOTS1: &str = "architecture = \"dots1\"\nexperts = 6\nexpert_ffn = 24\ndense_layers = 1\nexpert_groups = 3\n\
    expert_top_groups = 2\nrouter_scale = 1.5\nbalance_bias = 0.001";
/// Norms over all of Q and K, of which tensor-parallel ranks have parts.
const OLMOE: &str = "architecture = \"olmoe\"\nexperts = 5";
/// Norms after blocks alone; the same with windows, and a scaled RoPE of layers without one.
const OLMO2: &str = "architecture = \"olmo2\"";
const OLMO3: &str = "architecture = \"olmo3\"\nsliding_window = 5\n\
    rope_scaling = { type = \"yarn\", factor = 4.0, original_context = 8 }";
/// Layers without RoPE.
const SMOLLM3: &str = "architecture = \"smollm3\"\nrope_layers = [1, 0]";
/// Norms around blocks by 1 + their weights, a scaled embedding, GeGLU, another softmax scale, two bases of RoPE.
const GEMMA3: &str = "architecture = \"gemma3_text\"\nhead_dim = 10\nsliding_window = 5\nlayer_types = [\"sliding\", \"full\"]\n\
    softmax_scale_dim = 7\nrope_scaling = { type = \"linear\", factor = 2.0 }";
/// Latent attention, with heads of V that are narrower than those of Q and K, and scores that YaRN makes larger.
const LATENT: &str = "kv_heads = 4\nkv_lora_rank = 10\nq_lora_rank = 12\nqk_nope_head_dim = 6\nqk_rope_head_dim = 4\n\
    v_head_dim = 7\nrope_scaling = { type = \"yarn\", factor = 4.0, original_context = 8, mscale_all_dim = 1.0 }";
/// Queries without a latent, wider heads of V, in a window.
const LATENT_WINDOW: &str = "kv_heads = 4\nkv_lora_rank = 10\nqk_nope_head_dim = 3\nqk_rope_head_dim = 2\nv_head_dim = 8\n\
    sliding_window = 5\nlayer_types = [\"sliding\", \"full\"]";
/// All of DeepSeek-V3, and DeepSeek-V2's groups, of which the best expert counts.
const DEEPSEEK_V3: &str = "architecture = \"deepseek_v3\"\nkv_heads = 4\nkv_lora_rank = 10\nq_lora_rank = 12\n\
    qk_nope_head_dim = 6\nqk_rope_head_dim = 4\nv_head_dim = 7\nexperts = 6\nexpert_ffn = 24\ndense_layers = 1\n\
    expert_groups = 3\nexpert_top_groups = 2\nrouter_scale = 1.5\nbalance_bias = 0.001";
const DEEPSEEK_V2: &str = "architecture = \"deepseek_v2\"\nkv_heads = 4\nkv_lora_rank = 10\nqk_nope_head_dim = 6\n\
    qk_rope_head_dim = 4\nv_head_dim = 7\nexperts = 6\nexpert_ffn = 24\ndense_layers = 1\nshared_experts = 2\n\
    expert_groups = 3\nexpert_top_groups = 2";
/// Attention sinks and a clamped SwiGLU, with layers of both kinds, and where every head has keys of its own.
const SINKS: &str = "attention_sinks = true\nactivation = \"clamped_swiglu\"\nswiglu_limit = 0.02\nsliding_window = 5\n\
    layer_types = [\"sliding\", \"full\"]";
const SINKS_MHA: &str = "kv_heads = 4\nattention_sinks = true";
/// All of gpt-oss.
const GPT_OSS: &str = "architecture = \"gpt_oss\"\nkv_heads = 4\nhead_dim = 10\nexperts = 6\nexperts_per_token = 3\nexpert_ffn = 24\n\
    sliding_window = 5\nrope_scaling = { type = \"yarn\", factor = 32.0, original_context = 8, truncate = false }";
/// Sizes that fp8 takes, also of two tensor-parallel ranks.
const LATENT_FP8: &str = "[model]\nvocab_size = 131\nlayers = 4\ndim = 32\nheads = 4\nffn = 64\nkv_lora_rank = 32\nq_lora_rank = 48\n\
    qk_nope_head_dim = 16\nqk_rope_head_dim = 16\nv_head_dim = 8\n[train]\nseq = 16\nglobal_batch = 8\nmicro_batch = 2\nthreads = 1\n";
/// Weights of attention as matrices, also in a window.
const NAIVE: &str = "attention = \"naive\"";
/// GPT-2 asks for as many key heads as query heads.
const NAIVE_GPT2: &str = "attention = \"naive\"\narchitecture = \"gpt2\"\nkv_heads = 4\npositions = 12";
const NAIVE_WINDOW: &str = "attention = \"naive\"\narchitecture = \"mistral\"\nsliding_window = 5";

/// Two key heads: with tp=4 neighbours share one.
const LAYOUTS: [&str; 14] = [
    "dp=2",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "tp=2",
    "tp=2,sp",
    "tp=4",
    "tp=4,sp",
    "pp=2",
    "pp=2,gpipe",
    "dp=2,zero=2,tp=4",
    "dp=2,zero=3,tp=4,sp",
    "tp=4,sp,pp=2",
    "dp=2,zero=1,tp=2,sp,pp=2",
];

fn config(model: &str, keys: &str) -> Config {
    let kv_heads = if model.contains("kv_heads") { "" } else { "kv_heads = 2\n" };
    let text = format!(
        "[model]\nvocab_size = 131\nlayers = 4\ndim = 32\nheads = 4\nffn = 48\n{kv_heads}{model}\n\
         [train]\nseq = 12\nglobal_batch = 8\nmicro_batch = 2\nthreads = 1\n{keys}\n"
    );
    Config::parse(&text, "run.toml", &[]).unwrap()
}

fn compared(config: &Config) -> Vec<Comparison> {
    compared_some(config, 1)
}

/// On every n-th of the layouts.
fn compared_some(config: &Config, every: usize) -> Vec<Comparison> {
    common::check_layouts(config, &LAYOUTS.into_iter().step_by(every).collect::<Vec<_>>())
}

/// Every layout, in both precisions, and some with documents kept apart and with sums that do not depend on their order.
fn check_layouts(model: &str) {
    let reproducible = "reproducible = true\n[precision]\npolicy = \"bf16\"";
    let bf16 = "[precision]\npolicy = \"bf16\"";
    for (keys, every) in [("", 1), (bf16, 1), ("[data]\ndocument_mask = true", 3), (reproducible, 3)] {
        compared_some(&config(model, keys), every);
    }
}

/// Every recompute policy on some layouts, against keeping all.
fn check_recompute(model: &str) {
    let run = |policy: &str| compared_some(&config(model, &format!("[recompute]\npolicy = \"{policy}\"")), 3);
    let kept = run("none");
    for policy in ["selective", "full", "sqrt"] {
        for (with, without) in run(policy).iter().zip(&kept) {
            assert_eq!(with.losses, without.losses, "{policy}, {}", with.layout);
        }
    }
}

#[test]
fn qwen3_on_every_layout() {
    check_layouts(QWEN3);
}

#[test]
fn mistral_on_every_layout() {
    check_layouts(MISTRAL);
}

#[test]
fn experts_on_every_layout() {
    check_layouts(MIXTRAL);
    check_layouts(QWEN3_MOE);
}

#[test]
fn shared_experts_and_moving_biases_on_every_layout() {
    check_layouts(DOTS1);
}

#[test]
fn norms_over_all_of_q_and_k_on_every_layout() {
    check_layouts(OLMOE);
}

#[test]
fn norms_behind_blocks_on_every_layout() {
    check_layouts(OLMO2);
    check_layouts(OLMO3);
}

#[test]
fn layers_without_rope_on_every_layout() {
    check_layouts(SMOLLM3);
}

#[test]
fn norms_around_blocks_by_weights_plus_one_on_every_layout() {
    check_layouts(GEMMA3);
}

#[test]
fn latent_attention_on_every_layout() {
    check_layouts(LATENT);
    check_layouts(LATENT_WINDOW);
    check_layouts(&format!("{LATENT}\n{NAIVE}"));
}

#[test]
fn latent_attention_with_experts_on_every_layout() {
    check_layouts(DEEPSEEK_V3);
    check_layouts(DEEPSEEK_V2);
}

#[test]
fn latent_attention_over_parts_of_sequences() {
    for (context, precision) in
        [("ring", "fp32"), ("ring", "bf16"), ("gather", "fp32"), ("a2a", "fp32"), ("a2a", "bf16")]
    {
        let keys = format!("[parallel]\ncontext = \"{context}\"\n[precision]\npolicy = \"{precision}\"");
        let layouts = ["cp=2", "cp=2,tp=2,sp", "dp=2,zero=3,cp=2,pp=2"];
        for model in [LATENT, LATENT_WINDOW, DEEPSEEK_V3] {
            common::check_layouts(&config(model, &keys), &layouts);
            common::check_layouts(&config(model, &format!("{keys}\n[data]\ndocument_mask = true")), &layouts[..2]);
        }
    }
}

#[test]
fn attention_sinks_on_every_layout() {
    check_layouts(SINKS);
    check_layouts(&GPT_OSS.replace("kv_heads = 4", "kv_heads = 2"));
}

#[test]
fn attention_sinks_over_parts_of_sequences() {
    for (context, precision) in
        [("ring", "fp32"), ("ring", "bf16"), ("gather", "fp32"), ("a2a", "fp32"), ("a2a", "bf16")]
    {
        let keys = format!("[parallel]\ncontext = \"{context}\"\n[precision]\npolicy = \"{precision}\"");
        let layouts = ["cp=2", "cp=2,tp=2,sp", "dp=2,zero=3,cp=2,pp=2"];
        for model in [SINKS_MHA, GPT_OSS] {
            common::check_layouts(&config(model, &keys), &layouts);
            common::check_layouts(&config(model, &format!("{keys}\n[data]\ndocument_mask = true")), &layouts[..2]);
            let again = format!("{keys}\n[recompute]\npolicy = \"full\"");
            common::check_layouts(&config(model, &again), &layouts[..1]);
        }
    }
}

#[test]
fn attention_sinks_under_every_recompute_policy() {
    check_recompute(SINKS);
    check_recompute(GPT_OSS);
}

#[test]
fn attention_sinks_with_adapters_and_by_muon() {
    for keys in ["[lora]\nrank = 4", "[optimizer]\nname = \"muon\"", "reproducible = true"] {
        common::check_layouts(&config(GPT_OSS, keys), &["dp=2,zero=1", "tp=2", "pp=2"]);
    }
}

#[test]
fn latent_attention_in_fp8() {
    for recipe in ["current", "rowwise", "delayed"] {
        let keys = format!("[precision]\npolicy = \"fp8\"\nfp8_weights = 0\nfp8_recipe = \"{recipe}\"\n");
        let config = Config::parse(&format!("{LATENT_FP8}{keys}"), "run.toml", &[]).unwrap();
        let plan = plan(&Devices::new(), &config).unwrap();
        assert!(plan.fp8.iter().all(|(_, stays)| stays.is_none()), "{:?}", plan.fp8);
        assert!(plan.fp8.iter().any(|(weight, _)| weight.ends_with("wkv_a")), "{:?}", plan.fp8);
        common::check_layouts(&config, &["dp=2,zero=3", "tp=2", "tp=2,sp", "pp=2"]);
    }
}

#[test]
fn latent_attention_with_adapters_and_by_muon() {
    for keys in ["[lora]\nrank = 4", "[optimizer]\nname = \"muon\""] {
        common::check_layouts(&config(LATENT, keys), &["dp=2,zero=1", "tp=2", "pp=2"]);
    }
}

#[test]
fn latent_attention_under_every_recompute_policy() {
    check_recompute(LATENT);
    check_recompute(DEEPSEEK_V3);
}

/// The latent is saved, and keys and values of all heads are expanded from it again in backward.
#[test]
fn keys_and_values_are_rebuilt_from_a_saved_latent() {
    let with = |recompute: &str| config(LATENT, &format!("[recompute]\n{recompute}"));
    let (kept, rebuilt) = (with("policy = \"none\""), with("policy = \"list\"\nops = [\"rope\"]"));
    let saved = |config: &Config| plan(&Devices::new(), config).unwrap().memory.total_bytes;
    assert!(saved(&rebuilt) < saved(&kept), "{} and {}", saved(&rebuilt), saved(&kept));
    for (with, without) in compared_some(&rebuilt, 3).iter().zip(&compared_some(&kept, 3)) {
        assert_eq!(with.losses, without.losses, "{}", with.layout);
    }
}

#[test]
fn layers_of_several_kinds_over_parts_of_sequences() {
    for model in [OLMO3, GEMMA3] {
        for context in ["ring", "gather"] {
            let keys = format!("[parallel]\ncontext = \"{context}\"");
            common::check_layouts(&config(model, &keys), &["cp=2", "cp=2,tp=2,sp", "dp=2,zero=3,cp=2,pp=2"]);
        }
    }
}

#[test]
fn layers_of_several_kinds_under_every_recompute_policy() {
    check_recompute(OLMO3);
    check_recompute(GEMMA3);
}

/// The example of layers that no family has, made small.
#[test]
fn a_mix_of_parts_that_no_family_has_on_every_layout() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/own-layers.toml");
    let small = [
        "model.layers=4",
        "model.dim=32",
        "model.heads=4",
        "model.ffn=48",
        "model.sliding_window=5",
        "train.seq=16",
        "train.global_batch=8",
        "train.micro_batch=2",
        "train.threads=1",
    ];
    for more in ["precision.policy=\"fp32\"", "precision.policy=\"bf16\"", "data.document_mask=true"] {
        let set: Vec<String> = small.into_iter().chain([more]).map(str::to_owned).collect();
        let config = Config::load(std::path::Path::new(path), &set).unwrap();
        compared(&config);
        common::check_layouts(&config, &["cp=2", "cp=2,tp=2,sp"]);
    }
}

#[test]
fn experts_under_every_recompute_policy() {
    check_recompute(MIXTRAL);
    check_recompute(QWEN3_MOE);
    check_recompute(DOTS1);
}

#[test]
fn qwen3_under_every_recompute_policy() {
    check_recompute(QWEN3);
}

#[test]
fn mistral_under_every_recompute_policy() {
    check_recompute(MISTRAL);
}

#[test]
fn naive_attention_on_every_layout() {
    check_layouts(NAIVE);
    check_layouts(NAIVE_WINDOW);
    check_layouts(NAIVE_GPT2);
}

#[test]
fn naive_attention_under_every_recompute_policy() {
    check_recompute(NAIVE);
    check_recompute(NAIVE_GPT2);
}

#[test]
fn naive_attention_is_the_same_function() {
    for model in ["", MISTRAL] {
        for keys in ["", "[data]\ndocument_mask = true"] {
            let run = |model: &str| compared(&config(model, keys))[0].losses.clone();
            let naive = run(&format!("{model}\n{NAIVE}"));
            for ((flash, _), (naive, _)) in run(model).iter().zip(&naive) {
                assert!((flash - naive).abs() < 1e-5 * flash, "{flash} {naive}");
            }
        }
    }
}

#[test]
fn naive_attention_keeps_its_weights_for_backward_unless_they_are_computed_again() {
    let saved = |attention: &str, policy: &str| -> u64 {
        let keys = format!("[precision]\npolicy = \"bf16\"\n[recompute]\npolicy = \"{policy}\"");
        let plan = plan(&Devices::new(), &config(&format!("attention = \"{attention}\""), &keys)).unwrap();
        let program = plan.program();
        let saved =
            |b: &&Buffer| matches!(program.regions[b.region].lifetime, Lifetime::Saved(_)) && b.name.ends_with(".p");
        program.buffers.iter().filter(saved).map(|b| b.bytes).sum()
    };
    // 4 layers, 2 sequences of 12 tokens, 4 heads, 2 bytes each.
    assert_eq!(saved("naive", "none"), 4 * 2 * 4 * 12 * 12 * 2);
    assert_eq!(saved("naive", "selective"), 0);
    assert_eq!(saved("flash", "none"), 0);
}

#[test]
fn naive_attention_generates_through_the_cache_as_flash_does() {
    let logits = |attention: &str| {
        let config = config(&format!("{MISTRAL}\nattention = \"{attention}\""), "");
        let mut generator = Generator::new(&Devices::new(), &config, 20, Weights::Initial).unwrap();
        generator.read(&[5, 6, 7, 8, 9, 10, 11, 12]).unwrap();
        generator.read(&[13]).unwrap().to_vec()
    };
    assert_eq!(logits("naive"), logits("flash"));
}

#[test]
fn a_window_changes_losses_and_one_past_the_sequence_does_not() {
    let losses = |window: &str| {
        let found = compare(
            &Devices::new(),
            &config(&format!("architecture = \"mistral\"\n{window}"), ""),
            &["pp=2".parse().unwrap()],
            2,
            &mut |_| (),
        );
        found.unwrap()[0].losses.clone()
    };
    let whole = losses("");
    assert_eq!(losses("sliding_window = 12"), whole);
    assert_ne!(losses("sliding_window = 11"), whole);
}
