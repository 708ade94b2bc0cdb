//! The files of a revision as the hub lists them, and which of them are wanted. A server wrote it: nothing is believed unchecked.

use crate::name::{is_commit, is_hex, is_inside};
use crate::{HubError, HubName};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

const ADAPTERS: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];

/// What is small and stands beside the weights of a model.
const BESIDE: [&str; 9] = [
    CONFIG,
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.json",
];

/// Which files of a repository are wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HubFiles {
    /// A model: its config, its tokenizer if it has one, its weights as safetensors.
    Model,
    /// The same without weights.
    Description,
    /// The tokenizer and what stands beside it.
    Tokenizer,
    /// Adapters, as PEFT writes them.
    Adapters,
    /// The file that the name's path is, or the files below it with these extensions.
    Data(Vec<String>),
}

/// A file of a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HubFile {
    pub name: String,
    /// Its length, where the hub tells.
    pub bytes: Option<u64>,
    /// Its SHA-256, for large files, or the SHA-1 of its git object; none where it is still to be asked for.
    pub checksum: Option<String>,
}

/// The files of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listing {
    pub commit: String,
    pub files: BTreeMap<String, HubFile>,
}

impl Listing {
    /// Reads the hub's answer: `sha`, and `siblings` with `rfilename`, `size`, `blobId`, `lfs.sha256`.
    pub fn read(answer: &Value) -> Result<Self, String> {
        let commit = answer["sha"].as_str().filter(|sha| is_commit(sha)).ok_or("no commit in `sha`")?;
        let siblings = answer["siblings"].as_array().ok_or("no files in `siblings`")?;
        let mut files = BTreeMap::new();
        for sibling in siblings {
            let name = sibling["rfilename"].as_str().ok_or("a file without a name")?;
            if !is_inside(name) {
                return Err(format!("the file name {name:?}"));
            }
            let lfs = &sibling["lfs"];
            let sum = |value: &Value, length: usize| {
                value.as_str().filter(|text| text.len() == length && is_hex(text)).map(str::to_owned)
            };
            let checksum = if lfs.is_object() { sum(&lfs["sha256"], 64) } else { sum(&sibling["blobId"], 40) };
            let bytes = lfs["size"].as_u64().or(sibling["size"].as_u64());
            files.insert(name.to_owned(), HubFile { name: name.to_owned(), bytes, checksum });
        }
        Ok(Self { commit: commit.to_owned(), files })
    }

    /// In the form of the hub's answer.
    pub fn to_json(&self) -> Value {
        let sibling = |file: &HubFile| match &file.checksum {
            Some(sum) if sum.len() == 64 => {
                json!({ "rfilename": file.name, "size": file.bytes, "lfs": { "sha256": sum, "size": file.bytes } })
            }
            sum => json!({ "rfilename": file.name, "size": file.bytes, "blobId": sum }),
        };
        json!({ "sha": self.commit, "siblings": self.files.values().map(sibling).collect::<Vec<_>>() })
    }

    /// The files that are wanted, as far as they are known: the shards of weights are when their index is in `snapshot`.
    pub fn wanted(&self, name: &HubName, wanted: &HubFiles, snapshot: &Path) -> Result<Vec<&HubFile>, HubError> {
        let no = |file: &str| HubError::NoFile { name: name.clone().into(), file: file.to_owned() };
        let get = |file: &str| self.files.get(file).ok_or_else(|| no(file));
        let mut files: Vec<&HubFile> = match wanted {
            HubFiles::Data(extensions) => return self.data(name, extensions),
            HubFiles::Adapters => return ADAPTERS.into_iter().map(get).collect(),
            _ => BESIDE.iter().filter_map(|file| self.files.get(*file)).collect(),
        };
        match wanted {
            HubFiles::Tokenizer => {
                get(TOKENIZER)?;
            }
            HubFiles::Description => {
                get(CONFIG)?;
            }
            _ => {
                get(CONFIG)?;
                match (self.files.get(WEIGHTS), self.files.get(INDEX)) {
                    (Some(whole), _) => files.push(whole),
                    (None, None) => return Err(no(WEIGHTS)),
                    (None, Some(index)) => {
                        files.push(index);
                        for shard in shards(&snapshot.join(INDEX)) {
                            files.push(get(&shard)?);
                        }
                    }
                }
            }
        }
        Ok(files)
    }

    /// The files of a dataset.
    fn data(&self, name: &HubName, extensions: &[String]) -> Result<Vec<&HubFile>, HubError> {
        if let Some(file) = self.files.get(name.path()) {
            return Ok(vec![file]);
        }
        let folder = if name.path().is_empty() { String::new() } else { format!("{}/", name.path()) };
        let has = |file: &str, extension: &String| {
            let extension = extension.trim_start_matches('.').to_lowercase();
            file.to_lowercase().ends_with(&format!(".{extension}"))
        };
        // As in folders of one's own: what begins with a dot is passed over.
        let below = |file: &&HubFile| {
            let inside = file.name.strip_prefix(&folder);
            inside.is_some_and(|inside| !inside.split('/').any(|part| part.starts_with('.')))
                && (extensions.is_empty() || extensions.iter().any(|extension| has(&file.name, extension)))
        };
        let files: Vec<&HubFile> = self.files.values().filter(below).collect();
        if files.is_empty() {
            let place = if name.path().is_empty() { "it".to_owned() } else { name.path().to_owned() };
            let file = format!("file in {place} with one of the extensions {}", extensions.join(", "));
            return Err(HubError::NoFile { name: name.clone().into(), file });
        }
        Ok(files)
    }

    /// Whether a listing that was made from what is in the cache has all that a model may have beside its weights: what is not here
    /// may be on the hub, and who has these has asked for the others too.
    pub fn is_likely_whole(&self, name: &HubName, wanted: &HubFiles) -> bool {
        match wanted {
            HubFiles::Data(_) => self.files.contains_key(name.path()),
            HubFiles::Adapters => ADAPTERS.into_iter().all(|file| self.files.contains_key(file)),
            _ => self.files.contains_key(TOKENIZER) && self.files.contains_key("tokenizer_config.json"),
        }
    }
}

/// The files that an index names; none where it is not here or no index: who reads the weights says what is wrong with it.
fn shards(index: &Path) -> BTreeSet<String> {
    let index: Value =
        std::fs::read(index).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
    let files = index["weight_map"].as_object().into_iter().flat_map(|map| map.values());
    files.filter_map(Value::as_str).filter(|file| is_inside(file) && !file.contains('/')).map(str::to_owned).collect()
}
