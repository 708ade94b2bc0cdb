//! What the weights decide that `train.init_from` names: the shape of the model, and its tokenizer.

use crate::hf;
use crate::trained::{TOKENIZER, Trained};
use crate::TrainError;
use lockstep_config::{Config, Inherited, NotInherited};
use std::path::Path;

/// The keys of a config that the weights in a folder decide (a Hugging Face model, a run directory or a checkpoint), for
/// [`Config::load_with`].
pub fn inherited(folder: &Path) -> Result<Option<Inherited>, NotInherited> {
    let found = if !folder.exists() {
        let hint = "name the folder of a Hugging Face model, a run or a checkpoint; a run that has begun goes on without it by \
                    the run.toml in its own folder";
        return Err(NotInherited { problem: format!("train.init_from: {}: no such folder", folder.display()), hint: hint.into() });
    } else if hf::is_foreign(folder) {
        hf::keys(folder)
    } else {
        keys(folder)
    };
    found.map(Some).map_err(|error| {
        let text = error.to_string();
        let (problem, hint) = text.split_once("\nhint: ").unwrap_or((&text, "name another folder in train.init_from"));
        NotInherited { problem: format!("train.init_from: {problem}"), hint: hint.to_owned() }
    })
}
