//! Causal attention over packed Q·K·V, tile by tile: the score matrix never exists whole.
//!
//! Shapes: qkv `[b, s, (q + u)·e + u·v]`, o `[b, s, q·v]`, lse `[b, q, s]`. Query head `h` reads key and value head
//! `h / (q / u)`.
//!
//! A task owns a key-value head of a sequence, or some of the queries that read it, and packs the keys and values once. Tiles are
//! transposed: rows are keys, columns are the queries of a panel. So maxima and sums go down the columns in vector registers, and
//! weights are already laid out as the next matmul reads them. Keys are visited in tiles counted from position 0 and sums go in key order,
//! so a query's bits do not depend on the queries around it. A context-parallel rank has two chunks of a sequence: tiles of queries and of keys are
//! counted from the start of each chunk, so chunks meet at the corners of tiles or not at all. Scores, sums and gradient sums are in f32; weights and score gradients
//! are stored in the compute type for the next matmul.

mod backward;
mod cached;
mod forward;
mod merge;
pub mod naive;

pub use backward::over_parts_grad;
pub use forward::over_parts;
pub use merge::merge;

use super::call::{Call, Kernel, Kernels, Ptr};
use super::float::Float;
use super::gemm::{K_STEP, Matrix, NR, Unit};
use super::position::{argmax, last_position};
use super::simd::Simd;
use crate::by_kind;
use lockstep_ir::op::Ring;
use lockstep_ir::{DType, Run, Span};

/// The kernels of this family.
pub fn kernels<T: Float>() -> Kernels {
    by_kind! { call: Call => Kernel;
        Attention { window } => forward::forward::<T>(call, window),
        AttentionGrad { window } => backward::grad::<T>(call, window),
        AttentionScores { window } => naive::scores::<T>(call, window),
        AttentionScoresGrad { .. } => naive::scores_grad::<T>(call),
        AttentionMix { .. } => naive::mix::<T>(call),
        AttentionMixGrad { .. } => naive::mix_grad::<T>(call),
        CachedAttention { latent, window, .. } => cached::forward::<T>(call, latent, window),
        LastPosition => last_position::<T>(call),
        Argmax { known } => argmax::<T>(call, known),
    }
}

/// Keys of a tile: whole panels of every unit.
const KEYS: usize = 96;

#[derive(Clone, Copy)]
struct HeadShape {
    seq: usize,
    /// Elements of a head of Q and K.
    e: usize,
    /// Elements of a head of V.
    v: usize,
    heads: usize,
    group: usize,
    kv_heads: usize,
    /// Elements of a row of qkv.
    width: usize,
    scale: f32,
}

impl HeadShape {
    fn of(call: &Call) -> Self {
        let (heads, kv_heads, e) = (call.size("heads"), call.size("kv_heads"), call.size("head_dim"));
        Self {
            seq: call.size("seq"),
            e,
            v: call.size("value_dim"),
            heads,
            group: heads / kv_heads,
            kv_heads,
            width: call.size("qkv"),
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
        self.k(b, s, self.kv_heads) + kv * self.v
    }

    fn o(&self, b: usize, s: usize, h: usize) -> usize {
        ((b * self.seq + s) * self.heads + h) * self.v
    }
}

/// Keys and values, in rows of their own or of packed Q·K·V: K of all heads, then V.
#[derive(Clone, Copy)]
struct Keys<T> {
    first: Ptr<T>,
    /// Elements of a row, and of the K section.
    width: usize,
    values: usize,
    /// Rows of a sequence.
    rows: usize,
    e: usize,
    v: usize,
}

impl<T> Keys<*const T> {
    /// Those of packed Q·K·V.
    fn packed(shape: &HeadShape, qkv: *const T) -> Self {
        Self::new(shape, qkv.wrapping_add(shape.heads * shape.e), shape.width, shape.seq)
    }

    /// Those of packed K·V with this many rows.
    fn apart(shape: &HeadShape, kv: *const T, rows: usize) -> Self {
        Self::new(shape, kv, shape.kv_heads * (shape.e + shape.v), rows)
    }
}

impl<T> Keys<T> {
    fn new(shape: &HeadShape, first: T, width: usize, rows: usize) -> Self {
        Self { first: Ptr(first), width, values: shape.kv_heads * shape.e, rows, e: shape.e, v: shape.v }
    }

