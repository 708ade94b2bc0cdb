//! Names on the Hugging Face Hub, from whole commands against a hub of this machine.

mod common;
#[path = "../../hub/tests/server/mod.rs"]
mod server;

use common::Place;
use serde_json::Value;
use server::{COMMIT, Heard, LocalHub, Mischief, sha256};
use std::process::Output;

/// Without `[model]`: the weights decide it.
const FINETUNE: &str = "\
[data]
paths = [\"corpus\"]

[train]
init_from = \"hf:org/name\"
steps = 4
seq = 32
global_batch = 8

[checkpoint]
every = 2
";

/// A hub that has a small model.
struct Test {
    place: Place,
    hub: LocalHub,
}

impl Test {
    fn new() -> Self {
        let (place, hub) = (Place::new(), LocalHub::new());
        place.ok(&["train", "run.toml", "--run-dir", "first", "--set", "train.steps=2", "--quiet"]);
        place.ok(&["checkpoint", "export", "first", "--out", "exported"]);
        for entry in std::fs::read_dir(place.path("exported")).unwrap() {
            let (path, name) = {
                let entry = entry.unwrap();
                (entry.path(), entry.file_name().into_string().unwrap())
            };
            hub.file(&name, std::fs::read(path).unwrap(), name.ends_with("safetensors"));
        }
        std::fs::remove_dir_all(place.path("exported")).unwrap();
        place.config(FINETUNE);
        Self { place, hub }
    }

    fn run(&self, args: &[&str], more: &[(&str, &str)]) -> Output {
        let mut command = self.place.command(args);
        for name in [
            "HF_TOKEN",
            "HUGGING_FACE_HUB_TOKEN",
            "HF_HUB_CACHE",
            "HF_HUB_OFFLINE",
            "HTTP_PROXY",
            "http_proxy",
            "ALL_PROXY",
        ] {
            command.env_remove(name);
        }
        command.env("HF_ENDPOINT", &self.hub.endpoint).env("HF_HOME", self.place.path("home"));
        command.envs(more.iter().copied()).output().unwrap()
    }

    fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args, &[]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn fails(&self, args: &[&str], more: &[(&str, &str)]) -> String {
        let output = self.run(args, more);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && !text.contains("panicked"), "{text}");
        text[text.find("error: ").unwrap_or_else(|| panic!("{text}"))..].to_owned()
    }

    /// The files that were asked for since the last call.
    fn heard(&self) -> Vec<String> {
        let name = |heard: Heard| heard.path.rsplit('/').next().unwrap_or_default().to_owned();
        self.hub.heard().into_iter().map(name).collect()
    }

    fn read(&self, path: &str) -> String {
        std::fs::read_to_string(self.place.path(path)).unwrap()
    }
}

#[test]
fn a_run_starts_from_a_name_and_says_what_it_took() {
    let test = Test::new();
    // What is explained needs no weights.
    assert!(test.ok(&["explain", "run.toml"]).contains("parameters"));
    let heard = test.heard();
    assert!(heard.iter().any(|file| file == "config.json") && !heard.iter().any(|file| file == "model.safetensors"));

    test.hub.once("model.safetensors", Mischief::Cut(1000)).once("model.safetensors", Mischief::Wrong);
    test.ok(&["train", "run.toml", "--run-dir", "run"]);
    assert_eq!(test.heard(), ["model.safetensors"; 3]);
    let (config, pinned) = (test.read("run/run.toml"), format!("hf:org/name@{COMMIT}"));
    assert!(config.contains(&format!("init_from = \"{pinned}\"  # run.toml:5\n")), "{config}");
    assert!(config.contains(&format!("tokenizer = \"{pinned}\"  # train.init_from\n")), "{config}");
    let start: Value = serde_json::from_str(test.read("run/starts.jsonl").lines().next().unwrap()).unwrap();
    let taken = &start["hub"][0];
    assert_eq!((&taken["name"], &taken["revision"]), (&"hf:org/name".into(), &COMMIT.into()), "{start}");
    let weights =
        std::fs::read(test.place.path("home/hub/models--org--name/snapshots").join(COMMIT).join("model.safetensors"));
    assert_eq!(taken["files"]["model.safetensors"], format!("sha256:{}", sha256(&weights.unwrap())), "{taken}");

    // A second start downloads nothing, nor does any other command, nor the same run by its resolved config.
    test.ok(&["train", "run.toml", "--run-dir", "again"]);
    assert_eq!(test.place.trajectory("run"), test.place.trajectory("again"));
    test.ok(&["train", "--from", "run", "--run-dir", "third"]);
    assert_eq!(test.place.trajectory("run"), test.place.trajectory("third"));
    for name in ["hf:org/name", "org/name", &pinned] {
        test.ok(&["generate", name, "--prompt", "line", "--max-tokens", "2"]);
    }
    test.ok(&["eval", "hf:org/name", "--data", "corpus/0.txt"]);
    test.ok(&["checkpoint", "import", "hf:org/name", "--out", "imported"]);
    test.ok(&["rehearse", "run.toml"]);
    assert_eq!(test.heard().len(), 0);
}

