//! What a user sees when a config is refused.

use std::fmt;
use std::ops::Range;

/// Why a config was refused. Prints as the problem and the place; a user sees the hint below:
///
/// ```text
/// train.stesp is not a key of [train]
///   --> run.toml:3
///   |
/// 3 | stesp = 300
///   | ^^^^^
/// hint: did you mean `steps`?
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, lockstep_ir::Hint)]
#[error("{0}")]
#[hint("{}", _0.hint)]
pub struct ConfigError(Box<Report>);

impl ConfigError {
    pub(crate) fn new(problem: Problem, location: Location) -> Self {
        let Problem { text, hint, .. } = problem;
        Self(Box::new(Report { text, hint, location }))
    }

    /// The first line: what is wrong, with the key and its value.
    pub fn problem(&self) -> &str {
        &self.0.text
    }
}

/// A refusal that does not know yet where it happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    pub text: String,
    pub hint: String,
    /// The bytes at fault, where they are narrower than the value being read.
    pub span: Option<Range<usize>>,
}

impl Problem {
    pub(crate) fn new(text: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { text: text.into(), hint: hint.into(), span: None }
    }

    /// Narrows the problem to `span`, unless a part further in has already done so.
    pub(crate) fn within(mut self, span: Range<usize>) -> Self {
        self.span.get_or_insert(span);
        self
    }
}

/// Where a problem is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    /// The file as a whole.
    File { name: String },
    /// A span of one line; `caret` counts characters of `text`.
    Line { name: String, number: usize, text: String, caret: Range<usize> },
    /// A value from the command line, with its option.
    Option(String),
}

impl Location {
    /// The same place, without the value that stands there.
    pub(crate) fn without_value(self) -> Self {
        match self {
            Location::Line { name, number, .. } => Location::File { name: format!("{name}:{number}") },
            Location::Option(text) => Location::Option(text.split('=').next().unwrap_or_default().to_owned()),
            Location::File { name } => Location::File { name },
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Report {
    text: String,
    hint: String,
    location: Location,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.text)?;
        match &self.location {
            Location::File { name: text } | Location::Option(text) => write!(f, "  --> {text}"),
            Location::Line { name, number, text, caret } => {
                let number = number.to_string();
                let gutter = " ".repeat(number.len());
                let indent = " ".repeat(caret.start);
                let carets = "^".repeat(caret.len().max(1));
                writeln!(f, "{gutter} --> {name}:{number}")?;
                writeln!(f, "{gutter} |")?;
                writeln!(f, "{number} | {text}")?;
                write!(f, "{gutter} | {indent}{carets}")
            }
        }
    }
}
