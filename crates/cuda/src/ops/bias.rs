//! Biases, and what is summed over rows with them.

use super::norm::add_shares;
use super::pointwise::{in_parts, over_rows};
use crate::CudaError;
use crate::call::{Call, THREADS};
use crate::kernels::args;

pub unsafe fn add_bias(call: Call) -> Result<(), CudaError> {
    let Some(y) = call.output(0) else { return Ok(()) };
    let d = call.size("features");
    let (grid, wide) = over_rows(call, d);
    let bytes = call.float().bytes();
    in_parts(grid, |first, grid| {
        let row = (first * d * bytes) as u64;
        let args = args![call.input(0) + row, call.input(1), y + row, d, wide];
        // SAFETY: the operands have these sizes.
        unsafe { call.typed(("elements", "add_bias"), grid, THREADS, args) }
    })
}

/// Most shares of a sum over rows: scratch has room for as many.
pub const SHARES: usize = 264;

/// The grid of kernels that sum over rows of `d` columns: lines of 32 packs, and about as many blocks in all as run at the same time
/// on an H100. It does not depend on the device, since the order of sums does on it.
fn over_columns(call: Call, d: usize) -> ([usize; 3], bool) {
    let wide = call.wide(d);
    let lines = d.div_ceil(32 * if wide { call.pack() } else { 1 });
    let blocks = (4 * 132 / lines.max(1)).clamp(8, SHARES).min(call.rows().div_ceil(8));
    ([lines, blocks, 1], wide)
}

/// Scratch: a share for every block of rows.
pub unsafe fn bias_grad(call: Call) -> Result<(), CudaError> {
    let (d, shares) = (call.size("features"), call.scratch()?);
    let (grid, wide) = over_columns(call, d);
    let args = args![call.input(0), shares, call.rows(), d, wide];
    // SAFETY: the operands and the scratch have these sizes.
    unsafe {
        call.typed(("elements", "bias_grad"), grid, THREADS, args)?;
        add_shares(&[call], shares, grid[1], d)
    }
}

/// dx of a GELU, and the gradient of the bias before it, in one pass.
pub unsafe fn gelu_bias_grad(gelu: Call, bias: Call) -> Result<(), CudaError> {
    let Some(dx) = gelu.output(0) else { return Ok(()) };
    let (d, shares) = (bias.size("features"), bias.scratch()?);
    let (grid, wide) = over_columns(bias, d);
    let args = args![gelu.input(0), gelu.input(1), dx, shares, bias.rows(), d, wide];
    // SAFETY: the operands and the scratch have these sizes; an element's dy is read before its dx is written.
    unsafe {
        bias.typed(("elements", "gelu_bias_grad"), grid, THREADS, args)?;
        add_shares(&[bias], shares, grid[1], d)
    }
}
