//! dqkv from do, qkv, o and lse.

use super::super::call::{Call, Ptr};
use super::super::float::Float;
use super::super::gemm::{Matrix, NR, Packed, Target, Unit, multiply, pack_a, pack_b, put_a_line, put_b_pair};
use super::super::simd::{self, Simd, vectorised};
use super::forward::{hide, round_rows, transpose_rows};
use super::{HeadShape, KEYS, KeyRun, Keys, Mask, Pieces, Places, tiles, whole};
use lockstep_ir::Run;
use lockstep_ir::op::Ring;

/// Queries of a tile: as many as keys, so that tiles meet the diagonal at their corners.
const QUERIES: usize = KEYS;
const PANELS: usize = QUERIES / NR;

/// What one thread works with.
#[derive(Clone, Copy)]
pub(super) struct Buffers {
    unit: Unit,
    /// Keys and values as the rows of left operands, `e` and `v` deep; keys transposed, as deep as there are positions.
    keys: Packed,
    values: Packed,
    keys_transposed: Packed,
    /// Sums of dk and dv over all queries that read them: rows of `stride` and of `value_stride` floats.
    dk: *mut f32,
    dv: *mut f32,
    stride: usize,
    value_stride: usize,
    /// Queries and do as right operands: as columns, `e` and `v` deep, and as rows.
    query: Packed,
    dout: Packed,
    query_rows: Packed,
    dout_rows: Packed,
    /// Panels of KEYS rows of NR: scores, later weights; do·vᵀ, later gradients of scores.
    scores: *mut f32,
    dp: *mut f32,
    /// Gradients of scores as right operands, a panel each.
    ds_panels: *mut u8,
    ds_bytes: usize,
    /// Weights and gradients of scores as left operands: keys are rows.
    p_rows: Packed,
    ds_rows: Packed,
    /// Sums of dq: panels of `e` rows of NR, and one of them transposed.
    dq: *mut f32,
    transposed: *mut f32,
    /// Per query: lse, and what softmax's gradient takes away.
    lse: *mut [f32; QUERIES],
    dots: *mut [f32; QUERIES],
}

impl Buffers {
    fn carve(base: *mut u8, unit: Unit, positions: usize, (e, v): (usize, usize)) -> (Self, usize) {
        let mut pieces = Pieces { base, used: 0 };
        let rows = positions.next_multiple_of(KEYS);
        let [lines, value_lines] = [e, v].map(|n| n.next_multiple_of(96));
        let columns = |deep| unit.bytes(QUERIES, deep);
        let deep = |lines| unit.bytes(lines, QUERIES);
        let ds_bytes = KEYS * NR * 4;
        let buffers = Self {
            unit,
            keys: Packed::a(unit, pieces.take(unit.bytes(rows, e)), e),
            values: Packed::a(unit, pieces.take(unit.bytes(rows, v)), v),
            keys_transposed: Packed::a(unit, pieces.take(unit.bytes(lines, positions)), positions),
            dk: pieces.take(rows * lines * 4),
            dv: pieces.take(rows * value_lines * 4),
            stride: lines,
            value_stride: value_lines,
            query: Packed::b(unit, pieces.take(columns(e)), e),
            dout: Packed::b(unit, pieces.take(columns(v)), v),
            query_rows: Packed::b(unit, pieces.take(deep(lines)), QUERIES),
            dout_rows: Packed::b(unit, pieces.take(deep(value_lines)), QUERIES),
            scores: pieces.take(PANELS * KEYS * NR * 4),
            dp: pieces.take(PANELS * KEYS * NR * 4),
            ds_panels: pieces.take(PANELS * ds_bytes),
            ds_bytes,
            p_rows: Packed::a(unit, pieces.take(unit.bytes(KEYS, QUERIES)), QUERIES),
            ds_rows: Packed::a(unit, pieces.take(unit.bytes(KEYS, QUERIES)), QUERIES),
            dq: pieces.take(PANELS * lines * NR * 4),
            transposed: pieces.take(lines * NR * 4),
            lse: pieces.take(QUERIES * 4),
            dots: pieces.take(QUERIES * 4),
        };
        (buffers, pieces.used)
    }

