//! Whole runs on a device beside the same runs on the CPU.

mod common;
#[path = "../../cuda/tests/on_device/mod.rs"]
mod on_device;

use common::{run_to, write_corpus};
use lockstep_config::{Config, FrozenPrecision};
use lockstep_host::Devices;
use lockstep_infer::{Weights, state};
use lockstep_ir::{DType, StepProgram, bf16, f16};
use lockstep_model::names;
use lockstep_plan::{GenerationShape, Target, cache_plan, decode_sizes, generation_program};
use lockstep_train::StepMetrics;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    on_device::run(&[
        ("llama_steps_as_on_the_cpu_in_fp32", || steps_alike(LLAMA, FP32)),
        ("llama_steps_as_on_the_cpu_in_bf16", || steps_alike(LLAMA, BF16)),
        ("llama_steps_as_on_the_cpu_in_fp16", || steps_alike(LLAMA, FP16)),
        ("gpt2_steps_as_on_the_cpu_in_fp32", || steps_alike(GPT2, FP32)),
        ("gpt2_steps_as_on_the_cpu_in_bf16", || steps_alike(GPT2, BF16)),
        ("gpt2_steps_as_on_the_cpu_in_fp16", || steps_alike(GPT2, FP16)),
        ("qwen3_steps_as_on_the_cpu_in_fp32", || steps_alike(QWEN3, FP32)),
        ("qwen3_steps_as_on_the_cpu_in_bf16", || steps_alike(QWEN3, BF16)),
        ("qwen3_steps_as_on_the_cpu_in_fp16", || steps_alike(QWEN3, FP16)),
        ("documents_are_apart_as_on_the_cpu", || documents_alike(LLAMA, "")),
        ("documents_of_as_many_key_heads_are_apart_as_on_the_cpu", || documents_alike(MHA, "")),
        ("documents_with_a_sliding_window_are_apart_as_on_the_cpu", || documents_alike(WINDOW, "")),
        ("documents_are_apart_as_on_the_cpu_if_deterministic", || documents_alike(WINDOW, DETERMINISTIC)),
        ("a_run_of_the_device_resumes_on_the_cpu", || goes_on("cuda", "cpu")),
        ("a_run_of_the_cpu_resumes_on_the_device", || goes_on("cpu", "cuda")),
        ("the_same_run_in_fp32_has_the_same_bits", || the_same_bits("fp32", false)),
        ("the_same_run_in_bf16_has_the_same_bits_if_deterministic", || the_same_bits("bf16", true)),
        ("the_same_run_in_fp16_has_the_same_bits_if_deterministic", || the_same_bits("fp16", true)),
        ("documents_have_the_same_bits_if_deterministic", documents_the_same_bits),
        ("offload_changes_no_bit", || offload_changes_no_bit(LLAMA, "bf16", &["recompute.policy=none"])),
        ("offload_changes_no_bit_where_layers_are_recomputed", || {
            offload_changes_no_bit(GPT2, "bf16", &["recompute.policy=full"])
        }),
        ("offload_changes_no_bit_in_fp8", || {
            offload_changes_no_bit(LLAMA, "fp8", &["precision.fp8_weights=0", "model.dim=128", "model.ffn=256"])
        }),
        ("offload_changes_no_bit_in_fp16", || offload_changes_no_bit(QWEN3, "fp16", &["recompute.policy=selective"])),
        ("decoding_is_as_on_the_cpu", || decoding_alike(GROUPED, "bf16", false)),
        ("decoding_in_fp16_is_as_on_the_cpu", || decoding_alike(GROUPED, "fp16", false)),
        ("decoding_with_weights_in_fp8_is_as_on_the_cpu", || decoding_alike(GROUPED, "bf16, fp8 weights", false)),
        ("decoding_with_weights_in_int8_is_as_on_the_cpu", || decoding_alike(GROUPED, "bf16, int8 weights", false)),
        ("decoding_with_weights_in_int8_and_biases_is_as_on_the_cpu", || {
            decoding_alike(BIASES, "bf16, int8 weights", false)
        }),
        ("decoding_with_weights_in_int8_in_fp16_is_as_on_the_cpu", || {
            decoding_alike(GROUPED, "fp16, int8 weights", false)
        }),
        ("decoding_is_as_on_the_cpu_if_deterministic", || decoding_alike(GROUPED, "bf16", true)),
        ("decoding_with_large_heads_is_as_on_the_cpu", || decoding_alike(LARGE_HEADS, "bf16", false)),
        ("decoding_with_biases_is_as_on_the_cpu", || decoding_alike(BIASES, "bf16", false)),
        ("decoding_with_a_sliding_window_is_as_on_the_cpu", || decoding_alike(SEEN, "bf16", false)),
        ("decoding_with_norms_of_heads_is_as_on_the_cpu", || decoding_alike(NORMED_HEADS, "bf16", false)),
        ("decoding_with_sinks_is_as_on_the_cpu", || decoding_alike(SINKS, "bf16", false)),
        ("decoding_with_latents_is_as_on_the_cpu", || decoding_alike(LATENT, "bf16", false)),
        ("decoding_with_latents_in_fp16_is_as_on_the_cpu", || decoding_alike(LATENT, "fp16", false)),
        ("decoding_with_latents_is_as_on_the_cpu_if_deterministic", || decoding_alike(LATENT, "bf16", true)),
        ("decoding_with_odd_latents_is_as_on_the_cpu", || decoding_alike(ODD_LATENT, "bf16", false)),
    ])
}

