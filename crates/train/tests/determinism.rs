//! The same config gives the same bits; accumulation keeps them where it promises to.

mod common;

use common::{Ran, losses, run_to, tiny, write_corpus};
use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_ir::Axis;
use lockstep_ir::program::{Arg, Instr};
use lockstep_train::{Event, RunOptions, run};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn the_same_config_twice_gives_the_same_bits_on_any_number_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let run = |threads: usize, name: &str| {
        let config = tiny(dir.path(), &format!("steps = 12\nvalidate_every = 4\nthreads = {threads}"));
        losses(&config, &dir.path().join(name))
    };
    let first = run(2, "a");
    assert_eq!(first, run(2, "b"));
    assert_eq!(first, run(1, "c"));
    assert!(first[11].0 < first[0].0 - 0.5, "the model learns: {first:?}");
}

#[test]
fn accumulation_is_bit_identical_with_reproducible_and_close_without() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let run = |micro_batch: usize, reproducible: bool| {
        let keys = format!("steps = 10\nmicro_batch = {micro_batch}\nreproducible = {reproducible}");
        losses(&tiny(dir.path(), &keys), &dir.path().join(format!("run-{micro_batch}-{reproducible}")))
    };
    let whole = run(8, true);
    for micro_batch in [4, 2, 1] {
        assert_eq!(whole, run(micro_batch, true), "micro-batches of {micro_batch}");
    }
    // Without it, sums over micro-batches are rounded in another order: the stated bound is 1e-4 of the loss over the
    // first ten steps.
    let whole = run(8, false);
    for micro_batch in [4, 2, 1] {
        for (a, b) in whole.iter().zip(run(micro_batch, false)) {
            assert!((a.0 - b.0).abs() < 1e-4 * a.0, "micro-batches of {micro_batch}: {} and {}", a.0, b.0);
        }
    }
}

#[test]
fn bf16_is_deterministic_learns_as_well_and_keeps_its_promises_about_accumulation() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let run = |policy: &str, keys: &str, name: &str| {
        let config = tiny(dir.path(), &format!("steps = 40\n{keys}\n[precision]\npolicy = \"{policy}\""));
        losses(&config, &dir.path().join(name))
    };
    let bf16 = run("bf16", "", "a");
    assert_eq!(bf16, run("bf16", "threads = 1", "b"));
    let fp32 = run("fp32", "", "c");
    let (last, reference) = (bf16[39].0, fp32[39].0);
    assert!((last / reference - 1.0).abs() < 0.02, "bf16 {last}, fp32 {reference}");
    let whole = run("bf16", "reproducible = true", "d");
    assert_eq!(whole, run("bf16", "reproducible = true\nmicro_batch = 2", "e"));
}

#[test]
fn tf32_is_a_permission_that_a_cpu_does_not_take_and_routers_do_not_have() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let run = |policy: &str| {
        let config = tiny(dir.path(), &format!("steps = 6\nvalidate_every = 3\n[precision]\npolicy = \"{policy}\""));
        losses(&config, &dir.path().join(policy))
    };
    assert_eq!(run("tf32"), run("fp32"));
    let text = "[model]\narchitecture = \"mixtral\"\nvocab_size = 256\nlayers = 2\ndim = 32\nheads = 4\nffn = 48\nexperts = 4\n\
                [train]\nseq = 16\nglobal_batch = 4\ndevice = \"cuda\"\n[precision]\npolicy = \"tf32\"\n\
                [parallel]\ntp = 2\ndp = 2\nzero = 3\n[recompute]\npolicy = \"full\"\n";
    let plan = lockstep_plan::plan(&Devices::new(), &Config::parse(text, "run.toml", &[]).unwrap()).unwrap();
    let instrs = || plan.program().segments.iter().flat_map(|s| &s.instrs);
    let rounds: BTreeSet<&str> = instrs().filter(|i| i.tf32).map(|i| i.op.name()).collect();
    let expected = ["linear", "linear_grad_input", "linear_grad_weight", "vocab_grad", "vocab_logits"];
    assert_eq!(rounds, BTreeSet::from(expected));
    // Of each linear layer every matmul, those that are recomputed too; of a router none.
    let router = |i: &&Instr| {
        let experts = |a: &Arg| a.ty.dims.iter().any(|d| d.sections[0].axis == Axis::Experts);
        i.inputs.iter().chain(i.outputs.iter().flatten()).any(experts)
    };
    for instr in instrs().filter(|i| i.op.name().starts_with("linear")) {
        assert_eq!(instr.tf32, !router(&instr), "{instr:?}");
    }
    assert!(instrs().filter(|i| i.op.name().starts_with("linear")).any(|i| router(&i)));
}