    /// Bytes of one thread, for heads of `e` elements in Q and K and of `v` in V.
    pub fn bytes(unit: Unit, positions: usize, (e, v): (usize, usize)) -> usize {
        Self::carve(std::ptr::null_mut(), unit, positions, (e, v)).1
    }

    /// Weights and gradients of scores of panel `p` of a tile: from scores and do·vᵀ of its first `seen` keys; there are none
    /// after them.
    unsafe fn panel<T: Float>(&self, simd: Simd, p: usize, seen: usize, keys: usize, scale: f32) {
        let at = p * KEYS * NR;
        // SAFETY: the panel lies in the tile.
        unsafe {
            let (scores, dp, ds) = (self.scores.add(at), self.dp.add(at), self.ds_panels.add(p * self.ds_bytes));
            let (lse, dots) = (self.lse.cast::<[f32; NR]>().add(p), self.dots.cast::<[f32; NR]>().add(p));
            let rows = (self.p_rows, self.ds_rows);
            grad_panel::<T>(
                simd,
                self.unit,
                scores,
                dp,
                ds,
                rows,
                &*lse,
                &*dots,
                p * NR,
                seen,
                whole(self.unit, keys),
                scale,
            );
            if self.unit == Unit::Vector {
                let widened = |from: *mut f32| Matrix::rows(from.cast_const(), NR);
                pack_a(simd, widened(scores), keys, NR, self.p_rows.rows_deep(self.unit, p * NR));
                pack_a(simd, widened(dp), keys, NR, self.ds_rows.rows_deep(self.unit, p * NR));
            }
        }
    }
}

/// dqkv; the fifth input, if given, says where documents start.
pub fn grad<T: Float>(call: Call, window: Option<usize>) {
    let shape = HeadShape::of(&call);
    let Some(dqkv) = call.output::<T>(0) else { return };
    let dkv = Keys::new(&shape, dqkv.wrapping_add(shape.heads * shape.e), shape.width, shape.seq);
    let kv = Keys::packed(&shape, call.input(1));
    let inputs = Inputs { o: 2, lse: 3, starts: 4 };
    over::<T, T, T>(call, (window, inputs), kv, (dqkv, shape.width), dkv, Places::whole(shape.seq));
}

/// dq, and dkv in f32, of a part of the queries over keys that stand apart: over a part of a ring dq is in f32 too. The sixth input, if
/// given, says where documents start.
pub fn over_parts_grad<T: Float>(call: Call, window: Option<usize>, ring: Option<Ring>) {
    match ring {
        Some(_) => apart::<T, f32>(call, window, Places::of_parts(&call, ring)),
        None => apart::<T, T>(call, window, Places::of_parts(&call, ring)),
    }
}

fn apart<T: Float, Q: Float>(call: Call, window: Option<usize>, places: Places) {
    let (shape, rows) = (HeadShape::of(&call), call.size("keys"));
    let (Some(dq), Some(dkv)) = (call.output::<Q>(0), call.output::<f32>(1)) else {
        unreachable!("both gradients are wanted");
    };
    let kv = Keys::apart(&shape, call.input(2), rows);
    let dkv = Keys::new(&shape, dkv, kv.width, rows);
    let inputs = Inputs { o: 3, lse: 4, starts: 5 };
    over::<T, Q, f32>(call, (window, inputs), kv, (dq, shape.heads * shape.e), dkv, places);
}

/// Which inputs these are; do and qkv are the first two.
struct Inputs {
    o: usize,
    lse: usize,
    starts: usize,
}

