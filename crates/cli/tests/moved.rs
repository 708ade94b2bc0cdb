//! A run owns what it needs: it can be moved and copied, and what it was made from may change or go.

mod common;

use common::{CONFIG, Place};
use std::path::Path;
use std::process::Stdio;

/// A place with the test tokenizer.
fn with_tokenizer() -> Place {
    let place = Place::new();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/fixtures/tokenizer.json");
    std::fs::copy(fixture, place.path("tokenizer.json")).unwrap();
    let config = CONFIG.replace("paths = [\"corpus\"]", "paths = [\"corpus\"]\ntokenizer = \"tokenizer.json\"");
    place.config(&config.replace("vocab_size = 256", "vocab_size = 1000"));
    place
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let to = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy(&entry.path(), &to),
            false => std::fs::copy(entry.path(), to).map(|_| ()).unwrap(),
        }
    }
}

/// What a model says of a text, what it writes, and the tokenizer it is exported with.
fn uses(place: &Place, model: &str, out: &str) -> (String, String, Vec<u8>) {
    let evaluated = place.ok(&["eval", model, "--data", "corpus/1.txt", "--format", "json"]);
    let evaluated: serde_json::Value = serde_json::from_str(&evaluated).unwrap();
    let text = place.ok(&["generate", model, "--prompt", "line 3", "--max-tokens", "8", "--temperature", "0"]);
    place.ok(&["checkpoint", "export", model, "--out", out]);
    (evaluated["loss"].to_string(), text, std::fs::read(place.path(out).join("tokenizer.json")).unwrap())
}

