//! Poisoned documents in the training data: what the spike policy skips, rolls back and leaves out.

mod common;
mod launched;
mod layouts;

use common::Place;
use launched::{end, ranks_of, spawn};
use lockstep_ir::counter;
use serde_json::Value;
use std::fs;
use std::thread::sleep;
use std::time::Duration;

/// Tokens of a document, its EOS token included: as many as a sequence has, so that every sample is one document.
const SEQ: usize = 32;
const RECORDS: u64 = 2400;

const CONFIG: &str = "\
[model]
vocab_size = 256
layers = 2
dim = 48
heads = 4
ffn = 96

[data]
paths = [\"records.jsonl\"]

[train]
steps = 110
seq = 32
global_batch = 8
micro_batch = 2
threads = 1
validate_every = 0

[optimizer]
lr = 1e-2
warmup_steps = 10
grad_clip = 0.0

[spikes]
skip = true
window = 16
skips = 2

[checkpoint]
every = 10
";

/// A document as a line of JSON.
fn line(text: &str) -> String {
    assert_eq!(text.len(), SEQ - 1);
    format!("{{\"text\": \"{text}\"}}\n")
}

fn sound(record: u64) -> String {
    let (a, b) = (record % 97, record % 53);
    line(&format!("{a:>3} plus {b:>3} is {:>3}, and on... ", a + b)[..SEQ - 1])
}

fn poison(record: u64) -> String {
    let letter = |i: u64| (b'A' + (counter::bits(record, i) % 26) as u8) as char;
    line(&(0..SEQ as u64 - 1).map(letter).collect::<String>())
}

/// The records of a step, counted from 1.
fn records(place: &Place, step: u64) -> Vec<u64> {
    let text = place.ok(&["data", "inspect", "run.toml", "--step", &step.to_string(), "--format", "json"]);
    let json: Value = serde_json::from_str(&text).unwrap();
    let samples = json["step"]["samples"].as_array().unwrap();
    samples.iter().map(|sample| sample["documents"][0]["record"].as_u64().unwrap()).collect()
}

/// A folder with `records.jsonl`, in which all documents of these steps are poisoned; `clean.jsonl` has none.
fn poisoned(steps: &[u64]) -> Place {
    let place = Place::new();
    place.config(CONFIG);
    let clean: Vec<String> = (0..RECORDS).map(sound).collect();
    for name in ["records.jsonl", "clean.jsonl"] {
        fs::write(place.path(name), clean.concat()).unwrap();
    }
    place.ok(&["data", "prepare", "run.toml"]);
    let bad: Vec<u64> = steps.iter().flat_map(|step| records(&place, *step)).collect();
    fs::remove_dir_all(place.path("runs")).unwrap();
    let all =
        clean.into_iter().zip(1..).map(|(line, record)| if bad.contains(&record) { poison(record) } else { line });
    fs::write(place.path("records.jsonl"), all.collect::<String>()).unwrap();
    place
}

fn train<'a>(dir: &'a str, set: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["train", "run.toml", "--quiet", "--run-dir", dir];
    args.extend(set.iter().flat_map(|set| ["--set", set]));
    args
}

const CLEAN: &str = "data.paths=[\"clean.jsonl\"]";

