//! Heads of latent attention: copies of rows, with the part that has RoPE in front. Where queries absorb the weight of keys, and where sums of
//! latents become values, a matmul for each head.

use super::call::{Call, Kernel, Kernels, Ptr};
use super::float::Float;
use super::gemm::{Matrix, Target, gemm};
use super::position::row_positions;
use crate::by_kind;

/// The kernels of this family.
pub fn kernels<T: Float>() -> Kernels {
    by_kind! { call: Call => Kernel;
        LatentHeads { absorbed, scale } => if absorbed { absorbed_heads::<T>(call, scale) } else { heads::<T>(call, scale) },
        LatentValues { value } => values::<T>(call, value),
        LatentHeadsGrad { scale, .. } => grad::<T>(call, scale),
        SharedKey { inverse } => shared_key::<T>(call, inverse),
        LatentKeys { .. } => keys::<T>(call),
        LatentKeysGrad { .. } => keys_grad::<T>(call),
    }
}

/// Sizes of a row.
#[derive(Clone, Copy)]
struct Sizes {
    heads: usize,
    /// Elements of a head of Q and K, of these with RoPE and without, and of V.
    head: usize,
    rope: usize,
    plain: usize,
    value: usize,
    /// Elements of a row.
    q: usize,
    kv: usize,
    qkv: usize,
}

impl Sizes {
    fn of(call: &Call) -> Self {
        let [heads, head, rope, value] = ["heads", "head_dim", "shared", "value_dim"].map(|name| call.size(name));
        let [q, kv, qkv] = ["q", "kv", "qkv"].map(|name| call.size(name));
        Self { heads, head, rope, plain: head - rope, value, q, kv, qkv }
    }

    /// Where a head of K and one of V start in packed Q·K·V.
    fn key(&self, h: usize) -> usize {
        self.q + h * self.head
    }

    fn value(&self, h: usize) -> usize {
        2 * self.q + h * self.value
    }
}

/// Pairs of `from` to halves of `to`: evens, then odds.
fn to_halves<T: Float>(from: &[T], to: &mut [T], scale: f32) {
    let (evens, odds) = to.split_at_mut(from.len() / 2);
    for (pair, (even, odd)) in from.chunks_exact(2).zip(evens.iter_mut().zip(odds)) {
        (*even, *odd) = (T::of(pair[0].to() * scale), T::of(pair[1].to() * scale));
    }
}

/// qkv of q, kv and the shared key.
fn heads<T: Float>(call: Call, scale: f32) {
    let n = Sizes::of(&call);
    let [q, kv, shared] = [0, 1, 2].map(|i| Ptr(call.input::<T>(i)));
    let Some(qkv) = call.output::<T>(0).map(Ptr) else { return };
    call.rows(call.size("batch") * call.size("seq"), |first, last| {
        for row in first..last {
            // SAFETY: rows first .. last belong to this task.
            let (q, kv, shared, to) = unsafe {
                let (q, kv) = (q.slice(row * n.q, n.q), kv.slice(row * n.kv, n.kv));
                (q, kv, shared.slice(row * n.rope, n.rope), qkv.slice(row * n.qkv, n.qkv))
            };
            for h in 0..n.heads {
                let (query, expanded) =
                    (&q[h * n.head..][..n.head], &kv[h * (n.plain + n.value)..][..n.plain + n.value]);
                let (rope, plain) = to[h * n.head..][..n.head].split_at_mut(n.rope);
                to_halves(&query[n.plain..], rope, scale);
                plain.iter_mut().zip(query).for_each(|(to, from)| *to = T::of(from.to() * scale));
                let (rope, plain) = to[n.key(h)..][..n.head].split_at_mut(n.rope);
                to_halves(shared, rope, 1.0);
                plain.copy_from_slice(&expanded[..n.plain]);
                to[n.value(h)..][..n.value].copy_from_slice(&expanded[n.plain..]);
            }
        }
    });
}

