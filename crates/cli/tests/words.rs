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

/// Turns of a sentence that have to be read twice, in everything that people read, comments and texts of tests included.
const SENTENCES: &[(&str, &str)] = &[
    ("behind", "after, or follows: of order and time"),
    ("so many", "N, this many, or the name of the argument"),
    ("as many tokens a step", "the same number of tokens per step"),
    ("stops nothing", "a warning, which does not end the run"),
    ("only say", "presence alone decides"),
    ("is tried on", "its sample inputs"),
    ("are tried on", "their sample inputs"),
    ("without those that lack", "and drop the missing ones"),
    ("bytes in whole", "bytes as a whole"),
    ("is priced", "its cost is estimated"),
    ("are priced", "their cost is estimated"),
    ("meeting", "rendezvous"),
];

/// Where "behind" is what anybody would say.
const IDIOMS: &[&str] =
    &["left behind", "leave behind", "leaves behind", "leave nothing behind", "leaves nothing behind"];

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

/// What a source says to people: its comments and literal texts. Code between them cuts phrases.
fn written(source: &str) -> String {
    let (mut said, mut at) = (String::new(), 0);
    while let Some(c) = source[at..].chars().next() {
        let rest = &source[at..];
        let hashes = rest[1..].chars().take_while(|c| *c == '#').count();
        let raw = c == 'r' && rest[c.len_utf8() + hashes..].starts_with('"');
        let (len, text) = if rest.starts_with("//") {
            let len = rest.find('\n').unwrap_or(rest.len());
            (len, rest[..len].trim_start_matches(['/', '!']))
        } else if rest.starts_with("/*") {
            let len = rest.find("*/").map_or(rest.len(), |end| end + 2);
            (len, &rest[..len])
        } else if raw {
            let end = format!("\"{}", "#".repeat(hashes));
            let (open, len) = (2 + hashes, rest[2 + hashes..].find(&end).map_or(rest.len() - 2 - hashes, |at| at));
            ((open + len + end.len()).min(rest.len()), &rest[open..open + len])
        } else if c == '"' {
            let mut escaped = false;
            let ends = |c: char| {
                let end = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                end
            };
            let len = rest[1..].find(ends).unwrap_or(rest.len() - 1);
            ((len + 2).min(rest.len()), &rest[1..=len])
        } else if c == '\'' && rest[1..].starts_with('\\') {
            (3 + rest[3..].find('\'').map_or(0, |end| end + 1), "")
        } else if c == '\'' && rest[1..].chars().nth(1) == Some('\'') {
            (2 + rest[1..].chars().next().map_or(0, char::len_utf8), "")
        } else {
            (c.len_utf8(), if c.is_whitespace() { " " } else { "\u{b6}" })
        };
        if !(text == "\u{b6}" && said.ends_with('\u{b6}')) {
            said += text;
        }
        at += len;
    }
    said.replace("\\n", " ").replace('\\', " ")
}

/// Comments of a script, or of the code in a document.
fn remarks(text: &str) -> String {
    let remark = |line: &str| match line.trim_start().strip_prefix('#') {
        Some(rest) => rest.to_owned(),
        None => line.split_once(" # ").map_or("\u{b6}".to_owned(), |(_, rest)| rest.to_owned()),
    };
    text.lines().map(remark).collect::<Vec<_>>().join("\n")
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

/// Sources, tests, kernels, scripts, examples and documents: whatever is written by hand.
#[test]
fn sentences_are_read_once() {
    let root = project();
    let mut paths = vec![root.join("release.sh")];
    for folder in ["crates", "docs", "bench", "examples", ".ci"] {
        paths.extend(files(&root.join(folder), &["rs", "cu", "cuh", "c", "h", "js", "py", "sh", "toml", "md"]));
    }
    paths.extend(files_of(&root, "md"));
    // What machines wrote down, and these tables.
    let by_hand = |path: &PathBuf| !path.starts_with(root.join("bench/records")) && !path.ends_with("tests/words.rs");
    let texts = paths.into_iter().filter(by_hand).map(|path| {
        let text = std::fs::read_to_string(&path).unwrap();
        let said = match path.extension().and_then(|e| e.to_str()).unwrap_or_default() {
            "md" => format!("{}\n{}", prose(&text), remarks(&text)),
            "py" | "sh" | "toml" => remarks(&text),
            _ => written(&text),
        };
        let said = said.to_lowercase().split_whitespace().collect::<Vec<_>>().join(" ");
        let said = IDIOMS.iter().fold(prose(&said), |said, idiom| said.replace(idiom, ""));
        (path.strip_prefix(&root).unwrap().display().to_string(), said)
    });
    check(texts, &[COINED, SENTENCES]);
    let place = Place::new();
    let mut shown = help(&place, &[]);
    shown.push(("lockstep config".to_owned(), place.ok(&["config"])));
    check(shown, &[SENTENCES]);
}

/// The files of a folder itself with one extension.
fn files_of(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let all = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    all.filter(|path| path.is_file() && path.extension().is_some_and(|e| e == extension)).collect()
}

#[test]
fn comments_and_texts_are_told_from_code() {
    let said = written("/// After\n/// the first.\nlet behind = \"one \\\n   two\"; // 'a'\nlet c = '\"'; r#\"raw\"#");
    let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(said.starts_with("After the first. \u{b6}") && said.contains("one two") && said.contains("raw"), "{said}");
    assert!(!said.contains("behind"), "{said}");
    assert_eq!(remarks("# one\na = 1 # two\nbehind").split_whitespace().collect::<Vec<_>>(), ["one", "two", "\u{b6}"]);
}
