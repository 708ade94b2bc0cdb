//! Copies of sections of packed rows.

use super::call::{Call, Ptr};
use super::float::Float;

/// y `[rows, h]` = x `[rows, p]` from section `first` on.
pub fn slice<T: Float>(call: Call, first: usize) {
    let Some(y) = call.output::<T>(0) else { return };
    let (n, at) = (call.size('h'), call.bound.columns[..first].iter().sum());
    copy_columns(call, (call.input::<T>(0), call.size('p'), at), (y, n, 0), n);
}

/// whole `[rows, p]` = all inputs side by side.
pub fn concat<T: Float>(call: Call) {
    let Some(whole) = call.output::<T>(0) else { return };
    let mut at = 0;
    for (i, part) in call.bound.inputs.iter().enumerate() {
        let n = part.elements / (call.size('b') * call.size('s'));
        copy_columns(call, (call.input::<T>(i), n, 0), (whole, call.size('p'), at), n);
        at += n;
    }
}

/// Copies `n` columns of every row; of either side the rows' width and the first of the columns are given.
fn copy_columns<T: Float>(call: Call, from: (*const T, usize, usize), to: (*mut T, usize, usize), n: usize) {
    let ((from, from_width, from_at), (to, to_width, to_at)) = ((Ptr(from.0), from.1, from.2), (Ptr(to.0), to.1, to.2));
    call.rows(call.size('b') * call.size('s'), |first, last| {
        for row in first..last {
            // SAFETY: rows first .. last belong to this task; the columns lie in them.
            unsafe {
                to.slice(row * to_width + to_at, n).copy_from_slice(from.slice(row * from_width + from_at, n));
            }
        }
    });
}
