//! Cross-entropy, over logits in memory and fused with the output head. Losses are sums over the tokens of a sequence.

use super::call::{Accumulator, Call, Ptr};
use super::gemm::{Matrix, gemm, scratch_bytes};
use super::linear::weight_product;
use super::pointwise::checked_token;
use super::simd;

/// logits `[b, s, v]`, targets `[b, s]` → loss `[b]` (f64), lse `[b, s]`.
pub fn cross_entropy(call: Call) {
    let (batch, seq, v) = (call.size('b'), call.size('s'), call.size('v'));
    let (logits, targets) = (Ptr(call.input::<f32>(0)), Ptr(call.input::<u32>(1)));
    let loss = call.output::<f64>(0).map(Ptr);
    let lse = call.output::<f32>(1).map(Ptr);
    call.ranges(batch, 1, |b, _| {
        let mut total = 0.0f64;
        for row in b * seq..(b + 1) * seq {
            // SAFETY: sequence b belongs to this task; targets are checked.
            unsafe {
                let x = logits.slice(row * v, v);
                let row_lse = log_sum_exp(x);
                total += f64::from(row_lse - x[checked_token(*targets.at(row), v)]);
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
pub fn cross_entropy_grad(call: Call) {
    let (rows, v) = (call.size('b') * call.size('s'), call.size('v'));
    let (logits, targets) = (Ptr(call.input::<f32>(0)), Ptr(call.input::<u32>(1)));
    let lse = Ptr(call.input::<f32>(2));
    let Some(out) = call.output::<f32>(0).map(Ptr) else { return };
    call.rows(rows, |from, to| {
        for row in from..to {
            // SAFETY: rows from .. to belong to this task; `out` may be the memory of `logits`, so both are touched element
            // by element.
            unsafe {
                let lse = *lse.at(row);
                for i in row * v..(row + 1) * v {
                    *out.at(i) = simd::exp(*logits.at(i) - lse);
                }
                *out.at(row * v + checked_token(*targets.at(row), v)) -= 1.0;
            }
        }
    });
}

/// x `[b, s, k]`, w `[v, k]`, targets `[b, s]` → loss `[b]`, and where asked for dx `[b, s, k]` and dw `[v, k]`.
pub fn linear_cross_entropy(call: Call, most_rows: usize) {
    let (batch, seq, k, v) = (call.size('b'), call.size('s'), call.size('k'), call.size('v'));
    let (x, w, targets) = (call.input::<f32>(0), call.input::<f32>(1), Ptr(call.input::<u32>(2)));
    let loss = call.output::<f64>(0);
    let dx = call.output::<f32>(1);
    let dw = call.accumulator(2);
    let threads = call.pool.threads();
    let scratch: *mut f32 = call.scratch();
    // Scratch: a product's, then for fixed-point sums dw once, then the logits of a chunk and its losses.
    let share = if matches!(dw, Some(Accumulator::Fixed { .. })) { v * k } else { 0 };
    // SAFETY: the device profile asks for this much.
    let (logits, losses) = unsafe {
        let logits = scratch.add(scratch_bytes(threads) / 4 + share);
        (logits, logits.add(most_rows * v))
    };
    let chunks = (0..batch).flat_map(|b| (0..seq).step_by(most_rows).map(move |s| (b, s)));
    for (b, s) in chunks {
        let (first, chunk) = (b * seq + s, most_rows.min(seq - s));
        // SAFETY: the chunk lies in the operands, inside one sequence.
        unsafe {
            let x = x.add(first * k);
            let weights = Matrix::rows(w, k);
            let shape = (chunk, v, k);
            gemm(call.pool, call.simd, shape, Matrix::rows(x, k), weights.transposed(), logits, v, false, scratch);
            let (rows, row_losses) = (Ptr(logits), Ptr(losses));
            let gradients = dx.is_some() || dw.is_some();
            call.ranges(chunk, 1, |row, _| {
                let x = rows.slice(row * v, v);
                let target = checked_token(*targets.at(first + row), v);
                let lse = log_sum_exp(x);
                *row_losses.at(row) = lse - x[target];
                if gradients {
                    x.iter_mut().for_each(|x| *x = simd::exp(*x - lse));
                    x[target] -= 1.0;
                }
            });
            if let Some(loss) = loss {
                let at = loss.add(b);
                let before = if s == 0 { 0.0 } else { *at };
                *at = (0..chunk).fold(before, |sum, row| sum + f64::from(*losses.add(row)));
            }
            let dlogits = logits.cast_const();
            if let Some(dx) = dx {
                let to = dx.add(first * k);
                gemm(call.pool, call.simd, (chunk, k, v), Matrix::rows(dlogits, v), weights, to, k, false, scratch);
            }
            if let Some(dw) = dw {
                let dw = match dw {
                    Accumulator::Float { sum, add } => Accumulator::Float { sum, add: add || first > 0 },
                    Accumulator::Fixed { sum, add } => Accumulator::Fixed { sum, add: add || first > 0 },
                };
                weight_product(call, (1, chunk, v, k), dlogits, x, dw, scratch);
            }
        }
    }
}

#[inline(always)]
fn log_sum_exp(x: &[f32]) -> f32 {
    let max = simd::max(x);
    max + simd::sum(x.len(), |i| simd::exp(x[i] - max)).ln()
}