    /// Where row `row` of sequence `b` starts for a key head, and for a value head.
    fn at(&self, b: usize, row: usize, head: usize) -> [usize; 2] {
        [head * self.e, self.values + head * self.v].map(|column| (b * self.rows + row) * self.width + column)
    }
}

impl<T: Float> Keys<*const T> {
    /// Keys and values of a head from a row on.
    ///
    /// # Safety
    /// The operand has the row.
    unsafe fn head(&self, b: usize, row: usize, head: usize) -> [Matrix<T>; 2] {
        // SAFETY: the caller vouches.
        self.at(b, row, head).map(|at| Matrix::rows(unsafe { self.first.at(at) }, self.width))
    }
}

/// Keys that stand together: where they are in the sequence, in their operand, and packed, from a multiple of a tile on.
#[derive(Clone, Copy, Default)]
struct KeyRun {
    /// Position of the first.
    first: usize,
    /// Its row in the operand.
    row: usize,
    /// Where it is packed.
    at: usize,
    len: usize,
}

/// Most runs of keys: those of two chunks, before, between and after them.
const RUNS: usize = 5;

/// Which positions a rank's queries and its keys have. A run of keys is one of queries, or has no position of any.
#[derive(Clone, Copy)]
struct Places {
    queries: [Run; 2],
    keys: [KeyRun; RUNS],
    /// Rows of packed keys.
    room: usize,
}

impl Places {
    fn new(queries: [Run; 2], runs: impl IntoIterator<Item = Run>) -> Self {
        let (mut keys, mut room) = ([KeyRun::default(); RUNS], 0);
        for (to, Run { whole: first, local: row, len }) in keys.iter_mut().zip(runs.into_iter().filter(|r| r.len > 0)) {
            *to = KeyRun { first, row, at: room, len };
            room += len.next_multiple_of(KEYS);
        }
        Self { queries, keys, room }
    }

    /// Sequences of `seq` positions that are here whole.
    fn whole(seq: usize) -> Self {
        let all = Span::ALL.runs(seq);
        Self { room: seq, ..Self::new(all, all) }
    }

    /// A rank's queries, over the part of as many keys that has come around a ring, or over all keys.
    fn of_parts(call: &Call, ring: Option<Ring>) -> Self {
        let rows = call.size("seq");
        match ring {
            Some(Ring { step, .. }) => Self::parts(call.positions(), call.bound.positions_before(step), rows),
            None => Self::gathered(call.positions(), rows, call.size("keys")),
        }
    }

    /// Parts of as many positions.
    fn parts(queries: Span, keys: Span, rows: usize) -> Self {
        Self::new(queries.runs(rows), keys.runs(rows))
    }

    /// A part of the queries, over all `seq` keys.
    fn gathered(queries: Span, rows: usize, seq: usize) -> Self {
        let queries = queries.runs(rows);
        let [a, b] = queries.map(|run| (run.whole, run.whole + run.len));
        let run = |(from, to): (usize, usize)| Run { whole: from, local: from, len: to.saturating_sub(from) };
        let last = if b.0 < b.1 { b } else { a };
        Self::new(queries, [(0, a.0), a, (a.1, b.0), b, (last.1, seq)].map(run))
    }

    /// Panels of up to `NR` queries, each in one run: (its first row, that one's position, queries).
    fn panels(&self) -> usize {
        self.queries.iter().map(|run| run.len.div_ceil(NR)).sum()
    }

    fn panel(&self, index: usize) -> (usize, usize, usize) {
        let before = self.queries[0].len.div_ceil(NR);
        let (run, index) = if index < before { (self.queries[0], index) } else { (self.queries[1], index - before) };
        (run.local + index * NR, run.whole + index * NR, NR.min(run.len - index * NR))
    }

    /// The runs of keys that there are.
    fn runs(&self) -> impl Iterator<Item = &KeyRun> {
        self.keys.iter().filter(|run| run.len > 0)
    }
}

/// What queries of a sequence see of the keys up to their own.
#[derive(Clone, Copy)]
struct Mask {
    /// Where the document of every row starts; null where all are in one document.
    starts: *const u32,
    /// How many keys a query sees at most.
    window: usize,
}

impl Mask {
    /// Of sequence `b`; `starts` is null or has an element per row of every sequence.
    fn of(starts: *const u32, b: usize, seq: usize, window: Option<usize>) -> Self {
        let starts = if starts.is_null() { starts } else { starts.wrapping_add(b * seq) };
        Self { starts, window: window.unwrap_or(usize::MAX).max(1) }
    }

    /// Whether queries see all keys up to their own.
    fn is_causal(self) -> bool {
        self.starts.is_null() && self.window == usize::MAX
    }

