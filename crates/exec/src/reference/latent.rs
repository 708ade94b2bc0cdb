//! Heads of latent attention.

use super::at::{At, Definition, Definitions};
use crate::by_kind;
use lockstep_ir::op::Dims;

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        LatentHeads { scale } => vec![heads(&at.dims, at.rows(), at.x, f64::from(scale))],
        LatentHeadsGrad { scale, .. } => grad(&at.dims, at.rows(), at.x[0], f64::from(scale)).into(),
    }
}

/// Where an element of a row of packed Q·K·V comes from.
enum From {
    Query(usize),
    Expanded(usize),
    Shared(usize),
}

/// Of every element of a row of packed Q·K·V, in order.
fn origins(dims: &Dims) -> Vec<From> {
    let [heads, head, value, rope] = ["heads", "head_dim", "value_dim", "shared"].map(|name| dims.size(name));
    let plain = head - rope;
    // Which element of the pairs stands at place `i`: evens, then odds.
    let pair = |i: usize| if i < rope / 2 { 2 * i } else { 2 * (i - rope / 2) + 1 };
    let query = |i: usize| if i < rope { plain + pair(i) } else { i - rope };
    let key = |h: usize, i: usize| match i < rope {
        true => From::Shared(pair(i)),
        false => From::Expanded(h * (plain + value) + i - rope),
    };
    let queries = (0..heads).flat_map(|h| (0..head).map(move |i| From::Query(h * head + query(i))));
    let keys = (0..heads).flat_map(|h| (0..head).map(move |i| key(h, i)));
    let values = (0..heads).flat_map(|h| (0..value).map(move |i| From::Expanded(h * (plain + value) + plain + i)));
    queries.chain(keys).chain(values).collect()
}

fn heads(dims: &Dims, rows: usize, x: &[&[f64]], scale: f64) -> Vec<f64> {
    let [q, kv, shared] = ["q", "kv", "shared"].map(|name| dims.size(name));
    let origins = origins(dims);
    let element = |row: usize, from: &From| match from {
        From::Query(i) => x[0][row * q + i] * scale,
        From::Expanded(i) => x[1][row * kv + i],
        From::Shared(i) => x[2][row * shared + i],
    };
    (0..rows).flat_map(|row| origins.iter().map(move |from| element(row, from))).collect()
}

fn grad(dims: &Dims, rows: usize, dqkv: &[f64], scale: f64) -> [Vec<f64>; 3] {
    let [q, kv, shared] = ["q", "kv", "shared"].map(|name| dims.size(name));
    let origins = origins(dims);
    let mut to = [q, kv, shared].map(|n| vec![0.0; rows * n]);
    for (row, dqkv) in dqkv.chunks(origins.len()).enumerate() {
        for (from, dy) in origins.iter().zip(dqkv) {
            match from {
                From::Query(i) => to[0][row * q + i] = dy * scale,
                From::Expanded(i) => to[1][row * kv + i] = *dy,
                From::Shared(i) => to[2][row * shared + i] += dy,
            }
        }
    }
    to
}
