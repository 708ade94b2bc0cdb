//! Cross-entropy over logits in memory. Losses are sums over the tokens of a sequence.

use super::call::{Call, Ptr};
use super::float::Float;
use super::pointwise::checked_target;
use super::simd::{self, Simd, vectorised};

/// logits `[b, s, v]`, targets `[b, s]` → loss `[b]` (f64), lse `[b, s]`.
pub fn cross_entropy<T: Float>(call: Call) {
    let (batch, seq, v) = (call.size("batch"), call.size("seq"), call.size("vocab"));
    let (logits, targets) = (Ptr(call.input::<T>(0)), Ptr(call.input::<u32>(1)));
    let loss = call.output::<f64>(0).map(Ptr);
    let lse = call.output::<f32>(1).map(Ptr);
    call.ranges(batch, 1, |b, _| {
        let mut total = 0.0f64;
        for row in b * seq..(b + 1) * seq {
            // SAFETY: sequence b belongs to this task; targets are checked.
            unsafe {
                let x = logits.at(row * v);
                let row_lse = log_sum_exp(call.simd, x, v);
                if let Some(target) = checked_target(*targets.at(row), v) {
                    total += f64::from(row_lse - (*x.add(target)).to());
                }
                if let Some(lse) = lse {
                    *lse.at(row) = row_lse;
                }
            }
        }
        if let Some(loss) = loss {
            // SAFETY: sequence b belongs to this task.
            unsafe { *loss.at(b) = total };
        }
    });
}

/// dlogits = weight · (softmax(logits) − one-hot(target)); 0 where the target is ignored.
pub fn cross_entropy_grad<T: Float>(call: Call, weight: f32) {
    let (rows, v) = (call.size("batch") * call.size("seq"), call.size("vocab"));
    let (logits, targets) = (Ptr(call.input::<T>(0)), Ptr(call.input::<u32>(1)));
    let lse = Ptr(call.input::<f32>(2));
    let Some(out) = call.output::<T>(0).map(Ptr) else { return };
    call.rows(rows, |from, to| {
        for row in from..to {
            // SAFETY: rows from .. to belong to this task; targets are checked.
            unsafe {
                match checked_target(*targets.at(row), v) {
                    Some(target) => {
                        let (x, dx) = (logits.at(row * v), out.at(row * v));
                        softmax_minus_hit(call.simd, x, dx, v, *lse.at(row), target, weight);
                    }
                    None => out.slice(row * v, v).fill(T::of(0.0)),
                }
            }
        }
    });
}

unsafe fn log_sum_exp<T: Float>(unit: Simd, x: *const T, n: usize) -> f32 {
    // SAFETY: the caller vouches for n elements.
    let (max, sum) = unsafe { maximum_and_sum(unit, x, n) };
    max + sum.ln()
}

vectorised! {
    /// The largest of `n` numbers, and the sum of their exponentials below it.
    pub(super) unsafe fn maximum_and_sum<T>(x: *const T, n: usize) -> (f32, f32) {
        const WIDTH: usize = 64;
        let mut max = f32::NEG_INFINITY;
        let mut block = [f32::NEG_INFINITY; WIDTH];
        for start in (0..n).step_by(WIDTH) {
            let here = WIDTH.min(n - start);
            (0..here).for_each(|i| block[i] = (*x.add(start + i)).to());
            let top = simd::max(&block[..here]);
            max = if top > max { top } else { max };
        }
        (max, simd::sum(n, |i| simd::exp((*x.add(i)).to() - max)))
    }
}

vectorised! {
    /// `out` may be the memory of `logits`.
    unsafe fn softmax_minus_hit<T>(logits: *const T, out: *mut T, n: usize, lse: f32, target: usize, weight: f32) -> () {
        let hit = weight * (simd::exp((*logits.add(target)).to() - lse) - 1.0);
        for i in 0..n {
            *out.add(i) = T::of(weight * simd::exp((*logits.add(i)).to() - lse));
        }
        *out.add(target) = T::of(hit);
    }
}
