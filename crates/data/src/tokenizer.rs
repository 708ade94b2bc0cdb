//! Text to tokens and back.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::cut;
use crate::guard::caught;
use crate::output::hexadecimal;
use crate::shard::Width;
use crate::stop::{NEVER, go_on};
use crate::{BYTE_VOCABULARY, DataError, DataHint, DataSetting, EOS_BYTE, Result};

/// The largest `tokenizer.json` that is read; the largest in use have about 35 MB.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Tokens that end a document, by the names that published tokenizers give them.
const END_TOKENS: [&str; 4] = ["<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>"];

/// Which tokenizer to use, and where it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum TokenizerSpec {
    /// A token is a byte.
    #[default]
    Bytes,
    /// A Hugging Face `tokenizer.json`.
    File {
        /// Where it is.
        path: PathBuf,
        /// The hash of its bytes.
        #[serde(with = "hexadecimal")]
        xxh3: u64,
        /// The token that ends a document; where none is given, the tokenizer must have one of the usual ones.
        end_token: Option<String>,
        /// The token that begins a document, if one does.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        begin_token: Option<String>,
        /// Special tokens that text may spell; others are text there.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        special_tokens: Vec<String>,
    },
}

impl TokenizerSpec {
    /// The tokenizer in a file, as the file is now.
    pub fn file(path: &Path, end_token: Option<String>) -> Result<Self> {
        if path.to_str().is_none() {
            return Err(DataError::PathNotUtf8 { path: path.to_owned() });
        }
        Ok(TokenizerSpec::of_json(path, &read(path)?).with_eos(end_token.as_deref()))
    }

    /// The tokenizer of a `tokenizer.json` that was read from `path`.
    pub fn of_json(path: &Path, json: &[u8]) -> Self {
        let (path, special_tokens) = (path.to_owned(), Vec::new());
        TokenizerSpec::File { path, xxh3: xxh3_64(json), end_token: None, begin_token: None, special_tokens }
    }

    /// The same file, whose documents begin with a token.
    pub fn with_bos(mut self, token: Option<&str>) -> Self {
        if let TokenizerSpec::File { begin_token, .. } = &mut self {
            *begin_token = token.map(str::to_owned);
        }
        self
    }

    /// The same file, with special tokens that text may spell.
    pub fn with_special(mut self, tokens: &[String]) -> Self {
        if let TokenizerSpec::File { special_tokens, .. } = &mut self {
            *special_tokens = tokens.to_vec();
        }
        self
    }

    /// The same file, with another choice of the token that ends a document.
    pub fn with_eos(mut self, token: Option<&str>) -> Self {
        if let TokenizerSpec::File { end_token, .. } = &mut self {
            *end_token = token.map(str::to_owned);
        }
        self
    }

    /// The same tokenizer in another place: it is known by its hash.
    pub(crate) fn at(mut self, place: PathBuf) -> Self {
        if let TokenizerSpec::File { path, .. } = &mut self {
            *path = place;
        }
        self
    }

    /// The same tokenizer with no place.
    pub(crate) fn anywhere(&self) -> Self {
        self.clone().at(PathBuf::new())
    }
}

/// Makes tokens of text.
pub struct Tokenizer {
    model: Model,
    eos: u32,
    bos: Option<u32>,
    vocabulary: u32,
}

enum Model {
    Bytes,
    File {
        path: PathBuf,
        tokenizer: Box<tokenizers::Tokenizer>,
        source: Vec<u8>,
        /// The same, which reads special tokens in text; made when it is first used.
        reads_special: OnceLock<Box<tokenizers::Tokenizer>>,
        /// The tokens that the file calls special, those that text may spell among them.
        special: BTreeSet<u32>,
    },
}

impl Tokenizer {
    /// Loads the tokenizer that `spec` names, which must not have changed since.
    pub fn open(spec: &TokenizerSpec) -> Result<Self> {
        match spec {
            TokenizerSpec::Bytes => Ok(Tokenizer::bytes()),
            TokenizerSpec::File { path, .. } => Tokenizer::of_json(spec, read(path)?),
        }
    }

    /// The same where the `tokenizer.json` was read already.
    pub fn of_json(spec: &TokenizerSpec, source: Vec<u8>) -> Result<Self> {
        let TokenizerSpec::File { path, xxh3, end_token, begin_token, special_tokens } = spec else {
            return Ok(Tokenizer::bytes());
        };
        if xxh3_64(&source) != *xxh3 {
            return Err(DataError::tokenizer(path, "it changed while it was in use", "run the command again"));
        }
        let tokenizer = Tokenizer::parse(path, source, end_token.as_deref())?;
        tokenizer.with_bos(begin_token.as_deref())?.with_special(special_tokens)
    }

