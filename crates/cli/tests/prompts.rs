//! `lockstep generate --prompts`: many texts at once, from whole commands.

mod common;

use common::{Place, free_port};
use serde_json::{Value, json};
use std::process::Stdio;
use std::time::Duration;

fn trained() -> Place {
    let place = Place::new();
    place.ok(&["train", "run.toml", "--run-dir", "run"]);
    place
}

/// Prompts of one token up to most of the context, many of which begin alike.
fn write_prompts(place: &Place, count: usize) {
    let line = |i: usize| {
        let text = if i.is_multiple_of(3) { "x".repeat(1 + 7 * i % 90) } else { format!("{}{i}", "line ".repeat(20)) };
        json!({"prompt": text, "id": format!("p{i}")}).to_string() + "\n"
    };
    std::fs::write(place.path("prompts.jsonl"), (0..count).map(line).collect::<String>()).unwrap();
}

const OPTIONS: [&str; 8] = ["--prompts", "prompts.jsonl", "--max-tokens", "30", "--context", "200", "--top-k", "40"];

fn args<'a>(out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["generate", "run"], &OPTIONS[..], &["--out", out], more].concat()
}

fn lines(place: &Place, out: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(place.path(out)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn texts_of_a_file_do_not_depend_on_what_is_written_at_once() {
    let place = trained();
    write_prompts(&place, 20);
    place.ok(&args("one.jsonl", &["--batch", "1"]));
    place.ok(&args("all.jsonl", &[]));
    // Less than the pages of two texts at their longest: some give way and are read again.
    let summary: Value =
        serde_json::from_str(&place.ok(&args("few.jsonl", &["--batch", "7", "--cache", "200KiB", "--format", "json"])))
            .unwrap();
    let one = std::fs::read(place.path("one.jsonl")).unwrap();
    assert_eq!(std::fs::read(place.path("all.jsonl")).unwrap(), one);
    assert_eq!(std::fs::read(place.path("few.jsonl")).unwrap(), one);
    assert!(summary["texts_read_again"].as_u64().unwrap() > 0, "{summary}");
    let lines = lines(&place, "one.jsonl");
    for (i, line) in lines.iter().enumerate() {
        assert_eq!((&line["line"], &line["id"]), (&(i + 1).into(), &format!("p{i}").into()));
        assert!(line["text"].is_string() && line["tokens"].as_u64().unwrap() <= 30, "{line}");
    }
    // Started again there is nothing left to do; with another seed the file is not this one's.
    let again: Value = serde_json::from_str(&place.ok(&args("one.jsonl", &["--format", "json"]))).unwrap();
    assert_eq!((&again["texts_before"], &again["tokens"]), (&20.into(), &0.into()));
    let output = place.run(&args("one.jsonl", &["--seed", "5"]));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && text.contains("its texts were written with sampling"), "{text}");
    assert!(text.contains("name another file for the texts"), "{text}");
}

#[test]
fn a_run_that_is_killed_goes_on_where_it_stopped() {
    let place = trained();
    write_prompts(&place, 40);
    place.ok(&args("whole.jsonl", &[]));
    let mut kills = 0;
    for attempt in 0..200 {
        let mut child = place.command(&args("out.jsonl", &["--batch", "4"])).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(60 + 37 * attempt % 200));
        if child.try_wait().unwrap().is_some_and(|status| status.success()) {
            break;
        }
        // One that has just ended cannot be killed.
        let _ = child.kill();
        child.wait().unwrap();
        kills += 1;
        if kills == 12 {
            // A line that was cut off is written anew.
            let mut text = std::fs::read(place.path("out.jsonl")).unwrap_or_default();
            text.extend(b"{\"line\": 9");
            if text.len() > 10 {
                std::fs::write(place.path("out.jsonl"), text).unwrap();
            }
            place.ok(&args("out.jsonl", &[]));
        }
    }
    let [whole, out] = ["whole.jsonl", "out.jsonl"].map(|name| std::fs::read_to_string(place.path(name)).unwrap());
    assert!(out == whole, "{kills} kills changed the file");
}

#[test]
fn samples_stops_and_log_probabilities_are_written() {
    let place = trained();
    write_prompts(&place, 4);
    let more = ["--samples", "3", "--stop", "e", "--stop", "n", "--logprobs", "--temperature", "1", "--top-p", "1"];
    place.ok(&args("out.jsonl", &more));
    let lines = lines(&place, "out.jsonl");
    assert_eq!(lines.len(), 12);
    for (i, line) in lines.iter().enumerate() {
        assert_eq!((&line["line"], &line["sample"]), (&(i / 3 + 1).into(), &(i % 3).into()));
        let text = line["text"].as_str().unwrap();
        assert!(!text.contains(['e', 'n']), "{line}");
        let logprobs = line["logprobs"].as_array().unwrap();
        assert_eq!(logprobs.len() as u64, line["tokens"].as_u64().unwrap());
        assert!(logprobs.iter().all(|x| x.as_f64().unwrap() <= 0.0), "{line}");
    }
    assert!(lines.iter().any(|line| line["stop"] == "stop_string"));
    assert!(lines.chunks(3).any(|of| of[0]["text"] != of[1]["text"]));
}

