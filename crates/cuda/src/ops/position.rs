//! Where a position stands: tables of positions, and RoPE.

use super::launch::{Launches, launches};
use crate::CudaError;
use crate::call::{Call, THREADS, sum_kind};
use crate::kernels::args;

/// The launches of this family.
pub fn launches() -> Launches {
    launches! { call:
        AddPositions { seq } => add_positions(call, Some(seq)),
        AddPositionsAt => add_positions(call, None),
        PositionsGrad { seq, .. } => positions_grad(call, seq),
        Rope { inverse } => rotate(call, if inverse { -1.0 } else { 1.0 }, Positions::of(call.given(2))),
        RopeAt => rotate(call, 1.0, Positions::From),
    }
}

/// Where a row's position comes from: as kernels count.
#[derive(Clone, Copy)]
enum Positions {
    Sequence = 0,
    From = 1,
    Document = 2,
}

impl Positions {
    /// Positions in documents where it is given where those start.
    fn of(starts: Option<u64>) -> Self {
        if starts.is_some() { Positions::Document } else { Positions::Sequence }
    }
}

unsafe fn rotate(call: Call, sign: f32, positions: Positions) -> Result<(), CudaError> {
    let Some(out) = call.output(0) else { return Ok(()) };
    let starts = call.given(2);
    let (e, turned, width) = (call.size("head_dim"), call.size("columns"), call.size("qkv"));
    let heads = call.size("heads") + call.size("kv_heads");
    let (rotated, pairs) = (heads * e, heads * turned / 2);
    let wide = call.wide(turned / 2) && call.wide(e) && call.wide(width);
    let work = if wide { pairs / call.pack() } else { pairs };
    let threads = work.next_multiple_of(32).clamp(32, THREADS);
    let (qkv, table) = (call.input(0), call.input(1));
    let (seq, rows) = (call.size("seq"), call.size("table"));
    let [first, count, then] = call.span();
    let how = positions as i32;
    let args =
        args![qkv, table, starts, out, seq, first, count, then, width, rotated, e, turned, rows, sign, how, wide];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("pointwise", "rope"), [call.rows(), 1, 1], threads, args) }
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
