//! What is whose: the code map of ARCHITECTURE.md is that of the crates, an architecture is named in one
//! place, keys of the config where the config is known, flags in `cli`, hints beside messages, and names tell types apart.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn read(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.as_ref().display()))
}

/// The crates of ours that a crate is built from; those of its tests alone are not among them.
fn uses(name: &str) -> BTreeSet<String> {
    let manifest = read(project().join(format!("crates/{name}/Cargo.toml")));
    let dependencies = manifest.split("[dependencies]").nth(1).unwrap_or_default().split("\n[").next().unwrap_or("");
    let ours = dependencies.lines().filter_map(|line| line.strip_prefix("lockstep-"));
    ours.filter_map(|line| line.split(['.', ' ']).next()).map(str::to_owned).collect()
}

#[test]
fn the_code_map_says_which_crate_uses_which() {
    let text = read(project().join("ARCHITECTURE.md"));
    let mut above: BTreeSet<String> = BTreeSet::new();
    // The section of a crate begins with its name, and a sentence of it says what the crate uses.
    for section in text.split("\n### `").skip(1) {
        let words = section.split_whitespace().collect::<Vec<_>>().join(" ");
        let (name, rest) = words.split_once('`').unwrap();
        let (_, listed) = rest.split_once("Uses ").unwrap_or_else(|| panic!("{name}: what it uses is not said"));
        match listed.split('.').next().unwrap_or_default() {
            "all above" => assert!(uses(name).is_subset(&above), "{name} uses {:?}", uses(name)),
            "no other crate" => assert_eq!(uses(name), BTreeSet::new(), "{name}"),
            listed => {
                let listed: BTreeSet<String> = listed.split(", ").map(|one| one.trim_matches('`').to_owned()).collect();
                assert_eq!(uses(name), listed, "{name}");
                assert!(listed.is_subset(&above), "{name} uses a crate that stands below it");
            }
        }
        above.insert(name.to_owned());
    }
    assert_eq!(above, crates().into_iter().collect(), "the code map and crates/ name different crates");
}

/// Paths of the page that stand in backticks and have a folder: below crates/, or of the project.
#[test]
fn files_that_the_code_map_names_are_there() {
    let text = read(project().join("ARCHITECTURE.md"));
    let crates = crates();
    // `train/tests` is of a crate, `run/step.rs` is of no folder of ours: a name without its crate.
    let inside = ["src/", "tests", "data", "kernels"];
    let mut named = 0;
    for path in text.split('`').skip(1).step_by(2).filter(|path| !path.contains([' ', '{', '*', '\n', '"'])) {
        let Some((folder, rest)) = path.split_once('/') else { continue };
        let file = match crates.iter().any(|name| name == folder) {
            true if inside.iter().any(|of| rest.starts_with(of)) => project().join("crates").join(path),
            false if project().join(folder).is_dir() => project().join(path),
            _ => continue,
        };
        assert!(file.exists(), "ARCHITECTURE.md names {path}, which is not there");
        named += 1;
    }
    assert!(named > 100, "only {named} paths were found");
}

/// All crates, as they are in the tree.
fn crates() -> Vec<String> {
    let all = std::fs::read_dir(project().join("crates")).unwrap();
    let mut all: Vec<String> = all.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    all.sort();
    all
}

/// The sources of some crates, without their tests: path and text.
fn sources(crates: &[String]) -> Vec<(String, String)> {
    fn below(folder: &Path, all: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let test = path.file_stem().is_some_and(|name| name == "tests");
            match path.is_dir() {
                true => below(&path, all),
                false if path.extension().is_some_and(|e| e == "rs") && !test => all.push(path),
                false => {}
            }
        }
    }
    let mut all = Vec::new();
    crates.iter().for_each(|name| below(&project().join(format!("crates/{name}/src")), &mut all));
    let shown = |path: &Path| path.strip_prefix(project()).unwrap().display().to_string();
    let untested = |text: String| text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default().to_owned();
    all.iter().map(|path| (shown(path), untested(read(path)))).collect()
}

#[test]
fn an_architecture_is_a_file_and_a_line() {
    let names: Vec<String> = lockstep_config::Architecture::ALL.iter().map(|one| format!("{one:?}")).collect();
    assert!(names.len() >= 5);
    for (path, text) in sources(&crates()) {
        for name in &names {
            let named = format!("Architecture::{name}");
            assert!(!text.contains(&named), "{path} names {named}: an architecture's file and line are all of it");
        }
        // Its word too: nothing outside its line and its file compares it, has an arm for it or lists it in a message.
        if path.starts_with("crates/model/") || path == "crates/config/src/architecture.rs" {
            continue;
        }
        for word in lockstep_config::Architecture::WORDS {
            let quoted = format!("\"{word}\"");
            let branches = text.match_indices(&quoted).any(|(at, _)| {
                let (before, after) = (text[..at].trim_end(), text[at + quoted.len()..].trim_start());
                ["==", "!=", "|"].iter().any(|sign| before.ends_with(sign))
                    || ["==", "!=", "|", "=>"].iter().any(|sign| after.starts_with(sign))
            });
            let told = text.contains(&format!("\\\"{word}\\\""));
            assert!(!branches && !told, "{path} knows {quoted} by name: ask its `Features`");
        }
    }
    for word in lockstep_config::Architecture::WORDS {
        let file = project().join(format!("crates/model/src/architectures/{word}.rs"));
        assert!(file.is_file(), "{} is not there", file.display());
    }
}

