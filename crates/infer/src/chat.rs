//! Where the chat template of a tokenizer is found, and the special tokens that it names.

use crate::Result;
use crate::hf::{CHAT_TEMPLATE, Kept, TOOL_TEMPLATE, text_of};
use lockstep_config::{Config, DataFormat, TrainOnTurns};
use lockstep_data::{ChatSpec, DataError, TrainOn};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The tokens that templates know by name.
const TOKENS: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// How the conversations of a config become text; none where its data are no conversations.
pub(crate) fn chat_spec(config: &Config) -> Result<Option<ChatSpec>> {
    if config.data.format == DataFormat::Text {
        return Ok(None);
    }
    let found = beside_tokenizer(config)?.ok_or_else(|| DataError::Template {
        path: tokenizer_folder(config),
        problem: "the tokenizer has no chat template: neither chat_template.jinja nor chat_template in \
                  tokenizer_config.json is beside it"
            .to_owned(),
        hint: "fetch these files of the model too, or name a template in data.chat_template".into(),
    })?;
    Ok(Some(found))
}

/// What of a conversation counts in the loss.
pub(crate) fn train_on(config: &Config) -> TrainOn {
    match config.data.train_on {
        Some(TrainOnTurns::Assistant) | None => TrainOn::Assistant,
        Some(TrainOnTurns::Last) => TrainOn::Last,
        Some(TrainOnTurns::All) => TrainOn::All,
    }
}

/// The template that `data.chat_template` names, or else that beside the tokenizer; none where there is neither.
pub(crate) fn beside_tokenizer(config: &Config) -> Result<Option<ChatSpec>> {
    let folder = tokenizer_folder(config);
    let files = Kept::beside(&folder)?;
    let found = match config.chat_template_path() {
        Some(path) => {
            let text = std::fs::read_to_string(&path);
            let text = text.map_err(|cause| DataError::Unreadable { path: path.clone(), cause })?;
            Some(Found { path, text, of_tools: None })
        }
        None => template(&folder, &files),
    };
    Ok(found.map(|found| found.spec(config, &files)))
}

/// Templates, and the file that they were found in.
struct Found {
    path: PathBuf,
    text: String,
    of_tools: Option<String>,
}

impl Found {
    fn spec(self, config: &Config, files: &Kept) -> ChatSpec {
        let Found { path, text, of_tools } = self;
        ChatSpec::new(&path, text, tokens(config, files), train_on(config)).with_tool_template(of_tools)
    }
}

/// The folder of the tokenizer that a config names.
fn tokenizer_folder(config: &Config) -> PathBuf {
    let path = config.tokenizer_path().unwrap_or_default();
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned()
}

/// How conversations become text by the files of a folder; none where these have no template.
pub(crate) fn chat_of_files(config: &Config, folder: &Path, files: &Kept) -> Option<ChatSpec> {
    template(folder, files).map(|found| found.spec(config, files))
}

/// The templates in the files of a folder, as transformers takes them.
fn template(folder: &Path, files: &Kept) -> Option<Found> {
    if let Some(text) = files.file(CHAT_TEMPLATE) {
        let of_tools = files.file(TOOL_TEMPLATE).map(str::to_owned);
        return Some(Found { path: folder.join(CHAT_TEMPLATE), text: text.to_owned(), of_tools });
    }
    let name = "tokenizer_config.json";
    let found = &files.json(name)["chat_template"];
    // Several have names.
    let named = |name: &str| found.as_array()?.iter().find(|one| one["name"] == name)?["template"].as_str();
    let text = found.as_str().or_else(|| named("default"))?;
    Some(Found { path: folder.join(name), text: text.to_owned(), of_tools: named("tool_use").map(str::to_owned) })
}

/// The tokens that the config names; where it names none, those that files do.
fn tokens(config: &Config, files: &Kept) -> BTreeMap<String, String> {
    let own = [("eos_token", config.data.eos_token.as_deref()), ("bos_token", config.bos_token())];
    let own = own.into_iter().filter_map(|(name, token)| Some((name.to_owned(), token?.to_owned())));
    let theirs = ["special_tokens_map.json", "tokenizer_config.json"].into_iter().flat_map(|file| {
        let file = files.json(file);
        let token = |name: &'static str| text_of(&file[name]).map(|token| (name.to_owned(), token));
        TOKENS.into_iter().filter_map(token).collect::<Vec<_>>()
    });
    // The last of a name counts.
    theirs.chain(own).collect()
}
