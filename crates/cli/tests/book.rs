//! The book (`docs/`) is whole, and its commands, and those of the README, run and print what their pages say.
//!
//! What stands between fences is known by the first words of the fence:
//! - `sh`: a script. It runs in the page's folder and must succeed.
//! - `sh serves`: each line is a server, which must say where it listens.
//! - `sh gpu`, `sh cluster`, `sh slow`, `sh install`: not run, for the reason that is named, and counted.
//! - `text`: after `sh`, lines that the script printed, in this order. `…` stands for any others, at the end of a line for its rest.
//! - `usage`: forms of commands, whose options must be in the command's help.
//! - anything after a line that is a file's name alone: that file, in the page's folder.
//!
//! Learners' pages share a folder that is empty at first, in the order of the book. Every other page has a folder of its own, with a small
//! config, `run.toml`, and runs of it.

mod common;

use common::Place;
use std::collections::BTreeMap;
use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::time::Instant;

/// How many lines may be left out, by reason. More of them is a decision, and so is another reason.
const NOT_RUN: [(&str, usize); 4] = [("cluster", 14), ("gpu", 30), ("install", 10), ("slow", 25)];

/// At least this many lines must be run.
const RUN: usize = 110;

/// From the folder of the book.
const README: &str = "../README.md";

/// What stands between a page's fences.
struct Block {
    /// Words after the fence.
    kind: String,
    text: String,
    /// The line before it, if that is the name of a file.
    file: Option<String>,
}

impl Block {
    /// Lines that are commands, comments left out.
    fn commands(&self) -> impl Iterator<Item = &str> {
        self.text.lines().filter(|line| !line.trim().is_empty() && !line.trim_start().starts_with('#'))
    }
}

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

fn read(page: &str) -> String {
    std::fs::read_to_string(docs().join(page)).unwrap_or_else(|e| panic!("{page}: {e}"))
}

/// The pages that SUMMARY.md lists, in their order.
fn pages() -> Vec<String> {
    links(&read("SUMMARY.md"))
}

/// Where a page links to.
fn links(text: &str) -> Vec<String> {
    let mut code = false;
    let mut found = Vec::new();
    for line in text.lines() {
        code ^= line.trim_start().starts_with("```");
        if !code {
            found.extend(line.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0.to_owned())));
        }
    }
    found
}

fn blocks(page: &str) -> Vec<Block> {
    let text = read(page);
    let mut found = Vec::new();
    let (mut open, mut before): (Option<(Block, usize)>, &str) = (None, "");
    for line in text.lines() {
        let (inner, indent) = (line.trim_start(), line.len() - line.trim_start().len());
        match (&mut open, inner.strip_prefix("```")) {
            (None, Some(kind)) => {
                let name = before.strip_prefix('`').and_then(|n| n.strip_suffix('`')).filter(|n| !n.contains(' '));
                let file = name.map(str::to_owned);
                open = Some((Block { kind: kind.to_owned(), text: String::new(), file }, indent));
            }
            (Some(_), Some(_)) => found.push(open.take().unwrap().0),
            (Some((block, indent)), None) => {
                block.text += line.get(*indent..).unwrap_or("");
                block.text.push('\n');
            }
            (None, None) => before = line,
        }
    }
    assert!(open.is_none(), "{page}: a fence is not closed");
    found
}

/// A heading as the address that mdBook and GitHub give it.
fn anchor(heading: &str) -> String {
    let letters = heading.trim_start_matches('#').trim().to_lowercase();
    letters
        .chars()
        .filter(|c| c.is_alphanumeric() || " -_".contains(*c))
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

#[test]
fn every_page_is_in_the_summary_and_every_link_leads_somewhere() {
    let pages = pages();
    let mut files = Vec::new();
    for folder in ["", "learn"] {
        for entry in std::fs::read_dir(docs().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|e| e == "md") {
                files.push(path.strip_prefix(docs()).unwrap().display().to_string());
            }
        }
    }
    for file in files.iter().filter(|file| *file != "SUMMARY.md") {
        assert!(pages.contains(file), "docs/{file} is not in docs/SUMMARY.md");
    }
    for page in &pages {
        let text = read(page);
        assert!(text.starts_with("# "), "{page} has no title");
        for link in links(&text).iter().filter(|link| !link.starts_with("http")) {
            let (file, part) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => page.clone(),
                _ => {
                    let joined = Path::new(page).parent().unwrap().join(file);
                    joined.to_str().unwrap().replace("learn/../", "")
                }
            };
            assert!(!target.starts_with(".."), "{page}: {link} is outside of the book; name the file in `…` instead");
            assert!(docs().join(&target).exists(), "{page}: {link} leads nowhere");
            if !part.is_empty() {
                let found = read(&target).lines().any(|l| l.starts_with('#') && anchor(l) == part);
                assert!(found, "{page}: {target} has no heading for #{part}");
            }
        }
    }
}

