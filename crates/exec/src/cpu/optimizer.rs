//! Update rules of optimizers. All compute in f32, in place, whatever weights and moments are kept in (`kept.rs`), and round a copy of the new
//! weights where asked for. Where the factor on gradients is NaN nothing moves.

use super::call::{At, Call, Kernel, Kernels, Ptr};
use super::float::{Bf16, F16};
use super::kept::{GRAIN, Grad, Range, update};
use super::orthogonal::orthogonalise;
use super::simd::vectorised;
use crate::by_kind;
use lockstep_ir::DType;

/// The kernels of this family.
pub fn kernels() -> Kernels {
    by_kind! { call: Call => Kernel;
        AdamW { beta1, beta2, eps, decay, lr_scale } => adamw(call, [beta1, beta2, eps], decay, lr_scale),
        Lion { beta1, beta2, decay, lr_scale } => lion(call, [beta1, beta2], decay, lr_scale),
        Sgd { momentum, decay, lr_scale } => sgd(call, momentum, decay, lr_scale),
        Momentum { momentum: beta } => momentum(call, beta),
        Orthogonalise => orthogonalise(call),
        Descend { decay, lr_scale } => descend(call, decay, lr_scale),
    }
}

/// The numbers of one AdamW step.
#[derive(Clone, Copy)]
struct AdamW {
    factor: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    /// 1 − lr · decay.
    keep: f32,
    /// lr ÷ (1 − β₁ᵗ).
    rate: f32,
    /// 1 ÷ √(1 − β₂ᵗ).
    root: f32,
}

/// One AdamW step.
pub fn adamw(call: Call, [beta1, beta2, eps]: [f32; 3], decay: f32, lr_scale: f32) {
    let (scalars, factor) = (call.scalars(4), factor(call, 5));
    if factor.is_nan() {
        return copy(call, 3);
    }
    let lr = scalars.lr * lr_scale;
    let (keep, rate, root) = (1.0 - lr * decay, lr / scalars.bias1, 1.0 / scalars.bias2.sqrt());
    let step = AdamW { factor, beta1, beta2, eps, keep, rate, root };
    // SAFETY: `update` gives ranges of the operands, each once.
    update(call, 1, [0, 1, 2], |grad, [w, m, v], Range { n, .. }| unsafe {
        match grad {
            Grad::F32(grad) => adamw_range(call.simd, grad, w, m, v, n, step),
            Grad::Bf16(grad) => adamw_range(call.simd, grad, w, m, v, n, step),
        }
    });
    copy(call, 3);
}

vectorised! {
    unsafe fn adamw_range<T>(grad: *const T, w: *mut f32, m: *mut f32, v: *mut f32, n: usize, step: AdamW) -> () {
        let AdamW { factor, beta1, beta2, eps, keep, rate, root } = step;
        for i in 0..n {
            let g = (*grad.add(i)).to() * factor;
            let (w, m, v) = (w.add(i), m.add(i), v.add(i));
            *m = beta1 * *m + (1.0 - beta1) * g;
            *v = beta2 * *v + (1.0 - beta2) * g * g;
            *w = *w * keep - rate * *m / ((*v).sqrt() * root + eps);
        }
    }
}

/// The numbers of a step by one moment.
#[derive(Clone, Copy)]
struct ByMoment {
    factor: f32,
    /// Share of the moment in the update, for Lion.
    mix: f32,
    /// Decay of the moment.
    beta: f32,
    /// 1 − lr · decay.
    keep: f32,
    lr: f32,
}

/// One Lion step.
pub fn lion(call: Call, [beta1, beta2]: [f32; 2], decay: f32, lr_scale: f32) {
    by_moment(call, beta1, beta2, decay, lr_scale, true);
}

/// One step of gradient descent with momentum.
pub fn sgd(call: Call, momentum: f32, decay: f32, lr_scale: f32) {
    by_moment(call, 0.0, momentum, decay, lr_scale, false);
}

fn by_moment(call: Call, mix: f32, beta: f32, decay: f32, lr_scale: f32, signs: bool) {
    let (lr, factor) = (call.scalars(3).lr * lr_scale, factor(call, 4));
    if factor.is_nan() {
        return copy(call, 2);
    }
    let step = ByMoment { factor, mix, beta, keep: 1.0 - lr * decay, lr };
    // SAFETY: `update` gives ranges of the operands, each once.
    update(call, 1, [0, 1], |grad, [w, m], Range { n, .. }| unsafe {
        match (grad, signs) {
            (Grad::F32(grad), true) => lion_range(call.simd, grad, w, m, n, step),
            (Grad::Bf16(grad), true) => lion_range(call.simd, grad, w, m, n, step),
            (Grad::F32(grad), false) => sgd_range(call.simd, grad, w, m, n, step),
            (Grad::Bf16(grad), false) => sgd_range(call.simd, grad, w, m, n, step),
        }
    });
    copy(call, 2);
}

