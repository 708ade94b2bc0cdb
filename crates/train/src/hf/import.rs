//! A Hugging Face folder becomes a run directory of no steps.

use super::{ATTACHMENT, CONFIG, HfFolder, Kept, SAME_FOLDER, TOKENIZER, TOKENIZER_CONFIG, unfit};
use crate::TrainError;
use lockstep_checkpoint::{About, NewFolder, TensorCopy, TensorSource, WeightsFolder, save_copies};
use lockstep_config::{Config, Inherited};
use lockstep_data::{Tokenizer, TokenizerSpec};
use lockstep_ir::DType;
use serde_json::{Value, json};
use std::path::Path;

/// What was imported.
#[derive(Clone, Debug)]
pub struct Imported {
    /// The config in the new folder.
    pub config: Config,
    /// Elements of all parameters.
    pub parameters: u64,
    /// Positions that the model was made for.
    pub context: usize,
    /// Whether the folder has a tokenizer.
    pub tokenizer: bool,
}

/// The largest `tokenizer.json` that is copied.
const MOST_TOKENIZER_BYTES: u64 = 256 << 20;

/// Writes the model in a Hugging Face folder to `out` as a run directory with a checkpoint of step 0: `run.toml`, the
/// tokenizer and `checkpoints/step-00000000`. `train.init_from`, `generate`, `eval` and [`export`](super::export) take it.
///
/// Weights pass in chunks. `progress` hears the bytes written and the bytes in all.
pub fn import(folder: &Path, out: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Imported, TrainError> {
    let FolderModel { folder: theirs, copies, text } = read_folder(folder)?;
    let config = Config::parse(&text, &out.join("run.toml").display().to_string(), &[])?;
    let (kept, tokenizer) = (Kept::of_folder(folder)?.to_json(), tokenizer_bytes(folder)?);

    let new = NewFolder::begin(out)?;
    new.write("run.toml", text.as_bytes())?;
    if let Some(tokenizer) = &tokenizer {
        new.write(TOKENIZER, tokenizer)?;
    }
    let context = theirs.config.context;
    let state = json!({
        "tokens": 0,
        "config": config.resolved_toml(),
        "lockstep": env!("CARGO_PKG_VERSION"),
        "imported": { "context": context },
    });
    let attachments = [(TOKENIZER, &tokenizer), (ATTACHMENT, &kept)];
    let attachments: Vec<_> = attachments.iter().filter_map(|(name, file)| Some((*name, file.as_deref()?))).collect();
    let about = About { state: &state, attachments: &attachments };
    let source = TensorSource::Folder(&theirs.weights);
    save_copies(&new.contents().join("checkpoints"), 0, "model", source, &copies, about, progress)?;
    new.publish()?;
    let parameters = copies.iter().map(|copy| copy.shape.iter().product::<usize>() as u64).sum();
    Ok(Imported { config, parameters, context, tokenizer: tokenizer.is_some() })
}

/// A Hugging Face folder that was understood.
pub(crate) struct FolderModel {
    pub(crate) folder: HfFolder,
    /// How its tensors are copied.
    pub(crate) copies: Vec<TensorCopy>,
    /// Its config, with the tokenizer by its name in the folder.
    pub(crate) text: String,
}

/// Reads all of a Hugging Face folder but the weights.
pub(crate) fn read_folder(path: &Path) -> Result<FolderModel, TrainError> {
    let folder = HfFolder::open(path)?;
    // Twice: whether all weights are bf16 can only be asked when it is known which they are.
    let plain = Config::parse(&folder.config.to_toml(), CONFIG, &[])?;
    let copies = folder.copies(&plain.model, SAME_FOLDER)?;
    let mut text = folder.config.to_toml() + &tokenizer_keys(path, TOKENIZER)?;
    if TensorSource::Folder(&folder.weights).all_are(&copies, DType::BF16) {
        text += "\n[precision]\npolicy = \"bf16\"\n";
    }
    Ok(FolderModel { folder, copies, text })
}

/// The keys of a config that a Hugging Face folder decides: the model, and where it has one the tokenizer, by its whole path.
pub(crate) fn keys(path: &Path) -> Result<Inherited, TrainError> {
    let config = lockstep_model::hf::read_config(&WeightsFolder::json(path, CONFIG)?)
        .map_err(|e| unfit(&path.join(CONFIG), e.problem, e.hint))?;
    let tokenizer = path.join(TOKENIZER);
    let text = config.table + &tokenizer_keys(path, &tokenizer.to_string_lossy())?;
    Ok(Inherited { name: path.join(CONFIG).display().to_string(), text })
}

/// The `[data]` table of a folder with a tokenizer.
fn tokenizer_keys(folder: &Path, name: &str) -> Result<String, TrainError> {
    if !folder.join(TOKENIZER).exists() {
        return Ok(String::new());
    }
    let end = end_token(folder)?.map_or(String::new(), |token| format!("eos_token = {}\n", quoted(&token)));
    Ok(format!("\n[data]\ntokenizer = {}\n{end}", quoted(name)))
}

/// The tokenizer of a folder, if it has one.
pub(crate) fn tokenizer_bytes(folder: &Path) -> Result<Option<Vec<u8>>, TrainError> {
    match folder.join(TOKENIZER).exists() {
        true => Ok(Some(WeightsFolder::bytes(folder, TOKENIZER, MOST_TOKENIZER_BYTES)?)),
        false => Ok(None),
    }
}

/// The token that ends a document, where it has none of the usual names: what `tokenizer_config.json`, or else
/// `config.json`, says it is.
fn end_token(folder: &Path) -> Result<Option<String>, TrainError> {
    // Read from a copy: the library takes any path, also one that leads out of the folder.
    let copy = tempfile::tempdir().map_err(|e| TrainError::io("create", &std::env::temp_dir(), e))?;
    let path = copy.path().join(TOKENIZER);
    let bytes = WeightsFolder::bytes(folder, TOKENIZER, MOST_TOKENIZER_BYTES)?;
    std::fs::write(&path, bytes).map_err(|e| TrainError::io("write", &path, e))?;
    let open = |end| TokenizerSpec::file(&path, end).and_then(|spec| Tokenizer::open(&spec));
    let Err(error) = open(None) else { return Ok(None) };
    let said = match folder.join(TOKENIZER_CONFIG).exists() {
        true => WeightsFolder::json(folder, TOKENIZER_CONFIG)?["eos_token"].clone(),
        false => Value::Null,
    };
    let said = said.as_str().or_else(|| said["content"].as_str()).map(str::to_owned);
    let candidates = [said, token_of(&WeightsFolder::json(folder, CONFIG)?["eos_token_id"], &path)];
    match candidates.into_iter().flatten().find(|token| open(Some(token.clone())).is_ok()) {
        Some(token) => Ok(Some(token)),
        None => Err(error.into()),
    }
}

/// The token that a tokenizer has for a number, or for the first of a list of them.
fn token_of(id: &Value, tokenizer: &Path) -> Option<String> {
    let id = id.as_u64().or_else(|| id[0].as_u64())?;
    let file: Value = serde_json::from_slice(&std::fs::read(tokenizer).ok()?).ok()?;
    let added = file["added_tokens"].as_array().into_iter().flatten().find(|token| token["id"] == id);
    let vocabulary = file["model"]["vocab"].as_object().into_iter().flatten().find(|(_, of)| **of == id);
    added.and_then(|token| token["content"].as_str()).or(vocabulary.map(|(token, _)| token.as_str())).map(str::to_owned)
}

pub(crate) fn quoted(text: &str) -> String {
    // JSON's escapes are TOML's too, but for the ones that JSON does not need to write.
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// Whether a folder is to be imported rather than opened.
pub(crate) fn is_foreign(path: &Path) -> bool {
    path.join(CONFIG).exists() && WeightsFolder::is_one(path)
}
