//! o and lse.

use super::super::call::{Call, Ptr};
use super::super::float::Float;
use super::super::gemm::{Matrix, NR, Packed, Target, Unit, multiply, pack_a, pack_b, put_b_pair, transpose};
use super::super::simd::{self, Simd, vectorised};
use super::{HeadShape, KEYS, KeyRun, Keys, Mask, Pieces, Places, tiles, whole};
use lockstep_ir::op::Ring;

/// What one thread works with.
#[derive(Clone, Copy)]
pub(super) struct Buffers {
    unit: Unit,
    /// Keys as the rows of a left operand, `e` deep.
    keys: Packed,
    /// Values transposed: `v` rows of a left operand, as deep as there are positions.
    values: Packed,
    /// A panel of queries, `e` deep.
    query: *mut u8,
    /// KEYS rows of NR scores, and the weights as a right operand.
    scores: *mut f32,
    weights: *mut u8,
    /// `v` rows of NR sums, and the same transposed.
    out: *mut f32,
    transposed: *mut f32,
    /// Per query: largest score and sum of weights so far.
    lanes: *mut Lanes,
}

#[derive(Clone, Copy)]
struct Lanes {
    maxima: [f32; NR],
    sums: [f32; NR],
}

impl Buffers {
    fn carve(base: *mut u8, unit: Unit, positions: usize, (e, v): (usize, usize)) -> (Self, usize) {
        let mut pieces = Pieces { base, used: 0 };
        let rows = v.next_multiple_of(96);
        let buffers = Self {
            unit,
            keys: Packed::a(unit, pieces.take(unit.bytes(positions.next_multiple_of(KEYS), e)), e),
            values: Packed::a(unit, pieces.take(unit.bytes(rows, positions)), positions),
            query: pieces.take(unit.bytes(NR, e)),
            scores: pieces.take(KEYS * NR * 4),
            weights: pieces.take(KEYS * NR * 4),
            out: pieces.take(rows * NR * 4),
            transposed: pieces.take(rows * NR * 4),
            lanes: pieces.take(size_of::<Lanes>()),
        };
        (buffers, pieces.used)
    }

    /// Bytes of one thread, for heads of `e` elements in Q and K and of `v` in V.
    pub fn bytes(unit: Unit, positions: usize, (e, v): (usize, usize)) -> usize {
        Self::carve(std::ptr::null_mut(), unit, positions, (e, v)).1
    }

    /// # Safety
    /// `scratch` holds `bytes` for every worker.
    pub unsafe fn of(scratch: *mut u8, worker: usize, unit: Unit, positions: usize, heads: (usize, usize)) -> Self {
        // SAFETY: the caller vouches.
        let own = unsafe { scratch.add(worker * Self::bytes(unit, positions, heads)) };
        Self::carve(own, unit, positions, heads).0
    }

    /// Packs the keys and values of a run, from `from`, a multiple of a tile, up to `end`.
    pub unsafe fn pack<T: Float>(
        &self,
        simd: Simd,
        [key, value]: [Matrix<T>; 2],
        run: &KeyRun,
        (from, end): (usize, usize),
        (e, v): (usize, usize),
    ) {
        let Self { unit, keys, values, .. } = *self;
        let (row, at, n) = (run.row + from, run.at + from, end - from);
        // SAFETY: the caller vouches for the rows of each.
        unsafe {
            pack_a(simd, key.skip_rows(row), n, e, keys.rows_from(unit, at));
            pack_a(simd, value.skip_rows(row).transposed(), v, n, values.rows_deep(unit, at));
        }
    }

