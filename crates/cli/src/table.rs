//! Text in columns that fit the terminal.

use crate::style;
use console::Term;
use std::sync::OnceLock;

/// Columns of the screen: those of the terminal, else as many as `COLUMNS` says, else 80.
pub fn columns() -> usize {
    static COLUMNS: OnceLock<usize> = OnceLock::new();
    *COLUMNS.get_or_init(|| {
        // None where stdout is not a terminal.
        let terminal = Term::stdout().size_checked().map(|(_, width)| usize::from(width));
        let asked = || std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
        terminal.or_else(asked).unwrap_or(USUAL).max(LEAST)
    })
}

const USUAL: usize = 80;
/// Narrower terminals wrap.
const LEAST: usize = 40;

/// Lays rows out in columns: the first left, the others right. A column whose title starts with `~` is left out where the
/// table would be too wide.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    fitted(header, rows, columns())
}

/// The ways to fit a table, from the widest: titles on one line, on several, without the columns that may be left out, and
/// closer together; then the first column is cut.
fn fitted(header: &[&str], rows: &[Vec<String>], columns: usize) -> String {
    let all: Vec<usize> = (0..header.len()).collect();
    let most: Vec<usize> = all.iter().copied().filter(|c| !header[*c].starts_with('~')).collect();
    let ways = [(&all, false, 2), (&all, true, 2), (&most, false, 2), (&most, true, 2), (&most, true, 1)];
    let made: Vec<Grid> =
        ways.into_iter().map(|(kept, broken, gap)| Grid::new(header, rows, kept, broken, gap)).collect();
    let fits = |grid: &&Grid| grid.width() <= columns;
    match made.iter().find(fits) {
        Some(grid) => grid.text(),
        None => made.into_iter().next_back().map_or(String::new(), |grid| grid.cut(columns).text()),
    }
}

/// A table whose columns are decided.
struct Grid {
    /// Lines of the titles, then the rows.
    lines: Vec<Vec<String>>,
    titles: usize,
    widths: Vec<usize>,
    gap: usize,
}

impl Grid {
    fn new(header: &[&str], rows: &[Vec<String>], kept: &[usize], broken: bool, gap: usize) -> Self {
        let body: Vec<Vec<String>> =
            rows.iter().map(|row| kept.iter().map(|c| row.get(*c).cloned().unwrap_or_default()).collect()).collect();
        let cells = |i: usize| body.iter().map(|row| style::width(&row[i])).max().unwrap_or(0);
        let titles: Vec<Vec<String>> = kept
            .iter()
            .enumerate()
            .map(|(i, c)| {
                let title = header[*c].trim_start_matches('~');
                let longest = title.split(' ').map(|word| word.chars().count()).max().unwrap_or(0);
                if broken { lines_of(title, cells(i).max(longest)) } else { vec![title.to_owned()] }
            })
            .collect();
        let height = titles.iter().map(Vec::len).max().unwrap_or(0);
        // Titles stand at the bottom of their lines.
        let line = |n: usize| {
            let at =
                |title: &Vec<String>| (n + title.len()).checked_sub(height).map_or(String::new(), |i| title[i].clone());
            titles.iter().map(at).collect::<Vec<_>>()
        };
        let lines: Vec<Vec<String>> = (0..height).map(line).chain(body.iter().cloned()).collect();
        let width = |c: usize| lines.iter().map(|line| style::width(&line[c])).max().unwrap_or(0);
        let widths = (0..kept.len()).map(width).collect();
        Self { lines, titles: height, widths, gap }
    }

    fn width(&self) -> usize {
        2 + self.widths.iter().sum::<usize>() + self.gap * self.widths.len().saturating_sub(1)
    }

    /// The same with a first column that is as narrow as the screen wants, down to a few characters.
    fn cut(mut self, columns: usize) -> Self {
        let excess = self.width().saturating_sub(columns);
        let Some(first) = self.widths.first_mut() else { return self };
        *first = first.saturating_sub(excess).max(8).min(*first);
        let most = *first;
        for line in &mut self.lines {
            if line[0].chars().count() > most {
                line[0] = line[0].chars().take(most - 1).chain(['…']).collect();
            }
        }
        self
    }

    fn text(&self) -> String {
        let line = |(n, cells): (usize, &Vec<String>)| {
            let padded = cells.iter().zip(&self.widths).enumerate().map(|(c, (cell, width))| {
                let blanks = " ".repeat(width.saturating_sub(style::width(cell)));
                if c == 0 { format!("{cell}{blanks}") } else { format!("{blanks}{cell}") }
            });
            let text = padded.collect::<Vec<_>>().join(&" ".repeat(self.gap));
            let text = if n < self.titles { style::heading(text.trim_end()) } else { text.trim_end().to_owned() };
            format!("  {text}\n")
        };
        self.lines.iter().enumerate().map(line).collect()
    }
}

/// Words in lines of at most this many characters; a longer word has a line of its own.
fn lines_of(text: &str, most: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if style::width(line) + 1 + style::width(word) <= most => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// A paragraph that fits the screen, later lines after `indent`.
pub fn wrapped(text: &str, indent: &str) -> String {
    let body = text.trim_start_matches(' ');
    let own = &text[..text.len() - body.len()];
    let lines = lines_of(body, columns() - own.len().max(indent.len()));
    let line = |(i, line): (usize, &String)| format!("{}{line}\n", if i == 0 { own } else { indent });
    lines.iter().enumerate().map(line).collect()
}

/// A paragraph beside a label; later lines stand below the first word.
pub fn beside(label: &str, text: &str) -> String {
    let indent = " ".repeat(style::width(label));
    let lines = wrapped(&format!("{indent}{text}"), &indent);
    format!("{label}{}", &lines[indent.len()..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(cells: &[&str]) -> Vec<String> {
        cells.iter().map(|cell| cell.to_string()).collect()
    }

    #[test]
    fn columns_line_up() {
        let rows = [row(&["a", "12"]), row(&["long", "3"])];
        assert_eq!(table(&["op", "n"], &rows), "  op     n\n  a     12\n  long   3\n");
    }

    #[test]
    fn a_table_breaks_its_titles_then_loses_columns_then_cuts_the_first() {
        let rows = [row(&["linear", "1.00 GiB", "1234"])];
        let header = ["op", "bytes moved", "~exact"];
        assert_eq!(fitted(&header, &rows, 40), "  op      bytes moved  exact\n  linear     1.00 GiB   1234\n");
        assert_eq!(
            fitted(&header, &rows, 26),
            "             bytes\n  op         moved  exact\n  linear  1.00 GiB   1234\n"
        );
        assert_eq!(fitted(&header, &rows, 20), "             bytes\n  op         moved\n  linear  1.00 GiB\n");
        let long = [row(&["a very long name indeed", "1.00 GiB"])];
        assert_eq!(fitted(&["op", "bytes"], &long, 24), "  op               bytes\n  a very long … 1.00 GiB\n");
    }

    #[test]
    fn paragraphs_are_broken_between_words() {
        assert_eq!(lines_of("one two three", 7), ["one two", "three"]);
        assert_eq!(lines_of("incomprehensibilities", 5), ["incomprehensibilities"]);
    }
}
