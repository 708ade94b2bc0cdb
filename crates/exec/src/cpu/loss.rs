//! Cross-entropy, over logits in memory and fused with the output head. Losses are sums over the tokens of a sequence.

use super::call::{Accumulator, Call, Ptr};
use super::float::Float;
use super::gemm::{Matrix, Target, gemm};
use super::linear::weight_product;
use super::pointwise::checked_token;
use super::simd::{self, vectorised};

/// logits `[b, s, v]`, targets `[b, s]` → loss `[b]` (f64), lse `[b, s]`.
pub fn cross_entropy<T: Float>(call: Call) {
    let (batch, seq, v) = (call.size('b'), call.size('s'), call.size('v'));
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
                total += f64::from(row_lse - (*x.add(checked_token(*targets.at(row), v))).to());
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

/// dlogits = softmax(logits) − one-hot(target).
pub fn cross_entropy_grad<T: Float>(call: Call) {
    let (rows, v) = (call.size('b') * call.size('s'), call.size('v'));
    let (logits, targets) = (Ptr(call.input::<T>(0)), Ptr(call.input::<u32>(1)));
    let lse = Ptr(call.input::<f32>(2));
    let Some(out) = call.output::<T>(0).map(Ptr) else { return };
    call.rows(rows, |from, to| {
        for row in from..to {
            // SAFETY: rows from .. to belong to this task; targets are checked.
            unsafe {
                let target = checked_token(*targets.at(row), v);
                softmax_minus_hit(call.simd, logits.at(row * v), out.at(row * v), v, *lse.at(row), target);
            }
        }
    });
}

/// x `[b, s, k]`, w `[v, k]`, targets `[b, s]` → loss `[b]`, and where asked for dx `[b, s, k]` and dw `[v, k]`.
///
/// Scratch: a product's; for sums that are not in f32 dw once; logits of a chunk in f32 and their gradient; dx of a chunk in
/// f32; losses of a chunk.
pub fn linear_cross_entropy<T: Float>(call: Call, most_rows: usize) {
    let (batch, seq, k, v) = (call.size('b'), call.size('s'), call.size('k'), call.size('v'));
    let (x, w, targets) = (call.input::<T>(0), call.input::<T>(1), Ptr(call.input::<u32>(2)));
    let loss = call.output::<f64>(0);
    let dx = call.output::<T>(1);
    let dw = call.accumulator(2);
    let scratch: *mut f32 = call.scratch();
    // SAFETY: the device profile asks for this much.
    let (logits, dlogits, dx_sums, losses, share) = unsafe {
        let logits = scratch.byte_add(call.gemm_scratch());
        let dlogits = logits.add(most_rows * v);
        let dx_sums = dlogits.add(most_rows * v);
        let losses = dx_sums.add(most_rows * k);
        (logits, dlogits.cast::<T>(), dx_sums, losses, losses.add(most_rows.next_multiple_of(16)))
    };
    // Fixed-point sums take each sequence's share on its own; other sums do not care where a chunk ends.
    let (spans, span) = if matches!(dw, Some(Accumulator::Fixed { .. })) { (batch, seq) } else { (1, batch * seq) };
    let chunks = (0..spans).flat_map(|b| (0..span).step_by(most_rows).map(move |s| (b * span + s, span - s)));
    for (first, left) in chunks {
        let chunk = most_rows.min(left);
        // SAFETY: the chunk lies in the operands.
        unsafe {
            let x = x.add(first * k);
            let weights = Matrix::rows(w, k);
            let target = Target::F32 { ptr: logits, stride: v, add: false };
            gemm(call.pool, call.simd, (chunk, v, k), Matrix::rows(x, k), weights.transposed(), target, scratch);
            let (rows, row_losses, gradients) = (Ptr(logits), Ptr(losses), Ptr(dlogits));
            let wanted = dx.is_some() || dw.is_some();
            call.ranges(chunk, 4, |from, to| {
                for row in from..to {
                    let x = rows.at(row * v).cast_const();
                    let target = checked_token(*targets.at(first + row), v);
                    let lse = log_sum_exp(call.simd, x, v);
                    *row_losses.at(row) = lse - *x.add(target);
                    if wanted {
                        softmax_minus_hit_into(call.simd, x, gradients.at(row * v), v, lse, target);
                    }
                }
            });
            if let Some(loss) = loss {
                for row in 0..chunk {
                    let (at, start) = (loss.add((first + row) / seq), (first + row).is_multiple_of(seq));
                    *at = if start { 0.0 } else { *at } + f64::from(*losses.add(row));
                }
            }
            let dlogits = dlogits.cast_const();
            if let Some(dx) = dx {
                let target = Target::F32 { ptr: dx_sums, stride: k, add: false };
                gemm(call.pool, call.simd, (chunk, k, v), Matrix::rows(dlogits, v), weights, target, scratch);
                let (from, to) = (Ptr(dx_sums.cast_const()), Ptr(dx.add(first * k)));
                call.rows(chunk * k, |a, b| {
                    for i in a..b {
                        *to.at(i) = T::of(*from.at(i));
                    }
                });
            }
            if let Some(dw) = dw {
                weight_product(call, (1, chunk, v, k), dlogits, x, dw.adding(first > 0), scratch, share);
            }
        }
    }
}

vectorised! {
    unsafe fn log_sum_exp<T>(x: *const T, n: usize) -> f32 {
        const WIDTH: usize = 64;
        let mut max = f32::NEG_INFINITY;
        let mut block = [f32::NEG_INFINITY; WIDTH];
        for start in (0..n).step_by(WIDTH) {
            let here = WIDTH.min(n - start);
            (0..here).for_each(|i| block[i] = (*x.add(start + i)).to());
            let top = simd::max(&block[..here]);
            max = if top > max { top } else { max };
        }
        max + simd::sum(n, |i| simd::exp((*x.add(i)).to() - max)).ln()
    }
}

vectorised! {
    /// `out` may be the memory of `logits`.
    unsafe fn softmax_minus_hit<T>(logits: *const T, out: *mut T, n: usize, lse: f32, target: usize) -> () {
        let hit = simd::exp((*logits.add(target)).to() - lse) - 1.0;
        for i in 0..n {
            *out.add(i) = T::of(simd::exp((*logits.add(i)).to() - lse));
        }
        *out.add(target) = T::of(hit);
    }
}

vectorised! {
    /// From f32 logits to a gradient in the compute type.
    unsafe fn softmax_minus_hit_into<T>(logits: *const f32, out: *mut T, n: usize, lse: f32, target: usize) -> () {
        for i in 0..n {
            *out.add(i) = T::of(simd::exp(*logits.add(i) - lse));
        }
        *out.add(target) = T::of(simd::exp(*logits.add(target) - lse) - 1.0);
    }
}
