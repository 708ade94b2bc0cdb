//! `--set table.key=value`: one key from the command line.

use toml::Spanned;
use toml::de::DeValue;

use crate::declare::{Key, Named};
use crate::error::{ConfigError, Location, Problem};
use crate::kind::Reading;
use crate::source::quoted;
use crate::value::Value;

/// Reads one override. The value is TOML; a word that is not TOML is taken as a string.
pub(crate) fn read(text: &str) -> Result<(Named, Value), ConfigError> {
    read_parts(text).map_err(|problem| ConfigError::new(problem, location(text)))
}

/// The place of an override, to show in an error.
pub(crate) fn location(text: &str) -> Location {
    Location::Override(quoted(text))
}

fn read_parts(text: &str) -> Result<(Named, Value), Problem> {
    const FORM: &str = "write --set table.key=value, such as --set train.steps=100";
    let (path, value) =
        text.split_once('=').ok_or_else(|| Problem::new(format!("{} sets no value", quoted(text)), FORM))?;
    let (path, value) = (path.trim(), value.trim());
    let (table, name) = path.split_once('.').ok_or_else(|| match Key::check_table(path) {
        Ok(()) => Problem::new(format!("{path} is a table, not a key"), FORM),
        Err(problem) => Problem::new(format!("{} is not a key", quoted(path)), problem.hint),
    })?;
    Key::check_table(table)?;
    let named = Key::find(table, name)?;
    if value.is_empty() {
        return Err(Problem::new(format!("{path} is set to nothing"), FORM));
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
