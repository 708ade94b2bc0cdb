//! Where long text may be cut so that its parts become the tokens of the whole.

/// Text is tokenised in stretches of about this size, and held out in pieces of it.
pub(crate) const PIECE_BYTES: u64 = 64 * 1024;

/// How far after its nominal place a cut may be; less than a piece, so that cuts keep their order.
pub(crate) const LOOK_AHEAD: usize = PIECE_BYTES as usize - 1;

/// The first place after `text[0]` and within the look-ahead where it is safe to cut: between lines, where no tokenizer
/// in use joins what comes before to what comes after; or else before a space; or else, in one long word, at any
/// character. The answer depends on the look-ahead only, so any longer `text` gives the same.
pub(crate) fn first_cut(text: &[u8]) -> usize {
    let window = &text[..text.len().min(LOOK_AHEAD)];
    let between =
        |at: &usize, before: fn(u8) -> bool, after: fn(u8) -> bool| before(window[*at - 1]) && after(window[*at]);
    let lines = |at: &usize| between(at, |b| b == b'\n', |b| !b.is_ascii_whitespace());
    let words = |at: &usize| between(at, |b| !b.is_ascii_whitespace(), |b| b == b' ');
    let places = 1..window.len();
    let character = |at: &usize| window[*at] & 0xc0 != 0x80;
    (places.clone().find(lines))
        .or_else(|| places.clone().find(words))
        .or_else(|| (0..window.len()).find(character))
        .unwrap_or(window.len())
}

/// Cuts text into stretches to tokenise one by one.
pub(crate) fn stretches(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let nominal = PIECE_BYTES as usize;
        let cut = if rest.len() <= nominal + LOOK_AHEAD {
            rest.len()
        } else {
            nominal + first_cut(&rest.as_bytes()[nominal..])
        };
        // A cut before a line, a space or a leading byte is between characters.
        let (now, after) = rest.split_at(cut);
        rest = after;
        Some(now)
    })
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
    fn stretches_are_the_text_and_bounded() {
        for text in ["line\n".repeat(100_000), "\u{20ac}".repeat(100_000), "a b".repeat(100_000), String::new()] {
            assert_eq!(stretches(&text).collect::<String>(), text);
            assert!(stretches(&text).all(|part| !part.is_empty() && part.len() < 2 * PIECE_BYTES as usize));
        }
    }
}
