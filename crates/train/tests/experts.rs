//! Runs of models with experts: their counts, the biases that balance them, and a router that gets NaN.

mod common;
mod hf_folder;

use common::write_corpus;
use hf_folder::Model;
use lockstep_config::Config;
use lockstep_exec::Executor;
use lockstep_host::Devices;
use lockstep_infer::{Generator, Trained, import};
use lockstep_plan::plan;
use lockstep_train::{Event, ExpertMetrics, RunOptions, Session, run};
use safetensors::SafeTensors;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// DeepSeek-V3's experts after a dense layer.
const DOTS1: &str = "[model]\narchitecture = \"dots1\"\nvocab_size = 259\nlayers = 4\ndim = 32\nheads = 4\nkv_heads = 2\nffn = 48\n\
    expert_ffn = 12\nexperts = 6\nexperts_per_token = 2\nshared_experts = 1\ndense_layers = 1\nrouter_scale = 1.5\n\
    expert_groups = 3\nexpert_top_groups = 2\nbalance_loss = 0.0\nbalance_bias = 0.01\n";
/// Of three layers with experts, in a step of 8 sequences of 12 tokens.
const COUNTED: u64 = 3 * 8 * 12 * 2;

fn config(dir: &Path, train: &str, set: &[&str]) -> Config {
    let text = format!(
        "{DOTS1}[data]\npaths = [\".\"]\nextensions = [\"txt\"]\n[optimizer]\nlr = 3e-3\nwarmup_steps = 2\n\
         [train]\nsteps = 8\nseq = 12\nglobal_batch = 8\nthreads = 2\nvalidation_sequences = 8\n{train}\n"
    );
    std::fs::write(dir.join("run.toml"), text).unwrap();
    let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
    Config::load(&dir.join("run.toml"), &set).unwrap()
}

/// Runs a config up to a step: loss, gradient norm and what experts got, of every step.
fn run_to(config: &Config, dir: &Path, last: u64) -> Vec<(f64, f32, ExpertMetrics)> {
    let stop = AtomicBool::new(false);
    let options = RunOptions { dir: dir.to_owned(), ..RunOptions::default() };
    let mut steps = Vec::new();
    let outcome = run(&Devices::new(), config, &options, &stop, &mut |event| {
        if let Event::Stepped(m) = event {
            steps.push((m.loss, m.grad_norm, m.experts.clone()));
            stop.store(m.step >= last, Ordering::SeqCst);
        }
    });
    assert_eq!(outcome.unwrap().step, last);
    steps
}

fn counted(metrics: &ExpertMetrics) -> u64 {
    metrics.experts.values().flat_map(|layer| &layer.counts).sum()
}

#[test]
fn counts_and_biases_have_the_same_bits_however_the_layout_changes() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    for precision in ["", "[precision]\npolicy = \"bf16\""] {
        let train = format!("reproducible = true\n{precision}");
        let at = |kind: &str| dir.path().join(format!("{kind}-{}", precision.len()));
        let whole = run_to(&config(dir.path(), &train, &[]), &at("whole"), 8);
        assert!(whole.iter().all(|(_, _, experts)| counted(experts) == COUNTED));
        assert_eq!(whole[0].2.experts.keys().collect::<Vec<_>>(), ["1", "2", "3"]);
        let (one, two) = ("train.micro_batch=1", "train.micro_batch=2");
        let legs: [&[&str]; 4] = [
            &["parallel.dp_replicate=2", "parallel.dp=2", "parallel.zero=3"],
            &[two],
            &["parallel.dp=2", "parallel.zero=1", "parallel.pp=2", two],
            &["parallel.dp=4", "parallel.zero=2", one],
        ];
        let leg =
            |(n, set): (usize, &&[&str])| run_to(&config(dir.path(), &train, set), &at("changing"), 2 * (n as u64 + 1));
        let changing: Vec<_> = legs.iter().enumerate().flat_map(leg).collect();
        assert_eq!(changing, whole, "{precision}");
        // Biases count in what is chosen.
        let still = run_to(&config(dir.path(), &train, &["model.balance_bias=0"]), &at("still"), 8);
        assert!(still[0] == whole[0] && still[1..] != whole[1..]);
    }
}

