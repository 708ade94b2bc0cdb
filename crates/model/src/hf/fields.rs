//! Reading fields of a JSON object, and the errors of those that are wrong.

use super::HfError;
use serde_json::{Map, Value};

/// The width of a head.
pub(super) const HEAD_DIM: &str = "head_dim";

/// The largest extent that a config accepts.
const MOST: u64 = 1 << 24;

/// The fields of a JSON object; null is as good as not there.
pub(super) struct Fields<'a>(pub(super) &'a Map<String, Value>);

impl<'a> Fields<'a> {
    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>, HfError> {
        self.typed(name, "a string", Value::as_str)
    }

    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>, HfError> {
        self.typed(name, "true or false", Value::as_bool)
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<f64>, HfError> {
        self.typed(name, "a number greater than 0", |value| value.as_f64().filter(|x| x.is_finite() && *x > 0.0))
    }

    pub(super) fn number_or_zero(&self, name: &str) -> Result<Option<f64>, HfError> {
        self.typed(name, "a number, at least 0", |value| value.as_f64().filter(|x| x.is_finite() && *x >= 0.0))
    }

    pub(super) fn count(&self, name: &str) -> Result<Option<usize>, HfError> {
        self.count_from(1, name)
    }

    pub(super) fn count_from(&self, least: u64, name: &str) -> Result<Option<usize>, HfError> {
        let accepted = format!("an integer from {least} to {MOST}");
        let count = |value: &Value| value.as_u64().filter(|n| (least..=MOST).contains(n)).map(|n| n as usize);
        self.typed(name, &accepted, count)
    }

    fn typed<T>(&self, name: &str, kind: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>, HfError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let wrong =
            || refused(&format!("`{name}` is {}, which is wrong", shown(value)), &format!("it should be {kind}"));
        read(value).map(Some).ok_or_else(wrong)
    }

    pub(super) fn unsupported(&self, name: &str, hint: &str) -> HfError {
        let value = self.get(name).map_or(String::new(), |value| format!(" = {}", shown(value)));
        refused(&format!("`{name}`{value} is not supported"), hint)
    }
}

/// An error with its hint.
pub(super) fn refused(problem: &str, hint: &str) -> HfError {
    HfError { problem: problem.to_owned(), hint: hint.to_owned() }
}

/// A value on one line, shortened.
fn shown(value: &Value) -> String {
    const SHOWN: usize = 60;
    let text = value.to_string();
    let short: String = text.chars().take(SHOWN).collect();
    if short.len() < text.len() { short + "…" } else { short }
}

/// The error of two fields that say the same and differ.
pub(super) fn contradiction(first: (&str, &Value), second: (&str, &Value)) -> HfError {
    let text = |(name, value): (&str, &Value)| format!("`{name}` = {}", shown(value));
    let problem = format!("{} contradicts {}: both say the same", text(first), text(second));
    refused(&problem, "keep the one in config.json that the model was made with")
}

/// Whether two values are the same, whatever form a number is written in.
pub(super) fn is_same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}
