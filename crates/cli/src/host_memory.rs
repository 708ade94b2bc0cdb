//! What waits in the memory of the host, in words.

use lockstep_ir::units;

/// What the bytes in the memory of the host are of, as many of them as `activations` of activations.
pub(crate) fn in_host(bytes: u64, activations: u64) -> String {
    match activations {
        0 => "optimizer state".into(),
        all if all == bytes => "activations".into(),
        some => format!("optimizer state and activations ({})", units::bytes(some)),
    }
}