/// The lines of one of a run's files.
fn lines(place: &Place, file: &str) -> Vec<Value> {
    let text = fs::read_to_string(place.path(file)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn last_loss(place: &Place, dir: &str) -> f64 {
    lines(place, &format!("{dir}/metrics.jsonl")).last().unwrap()["val_loss"].as_f64().unwrap()
}

/// Steps and kinds of the events of spikes.
fn spikes(place: &Place, dir: &str) -> Vec<(String, u64)> {
    let events = lines(place, &format!("{dir}/events.jsonl")).into_iter();
    let told = events.map(|v| (v["event"].as_str().unwrap().to_owned(), v["step"].as_u64().unwrap_or(0)));
    told.filter(|(kind, _)| ["skipped", "roll_back"].contains(&kind.as_str())).collect()
}

fn roll_backs(place: &Place, dir: &str) -> Vec<Value> {
    let text = fs::read(place.path(dir).join("roll_backs.json")).unwrap();
    serde_json::from_slice::<Value>(&text).unwrap()["roll_backs"].as_array().unwrap().clone()
}

/// Steps whose documents are poisoned: one alone, and near the end as many as roll a run back, with one more.
const POISONED: [u64; 4] = [60, 104, 105, 106];

#[test]
fn a_run_with_poisoned_documents_ends_as_the_clean_one_on_every_layout() {
    let place = poisoned(&POISONED);
    place.ok(&train("clean", &[CLEAN]));
    let clean = last_loss(&place, "clean");
    assert!(spikes(&place, "clean").is_empty() && !place.path("clean/roll_backs.json").exists());
    place.ok(&train("without", &["spikes.skip=false"]));
    let off = |loss: f64| loss / clean - 1.0;
    assert!(off(last_loss(&place, "without")) > 0.01, "{}", off(last_loss(&place, "without")));
    assert!(lines(&place, "without/metrics.jsonl").iter().all(|line| line.get("loss_limit").is_none()));

    for (dir, layout) in [("one", ""), ("dp", "parallel.dp=2"), ("pp", "parallel.pp=2")] {
        let layout: Vec<&str> = Some(layout).filter(|l| !l.is_empty()).into_iter().collect();
        place.ok(&train(dir, &layout));
        // After the roll-back, the data of step 106 are those of step 101.
        let kinds = ["skipped", "skipped", "skipped", "roll_back", "skipped"].map(str::to_owned);
        let told: Vec<(String, u64)> = kinds.into_iter().zip([60, 104, 105, 100, 101]).collect();
        assert_eq!(spikes(&place, dir), told, "{dir}");
        let found = roll_backs(&place, dir);
        let [first] = &found[..] else { panic!("{found:?}") };
        // The 8 sequences of steps 101 to 105.
        assert_eq!(
            (&first["to"], &first["from"], &first["samples"], &first["first_sample"]),
            (&100.into(), &105.into(), &40.into(), &800.into())
        );
        assert!(off(last_loss(&place, dir)).abs() < 0.01, "{dir}: {}", off(last_loss(&place, dir)));
        let metrics = lines(&place, &format!("{dir}/metrics.jsonl"));
        assert_eq!(
            metrics.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(),
            (1..=110).collect::<Vec<_>>()
        );
        let skipped: Vec<&Value> = metrics.iter().filter(|line| line["skipped"] == 1).collect();
        assert_eq!(skipped.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), [60, 101]);
        assert!(skipped.iter().all(|line| line["loss"].as_f64() > line["loss_limit"].as_f64()));
    }
    // What is left out is left out of what is shown too.
    let shown = place.ok(&["data", "inspect", "one", "--step", "101", "--format", "json"]);
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["step"]["samples"][0]["index"], 840);
}

#[test]
fn kills_change_nothing_and_another_layout_leaves_out_the_same() {
    let place = poisoned(&POISONED);
    let often = ["checkpoint.every=5", "checkpoint.keep=2", "train.reproducible=true"];
    place.ok(&train("whole", &often));
    place.kill_until_done(|_| train("killed", &often));
    assert_eq!(place.trajectory("killed"), place.trajectory("whole"));
    assert_eq!(roll_backs(&place, "killed"), roll_backs(&place, "whole"));
    // Wherever in a roll-back a kill comes: with what is recorded gone, and with it there and nothing else done.
    for (dir, keeps) in [("before", false), ("after", true)] {
        before_roll_back(&place, "whole", dir);
        if keeps {
            fs::copy(place.path("whole/roll_backs.json"), place.path(dir).join("roll_backs.json")).unwrap();
        }
        let layout = if keeps { &["parallel.dp=2"][..] } else { &[] };
        place.ok(&train(dir, &[&often[..], layout].concat()));
        assert_eq!(place.trajectory(dir), place.trajectory("whole"), "{dir}");
    }
}

/// Copies a run, as it was before it rolled back from step 105 to step 100.
fn before_roll_back(place: &Place, from: &str, to: &str) {
    let copied = std::process::Command::new("cp").args(["-r", from, to]).current_dir(place.path("")).status();
    assert!(copied.unwrap().success());
    for step in [105, 110] {
        fs::remove_dir_all(place.path(&format!("{to}/checkpoints/step-{step:08}"))).unwrap();
    }
    fs::remove_file(place.path(to).join("roll_backs.json")).unwrap();
}

