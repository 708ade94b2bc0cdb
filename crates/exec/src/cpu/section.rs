//! Copies of sections of packed rows.

use super::call::{Call, Kernel, Kernels, Ptr};
use super::float::Float;
use crate::by_kind;

/// The kernels of this family.
pub fn kernels<T: Float>() -> Kernels {
    by_kind! { call: Call => Kernel;
        Slice { first, .. } => slice::<T>(call, first),
        Concat => concat::<T>(call),
        Part { .. } => part(call),
    }
}

/// y `[rows, h]` = x `[rows, p]` from section `first` on.
pub fn slice<T: Float>(call: Call, first: usize) {
    let Some(y) = call.output::<T>(0) else { return };
    let (n, at) = (call.size("sections"), call.bound.columns[..first].iter().sum());
    copy_columns(call, (call.input::<T>(0), call.size("packed"), at), (y, n, 0), n);
}

/// whole `[rows, p]` = all inputs side by side.
pub fn concat<T: Float>(call: Call) {
    let Some(whole) = call.output::<T>(0) else { return };
    let mut at = 0;
    for (i, part) in call.bound.inputs.iter().enumerate() {
        let n = part.elements / (call.size("batch") * call.size("seq"));
        copy_columns(call, (call.input::<T>(i), n, 0), (whole, call.size("packed"), at), n);
        at += n;
    }
}

/// This rank's part of a whole.
pub fn part(call: Call) {
    let (whole, Some(part)) = (Ptr(call.input::<f32>(0)), call.output::<f32>(0).map(Ptr)) else { return };
    for block in &call.bound.blocks {
        // One row may be a whole section: it is copied in pieces.
        let pieces = if block.rows == 1 { 4 * call.pool.threads() } else { 1 };
        let len = block.len.div_ceil(pieces).max(1);
        call.rows(block.rows * pieces, |first, last| {
            for (row, at) in (first..last).map(|i| (i / pieces, (i % pieces * len).min(block.len))) {
                let (from, to) =
                    (block.whole + row * block.whole_stride + at, block.part + row * block.part_stride + at);
                let n = len.min(block.len - at);
                // SAFETY: the block lies in both, and every element of the part is one task's.
                unsafe { part.slice(to, n).copy_from_slice(whole.slice(from, n)) };
            }
        });
    }
}

/// Copies `n` columns of every row; of either side the rows' width and the first of the columns are given.
fn copy_columns<T: Float>(call: Call, from: (*const T, usize, usize), to: (*mut T, usize, usize), n: usize) {
    let ((from, from_width, from_at), (to, to_width, to_at)) = ((Ptr(from.0), from.1, from.2), (Ptr(to.0), to.1, to.2));
    call.rows(call.size("batch") * call.size("seq"), |first, last| {
        for row in first..last {
            // SAFETY: rows first .. last belong to this task; the columns lie in them.
            unsafe {
                to.slice(row * to_width + to_at, n).copy_from_slice(from.slice(row * from_width + from_at, n));
            }
        }
    });
}
