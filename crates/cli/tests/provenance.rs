//! What a run directory says of how it came about; runs that are repeated, listed and compared.

mod common;

use common::{Place, signal, wait_for_steps};
use serde_json::Value;
use std::fs;
use std::process::Stdio;

fn starts(place: &Place, run: &str) -> Vec<Value> {
    let text = fs::read_to_string(place.path(run).join("starts.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn every_start_is_recorded_with_its_reason_the_binary_and_the_command() {
    let place = Place::new();
    let train = ["train", "run.toml", "--quiet", "--run-dir", "run"];
    let mut endless = place.command(&[&train[..], &["--set", "train.steps=100000"]].concat());
    let child = endless.env("SLURM_JOB_ID", "4711").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_for_steps(&place, "run", 7);
    signal(child.id() as i32, libc::SIGTERM);
    let mut child = child;
    assert_eq!(child.wait().unwrap().code(), Some(75));
    let mut again = endless.spawn().unwrap();
    let before = place.trajectory("run").len();
    wait_for_steps(&place, "run", before + 6);
    again.kill().unwrap();
    again.wait().unwrap();
    let steps = (place.trajectory("run").len() + 3).to_string();
    let fewer = format!("train.steps={steps}");
    place.ok(&[&train[..], &["--set", "train.steps=100000", "--change", &fewer]].concat());
    let all = starts(&place, "run");
    let reasons: Vec<&str> = all.iter().map(|start| start["reason"].as_str().unwrap()).collect();
    assert_eq!(reasons, ["new run", "resumed after an interrupt", "resumed after a failure or a kill"]);
    assert_eq!(all[0]["step"], 0);
    assert!(all[1]["step"].as_u64().unwrap() >= 7 && all[2]["step"].as_u64() >= all[1]["step"].as_u64());
    assert_eq!(all[2]["changed"][0]["key"], "train.steps");
    assert_eq!((&all[0]["slurm"]["SLURM_JOB_ID"], &all[2]["slurm"]["SLURM_JOB_ID"]), (&"4711".into(), &Value::Null));
    for start in &all {
        let command = start["command"].as_array().unwrap();
        assert!(command[0].as_str().unwrap().ends_with("lockstep") && command[1] == "train", "{start}");
        assert_eq!(start["binary_xxh3"].as_str().unwrap().len(), 32);
        assert_eq!(start["hosts"].as_array().unwrap().len(), 1);
        assert_eq!((&start["data"], &start["program"]), (&all[0]["data"], &all[0]["program"]));
        assert!(start["build"]["rustc"].as_str().unwrap().starts_with("rustc "), "{start}");
        assert!(start["build"]["commit"].is_null() || start["build"]["commit"].as_str().unwrap().len() == 40);
    }
    let given = fs::read_to_string(place.path("run/given.toml")).unwrap();
    assert_eq!(given, fs::read_to_string(place.path("run.toml")).unwrap());
    // It is no run of one config.
    let text = place.fails(2, &["train", "--from", "run", "--run-dir", "again"]);
    assert!(text.contains("run was changed at step ") && text.contains("\nhint: "), "{text}");
}

#[test]
fn a_run_is_repeated_from_its_directory_to_the_bit_and_compared() {
    let place = Place::new();
    place.ok(&["train", "run.toml", "--quiet", "--run-dir", "runs/one", "--set", "optimizer.lr=2e-3"]);
    // The config is not needed any more.
    fs::remove_file(place.path("run.toml")).unwrap();
    place.ok(&["train", "--from", "runs/one", "--quiet", "--run-dir", "runs/two"]);
    assert_eq!(place.trajectory("runs/two"), place.trajectory("runs/one"));
    place.ok(&["train", "--from", "runs/one", "--quiet", "--run-dir", "runs/three", "--set", "optimizer.lr=1e-3"]);
    let differ = |a: &str, b: &str| -> Vec<Value> {
        let json: Value = serde_json::from_str(&place.ok(&["diff", a, b, "--format", "json"])).unwrap();
        json["differences"].as_array().unwrap().clone()
    };
    let what = |all: &[Value], of: &str| -> Vec<String> {
        let mine = all.iter().filter(|d| d["of"] == of);
        mine.map(|d| d["what"].as_str().unwrap().to_owned()).collect()
    };
    let same = differ("runs/one", "runs/two");
    assert_eq!(what(&same, "config"), ["data.prepared"]);
    assert_eq!(same.len(), 1, "{same:?}");
    let other = differ("runs/two", "runs/three");
    assert_eq!(what(&other, "config"), ["optimizer.lr"]);
    assert_eq!(what(&other, "data").len() + what(&other, "code").len(), 0);
    assert_eq!(what(&other, "result")[0], "loss at step 2, the first that differs");
    let text = place.ok(&["diff", "runs/two", "runs/three"]);
    assert!(text.contains("optimizer.lr") && text.contains("0.002") && text.contains("0.001"), "{text}");
    assert_eq!(place.ok(&["diff", "runs/two", "runs/two"]), "no difference in config, data, code or result\n");

    let runs: Value = serde_json::from_str(&place.ok(&["runs", "--format", "json"])).unwrap();
    let runs = runs["runs"].as_array().unwrap();
    let paths: Vec<&str> = runs.iter().map(|run| run["path"].as_str().unwrap()).collect();
    assert_eq!(paths, ["runs/one", "runs/three", "runs/two"]);
    for run in runs {
        assert_eq!((&run["state"], &run["step"], &run["steps"]), (&"finished".into(), &20.into(), &20.into()));
        assert!(run["loss"].as_f64().unwrap() > 0.0 && run["tokens_per_s"].as_f64().unwrap() > 0.0);
    }
    let validations = runs[0]["validations"].as_array().unwrap();
    assert_eq!(validations[0]["step"], 0);
    assert_eq!(validations.last().unwrap()["val_loss"], runs[0]["val_loss"]);
    assert!(runs[0]["hours"].as_f64().unwrap() > 0.0 && runs[0]["gpu_hours"].is_null(), "{}", runs[0]);
    let text = place.ok(&["runs", "runs"]);
    assert!(text.contains("best (step)") && text.contains("hours") && !text.contains("GPU-hours"), "{text}");
    assert!(text.contains("finished") && text.contains("20/20"), "{text}");
    let text = place.fails(2, &["diff", "runs/one", "corpus"]);
    assert!(text.starts_with("error: corpus is no run directory: "), "{text}");
    let text = place.fails(2, &["train", "--from", "corpus", "--run-dir", "x"]);
    assert!(text.starts_with("error: corpus is no run directory\nhint: "), "{text}");
}
