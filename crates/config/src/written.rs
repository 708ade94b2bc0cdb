//! A config as text again: the resolved file, equality, and what changed between two.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::declare::{Effect, Key};
use crate::inherit::is_hub_name;
use crate::origin::Origin;
use crate::overrides;
use crate::schema::{Config, KEYS, value_of};
use crate::source::printable;
use crate::value::{CorpusConfig, Value};

/// A value that a run took on when it was resumed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// Steps that were done before it.
    pub step: u64,
    /// `table.key=value`.
    #[serde(rename = "change")]
    pub text: String,
}

impl Change {
    /// The key, `table.key`; whatever stands before the value where there is no such key.
    pub fn key(&self) -> &str {
        let written = || self.text.split('=').next().unwrap_or_default().trim();
        overrides::read(overrides::CHANGE, &self.text).map_or_else(|_| written(), |(named, _)| named.key.path)
    }
}

/// A key with different values in two configs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// `table.key`.
    pub path: &'static str,
    /// The value of the config that was asked, as TOML; `not set` where it has none.
    pub ours: String,
    /// The value of the other config.
    pub theirs: String,
    /// Whether a run may take on another value when it is resumed.
    pub changeable: bool,
    /// Whether our value was not given: it follows from others.
    pub follows: bool,
}

impl Config {
    /// Every key with its value and, as a comment, its origin. Reads back as an equal config from any folder:
    /// paths are written absolute (a folder whose name is not UTF-8 is written with replacement characters).
    pub fn resolved_toml(&self) -> String {
        let mut text = String::new();
        let mut table = "";
        for key in KEYS {
            if key.table != table {
                let gap = if table.is_empty() { "" } else { "\n" };
                let _ = writeln!(text, "{gap}[{}]", key.table);
                table = key.table;
            }
            let _ = match self.written(key) {
                Some(value) => writeln!(text, "{} = {value}  # {}", key.name, self.origin_text(key)),
                None => writeln!(text, "# {} is not set", key.name),
            };
        }
        text
    }

    /// The keys of `[model]` as TOML, without the preset that some of them may be from.
    pub fn model_toml(&self) -> String {
        let mut text = "[model]\n".to_owned();
        for key in KEYS.iter().filter(|key| key.table == "model" && key.name != "preset") {
            if let Some(value) = value_of(self, key) {
                let _ = writeln!(text, "{} = {value}", key.name);
            }
        }
        text
    }

    /// The keys that change the trajectory of a run and differ between the two configs.
    pub fn differences(&self, other: &Config) -> Vec<Difference> {
        let difference = |key: &Key| Difference {
            path: key.path,
            ours: text(self.decisive(key)),
            theirs: text(other.decisive(key)),
            changeable: key.effect == Effect::Changeable,
            follows: !self.is_given(key.path),
        };
        let differ = |key: &&Key| key.effect != Effect::Conduct && self.decisive(key) != other.decisive(key);
        KEYS.iter().filter(differ).map(difference).collect()
    }

    /// Whether the user gave the key `table.key`, or a preset: its value is no default.
    pub fn is_given(&self, path: &str) -> bool {
        !matches!(self.provenance.origins.get(path), Some(Origin::Default) | None)
    }

    /// Whether the folder that `train.init_from` names gave the key its value.
    pub fn is_inherited(&self, path: &str) -> bool {
        matches!(self.provenance.origins.get(path), Some(Origin::InitFrom))
    }

    /// The value of the key `table.key` as TOML; `not set` where it has none.
    pub fn value(&self, path: &str) -> String {
        text(KEYS.iter().find(|key| key.path == path).and_then(|key| self.written(key)))
    }

    /// The part of a value that changes a run: where files are does not, what they are called does.
    fn decisive(&self, key: &Key) -> Option<Value> {
        match (key.path, value_of(self, key)) {
            ("data.corpora", Some(Value::Corpora(mut corpora))) => {
                corpora.iter_mut().for_each(|corpus| corpus.paths.clear());
                Some(Value::Corpora(corpora))
            }
            // A name on the hub is that of a revision.
            ("data.tokenizer" | "train.init_from" | "lora.init_from", Some(Value::Text(text)))
                if is_hub_name(&self.pinned(key.path, &text)) =>
            {
                Some(Value::Text(self.pinned(key.path, &text)))
            }
            ("data.tokenizer" | "data.chat_template", Some(Value::Text(path))) => {
                let name = Path::new(&path).file_name().map(|name| name.to_string_lossy().into_owned());
                Some(Value::Text(name.unwrap_or(path)))
            }
            ("train.init_from", Some(_)) => {
                let path = self.init_from()?;
                let name = path.file_name().map_or(path.as_os_str(), |name| name);
                Some(Value::Text(name.to_string_lossy().into_owned()))
            }
            (_, value) => value,
        }
    }

    /// The value of a key, with paths resolved so that it means the same from any folder.
    fn written(&self, key: &Key) -> Option<Value> {
        let text = |path: PathBuf| path.to_string_lossy().into_owned();
        match key.path {
            "data.paths" => {
                let pinned = |path: &String| self.pinned(key.path, path);
                Some(Value::Texts(self.data.paths.iter().map(pinned).collect()))
            }
            "eval.tasks" => Some(Value::Texts(self.task_paths().into_iter().map(text).collect())),
            "data.corpora" => {
                let pinned = |path: &String| self.pinned(key.path, path);
                let corpus = |corpus: &CorpusConfig| CorpusConfig {
                    paths: corpus.paths.iter().map(pinned).collect(),
                    ..corpus.clone()
                };
                Some(Value::Corpora(self.data.corpora.iter().map(corpus).collect()))
            }
            "data.tokenizer" if self.data.tokenizer == "bytes" => value_of(self, key),
            "data.tokenizer" => Some(Value::Text(self.pinned(key.path, &self.data.tokenizer))),
            "data.chat_template" => self.chat_template_path().map(|path| Value::Text(text(path))),
            "data.prepared" => self.prepared_dir().map(|path| Value::Text(text(path))),
            "data.cache" => self.cache_dir().map(|path| Value::Text(text(path))),
            "train.init_from" => self.train.init_from.as_ref().map(|name| Value::Text(self.pinned(key.path, name))),
            "lora.init_from" => self.lora.init_from.as_ref().map(|name| Value::Text(self.pinned(key.path, name))),
            "checkpoint.mirror" => self.mirror_dir().map(|path| Value::Text(text(path))),
            _ => value_of(self, key),
        }
    }

    fn origin_text(&self, key: &Key) -> String {
        let file = Path::new(&self.provenance.file_name);
        let file = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy();
        match self.provenance.origins.get(key.path) {
            Some(Origin::Preset(name)) => format!("preset {name}"),
            Some(Origin::File { line }) => format!("{}:{line}", printable(&file)),
            Some(Origin::Set) => "--set".into(),
            Some(Origin::InitFrom) => "train.init_from".into(),
            Some(Origin::Found(how)) => format!("default: {how}"),
            Some(Origin::Auto(how)) => format!("auto: {how}"),
            Some(Origin::Change { step }) => format!("--change at step {step}"),
            Some(Origin::Default) | None => "default".into(),
        }
    }
}

fn text(value: Option<Value>) -> String {
    value.map_or("not set".into(), |value| value.to_string())
}

/// Compares values, not origins; paths as resolved.
impl PartialEq for Config {
    fn eq(&self, other: &Self) -> bool {
        KEYS.iter().all(|key| self.written(key) == other.written(key))
    }
}
