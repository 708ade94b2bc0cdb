//! Copies between the memory of a device and that of its host.

use super::at::{At, Definition, Definitions};
use crate::by_kind;

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        Fetch => vec![at.x[0].to_vec()],
        Offload => vec![at.x[0].to_vec()],
    }
}
