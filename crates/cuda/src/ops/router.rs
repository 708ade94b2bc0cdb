//! The router of a mixture of experts.

use super::head::LOSS_SCALE;
use crate::CudaError;
use crate::call::Call;
use crate::kernels::args;
use lockstep_ir::op::{Routing, Score};

/// Tokens of a block: as in `router.cu`.
const WARPS: usize = 4;
/// Most experts that kernels have room for: as in `router.cu` and `experts.cu`.
pub const MOST_EXPERTS: usize = 1024;

/// Blocks over tokens and their threads, and the number of experts, having checked it.
fn over_tokens(call: Call) -> Result<([usize; 3], usize, usize), CudaError> {
    let experts = check_experts(call)?;
    Ok(([call.rows().div_ceil(WARPS), 1, 1], 32 * WARPS, experts))
}

/// The number of experts, if kernels have room for as many.
pub fn check_experts(call: Call) -> Result<usize, CudaError> {
    match call.size("experts") {
        experts @ 1..=MOST_EXPERTS => Ok(experts),
        experts => Err(CudaError::Internal(format!("{experts} experts are too many for the device's kernels"))),
    }
}

fn sigmoid(how: &Routing) -> bool {
    match how.score {
        Score::Softmax => false,
        Score::Sigmoid => true,
    }
}

pub unsafe fn route(call: Call, how: &Routing) -> Result<(), CudaError> {
    let (grid, threads, experts) = over_tokens(call)?;
    let &Routing { choices, normalise, scale, groups, top_groups, .. } = how;
    let (weights, chosen, tokens) = (call.output(0), call.output(1), call.rows());
    let operands = (call.input(0), call.given(1), sigmoid(how));
    let (logits, bias, sigmoid) = operands;
    let args =
        args![logits, bias, weights, chosen, tokens, experts, choices, sigmoid, normalise, scale, groups, top_groups];
    // SAFETY: the operands have these sizes.
    unsafe { call.plain(("router", "route"), grid, threads, args) }
}

pub unsafe fn route_to(call: Call, how: &Routing) -> Result<(), CudaError> {
    let (grid, threads, experts) = over_tokens(call)?;
    let (logits, given, tokens) = (call.input(0), call.input(1), call.rows());
    let (weights, chosen) = (call.output(0), call.output(1));
    let &Routing { choices, normalise, scale, .. } = how;
    let args = args![logits, given, weights, chosen, tokens, experts, choices, sigmoid(how), normalise, scale];
    // SAFETY: the operands have these sizes.
    unsafe { call.plain(("router", "route_to"), grid, threads, args) }
}

pub unsafe fn route_grad(call: Call, how: &Routing) -> Result<(), CudaError> {
    let Some(dlogits) = call.output(0) else { return Ok(()) };
    let (grid, threads, experts) = over_tokens(call)?;
    let (dweights, logits, chosen, tokens) = (call.input(0), call.input(1), call.input(2), call.rows());
    let &Routing { choices, normalise, scale, .. } = how;
    let args = args![dweights, logits, chosen, dlogits, tokens, experts, choices, sigmoid(how), normalise, scale];
    // SAFETY: the operands have these sizes.
    unsafe { call.plain(("router", "route_grad"), grid, threads, args) }
}

pub unsafe fn counts(call: Call) -> Result<(), CudaError> {
    let Some(counts) = call.output(0) else { return Ok(()) };
    let rows = call.size("seq") * call.size("choices");
    let args = args![call.input(0), counts, rows, check_experts(call)?];
    // SAFETY: the operands have these sizes.
    unsafe { call.plain(("router", "expert_counts"), [call.size("batch"), 1, 1], 1024, args) }
}

pub unsafe fn load(call: Call) -> Result<(), CudaError> {
    /// Choices of a block.
    const EACH: usize = 8192;
    let Some(load) = call.output(0) else { return Ok(()) };
    let (rows, experts) = (call.bound.inputs[0].elements, check_experts(call)?);
    // SAFETY: the operands have these sizes; a double of zero bits is zero.
    unsafe {
        if !call.adds(0) {
            call.stream.fill(load, 0, 8 * experts)?;
        }
        let args = args![call.input(0), load, rows, EACH, experts];
        call.plain(("router", "expert_load"), [rows.div_ceil(EACH), 1, 1], 1024, args)
    }
}

pub unsafe fn stack_totals(call: Call) -> Result<(), CudaError> {
    let Some(totals) = call.output(0) else { return Ok(()) };
    let bytes = 8 * call.size("entries");
    (0..call.bound.inputs.len()).try_for_each(|row| {
        // SAFETY: there is a row for every input, of as many elements.
        unsafe { call.stream.copy(totals + (row * bytes) as u64, call.input(row), bytes) }
    })
}

pub unsafe fn move_bias(call: Call, row: usize, rate: f32) -> Result<(), CudaError> {
    let Some(next) = call.output(0) else { return Ok(()) };
    let experts = check_experts(call)?;
    let load = call.input(1) + (8 * row * experts) as u64;
    let args = args![call.input(0), load, call.input(2), next, experts, rate];
    // SAFETY: the operands have these sizes; the shape rule has checked the row.
    unsafe { call.plain(("router", "move_bias"), [1, 1, 1], 1024, args) }
}

/// Scratch: a number for every token.
pub unsafe fn router_loss(call: Call, balance: f32, z: f32) -> Result<(), CudaError> {
    let Some(loss) = call.output(0) else { return Ok(()) };
    let (grid, threads, experts) = over_tokens(call)?;
    let (seq, losses) = (call.size("seq"), call.scratch()?);
    let args = args![call.input(0), call.input(1), losses, call.rows(), seq, experts, balance, z];
    // SAFETY: the operands and the scratch have these sizes.
    unsafe {
        call.plain(("router", "router_loss"), grid, threads, args)?;
        call.plain(("loss", "sum_losses"), [call.size("batch"), 1, 1], 256, args![losses, loss, seq])
    }
}

pub unsafe fn router_loss_grad(call: Call, balance: f32, z: f32) -> Result<(), CudaError> {
    let Some(dlogits) = call.output(0) else { return Ok(()) };
    let (grid, threads, experts) = over_tokens(call)?;
    let scale = call.given(2).map(|scalars| scalars + LOSS_SCALE);
    let (logits, counts, tokens, seq) = (call.input(0), call.input(1), call.rows(), call.size("seq"));
    let args = args![logits, counts, scale, dlogits, tokens, seq, experts, balance, z];
    // SAFETY: the operands have these sizes.
    unsafe { call.plain(("router", "router_loss_grad"), grid, threads, args) }
}
