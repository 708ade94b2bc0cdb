//! RMSNorm, alone and with the residual addition. Shapes: x, delta, sum, y `[rows, d]`; rstd `[rows]`; w `[d]`.

use super::call::{Call, Ptr};
use super::float::Float;
use super::simd::{self, vectorised};

/// `add` says whether the call is `AddRmsNorm`.
pub fn forward<T: Float>(call: Call, eps: f32, add: bool) {
    let (rows, d) = (call.size('b') * call.size('s'), call.size('d'));
    let x = Ptr(call.input::<T>(0));
    let delta = Ptr(if add { call.input::<T>(1) } else { std::ptr::null() });
    let w = Ptr(call.input::<T>(if add { 2 } else { 1 }));
    let first = usize::from(add);
    let or_null = |p: Option<*mut T>| Ptr(p.unwrap_or(std::ptr::null_mut()));
    // The sum is what is normed, so it is made whether anybody else reads it or not (the op table says so).
    let sum = or_null(if add { Some(call.output(0).expect("add_rms_norm makes its sum")) } else { None });
    let y = or_null(call.output(first));
    let rstd = Ptr(call.output::<f32>(first + 1).unwrap_or(std::ptr::null_mut()));
    call.rows(rows, |from, to| {
        // SAFETY: rows from .. to of every operand belong to this task.
        unsafe {
            let (x, delta, w, sum) = (x.get(), delta.get(), w.get(), sum.get());
            norm_rows(call.simd, x, delta, w, sum, y.get(), rstd.get(), from, to, d, eps);
        }
    });
}

vectorised! {
    /// `delta` and `sum` are null where there is nothing to add; `sum` may be the memory of `x` or `delta`.
    unsafe fn norm_rows<T>(
        x: *const T, delta: *const T, w: *const T, sum: *mut T, y: *mut T, rstd: *mut f32,
        from: usize, to: usize, d: usize, eps: f32,
    ) -> () {
        for row in from..to {
            let at = row * d;
            let mut normed = x.add(at);
            if !sum.is_null() {
                simd::map([x.add(at), delta.add(at)], [sum.add(at)], d, |[x, delta], _| [x + delta]);
                normed = sum.add(at).cast_const();
            }
            let mean = simd::sum(d, |i| (*normed.add(i)).to() * (*normed.add(i)).to()) / d as f32;
            let scale = 1.0 / (mean + eps).sqrt();
            if !y.is_null() {
                simd::map([normed, w], [y.add(at)], d, |[x, w], _| [x * scale * w]);
            }
            if !rstd.is_null() {
                *rstd.add(row) = scale;
            }
        }
    }
}

/// dx = rstd · (w·dy − x · rstd² · mean(w·dy·x)), plus `dsum` where `add` says so.
pub fn grad<T: Float>(call: Call, add: bool) {
    let (rows, d) = (call.size('b') * call.size('s'), call.size('d'));
    let (dy, x) = (Ptr(call.input::<T>(0)), Ptr(call.input::<T>(1)));
    let (w, rstd) = (Ptr(call.input::<T>(2)), Ptr(call.input::<f32>(3)));
    let dsum = Ptr(if add { call.input::<T>(4) } else { std::ptr::null() });
    let Some(dx) = call.output::<T>(0).map(Ptr) else { return };
    call.rows(rows, |from, to| {
        // SAFETY: rows from .. to of every operand belong to this task.
        unsafe {
            let (dy, x, w, rstd) = (dy.get(), x.get(), w.get(), rstd.get());
            grad_rows(call.simd, dy, x, w, rstd, dsum.get(), dx.get(), from, to, d);
        }
    });
}

vectorised! {
    /// `dsum` is null where there is nothing to add; `dx` may be the memory of `dy` or `dsum`.
    unsafe fn grad_rows<T>(
        dy: *const T, x: *const T, w: *const T, rstd: *const f32, dsum: *const T, dx: *mut T,
        from: usize, to: usize, d: usize,
    ) -> () {
        for row in from..to {
            let at = row * d;
            let (dy, x, dx) = (dy.add(at), x.add(at), dx.add(at));
            let scale = *rstd.add(row);
            let dot = simd::sum(d, |i| (*w.add(i)).to() * (*dy.add(i)).to() * (*x.add(i)).to());
            let shrink = dot * scale * scale * scale / d as f32;
            let own = |w: f32, dy: f32, x: f32| scale * w * dy - x * shrink;
            if dsum.is_null() {
                simd::map([w, dy, x], [dx], d, |[w, dy, x], _| [own(w, dy, x)]);
            } else {
                simd::map([w, dy, x, dsum.add(at)], [dx], d, |[w, dy, x, dsum], _| [dsum + own(w, dy, x)]);
            }
        }
    }
}
