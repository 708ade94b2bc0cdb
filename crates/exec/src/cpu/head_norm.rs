//! RMSNorm of every head of Q and K. Shapes: qkv, y `[rows, (q + 2u)·e]`; rstd `[rows, q + u]`; w `[2e]`, Q's then K's.

use super::call::{Accumulator, Call, Ptr};
use super::columns::COLUMNS;
use super::float::Float;
use super::norm::{grad_rows, more, norm_rows};
use super::simd::vectorised;

/// The heads of one section of a row.
#[derive(Clone, Copy)]
struct Section {
    /// Its first head.
    first: usize,
    heads: usize,
    /// Where its weight starts.
    weight: usize,
}

/// Q and K.
fn sections(call: &Call) -> [Section; 2] {
    let (q, u, e) = (call.size("heads"), call.size("kv_heads"), call.size("head_dim"));
    [Section { first: 0, heads: q, weight: 0 }, Section { first: q, heads: u, weight: e }]
}

/// V of a row, where it is not in place.
unsafe fn copy_v<T: Float>(call: &Call, from: *const T, to: *mut T) {
    if !std::ptr::eq(from, to) {
        let before = call.size("normed") * call.size("head_dim");
        // SAFETY: the caller vouches for whole rows, one apart from the other.
        unsafe { std::ptr::copy_nonoverlapping(from.add(before), to.add(before), call.size("qkv") - before) };
    }
}

/// y = x / rms(x) · w, or by 1 + w.
pub fn forward<T: Float>(call: Call, eps: f32, plus_one: bool) {
    let (rows, width, normed, e) =
        (call.size("batch") * call.size("seq"), call.size("qkv"), call.size("normed"), call.size("head_dim"));
    let (qkv, w) = (Ptr(call.input::<T>(0)), Ptr(call.input::<T>(1)));
    let Some(y) = call.output::<T>(0).map(Ptr) else { return };
    let rstd = Ptr(call.output::<f32>(1).unwrap_or(std::ptr::null_mut()));
    call.rows(rows, |from, to| {
        for row in from..to {
            // SAFETY: row belongs to this task.
            unsafe {
                for Section { first, heads, weight } in sections(&call) {
                    let (x, y) = (qkv.at(row * width + first * e), y.at(row * width + first * e));
                    let rstd = match rstd.get() {
                        null if null.is_null() => null,
                        rstd => rstd.add(row * normed + first),
                    };
                    let (none, nowhere) = (std::ptr::null(), std::ptr::null_mut());
                    let (mean, w) = (std::ptr::null_mut(), w.at(weight));
                    norm_rows(call.simd, x, none, w, none, nowhere, y, mean, rstd, 0, heads, e, eps, more(plus_one));
                }
                copy_v(&call, qkv.at(row * width), y.at(row * width));
            }
        }
    });
}

/// dqkv from dy, qkv, w and rstd.
pub fn grad<T: Float>(call: Call, plus_one: bool) {
    let (rows, width, normed, e) =
        (call.size("batch") * call.size("seq"), call.size("qkv"), call.size("normed"), call.size("head_dim"));
    let (dy, qkv) = (Ptr(call.input::<T>(0)), Ptr(call.input::<T>(1)));
    let (w, rstd) = (Ptr(call.input::<T>(2)), Ptr(call.input::<f32>(3)));
    let Some(dx) = call.output::<T>(0).map(Ptr) else { return };
    call.rows(rows, |from, to| {
        for row in from..to {
            // SAFETY: row belongs to this task.
            unsafe {
                for Section { first, heads, weight } in sections(&call) {
                    let at = row * width + first * e;
                    let rstd = rstd.at(row * normed + first);
                    let (dy, x, dx) = (dy.at(at), qkv.at(at), dx.at(at));
                    let (mean, dsum) = (std::ptr::null(), std::ptr::null());
                    grad_rows(call.simd, dy, x, w.at(weight), mean, rstd, dsum, dx, 0, heads, e, more(plus_one));
                }
                copy_v(&call, dy.at(row * width), dx.at(row * width));
            }
        }
    });
}

/// dw = Σ over rows and heads of dy · x · rstd.
pub fn grad_weight<T: Float>(call: Call) {
    let (batch, seq, e) = (call.size("batch"), call.size("seq"), call.size("head_dim"));
    let (width, normed) = (call.size("qkv"), call.size("normed"));
    let (dy, qkv, rstd) = (Ptr(call.input::<T>(0)), Ptr(call.input::<T>(1)), Ptr(call.input::<f32>(2)));
    let Some(dw) = call.accumulator(0).map(Ptr) else { return };
    let blocks = e.div_ceil(COLUMNS);
    call.ranges(2 * blocks, 1, |task, _| {
        let Section { first, heads, weight } = sections(&call)[task / blocks];
        let from = task % blocks * COLUMNS;
        let n = COLUMNS.min(e - from);
        // A sequence's share of a fixed-point sum does not depend on its neighbours.
        let fixed = matches!(dw.get(), Accumulator::Fixed { .. });
        let (groups, rows) = if fixed { (batch, seq) } else { (1, batch * seq) };
        for group in 0..groups {
            let mut sums = [0.0f32; COLUMNS];
            // SAFETY: these columns of dw belong to this task.
            unsafe {
                for row in group * rows..(group + 1) * rows {
                    let at = row * width + first * e + from;
                    let rstd = rstd.at(row * normed + first);
                    add_heads(call.simd, dy.at(at), qkv.at(at), rstd, heads, e, n, &mut sums);
                }
                let dw = dw.get().adding(group > 0);
                (0..n).for_each(|i| dw.put(weight + from + i, sums[i]));
            }
        }
    });
}

vectorised! {
    /// Adds the share of a row: first over its heads, so that sums of many rows lose less.
    unsafe fn add_heads<T>(
        dy: *const T, x: *const T, rstd: *const f32, heads: usize, e: usize, n: usize, sums: &mut [f32; COLUMNS],
    ) -> () {
        let mut share = [0.0f32; COLUMNS];
        for head in 0..heads {
            let (dy, x, scale) = (dy.add(head * e), x.add(head * e), *rstd.add(head));
            for (i, sum) in share.iter_mut().enumerate().take(n) {
                *sum += (*dy.add(i)).to() * (*x.add(i)).to() * scale;
            }
        }
        for i in 0..COLUMNS {
            sums[i] += share[i];
        }
    }
}
