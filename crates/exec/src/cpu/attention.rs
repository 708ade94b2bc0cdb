//! Causal attention over packed Q·K·V, tile by tile: the score matrix never exists whole.
//!
//! Shapes: qkv `[b, s, (q + 2u)·e]`, o `[b, s, q·e]`, lse `[b, q, s]`. Query head `h` reads key and value head
//! `h / (q / u)`. A task owns whole rows or whole heads, so sums are always in the same order. Scores, weights' sums and
//! gradient sums are in f32; weights and score gradients are stored in the compute type for the next product.

use super::call::{Call, Ptr};
use super::float::Float;
use super::gemm::{Matrix, Target, gemm_small, small_scratch};
use super::simd::{self, vectorised};

/// Queries and keys of a tile.
pub(super) const TILE: usize = 128;

/// Bytes of one thread's tiles for heads of `e` elements: two score tiles in f32 and in the compute type, an output tile,
/// row statistics, packed operands.
const fn tile_bytes(e: usize) -> usize {
    let wide = if e > TILE { e } else { TILE };
    let tiles = 2 * TILE * TILE * (4 + 4) + TILE * e * 4 + 4 * TILE * 4;
    (tiles + small_scratch(TILE, wide, wide)).next_multiple_of(64)
}

/// Scratch as bytes, bytes per element of a head, and bytes per position and element of a head: an upper bound of what
/// `threads` threads use.
pub fn scratch_bytes(threads: usize) -> (u64, u64, u64) {
    let threads = threads as u64;
    // A chord of `tile_bytes` from 0 to a head of 4096, above it everywhere since it bends upwards only below 1024.
    let slope = (tile_bytes(1024) - tile_bytes(TILE)).div_ceil(1024 - TILE) as u64 + 64;
    (threads * (tile_bytes(TILE) as u64 + 64), threads * slope, threads * 2 * 4)
}

#[derive(Clone, Copy)]
struct Shape {
    seq: usize,
    e: usize,
    heads: usize,
    group: usize,
    kv_heads: usize,
    /// Elements of a row of qkv.
    width: usize,
    scale: f32,
}

impl Shape {
    fn of(call: &Call) -> Self {
        let (heads, kv_heads, e) = (call.size('q'), call.size('u'), call.size('e'));
        Self {
            seq: call.size('s'),
            e,
            heads,
            group: heads / kv_heads,
            kv_heads,
            width: call.size('p'),
            scale: 1.0 / (e as f32).sqrt(),
        }
    }

    /// Where position `s` of sequence `b` starts for query head `h`, in qkv.
    fn q(&self, b: usize, s: usize, h: usize) -> usize {
        (b * self.seq + s) * self.width + h * self.e
    }

    fn k(&self, b: usize, s: usize, kv: usize) -> usize {
        self.q(b, s, self.heads + kv)
    }

    fn v(&self, b: usize, s: usize, kv: usize) -> usize {
        self.q(b, s, self.heads + self.kv_heads + kv)
    }

    fn o(&self, b: usize, s: usize, h: usize) -> usize {
        ((b * self.seq + s) * self.heads + h) * self.e
    }
}

/// Tiles of one thread.
pub(super) struct Tiles<T> {
    /// f32 tiles of TILE × TILE.
    pub(super) scores: *mut f32,
    other: *mut f32,
    /// The same in the compute type.
    pub(super) weights: *mut T,
    gradients: *mut T,
    /// TILE × e.
    pub(super) out: *mut f32,
    /// Four numbers per row.
    pub(super) rows: *mut f32,
    pub(super) packed: *mut u8,
}

impl<T> Tiles<T> {
    /// # Safety
    /// `scratch` holds `tile_bytes(e)` bytes for every worker.
    pub(super) unsafe fn of(scratch: *mut u8, worker: usize, e: usize) -> Self {
        // SAFETY: the caller vouches.
        unsafe {
            let scores: *mut f32 = scratch.add(worker * tile_bytes(e)).cast();
            let other = scores.add(TILE * TILE);
            let weights = other.add(TILE * TILE);
            let gradients = weights.add(TILE * TILE);
            let out = gradients.add(TILE * TILE);
            let rows = out.add(TILE * e);
            let packed = rows.add(4 * TILE).cast();
            Self { scores, other, weights: weights.cast(), gradients: gradients.cast(), out, rows, packed }
        }
    }
}

