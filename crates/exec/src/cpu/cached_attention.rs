//! Attention of new positions over a cache of keys and values.
//!
//! Shapes: qkv `[b, s, (q + 2u)·e]`, cache `[b, t, 2u·e]`, start and count `[b]`, o `[b, s, q·e]`. Keys are visited in
//! the tiles of `attention::forward`, counted from position 0, so a position gets the same bits however the text before
//! it was cut into calls.

use super::attention::{Starts, TILE, Tiles, finish_tile, into, softmax_tile};
use super::call::{Call, Ptr};
use super::float::Float;
use super::gemm::{Matrix, gemm_small};

/// Appends the new keys and values to the cache, then o.
pub fn forward<T: Float>(call: Call) {
    let (batch, seq, context) = (call.size('b'), call.size('s'), call.size('t'));
    let (heads, kv_heads, e) = (call.size('q'), call.size('u'), call.size('e'));
    let (width, cached, group) = (call.size('p'), call.size('w'), heads / kv_heads);
    let (qkv, start, count) = (Ptr(call.input::<T>(0)), Ptr(call.input::<u32>(2)), Ptr(call.input::<u32>(3)));
    let Some(cache) = call.output::<T>(1).map(Ptr) else { return };
    let span = |b: usize| {
        // SAFETY: both operands have an element per sequence.
        let (start, count) = unsafe { (*start.at(b) as usize, *count.at(b) as usize) };
        let fits = count <= seq && start.checked_add(count).is_some_and(|end| end <= context);
        assert!(fits, "{count} positions from {start} on leave a cache of {context} or a call of {seq}");
        (start, count)
    };
    call.rows(batch * seq, |from, to| {
        for (row, (b, i)) in (from..to).map(|row| (row, (row / seq, row % seq))) {
            let (start, count) = span(b);
            if i < count {
                // SAFETY: the position lies in the cache, and no other row has it.
                unsafe {
                    let keys_and_values = qkv.slice(row * width + heads * e, cached);
                    cache.slice((b * context + start + i) * cached, cached).copy_from_slice(keys_and_values);
                }
            }
        }
    });
    let Some(o) = call.output::<T>(0).map(Ptr) else { return };
    let (unit, scale) = (call.simd, 1.0 / (e as f32).sqrt());
    let scratch = Ptr(call.scratch::<u8>());
    let q_tiles = seq.div_ceil(TILE);
    call.pool.run(batch * heads * q_tiles, |task, worker| {
        let (b, h, tile) = (task / (heads * q_tiles), task / q_tiles % heads, task % q_tiles);
        let (start, count) = span(b);
        let q0 = tile * TILE;
        let to = |r: usize| ((b * seq + q0 + r) * heads + h) * e;
        let rows = count.saturating_sub(q0).min(TILE);
        // SAFETY: the task owns these rows of o; each worker has tiles of its own; positions up to start + count are in
        // the cache.
        unsafe {
            (rows..TILE.min(seq - q0)).for_each(|r| o.slice(to(r), e).fill(T::of(0.0)));
            if rows == 0 {
                return;
            }
            let t = Tiles::<T>::of(scratch.get(), worker, e);
            let (maxima, sums) = (t.rows, t.rows.add(TILE));
            for r in 0..rows {
                *maxima.add(r) = f32::NEG_INFINITY;
                *sums.add(r) = 0.0;
            }
            t.out.write_bytes(0, rows * e);
            let query = Matrix::rows(qkv.at((b * seq + q0) * width + h * e), width);
            let first = start + q0;
            for k0 in (0..first + rows).step_by(TILE) {
                let columns = TILE.min(first + rows - k0);
                let key = cache.at((b * context + k0) * cached + h / group * e).cast_const();
                let value = Matrix::rows(key.add(kv_heads * e), cached);
                let key = Matrix::rows(key, cached).transposed();
                gemm_small(unit, (rows, columns, e), query, key, into(t.scores, TILE, false), t.packed);
                let seen = first as isize - k0 as isize + 1;
                let starts = Starts::NONE;
                softmax_tile(unit, t.scores, t.weights, t.out, maxima, sums, rows, columns, seen, starts, k0, e, scale);
                let weights = Matrix::rows(t.weights.cast_const(), TILE);
                gemm_small(unit, (rows, e, columns), weights, value, into(t.out, e, true), t.packed);
            }
            finish_tile(unit, t.out, maxima, sums, o.at(to(0)), heads * e, std::ptr::null_mut(), rows, e);
        }
    });
}
