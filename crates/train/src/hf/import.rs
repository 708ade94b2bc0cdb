//! A Hugging Face folder becomes a run directory of no steps.

use super::{CONFIG, HfFolder, SAME_FOLDER, TOKENIZER, TOKENIZER_CONFIG};
use crate::TrainError;
use lockstep_checkpoint::{NewFolder, Source, WeightsFolder, save_copies};
use lockstep_config::Config;
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
const MOST_TOKENIZER_CONFIG_BYTES: u64 = 16 << 20;

/// Writes the model in a Hugging Face folder to `out` as a run directory with a checkpoint of step 0: `run.toml`, the
/// tokenizer and `checkpoints/step-00000000`. `train.init_from`, `generate`, `eval` and [`export`](super::export) take it.
///
/// Weights pass in chunks. `progress` hears the bytes written and the bytes in all.
pub fn import(folder: &Path, out: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Imported, TrainError> {
    let theirs = HfFolder::open(folder)?;
    let source = Source::Folder(&theirs.weights);
    let name = out.join("run.toml").display().to_string();
    // Twice: whether all weights are bf16 can only be asked when it is known which they are.
    let plain = Config::parse(&theirs.config.to_toml(), &name, &[])?;
    let copies = theirs.copies(&plain.model, SAME_FOLDER)?;
    let mut text = theirs.config.to_toml();
    let tokenizer = folder.join(TOKENIZER).exists();
    if tokenizer {
        text += &format!("\n[data]\ntokenizer = \"{TOKENIZER}\"\n");
        text += &end_token(folder)?.map_or(String::new(), |token| format!("eos_token = {}\n", quoted(&token)));
    }
    if source.all_are(&copies, DType::BF16) {
        text += "\n[precision]\npolicy = \"bf16\"\n";
    }
    let config = Config::parse(&text, &name, &[])?;

    let new = NewFolder::begin(out)?;
    new.write("run.toml", text.as_bytes())?;
    if tokenizer {
        new.write(TOKENIZER, &WeightsFolder::bytes(folder, TOKENIZER, MOST_TOKENIZER_BYTES)?)?;
        if folder.join(TOKENIZER_CONFIG).exists() {
            let bytes = WeightsFolder::bytes(folder, TOKENIZER_CONFIG, MOST_TOKENIZER_CONFIG_BYTES)?;
            new.write(TOKENIZER_CONFIG, &bytes)?;
        }
    }
    let context = theirs.config.context;
    let state = json!({
        "tokens": 0,
        "config": config.resolved_toml(),
        "lockstep": env!("CARGO_PKG_VERSION"),
        "imported": { "context": context },
    });
    save_copies(&new.contents().join("checkpoints"), 0, "model", source, &copies, &state, progress)?;
    new.publish()?;
    let parameters = copies.iter().map(|copy| copy.shape.iter().product::<usize>() as u64).sum();
    Ok(Imported { config, parameters, context, tokenizer })
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

fn quoted(text: &str) -> String {
    // JSON's escapes are TOML's too, but for the ones that JSON does not need to write.
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// Whether a folder is to be imported rather than opened.
pub(crate) fn is_foreign(path: &Path) -> bool {
    path.join(CONFIG).exists() && WeightsFolder::is_one(path)
}