/// Norms with one weight, no bias; two key heads for four.
const LLAMA: &str = "kv_heads = 2\nffn = 160\ntied_embeddings = true";
/// Norms and projections with biases: matmuls with their bias, all gradients of a norm at once.
const GPT2: &str = "architecture = \"gpt2\"\npositions = 32\nffn = 256";
/// Norms over the heads of Q and K.
const QWEN3: &str = "architecture = \"qwen3\"\nkv_heads = 2\nffn = 160";

/// A key head for every query head.
const MHA: &str = "head_dim = 64\nffn = 160";
/// Heads of 32 elements, which see 20 keys at most.
const WINDOW: &str = "architecture = \"mistral\"\nhead_dim = 32\nkv_heads = 2\nffn = 160\nwindow = 20";
const DETERMINISTIC: &str = "deterministic = true";

/// Heads of Q that share keys; a norm, a matmul and a SwiGLU, and RoPE and attention are one kernel each where one text is decoded.
const GROUPED: &str = "dim = 256\nheads = 8\nkv_heads = 2\nhead_dim = 64\nffn = 512";
const LARGE_HEADS: &str = "dim = 512\nheads = 4\nkv_heads = 4\nhead_dim = 128\nffn = 8192";
/// Learned positions: no RoPE.
const BIASES: &str = "architecture = \"gpt2\"\npositions = 3072\ndim = 256\nheads = 4\nffn = 1024";
const SEEN: &str =
    "architecture = \"mistral\"\ndim = 256\nheads = 4\nkv_heads = 2\nhead_dim = 64\nffn = 512\nwindow = 20";
/// What is turned is a norm's.
const NORMED_HEADS: &str = "architecture = \"qwen3\"\ndim = 256\nheads = 4\nkv_heads = 2\nhead_dim = 64\nffn = 512";
const SINKS: &str = "dim = 256\nheads = 4\nkv_heads = 2\nhead_dim = 64\nffn = 512\nattention_sinks = true";

/// As DeepSeek's models have it, with more heads than a block of the kernel takes; and of sizes that the matrix units do not take.
const LATENT: &str = "dim = 256\nheads = 20\nffn = 512\nkv_lora_rank = 512\nq_lora_rank = 96\nqk_nope_head_dim = 128\n\
    qk_rope_head_dim = 64\nv_head_dim = 128";
const ODD_LATENT: &str = "dim = 256\nheads = 4\nffn = 512\nkv_lora_rank = 40\nqk_nope_head_dim = 20\nqk_rope_head_dim = 12\n\
    v_head_dim = 24";

/// A precision, and how far losses and gradient norms may be from the CPU's.
struct Bound {
    policy: &'static str,
    loss: f64,
    norm: f64,
}

