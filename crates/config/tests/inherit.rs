//! What `train.init_from` and `--set model.preset` decide, and what they say to who says otherwise.

use lockstep_config::{Config, Inherited, Located, NamedFiles, NotInherited, Opener};
use lockstep_ir::Hint;
use std::path::Path;

const THEIRS: &str = "[model]\narchitecture = \"qwen2\"\nvocab_size = 300\nlayers = 2\ndim = 32\nheads = 4\nkv_heads = 2\n\
                      ffn = 48\nrope_theta = 10000.0\n[data]\ntokenizer = \"/hf/tokenizer.json\"\neos_token = \"<end>\"\nbos_token = \"<s>\"\n";

/// A config file beside which there is a folder `hf` of weights.
fn load(text: &str, set: &[&str]) -> Result<Config, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.toml");
    std::fs::write(&path, text).unwrap();
    let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
    let inherit = |from: &Path| match from.strip_prefix(folder.path()) {
        Ok(name) if name == Path::new("hf") => {
            Ok(Some(Inherited { name: "hf/config.json".into(), text: THEIRS.into() }))
        }
        _ => Err(NotInherited { problem: "no such folder".into(), hint: "name another".into() }),
    };
    let shown = |error: lockstep_config::ConfigError| error.with_hint().replace(folder.path().to_str().unwrap(), "");
    Config::load_with(&path, &set, &inherit).map_err(shown)
}

#[test]
fn the_model_and_the_tokenizer_are_those_of_the_weights() {
    let config = load("[train]\ninit_from = \"hf\"\n", &[]).unwrap();
    assert_eq!((config.model.layers, config.model.head_dim, config.model.rope_theta), (2, 8, 10000.0));
    assert_eq!(config.data.tokenizer, "/hf/tokenizer.json");
    let text = config.resolved_toml();
    for line in [
        "vocab_size = 300  # train.init_from\n",
        "tokenizer = \"/hf/tokenizer.json\"  # train.init_from\n",
        "eos_token = \"<end>\"  # train.init_from\n",
        "bos_token = \"<s>\"  # train.init_from\n",
        "head_dim = 8  # default\n",
    ] {
        assert!(text.contains(line), "{line}{text}");
    }
    // Written out, it needs them no more.
    assert_eq!(Config::parse(&text, "run.toml", &[]).unwrap(), config);
    assert_eq!(load(&text, &["train.init_from=\"gone\""]).unwrap().model, config.model);
    let model = Config::parse(&config.model_toml(), "run.toml", &[]).unwrap().model;
    assert_eq!(model, config.model);
}

#[test]
fn what_agrees_may_be_said_and_what_is_no_shape_may_be_changed() {
    let agreeing =
        "[model]\nlayers = 2\nrope_theta = 5e5\n[data]\ntokenizer = \"bytes\"\n[train]\ninit_from = \"hf\"\n";
    let config = load(agreeing, &["model.dim=32"]).unwrap();
    assert_eq!((config.model.rope_theta, config.data.tokenizer.as_str(), config.data.eos_token), (5e5, "bytes", None));
    assert_eq!(config.data.bos_token, None);
}

#[test]
fn what_contradicts_the_weights_is_refused_where_it_stands() {
    let error = load("[model]\nlayers = 3\n[train]\ninit_from = \"hf\"\n", &[]).unwrap_err();
    assert_eq!(
        error,
        "model.layers = 3 contradicts the weights of train.init_from: 2 in hf/config.json\n  --> /run.toml:2\n  |\n\
         2 | layers = 3\n  |          ^\nhint: leave it out: the shape of the model is taken from train.init_from"
    );
    let error = load("[train]\ninit_from = \"hf\"\n", &["model.ffn=64"]).unwrap_err();
    assert!(error.starts_with("model.ffn = 64 contradicts the weights") && error.contains("--set"), "{error}");
    let error = load("[model]\npreset = \"qwen2.5-0.5b\"\n[train]\ninit_from = \"hf\"\n", &[]).unwrap_err();
    assert!(error.starts_with("model.preset = \"qwen2.5-0.5b\" has model."), "{error}");
    let error = load("[train]\ninit_from = \"gone\"\n", &[]).unwrap_err();
    assert!(error.starts_with("no such folder\n  --> /run.toml:2\n"), "{error}");
}

