//! Heads of latent attention.

use super::launch::{Launches, launches};
use crate::CudaError;
use crate::call::{Call, THREADS};
use crate::kernels::args;

/// The launches of this family.
pub fn launches() -> Launches {
    launches! { call:
        LatentHeads { absorbed, scale } => if absorbed { absorbed_heads(call, scale) } else { heads(call, scale) },
        LatentValues { value } => values(call, value),
        LatentHeadsGrad { scale, .. } => grad(call, scale),
        SharedKey { inverse } => shared_key(call, inverse),
        LatentKeys { .. } => keys(call),
        LatentKeysGrad { .. } => keys_grad(call),
    }
}

/// Heads, elements of one in Q and K, of these with RoPE, and of one in V.
fn sizes(call: Call) -> [usize; 4] {
    ["heads", "head_dim", "shared", "value_dim"].map(|name| call.size(name))
}

unsafe fn heads(call: Call, scale: f32) -> Result<(), CudaError> {
    let Some(qkv) = call.output(0) else { return Ok(()) };
    let [count, head, rope, value] = sizes(call);
    let args = args![call.input(0), call.input(1), call.input(2), qkv, count, head, rope, value, scale];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("latent", "latent_heads"), [call.rows(), 1, 1], THREADS, args) }
}

unsafe fn grad(call: Call, scale: f32) -> Result<(), CudaError> {
    let [count, head, rope, value] = sizes(call);
    let [dq, dkv, dshared] = [0, 1, 2].map(|i| call.output(i));
    let args = args![call.input(0), dq, dkv, dshared, count, head, rope, value, scale];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("latent", "latent_heads_grad"), [call.rows(), 1, 1], THREADS, args) }
}

unsafe fn shared_key(call: Call, inverse: bool) -> Result<(), CudaError> {
    let Some(y) = call.output(0) else { return Ok(()) };
    let (rope, seq, [first, count, then]) = (call.size("shared"), call.size("seq"), call.span());
    let (table, starts) = (call.given(1), call.given(2));
    let args = args![call.input(0), table, starts, y, seq, first, count, then, rope, inverse];
    let threads = (rope / 2).next_multiple_of(32).clamp(32, THREADS);
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("latent", "shared_key"), [call.rows(), 1, 1], threads, args) }
}

/// Whether rows of packed K·V are whole packs.
fn keys_are_wide(call: Call) -> bool {
    let [_, head, rope, value] = sizes(call);
    [rope, head - rope, value].into_iter().all(|n| call.wide(n))
}

unsafe fn keys(call: Call) -> Result<(), CudaError> {
    let Some(kv) = call.output(0) else { return Ok(()) };
    let ([count, head, rope, value], wide) = (sizes(call), keys_are_wide(call));
    let args = args![call.input(0), call.input(1), kv, count, head, rope, value, wide];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("latent", "latent_keys"), [call.rows(), 1, 1], THREADS, args) }
}

unsafe fn keys_grad(call: Call) -> Result<(), CudaError> {
    let ([count, head, rope, value], wide) = (sizes(call), keys_are_wide(call));
    let [dexpanded, dshared] = [0, 1].map(|i| call.output(i));
    let args = args![call.input(0), dexpanded, dshared, count, head, rope, value, wide];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("latent", "latent_keys_grad"), [call.rows(), 1, 1], THREADS, args) }
}

/// Rows and columns of a tile of `per_head`.
const TILE: [usize; 2] = [32, 64];

/// A matmul for each head, with the rows of the weight of keys and values from `first` on of its block.
struct PerHead {
    columns: usize,
    depth: usize,
    /// Elements of a row of both sides, and of a head in it.
    a: [usize; 2],
    c: [usize; 2],
    first: usize,
    /// Whether rows of the weight are columns of the result.
    transposed: bool,
}

impl PerHead {
    /// # Safety
    /// The operands have these sizes.
    unsafe fn run(&self, call: Call, from: u64, to: u64, scale: f32) -> Result<(), CudaError> {
        let &Self { columns, depth, a: [a_row, a_head], c: [c_row, c_head], first, transposed } = self;
        let [heads, rank, block] = ["heads", "latent", "row"].map(|name| call.size(name));
        let w = call.input(1) + (first * rank * call.float().bytes()) as u64;
        let wide = [depth, a_row, a_head, rank].into_iter().all(|n| call.wide(n));
        let args = args![
            from,
            w,
            to,
            call.rows(),
            columns,
            depth,
            a_row,
            a_head,
            rank,
            block * rank,
            c_row,
            c_head,
            transposed,
            wide,
            scale
        ];
        let grid = [columns.div_ceil(TILE[1]), call.rows().div_ceil(TILE[0]), heads];
        // SAFETY: the caller vouches.
        unsafe { call.typed(("latent", "per_head"), grid, 128, args) }
    }
}

/// Queries that absorb the weight of keys, the shared key and the latent.
unsafe fn absorbed_heads(call: Call, scale: f32) -> Result<(), CudaError> {
    let Some(qkv) = call.output(0) else { return Ok(()) };
    let [heads, plain, rope, rank] = ["heads", "plain", "shared", "latent"].map(|name| call.size(name));
    let (head, key) = (plain + rope, rope + rank);
    let per_head = PerHead {
        columns: rank,
        depth: plain,
        a: [heads * head, head],
        c: [(heads + 1) * key, key],
        first: 0,
        transposed: false,
    };
    let rest = args![call.input(0), call.input(2), call.input(3), qkv, heads, head, rope, rank, scale];
    // SAFETY: the operands have these sizes; what a head absorbs stands after its part with RoPE.
    unsafe {
        call.typed(("latent", "absorbed_rest"), [call.rows(), 1, 1], THREADS, rest)?;
        per_head.run(call, call.input(0), qkv + (rope * call.float().bytes()) as u64, scale)
    }
}

/// Values of heads, of the sums of latents.
unsafe fn values(call: Call, value: usize) -> Result<(), CudaError> {
    let Some(y) = call.output(0) else { return Ok(()) };
    let [heads, rank, block] = ["heads", "latent", "row"].map(|name| call.size(name));
    let (a, c) = ([heads * rank, rank], [heads * value, value]);
    let per_head = PerHead { columns: value, depth: rank, a, c, first: block - value, transposed: true };
    // SAFETY: the operands have these sizes.
    unsafe { per_head.run(call, call.input(0), y, 1.0) }
}
