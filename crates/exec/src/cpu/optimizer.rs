//! The update: gradient norm, clipping, AdamW.

use super::call::{At, Call, Ptr};
use super::float::{Bf16, Float};
use super::simd::vectorised;
use lockstep_ir::{DType, StepScalars, fixed};

/// Elements whose squares are summed into one f64: a fixed logical block, so that the norm does not depend on threads.
const BLOCK: usize = 4096;
/// Partial sums held at a time.
const PARTIALS: usize = 4096;
/// Scratch of `global_norm`.
pub const NORM_SCRATCH: usize = PARTIALS * 8;

/// A gradient as a function of the index.
#[inline(always)]
fn read(dtype: DType, ptr: Ptr<*const u8>, i: usize) -> f32 {
    // SAFETY: callers stay inside the operand.
    unsafe {
        match dtype {
            DType::Fixed64 => fixed::to_f32(*ptr.get().cast::<i64>().add(i)),
            DType::BF16 => (*ptr.get().cast::<Bf16>().add(i)).to(),
            _ => *ptr.get().cast::<f32>().add(i),
        }
    }
}

/// stats = [norm of the mean gradient, factor to apply]; the factor is NaN where the norm is not finite.
pub fn global_norm(call: Call) {
    let inputs = &call.bound.inputs;
    let count = inputs.len() - 1;
    // SAFETY: the scalars are the last input.
    let scalars = StepScalars::from_slice(unsafe { Ptr(call.input::<f32>(count)).slice(0, 5) });
    let partials = Ptr(call.scratch::<f64>());
    let mut total = 0.0f64;
    for (i, &At { elements, dtype, .. }) in inputs[..count].iter().enumerate() {
        let grad = Ptr(call.input::<u8>(i));
        for first in (0..elements).step_by(BLOCK * PARTIALS) {
            let here = elements.min(first + BLOCK * PARTIALS) - first;
            let blocks = here.div_ceil(BLOCK);
            call.ranges(blocks, 4, |from, to| {
                for block in from..to {
                    let start = first + block * BLOCK;
                    let n = elements.min(start + BLOCK) - start;
                    // SAFETY: inside the gradient; each block has a partial of its own.
                    unsafe {
                        *partials.at(block) = match dtype {
                            DType::F32 => squares(call.simd, grad.get().cast::<f32>().add(start), n),
                            DType::BF16 => squares(call.simd, grad.get().cast::<Bf16>().add(start), n),
                            _ => (start..start + n).map(|i| f64::from(read(dtype, grad, i)).powi(2)).sum(),
                        };
                    }
                }
            });
            // SAFETY: written above.
            total += (0..blocks).map(|b| unsafe { *partials.at(b) }).sum::<f64>();
        }
    }
    let norm = (total.sqrt() * f64::from(scalars.inverse_count)) as f32;
    let clip = if norm > scalars.clip { scalars.clip / norm } else { 1.0 };
    let factor = if norm.is_finite() { scalars.inverse_count * clip } else { f32::NAN };
    if let Some(stats) = call.output::<f32>(0) {
        // SAFETY: stats has two elements.
        unsafe {
            *stats = norm;
            *stats.add(1) = factor;
        }
    }
}

vectorised! {
    unsafe fn squares<T>(x: *const T, n: usize) -> f64 {
        let mut sums = [0.0f64; 8];
        for start in (0..n / 8 * 8).step_by(8) {
            for (lane, sum) in sums.iter_mut().enumerate() {
                let g = f64::from((*x.add(start + lane)).to());
                *sum += g * g;
            }
        }
        for i in n / 8 * 8..n {
            sums[i % 8] += f64::from((*x.add(i)).to()).powi(2);
        }
        sums.iter().sum()
    }
}