    /// The first key that the query in a row, at a position, sees. A start after the query counts as the query.
    ///
    /// # Safety
    /// The sequence has the row.
    unsafe fn first(self, row: usize, position: usize) -> usize {
        let start = match self.starts.is_null() {
            true => 0,
            // SAFETY: the caller vouches.
            false => (unsafe { *self.starts.add(row) } as usize).min(position),
        };
        start.max((position + 1).saturating_sub(self.window))
    }

    /// The first key that one of `queries` queries from a row, at a position, on sees.
    ///
    /// # Safety
    /// The sequence has these rows.
    unsafe fn first_of(self, row: usize, position: usize, queries: usize) -> usize {
        // SAFETY: the caller vouches.
        (0..queries).map(|q| unsafe { self.first(row + q, position + q) }).min().unwrap_or(0)
    }
}

/// The tiles of a run of keys that some of `queries` queries from `position` on see, the first key that one of them sees being
/// `seen`: where in the run they start, and how far keys are seen.
fn tiles(run: &KeyRun, position: usize, queries: usize, seen: usize) -> std::ops::Range<usize> {
    let end = (position + queries).saturating_sub(run.first).min(run.len);
    seen.saturating_sub(run.first) / KEYS * KEYS..end
}

/// Rows of a matmul whose target has room for whole tiles: tile registers write them whole.
fn whole(unit: Unit, rows: usize) -> usize {
    match unit {
        Unit::Vector => rows,
        Unit::Amx => rows.next_multiple_of(unit.rows()),
    }
}

/// Hands out pieces of a scratch, one after the other.
struct Pieces {
    base: *mut u8,
    used: usize,
}

impl Pieces {
    fn take<T>(&mut self, bytes: usize) -> *mut T {
        let at = self.base.wrapping_add(self.used);
        self.used += bytes.next_multiple_of(64);
        at.cast()
    }
}

/// Scratch of one kernel as bytes and bytes per product of letters, where `s` stands for positions.
pub struct Scratch {
    fixed: usize,
    per_element: usize,
    per_position: usize,
    per_both: usize,
}

impl Scratch {
    /// An upper bound for `threads` threads of what is `bytes(positions, e)` on one: linear in both but for rounding up.
    fn of(threads: usize, bytes: impl Fn(usize, usize) -> usize) -> Self {
        // Slopes between sizes at which nothing is rounded; rounding up adds less than a panel in either direction.
        const N: usize = 96 * 64;
        let (one, panel) = (bytes(N, N), KEYS.max(K_STEP).max(NR));
        let per_both = (one + bytes(2 * N, 2 * N) - bytes(2 * N, N) - bytes(N, 2 * N)).div_ceil(N * N);
        let per_position = (bytes(2 * N, N) - one).div_ceil(N) - per_both * N;
        let per_element = (bytes(N, 2 * N) - one).div_ceil(N) - per_both * N;
        let fixed = one - per_both * N * N - (per_position + per_element) * N;
        Self {
            fixed: threads * (fixed + panel * (per_position + per_element + panel * per_both) + 64 * 32),
            per_element: threads * (per_element + panel * per_both),
            per_position: threads * (per_position + panel * per_both),
            per_both: threads * per_both,
        }
    }

    /// The same where there are this many positions more than the letter says.
    fn and_positions(self, more: usize) -> Self {
        Self {
            fixed: self.fixed + more * self.per_position,
            per_element: self.per_element + more * self.per_both,
            ..self
        }
    }

    /// The same for keys in runs.
    pub fn in_runs(self) -> Self {
        self.and_positions(RUNS * KEYS)
    }

