//! Latent attention over a cache: one key for all heads, whose end is its value.

use super::{BUSY, LONG, WARPS, keys_seen};
use crate::CudaError;
use crate::attention::plans::scale;
use crate::call::Call;
use crate::kernels::{Block, args};
use lockstep_ir::{DType, Workspace};

/// Heads of a block of the matrix units' kernel, keys of its tiles, elements after each row in shared memory, and elements of a value at most: as in
/// `latent_cache.cu`.
const GROUP: usize = 16;
const TILE: usize = 32;
const PAD: usize = 8;
const MOST_VALUES: usize = 512;

/// Elements of the widest key that both kernels take.
const MOST: usize = 1024;

/// Blocks that share the keys of a text, at most.
const SHARES: usize = 8;

/// Scratch: of every head its part of the softmax in each of the blocks that share a text's keys.
pub fn scratch(compute: DType) -> Workspace {
    let share = 4 * SHARES as u64;
    match compute {
        DType::BF16 | DType::F16 => {
            Workspace { fixed: 0, terms: vec![(share, "batch heads value_dim"), (2 * share, "batch heads")] }
        }
        _ => Workspace::default(),
    }
}

/// o of new positions over the cache, which gets their keys.
///
/// # Safety
/// The operands are those of the op.
pub unsafe fn cached(call: Call, window: Option<usize>, apart: bool) -> Result<(), CudaError> {
    let (Some(o), Some(cache)) = (call.output(0), call.output(1)) else { return Ok(()) };
    let [heads, e, v] = ["heads", "head_dim", "value_dim"].map(|name| call.size(name));
    let [seq, blocks, page, batch] = ["seq", "blocks", "page", "batch"].map(|name| call.size(name));
    let [table, slot, start, count] = [2, 3, 4, 5].map(|i| call.input(i));
    if e > MOST {
        return Err(CudaError::Internal(format!("latents of {e} elements are too wide for the device's kernels")));
    }
    let (qkv, sinks, seen, by) = (call.input(0), call.given(6), keys_seen(window), scale(e));
    // One head, whose key and value are all that a position has.
    let write = args![qkv, cache, table, slot, start, count, blocks, page, seq, heads, 1usize, e, 0usize];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("attention", "cache_write"), [seq, batch, 1], 128, write)? };
    let whole = e.is_multiple_of(16) && v.is_multiple_of(64) && page.is_multiple_of(TILE);
    if call.float() == DType::F32 || !whole || v > MOST_VALUES {
        let args = args![qkv, cache, table, slot, start, count, sinks, o, blocks, page, heads, e, v, seen, seq, by];
        // SAFETY: the operands have these sizes.
        return unsafe { call.typed(("latent_cache", "plain"), [seq.div_ceil(WARPS), heads, batch], 32 * WARPS, args) };
    }
    let (groups, parts) = (heads.div_ceil(GROUP), call.scratch()?);
    // Where bits must not depend on the rows beside a text, keys are divided in one way.
    let own = seq == 1 && (apart || batch == 1);
    let shares = if own && blocks > LONG { (BUSY / (batch * groups)).clamp(1, SHARES) } else { 1 };
    let args =
        args![qkv, cache, table, slot, start, count, sinks, parts, o, blocks, page, heads, e, v, seen, seq, shares, by];
    let block = Block { threads: 128, shared: (GROUP + TILE) * (e + PAD) * call.float().bytes() };
    let name = format!("attend_{}", call.suffix());
    // SAFETY: the operands have these sizes; the scratch has a part of every head for every share.
    unsafe {
        call.on().launch_with(("latent_cache", &name), [groups, seq, batch * shares], block, None, args)?;
        if shares > 1 {
            let merge = args![parts, count, sinks, o, heads, shares, v];
            call.typed(("paged", "decode_merge"), [heads, batch, 1], v, merge)?;
        }
    }
    Ok(())
}