vectorised! {
    unsafe fn lion_range<T>(grad: *const T, w: *mut f32, m: *mut f32, n: usize, step: ByMoment) -> () {
        let ByMoment { factor, mix, beta, keep, lr } = step;
        for i in 0..n {
            let g = (*grad.add(i)).to() * factor;
            let (w, m) = (w.add(i), m.add(i));
            let mixed = mix * *m + (1.0 - mix) * g;
            // Zero has no sign here.
            let sign = if mixed == 0.0 { 0.0 } else { 1.0f32.copysign(mixed) };
            *m = beta * *m + (1.0 - beta) * g;
            *w = *w * keep - lr * sign;
        }
    }
}

vectorised! {
    unsafe fn sgd_range<T>(grad: *const T, w: *mut f32, m: *mut f32, n: usize, step: ByMoment) -> () {
        let ByMoment { factor, beta, keep, lr, .. } = step;
        for i in 0..n {
            let (w, m) = (w.add(i), m.add(i));
            *m = beta * *m + (*grad.add(i)).to() * factor;
            *w = *w * keep - lr * *m;
        }
    }
}

/// The momentum of gradients, and the mixture of both that looks one step ahead.
pub fn momentum(call: Call, beta: f32) {
    let factor = factor(call, 2);
    let At { elements, .. } = call.bound.inputs[0];
    let Some(ahead) = call.output::<f32>(1) else { return };
    let ahead = Ptr(ahead);
    if factor.is_nan() {
        // SAFETY: ranges of the output, each once.
        call.rows(elements, |from, to| unsafe { ahead.slice(from, to - from).fill(0.0) });
        return;
    }
    // SAFETY: `update` gives ranges of the operands, each once.
    update(call, 0, [0], |grad, [m], Range { from, n }| unsafe {
        match grad {
            Grad::F32(grad) => momentum_range(call.simd, grad, m, ahead.at(from), n, factor, beta),
            Grad::Bf16(grad) => momentum_range(call.simd, grad, m, ahead.at(from), n, factor, beta),
        }
    });
}

vectorised! {
    unsafe fn momentum_range<T>(
        grad: *const T, m: *mut f32, update: *mut f32, n: usize, factor: f32, beta: f32,
    ) -> () {
        for i in 0..n {
            let g = (*grad.add(i)).to() * factor;
            let m = m.add(i);
            *m = beta * *m + (1.0 - beta) * g;
            *update.add(i) = beta * *m + (1.0 - beta) * g;
        }
    }
}

/// w = w − lr · (decay · w + update).
pub fn descend(call: Call, decay: f32, lr_scale: f32) {
    let (lr, factor) = (call.scalars(2).lr * lr_scale, factor(call, 3));
    if factor.is_nan() {
        return copy(call, 1);
    }
    // SAFETY: `update` gives ranges of the operands, each once.
    update(call, 1, [0], |direction, [w], Range { n, .. }| unsafe {
        match direction {
            Grad::F32(direction) => descend_range(call.simd, direction, w, n, 1.0 - lr * decay, lr),
            Grad::Bf16(direction) => descend_range(call.simd, direction, w, n, 1.0 - lr * decay, lr),
        }
    });
    copy(call, 1);
}

vectorised! {
    unsafe fn descend_range<T>(update: *const T, w: *mut f32, n: usize, keep: f32, lr: f32) -> () {
        for i in 0..n {
            *w.add(i) = *w.add(i) * keep - lr * (*update.add(i)).to();
        }
    }
}

/// The factor on gradients, out of the statistics of a step.
fn factor(call: Call, stats: usize) -> f32 {
    // SAFETY: the statistics have two elements.
    unsafe { *call.input::<f32>(stats).add(1) }
}

/// Rounds the weights, output 0, to output `to` where it is used; where nothing moves too, as a step may have used the memory of that.
fn copy(call: Call, to: usize) {
    let At { elements, .. } = call.bound.inputs[0];
    let (Some(w), Some(copy), Some(at)) = (call.output::<f32>(0), call.output::<u16>(to), call.bound.outputs[to])
    else {
        return;
    };
    if call.bound.outputs[0].is_some_and(|at| at.dtype != DType::F32) {
        // Weights that are their own master weights have no copy.
        return;
    }
    let (w, copy) = (Ptr(w.cast_const()), Ptr(copy));
    // SAFETY: ranges of the operands, each once; both types are as large as their bits.
    call.ranges(elements, GRAIN, |from, to| unsafe {
        match at.dtype {
            DType::F16 => round(call.simd, w.at(from), copy.at(from).cast::<F16>(), to - from),
            DType::BF16 => round(call.simd, w.at(from), copy.at(from).cast::<Bf16>(), to - from),
            other => unreachable!("{other} is not rounded to"),
        }
    });
}

vectorised! {
    unsafe fn round<T>(from: *const f32, to: *mut T, n: usize) -> () {
        for i in 0..n {
            *to.add(i) = T::of(*from.add(i));
        }
    }
}
