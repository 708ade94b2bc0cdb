//! Rotary positions, SwiGLU, additions: each element on its own.

use crate::CudaError;
use crate::call::{Call, THREADS, suffix};
use crate::kernels::args;

/// Where a row's position comes from: as kernels count.
#[derive(Clone, Copy)]
pub enum Positions {
    Sequence = 0,
    From = 1,
    Document = 2,
}

impl Positions {
    /// Positions in documents where it is given where those start.
    pub fn of(starts: Option<u64>) -> Self {
        if starts.is_some() { Positions::Document } else { Positions::Sequence }
    }
}

/// Elements that a thread of a map has: as in `map.cu`.
const EACH: usize = 4;

/// y = an expression of x, of this name among [`maps`](super::maps), in the type of y.
pub unsafe fn map(call: Call, name: &str) -> Result<(), CudaError> {
    let (Some(y), Some(at)) = (call.output(0), call.bound.outputs[0]) else { return Ok(()) };
    let kernel = format!("{name}_{}_{}", call.suffix(), suffix(at.dtype));
    let grid = [at.elements.div_ceil(EACH * THREADS), 1, 1];
    // SAFETY: the operands have as many elements.
    unsafe { call.plain(("map", &kernel), grid, THREADS, args![call.input(0), y, at.elements]) }
}

pub unsafe fn rope(call: Call, inverse: bool) -> Result<(), CudaError> {
    // SAFETY: as the caller says.
    unsafe { rotate(call, if inverse { -1.0 } else { 1.0 }, Positions::of(call.given(2))) }
}

pub unsafe fn rope_at(call: Call) -> Result<(), CudaError> {
    // SAFETY: as the caller says.
    unsafe { rotate(call, 1.0, Positions::From) }
}

unsafe fn rotate(call: Call, sign: f32, positions: Positions) -> Result<(), CudaError> {
    let Some(out) = call.output(0) else { return Ok(()) };
    let starts = call.given(2);
    let (e, width) = (call.size("head_dim"), call.size("qkv"));
    let rotated = (call.size("heads") + call.size("kv_heads")) * e;
    let wide = call.wide(e / 2) && call.wide(width);
    let work = if wide { rotated / 2 / call.pack() } else { rotated / 2 };
    let threads = work.next_multiple_of(32).clamp(32, THREADS);
    let (qkv, table) = (call.input(0), call.input(1));
    let (seq, rows) = (call.size("seq"), call.size("table"));
    let [first, count, then] = call.span();
    let how = positions as i32;
    let args = args![qkv, table, starts, out, seq, first, count, then, width, rotated, e, rows, sign, how, wide];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("pointwise", "rope"), [call.rows(), 1, 1], threads, args) }
}

/// Blocks over rows of `n` elements, each thread a pack where rows divide into them.
pub fn over_rows(call: Call, n: usize) -> ([usize; 3], bool) {
    let wide = call.wide(n);
    let work = if wide { n / call.pack() } else { n };
    ([work.div_ceil(THREADS), call.rows(), 1], wide)
}

/// Calls `f` for parts of the rows, as many as a grid may have.
pub fn in_parts(
    grid: [usize; 3],
    mut f: impl FnMut(usize, [usize; 3]) -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    const MOST: usize = 65535;
    (0..grid[1]).step_by(MOST).try_for_each(|first| f(first, [grid[0], MOST.min(grid[1] - first), 1]))
}

pub unsafe fn swiglu(call: Call) -> Result<(), CudaError> {
    let Some(y) = call.output(0) else { return Ok(()) };
    let f = call.size("ffn");
    let (grid, wide) = over_rows(call, f);
    let bytes = call.float().bytes();
    in_parts(grid, |first, grid| {
        let row = (first * f * bytes) as u64;
        // SAFETY: the operands have these sizes.
        unsafe { call.typed(("pointwise", "swiglu"), grid, THREADS, args![call.input(0) + 2 * row, y + row, f, wide]) }
    })
}

pub unsafe fn swiglu_grad(call: Call) -> Result<(), CudaError> {
    let Some(out) = call.output(0) else { return Ok(()) };
    let f = call.size("ffn");
    let (grid, wide) = over_rows(call, f);
    let bytes = call.float().bytes();
    in_parts(grid, |first, grid| {
        let row = (first * f * bytes) as u64;
        let args = args![call.input(0) + row, call.input(1) + 2 * row, out + 2 * row, f, wide];
        // SAFETY: the operands have these sizes.
        unsafe { call.typed(("pointwise", "swiglu_grad"), grid, THREADS, args) }
    })
}

pub unsafe fn add(call: Call) -> Result<(), CudaError> {
    let Some(sum) = call.output(0) else { return Ok(()) };
    let n = call.bound.inputs[0].elements;
    let grid = [n.div_ceil(call.pack() * THREADS), 1, 1];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("pointwise", "add"), grid, THREADS, args![call.input(0), call.input(1), sum, n]) }
}

pub unsafe fn last_position(call: Call) -> Result<(), CudaError> {
    let Some(y) = call.output(0) else { return Ok(()) };
    let args = args![call.input(0), call.input(1), y, call.size("seq"), call.size("features")];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("pointwise", "last_position"), [call.size("batch"), 1, 1], THREADS, args) }
}
