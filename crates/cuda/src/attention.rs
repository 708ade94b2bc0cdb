//! Attention: cuDNN's fused kernels where they take the shape, else kernels of our own.

pub(crate) mod blocks;
pub mod context;
mod document_kernels;
pub mod documents;
mod graph;
pub mod latent;
pub(crate) mod plans;
mod table;

pub use table::Written;

use crate::CudaError;
use crate::call::Call;
use crate::cudnn::Data;
use crate::driver::{ALIGNMENT, Address};
use crate::kernels::{Value, args};
use lockstep_ir::{DType, Op, Span, Workspace};
use plans::{HEADS, Operands, SLACK, execute, scale};

/// Scratch of the forward kernels: cuDNN's, and log-sum-exps that are otherwise unused.
pub fn scratch(compute: DType) -> Workspace {
    match Data::fused(compute).is_some() {
        true => Workspace { fixed: SLACK, terms: vec![(4, "batch heads seq")] },
        false => Workspace::default(),
    }
}

/// All heads of Q.
const HEAD: &str = "batch heads seq head_dim";
/// dK and dV of every query head.
const KEYS_AND_VALUES: &[(u64, &str)] = &[(2, HEAD), (2, "batch heads seq value_dim")];

/// Scratch of the backward kernels. Ours: a sum of every row. cuDNN's: that, dK and dV of every query head, and dQ in f32, or all
/// of dS where it is deterministic.
pub fn grad_scratch(compute: DType, deterministic: bool) -> Workspace {
    let fixed = SLACK + 2 * ALIGNMENT;
    match (Data::fused(compute).is_some(), deterministic) {
        (true, false) => Workspace { fixed, terms: [&[(4, HEAD), (8, "batch heads seq")], KEYS_AND_VALUES].concat() },
        (true, true) => Workspace {
            fixed,
            terms: [&[(8, "batch heads seq"), (2, "batch heads SEQ SEQ")], KEYS_AND_VALUES].concat(),
        },
        (false, _) => Workspace { fixed: 0, terms: vec![(4, "batch heads seq")] },
    }
}

/// Keys that a query sees at most.
pub(crate) fn keys_seen(window: Option<usize>) -> usize {
    window.unwrap_or(i32::MAX as usize).min(i32::MAX as usize)
}

/// Warps of a block of our own kernels; each has a position.
pub(crate) const WARPS: usize = 4;

/// Where queries and keys stand, and which positions they are.
#[derive(Clone, Copy)]
struct Rows {
    queries: Address,
    keys: Address,
    /// Keys of a sequence.
    count: usize,
    /// Elements from a key to the next.
    key_width: usize,
    positions: Span,
    key_positions: Span,
}

impl Rows {
    /// Packed Q·K·V of whole sequences.
    fn packed(call: &Call, qkv: Address) -> Self {
        let keys = qkv + (call.size("heads") * call.size("head_dim") * call.float().bytes()) as u64;
        let (count, key_width) = (call.size("seq"), width(call));
        Self { queries: qkv, keys, count, key_width, positions: Span::ALL, key_positions: Span::ALL }
    }

    /// The arguments of our own kernels after their operands.
    fn sizes(&self, call: &Call, window: Option<usize>) -> Vec<Value> {
        let [heads, kv_heads, e, v] = HEADS.map(|name| call.size(name));
        let [first, count, then] = call.span_of(self.positions);
        let [key_first, key_count, key_then] = call.span_of(self.key_positions);
        let value = kv_heads * e;
        let rows = args![
            call.size("seq"),
            heads,
            kv_heads,
            e,
            v,
            self.count,
            keys_seen(window),
            width(call),
            self.key_width,
            value
        ];
        let positions = args![first, count, then, key_first, key_count, key_then, scale(e)];
        [&rows[..], positions].concat()
    }
}

/// Which keys a query sees besides those up to its own position.
#[derive(Clone, Copy)]
struct Mask {
    window: Option<usize>,
    /// Where the document of each position starts.
    starts: Option<Address>,
}

/// Where o and the log-sum-exps of rows are.
#[derive(Clone, Copy)]
struct Attended {
    o: Option<Address>,
    lse: Option<Address>,
}

/// What our own backward kernels read besides queries and keys, and a number of scratch per row.
#[derive(Clone, Copy)]
struct GradOperands {
    dout: Address,
    o: Address,
    lse: Address,
    delta: Address,
}

/// Where gradients go.
#[derive(Clone, Copy)]
struct GradRows<'a> {
    at: Address,
    /// Elements from a row to the next.
    width: usize,
    /// The types of the kernel.
    types: &'a str,
}

