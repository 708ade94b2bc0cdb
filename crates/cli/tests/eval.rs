//! `lockstep eval`, from whole commands.

mod common;

use common::{CONFIG, Place, free_port};
use serde_json::Value;
use std::process::Stdio;

fn trained() -> Place {
    let place = Place::new();
    place.ok(&["train", "run.toml", "--run-dir", "run"]);
    place
}

fn json(place: &Place, args: &[&str]) -> Value {
    let args = [&["eval"], args, &["--format", "json"]].concat();
    serde_json::from_str(&place.ok(&args)).unwrap()
}

fn number(object: &Value, field: &str) -> f64 {
    object[field].as_f64().unwrap_or_else(|| panic!("{field}: {object}"))
}

#[test]
fn the_validation_loss_is_the_one_that_the_run_logged() {
    let place = trained();
    let metrics = std::fs::read_to_string(place.path("run/metrics.jsonl")).unwrap();
    let logged = |step: usize| {
        serde_json::from_str::<Value>(metrics.lines().nth(step - 1).unwrap()).unwrap()["val_loss"].clone()
    };
    let evaluation = json(&place, &["run", "--validation"]);
    assert_eq!(evaluation["loss"], logged(20));
    assert_eq!(json(&place, &["run/checkpoints/step-00000010", "--validation"])["loss"], logged(10));
    let loss = number(&evaluation, "loss");
    assert!((number(&evaluation, "perplexity") - loss.exp()).abs() < 1e-9);
}

#[test]
fn documents_are_kept_apart_as_in_training() {
    let place = Place::new();
    let lines: String = (0..3000u64).map(|i| format!("{{\"text\": \"record {i}: {}\"}}\n", i * i)).collect();
    std::fs::write(place.path("records.jsonl"), lines).unwrap();
    let data = "paths = [\"records.jsonl\"]\ndocument_mask = true";
    place.config(&CONFIG.replace("paths = [\"corpus\"]", data));
    place.ok(&["train", "run.toml", "--run-dir", "run"]);
    let metrics = std::fs::read_to_string(place.path("run/metrics.jsonl")).unwrap();
    let last: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    assert_eq!(json(&place, &["run", "--validation"])["loss"], last["val_loss"]);
    // The tokens that are left over after the last sequence are a program of their own.
    let all = number(&json(&place, &["run", "--data", "records.jsonl", "--seq", "48"]), "loss");
    assert!((all - number(&last, "val_loss")).abs() < 0.2, "{all}");
    let text = place.ok(&["generate", "run", "--prompt", "record 7", "--max-tokens", "5"]);
    assert!(text.starts_with("record 7"), "{text}");
}

