//! What the user sees: explain, config, the files of a run.

mod common;

use common::Place;
use serde_json::Value;

#[test]
fn explain_predicts_the_bytes_that_train_allocates() {
    let place = Place::new();
    let explained: Value = serde_json::from_str(&place.ok(&["explain", "run.toml", "--format", "json"])).unwrap();
    let total = explained["memory"]["total_bytes"].as_u64().unwrap();
    let classes = explained["memory"]["classes"].as_object().unwrap();
    assert_eq!(classes.values().map(|v| v.as_u64().unwrap()).sum::<u64>(), total);
    for class in ["parameters", "gradients", "optimizer", "activations", "workspace", "communication"] {
        assert!(classes.contains_key(class), "{class}");
    }
    assert_eq!(explained["model"]["parameters"], 54_000);
    place.ok(&["train", "run.toml", "--run-dir", "run"]);
    let metrics = std::fs::read_to_string(place.path("run/metrics.jsonl")).unwrap();
    let line: Value = serde_json::from_str(metrics.lines().next().unwrap()).unwrap();
    assert_eq!(line["arena_bytes"], total);
}

#[test]
fn explain_needs_only_a_preset_and_json_is_the_same_as_text() {
    let place = Place::new();
    place.config("[model]\npreset = \"llama-3-8b\"");
    let text = place.ok(&["explain", "run.toml"]);
    assert!(text.starts_with("llama: 8,030,261,248 parameters (8.03B)"), "{text}");
    let json: Value = serde_json::from_str(&place.ok(&["explain", "run.toml", "--format", "json"])).unwrap();
    assert_eq!(json["model"]["parameters"], 8_030_261_248u64);
    assert!(json["flops"]["hardware_per_token"].as_f64() > json["flops"]["model_per_token"].as_f64());
}

#[test]
fn explain_verbose_prints_the_graph_after_every_pass_and_the_program() {
    let place = Place::new();
    let text = place.ok(&["explain", "run.toml", "--verbose"]);
    for heading in ["forward graph", "after fuse (numerics-changing)", "after autodiff", "after optimizer", "program"] {
        assert!(text.contains(&format!("== {heading}")), "{heading}");
    }
    let fused = text.split("== after fuse").nth(1).unwrap().split("== after autodiff").next().unwrap();
    assert!(fused.contains("add_rms_norm(") && fused.contains("linear_cross_entropy("));
}

#[test]
fn a_run_directory_holds_what_is_documented() {
    let place = Place::new();
    place.ok(&["train", "run.toml", "--run-dir", "run"]);
    for file in ["run.toml", "plan.json", "metrics.jsonl", "events.jsonl", "checkpoints/step-00000020/manifest.json"] {
        assert!(place.path("run").join(file).exists(), "{file}");
    }
    let resolved = std::fs::read_to_string(place.path("run/run.toml")).unwrap();
    assert!(resolved.contains("steps = 20  # run.toml:14"), "{resolved}");
    assert!(resolved.contains("beta1 = 0.9  # default"), "{resolved}");
    let metrics = std::fs::read_to_string(place.path("run/metrics.jsonl")).unwrap();
    assert_eq!(metrics.lines().count(), 20);
    let line: Value = serde_json::from_str(metrics.lines().nth(4).unwrap()).unwrap();
    for field in [
        "step",
        "tokens",
        "loss",
        "grad_norm",
        "lr",
        "step_s",
        "data_wait_s",
        "tokens_per_s",
        "mfu",
        "arena_bytes",
        "val_loss",
    ] {
        assert!(line[field].is_number(), "{field}");
    }
    // The resolved config starts the very same run.
    std::fs::copy(place.path("run/run.toml"), place.path("again.toml")).unwrap();
    place.ok(&["train", "again.toml", "--run-dir", "again"]);
    assert_eq!(place.trajectory("again"), place.trajectory("run"));
}

#[test]
fn config_lists_every_key_with_its_meaning() {
    let place = Place::new();
    let text = place.ok(&["config"]);
    for key in ["[model]", "vocab_size = ", "global_batch = ", "reproducible = false", "presets: llama-15m"] {
        assert!(text.contains(key), "{key}\n{text}");
    }
    let json: Value = serde_json::from_str(&place.ok(&["config", "--format", "json"])).unwrap();
    assert!(json.as_array().unwrap().len() > 30);
}

#[test]
fn a_finished_run_says_so_and_changes_nothing() {
    let place = Place::new();
    let args = ["train", "run.toml", "--run-dir", "run"];
    place.ok(&args);
    let before = place.trajectory("run");
    assert!(place.ok(&args).contains("finished 20 steps"));
    assert_eq!(place.trajectory("run"), before);
}
