//! A disk that is full wherever Lockstep writes: the run ends or goes on, says why, and loses nothing.

mod common;

use common::{CONFIG, Place};
use std::path::Path;
use std::process::Command;

/// What becomes of a run.
enum End {
    /// It fails with this exit code.
    Fails(i32),
    /// It goes on to its end, with a warning.
    GoesOn,
}
use End::{Fails, GoesOn};

/// Where the disk is full, the bytes that fit there, what the run is asked for besides, what becomes of it, and what it says.
type Case = (&'static str, u64, &'static [&'static str], End, &'static [&'static str]);

const SYNCHRONOUS: &str = "checkpoint.asynchronous=false";
const MIRROR: &str = "checkpoint.mirror=backup";

const CASES: [Case; 17] = [
    ("/data/", 4000, &[], Fails(2), &["data/", "No space left on device", "hint: "]),
    ("run.toml.new", 50, &[], Fails(1), &["cannot write ", "run.toml: No space left", "hint: "]),
    ("plan.json.new", 50, &[], Fails(1), &["cannot write ", "plan.json: No space left", "hint: "]),
    ("given.toml.new", 50, &[], Fails(1), &["cannot write ", "given.toml: No space left", "hint: "]),
    ("starts.jsonl", 50, &[], Fails(1), &["cannot write ", "starts.jsonl: No space left", "hint: "]),
    ("metrics.jsonl", 500, &[], Fails(1), &["cannot write ", "metrics.jsonl: No space left", "hint: "]),
    ("events.jsonl", 500, &[], Fails(1), &["cannot write ", "events.jsonl: No space left", "hint: "]),
    ("checkpoints/.tmp-", 90_000, &[], Fails(1), &["step 3 was not saved: ", "No space left", "hint: "]),
    ("checkpoints/.tmp-", 90_000, &[SYNCHRONOUS], Fails(1), &["step 3 was not saved: ", "No space left", "hint: "]),
    // One checkpoint fits, and the next does not.
    ("checkpoints/.tmp-", 400_000, &[], Fails(1), &["was not saved: ", "No space left", "hint: "]),
    ("manifest.json", 100, &[SYNCHRONOUS], Fails(1), &["step 3 was not saved: ", "manifest.json", "No space left"]),
    ("checkpoints/.tmp-", 90_000, &[MIRROR], GoesOn, &["step 3 was not saved: ", "saving in the mirror"]),
    ("checkpoints/.tmp-", 90_000, &[MIRROR, SYNCHRONOUS], GoesOn, &["step 3 was not saved: ", "saving in the mirror"]),
    ("backup/", 90_000, &[MIRROR], GoesOn, &["the mirror has no copy of step 3: ", "No space left"]),
    ("backup/", 90_000, &[MIRROR, SYNCHRONOUS], GoesOn, &["the mirror has no copy of step 3: ", "No space left"]),
    ("metrics.csv", 100, &["telemetry.csv=true"], GoesOn, &["metrics.csv is not written any more", "the run goes on"]),
    (
        "events.out",
        100,
        &["telemetry.tensorboard=true"],
        GoesOn,
        &["tensorboard is not written any more", "the run goes on"],
    ),
];

fn full_disk(place: &Place) -> std::path::PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/full_disk/full.c");
    let built = place.path("full.so");
    let options = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o"];
    let compiled = Command::new("cc").args(options).arg(&built).arg(source).output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    built
}

#[test]
fn a_full_disk_in_every_place_that_is_written_is_told_and_costs_nothing() {
    let place = Place::new();
    place.config(&CONFIG.replace("steps = 20", "steps = 8").replace("every = 5\n", "every = 3\n"));
    let full = full_disk(&place);
    place.ok(&["train", "run.toml", "--quiet", "--run-dir", "whole"]);
    let whole = place.trajectory("whole");
    for (n, (path, room, set, end, said)) in CASES.iter().enumerate() {
        let dir = format!("run-{n}");
        let mut args = vec!["train", "run.toml", "--quiet", "--run-dir", &dir];
        args.extend(set.iter().flat_map(|set| ["--set", set]));
        let mut command = place.command(&args);
        command.env("LD_PRELOAD", &full).env("FULL_PATH", path).env("FULL_ROOM", room.to_string());
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        let case = format!("{path} {room} {set:?}: {text}");
        let code = match end {
            Fails(code) => *code,
            GoesOn => 0,
        };
        assert_eq!(output.status.code(), Some(code), "{case}");
        assert!(!text.contains("panicked") && said.iter().all(|part| text.contains(part)), "{said:?}: {case}");
        // There is room again: the same command goes on, and nothing is lost.
        let again = place.run(&args);
        let told = String::from_utf8_lossy(&again.stderr);
        assert!(again.status.success() && !told.contains("lost") && !told.contains("damaged"), "{case}\n{told}");
        assert_eq!(place.trajectory(&dir), whole, "{case}");
    }
}
