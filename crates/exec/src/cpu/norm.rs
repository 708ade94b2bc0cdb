//! RMSNorm and LayerNorm, alone and with the residual addition. Shapes: x, delta, sum, y `[rows, d]`; mean, rstd `[rows]`; w,
//! bias `[d]`. An RMS norm is a layer norm whose mean is taken for 0 and that has no bias: one kernel does both.

use super::call::{Call, Kernel, Kernels, Ptr};
use super::columns::norm_grad_weight;
use super::float::Float;
use super::head_norm;
use super::simd::{self, vectorised};
use crate::by_kind;
use lockstep_ir::op::Norm;

/// The kernels of this family.
pub fn kernels<T: Float>() -> Kernels {
    by_kind! { call: Call => Kernel;
        Norm { norm, residual, eps } => forward::<T>(call, eps, residual, norm == Norm::Layer),
        NormGrad { norm, residual } => grad::<T>(call, residual, norm == Norm::Layer),
        NormGradWeight { norm } => norm_grad_weight::<T>(call, norm == Norm::Layer),
        QkNorm { eps } => head_norm::forward::<T>(call, eps),
        QkNormGrad => head_norm::grad::<T>(call),
        QkNormGradWeight => head_norm::grad_weight::<T>(call),
    }
}

/// `add` says whether the call adds first, `layer` whether it is a layer norm.
pub fn forward<T: Float>(call: Call, eps: f32, add: bool, layer: bool) {
    let (rows, d) = (call.size("batch") * call.size("seq"), call.size("features"));
    let x = Ptr(call.input::<T>(0));
    let delta = Ptr(if add { call.input::<T>(1) } else { std::ptr::null() });
    let first = usize::from(add);
    let w = Ptr(call.input::<T>(first + 1));
    let bias = Ptr(if layer { call.input::<T>(first + 2) } else { std::ptr::null() });
    let or_null = |p: Option<*mut T>| Ptr(p.unwrap_or(std::ptr::null_mut()));
    // The sum is what is normed, so it is made even where it is unused (the op table says so).
    let sum = or_null(if add { Some(call.output(0).expect("a norm that adds makes its sum")) } else { None });
    let y = or_null(call.output(first));
    let statistics = |i: usize| Ptr(call.output::<f32>(i).unwrap_or(std::ptr::null_mut()));
    let mean = if layer { statistics(first + 1) } else { Ptr(std::ptr::null_mut()) };
    let rstd = statistics(first + 1 + usize::from(layer));
    call.rows(rows, |from, to| {
        // SAFETY: rows from .. to of every operand belong to this task.
        unsafe {
            let (x, delta, w, bias) = (x.get(), delta.get(), w.get(), bias.get());
            let (sum, y, mean, rstd) = (sum.get(), y.get(), mean.get(), rstd.get());
            norm_rows(call.simd, x, delta, w, bias, sum, y, mean, rstd, from, to, d, eps);
        }
    });
}

vectorised! {
    /// `delta` and `sum` are null where there is nothing to add; `sum` may be the memory of `x` or `delta`; `bias` is null where
    /// the norm does not look at the mean.
    pub(super) unsafe fn norm_rows<T>(
        x: *const T, delta: *const T, w: *const T, bias: *const T, sum: *mut T, y: *mut T, mean: *mut f32, rstd: *mut f32,
        from: usize, to: usize, d: usize, eps: f32,
    ) -> () {
        for row in from..to {
            let at = row * d;
            let mut normed = x.add(at);
            if !sum.is_null() {
                simd::map([x.add(at), delta.add(at)], [sum.add(at)], d, |[x, delta], _| [x + delta]);
                normed = sum.add(at).cast_const();
            }
            let centre = if bias.is_null() { 0.0 } else { simd::sum(d, |i| (*normed.add(i)).to()) / d as f32 };
            let square = |i: usize| ((*normed.add(i)).to() - centre) * ((*normed.add(i)).to() - centre);
            let scale = 1.0 / (simd::sum(d, square) / d as f32 + eps).sqrt();
            if !y.is_null() && bias.is_null() {
                simd::map([normed, w], [y.add(at)], d, |[x, w], _| [x * scale * w]);
            } else if !y.is_null() {
                simd::map([normed, w, bias], [y.add(at)], d, |[x, w, b], _| [(x - centre) * scale * w + b]);
            }
            if !mean.is_null() {
                *mean.add(row) = centre;
            }
            if !rstd.is_null() {
                *rstd.add(row) = scale;
            }
        }
    }
}

/// dx = rstd · (w·dy − x · rstd² · mean(w·dy·x)), plus `dsum` where `add` says so. For a layer norm x stands for x − mean, and
/// dx is less by its own mean.
pub fn grad<T: Float>(call: Call, add: bool, layer: bool) {
    let (rows, d) = (call.size("batch") * call.size("seq"), call.size("features"));
    let (dy, x) = (Ptr(call.input::<T>(0)), Ptr(call.input::<T>(1)));
    let (w, shift) = (Ptr(call.input::<T>(2)), usize::from(layer));
    let mean = Ptr(if layer { call.input::<f32>(3) } else { std::ptr::null() });
    let rstd = Ptr(call.input::<f32>(3 + shift));
    let dsum = Ptr(if add { call.input::<T>(4 + shift) } else { std::ptr::null() });
    let Some(dx) = call.output::<T>(0).map(Ptr) else { return };
    call.rows(rows, |from, to| {
        // SAFETY: rows from .. to of every operand belong to this task.
        unsafe {
            let (dy, x, w, mean, rstd) = (dy.get(), x.get(), w.get(), mean.get(), rstd.get());
            grad_rows(call.simd, dy, x, w, mean, rstd, dsum.get(), dx.get(), from, to, d);
        }
    });
}

vectorised! {
    /// `dsum` is null where there is nothing to add; `dx` may be the memory of `dy` or `dsum`; `mean` is null where the norm does
    /// not look at it.
    pub(super) unsafe fn grad_rows<T>(
        dy: *const T, x: *const T, w: *const T, mean: *const f32, rstd: *const f32, dsum: *const T, dx: *mut T,
        from: usize, to: usize, d: usize,
    ) -> () {
        for row in from..to {
            let at = row * d;
            let (dy, x, dx) = (dy.add(at), x.add(at), dx.add(at));
            let scale = *rstd.add(row);
            let centre = if mean.is_null() { 0.0 } else { *mean.add(row) };
            let dot = simd::sum(d, |i| (*w.add(i)).to() * (*dy.add(i)).to() * ((*x.add(i)).to() - centre));
            let shrink = dot * scale * scale * scale / d as f32;
            let shift = match mean.is_null() {
                true => 0.0,
                false => simd::sum(d, |i| (*w.add(i)).to() * (*dy.add(i)).to()) * scale / d as f32,
            };
            let own = |w: f32, dy: f32, x: f32| scale * w * dy - (x - centre) * shrink - shift;
            if dsum.is_null() {
                simd::map([w, dy, x], [dx], d, |[w, dy, x], _| [own(w, dy, x)]);
            } else {
                simd::map([w, dy, x, dsum.add(at)], [dx], d, |[w, dy, x, dsum], _| [dsum + own(w, dy, x)]);
            }
        }
    }
}