const FP32: Bound = Bound { policy: "fp32", loss: 1e-5, norm: 1e-4 };
const BF16: Bound = Bound { policy: "bf16", loss: 2e-2, norm: 5e-2 };
const FP16: Bound = Bound { policy: "fp16", loss: 5e-3, norm: 1.5e-2 };
const STEPS: u64 = 10;

/// A small model over the corpus in `dir`, two micro-batches per step.
fn config(dir: &Path, model: &str, policy: &str, device: &str) -> Config {
    let text = format!(
        "[model]\nvocab_size = 256\nlayers = 2\ndim = 64\nheads = 4\n{model}\n\
         [data]\npaths = [\".\"]\nextensions = [\"txt\"]\n[optimizer]\nlr = 3e-3\nwarmup_steps = 4\n\
         [train]\nsteps = {STEPS}\nseq = 32\nglobal_batch = 8\nmicro_batch = 4\ndevice = \"{device}\"\n\
         [precision]\npolicy = \"{policy}\"\n"
    );
    std::fs::write(dir.join("run.toml"), text).unwrap();
    Config::load(&dir.join("run.toml"), &[]).unwrap()
}

/// Checks every step of one run against that of another.
fn check_alike(found: &[StepMetrics], expected: &[StepMetrics], bound: &Bound) {
    assert_eq!(found.len(), expected.len());
    let apart = |a: f64, b: f64| (a - b).abs() / b.abs();
    let [mut loss, mut norm, mut val] = [0.0f64; 3];
    for (a, b) in found.iter().zip(expected) {
        assert!(a.loss.is_finite() && a.grad_norm > 0.0, "{a:?}");
        loss = loss.max(apart(a.loss, b.loss));
        norm = norm.max(apart(a.grad_norm.into(), b.grad_norm.into()));
        val = val.max(a.val_loss.zip(b.val_loss).map_or(0.0, |(a, b)| apart(a, b)));
    }
    println!("    losses differ by {loss:.1e}, gradient norms by {norm:.1e}, validation losses by {val:.1e}");
    assert!(loss <= bound.loss && val <= bound.loss, "losses may differ by {:.0e}", bound.loss);
    assert!(norm <= bound.norm, "gradient norms may differ by {:.0e}", bound.norm);
    let learned = expected[0].loss - expected[expected.len() - 1].loss;
    assert!(learned > 0.1, "the model learns nothing: {learned}");
}

fn steps_alike(model: &str, bound: Bound) {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let run =
        |device: &str| run_to(&config(dir.path(), model, bound.policy, device), &dir.path().join(device), STEPS).steps;
    check_alike(&run("cuda"), &run("cpu"), &bound);
}

/// A run that changes its device half way is the run that did not.
fn goes_on(first: &str, second: &str) {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let part = |device: &str, run: &str, to| {
        run_to(&config(dir.path(), LLAMA, "fp32", device), &dir.path().join(run), to).steps
    };
    let whole = part("cpu", "whole", STEPS);
    let mut changed = part(first, "changed", STEPS / 2);
    changed.extend(part(second, "changed", STEPS));
    check_alike(&changed, &whole, &FP32);
}

/// Long documents, and stretches of documents of a byte: micro-batches have from a few documents to more than the first plans take.
fn write_documents(dir: &Path) {
    let line = |i: u64| format!("{{\"text\": \"the square of {i} is {}, and so on, and so on\"}}\n", i * i);
    let short = |i: u64| format!("{{\"text\": \"{}\"}}\n", i % 10);
    let block = |b: u64| -> String { (0..40).map(|i| line(b + i)).chain((0..600).map(|i| short(b + i))).collect() };
    std::fs::write(dir.join("documents.jsonl"), (0..8).map(block).collect::<String>()).unwrap();
}

