//! Biases, GELU, learned positions, dropout.

use super::norm::add_shares;
use super::pointwise::{Positions, in_parts, over_rows};
use crate::CudaError;
use crate::call::{Call, THREADS, sum_kind};
use crate::kernels::{Value, args};
use lockstep_ir::counter;

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

/// Blocks of threads that have a pack each.
fn packs(call: Call, n: usize) -> [usize; 3] {
    [n.div_ceil(call.pack() * THREADS), 1, 1]
}

pub unsafe fn gelu(call: Call) -> Result<(), CudaError> {
    let Some(y) = call.output(0) else { return Ok(()) };
    let n = call.bound.inputs[0].elements;
    // SAFETY: the operands have as many elements.
    unsafe { call.typed(("elements", "gelu"), packs(call, n), THREADS, args![call.input(0), y, n]) }
}

pub unsafe fn gelu_grad(call: Call) -> Result<(), CudaError> {
    let Some(dx) = call.output(0) else { return Ok(()) };
    let n = call.bound.inputs[0].elements;
    let args = args![call.input(0), call.input(1), dx, n];
    // SAFETY: the operands have as many elements.
    unsafe { call.typed(("elements", "gelu_grad"), packs(call, n), THREADS, args) }
}

/// `seq` is `None` where positions go on from a number on the device.
pub unsafe fn add_positions(call: Call, seq: Option<usize>) -> Result<(), CudaError> {
    let Some(y) = call.output(0) else { return Ok(()) };
    let (d, here) = (call.size("features"), call.size("seq"));
    let whole = seq.unwrap_or(here);
    let [first, count, then] = call.span();
    let starts = call.given(2);
    let positions = if seq.is_none() { Positions::From } else { Positions::of(starts) };
    let (x, table, how, rows) = (call.input(0), call.input(1), positions as i32, call.size("table"));
    let args = args![x, table, starts, y, d, here, whole, first, count, then, how, rows];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("elements", "add_positions"), [call.rows(), 1, 1], THREADS, args) }
}

pub unsafe fn positions_grad(call: Call, seq: usize) -> Result<(), CudaError> {
    let (Some(out), Some(at)) = (call.output(0), call.bound.outputs[0]) else { return Ok(()) };
    let (d, rows, batch, here) = (call.size("features"), call.size("table"), call.size("batch"), call.size("seq"));
    let [first, count, then] = call.span();
    let starts = call.given(1);
    let (kind, adds, how) = (sum_kind(at.dtype), call.adds(0), Positions::of(starts) as i32);
    let args = args![call.input(0), starts, out, kind, adds, d, batch, here, seq, first, count, then, how, rows];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("elements", "positions_grad"), [rows, 1, 1], THREADS, args) }
}

pub unsafe fn dropout(call: Call, rate: f32, site: u64) -> Result<(), CudaError> {
    let Some(y) = call.output(0) else { return Ok(()) };
    let [first, count, then] = call.span();
    let (below, scale) = (counter::threshold(rate) as usize, 1.0 / (1.0 - rate));
    let (x, keys, d, seq) = (call.input(0), call.input(1), call.size("features"), call.size("seq"));
    let args = args![x, keys, y, d, seq, first, count, then, Value::Long(site), below, scale];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("elements", "dropout"), [call.rows(), 1, 1], THREADS, args) }
}
