//! Rows of a table by token, and their gradient.

use super::launch::{Launches, launches};
use crate::CudaError;
use crate::call::{Call, THREADS, sum_kind};
use crate::driver::ALIGNMENT;
use crate::kernels::args;

/// The launches of this family.
pub fn launches() -> Launches {
    launches! { call:
        Embedding => forward(call),
        EmbeddingGrad { .. } => grad(call),
    }
}

pub unsafe fn forward(call: Call) -> Result<(), CudaError> {
    let Some(x) = call.output(0) else { return Ok(()) };
    let (d, part) = (call.size("features"), call.vocab_part());
    let wide = call.wide(d);
    let work = if wide { d / call.pack() } else { d };
    let threads = work.next_multiple_of(32).clamp(32, THREADS);
    let args = args![call.input(0), call.input(1), x, d, part.first, part.entries, wide];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("pointwise", "embedding"), [call.rows(), 1, 1], threads, args) }
}

/// Scratch: of every position its rank among those with its token, the positions ordered by token; of every token its count and
/// where its positions start.
pub unsafe fn grad(call: Call) -> Result<(), CudaError> {
    let (Some(out), Some(at)) = (call.output(0), call.bound.outputs[0]) else { return Ok(()) };
    let (n, d, v, part) = (call.rows(), call.size("features"), call.size("vocab"), call.vocab_part());
    let (tokens, dy) = (call.input(1), call.input(0));
    let step = |elements: usize| (4 * elements as u64).next_multiple_of(ALIGNMENT);
    let ranks = call.scratch()?;
    let order = ranks + step(n);
    let counts = order + step(n);
    let offsets = counts + step(v);
    let (first, entries, kind) = (part.first, part.entries, sum_kind(at.dtype));
    let source = "embedding_grad";
    let per_row = args![dy, order, offsets, counts, out, kind, call.adds(0), d];
    let threads = d.next_multiple_of(32).clamp(32, 512);
    // SAFETY: the operands have these sizes; so does the scratch.
    unsafe {
        call.stream.fill(counts, 0, 4 * v)?;
        let blocks = [n.div_ceil(256), 1, 1];
        call.plain((source, "token_ranks"), blocks, 256, args![tokens, ranks, counts, n, first, entries])?;
        // Padding after the entries has no tokens.
        call.plain((source, "token_offsets"), [1, 1, 1], 1024, args![counts, offsets, v])?;
        call.plain((source, "token_order"), blocks, 256, args![tokens, ranks, offsets, order, n, first, entries])?;
        call.typed((source, "embedding_grad"), [v, 1, 1], threads, per_row)
    }
}
