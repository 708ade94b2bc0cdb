//! Marks in a rendered conversation, which say what wrote its text: the template, or whoever wrote a message.
//!
//! Marks are noncharacters, which Unicode keeps for such uses. They are put into messages, or around blocks of the assistant, before
//! a template is rendered for a second time; without them the text must be that of the first time.

use std::collections::BTreeMap;
use std::ops::Range;

use minijinja::Value;
use minijinja::value::ValueKind;

/// Around what the assistant writes.
pub(super) const OPEN: char = '\u{fdd0}';
pub(super) const CLOSE: char = '\u{fdd1}';
/// After the first character of what would be a special token, and is the text of a message.
const SPELLED: char = '\u{fdd2}';

/// Whether a text has one of the marks already.
pub(super) fn has_mark(text: &str) -> bool {
    text.contains([OPEN, CLOSE, SPELLED])
}

/// Adds all texts of a value that are not blank.
pub(super) fn texts(value: &Value, all: &mut Vec<String>) {
    match value.kind() {
        ValueKind::String => all.extend(value.as_str().filter(|text| !text.trim().is_empty()).map(str::to_owned)),
        ValueKind::Seq | ValueKind::Map => {
            for item in value.try_iter().into_iter().flatten() {
                texts(&item, all);
                if value.kind() == ValueKind::Map {
                    texts(&value.get_item(&item).unwrap_or_default(), all);
                }
            }
        }
        _ => {}
    }
}

/// Special tokens that a text may spell.
#[derive(Debug)]
pub(super) struct Spellings {
    /// By their first character, the longest first.
    tokens: BTreeMap<char, Vec<String>>,
}

impl Spellings {
    pub(super) fn new(mut tokens: Vec<String>) -> Self {
        tokens.sort_by_key(|token| std::cmp::Reverse(token.len()));
        let mut by_first: BTreeMap<char, Vec<String>> = BTreeMap::new();
        for token in tokens {
            if let Some(first) = token.chars().next() {
                by_first.entry(first).or_default().push(token);
            }
        }
        Spellings { tokens: by_first }
    }

    /// Those that a text may begin with.
    fn of(&self, text: &str) -> &[String] {
        text.chars().next().and_then(|first| self.tokens.get(&first)).map_or(&[], Vec::as_slice)
    }

    /// A value in which a mark breaks every special token, and what becomes one together with another of the texts; none where there
    /// are none.
    pub(super) fn mark(&self, value: &Value, texts: &[String]) -> Option<Value> {
        match value.kind() {
            ValueKind::String => self.mark_text(value.as_str()?, texts).map(Value::from),
            ValueKind::Seq => {
                let items: Vec<Value> = value.try_iter().ok()?.collect();
                let marked: Vec<Option<Value>> = items.iter().map(|item| self.mark(item, texts)).collect();
                let any = marked.iter().any(Option::is_some);
                any.then(|| items.into_iter().zip(marked).map(|(item, marked)| marked.unwrap_or(item)).collect())
            }
            ValueKind::Map => {
                let keys: Vec<Value> = value.try_iter().ok()?.collect();
                let mut any = false;
                let mut marked = |item: Value| match self.mark(&item, texts) {
                    Some(marked) => {
                        any = true;
                        marked
                    }
                    None => item,
                };
                let pair = |key: Value| {
                    let item = value.get_item(&key).unwrap_or_default();
                    (marked(key), marked(item))
                };
                let pairs: Vec<(Value, Value)> = keys.into_iter().map(pair).collect();
                any.then(|| pairs.into_iter().collect())
            }
            _ => None,
        }
    }

    fn mark_text(&self, text: &str, texts: &[String]) -> Option<String> {
        // A template may trim what it puts together.
        let completes =
            |left: &str| texts.iter().any(|text| left.starts_with(text.trim()) || text.trim_start().starts_with(left));
        // Once for all places: a text may be long, and end in as many spaces.
        let end = text.trim_end().len();
        let begins = |at: usize| {
            self.of(&text[at..]).iter().any(|token| {
                text[at..].starts_with(token) || at < end && token.strip_prefix(&text[at..end]).is_some_and(&completes)
            })
        };
        let places: Vec<usize> = text.char_indices().map(|(at, _)| at).filter(|at| begins(*at)).collect();
        if places.is_empty() {
            return None;
        }
        let mut marked = String::with_capacity(text.len() + 3 * places.len());
        let mut from = 0;
        for at in places {
            let end = at + text[at..].chars().next().map_or(0, char::len_utf8);
            marked.push_str(&text[from..end]);
            marked.push(SPELLED);
            from = end;
        }
        marked.push_str(&text[from..]);
        Some(marked)
    }

