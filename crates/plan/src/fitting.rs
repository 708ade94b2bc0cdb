//! Changes under which a plan fits its memory.

use serde::Serialize;

/// What to do about a plan that does not fit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WaysToFit {
    /// What the slowdowns rest on.
    pub basis: String,
    /// Bytes that the plan needs, of those that `room` counts.
    pub needed_bytes: u64,
    /// The cheapest changes under which it fits, by slowdown; at most three.
    pub changes: Vec<FittingChange>,
    /// Where there is none: what comes nearest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nearest: Option<NearestMiss>,
}

/// A change of the config under which a plan fits.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FittingChange {
    /// The keys to set.
    pub keys: Vec<String>,
    /// Bytes that it needs less.
    pub saved_bytes: u64,
    /// Bytes of the largest arena then.
    pub arena_bytes: u64,
    /// How much longer a step takes than it would with memory enough: 0.05 is 5%.
    pub slowdown: f64,
    /// Seconds of a step, where they can be predicted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_s: Option<f64>,
    /// Whether it computes other numbers, as another precision does.
    pub other_numbers: bool,
}

/// The least memory that changes can reach, where that is still too much.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NearestMiss {
    /// The keys to set.
    pub keys: Vec<String>,
    /// Bytes that it needs then.
    pub needed_bytes: u64,
    /// Bytes that are missing.
    pub missing_bytes: u64,
    /// More ranks on which it fits, where each has memory of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranks: Option<MoreRanks>,
}

/// As many ranks as a plan needs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MoreRanks {
    /// How many.
    pub ranks: usize,
    /// The keys to set.
    pub keys: Vec<String>,
}
