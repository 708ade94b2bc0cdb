//! `lockstep data`: prepare, inspect, and what `train` makes of it.

mod common;

use common::{CONFIG, Place};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/fixtures").join(name)
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// A place with a corpus of text and one of records, mixed 1 : 3, and the test tokenizer.
fn mixed() -> Place {
    let place = Place::new();
    std::fs::copy(fixture("tokenizer.json"), place.path("tokenizer.json")).unwrap();
    let lines: String = (0..600u64).map(|i| format!("{{\"body\": \"record {i}: {}\"}}\n", i * i)).collect();
    std::fs::write(place.path("records.jsonl"), lines).unwrap();
    let data = "text_field = \"body\"\ntokenizer = \"tokenizer.json\"\n\
                corpora = [{ name = \"text\", paths = [\"corpus\"], weight = 1 }, \
                { name = \"records\", paths = [\"records.jsonl\"], weight = 3 }]";
    place.config(&CONFIG.replace("paths = [\"corpus\"]", data).replace("vocab_size = 256", "vocab_size = 1000"));
    place
}

#[test]
fn train_uses_what_prepare_made() {
    let place = Place::new();
    let text = place.ok(&["data", "prepare", "run.toml", "--run-dir", "run"]);
    assert!(text.starts_with("run/data\ntokenizer bytes, vocabulary 256, EOS token 0\n"), "{text}");
    let made = std::fs::metadata(place.path("run/data/train.shard")).unwrap().modified().unwrap();
    place.ok(&["train", "run.toml", "--run-dir", "run"]);
    assert_eq!(std::fs::metadata(place.path("run/data/train.shard")).unwrap().modified().unwrap(), made);
    place.ok(&["train", "run.toml", "--run-dir", "alone"]);
    assert_eq!(place.trajectory("run"), place.trajectory("alone"));
}

#[test]
fn prepare_notices_new_files_until_the_run_has_started() {
    let place = Place::new();
    let documents = || {
        let args = ["data", "prepare", "run.toml", "--run-dir", "run", "--format", "json"];
        let corpus = json(&place.ok(&args))["corpora"][0].clone();
        corpus["train"]["documents"].as_u64().unwrap() + corpus["validation"]["documents"].as_u64().unwrap()
    };
    assert_eq!(documents(), 8);
    std::fs::write(place.path("corpus/new.txt"), "a new file").unwrap();
    assert_eq!(documents(), 9);
    place.ok(&["train", "run.toml", "--run-dir", "run"]);
    std::fs::write(place.path("corpus/newer.txt"), "a newer file").unwrap();
    assert_eq!(documents(), 9, "a run keeps the data it began with");
    place.ok(&["train", "run.toml", "--run-dir", "run"]);
}

#[test]
fn a_shared_folder_serves_several_runs_and_is_not_overwritten() {
    let place = Place::new();
    let shared = ["--set", "data.prepared=shared"];
    place.ok(&[&["data", "prepare", "run.toml"], &shared[..]].concat());
    assert!(place.path("shared/data.json").exists());
    for run in ["a", "b"] {
        place.ok(&[&["train", "run.toml", "--run-dir", run], &shared[..]].concat());
        assert!(!place.path(run).join("data").exists());
    }
    let other = ["train", "run.toml", "--run-dir", "c", "--set", "data.validation_fraction=0.2"];
    assert_eq!(
        place.fails(2, &[&other[..], &shared].concat()),
        "error: shared holds data that were prepared with other settings\n\
         hint: choose another data.prepared, or delete the folder if nothing else uses it\n"
    );
}

