//! This machine's profile: what train, explain and bench say by it, beside what is measured.

mod common;

use common::{Place, planted};
use lockstep_plan::published::{LeftOut, Residuals};
use serde_json::Value;

fn json(place: &Place, file: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(place.path(file)).unwrap()).unwrap()
}

const SET: [&str; 8] = [
    "--set",
    "train.steps=8",
    "--set",
    "train.threads=1",
    "--set",
    "train.device=\"cpu\"",
    "--set",
    "train.validate_every=0",
];

#[test]
fn a_run_writes_what_was_predicted_is_analyzed_and_learned_from() {
    let place = Place::new();
    std::fs::create_dir(place.path("machines")).unwrap();
    let file = place.path("machines/planted.toml");
    std::fs::write(&file, planted().to_toml()).unwrap();
    let train = |dir: &str| place.ok(&[&["train", "run.toml", "--run-dir", dir][..], &SET].concat());
    train("first");
    let before = &json(&place, "first/plan.json")["prediction"];
    assert_eq!((&before["by"], &before["measured_as_run"]), (&"profile planted".into(), &true.into()));
    assert!(before["step_s"].as_f64().unwrap() > 0.0 && before["tokens_per_s"].as_f64().unwrap() > 0.0);
    assert!(before["unmeasured"].as_array().unwrap().contains(&"adamw f32".into()), "{before}");
    let shown = place.ok(&["explain", "--analyze", "first"]);
    for part in
        ["predicted by profile planted", "matmul", "optimizer", "step", "they part most in", "bench --learn first"]
    {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    // Kernels that were timed to more than a step leave nothing for the rest, and that is said.
    let timed = place.path("first/measured.json");
    let kept = std::fs::read_to_string(&timed).unwrap();
    let mut measured: Value = serde_json::from_str(&kept).unwrap();
    measured["classes"]["matmul"] = Value::from(1000.0);
    std::fs::write(&timed, measured.to_string()).unwrap();
    let shown = place.ok(&["explain", "--analyze", "first"]);
    assert!(shown.contains("nothing is left for communication, waits and the host: "), "{shown}");
    let over = json(&place, "first/plan.json")["prediction"]["step_s"].as_f64().unwrap();
    let found: Value = serde_json::from_str(&place.ok(&["explain", "--analyze", "first", "--format", "json"])).unwrap();
    assert!(over < 900.0 && found["kernels_over_step_s"].as_f64().unwrap() > 900.0, "{found}");
    std::fs::write(&timed, kept).unwrap();
    let learned = place.ok(&["bench", "--learn", "first"]);
    assert!(learned.contains("times by op and size added to"), "{learned}");
    train("second");
    let analysis = |dir: &str| -> Value {
        serde_json::from_str(&place.ok(&["explain", "--analyze", dir, "--format", "json"])).unwrap()
    };
    let apart = |dir: &str| {
        let found = analysis(dir);
        let [predicted, measured] = ["predicted_step_s", "measured_step_s"].map(|key| found[key].as_f64().unwrap());
        (predicted / measured).ln().abs()
    };
    assert!(apart("second") < apart("first"), "{} {}", analysis("first"), analysis("second"));
    assert_eq!(analysis("second")["unmeasured"], Value::Array(Vec::new()));
    // explain says it by itself.
    let explained = place.ok(&[&["explain", "run.toml"][..], &SET].concat());
    assert!(explained.contains("profile planted") && explained.contains("step time"), "{explained}");
}

#[test]
fn a_profile_that_cannot_be_read_is_named_by_line_and_stops_no_run() {
    let place = Place::new();
    std::fs::create_dir(place.path("machines")).unwrap();
    let text = planted().to_toml().replace("op = \"linear\"", "op = \"liner\"");
    std::fs::write(place.path("machines/planted.toml"), text).unwrap();
    let errors = place.fails(2, &["explain", "run.toml"]);
    assert!(errors.contains("machines/planted.toml: line ") && errors.contains("there is no op \"liner\""), "{errors}");
    let output = place.run(&[&["train", "run.toml"][..], &SET].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("no prediction:"), "{said}");
    let errors = place.fails(2, &["explain", "--analyze", "runs/run"]);
    assert!(errors.contains("the run has no prediction") && errors.contains("bench --save"), "{errors}");
    let errors = place.fails(2, &["bench", "--save", "a/b"]);
    assert!(errors.contains("a profile's name has letters"), "{errors}");
}

/// The steps of `bench/records/foresight-h200.txt`, which intervals of predicted times are from, against what the catalogue says of them.
#[test]
fn residuals_of_steps_on_an_h200_are_those_of_the_record() {
    let place = Place::new();
    let preset = |name: &str, seq: usize| format!("[model]\npreset = \"{name}\"\n[train]\nseq = {seq}\n");
    let sizes = |text: &str, seq: usize| format!("[model]\n{text}\n[train]\nseq = {seq}\n");
    let selective = "[recompute]\npolicy = \"selective\"\n[precision]\ngradients = \"bf16\"\n";
    let [mid, big, odd] = [
        "vocab_size = 40000\nlayers = 16\ndim = 1280\nheads = 20\nkv_heads = 4\nffn = 3456",
        "vocab_size = 100352\nlayers = 4\ndim = 3328\nheads = 26\nkv_heads = 13\nffn = 9216",
        "architecture = \"gpt2\"\nvocab_size = 50304\nlayers = 8\ndim = 896\nheads = 14\nffn = 3584",
    ];
    let cases = [
        ("124m", preset("llama-124m", 1024), 64, ""),
        ("1b", preset("llama-3.2-1b", 4096), 8, ""),
        ("gpt2-xl", preset("gpt2-xl", 1024), 16, ""),
        ("8b", preset("llama-3-8b", 4096), 1, selective),
        ("350m", sizes(mid, 2048), 12, ""),
        ("3b-4layers", sizes(big, 3072), 4, ""),
        ("gpt2-90m", sizes(odd, 1024), 48, "[recompute]\npolicy = \"full\"\n"),
    ];
    const RECORD: &str = include_str!("../../../bench/records/foresight-h200.txt");
    let known = Residuals::builtin();
    for (name, model, batch, more) in cases {
        std::fs::write(place.path("case.toml"), format!("{model}global_batch = {batch}\n{more}")).unwrap();
        let micro_batch = format!("train.micro_batch={batch}");
        let set = ["--set", "precision.policy=bf16", "--set", &micro_batch];
        let args = [&["explain", "case.toml", "--gpu", "h200", "--format", "json"][..], &set].concat();
        let found: Value = serde_json::from_str(&place.ok(&args)).unwrap();
        let predicted = found["forecast"]["step_s"].as_f64().unwrap();
        let line = RECORD.lines().find(|line| line.split_whitespace().next() == Some(name)).unwrap();
        let measured: f64 = line.split_whitespace().nth(3).unwrap().parse().unwrap();
        let of = |group: &&LeftOut| group.framework == "lockstep" && group.model == name;
        let residual = known.left_out.iter().find(of).unwrap().residuals[0];
        let computed = (measured / 1e3 / predicted).ln();
        assert!((computed - residual).abs() < 0.002, "{name}: {computed:.4}, and residuals.toml has {residual}");
        // It says so, and how sure it is.
        let share = found["forecast"]["interval"]["share"].as_f64().unwrap();
        assert!((0.1..0.5).contains(&share), "{found}");
        let power = found["forecast"]["energy"]["power_w"].as_f64().unwrap();
        assert!((600.0..=700.0).contains(&power), "{name}: {power} W");
    }
}

#[test]
fn the_catalogue_predicts_what_steps_of_an_h200_took() {
    let bench = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench");
    let record = std::fs::read_to_string(bench.join("records/foresight-h200.txt")).unwrap();
    // `NAME PREDICTED ms MEASURED ms RATIO …`, by a machine that was measured; the last of a name counts.
    let measured = |name: &str| -> f64 {
        let mut rows = record.lines().rev().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let row = rows.find(|words| words.len() == 8 && words[0] == name).unwrap_or_else(|| panic!("{name}"));
        row[3].parse().unwrap()
    };
    let place = Place::new();
    let mut off = Vec::new();
    for entry in std::fs::read_dir(bench.join("configs/h200")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        let said = place.ok(&["explain", path.to_str().unwrap(), "--gpu", "h200", "--format", "json"]);
        let said: Value = serde_json::from_str(&said).unwrap();
        off.push(((1e3 * said["forecast"]["step_s"].as_f64().unwrap() / measured(name) - 1.0).abs(), name.to_owned()));
    }
    off.sort_by(|a, b| a.0.total_cmp(&b.0));
    assert!(off.len() == 15 && off[7].0 <= 0.05 && off[14].0 <= 0.16, "{off:?}");
}