#[test]
fn every_command_of_the_book_is_run_or_counted() {
    let mut counts = BTreeMap::new();
    for page in pages().into_iter().chain([README.to_owned()]) {
        for block in blocks(&page) {
            let words: Vec<&str> = block.kind.split(' ').collect();
            let has_command = || block.text.lines().any(|line| line.trim_start().starts_with("lockstep "));
            let reason = match words[..] {
                ["sh"] | ["sh", "serves"] => "",
                ["sh", reason] => reason,
                ["usage"] => continue,
                _ => {
                    assert!(!has_command(), "{page}: commands belong into ```sh or ```usage:\n{}", block.text);
                    continue;
                }
            };
            *counts.entry(reason.to_owned()).or_insert(0) += block.commands().count();
        }
    }
    let run = counts.remove("").unwrap_or(0);
    assert!(run >= RUN, "{run} lines are run");
    for (reason, lines) in &counts {
        let most = NOT_RUN.iter().find(|(known, _)| known == reason).map_or(0, |(_, most)| *most);
        assert!(*lines <= most, "{lines} lines are not run, as `sh {reason}`: change NOT_RUN if that is meant");
    }
    println!("{run} lines are run; not run, by reason: {counts:?}");
}

#[test]
fn the_commands_of_the_book_run_and_print_what_it_says() {
    let base = Place::new();
    base.ok(&["train", "run.toml"]);
    std::fs::write(base.path("README.md"), "A text that a model may read.\n".repeat(40)).unwrap();
    std::fs::create_dir_all(base.path("docs")).unwrap();
    copy_folder(&docs().join("../examples"), &base.path("examples"));
    std::fs::write(base.path("docs/page.md"), "Another text, which it has not seen.\n".repeat(40)).unwrap();
    for copy in ["quickstart", "a", "b", "c"] {
        copy_folder(&base.path("runs/run"), &base.path(&format!("runs/{copy}")));
    }
    let (learners, users): (Vec<String>, Vec<String>) = pages().into_iter().partition(|p| p.starts_with("learn/"));
    // The longest first: learners' pages are one after the other.
    let alone = users.into_iter().chain([README.to_owned()]).map(|page| vec![page]);
    let work: Vec<Vec<String>> = std::iter::once(learners).chain(alone).collect();
    let queue = Mutex::new(work.into_iter());
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let Some(pages) = queue.lock().unwrap().next() else { break };
                    let dir = tempfile::tempdir().unwrap();
                    let folder = dir.path().join("book");
                    match pages[0].starts_with("learn/") {
                        true => std::fs::create_dir(&folder).unwrap(),
                        false => copy_folder(&base.path("."), &folder),
                    }
                    pages.iter().for_each(|page| run_page(page, &folder));
                }
            });
        }
    });
}

/// The README is read from the top: a run is trained before it is looked at, and nothing is installed that a reader cannot have.
#[test]
fn the_commands_of_the_readme_work_in_their_order() {
    let all = blocks(README);
    let lines: Vec<&str> = all.iter().filter(|b| b.kind.starts_with("sh")).flat_map(Block::commands).collect();
    let first = |what: &str| lines.iter().position(|line| line.contains(what)).unwrap_or_else(|| panic!("no {what}"));
    assert_eq!(lines[0].trim(), "cargo install --path crates/cli --locked");
    assert!(first("train examples/quickstart.toml") < first("runs/quickstart"), "{lines:#?}");
    let words = read(README).split_whitespace().count();
    assert!(words <= 1200, "the README has {words} words: a reader stops at 1200");
}

