//! A Hugging Face folder becomes a run directory of no steps.

use super::special::SpecialTokens;
use super::{ATTACHMENT, CONFIG, HfFolder, Kept, SAME_FOLDER, TOKENIZER, unfit, with_modules};
use crate::Result;
use lockstep_checkpoint::{About, NewFolder, TensorCopy, TensorSource, WeightsFolder, save_copies};
use lockstep_config::{Config, Inherited};
use lockstep_ir::DType;
use lockstep_model::hf;
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
    /// What the files of the folder contradict each other in, and what was passed over.
    pub warnings: Vec<String>,
}

/// The largest `tokenizer.json` that is copied.
const MOST_TOKENIZER_BYTES: u64 = 256 << 20;

/// Writes the model in a Hugging Face folder to `out` as a run directory with a checkpoint of step 0: `run.toml`, the
/// tokenizer and `checkpoints/step-00000000`. `train.init_from`, `generate`, `eval` and [`export`](super::export) take it.
///
/// Weights pass in chunks. `progress` hears the bytes written and the bytes in all.
pub fn import(folder: &Path, out: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Imported> {
    let FolderModel { folder: theirs, copies, text, warnings } = read_folder(folder)?;
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
    Ok(Imported { config, parameters, context, tokenizer: tokenizer.is_some(), warnings })
}

/// A Hugging Face folder that was understood.
pub(crate) struct FolderModel {
    pub(crate) folder: HfFolder,
    /// How its tensors are copied.
    pub(crate) copies: Vec<TensorCopy>,
    /// Its config, with the tokenizer by its name in the folder.
    pub(crate) text: String,
    pub(crate) warnings: Vec<String>,
}

/// Reads all of a Hugging Face folder but the weights.
pub(crate) fn read_folder(path: &Path) -> Result<FolderModel> {
    let mut folder = HfFolder::open(path)?;
    // Twice: whether all weights are bf16 can only be asked when it is known which they are.
    let plain = Config::parse(&folder.config.to_toml(), CONFIG, &[])?;
    let copies = folder.copies(&plain.model, SAME_FOLDER)?;
    let (tokenizer, special) = tokenizer_keys(path, TOKENIZER)?;
    let mut text = folder.config.to_toml() + &tokenizer;
    if TensorSource::Folder(&folder.weights).all_are(&copies, DType::BF16) {
        text += BF16;
    }
    let warnings = [folder.warnings(), special].concat();
    Ok(FolderModel { folder, copies, text, warnings })
}

const BF16: &str = "\n[precision]\npolicy = \"bf16\"\n";

/// The keys of a config that a Hugging Face folder decides: the model, where it has one the tokenizer, by this name, and the
/// precision, where all weights are bf16. Where the weights are not here, their type is what `config.json` says.
pub(crate) fn keys(path: &Path, tokenizer: &str) -> Result<Inherited> {
    let json = WeightsFolder::json(path, CONFIG)?;
    let config = hf::read_config(&json).map_err(|e| unfit(&path.join(CONFIG), e.problem, e.hint))?;
    let weights = WeightsFolder::is_one(path).then(|| WeightsFolder::open(path)).transpose()?;
    let config = match &weights {
        Some(weights) => with_modules(config, weights),
        None => config,
    };
    let mut text = config.table + &tokenizer_keys(path, tokenizer)?.0;
    let is_bf16 = match weights {
        Some(weights) => weights.is_bf16(|name| !hf::is_buffer(name) && !hf::stays_f32(name)),
        None => ["dtype", "torch_dtype"].iter().any(|field| json[*field] == "bfloat16"),
    };
    if is_bf16 {
        text += BF16;
    }
    Ok(Inherited { name: path.join(CONFIG).display().to_string(), text })
}

/// The `[data]` table of a folder with a tokenizer, and what its files contradict each other in.
fn tokenizer_keys(folder: &Path, name: &str) -> Result<(String, Vec<String>)> {
    let Some(tokenizer) = tokenizer_bytes(folder)? else { return Ok(Default::default()) };
    let SpecialTokens { eos, bos, warnings } = SpecialTokens::read(folder, &tokenizer, &Kept::of_folder(folder)?)?;
    let mut text = format!("\n[data]\ntokenizer = {}\n", quoted(name));
    for (key, token) in [("eos_token", eos), ("bos_token", bos)] {
        text += &token.map_or(String::new(), |token| format!("{key} = {}\n", quoted(&token)));
    }
    Ok((text, warnings))
}

/// What the files beside the tokenizer of a folder contradict each other in.
pub(crate) fn special_warnings(folder: &Path) -> Result<Vec<String>> {
    Ok(tokenizer_keys(folder, TOKENIZER)?.1)
}

/// The tokenizer of a folder, if it has one.
pub(crate) fn tokenizer_bytes(folder: &Path) -> Result<Option<Vec<u8>>> {
    match folder.join(TOKENIZER).exists() {
        true => Ok(Some(WeightsFolder::bytes(folder, TOKENIZER, MOST_TOKENIZER_BYTES)?)),
        false => Ok(None),
    }
}

pub(crate) fn quoted(text: &str) -> String {
    // JSON's escapes are TOML's too, but for the ones that JSON does not need to write.
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// Whether a folder is to be imported rather than opened.
pub(crate) fn is_foreign(path: &Path) -> bool {
    WeightsFolder::is_hugging_face(path)
}