    /// The outputs of up to NR queries over runs of keys, to rows of `stride`; lse where it is not null. The first query is in this row, at
    /// this position.
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn attend<'k, T: Float, O: Float>(
        &self,
        simd: Simd,
        (queries, (e, v), scale): (usize, (usize, usize), f32),
        query: Matrix<T>,
        (row, position): (usize, usize),
        runs: impl Iterator<Item = &'k KeyRun>,
        mask: Mask,
        o: *mut O,
        stride: usize,
        lse: *mut f32,
    ) {
        let Self { unit, keys, values, scores, weights, out, lanes, .. } = *self;
        let rows = whole(unit, v);
        // SAFETY: the keys and values of all positions up to the last query are packed; the caller vouches for the rest.
        unsafe {
            let packed = Packed::b(unit, self.query, e);
            pack_b(simd, query.transposed(), queries, e, packed);
            *lanes = Lanes { maxima: [f32::NEG_INFINITY; NR], sums: [0.0; NR] };
            out.write_bytes(0, rows * NR);
            let seen = mask.first_of(row, position, queries);
            for run in runs {
                let tiles = tiles(run, position, queries, seen);
                for k0 in tiles.clone().step_by(KEYS) {
                    let (n, at) = (KEYS.min(tiles.end - k0), run.at + k0);
                    let to = Target::F32 { ptr: scores, stride: NR, add: false };
                    multiply::<T>(simd, (whole(unit, n), NR, e), keys.rows_from(unit, at), packed, to);
                    hide(scores, run.first + k0, n, (row, position), queries, mask);
                    weigh::<T>(simd, unit, scores, weights, n, scale, lanes, out, v);
                    let (value, weight) = (values.rows_deep(unit, at), Packed::b(unit, weights, KEYS));
                    multiply::<T>(simd, (rows, NR, n), value, weight, Target::F32 { ptr: out, stride: NR, add: true });
                }
            }
            // A query that has seen no key has no weights.
            let sums = (*lanes).sums.map(|sum| if sum == 0.0 { 1.0 } else { sum });
            for row in 0..v {
                let row = &mut *out.cast::<[f32; NR]>().add(row);
                row.iter_mut().zip(&sums).for_each(|(x, sum)| *x /= sum);
            }
            transpose_rows(simd, out, self.transposed, o, stride, queries, v);
            if !lse.is_null() {
                (0..queries).for_each(|l| *lse.add(l) = (*lanes).maxima[l] + (*lanes).sums[l].ln());
            }
        }
    }
}

/// Takes the keys that a query must not see out of a tile of `n` keys from position `k0` on: those after its own position and those
/// before its document or its window. `row` and `first` are the row and the position of column 0.
pub(super) unsafe fn hide(
    scores: *mut f32,
    k0: usize,
    n: usize,
    (row, first): (usize, usize),
    queries: usize,
    mask: Mask,
) {
    for row in (first + 1).saturating_sub(k0)..n {
        let hidden = (k0 + row - first).min(NR);
        // SAFETY: the caller vouches for n rows of NR scores.
        unsafe { std::slice::from_raw_parts_mut(scores.add(row * NR), hidden).fill(f32::NEG_INFINITY) };
    }
    if mask.is_causal() {
        return;
    }
    for column in 0..queries {
        // SAFETY: the caller vouches for n rows of NR scores and for the queries.
        unsafe {
            let before = mask.first(row + column, first + column).saturating_sub(k0).min(n);
            (0..before).for_each(|row| *scores.add(row * NR + column) = f32::NEG_INFINITY);
        }
    }
}

/// o and lse; the second input, if given, says where documents start.
pub fn forward<T: Float>(call: Call, window: Option<usize>) {
    let shape = HeadShape::of(&call);
    over::<T, T>(call, window, Keys::packed(&shape, call.input(0)), Places::whole(shape.seq), 1);
}

/// o and lse of a part of the queries over keys that stand apart: over a part of a ring o is in f32. The third input, if given, says where
/// documents start.
pub fn over_parts<T: Float>(call: Call, window: Option<usize>, ring: Option<Ring>) {
    let shape = HeadShape::of(&call);
    let keys = Keys::apart(&shape, call.input(1), call.size("keys"));
    match ring {
        Some(_) => over::<T, f32>(call, window, keys, Places::of_parts(&call, ring), 2),
        None => over::<T, T>(call, window, keys, Places::of_parts(&call, ring), 2),
    }
}