    /// The same, whose documents begin with a token of its vocabulary.
    fn with_bos(mut self, token: Option<&str>) -> Result<Self> {
        self.bos = match (token, &self.model) {
            (None, _) | (_, Model::Bytes) => None,
            (Some(token), Model::File { path, tokenizer, .. }) => {
                Some(tokenizer.token_to_id(token).ok_or_else(|| {
                    let hint = DataHint::of("name a token of its vocabulary in {}", DataSetting::BosToken);
                    DataError::tokenizer(path, format!("it has no token {token:?}"), hint)
                })?)
            }
        };
        Ok(self)
    }

    /// The same, which makes special tokens of text that spells some of them.
    fn with_special(mut self, tokens: &[String]) -> Result<Self> {
        let Model::File { path, tokenizer, source, reads_special, .. } = &mut self.model else { return Ok(self) };
        if tokens.is_empty() {
            return Ok(self);
        }
        let known = tokenizer.get_added_tokens_decoder();
        let is_special = |token: &String| known.values().any(|known| known.special && known.content == *token);
        if let Some(token) = tokens.iter().find(|token| !is_special(token)) {
            let hint = DataHint::of("name special tokens of its vocabulary in {}", DataSetting::SpecialTokens);
            return Err(DataError::tokenizer(path, format!("it has no special token {token:?}"), hint));
        }
        // To the library a token that text may spell is one that was added and is not special.
        let mut file: serde_json::Value =
            serde_json::from_slice(source).map_err(|error| not_a_tokenizer(path, &short(&error)))?;
        for added in file["added_tokens"].as_array_mut().into_iter().flatten() {
            if tokens.iter().any(|token| added["content"] == token.as_str()) {
                added["special"] = false.into();
            }
        }
        let mut changed = load(path, file.to_string().as_bytes())?;
        as_text(path, &mut changed)?;
        (**tokenizer, *reads_special) = (changed, OnceLock::new());
        Ok(self)
    }

    /// The tokenizer whose tokens are bytes.
    pub fn bytes() -> Self {
        Tokenizer { model: Model::Bytes, eos: EOS_BYTE.into(), bos: None, vocabulary: BYTE_VOCABULARY }
    }

    fn parse(path: &Path, source: Vec<u8>, end_token: Option<&str>) -> Result<Self> {
        let refuse = |cause: String| not_a_tokenizer(path, &cause);
        let mut tokenizer = load(path, &source)?;
        as_text(path, &mut tokenizer)?;

        let largest = tokenizer.get_vocab(true).into_values().max();
        let largest = largest.ok_or_else(|| refuse("it has no tokens".into()))?;
        if largest > MAX_TOKEN {
            return Err(refuse(format!("it has a token {largest}, and at most {MAX_TOKEN} is accepted")));
        }
        let eos = match end_token {
            Some(token) => tokenizer.token_to_id(token).ok_or_else(|| {
                let hint = DataHint::of("name a token of its vocabulary in {}", DataSetting::EosToken);
                DataError::tokenizer(path, format!("it has no token {token:?}"), hint)
            })?,
            None => usual_eos(&tokenizer).ok_or_else(|| {
                let problem = format!("it has none of the usual tokens to end a document ({})", END_TOKENS.join(", "));
                let hint = "name the token to use in {}; of a model to import, as eos_token in tokenizer_config.json";
                DataError::tokenizer(path, problem, DataHint::of(hint, DataSetting::EosToken))
            })?,
        };
        let (path, reads_special) = (path.to_owned(), OnceLock::new());
        let added = tokenizer.get_added_tokens_decoder().into_iter();
        let special = added.filter(|(_, token)| token.special).map(|(id, _)| id).collect();
        let model = Model::File { path, tokenizer: Box::new(tokenizer), source, reads_special, special };
        Ok(Tokenizer { model, eos, bos: None, vocabulary: largest + 1 })
    }

    /// One more than the largest token it can make: the smallest vocabulary of a model for it.
    pub fn vocabulary(&self) -> u32 {
        self.vocabulary
    }

    /// The token after each document.
    pub fn eos(&self) -> u32 {
        self.eos
    }

    /// The token before each document, if there is one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// A token by its number, as the vocabulary spells it.
    pub fn token(&self, id: u32) -> Option<String> {
        match &self.model {
            Model::Bytes => None,
            Model::File { tokenizer, .. } => tokenizer.id_to_token(id),
        }
    }

    /// Its special tokens with their numbers.
    pub(crate) fn special_tokens(&self) -> Vec<(u32, String)> {
        let Model::File { tokenizer, .. } = &self.model else { return Vec::new() };
        let added = tokenizer.get_added_tokens_decoder().into_iter();
        let mut special: Vec<(u32, String)> = added
            .filter(|(_, token)| token.special && !token.content.is_empty())
            .map(|(id, token)| (id, token.content))
            .collect();
        special.sort();
        special
    }

