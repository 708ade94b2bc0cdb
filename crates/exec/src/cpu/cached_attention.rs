//! Attention of new positions over a cache of keys and values.
//!
//! Shapes: qkv `[b, s, (q + 2u)·e]`, cache `[b, t, 2u·e]`, start and count `[b]`, o `[b, s, q·e]`. Keys are visited in
//! the tiles of `attention::forward`, counted from position 0, so a position gets the same bits however the text before
//! it was cut into calls.

use super::attention::{TILE_K, TILE_Q, Tiles};
use super::call::{Call, Ptr};
use super::gemm::{Matrix, gemm_small};
use super::simd;

/// Appends the new keys and values to the cache, then o.
pub fn forward(call: Call) {
    let (batch, seq, context) = (call.size('b'), call.size('s'), call.size('t'));
    let (heads, kv_heads, e) = (call.size('q'), call.size('u'), call.size('e'));
    let (width, cached, group) = (call.size('p'), call.size('w'), heads / kv_heads);
    let (qkv, start, count) = (Ptr(call.input::<f32>(0)), Ptr(call.input::<u32>(2)), Ptr(call.input::<u32>(3)));
    let Some(cache) = call.output::<f32>(1).map(Ptr) else { return };
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
    let Some(o) = call.output::<f32>(0).map(Ptr) else { return };
    let (unit, scale) = (call.simd, 1.0 / (e as f32).sqrt());
    let scratch = Ptr(call.scratch::<f32>());
    let q_tiles = seq.div_ceil(TILE_Q);
    call.pool.run(batch * heads * q_tiles, |task, worker| {
        let (b, h, tile) = (task / (heads * q_tiles), task / q_tiles % heads, task % q_tiles);
        let (start, count) = span(b);
        let q0 = tile * TILE_Q;
        let to = |r: usize| ((b * seq + q0 + r) * heads + h) * e;
        let rows = count.saturating_sub(q0).min(TILE_Q);
        // SAFETY: the task owns these rows of o; each worker has tiles of its own; positions up to start + count are in
        // the cache.
        unsafe {
            (rows..TILE_Q.min(seq - q0)).for_each(|r| o.slice(to(r), e).fill(0.0));
            if rows == 0 {
                return;
            }
            let tiles = Tiles::of(scratch.get(), worker, e);
            let maxima = std::slice::from_raw_parts_mut(tiles.rows, rows);
            let sums = std::slice::from_raw_parts_mut(tiles.rows.add(TILE_Q), rows);
            maxima.fill(f32::NEG_INFINITY);
            sums.fill(0.0);
            std::slice::from_raw_parts_mut(tiles.out, rows * e).fill(0.0);
            let query = Matrix::rows(qkv.at((b * seq + q0) * width + h * e), width);
            let first = start + q0;
            for k0 in (0..first + rows).step_by(TILE_K) {
                let columns = TILE_K.min(first + rows - k0);
                let key = cache.at((b * context + k0) * cached + h / group * e).cast_const();
                let value = Matrix::rows(key.add(kv_heads * e), cached);
                let key = Matrix::rows(key, cached).transposed();
                gemm_small(unit, (rows, columns, e), query, key, tiles.scores, TILE_K, false, tiles.packed);
                unit.run(|| {
                    let out = std::slice::from_raw_parts_mut(tiles.out, rows * e);
                    for r in 0..rows {
                        // Keys after the query are masked: they get no weight.
                        let seen = (first + r + 1).saturating_sub(k0).min(columns);
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
                let weights = Matrix::rows(tiles.scores.cast_const(), TILE_K);
                gemm_small(unit, (rows, e, columns), weights, value, tiles.out, e, true, tiles.packed);
            }
            unit.run(|| {
                let out = std::slice::from_raw_parts(tiles.out, rows * e);
                for (r, sum) in sums.iter().enumerate() {
                    let inverse = 1.0 / sum;
                    for (to, x) in o.slice(to(r), e).iter_mut().zip(&out[r * e..(r + 1) * e]) {
                        *to = x * inverse;
                    }
                }
            });
        }
    });
}