/// A product into f32 rows.
pub(super) fn into(ptr: *mut f32, stride: usize, add: bool) -> Target {
    Target::F32 { ptr, stride, add }
}

/// Where the documents of a tile's queries start.
#[derive(Clone, Copy)]
pub(super) struct Starts {
    /// Per row of the tile, at most its position; null where there is one document only.
    rows: *const u32,
    /// The first of them.
    first: usize,
}

impl Starts {
    /// All in one document.
    pub(super) const NONE: Starts = Starts { rows: std::ptr::null(), first: 0 };

    /// Of the `rows` queries from `q0` on. A start after its query counts as the query.
    ///
    /// # Safety
    /// `starts` is null or has an element for each query; `to` has room for them.
    unsafe fn of(starts: *const u32, to: *mut u32, q0: usize, rows: usize) -> Self {
        if starts.is_null() {
            return Starts::NONE;
        }
        let mut first = q0;
        for r in 0..rows {
            // SAFETY: the caller vouches.
            unsafe {
                let start = (*starts.add(r) as usize).min(q0 + r);
                *to.add(r) = start as u32;
                first = first.min(start);
            }
        }
        Starts { rows: to, first }
    }

    /// The first tile of keys that a query sees.
    fn first_tile(self) -> usize {
        self.first / TILE * TILE
    }

    /// The first column that row `r` sees in the tile of keys from `k0` on; `seen` where it sees none before that.
    #[inline(always)]
    unsafe fn column(self, r: usize, k0: usize, seen: usize) -> usize {
        match self.rows.is_null() {
            true => 0,
            // SAFETY: there is an element per row.
            false => (unsafe { *self.rows.add(r) } as usize).saturating_sub(k0).min(seen),
        }
    }
}

/// o and lse; `documents` where the second input says where they start.
pub fn forward<T: Float>(call: Call, documents: bool) {
    let shape = Shape::of(&call);
    let Shape { seq, e, heads, group, width, scale, .. } = shape;
    let unit = call.simd;
    let qkv = Ptr(call.input::<T>(0));
    let starts = Ptr(if documents { call.input::<u32>(1) } else { std::ptr::null() });
    let Some(o) = call.output::<T>(0).map(Ptr) else { return };
    let lse = Ptr(call.output::<f32>(1).unwrap_or(std::ptr::null_mut()));
    let scratch = Ptr(call.scratch::<u8>());
    let q_tiles = seq.div_ceil(TILE);
    call.pool.run(call.size('b') * heads * q_tiles, |task, worker| {
        let (b, h, tile) = (task / (heads * q_tiles), task / q_tiles % heads, task % q_tiles);
        // SAFETY: the task owns these rows of o and lse; each worker has tiles of its own.
        unsafe {
            let t = Tiles::<T>::of(scratch.get(), worker, e);
            let q0 = tile * TILE;
            let rows = TILE.min(seq - q0);
            let (maxima, sums) = (t.rows, t.rows.add(TILE));
            for r in 0..rows {
                *maxima.add(r) = f32::NEG_INFINITY;
                *sums.add(r) = 0.0;
            }
            t.out.write_bytes(0, rows * e);
            let query = Matrix::rows(qkv.at(shape.q(b, q0, h)), width);
            let starts = Starts::of(at_row(starts.get(), b * seq + q0), t.rows.add(3 * TILE).cast(), q0, rows);
            for k0 in (starts.first_tile()..q0 + rows).step_by(TILE) {
                let columns = TILE.min(q0 + rows - k0);
                let key = Matrix::rows(qkv.at(shape.k(b, k0, h / group)), width).transposed();
                gemm_small(unit, (rows, columns, e), query, key, into(t.scores, TILE, false), t.packed);
                // Keys after the query, or before its document, are masked.
                let seen = q0 as isize - k0 as isize + 1;
                softmax_tile(unit, t.scores, t.weights, t.out, maxima, sums, rows, columns, seen, starts, k0, e, scale);
                let value = Matrix::rows(qkv.at(shape.v(b, k0, h / group)), width);
                let weights = Matrix::rows(t.weights.cast_const(), TILE);
                gemm_small(unit, (rows, e, columns), weights, value, into(t.out, e, true), t.packed);
            }
            let lse = match lse.get() {
                null if null.is_null() => null,
                lse => lse.add((b * heads + h) * seq + q0),
            };
            finish_tile(unit, t.out, maxima, sums, o.at(shape.o(b, q0, h)), heads * e, lse, rows, e);
        }
    });
}

