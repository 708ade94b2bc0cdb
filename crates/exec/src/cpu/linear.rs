//! Linear layers. Shapes: x `[rows, k]`, w `[n, k]`, y `[rows, n]`.

use super::call::{Accumulator, Call, Ptr};
use super::gemm::{Matrix, gemm, scratch_bytes};
use lockstep_ir::fixed;

/// y = x · wᵀ.
pub fn forward(call: Call) {
    let (rows, n, k) = (call.size('b') * call.size('s'), call.size('n'), call.size('k'));
    let Some(y) = call.output(0) else { return };
    let (x, w) = (Matrix::rows(call.input(0), k), Matrix::rows(call.input(1), k).transposed());
    // SAFETY: sizes come from the operands' types; the verifier keeps outputs and scratch apart from inputs.
    unsafe { gemm(call.pool, call.simd, (rows, n, k), x, w, y, n, false, call.scratch()) }
}

/// dx = dy · w.
pub fn grad_input(call: Call) {
    let (rows, n, k) = (call.size('b') * call.size('s'), call.size('n'), call.size('k'));
    let Some(dx) = call.output(0) else { return };
    let (dy, w) = (Matrix::rows(call.input(0), n), Matrix::rows(call.input(1), k));
    // SAFETY: as in `forward`.
    unsafe { gemm(call.pool, call.simd, (rows, k, n), dy, w, dx, k, false, call.scratch()) }
}

/// dw = dyᵀ · x.
pub fn grad_weight(call: Call) {
    let (batch, seq, n, k) = (call.size('b'), call.size('s'), call.size('n'), call.size('k'));
    let Some(dw) = call.accumulator(0) else { return };
    // SAFETY: as in `forward`.
    unsafe { weight_product(call, (batch, seq, n, k), call.input(0), call.input(1), dw, call.scratch()) }
}

/// dw `[n, k]` += dyᵀ · x over `groups` groups of `rows` rows: at once for float sums, group by group for fixed-point
/// sums, so that a group's share does not depend on its neighbours.
///
/// # Safety
/// The operands have these sizes; `scratch` holds a product's scratch, and n · k floats behind it for fixed-point sums.
pub unsafe fn weight_product(
    call: Call,
    (groups, rows, n, k): (usize, usize, usize, usize),
    dy: *const f32,
    x: *const f32,
    dw: Accumulator,
    scratch: *mut f32,
) {
    match dw {
        Accumulator::Float { sum, add } => {
            let (dy, x) = (Matrix::rows(dy, n).transposed(), Matrix::rows(x, k));
            // SAFETY: the caller vouches.
            unsafe { gemm(call.pool, call.simd, (n, k, groups * rows), dy, x, sum, k, add, scratch) }
        }
        Accumulator::Fixed { sum, add } => {
            for group in 0..groups {
                // SAFETY: the caller vouches; tasks convert disjoint ranges.
                unsafe {
                    let share = scratch.add(scratch_bytes(call.pool.threads()) / 4);
                    let dy = Matrix::rows(dy.add(group * rows * n), n).transposed();
                    let x = Matrix::rows(x.add(group * rows * k), k);
                    gemm(call.pool, call.simd, (n, k, rows), dy, x, share, k, false, scratch);
                    let (share, sum) = (Ptr(share.cast_const()), Ptr(sum));
                    call.rows(n * k, |from, to| {
                        let shares = share.slice(from, to - from);
                        for (s, x) in sum.slice(from, to - from).iter_mut().zip(shares) {
                            *s = fixed::add(if add || group > 0 { *s } else { 0 }, *x);
                        }
                    });
                }
            }
        }
    }
}
