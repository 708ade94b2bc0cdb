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
        Norm { norm, residual, eps } => forward::<T>(call, eps, residual, norm),
        NormGrad { norm, residual } => grad::<T>(call, residual, norm),
        NormGradWeight { norm } => norm_grad_weight::<T>(call, norm == Norm::Layer),
        RowDot { plus_one } => row_dot::<T>(call, more(plus_one)),
        NormBy { plus_one, eps, width } => forward_by::<T>(call, eps, width as f32, more(plus_one)),
        NormByGrad { plus_one, width } => grad_by::<T>(call, width as f32, more(plus_one)),
        QkNorm { plus_one, eps } => head_norm::forward::<T>(call, eps, plus_one),
        QkNormGrad { plus_one } => head_norm::grad::<T>(call, plus_one),
        QkNormGradWeight => head_norm::grad_weight::<T>(call),
    }
}

/// What a norm adds to its weight.
pub(super) fn more(plus_one: bool) -> f32 {
    if plus_one { 1.0 } else { 0.0 }
}

/// `add` says whether the call adds first.
pub fn forward<T: Float>(call: Call, eps: f32, add: bool, norm: Norm) {
    let (layer, more) = (norm == Norm::Layer, more(norm == Norm::RmsPlusOne));
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
            norm_rows(call.simd, x, delta, w, bias, sum, y, mean, rstd, from, to, d, eps, more);
        }
    });
}

vectorised! {
    /// `delta` and `sum` are null where there is nothing to add; `sum` may be the memory of `x` or `delta`; `bias` is null where
    /// the norm does not look at the mean. `more` is added to the weight of one that does not.
    pub(super) unsafe fn norm_rows<T>(
        x: *const T, delta: *const T, w: *const T, bias: *const T, sum: *mut T, y: *mut T, mean: *mut f32, rstd: *mut f32,
        from: usize, to: usize, d: usize, eps: f32, more: f32,
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
                simd::map([normed, w], [y.add(at)], d, |[x, w], _| [x * scale * (more + w)]);
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

/// dot = Σ a · b, or Σ a · b · (w + more), of every row.
pub fn row_dot<T: Float>(call: Call, more: f32) {
    let (rows, d) = (call.size("batch") * call.size("seq"), call.size("features"));
    let (a, b) = (Ptr(call.input::<T>(0)), Ptr(call.input::<T>(1)));
    let w = Ptr(if call.bound.inputs.len() > 2 { call.input::<T>(2) } else { std::ptr::null() });
    let Some(dot) = call.output::<f32>(0).map(Ptr) else { return };
    call.rows(rows, |from, to| {
        for row in from..to {
            // SAFETY: rows from .. to belong to this task.
            unsafe { *dot.at(row) = dot_of_row(call.simd, a.at(row * d), b.at(row * d), w.get(), d, more) };
        }
    });
}

vectorised! {
    /// `w` is null where there is none.
    unsafe fn dot_of_row<T>(a: *const T, b: *const T, w: *const T, d: usize, more: f32) -> f32 {
        match w.is_null() {
            true => simd::sum(d, |i| (*a.add(i)).to() * (*b.add(i)).to()),
            false => simd::sum(d, |i| (more + (*w.add(i)).to()) * (*a.add(i)).to() * (*b.add(i)).to()),
        }
    }
}

/// y = x / rms · (w + more), by the sum of squares of `width` features.
pub fn forward_by<T: Float>(call: Call, eps: f32, width: f32, more: f32) {
    let (rows, d) = (call.size("batch") * call.size("seq"), call.size("features"));
    let (x, w, squares) = (Ptr(call.input::<T>(0)), Ptr(call.input::<T>(1)), Ptr(call.input::<f32>(2)));
    let y = Ptr(call.output::<T>(0).unwrap_or(std::ptr::null_mut()));
    let rstd = Ptr(call.output::<f32>(1).unwrap_or(std::ptr::null_mut()));
    call.rows(rows, |from, to| {
        for row in from..to {
            // SAFETY: rows from .. to belong to this task.
            unsafe {
                let scale = 1.0 / (*squares.at(row) / width + eps).sqrt();
                if !y.get().is_null() {
                    scale_row(call.simd, x.at(row * d), w.get(), y.at(row * d), d, scale, more);
                }
                if !rstd.get().is_null() {
                    *rstd.at(row) = scale;
                }
            }
        }
    });
}

vectorised! {
    unsafe fn scale_row<T>(x: *const T, w: *const T, y: *mut T, d: usize, scale: f32, more: f32) -> () {
        simd::map([x, w], [y], d, |[x, w], _| [x * scale * (more + w)]);
    }
}

/// The gradient of its input, by the sum of dy · w · x over `width` features.
pub fn grad_by<T: Float>(call: Call, width: f32, more: f32) {
    let (rows, d) = (call.size("batch") * call.size("seq"), call.size("features"));
    let (dy, x, w) = (Ptr(call.input::<T>(0)), Ptr(call.input::<T>(1)), Ptr(call.input::<T>(2)));
    let (rstd, dot) = (Ptr(call.input::<f32>(3)), Ptr(call.input::<f32>(4)));
    let Some(dx) = call.output::<T>(0).map(Ptr) else { return };
    call.rows(rows, |from, to| {
        for row in from..to {
            // SAFETY: rows from .. to belong to this task.
            unsafe {
                let scale = *rstd.at(row);
                let shrink = *dot.at(row) * scale * scale * scale / width;
                let (dy, x, dx) = (dy.at(row * d), x.at(row * d), dx.at(row * d));
                grad_row_by(call.simd, dy, x, w.get(), dx, d, scale, shrink, more);
            }
        }
    });
}

vectorised! {
    /// `dx` may be the memory of `dy`.
    unsafe fn grad_row_by<T>(
        dy: *const T, x: *const T, w: *const T, dx: *mut T, d: usize, scale: f32, shrink: f32, more: f32,
    ) -> () {
        simd::map([w, dy, x], [dx], d, |[w, dy, x], _| [scale * (more + w) * dy - x * shrink]);
    }
}

/// dx = rstd · (w·dy − x · rstd² · mean(w·dy·x)), plus `dsum` where `add` says so. For a layer norm x stands for x − mean, and
/// dx is less by its own mean.
pub fn grad<T: Float>(call: Call, add: bool, norm: Norm) {
    let (layer, more) = (norm == Norm::Layer, more(norm == Norm::RmsPlusOne));
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
            grad_rows(call.simd, dy, x, w, mean, rstd, dsum.get(), dx.get(), from, to, d, more);
        }
    });
}

