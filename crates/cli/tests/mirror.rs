//! Which checkpoints stay, a second place for them, and the commands that look after them.

mod common;

use common::{CONFIG, Place, damage};
use serde_json::Value;
use std::fs;
use std::process::Output;

/// The steps of the checkpoints in a folder.
fn steps(place: &Place, folder: &str) -> Vec<u64> {
    let names =
        fs::read_dir(place.path(folder)).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut steps: Vec<u64> = names.filter_map(|name| name.strip_prefix("step-")?.parse().ok()).collect();
    steps.sort_unstable();
    steps
}

fn said(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn the_latest_every_nth_and_the_best_stay() {
    let place = Place::new();
    let set = ["checkpoint.every=2", "checkpoint.keep=2", "checkpoint.keep_every=8", "checkpoint.keep_best=true"];
    let mut args = vec!["train", "run.toml", "--quiet", "--run-dir", "run", "--set", "train.validate_every=4"];
    args.extend(set.iter().flat_map(|set| ["--set", set]));
    // Whatever is learned is lost again: the best checkpoint is an early one.
    args.extend(["--set", "train.steps=12"]);
    place.ok(&args);
    args.extend(["--change", "train.steps=20", "--change", "optimizer.lr=1.0", "--change", "optimizer.grad_clip=0.0"]);
    place.ok(&args);
    let list: Value = serde_json::from_str(&place.ok(&["checkpoint", "list", "run", "--format", "json"])).unwrap();
    let losses: Vec<(u64, f64)> = list["checkpoints"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|c| Some((c["step"].as_u64()?, c["val_loss"].as_f64()?)))
        .collect();
    assert_eq!(steps(&place, "run/checkpoints"), [8, 12, 16, 18, 20], "{losses:?}");
    let best = losses.iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    assert_eq!(best.0, 12, "{losses:?}");

    let prune = |more: &[&str]| place.ok(&[&["checkpoint", "prune", "run", "--keep", "1"], more].concat());
    let would = prune(&["--keep-best", "--keep-every", "16", "--dry-run"]);
    assert!(would.starts_with("would remove steps 8, 18: "), "{would}");
    assert_eq!(steps(&place, "run/checkpoints").len(), 5);
    let json: Value = serde_json::from_str(&prune(&["--keep-best", "--format", "json"])).unwrap();
    assert_eq!(json["removed"], serde_json::json!([8, 16, 18]));
    assert!(json["bytes"].as_u64().unwrap() > 0);
    assert_eq!(steps(&place, "run/checkpoints"), [12, 20]);
}

#[test]
fn a_checkpoint_comes_when_the_time_has_passed() {
    let place = Place::new();
    let args = ["train", "run.toml", "--quiet", "--run-dir", "run", "--set", "checkpoint.every=0", "--set"];
    place.ok(&[&args[..], &["checkpoint.every_minutes=1e-9", "--set", "checkpoint.keep=99"]].concat());
    assert_eq!(steps(&place, "run/checkpoints"), (1..=20).collect::<Vec<_>>());
}

/// What is done to a run directory, its name, and the warning that comes of it.
type Harm<'a> = (&'a str, &'a dyn Fn(&str), &'a str);