#[test]
fn a_mixture_is_evaluated_as_a_whole_and_per_corpus() {
    let place = Place::new();
    let lines: String = (0..3000u64).map(|i| format!("{{\"text\": \"record {i}: {}\"}}\n", i * i)).collect();
    std::fs::write(place.path("records.jsonl"), lines).unwrap();
    std::fs::write(place.path("few.jsonl"), "{\"text\": \"a\"}\n{\"text\": \"b\"}\n".repeat(40)).unwrap();
    let data = "prepared = \"shared\"\ncorpora = [{ name = \"text\", paths = [\"corpus\"], weight = 1 }, \
                { name = \"few\", paths = [\"few.jsonl\"], weight = 1 }, \
                { name = \"records\", paths = [\"records.jsonl\"], weight = 3 }]";
    place.config(&CONFIG.replace("paths = [\"corpus\"]", data));
    // As many as the weights divide.
    place.ok(&["train", "run.toml", "--run-dir", "run", "--set", "train.validation_sequences=64"]);
    let metrics = std::fs::read_to_string(place.path("run/metrics.jsonl")).unwrap();
    let last: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    for from in ["run", "run/checkpoints/step-00000020"] {
        let all = json(&place, &[from, "--validation"]);
        assert_eq!(all["loss"], last["val_loss"]);
        let corpora = all["corpora"].as_array().unwrap();
        let names: Vec<_> = corpora.iter().map(|corpus| corpus["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["text", "records"], "the validation text of the other is not one sequence");
        let total = |field: &str| corpora.iter().map(|corpus| number(corpus, field)).sum::<f64>();
        assert_eq!((total("tokens"), total("bytes")), (number(&all, "tokens"), number(&all, "bytes")));
        assert_eq!(number(&corpora[1], "tokens"), 3.0 * number(&corpora[0], "tokens"));
        let sum: f64 = corpora.iter().map(|corpus| number(corpus, "loss") * number(corpus, "tokens")).sum();
        assert!((sum / number(&all, "tokens") - number(&all, "loss")).abs() < 1e-9);
        assert!(number(&corpora[0], "loss") != number(&corpora[1], "loss"));
    }
    let output = place.run(&["eval", "run", "--validation", "--seq", "16"]);
    let (text, warning) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    let columns = ["corpus", "loss", "perplexity", "bits", "per", "byte", "tokens", "bytes"];
    assert!(text.lines().any(|line| line.split_whitespace().eq(columns)), "{text}");
    assert!(text.contains("\n  records ") && text.contains("in sequences of 16"), "{text}");
    assert!(warning.contains("warning: the validation text of few has"), "{warning}");
    assert_eq!(json(&place, &["run", "--data", "corpus"])["corpora"], serde_json::json!([]));
    let text = place.fails(2, &["eval", "run", "--validation", "--seq", "100000"]);
    assert!(text.contains("tokens are too few for a sequence of 100000"), "{text}");
}

#[test]
fn the_program_is_smaller_than_that_of_training() {
    let place = trained();
    let metrics = std::fs::read_to_string(place.path("run/metrics.jsonl")).unwrap();
    let line: Value = serde_json::from_str(metrics.lines().next().unwrap()).unwrap();
    let evaluation = json(&place, &["run", "--validation"]);
    // Neither gradients nor moments: three times the parameters less, and nothing saved for a backward pass.
    let saved = number(&line, "arena_bytes") - number(&evaluation, "arena_bytes");
    assert!(saved > 3.0 * 4.0 * 54_000.0, "{saved}");
}

#[test]
fn every_byte_but_the_first_is_predicted_whatever_the_length() {
    let place = trained();
    let text = "line 3: the square of 9 is 81.\nline 4: the square of 16 is 256.\n";
    for length in [1, 2, 31, 32, 33, 64] {
        std::fs::write(place.path("some.txt"), &text[..length]).unwrap();
        let evaluation = json(&place, &["run", "--data", "some.txt"]);
        // The EOS token at the end is predicted too.
        assert_eq!((&evaluation["tokens"], &evaluation["bytes"]), (&length.into(), &(length - 1).into()), "{length}");
    }
    let json = json(&place, &["run", "--data", "some.txt"]);
    let bits = number(&json, "loss") * 64.0 / std::f64::consts::LN_2 / 63.0;
    assert!((number(&json, "bits_per_byte") - bits).abs() < 1e-9, "{json}");
}

#[test]
fn bytes_of_value_0_are_bytes_of_text() {
    let place = trained();
    std::fs::write(place.path("some.txt"), b"a\0b\0\0c").unwrap();
    std::fs::write(place.path("more.txt"), b"\0\0").unwrap();
    let evaluation = json(&place, &["run", "--data", "some.txt", "more.txt", "--seq", "4"]);
    // All but the first, and the two EOS tokens.
    assert_eq!((&evaluation["tokens"], &evaluation["bytes"]), (&9.into(), &7.into()));
}

#[test]
fn longer_sequences_and_other_cuts_see_the_same_text() {
    let place = trained();
    let tokens = |args: &[&str]| {
        let args = [&["run", "--data", "corpus", "run.toml"], args].concat();
        number(&json(&place, &args), "tokens")
    };
    let all = tokens(&[]);
    assert_eq!(tokens(&["--seq", "7"]), all);
    assert_eq!(tokens(&["--seq", "100"]), all);
    let text = place.ok(&["eval", "run", "--data", "corpus"]);
    for line in ["loss ", "perplexity ", "bits per byte ", "text ", "model "] {
        assert!(text.lines().any(|l| l.starts_with(line)), "{text}");
    }
}

#[test]
fn mistakes_are_named_with_a_hint() {
    let place = trained();
    std::fs::write(place.path("empty.txt"), "").unwrap();
    for (args, expected) in [
        (&["nowhere", "--validation"][..], "error: nowhere: no such run or checkpoint\nhint: "),
        (&["run", "--data", "gone.txt"], "error: gone.txt: no such file or folder\nhint: "),
        (&["run", "--data", "empty.txt"], "error: empty.txt: found 1 file, all empty\nhint: "),
        (&["run"], "error: the following required arguments were not provided"),
        (&["run", "--validation", "--seq", "0"], "error: invalid value '0' for '--seq <N>'"),
    ] {
        let text = place.fails(2, &[&["eval"], args].concat());
        assert!(text.starts_with(expected), "{args:?}: {text}");
    }
    std::fs::remove_dir_all(place.path("run/data")).unwrap();
    let text = place.fails(2, &["eval", "run", "--validation"]);
    assert_eq!(text, "error: run/data holds no validation text\nhint: name text to evaluate on: --data PATH\n");
}

/// A model that has learned to answer with the letter that follows, in capitals.
fn answers() -> Place {
    let place = Place::new();
    let letters = ["ab", "bc", "cd", "de", "ef", "fg"];
    let say = |pair: &str| format!("after {} comes {}.\n", &pair[..1], pair[1..].to_uppercase());
    let text: String = (0..4000u64).map(|i| say(letters[(i * 2_654_435_761 % 4_294_967_291 % 6) as usize])).collect();
    for entry in std::fs::read_dir(place.path("corpus")).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    std::fs::write(place.path("corpus/letters.txt"), text).unwrap();
    place.config(&CONFIG.replace("steps = 20", "steps = 400").replace("every = 5", "every = 400"));
    place.ok(&["train", "run.toml", "--run-dir", "run"]);
    place
}

#[test]
fn questions_are_answered_by_generation_and_answers_found_by_a_pattern() {
    let place = answers();
    let ask = |letter: &str, answer: &str| format!("{{\"prompt\": \"after {letter}\", {answer}}}\n");
    let declared = "{\"pattern\": \"comes ([A-Z])\", \"max_tokens\": 12, \"stop\": [\"\\n\"]}\n";
    let right = [ask("a", "\"answer\": \"B\""), ask("c", "\"answers\": [\"x\", \"D\"]"), ask("e", "\"answer\": \"F\"")];
    std::fs::write(place.path("right.jsonl"), declared.to_owned() + &right.concat()).unwrap();
    let half = [ask("b", "\"answer\": \"C\""), ask("b", "\"answer\": \"Q\"")].concat();
    std::fs::write(place.path("half.jsonl"), declared.to_owned() + &half).unwrap();
    // Without a pattern the whole text is the answer.
    let whole = "{\"max_tokens\": 12, \"stop\": [\".\"]}\n".to_owned() + &ask("d", "\"answer\": \"comes E\"");
    std::fs::write(place.path("whole.jsonl"), whole).unwrap();
    let missed = declared.replace("comes (", "goes (") + &right.concat();
    std::fs::write(place.path("missed.jsonl"), missed).unwrap();
    std::fs::write(place.path("choice.jsonl"), "{\"query\":\"after a comes\",\"choices\":[\"B\",\"C\"],\"gold\":0}\n")
        .unwrap();
    let tasks = ["right.jsonl", "half.jsonl", "whole.jsonl", "missed.jsonl", "choice.jsonl"];
    let args = [&["run", "--tasks"], &tasks[..], &["--log-samples", "items.jsonl"]].concat();
    let found = json(&place, &args);
    let task = |name: &str| found["tasks"].as_array().unwrap().iter().find(|task| task["name"] == name).unwrap();
    let items = std::fs::read_to_string(place.path("items.jsonl")).unwrap();
    for (name, share, unmatched) in [("right", 1.0, 0), ("half", 0.5, 0), ("whole", 1.0, 0), ("missed", 0.0, 3)] {
        assert_eq!(
            (number(task(name), "exact_match"), &task(name)["unmatched"]),
            (share, &unmatched.into()),
            "{items}"
        );
    }
    assert_eq!(number(task("half"), "exact_match_stderr"), 0.5);
    assert_eq!(number(task("choice"), "acc"), 1.0);
    assert!(number(&found, "tokens_written") > 0.0 && number(&found, "tokens_read") > 0.0);
    let items: Vec<Value> = items.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(items.len(), 10);
    let item = items.iter().find(|item| item["task"] == "right" && item["item"] == 1).unwrap();
    assert_eq!((&item["line"], &item["extracted"], &item["exact_match"]), (&3.into(), &"D".into(), &true.into()));
    assert_eq!((&item["text"], &item["stop"]), (&" comes D.".into(), &"stop_string".into()));
    let text = place.ok(&["eval", "run", "--tasks", "half.jsonl", "--limit", "1"]);
    assert!(text.contains("exact_match") && text.contains("1.0000") && !text.contains("perplexity"), "{text}");
    // What is wrong with a file is said with its line.
    for (file, expected) in [
        ("{\"pattern\": \"[\"}\n{}\n", "error: bad.jsonl, line 1: `pattern` is no regular expression: "),
        ("{\"stop\": []}\n{\"prompt\": \"a\"}\n", "error: bad.jsonl, line 2: it has no `answer`\nhint: "),
        ("{\"max_tokens\": 2}\n\n", "error: bad.jsonl: it has no questions\nhint: "),
        ("\n", "error: bad.jsonl: it has no items\nhint: "),
        ("{\"prompt\": \"a\", \"answer\": \"b\"}\n", "error: bad.jsonl: answers of 256 tokens leave no room"),
    ] {
        std::fs::write(place.path("bad.jsonl"), file).unwrap();
        let text = place.fails(2, &["eval", "run", "--tasks", "bad.jsonl"]);
        assert!(text.starts_with(expected) && text.contains("\nhint: "), "{text}");
    }
    let text = place.fails(2, &["train", "run.toml", "--run-dir", "other", "--set", "eval.tasks=[\"right.jsonl\"]"]);
    assert!(text.contains("right.jsonl: its questions are answered by generation\nhint: "), "{text}");
}

#[test]
fn ranks_that_share_a_model_score_what_one_scores() {
    let place = trained();
    let task: String = (0..20)
        .map(|i| format!("{{\"query\": \"line {i}\", \"choices\": [\" of\", \" 7\"], \"gold\": 0}}\n"))
        .collect();
    std::fs::write(place.path("task.jsonl"), task).unwrap();
    let asked =
        "{\"max_tokens\": 4}\n{\"prompt\": \"line \", \"answer\": \"7\"}\n{\"prompt\": \"the \", \"answer\": \"8\"}\n";
    std::fs::write(place.path("asked.jsonl"), asked).unwrap();
    let validation = ["run", "--validation"];
    let tasks = |samples| ["run", "--tasks", "task.jsonl", "asked.jsonl", "--log-samples", samples];
    let shared = |args: &[&str]| json(&place, &[args, &["--tp", "2"]].concat());
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b.abs();
    let (one, two) = (json(&place, &validation), shared(&validation));
    assert_eq!(one["tokens"], two["tokens"]);
    assert!(close(number(&two, "loss"), number(&one, "loss")), "{one} {two}");
    let (one, two) = (json(&place, &tasks("one.jsonl")), shared(&tasks("two.jsonl")));
    assert_eq!(one["tasks"], two["tasks"]);
    let items = |file: &str| -> Vec<Value> {
        let text = std::fs::read_to_string(place.path(file)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    for (a, b) in items("one.jsonl").iter().zip(items("two.jsonl")) {
        assert_eq!((&a["task"], &a["item"], &a["text"]), (&b["task"], &b["item"], &b["text"]));
        let losses = |item: &Value| -> Vec<f64> {
            let all = item["log_likelihoods"].as_array();
            all.into_iter().flatten().map(|loss| loss.as_f64().unwrap()).collect()
        };
        assert_eq!(losses(a).len(), if a["task"] == "task" { 2 } else { 0 }, "{a}");
        assert!(losses(a).iter().zip(losses(&b)).all(|(a, b)| close(b, *a)), "{a} {b}");
    }
    // As processes, of which the first prints.
    let processes = |args: &[&str]| -> Value {
        let (port, args) = (free_port(), [&["eval"], args, &["--tp", "2", "--format", "json"]].concat());
        let outputs = ["1", "0"].map(|rank| {
            let places = [("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
            place.command(&args).envs(places).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        });
        let [second, first] = outputs.map(|rank| {
            let output = rank.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap()
        });
        assert_eq!(second, "");
        serde_json::from_str(&first).unwrap()
    };
    assert_eq!(processes(&validation)["loss"], shared(&validation)["loss"]);
    assert_eq!(processes(&tasks("processes.jsonl"))["tasks"], two["tasks"]);
    assert_eq!(items("processes.jsonl"), items("two.jsonl"));
    // What cannot be split is refused.
    let output = place.run(&["eval", "run", "--validation", "--tp", "64"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("tp = 64") && error.contains("hint: "), "{error}");
}
