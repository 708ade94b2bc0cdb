//! Runs of several ranks, from whole commands: stopped, damaged, continued in other layouts, and used on one rank.

mod common;

use common::{Place, damage};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Arguments that train with these keys changed.
fn train<'a>(dir: &'a str, set: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["train", "run.toml", "--run-dir", dir];
    set.iter().for_each(|s| args.extend(["--set", s]));
    args
}

const SQUARE: [&str; 3] = ["parallel.dp=2", "parallel.tp=2", "train.micro_batch=1"];

/// Every start must go on from the last checkpoint that was told of, or a later one.
fn check_nothing_is_lost(place: &Place, dir: &str) {
    let events = fs::read_to_string(place.path(dir).join("events.jsonl")).unwrap();
    let mut last = 0;
    for event in events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        let step = event["step"].as_u64().unwrap();
        match event["event"].as_str().unwrap() {
            "checkpoint" => last = step,
            "start" => assert!(step >= last, "started at {step} after checkpoint {last}"),
            _ => {}
        }
    }
}

#[test]
fn killed_at_any_moment_a_run_of_several_ranks_resumes_bit_identically() {
    let place = Place::new();
    let set = [&SQUARE[..], &["checkpoint.every=1", "train.steps=30"]].concat();
    place.ok(&train("whole", &set));
    place.kill_until_done(|_| train("killed", &set));
    assert_eq!(place.trajectory("killed"), place.trajectory("whole"));
    assert_eq!(place.trajectory("whole").len(), 30);
    check_nothing_is_lost(&place, "killed");
}

#[test]
fn killed_at_any_moment_a_reproducible_run_resumes_bit_identically_in_any_layout() {
    let place = Place::new();
    let common = ["checkpoint.every=1", "train.steps=30", "train.reproducible=true"];
    let layouts: [&[&str]; 4] = [
        &["parallel.dp=2"],
        &["parallel.pp=2", "train.micro_batch=2"],
        &["parallel.dp=4", "parallel.zero=3"],
        &["train.micro_batch=4"],
    ];
    place.ok(&train("whole", &common));
    place.kill_until_done(|attempt| train("killed", &[&common, layouts[attempt as usize % 4]].concat()));
    assert_eq!(place.trajectory("killed"), place.trajectory("whole"));
    check_nothing_is_lost(&place, "killed");
}

#[test]
fn a_damaged_file_of_one_rank_is_named_and_the_checkpoint_before_it_used() {
    let place = Place::new();
    let args = train("run", &SQUARE);
    place.ok(&args);
    let whole = place.trajectory("run");
    let cut = |path: &Path| {
        let bytes = fs::read(path).unwrap();
        fs::write(path, &bytes[..bytes.len() - 5]).unwrap();
    };
    type Harm = fn(&Path);
    let cases: [(&str, Harm, &str); 3] = [
        ("model-00001.safetensors", damage, "checksum differs"),
        ("optimizer-00000.safetensors", cut, "bytes instead of "),
        ("model-00000.safetensors", |path| fs::remove_file(path).unwrap(), "missing"),
    ];
    for (file, harm, expected) in cases {
        harm(&place.path("run/checkpoints/step-00000020").join(file));
        let output = place.run(&args);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{text}");
        let warning = text.lines().find(|line| line.contains("warning: ")).unwrap_or_else(|| panic!("{text}"));
        assert!(warning.contains(&format!("checkpoint step 20 is damaged ({file}: ")), "{warning}");
        assert!(warning.contains(expected) && warning.ends_with("using step 15"), "{warning}");
        assert!(text.contains("resuming at step 15"), "{text}");
        assert_eq!(place.trajectory("run"), whole);
    }
}

#[test]
fn a_run_of_several_ranks_is_evaluated_and_continued_on_one() {
    let place = Place::new();
    place.ok(&train("run", &["parallel.dp=2", "parallel.pp=2", "train.micro_batch=1", "train.reproducible=true"]));
    place.ok(&train("one", &["train.reproducible=true"]));
    assert_eq!(place.trajectory("run"), place.trajectory("one"));
    let object = |args: &[&str]| -> Value { serde_json::from_str(&place.ok(args)).unwrap() };
    let loss = |dir| object(&["eval", dir, "--validation", "--format", "json"])["loss"].clone();
    assert_eq!(loss("run"), loss("one"));
    let last = place.trajectory("run").pop().unwrap();
    assert!(last.ends_with(&format!(" {}", loss("run"))), "{last}");
    let greedy = |dir| ["generate", dir, "--prompt", "line", "--temperature", "0", "--format", "json"];
    let text = |dir| object(&greedy(dir))["text"].clone();
    assert_eq!(text("run"), text("one"));
    assert_eq!(text("run/checkpoints/step-00000010"), text("one/checkpoints/step-00000010"));

    // Of split matrices too, and where a layout splits the vocabulary and the moments.
    let split = ["parallel.dp=2", "parallel.zero=1", "parallel.tp=4", "train.micro_batch=1"];
    place.ok(&train("split", &split));
    let last = place.trajectory("split").pop().unwrap();
    let (logged, loss) = (last.rsplit(' ').next().unwrap().parse::<f64>().unwrap(), loss("split").as_f64().unwrap());
    assert!((loss - logged).abs() < 1e-5 * logged, "{loss} and {logged}");
    place.ok(&greedy("split"));
}