/// The first place damaged in every way: the mirror takes over, and the bits are those of a run that nobody disturbed.
#[test]
fn the_mirror_takes_over_where_the_first_place_is_gone_damaged_or_cannot_be_written() {
    let place = Place::new();
    let args = |dir| {
        vec![
            "train",
            "run.toml",
            "--quiet",
            "--run-dir",
            dir,
            "--set",
            "checkpoint.mirror=backup",
            "--set",
            "train.steps=20",
        ]
    };
    place.ok(&args("whole"));
    let whole = place.trajectory("whole");
    assert_eq!(steps(&place, "backup/whole"), [10, 15, 20]);
    for entry in fs::read_dir(place.path("backup/whole/step-00000020")).unwrap() {
        let name = entry.unwrap().file_name();
        let [first, second] = ["whole/checkpoints", "backup/whole"]
            .map(|dir| fs::read(place.path(dir).join("step-00000020").join(&name)).unwrap());
        assert_eq!(first, second, "{name:?}");
    }

    // Cut off, deleted with everything else, and a file where the folder should be.
    let truncate = |dir: &str| {
        for step in [10, 15] {
            let path = place.path(dir).join(format!("checkpoints/step-{step:08}/model.safetensors"));
            fs::OpenOptions::new().write(true).open(path).unwrap().set_len(100).unwrap();
        }
    };
    let delete = |dir: &str| fs::remove_dir_all(place.path(dir).join("checkpoints")).unwrap();
    let replace = |dir: &str| {
        delete(dir);
        fs::write(place.path(dir).join("checkpoints"), "in the way").unwrap();
    };
    let harm: [Harm; 3] = [
        ("truncated", &truncate, "warning: checkpoint step 15 is damaged (model.safetensors: "),
        ("deleted", &delete, "has no checkpoint as new as the mirror's"),
        ("unwritable", &replace, "warning: cannot list "),
    ];
    for (dir, harm, warning) in harm {
        // Up to step 15, as a run that was killed after it.
        place.ok(&args(dir));
        for folder in [format!("{dir}/checkpoints"), format!("backup/{dir}")] {
            fs::remove_dir_all(place.path(&folder).join("step-00000020")).unwrap();
        }
        harm(dir);
        let text = said(&place.run(&args(dir)));
        assert!(text.contains(warning), "{dir}: {text}");
        assert!(text.contains("using step 15 of the mirror, "), "{dir}: {text}");
        assert_eq!(place.trajectory(dir), whole, "{dir}");
        assert_eq!(steps(&place, &format!("backup/{dir}")), [10, 15, 20], "{dir}");
        if dir == "unwritable" {
            assert!(text.contains("step 20 was not saved: ") && text.contains("; saving in the mirror"), "{text}");
        } else {
            assert!(steps(&place, &format!("{dir}/checkpoints")).contains(&20), "{dir}");
        }
    }

    // Who starts over, or goes back, does not find the other run there.
    place.ok(&[&args("whole")[..], &["--resume-from", "10"]].concat());
    assert_eq!(place.trajectory("whole"), whole);
    place.ok(&[&args("whole")[..], &["--fresh", "--set", "train.steps=5"]].concat());
    assert_eq!(steps(&place, "backup/whole"), [5]);
    assert_eq!(steps(&place, "backup/whole/old-1"), [15, 20]);
    assert_eq!(steps(&place, "backup/whole/old-2"), [10, 15, 20]);

    // A mirror that cannot be written is told, and the run goes on.
    fs::remove_dir_all(place.path("backup")).unwrap();
    fs::write(place.path("backup"), "in the way").unwrap();
    let text = said(&place.run(&args("alone")));
    assert!(text.contains("warning: the mirror has no copy of step 20: "), "{text}");
    assert_eq!(place.trajectory("alone"), whole);
}

#[test]
fn checkpoints_are_verified_and_shown() {
    let place = Place::new();
    place.ok(&["train", "run.toml", "--quiet", "--run-dir", "run"]);
    let text = place.ok(&["checkpoint", "verify", "run"]);
    assert_eq!(text.matches("whole").count(), 3, "{text}");
    let text = place.ok(&["checkpoint", "inspect", "run", "--tensors"]);
    assert!(text.contains("step 20, every checksum right") && text.contains("model.norm.weight"), "{text}");
    let json: Value = serde_json::from_str(&place.ok(&["checkpoint", "inspect", "run", "--format", "json"])).unwrap();
    assert_eq!(json["step"], 20);
    assert_eq!(json["state"]["tokens"], 20 * 8 * 32);
    assert!(
        json["groups"]["optimizer"].as_array().unwrap().len() >= 2 * json["groups"]["model"].as_array().unwrap().len()
    );
    damage(&place.path("run/checkpoints/step-00000015/optimizer.safetensors"));
    let text = place.fails(1, &["checkpoint", "verify", "run"]);
    assert!(text.starts_with("error: 1 of 3 checkpoints is not whole\nhint: "), "{text}");
    let text = place.fails(1, &["checkpoint", "inspect", "run/checkpoints/step-00000015"]);
    assert!(text.contains("is damaged (optimizer.safetensors: "), "{text}");
    let text = place.fails(2, &["checkpoint", "verify", "corpus"]);
    assert!(text.starts_with("error: corpus holds no checkpoint\nhint: "), "{text}");
}

/// `bench/scripts/save.sh` holds the times of 1 GB against each other.
#[test]
fn the_bench_of_checkpoints_tells_what_steps_wait_for() {
    let place = Place::new();
    let args =
        ["bench", "checkpoint", "--size", "2MB", "--ranks", "2", "--rounds", "1", "--disk", ".", "--format", "json"];
    let bench: Value = serde_json::from_str(&place.ok(&args)).unwrap();
    assert_eq!(bench["bytes"], bench["snapshot_bytes"]);
    assert!(bench["bytes"].as_u64().unwrap() >= 2_000_000);
    for key in ["copy_s", "stall_s", "background_s", "synchronous_s", "step_s", "step_while_saving_s"] {
        assert!(bench[key].as_f64().unwrap() > 0.0, "{key}");
    }
    place.config(CONFIG);
    let run = ["bench", "checkpoint", "run.toml", "--set", "model.layers=1", "--rounds", "1", "--format", "json"];
    let less: Value = serde_json::from_str(&place.ok(&run)).unwrap();
    assert!(less["bytes"].as_u64() < bench["bytes"].as_u64() && less["ranks"] == 1, "{less}");
    // It leaves nothing behind.
    assert!(fs::read_dir(place.path("")).unwrap().all(|e| !e.unwrap().file_name().to_string_lossy().contains("bench")));
}
