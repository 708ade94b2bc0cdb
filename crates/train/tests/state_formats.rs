//! Moments and master weights in fewer bits than fp32.

mod common;

use common::{check_layouts, run_to, write_corpus};
use lockstep_checkpoint::open;
use lockstep_config::Config;
use lockstep_host::Devices;
use lockstep_infer::state::converted;
use lockstep_ir::DType;
use lockstep_train::{Event, RunOptions, StepMetrics, run};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// A model whose rows are whole blocks of 256.
fn config(dir: &Path, set: &[&str]) -> Config {
    let text = "[model]\nvocab_size = 256\nlayers = 2\ndim = 256\nheads = 4\nkv_heads = 2\nffn = 256\n\
         [data]\npaths = [\".\"]\nextensions = [\"txt\"]\n[optimizer]\nlr = 1e-3\nwarmup_steps = 2\n\
         [train]\nsteps = 5\nseq = 32\nglobal_batch = 4\nmicro_batch = 2\nvalidate_every = 5\n\
         [precision]\npolicy = \"bf16\"\n";
    std::fs::write(dir.join("run.toml"), text).unwrap();
    let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    Config::load(&dir.join("run.toml"), &set).unwrap()
}

const FORMATS: [&[&str]; 4] = [
    &["precision.moments=bf16"],
    &["precision.moments=int8"],
    &["precision.master=bf16"],
    &["precision.moments=int8", "precision.master=bf16", "precision.gradients=bf16"],
];

fn bits(steps: &[StepMetrics]) -> Vec<(u64, u32)> {
    steps.iter().map(|m| (m.loss.to_bits(), m.grad_norm.to_bits())).collect()
}

/// The types of the tensors of the last checkpoint, by name.
fn types(run: &Path) -> BTreeMap<String, DType> {
    let checkpoint = open(&run.join("checkpoints/step-00000005")).unwrap();
    let of = |group: &'static str| {
        let names = checkpoint.names(group).unwrap().into_iter();
        names.map(|name| (name.to_owned(), checkpoint.tensor(group, name).unwrap().dtype)).collect::<Vec<_>>()
    };
    of("model").into_iter().chain(of("optimizer")).collect()
}

#[test]
fn losses_stay_where_they_were_by_every_rule_and_no_bit_depends_on_interruptions_and_ranges() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let ran = |name: &str, sets: &[&[&str]], stops: &[u64]| {
        let (config, folder) = (config(dir.path(), &sets.concat()), dir.path().join(name));
        stops.iter().flat_map(|last| run_to(&config, &folder, *last).steps).collect::<Vec<StepMetrics>>()
    };
    let mut kept = BTreeMap::new();
    for rule in ["adamw", "lion", "sgd", "muon"] {
        let rate = if rule == "lion" { "optimizer.lr=1e-4" } else { "optimizer.lr=1e-3" };
        let rule = [format!("optimizer.name={rule}"), rate.to_owned()];
        let rule: Vec<&str> = rule.iter().map(String::as_str).collect();
        let fp32 = ran(&format!("{rule:?}"), &[&rule], &[5]);
        for format in FORMATS {
            let name = format!("{rule:?} {format:?}");
            let found = ran(&name, &[&rule, format], &[5]);
            // Before the first update nothing is rounded but gradients.
            assert_eq!(found[0].loss, fp32[0].loss, "{name}");
            assert_ne!(found[4].loss, fp32[4].loss, "{name}");
            kept.insert(name.clone(), bits(&found));
            for (a, b) in found.iter().zip(&fp32) {
                assert!((a.loss / b.loss - 1.0).abs() < 5e-3, "{name}: {} and {}", a.loss, b.loss);
            }
        }
        let (name, format) = (format!("{rule:?} {:?}", FORMATS[3]), FORMATS[3]);
        let stopped = ran(&format!("{name} stopped"), &[&rule, format], &[2, 5]);
        assert_eq!(bits(&stopped), kept[&name], "{name}");
    }
    // Ranges of ZeRO and stages of a pipeline round the same elements in the same way.
    let format: &[&str] = FORMATS[3];
    let found = ran("one rank", &[format, &["train.micro_batch=1"]], &[5]);
    let stages: &[&str] = &["train.micro_batch=1", "parallel.pp=2"];
    assert_eq!(bits(&ran("stages", &[format, stages], &[2, 5])), bits(&found));
    // With sums that do not depend on their order, so do ranges on several ranks.
    let format: &[&str] = &["precision.moments=int8", "precision.master=bf16", "train.reproducible=true"];
    let found = ran("reproducible", &[format], &[5]);
    let ranges: &[&str] = &["parallel.dp=2", "parallel.zero=3", "train.micro_batch=1"];
    assert_eq!(bits(&ran("ranges", &[format, ranges], &[3, 5])), bits(&found));
}