/// Gradients of queries, in rows of a width, and of keys and values. A task owns a key-value head and the query heads that read it.
fn over<T: Float, Q: Float, K: Float>(
    call: Call,
    (window, inputs): (Option<usize>, Inputs),
    kv: Keys<*const T>,
    (dq, dq_width): (*mut Q, usize),
    dkv: Keys<*mut K>,
    places: Places,
) {
    let shape = HeadShape::of(&call);
    let HeadShape { seq, e, v, heads, group, kv_heads, width, scale } = shape;
    let (simd, unit) = (call.simd, Unit::of::<T>(call.simd));
    let (dout, qkv) = (Ptr(call.input::<T>(0)), Ptr(call.input::<T>(1)));
    let (o, lse) = (Ptr(call.input::<T>(inputs.o)), Ptr(call.input::<f32>(inputs.lse)));
    let starts = Ptr(call.given::<u32>(inputs.starts).unwrap_or(std::ptr::null()));
    let (dq, scratch) = (Ptr(dq), Ptr(call.scratch::<u8>()));
    let bytes = Buffers::bytes(unit, places.room, (e, v));
    call.pool.run(call.size("batch") * kv_heads, |task, worker| {
        let (b, kv_head) = (task / kv_heads, task % kv_heads);
        // SAFETY: the task owns the columns of its heads in the gradients; each worker has buffers of its own.
        unsafe {
            let t = Buffers::carve(scratch.get().add(worker * bytes), unit, places.room, (e, v)).0;
            for run in places.runs() {
                let [key, value] = kv.head(b, run.row, kv_head);
                pack_a(simd, key, run.len, e, t.keys.rows_from(unit, run.at));
                pack_a(simd, value, run.len, v, t.values.rows_from(unit, run.at));
                pack_a(simd, key.transposed(), e, run.len, t.keys_transposed.rows_deep(unit, run.at));
            }
            t.dk.write_bytes(0, places.room.next_multiple_of(KEYS) * t.stride);
            t.dv.write_bytes(0, places.room.next_multiple_of(KEYS) * t.value_stride);
            let tiles =
                |run: Run| (0..run.len).step_by(QUERIES).map(move |q| (run.local + q, run.whole + q, run.len - q));
            for h in kv_head * group..(kv_head + 1) * group {
                for (row, position, rest) in places.queries.into_iter().flat_map(tiles) {
                    let rows = QUERIES.min(rest);
                    let at = shape.o(b, row, h);
                    *t.dots = [0.0; QUERIES];
                    row_dots(simd, dout.at(at), o.at(at), heads * v, t.dots.cast(), rows, v);
                    // Queries that are not there weigh nothing.
                    *t.lse = [f32::INFINITY; QUERIES];
                    std::ptr::copy_nonoverlapping(lse.at((b * heads + h) * seq + row), t.lse.cast(), rows);
                    let query = Matrix::rows(qkv.at(shape.q(b, row, h)), width);
                    let (dout, mask) = (Matrix::rows(dout.at(at), heads * v), Mask::of(starts.get(), b, seq, window));
                    query_tile(simd, &t, query, dout, (row, position), rows, mask, places.runs(), (e, v), scale);
                    for first in (0..rows).step_by(NR) {
                        let to = dq.at((b * seq + row + first) * dq_width + h * e);
                        let sums = t.dq.add(first * t.stride);
                        transpose_rows(simd, sums, t.transposed, to, dq_width, NR.min(rows - first), e);
                    }
                }
            }
            for run in places.runs() {
                let [key, value] = dkv.at(b, run.row, kv_head).map(|at| dkv.first.at(at));
                round_rows(simd, t.dk.add(run.at * t.stride), t.stride, key, dkv.width, run.len, e);
                round_rows(simd, t.dv.add(run.at * t.value_stride), t.value_stride, value, dkv.width, run.len, v);
            }
        }
    });
}

