//! Causal attention over packed Q·K·V, tile by tile: the score matrix never exists whole.
//!
//! Shapes: qkv `[b, s, (q + 2u)·e]`, o `[b, s, q·e]`, lse `[b, q, s]`. Query head `h` reads key and value head
//! `h / (q / u)`. A task owns whole heads, so sums are always in the same order.

use super::call::{Call, Ptr};
use super::gemm::{Matrix, gemm_small, small_scratch};
use super::simd;

/// Queries and keys of a tile.
pub(super) const TILE_Q: usize = 48;
pub(super) const TILE_K: usize = 128;

/// Floats of scratch of one thread, for heads of `e` elements: packed sides, two score tiles, an output tile, row statistics.
const fn thread_scratch(e: usize) -> usize {
    let wide = if e > TILE_K { e } else { TILE_K };
    let packed = small_scratch(TILE_K, wide.next_multiple_of(32), wide);
    (packed + 2 * TILE_Q * TILE_K + TILE_Q * e + 4 * TILE_Q).next_multiple_of(16)
}

/// Scratch as (fixed bytes, bytes per element of a head), an upper bound of what `threads` threads use.
pub fn scratch_bytes(threads: usize) -> (u64, u64) {
    // `thread_scratch` is convex in e with slope below this; one probe at the tile width bounds the constant.
    let slope = (TILE_K.next_multiple_of(12) + TILE_Q + 3 * 256) as u64;
    let fixed = thread_scratch(TILE_K) as u64;
    (threads as u64 * fixed * 4, threads as u64 * slope * 4)
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
pub(super) struct Tiles {
    pub(super) packed: *mut f32,
    pub(super) scores: *mut f32,
    other: *mut f32,
    pub(super) out: *mut f32,
    pub(super) rows: *mut f32,
}

impl Tiles {
    /// # Safety
    /// `scratch` holds `thread_scratch(e)` floats for every worker.
    pub(super) unsafe fn of(scratch: *mut f32, worker: usize, e: usize) -> Self {
        // SAFETY: the caller vouches.
        unsafe {
            let scores = scratch.add(worker * thread_scratch(e));
            let other = scores.add(TILE_Q * TILE_K);
            let out = other.add(TILE_Q * TILE_K);
            let rows = out.add(TILE_Q * e);
            Self { packed: rows.add(4 * TILE_Q), scores, other, out, rows }
        }
    }
}

/// o and lse.
pub fn forward(call: Call) {
    let shape = Shape::of(&call);
    let Shape { seq, e, heads, group, width, scale, .. } = shape;
    let simd_unit = call.simd;
    let qkv = Ptr(call.input::<f32>(0));
    let Some(o) = call.output::<f32>(0).map(Ptr) else { return };
    let lse = call.output::<f32>(1).map(Ptr);
    let scratch = Ptr(call.scratch::<f32>());
    let q_tiles = seq.div_ceil(TILE_Q);
    call.pool.run(call.size('b') * heads * q_tiles, |task, worker| {
        let (b, h, tile) = (task / (heads * q_tiles), task / q_tiles % heads, task % q_tiles);
        // SAFETY: the task owns these rows of o and lse; each worker has tiles of its own.
        unsafe {
            let tiles = Tiles::of(scratch.get(), worker, e);
            let q0 = tile * TILE_Q;
            let rows = TILE_Q.min(seq - q0);
            let maxima = std::slice::from_raw_parts_mut(tiles.rows, rows);
            let sums = std::slice::from_raw_parts_mut(tiles.rows.add(TILE_Q), rows);
            maxima.fill(f32::NEG_INFINITY);
            sums.fill(0.0);
            std::slice::from_raw_parts_mut(tiles.out, rows * e).fill(0.0);
            let query = Matrix::rows(qkv.at(shape.q(b, q0, h)), width);
            for k0 in (0..q0 + rows).step_by(TILE_K) {
                let columns = TILE_K.min(q0 + rows - k0);
                let key = Matrix::rows(qkv.at(shape.k(b, k0, h / group)), width).transposed();
                let shape3 = (rows, columns, e);
                gemm_small(simd_unit, shape3, query, key, tiles.scores, TILE_K, false, tiles.packed);
                simd_unit.run(|| {
                    let out = std::slice::from_raw_parts_mut(tiles.out, rows * e);
                    for r in 0..rows {
                        // Keys after the query are masked: they get no weight.
                        let seen = (q0 + r + 1).saturating_sub(k0).min(columns);
                        let row = std::slice::from_raw_parts_mut(tiles.scores.add(r * TILE_K), columns);
                        row[..seen].iter_mut().for_each(|x| *x *= scale);
                        row[seen..].fill(0.0);
                        if seen == 0 {
                            continue;
                        }
                        let seen_row = &mut row[..seen];
                        let top = simd::max(seen_row);
                        let top = if maxima[r] > top || maxima[r].is_nan() { maxima[r] } else { top };
                        seen_row.iter_mut().for_each(|x| *x = simd::exp(*x - top));
                        let fade = simd::exp(maxima[r] - top);
                        sums[r] = sums[r] * fade + simd::sum(seen, |i| seen_row[i]);
                        out[r * e..(r + 1) * e].iter_mut().for_each(|x| *x *= fade);
                        maxima[r] = top;
                    }
                });
                let value = Matrix::rows(qkv.at(shape.v(b, k0, h / group)), width);
                let weights = Matrix::rows(tiles.scores.cast_const(), TILE_K);
                gemm_small(simd_unit, (rows, e, columns), weights, value, tiles.out, e, true, tiles.packed);
            }
            simd_unit.run(|| {
                let out = std::slice::from_raw_parts(tiles.out, rows * e);
                for r in 0..rows {
                    let inverse = 1.0 / sums[r];
                    let to = o.slice(shape.o(b, q0 + r, h), e);
                    for (to, x) in to.iter_mut().zip(&out[r * e..(r + 1) * e]) {
                        *to = x * inverse;
                    }
                    if let Some(lse) = lse {
                        *lse.at((b * heads + h) * seq + q0 + r) = maxima[r] + sums[r].ln();
                    }
                }
            });
        }
    });
}

/// dqkv from do, qkv, o and lse. A task owns a key-value head and the query heads that read it.
pub fn grad(call: Call) {
    let shape = Shape::of(&call);
    let Shape { seq, e, heads, group, kv_heads, width, scale } = shape;
    let unit = call.simd;
    let (dout, qkv) = (Ptr(call.input::<f32>(0)), Ptr(call.input::<f32>(1)));
    let (o, lse) = (Ptr(call.input::<f32>(2)), Ptr(call.input::<f32>(3)));
    let Some(dqkv) = call.output::<f32>(0).map(Ptr) else { return };
    let scratch = Ptr(call.scratch::<f32>());
    call.pool.run(call.size('b') * kv_heads, |task, worker| {
        let (b, kv) = (task / kv_heads, task % kv_heads);
        // SAFETY: the task owns the columns of its heads in dqkv; each worker has tiles of its own.
        unsafe {
            let tiles = Tiles::of(scratch.get(), worker, e);
            for s in 0..seq {
                dqkv.slice(shape.q(b, s, kv * group), group * e).fill(0.0);
                dqkv.slice(shape.k(b, s, kv), e).fill(0.0);
                dqkv.slice(shape.v(b, s, kv), e).fill(0.0);
            }
            for h in kv * group..(kv + 1) * group {
                for q0 in (0..seq).step_by(TILE_Q) {
                    let rows = TILE_Q.min(seq - q0);
                    // Σ over a head of do · o: what softmax's gradient takes away.
                    let dots = std::slice::from_raw_parts_mut(tiles.rows, rows);
                    unit.run(|| {
                        for (r, dot) in dots.iter_mut().enumerate() {
                            let at = shape.o(b, q0 + r, h);
                            let (x, y) = (dout.slice(at, e), o.slice(at, e));
                            *dot = simd::sum(e, |i| x[i] * y[i]);
                        }
                    });
                    let query = Matrix::rows(qkv.at(shape.q(b, q0, h)), width);
                    let dout_tile = Matrix::rows(dout.at(shape.o(b, q0, h)), heads * e);
                    for k0 in (0..q0 + rows).step_by(TILE_K) {
                        let columns = TILE_K.min(q0 + rows - k0);
                        let key = Matrix::rows(qkv.at(shape.k(b, k0, kv)), width);
                        let value = Matrix::rows(qkv.at(shape.v(b, k0, kv)), width);
                        let (p, ds) = (tiles.scores, tiles.other);
                        let product = |a, b, c, stride, shape3, add| {
                            gemm_small(unit, shape3, a, b, c, stride, add, tiles.packed);
                        };
                        product(query, key.transposed(), p, TILE_K, (rows, columns, e), false);
                        product(dout_tile, value.transposed(), ds, TILE_K, (rows, columns, e), false);
                        unit.run(|| {
                            for (r, dot) in dots.iter().enumerate() {
                                let seen = (q0 + r + 1).saturating_sub(k0).min(columns);
                                let lse = *lse.at((b * heads + h) * seq + q0 + r);
                                let p = std::slice::from_raw_parts_mut(p.add(r * TILE_K), columns);
                                let ds = std::slice::from_raw_parts_mut(ds.add(r * TILE_K), columns);
                                for (p, ds) in p[..seen].iter_mut().zip(&mut ds[..seen]) {
                                    *p = simd::exp(*p * scale - lse);
                                    *ds = *p * (*ds - dot) * scale;
                                }
                                p[seen..].fill(0.0);
                                ds[seen..].fill(0.0);
                            }
                        });
                        let p = Matrix::rows(p.cast_const(), TILE_K);
                        let ds = Matrix::rows(ds.cast_const(), TILE_K);
                        let (dq, dk, dv) =
                            (dqkv.at(shape.q(b, q0, h)), dqkv.at(shape.k(b, k0, kv)), dqkv.at(shape.v(b, k0, kv)));
                        product(p.transposed(), dout_tile, dv, width, (columns, e, rows), true);
                        product(ds, key, dq, width, (rows, e, columns), true);
                        product(ds.transposed(), query, dk, width, (columns, e, rows), true);
                    }
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_profile_asks_for_enough_scratch_at_every_head_size() {
        for e in 1..=1024 {
            let (fixed, per_element) = scratch_bytes(2);
            assert!(fixed + per_element * e as u64 >= 2 * thread_scratch(e) as u64 * 4, "head_dim {e}");
        }
    }
}