#[test]
fn a_preset_of_the_command_line_wins_over_the_shape_in_the_file() {
    let text = "[model]\narchitecture = \"gpt2\"\nvocab_size = 256\nlayers = 2\ndim = 32\nheads = 4\npositions = 64\n\
                dropout = 0.0\n[train]\nseq = 64\n";
    let config = load(text, &["model.preset=llama-15m", "model.layers=3"]).unwrap();
    let preset = Config::parse("[model]\npreset = \"llama-15m\"\nlayers = 3\n", "run.toml", &[]).unwrap();
    let (mut ours, theirs) = (config.model.clone(), preset.model);
    ours.preset.clone_from(&theirs.preset);
    assert_eq!(ours, theirs);
    let [warning] = config.warnings() else { panic!("{:?}", config.warnings()) };
    assert!(warning.starts_with("--set model.preset takes the place of keys of "), "{warning}");
    assert!(
        warning.ends_with(": model.architecture, model.dim, model.heads, model.positions, model.vocab_size"),
        "{warning}"
    );
    // In the file, the keys beside it count as ever.
    let config = load("[model]\npreset = \"llama-15m\"\nlayers = 3\n", &[]).unwrap();
    assert_eq!((config.model.layers, config.warnings().len()), (3, 0));
}

/// A hub with one model, at a commit.
struct OneModel(&'static str);

impl Opener for OneModel {
    fn inherited(&self, folder: &Path) -> Result<Option<Inherited>, NotInherited> {
        assert_eq!(folder, Path::new("/cache"));
        Ok(Some(Inherited { name: "hub".into(), text: THEIRS.replace("/hf/tokenizer.json", "hf:org/name") }))
    }

    fn located(&self, named: &NamedFiles<'_>) -> Result<Option<Located>, NotInherited> {
        let paths = match (named.key, named.text.strip_prefix("hf:")) {
            (_, None) => return Ok(None),
            ("train.init_from", Some("org/name")) => vec!["/cache".into()],
            ("data.tokenizer", Some("org/name")) => vec!["/cache/tokenizer.json".into()],
            ("data.paths", Some("org/data")) => vec!["/cache/a.txt".into(), "/cache/b.txt".into()],
            _ => {
                return Err(NotInherited {
                    problem: format!("{}: not there", named.text),
                    hint: "name another".into(),
                });
            }
        };
        Ok(Some(Located { pinned: format!("{}@{}", named.text, self.0), paths }))
    }
}

#[test]
fn names_are_kept_with_their_revision_and_lead_to_paths() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.toml");
    let load = |text: &str, commit| {
        std::fs::write(&path, text).unwrap();
        Config::load_with(&path, &[], &OneModel(commit))
    };
    let text = "[data]\npaths = [\"own\", \"hf:org/data\"]\n[train]\ninit_from = \"hf:org/name\"\n";
    let config = load(text, "c1").unwrap();
    assert_eq!(config.init_from().as_deref(), Some(Path::new("/cache")));
    assert_eq!(config.tokenizer_path().as_deref(), Some(Path::new("/cache/tokenizer.json")));
    let own = folder.path().join("own");
    assert_eq!(config.data_paths(), [own.as_path(), Path::new("/cache/a.txt"), Path::new("/cache/b.txt")]);
    let resolved = config.resolved_toml();
    assert!(resolved.contains("init_from = \"hf:org/name@c1\"  # run.toml:4\n"), "{resolved}");
    assert!(resolved.contains("tokenizer = \"hf:org/name@c1\"  # train.init_from\n"), "{resolved}");
    assert!(resolved.contains("\"hf:org/data@c1\"]"), "{resolved}");
    // Read without a hub, from any folder, and with changes: the same.
    let again = Config::parse(&resolved, "/elsewhere/run.toml", &[]).unwrap();
    assert!(again == config && again.differences(&config).is_empty());
    assert_eq!(again.hub_names(), config.hub_names());
    let change = lockstep_config::Change { step: 1, text: "train.steps=7".into() };
    let changed = config.with_changes(&[change]).unwrap();
    assert_eq!((changed.train.steps, changed.init_from()), (7, config.init_from()));
    // Another commit is another run.
    let moved: Vec<&str> = load(text, "c2").unwrap().differences(&config).iter().map(|d| d.path).collect();
    assert_eq!(moved, ["data.tokenizer", "train.init_from"]);

    let error = load(&text.replace("hf:org/data", "hf:org/nothing"), "c1").unwrap_err().with_hint();
    assert!(error.starts_with("hf:org/nothing: not there\n") && error.contains("run.toml:2"), "{error}");
    // A config that is whole needs no weights, unless it begins.
    let whole = resolved.replace("\"hf:org/name@c1\"  # run.toml:4", "\"hf:org/gone\"");
    let whole = load(&whole.replace("@c1", ""), "c1").unwrap();
    assert_eq!(whole.init_from_not_found().map(|why| why.problem.as_str()), Some("hf:org/gone: not there"));
    assert_eq!(config.init_from_not_found(), None);
}
