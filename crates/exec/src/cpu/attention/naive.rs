//! Attention whose weights exist as a matrix: p `[b, q, s, t]`, a matmul per head. Slow and large on purpose: it shows what the
//! tiled kernels save.

use super::super::call::{Call, Ptr};
use super::super::float::Float;
use super::super::gemm::{Matrix, Target, gemm};
use super::super::simd::{self, vectorised};
use super::forward::round_rows;
use super::{HeadShape, Mask, Pieces};

/// Scratch bytes for pieces that end between multiples of 64.
pub const SLACK: usize = 128;

/// p from qkv; the second input, if given, says where documents start.
pub fn scores<T: Float>(call: Call, window: Option<usize>) {
    let shape = HeadShape::of(&call);
    let HeadShape { seq, e, scale, .. } = shape;
    let starts = Ptr(call.given::<u32>(1).unwrap_or(std::ptr::null()));
    let qkv = call.input::<T>(0);
    let Some(p) = call.output::<T>(0).map(Ptr) else { return };
    let mut pieces = Pieces { base: call.scratch(), used: 0 };
    let raw: *mut f32 = pieces.take(seq * seq * 4);
    let (raw, gemm_scratch) = (Ptr(raw), pieces.take(0));
    for (b, h) in heads(&call, shape) {
        // SAFETY: sizes come from the operands' types; the verifier keeps outputs and scratch apart from inputs. Rows from .. to
        // belong to one task.
        unsafe {
            let query = Matrix::rows(qkv.add(shape.q(b, 0, h)), shape.width);
            let key = Matrix::rows(qkv.add(shape.k(b, 0, h / shape.group)), shape.width).transposed();
            let target = Target::F32 { ptr: raw.get(), stride: seq, add: false };
            gemm(call.pool, call.simd, (seq, seq, e), query, key, target, gemm_scratch);
            let mask = Ptr(Mask::of(starts.get(), b, seq, window));
            call.rows(seq, |from, to| {
                for s in from..to {
                    let (first, row) = (mask.get().first(s, s), ((b * shape.heads + h) * seq + s) * seq);
                    softmax_row(call.simd, p.at(row), raw.at(s * seq), first, s + 1, seq, scale);
                }
            });
        }
    }
}

/// o from p and qkv.
pub fn mix<T: Float>(call: Call) {
    let shape = HeadShape::of(&call);
    let HeadShape { seq, v, heads: all, group, width, .. } = shape;
    let (p, qkv) = (call.input::<T>(0), call.input::<T>(1));
    let Some(o) = call.output::<T>(0) else { return };
    for (b, h) in heads(&call, shape) {
        // SAFETY: as in `scores`.
        unsafe {
            let weights = Matrix::rows(p.add((b * all + h) * seq * seq), seq);
            let value = Matrix::rows(qkv.add(shape.v(b, 0, h / group)), width);
            let target = Target::new(o.add(shape.o(b, 0, h)), all * v);
            gemm(call.pool, call.simd, (seq, v, seq), weights, value, target, call.scratch());
        }
    }
}

/// dp and the V section of dqkv from do, p and qkv.
pub fn mix_grad<T: Float>(call: Call) {
    let shape = HeadShape::of(&call);
    let HeadShape { seq, e, v, heads: all, group, width, .. } = shape;
    let (dout, p, qkv) = (call.input::<T>(0), call.input::<T>(1), call.input::<T>(2));
    let (dp, dqkv) = (call.output::<T>(0), call.output::<T>(1));
    let mut pieces = Pieces { base: call.scratch(), used: 0 };
    let (sums, gemm_scratch) = (pieces.take(seq * v * 4), pieces.take(0));
    for (b, h) in heads(&call, shape) {
        // SAFETY: as in `scores`; sections of dqkv are apart.
        unsafe {
            let at = (b * all + h) * seq * seq;
            let dout = Matrix::rows(dout.add(shape.o(b, 0, h)), all * v);
            if let Some(dp) = dp {
                let value = Matrix::rows(qkv.add(shape.v(b, 0, h / group)), width).transposed();
                gemm(call.pool, call.simd, (seq, seq, v), dout, value, Target::new(dp.add(at), seq), gemm_scratch);
            }
            if let Some(dqkv) = dqkv {
                let weights = Matrix::rows(p.add(at), seq).transposed();
                let target = Target::F32 { ptr: sums, stride: v, add: h % group > 0 };
                gemm(call.pool, call.simd, (seq, v, seq), weights, dout, target, gemm_scratch);
                finish_head(&call, (shape, v), h, sums, dqkv.add(shape.v(b, 0, h / group)));
            }
        }
    }
    if let Some(dqkv) = dqkv {
        let before = (all + shape.kv_heads) * e;
        clear(&call, dqkv, 0, before, width);
    }
}