/// o and lse of the queries of input 0; input `starts`, if given, says where documents start.
fn over<T: Float, O: Float>(call: Call, window: Option<usize>, kv: Keys<*const T>, places: Places, starts: usize) {
    let shape = HeadShape::of(&call);
    let HeadShape { seq, e, v, heads, group, kv_heads, width, scale } = shape;
    let (simd, unit) = (call.simd, Unit::of::<T>(call.simd));
    let qkv = Ptr(call.input::<T>(0));
    let starts = Ptr(call.given::<u32>(starts).unwrap_or(std::ptr::null()));
    let Some(o) = call.output::<O>(0).map(Ptr) else { return };
    let lse = Ptr(call.output::<f32>(1).unwrap_or(std::ptr::null_mut()));
    let scratch = Ptr(call.scratch::<u8>());
    let panels = places.panels();
    // Keys after the last query are seen by none.
    let end = places.queries.iter().map(|run| run.whole + run.len).max().unwrap_or(0);
    let pairs = call.size("batch") * kv_heads;
    let parts = parts(pairs, panels, call.pool.threads());
    call.pool.run(pairs * parts, |task, worker| {
        let (b, kv_head, part) = (task / parts / kv_heads, task / parts % kv_heads, task % parts);
        // SAFETY: the task owns these rows of o and lse; each worker has buffers of its own.
        unsafe {
            let buffers = Buffers::of(scratch.get(), worker, unit, places.room, (e, v));
            let runs = || places.runs().filter(|run| run.first < end);
            runs().for_each(|run| buffers.pack(simd, kv.head(b, 0, kv_head), run, (0, run.len), (e, v)));
            let mask = Mask::of(starts.get(), b, seq, window);
            for h in kv_head * group..(kv_head + 1) * group {
                for (row, position, queries) in (part..panels).step_by(parts).map(|panel| places.panel(panel)) {
                    let query = Matrix::rows(qkv.at(shape.q(b, row, h)), width);
                    let lse = match lse.get() {
                        null if null.is_null() => null,
                        lse => lse.add((b * heads + h) * seq + row),
                    };
                    let o = o.at(shape.o(b, row, h));
                    let (size, at) = ((queries, (e, v), scale), (row, position));
                    buffers.attend(simd, size, query, at, runs(), mask, o, heads * v, lse);
                }
            }
        }
    });
}

/// Into how many tasks the panels of a key-value head are split, so that every thread has a few; each packs its own keys.
pub(super) fn parts(pairs: usize, panels: usize, threads: usize) -> usize {
    (3 * threads).div_ceil(pairs).min(panels).max(1)
}

vectorised! {
    /// Scores become weights, rounded to `T`, as a right operand; fades what `out` (`e` rows) and the sums hold to the new maxima.
    unsafe fn weigh<T>(
        unit: Unit, scores: *const f32, weights: *mut u8, n: usize, scale: f32, lanes: *mut Lanes, out: *mut f32, e: usize,
    ) -> () {
        let rows = scores.cast::<[f32; NR]>();
        let Lanes { maxima: before, mut sums } = *lanes;
        let mut tops = [f32::NEG_INFINITY; NR];
        for row in 0..n {
            let row = *rows.add(row);
            for l in 0..NR {
                tops[l] = if row[l] > tops[l] { row[l] } else { tops[l] };
            }
        }
        let mut fades = [0.0; NR];
        // What exponents are taken of: a query that has seen no key yet has no maximum.
        let mut bases = [0.0; NR];
        for l in 0..NR {
            let top = tops[l] * scale;
            tops[l] = if before[l] > top { before[l] } else { top };
            bases[l] = if tops[l] == f32::NEG_INFINITY { 0.0 } else { tops[l] };
            fades[l] = simd::exp(before[l] - bases[l]);
            sums[l] *= fades[l];
        }
        for k in (0..n.next_multiple_of(2)).step_by(2) {
            let mut pair = [[0.0; NR]; 2];
            for (odd, to) in pair.iter_mut().enumerate().take(n - k) {
                let row = *rows.add(k + odd);
                for l in 0..NR {
                    to[l] = simd::exp(row[l] * scale - bases[l]);
                    sums[l] += to[l];
                }
            }
            put_b_pair::<T>(unit, weights, k, &pair);
        }
        if unit == Unit::Amx {
            for k in (n.next_multiple_of(2)..n.next_multiple_of(32)).step_by(2) {
                put_b_pair::<T>(unit, weights, k, &[[0.0; NR]; 2]);
            }
        }
        if fades != [1.0; NR] {
            for row in 0..e {
                let row = &mut *out.cast::<[f32; NR]>().add(row);
                for l in 0..NR {
                    row[l] *= fades[l];
                }
            }
        }
        *lanes = Lanes { maxima: tops, sums };
    }
}

/// `e` rows of `NR` sums become `queries` rows of `e` elements, by way of `transposed`.
pub(super) unsafe fn transpose_rows<T: Float>(
    simd: Simd,
    sums: *const f32,
    transposed: *mut f32,
    to: *mut T,
    stride: usize,
    queries: usize,
    e: usize,
) {
    // SAFETY: the caller vouches for the ranges.
    unsafe {
        transpose(simd, (e, NR), sums, NR, transposed, e);
        round_rows(simd, transposed, e, to, stride, queries, e);
    }
}

vectorised! {
    /// Rows of `e` floats, rounded.
    pub(super) unsafe fn round_rows<T>(
        from: *const f32, from_stride: usize, to: *mut T, stride: usize, rows: usize, e: usize,
    ) -> () {
        for r in 0..rows {
            for i in 0..e {
                *to.add(r * stride + i) = T::of(*from.add(r * from_stride + i));
            }
        }
    }
}
