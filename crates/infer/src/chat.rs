//! Where the chat template of a tokenizer is found, and the special tokens that it names.

use crate::hf::{CHAT_TEMPLATE, Kept};
use lockstep_config::{Config, DataFormat, TrainOnTurns};
use lockstep_data::{ChatSpec, DataError, TrainOn};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The tokens that templates know by name.
const TOKENS: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// How the conversations of a config become text; none where its data are no conversations.
pub(crate) fn chat_spec(config: &Config) -> Result<Option<ChatSpec>, DataError> {
    match config.data.format {
        DataFormat::Text => Ok(None),
        DataFormat::Chat => beside_tokenizer(config).map(Some),
    }
}

/// What of a conversation counts in the loss.
pub(crate) fn train_on(config: &Config) -> TrainOn {
    match config.data.train_on {
        Some(TrainOnTurns::Assistant) | None => TrainOn::Assistant,
        Some(TrainOnTurns::Last) => TrainOn::Last,
        Some(TrainOnTurns::All) => TrainOn::All,
    }
}

/// The template that `data.chat_template` names, or else that beside the tokenizer.
pub(crate) fn beside_tokenizer(config: &Config) -> Result<ChatSpec, DataError> {
    let folder = config.tokenizer_path().and_then(|path| path.parent().map(Path::to_owned)).unwrap_or_default();
    let files = Kept::beside(&folder).map_err(|cause| DataError::Unreadable { path: folder.clone(), cause })?;
    let found = match config.chat_template_path() {
        Some(path) => {
            let text = std::fs::read_to_string(&path);
            Some((path.clone(), text.map_err(|cause| DataError::Unreadable { path, cause })?))
        }
        None => template(&folder, &files),
    };
    let Some((path, text)) = found else {
        return Err(DataError::Template {
            path: folder,
            problem: "the tokenizer has no chat template: neither chat_template.jinja nor chat_template in \
                      tokenizer_config.json is beside it"
                .to_owned(),
            hint: "fetch these files of the model too, or name a template in data.chat_template".into(),
        });
    };
    Ok(ChatSpec::new(&path, text, tokens(config, &files), train_on(config)))
}

/// How conversations become text by the files of a folder; none where these have no template.
pub(crate) fn chat_of_files(config: &Config, folder: &Path, files: &Kept) -> Option<ChatSpec> {
    let (path, text) = template(folder, files)?;
    Some(ChatSpec::new(&path, text, tokens(config, files), train_on(config)))
}

/// The template in the files of a folder, and which of them has it.
fn template(folder: &Path, files: &Kept) -> Option<(PathBuf, String)> {
    if let Some(text) = files.file(CHAT_TEMPLATE) {
        return Some((folder.join(CHAT_TEMPLATE), text.to_owned()));
    }
    let name = "tokenizer_config.json";
    let found = &files.json(name)["chat_template"];
    // Several have names.
    let named = || found.as_array()?.iter().find(|one| one["name"] == "default")?["template"].as_str();
    let text = found.as_str().or_else(named)?;
    Some((folder.join(name), text.to_owned()))
}

/// The tokens that files name; those of the config where they name none.
fn tokens(config: &Config, files: &Kept) -> BTreeMap<String, String> {
    let own = [("eos_token", config.data.eos_token.as_deref()), ("bos_token", config.bos_token())];
    let own = own.into_iter().filter_map(|(name, token)| Some((name.to_owned(), token?.to_owned())));
    let theirs = ["special_tokens_map.json", "tokenizer_config.json"].into_iter().flat_map(|file| {
        let file = files.json(file);
        let token = |name: &'static str| {
            let token = file[name].as_str().or_else(|| file[name]["content"].as_str());
            token.map(|token| (name.to_owned(), token.to_owned()))
        };
        TOKENS.into_iter().filter_map(token).collect::<Vec<_>>()
    });
    own.chain(theirs).collect()
}