/// dq of a tile of queries, and its shares of dk and dv.
#[allow(clippy::too_many_arguments)]
unsafe fn query_tile<'k, T: Float>(
    simd: Simd,
    t: &Buffers,
    query: Matrix<T>,
    dout: Matrix<T>,
    (row, position): (usize, usize),
    rows: usize,
    mask: Mask,
    runs: impl Iterator<Item = &'k KeyRun>,
    (e, v): (usize, usize),
    scale: f32,
) {
    let unit = t.unit;
    let lines = whole(unit, e);
    let into = |ptr: *mut f32, stride: usize, add: bool| Target::F32 { ptr, stride, add };
    // SAFETY: the caller vouches for `rows` queries; buffers are as large as their sizes say.
    unsafe {
        pack_b(simd, query.transposed(), rows, e, t.query);
        pack_b(simd, dout.transposed(), rows, v, t.dout);
        pack_b(simd, query, e, rows, t.query_rows);
        pack_b(simd, dout, v, rows, t.dout_rows);
        t.dq.write_bytes(0, PANELS * t.stride * NR);
        let seen = mask.first_of(row, position, rows);
        for run in runs {
            let tiles = tiles(run, position, rows, seen);
            // Where the queries stand among the keys, after them if the run ends before.
            let q0 = position.saturating_sub(run.first);
            for k0 in tiles.clone().step_by(KEYS) {
                let (keys, at) = (KEYS.min(tiles.end - k0), run.at + k0);
                for p in 0..rows.div_ceil(NR) {
                    // On the diagonal a panel sees the keys up to its last query.
                    let (panel, seen) = (p * KEYS * NR, keys.min(q0 + (p + 1) * NR - k0));
                    let shape = |deep| (whole(unit, seen), NR, deep);
                    let columns = p * NR;
                    let (keys_here, values_here) = (t.keys.rows_from(unit, at), t.values.rows_from(unit, at));
                    let (scores, dp) = (into(t.scores.add(panel), NR, false), into(t.dp.add(panel), NR, false));
                    multiply::<T>(simd, shape(e), keys_here, t.query.columns_from(columns), scores);
                    multiply::<T>(simd, shape(v), values_here, t.dout.columns_from(columns), dp);
                    let (first, queries) = ((row + columns, position + columns), NR.min(rows - columns));
                    hide(t.scores.add(panel), run.first + k0, seen, first, queries, mask);
                    t.panel::<T>(simd, p, seen, keys, scale);
                    let ds = Packed::b(unit, t.ds_panels.add(p * t.ds_bytes), KEYS);
                    let dq = into(t.dq.add(columns * t.stride), NR, true);
                    multiply::<T>(simd, (lines, NR, seen), t.keys_transposed.rows_deep(unit, at), ds, dq);
                }
                // Rows of keys that on the diagonal are read from the same panel on.
                let step = NR.next_multiple_of(unit.rows());
                for r0 in (0..keys).step_by(step) {
                    let from = if k0 == q0 { r0 / NR * NR } else { 0 };
                    let of_values = (t.p_rows, t.dout_rows, t.dv, t.value_stride, v);
                    let of_keys = (t.ds_rows, t.query_rows, t.dk, t.stride, e);
                    for (a, b, c, stride, n) in [of_values, of_keys] {
                        let shape = (whole(unit, step.min(keys - r0)), whole(unit, n), rows - from);
                        let (a, c) = (a.rows_from(unit, r0).rows_deep(unit, from), c.add((at + r0) * stride));
                        multiply::<T>(simd, shape, a, b.columns_deep(unit, from), into(c, stride, true));
                    }
                }
            }
        }
    }
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
    /// From scores and do·vᵀ of `seen` keys to weights and gradients of scores: as left operands at depth `k` where they are in
    /// tile registers, else in place; the gradients also as a right operand. Zeros up to `keys`.
    unsafe fn grad_panel<T>(
        unit: Unit, scores: *mut f32, dp: *mut f32, ds_panel: *mut u8, rows: (Packed, Packed),
        lse: &[f32; NR], dots: &[f32; NR], k: usize, seen: usize, keys: usize, scale: f32,
    ) -> () {
        let (scores, dp) = (scores.cast::<[f32; NR]>(), dp.cast::<[f32; NR]>());
        let (lse, dots) = (*lse, *dots);
        for key in (0..keys.next_multiple_of(2)).step_by(2) {
            let mut pair = [[0.0; NR]; 2];
            for (odd, to) in pair.iter_mut().enumerate().take(keys - key) {
                let at = key + odd;
                let (mut p, mut ds) = ([0.0; NR], [0.0; NR]);
                if at < seen {
                    let (score, dp) = (*scores.add(at), *dp.add(at));
                    for l in 0..NR {
                        p[l] = simd::exp(score[l] * scale - lse[l]);
                        ds[l] = p[l] * (dp[l] - dots[l]) * scale;
                    }
                }
                match unit {
                    Unit::Vector => {
                        let (scores, dp) = (&mut *scores.add(at), &mut *dp.add(at));
                        for l in 0..NR {
                            scores[l] = T::of(p[l]).to();
                            dp[l] = T::of(ds[l]).to();
                        }
                    }
                    Unit::Amx => {
                        put_a_line(rows.0, at, k, &p);
                        put_a_line(rows.1, at, k, &ds);
                    }
                }
                *to = ds;
            }
            put_b_pair::<T>(unit, ds_panel, key, &pair);
        }
    }
}
