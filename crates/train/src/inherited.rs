//! What the weights decide that `train.init_from` names: the shape of the model, and its tokenizer.

use crate::TrainError;
use crate::hf::{self, quoted};
use crate::trained::{TOKENIZER, Trained};
use lockstep_checkpoint::list;
use lockstep_config::{Inherited, NotInherited};
use std::path::Path;

/// The keys of a config that the weights in a folder decide (a Hugging Face model, a run directory or a checkpoint), for
/// [`Config::load_with`](lockstep_config::Config::load_with).
pub fn inherited(folder: &Path) -> Result<Option<Inherited>, NotInherited> {
    if !folder.exists() {
        let problem = format!("train.init_from: {}: no such folder", folder.display());
        let hint = "name a Hugging Face folder, a run or a checkpoint; a run that has begun goes on without it by the run.toml \
                    in its own folder";
        return Err(NotInherited { problem, hint: hint.into() });
    }
    let keys = if hf::is_foreign(folder) { hf::keys(folder) } else { keys(folder) };
    keys.map(Some).map_err(|error| {
        let text = error.to_string();
        let (problem, hint) = text.split_once("\nhint: ").unwrap_or((&text, "name another folder in train.init_from"));
        NotInherited { problem: format!("train.init_from: {problem}"), hint: hint.to_owned() }
    })
}

/// Those of a run directory or a checkpoint. Its weights are not read.
fn keys(folder: &Path) -> Result<Inherited, TrainError> {
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
    if let Some(token) = &config.data.eos_token {
        text += &format!("eos_token = {}\n", quoted(token));
    }
    Ok(Inherited { name: folder.display().to_string(), text })
}