    /// As a device profile's terms, with the letter of positions.
    pub fn terms(&self, position: &'static str, both: &'static str) -> (u64, Vec<(u64, &'static str)>) {
        let terms = [(self.per_element, "widest_dim"), (self.per_position, position), (self.per_both, both)];
        (self.fixed as u64, terms.map(|(bytes, letters)| (bytes as u64, letters)).to_vec())
    }
}

/// Scratch of `forward` and `cached`.
pub fn scratch(simd: Simd, compute: DType, threads: usize) -> Scratch {
    let unit = Unit::for_dtype(compute, simd);
    Scratch::of(threads, |positions, e| forward::Buffers::bytes(unit, positions, (e, e)))
}

/// Scratch of `grad`.
pub fn grad_scratch(simd: Simd, compute: DType, threads: usize) -> Scratch {
    let unit = Unit::for_dtype(compute, simd);
    Scratch::of(threads, |positions, e| backward::Buffers::bytes(unit, positions, (e, e)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_before_a_window_or_a_document_are_not_visited() {
        let (none, starts) = (std::ptr::null(), [vec![0; 250], vec![250; 150]].concat());
        // (documents, window, first query, queries) and the first key that is looked at.
        let cases = [
            (none, None, 300, 32, 0),
            (none, Some(1), 300, 32, 288),
            (none, Some(100), 300, 32, 192),
            (none, Some(14), 300, 1, 192),
            (none, Some(12), 300, 1, 288),
            (none, Some(1000), 300, 32, 0),
            (starts.as_ptr(), None, 300, 32, 192),
            (starts.as_ptr(), Some(20), 320, 32, 288),
            (starts.as_ptr(), Some(200), 240, 32, 0),
        ];
        for (starts, window, first, queries, expected) in cases {
            // SAFETY: there are starts of 400 positions, or none.
            let seen = unsafe { Mask::of(starts, 0, 400, window).first_of(first, first, queries) };
            let found = tiles(&Places::whole(400).keys[0], first, queries, seen);
            assert_eq!(found, expected..first + queries, "{window:?} {first} {queries}");
        }
    }

    /// Tiles that all queries of a rank visit, as the kernels do: in the forward pass by panels, in the backward pass by tiles.
    fn visited(places: &Places, window: Option<usize>) -> [usize; 2] {
        [NR, KEYS].map(|step| {
            let mask = Mask::of(std::ptr::null(), 0, 0, window);
            let of_run = |queries: &Run| -> usize {
                let panels = (0..queries.len).step_by(step).map(|q| (queries.whole + q, step.min(queries.len - q)));
                let tiles = panels.flat_map(|(position, n)| {
                    // SAFETY: there are no documents.
                    let seen = unsafe { mask.first_of(0, position, n) };
                    places.runs().map(move |run| tiles(run, position, n, seen).step_by(KEYS).count())
                });
                tiles.sum()
            };
            places.queries.iter().map(of_run).sum()
        })
    }

    #[test]
    fn causal_attention_visits_as_many_tiles_on_every_context_parallel_rank_in_every_step() {
        for (seq, parts) in [(64, 2), (800, 2), (2400, 4), (1728, 3)] {
            let chunk = seq / parts / 2;
            let span = |i: usize| Span { first: i * chunk, count: chunk, then: (2 * parts - 1 - i) * chunk };
            let ring = |i: usize, window| {
                let step =
                    |k: usize| visited(&Places::parts(span(i), span((i + parts - k) % parts), 2 * chunk), window);
                (0..parts).map(step).fold([0, 0], |a, b| [a[0] + b[0], a[1] + b[1]])
            };
            let gathered = |i: usize| visited(&Places::gathered(span(i), 2 * chunk, seq), None);
            assert!((1..parts).all(|i| ring(i, None) == ring(0, None)), "{seq} over {parts}");
            if chunk.is_multiple_of(KEYS) {
                assert!((0..parts).all(|i| gathered(i) == ring(0, None)), "{seq} over {parts}, gathered");
            }
            if chunk > 2 * KEYS {
                assert_ne!(ring(0, Some(chunk)), ring(1, Some(chunk)), "a window makes ranks unequal");
            }
        }
    }

    #[test]
    fn runs_of_keys_cover_the_sequence_and_are_packed_apart() {
        for (first, count, then, rows, seq) in [(0, 5, 15, 10, 20), (5, 5, 10, 10, 20), (10, 10, 20, 10, 20)] {
            let places = Places::gathered(Span { first, count, then }, rows, seq);
            let covered: Vec<usize> = places.runs().flat_map(|run| run.first..run.first + run.len).collect();
            assert_eq!(covered, (0..seq).collect::<Vec<_>>());
            assert!(places.runs().zip(places.runs().skip(1)).all(|(a, b)| a.at + a.len <= b.at));
            assert!(places.runs().all(|run| run.at.is_multiple_of(KEYS) && run.at + run.len <= places.room));
        }
    }

    #[test]
    fn the_profile_asks_for_enough_scratch_at_every_shape() {
        for unit in [Unit::Vector, Unit::Amx] {
            for bytes in [forward::Buffers::bytes, backward::Buffers::bytes] {
                let scratch = Scratch::of(3, |positions, e| bytes(unit, positions, (e, e)));
                for positions in (1..200).chain([1000, 4097, 100_000]) {
                    for e in (1..200).chain([256, 1000, 4096]) {
                        let asked = scratch.fixed
                            + scratch.per_element * e
                            + scratch.per_position * positions
                            + scratch.per_both * positions * e;
                        let needed = 3 * bytes(unit, positions, (e, e));
                        assert!(asked >= needed, "{unit:?}, {positions} positions, head of {e}");
                        assert!(asked <= 2 * needed + (3 << 21), "{unit:?}: {asked} for {needed}");
                    }
                }
            }
        }
    }
}
