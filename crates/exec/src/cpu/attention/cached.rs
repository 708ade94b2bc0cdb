//! Attention of new positions over a cache of keys and values.
//!
//! Shapes: qkv `[b, s, (q + u)·e + u·v]`, cache `[pages, page, u·(e + v)]`, table `[slots, blocks]`, slot, start and count `[b]`, sinks `[q]`, o
//! `[b, s, q·v]`. In latent attention, qkv `[b, s, (q + 1)·e]` and cache `[pages, page, e]`: the value is the end of the one key. Keys are visited as in `forward`, so a position gets the same bits however the text before it was cut into calls, and
//! wherever its pages are: a page is whole tiles of keys. Sinks are applied to what `forward` gives.

use super::super::call::{Call, Ptr};
use super::super::float::Float;
use super::super::gemm::{Matrix, NR, Unit};
use super::super::sink::with_sink;
use super::forward::{Buffers, parts};
use super::{KEYS, KeyRun, Mask};

/// Appends the new keys and values to the cache, then o.
pub fn forward<T: Float>(call: Call, latent: bool, window: Option<usize>) {
    let (batch, seq) = (call.size("batch"), call.size("seq"));
    let (pages, page, blocks) = (call.size("pages"), call.size("page"), call.size("blocks"));
    let context = blocks * page;
    assert!(page.is_multiple_of(KEYS), "a page of {page} positions is no whole tiles of {KEYS}");
    let (heads, kv_heads) = (call.size("heads"), call.size("kv_heads"));
    let (e, v) = (call.size("head_dim"), call.size("value_dim"));
    let (width, cached, group) = (call.size("qkv"), call.size("kv"), heads / kv_heads);
    let qkv = Ptr(call.input::<T>(0));
    let [table, slot, start, count] = [2, 3, 4, 5].map(|i| Ptr(call.input::<u32>(i)));
    let sinks = call.given::<f32>(6).map(Ptr);
    let Some(cache) = call.output::<T>(1).map(Ptr) else { return };
    let span = |b: usize| {
        // SAFETY: both operands have an element per sequence.
        let (start, count) = unsafe { (*start.at(b) as usize, *count.at(b) as usize) };
        let fits = count <= seq && start.checked_add(count).is_some_and(|end| end <= context);
        assert!(fits, "{count} positions from {start} on leave a cache of {context} or a call of {seq}");
        (start, count)
    };
    let slots = call.size("slots");
    // The first row of the page that a block of a text is in.
    let row_of = |b: usize, block: usize| {
        // SAFETY: there is a slot for every text, and the table has a row for every slot.
        let page_of = unsafe {
            let slot = *slot.at(b) as usize;
            assert!(slot < slots && block < blocks, "slot {slot} has no block {block}");
            *table.at(slot * blocks + block) as usize
        };
        assert!(page_of < pages, "block {block} is in page {page_of} of {pages}");
        page_of * page
    };
    call.rows(batch * seq, |from, to| {
        for (row, (b, i)) in (from..to).map(|row| (row, (row / seq, row % seq))) {
            let (start, count) = span(b);
            if i < count {
                let at = row_of(b, (start + i) / page) + (start + i) % page;
                // SAFETY: the position lies in the cache, and no other row has it.
                unsafe {
                    let keys_and_values = qkv.slice(row * width + heads * e, cached);
                    cache.slice(at * cached, cached).copy_from_slice(keys_and_values);
                }
            }
        }
    });
    let Some(o) = call.output::<T>(0).map(Ptr) else { return };
    let (simd, unit, scale) = (call.simd, Unit::of::<T>(call.simd), 1.0 / (e as f32).sqrt());
    let scratch = Ptr(call.scratch::<u8>());
    // The heads of latent attention share one key. Where one position sees all keys, they are the columns of a panel, as positions are elsewhere:
    // no key is after any of them. Where there are fewer texts than threads, tasks have some of the heads each.
    let (pairs, panels, threads) = (batch * kv_heads, seq.div_ceil(NR), call.pool.threads());
    let together = latent && seq == 1 && window.is_none();
    let most = if together { group.div_ceil(NR) } else { group };
    let shares = if latent { (threads / pairs).clamp(1, most) } else { 1 };
    let parts = parts(pairs * shares, panels, threads);
    call.pool.run(pairs * shares * parts, |task, worker| {
        let (b, kv, share, part) =
            (task / parts / shares / kv_heads, task / parts / shares % kv_heads, task / parts % shares, task % parts);
        let (start, count) = span(b);
        let at = |i: usize, h: usize| ((b * seq + i) * heads + h) * v;
        // SAFETY: the task owns these rows of o; each worker has buffers of its own; positions up to start + count are in
        // the cache.
        unsafe {
            let buffers = Buffers::of(scratch.get(), worker, unit, context, (e, v));
            let mask = Mask::of(std::ptr::null(), b, context, window);
            let end = start + count;
            let run = KeyRun { len: end, ..KeyRun::default() };
            if part * NR < count {
                let at = |column: usize| cache.at(column).cast_const();
                let values = if latent { e - v } else { kv_heads * e + kv * v };
                let kv = [kv * e, values].map(|column| Matrix::rows(at(column), cached));
                let first = mask.first_of(0, start + part * NR, 1) / KEYS * KEYS;
                for block in first / page..end.div_ceil(page) {
                    let from = first.max(block * page) - block * page;
                    let of_page = KeyRun { row: row_of(b, block), at: block * page, ..run };
                    buffers.pack(simd, kv, &of_page, (from, page.min(end - block * page)), (e, v));
                }
            }
            if together {
                for h in (share * NR..heads).step_by(shares * NR) {
                    let columns = NR.min(heads - h);
                    let to = o.slice(at(0, h), columns * v);
                    if count == 0 {
                        to.fill(T::of(0.0));
                        continue;
                    }
                    let (query, mut lse) = (Matrix::rows(qkv.at(b * width + h * e), e), [0.0; NR]);
                    let (size, to_o) = ((columns, (e, v), scale), to.as_mut_ptr());
                    buffers.attend(simd, size, query, (0, start), [run].iter(), mask, to_o, v, lse.as_mut_ptr());
                    let Some(sinks) = sinks else { continue };
                    for (i, lse) in lse.iter().enumerate().take(columns) {
                        let share = with_sink(*lse, *sinks.at(h + i)).0;
                        o.slice(at(0, h + i), v).iter_mut().for_each(|o| *o = T::of(o.to() * share));
                    }
                }
                return;
            }
            for h in (kv * group + share..(kv + 1) * group).step_by(shares) {
                for first in (part..panels).step_by(parts).map(|panel| panel * NR) {
                    let queries = count.saturating_sub(first).min(NR);
                    (first + queries..seq.min(first + NR)).for_each(|i| o.slice(at(i, h), v).fill(T::of(0.0)));
                    if queries > 0 {
                        let query = Matrix::rows(qkv.at((b * seq + first) * width + h * e), width);
                        let (first_o, mut lse) = (o.at(at(first, h)), [0.0; NR]);
                        let (size, place) = ((queries, (e, v), scale), (0, start + first));
                        let to_lse = lse.as_mut_ptr();
                        buffers.attend(simd, size, query, place, [run].iter(), mask, first_o, heads * v, to_lse);
                        let Some(sink) = sinks.map(|sinks| *sinks.at(h)) else { continue };
                        for (i, lse) in lse.iter().enumerate().take(queries) {
                            let share = with_sink(*lse, sink).0;
                            o.slice(at(first + i, h), v).iter_mut().for_each(|o| *o = T::of(o.to() * share));
                        }
                    }
                }
            }
        }
    });
}
