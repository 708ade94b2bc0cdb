//! Runs in fp8 whose scales are those of earlier steps.

mod common;

use common::{check_layouts, run_to, write_corpus};
use lockstep_checkpoint::open;
use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_train::{Event, RunOptions, StepMetrics, run};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// A model whose matmuls can all be in fp8, on up to two tensor-parallel ranks.
fn config(dir: &Path, set: &[&str]) -> Config {
    let text = "[model]\nvocab_size = 256\nlayers = 4\ndim = 64\nheads = 4\nkv_heads = 2\nffn = 128\n\
         [data]\npaths = [\".\"]\nextensions = [\"txt\"]\n[optimizer]\nlr = 3e-3\nwarmup_steps = 2\n\
         [train]\nsteps = 5\nseq = 64\nglobal_batch = 8\nmicro_batch = 2\nvalidate_every = 2\n\
         [precision]\npolicy = \"fp8\"\nfp8_weights = 0\nfp8_recipe = \"delayed\"\n";
    std::fs::write(dir.join("run.toml"), text).unwrap();
    let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    Config::load(&dir.join("run.toml"), &set).unwrap()
}

fn bits(steps: &[StepMetrics]) -> Vec<(u64, u32)> {
    steps.iter().map(|m| (m.loss.to_bits(), m.grad_norm.to_bits())).collect()
}

/// The histories of the last checkpoint, by name.
fn histories(run: &Path) -> BTreeMap<String, Vec<f32>> {
    let checkpoint = open(&run.join("checkpoints/step-00000005")).unwrap();
    let names = checkpoint.names("optimizer").unwrap();
    let history = |name: &str| {
        let view = checkpoint.tensor("optimizer", name).unwrap();
        let mut bytes = vec![0; 4 * view.shape.iter().product::<usize>()];
        view.copy_to(&mut bytes);
        bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect()
    };
    names.into_iter().filter(|n| n.starts_with("history.")).map(|n| (n.to_owned(), history(n))).collect()
}

#[test]
fn histories_are_those_of_all_ranks_once_however_a_step_is_computed_and_interrupted() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let ran = |name: &str, set: &[&str], stops: &[u64]| {
        let (config, folder) = (config(dir.path(), set), dir.path().join(name));
        let steps: Vec<StepMetrics> = stops.iter().flat_map(|last| run_to(&config, &folder, *last).steps).collect();
        (bits(&steps), histories(&folder), steps)
    };
    let (losses, expected, steps) = ran("one rank", &[], &[5]);
    // Of activations and gradients, four of each layer: five steps were seen, and the guess is gone.
    assert_eq!(expected.len(), 4 * 2 * 4);
    for (name, history) in &expected {
        let (seen, before) = history.split_at(5);
        assert!(seen.iter().all(|x| *x > 0.0 && x.log2().fract() == 0.0), "{name}: {history:?}");
        assert!(before.iter().all(|x| *x == 0.0), "{name}: {history:?}");
    }
    for step in &steps {
        let [large, small] = [&step.fp8.fp8_overflow, &step.fp8.fp8_underflow];
        assert_eq!(large.keys().collect::<Vec<_>>(), ["activations", "gradients", "weights"]);
        assert!(large.values().chain(small.values()).all(|share| *share < 0.05), "{:?}", step.fp8);
    }
    // The same bits: recomputed, stopped in between, on stages.
    let stages = ["parallel.pp=2", "parallel.schedule=zb-v"];
    for (name, set, stops) in [
        ("recomputed", &["recompute.policy=full"][..], &[5][..]),
        ("stopped", &[], &[2, 3, 5]),
        ("stages", &stages, &[3, 5]),
    ] {
        let (found, histories, _) = ran(name, set, stops);
        assert_eq!((found, &histories), (losses.clone(), &expected), "{name}");
    }
    // Other sums, of the same tensors.
    for set in [&["parallel.dp=2"][..], &["parallel.dp=2", "parallel.zero=3"], &["parallel.tp=2"], &["parallel.cp=2"]] {
        let (_, found, _) = ran(&set.concat(), set, &[5]);
        assert_eq!(found.len(), expected.len());
        for (name, history) in &expected {
            // What is just below a power of two may be just above it elsewhere.
            let near = |(a, b): (&f32, &f32)| a == b || a / b == 2.0 || b / a == 2.0;
            assert!(history.iter().zip(&found[name]).all(near), "{set:?} {name}: {history:?}, {:?}", found[name]);
        }
        let same = expected.iter().filter(|(name, history)| found[*name] == **history).count();
        assert!(2 * same > expected.len(), "{set:?}: {same} of {} are the same", expected.len());
    }
}

#[test]
fn a_run_may_take_up_another_recipe_and_leave_it_again() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let folder = dir.path().join("run");
    let of = |recipe: &str, steps: u64| {
        let keys = [format!("precision.fp8_recipe={recipe}"), format!("train.steps={steps}")];
        (config(dir.path(), &["precision.fp8_recipe=current", "train.steps=2"]), keys)
    };
    run_to(&of("current", 2).0, &folder, 2);
    for (recipe, steps) in [("delayed", 4), ("current", 5)] {
        let (config, change) = of(recipe, steps);
        let options = RunOptions { dir: folder.clone(), change: change.into(), ..RunOptions::default() };
        let mut seen = 0;
        run(&Devices::new(), &config, &options, &AtomicBool::new(false), &mut |event| {
            if let Event::Stepped(m) = event {
                assert!(m.loss.is_finite() && m.fp8.fp8_overflow["gradients"] < 0.05, "{recipe}: {m:?}");
                seen += 1;
            }
        })
        .unwrap();
        assert!(seen > 0);
    }
    assert!(histories(&folder).is_empty());
}

#[test]
fn layouts_keep_their_promise() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), &[]);
    check_layouts(&config, &["dp=2,zero=2", "tp=2,sp", "cp=2", "pp=2,zb-h1", "dp=2,zero=3,tp=2"]);
}