/// Elements of a row of packed Q·K·V.
fn width(call: &Call) -> usize {
    let [heads, kv_heads, e, v] = HEADS.map(|name| call.size(name));
    (heads + kv_heads) * e + kv_heads * v
}

/// o, and the log-sum-exp of each row of scores.
pub unsafe fn forward(call: Call, window: Option<usize>) -> Result<(), CudaError> {
    let Some(o) = call.output(0) else { return Ok(()) };
    let qkv = call.input(0);
    let starts = call.given(1);
    if let Some((shape, plan)) = call.attention.of(call.bound) {
        if starts.is_some() {
            // SAFETY: the operands have these sizes.
            return unsafe { documents::forward(call, &shape, plan, qkv, o) };
        }
        let scratch = call.scratch()?;
        let lse = call.output(1).unwrap_or(scratch + SLACK);
        let at = Operands { inputs: shape.packed(qkv), o, lse, scratch, ..Operands::default() };
        // SAFETY: the operands have these sizes.
        return unsafe { execute(call.stream, &shape, plan, &at) };
    }
    let to = Attended { o: Some(o), lse: call.output(1) };
    // SAFETY: the operands have these sizes.
    unsafe { own_forward(call, Rows::packed(&call, qkv), Mask { window, starts }, call.suffix(), to) }
}

/// o and log-sum-exps by a kernel of our own, of these types.
unsafe fn own_forward(call: Call, rows: Rows, mask: Mask, types: &str, to: Attended) -> Result<(), CudaError> {
    check_head(call.size("widest_dim"))?;
    let grid = [call.size("seq").div_ceil(WARPS), call.size("heads"), call.size("batch")];
    let operands = args![rows.queries, rows.keys, mask.starts, to.o, to.lse];
    let args = [&operands[..], &rows.sizes(&call, mask.window)].concat();
    // SAFETY: rows and heads are the call's, whose operands have these sizes by the caller's word.
    unsafe { call.plain(("attention", &format!("attention_{types}")), grid, 32 * WARPS, &args) }
}

/// Our own kernels keep a head in the registers of a warp.
pub(crate) fn check_head(e: usize) -> Result<(), CudaError> {
    match e {
        1..=256 => Ok(()),
        _ => Err(CudaError::Internal(format!("heads of {e} elements are too wide for the device's kernels"))),
    }
}

/// dqkv from do, qkv, o and the log-sum-exps.
pub unsafe fn grad(call: Call, window: Option<usize>) -> Result<(), CudaError> {
    let Some(dqkv) = call.output(0) else { return Ok(()) };
    let (dout, qkv, o, lse, scratch) = (call.input(0), call.input(1), call.input(2), call.input(3), call.scratch()?);
    let starts = call.given(4);
    if let Some((shape, plan)) = call.attention.of(call.bound) {
        if starts.is_some() {
            // SAFETY: the operands have these sizes.
            return unsafe { documents::grad(call, &shape, plan, dqkv) };
        }
        let rest = scratch + shape.dq_bytes().next_multiple_of(ALIGNMENT);
        let (inputs, gradients) = (shape.packed(qkv), shape.packed(dqkv));
        let at = Operands { inputs, o, lse, dout, gradients, dq: scratch, scratch: rest, ragged: None };
        // SAFETY: the operands have these sizes; the scratch has room for dQ and the plan.
        return unsafe { execute(call.stream, &shape, plan, &at) };
    }
    let rows = Rows::packed(&call, qkv);
    let dq = GradRows { at: dqkv, width: width(&call), types: call.suffix() };
    let dkv = GradRows { at: dqkv + (rows.keys - rows.queries), ..dq };
    let operands = GradOperands { dout, o, lse, delta: scratch };
    // SAFETY: the operands have these sizes; the scratch has a number per row.
    unsafe { own_grad(call, rows, Mask { window, starts }, operands, Some(dq), Some(dkv)) }
}

/// dq and dkv by kernels of our own.
unsafe fn own_grad(
    call: Call,
    rows: Rows,
    mask: Mask,
    GradOperands { dout, o, lse, delta }: GradOperands,
    dq: Option<GradRows>,
    dkv: Option<GradRows>,
) -> Result<(), CudaError> {
    let (v, seq, heads, batch) = (call.size("value_dim"), call.size("seq"), call.size("heads"), call.size("batch"));
    check_head(call.size("widest_dim"))?;
    let sizes = rows.sizes(&call, mask.window);
    let grid = [seq.div_ceil(WARPS), heads, batch];
    let keys = [rows.count.div_ceil(WARPS), call.size("kv_heads"), batch];
    // SAFETY: rows and heads are the call's, whose operands have these sizes by the caller's word; each gradient is written by one kernel.
    unsafe {
        call.typed(("attention", "attention_delta"), grid, 32 * WARPS, args![dout, o, delta, seq, heads, v])?;
        for (into, kernel, grid) in [(dq, "query", grid), (dkv, "key", keys)] {
            let Some(GradRows { at, width, types }) = into else { continue };
            let args = args![dout, rows.queries, rows.keys, lse, delta, mask.starts, at, width];
            let name = format!("attention_grad_{kernel}_{types}");
            call.plain(("attention", &name), grid, 32 * WARPS, &[&args[..], &sizes].concat())?;
        }
    }
    Ok(())
}