vectorised! {
    /// `dsum` is null where there is nothing to add; `dx` may be the memory of `dy` or `dsum`; `mean` is null where the norm does
    /// not look at it; `more` is added to the weight.
    pub(super) unsafe fn grad_rows<T>(
        dy: *const T, x: *const T, w: *const T, mean: *const f32, rstd: *const f32, dsum: *const T, dx: *mut T,
        from: usize, to: usize, d: usize, more: f32,
    ) -> () {
        for row in from..to {
            let at = row * d;
            let (dy, x, dx) = (dy.add(at), x.add(at), dx.add(at));
            let scale = *rstd.add(row);
            let centre = if mean.is_null() { 0.0 } else { *mean.add(row) };
            let dot = simd::sum(d, |i| (more + (*w.add(i)).to()) * (*dy.add(i)).to() * ((*x.add(i)).to() - centre));
            let shrink = dot * scale * scale * scale / d as f32;
            let shift = match mean.is_null() {
                true => 0.0,
                false => simd::sum(d, |i| (more + (*w.add(i)).to()) * (*dy.add(i)).to()) * scale / d as f32,
            };
            let own = |w: f32, dy: f32, x: f32| scale * (more + w) * dy - (x - centre) * shrink - shift;
            if dsum.is_null() {
                simd::map([w, dy, x], [dx], d, |[w, dy, x], _| [own(w, dy, x)]);
            } else {
                simd::map([w, dy, x, dsum.add(at)], [dx], d, |[w, dy, x, dsum], _| [dsum + own(w, dy, x)]);
            }
        }
    }
}
