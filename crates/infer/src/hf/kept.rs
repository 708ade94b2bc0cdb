//! The files beside the weights of a Hugging Face model: they go with it through import, training and export.

use super::special::{ids_of, put_bos_text, put_eos_id, put_eos_text};
use super::{CONFIG, GENERATION, SPECIAL_TOKENS, TOKENIZER_CONFIG, unfit};
use crate::{Result, RunTokenizer};
use lockstep_checkpoint::{Loaded, WeightsFolder};
use lockstep_data::ChatSpec;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// The attachment of a checkpoint that holds them, and the most bytes of one.
pub const ATTACHMENT: &str = "hugging_face.json";
const MOST_BYTES: u64 = 16 << 20;

/// The file of a chat template.
pub(crate) const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// The file of a template for conversations with tools, where there is one beside [`CHAT_TEMPLATE`].
pub(crate) const TOOL_TEMPLATE: &str = "additional_chat_templates/tool_use.jinja";

/// What is kept: which tokens begin, end and pad, how to draw tokens, how a chat is written.
const FILES: [&str; 8] = [
    CONFIG,
    GENERATION,
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS,
    "added_tokens.json",
    CHAT_TEMPLATE,
    TOOL_TEMPLATE,
    "chat_template.json",
];

/// Fields of `config.json` that the files beside it decide.
const IDS: [&str; 3] = ["bos_token_id", "eos_token_id", "pad_token_id"];

/// The files as they came, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept(BTreeMap<String, String>);

impl Kept {
    /// Those of a Hugging Face folder.
    pub fn of_folder(folder: &Path) -> Result<Self> {
        let mut files = BTreeMap::new();
        for name in FILES.into_iter().filter(|name| folder.join(name).exists()) {
            let bytes = WeightsFolder::bytes(folder, name, MOST_BYTES)?;
            let text = String::from_utf8(bytes)
                .map_err(|_| unfit(&folder.join(name), "not UTF-8 text".into(), "fetch the file again".into()))?;
            files.insert(name.to_owned(), text);
        }
        Ok(Self(files))
    }

    /// Those beside a tokenizer: in its folder, or kept in the checkpoint that it is in.
    pub(crate) fn beside(folder: &Path) -> Result<Self> {
        let own = Self::of_folder(folder)?;
        let attachment = folder.join(ATTACHMENT);
        if !attachment.exists() {
            return Ok(own);
        }
        let bytes = WeightsFolder::bytes(folder, ATTACHMENT, FILES.len() as u64 * MOST_BYTES)?;
        let mut files: BTreeMap<String, String> = serde_json::from_slice(&bytes).map_err(|error| {
            let hint = "name the tokenizer.json of a whole checkpoint, or put it into a folder of its own";
            unfit(&attachment, format!("not the files of a Hugging Face model: {error}"), hint.into())
        })?;
        files.extend(own.0);
        Ok(Self(files))
    }

    /// These files for a model that was trained on conversations in a template, which names special tokens.
    pub fn with_chat(mut self, chat: &ChatSpec) -> Self {
        self.0.insert(CHAT_TEMPLATE.to_owned(), chat.template.clone());
        match &chat.tool_template {
            Some(template) => self.0.insert(TOOL_TEMPLATE.to_owned(), template.clone()),
            None => self.0.remove(TOOL_TEMPLATE),
        };
        let named = self.0.contains_key(TOKENIZER_CONFIG) || self.0.contains_key(SPECIAL_TOKENS);
        if !named && !chat.tokens.is_empty() {
            let tokens = Value::from_iter(chat.tokens.clone());
            self.0.insert(SPECIAL_TOKENS.to_owned(), format!("{tokens:#}\n"));
        }
        self
    }

    /// Those that a checkpoint has.
    pub fn of_checkpoint(checkpoint: &Loaded) -> Self {
        let files = checkpoint.attachment(ATTACHMENT).map(serde_json::from_slice);
        Self(files.and_then(Result::ok).unwrap_or_default())
    }

    /// The attachment, if there is anything to keep.
    pub fn to_json(&self) -> Option<Vec<u8>> {
        (!self.0.is_empty()).then(|| Value::from_iter(self.0.clone()).to_string().into_bytes())
    }

    /// These files for a run with a tokenizer: they are about another one's tokens where `theirs`, the `tokenizer.json` that came
    /// with them, is another.
    pub fn with_tokenizer(self, theirs: Option<&[u8]>, ours: &RunTokenizer) -> Self {
        if theirs.is_none() || theirs == ours.source() { self } else { Self::default() }
    }

    /// A file.
    pub fn file(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Files that no other part of an export makes.
    pub fn others(&self) -> impl Iterator<Item = (&str, &str)> {
        let made = [CONFIG, GENERATION, TOKENIZER_CONFIG];
        self.0.iter().map(|(name, text)| (name.as_str(), text.as_str())).filter(move |(name, _)| !made.contains(name))
    }

    /// A file that is JSON; null where there is none.
    pub fn json(&self, name: &str) -> Value {
        self.file(name).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
    }

    /// Gives a `config.json` the special tokens of the one that came.
    pub fn put_ids(&self, config: &mut Value) {
        let came = self.json(CONFIG);
        for field in IDS.into_iter().filter(|field| !came[*field].is_null()) {
            config[field] = came[field].clone();
        }
    }

    /// These files for a model that was trained to end texts with a token: those that name others name it too.
    pub fn ended_by(mut self, id: u32, token: Option<&str>) -> Self {
        for (name, text) in &mut self.0 {
            let Ok(mut file @ Value::Object(_)) = serde_json::from_str(text) else { continue };
            let changed = match (name.as_str(), token) {
                (CONFIG | GENERATION, _) => put_eos_id(&mut file, id),
                (TOKENIZER_CONFIG, Some(token)) => put_eos_text(&mut file, token),
                // It need not name one.
                (SPECIAL_TOKENS, Some(token)) => !file["eos_token"].is_null() && put_eos_text(&mut file, token),
                _ => false,
            };
            if changed {
                *text = format!("{file:#}\n");
            }
        }
        self
    }

    /// These files for a model that was trained to begin texts with a token, or without one; `template` is what its tokenizer adds.
    pub fn begun_by(mut self, token: Option<&str>, template: Option<&str>) -> Self {
        if let Some(text) = self.0.get_mut(TOKENIZER_CONFIG)
            && let Ok(mut file @ Value::Object(_)) = serde_json::from_str(text)
            && put_bos_text(&mut file, token, template)
        {
            *text = format!("{file:#}\n");
        }
        self
    }

    /// Tokens that end a text.
    pub fn end_tokens(&self) -> Vec<u32> {
        let mut tokens: Vec<u32> =
            [GENERATION, CONFIG].iter().flat_map(|name| ids_of(&self.json(name)["eos_token_id"])).collect();
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    }
}
