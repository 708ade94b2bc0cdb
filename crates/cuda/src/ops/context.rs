//! Attention of context-parallel ranks.

use super::launch::{Launches, launches};
use crate::attention::context;
use crate::call::Call;

/// The launches of this family.
pub fn launches() -> Launches {
    launches! { call:
        PartAttention { ring, .. } => context::forward(call, ring.is_some()),
        PartAttentionGrad { ring, .. } => context::grad(call, ring.is_some()),
        AttentionMerge => context::merge_two(call),
    }
}