#[test]
fn a_run_keeps_its_tokenizer_whatever_becomes_of_the_file() {
    let place = with_tokenizer();
    let args = ["train", "run.toml", "--run-dir", "run"];
    place.ok(&args);
    let before = uses(&place, "run", "hf-1");
    // Two tokens change places: the same vocabulary, other numbers.
    let text = std::fs::read_to_string(place.path("tokenizer.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let vocabulary = json["model"]["vocab"].as_object_mut().unwrap();
    let (a, b) = (vocabulary["e"].clone(), vocabulary["t"].clone());
    vocabulary.insert("e".into(), b);
    vocabulary.insert("t".into(), a);
    std::fs::write(place.path("tokenizer.json"), json.to_string()).unwrap();
    assert_eq!(uses(&place, "run", "hf-2"), before);
    place.ok(&args);
    std::fs::remove_file(place.path("tokenizer.json")).unwrap();
    assert_eq!(uses(&place, "run", "hf-3"), before);
    // A checkpoint alone has all it needs.
    copy(&place.path("run/checkpoints/step-00000020"), &place.path("alone"));
    assert_eq!(uses(&place, "alone", "hf-4"), before);
    std::fs::remove_dir_all(place.path("run/data")).unwrap();
    copy(&place.path("run"), &place.path("elsewhere/copied"));
    assert_eq!(uses(&place, "elsewhere/copied", "hf-5"), before);
}

#[test]
fn a_checkpoint_with_a_damaged_tokenizer_is_passed_over() {
    let place = with_tokenizer();
    place.ok(&["train", "run.toml", "--run-dir", "run"]);
    common::damage(&place.path("run/checkpoints/step-00000020/tokenizer.json"));
    let output = place.run(&["generate", "run", "--prompt", "line", "--max-tokens", "1"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && text.contains("step 20 is damaged (tokenizer.json: "), "{text}");
}

#[test]
fn a_moved_project_resumes_and_so_does_a_copy() {
    let place = Place::new();
    std::fs::create_dir(place.path("one")).unwrap();
    for name in ["corpus", "run.toml"] {
        std::fs::rename(place.path(name), place.path("one").join(name)).unwrap();
    }
    let train = |folder: &str, more: &[&str]| {
        let args = [&["train", "run.toml", "--run-dir", "runs/a"], more].concat();
        let output = place.command(&args).current_dir(place.path(folder)).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{text}");
        text
    };
    train("one", &[]);
    std::fs::rename(place.path("one"), place.path("two")).unwrap();
    assert!(train("two", &["--change", "train.steps=22"]).contains("resuming at step 20"));
    copy(&place.path("two"), &place.path("deep/three"));
    assert!(train("deep/three", &["--change", "train.steps=24"]).contains("resuming at step 22"));
    // Without its text too: the run has packed it.
    std::fs::remove_dir_all(place.path("deep/three/corpus")).unwrap();
    std::fs::rename(place.path("deep/three"), place.path("four")).unwrap();
    let text = train("four", &["--change", "train.steps=25"]);
    assert!(
        text.contains("/corpus: no such file or folder; the run goes on with the text") && text.contains("at step 24")
    );
}

#[test]
fn shared_data_move_with_a_project_and_are_not_overwritten_by_another() {
    let place = Place::new();
    place.config(&CONFIG.replace("paths = [\"corpus\"]", "paths = [\"corpus\"]\nprepared = \"shared\""));
    place.ok(&["train", "run.toml", "--run-dir", "a"]);
    let made = |folder: &str| std::fs::metadata(place.path(folder).join("train.shard")).unwrap().modified().unwrap();
    let first = made("shared");
    for name in ["corpus", "run.toml", "shared", "a"] {
        std::fs::create_dir_all(place.path("moved")).unwrap();
        std::fs::rename(place.path(name), place.path("moved").join(name)).unwrap();
    }
    place.ok(&["train", "moved/run.toml", "--run-dir", "moved/a"]);
    place.ok(&["train", "moved/run.toml", "--run-dir", "moved/b"]);
    assert_eq!(made("moved/shared"), first, "known by its content, it is not prepared anew");
    place.ok(&["eval", "moved/a", "--validation"]);
    std::fs::rename(place.path("moved"), place.path("again")).unwrap();
    place.ok(&["eval", "again/b", "--validation"]);
    std::fs::rename(place.path("again"), place.path("moved")).unwrap();
    std::fs::create_dir(place.path("moved/other")).unwrap();
    std::fs::write(place.path("moved/other/0.txt"), "another text\n".repeat(2000)).unwrap();
    let args = ["train", "moved/run.toml", "--run-dir", "moved/c", "--set", "data.paths=[\"other\"]"];
    let text = place.fails(2, &args);
    assert!(text.starts_with("error: moved/shared holds data that were prepared "), "{text}");
}

#[test]
fn runs_that_start_together_on_unprepared_data_all_finish() {
    // On a busy machine the first may be done before the others come.
    assert!((0..6).any(|_| starts_of_which_one_waits() >= 1));
}

/// Starts four runs at once, and gives how many said that they wait for another.
fn starts_of_which_one_waits() -> usize {
    let place = Place::new();
    // Enough text that the others come while the first one works.
    let long: String = (0..400_000).map(|i| format!("line {i} of a longer text\n")).collect();
    std::fs::write(place.path("corpus/long.txt"), long).unwrap();
    let start = |n: usize| {
        let dir = format!("run-{n}");
        let sets = ["--set", "data.prepared=shared", "--set", "train.steps=2", "--set", "train.threads=1"];
        let args = [&["train", "run.toml", "--run-dir", &dir], &sets[..]].concat();
        place.command(&args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let running: Vec<_> = (0..4).map(start).collect();
    let outputs: Vec<_> = running.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    let texts: Vec<_> = outputs.iter().map(|o| String::from_utf8_lossy(&o.stderr).into_owned()).collect();
    assert!(outputs.iter().all(|output| output.status.success()), "{texts:#?}");
    let waited = texts.iter().filter(|text| text.contains("waiting for another process that prepares data")).count();
    let whole = place.trajectory("run-0");
    assert!((1..4).all(|n| place.trajectory(&format!("run-{n}")) == whole));
    waited
}