#[test]
fn determinism_has_its_scratch_on_a_gpu_and_changes_nothing_on_the_cpu() {
    let scratch = |device: &str, deterministic: bool| {
        let text = format!(
            "[model]\npreset = \"llama-15m\"\n[train]\nseq = 500\nglobal_batch = 4\ndevice = \"{device}\"\n\
             deterministic = {deterministic}\n[precision]\npolicy = \"bf16\"\n"
        );
        let config = Config::parse(&text, "run.toml", &[]).unwrap();
        let plan = lockstep_plan::plan(&Devices::new(), &config).unwrap();
        let program = plan.program();
        let backward = program.segments.iter().flat_map(|s| &s.instrs).find(|i| i.op.name() == "attention_grad");
        program.buffers[backward.unwrap().workspace.unwrap().0].bytes
    };
    assert_eq!(scratch("cpu", true), scratch("cpu", false));
    // All of dS in whole tiles instead of dQ in f32.
    let [heads, head_dim, tiles] = [6, 48, 512];
    let more = 2 * 4 * heads * tiles * tiles - 4 * 4 * 500 * heads * head_dim;
    let (with, without) = (scratch("cuda", true), scratch("cuda", false));
    assert!(with.abs_diff(without + more) < 1024, "{with} and {without} bytes of scratch");
}

/// The gradient norm of the first step of a run's config, profiled.
fn run_profiled(config: &Path, dir: &Path) -> Vec<f32> {
    let (stop, mut norms) = (AtomicBool::new(false), Vec::new());
    let options = RunOptions { dir: dir.to_owned(), profile_steps: Some(1..=1), ..RunOptions::default() };
    run(&Devices::new(), &Config::load(config, &[]).unwrap(), &options, &stop, &mut |event| {
        if let Event::Stepped(m) = event {
            norms.push(m.grad_norm);
            stop.store(true, Ordering::SeqCst);
        }
    })
    .unwrap();
    norms
}

#[test]
fn a_finite_gradient_of_any_size_is_clipped_and_applied() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let run = |std: &str, reproducible: bool, micro_batch: usize| {
        let keys = format!("steps = 8\nvalidate_every = 0\nreproducible = {reproducible}\nmicro_batch = {micro_batch}");
        let set = [format!("model.init_std={std}"), "optimizer.lr=1e-9".to_owned()];
        let config = Config::parse(&tiny(dir.path(), &keys).resolved_toml(), "run.toml", &set).unwrap();
        let name = format!("run-{std}-{reproducible}-{micro_batch}");
        let Ran { steps, skipped, .. } = run_to(&config, &dir.path().join(name), 2);
        assert_eq!(skipped, [0; 0], "init_std {std}");
        steps.iter().map(|m| m.grad_norm).collect::<Vec<f32>>()
    };
    let mut largest = 0.0f32;
    for std in ["0.02", "100", "3e4"] {
        let (plain, fixed) = (run(std, false, 8), run(std, true, 8));
        for (a, b) in plain.iter().zip(&fixed) {
            assert!((a / b - 1.0).abs() < 1e-3, "init_std {std}: {plain:?} and {fixed:?}");
        }
        assert_eq!(fixed, run(std, true, 2), "init_std {std}");
        // A step that is profiled is the same step.
        let profiled = run_profiled(&dir.path().join(format!("run-{std}-true-8/run.toml")), &dir.path().join(std));
        assert_eq!(profiled, fixed[..1], "init_std {std}");
        largest = largest.max(plain[0]);
    }
    // Sums over 256 tokens are beyond the range of fixed point at first.
    assert!(largest > 1.5e6, "{largest}");
}
