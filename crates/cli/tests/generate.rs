//! `lockstep generate`, from whole commands.

mod common;

use common::{CONFIG, Place, damage};
use serde_json::Value;

fn trained() -> Place {
    let place = Place::new();
    place.ok(&["train", "run.toml", "--run-dir", "run"]);
    place
}

fn json(place: &Place, args: &[&str]) -> Value {
    let args = [&["generate"], args, &["--format", "json"]].concat();
    serde_json::from_str(&place.ok(&args)).unwrap()
}

#[test]
fn a_prompt_is_continued_and_the_same_seed_gives_the_same_text() {
    let place = trained();
    let args = ["generate", "run", "--prompt", "line 7", "--max-tokens", "20"];
    let output = place.run(&args);
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("line 7") && text.ends_with('\n') && text.len() > "line 7\n".len(), "{text:?}");
    let notes = String::from_utf8(output.stderr).unwrap();
    assert!(notes.contains(" tokens/s; prompt of 6 read in "), "{notes}");
    assert_eq!(place.ok(&args), text);
    let object = json(&place, &args[1..]);
    assert_eq!(format!("line 7{}", object["text"].as_str().unwrap()).trim_end(), text.trim_end());
    for field in
        ["step", "prompt_tokens", "tokens", "seed", "context", "tokens_per_s", "prompt_tokens_per_s", "arena_bytes"]
    {
        assert!(object[field].is_number(), "{field}");
    }
    assert_eq!((&object["step"], &object["prompt_tokens"]), (&20.into(), &6.into()));
    assert!(object["checkpoint"].as_str().unwrap().ends_with("step-00000020"), "{object}");
    let other = json(&place, &[&args[1..], &["--seed", "1", "--temperature", "2", "--top-p", "1"]].concat());
    assert_ne!(other["text"], object["text"]);
}

#[test]
fn greedy_text_does_not_depend_on_the_seed_and_ends_at_the_context() {
    let place = trained();
    let greedy =
        |seed| json(&place, &["run", "--prompt", "line", "--temperature", "0", "--max-tokens", "100", "--seed", seed]);
    let (one, two) = (greedy("1"), greedy("2"));
    assert_eq!(one["text"], two["text"]);
    // A context of 32 tokens, four of them the prompt's.
    assert_eq!((&one["stop"], &one["tokens"]), (&"context".into(), &28.into()));
    let longer =
        json(&place, &["run", "--prompt", "line", "--temperature", "0", "--max-tokens", "40", "--context", "64"]);
    assert_eq!((&longer["stop"], &longer["tokens"]), (&"max_tokens".into(), &40.into()));
    assert!(longer["text"].as_str().unwrap().starts_with(one["text"].as_str().unwrap()));
}

#[test]
fn a_checkpoint_folder_and_a_prompt_file_do_as_well() {
    let place = trained();
    std::fs::write(place.path("prompt.txt"), "line 9: ").unwrap();
    let of_run = place.ok(&["generate", "run", "--prompt", "line 9: "]);
    let args = ["generate", "run/checkpoints/step-00000020", "--prompt-file", "prompt.txt"];
    assert_eq!(place.ok(&args), of_run);
    let early = json(&place, &["run/checkpoints/step-00000010", "--prompt", "line 9: ", "--max-tokens", "1"]);
    assert_eq!(early["step"], 10);
    // A checkpoint needs nothing around it.
    std::fs::rename(place.path("run/checkpoints/step-00000020"), place.path("alone")).unwrap();
    assert_eq!(place.ok(&["generate", "alone", "--prompt", "line 9: "]), of_run);
}

#[test]
fn a_damaged_checkpoint_is_named_and_a_run_falls_back_to_the_one_before() {
    let place = trained();
    damage(&place.path("run/checkpoints/step-00000020/model.safetensors"));
    let text = place.fails(1, &["generate", "run/checkpoints/step-00000020", "--prompt", "a"]);
    assert!(text.contains("model.safetensors") && text.contains("hint: "), "{text}");
    let output = place.run(&["generate", "run", "--prompt", "a", "--max-tokens", "1"]);
    assert!(output.status.success());
    let notes = String::from_utf8(output.stderr).unwrap();
    assert!(notes.contains("warning: checkpoint step 20 is damaged") && notes.contains("using step 15"), "{notes}");
}