/// The element of an optional operand for a row.
///
/// # Safety
/// `operand` is null or has the row.
unsafe fn at_row(operand: *const u32, row: usize) -> *const u32 {
    match operand.is_null() {
        true => operand,
        // SAFETY: the caller vouches.
        false => unsafe { operand.add(row) },
    }
}

vectorised! {
    /// Scores become weights: row `r` sees its first `seen + r` columns, from the start of its document on; the first column
    /// is key `k0`. Fades what `out` and `sums` hold to the new maximum.
    pub(super) unsafe fn softmax_tile<T>(
        scores: *mut f32, weights: *mut T, out: *mut f32, maxima: *mut f32, sums: *mut f32,
        rows: usize, columns: usize, seen: isize, starts: Starts, k0: usize, e: usize, scale: f32,
    ) -> () {
        for r in 0..rows {
            let end = (seen + r as isize).clamp(0, columns as isize) as usize;
            let from = starts.column(r, k0, end);
            for i in 0..from {
                *weights.add(r * TILE + i) = T::of(0.0);
            }
            for i in end..columns {
                *weights.add(r * TILE + i) = T::of(0.0);
            }
            let seen = end - from;
            if seen == 0 {
                continue;
            }
            let (row, to) = (scores.add(r * TILE + from), weights.add(r * TILE + from));
            let here = simd::max(std::slice::from_raw_parts(row, seen)) * scale;
            let before = *maxima.add(r);
            let top = if before > here { before } else { here };
            for i in 0..seen {
                *row.add(i) = simd::exp(*row.add(i) * scale - top);
            }
            for i in 0..seen {
                *to.add(i) = T::of(*row.add(i));
            }
            let fade = simd::exp(before - top);
            *sums.add(r) = *sums.add(r) * fade + simd::sum(seen, |i| *row.add(i));
            *maxima.add(r) = top;
            if before != top {
                for i in 0..e {
                    *out.add(r * e + i) *= fade;
                }
            }
        }
    }
}

vectorised! {
    pub(super) unsafe fn finish_tile<T>(
        out: *const f32, maxima: *const f32, sums: *const f32, o: *mut T, stride: usize, lse: *mut f32,
        rows: usize, e: usize,
    ) -> () {
        for r in 0..rows {
            let inverse = 1.0 / *sums.add(r);
            for i in 0..e {
                *o.add(r * stride + i) = T::of(*out.add(r * e + i) * inverse);
            }
            if !lse.is_null() {
                *lse.add(r) = *maxima.add(r) + (*sums.add(r)).ln();
            }
        }
    }
}