/// Scratch of attention over a cache: of every head and page its part of the softmax, where the kernels of decoding run.
pub fn cached_scratch(compute: DType) -> Workspace {
    match compute {
        DType::BF16 | DType::F16 => {
            Workspace { fixed: 0, terms: vec![(4, "batch heads blocks value_dim"), (8, "batch heads blocks")] }
        }
        _ => Workspace::default(),
    }
}

/// The packs of 16 bytes of a head, where the kernels of `paged.cu` take the heads: of 64 or 128 elements of 16 bits.
fn lanes(call: Call) -> Option<usize> {
    let [_, _, e, v] = HEADS.map(|name| call.size(name));
    (e == v && [64, 128].contains(&e) && call.float() != DType::F32).then_some(e / 8)
}

/// RoPE of new positions that attention over the cache does itself: its table, as many rows of it, and the elements of a head that turn.
#[derive(Clone, Copy)]
pub struct Turn {
    table: u64,
    rows: usize,
    turned: usize,
}

/// RoPE and attention of one new position of each text; false where they must be done one after the other.
pub unsafe fn turned(rope: Call, attention: Call) -> Result<bool, CudaError> {
    let turn = Turn { table: rope.input(1), rows: rope.size("table"), turned: rope.size("columns") };
    let Op::CachedAttention { latent: false, window, .. } = attention.op() else { return Ok(false) };
    if decodes(attention).is_none() || !turn.turned.is_multiple_of(16) {
        return Ok(false);
    }
    // SAFETY: the operands have these sizes.
    unsafe { decode(attention, rope.input(0), (window, true), Some(turn)).map(|()| true) }
}

/// The packs of a head, where the kernels of decoding take a call.
fn decodes(call: Call) -> Option<usize> {
    let [heads, kv_heads, seq, page] = ["heads", "kv_heads", "seq", "page"].map(|name| call.size(name));
    lanes(call).filter(|_| seq == 1 && heads <= 8 * kv_heads && page.is_multiple_of(16))
}

/// Multiprocessors that decoding should keep busy, and the pages from which on more than one block shares those of a text.
const BUSY: usize = 128;
const LONG: usize = 24;

/// Blocks that leave most multiprocessors idle.
const FEW: usize = 64;

/// o of one new position of each text. `own` where no row reads what another writes: then the new key and value are written here.
unsafe fn decode(
    call: Call,
    qkv: u64,
    (window, own): (Option<usize>, bool),
    turn: Option<Turn>,
) -> Result<(), CudaError> {
    let (Some(o), Some(cache), Some(lanes)) = (call.output(0), call.output(1), decodes(call)) else { return Ok(()) };
    let [heads, kv_heads, e, _] = HEADS.map(|name| call.size(name));
    let [blocks, page, batch] = ["blocks", "page", "batch"].map(|name| call.size(name));
    let [table, slot, start, count] = [2, 3, 4, 5].map(|i| call.input(i));
    let (sinks, parts, window) = (call.given(6), call.scratch()?, keys_seen(window));
    // Where bits must not depend on the rows beside a text, keys are divided in one way.
    let shares = if own && blocks > LONG { (BUSY / (batch * kv_heads)).clamp(1, 8) } else { 1 };
    let (angles, rows, turned) = turn.map_or((None, 0, 0), |t| (Some(t.table), t.rows, t.turned));
    let by = scale(e);
    let decode = args![
        qkv, cache, table, slot, start, count, sinks, angles, parts, o, blocks, page, heads, kv_heads, window, rows,
        turned, own, by
    ];
    // SAFETY: the operands have these sizes; the scratch has a part of every head for every block of pages, which are more than shares.
    unsafe {
        // Where blocks are few, each has more warps. Sums over warps are then cut in another way, as with shares.
        let few = own && lanes == 8 && shares * batch * kv_heads <= FEW;
        let (kernel, threads) = if few { ("decode_few_8".into(), 512) } else { (format!("decode_{lanes}"), 256) };
        call.typed(("paged", &kernel), [kv_heads, batch, shares], threads, decode)?;
        if shares > 1 {
            let merge = args![parts, count, sinks, o, heads, shares, e];
            call.typed(("paged", "decode_merge"), [heads, batch, 1], e, merge)?;
        }
    }
    Ok(())
}

