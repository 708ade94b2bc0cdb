//! Attention of context-parallel ranks.

use super::attention::{merge, over_parts, over_parts_grad};
use super::call::{Call, Kernel, Kernels};
use super::float::Float;
use crate::by_kind;

/// The kernels of this family.
pub fn kernels<T: Float>() -> Kernels {
    by_kind! { call: Call => Kernel;
        PartAttention { window, ring } => over_parts::<T>(call, window, ring),
        PartAttentionGrad { window, ring } => over_parts_grad::<T>(call, window, ring),
        AttentionMerge => merge(call),
    }
}