/// What a run has written when a roll-back comes to a point.
#[derive(Clone, Copy, Debug)]
enum Point {
    /// The last of the steps that lead to it has been skipped.
    Skipped,
    /// It is recorded.
    Recorded,
    /// It is done.
    Done,
}

#[test]
fn ranks_that_are_killed_while_they_roll_back_change_nothing() {
    let place = poisoned(&POISONED);
    let often = ["checkpoint.every=5", "checkpoint.keep=2", "train.reproducible=true"];
    place.ok(&train("whole", &often));
    let moments =
        [(Point::Skipped, 0), (Point::Skipped, 12), (Point::Recorded, 0), (Point::Recorded, 12), (Point::Done, 0)];
    for (i, (point, later)) in moments.into_iter().enumerate() {
        let layout = ["parallel.dp=2", "parallel.pp=2"][i % 2];
        let dir = format!("killed-{i}");
        before_roll_back(&place, "whole", &dir);
        // Lines may be half written.
        let events = || fs::read_to_string(place.path(&dir).join("events.jsonl")).unwrap_or_default();
        let count = |kind: &str| events().matches(&format!("\"event\":\"{kind}\"")).count();
        let (skips, roll_backs_before) = (count("skipped"), count("roll_back"));
        let mut args = vec!["launch", "run.toml", "--quiet", "--run-dir", &dir, "--set", layout];
        args.extend(often.iter().flat_map(|set| ["--set", set]));
        let mut launcher = spawn(place.command(&args));
        let come = || match point {
            Point::Skipped => count("skipped") >= skips + 2,
            Point::Recorded => place.path(&dir).join("roll_backs.json").exists(),
            Point::Done => count("roll_back") > roll_backs_before,
        };
        while launcher.try_wait().unwrap().is_none() && !come() {
            sleep(Duration::from_millis(1));
        }
        sleep(Duration::from_millis(later));
        // Either rank: the one that writes the record, or the one that waits for it. It may have ended meanwhile.
        if let Some(pid) = ranks_of(&launcher).get(i / 2 % 2) {
            // SAFETY: a signal to a process that this test has started.
            unsafe { libc::kill(*pid, libc::SIGKILL) };
        }
        end(launcher, Duration::from_secs(60));
        place.ok(&args);
        assert_eq!(place.trajectory(&dir), place.trajectory("whole"), "{layout} {point:?}");
        assert_eq!(roll_backs(&place, &dir), roll_backs(&place, "whole"), "{layout} {point:?}");
    }
}

#[test]
fn a_run_that_has_rolled_back_often_enough_stops_with_a_report_and_goes_on_when_told_to() {
    let place = poisoned(&[44, 45, 54, 55]);
    let set = ["train.steps=60", "spikes.roll_backs=1", "checkpoint.every=20"];
    let text = place.fails(1, &train("run", &set));
    let expected =
        "error: step 50: 2 updates were skipped in a row, and spikes.roll_backs = 1 allows no further roll-back";
    assert!(text.starts_with(expected), "{text}");
    assert!(
        text.contains("\n  rolled back from step 45 to step 40, 40 sequences left out (step 44: the loss of "),
        "{text}"
    );
    assert!(text.contains("--change spikes.roll_backs=2"), "{text}");
    let mut args = train("run", &set);
    args.extend(["--change", "spikes.roll_backs=2"]);
    place.ok(&args);
    assert_eq!(roll_backs(&place, "run").len(), 2);
    assert_eq!(lines(&place, "run/metrics.jsonl").len(), 60);
}

#[test]
fn before_the_first_checkpoint_a_run_rolls_back_to_its_beginning() {
    let place = poisoned(&[24, 25]);
    let args = train("run", &["train.steps=30", "checkpoint.every=0"]);
    place.ok(&args);
    let found = roll_backs(&place, "run");
    assert_eq!((&found[0]["to"], &found[0]["samples"]), (&0.into(), &200.into()));
    // As if the data had begun after them.
    assert_eq!(lines(&place, "run/metrics.jsonl").len(), 30);
    fs::remove_dir_all(place.path("run/checkpoints")).unwrap();
    let whole = place.trajectory("run");
    place.ok(&args);
    assert_eq!(place.trajectory("run"), whole);
}
