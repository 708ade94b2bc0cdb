//! Every config of `examples/` is explained as its own comments say, and fits what it is written for.

mod common;

use common::Place;
use std::path::Path;

#[test]
fn every_example_is_explained_and_fits() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (place, mut count) = (Place::new(), 0);
    // A folder to fine-tune.
    place.ok(&["train", "run.toml", "--run-dir", "run", "--set", "train.steps=1"]);
    place.ok(&["checkpoint", "export", "run", "--out", "hf"]);
    let init_from = format!("train.init_from={}", place.path("hf").display());
    let mut files: Vec<_> = root.join("examples").read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for file in files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "toml")) {
        let name = file.file_name().unwrap().to_str().unwrap();
        let text = std::fs::read_to_string(file).unwrap();
        let shown = text.lines().find_map(|line| line.strip_prefix("#     lockstep explain examples/"));
        let mut args: Vec<&str> = shown.map_or(Vec::new(), |shown| shown.split(' ').skip(1).collect());
        if text.contains("device = \"cuda\"") && !args.contains(&"--gpu") {
            args.extend(["--gpu", "h100"]);
        }
        if text.contains("init_from") {
            args.extend(["--set", &init_from]);
        }
        let output = place.command(&[&["explain", file.to_str().unwrap()], &args[..]].concat()).output().unwrap();
        let (said, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{name}: {error}");
        assert!(said.contains("fits: ") || args.contains(&"--sequence-lengths"), "{name}: {said}");
        count += 1;
    }
    assert_eq!(count, 12);
}
