//! Linear layers. Shapes: x `[rows, k]`, w `[n, k]`, y `[rows, n]`.

use super::call::{Accumulator, Call, Kernel, Kernels, Ptr};
use super::columns::bias_grad;
use super::float::{Bf16, Float};
use super::gemm::{Matrix, Target, gemm};
use super::pointwise::add_bias;
use super::simd::vectorised;
use crate::by_kind;
use lockstep_ir::fixed;

/// The kernels of this family.
pub fn kernels<T: Float>() -> Kernels {
    by_kind! { call: Call => Kernel;
        Linear => forward::<T>(call),
        LinearGradInput => grad_input::<T>(call),
        LinearGradWeight => grad_weight::<T>(call),
        AddBias => add_bias::<T>(call),
        BiasGrad => bias_grad::<T>(call),
    }
}

/// y = x · wᵀ.
pub fn forward<T: Float>(call: Call) {
    let (rows, n, k) = (call.size("batch") * call.size("seq"), call.size("outputs"), call.size("inputs"));
    let Some(y) = call.output::<T>(0) else { return };
    let (x, w) = (Matrix::rows(call.input::<T>(0), k), Matrix::rows(call.input::<T>(1), k).transposed());
    // SAFETY: sizes come from the operands' types; the verifier keeps outputs and scratch apart from inputs.
    unsafe { gemm(call.pool, call.simd, (rows, n, k), x, w, Target::new(y, n), call.scratch()) }
}

/// dx = dy · w.
pub fn grad_input<T: Float>(call: Call) {
    let (rows, n, k) = (call.size("batch") * call.size("seq"), call.size("outputs"), call.size("inputs"));
    let Some(dx) = call.output::<T>(0) else { return };
    let (dy, w) = (Matrix::rows(call.input::<T>(0), n), Matrix::rows(call.input::<T>(1), k));
    // SAFETY: as in `forward`.
    unsafe { gemm(call.pool, call.simd, (rows, k, n), dy, w, Target::new(dx, k), call.scratch()) }
}

/// dw = dyᵀ · x.
pub fn grad_weight<T: Float>(call: Call) {
    let (batch, seq, n, k) = (call.size("batch"), call.size("seq"), call.size("outputs"), call.size("inputs"));
    let Some(dw) = call.accumulator(0) else { return };
    let scratch: *mut f32 = call.scratch();
    // SAFETY: as in `forward`; sums that are not in f32 have n · k floats of scratch after the matmul's.
    unsafe {
        let share = scratch.byte_add(call.gemm_scratch());
        weight_product::<T>(call, (batch, seq, n, k), call.input(0), call.input(1), dw, scratch, share);
    }
}

/// dw `[n, k]` += dyᵀ · x over `groups` groups of `rows` rows: at once for float sums, group by group for fixed-point
/// sums, so that a group's share does not depend on its neighbours.
///
/// # Safety
/// The operands have these sizes; `scratch` holds a matmul's scratch, and `share` n · k floats for sums that are not in f32.
pub unsafe fn weight_product<T: Float>(
    call: Call,
    sizes: (usize, usize, usize, usize),
    dy: *const T,
    x: *const T,
    dw: Accumulator,
    scratch: *mut f32,
    share: *mut f32,
) {
    let (_, _, n, k) = sizes;
    // SAFETY: the caller vouches.
    unsafe { weight_product_of(call, sizes, [Matrix::rows(dy, n), Matrix::rows(x, k)], dw, scratch, share) }
}

/// The same of matrices, whose rows are positions.
///
/// # Safety
/// As there.
pub unsafe fn weight_product_of<T: Float>(
    call: Call,
    (groups, rows, n, k): (usize, usize, usize, usize),
    [dy, x]: [Matrix<T>; 2],
    dw: Accumulator,
    scratch: *mut f32,
    share: *mut f32,
) {
    // SAFETY: the caller vouches; tasks convert disjoint ranges.
    unsafe {
        let matmul = |first: usize, rows: usize, target: Target| {
            let (dy, x) = (dy.skip_rows(first).transposed(), x.skip_rows(first));
            gemm(call.pool, call.simd, (n, k, rows), dy, x, target, scratch);
        };
        let apart = Target::F32 { ptr: share, stride: k, add: false };
        let share = Ptr(share.cast_const());
        match dw {
            Accumulator::Float { sum, add } => {
                matmul(0, groups * rows, Target::F32 { ptr: sum, stride: k, add });
            }
            Accumulator::Bf16 { sum, add } => {
                matmul(0, groups * rows, apart);
                let sum = Ptr(sum);
                call.rows(n * k, |from, to| {
                    add_rounded(call.simd, share.at(from), sum.at(from), to - from, add);
                });
            }
            Accumulator::Fixed { sum, add } => {
                let sum = Ptr(sum);
                for group in 0..groups {
                    matmul(group * rows, rows, apart);
                    call.rows(n * k, |from, to| {
                        add_fixed(call.simd, share.at(from), sum.at(from), to - from, add || group > 0);
                    });
                }
            }
        }
    }
}

vectorised! {
    pub(super) unsafe fn add_rounded<T>(share: *const T, sum: *mut Bf16, n: usize, add: bool) -> () {
        for i in 0..n {
            let before = if add { (*sum.add(i)).to() } else { 0.0 };
            *sum.add(i) = Bf16::of(before + (*share.add(i)).to());
        }
    }
}

vectorised! {
    pub(super) unsafe fn add_fixed<T>(share: *const T, sum: *mut i64, n: usize, add: bool) -> () {
        for i in 0..n {
            *sum.add(i) = fixed::add(if add { *sum.add(i) } else { 0 }, (*share.add(i)).to());
        }
    }
}