    /// Whether its file calls a token special, also one that text may spell.
    pub fn is_special(&self, id: u32) -> bool {
        matches!(&self.model, Model::File { special, .. } if special.contains(&id))
    }

    /// Whether a token is a byte, so that any bytes are text and may be cut anywhere.
    pub fn is_bytes(&self) -> bool {
        matches!(self.model, Model::Bytes)
    }

    /// The bytes of the `tokenizer.json` it was read from.
    pub fn source(&self) -> Option<&[u8]> {
        match &self.model {
            Model::Bytes => None,
            Model::File { source, .. } => Some(source),
        }
    }

    pub(crate) fn width(&self) -> Width {
        Width::of(self.vocabulary)
    }

    /// Appends the tokens of a text that follows `context`, each as the bytes of [`width`](Self::width). Memory grows with
    /// the result only: long text is tokenised in stretches.
    pub(crate) fn encode(&self, context: &str, text: &str, tokens: &mut Vec<u8>, stop: &AtomicBool) -> Result<()> {
        if self.is_bytes() {
            tokens.extend(text.as_bytes());
            return Ok(());
        }
        let nominal = cut::PIECE_BYTES as usize;
        let (mut context, mut rest) = (context.to_owned(), text);
        while !rest.is_empty() {
            go_on(stop)?;
            let end = match rest.len() <= nominal + cut::LOOK_AHEAD {
                true => rest.len(),
                false => self.cut(&[], rest.as_bytes(), nominal),
            };
            // A place to cut is between characters.
            let (stretch, after) = rest.split_at(end);
            self.width().append(&self.ids_behind(&context, stretch)?, tokens);
            context = cut::characters(&cut::context(context.as_bytes(), stretch.as_bytes())).to_owned();
            rest = after;
        }
        Ok(())
    }

    /// Where to cut a text that follows `before`, at or after `nominal`: a place where a token ends whatever comes after.
    /// Where the look-ahead has none, at the likeliest place, and the tokens there may not be those of the whole.
    pub(crate) fn cut(&self, before: &[u8], text: &[u8], nominal: usize) -> usize {
        if self.is_bytes() {
            return nominal;
        }
        let ahead = &text[nominal..];
        let is_safe = |at: &usize| {
            let context = cut::context(before, &text[..*at]);
            let (left, right) = (cut::characters(&context), &text[*at..text.len().min(*at + cut::CONTEXT_BYTES)]);
            self.ids(left).is_ok_and(|alone| {
                self.ids(&[left, cut::characters(right)].concat()).is_ok_and(|both| both.starts_with(&alone))
            })
        };
        let safe = cut::places(ahead).map(|at| nominal + at).find(is_safe);
        safe.unwrap_or_else(|| nominal + cut::first_cut(ahead))
    }

    /// The tokens of a stretch as they are in a text where it follows `context`.
    fn ids_behind(&self, context: &str, stretch: &str) -> Result<Vec<u32>> {
        if !context.is_empty() {
            let alone = self.ids(context)?;
            let mut both = self.ids(&[context, stretch].concat())?;
            if both.starts_with(&alone) {
                return Ok(both.split_off(alone.len()));
            }
        }
        self.ids(stretch)
    }

    fn ids(&self, text: &str) -> Result<Vec<u32>> {
        let Model::File { tokenizer, .. } = &self.model else { return Ok(text.bytes().map(u32::from).collect()) };
        Ok(self.encoding(|| tokenizer.encode_fast(text, false))?.get_ids().to_vec())
    }

    /// The tokens of a text and the bytes that each stands for. With `special`, text that spells a special token is one.
    pub(crate) fn spans(&self, text: &str, special: bool) -> Result<Vec<(u32, Range<usize>)>> {
        let Model::File { tokenizer, reads_special, .. } = &self.model else {
            return Ok(text.bytes().enumerate().map(|(at, byte)| (u32::from(byte), at..at + 1)).collect());
        };
        let reading = || {
            let mut tokenizer = tokenizer.clone();
            tokenizer.set_encode_special_tokens(false);
            tokenizer
        };
        let tokenizer = if special { reads_special.get_or_init(reading) } else { tokenizer };
        let encoding = self.encoding(|| tokenizer.encode(text, false))?;
        let spans = encoding.get_offsets().iter().map(|(start, end)| *start..*end);
        Ok(encoding.get_ids().iter().copied().zip(spans).collect())
    }

    /// Its file, for messages.
    pub(crate) fn path(&self) -> &Path {
        match &self.model {
            Model::Bytes => Path::new("bytes"),
            Model::File { path, .. } => path,
        }
    }