#[test]
fn a_shared_folder_serves_runs_whose_text_and_tokenizer_are_gone() {
    let place = Place::new();
    std::fs::copy(fixture("tokenizer.json"), place.path("tokenizer.json")).unwrap();
    let data = "paths = [\"corpus\"]\ntokenizer = \"tokenizer.json\"\nprepared = \"shared\"";
    place.config(&CONFIG.replace("vocab_size = 256", "vocab_size = 1000").replace("paths = [\"corpus\"]", data));
    let train = |run: &'static str| ["train", "run.toml", "--run-dir", run];
    place.ok(&train("before"));
    let away = |name: &str| std::fs::rename(place.path(name), place.path(&format!("{name}.away"))).unwrap();
    let back = |name: &str| std::fs::rename(place.path(&format!("{name}.away")), place.path(name)).unwrap();
    for (run, gone) in [("a", &["corpus"][..]), ("b", &["tokenizer.json"]), ("c", &["corpus", "tokenizer.json"])] {
        gone.iter().for_each(|name| away(name));
        assert!(place.ok(&[&train(run)[..], &["--dry-run"]].concat()).contains("training tokens"), "{gone:?}");
        place.ok(&[&train(run)[..], &["--set", "train.steps=10"]].concat());
        // It goes on, is evaluated and talks: all that it needs is in the shared folder and in its checkpoints.
        place.ok(&[&train(run)[..], &["--change", "train.steps=20"]].concat());
        assert_eq!(place.trajectory(run).len(), 20);
        place.ok(&["eval", run, "--validation"]);
        place.ok(&["generate", run, "--prompt", "line 7", "--max-tokens", "4"]);
        // Other settings than those of the data are refused all the same.
        for set in ["data.validation_fraction=0.2", "data.tokenizer=bytes"] {
            let text = place.fails(2, &[&train("other")[..], &["--set", set]].concat());
            assert!(text.starts_with("error: shared holds data that were prepared with other settings"), "{text}");
        }
        // Where nothing was prepared, what is missing is named.
        let text = place.fails(2, &[&train("other")[..], &["--set", "data.prepared=nowhere"]].concat());
        assert!(gone.iter().any(|name| text.contains(&format!("{name}: "))), "{gone:?}: {text}");
        gone.iter().for_each(|name| back(name));
    }
    // What is left of them must be what was prepared.
    away("tokenizer.json");
    std::fs::write(place.path("corpus/new.txt"), "a new file").unwrap();
    let text = place.fails(2, &train("other"));
    assert!(text.starts_with("error: shared holds data that were prepared with other settings"), "{text}");
}

#[test]
fn corpora_are_mixed_and_every_step_knows_its_documents() {
    let place = mixed();
    place.ok(&["train", "run.toml", "--run-dir", "run"]);
    let found = json(&place.ok(&["data", "inspect", "run", "--step", "3", "--format", "json"]));
    assert_eq!(found["vocabulary"], 1000);
    assert_eq!(found["corpora"][1]["name"], "records");
    let documents = |split: &str| found["corpora"][1][split]["documents"].as_u64().unwrap();
    assert_eq!((documents("train"), documents("validation")), (570, 30));

    let samples = found["step"]["samples"].as_array().unwrap();
    assert_eq!(samples.len(), 8);
    assert_eq!(samples[0]["index"], 16, "step 3 follows two steps of 8 samples");
    let from_text = samples.iter().filter(|sample| sample["corpus"] == "text").count();
    assert_eq!(from_text, 2);
    let record = samples.iter().find(|sample| sample["corpus"] == "records").unwrap();
    let document = &record["documents"][1];
    assert!(document["file"].as_str().unwrap().ends_with("records.jsonl"));

    // The text of a sample holds the record that it names.
    let index = record["index"].to_string();
    let sample = &json(&place.ok(&["data", "inspect", "run", "--sample", &index, "--format", "json"]))["sample"];
    let named = sample["documents"][1]["record"].as_u64().unwrap();
    let text = sample["text"].as_str().unwrap();
    assert!(text.contains(&format!("record {}: ", named - 1)), "{named}: {text}");

    // Tokens are those of a sequence and the target of its last.
    let text = place.fails(2, &["data", "inspect", "run", "--tokens"]);
    assert!(text.contains("--tokens shows the tokens of a sample or a step\nhint: "), "{text}");
    let step = json(&place.ok(&["data", "inspect", "run", "--step", "3", "--tokens", "--format", "json"]));
    let lengths: Vec<_> =
        step["step"]["samples"].as_array().unwrap().iter().map(|s| s["tokens"].as_array().unwrap().len()).collect();
    assert_eq!(lengths, [33; 8]);
    assert_eq!(samples[0]["tokens"], Value::Null);

    let text = place.ok(&["data", "inspect", "run", "--sample", &index]);
    assert!(text.contains("mixture: text 25.0%, records 75.0%") && text.contains("records.jsonl:"), "{text}");
    let text = place.ok(&["data", "inspect", "run/data"]);
    assert!(text.contains("records train"), "{text}");
}

