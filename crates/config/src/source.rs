//! The text of a config file and places in it.

use std::ops::Range;

use crate::error::{ConfigError, Location, Problem};

/// The longest config read. A real one has a few hundred lines.
pub(crate) const MAX_BYTES: usize = 1 << 20;

/// How many characters of a source line an error shows.
const SHOWN_WIDTH: usize = 100;
/// How many characters of a key or value a message repeats.
const QUOTED_WIDTH: usize = 60;

/// A config file that has been read.
pub(crate) struct Source<'a> {
    pub name: String,
    pub text: &'a str,
}

impl<'a> Source<'a> {
    /// Takes `text` as the file `name`, refusing one past [`MAX_BYTES`].
    pub(crate) fn new(name: &str, text: &'a str) -> Result<Self, ConfigError> {
        let source = Self { name: printable(name), text };
        if text.len() > MAX_BYTES {
            return Err(too_large(&source.name));
        }
        Ok(source)
    }

    /// The 1-based line of a byte offset.
    pub(crate) fn line_number(&self, offset: usize) -> usize {
        let before = &self.text.as_bytes()[..offset.min(self.text.len())];
        1 + before.iter().filter(|&&b| b == b'\n').count()
    }

    /// The place of a byte span, ready to be shown.
    pub(crate) fn locate(&self, span: &Range<usize>) -> Location {
        let start = floor_boundary(self.text, span.start);
        let line_start = self.text[..start].rfind('\n').map_or(0, |i| i + 1);
        let line_end = self.text[start..].find('\n').map_or(self.text.len(), |i| start + i);
        let end = floor_boundary(self.text, span.end).clamp(start, line_end);

        let before = self.text[line_start..start].chars().count();
        let width = self.text[start..end].chars().count();
        let skipped = if before + width > SHOWN_WIDTH { before.saturating_sub(SHOWN_WIDTH / 4) } else { 0 };
        let line = self.text[line_start..line_end].trim_end();
        let text: String = line.chars().skip(skipped).take(SHOWN_WIDTH).collect();
        let caret_start = before - skipped;
        let caret_end = (caret_start + width).min(SHOWN_WIDTH);
        Location::Line {
            name: self.name.clone(),
            number: self.line_number(start),
            text: printable(&text),
            caret: caret_start..caret_end,
        }
    }

    /// The file as a whole.
    pub(crate) fn whole(&self) -> Location {
        Location::File { name: self.name.clone() }
    }
}

/// The error for a file longer than [`MAX_BYTES`].
pub(crate) fn too_large(name: &str) -> ConfigError {
    let problem =
        Problem::new("the config file is larger than 1 MiB", "check that this is the config and not a data file");
    ConfigError::new(problem, Location::File { name: printable(name) })
}

/// `text` on one line, shortened, with nothing a terminal would act on.
pub(crate) fn quoted(text: &str) -> String {
    let text = text.trim();
    let short: String = text.chars().take(QUOTED_WIDTH).collect();
    let more = if short.len() < text.len() { "…" } else { "" };
    printable(&short) + more
}

/// `text` with every control character replaced, one for one.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .map(|c| {
            if c == '\t' {
                ' '
            } else if c.is_control() {
                '\u{fffd}'
            } else {
                c
            }
        })
        .collect()
}

fn floor_boundary(text: &str, offset: usize) -> usize {
    (0..=offset.min(text.len())).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caret(text: &str, span: Range<usize>) -> (usize, String, Range<usize>) {
        let source = Source::new("f", text).expect("small");
        match source.locate(&span) {
            Location::Line { number, text, caret, .. } => (number, text, caret),
            other => panic!("not a line: {other:?}"),
        }
    }

    #[test]
    fn a_span_becomes_a_line_and_a_caret() {
        assert_eq!(caret("a\nbcd = 1\n", 2..5), (2, "bcd = 1".into(), 0..3));
        assert_eq!(caret("é = 1", 5..6), (1, "é = 1".into(), 4..5));
        assert_eq!(caret("x =", 3..3), (1, "x =".into(), 3..3));
        assert_eq!(caret("", 7..9), (1, "".into(), 0..0));
    }

    #[test]
    fn a_span_over_several_lines_ends_with_its_first() {
        assert_eq!(caret("x = [1,\n2]\n", 4..10), (1, "x = [1,".into(), 4..7));
    }

    #[test]
    fn a_long_line_is_cut_around_the_span() {
        let text = format!("{}HERE{}", "a".repeat(5000), "b".repeat(5000));
        let (_, shown, caret) = caret(&text, 5000..5004);
        assert_eq!(shown.len(), SHOWN_WIDTH);
        assert_eq!(&shown[caret], "HERE");
    }

    #[test]
    fn control_characters_are_not_repeated() {
        assert_eq!(quoted("a\u{1b}[31m\tb"), "a\u{fffd}[31m b");
        assert_eq!(quoted(&"x".repeat(100)), "x".repeat(60) + "…");
    }
}
