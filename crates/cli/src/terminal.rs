//! Text that comes from a model or from a file, on a terminal.

use std::borrow::Cow;
use std::io::IsTerminal;

/// The text as it is, or on a terminal without the control characters that could move its cursor or change its settings.
pub fn printable(text: &str) -> Cow<'_, str> {
    if std::io::stdout().is_terminal() || std::io::stderr().is_terminal() { tame(text) } else { Cow::Borrowed(text) }
}

/// The text with control characters as escapes (`\u{1b}`): for names that come from files, which are to be told apart and must not
/// move a cursor. Line breaks and tabs too: a name is one word in a table.
pub fn escaped(text: &str) -> Cow<'_, str> {
    escaped_but(text, "")
}

/// As [`escaped`], for messages of several lines.
pub fn escaped_lines(text: &str) -> Cow<'_, str> {
    escaped_but(text, "\n\t")
}

fn escaped_but<'a>(text: &'a str, kept: &str) -> Cow<'a, str> {
    let wild = |c: char| c.is_control() && !kept.contains(c);
    if !text.contains(wild) {
        return Cow::Borrowed(text);
    }
    let one = |c: char| if wild(c) { c.escape_default().to_string() } else { c.to_string() };
    Cow::Owned(text.chars().map(one).collect())
}

fn tame(text: &str) -> Cow<'_, str> {
    let wild = |c: char| c.is_control() && c != '\n' && c != '\t';
    if text.contains(wild) { Cow::Owned(text.replace(wild, "\u{fffd}")) } else { Cow::Borrowed(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_sequences_lose_their_escape() {
        assert_eq!(tame("a\tb\n"), "a\tb\n");
        assert_eq!(tame("\u{1b}[2Jx\r"), "\u{fffd}[2Jx\u{fffd}");
        assert_eq!(escaped("a\u{1b}[2J\n\u{9b}é"), "a\\u{1b}[2J\\n\\u{9b}é");
        assert_eq!(escaped_lines("error: \u{7}\nhint: x"), "error: \\u{7}\nhint: x");
    }
}