    /// What the library makes of a text, or why it does not.
    fn encoding(
        &self,
        encode: impl FnOnce() -> tokenizers::Result<tokenizers::Encoding>,
    ) -> Result<tokenizers::Encoding> {
        let path = self.path();
        let refuse = |cause: String| {
            let problem = format!("it cannot make tokens of a text: {cause}");
            DataError::tokenizer(path, problem, "check the tokenizer with the library it was made with")
        };
        let encoding = caught(encode)
            .ok_or_else(|| refuse("the library that reads it gave up".into()))?
            .map_err(|error| refuse(short(&error)))?;
        match encoding.get_ids().iter().find(|&&id| id >= self.vocabulary) {
            Some(id) => Err(refuse(format!("it made a token {id} that is not in its vocabulary"))),
            None => Ok(encoding),
        }
    }

    /// The tokens of a text.
    pub fn tokens(&self, text: &str) -> Result<Vec<u32>> {
        let mut bytes = Vec::new();
        self.encode("", text, &mut bytes, &NEVER)?;
        let token = |b: &[u8]| b.iter().rev().fold(0, |token, byte| token << 8 | u32::from(*byte));
        Ok(bytes.chunks_exact(self.width() as usize).map(token).collect())
    }

    /// The text of some tokens, EOS tokens shown by name; what is not text shows as replacement characters.
    pub fn decode(&self, tokens: &[u32]) -> String {
        match &self.model {
            Model::Bytes => {
                let bytes: Vec<u8> = tokens.iter().map(|&token| u8::try_from(token).unwrap_or(b'?')).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Model::File { tokenizer, .. } => {
                let decoded = caught(|| tokenizer.decode(tokens, false).ok());
                decoded.flatten().unwrap_or_else(|| char::REPLACEMENT_CHARACTER.to_string())
            }
        }
    }
}

/// The tokens of a `tokenizer.json` by their names, whether or not one of them can end a document.
pub struct TokenNames(Box<tokenizers::Tokenizer>);

impl TokenNames {
    /// Those of a `tokenizer.json` that was read from `path`.
    pub fn of_json(path: &Path, source: &[u8]) -> Result<Self> {
        Ok(TokenNames(Box::new(load(path, source)?)))
    }

    /// The number of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.0.token_to_id(token)
    }

    /// The token of a number.
    pub fn token(&self, id: u32) -> Option<String> {
        self.0.id_to_token(id)
    }

    /// The EOS token where nobody names one: the first that has one of the usual names.
    pub fn usual_eos(&self) -> Option<u32> {
        usual_eos(&self.0)
    }
}

fn load(path: &Path, source: &[u8]) -> Result<tokenizers::Tokenizer> {
    // The library promises errors, but a file made up to hurt may still meet a panic in it.
    caught(|| tokenizers::Tokenizer::from_bytes(source))
        .ok_or_else(|| not_a_tokenizer(path, "the library that reads it gave up"))?
        .map_err(|error| not_a_tokenizer(path, &short(&error)))
}

/// Padding and truncation are for batches of sentences, and text is not to stand for a special token.
fn as_text(path: &Path, tokenizer: &mut tokenizers::Tokenizer) -> Result<()> {
    tokenizer.with_padding(None);
    tokenizer.with_truncation(None).map_err(|error| not_a_tokenizer(path, &short(&error)))?;
    tokenizer.set_encode_special_tokens(true);
    Ok(())
}

fn not_a_tokenizer(path: &Path, cause: &str) -> DataError {
    const HINT: &str = "give a tokenizer.json as Hugging Face's tokenizers library saves it";
    DataError::tokenizer(path, format!("not a tokenizer: {cause}"), HINT)
}

fn usual_eos(tokenizer: &tokenizers::Tokenizer) -> Option<u32> {
    END_TOKENS.iter().find_map(|token| tokenizer.token_to_id(token))
}

/// The largest token accepted, far above any vocabulary in use: it bounds what a made-up file can ask for.
const MAX_TOKEN: u32 = (1 << 24) - 1;

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("path", &self.path()).field("vocabulary", &self.vocabulary).finish()
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let unreadable = |cause| DataError::unreadable(path, cause);
    let file = File::open(path).map_err(unreadable)?;
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let problem = format!("longer than {} MiB, so not a tokenizer", MAX_FILE_BYTES >> 20);
        return Err(DataError::tokenizer(path, problem, "give a tokenizer.json, or \"bytes\""));
    }
    Ok(bytes)
}

/// The first line of what the library says, without what a terminal would act on.
fn short(error: &dyn fmt::Display) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    line.chars().take(200).map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}