#[test]
fn only_crates_that_know_the_config_name_its_keys() {
    let keys: Vec<&str> = lockstep_config::schema().iter().map(|key| key.path).collect();
    // A field of the same name is none.
    let inside = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || "_.".contains(c));
    let unaware: Vec<String> =
        crates().into_iter().filter(|name| name != "config" && !uses(name).contains("config")).collect();
    assert!(unaware.len() >= 8, "{unaware:?}");
    for (path, text) in sources(&unaware) {
        for key in &keys {
            let whole = |at: usize| {
                !inside(text[..at].chars().next_back())
                    && !inside(text[at + key.len()..].chars().next().filter(|c| *c != '.'))
            };
            let named = text.match_indices(key).any(|(at, _)| whole(at));
            assert!(!named, "{path} names {key}: give a typed error, and let `train` name the key");
        }
    }
}

#[test]
fn a_hint_is_a_field_and_no_part_of_a_message() {
    for (path, text) in sources(&crates()) {
        // A string may go on in the next line.
        let joined: String = text.split("\\\n").map(str::trim_start).collect();
        let prints = path == "crates/ir/src/hint.rs";
        assert_eq!(joined.contains("\\nhint:"), prints, "{path}: give the error a #[hint], and let `Hint` print it");
    }
}

#[test]
fn crates_below_the_command_name_none_of_its_flags() {
    for (path, text) in sources(&["host", "infer", "train"].map(str::to_owned)) {
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//")) {
            let flag =
                line.match_indices("--").any(|(at, _)| line[at + 2..].starts_with(|c: char| c.is_ascii_lowercase()));
            assert!(!flag, "{path}:{}: give a typed error, and let `cli` name the flag", number + 1);
        }
    }
}

#[test]
fn names_of_types_tell_them_apart() {
    // Where it is in the tree: crate, file, whether other crates can name it, name.
    let mut all: Vec<(String, String, bool, String)> = Vec::new();
    for name in crates() {
        let root = read(project().join(format!("crates/{name}/src/{}.rs", if name == "cli" { "main" } else { "lib" })));
        for (path, text) in sources(std::slice::from_ref(&name)) {
            for line in text.lines() {
                let public = line.starts_with("pub ");
                let line = line.trim_start().trim_start_matches("pub(crate) ").trim_start_matches("pub(super) ");
                let mut words = line.trim_start_matches("pub ").split(|c: char| !c.is_alphanumeric());
                if let Some("struct" | "enum" | "trait" | "type") = words.next()
                    && let Some(ty) = words.next()
                {
                    // What stands in the crate's root by name can be named by others.
                    let exported = public && root.split(|c: char| !c.is_alphanumeric()).any(|word| word == ty);
                    all.push((name.clone(), path.clone(), exported, ty.to_owned()));
                }
            }
        }
    }
    for vague in ["Place", "Shape", "Stage"] {
        let called: Vec<_> = all.iter().filter(|(.., ty)| ty == vague).map(|(_, path, ..)| path).collect();
        assert!(called.is_empty(), "{vague} tells nothing: {called:?}");
    }
    // What a function gives is each crate's own.
    for (i, (name, path, exported, ty)) in all.iter().enumerate().filter(|(_, (.., ty))| ty != "Result") {
        let other = all[i + 1..].iter().find(|(other, _, too, t)| other != name && *exported && *too && t == ty);
        assert!(other.is_none(), "{path} and {:?} both have a public {ty}", other.map(|(_, path, ..)| path));
    }
}

/// What `bench/scripts/extend.sh` builds and tests stands on code that moves: a patch that no longer applies is mended with the move.
#[test]
fn patches_that_measure_what_an_extension_costs_apply() {
    let patches = std::fs::read_dir(project().join("bench/extend")).unwrap();
    let mut patches: Vec<PathBuf> = patches.map(|entry| entry.unwrap().path()).collect();
    patches.sort();
    assert!(patches.len() >= 10, "{patches:?}");
    for patch in patches {
        let Ok(applied) = Command::new("git").args(["apply", "--check"]).arg(&patch).current_dir(project()).output()
        else {
            return eprintln!("skipped: no git");
        };
        let text = String::from_utf8_lossy(&applied.stderr);
        assert!(applied.status.success(), "{} does not apply: {text}", patch.display());
        let patch = read(patch);
        let limit = patch.lines().find_map(|line| line.strip_prefix("# limit: ")).unwrap();
        let counted =
            |line: &&str| ["crates", "docs"].iter().any(|of| line.starts_with(&format!("diff --git a/{of}/")));
        let files = patch.lines().filter(counted).count();
        assert!(files <= limit.parse().unwrap(), "{files} files: {patch}");
    }
}
