//! What may still be among the fastest, by the least that it takes.

use super::LayoutChoice;
use std::cmp::Ordering;

/// By how much a formula, or an estimate, may be above the simulated time.
const FORMULA_MARGIN: f64 = 0.005;
const ESTIMATE_MARGIN: f64 = 0.005;

/// What is known of some choices.
#[derive(Clone, Copy, Debug)]
pub(super) enum Node {
    /// All of a key, by its index.
    Key(usize),
    /// All of a key with one pipeline, by its index among those of the key's split.
    Pipe { key: usize, pipe: usize },
    /// A choice of a list of bounded ones, and those that come after it.
    Bounded { list: usize, at: usize },
    /// One choice.
    Estimated(LayoutChoice),
}

pub(super) struct Entry {
    pub seconds: f64,
    /// In the order of their making.
    pub number: u64,
    pub node: Node,
}

impl Entry {
    /// The least that its best choice takes.
    pub fn least(&self) -> f64 {
        match self.node {
            Node::Key(_) | Node::Pipe { .. } | Node::Bounded { .. } => self.seconds * (1.0 - FORMULA_MARGIN),
            Node::Estimated(_) => self.seconds * (1.0 - ESTIMATE_MARGIN),
        }
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The fastest is the greatest.
impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        other.least().total_cmp(&self.least()).then(other.number.cmp(&self.number))
    }
}
