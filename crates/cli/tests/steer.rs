//! A run that is steered: stopped by signals, taken back to an earlier step, extended, changed, looked at.

mod common;

use common::{CONFIG, Place};
use serde_json::Value;
use std::process::Stdio;
use std::time::Duration;

const TRAIN: [&str; 4] = ["train", "run.toml", "--run-dir", "run"];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&TRAIN[..], more].concat()
}

/// Both streams of a command that must succeed.
fn shown(place: &Place, args: &[&str]) -> (String, String) {
    let output = place.run(args);
    let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(output.status.success(), "{err}");
    (out, err)
}

fn events(place: &Place, kind: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(place.path("run/events.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).filter(|v: &Value| v["event"] == kind).collect()
}

#[test]
fn every_signal_that_asks_to_stop_saves_and_gives_exit_code_75() {
    let place = Place::new();
    for (n, signal) in [libc::SIGINT, libc::SIGTERM, libc::SIGUSR1].into_iter().enumerate() {
        let dir = format!("run-{n}");
        let args =
            ["train", "run.toml", "--run-dir", &dir, "--set", "train.steps=100000", "--set", "checkpoint.every=0"];
        let child = place.command(&args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let lines =
            || std::fs::read_to_string(place.path(&dir).join("metrics.jsonl")).map_or(0, |text| text.lines().count());
        while lines() < 3 {
            std::thread::sleep(Duration::from_millis(5));
        }
        // SAFETY: sends a signal to our own child.
        unsafe { libc::kill(child.id() as i32, signal) };
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(75), "{signal}: {text}");
        assert!(text.starts_with("interrupted after step ") && text.ends_with("again resumes\n"), "{text}");
        assert_eq!(std::fs::read_dir(place.path(&dir).join("checkpoints")).unwrap().count(), 1);
    }
    let help = place.ok(&["train", "--help"]);
    assert!(help.contains("75  interrupted"), "{help}");
}

#[test]
fn signals_of_two_kinds_save_and_a_hangup_under_nohup_is_no_signal() {
    let place = Place::new();
    let steps = || std::fs::read_to_string(place.path("run").join("metrics.jsonl")).map_or(0, |t| t.lines().count());
    let lockstep = env!("CARGO_BIN_EXE_lockstep");
    let line = format!("exec nohup {lockstep} train run.toml --run-dir run --set train.steps=100000 >out 2>err");
    let mut child = std::process::Command::new("sh").args(["-c", &line]).current_dir(place.path(".")).spawn().unwrap();
    // SAFETY: sends signals to our own child.
    let send = |signal| unsafe { libc::kill(child.id() as i32, signal) };
    let wait = |least: usize| {
        while steps() < least {
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    wait(3);
    send(libc::SIGHUP);
    wait(steps() + 5);
    send(libc::SIGUSR1);
    send(libc::SIGTERM);
    assert_eq!(child.wait().unwrap().code(), Some(75));
}

#[test]
fn a_finished_run_is_extended_and_later_resumes_keep_it() {
    let place = Place::new();
    let constant = CONFIG.replace("warmup_steps = 4", "warmup_steps = 4\nschedule = \"constant\"");
    place.config(&constant.replace("steps = 20", "steps = 40"));
    place.ok(&["train", "run.toml", "--run-dir", "whole"]);
    place.config(&constant);
    place.ok(&TRAIN);
    // From a constant schedule, more steps are the same run.
    let (_, err) = shown(&place, &with(&["--change", "train.steps=30"]));
    assert!(
        err.contains("from step 20 on: train.steps = 30, 20 before\n") && err.contains("resuming at step 20"),
        "{err}"
    );
    assert!(!err.contains("learning rate"), "{err}");
    let text = place.ok(&with(&["--change", "train.steps=40"]));
    assert!(text.contains("finished 40 steps"), "{text}");
    // Its first command again: nothing is left to do, and nothing is refused.
    let (text, err) = shown(&place, &TRAIN);
    assert!(text.contains("finished 40 steps"), "{text}");
    assert!(err.contains("train.steps = 40 since --change at step 30; 20 in the config does not count"), "{err}");
    let losses = |dir: &str| -> Vec<String> {
        place.trajectory(dir).iter().map(|line| line.split(' ').take(4).collect::<Vec<_>>().join(" ")).collect()
    };
    assert_eq!(losses("run"), losses("whole"));
    let changes: Value = serde_json::from_slice(&std::fs::read(place.path("run/changes.json")).unwrap()).unwrap();
    assert_eq!(changes["changes"][1], serde_json::json!({ "step": 30, "change": "train.steps=40" }));
    let event = &events(&place, "change")[0];
    assert_eq!((&event["step"], &event["key"], &event["now"]), (&20.into(), &"train.steps".into(), &"30".into()));
    let resolved = std::fs::read_to_string(place.path("run/run.toml")).unwrap();
    assert!(resolved.contains("steps = 40  # --change at step 30\n"), "{resolved}");
}

#[test]
fn what_a_run_may_change_is_taken_and_what_would_corrupt_it_is_refused() {
    let place = Place::new();
    place.ok(&TRAIN);
    let (_, err) = shown(&place, &with(&["--change", "train.steps=25", "--change", "optimizer.lr=1e-3"]));
    assert!(err.contains("from step 20 on: optimizer.lr = 0.001, 0.003 before\n"), "{err}");
    assert!(err.contains("the schedule with these values counts from here on: learning rate "), "{err}");
    let changes = [
        "optimizer.grad_clip=0.5",
        "optimizer.weight_decay=0",
        "optimizer.schedule=constant",
        "optimizer.beta2=0.99",
        "precision.policy=bf16",
        "checkpoint.every=2",
        "train.validate_every=0",
    ];
    for (change, steps) in changes.iter().zip(26..) {
        place.ok(&with(&["--change", change, "--change", &format!("train.steps={steps}")]));
    }
    // All of them count at once.
    let text = place.ok(&with(&["--change", "train.steps=33"]));
    assert!(text.contains("finished 33 steps"), "{text}");
    assert!(place.trajectory("run").last().unwrap().contains(" 0.001 "), "{:?}", place.trajectory("run").last());
    for (change, why) in [
        ("model.layers=3", "its weights belong to the model"),
        ("train.seq=16", "samples would be left out or seen twice"),
        ("train.seed=9", "samples would be left out or seen twice"),
        ("train.global_batch=16", "samples would be left out or seen twice"),
        ("data.validation_fraction=0.2", "samples would be left out or seen twice"),
        ("optimizer.name=lion", "its optimizer state belongs to"),
    ] {
        let text = place.fails(2, &with(&["--change", change]));
        let key = change.split('=').next().unwrap();
        assert!(text.starts_with(&format!("error: --change {key}: a run that has begun cannot go from ")), "{text}");
        assert!(text.contains(why), "{change}: {text}");
    }
    let text = place.fails(2, &with(&["--change", "train.steps=7"]));
    assert!(text.contains("train.steps = 7 is less than the 33 steps that the run has done"), "{text}");
    let text = place.fails(2, &["train", "run.toml", "--run-dir", "new", "--change", "train.steps=7"]);
    assert!(text.contains("no run to change\nhint: give the values with --set"), "{text}");
    let text = place.fails(2, &with(&["--change", "train.stesp=7"]));
    assert!(text.contains("--> --change train.stesp=7\nhint: did you mean `steps`?"), "{text}");
}

#[test]
fn a_changed_run_keeps_the_micro_batch_that_it_began_with() {
    let place = Place::new();
    place.ok(&with(&["--set", "train.micro_batch=2"]));
    place.ok(&with(&["--change", "train.steps=22"]));
    let resolved = std::fs::read_to_string(place.path("run/run.toml")).unwrap();
    assert!(resolved.contains("\nmicro_batch = 2 "), "{resolved}");
    // A key by an old name is the same key.
    let (_, err) = shown(&place, &with(&["--change", "parallel.patience=30", "--change", "train.steps=23"]));
    assert!(err.contains("from step 22 on: parallel.timeout = 30.0, 60.0 before"), "{err}");
}

#[test]
fn a_change_of_a_finished_run_is_refused_and_an_equal_one_is_recorded_once() {
    let place = Place::new();
    place.ok(&TRAIN);
    let records = || {
        ["changes.json", "events.jsonl", "starts.jsonl", "run.toml"]
            .map(|name| std::fs::read(place.path("run").join(name)).unwrap_or_default())
    };
    let before = records();
    for dry in [&[][..], &["--dry-run"]] {
        let args = [&with(&["--change", "optimizer.lr=1e-3", "--change", "checkpoint.every=2"]), dry].concat();
        assert_eq!(
            place.fails(2, &args),
            "error: --change optimizer.lr=1e-3, checkpoint.every=2: the run in run is finished, all 20 steps are done: it would \
             have no effect, and nothing was recorded\nhint: give --change train.steps=N too, with N more than 20, to go on with \
             it; or take the run back with --resume-from STEP (`lockstep checkpoint list` shows which there are)\n"
        );
        assert_eq!(records(), before);
    }
    // Equal to what the run has: nothing to refuse, nothing to record.
    assert!(place.ok(&with(&["--change", "optimizer.lr=3e-3"])).contains("finished 20 steps"));
    assert!(!place.path("run/changes.json").exists() && events(&place, "change").is_empty());
    let changed = || -> Vec<String> {
        let file: Value = serde_json::from_slice(&std::fs::read(place.path("run/changes.json")).unwrap()).unwrap();
        file["changes"].as_array().unwrap().iter().map(|c| c["change"].as_str().unwrap().to_owned()).collect()
    };
    let more = with(&["--change", "train.steps=22", "--change", "optimizer.lr=2e-3", "--change", "optimizer.lr=1e-3"]);
    for _ in 0..2 {
        assert!(place.ok(&more).contains("finished 22 steps"));
        assert_eq!(changed(), ["train.steps=22", "optimizer.lr=1e-3"]);
    }
    // Changed at a step whose checkpoint does not know of it: the run ends where it is, and the command is repeated.
    std::fs::remove_dir_all(place.path("run")).unwrap();
    place.ok(&TRAIN);
    place.ok(&with(&["--resume-from", "10", "--set", "train.steps=20", "--change", "train.steps=10"]));
    for _ in 0..2 {
        assert!(place.ok(&with(&["--change", "train.steps=10"])).contains("finished 10 steps"));
        assert_eq!((changed().len(), events(&place, "change").len()), (1, 1));
    }
}

#[test]
fn going_back_to_a_step_undoes_what_was_changed_at_it() {
    let place = Place::new();
    place.ok(&TRAIN);
    let whole = place.trajectory("run");
    place.ok(&with(&["--resume-from", "10", "--change", "optimizer.lr=1e-3"]));
    assert_ne!(place.trajectory("run"), whole);
    // Without --resume-from the change stays.
    assert!(shown(&place, &TRAIN).0.contains("finished 20 steps"));
    let (_, err) = shown(&place, &with(&["--resume-from", "10"]));
    let expected = "warning: optimizer.lr=1e-3 was changed at step 10, to which the run goes back: it is undone; --change makes it \
                    again\n";
    assert!(err.contains(expected), "{err}");
    assert_eq!(place.trajectory("run"), whole);
}

#[test]
fn the_hint_of_another_config_is_a_command_that_works() {
    let place = Place::new();
    place.ok(&TRAIN);
    let other = |steps: &str, lr: &str| place.config(&CONFIG.replace("steps = 20", steps).replace("lr = 3e-3", lr));
    // Fewer steps than are done cannot be offered.
    other("steps = 10", "lr = 3e-3");
    let text = place.fails(2, &TRAIN);
    assert!(text.contains("train.steps: 20 before, 10 now\nhint: undo these changes to resume it, choose"), "{text}");
    other("steps = 10", "lr = 1e-3");
    let text = place.fails(2, &TRAIN);
    let expected = "hint: a run cannot change train.steps to 10, 20 steps are done: undo that; with the rest it goes on: --change \
                    train.steps=N --change optimizer.lr=0.001 (it is finished: N must be more than 20); or choose";
    assert!(text.contains(expected), "{text}");
    other("steps = 20", "lr = 1e-3");
    let text = place.fails(2, &TRAIN);
    let expected =
        "go on with the new values from here on: --change train.steps=N --change optimizer.lr=0.001 (it is finished: N";
    assert!(text.contains(expected), "{text}");
    let args = with(&["--change", "train.steps=21", "--change", "optimizer.lr=0.001"]);
    assert!(place.ok(&args).contains("finished 21 steps"));
}

#[test]
fn a_config_file_with_more_steps_is_told_which_change_to_give() {
    let place = Place::new();
    place.ok(&TRAIN);
    place.config(&CONFIG.replace("steps = 20", "steps = 24").replace("lr = 3e-3", "lr = 3e-3\nschedule = \"linear\""));
    let text = place.fails(2, &TRAIN);
    assert!(text.contains("train.steps: 20 before, 24 now"), "{text}");
    let flags = "--change train.steps=24 --change 'optimizer.schedule=\"linear\"'";
    assert!(text.contains(&format!("hint: go on with the new values from here on: {flags}; or undo")), "{text}");
    let args = with(&["--change", "train.steps=24", "--change", "optimizer.schedule=\"linear\""]);
    assert!(place.ok(&args).contains("finished 24 steps"));
    assert!(place.ok(&TRAIN).contains("finished 24 steps"));
}

#[test]
fn a_run_goes_back_to_a_step_and_nothing_is_lost() {
    let place = Place::new();
    place.ok(&TRAIN);
    let whole = place.trajectory("run");
    let text = place.fails(2, &with(&["--resume-from", "12"]));
    assert_eq!(text, "error: run has no checkpoint of step 12\nhint: there are those of steps 10, 15 and 20\n");
    let (_, err) = shown(&place, &with(&["--resume-from", "10", "--change", "optimizer.lr=1e-3"]));
    let expected = "back to step 10: 2 checkpoints of later steps and the metrics after it are kept in run/old-1\n";
    assert!(err.contains(expected) && err.contains("resuming at step 10"), "{err}");
    assert_eq!(place.trajectory("run")[..10], whole[..10]);
    assert_ne!(place.trajectory("run")[10..], whole[10..]);
    // What was set aside is a run of its own.
    assert_eq!(place.trajectory("run/old-1"), whole);
    assert!(place.ok(&["generate", "run/old-1", "--prompt", "line", "--max-tokens", "2"]).starts_with("line"));
    assert_eq!(events(&place, "set_aside")[0]["checkpoints"], serde_json::json!([15, 20]));
    // With the value changed back, the run is the one that it was.
    let (_, err) = shown(&place, &with(&["--resume-from", "10", "--change", "optimizer.lr=3e-3"]));
    assert!(err.contains("kept in run/old-2"), "{err}");
    assert_eq!(place.trajectory("run"), whole);
}

#[test]
fn lost_lines_of_metrics_are_noticed_once() {
    let place = Place::new();
    place.ok(&TRAIN);
    let path = place.path("run/metrics.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    let kept: String = text.lines().filter(|l| !l.contains("\"step\":7,")).take(16).map(|l| format!("{l}\n")).collect();
    std::fs::write(&path, kept).unwrap();
    let more = with(&["--change", "train.steps=22"]);
    let (_, err) = shown(&place, &more);
    assert!(err.contains("warning: metrics.jsonl has lost the lines of step 7;"), "{err}");
    assert!(err.contains("warning: metrics.jsonl has lost the lines of steps 18 to 20;"), "{err}");
    let gap = &events(&place, "metrics_gap")[1];
    assert_eq!((&gap["from"], &gap["to"], &gap["step"]), (&18.into(), &20.into(), &20.into()));
    let (_, err) = shown(&place, &more);
    assert!(!err.contains("warning"), "{err}");
}

#[test]
fn a_smoke_test_shortens_the_warmup_and_validation_can_be_skipped() {
    let place = Place::new();
    let (out, err) = shown(&place, &with(&["--set", "train.steps=1"]));
    let expected = "warning: optimizer.warmup_steps = 4 is more than train.steps = 1: the warmup is shortened to 1\n";
    assert!(err.starts_with(expected), "{err}");
    assert!(out.contains("finished 1 step; checkpoint "), "{out}");
    let resolved = std::fs::read_to_string(place.path("run/run.toml")).unwrap();
    // A quarter of the sequences trained on.
    assert!(resolved.contains("validation_sequences = 2  # default\n"), "{resolved}");
    // The same again has nothing new to say of its schedule.
    let (_, err) = shown(&place, &with(&["--set", "train.steps=1"]));
    assert!(!err.contains("warning"), "{err}");
    // A smoke test becomes the run: there is room again for the warmup, and for a validation that tells something.
    let (out, err) = shown(&place, &with(&["--change", "train.steps=6"]));
    assert!(
        out.contains("finished 6 steps") && err.contains("optimizer.warmup_steps = 4, 1 before (follows)"),
        "{err}"
    );
    assert!(err.contains("from step 1 on: train.steps = 6, 1 before\n"), "what the run had, not the file: {err}");
    assert!(err.contains("from step 1 on: train.validation_sequences = 10, 2 before (follows)\n"), "{err}");
    // Fewer steps, or fewer between two validations, leave it as it is.
    let short = ["train", "run.toml", "--run-dir", "short"];
    place.ok(&short);
    let fewer = ["--resume-from", "10", "--change", "train.steps=11", "--change", "train.validate_every=1"];
    place.ok(&[&short[..], &fewer].concat());
    let resolved = std::fs::read_to_string(place.path("short/run.toml")).unwrap();
    assert!(resolved.contains("validation_sequences = 10  # --change at step 10\n"), "{resolved}");
    let args = ["train", "run.toml", "--run-dir", "none", "--set", "train.validation_sequences=0"];
    let (out, err) = shown(&place, &args);
    assert!(!out.contains("validation") && !err.contains("validation loss"), "{out}{err}");
    let metrics = std::fs::read_to_string(place.path("none/metrics.jsonl")).unwrap();
    assert!(!metrics.contains("val_loss"), "{metrics}");
    // Validation text there is all the same.
    place.ok(&["eval", "none", "--validation"]);
}

#[test]
fn what_to_try_next_works_as_it_is_printed() {
    let place = Place::new();
    let args = ["train", "run.toml", "--run-dir", "my run's", "--set", "data.validation_fraction=0"];
    let (_, err) = shown(&place, &args);
    let lines: Vec<&str> = err.split("try next:\n").nth(1).unwrap().lines().collect();
    assert_eq!(lines.len(), 2, "no validation is offered where nothing is held out: {err}");
    let (_, err) = shown(&place, &TRAIN);
    for line in lines.into_iter().chain(err.split("try next:\n").nth(1).unwrap().lines()) {
        let output = std::process::Command::new("sh").args(["-c", line]).current_dir(place.path(".")).output().unwrap();
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn a_quiet_run_says_its_last_line_and_warnings_only() {
    let place = Place::new();
    let (out, err) = shown(&place, &with(&["--quiet", "--set", "train.steps=3"]));
    assert_eq!(out, "finished 3 steps; checkpoint run/checkpoints/step-00000003, metrics run/metrics.jsonl\n");
    // Of eight documents one is more than was asked for.
    let held_out = "data.validation_fraction = 0.05, and 12.5% of the tokens are held out: 1 of 8 documents";
    assert!(err.contains(held_out), "{err}");
    let warnings: Vec<&str> = err.lines().filter(|line| !line.contains("data.validation_fraction")).collect();
    assert!(err.starts_with("warning: optimizer.warmup_steps = 4") && warnings.len() == 1, "{err}");
}

#[test]
fn a_dry_run_says_what_would_be_done_and_does_nothing() {
    let place = Place::new();
    let dry = with(&["--dry-run"]);
    let text = place.ok(&dry);
    assert!(text.starts_with("run     run: would start\n"), "{text}");
    let explained: Value = serde_json::from_str(&place.ok(&["explain", "run.toml", "--format", "json"])).unwrap();
    for part in [
        "8 files, ".to_owned(),
        "steps   20 of 20, in sequences of 32 tokens; 5.12K tokens in all\n".to_owned(),
        format!("({} bytes)", explained["memory"]["total_bytes"]),
        "dry run: nothing was started or written\n".to_owned(),
    ] {
        assert!(text.contains(&part), "{part}: {text}");
    }
    assert!(!place.path("run").exists());
    place.ok(&TRAIN);
    let before = std::fs::read(place.path("run/events.jsonl")).unwrap();
    let text = place.ok(&with(&["--dry-run", "--resume-from", "10", "--change", "train.steps=30"]));
    assert!(text.contains("would resume at step 10") && text.contains("train.steps = 30, 20 before"), "{text}");
    assert!(text.contains("2 later checkpoints would be set aside") && text.contains("prepared, "), "{text}");
    assert_eq!(std::fs::read(place.path("run/events.jsonl")).unwrap(), before);
    assert!(!place.path("run/old-1").exists());
    let text = place.fails(2, &with(&["--dry-run", "--set", "train.seq=16"]));
    assert!(text.contains("train.seq: 32 before, 16 now"), "{text}");
    place.config(&CONFIG.replace("\"corpus\"", "\"corpse\""));
    let text = place.fails(2, &["train", "run.toml", "--run-dir", "other", "--dry-run"]);
    assert!(text.starts_with("error: corpse: no such file or folder\n"), "{text}");
}

#[test]
fn checkpoints_are_listed_with_their_validation_loss() {
    let place = Place::new();
    place.ok(&with(&["--set", "checkpoint.every=8"]));
    let list = |format: &str| place.ok(&["checkpoint", "list", "run", "--format", format]);
    let found: Value = serde_json::from_str(&list("json")).unwrap();
    let found = found["checkpoints"].as_array().unwrap();
    let steps: Vec<u64> = found.iter().map(|c| c["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [8, 16, 20]);
    let last: f64 = place.trajectory("run").last().unwrap().rsplit(' ').next().unwrap().parse().unwrap();
    assert_eq!((&found[0]["val_loss"], &found[2]["val_loss"]), (&Value::Null, &last.into()));
    assert!(found.iter().all(|c| c["bytes"].as_u64() > Some(600_000) && c["unix_s"].as_f64() > Some(1.7e9)));
    let text = list("text");
    assert_eq!(text.lines().count(), 4, "{text}");
    assert!(text.contains(" UTC ") && text.contains(&format!("{last:.4}")), "{text}");
    std::fs::write(place.path("run/checkpoints/step-00000016/model.safetensors"), "cut").unwrap();
    assert!(list("text").lines().nth(2).unwrap().ends_with("not whole"), "{}", list("text"));
    let text = place.fails(2, &["checkpoint", "list", "nowhere"]);
    assert!(text.starts_with("error: nowhere: no such run or checkpoint\nhint: "), "{text}");
}
