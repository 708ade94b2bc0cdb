//! The words of the field: help, `config`, documents and sources say what PyTorch, Megatron and papers say, so that people find
//! things by the names that they know.

mod common;

use common::Place;
use std::path::{Path, PathBuf};

/// Phrases that were ours alone, each with the field's word for it.
const COINED: &[(&str, &str)] = &[
    ("originals", "master weights"),
    ("f32 original", "master weights"),
    ("the processor", "the CPU"),
    ("a processor", "a CPU"),
    ("matrix product", "matmul"),
    ("matrix products", "matmuls"),
    ("computed again", "recomputed"),
    ("computes again", "recomputes"),
    ("compute again", "recompute"),
    ("given up", "recomputed, not saved"),
    ("kept for backward", "saved for backward"),
    ("keep-set", "the activations that are saved"),
    ("memory bill", "memory breakdown"),
    ("billed", "counted"),
    ("lies over the mesh", "sharding"),
    ("hold a share of", "shard"),
    ("outbox", "send buffer"),
    ("courier", "communication thread"),
    ("mailbox", "message queue"),
    ("held-out loss", "validation loss"),
    ("held-out text", "validation text"),
    ("matmul ceiling", "measured matmul peak"),
    ("closed forms", "analytical formulas"),
    ("public shape", "preset, model size"),
    ("stretching of", "RoPE scaling"),
    ("a line up", "linear warmup"),
    ("falls in a line", "linear decay"),
    ("recorded graph", "CUDA graph"),
    ("recorded graphs", "CUDA graphs"),
    ("page-locked", "pinned"),
    ("slope of", "derivative"),
    ("takes gelu along", "fuses GELU into its epilogue"),
    ("throws the same", "draws the same mask"),
    ("nobody wants", "unused"),
    ("somebody wants", "used"),
    ("summand", "partial sum"),
    ("likeliest token", "greedy decoding, most probable"),
    ("likeliest tokens", "most probable tokens"),
];

/// The same where only people read: in sources these have other uses too.
const SHOWN: &[(&str, &str)] = &[
    ("ceiling", "measured peak"),
    ("ceilings", "measured peaks"),
    ("floor", "roofline bound"),
    ("floors", "roofline bounds"),
    ("growth", "scaling"),
    ("exchanges", "collectives, communication"),
    ("patience", "timeout"),
    ("separator", "EOS token"),
    ("priced", "with its cost"),
    ("prices", "costs"),
    ("held-out", "validation"),
];

/// Where a text has one of the phrases, in any letter case and over the ends of lines: the phrase and what to say instead.
fn found(text: &str, phrases: &[(&str, &str)]) -> Vec<String> {
    let text = text.to_lowercase().split_whitespace().collect::<Vec<_>>().join(" ");
    let inside = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let has = |phrase: &str| {
        text.match_indices(phrase)
            .any(|(at, _)| !inside(text[..at].chars().next_back()) && !inside(text[at + phrase.len()..].chars().next()))
    };
    phrases.iter().filter(|(phrase, _)| has(phrase)).map(|(phrase, say)| format!("{phrase:?}: say {say}")).collect()
}

/// A document without its `code`, which names fields and files.
fn prose(text: &str) -> String {
    text.split('`').step_by(2).collect::<Vec<_>>().join(" ")
}

/// A source without the marks of its comments, so that phrases are found over the ends of lines.
fn unmarked(text: &str) -> String {
    text.lines().map(|line| line.trim_start().trim_start_matches(['/', '!'])).collect::<Vec<_>>().join("\n")
}

fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// All files below a folder with one of these extensions.
fn files(folder: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.extend(files(&path, extensions));
        } else if path.extension().and_then(|e| e.to_str()).is_some_and(|e| extensions.contains(&e)) {
            all.push(path);
        }
    }
    all
}

/// The help of a command and of all commands below it.
fn help(place: &Place, command: &[&str]) -> Vec<(String, String)> {
    let text = place.ok(&[command, &["--help"]].concat());
    let below = text.split_once("Commands:\n").map_or("", |(_, rest)| rest.split("\n\n").next().unwrap_or(""));
    let names = below.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names: Vec<String> = names.filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect();
    let mut all = vec![(format!("lockstep {} --help", command.join(" ")), text.clone())];
    for name in names.iter().filter(|name| *name != "help") {
        all.extend(help(place, &[command, &[name.as_str()]].concat()));
    }
    all
}

fn check(texts: impl IntoIterator<Item = (String, String)>, phrases: &[&[(&str, &str)]]) {
    let phrases = phrases.concat();
    let coined: Vec<String> = texts
        .into_iter()
        .flat_map(|(name, text)| found(&text, &phrases).into_iter().map(move |found| format!("{name}: {found}")))
        .collect();
    assert!(coined.is_empty(), "{}", coined.join("\n"));
}

#[test]
fn phrases_are_found_whole_and_over_the_ends_of_lines() {
    let found = |text: &str| found(text, &[("given up", "not saved"), ("floor", "bound")]).len();
    assert_eq!(found("Values are given\nup, as a Floor."), 2);
    assert_eq!(found("a misgiven up, x.floor_s, floors"), 0);
    assert_eq!(prose("a `separator` of `b`"), "a   of  ");
}

#[test]
fn help_and_config_speak_the_words_of_the_field() {
    let place = Place::new();
    let texts = help(&place, &[]);
    assert!(texts.len() > 10 && texts.iter().any(|(name, _)| name == "lockstep data prepare --help"), "{texts:?}");
    check(texts, &[COINED, SHOWN]);
    check([("lockstep config".to_owned(), place.ok(&["config"]))], &[COINED, SHOWN]);
}

#[test]
fn documents_speak_the_words_of_the_field() {
    let root = project();
    let mut paths = files(&root.join("docs"), &["md"]);
    paths.extend(files(&root.join("bench"), &["md"]));
    paths.extend(["README.md", "ARCHITECTURE.md"].map(|name| root.join(name)));
    let name = |path: &Path| path.strip_prefix(&root).unwrap().display().to_string();
    check(paths.iter().map(|p| (name(p), prose(&std::fs::read_to_string(p).unwrap()))), &[COINED, SHOWN]);
    // What people search for is named where it is described.
    let all: String = paths.iter().map(|p| std::fs::read_to_string(p).unwrap()).collect();
    for word in [
        "FSDP",
        "mixed precision",
        "activation checkpointing",
        "GQA",
        "sliding window",
        "master weights",
        "gradient accumulation",
        "MFU",
    ] {
        assert!(all.to_lowercase().contains(&word.to_lowercase()), "no document names {word}");
    }
}

#[test]
fn sources_speak_the_words_of_the_field() {
    let root = project();
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(root.join("crates")).unwrap() {
        for part in ["src", "kernels"].map(|part| entry.as_ref().unwrap().path().join(part)) {
            if part.is_dir() {
                paths.extend(files(&part, &["rs", "cu", "cuh"]));
            }
        }
    }
    let name = |path: &Path| path.strip_prefix(&root).unwrap().display().to_string();
    check(paths.iter().map(|p| (name(p), unmarked(&std::fs::read_to_string(p).unwrap()))), &[COINED]);
}
