//! What the weights decide that `train.init_from` names: the shape of the model, and its tokenizer.

use crate::hf::{self, quoted};
use crate::trained::{TOKENIZER, Trained};
use crate::{InferError, Result};
use lockstep_checkpoint::list;
use lockstep_config::{Inherited, NotInherited, PrecisionPolicy};
use lockstep_ir::Hint;
use std::path::Path;

/// The keys of a config that the weights in a folder decide (a Hugging Face model, a run directory or a checkpoint), for
/// [`Config::load_with`](lockstep_config::Config::load_with).
pub fn inherited(folder: &Path) -> Result<Option<Inherited>, NotInherited> {
    if !folder.exists() {
        let problem = format!("train.init_from: {}: no such folder", folder.display());
        if let Some(name) = hub_name(folder) {
            let hint = format!("for a model on the Hugging Face Hub, set train.init_from = \"hf:{name}\"");
            return Err(NotInherited { problem, hint });
        }
        let hint = "name a Hugging Face folder, a run, a checkpoint, or hf:OWNER/NAME on the Hugging Face Hub; a run that has begun \
                    goes on without it by the run.toml in its own folder";
        return Err(NotInherited { problem, hint: hint.into() });
    }
    let keys = match hf::is_foreign(folder) {
        true => hf::keys(folder, &folder.join(TOKENIZER).to_string_lossy()),
        false => keys(folder),
    };
    keys.map(Some).map_err(not_inherited)
}

/// Those that a model of the hub decides, whose tokenizer is known by this name. Its weights need not be here.
pub(crate) fn keys_of_hub(folder: &Path, name: &str) -> Result<Inherited, NotInherited> {
    hf::keys(folder, name).map_err(not_inherited)
}

fn not_inherited(error: InferError) -> NotInherited {
    let hint = error.hint().unwrap_or_else(|| "name another folder in train.init_from".to_owned());
    NotInherited { problem: format!("train.init_from: {error}"), hint }
}

/// Those of a run directory or a checkpoint. Its weights are not read.
fn keys(folder: &Path) -> Result<Inherited> {
    let config = Trained::config_at(folder)?;
    // Its own copy of the tokenizer counts, where it has one.
    let checkpoint = match folder.join("checkpoints").is_dir() {
        true => list(&folder.join("checkpoints"))?.pop().map(|(_, path)| path),
        false => Some(folder.to_owned()),
    };
    let own = checkpoint.map(|path| path.join(TOKENIZER)).filter(|path| path.exists());
    let tokenizer = match (config.tokenizer_path(), own) {
        (None, _) => "bytes".to_owned(),
        (Some(path), own) => own.unwrap_or(path).to_string_lossy().into_owned(),
    };
    let mut text = format!("{}\n[data]\ntokenizer = {}\n", config.model_toml(), quoted(&tokenizer));
    for (key, token) in [("eos_token", &config.data.eos_token), ("bos_token", &config.data.bos_token)] {
        text += &token.as_ref().map_or(String::new(), |token| format!("{key} = {}\n", quoted(token)));
    }
    // Weights that were trained, or came, in 16 bits go on in them.
    if !matches!(config.precision.policy, PrecisionPolicy::Fp32 | PrecisionPolicy::Tf32) {
        text += &format!("[precision]\npolicy = {}\n", quoted(config.precision.policy.word()));
    }
    Ok(Inherited { name: folder.display().to_string(), text })
}

/// The last two parts of a path that nobody made, where they look like an owner and a model: `meta-llama/Llama-3.2-1B`.
fn hub_name(folder: &Path) -> Option<String> {
    let name = folder.file_name()?.to_str()?;
    let owner = folder.parent()?;
    let owner = owner.file_name()?.to_str().filter(|_| !owner.exists())?;
    let plain = |part: &str| part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
    (plain(name) && plain(owner) && owner != "..").then(|| format!("{owner}/{name}"))
}