#[test]
fn what_is_wrong_with_a_line_stands_in_its_place_and_the_rest_goes_on() {
    let place = trained();
    let text = [
        r#"{"prompt": "line 1"}"#.to_owned(),
        r#"{"prompt": ""}"#.to_owned(),
        "not JSON".to_owned(),
        r#"{"text": "x"}"#.to_owned(),
        json!({"prompt": "long ".repeat(100)}).to_string(),
        r#"{"messages": [{"role": "user", "content": "hi"}]}"#.to_owned(),
        r#"{"prompt": "line 2"}"#.to_owned(),
    ];
    std::fs::write(place.path("prompts.jsonl"), text.join("\n")).unwrap();
    let output = place.run(&args("out.jsonl", &[]));
    let notes = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && notes.contains("5 prompts have an \"error\""), "{notes}");
    let lines = lines(&place, "out.jsonl");
    let error = |i: usize| lines[i]["error"].as_str().unwrap_or_default();
    let expected = [
        (1, "the prompt is empty"),
        (2, "not a JSON object"),
        (3, "neither \"prompt\" nor \"messages\" is there"),
        (4, "500 tokens leave no room in a context of 200"),
        (5, "no chat template is asked for"),
    ];
    expected.iter().for_each(|(i, text)| assert!(error(*i).contains(text), "{}", lines[*i]));
    assert!(lines[0]["text"].is_string() && lines[6]["text"].is_string());

    let refused = |more: &[&str], what: &[&str]| {
        let output = place.run(&args("other.jsonl", more));
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && what.iter().all(|what| text.contains(what)), "{text}");
    };
    refused(&["--cache", "1KiB"], &["holds no text of 200 tokens", "hint: give the cache more memory"]);
    refused(&["--cache", "much"], &["give bytes with a unit, such as 20GiB"]);
    refused(&["--repetition-penalty", "0"], &["repetition-penalty 0 has no meaning"]);
    std::fs::write(place.path("prompts.jsonl"), "\n").unwrap();
    refused(&[], &["it has no prompts", "a line is {\"prompt\""]);
    std::fs::remove_file(place.path("prompts.jsonl")).unwrap();
    refused(&[], &["prompts.jsonl: it cannot be read"]);
}

#[test]
fn generation_is_timed_against_its_bounds() {
    let place = Place::new();
    let args = ["bench", "generate", "run.toml", "--batch", "3", "--prompt", "40", "--tokens", "6"];
    let result: Value = serde_json::from_str(&place.ok(&[&args[..], &["--format", "json"]].concat())).unwrap();
    for field in ["prefill_tokens_per_s", "prefill_share", "tokens_per_s", "bound_s", "share", "bandwidth"] {
        assert!(result[field].as_f64().unwrap() > 0.0, "{field}: {result}");
    }
    assert_eq!((&result["texts"], &result["prompt"], &result["tokens"]), (&3.into(), &40.into(), &6.into()));
    let text = place.ok(&[&args[..], &["--profile", "trace.json"]].concat());
    assert!(text.contains("prefill: ") && text.contains("decode: ") && text.contains("cached_attention"), "{text}");
    assert!(place.path("trace.json").exists());
}

#[test]
fn ranks_that_share_a_model_write_what_one_writes() {
    let place = trained();
    write_prompts(&place, 6);
    let greedy = |out| args(out, &["--temperature", "0"]);
    let shared = |out| [&greedy(out)[..], &["--tp", "2"]].concat();
    place.ok(&greedy("one.jsonl"));
    place.ok(&shared("threads.jsonl"));
    let text = |out: &str| std::fs::read_to_string(place.path(out)).unwrap();
    assert_eq!(text("threads.jsonl"), text("one.jsonl"));
    // The same as processes, of which the first writes.
    let port = free_port();
    let of_rank = |rank: &str, args: &[&str]| {
        let places = [("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
        place.command(args).envs(places).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let both = |args: &[&str]| {
        ["1", "0"].map(|rank| of_rank(rank, args)).map(|rank| {
            let output = rank.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap()
        })
    };
    both(&shared("processes.jsonl"));
    assert_eq!(text("processes.jsonl"), text("one.jsonl"));
    let prompt = ["generate", "run", "--prompt", "line ", "--max-tokens", "12", "--temperature", "0"];
    let [second, first] = both(&[&prompt[..], &["--tp", "2"]].concat());
    assert_eq!((first, second), (place.ok(&prompt), String::new()));
    // As many as were asked for.
    let output = of_rank("0", &[&prompt[..], &["--tp", "4"]].concat()).wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("--tp 4, and 2 processes were started") && error.contains("pass --tp 2"), "{error}");
}
