//! Colour, where somebody looks: on a terminal, and unless NO_COLOR says otherwise.

use crate::terminal::escaped_lines;
use std::io::IsTerminal;
use std::sync::OnceLock;

/// Whether a stream shows colours.
fn shows(terminal: bool) -> bool {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    terminal && !set("NO_COLOR") && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

fn on_stdout() -> bool {
    static SHOWS: OnceLock<bool> = OnceLock::new();
    // Open MPI gives its ranks a terminal of their own, also where what mpirun passes on goes to a file.
    let forwarded = || std::env::var_os("OMPI_COMM_WORLD_RANK").is_some();
    *SHOWS.get_or_init(|| shows(std::io::stdout().is_terminal() && !forwarded()))
}

fn on_stderr() -> bool {
    static SHOWS: OnceLock<bool> = OnceLock::new();
    *SHOWS.get_or_init(|| shows(std::io::stderr().is_terminal()))
}

fn painted(shown: bool, code: &str, text: &str) -> String {
    if shown { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
}

/// The head of a table or of a section, on stdout.
pub fn heading(text: &str) -> String {
    painted(on_stdout(), "1", text)
}

/// A name to look up, on stdout.
pub fn name(text: &str) -> String {
    painted(on_stdout(), "36", text)
}

/// A verdict, on stdout.
pub fn verdict(good: bool, text: &str) -> String {
    painted(on_stdout(), if good { "32" } else { "1;31" }, text)
}

/// A message for stderr, with its `error:`, `warning:` and `hint:` marked. What it quotes may come from a file: control characters are
/// shown, not sent.
pub fn message(text: &str) -> String {
    let text = &escaped_lines(text);
    let marked = |line: &str| {
        let marks = [("error:", "1;31"), ("warning:", "1;33"), ("hint:", "1;36")];
        let found = marks.into_iter().find(|(mark, _)| line.starts_with(mark));
        found.map_or(line.to_owned(), |(mark, code)| painted(true, code, mark) + &line[mark.len()..])
    };
    if !on_stderr() {
        return text.to_string();
    }
    text.split('\n').map(marked).collect::<Vec<_>>().join("\n")
}

/// Characters that a text takes on the screen.
pub fn width(text: &str) -> usize {
    let mut escape = false;
    let shown = |c: char| {
        let inside = escape || c == '\u{1b}';
        escape = inside && c != 'm';
        !inside
    };
    text.chars().map(shown).filter(|shown| *shown).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colour_takes_no_room() {
        assert_eq!(width(&painted(true, "1;31", "error")), 5);
        assert_eq!(painted(false, "1", "x"), "x");
    }
}
