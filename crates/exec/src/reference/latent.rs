//! Heads of latent attention.

use super::at::{At, Definition, Definitions, dot};
use crate::by_kind;
use lockstep_ir::op::Dims;

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        LatentHeads { absorbed, scale } => {
            let of = if absorbed { absorbed_heads } else { heads };
            vec![of(&at.dims, at.rows(), at.x, f64::from(scale))]
        },
        LatentValues { value } => vec![values(&at.dims, at.rows(), at.x, value)],
        LatentHeadsGrad { scale, .. } => grad(&at.dims, at.rows(), at.x[0], f64::from(scale)).into(),
    }
}

/// Where an element of a row of packed Q·K·V comes from.
enum From {
    Query(usize),
    Expanded(usize),
    Shared(usize),
}

/// Which element of the pairs with RoPE stands at place `i`: evens, then odds.
fn pair(rope: usize, i: usize) -> usize {
    if i < rope / 2 { 2 * i } else { 2 * (i - rope / 2) + 1 }
}

/// Of every element of a row of packed Q·K·V, in order.
fn origins(dims: &Dims) -> Vec<From> {
    let [heads, head, value, rope] = ["heads", "head_dim", "value_dim", "shared"].map(|name| dims.size(name));
    let plain = head - rope;
    let pair = |i: usize| pair(rope, i);
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

/// Packed Q·K·V: the part of a head with RoPE and what the rest absorbs, then the shared key and the latent.
fn absorbed_heads(dims: &Dims, rows: usize, x: &[&[f64]], scale: f64) -> Vec<f64> {
    let [heads, plain, rope, rank, block] = ["heads", "plain", "shared", "latent", "row"].map(|name| dims.size(name));
    let [q, w, latents, shared] = *x else { panic!("absorbed heads have four inputs") };
    let head = plain + rope;
    let of_row = |row: usize| {
        let query = move |h: usize| &q[(row * heads + h) * head..][..head];
        let own = move |h: usize, i: usize| match i < rope {
            true => query(h)[plain + pair(rope, i)],
            false => (0..plain).map(|k| query(h)[k] * w[(h * block + k) * rank + i - rope]).sum(),
        };
        let queries = (0..heads).flat_map(move |h| (0..rope + rank).map(move |i| own(h, i) * scale));
        let key = (0..rope).map(move |i| shared[row * rope + pair(rope, i)]);
        queries.chain(key).chain(latents[row * rank..(row + 1) * rank].iter().copied())
    };
    (0..rows).flat_map(of_row).collect()
}

/// Every head's sum of latents through the last rows of its block of the weight.
fn values(dims: &Dims, rows: usize, x: &[&[f64]], value: usize) -> Vec<f64> {
    let [heads, rank, block] = ["heads", "latent", "row"].map(|name| dims.size(name));
    let row_of = |h: usize, i: usize| &x[1][(h * block + block - value + i) * rank..][..rank];
    let of_head = |at: usize| (0..value).map(move |i| dot(&x[0][at * rank..][..rank], row_of(at % heads, i)));
    (0..rows * heads).flat_map(of_head).collect()
}