/// dq, dkv and, summed over heads, the gradient of the shared key.
fn grad<T: Float>(call: Call, scale: f32) {
    let n = Sizes::of(&call);
    let dqkv = Ptr(call.input::<T>(0));
    let [dq, dkv, dshared] = [0, 1, 2].map(|i| call.output::<T>(i).map(Ptr));
    let half = n.rope / 2;
    // Where an element of the pairs stands in halves.
    let place = |i: usize| i / 2 + i % 2 * half;
    call.rows(call.size("batch") * call.size("seq"), |first, last| {
        for row in first..last {
            // SAFETY: rows first .. last belong to this task.
            unsafe {
                let from = dqkv.slice(row * n.qkv, n.qkv);
                if let Some(dq) = dq {
                    for (to, head) in dq.slice(row * n.q, n.q).chunks_exact_mut(n.head).zip(from.chunks_exact(n.head)) {
                        let (plain, rope) = to.split_at_mut(n.plain);
                        plain.iter_mut().zip(&head[n.rope..]).for_each(|(to, dy)| *to = T::of(dy.to() * scale));
                        rope.iter_mut().enumerate().for_each(|(i, to)| *to = T::of(head[place(i)].to() * scale));
                    }
                }
                if let Some(dkv) = dkv {
                    let to = dkv.slice(row * n.kv, n.kv).chunks_exact_mut(n.plain + n.value);
                    for (h, to) in to.enumerate() {
                        to[..n.plain].copy_from_slice(&from[n.key(h) + n.rope..][..n.plain]);
                        to[n.plain..].copy_from_slice(&from[n.value(h)..][..n.value]);
                    }
                }
                if let Some(dshared) = dshared {
                    for (i, to) in dshared.slice(row * n.rope, n.rope).iter_mut().enumerate() {
                        *to = T::of((0..n.heads).map(|h| from[n.key(h) + place(i)].to()).sum());
                    }
                }
            }
        }
    });
}

/// The shared key of every position, from pairs to halves and rotated; or back.
fn shared_key<T: Float>(call: Call, inverse: bool) {
    let (rope, position) = (call.size("shared"), row_positions(&call));
    let (x, table) = (Ptr(call.input::<T>(0)), call.given::<f32>(1).map(Ptr));
    let Some(y) = call.output::<T>(0).map(Ptr) else { return };
    let half = rope / 2;
    call.rows(call.size("batch") * call.size("seq"), |first, last| {
        for row in first..last {
            // SAFETY: rows first .. last belong to this task; positions are below the table's rows.
            let (x, y, angles) = unsafe {
                let angles = table.map(|table| table.slice(position(row) * rope, rope));
                (x.slice(row * rope, rope), y.slice(row * rope, rope), angles)
            };
            for i in 0..half {
                let (cos, sin) = angles.map_or((1.0, 0.0), |angles| (angles[i], angles[half + i]));
                let (pair, halves) = ([2 * i, 2 * i + 1], [i, half + i]);
                let (from, to, sin) = if inverse { (halves, pair, -sin) } else { (pair, halves, sin) };
                let [a, b] = from.map(|at| x[at].to());
                (y[to[0]], y[to[1]]) = (T::of(a * cos - b * sin), T::of(b * cos + a * sin));
            }
        }
    });
}

/// Packed K·V of what the latent expands to and the shared key.
fn keys<T: Float>(call: Call) {
    let n = KeySizes::of(&call);
    let [expanded, shared] = [0, 1].map(|i| Ptr(call.input::<T>(i)));
    let Some(kv) = call.output::<T>(0).map(Ptr) else { return };
    call.rows(call.size("batch") * call.size("seq"), |first, last| {
        for row in first..last {
            // SAFETY: rows first .. last belong to this task.
            let (expanded, shared, kv) = unsafe {
                let shared = shared.slice(row * n.rope, n.rope);
                (expanded.slice(row * n.expanded(), n.expanded()), shared, kv.slice(row * n.kv(), n.kv()))
            };
            let (keys, values) = kv.split_at_mut(n.heads * n.head());
            let heads = expanded.chunks_exact(n.plain + n.value);
            for ((from, key), value) in heads.zip(keys.chunks_exact_mut(n.head())).zip(values.chunks_exact_mut(n.value))
            {
                key[..n.rope].copy_from_slice(shared);
                key[n.rope..].copy_from_slice(&from[..n.plain]);
                value.copy_from_slice(&from[n.plain..]);
            }
        }
    });
}

