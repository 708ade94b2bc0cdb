//! A run that is stopped in any way continues as if it had not been.

mod common;

use common::{Place, damage};
use std::time::Duration;

#[test]
fn killed_at_any_moment_a_run_resumes_bit_identically() {
    let place = Place::new();
    // A checkpoint after every step: most kills hit one being written.
    let args =
        |dir| vec!["train", "run.toml", "--run-dir", dir, "--set", "checkpoint.every=1", "--set", "train.steps=40"];
    place.ok(&args("whole"));
    place.kill_until_done(|_| args("killed"));
    assert_eq!(place.trajectory("killed"), place.trajectory("whole"));
    assert_eq!(place.trajectory("whole").len(), 40);
}

#[test]
fn a_run_in_fp8_resumes_bit_identically_and_is_exported_and_generated_from() {
    let place = Place::new();
    let fp8 = ["--set", "precision.policy=fp8", "--set", "precision.fp8_weights=0"];
    let explained = place.ok(&[&["explain", "run.toml"][..], &fp8].concat());
    assert!(explained.contains("fp8_linear") && !explained.contains("forward linear "), "{explained}");
    let train = |dir, steps| {
        let args = ["train", "run.toml", "--run-dir", dir, "--set", "checkpoint.every=1", "--set", steps];
        [&args[..], &fp8].concat()
    };
    place.ok(&train("whole", "train.steps=12"));
    place.kill_until_done(|_| train("killed", "train.steps=12"));
    assert_eq!(place.trajectory("killed"), place.trajectory("whole"));
    let bf16 = ["--set", "train.steps=12", "--set", "precision.policy=bf16"];
    place.ok(&[&["train", "run.toml", "--run-dir", "bf16"][..], &bf16].concat());
    assert_ne!(place.trajectory("bf16"), place.trajectory("whole"));
    place.ok(&["generate", "whole", "--prompt", "a", "--max-tokens", "3", "--temperature", "0"]);
    assert!(place.ok(&["checkpoint", "export", "whole", "--out", "exported"]).contains(" in bf16"));
}

#[test]
fn an_interrupt_saves_and_the_same_command_resumes() {
    let place = Place::new();
    let args =
        |dir| vec!["train", "run.toml", "--run-dir", dir, "--set", "train.steps=200", "--set", "checkpoint.every=0"];
    place.ok(&args("whole"));
    let child = place
        .command(&args("stopped"))
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let lines = || std::fs::read_to_string(place.path("stopped/metrics.jsonl")).map_or(0, |text| text.lines().count());
    while lines() < 3 {
        std::thread::sleep(Duration::from_millis(5));
    }
    // SAFETY: sends a signal to our own child.
    unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(75));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("interrupted after step ") && text.contains("the same command again resumes"), "{text}");
    let text = place.ok(&args("stopped"));
    assert!(text.contains("finished 200 steps"), "{text}");
    assert_eq!(place.trajectory("stopped"), place.trajectory("whole"));
}

#[test]
fn a_damaged_checkpoint_is_named_and_the_one_before_it_used() {
    let place = Place::new();
    let args = ["train", "run.toml", "--run-dir", "run"];
    place.ok(&args);
    let whole = place.trajectory("run");
    damage(&place.path("run/checkpoints/step-00000020/model.safetensors"));
    let output = place.run(&args);
    assert!(output.status.success());
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("warning: checkpoint step 20 is damaged"), "{text}");
    assert!(text.contains("resuming at step 15"), "{text}");
    assert_eq!(place.trajectory("run"), whole);
}

#[test]
fn with_every_checkpoint_damaged_nothing_is_removed() {
    let place = Place::new();
    let args = ["train", "run.toml", "--run-dir", "run"];
    place.ok(&args);
    for step in [10, 15, 20] {
        damage(&place.path(&format!("run/checkpoints/step-{step:08}/model.safetensors")));
    }
    let text = place.fails(1, &args);
    assert!(text.starts_with("error: no checkpoint in run/checkpoints is whole"), "{text}");
    assert!(place.path("run/checkpoints/step-00000020/model.safetensors").exists());
}

#[test]
fn a_changed_config_is_refused_with_the_differences_and_fresh_keeps_the_old_run() {
    let place = Place::new();
    place.ok(&["train", "run.toml", "--run-dir", "run"]);
    let changed = ["train", "run.toml", "--run-dir", "run", "--set", "optimizer.lr=1e-3", "--set", "train.seq=16"];
    let text = place.fails(2, &changed);
    assert_eq!(
        text,
        "error: run holds a run with another config:\n  \
         train.seq: 32 before, 16 now\n  \
         optimizer.lr: 0.003 before, 0.001 now\n\
         hint: a run cannot change train.seq: undo that; with the rest it goes on: --change train.steps=N --change optimizer.lr=0.001 \
         (it is finished: N must be more than 20); or choose another --run-dir, or give --fresh to start over (the old run is kept in a folder inside)\n"
    );
    place.ok(&[&changed[..], &["--fresh"]].concat());
    assert!(place.path("run/old-1/checkpoints/step-00000020").exists());
    assert_eq!(place.trajectory("run").len(), 20);
}

