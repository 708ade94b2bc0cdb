//! Keys that contradict each other.

use crate::error::Problem;
use crate::value::Value;

/// Keys that do not go together.
pub(crate) struct Conflict {
    /// The keys at fault, the most likely first.
    pub keys: Vec<&'static str>,
    pub problem: Problem,
}

impl Conflict {
    pub(crate) fn new(keys: &[&'static str], text: String, hint: impl Into<String>) -> Self {
        Self { keys: keys.to_vec(), problem: Problem::new(text, hint) }
    }

    /// The conflict of a rule, where it is broken.
    pub(crate) fn when(
        broken: bool,
        keys: &[&'static str],
        text: impl Into<String>,
        hint: impl Into<String>,
    ) -> Option<Self> {
        broken.then(|| Self::new(keys, text.into(), hint))
    }
}

/// A default made from other keys: `None` where one of those is in conflict itself.
pub(crate) type Derived = Result<Option<Value>, Conflict>;
