//! The values of a config while it is resolved.

use std::collections::BTreeMap;

use crate::value::{Field, Value};

/// The values of the keys, by path.
pub(crate) struct Values(BTreeMap<&'static str, Option<Value>>);

impl Values {
    /// No value for any of these keys.
    pub(crate) fn none(paths: impl Iterator<Item = &'static str>) -> Self {
        Self(paths.map(|path| (path, None)).collect())
    }

    pub(crate) fn set(&mut self, path: &'static str, value: Value) {
        self.0.insert(path, Some(value));
    }

    /// Takes a key's value away.
    pub(crate) fn clear(&mut self, path: &'static str) {
        self.0.insert(path, None);
    }

    pub(crate) fn get(&self, path: &str) -> Option<&Value> {
        debug_assert!(self.0.contains_key(path), "{path} is not a key");
        self.0.get(path)?.as_ref()
    }

    /// The value of a count, once it has one.
    pub(crate) fn count(&self, path: &str) -> Option<u64> {
        match self.get(path) {
            Some(Value::Count(n)) => Some(*n),
            _ => None,
        }
    }

    /// The value of a switch, once it has one.
    pub(crate) fn switch(&self, path: &str) -> Option<bool> {
        match self.get(path) {
            Some(Value::Bool(b)) => Some(*b),
            _ => None,
        }
    }

    /// The value of a key whose words are an enum, once it has one.
    pub(crate) fn word<T: Field>(&self, path: &str) -> Option<T> {
        T::from_value(self.get(path).cloned())
    }

    /// The value as its typed field.
    pub(crate) fn take<T: Field>(&self, path: &str) -> T {
        T::from_value(self.get(path).cloned()).unwrap_or_else(|| panic!("{path}: its kind and its type disagree"))
    }
}
