//! `lockstep init`: what it writes is accepted by the commands that it names.

mod common;

use common::Place;
use std::io::Write;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;
use std::process::Stdio;

/// A model with a tokenizer and a chat template in `hf`, and conversations in `chats.jsonl`.
fn model(place: &Place) {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/fixtures/tokenizer.json");
    std::fs::copy(fixture, place.path("tokenizer.json")).unwrap();
    let set = ["--set", "data.tokenizer=tokenizer.json", "--set", "model.vocab_size=1000", "--set", "train.steps=1"];
    place.ok(&[&["train", "run.toml", "--run-dir", "base", "--quiet"][..], &set].concat());
    place.ok(&["checkpoint", "export", "base", "--out", "hf"]);
    let template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}";
    std::fs::write(place.path("hf/chat_template.jinja"), template).unwrap();
    let chat = |n: u32| {
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"What is the square of {n}?\"}}, {{\"role\": \"assistant\", \
             \"content\": \"The square of {n} is {}.\"}}]}}\n",
            n * n
        )
    };
    std::fs::write(place.path("chats.jsonl"), (0..3000).map(chat).collect::<String>()).unwrap();
}

#[test]
fn what_is_written_is_explained_and_rehearsed() {
    let place = Place::new();
    model(&place);
    std::fs::create_dir(place.path("text")).unwrap();
    for file in 0..20 {
        let text = format!("text {file} of some length, again and again\n").repeat(2000);
        std::fs::write(place.path(&format!("text/{file}.txt")), text).unwrap();
    }
    let pair = |n: u32| format!("{{\"prompt\": \"The square of {n} is\", \"completion\": \" {}.\"}}\n", n * n);
    std::fs::write(place.path("pairs.jsonl"), (0..6000).map(pair).collect::<String>()).unwrap();
    for (task, model, data) in [
        ("pretrain", "llama-15m", "text"),
        ("continue", "hf", "text"),
        ("prompts", "hf", "pairs.jsonl"),
        ("finetune", "hf", "chats.jsonl"),
        ("lora", "hf", "chats.jsonl"),
        ("qlora", "hf", "chats.jsonl"),
    ] {
        let out = format!("{task}.toml");
        let output =
            place.run(&["init", "--task", task, "--model", model, "--data", data, "--gpus", "0", "--out", &out]);
        let (text, next) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert_eq!(text, format!("{out}: written\n"), "{next}");
        assert!(next.contains(&format!("lockstep explain {out}\n")) && next.contains(&format!("lockstep train {out}")));
        let written = std::fs::read_to_string(place.path(&out)).unwrap();
        assert!(written.starts_with("# ") && !written.contains("[parallel]"), "{written}");
        assert!(place.ok(&["explain", &out]).contains("parameters"));
        place.ok(&["rehearse", &out]);

        // For GPUs, from another folder.
        std::fs::create_dir_all(place.path("configs")).unwrap();
        let out = format!("configs/{task}.toml");
        place.ok(&["init", "--task", task, "--model", model, "--data", data, "--gpus", "3", "--out", &out]);
        let written = std::fs::read_to_string(place.path(&out)).unwrap();
        assert!(written.contains("dp = 3\n") && !written.contains("device = \"cpu\""), "{written}");
        assert!(written.contains(&format!("lockstep launch {out}")), "{written}");
        place.ok(&["explain", &out]);
    }
}

#[test]
fn what_is_missing_or_wrong_is_named_by_its_flag() {
    let place = Place::new();
    std::fs::create_dir(place.path("hf")).unwrap();
    for (args, expected) in [
        (&[][..], "--task is not given, and there is no terminal to ask on"),
        (&["--task", "pretrain"], "--model is not given"),
        (
            &["--task", "pretrain", "--model", "hf"],
            "--model hf: pretrain begins with random weights, and needs a preset",
        ),
        (&["--task", "continue", "--model", "llama-15m"], "--model llama-15m: a preset has no weights"),
        (&["--task", "continue", "--model", "gone"], "--model gone: no such folder"),
        (&["--task", "continue", "--model", "hf"], "--data is not given"),
        (&["--task", "continue", "--model", "hf", "--data", "gone"], "--data gone: no such file or folder"),
        (&["--task", "continue", "--model", "hf:org/name", "--data", "corpus"], "--gpus is not given"),
        (
            &["--out", "nowhere/x.toml", "--task", "continue", "--model", "hf", "--data", "corpus", "--gpus", "1"],
            "nowhere/x.toml: ",
        ),
    ] {
        let out = ["init", "--out", "new.toml"];
        let args = if args.contains(&"--out") { [&["init"], args].concat() } else { [&out[..], args].concat() };
        let error = place.fails(2, &args);
        assert!(error.starts_with(&format!("error: {expected}")) && error.contains("\nhint: "), "{error}");
        assert!(!place.path("new.toml").exists());
    }
    // Nothing is written over.
    let error = place.fails(2, &["init", "--task", "pretrain"]);
    assert!(error.starts_with("error: run.toml is there already\nhint: name another file: --out"), "{error}");
}

#[cfg(target_os = "linux")]
#[test]
fn what_is_not_given_is_asked_for_on_a_terminal() {
    let place = Place::new();
    model(&place);
    let (mut theirs, mut ours) = (0, 0);
    let none = std::ptr::null_mut();
    // SAFETY: the pointers are of two integers that live through the call, and the others may be null.
    assert_eq!(unsafe { libc::openpty(&mut ours, &mut theirs, none, none.cast(), none.cast()) }, 0);
    // SAFETY: openpty has just opened both, and nobody else has them.
    let (ours, theirs) = unsafe { (OwnedFd::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) };
    let mut command = place.command(&["init", "--out", "asked.toml"]);
    let child = command.stdin(theirs).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Two answers that cannot be used among those that can.
    std::fs::File::from(ours.try_clone().unwrap()).write_all(b"train\nlora\n\nhf\nchats.jsonl\nmany\n0\n").unwrap();
    let output = child.wait_with_output().unwrap();
    let questions = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{questions}");
    for question in [
        "What to do (pretrain, continue, prompts, finetune, lora, qlora)? [pretrain] one of these words, please",
        "Which model (a Hugging Face folder, or hf:OWNER/NAME)? a path or a name, please",
        "Where is the data (a file or a folder of conversations, as JSON lines or Parquet)?",
        "On how many GPUs (0 for the CPU)? [1] a number, please",
    ] {
        assert!(questions.contains(question), "{question}: {questions}");
    }
    assert!(std::fs::read_to_string(place.path("asked.toml")).unwrap().contains("[lora]\nrank = 16\n"));
}
