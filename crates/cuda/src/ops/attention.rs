//! Attention over whole sequences: fused, with the weights as a matrix, and over a cache.

use super::launch::{Launches, launches};
use super::naive;
use crate::CudaError;
use crate::attention;
use crate::call::{Call, THREADS};
use crate::kernels::args;

/// The launches of this family.
pub fn launches() -> Launches {
    launches! { call:
        Attention { window } => attention::forward(call, window),
        AttentionGrad { window } => attention::grad(call, window),
        AttentionScores { window } => naive::scores(call, window),
        AttentionScoresGrad { .. } => naive::scores_grad(call),
        AttentionMix { .. } => naive::mix(call),
        AttentionMixGrad { .. } => naive::mix_grad(call),
        CachedAttention { latent, window, apart } => match latent {
            true => attention::latent::cached(call, window, apart),
            false => attention::cached(call, window, apart),
        },
        LastPosition => last_position(call),
        Argmax { known } => argmax(call, known),
    }
}

unsafe fn argmax(call: Call, known: usize) -> Result<(), CudaError> {
    let Some(token) = call.output(0) else { return Ok(()) };
    let args = args![call.input(0), token, call.size("vocab"), known];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("paged", "argmax"), [call.rows(), 1, 1], 1024, args) }
}

unsafe fn last_position(call: Call) -> Result<(), CudaError> {
    let Some(y) = call.output(0) else { return Ok(()) };
    let args = args![call.input(0), call.input(1), y, call.size("seq"), call.size("features")];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("pointwise", "last_position"), [call.size("batch"), 1, 1], THREADS, args) }
}
