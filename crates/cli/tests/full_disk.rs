//! A disk that is full wherever Lockstep writes: the run ends or goes on, says why, and loses nothing.

mod common;
mod launched;
mod layouts;

use common::{CONFIG, Place, planted, signal, wait_for_steps};
use launched::{end as ended, ranks_of, said as told, spawn};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

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

/// What a run is, beside where the disk is full.
struct Subject<'a> {
    place: &'a Place,
    full: &'a Path,
    /// The bits that must come of it.
    whole: &'a [String],
}

impl Subject<'_> {
    /// Runs into the full disk, and then with room: the same command goes on, and nothing is lost.
    fn check(&self, dir: &str, (path, room): (&str, u64), args: &[&str], end: &End, said: &[&str]) {
        let mut command = self.place.command(args);
        command.env("LD_PRELOAD", self.full).env("FULL_PATH", path).env("FULL_ROOM", room.to_string());
        let begun = Instant::now();
        let output = command.output().unwrap();
        let took = begun.elapsed();
        let text = String::from_utf8_lossy(&output.stderr);
        let case = format!("{path} {room} {args:?}: {text}");
        let code = match end {
            Fails(code) => *code,
            GoesOn => 0,
        };
        assert_eq!(output.status.code(), Some(code), "{case}");
        // A file system may take a minute to show a folder of another process, which is not there any more where its write has failed.
        assert!(took < Duration::from_secs(60), "{took:?}: {case}");
        assert!(!text.contains("panicked") && said.iter().all(|part| text.contains(part)), "{said:?}: {case}");
        let again = self.place.run(args);
        let told = String::from_utf8_lossy(&again.stderr);
        assert!(again.status.success() && !told.contains("lost") && !told.contains("damaged"), "{case}\n{told}");
        assert_eq!(self.place.trajectory(dir), self.whole, "{case}");
    }
}

/// A place with a short run, and the library that makes disks full.
fn short() -> (Place, std::path::PathBuf) {
    let place = Place::new();
    place.config(&CONFIG.replace("steps = 20", "steps = 8").replace("every = 5\n", "every = 3\n"));
    let full = full_disk(&place);
    (place, full)
}

fn command<'a>(verb: &'a str, dir: &'a str, set: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec![verb, "run.toml", "--quiet", "--run-dir", dir];
    args.extend(set.iter().flat_map(|set| ["--set", set]));
    args
}

#[test]
fn a_full_disk_in_every_place_that_is_written_is_told_and_costs_nothing() {
    let (place, full) = short();
    place.ok(&command("train", "whole", &[]));
    let whole = place.trajectory("whole");
    let subject = Subject { place: &place, full: &full, whole: &whole };
    for (n, (path, room, set, end, said)) in CASES.iter().enumerate() {
        let dir = format!("run-{n}");
        subject.check(&dir, (path, *room), &command("train", &dir, set), end, said);
    }
    // What a machine with a profile measures.
    std::fs::create_dir_all(place.path("machines")).unwrap();
    std::fs::write(place.path("machines/planted.toml"), planted().to_toml()).unwrap();
    let said = ["cannot write ", "measured.json: No space left", "hint: "];
    let args = command("train", "measured", &["train.device=cpu", "train.threads=1"]);
    subject.check("measured", ("measured.json.new", 50), &args, &Fails(1), &said);
}

#[test]
fn changes_and_roll_backs_that_find_the_disk_full_are_made_by_the_next_start() {
    let (place, full) = short();
    // A model that does not learn: every step that is worse than the median is taken for a spike, until the run may roll back no more.
    let spikes = ["optimizer.lr=1e-9", "spikes.skip=true", "spikes.window=4", "spikes.z=1e-6", "spikes.skips=1"];
    let whole = place.fails(1, &command("train", "whole", &spikes));
    let rolled = |dir: &str| std::fs::read_to_string(place.path(dir).join("roll_backs.json")).unwrap();
    let mut first = place.command(&command("train", "run", &spikes));
    first.env("LD_PRELOAD", &full).env("FULL_PATH", "roll_backs.json.new").env("FULL_ROOM", "50");
    let output = first.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("cannot write ") && text.contains("roll_backs.json: No space left"), "{text}");
    assert!(!text.contains("panicked") && !place.path("run/roll_backs.json").exists(), "{text}");
    assert_eq!(place.fails(1, &command("train", "run", &spikes)), whole);
    assert_eq!((rolled("run"), place.trajectory("run")), (rolled("whole"), place.trajectory("whole")));

    for dir in ["longer", "changed"] {
        place.ok(&command("train", dir, &[]));
    }
    let change = |dir: &'static str| [&command("train", dir, &[])[..], &["--change", "train.steps=10"]].concat();
    place.ok(&change("longer"));
    let whole = place.trajectory("longer");
    assert_eq!(whole.len(), 10);
    let subject = Subject { place: &place, full: &full, whole: &whole };
    let said = ["cannot write ", "changes.json: No space left", "hint: "];
    subject.check("changed", ("changes.json.new", 20), &change("changed"), &Fails(1), &said);
}

#[test]
fn a_disk_that_is_full_for_one_of_several_processes_ends_all_or_none_of_them() {
    let (place, full) = short();
    let two = ["parallel.dp=2", "parallel.zero=1"];
    place.ok(&command("train", "whole", &two));
    let whole = place.trajectory("whole");
    let subject = Subject { place: &place, full: &full, whole: &whole };
    let not_saved: &[&str] = &["step 3 was not saved: ", "No space left", "hint: "];
    let cases: [Case; 7] = [
        ("metrics.jsonl", 500, &[], Fails(1), &["cannot write ", "metrics.jsonl: No space left", "hint: "]),
        ("checkpoints/.tmp-", 60_000, &[], Fails(1), not_saved),
        // Of the second process alone.
        ("optimizer-00001.safetensors", 100, &[], Fails(1), not_saved),
        ("checkpoints/.tmp-", 60_000, &[SYNCHRONOUS], Fails(1), &["No space left", "hint: "]),
        ("manifest.json", 100, &[SYNCHRONOUS], Fails(1), &["manifest.json: No space left", "hint: "]),
        ("checkpoints/.tmp-", 60_000, &[MIRROR], GoesOn, &["step 3 was not saved: ", "saving in the mirror"]),
        ("backup/", 60_000, &[MIRROR], GoesOn, &["the mirror has no copy of step 3: ", "No space left"]),
    ];
    for (n, (path, room, set, end, said)) in cases.iter().enumerate() {
        let dir = format!("run-{n}");
        let set = [&two[..], set].concat();
        subject.check(&dir, (path, *room), &command("launch", &dir, &set), end, said);
    }
    // What ended a run cannot be written down: it is told all the same.
    let args = command("launch", "killed", &[&two[..], &["train.steps=100000", "train.validate_every=0"]].concat());
    let mut command = place.command(&args);
    command.env("LD_PRELOAD", &full).env("FULL_PATH", "failures.jsonl").env("FULL_ROOM", "0");
    let launcher = spawn(command);
    wait_for_steps(&place, "killed", 4);
    signal(ranks_of(&launcher)[1], libc::SIGKILL);
    let output = ended(launcher, Duration::from_secs(60));
    let text = told(&output);
    assert!(output.status.code() == Some(1) && text.contains("rank 1 on host "), "{text}");
    assert_eq!(std::fs::read_to_string(place.path("killed/failures.jsonl")).unwrap_or_default(), "");
}
