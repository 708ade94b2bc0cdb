//! `lockstep eval`, from whole commands.

mod common;

use common::Place;
use serde_json::Value;

fn trained() -> Place {
    let place = Place::new();
    place.ok(&["train", "run.toml", "--run-dir", "run"]);
    place
}

fn json(place: &Place, args: &[&str]) -> Value {
    let args = [&["eval"], args, &["--format", "json"]].concat();
    serde_json::from_str(&place.ok(&args)).unwrap()
}

fn number(object: &Value, field: &str) -> f64 {
    object[field].as_f64().unwrap_or_else(|| panic!("{field}: {object}"))
}

#[test]
fn the_held_out_loss_is_the_one_that_the_run_logged() {
    let place = trained();
    let metrics = std::fs::read_to_string(place.path("run/metrics.jsonl")).unwrap();
    let logged = |step: usize| {
        serde_json::from_str::<Value>(metrics.lines().nth(step - 1).unwrap()).unwrap()["val_loss"].clone()
    };
    let evaluation = json(&place, &["run", "--validation"]);
    assert_eq!(evaluation["loss"], logged(20));
    assert_eq!(json(&place, &["run/checkpoints/step-00000010", "--validation"])["loss"], logged(10));
    let loss = number(&evaluation, "loss");
    assert!((number(&evaluation, "perplexity") - loss.exp()).abs() < 1e-9);
}

#[test]
fn the_program_is_smaller_than_that_of_training() {
    let place = trained();
    let metrics = std::fs::read_to_string(place.path("run/metrics.jsonl")).unwrap();
    let line: Value = serde_json::from_str(metrics.lines().next().unwrap()).unwrap();
    let evaluation = json(&place, &["run", "--validation"]);
    // Neither gradients nor moments: three times the parameters less, and nothing saved for a backward pass.
    let saved = number(&line, "arena_bytes") - number(&evaluation, "arena_bytes");
    assert!(saved > 3.0 * 4.0 * 54_000.0, "{saved}");
}

#[test]
fn every_byte_but_the_first_is_predicted_whatever_the_length() {
    let place = trained();
    let text = "line 3: the square of 9 is 81.\nline 4: the square of 16 is 256.\n";
    for length in [1, 2, 31, 32, 33, 64] {
        std::fs::write(place.path("some.txt"), &text[..length]).unwrap();
        let evaluation = json(&place, &["run", "--data", "some.txt"]);
        // The separator at the end is predicted too.
        assert_eq!((&evaluation["tokens"], &evaluation["bytes"]), (&length.into(), &(length - 1).into()), "{length}");
    }
    let json = json(&place, &["run", "--data", "some.txt"]);
    let bits = number(&json, "loss") * 64.0 / std::f64::consts::LN_2 / 63.0;
    assert!((number(&json, "bits_per_byte") - bits).abs() < 1e-9, "{json}");
}

#[test]
fn longer_sequences_and_other_cuts_see_the_same_text() {
    let place = trained();
    let tokens = |args: &[&str]| {
        let args = [&["run", "--data", "corpus", "run.toml"], args].concat();
        number(&json(&place, &args), "tokens")
    };
    let all = tokens(&[]);
    assert_eq!(tokens(&["--seq", "7"]), all);
    assert_eq!(tokens(&["--seq", "100"]), all);
    let text = place.ok(&["eval", "run", "--data", "corpus"]);
    for line in ["loss ", "perplexity ", "bits per byte ", "text ", "model "] {
        assert!(text.lines().any(|l| l.starts_with(line)), "{text}");
    }
}

#[test]
fn mistakes_are_named_with_a_hint() {
    let place = trained();
    std::fs::write(place.path("empty.txt"), "").unwrap();
    for (args, expected) in [
        (&["nowhere", "--validation"][..], "error: nowhere: no such run or checkpoint\nhint: "),
        (&["run", "--data", "gone.txt"], "error: gone.txt: no such file or folder\nhint: "),
        (&["run", "--data", "empty.txt"], "error: empty.txt: found 1 file, all empty\nhint: "),
        (&["run"], "error: the following required arguments were not provided"),
        (&["run", "--validation", "--seq", "0"], "error: invalid value '0' for '--seq <N>'"),
    ] {
        let text = place.fails(2, &[&["eval"], args].concat());
        assert!(text.starts_with(expected), "{args:?}: {text}");
    }
    std::fs::remove_dir_all(place.path("run/data")).unwrap();
    let text = place.fails(2, &["eval", "run", "--validation"]);
    assert_eq!(text, "error: run/data holds no held-out text\nhint: name text to evaluate on: --data PATH\n");
}
