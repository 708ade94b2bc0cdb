//! Causal attention over packed Q·K·V, tile by tile: the score matrix never exists whole.
//!
//! Shapes: qkv `[b, s, (q + 2u)·e]`, o `[b, s, q·e]`, lse `[b, q, s]`. Query head `h` reads key and value head
//! `h / (q / u)`.
//!
//! A task owns a key-value head of a sequence, or some of the queries that read it, and packs the keys and values once. Tiles are
//! transposed: rows are keys, columns are the queries of a panel. So maxima and sums go down the columns in vector registers, and
//! weights are already laid out as the next matmul reads them. Keys are visited in tiles counted from position 0 and sums go in key order,
//! so a query's bits do not depend on the queries around it. Scores, sums and gradient sums are in f32; weights and score gradients
//! are stored in the compute type for the next matmul.

mod backward;
mod cached;
mod forward;
pub mod naive;

pub use backward::grad;
pub use cached::forward as cached;
pub use forward::forward;

use super::call::Call;
use super::gemm::{K_STEP, NR, Unit};
use super::simd::Simd;
use lockstep_ir::DType;

/// Keys of a tile: whole panels of every unit.
const KEYS: usize = 96;

#[derive(Clone, Copy)]
struct HeadShape {
    seq: usize,
    e: usize,
    heads: usize,
    group: usize,
    kv_heads: usize,
    /// Elements of a row of qkv.
    width: usize,
    scale: f32,
}

impl HeadShape {
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

/// What queries of a sequence see of the keys up to their own.
#[derive(Clone, Copy)]
struct Mask {
    /// Where the document of every position starts; null where all are in one document.
    starts: *const u32,
    /// How many keys a query sees at most.
    window: usize,
}

impl Mask {
    /// Of sequence `b`; `starts` is null or has an element per position of every sequence.
    fn of(starts: *const u32, b: usize, seq: usize, window: Option<usize>) -> Self {
        let starts = if starts.is_null() { starts } else { starts.wrapping_add(b * seq) };
        Self { starts, window: window.unwrap_or(usize::MAX).max(1) }
    }

    /// Whether queries see all keys up to their own.
    fn is_causal(self) -> bool {
        self.starts.is_null() && self.window == usize::MAX
    }

    /// The first key that the query at a position sees. A start after the query counts as the query.
    ///
    /// # Safety
    /// The sequence has the position.
    unsafe fn first(self, position: usize) -> usize {
        let start = match self.starts.is_null() {
            true => 0,
            // SAFETY: the caller vouches.
            false => (unsafe { *self.starts.add(position) } as usize).min(position),
        };
        start.max((position + 1).saturating_sub(self.window))
    }

    /// The first tile of keys that one of `queries` queries from `first` on sees.
    ///
    /// # Safety
    /// The sequence has these positions.
    unsafe fn first_tile(self, first: usize, queries: usize) -> usize {
        // SAFETY: the caller vouches.
        let seen = (first..first + queries).map(|q| unsafe { self.first(q) }).min().unwrap_or(0);
        seen / KEYS * KEYS
    }
}

/// Rows of a matmul whose target has room for whole tiles: tile registers write them whole.
fn whole(unit: Unit, rows: usize) -> usize {
    match unit {
        Unit::Vector => rows,
        Unit::Amx => rows.next_multiple_of(unit.rows()),
    }
}

/// Hands out pieces of a scratch, one behind the other.
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

    /// As a device profile's terms, with the letter of positions.
    pub fn terms(&self, position: &'static str, both: &'static str) -> (u64, Vec<(u64, &'static str)>) {
        let terms = [(self.per_element, "e"), (self.per_position, position), (self.per_both, both)];
        (self.fixed as u64, terms.map(|(bytes, letters)| (bytes as u64, letters)).to_vec())
    }
}

/// Scratch of `forward` and `cached`.
pub fn scratch(compute: DType, threads: usize) -> Scratch {
    let unit = Unit::for_dtype(compute, Simd::detect());
    Scratch::of(threads, |positions, e| forward::Buffers::bytes(unit, positions, e))
}

/// Scratch of `grad`.
pub fn grad_scratch(compute: DType, threads: usize) -> Scratch {
    let unit = Unit::for_dtype(compute, Simd::detect());
    Scratch::of(threads, |positions, e| backward::Buffers::bytes(unit, positions, e))
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
            let found = unsafe { Mask::of(starts, 0, 400, window).first_tile(first, queries) };
            assert_eq!(found, expected, "{window:?} {first} {queries}");
        }
    }

    #[test]
    fn the_profile_asks_for_enough_scratch_at_every_shape() {
        for unit in [Unit::Vector, Unit::Amx] {
            for bytes in [forward::Buffers::bytes, backward::Buffers::bytes] {
                let scratch = Scratch::of(3, |positions, e| bytes(unit, positions, e));
                for positions in (1..200).chain([1000, 4097, 100_000]) {
                    for e in (1..200).chain([256, 1000, 4096]) {
                        let asked = scratch.fixed
                            + scratch.per_element * e
                            + scratch.per_position * positions
                            + scratch.per_both * positions * e;
                        let needed = 3 * bytes(unit, positions, e);
                        assert!(asked >= needed, "{unit:?}, {positions} positions, head of {e}");
                        assert!(asked <= 2 * needed + (3 << 21), "{unit:?}: {asked} for {needed}");
                    }
                }
            }
        }
    }
}