/// dqkv from do, qkv, o and lse, and from where documents start where `documents` says so. A task owns a key-value head and
/// the query heads that read it.
pub fn grad<T: Float>(call: Call, documents: bool) {
    let shape = Shape::of(&call);
    let Shape { seq, e, heads, group, kv_heads, width, scale } = shape;
    let unit = call.simd;
    let (dout, qkv) = (Ptr(call.input::<T>(0)), Ptr(call.input::<T>(1)));
    let (o, lse) = (Ptr(call.input::<T>(2)), Ptr(call.input::<f32>(3)));
    let starts = Ptr(if documents { call.input::<u32>(4) } else { std::ptr::null() });
    let Some(dqkv) = call.output::<T>(0).map(Ptr) else { return };
    let scratch = Ptr(call.scratch::<u8>());
    let threads = call.pool.threads();
    call.pool.run(call.size('b') * kv_heads, |task, worker| {
        let (b, kv) = (task / kv_heads, task % kv_heads);
        // SAFETY: the task owns the columns of its heads in dqkv; each worker has tiles and sums of its own.
        unsafe {
            let t = Tiles::<T>::of(scratch.get(), worker, e);
            // Sums of dK and dV over all queries of the group.
            let sums: *mut f32 = scratch.get().add(threads * tile_bytes(e)).cast();
            let dk = sums.add(worker * 2 * seq * e);
            let dv = dk.add(seq * e);
            dk.write_bytes(0, 2 * seq * e);
            for h in kv * group..(kv + 1) * group {
                for q0 in (0..seq).step_by(TILE) {
                    let rows = TILE.min(seq - q0);
                    let (dots, row_lse) = (t.rows, lse.at((b * heads + h) * seq + q0));
                    let at = shape.o(b, q0, h);
                    row_dots(unit, dout.at(at), o.at(at), heads * e, dots, rows, e);
                    t.out.write_bytes(0, rows * e);
                    let query = Matrix::rows(qkv.at(shape.q(b, q0, h)), width);
                    let dout_tile = Matrix::rows(dout.at(at), heads * e);
                    let starts = Starts::of(at_row(starts.get(), b * seq + q0), t.rows.add(3 * TILE).cast(), q0, rows);
                    for k0 in (starts.first_tile()..q0 + rows).step_by(TILE) {
                        let columns = TILE.min(q0 + rows - k0);
                        let key = Matrix::rows(qkv.at(shape.k(b, k0, kv)), width);
                        let value = Matrix::rows(qkv.at(shape.v(b, k0, kv)), width);
                        let product = |shape3, a, b, c| gemm_small(unit, shape3, a, b, c, t.packed);
                        product((rows, columns, e), query, key.transposed(), into(t.scores, TILE, false));
                        product((rows, columns, e), dout_tile, value.transposed(), into(t.other, TILE, false));
                        let seen = q0 as isize - k0 as isize + 1;
                        let (p, ds) = (t.weights, t.gradients);
                        grad_tile(
                            unit, t.scores, t.other, p, ds, row_lse, dots, rows, columns, seen, starts, k0, scale,
                        );
                        let p = Matrix::rows(p.cast_const(), TILE);
                        let ds = Matrix::rows(ds.cast_const(), TILE);
                        product((columns, e, rows), p.transposed(), dout_tile, into(dv.add(k0 * e), e, true));
                        product((columns, e, rows), ds.transposed(), query, into(dk.add(k0 * e), e, true));
                        product((rows, e, columns), ds, key, into(t.out, e, true));
                    }
                    copy_rows(unit, t.out, dqkv.at(shape.q(b, q0, h)), width, rows, e);
                }
            }
            copy_rows(unit, dk, dqkv.at(shape.k(b, 0, kv)), width, seq, e);
            copy_rows(unit, dv, dqkv.at(shape.v(b, 0, kv)), width, seq, e);
        }
    });
}

vectorised! {
    /// Σ over a head of do · o: what softmax's gradient takes away.
    unsafe fn row_dots<T>(dout: *const T, o: *const T, stride: usize, dots: *mut f32, rows: usize, e: usize) -> () {
        for r in 0..rows {
            let (x, y) = (dout.add(r * stride), o.add(r * stride));
            *dots.add(r) = simd::sum(e, |i| (*x.add(i)).to() * (*y.add(i)).to());
        }
    }
}

vectorised! {
    /// From scores and do·vᵀ to weights and the gradient of scores.
    unsafe fn grad_tile<T>(
        scores: *const f32, dp: *const f32, p: *mut T, ds: *mut T, lse: *const f32, dots: *const f32,
        rows: usize, columns: usize, seen: isize, starts: Starts, k0: usize, scale: f32,
    ) -> () {
        for r in 0..rows {
            let seen = (seen + r as isize).clamp(0, columns as isize) as usize;
            let from = starts.column(r, k0, seen);
            let at = r * TILE;
            let (lse, dot) = (*lse.add(r), *dots.add(r));
            for i in at + from..at + seen {
                let weight = simd::exp(*scores.add(i) * scale - lse);
                *p.add(i) = T::of(weight);
                *ds.add(i) = T::of(weight * (*dp.add(i) - dot) * scale);
            }
            for i in at..at + from {
                *p.add(i) = T::of(0.0);
                *ds.add(i) = T::of(0.0);
            }
            for i in at + seen..at + columns {
                *p.add(i) = T::of(0.0);
                *ds.add(i) = T::of(0.0);
            }
        }
    }
}

vectorised! {
    unsafe fn copy_rows<T>(from: *const f32, to: *mut T, stride: usize, rows: usize, e: usize) -> () {
        for r in 0..rows {
            for i in 0..e {
                *to.add(r * stride + i) = T::of(*from.add(r * e + i));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_profile_asks_for_enough_scratch_at_every_head_size() {
        for threads in [1, 2, 7] {
            let (fixed, per_element, _) = scratch_bytes(threads);
            for e in 1..=4096 {
                let asked = fixed + per_element * e as u64;
                assert!(asked >= (threads * tile_bytes(e)) as u64, "{threads} threads, head_dim {e}");
            }
        }
    }
}