#[test]
fn a_mixture_resumes_and_another_mixture_is_refused() {
    let place = mixed();
    let args = ["train", "run.toml", "--run-dir", "run"];
    place.ok(&["train", "run.toml", "--run-dir", "whole"]);
    place.ok(&args);
    for step in [15, 20] {
        std::fs::remove_dir_all(place.path(&format!("run/checkpoints/step-{step:08}"))).unwrap();
    }
    // The data have a copy of the tokenizer.
    std::fs::remove_file(place.path("tokenizer.json")).unwrap();
    place.ok(&args);
    assert_eq!(place.trajectory("run"), place.trajectory("whole"));
    let config = std::fs::read_to_string(place.path("run.toml")).unwrap();
    place.config(&config.replace("weight = 3", "weight = 4"));
    let text = place.fails(2, &args);
    assert!(text.contains("data.corpora: [{ name = \"text\"") && text.contains("weight = 4.0"), "{text}");
}

#[test]
fn a_vocabulary_smaller_than_the_tokenizer_is_refused() {
    let place = mixed();
    for command in [&["train"][..], &["data", "prepare"]] {
        let text = place.fails(2, &[command, &["run.toml", "--set", "model.vocab_size=999"]].concat());
        assert_eq!(
            text,
            "error: model.vocab_size is 999, the tokenizer \"tokenizer.json\" makes tokens up to 999\n\
             hint: set model.vocab_size = 1000\n"
        );
    }
}

#[test]
fn killed_at_any_moment_prepare_finishes_with_the_same_bytes() {
    let place = mixed();
    // Enough text that most kills hit the work.
    let long: String = (0..60_000).map(|i| format!("line {i} of a longer text\n")).collect();
    std::fs::write(place.path("corpus/long.txt"), long).unwrap();
    let args = |out| vec!["data", "prepare", "run.toml", "--out", out];
    place.ok(&args("whole"));
    for attempt in 0..6 {
        let mut child = place.command(&args("killed")).stderr(std::process::Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(20 + lockstep_ir::counter::bits(7, attempt) % 300));
        // It may have finished.
        let _ = child.kill();
        child.wait().unwrap();
    }
    place.ok(&args("killed"));
    for name in ["text/data.json", "text/train.shard", "text/validation.shard", "records/train.shard"] {
        let read = |out: &str| std::fs::read(place.path(out).join(name)).unwrap();
        assert!(read("whole") == read("killed"), "{name}");
    }
}

#[test]
fn an_interrupt_stops_preparation_at_once_and_the_same_command_finishes_it() {
    let place = mixed();
    // Seconds of work, so that the signal hits it.
    let long: String = (0..300_000).map(|i| format!("line {i} of a longer text\n")).collect();
    std::fs::write(place.path("corpus/long.txt"), long).unwrap();
    let interrupted = |args: &[&str], signal| {
        let child = place.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let working =
            || std::fs::read_dir(place.path("prepared/text/.partial")).is_ok_and(|mut dir| dir.next().is_some());
        while !working() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let asked = Instant::now();
        // SAFETY: sends a signal to our own child.
        unsafe { libc::kill(child.id() as i32, signal) };
        let output = child.wait_with_output().unwrap();
        assert!(asked.elapsed() < Duration::from_millis(1500), "{:?}", asked.elapsed());
        assert!(!place.path("prepared/text/data.json").exists());
        output
    };
    let set = ["--set", "data.prepared=prepared"];
    let prepare = [&["data", "prepare", "run.toml"], &set[..]].concat();
    let output = interrupted(&prepare, libc::SIGINT);
    assert_eq!(output.status.code(), Some(75));
    let text = String::from_utf8(output.stderr).unwrap();
    let expected =
        "error: preparing data was interrupted\nhint: the same command again goes on after the last finished part";
    assert!(text.contains(expected), "{text}");
    let train = [&["train", "run.toml", "--run-dir", "run"], &set[..]].concat();
    let output = interrupted(&train, libc::SIGTERM);
    assert_eq!(output.status.code(), Some(75));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("interrupted before the first step of 20\nthe same command again starts"), "{text}");

    place.ok(&prepare);
    place.ok(&["data", "prepare", "run.toml", "--out", "whole"]);
    for name in ["text/data.json", "text/train.shard", "text/validation.shard", "records/train.shard"] {
        let read = |out: &str| std::fs::read(place.path(out).join(name)).unwrap();
        assert!(read("whole") == read("prepared"), "{name}");
    }
}

