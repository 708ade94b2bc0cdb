//! Which text to prepare, and how.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{ChatSpec, TokenizerSpec};

/// Which text to prepare, and how.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrepareSpec {
    /// Files and folders, read in this order.
    ///
    /// Folders are walked by name. Hidden entries, symbolic links, and folders named `target`, `node_modules` or `runs`
    /// inside them are skipped, and so are run directories and folders of prepared data. A file that is reached twice is
    /// read once.
    pub paths: Vec<PathBuf>,
    /// Extensions of the files to take from folders, in any case; none takes every file. Files that `paths` names are
    /// always read.
    pub extensions: Vec<String>,
    /// The field of a JSON line, or the column of a Parquet file, that holds the text.
    pub text_field: String,
    /// The field or column whose text stands before it as a prompt, which is read and not predicted. Only records have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_field: Option<String>,
    /// How conversations become text, where the field holds such.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat: Option<ChatSpec>,
    /// What makes tokens of the text.
    pub tokenizer: TokenizerSpec,
    /// The share of the text to hold out for validation, at least 0 and below 1.
    pub validation_fraction: f64,
    /// The seed of the choice of what is held out.
    pub seed: u64,
}

impl PrepareSpec {
    /// Whether some tokens do not count in the loss: prompts, or what others than the assistant say.
    pub fn is_masked(&self) -> bool {
        self.prompt_field.is_some() || self.chat.as_ref().is_some_and(ChatSpec::is_masked)
    }

    /// Whether the same text becomes the same tokens, wherever the text and the tokenizer are.
    pub fn reads_alike(&self, other: &PrepareSpec) -> bool {
        let anywhere = |spec: &PrepareSpec| PrepareSpec {
            paths: Vec::new(),
            extensions: Vec::new(),
            chat: spec.chat.as_ref().map(ChatSpec::anywhere),
            tokenizer: spec.tokenizer.anywhere(),
            ..spec.clone()
        };
        anywhere(self) == anywhere(other)
    }
}

impl Default for PrepareSpec {
    /// No text: bytes of any files, nothing held out.
    fn default() -> Self {
        PrepareSpec {
            paths: Vec::new(),
            extensions: Vec::new(),
            text_field: "text".to_owned(),
            prompt_field: None,
            chat: None,
            tokenizer: TokenizerSpec::Bytes,
            validation_fraction: 0.0,
            seed: 0,
        }
    }
}