#[test]
fn mistakes_are_named_with_a_hint() {
    let place = trained();
    std::fs::create_dir_all(place.path("new/checkpoints")).unwrap();
    std::fs::write(place.path("binary"), b"\xff\xfe").unwrap();
    let prompt = "x".repeat(40);
    for (args, expected) in [
        (&["nowhere", "--prompt", "a"][..], "error: nowhere: no such run or checkpoint\nhint: "),
        (&["corpus", "--prompt", "a"], "error: corpus: neither a run directory nor a checkpoint\nhint: "),
        (&["new", "--prompt", "a"], "error: new has no checkpoint yet\nhint: "),
        (&["run", "--prompt", ""], "error: the prompt is empty\nhint: "),
        (&["run", "--prompt", &prompt], "error: 40 tokens leave no room in a context of 32\nhint: "),
        (&["run", "--prompt", "a", "--temperature", "-1"], "error: --temperature -1 has no meaning\nhint: "),
        (&["run", "--prompt", "a", "--top-k", "0"], "error: --top-k 0 has no meaning\nhint: "),
        (&["run", "--prompt", "a", "--top-p", "1.5"], "error: --top-p 1.5 has no meaning\nhint: "),
        (&["run", "--prompt-file", "gone"], "error: gone: cannot be read: "),
        (&["run", "--prompt-file", "binary"], "error: binary: is not UTF-8 text\nhint: "),
        (&["run"], "error: the following required arguments were not provided"),
    ] {
        let text = place.fails(2, &[&["generate"], args].concat());
        assert!(text.starts_with(expected), "{args:?}: {text}");
    }
}

#[test]
fn a_finished_run_shows_a_sample_and_what_to_try_next_beside_its_result() {
    let place = Place::new();
    let output = place.run(&["train", "run.toml", "--run-dir", "run"]);
    let result = String::from_utf8(output.stdout).unwrap();
    assert_eq!(result.lines().count(), 2, "{result}");
    let notes = String::from_utf8(output.stderr).unwrap();
    let sample = notes.split_once("a sample: the model continues \"").unwrap().1;
    assert!(sample.contains("generate run --prompt '") && sample.contains("explain run/run.toml\n"), "{notes}");
}

#[test]
fn a_model_that_ends_the_document_goes_on_where_eos_is_ignored() {
    let place = Place::new();
    std::fs::write(place.path("short.jsonl"), "{\"text\":\"a\"}\n".repeat(4000)).unwrap();
    place.config(&CONFIG.replace("\"corpus\"", "\"short.jsonl\""));
    place.ok(&["train", "run.toml", "--run-dir", "run"]);
    let args = ["run", "--prompt", "a", "--temperature", "0", "--max-tokens", "8"];
    let ended = json(&place, &args);
    assert_eq!((&ended["stop"], &ended["tokens"]), (&"separator".into(), &0.into()));
    let on = json(&place, &[&args[..], &["--ignore-eos"]].concat());
    assert_eq!((&on["stop"], &on["tokens"]), (&"max_tokens".into(), &8.into()));
}

#[test]
fn a_chat_is_answered_and_ends_with_its_turn() {
    let place = Place::new();
    let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/fixtures/chats");
    std::fs::copy(fixtures.join("tokenizer.json"), place.path("tokenizer.json")).unwrap();
    std::fs::copy(fixtures.join("turns.jinja"), place.path("mine.jinja")).unwrap();
    let line = r#"{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]}"#;
    std::fs::write(place.path("chats.jsonl"), format!("{line}\n").repeat(60)).unwrap();
    let chat =
        "paths = [\"chats.jsonl\"]\nformat = \"chat\"\ntokenizer = \"tokenizer.json\"\nchat_template = \"mine.jinja\"";
    place.config(&CONFIG.replace("paths = [\"corpus\"]", chat).replace("vocab_size = 256", "vocab_size = 384"));
    let output =
        place.run(&["train", "run.toml", "--run-dir", "run", "--set", "train.steps=40", "--set", "optimizer.lr=1e-2"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && said.contains(" generate run --chat --prompt Hello\n"), "{said}");
    let asked = ["generate", "run", "--chat", "--system", "Be brief.", "--prompt", "Who?", "--temperature", "0"];
    let output = place.run(&asked);
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "Me.\n");
    assert!(String::from_utf8(output.stderr).unwrap().contains("; the answer ended"));
    let error = place.fails(2, &["generate", "run", "--system", "a", "--prompt", "b"]);
    assert!(error.contains("--chat"), "{error}");
    let inspected = place.ok(&["data", "inspect", "run", "--sample", "0"]);
    assert!(inspected.contains("chats.jsonl:") && inspected.contains("<start_of_turn>user"), "{inspected}");
    // What is wrong is said with the key that may help.
    std::fs::write(place.path("mine.jinja"), "{% for m in messages %}").unwrap();
    let error = place.fails(2, &["data", "prepare", "run.toml", "--out", "other"]);
    assert!(
        error.contains("mine.jinja: not a chat template: ") && error.contains("name another in data.chat_template"),
        "{error}"
    );
    place.config(&CONFIG.replace("paths = [\"corpus\"]", &chat.replace("chat_template = \"mine.jinja\"", "")));
    let error = place.fails(2, &["data", "prepare", "run.toml", "--out", "other", "--set", "model.vocab_size=384"]);
    assert!(error.contains("the tokenizer has no chat template: neither chat_template.jinja"), "{error}");
    let trained = trained();
    let error = trained.fails(2, &["generate", "run", "--chat", "--prompt", "b"]);
    assert!(error.contains("it has no chat template"), "{error}");
}
