//! The tokens of a rendered conversation, and which of them count in the loss.

use std::collections::BTreeMap;
use std::ops::Range;

use super::Rendered;
use crate::{DataError, DataHint, DataSetting, Result, Tokenizer};

/// A token and the bytes that it stands for.
type Span = (u32, Range<usize>);

/// Tokens that do not count, and those after them that do, up to the next of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    /// Its first token.
    pub(crate) start: u64,
    /// How many tokens do not count.
    pub(crate) prompt: u64,
}

impl Turn {
    /// A document in which the first tokens do not count.
    pub(crate) fn alone(prompt: u64) -> Vec<Self> {
        vec![Turn { start: 0, prompt }]
    }
}

impl Rendered {
    /// Its tokens, in turns.
    pub(crate) fn encode(&self, tokenizer: &Tokenizer) -> Result<(Vec<u32>, Vec<Turn>)> {
        let spans = self.spans(tokenizer)?;
        let turns = match &self.trained {
            None => Turn::alone(0),
            Some(trained) => turns(&spans, trained),
        };
        Ok((spans.into_iter().map(|(token, _)| token).collect(), turns))
    }

    /// The whole text at once, as transformers reads it. Special tokens that a message spells are read apart from it, as text.
    fn spans(&self, tokenizer: &Tokenizer) -> Result<Vec<Span>> {
        if self.spelled.is_empty() {
            return tokenizer.spans(&self.text, true);
        }
        let lines = [tokenizer.spans("\n", false)?, tokenizer.spans("\n", true)?];
        let parts = Parts { text: &self.text, tokenizer, lines };
        let special: BTreeMap<u32, String> = tokenizer.special_tokens().into_iter().collect();
        let mut spans = Vec::new();
        let mut at = 0;
        for spelled in &self.spelled {
            parts.read(at..spelled.start, true, &mut spans)?;
            let before = spans.len();
            parts.read(spelled.clone(), false, &mut spans)?;
            at = spelled.end;
            if let Some(token) = spans[before..].iter().find_map(|(made, _)| special.get(made)) {
                let problem = format!("the tokenizer makes the special token {token:?} of a message that spells it");
                let hint = DataHint::of("allow it with {}, or remove it from the text", DataSetting::SpecialTokens);
                return Err(DataError::source(tokenizer.path(), problem, hint));
            }
        }
        parts.read(at..self.text.len(), true, &mut spans)?;
        Ok(spans)
    }
}

/// A text that is read in parts.
struct Parts<'a> {
    text: &'a str,
    tokenizer: &'a Tokenizer,
    /// The tokens of a line end, read as text and with special tokens.
    lines: [Vec<Span>; 2],
}

impl Parts<'_> {
    /// Adds the tokens of a part of the text.
    fn read(&self, part: Range<usize>, special: bool, spans: &mut Vec<Span>) -> Result<()> {
        let (text, line) = (&self.text[part.clone()], &self.lines[usize::from(special)]);
        if text.is_empty() {
            return Ok(());
        }
        let moved = |(token, bytes): Span, by: usize| {
            let place = |at: usize| (part.start + at).saturating_sub(by);
            (token, place(bytes.start)..place(bytes.end))
        };
        if part.start > 0 {
            // After a line end: some tokenizers put a space before what begins a text.
            let behind = self.tokenizer.spans(&format!("\n{text}"), special)?;
            if behind.len() >= line.len() && line.iter().zip(&behind).all(|(a, b)| a.0 == b.0) {
                spans.extend(behind.into_iter().skip(line.len()).map(|span| moved(span, 1)));
                return Ok(());
            }
        }
        spans.extend(self.tokenizer.spans(text, special)?.into_iter().map(|span| moved(span, 0)));
        Ok(())
    }
}

/// The turns of tokens that count where their text does. Parts are in order, and so are tokens: each is looked at once.
fn turns(spans: &[Span], trained: &[Range<usize>]) -> Vec<Turn> {
    let (mut turns, mut counted, mut at): (Vec<Turn>, usize, usize) = (Vec::new(), 0, 0);
    for part in trained {
        at += spans[at..].iter().take_while(|(_, bytes)| is_before(bytes, part)).count();
        let end = at + spans[at..].iter().take_while(|(_, bytes)| !is_after(bytes, part)).count();
        if end == at {
            continue;
        }
        if turns.is_empty() || at > counted {
            turns.push(Turn { start: counted as u64, prompt: (at - counted) as u64 });
        }
        (counted, at) = (end, end);
    }
    if counted < spans.len() {
        turns.push(Turn { start: counted as u64, prompt: (spans.len() - counted) as u64 });
    }
    turns
}

/// Whether a token ends before a part of a text. Tokenizers leave spaces out of the bytes of a token, so that one may have none: it
/// is of the text that ends there.
fn is_before(bytes: &Range<usize>, part: &Range<usize>) -> bool {
    bytes.end <= part.start
}

/// Whether a token begins after a part of a text.
fn is_after(bytes: &Range<usize>, part: &Range<usize>) -> bool {
    if bytes.is_empty() { bytes.start > part.end } else { bytes.start >= part.end }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_the_tokens_of_the_parts_that_count() {
        let spans = |ends: &[usize]| -> Vec<Span> {
            ends.iter().scan(0, |start, end| Some((7, std::mem::replace(start, *end)..*end))).collect()
        };
        let tokens = spans(&[2, 3, 6, 8, 9, 12]);
        let found = |parts: &[(usize, usize)]| -> Vec<(u64, u64)> {
            let parts: Vec<Range<usize>> = parts.iter().map(|(start, end)| *start..*end).collect();
            turns(&tokens, &parts).iter().map(|turn| (turn.start, turn.prompt)).collect()
        };
        assert_eq!(found(&[(2, 6)]), [(0, 1), (3, 3)]);
        assert_eq!(found(&[(2, 3), (8, 12)]), [(0, 1), (2, 2)]);
        assert_eq!(found(&[(0, 3), (3, 6)]), [(0, 0), (3, 3)], "parts side by side are one");
        assert_eq!(found(&[(4, 5)]), [(0, 2), (3, 3)], "a token counts where a part of its text does");
        assert_eq!(found(&[]), [(0, 6)]);
    }
}