#[test]
fn a_run_directory_among_the_text_is_not_read() {
    let place = Place::new();
    let files = |out: &str, paths: &str| {
        let args = ["data", "prepare", "run.toml", "--out", out, "--format", "json", "--set", paths];
        json(&place.ok(&args))["corpora"][0]["files"].as_u64().unwrap()
    };
    let corpus = "data.paths=[\"corpus\"]";
    assert_eq!(files("before", corpus), 8);
    place.ok(&["train", "run.toml", "--run-dir", "corpus/my-run"]);
    place.ok(&["train", "run.toml", "--run-dir", "corpus/my-run", "--fresh"]);
    place.ok(&["data", "prepare", "run.toml", "--out", "corpus/shared"]);
    for folder in ["corpus/my-run/old-1/checkpoints", "corpus/my-run/data", "corpus/shared"] {
        assert!(place.path(folder).is_dir(), "{folder}");
    }
    assert_eq!(files("after", corpus), 8);
    // The run goes on beside the same text.
    place.ok(&["train", "run.toml", "--run-dir", "corpus/my-run"]);

    // A run directory that is named itself: what somebody put beside the run is text.
    std::fs::write(place.path("corpus/my-run/notes.md"), "notes").unwrap();
    assert_eq!(files("named", "data.paths=[\"corpus/my-run\"]"), 1);
}

#[test]
fn inspect_says_what_it_needs() {
    let place = Place::new();
    let text = place.fails(2, &["data", "inspect", "."]);
    assert!(text.contains("no prepared data here\nhint: "), "{text}");
    place.ok(&["data", "prepare", "run.toml", "--out", "out"]);
    let text = place.fails(2, &["data", "inspect", "out", "--sample", "1"]);
    assert!(text.contains("there is no run.toml here\nhint: give the run directory"), "{text}");
    place.ok(&["data", "prepare", "run.toml"]);
    let text = place.ok(&["data", "inspect", "run.toml", "--sample", "1"]);
    assert!(text.contains("sample 1: epoch 0, tokens from") && text.contains("corpus/"), "{text}");
}

#[test]
fn inspect_reads_a_config_whose_model_is_that_of_its_weights() {
    let place = Place::new();
    place.ok(&["train", "run.toml", "--run-dir", "run", "--set", "train.steps=5"]);
    place.ok(&["checkpoint", "export", "run", "--out", "hf"]);
    let train = CONFIG.split_once("[data]").unwrap().1.replace("steps = 20", "steps = 20\ninit_from = \"hf\"");
    place.config(&format!("[data]{train}"));
    place.ok(&["data", "prepare", "run.toml"]);
    let text = place.ok(&["data", "inspect", "run.toml", "--sample", "1"]);
    assert!(text.contains("sample 1: epoch 0, tokens from") && text.contains("corpus/"), "{text}");
}

