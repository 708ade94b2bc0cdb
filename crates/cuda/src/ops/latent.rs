//! Heads of latent attention.

use super::launch::{Launches, launches};
use crate::CudaError;
use crate::call::{Call, THREADS};
use crate::kernels::args;

/// The launches of this family.
pub fn launches() -> Launches {
    launches! { call:
        LatentHeads { scale } => heads(call, scale),
        LatentHeadsGrad { scale, .. } => grad(call, scale),
    }
}

/// Heads, elements of one in Q and K, of these with RoPE, and of one in V.
fn sizes(call: Call) -> [usize; 4] {
    ["heads", "head_dim", "shared", "value_dim"].map(|name| call.size(name))
}

unsafe fn heads(call: Call, scale: f32) -> Result<(), CudaError> {
    let Some(qkv) = call.output(0) else { return Ok(()) };
    let [count, head, rope, value] = sizes(call);
    let args = args![call.input(0), call.input(1), call.input(2), qkv, count, head, rope, value, scale];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("latent", "latent_heads"), [call.rows(), 1, 1], THREADS, args) }
}

unsafe fn grad(call: Call, scale: f32) -> Result<(), CudaError> {
    let [count, head, rope, value] = sizes(call);
    let [dq, dkv, dshared] = [0, 1, 2].map(|i| call.output(i));
    let args = args![call.input(0), dq, dkv, dshared, count, head, rope, value, scale];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("latent", "latent_heads_grad"), [call.rows(), 1, 1], THREADS, args) }
}
