//! `--set table.key=value` and `--change table.key=value`: one key from the command line.

use toml::Spanned;
use toml::de::DeValue;

use crate::error::{ConfigError, Location, Problem};
use crate::kind::Reading;
use crate::lookup::{self, Named};
use crate::source::quoted;
use crate::value::Value;

/// The option of a value that is laid over the file.
pub(crate) const SET: &str = "--set";
/// The option of a value that a run takes on when it is resumed.
pub(crate) const CHANGE: &str = "--change";

/// Reads what an option gives. The value is TOML; a word that is not TOML is taken as a string.
pub(crate) fn read(option: &str, text: &str) -> Result<(Named, Value), ConfigError> {
    read_parts(option, text).map_err(|problem| ConfigError::new(problem, location(option, text)))
}

/// The place of an option, to show in an error.
pub(crate) fn location(option: &str, text: &str) -> Location {
    Location::Option(format!("{option} {}", quoted(text)))
}

fn read_parts(option: &str, text: &str) -> Result<(Named, Value), Problem> {
    let form = || format!("write {option} table.key=value, such as {option} train.steps=100");
    let (path, value) =
        text.split_once('=').ok_or_else(|| Problem::new(format!("{} sets no value", quoted(text)), form()))?;
    let (path, value) = (path.trim(), value.trim());
    let (table, name) = path.split_once('.').ok_or_else(|| match lookup::table(path) {
        Ok(()) => Problem::new(format!("{path} is a table, not a key"), form()),
        Err(problem) => Problem::new(format!("{} is not a key", quoted(path)), problem.hint),
    })?;
    lookup::table(table)?;
    let named = lookup::key(table, name)?;
    if value.is_empty() {
        return Err(Problem::new(format!("{path} is set to nothing"), form()));
    }
    let parsed = match DeValue::parse(value) {
        Ok(parsed) => parsed,
        Err(_) if !value.starts_with(['[', '{', '"', '\'']) => {
            Spanned::new(0..value.len(), DeValue::String(value.into()))
        }
        Err(error) => {
            let problem = format!("{path} = {} is not valid TOML: {}", quoted(value), error.message());
            return Err(Problem::new(problem, "close every quote and bracket; quote the whole argument for the shell"));
        }
    };
    let value = named.key.kind.read(Reading { path: named.key.path, text: value }, &parsed)?;
    Ok((named, value))
}
