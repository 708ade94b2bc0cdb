//! From TOML text to the values it gives, in file order.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::declare::Key;
use crate::error::{ConfigError, Problem};
use crate::kind::Reading;
use crate::lookup::{self, Named};
use crate::source::{Source, quoted};
use crate::value::Value;

/// What a file says.
pub(crate) struct Document {
    /// The values, in file order.
    pub given: Vec<Given>,
    /// Each table in the file, with the place of its name.
    pub tables: Vec<(String, Range<usize>)>,
}

/// A value that a file gives, with its place.
pub(crate) struct Given {
    pub key: &'static Key,
    pub value: Value,
    pub span: Range<usize>,
    /// The old name that it is given by, if it is.
    pub old_name: Option<&'static str>,
}

/// Reads every value of `source`. The first problem in file order is the error.
pub(crate) fn read(source: &Source<'_>) -> Result<Document, ConfigError> {
    let root = DeTable::parse(source.text).map_err(|error| syntax_error(source, &error))?;

    let mut document = Document { given: Vec::new(), tables: Vec::new() };
    let mut problems = Vec::new();
    for (table, value) in root.get_ref() {
        document.tables.push((table.get_ref().to_string(), table.span()));
        let entries = match (lookup::table(table.get_ref()), value.get_ref()) {
            (Ok(()), DeValue::Table(entries)) => entries,
            (Ok(()), _) => {
                let name = table.get_ref();
                let problem = format!("{name} is a table, and a value is given for it");
                problems.push(Problem::new(problem, format!("write [{name}] and its keys below")).within(table.span()));
                continue;
            }
            (Err(problem), _) => {
                problems.push(problem.within(table.span()));
                continue;
            }
        };
        for (name, value) in entries {
            match read_key(source, table.get_ref(), name, value) {
                Ok(given) => document.given.push(given),
                Err(problem) => problems.push(problem),
            }
        }
    }
    problems.extend(document.given.iter().filter_map(|given| given_by_two_names(given, &document.given)));
    let start = |problem: &Problem| problem.span.as_ref().map_or(0, |span| span.start);
    if let Some(first) = problems.into_iter().min_by_key(start) {
        let location = source.locate(&first.span.clone().unwrap_or_default());
        return Err(ConfigError::new(first, location));
    }
    document.given.sort_by_key(|given| given.span.start);
    Ok(document)
}

fn read_key(
    source: &Source<'_>,
    table: &str,
    name: &Spanned<std::borrow::Cow<'_, str>>,
    value: &Spanned<DeValue<'_>>,
) -> Result<Given, Problem> {
    let Named { key, old_name } = lookup::key(table, name.get_ref()).map_err(|problem| problem.within(name.span()))?;
    let reading = Reading { path: key.path, text: source.text };
    let read = key.kind.read(reading, value)?;
    Ok(Given { key, value: read, span: value.span(), old_name })
}

/// Refuses a value under an old name beside one under another name of the same key.
fn given_by_two_names(given: &Given, all: &[Given]) -> Option<Problem> {
    let old = given.old_name?;
    all.iter().find(|other| other.key.path == given.key.path && other.old_name != given.old_name)?;
    let (table, path) = (given.key.table, given.key.path);
    let problem = format!("{table}.{old} is the old name of {path}, and both are given");
    Some(Problem::new(problem, format!("remove {table}.{old}")).within(given.span.clone()))
}

fn syntax_error(source: &Source<'_>, error: &toml::de::Error) -> ConfigError {
    let message = error.message();
    let short = message.split(", expected ").next().unwrap_or(message);
    let hint = match short {
        "duplicate key" => "each key and each table is given once: remove one of the two, or join them",
        short if short.contains("recurs") => "no value of the config is nested this deeply",
        _ => "write `key = value`; strings are in quotes, numbers and true or false are not (https://toml.io)",
    };
    let span = error.span().unwrap_or(0..0);
    let problem = match source.text.get(span.clone()) {
        Some(key) if short == "duplicate key" => format!("the key {} is given twice", quoted(key)),
        _ => format!("not valid TOML: {short}"),
    };
    ConfigError::new(Problem::new(problem, hint), source.locate(&span))
}