/// The same with documents apart, in bf16, with more lines for `[train]`.
fn with_documents(dir: &Path, model: &str, device: &str, train: &str) -> Config {
    let text = format!(
        "[model]\nvocab_size = 256\nlayers = 2\ndim = 64\nheads = 4\n{model}\n\
         [data]\npaths = [\"documents.jsonl\"]\ndocument_mask = true\n[optimizer]\nlr = 3e-3\nwarmup_steps = 4\n\
         [train]\nsteps = {STEPS}\nseq = 96\nglobal_batch = 8\nmicro_batch = 4\ndevice = \"{device}\"\n{train}\n\
         [precision]\npolicy = \"bf16\"\n"
    );
    std::fs::write(dir.join("run.toml"), text).unwrap();
    Config::load(&dir.join("run.toml"), &[]).unwrap()
}

fn documents_alike(model: &str, train: &str) {
    let dir = tempfile::tempdir().unwrap();
    write_documents(dir.path());
    let run = |device: &str, train: &str| {
        run_to(&with_documents(dir.path(), model, device, train), &dir.path().join(device), STEPS).steps
    };
    check_alike(&run("cuda", train), &run("cpu", ""), &BF16);
}

fn documents_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    write_documents(dir.path());
    let run = |name: &str| {
        let ran = run_to(&with_documents(dir.path(), WINDOW, "cuda", DETERMINISTIC), &dir.path().join(name), STEPS);
        let model = std::fs::read(ran.outcome.checkpoint.as_ref().unwrap().join("model.safetensors")).unwrap();
        (ran.steps.iter().map(|m| (m.loss, m.grad_norm)).collect::<Vec<_>>(), model)
    };
    let (first, second) = (run("first"), run("second"));
    assert_eq!(first.0, second.0);
    assert!(first.1 == second.1, "losses agree, weights do not");
}

fn the_same_bits(policy: &str, deterministic: bool) {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    for model in [LLAMA, GPT2] {
        let mut config = config(dir.path(), model, policy, "cuda");
        config.train.deterministic = deterministic;
        let [first, second] = ["first", "second"].map(|name| trained(&config, &dir.path().join(name)));
        check_bits(&first, &second);
    }
}

/// Losses and gradient norms of all steps, and the files of the last checkpoint.
type Trained = (Vec<(f64, f32)>, [Vec<u8>; 2]);

fn trained(config: &Config, folder: &Path) -> Trained {
    let ran = run_to(config, folder, STEPS);
    let steps = ran.steps.iter().map(|m| (m.loss, m.grad_norm)).collect();
    let read = |file: &str| std::fs::read(ran.outcome.checkpoint.as_ref().unwrap().join(file)).unwrap();
    let files = ["model.safetensors", "optimizer.safetensors"].map(read);
    std::fs::remove_dir_all(folder).unwrap();
    (steps, files)
}

fn check_bits(first: &Trained, second: &Trained) {
    assert_eq!(first.0, second.0);
    assert!(first.1 == second.1, "losses agree, weights do not");
}

/// What waits in the memory of the host comes back as it went: state, activations, and both, whatever is recomputed.
fn offload_changes_no_bit(model: &str, policy: &str, set: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let run = |offload: &[&str]| {
        let path = dir.path().join("run.toml");
        config(dir.path(), model, policy, "cuda");
        let fixed = ["train.deterministic=true", "model.layers=6"];
        let set: Vec<String> = fixed.iter().chain(set).chain(offload).map(|s| (*s).to_owned()).collect();
        trained(&Config::load(&path, &set).unwrap(), &dir.path().join("run"))
    };
    let nothing = run(&[]);
    for offload in [
        &["offload.activations=true"][..],
        &["offload.activations=200 KiB"],
        &["offload.optimizer=true"],
        &["offload.activations=true", "offload.optimizer=true"],
    ] {
        check_bits(&run(offload), &nothing);
        println!("    {}: the same bits", offload.join(", "));
    }
}

/// Steps of decoding, with the same tokens on the device and on the CPU: logits are alike, whatever the texts at once, and in a cache with room for long texts, where
/// several blocks share the keys of one.
fn decoding_alike(model: &str, policy: &str, deterministic: bool) {
    let mut worst = 0.0f64;
    for (texts, context) in [(1, 200), (2, 200), (5, 200), (12, 200), (32, 200), (1, 3000)] {
        let [found, expected] =
            ["cuda", "cpu"].map(|device| decoded(model, policy, device, deterministic, texts, context));
        for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let apart: f64 = found.iter().zip(expected).map(|(a, b)| f64::from(a - b).powi(2)).sum();
            let all: f64 = expected.iter().map(|x| f64::from(*x).powi(2)).sum();
            let apart = (apart / all).sqrt();
            assert!(apart < 0.03, "{texts} texts, context {context}, step {step}: logits are {apart:.3} apart");
            worst = worst.max(apart);
        }
    }
    println!("    logits differ by {worst:.1e}");
}