#[test]
fn megatrons_files_train_as_the_shards_that_they_were_exported_from() {
    let place = Place::new();
    let config =
        CONFIG.replace("paths = [\"corpus\"]", "paths = [\"corpus\"]\nvalidation_fraction = 0.0\ndocument_mask = true");
    place.config(&config);
    place.ok(&["train", "run.toml", "--run-dir", "run"]);
    let text = place.ok(&["data", "export", "run", "--out", "tokens"]);
    assert!(text.contains("tokens/train.{bin,idx}") && text.contains(" 8 "), "{text}");
    place.config(&config.replace("[\"corpus\"]", "[\"tokens/train\"]"));
    place.ok(&["train", "run.toml", "--run-dir", "again"]);
    assert_eq!(place.trajectory("again"), place.trajectory("run"));
    assert!(!place.path("again/data").exists(), "nothing is copied");
    let statistics = json(&place.ok(&["data", "inspect", "again", "--step", "3", "--format", "json"]));
    assert_eq!(statistics["corpora"][0]["train"]["documents"], 8);
    assert!(statistics["step"]["samples"][0]["documents"][0]["file"].as_str().unwrap().ends_with("tokens/train.idx"));
    assert!(place.ok(&["data", "verify", "again"]).contains("their index was checked"));
    assert!(place.ok(&["data", "verify", "run"]).contains("everything is as it was prepared"));

    // Tokens that changed are other data, which a run does not go on with.
    let bin = place.path("tokens/train.bin");
    let bytes = std::fs::read(&bin).unwrap();
    std::fs::remove_file(&bin).unwrap();
    std::fs::write(&bin, &bytes[..bytes.len() - 2]).unwrap();
    let error = place.fails(2, &["train", "run.toml", "--run-dir", "again", "--change", "train.steps=25"]);
    assert!(error.contains("tokens/train.bin: ") && error.contains("hint: copy both files again"), "{error}");
    let mut other = bytes.clone();
    other[100] ^= 1;
    std::fs::write(&bin, &other).unwrap();
    let error = place.fails(2, &["train", "run.toml", "--run-dir", "again", "--change", "train.steps=25"]);
    assert!(error.contains("data"), "{error}");
    std::fs::write(&bin, &bytes).unwrap();
    place.ok(&["train", "run.toml", "--run-dir", "again", "--change", "train.steps=22"]);
    assert_eq!(place.trajectory("again").len(), 22);
}

#[test]
fn weights_change_at_given_tokens_whatever_the_layout_and_after_a_restart() {
    let place = mixed();
    let config = std::fs::read_to_string(place.path("run.toml")).unwrap();
    // 20 steps of 8 sequences of 32 tokens: from step 11 on, records alone.
    let scheduled = config.replace(
        "paths = [\"corpus\"], weight = 1 }",
        "paths = [\"corpus\"], weight = 1, schedule = [{ tokens = 2560, weight = 0 }] }",
    );
    assert_ne!(scheduled, config);
    place.config(&scheduled);
    place.ok(&["train", "run.toml", "--run-dir", "whole"]);
    let corpora = |step: &str| {
        let step = json(&place.ok(&["data", "inspect", "whole", "--step", step, "--format", "json"]))["step"].clone();
        let samples = step["samples"].as_array().unwrap();
        samples.iter().filter(|sample| sample["corpus"] == "text").count()
    };
    assert_eq!(["1", "10", "11", "20"].map(corpora), [2, 2, 0, 0]);
    let text = place.ok(&["data", "inspect", "whole"]);
    assert!(
        text.contains("mixture: text 25.0%, records 75.0%\n  from 2.56K tokens on: text 0.0%, records 100.0%\n"),
        "{text}"
    );

    let bits = ["--set", "train.reproducible=true", "--set", "train.micro_batch=2"];
    let with = |more: &[&'static str]| [&["train", "run.toml", "--quiet"], &bits[..], more].concat();
    place.ok(&with(&["--run-dir", "one"]));
    place.ok(&with(&["--run-dir", "two", "--set", "parallel.dp=2"]));
    assert_eq!(place.trajectory("two"), place.trajectory("one"));
    // Begun again from step 10, before the change, and from 15, after it.
    for step in ["10", "15"] {
        place.ok(&with(&["--run-dir", "one", "--resume-from", step]));
        assert_eq!(place.trajectory("one"), place.trajectory("two"), "from {step}");
    }
}
