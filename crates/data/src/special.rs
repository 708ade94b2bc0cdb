//! Special tokens that stand in text: they are tokenised as ordinary text there.

use crate::{Prepared, Result};
use std::collections::BTreeSet;

/// Tokens that are looked at: the number of places, evenly over the training tokens, and of tokens at each.
const PLACES: u64 = 256;
const TOKENS: u64 = 4096;

/// Special tokens that were found as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialInText {
    /// Which, in order of their spelling.
    pub tokens: Vec<String>,
    /// Documents that have one.
    pub documents: u64,
    /// Documents that were looked at.
    pub looked_at: u64,
}

impl Prepared {
    /// Special tokens of the tokenizer that training text spells out, by samples of it: up to a million tokens are looked at. None where
    /// there are none, and for tokens that others made.
    pub fn special_in_text(&self) -> Result<Option<SpecialInText>> {
        let (tokenizer, stream) = (self.tokenizer()?, self.train());
        let special = tokenizer.special_tokens();
        if self.is_in_place() || special.is_empty() || stream.is_empty() {
            return Ok(None);
        }
        let is_special = |id: &u32| special.iter().any(|(token, _)| token == id);
        let firsts: BTreeSet<u8> = special.iter().filter_map(|(_, text)| text.bytes().next()).collect();
        let (mut found, mut documents, mut looked_at) = (BTreeSet::new(), 0, 0);
        let places = stream.len().div_ceil(TOKENS).min(PLACES);
        for place in 0..places {
            let from = (u128::from(stream.len()) * u128::from(place) / u128::from(places)) as u64;
            let count = (stream.len() - from).min(TOKENS);
            let mut tokens = vec![0; count as usize];
            stream.copy(from, &mut tokens);
            let mut starts = Vec::new();
            stream.documents_beginning_in(from, from + count, |document| starts.push((document.start - from) as usize));
            stream.require_read()?;
            // What began earlier counts where nothing else is here.
            if starts.is_empty() {
                starts.push(0);
            }
            for (at, start) in starts.iter().enumerate() {
                let end = starts.get(at + 1).copied().unwrap_or(tokens.len());
                let ordinary: Vec<u32> = tokens[*start..end].iter().copied().filter(|id| !is_special(id)).collect();
                let text = tokenizer.decode(&ordinary);
                let mut any = false;
                for (at, _) in text.bytes().enumerate().filter(|(_, byte)| firsts.contains(byte)) {
                    let rest = &text.as_bytes()[at..];
                    for (_, token) in special.iter().filter(|(_, token)| rest.starts_with(token.as_bytes())) {
                        any = true;
                        found.insert(token.clone());
                    }
                }
                documents += u64::from(any);
                looked_at += 1;
            }
        }
        let tokens: Vec<String> = found.into_iter().collect();
        Ok((documents > 0).then_some(SpecialInText { tokens, documents, looked_at }))
    }
}
