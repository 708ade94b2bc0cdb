//! Expert parallelism: rows of tokens in blocks, one for every part of the experts, and back.

use super::experts;
use super::launch::{Launches, launches};
use super::router::check_experts;
use crate::CudaError;
use crate::call::{Call, THREADS};
use crate::kernels::args;
use lockstep_ir::op::Blocks;

/// The launches of this family.
pub fn launches() -> Launches {
    launches! { call:
        ExpertSlots { blocks, .. } => slots(call, blocks),
        SendRows { each, .. } => send_rows(call, call.bound.sharers(each)),
        TakeRows { .. } => take_rows(call),
        RowsLinear { .. } => experts::linear(call, 1),
        RowsGradInput { .. } => experts::grad_input(call),
        RowsGradWeight { .. } => experts::grad_weight(call, 1),
    }
}

/// Rows of a block of threads.
const WARPS: usize = THREADS / 32;

/// Places of choices, in the order of tokens, and the experts of places.
pub unsafe fn slots(call: Call, Blocks { parts, rows, .. }: Blocks) -> Result<(), CudaError> {
    let (choices, each) = (call.rows() * call.size("choices"), check_experts(call)? / parts);
    let (beyond, of_sequence) = (call.output(2), call.size("seq") * call.size("choices"));
    let args = args![call.input(0), call.output(0), call.output(1), beyond, choices, each, rows, of_sequence];
    // SAFETY: the operands have these sizes.
    unsafe {
        if let Some(beyond) = beyond {
            call.stream.fill(beyond, 0, 8 * call.size("batch"))?;
        }
        call.plain(("experts", "expert_slots"), [parts, 1, 1], 1024, args)
    }
}

/// Rows of x, of which `sharers` choices have one, at the places of choices; zeros elsewhere.
pub unsafe fn send_rows(call: Call, sharers: usize) -> Result<(), CudaError> {
    let (Some(rows), Some(at)) = (call.output(0), call.bound.outputs[0]) else { return Ok(()) };
    let (choices, d) = (call.rows() * call.size("choices"), call.size("features"));
    let args = args![call.input(0), call.input(1), rows, choices, call.size("parts") * call.size("rows"), d, sharers];
    // SAFETY: the operands have these sizes.
    unsafe {
        call.stream.fill(rows, 0, at.elements * at.dtype.bytes())?;
        call.typed(("experts", "send_rows"), [choices.div_ceil(WARPS), 1, 1], THREADS, args)
    }
}

/// The row at every choice's place.
pub unsafe fn take_rows(call: Call) -> Result<(), CudaError> {
    let Some(y) = call.output(0) else { return Ok(()) };
    let (choices, d) = (call.rows() * call.size("choices"), call.size("features"));
    let args = args![call.input(0), call.input(1), y, choices, call.size("parts") * call.size("rows"), d];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("experts", "take_rows"), [choices.div_ceil(WARPS), 1, 1], THREADS, args) }
}