fn copy_folder(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg("-r").arg(from).arg(to).status().unwrap().success());
}

/// A script in a page's folder, with `lockstep` on the path and nothing that the user has set up.
fn script(text: &str, folder: &Path) -> Command {
    let binary = Path::new(env!("CARGO_BIN_EXE_lockstep")).parent().unwrap();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new("sh");
    command.args(["-eu", "-c", text]).current_dir(folder).stdin(Stdio::null()).env("HOME", folder);
    command.env("PATH", format!("{}:{path}", binary.display()));
    command.env("LOCKSTEP_HARDWARE", folder.join("hardware")).env("LOCKSTEP_MACHINES", folder.join("machines"));
    // With NVRTC `doctor` would compile all kernels, as the tests of lockstep-cuda do.
    command.env_remove("LOCKSTEP_CUDA_LIBRARIES");
    command
}

fn run_page(page: &str, folder: &Path) {
    let mut printed = String::new();
    for block in blocks(page) {
        if let Some(file) = &block.file {
            std::fs::write(folder.join(file), &block.text).unwrap();
        }
        match block.kind.as_str() {
            "sh" => {
                let begun = Instant::now();
                let Output { status, stdout, stderr } = script(&block.text, folder).output().unwrap();
                let stderr = String::from_utf8_lossy(&stderr);
                assert!(status.success(), "{page}:\n{}{stderr}", block.text);
                printed = String::from_utf8(stdout).unwrap();
                println!("{:6.2} s  {page}: {}", begun.elapsed().as_secs_f64(), block.text.lines().next().unwrap());
            }
            "sh serves" => block.commands().for_each(|line| serves(page, line, folder)),
            "text" => says(page, &block.text, &printed),
            "usage" => usage(page, &block.text, folder),
            _ => {}
        }
        if page == "planning.md" && block.text.contains("--recipe --tokens") {
            table_has(page, &printed);
        }
    }
}

/// Every line is among those that were printed, in order.
fn says(page: &str, expected: &str, printed: &str) {
    let mut lines = printed.lines();
    for line in expected.lines().map(str::trim_end).filter(|line| *line != "…") {
        let fits = |said: &str| match line.strip_suffix(" …") {
            Some(start) => said.starts_with(start),
            None => said.trim_end() == line,
        };
        assert!(lines.any(fits), "{page}: not printed, or not in this order: {line:?} in\n{printed}");
    }
}

/// A server says where it listens. It takes any port that is free.
fn serves(page: &str, line: &str, folder: &Path) {
    let line = line.split('#').next().unwrap().trim();
    let mut server = script(&format!("exec {line} --port 0"), folder).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    std::io::BufReader::new(server.stdout.take().unwrap()).read_line(&mut said).unwrap();
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(said.contains("http://127.0.0.1:"), "{page}: {line}: {said}");
}

/// Every option of these forms is in the help of its command.
fn usage(page: &str, text: &str, folder: &Path) {
    for form in text.replace("\n ", " ").lines() {
        let mut words = form.strip_prefix("lockstep ").unwrap_or_else(|| panic!("{page}: {form}")).split_whitespace();
        let name = |word: &&str| word.chars().all(|c| c.is_ascii_lowercase());
        let command: Vec<&str> = words.by_ref().take_while(name).collect();
        let help = script(&format!("lockstep {} --help", command.join(" ")), folder).output().unwrap();
        let help = String::from_utf8(help.stdout).unwrap();
        let option = |word: &str| {
            Some(word.trim_start_matches('[').trim_end_matches(']').to_owned()).filter(|w| w.starts_with("--"))
        };
        for option in form.split_whitespace().filter_map(option) {
            assert!(help.contains(&option), "{page}: {form}: no {option} in\n{help}");
        }
    }
}

/// The table of machines has the GPU-days that commands print.
fn table_has(page: &str, printed: &str) {
    let rows = read(page);
    for (_, days) in printed.lines().filter_map(|line| line.split_once(" days, ")) {
        let days = days.trim_end_matches(" GPU-days");
        assert!(rows.contains(&format!("| {days} |")), "{page}: {days} GPU-days are not in its table");
    }
}
