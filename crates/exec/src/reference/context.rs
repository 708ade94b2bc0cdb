//! Attention over parts of the keys: of context-parallel ranks, over sequences that are there whole.

use super::at::{At, Definition, Definitions, add_scaled, dot, log_sum_exp};
use super::attention::first_keys;
use super::packed::Heads;
use crate::by_kind;
use lockstep_ir::op::{Dims, Ring};
use std::ops::Range;

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        PartAttention { window, ring } => {
            attention(&at.dims, at.x[0], at.x[1], &first_keys(&at.dims, at.given(2), window), ring).into()
        },
        PartAttentionGrad { window, ring } => {
            grad(&at.dims, at.x, &first_keys(&at.dims, at.given(5), window), ring).into()
        },
        AttentionMerge => merge(&at.dims, at.x).into(),
    }
}

/// The part of the sequence that a position is in, in zig-zag order.
fn part(position: usize, parts: usize, seq: usize) -> usize {
    let chunk = position / (seq / (2 * parts)).max(1);
    if parts == 1 { 0 } else { chunk.min(2 * parts - 1 - chunk) }
}

/// Whether a step of a ring is about this query and key: the key's part is `step` parts before the query's own.
fn meet(ring: Option<Ring>, query: usize, key: usize, seq: usize) -> bool {
    ring.is_none_or(|Ring { step, parts }| part(key, parts, seq) == (part(query, parts, seq) + parts - step) % parts)
}

/// Calls `f(b, h, s, keys)` for every query, with the keys that it sees; `first` says from which on, of every row.
fn each_query(dims: &Dims, first: &[usize], ring: Option<Ring>, mut f: impl FnMut(usize, usize, usize, &[usize])) {
    let g = Heads::of(dims);
    for b in 0..dims.size("batch") {
        for s in 0..g.seq {
            let keys: Vec<usize> = (first[b * g.seq + s]..=s).filter(|t| meet(ring, s, *t, g.seq)).collect();
            (0..g.heads).for_each(|h| f(b, h, s, &keys));
        }
    }
}

/// Where in packed K·V the key (0) or value (1) stands that query head `h` reads.
fn at(g: &Heads, b: usize, t: usize, h: usize, value: usize) -> Range<usize> {
    let (row, head) = ((b * g.seq + t) * g.kv_heads * (g.e + g.v), h / (g.heads / g.kv_heads));
    let (first, n) = if value == 0 { (head * g.e, g.e) } else { (g.kv_heads * g.e + head * g.v, g.v) };
    row + first..row + first + n
}

fn score(g: &Heads, (qkv, kv): (&[f64], &[f64]), b: usize, h: usize, s: usize, t: usize) -> f64 {
    dot(&qkv[g.range(b, s, h)], &kv[at(g, b, t, h, 0)]) / (g.e as f64).sqrt()
}

/// o and lse.
fn attention(dims: &Dims, qkv: &[f64], kv: &[f64], first: &[usize], ring: Option<Ring>) -> [Vec<f64>; 2] {
    let g = Heads::of(dims);
    let mut o = vec![0.0; dims.size("batch") * g.seq * g.heads * g.v];
    let mut lse = vec![f64::NEG_INFINITY; dims.size("batch") * g.heads * g.seq];
    each_query(dims, first, ring, |b, h, s, keys| {
        let scores: Vec<f64> = keys.iter().map(|t| score(&g, (qkv, kv), b, h, s, *t)).collect();
        if keys.is_empty() {
            return;
        }
        let total = log_sum_exp(&scores);
        lse[(b * g.heads + h) * g.seq + s] = total;
        let o = &mut o[g.out_range(b, s, h)];
        for (t, x) in keys.iter().zip(&scores) {
            add_scaled(o, (x - total).exp(), &kv[at(&g, b, *t, h, 1)]);
        }
    });
    [o, lse]
}

/// dq and dkv, from do, qkv, kv, and o and lse over all keys.
fn grad(dims: &Dims, x: &[&[f64]], first: &[usize], ring: Option<Ring>) -> [Vec<f64>; 2] {
    let g = Heads::of(dims);
    let (dout, qkv, kv, o, lse) = (x[0], x[1], x[2], x[3], x[4]);
    let scale = 1.0 / (g.e as f64).sqrt();
    let (mut dq, mut dkv) = (vec![0.0; dout.len() / g.v * g.e], vec![0.0; kv.len()]);
    each_query(dims, first, ring, |b, h, s, keys| {
        let (row, dout) = (g.out_range(b, s, h), &dout[g.out_range(b, s, h)]);
        let mean = dot(dout, &o[row]);
        for &t in keys {
            let p = (score(&g, (qkv, kv), b, h, s, t) - lse[(b * g.heads + h) * g.seq + s]).exp();
            let ds = p * (dot(dout, &kv[at(&g, b, t, h, 1)]) - mean) * scale;
            add_scaled(&mut dkv[at(&g, b, t, h, 1)], p, dout);
            add_scaled(&mut dq[((b * g.seq + s) * g.heads + h) * g.e..][..g.e], ds, &kv[at(&g, b, t, h, 0)]);
            add_scaled(&mut dkv[at(&g, b, t, h, 0)], ds, &qkv[g.range(b, s, h)]);
        }
    });
    [dq, dkv]
}

/// o and lse over two sets of keys.
fn merge(dims: &Dims, x: &[&[f64]]) -> [Vec<f64>; 2] {
    let (seq, heads) = (dims.size("seq"), dims.size("heads"));
    let e = dims.size("attended") / heads;
    let both = |i: usize| [x[1][i], x[3][i]];
    let lse: Vec<f64> = (0..x[1].len())
        .map(|i| if both(i).iter().all(|x| x.is_infinite()) { f64::NEG_INFINITY } else { log_sum_exp(&both(i)) })
        .collect();
    let element = |i: usize| {
        let (row, h) = (i / e / heads, i / e % heads);
        let at = (row / seq * heads + h) * seq + row % seq;
        let weight = |part: f64| if part.is_infinite() { 0.0 } else { (part - lse[at]).exp() };
        x[0][i] * weight(x[1][at]) + x[2][i] * weight(x[3][at])
    };
    [(0..x[0].len()).map(element).collect(), lse]
}
