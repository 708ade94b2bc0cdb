//! Copies of sections of packed rows.

use super::launch::{Launches, launches};
use crate::CudaError;
use crate::call::{Call, THREADS};
use crate::driver::Address;
use crate::kernels::args;

/// The launches of this family.
pub fn launches() -> Launches {
    launches! { call:
        Slice { first, .. } => slice(call, first),
        Concat => concat(call),
        Part { .. } => part(call),
    }
}

/// y `[rows, h]` = x `[rows, p]` from section `first` on.
pub unsafe fn slice(call: Call, first: usize) -> Result<(), CudaError> {
    let Some(y) = call.output(0) else { return Ok(()) };
    let (n, at) = (call.size("sections"), call.bound.columns[..first].iter().sum());
    // SAFETY: the sections lie in the rows.
    unsafe { copy_columns(call, (call.input(0), call.size("packed"), at), (y, n, 0), n) }
}

/// whole `[rows, p]` = all inputs side by side.
pub unsafe fn concat(call: Call) -> Result<(), CudaError> {
    let Some(whole) = call.output(0) else { return Ok(()) };
    let mut at = 0;
    call.bound.inputs.iter().enumerate().try_for_each(|(i, part)| {
        let n = part.elements / call.rows();
        let to = (whole, call.size("packed"), at);
        at += n;
        // SAFETY: the parts together are as wide as the whole.
        unsafe { copy_columns(call, (call.input(i), n, 0), to, n) }
    })
}

/// This rank's part of a whole.
pub unsafe fn part(call: Call) -> Result<(), CudaError> {
    let Some(part) = call.output(0) else { return Ok(()) };
    call.bound.blocks.iter().try_for_each(|block| {
        let (from, to) = (call.input(0) + 4 * block.whole as u64, part + 4 * block.part as u64);
        let (n, rows) = (block.len, block.rows);
        let threads = n.next_multiple_of(32).clamp(32, THREADS);
        // One row may be a whole section: several blocks copy it.
        let blocks = if rows == 1 { n.div_ceil(threads).clamp(1, 1024) } else { 1 };
        let args = args![from, to, block.whole_stride, block.part_stride, n];
        // SAFETY: the block lies in both.
        unsafe { call.plain(("sections", "copy_columns_f32"), [rows, blocks, 1], threads, args) }
    })
}

/// Copies `n` columns of every row; of either side the rows' width and the first of the columns are given.
unsafe fn copy_columns(
    call: Call,
    from: (Address, usize, usize),
    to: (Address, usize, usize),
    n: usize,
) -> Result<(), CudaError> {
    let first = |(address, _, at): (Address, usize, usize)| address + (at * call.float().bytes()) as u64;
    let threads = n.next_multiple_of(32).clamp(32, THREADS);
    let args = args![first(from), first(to), from.1, to.1, n];
    // SAFETY: the caller vouches.
    unsafe { call.typed(("sections", "copy_columns"), [call.rows(), 1, 1], threads, args) }
}