/// The logits of every step, for all texts.
fn decoded(
    model: &str,
    policy: &str,
    device: &str,
    deterministic: bool,
    texts: usize,
    context: usize,
) -> Vec<Vec<f32>> {
    let (policy, weights) = policy.split_once(", ").unwrap_or((policy, ""));
    let text = format!(
        "[model]\nvocab_size = 512\nlayers = 2\n{model}\n[data]\npaths = [\".\"]\n\
         [train]\nsteps = 1\nseq = 32\ndevice = \"{device}\"\ndeterministic = {deterministic}\n[precision]\npolicy = \"{policy}\"\n"
    );
    let mut config = Config::parse(&text, "run.toml", &[]).unwrap();
    config.precision.frozen = match weights {
        "fp8 weights" => FrozenPrecision::Fp8,
        "int8 weights" => FrozenPrecision::Int8,
        _ => FrozenPrecision::Policy,
    };
    let devices = Devices::new();
    let shape = GenerationShape { texts, ..GenerationShape::one(context) };
    let cache = cache_plan(&devices, &config, &shape).unwrap();
    let (program, threads) = generation_program(&devices, &config, &cache).unwrap();
    let mut executor = devices.device(Target::of(&devices, &config)).unwrap().load(program.clone(), threads).unwrap();
    state::load(&program.tensors, executor.as_mut(), Weights::Initial, 7).unwrap();
    let bytes = |numbers: &[usize]| numbers.iter().flat_map(|n| (*n as u32).to_le_bytes()).collect::<Vec<u8>>();
    // Pages in an order of their own.
    let pages: Vec<usize> = (0..cache.shape.slots * cache.shape.blocks).rev().collect();
    for name in [names::PAGES, names::WINDOW_PAGES].into_iter().filter(|name| program.tensor(name).is_some()) {
        let there = if name == names::PAGES { cache.shape.pages } else { cache.shape.window_pages };
        executor.write(name, 0, &bytes(&pages.iter().map(|page| page % there).collect::<Vec<_>>())).unwrap();
    }
    let (rows, entry) = *decode_sizes(&cache).iter().find(|(rows, _)| *rows >= texts).unwrap();
    let all =
        |of: &dyn Fn(usize) -> usize| (0..rows).map(|row| if row < texts { of(row) } else { 0 }).collect::<Vec<_>>();
    let mut steps = Vec::new();
    for position in 0..150 {
        // Texts of different lengths: one begins after the other.
        let begin = |text: usize| text % 4 * 9;
        let inputs = [
            (names::TOKENS, all(&|text| (text * 37 + position * 11 + 5) % 512)),
            (names::START, all(&|text| position.saturating_sub(begin(text)))),
            (names::COUNT, all(&|text| usize::from(position >= begin(text)))),
            (names::SLOT, all(&|text| text)),
        ];
        for (name, numbers) in inputs {
            executor.write(&StepProgram::name_in(entry, name), 0, &bytes(&numbers)).unwrap();
        }
        executor.run(entry).unwrap();
        let logits = StepProgram::name_in(entry, names::LOGITS);
        let dtype = program.tensor(&logits).unwrap().ty.dtype;
        let read = executor.read(&logits, 0).unwrap();
        let to_f32 = |b: &[u8; 2]| match dtype {
            DType::BF16 => bf16::to_f32(u16::from_le_bytes(*b)),
            _ => f16::to_f32(u16::from_le_bytes(*b)),
        };
        let row = |text: usize| read.as_chunks().0[text * 512..][..512].iter().map(to_f32);
        steps.push((0..texts).filter(|text| position >= begin(*text)).flat_map(row).collect());
    }
    steps
}
