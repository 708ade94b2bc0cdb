//! What is whose: the code map of ARCHITECTURE.md is that of the crates.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

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
    let rows = text.lines().filter(|line| line.starts_with("| `"));
    let mut above: BTreeSet<String> = BTreeSet::new();
    for row in rows {
        let cells: Vec<&str> = row.split(" | ").collect();
        let (name, listed) = (cells[0].trim_matches(['|', ' ', '`']), cells[2].trim());
        match listed {
            "all above" => assert!(uses(name).is_subset(&above), "{name} uses {:?}", uses(name)),
            "–" => assert_eq!(uses(name), BTreeSet::new(), "{name}"),
            listed => {
                let listed: BTreeSet<String> = listed.split(", ").map(str::to_owned).collect();
                assert_eq!(uses(name), listed, "{name}");
                assert!(listed.is_subset(&above), "{name} uses a crate that stands below it");
            }
        }
        above.insert(name.to_owned());
    }
    let crates = std::fs::read_dir(project().join("crates")).unwrap();
    let all: BTreeSet<String> = crates.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(above, all, "the code map and crates/ name different crates");
}
