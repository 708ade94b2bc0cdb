//! The output head over a part of the vocabulary, chunk by chunk of positions.
//!
//! Shapes: x `[b, s, k]`, w `[v, k]` (this rank's entries, padding after them), logits `[c, v]` in f32, statistics `[a, c, 3]`: for
//! each part of the vocabulary and position the largest logit, the sum of exponentials below it, and the target's logit (−∞
//! where the target is in another part).

use super::call::{Call, Ptr};
use super::float::Float;
use super::gemm::{Matrix, Target, gemm};
use super::linear::weight_product;
use super::loss::maximum_and_sum;
use super::simd::{self, vectorised};
use lockstep_ir::op::{IGNORED_TARGET, Rows};

/// Numbers of a position and part.
const STATISTICS: usize = 3;

/// Logits of a chunk and their statistics.
pub fn logits<T: Float>(call: Call, rows: Rows) {
    let (k, v) = (call.size("inputs"), call.size("vocab"));
    let (x, w, targets) = (call.input::<T>(0), call.input::<T>(1), Ptr(call.input::<u32>(2)));
    let (Some(logits), Some(statistics)) = (call.output::<f32>(0), call.output::<f32>(1)) else { return };
    let part = call.vocab_part();
    // SAFETY: the chunk lies in the operands; tasks own whole rows.
    unsafe {
        let target = Target::F32 { ptr: logits, stride: v, add: false };
        let (a, b) = (Matrix::rows(x.add(rows.first * k), k), Matrix::rows(w, k).transposed());
        gemm(call.pool, call.simd, (rows.count, v, k), a, b, target, call.scratch());
        let (logits, statistics) = (Ptr(logits), Ptr(statistics));
        call.ranges(rows.count, 4, |from, to| {
            for row in from..to {
                let x = logits.at(row * v);
                let (max, sum) = maximum_and_sum(call.simd, x.cast_const(), part.entries);
                (part.entries..v).for_each(|i| *x.add(i) = f32::NEG_INFINITY);
                let hit = part.find(*targets.at(rows.first + row));
                let numbers = [max, sum, hit.map_or(f32::NEG_INFINITY, |i| *x.add(i))];
                statistics.slice(row * STATISTICS, STATISTICS).copy_from_slice(&numbers);
            }
        });
    }
}

/// The log-sum-exp of a position over all parts of the vocabulary, and its target's logit.
///
/// # Safety
/// `statistics` holds `parts` × `rows` × 3 numbers.
unsafe fn combine(statistics: Ptr<*const f32>, parts: usize, rows: usize, row: usize) -> (f32, f32) {
    let (mut max, mut target) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    // SAFETY: the caller vouches.
    let part = |a: usize| unsafe { statistics.slice((a * rows + row) * STATISTICS, STATISTICS) };
    for a in 0..parts {
        // A NaN stays: it is in the sum.
        max = if part(a)[0] > max { part(a)[0] } else { max };
        target = if part(a)[2] > target { part(a)[2] } else { target };
    }
    let empty = |a: usize| part(a)[1] == 0.0;
    let sum: f32 = (0..parts).filter(|a| !empty(*a)).map(|a| part(a)[1] * simd::exp(part(a)[0] - max)).sum();
    (max + sum.ln(), target)
}

/// Losses from the statistics of all chunks, in order of positions.
pub fn loss(call: Call) {
    let (batch, seq, parts) = (call.size("batch"), call.size("seq"), call.size("parts"));
    let Some(loss) = call.output::<f64>(0) else { return };
    let chunks = call.bound.inputs.len() - 1;
    let targets = Ptr(call.input::<u32>(chunks));
    let mut position = 0;
    for c in 0..chunks {
        let rows = call.bound.inputs[c].elements / (parts * STATISTICS);
        let statistics = Ptr(call.input::<f32>(c));
        for row in 0..rows {
            // SAFETY: chunks together have the positions of all sequences.
            unsafe {
                let (lse, target) = combine(statistics, parts, rows, row);
                let at = loss.add(position / seq);
                let loss = if *targets.at(position) == IGNORED_TARGET { 0.0 } else { f64::from(lse - target) };
                *at = if position.is_multiple_of(seq) { 0.0 } else { *at } + loss;
            }
            position += 1;
        }
    }
    debug_assert_eq!(position, batch * seq);
}

