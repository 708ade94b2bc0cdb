//! What explain says besides the memory bill: the cost of a run, recomputation, growth, closed forms, the timeline.

mod common;

use common::Place;
use serde_json::Value;

/// An 8B model at sequence 4096.
fn llama_3_8b() -> Place {
    let place = Place::new();
    place.config(
        "[model]\npreset = \"llama-3-8b\"\n[train]\nseq = 4096\nglobal_batch = 1\n[precision]\npolicy = \"bf16\"",
    );
    place
}

fn json(place: &Place, args: &[&str]) -> Value {
    let args = [&["explain", "run.toml", "--format", "json"], args].concat();
    serde_json::from_str(&place.ok(&args)).unwrap()
}

#[test]
fn a_run_is_priced_in_flops_gpu_days_and_days() {
    let place = llama_3_8b();
    let run = ["--tokens", "15T", "--gpu", "a100", "--mfu", "0.4", "--gpus", "480"];
    let cost = &json(&place, &run)["cost"];
    let near = |field: &str, expected: f64, digits: f64| {
        let found = cost[field].as_f64().unwrap();
        assert!((found - expected).abs() <= digits / 2.0, "{field}: {found}");
    };
    near("model_flops", 7.7e23, 0.1e23);
    near("gpu_days", 71_600.0, 100.0);
    near("days", 149.0, 1.0);
    let text = place.ok(&[&["explain", "run.toml"], &run[..]].concat());
    assert!(text.contains("a run of 15.0T tokens: 7.72e23 model FLOPs"), "{text}");
    assert!(text.contains("GPU-days on a100 at MFU 0.4 of 312 TFLOP/s, 149.2 days on 480"), "{text}");
    assert!(json(&place, &[])["cost"].is_null());
}

#[test]
fn a_price_that_cannot_be_meant_is_refused() {
    let place = llama_3_8b();
    for (args, part) in [
        (&["--tokens", "15T", "--gpu", "a10O", "--mfu", "0.4"][..], "did you mean a100?"),
        (&["--tokens", "15T", "--gpu", "a100", "--mfu", "40"], "--mfu 40 is no share"),
        (&["--tokens", "15 parsecs"], "--tokens 15 parsecs is not a count"),
        (&["--tokens", "1T", "--gpu", "a100", "--mfu", "0.4", "--gpus", "0"], "--gpus 0 trains nothing"),
        (&["--tokens", "1T", "--gpu", "a100"], "--mfu"),
    ] {
        let args = [&["explain", "run.toml"], args].concat();
        let error = place.fails(2, &args);
        assert!(error.contains(part), "{args:?}: {error}");
    }
}
