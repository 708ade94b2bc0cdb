//! Heads of latent attention.

use super::at::{At, Definition, Definitions, dot};
use super::position::positions;
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
        SharedKey { inverse } => vec![shared_key(&at.dims, at.x[0], at.given(1), &positions(&at.dims, at.given(2)), inverse)],
        LatentKeys { .. } => vec![keys(&at.dims, at.rows(), at.x[0], at.x[1])],
        LatentKeysGrad { .. } => keys_grad(&at.dims, at.rows(), at.x[0]).into(),
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

/// Pairs as halves, rotated; or halves, rotated by the opposite angles, as pairs.
fn shared_key(dims: &Dims, x: &[f64], table: Option<&[f64]>, positions: &[usize], inverse: bool) -> Vec<f64> {
    let rope = dims.size("shared");
    let half = rope / 2;
    let of_row = |(row, x): (usize, &[f64])| {
        let halves: Vec<f64> = if inverse { x.to_vec() } else { (0..rope).map(|i| x[pair(rope, i)]).collect() };
        let angle = |i: usize| {
            table.map_or((1.0, 0.0), |t| (t[positions[row] * rope + i], t[positions[row] * rope + half + i]))
        };
        let mut to = vec![0.0; rope];
        for i in 0..half {
            let (cos, sin) = angle(i);
            let sin = if inverse { -sin } else { sin };
            let (a, b) = (halves[i], halves[half + i]);
            (to[i], to[half + i]) = (a * cos - b * sin, b * cos + a * sin);
        }
        let as_pairs = |i: usize| to[i / 2 + i % 2 * half];
        if inverse { (0..rope).map(as_pairs).collect() } else { to }
    };
    x.chunks(rope.max(1)).enumerate().flat_map(of_row).collect()
}

/// Of every element of a row of packed K·V, in order.
fn origins_of_keys(dims: &Dims) -> Vec<From> {
    let [heads, head, value, rope] = ["heads", "head_dim", "value_dim", "shared"].map(|name| dims.size(name));
    let (plain, width) = (head - rope, head - rope + value);
    let key = |h: usize, i: usize| if i < rope { From::Shared(i) } else { From::Expanded(h * width + i - rope) };
    let keys = (0..heads).flat_map(|h| (0..head).map(move |i| key(h, i)));
    let values = (0..heads).flat_map(|h| (0..value).map(move |i| From::Expanded(h * width + plain + i)));
    keys.chain(values).collect()
}

fn keys(dims: &Dims, rows: usize, expanded: &[f64], shared: &[f64]) -> Vec<f64> {
    let [width, rope] = ["expanded", "shared"].map(|name| dims.size(name));
    let origins = origins_of_keys(dims);
    let element = |row: usize, from: &From| match from {
        From::Expanded(i) => expanded[row * width + i],
        From::Query(i) | From::Shared(i) => shared[row * rope + i],
    };
    (0..rows).flat_map(|row| origins.iter().map(move |from| element(row, from))).collect()
}

fn keys_grad(dims: &Dims, rows: usize, dkv: &[f64]) -> [Vec<f64>; 2] {
    let [width, rope] = ["expanded", "shared"].map(|name| dims.size(name));
    let origins = origins_of_keys(dims);
    let mut to = [width, rope].map(|n| vec![0.0; rows * n]);
    for (row, dkv) in dkv.chunks(origins.len()).enumerate() {
        for (from, dy) in origins.iter().zip(dkv) {
            match from {
                From::Expanded(i) => to[0][row * width + i] = *dy,
                From::Query(i) | From::Shared(i) => to[1][row * rope + i] += dy,
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
