//! Runs that give their metrics to the client of Weights & Biases: a module of the same name that writes down what it is asked for.
//! What the real client makes of it is in `bench/records/wandb.txt`.

mod common;

use common::{CONFIG, Place, steps, wait_until};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// A client that writes a line of JSON for every call: where, the environment says.
const MODULE: &str = r#"
import json, os
__version__ = "0.0"

def said(**what):
    what["pid"] = os.getpid()
    with open(os.environ["FAKE_WANDB"], "a") as file:
        file.write(json.dumps(what) + "\n")

class Config(dict):
    def update(self, values, allow_val_change=False):
        said(config=values)

class Summary(dict):
    def __setitem__(self, key, value):
        said(summary={key: value})

class Run:
    config, summary = Config(), Summary()
    def define_metric(self, name, step_metric=None):
        said(define=name)
    def log(self, values):
        said(log=values)
    def finish(self, exit_code):
        said(finish=exit_code)

def init(**options):
    if os.environ.get("FAKE_WANDB_FAILS"):
        raise RuntimeError("no such project")
    said(init=options)
    print("the client says something")
    return Run()
"#;

const TRAIN: [&str; 4] = ["train", "run.toml", "--run-dir", "run"];

/// A place with the module; nothing where there is no Python.
fn place() -> Option<Place> {
    if !Command::new("python3").arg("-V").output().is_ok_and(|output| output.status.success()) {
        // Past the test runner, which hides what a test that passes prints.
        let _ = writeln!(std::io::stderr(), "skipped: there is no python3");
        return None;
    }
    let place = Place::new();
    place.config(&format!("{CONFIG}\n[telemetry]\nwandb = true\nexperiment = \"mine\"\n"));
    fs::create_dir(place.path("modules")).unwrap();
    fs::write(place.path("modules/wandb.py"), MODULE).unwrap();
    Some(place)
}

fn command(place: &Place, more: &[&str]) -> Command {
    let mut command = place.command(&[&TRAIN[..], more].concat());
    command.env("PYTHONPATH", place.path("modules")).env("FAKE_WANDB", place.path("said"));
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// What the client was asked for.
fn said(place: &Place) -> Vec<Value> {
    let text = fs::read_to_string(place.path("said")).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// The values of one kind of call.
fn all<'a>(calls: &'a [Value], kind: &str) -> Vec<&'a Value> {
    calls.iter().filter_map(|call| call.get(kind)).collect()
}

#[test]
fn the_client_gets_config_metrics_events_and_one_id_over_resumes() {
    let Some(place) = place() else { return };
    let output = command(&place, &[]).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !stderr.contains("Weights"), "{stderr}");
    let calls = said(&place);
    let init = all(&calls, "init")[0];
    assert_eq!(
        (init["name"].as_str(), init["project"].as_str(), init["resume"].as_str()),
        (Some("run"), Some("mine"), Some("allow"))
    );
    assert_eq!(
        (init["config"]["model.layers"].as_u64(), init["config"]["optimizer.lr"].as_f64()),
        (Some(2), Some(3e-3))
    );
    assert_eq!(all(&calls, "config")[0]["lockstep"]["build"]["version"], env!("CARGO_PKG_VERSION"));
    assert!(all(&calls, "config")[0]["lockstep"]["hosts"][0].is_string());
    let logs = all(&calls, "log");
    let lines = fs::read_to_string(place.path("run/metrics.jsonl")).unwrap();
    for line in lines.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        assert!(logs.iter().any(|log| log["step"] == line["step"] && log["loss"] == line["loss"]), "{line}");
    }
    let checkpoints = logs.iter().filter(|log| log["events/checkpoint"] == 1);
    assert_eq!(checkpoints.map(|log| log["step"].as_u64().unwrap()).collect::<Vec<_>>(), [5, 10, 15, 20]);
    assert_eq!(all(&calls, "finish"), [0]);
    assert!(fs::read_to_string(place.path("run/wandb/helper.log")).unwrap().contains("the client says something"));
    // A resume is the same run, and going back too, whatever links the client leaves.
    symlink("nowhere", place.path("run/wandb/latest-run")).unwrap();
    let back = ["--resume-from", "10", "--change", "train.steps=12"];
    assert!(command(&place, &back).output().unwrap().status.success());
    let calls = said(&place);
    let ids: Vec<_> = all(&calls, "init").iter().map(|init| init["id"].clone()).collect();
    assert!(ids.len() == 2 && ids[0] == ids[1] && ids[0].is_string(), "{ids:?}");
    assert_eq!(all(&calls, "finish"), [0, 0]);
}

#[test]
fn a_client_that_dies_is_started_again_and_one_that_fails_costs_no_step() {
    let Some(place) = place() else { return };
    let long = ["--set", "train.steps=1000000", "--set", "train.validate_every=0"];
    let mut child = command(&place, &long).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    wait_until("the client has a step", || !all(&said(&place), "log").is_empty());
    let helper = said(&place)[0]["pid"].as_i64().unwrap() as i32;
    common::signal(helper, libc::SIGKILL);
    wait_until("the client is started again", || all(&said(&place), "init").len() == 2);
    common::signal(child.id() as i32, libc::SIGTERM);
    assert_eq!(child.wait().unwrap().code(), Some(75));
    let calls = said(&place);
    assert_eq!(all(&calls, "finish"), [75]);
    let logged = |calls: &[Value]| -> BTreeSet<u64> {
        let lines = all(calls, "log").into_iter().filter(|log| log.get("loss").is_some());
        lines.filter_map(|log| log["step"].as_u64()).collect()
    };
    let done = steps(&place, "run") as u64;
    assert_eq!(logged(&calls), (1..=done).collect());
    // One that never begins: the run ends well, says what is left, and the next start gives it.
    let more = |steps: u64| ["--change".to_owned(), format!("train.steps={}", done + steps)];
    let [change, five] = more(5);
    let output = command(&place, &[&change, &five]).env("FAKE_WANDB_FAILS", "1").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let told = "were not sent to the client of Weights & Biases: ";
    assert!(stderr.contains(told) && stderr.contains("no such project"), "{stderr}");
    let [change, six] = more(6);
    assert!(command(&place, &[&change, &six]).output().unwrap().status.success());
    assert_eq!(logged(&said(&place)), (1..=done + 6).collect());
}

#[test]
fn no_client_is_an_error_before_the_start() {
    let Some(place) = place() else { return };
    fs::write(place.path("modules/wandb.py"), "raise ImportError(\"half of it is missing\")\n").unwrap();
    let refused = |command: &mut Command| {
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(!place.path("run").exists());
        String::from_utf8(output.stderr).unwrap()
    };
    let error = refused(&mut command(&place, &[]));
    assert!(error.contains("telemetry.wandb: python3 cannot load the client: ImportError: half of it is missing\nhint: `pip install wandb`"), "{error}");
    fs::create_dir(place.path("none")).unwrap();
    let error = refused(command(&place, &[]).env("PATH", place.path("none")));
    assert!(
        error.contains("telemetry.wandb: python3 does not start: ") && error.contains("\nhint: activate"),
        "{error}"
    );
    // One that does not run is no Python either.
    let broken: PathBuf = place.path("none/python3");
    fs::write(&broken, "#!/bin/sh\nexit 3\n").unwrap();
    fs::set_permissions(&broken, fs::Permissions::from_mode(0o755)).unwrap();
    assert!(refused(command(&place, &[]).env("PATH", place.path("none"))).contains("cannot load the client"));
}
