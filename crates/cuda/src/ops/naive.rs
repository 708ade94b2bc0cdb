//! Attention whose weights exist.

use crate::CudaError;
use crate::attention::plans::scale;
use crate::attention::{WARPS, check_head, keys_seen};
use crate::call::Call;
use crate::kernels::args;

/// Positions, heads of Q and of K, and the sizes of heads of Q and K and of V.
const SIZES: [&str; 5] = ["seq", "heads", "kv_heads", "head_dim", "value_dim"];

/// Grids over positions of query heads and of key heads, having checked the width of heads.
fn grids(call: Call) -> Result<[[usize; 3]; 2], CudaError> {
    check_head(call.size("widest_dim"))?;
    let rows = call.size("seq").div_ceil(WARPS);
    Ok([call.size("heads"), call.size("kv_heads")].map(|heads| [rows, heads, call.size("batch")]))
}

pub unsafe fn scores(call: Call, window: Option<usize>) -> Result<(), CudaError> {
    let Some(p) = call.output(0) else { return Ok(()) };
    let [grid, _] = grids(call)?;
    let [s, q, u, e, v] = SIZES.map(|name| call.size(name));
    let args = args![call.input(0), call.given(1), p, s, q, u, e, v, keys_seen(window), scale(e)];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("naive", "scores"), grid, 32 * WARPS, args) }
}

pub unsafe fn mix(call: Call) -> Result<(), CudaError> {
    let Some(o) = call.output(0) else { return Ok(()) };
    let [grid, _] = grids(call)?;
    let [s, q, u, e, v] = SIZES.map(|name| call.size(name));
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("naive", "mix"), grid, 32 * WARPS, args![call.input(0), call.input(1), o, s, q, u, e, v]) }
}

pub unsafe fn mix_grad(call: Call) -> Result<(), CudaError> {
    let [grid, keys] = grids(call)?;
    let [s, q, u, e, v] = SIZES.map(|name| call.size(name));
    let (dout, p, qkv) = (call.input(0), call.input(1), call.input(2));
    // SAFETY: the operands have these sizes.
    unsafe {
        if let Some(dp) = call.output(0) {
            let args = args![dout, qkv, dp, s, q, u, e, v];
            call.typed(("naive", "mix_grad_weights"), grid, 32 * WARPS, args)?;
        }
        if let Some(dqkv) = call.output(1) {
            let args = args![dout, p, dqkv, s, q, u, e, v];
            call.typed(("naive", "mix_grad_values"), keys, 32 * WARPS, args)?;
        }
    }
    Ok(())
}

/// Scratch: a number per row of weights.
pub unsafe fn scores_grad(call: Call) -> Result<(), CudaError> {
    let Some(dqkv) = call.output(0) else { return Ok(()) };
    let [grid, keys] = grids(call)?;
    let [s, q, u, e, v] = SIZES.map(|name| call.size(name));
    let (dp, p, qkv, means) = (call.input(0), call.input(1), call.input(2), call.scratch()?);
    let args = args![dp, p, qkv, means, dqkv, s, q, u, e, v, scale(e)];
    // SAFETY: the operands and the scratch have these sizes.
    unsafe {
        call.typed(("naive", "row_means"), grid, 32 * WARPS, args![dp, p, means, s, q, u, e, v])?;
        call.typed(("naive", "scores_grad_query"), grid, 32 * WARPS, args)?;
        call.typed(("naive", "scores_grad_key"), keys, 32 * WARPS, args)
    }
}