/// The gradient of what the latent expands to and, summed over heads, that of the shared key.
fn keys_grad<T: Float>(call: Call) {
    let n = KeySizes::of(&call);
    let dkv = Ptr(call.input::<T>(0));
    let [dexpanded, dshared] = [0, 1].map(|i| call.output::<T>(i).map(Ptr));
    call.rows(call.size("batch") * call.size("seq"), |first, last| {
        for row in first..last {
            // SAFETY: rows first .. last belong to this task.
            unsafe {
                let (keys, values) = dkv.slice(row * n.kv(), n.kv()).split_at(n.heads * n.head());
                if let Some(to) = dexpanded {
                    let heads = to.slice(row * n.expanded(), n.expanded()).chunks_exact_mut(n.plain + n.value);
                    for ((to, key), value) in heads.zip(keys.chunks_exact(n.head())).zip(values.chunks_exact(n.value)) {
                        to[..n.plain].copy_from_slice(&key[n.rope..]);
                        to[n.plain..].copy_from_slice(value);
                    }
                }
                if let Some(to) = dshared {
                    for (i, to) in to.slice(row * n.rope, n.rope).iter_mut().enumerate() {
                        *to = T::of(keys.chunks_exact(n.head()).map(|key| key[i].to()).sum());
                    }
                }
            }
        }
    });
}

/// Sizes of a row of packed K·V.
#[derive(Clone, Copy)]
struct KeySizes {
    heads: usize,
    /// Elements of a head of K with RoPE and without, and of V.
    rope: usize,
    plain: usize,
    value: usize,
}

impl KeySizes {
    fn of(call: &Call) -> Self {
        let [heads, head, rope, value] = ["heads", "head_dim", "shared", "value_dim"].map(|name| call.size(name));
        Self { heads, rope, plain: head - rope, value }
    }

    fn head(&self) -> usize {
        self.rope + self.plain
    }

    fn kv(&self) -> usize {
        self.heads * (self.head() + self.value)
    }

    fn expanded(&self) -> usize {
        self.heads * (self.plain + self.value)
    }
}

/// qkv of q, the weight of keys and values, the latent and the shared key.
fn absorbed_heads<T: Float>(call: Call, scale: f32) {
    let [heads, plain, rope, rank, block] = ["heads", "plain", "shared", "latent", "row"].map(|name| call.size(name));
    let (rows, head, key) = (call.size("batch") * call.size("seq"), plain + rope, rope + rank);
    let (width, q, w) = (call.size("qkv"), Ptr(call.input::<T>(0)), call.input::<T>(1));
    let [latents, shared] = [2, 3].map(|i| Ptr(call.input::<T>(i)));
    let Some(qkv) = call.output::<T>(0).map(Ptr) else { return };
    call.rows(rows, |first, last| {
        for row in first..last {
            // SAFETY: rows first .. last belong to this task.
            unsafe {
                let (to, query) = (qkv.slice(row * width, width), q.slice(row * heads * head, heads * head));
                for (to, query) in to.chunks_exact_mut(key).zip(query.chunks_exact(head)) {
                    to_halves(&query[plain..], &mut to[..rope], scale);
                }
                let to = &mut to[heads * key..];
                to_halves(shared.slice(row * rope, rope), &mut to[..rope], 1.0);
                to[rope..].copy_from_slice(latents.slice(row * rank, rank));
            }
        }
    });
    let scratch: *mut f32 = call.scratch();
    for h in 0..heads {
        // SAFETY: sizes come from the operands' types; after the matmul's scratch there is room for what a head absorbs; tasks have rows of
        // their own.
        unsafe {
            let sums = scratch.byte_add(call.gemm_scratch());
            let query = Matrix::rows(q.at(h * head), heads * head);
            let keys = Matrix::rows(w.add(h * block * rank), rank);
            let to = Target::F32 { ptr: sums, stride: rank, add: false };
            gemm(call.pool, call.simd, (rows, rank, plain), query, keys, to, scratch);
            let sums = Ptr(sums.cast_const());
            call.rows(rows, |first, last| {
                for row in first..last {
                    let to = qkv.slice(row * width + h * key + rope, rank);
                    to.iter_mut().zip(sums.slice(row * rank, rank)).for_each(|(to, sum)| *to = T::of(sum * scale));
                }
            });
        }
    }
}

/// Values of heads, of the sums of latents and the weight of keys and values.
fn values<T: Float>(call: Call, value: usize) {
    let [heads, rank, block] = ["heads", "latent", "row"].map(|name| call.size(name));
    let rows = call.size("batch") * call.size("seq");
    let (x, w) = (call.input::<T>(0), call.input::<T>(1));
    let Some(y) = call.output::<T>(0) else { return };
    for h in 0..heads {
        // SAFETY: sizes come from the operands' types.
        unsafe {
            let summed = Matrix::rows(x.add(h * rank), heads * rank);
            let of_values = Matrix::rows(w.add((h * block + block - value) * rank), rank).transposed();
            let to = Target::new(y.add(h * value), heads * value);
            gemm(call.pool, call.simd, (rows, value, rank), summed, of_values, to, call.scratch());
        }
    }
}
