//! Whole runs on a device beside the same runs on the CPU.

mod common;
#[path = "../../cuda/tests/on_device/mod.rs"]
mod on_device;

use common::{run_to, write_corpus};
use lockstep_config::Config;
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
        let run = |name: &str| {
            let folder = dir.path().join(name);
            let mut config = config(dir.path(), model, policy, "cuda");
            config.train.deterministic = deterministic;
            let ran = run_to(&config, &folder, STEPS);
            let steps: Vec<(f64, f32)> = ran.steps.iter().map(|m| (m.loss, m.grad_norm)).collect();
            let read = |file: &str| std::fs::read(ran.outcome.checkpoint.as_ref().unwrap().join(file)).unwrap();
            let files = ["model.safetensors", "optimizer.safetensors"].map(read);
            std::fs::remove_dir_all(folder).unwrap();
            (steps, files)
        };
        let (first, second) = (run("first"), run("second"));
        assert_eq!(first.0, second.0);
        assert!(first.1 == second.1, "losses agree, weights do not");
    }
}