/// Of each position of a chunk, 1 where this part has a token that is taken before the target.
pub fn misses(call: Call, rows: Rows) {
    let (v, parts) = (call.size("vocab"), call.size("parts"));
    let (logits, statistics) = (Ptr(call.input::<f32>(0)), Ptr(call.input::<f32>(1)));
    let (targets, part) = (Ptr(call.input::<u32>(2)), call.vocab_part());
    let Some(misses) = call.output::<f32>(0).map(Ptr) else { return };
    call.ranges(rows.count, 4, |from, to| {
        for row in from..to {
            // SAFETY: the chunk lies in the operands; tasks own whole rows.
            unsafe {
                let target = *targets.at(rows.first + row);
                let (_, hit) = combine(statistics, parts, rows.count, row);
                let logits = logits.slice(row * v, part.entries);
                // Tokens of this part that come before the target.
                let before = (target as usize).saturating_sub(part.first).min(part.entries);
                let beaten = target != IGNORED_TARGET && is_beaten(logits, hit, before);
                *misses.at(row) = f32::from(u8::from(beaten));
            }
        }
    });
}

/// Whether greedy decoding takes one of these logits before one of this size, which has this many of them before it.
pub(super) fn is_beaten(logits: &[f32], hit: f32, before: usize) -> bool {
    let (before, behind) = logits.split_at(before);
    before.iter().any(|logit| *logit >= hit) || behind.iter().any(|logit| *logit > hit)
}

/// This part's share of dx `[c, k]`, and dw.
///
/// Scratch: a matmul's; dlogits in the compute type; dx in f32; for sums that are not in f32 dw once.
pub fn grad<T: Float>(call: Call, rows: Rows) {
    let (k, v, parts) = (call.size("inputs"), call.size("vocab"), call.size("parts"));
    let (logits, statistics) = (Ptr(call.input::<f32>(0)), Ptr(call.input::<f32>(1)));
    let (x, w, targets) = (call.input::<T>(2), call.input::<T>(3), Ptr(call.input::<u32>(4)));
    let part = call.vocab_part();
    let scratch: *mut f32 = call.scratch();
    let (count, seed) = (rows.count, call.seed(5));
    // SAFETY: the device profile asks for this much scratch; the chunk lies in the operands; tasks own whole rows.
    unsafe {
        let sums = scratch.byte_add(call.gemm_scratch());
        let dlogits = sums.add(count * k).cast::<T>();
        let share = sums.add(count * k + count * v);
        let out = Ptr(dlogits);
        call.ranges(count, 4, |from, to| {
            for row in from..to {
                let (lse, _) = combine(statistics, parts, count, row);
                let target = *targets.at(rows.first + row);
                let (hit, seed) = (part.find(target), if target == IGNORED_TARGET { 0.0 } else { seed });
                softmax_minus_hit(call.simd, logits.at(row * v), out.at(row * v), v, lse, hit, seed);
            }
        });
        let dlogits = dlogits.cast_const();
        if let Some(dx) = call.output::<T>(0) {
            let target = Target::F32 { ptr: sums, stride: k, add: false };
            gemm(call.pool, call.simd, (count, k, v), Matrix::rows(dlogits, v), Matrix::rows(w, k), target, scratch);
            let (from, to) = (Ptr(sums.cast_const()), Ptr(dx));
            call.rows(count * k, |a, b| (a..b).for_each(|i| *to.at(i) = T::of(*from.at(i))));
        }
        if let Some(dw) = call.accumulator(1) {
            weight_product(call, (1, count, v, k), dlogits, x.add(rows.first * k), dw, scratch, share);
        }
    }
}

vectorised! {
    unsafe fn softmax_minus_hit<T>(
        logits: *const f32, out: *mut T, n: usize, lse: f32, hit: Option<usize>, seed: f32,
    ) -> () {
        for i in 0..n {
            *out.add(i) = T::of(simd::exp(*logits.add(i) - lse) * seed);
        }
        if let Some(hit) = hit {
            *out.add(hit) = T::of((simd::exp(*logits.add(hit) - lse) - 1.0) * seed);
        }
    }
}

/// Chunks of rows `[c, k]`, one after the other.
pub fn join_rows<T: Float>(call: Call) {
    let Some(joined) = call.output::<T>(0) else { return };
    let mut done = 0;
    for (i, part) in call.bound.inputs[..call.bound.inputs.len() - 1].iter().enumerate() {
        // SAFETY: chunks together are as large as the output.
        unsafe { std::ptr::copy_nonoverlapping(call.input::<T>(i), joined.add(done), part.elements) };
        done += part.elements;
    }
}