/// o of new positions over the cache, which gets their keys and values.
pub unsafe fn cached(call: Call, window: Option<usize>, apart: bool) -> Result<(), CudaError> {
    let (Some(o), Some(cache)) = (call.output(0), call.output(1)) else { return Ok(()) };
    let [heads, kv_heads, e, v] = HEADS.map(|name| call.size(name));
    let [seq, blocks, page, batch] = ["seq", "blocks", "page", "batch"].map(|name| call.size(name));
    let [table, slot, start, count] = [2, 3, 4, 5].map(|i| call.input(i));
    let qkv = call.input(0);
    check_head(e.max(v))?;
    let (sinks, seen, by) = (call.given(6), keys_seen(window), scale(e));
    let decodes = decodes(call).is_some();
    if decodes && (apart || batch == 1) {
        // SAFETY: the caller vouches.
        return unsafe { decode(call, qkv, (window, true), None) };
    }
    let write = args![qkv, cache, table, slot, start, count, blocks, page, seq, heads, kv_heads, e, v];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("attention", "cache_write"), [seq, batch, 1], 128, write)? };
    // SAFETY: the same.
    unsafe {
        match lanes(call) {
            _ if decodes => decode(call, qkv, (window, false), None),
            Some(lanes) if seq > 1 => {
                let prefill = args![
                    qkv, cache, table, slot, start, count, sinks, o, blocks, page, heads, kv_heads, seen, seq, by
                ];
                call.typed(("paged", &format!("prefill_{lanes}")), [seq.div_ceil(64), heads, batch], 128, prefill)
            }
            _ => {
                let args = args![
                    qkv, cache, table, slot, start, count, sinks, o, blocks, page, seq, heads, kv_heads, e, v, seen, by
                ];
                call.typed(("attention", "cached_attention"), [seq.div_ceil(WARPS), heads, batch], 32 * WARPS, args)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::plans::AttentionShape;
    use super::*;
    use crate::ops;
    use lockstep_ir::{Axis, Dim, Op, Section, TensorType};

    /// The types of dO, qkv, o, log-sum-exps and starts of documents.
    pub fn operands(shape: &AttentionShape) -> [TensorType; 5] {
        let (b, s) = (Dim::new(Axis::Batch, shape.batch), Dim::new(Axis::Seq, shape.seq));
        let of = |axis, count, unit| Section { axis, count, unit };
        let (q, k) = (of(Axis::Heads, shape.heads, shape.e), of(Axis::KvHeads, shape.kv_heads, shape.e));
        let (o, v) = (Section { unit: shape.v, ..q }, Section { unit: shape.v, ..k });
        let rows =
            |sections: &[Section]| TensorType::new(shape.dtype, [b.clone(), s.clone(), Dim::packed(sections.to_vec())]);
        let lse = TensorType::new(DType::F32, [b.clone(), Dim::new(Axis::Heads, shape.heads), s.clone()]);
        let starts = TensorType::new(DType::U32, [b.clone(), s.clone()]);
        [rows(&[o]), rows(&[q, k, v]), rows(&[o]), lse, starts]
    }

    /// Shapes of backward passes.
    pub fn shapes(deterministic: bool) -> impl Iterator<Item = AttentionShape> {
        let sizes =
            [(1, 1, 1, 1, 16, 16), (3, 1000, 6, 2, 64, 64), (2, 4096, 32, 8, 128, 128), (2, 1000, 16, 16, 192, 128)];
        [DType::BF16, DType::F16].into_iter().flat_map(move |dtype| sizes.map(|size| (dtype, size))).map(
            move |(dtype, (batch, seq, heads, kv_heads, e, v))| {
                let (window, backward, documents, parts) = (None, true, None, None);
                AttentionShape {
                    dtype,
                    batch,
                    seq,
                    heads,
                    kv_heads,
                    e,
                    v,
                    window,
                    backward,
                    deterministic,
                    documents,
                    parts,
                }
            },
        )
    }

    #[test]
    fn planned_scratch_has_room_for_dq_and_the_largest_plan() {
        for shape in [false, true].into_iter().flat_map(shapes) {
            let profile = ops::profile("cuda", shape.dtype, DType::F32, shape.deterministic);
            let op = Op::AttentionGrad { window: None };
            let [dout, qkv, o, lse, _] = operands(&shape);
            let planned = profile.workspace(&op, &[&dout, &qkv, &o, &lse]).unwrap();
            let used = shape.dq_bytes().next_multiple_of(ALIGNMENT) + shape.most_scratch();
            assert!(used <= planned && planned <= used + 2 * ALIGNMENT, "{shape:?}: {used} of {planned} bytes");
        }
    }
}
