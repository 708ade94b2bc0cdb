//! Between text and tokens, for whoever talks to a trained model.

use crate::TrainError;
use lockstep_config::Config;
use lockstep_data::{BYTE_VOCABULARY, SEPARATOR};

/// How a model's tokens stand for text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tokenizer {
    /// A token is a byte of UTF-8.
    Bytes,
}

impl Tokenizer {
    /// The tokenizer of a run.
    pub fn of(config: &Config) -> Result<Self, TrainError> {
        let vocab = config.model.vocab_size;
        if vocab < BYTE_VOCABULARY as usize {
            return Err(TrainError::Vocabulary { vocab });
        }
        Ok(Tokenizer::Bytes)
    }

    /// Tokens that stand for text; a model's vocabulary may be larger.
    pub fn vocabulary(&self) -> usize {
        match self {
            Tokenizer::Bytes => BYTE_VOCABULARY as usize,
        }
    }

    /// The token after a document.
    pub fn separator(&self) -> u32 {
        match self {
            Tokenizer::Bytes => u32::from(SEPARATOR),
        }
    }

    /// Text as tokens.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        match self {
            Tokenizer::Bytes => text.bytes().map(u32::from).collect(),
        }
    }

    /// The bytes that a token stands for, appended to `out`; none for the separator.
    pub fn decode(&self, token: u32, out: &mut Vec<u8>) {
        match self {
            Tokenizer::Bytes if token == self.separator() => {}
            Tokenizer::Bytes => out.extend(u8::try_from(token)),
        }
    }

    /// Number of bytes that a token stands for.
    pub fn byte_count(&self, token: u32) -> u64 {
        match self {
            Tokenizer::Bytes => u64::from(token != self.separator()),
        }
    }
}

/// Tokens as text while they come: characters appear when they are whole, and bytes that are no UTF-8 as `�`.
#[derive(Debug)]
pub struct TextStream {
    tokenizer: Tokenizer,
    /// The beginning of a character.
    pending: Vec<u8>,
}

impl TextStream {
    /// An empty stream.
    pub fn new(tokenizer: Tokenizer) -> Self {
        Self { tokenizer, pending: Vec::new() }
    }

    /// The text that one more token completes; empty where a character is not whole yet.
    pub fn push(&mut self, token: u32) -> String {
        self.tokenizer.decode(token, &mut self.pending);
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

    /// What is left at the end: a character that was never completed.
    pub fn finish(&mut self) -> String {
        match std::mem::take(&mut self.pending)[..] {
            [] => String::new(),
            _ => char::REPLACEMENT_CHARACTER.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(bytes: &[u8]) -> (Vec<String>, String) {
        let mut stream = TextStream::new(Tokenizer::Bytes);
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
    fn separators_and_tokens_outside_the_vocabulary_are_no_text() {
        let mut stream = TextStream::new(Tokenizer::Bytes);
        assert_eq!(stream.push(0) + &stream.push(300) + &stream.push(u32::from(b'x')), "x");
    }
}