/// The Q and K sections of dqkv from dp, p and qkv.
pub fn scores_grad<T: Float>(call: Call) {
    let shape = HeadShape::of(&call);
    let HeadShape { seq, e, heads: all, group, kv_heads, width, scale, .. } = shape;
    let (dp, p, qkv) = (Ptr(call.input::<T>(0)), Ptr(call.input::<T>(1)), call.input::<T>(2));
    let Some(dqkv) = call.output::<T>(0) else { return };
    let mut pieces = Pieces { base: call.scratch(), used: 0 };
    let ds: *mut T = pieces.take(seq * seq * size_of::<T>());
    let (ds, sums, gemm_scratch) = (Ptr(ds), pieces.take(seq * e * 4), pieces.take(0));
    for (b, h) in heads(&call, shape) {
        // SAFETY: as in `scores`; sections of dqkv are apart.
        unsafe {
            let at = (b * all + h) * seq * seq;
            call.rows(seq, |from, to| {
                for row in from..to {
                    let (p, dp) = (p.at(at + row * seq), dp.at(at + row * seq));
                    softmax_grad_row(call.simd, p, dp, ds.at(row * seq), seq, scale);
                }
            });
            let ds = Matrix::rows(ds.get().cast_const(), seq);
            let key = Matrix::rows(qkv.add(shape.k(b, 0, h / group)), width);
            let query = Matrix::rows(qkv.add(shape.q(b, 0, h)), width);
            let target = Target::new(dqkv.add(shape.q(b, 0, h)), width);
            gemm(call.pool, call.simd, (seq, e, seq), ds, key, target, gemm_scratch);
            let target = Target::F32 { ptr: sums, stride: e, add: h % group > 0 };
            gemm(call.pool, call.simd, (seq, e, seq), ds.transposed(), query, target, gemm_scratch);
            finish_head(&call, (shape, e), h, sums, dqkv.add(shape.k(b, 0, h / group)));
        }
    }
    clear(&call, dqkv, (all + kv_heads) * e, width, width);
}

/// Every sequence and query head.
fn heads(call: &Call, shape: HeadShape) -> impl Iterator<Item = (usize, usize)> {
    (0..call.size("batch") * shape.heads).map(move |i| (i / shape.heads, i % shape.heads))
}

/// Rounds the sums over a group of query heads to the key or value head of `e` elements that they read, after the last of them.
unsafe fn finish_head<T: Float>(call: &Call, (shape, e): (HeadShape, usize), h: usize, sums: *const f32, to: *mut T) {
    if (h + 1).is_multiple_of(shape.group) {
        // SAFETY: the caller vouches for the section of a sequence at `to`.
        unsafe { round_rows(call.simd, sums, e, to, shape.width, shape.seq, e) };
    }
}

/// Zeros in the columns from .. to of every row.
fn clear<T: Float>(call: &Call, rows: *mut T, from: usize, to: usize, width: usize) {
    let rows = Ptr(rows);
    call.rows(call.size("batch") * call.size("seq"), |first, end| {
        // SAFETY: rows first .. end belong to this task.
        (first..end).for_each(|row| unsafe { rows.slice(row * width + from, to - from).fill(T::of(0.0)) });
    });
}

vectorised! {
    /// The weights of one query: softmax of the scores of the keys first .. end, zeros elsewhere.
    unsafe fn softmax_row<T>(
        p: *mut T, scores: *mut f32, first: usize, end: usize, keys: usize, scale: f32,
    ) -> () {
        let seen = std::slice::from_raw_parts_mut(scores.add(first), end - first);
        let top = simd::max(seen) * scale;
        seen.iter_mut().for_each(|x| *x = simd::exp(*x * scale - top));
        let inverse = 1.0 / simd::sum(seen.len(), |i| seen[i]);
        (0..first).for_each(|t| *p.add(t) = T::of(0.0));
        (first..end).for_each(|t| *p.add(t) = T::of(seen[t - first] * inverse));
        (end..keys).for_each(|t| *p.add(t) = T::of(0.0));
    }
}

vectorised! {
    /// Gradients of one query's scores, before they were scaled.
    unsafe fn softmax_grad_row<T>(p: *const T, dp: *const T, ds: *mut T, keys: usize, scale: f32) -> () {
        let mean = simd::sum(keys, |t| (*p.add(t)).to() * (*dp.add(t)).to());
        simd::map([p, dp], [ds], keys, |[p, dp], _| [p * (dp - mean) * scale]);
    }
}
