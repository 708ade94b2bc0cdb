//! Between text and tokens, for whoever talks to a trained model.

use crate::{InferError, Result};
use lockstep_config::Config;
use lockstep_data::{DataError, Tokenizer, TokenizerSpec};
use std::ops::Deref;
use std::sync::Arc;

/// How a model's tokens stand for text: bytes of UTF-8, or a `tokenizer.json`.
#[derive(Clone, Debug)]
pub struct RunTokenizer(Arc<Tokenizer>);

impl From<Tokenizer> for RunTokenizer {
    fn from(tokenizer: Tokenizer) -> Self {
        Self(Arc::new(tokenizer))
    }
}

impl Deref for RunTokenizer {
    type Target = Tokenizer;

    fn deref(&self) -> &Tokenizer {
        &self.0
    }
}

impl RunTokenizer {
    /// The tokenizer that a config names, where it is now. A trained model has its own: [`Trained::tokenizer`](crate::Trained::tokenizer).
    pub fn of(config: &Config) -> Result<Self> {
        let tokenizer = Tokenizer::open(&tokenizer_spec(config)?)?;
        require_vocabulary(config, tokenizer.vocabulary())?;
        Ok(tokenizer.into())
    }

    /// The token before a document as the vocabulary spells it, if there is one.
    pub fn bos_text(&self) -> Option<String> {
        self.bos().and_then(|bos| self.token(bos))
    }

    /// Text as the tokens of a document's beginning: after the BOS token, where there is one.
    pub fn encode_beginning(&self, text: &str) -> Result<Vec<u32>, DataError> {
        Ok(self.bos().into_iter().chain(self.tokens(text)?).collect())
    }

    /// Number of bytes of text that tokens stand for, which are of one document, after those that stand `before` them. Special
    /// tokens are no text, nor is a BOS token; an EOS token that is not special must be left out. Over the pieces of a document the
    /// numbers add up to its length: a character that is cut counts as `�` before the cut, and what that was too much is taken off
    /// after it.
    pub fn byte_count(&self, before: &[u32], tokens: &[u32]) -> i64 {
        if self.is_bytes() || tokens.is_empty() {
            return tokens.len() as i64;
        }
        let text = |tokens: &[u32]| tokens.iter().copied().filter(|token| !self.is_special(*token)).collect::<Vec<_>>();
        let (before, tokens) = (text(before), text(tokens));
        let (before, tokens) = match (&before[..], &tokens[..], self.bos()) {
            ([first, rest @ ..], tokens, Some(bos)) if *first == bos => (rest, tokens),
            ([], [first, rest @ ..], Some(bos)) if *first == bos => (&[][..], rest),
            (before, tokens, _) => (before, tokens),
        };
        let length = |tokens: &[u32]| if tokens.is_empty() { 0 } else { self.decode(tokens).len() as i64 };
        length(&[before, tokens].concat()) - length(before)
    }
}

/// The tokenizer that a config names.
pub fn tokenizer_spec(config: &Config) -> Result<TokenizerSpec, DataError> {
    let Some(path) = config.tokenizer_path() else { return Ok(TokenizerSpec::Bytes) };
    if let Some((problem, hint)) = config.tokenizer_on_the_hub() {
        let path = config.data.tokenizer.clone().into();
        return Err(DataError::Source { path, problem: problem.into(), hint: hint.into() });
    }
    Ok(with_tokens_of(config, TokenizerSpec::file(&path, None)?))
}

/// A tokenizer with the tokens that a config names: the EOS token, the BOS token, and those that text may spell.
pub(crate) fn with_tokens_of(config: &Config, tokenizer: TokenizerSpec) -> TokenizerSpec {
    let tokenizer = tokenizer.with_eos(config.data.eos_token.as_deref()).with_bos(config.bos_token());
    tokenizer.with_special(&config.data.special_tokens)
}

/// A warning and a hint where much of a model's vocabulary is no token of the tokenizer: it is trained on other text than is meant,
/// or has rows that nothing reads.
pub fn unused_vocabulary(config: &Config, tokenizer: &RunTokenizer) -> Option<(String, String)> {
    let (vocab, tokens) = (config.model.vocab_size, tokenizer.vocabulary() as usize);
    let named = config.tokenizer_path().map_or("\"bytes\"".to_owned(), |path| path.display().to_string());
    let problem = format!(
        "model.vocab_size = {vocab}, and data.tokenizer ({named}) has {tokens} tokens: the others are never read"
    );
    let hint = format!("set data.tokenizer to the tokenizer of the model, or model.vocab_size = {tokens}");
    (tokens < vocab / 4 * 3).then_some((problem, hint))
}

/// Refuses a model that has no embedding for some token.
pub fn require_vocabulary(config: &Config, needed: u32) -> Result<()> {
    let vocab = config.model.vocab_size;
    if vocab >= needed as usize {
        return Ok(());
    }
    let tokenizer = config.tokenizer_path().map_or("bytes".to_owned(), |path| path.display().to_string());
    Err(InferError::Unusable {
        problem: format!(
            "model.vocab_size is {vocab}, the tokenizer \"{tokenizer}\" makes tokens up to {}",
            needed - 1
        ),
        hint: format!("set model.vocab_size = {needed}"),
    })
}

/// Tokens as text while they come: characters appear when they are whole, and bytes that are no UTF-8 as `�`.
#[derive(Debug)]
pub struct TextStream {
    tokenizer: RunTokenizer,
    /// The beginning of a character, of byte tokens.
    pending: Vec<u8>,
    /// The last tokens of a `tokenizer.json`: those that were shown last, which tell how the next ones read, and after them those
    /// whose text is not whole yet.
    tokens: Vec<u32>,
    /// How many of them were shown, and the bytes of their text.
    read: usize,
    shown: usize,
}

