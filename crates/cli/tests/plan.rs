//! `lockstep plan`: the fastest layouts of a run, whose numbers are those of the programs that would run.

mod common;

use common::Place;
use serde_json::Value;

/// A model that every axis divides.
const SMALL: &str = "[model]\nvocab_size = 1024\nlayers = 4\ndim = 256\nheads = 8\nkv_heads = 4\nffn = 512\n[train]\nseq = 1024\n\
                     global_batch = 32\n[precision]\npolicy = \"bf16\"\n";

fn json(place: &Place, args: &[&str]) -> Value {
    let args = [&["plan", "run.toml", "--format", "json"], args].concat();
    serde_json::from_str(&place.ok(&args)).unwrap()
}

#[test]
fn what_is_shown_of_a_layout_is_what_explain_says_of_its_keys() {
    let place = Place::new();
    place.config(SMALL);
    let found = json(&place, &["--gpu", "h100", "--gpus", "8", "--top", "3"]);
    let layouts = found["layouts"].as_array().unwrap();
    assert_eq!(layouts.len(), 3, "{found}");
    let step = |layout: &Value| layout["forecast"]["step_s"].as_f64().unwrap();
    for layout in layouts {
        assert!(step(layout) >= step(&layouts[0]) * 0.995, "{layout}");
        let keys = layout["keys"].as_object().unwrap();
        let set: Vec<String> = keys.iter().flat_map(|(key, v)| ["--set".into(), format!("{key}={v}")]).collect();
        let args: Vec<&str> = ["explain", "run.toml", "--gpu", "h100", "--format", "json"]
            .into_iter()
            .chain(set.iter().map(String::as_str))
            .collect();
        let explained: Value = serde_json::from_str(&place.ok(&args)).unwrap();
        assert_eq!(explained["layout"]["ranks"], 8, "{layout}");
        assert_eq!(explained["memory"]["total_bytes"], layout["memory"]["total_bytes"], "{layout}");
        assert_eq!(explained["forecast"]["step_s"], layout["forecast"]["step_s"], "{layout}");
    }
}

#[test]
fn a_wrong_request_is_refused_with_what_would_do() {
    let place = Place::new();
    place.config(SMALL);
    let error = place.fails(2, &["plan", "run.toml", "--gpu", "h100", "--gpus", "0"]);
    assert!(error.contains("--gpus 0 trains nothing\nhint: give a number from 1"), "{error}");
    let error = place.fails(2, &["plan", "run.toml", "--cluster", "leonrado", "--gpus", "8"]);
    assert!(error.contains("did you mean leonardo?"), "{error}");
    let error = place.fails(2, &["plan", "run.toml", "--gpu", "h100", "--gpus", "8", "--tokens", "many"]);
    assert!(error.contains("--tokens many is not a count"), "{error}");
}
