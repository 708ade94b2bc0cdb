//! Runs in fp8 that compare their loss with that in bf16.

mod common;

use common::{Ran, run_to, run_with, write_corpus};
use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_plan::plan;
use lockstep_train::{Event, ShadowMetrics, StepMetrics, TrainError};
use std::path::Path;

/// A model whose matmuls can all be in fp8, on up to two tensor-parallel ranks.
fn config(dir: &Path, model: &str, set: &[&str]) -> Config {
    let text = format!(
        "[model]\nvocab_size = 256\nlayers = 2\ndim = 64\nheads = 4\nkv_heads = 2\nffn = 128\n{model}\n\
         [data]\npaths = [\".\"]\nextensions = [\"txt\"]\n[optimizer]\nlr = 3e-3\nwarmup_steps = 2\n\
         [train]\nsteps = 5\nseq = 32\nglobal_batch = 8\nvalidate_every = 2\n"
    );
    std::fs::write(dir.join("run.toml"), text).unwrap();
    let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    Config::load(&dir.join("run.toml"), &set).unwrap()
}

const FP8: [&str; 2] = ["precision.policy=fp8", "precision.fp8_weights=0"];

fn bits(steps: &[StepMetrics]) -> Vec<(u64, u32, Option<u64>)> {
    let of = |m: &StepMetrics| (m.loss.to_bits(), m.grad_norm.to_bits(), m.val_loss.map(f64::to_bits));
    steps.iter().map(of).collect()
}

#[test]
fn losses_are_compared_at_their_steps_and_the_run_does_not_notice() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let run = |config: &Config, name: &str, last| run_to(config, &dir.path().join(name), last);
    let weights =
        |name: &str| std::fs::read(dir.path().join(name).join("checkpoints/step-00000005/model.safetensors")).unwrap();
    for size in ["train.micro_batch=8", "train.micro_batch=4"] {
        let name = |kind: &str| format!("{kind}, {size}");
        let plain = config(dir.path(), "", &[&FP8[..], &[size]].concat());
        let compared = config(dir.path(), "", &[&FP8[..], &[size, "precision.shadow_every=2"]].concat());
        let Ran { steps: before, .. } = run(&plain, &name("plain"), 5);
        let Ran { steps, .. } = run(&compared, &name("compared"), 5);
        assert_eq!(bits(&steps), bits(&before));
        assert!(weights(&name("plain")) == weights(&name("compared")), "the weights differ");
        assert!(before.iter().all(|m| m.shadow == ShadowMetrics::default()));
        let at: Vec<u64> = steps.iter().filter(|m| m.shadow.shadow_loss_fp8.is_some()).map(|m| m.step).collect();
        assert_eq!(at, [1, 2, 4]);
        for shadow in steps.iter().filter_map(|m| m.shadow.shadow_difference) {
            assert!(shadow != 0.0 && shadow.abs() < 0.05, "{shadow}");
        }
        // The arena is that of the plan, in which the second evaluation is.
        let planned = plan(&Devices::new(), &compared).unwrap().memory.total_bytes;
        assert_eq!(steps[0].arena_bytes, planned);
        // A run that is stopped in between compares the same.
        let parts = [2, 3, 5].into_iter().flat_map(|last| run(&compared, &name("parts"), last).steps);
        assert_eq!(parts.map(|m| m.shadow).collect::<Vec<_>>(), steps.iter().map(|m| m.shadow).collect::<Vec<_>>());
        if size == "train.micro_batch=8" {
            // One micro-batch: the loss in fp8 is the step's, and that in bf16 is a bf16 run's.
            steps.iter().filter_map(|m| Some((m.shadow.shadow_loss_fp8?, m.loss))).for_each(|(a, b)| assert_eq!(a, b));
            let Ran { steps: bf16, .. } = run(&config(dir.path(), "", &[size, "precision.policy=bf16"]), "bf16", 1);
            assert_eq!(steps[0].shadow.shadow_loss_bf16, Some(bf16[0].loss));
        }
    }
}