#[test]
fn every_choice_is_counted_once_on_every_layout() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    for (n, set) in [
        &["parallel.tp=2"][..],
        &["parallel.tp=2", "parallel.sequence_parallel=true"],
        &["parallel.dp=2", "parallel.tp=2", "parallel.sequence_parallel=true", "parallel.pp=2", "parallel.zero=1"],
        &["recompute.policy=full"],
        &["parallel.ep=2"],
        &["parallel.ep=2", "parallel.dp=2", "parallel.zero=3"],
    ]
    .iter()
    .enumerate()
    {
        let steps = run_to(&config(dir.path(), "micro_batch = 1", set), &dir.path().join(n.to_string()), 2);
        assert!(steps.iter().all(|(_, _, experts)| counted(experts) == COUNTED), "{set:?}");
    }
}

/// The bits of every parameter.
fn parameters(session: &mut Session, names: &[String]) -> Vec<Vec<u8>> {
    let executor: &mut dyn Executor = session.executor();
    names.iter().map(|name| executor.read(name, 0).unwrap().into_owned()).collect()
}

#[test]
fn a_router_that_gets_nan_moves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "micro_batch = 2", &[]);
    let plan = plan(&Devices::new(), &config).unwrap();
    let names: Vec<String> = plan.forward.parameters().map(|(_, value, _)| value.name.clone()).collect();
    let mut session = Session::new(&Devices::new(), &config, &plan).unwrap();
    let scalars = lockstep_ir::StepScalars {
        lr: 0.01,
        inverse_count: 1.0 / 96.0,
        clip: 1.0,
        bias1: 0.1,
        bias2: 0.05,
        loss_scale: 1.0,
    };
    let before = parameters(&mut session, &names);
    assert!(session.run_step(scalars).unwrap().applied);
    let moved = parameters(&mut session, &names);
    assert!(names.iter().zip(before.iter().zip(&moved)).all(|(name, (a, b))| a != b || name.contains("norm")));
    let at = names.iter().position(|name| name == "layers.2.router").unwrap();
    let mut spoiled = moved[at].clone();
    spoiled[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    session.executor().write(&names[at], 0, &spoiled).unwrap();
    let after = session.run_step(scalars).unwrap();
    assert!(!after.applied && !after.grad_norm.is_finite());
    assert_eq!(after.loads.iter().sum::<f64>() as u64, COUNTED);
    let kept = parameters(&mut session, &names);
    for (i, name) in names.iter().enumerate() {
        assert!(kept[i] == if i == at { &spoiled[..] } else { &moved[i] }, "{name}");
    }
}

#[test]
fn mixtures_write_what_transformers_writes() {
    let others = ["deepseek_v2_lite", "deepseek_v2", "deepseek_v3", "deepseek_v3_wide", "gpt_oss", "gpt_oss_plain"];
    for case in ["mixtral", "qwen3_moe", "olmoe", "deepseek", "dots1"].into_iter().chain(others) {
        let dir = tempfile::tempdir().unwrap();
        let (hf, out) = (dir.path().join("hf"), dir.path().join("run"));
        Model::golden(case).write(&hf);
        import(&hf, &out, &mut |_, _| {}).unwrap();
        let bytes = std::fs::read(format!("{}/tests/golden/{case}.safetensors", env!("CARGO_MANIFEST_DIR"))).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let ids = |name: &str| -> Vec<u32> {
            file.tensor(name).unwrap().data().as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
        };
        let trained = Trained::open(&out).unwrap();
        let mut generator = Generator::new(&Devices::new(), &trained.config, 68, trained.weights()).unwrap();
        let (mut next, mut found) = (ids("tokens")[..4].to_vec(), Vec::new());
        for _ in 0..64 {
            let logits = generator.read(&next).unwrap();
            let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap() as u32;
            found.push(best);
            next = vec![best];
        }
        assert_eq!(found, ids("greedy"), "{case}");
    }
}