#[test]
fn adapters_on_the_hub_are_those_of_a_folder() {
    let test = Test::new();
    let lora = ["--set", "lora.rank=4"];
    test.ok(&[&["train", "run.toml", "--run-dir", "adapted", "--set", "optimizer.lr=0.05"], &lora[..]].concat());
    test.ok(&["checkpoint", "export", "adapted", "--adapter", "--out", "adapters"]);
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        let bytes = std::fs::read(test.place.path("adapters").join(name)).unwrap();
        test.hub.file(name, bytes, name.ends_with("safetensors"));
    }
    // The cache knows which files this revision has.
    std::fs::remove_dir_all(test.place.path("home")).unwrap();
    test.heard();
    let with = |dir, from| [&["train", "run.toml", "--run-dir", dir, "--set", from], &lora[..]].concat();
    test.ok(&with("named", "lora.init_from=\"hf:org/name\""));
    let heard = test.heard();
    assert_eq!(heard.iter().filter(|file| file.starts_with("adapter_")).count(), 2, "{heard:?}");
    test.ok(&with("folder", "lora.init_from=\"adapters\""));
    assert_eq!(test.place.trajectory("named"), test.place.trajectory("folder"));
    let config = test.read("named/run.toml");
    assert!(config.contains(&format!("init_from = \"hf:org/name@{COMMIT}\"  # --set\n")), "{config}");
    // A run that goes on has its own.
    test.ok(&[
        "train",
        "run.toml",
        "--run-dir",
        "named",
        "--set",
        "lora.rank=4",
        "--set",
        "lora.init_from=\"hf:org/name\"",
    ]);
    assert_eq!(test.heard().len(), 0);
    // Commands find the weights beside adapters in the cache, and say how to fetch them where they are not.
    test.ok(&["eval", "named", "--validation"]);
    std::fs::remove_dir_all(test.place.path("home")).unwrap();
    let error = test.fails(&["eval", "named", "--validation"], &[]);
    assert!(error.contains("are not in the hub's cache") && error.contains("hint: fetch them: `"), "{error}");
    assert_eq!(test.heard().len(), 0);
}