#[test]
fn every_layout_compares_the_same_losses() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let experts = "architecture = \"mixtral\"\nexperts = 4";
    let cases: [(&str, &[&[&str]]); 2] = [
        (
            "",
            &[
                &["parallel.dp=2", "parallel.tp=2", "train.micro_batch=2"],
                &["parallel.pp=2", "train.micro_batch=4"],
                &["parallel.dp=2", "parallel.zero=3", "parallel.pp=2", "train.micro_batch=2"],
                &["parallel.cp=2", "parallel.tp=2", "parallel.sequence_parallel=true", "train.micro_batch=4"],
            ],
        ),
        (experts, &[&["parallel.ep=2", "train.micro_batch=2"]]),
    ];
    for (model, layouts) in cases {
        let shadows = |set: &[&str]| -> Vec<ShadowMetrics> {
            let keys = ["precision.shadow_every=1", "train.validation_sequences=0"];
            let run = tempfile::tempdir().unwrap();
            run_to(&config(dir.path(), model, &[&FP8[..], &keys, set].concat()), run.path(), 2)
                .steps
                .iter()
                .map(|m| m.shadow)
                .collect()
        };
        let expected = shadows(&["train.micro_batch=4"]);
        for layout in layouts {
            for (found, expected) in shadows(layout).iter().zip(&expected) {
                // A pipeline has the bits of one rank. With tensor parallelism sums in bf16 have another order, and rounding
                // to fp8 makes more of that; a loss of the other type would still be twice as far off as the bound.
                let difference = expected.shadow_difference.unwrap().abs();
                assert!(difference > 0.0 && difference < 0.05, "{expected:?}");
                let bound = match *layout {
                    ["parallel.pp=2", "train.micro_batch=4"] => 0.0,
                    layout if layout.contains(&"parallel.tp=2") => 0.5 * difference,
                    _ => 0.02 * difference,
                };
                let close = |a: Option<f64>, b: Option<f64>| (a.unwrap() / b.unwrap() - 1.0).abs() <= bound;
                let losses = close(found.shadow_loss_fp8, expected.shadow_loss_fp8)
                    && close(found.shadow_loss_bf16, expected.shadow_loss_bf16);
                assert!(losses, "{model} {layout:?}: {found:?}, not {expected:?}");
            }
        }
    }
}

#[test]
fn a_comparison_for_which_experts_have_too_little_room_is_left_out() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let bound = ["parallel.ep=2", "parallel.ep_bound=1.0", "train.micro_batch=4", "train.validation_sequences=0"];
    let set = [&FP8[..], &["precision.shadow_every=1"], &bound].concat();
    let config = config(dir.path(), "architecture = \"mixtral\"\nexperts = 4", &set);
    let mut steps = Vec::new();
    let ended = run_with(&config, &dir.path().join("run"), &mut |event| {
        if let Event::Stepped(m) = event {
            steps.push((m.rows_beyond, m.shadow));
        }
    });
    assert!(matches!(ended, Err(TrainError::ExpertBound { step: 1, .. })), "some expert gets more than its share");
    assert!(matches!(steps[..], [(Some(1..), shadow)] if shadow == ShadowMetrics::default()), "{steps:?}");
}

#[test]
fn a_run_in_which_nothing_is_in_fp8_says_so_once() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let warnings = |name: &str, set: &[&str]| -> Vec<String> {
        let config = config(dir.path(), "", &[&["precision.policy=fp8", "train.steps=1"], set].concat());
        let mut warned = Vec::new();
        let ended = run_with(&config, &dir.path().join(name), &mut |event| {
            if let Event::Warning(text) = event {
                warned.extend(text.contains("fp8").then(|| text.to_owned()));
            }
        });
        ended.unwrap();
        warned
    };
    let small = warnings("small", &[]);
    let [text] = &small[..] else { panic!("{small:?}") };
    assert!(
        text.starts_with(
            "precision.policy = \"fp8\", and no matmul of this model is in fp8: the largest linear layer has 16,384 \
             weights on a rank, and fp8 is faster from 1,048,576 on; give precision.fp8_weights = 0"
        ),
        "{text}"
    );
    let compared = warnings("compared", &["precision.shadow_every=1"]);
    assert!(
        compared.len() == 1 && compared[0].contains("precision.shadow_every compares bf16 with itself"),
        "{compared:?}"
    );
    assert!(warnings("in fp8", &["precision.fp8_weights=0"]).is_empty());
}