/// Tokens that are waited with for the rest of a character: its bytes are tokens at most, so what is longer is no text.
const MOST_PENDING: usize = 8;

impl TextStream {
    /// An empty stream.
    pub fn new(tokenizer: RunTokenizer) -> Self {
        Self { tokenizer, pending: Vec::new(), tokens: Vec::new(), read: 0, shown: 0 }
    }

    /// The text that one more token completes; empty where a character is not whole yet.
    pub fn push(&mut self, token: u32) -> String {
        if token == self.tokenizer.eos() || Some(token) == self.tokenizer.bos() {
            return String::new();
        }
        if self.tokenizer.is_bytes() {
            self.pending.extend(u8::try_from(token));
            return self.whole_characters();
        }
        self.tokens.push(token);
        let text = self.tokenizer.decode(&self.tokens);
        let pending = self.tokens.len() - self.read;
        if text.ends_with(char::REPLACEMENT_CHARACTER) && pending < MOST_PENDING {
            return String::new();
        }
        let new = text.get(self.shown..).unwrap_or_default().to_owned();
        // What was shown before is needed no more.
        self.tokens.drain(..self.read);
        (self.read, self.shown) = (self.tokens.len(), self.tokenizer.decode(&self.tokens).len());
        new
    }

    /// What is left at the end: a character that was never completed.
    pub fn finish(&mut self) -> String {
        if self.tokenizer.is_bytes() {
            let cut = !std::mem::take(&mut self.pending).is_empty();
            return if cut { char::REPLACEMENT_CHARACTER.to_string() } else { String::new() };
        }
        self.tokenizer.decode(&self.tokens).get(self.shown..).unwrap_or_default().to_owned()
    }

    fn whole_characters(&mut self) -> String {
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.pending) {
                Ok(whole) => {
                    text.push_str(whole);
                    self.pending.clear();
                    return text;
                }
                Err(error) => {
                    let (whole, rest) = self.pending.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(whole));
                    let Some(wrong) = error.error_len() else {
                        self.pending = rest.to_vec();
                        return text;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    self.pending = rest[wrong..].to_vec();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(bytes: &[u8]) -> (Vec<String>, String) {
        let mut stream = TextStream::new(Tokenizer::bytes().into());
        let pieces = bytes.iter().map(|b| stream.push(u32::from(*b))).collect();
        (pieces, stream.finish())
    }

    #[test]
    fn characters_appear_when_they_are_whole() {
        let (pieces, rest) = stream("aé€😀".as_bytes());
        assert_eq!(pieces, ["a", "", "é", "", "", "€", "", "", "", "😀"]);
        assert_eq!(rest, "");
    }

    #[test]
    fn bytes_that_are_no_text_are_replaced_as_a_whole_reading_would() {
        for bytes in [&b"a\xffb"[..], b"\xe2\x82a", b"\xf0\x9f\x98", b"\xc3\xc3\xa9", b"\x80\x80", b"\xed\xa0\x80z"] {
            let (pieces, rest) = stream(bytes);
            assert_eq!(pieces.concat() + &rest, String::from_utf8_lossy(bytes), "{bytes:?}");
        }
    }

    #[test]
    fn eos_and_tokens_outside_the_vocabulary_are_no_text() {
        let mut stream = TextStream::new(Tokenizer::bytes().into());
        assert_eq!(stream.push(0) + &stream.push(300) + &stream.push(u32::from(b'x')), "x");
    }

    /// A tokenizer as Llama 2 has it: spaces are `▁`, the first of a text is none, and what is no token is bytes.
    const SPACES: &str = r#"{ "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " }, { "type": "ByteFallback" }, { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 } ] },
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": true, "ignore_merges": false, "merges": [],
            "vocab": { "</s>": 0, "▁": 1, "▁one": 2, "two": 3, "<0xE2>": 4, "<0x82>": 5, "<0xAC>": 6, "<0xFF>": 7 } } }"#;

    #[test]
    fn a_stream_of_a_tokenizer_reads_as_its_tokens_together() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, SPACES).unwrap();
        let spec = lockstep_data::TokenizerSpec::file(&path, None).unwrap();
        let tokenizer = RunTokenizer::from(Tokenizer::open(&spec).unwrap());
        for tokens in
            [&[2, 2, 3, 1, 2, 4, 5, 6, 2, 3][..], &[1, 1, 2, 3, 3], &[4, 5, 6, 4, 5, 6, 3], &[2, 4, 5], &[3, 7, 2, 7]]
        {
            let mut stream = TextStream::new(tokenizer.clone());
            let pieces: String = tokens.iter().map(|token| stream.push(*token)).collect();
            assert_eq!(pieces + &stream.finish(), tokenizer.decode(tokens), "{tokens:?}");
        }
        // The bytes of pieces are those of the whole, wherever a character is cut.
        let tokens = [2, 4, 5, 6, 3, 2, 4, 5, 6, 4, 5, 6, 3];
        for piece in 1..tokens.len() {
            let starts = (0..tokens.len()).step_by(piece);
            let bytes: i64 =
                starts.map(|at| tokenizer.byte_count(&tokens[..at], &tokens[at..(at + piece).min(tokens.len())])).sum();
            assert_eq!(bytes, tokenizer.decode(&tokens).len() as i64, "pieces of {piece}");
        }
        // However long the text, or the noise, few tokens are looked at.
        let mut stream = TextStream::new(tokenizer);
        for token in [2, 3, 7].into_iter().cycle().take(100).chain([7; 100]) {
            stream.push(token);
            assert!(stream.tokens.len() <= 2 * MOST_PENDING, "{:?}", stream.tokens);
        }
    }
}