    /// The special token that a text begins with.
    fn at(&self, text: &str) -> Option<&str> {
        self.of(text).iter().map(String::as_str).find(|token| text.starts_with(token))
    }
}

/// A rendered text without its marks, and what they said.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Marked {
    pub(super) text: String,
    /// What the assistant writes.
    pub(super) generated: Vec<Range<usize>>,
    /// Special tokens that are the text of messages.
    pub(super) spelled: Vec<Range<usize>>,
}

impl Marked {
    /// Takes the marks out of a text; none where they are not in pairs.
    pub(super) fn read(marked: &str, spellings: &Spellings) -> Option<Self> {
        let (mut this, mut open, mut firsts) = (Marked::default(), None, Vec::new());
        for c in marked.chars() {
            match c {
                OPEN if open.is_none() => open = Some(this.text.len()),
                CLOSE => this.generated.push(open.take()?..this.text.len()),
                SPELLED => firsts.push(this.text.char_indices().next_back()?.0),
                OPEN => return None,
                c => this.text.push(c),
            }
        }
        this.generated.retain(|range| !range.is_empty());
        let mut end = 0;
        for first in firsts {
            // One that begins inside of another is a part of its text.
            if let Some(token) = spellings.at(&this.text[first..]).filter(|_| first >= end) {
                end = first + token.len();
                this.spelled.push(first..end);
            }
        }
        open.is_none().then_some(this)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(ranges: &[Range<usize>]) -> Vec<(usize, usize)> {
        ranges.iter().map(|range| (range.start, range.end)).collect()
    }

    fn spellings() -> Spellings {
        Spellings::new(["<s>", "<|end|>", "<|end|>!"].map(str::to_owned).to_vec())
    }

    #[test]
    fn special_tokens_in_messages_are_marked_and_found_again() {
        let value: Value = serde_json::from_str(r#"{"a": ["x <|end|> y", 3, null], "<s>": "plain"}"#).unwrap();
        assert!(spellings().mark(&Value::from("a < b, <th> </s> <"), &["b".to_owned()]).is_none());
        let marked = spellings().mark(&value, &[]).unwrap().to_string();
        assert_eq!(marked.matches("<\\u{fdd2}").count(), 2, "{marked}");
        let text = "<|end|>".to_owned() + &spellings().mark_text("x<|end|>!<s", &[]).unwrap() + "s><s>";
        let read = Marked::read(&text, &spellings()).unwrap();
        assert_eq!(read.text, "<|end|>x<|end|>!<ss><s>");
        assert_eq!(pairs(&read.spelled), [(8, 16)]);
        // What pieces of text spell together.
        for pieces in [&[" d|> x"][..], &["d", "|>"]] {
            let pieces: Vec<String> = pieces.iter().map(|piece| piece.to_string()).collect();
            let marked = spellings().mark_text("<|en", &pieces).unwrap();
            let read = Marked::read(&(marked + "d|>"), &spellings()).unwrap();
            assert_eq!(pairs(&read.spelled), [(0, 7)]);
        }
    }

    #[test]
    fn marks_come_in_pairs() {
        let read = |text: &str| Marked::read(text, &spellings());
        let text = format!("a{OPEN}bé{CLOSE}c{OPEN}{CLOSE}");
        let marked = read(&text).unwrap();
        assert_eq!((marked.text.as_str(), pairs(&marked.generated)), ("abéc", vec![(1, 4)]));
        for text in [format!("{OPEN}a"), format!("a{CLOSE}"), format!("{OPEN}{OPEN}a{CLOSE}{CLOSE}")] {
            assert_eq!(read(&text), None);
        }
    }
}