#[test]
fn checkpoints_hold_what_a_run_keeps_and_norms_and_embeddings_stay_in_fp32() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let folder = dir.path().join("run");
    run_to(&config(dir.path(), FORMATS[3]), &folder, 5);
    let found = types(&folder);
    for (name, dtype) in &found {
        let small = name.contains("norm") || name.contains("embed_tokens");
        let expected = match (small, name.split_once('.')) {
            (false, Some(("m", _))) => DType::Signed8,
            (false, Some(("v", _))) => DType::Unsigned8,
            (false, _) => DType::BF16,
            (true, _) => DType::F32,
        };
        assert_eq!(*dtype, expected, "{name}");
    }
    assert!(found.values().filter(|dtype| **dtype == DType::Unsigned8).count() == 15, "{found:?}");
}

#[test]
fn a_run_may_take_up_other_formats_and_says_what_that_loses() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let folder = dir.path().join("run");
    let first = config(dir.path(), &["train.steps=2"]);
    run_to(&first, &folder, 2);
    let formats = [("int8", "bf16", 3), ("bf16", "fp32", 4), ("fp32", "fp32", 5)];
    let mut lost = Vec::new();
    for (moments, master, steps) in formats {
        let change = vec![
            format!("precision.moments={moments}"),
            format!("precision.master={master}"),
            format!("train.steps={steps}"),
        ];
        let options = RunOptions { dir: folder.clone(), change, ..RunOptions::default() };
        run(&Devices::new(), &first, &options, &AtomicBool::new(false), &mut |event| match event {
            Event::Converted(kind) => lost.push((steps, kind.group, kind.from, kind.to, kind.lost())),
            Event::Stepped(m) => assert!(m.loss.is_finite()),
            _ => {}
        })
        .unwrap();
    }
    let share = |step: u64, group: &str, to: DType| {
        let found = lost.iter().find(|(s, g, _, t, _)| (*s, *g, *t) == (step, group, to));
        found.unwrap_or_else(|| panic!("{step} {group} {to}: {lost:?}")).4
    };
    assert!((1e-3..4e-3).contains(&share(3, "model", DType::BF16)));
    assert!((1e-3..3e-2).contains(&share(3, "optimizer", DType::Signed8)));
    assert!((1e-3..3e-2).contains(&share(3, "optimizer", DType::Unsigned8)));
    assert_eq!(share(4, "model", DType::F32), 0.0);
    assert!((1e-3..4e-3).contains(&share(4, "optimizer", DType::BF16)));
    assert_eq!(share(5, "optimizer", DType::F32), 0.0);
    assert!(types(&folder).values().all(|dtype| *dtype == DType::F32));
}

/// The weights of the layers' matrices in the checkpoint of a step.
fn matrices(run: &Path, step: u64) -> Vec<f64> {
    let checkpoint = open(&run.join(format!("checkpoints/step-{step:08}"))).unwrap();
    let names = checkpoint.names("model").unwrap().into_iter().filter(|name| name.contains("proj"));
    let numbers = |name: &str| {
        let view = checkpoint.tensor("model", name).unwrap();
        converted(&view.bytes(), view.dtype, DType::F32)
    };
    let bytes: Vec<u8> = names.flat_map(numbers).collect();
    bytes.chunks_exact(4).map(|x| f64::from(f32::from_le_bytes(x.try_into().unwrap()))).collect()
}

#[test]
fn updates_far_below_a_unit_in_the_last_place_are_not_lost() {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path());
    let moved = |master: &str| {
        // A step moves a weight by about 2e-6; neighbours in bf16 are 1e-4 apart.
        let keys = ["optimizer.lr=2e-6", "optimizer.warmup_steps=0", "checkpoint.every=1", "checkpoint.keep=9", master];
        let (config, folder) = (config(dir.path(), &keys), dir.path().join(master));
        run_to(&config, &folder, 5);
        let (first, last) = (matrices(&folder, 1), matrices(&folder, 5));
        first.iter().zip(last).map(|(a, b)| b - a).collect::<Vec<f64>>()
    };
    let (exact, rounded) = (moved("precision.master=fp32"), moved("precision.master=bf16"));
    let along = |x: &[f64]| x.iter().zip(&exact).map(|(x, y)| x * y).sum::<f64>();
    // Rounded to the nearest, next to nothing would have moved.
    let share = along(&rounded) / along(&exact);
    assert!((0.95..1.05).contains(&share), "{share}");
}

#[test]
fn layouts_keep_their_promise() {
    let dir = tempfile::tempdir().unwrap();
    // Rows of whole blocks on two tensor-parallel ranks too.
    let wide: &[&str] = &["model.dim=512", "model.heads=8", "model.kv_heads=4", "model.ffn=512"];
    for set in [FORMATS[0], FORMATS[3]] {
        check_layouts(
            &config(dir.path(), &[wide, set].concat()),
            &["dp=2,zero=2", "tp=2,sp", "cp=2", "pp=2,zb-h1", "dp=2,zero=3,tp=2"],
        );
    }
    // Rows of 256 on two ranks are cut through their blocks: what they keep is in bf16.
    check_layouts(&config(dir.path(), FORMATS[1]), &["tp=2"]);
}
