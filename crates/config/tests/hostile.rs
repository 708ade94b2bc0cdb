//! Input that no honest user writes: refused in a few lines, without a panic.

use lockstep_ir::Hint;
use std::fs;

use lockstep_config::{Config, ConfigError};
use lockstep_ir::counter;

fn refused(text: &str) -> ConfigError {
    let error = Config::parse(text, "run.toml", &[]).expect_err("the config must be refused");
    let shown = error.with_hint();
    assert!(shown.len() < 1500 && !shown.contains('\u{1b}'), "{shown}");
    assert!(shown.lines().last().is_some_and(|line| line.starts_with("hint: ")), "{shown}");
    error
}

fn refused_bytes(bytes: &[u8]) -> String {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("run.toml");
    fs::write(&path, bytes).expect("a small file");
    let error = Config::load(&path, &[]).expect_err("the config must be refused");
    error.with_hint().replace(&folder.path().display().to_string(), "DIR")
}

#[test]
fn a_file_is_loaded_from_disk() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("run.toml");
    fs::write(&path, "[model]\npreset = \"llama-29m\"\n[data]\npaths = [\"docs\"]\n").expect("a small file");
    let config = Config::load(&path, &["train.steps=7".to_owned()]).expect("a good config");
    assert_eq!(config.train.steps, 7);
    assert_eq!(config.data_paths(), [folder.path().join("docs")]);
    assert_eq!(config.base_dir(), folder.path());
}

#[test]
fn a_missing_file_is_named() {
    let error = Config::load("/no/such/run.toml".as_ref(), &[]).expect_err("there is no such file");
    assert_eq!(
        error.with_hint(),
        "cannot read /no/such/run.toml: No such file or directory (os error 2)
  --> /no/such/run.toml
hint: give the path of a config file that exists and can be read"
    );
}

#[test]
fn a_huge_file_is_refused() {
    assert_eq!(
        refused_bytes(&vec![b'#'; (1 << 20) + 1]),
        "the config file is larger than 1 MiB
  --> DIR/run.toml
hint: check that this is the config and not a data file"
    );
    assert_eq!(refused(&"#".repeat((1 << 20) + 1)).problem(), "the config file is larger than 1 MiB");
}

#[test]
fn bytes_that_are_not_utf8_are_refused() {
    assert_eq!(
        refused_bytes(b"[model]\npreset = \"\xff\xfe\"\n"),
        "the config file is not UTF-8 text
  --> DIR/run.toml:2
hint: save the file as UTF-8"
    );
}

#[test]
fn deep_nesting_is_refused() {
    let error = refused(&format!("x = {}{}", "[".repeat(100_000), "]".repeat(100_000)));
    assert_eq!(error.hint().as_deref(), Some("no value of the config is nested this deeply"));
    refused(&format!("{}x = 1", "a.".repeat(100_000)));
    refused(&format!("[{}x]", "a.".repeat(100_000)));
    refused(&format!("x = {}", "{a = ".repeat(100_000)));
}

#[test]
fn long_lines_and_control_characters_are_not_repeated() {
    refused(&format!("[train]\n{} = 1\n", "k".repeat(500_000)));
    refused(&format!("[train]\nsteps = \"{}\"\n", "9".repeat(500_000)));
    refused(&format!("{} = 1\n", "t".repeat(500_000)));
    refused("[train]\n\"\\u001b[31mred\" = 1\n");
    refused("[train]\nsteps = \"\\u001b[31mred\"\n");
    refused("[train]\nsteps = \u{1b}[31m\n");
}

#[test]
fn odd_files_are_refused_without_a_panic() {
    for text in [
        "",
        "\u{feff}",
        "=",
        "[",
        "]",
        "[]",
        "[[",
        "a",
        "\"",
        "'''",
        "[model",
        "[model]\n[model]\n",
        "\0",
        "🦀 = 🦀",
        "\"model.dim\" = 3",
        "[model]\ndim.x = 3",
        "[model]\ndim = {}",
        "model = {}",
        "model = []",
        "[model]\r\ndim = \r\n",
        "[train]\nseq = \"١٢\"",
        "[train]\nsteps = 1e400",
        "[train]\nsteps = -9999999999999999999999",
        "[\"\"]\n\"\" = 1",
        "[train]\nglobal_batch = \"0 tokens\"",
        "[train]\nglobal_batch = \"18446744073709551615 tokens\"",
        "[data]\npaths = [[]]",
        "[data]\npaths = [\"\"]",
        "[model.rope_scaling.factor]\nx = 1",
    ] {
        refused(text);
    }
    for set in ["", "=", ".=", "a.=1", ".b=1", "train.steps=\0", "train.steps.x=1", "model.rope_scaling={", "é=é"] {
        let text = "[model]\npreset = \"llama-15m\"\n";
        Config::parse(text, "run.toml", &[set.to_owned()]).expect_err(set);
    }
}

#[test]
fn every_prefix_of_a_config_is_read_or_refused() {
    let text = "[model]\npreset = \"llama-3.2-1b\"\nrope_scaling = { factor = 8, low_freq_factor = 1.0 }\n\
                [train]\nglobal_batch = \"4M tokens\" # é\n[data]\npaths = ['''a\n''', \"b\"]\n";
    for end in (0..text.len()).filter(|&end| text.is_char_boundary(end)) {
        let _ = Config::parse(&text[..end], "run.toml", &[]);
    }
}

#[test]
fn a_file_name_cannot_break_the_resolved_file() {
    let text = "[model]\npreset = \"llama-15m\"\n";
    let config = Config::parse(text, "/tmp/a\nseed = 3 #.toml", &[]).expect("a good config");
    let again = Config::parse(&config.resolved_toml(), "run.toml", &[]).expect("still a good config");
    assert_eq!(again, config);
}

#[test]
fn mutations_of_a_config_are_read_or_refused() {
    let good = "[model]\npreset = \"llama-3.2-1b\"\nrope_scaling = { factor = 8, low_freq_factor = 1.0 }\n[train]\n\
                global_batch = \"4M tokens\" # é\n[data]\ncorpora = [{ name = \"a\", paths = ['b'], weight = 0.3 }]\n\
                tokenizer = \"t.json\"\n[optimizer]\nlr = 3e-4\n";
    let pieces = ["=", "[", "]", "{", "}", "\"", "'''", "\n", ".", "-1", "1e999", "nan", "data", "🦀", "\0", "#"];
    for round in 0..10_000 {
        let mut draws = (0..).map(|i| counter::bits(counter::key(round, "fuzz"), i));
        let mut draw = |below: usize| (draws.next().expect("endless") % below.max(1) as u64) as usize;
        let mut text: Vec<char> = good.chars().collect();
        for _ in 0..1 + draw(3) {
            let at = draw(text.len());
            let end = (at + 1 + draw(12)).min(text.len());
            match draw(3) {
                0 => drop(text.drain(at..end)),
                1 => drop(text.splice(at..end, pieces[draw(pieces.len())].chars())),
                _ => drop(text.splice(at..at, pieces[draw(pieces.len())].chars())),
            }
        }
        let text: String = text.into_iter().collect();
        if let Err(error) = Config::parse(&text, "run.toml", &[]) {
            let shown = error.with_hint();
            assert!(shown.contains("\nhint: ") && !shown.contains('\u{1b}'), "{shown}");
        }
    }
}
