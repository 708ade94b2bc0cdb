//! Where long text may be cut so that its parts become the tokens of the whole. Whether it may, the tokenizer says.

/// Text is tokenised in stretches of about this size, and held out in pieces of it.
pub(crate) const PIECE_BYTES: u64 = 64 * 1024;

/// How far after its nominal place a cut may be; less than a piece, so that cuts keep their order.
pub(crate) const LOOK_AHEAD: usize = PIECE_BYTES as usize - 1;

/// Text before a place that tells whether it may be cut there, and that is shown to the tokenizer with what comes after it:
/// some tokenizers treat the beginning of a text in a way of its own.
pub(crate) const CONTEXT_BYTES: usize = 512;

/// Places of each kind that are tried.
const TRIES: usize = 16;

/// Places after `text[0]` and within the look-ahead where it may be safe to cut, the likeliest first: between lines; before
/// a space; in one long word, at any character. The answer depends on the look-ahead only, so any longer `text` gives the same.
pub(crate) fn places(text: &[u8]) -> impl Iterator<Item = usize> {
    let window = &text[..text.len().min(LOOK_AHEAD)];
    let between =
        |at: &usize, before: fn(u8) -> bool, after: fn(u8) -> bool| before(window[*at - 1]) && after(window[*at]);
    let lines = move |at: &usize| between(at, |b| b == b'\n', |b| !b.is_ascii_whitespace());
    let words = move |at: &usize| between(at, |b| !b.is_ascii_whitespace(), |b| b == b' ');
    let character = |at: &usize| window[*at] & 0xc0 != 0x80;
    let places = 1..window.len();
    (places.clone().filter(lines).take(TRIES))
        .chain(places.filter(words).take(TRIES))
        .chain((0..window.len()).filter(character).take(TRIES))
}

/// The first of them, or the end of the look-ahead.
pub(crate) fn first_cut(text: &[u8]) -> usize {
    places(text).next().unwrap_or(text.len().min(LOOK_AHEAD))
}

/// The end of a text, or of what came before it and it, as far as it is context.
pub(crate) fn context(before: &[u8], text: &[u8]) -> Vec<u8> {
    let end = &text[text.len().saturating_sub(CONTEXT_BYTES)..];
    let more = before.len().min(CONTEXT_BYTES - end.len());
    [&before[before.len() - more..], end].concat()
}

/// The whole characters of a part of a text; none where it is no UTF-8.
pub(crate) fn characters(part: &[u8]) -> &str {
    let continues = |byte: &u8| byte & 0xc0 == 0x80;
    let part = &part[part.iter().take_while(|byte| continues(byte)).count()..];
    match std::str::from_utf8(part) {
        Ok(text) => text,
        // A character that the end of the part divides.
        Err(error) if error.error_len().is_none() => {
            std::str::from_utf8(&part[..error.valid_up_to()]).unwrap_or_default()
        }
        Err(_) => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_preferred_to_words_and_words_to_characters() {
        assert_eq!(first_cut(b"one two\nthree\n"), 8);
        assert_eq!(first_cut(b"one\n\n  two\nthree"), 11, "blank space stays with the line before");
        assert_eq!(first_cut(b"one two"), 3);
        assert_eq!(first_cut("\u{e9}t\u{e9}".as_bytes()), 0);
        assert_eq!(first_cut(&"\u{e9}t\u{e9}".as_bytes()[1..]), 1);
        assert_eq!(first_cut(b""), 0);
    }

    #[test]
    fn context_is_whole_characters_before_a_place() {
        assert_eq!(context(b"ab", b"cd"), b"abcd");
        assert_eq!(context(&[b'x'; 600], b"cd"), [&[b'x'; 510][..], b"cd"].concat());
        assert_eq!(context(b"ab", &[b'x'; 600]), [b'x'; 512]);
        assert_eq!(characters("\u{20ac}a\u{20ac}".as_bytes()), "\u{20ac}a\u{20ac}");
        assert_eq!(characters(&"\u{20ac}a\u{20ac}".as_bytes()[1..6]), "a");
        assert_eq!(characters(b"a\xffb"), "");
    }
}