#[test]
fn accumulation_may_change_under_a_reproducible_run() {
    let place = Place::new();
    let args =
        |dir, steps| vec!["train", "run.toml", "--run-dir", dir, "--set", "train.reproducible=true", "--set", steps];
    place.ok(&args("whole", "train.micro_batch=8"));
    place.ok(&[&args("split", "train.micro_batch=2")[..], &["--set", "checkpoint.keep=9"]].concat());
    for step in [15, 20] {
        std::fs::remove_dir_all(place.path(&format!("split/checkpoints/step-{step:08}"))).unwrap();
    }
    place.ok(&args("split", "train.micro_batch=4"));
    assert_eq!(place.trajectory("split"), place.trajectory("whole"));
}

#[test]
fn accumulation_may_change_under_any_run_and_rounding_is_all_it_changes() {
    let place = Place::new();
    let args = |dir, batch| vec!["train", "run.toml", "--run-dir", dir, "--set", "checkpoint.keep=9", "--set", batch];
    place.ok(&args("run", "train.micro_batch=8"));
    let losses = || -> Vec<f64> {
        place.trajectory("run").iter().map(|line| line.split(' ').nth(1).unwrap().parse().unwrap()).collect()
    };
    let whole = losses();
    for step in [15, 20] {
        std::fs::remove_dir_all(place.path(&format!("run/checkpoints/step-{step:08}"))).unwrap();
    }
    place.ok(&args("run", "train.micro_batch=2"));
    let split = losses();
    assert_eq!(split.len(), 20);
    assert!(split.iter().zip(&whole).all(|(a, b)| (a - b).abs() < 1e-4 * b), "{split:?} and {whole:?}");
}

#[test]
fn two_runs_in_one_directory_are_refused() {
    let place = Place::new();
    let long = ["train", "run.toml", "--run-dir", "run", "--set", "train.steps=100000"];
    let mut child = place.command(&long).stderr(std::process::Stdio::null()).spawn().unwrap();
    while !place.path("run/metrics.jsonl").exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let text = place.fails(2, &long);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(text, "error: run is in use by another process\nhint: wait for it, or choose another --run-dir\n");
}

#[test]
fn fresh_touches_nothing_but_the_run_and_gives_it_back_if_the_start_fails() {
    let place = Place::new();
    let args = ["train", "run.toml", "--run-dir", "."];
    place.ok(&args);
    let whole = place.trajectory(".");
    let text = place.fails(2, &[&args[..], &["--fresh", "--set", "data.paths=[\"nowhere\"]"]].concat());
    assert!(text.contains("nowhere"), "{text}");
    assert_eq!(place.trajectory("."), whole);
    assert!(place.path("corpus/0.txt").exists() && !place.path("old-1").exists());
    std::fs::write(place.path("mine.txt"), "keep").unwrap();
    place.ok(&[&args[..], &["--fresh"]].concat());
    assert!(place.path("mine.txt").exists() && place.path("old-1/metrics.jsonl").exists());
}

#[test]
fn the_checkpoint_itself_tells_what_it_was_made_with() {
    let place = Place::new();
    place.ok(&["train", "run.toml", "--run-dir", "run"]);
    std::fs::remove_file(place.path("run/run.toml")).unwrap();
    let text = place.fails(2, &["train", "run.toml", "--run-dir", "run", "--set", "train.seed=9"]);
    assert!(text.contains("train.seed: 0 before, 9 now"), "{text}");
}

#[test]
fn a_log_that_nobody_reads_does_not_end_a_run() {
    let place = Place::new();
    let mut child = place
        .command(&["train", "run.toml", "--run-dir", "run"])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stderr.take());
    assert!(child.wait().unwrap().success());
    assert_eq!(place.trajectory("run").len(), 20);
}

#[test]
fn other_text_than_the_run_began_with_is_refused_and_the_same_text_under_another_name_is_not() {
    let place = Place::new();
    place.ok(&["train", "run.toml", "--run-dir", "run"]);
    std::fs::create_dir(place.path("other")).unwrap();
    std::fs::copy(place.path("corpus/0.txt"), place.path("other/0.txt")).unwrap();
    let with = |paths| ["train", "run.toml", "--run-dir", "run", "--set", paths];
    let text = place.fails(2, &with("data.paths=[\"other\"]"));
    assert!(text.contains("holds text prepared from corpus ") && text.contains("the config now says other "), "{text}");
    assert!(text.contains("hint: undo the change"), "{text}");
    place.ok(&with("data.paths=[\"other/../corpus\"]"));
    // Text that is gone does not matter to a run that has packed it.
    std::fs::remove_dir_all(place.path("corpus")).unwrap();
    place.ok(&with("data.paths=[\"corpus\"]"));
}

#[test]
fn text_that_changes_before_the_first_checkpoint_is_prepared_anew() {
    let place = Place::new();
    let files = || {
        let text = std::fs::read_to_string(place.path("run/data/data.json")).unwrap();
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["files"].as_u64()
    };
    place.ok(&["data", "prepare", "run.toml", "--run-dir", "run"]);
    assert_eq!(files(), Some(8));
    for file in 1..8 {
        std::fs::remove_file(place.path(&format!("corpus/{file}.txt"))).unwrap();
    }
    place.ok(&["train", "run.toml", "--run-dir", "run"]);
    assert_eq!(files(), Some(1));
}