/// The numbers of one AdamW step.
#[derive(Clone, Copy)]
struct Step {
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

/// One AdamW step, in place; also writes the new weights in bf16 where asked for.
pub fn adamw(call: Call, beta1: f32, beta2: f32, eps: f32, decay: f32) {
    let At { elements, .. } = call.bound.inputs[0];
    let dtype = call.bound.inputs[1].dtype;
    let grad = Ptr(call.input::<u8>(1));
    // SAFETY: the inputs' types say so.
    let (scalars, factor) =
        unsafe { (StepScalars::from_slice(Ptr(call.input::<f32>(4)).slice(0, 5)), *call.input::<f32>(5).add(1)) };
    if factor.is_nan() {
        return;
    }
    let (Some(w), Some(m), Some(v)) = (call.output::<f32>(0), call.output::<f32>(1), call.output::<f32>(2)) else {
        return;
    };
    let (w, m, v) = (Ptr(w), Ptr(m), Ptr(v));
    let copy = call.output::<Bf16>(3).map(Ptr);
    let step = Step {
        factor,
        beta1,
        beta2,
        eps,
        keep: 1.0 - scalars.lr * decay,
        rate: scalars.lr / scalars.bias1,
        root: 1.0 / scalars.bias2.sqrt(),
    };
    call.ranges(elements, 1 << 14, |from, to| {
        let n = to - from;
        // SAFETY: elements from .. to belong to this task.
        unsafe {
            let (w, m, v) = (w.at(from), m.at(from), v.at(from));
            match dtype {
                DType::F32 => update(call.simd, grad.get().cast::<f32>().add(from), w, m, v, n, step),
                DType::BF16 => update(call.simd, grad.get().cast::<Bf16>().add(from), w, m, v, n, step),
                _ => {
                    const WIDTH: usize = 256;
                    let mut block = [0.0f32; WIDTH];
                    for start in (0..n).step_by(WIDTH) {
                        let here = WIDTH.min(n - start);
                        (0..here).for_each(|i| block[i] = read(dtype, grad, from + start + i));
                        update(call.simd, block.as_ptr(), w.add(start), m.add(start), v.add(start), here, step);
                    }
                }
            }
            if let Some(copy) = copy {
                round(call.simd, w.cast_const(), copy.at(from), n);
            }
        }
    });
}

vectorised! {
    unsafe fn update<T>(grad: *const T, w: *mut f32, m: *mut f32, v: *mut f32, n: usize, step: Step) -> () {
        let Step { factor, beta1, beta2, eps, keep, rate, root } = step;
        for i in 0..n {
            let g = (*grad.add(i)).to() * factor;
            let (w, m, v) = (w.add(i), m.add(i), v.add(i));
            *m = beta1 * *m + (1.0 - beta1) * g;
            *v = beta2 * *v + (1.0 - beta2) * g * g;
            *w = *w * keep - rate * *m / ((*v).sqrt() * root + eps);
        }
    }
}

vectorised! {
    unsafe fn round<T>(from: *const T, to: *mut Bf16, n: usize) -> () {
        for i in 0..n {
            *to.add(i) = Bf16::of((*from.add(i)).to());
        }
    }
}

/// sum = a + b, of two gradient accumulators.
pub fn add_state(call: Call) {
    let At { elements, dtype, .. } = call.bound.inputs[0];
    let (a, b) = (Ptr(call.input::<u8>(0)), Ptr(call.input::<u8>(1)));
    let Some(sum) = call.output::<u8>(0).map(Ptr) else { return };
    call.rows(elements, |from, to| {
        for i in from..to {
            // SAFETY: elements from .. to belong to this task; `sum` may be the memory of `a`.
            unsafe {
                match dtype {
                    DType::Fixed64 => {
                        let x = fixed::merge(*a.get().cast::<i64>().add(i), *b.get().cast::<i64>().add(i));
                        *sum.get().cast::<i64>().add(i) = x;
                    }
                    _ => {
                        *sum.get().cast::<f32>().add(i) = *a.get().cast::<f32>().add(i) + *b.get().cast::<f32>().add(i)
                    }
                }
            }
        }
    });
}