#[test]
fn a_run_goes_on_without_the_hub_at_the_revision_that_it_has() {
    let test = Test::new();
    test.ok(&["train", "run.toml", "--run-dir", "run"]);
    test.heard();
    // The branch has moved on, here and there.
    let refs = test.place.path("home/hub/models--org--name/refs/main");
    std::fs::write(&refs, "f".repeat(40)).unwrap();
    test.ok(&["train", "run.toml", "--run-dir", "run", "--change", "train.steps=6"]);
    assert!(test.read("run/run.toml").contains(&format!("hf:org/name@{COMMIT}")));
    assert_eq!(test.heard().len(), 0);
    // The cache is gone: what describes the model is enough.
    std::fs::remove_dir_all(test.place.path("home")).unwrap();
    test.ok(&["train", "run.toml", "--run-dir", "run", "--change", "train.steps=8"]);
    assert!(!test.heard().contains(&"model.safetensors".to_owned()));
    // By the resolved config, no connection is needed either.
    std::fs::remove_dir_all(test.place.path("home")).unwrap();
    let args = ["train", "run/run.toml", "--run-dir", "run", "--change", "train.steps=10"];
    let output = test.run(&args, &[("HF_HUB_OFFLINE", "1")]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!((test.heard().len(), test.place.trajectory("run").len()), (0, 10));
    // A run that begins does.
    let error = test.fails(&["train", "run/run.toml", "--run-dir", "new"], &[("HF_HUB_OFFLINE", "1")]);
    assert!(error.contains("HF_HUB_OFFLINE is set\n") && error.contains("`hf download org/name --revision"), "{error}");
}

#[test]
fn data_come_from_a_dataset() {
    let test = Test::new();
    for file in 0..8 {
        let text = std::fs::read(test.place.path(&format!("corpus/{file}.txt"))).unwrap();
        test.hub.file(&format!("data/{file}.txt"), text, file % 2 == 0);
    }
    let local = ["train", "run.toml", "--run-dir", "local"];
    test.ok(&local);
    test.heard();
    let set = "data.paths=[\"hf:datasets/org/name/data\"]";
    test.ok(&["explain", "run.toml", "--set", set]);
    assert_eq!(test.heard().len(), 0);
    test.ok(&["train", "run.toml", "--run-dir", "run", "--set", set]);
    assert_eq!(test.heard().len(), 9);
    assert_eq!(test.place.trajectory("run"), test.place.trajectory("local"));
    assert!(test.read("run/run.toml").contains(&format!("paths = [\"hf:datasets/org/name@{COMMIT}/data\"]")));
    // The same text is evaluated on, by the same names.
    let score = |data: &str| test.ok(&["eval", "local", "--data", data, "--format", "json"]);
    let loss = |text: String| serde_json::from_str::<Value>(&text).unwrap()["loss"].clone();
    let whole = loss(score("hf:datasets/org/name/data"));
    assert_eq!((test.heard().len(), &whole), (0, &loss(score("corpus"))));
    assert_eq!(loss(score("hf:datasets/org/name/data/3.txt")), loss(score("corpus/3.txt")));
    test.heard();
    let error = test.fails(&["eval", "local", "--data", "hf:datasets/org/name/none"], &[]);
    assert!(error.contains("hf:datasets/org/name") && error.contains("none"), "{error}");
    let error = test.fails(&["eval", "local", "--data", "org/nothing"], &[]);
    assert!(error.contains("org/nothing: no such file or folder, and hf:"), "{error}");
    test.heard();
    // It goes on with the tokens that it has.
    std::fs::remove_dir_all(test.place.path("home/hub/datasets--org--name")).unwrap();
    test.ok(&["train", "run.toml", "--run-dir", "run", "--set", set, "--change", "train.steps=6"]);
    assert_eq!(test.heard().len(), 0);
}

#[test]
fn what_does_not_come_is_told_with_what_to_do() {
    let test = Test::new();
    let error = test.fails(&["train", "run.toml"], &[("HF_HUB_OFFLINE", "1")]);
    assert!(error.contains("train.init_from: hf:org/name is not in ") && error.contains("--> run.toml:5"), "{error}");
    assert!(error.contains("`hf download org/name`"), "{error}");
    let error = test.fails(&["train", "run.toml"], &[("HF_ENDPOINT", "http://127.0.0.1:9")]);
    assert!(
        error.contains("http://127.0.0.1:9 cannot be reached") && error.contains("`hf download org/name`"),
        "{error}"
    );
    assert_eq!(test.heard().len(), 0);
    let error = test.fails(&["generate", "org/nobody", "--prompt", "x"], &[]);
    assert!(error.contains("org/nobody: no such folder, and hf:org/nobody: "), "{error}");
    // A folder of this name is a folder.
    std::fs::create_dir(test.place.path("org")).unwrap();
    test.heard();
    let error = test.fails(&["generate", "org/nobody", "--prompt", "x"], &[]);
    assert!(error.starts_with("error: org/nobody: no such run or checkpoint"), "{error}");
    assert_eq!(test.heard().len(), 0);
    // A token is asked for, and taken from where it is.
    test.hub.asks_for("hf_secret");
    let error = test.fails(&["train", "run.toml"], &[]);
    assert!(
        error.contains("access is restricted, and no token was found") && error.contains("`hf auth login`"),
        "{error}"
    );
    std::fs::create_dir_all(test.place.path("home")).unwrap();
    std::fs::write(test.place.path("home/token"), "hf_secret\n").unwrap();
    test.ok(&["train", "run.toml"]);
    let files = test.read("runs/run/run.toml") + &test.read("runs/run/starts.jsonl");
    assert!(!files.contains("hf_secret"));
}
