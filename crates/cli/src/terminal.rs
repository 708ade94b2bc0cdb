//! Text that a model made, on a terminal.

use std::borrow::Cow;
use std::io::IsTerminal;

/// The text as it is, or on a terminal without the control characters that could move its cursor or change its settings.
pub fn printable(text: &str) -> Cow<'_, str> {
    if std::io::stdout().is_terminal() || std::io::stderr().is_terminal() { tame(text) } else { Cow::Borrowed(text) }
}

fn tame(text: &str) -> Cow<'_, str> {
    let wild = |c: char| c.is_control() && c != '\n' && c != '\t';
    match text.contains(wild) {
        true => Cow::Owned(text.replace(wild, "\u{fffd}")),
        false => Cow::Borrowed(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_sequences_lose_their_escape() {
        assert_eq!(tame("a\tb\n"), "a\tb\n");
        assert_eq!(tame("\u{1b}[2Jx\r"), "\u{fffd}[2Jx\u{fffd}");
    }
}
