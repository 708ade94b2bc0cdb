//! Attention sinks.

use super::launch::{Launches, launches};
use crate::CudaError;
use crate::call::{Call, THREADS};
use crate::kernels::args;

/// The launches of this family.
pub fn launches() -> Launches {
    launches! { call:
        AttentionSink { each } => with_sinks(call, each),
        AttentionSinkGrad { each } => grad(call, each),
        ExpandSinks => expand(call),
    }
}

/// Heads of a block, a warp each.
const WARPS: usize = 8;

/// Positions, heads and elements of one, and the grid of a warp for each.
fn sizes(call: Call) -> ([usize; 3], [usize; 3]) {
    let [batch, seq, heads] = ["batch", "seq", "heads"].map(|name| call.size(name));
    ([seq, heads, call.size("attended") / heads], [seq.div_ceil(WARPS), heads, batch])
}

unsafe fn with_sinks(call: Call, each: bool) -> Result<(), CudaError> {
    let ([seq, heads, v], grid) = sizes(call);
    let (o, lse, sinks) = (call.input(0), call.input(1), call.input(2));
    let args = args![o, lse, sinks, call.output(0), call.output(1), seq, heads, v, each];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("sink", "attention_sink"), grid, 32 * WARPS, args) }
}

unsafe fn grad(call: Call, each: bool) -> Result<(), CudaError> {
    let Some(to) = call.output(0) else { return Ok(()) };
    let ([seq, heads, v], grid) = sizes(call);
    let [dout, o, lse, sinks] = [0, 1, 2, 3].map(|i| call.input(i));
    // SAFETY: the operands have these sizes.
    unsafe {
        let args = args![dout, o, lse, sinks, to, seq, heads, v, each];
        call.typed(("sink", "attention_sink_grad"), grid, 32 * WARPS, args)
    }
}

unsafe fn expand(call: Call) -> Result<(), CudaError> {
    let (Some(to), Some(at)) = (call.output(0), call.bound.outputs[0]) else { return Ok(()) };
    let args = args![call.input(1), to, call.size("heads"), at.elements];
    // SAFETY: the operands have these sizes.
    unsafe { call.plain(("sink", "expand_sinks"), [at.elements.div_ceil(THREADS), 1, 1], THREADS, args) }
}
