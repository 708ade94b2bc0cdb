//! Attention over a cache of keys and values.

use super::at::log_sum_exp;
use lockstep_ir::op::Dims;

/// o, and the cache with the new keys and values. A key of latent attention is all that a position has there, its value the end of it.
pub fn attention(dims: &Dims, x: &[&[f64]], latent: bool, window: Option<usize>) -> [Vec<f64>; 2] {
    let [qkv, cache, table, slot, start, count, ref sinks @ ..] = *x else { panic!("cached attention has six inputs") };
    let (batch, seq, blocks, page) = (dims.size("batch"), dims.size("seq"), dims.size("blocks"), dims.size("page"));
    let (heads, kv_heads) = (dims.size("heads"), dims.size("kv_heads"));
    let (e, v) = (dims.size("head_dim"), dims.size("value_dim"));
    let (width, cached) = (dims.size("qkv"), dims.size("kv"));
    let mut cache = cache.to_vec();
    let mut o = vec![0.0; batch * seq * heads * v];
    for b in 0..batch {
        let (start, count) = (start[b] as usize, count[b] as usize);
        let place = |t: usize| table[slot[b] as usize * blocks + t / page] as usize * page + t % page;
        for s in 0..count {
            let (from, to) = ((b * seq + s) * width + heads * e, place(start + s) * cached);
            cache[to..to + cached].copy_from_slice(&qkv[from..from + cached]);
        }
        for (s, h) in (0..count).flat_map(|s| (0..heads).map(move |h| (s, h))) {
            let kv = h / (heads / kv_heads);
            let query = &qkv[(b * seq + s) * width + h * e..][..e];
            let row = |t: usize| &cache[place(t) * cached..][..cached];
            let values = if latent { e - v } else { kv_heads * e + kv * v };
            let (key, value) = (|t: usize| &row(t)[kv * e..][..e], |t: usize| &row(t)[values..][..v]);
            let dot = |t: usize| query.iter().zip(key(t)).map(|(q, k)| q * k).sum::<f64>();
            let first = (start + s + 1).saturating_sub(window.map_or(usize::MAX, |w| w.max(1)));
            let scores: Vec<f64> = (first..=start + s).map(|t| dot(t) / (e as f64).sqrt()).collect();
            let sink = sinks.first().map(|sinks| sinks[h]);
            let lse = log_sum_exp(&scores.iter().copied().chain(sink).collect::<Vec<_>>());
            for i in 0..v {
                o[((b * seq + s) * heads + h) * v + i] =
                    scores.iter().enumerate().map(|(t, x)| (x - lse).exp() * value(first + t)[i]).sum();
            }
        }
    }
    [o, cache]
}
