//! Sums over positions, column by column: gradients of the vectors that all positions share. Shapes: dy, x `[rows, d]`; mean,
//! rstd `[rows]`; the sum `[d]`.

use super::call::{Accumulator, Call, Ptr};
use super::float::Float;
use super::simd::vectorised;

/// dbias = Σ over rows of dy.
pub fn bias_grad<T: Float>(call: Call) {
    let (dy, none) = (call.input(0), std::ptr::null());
    sum_columns::<T>(call, Terms { dy, x: std::ptr::null(), mean: none, rstd: none });
}

/// dw = Σ over rows of dy · x · rstd; for a layer norm of dy · (x − mean) · rstd.
pub fn norm_grad_weight<T: Float>(call: Call, layer: bool) {
    let (dy, x) = (call.input(0), call.input(1));
    let mean = if layer { call.input(2) } else { std::ptr::null() };
    sum_columns::<T>(call, Terms { dy, x, mean, rstd: call.input(if layer { 3 } else { 2 }) });
}

/// What is summed: dy, where `x` is not null times the normed x. The mean counts as 0 where it is null.
#[derive(Clone, Copy)]
struct Terms<T> {
    dy: *const T,
    x: *const T,
    mean: *const f32,
    rstd: *const f32,
}

/// Columns of one task.
pub(super) const COLUMNS: usize = 64;

fn sum_columns<T: Float>(call: Call, terms: Terms<T>) {
    let (batch, seq, d) = (call.size("batch"), call.size("seq"), call.size("features"));
    let Some(dw) = call.accumulator(0).map(Ptr) else { return };
    let terms = Ptr(terms);
    call.ranges(d, COLUMNS, |from, to| {
        let mut sums = [0.0f32; COLUMNS];
        let (groups, rows) =
            if matches!(dw.get(), Accumulator::Fixed { .. }) { (batch, seq) } else { (1, batch * seq) };
        for group in 0..groups {
            // SAFETY: columns from .. to of dw belong to this task.
            unsafe {
                column_sums(call.simd, terms.get(), (group * rows, (group + 1) * rows), from, to - from, d, &mut sums);
                let dw = dw.get().adding(group > 0);
                (0..to - from).for_each(|i| dw.put(from + i, sums[i]));
            }
        }
    });
}

vectorised! {
    unsafe fn column_sums<T>(
        terms: Terms<T>, rows: (usize, usize), from: usize, n: usize, d: usize, sums: &mut [f32; COLUMNS],
    ) -> () {
        sums.fill(0.0);
        for row in rows.0..rows.1 {
            let dy = terms.dy.add(row * d + from);
            if terms.x.is_null() {
                add_row(sums, n, |i| (*dy.add(i)).to());
                continue;
            }
            let (x, scale) = (terms.x.add(row * d + from), *terms.rstd.add(row));
            let centre = if terms.mean.is_null() { 0.0 } else { *terms.mean.add(row) };
            add_row(sums, n, |i| (*dy.add(i)).to() * ((*x.add(i)).to() - centre) * scale);
        }
    }
}

/// Adds a row to the first `n` sums; a whole task's columns without a bound that the compiler does not know.
#[inline(always)]
fn add_row(sums: &mut [f32; COLUMNS], n: usize, term: impl Fn(usize) -> f32) {
    if n == COLUMNS {
        sums.iter_mut().enumerate().for_each(|(i, sum)| *sum += term(i));
    } else {
        sums.iter_mut().enumerate().take(n).for_each(|(i, sum)| *sum += term(i));
    }
}
