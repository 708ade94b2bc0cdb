//! Attention of context-parallel ranks: cuDNN's fused kernels block by block where nothing but the causal mask cuts them, else kernels
//! of our own.

use super::blocks::{self, Block};
use super::plans::{AttentionShape, Operands, SLACK, execute};
use super::table::Room;
use super::{Attended, GradOperands, GradRows, Mask, Rows, WARPS, own_forward, own_grad};
use crate::CudaError;
use crate::call::Call;
use crate::cudnn::Data;
use crate::driver::{ALIGNMENT, Address};
use crate::kernels::args;
use lockstep_ir::blocks::PartedAttention;
use lockstep_ir::{DType, Workspace};

/// Scratch of the forward kernels: cuDNN's, o and log-sum-exps of a block, and all log-sum-exps where they are otherwise unused.
pub fn scratch(compute: DType) -> Workspace {
    match Data::fused(compute).is_some() {
        true => {
            Workspace { fixed: SLACK + 3 * ALIGNMENT, terms: vec![(2, "batch seq attended"), (8, "batch heads seq")] }
        }
        false => Workspace::default(),
    }
}

/// Scratch of the backward kernels: see [`GradScratch`]. Without cuDNN, a number per row.
pub fn grad_scratch(compute: DType, deterministic: bool) -> Workspace {
    match Data::fused(compute).is_some() {
        true => {
            let rows = [(6, "batch seq queries"), (12, "batch heads seq")];
            let keys = [(2, "batch keys queries"), (2, "batch keys attended"), (2, "batch keys kv")];
            // All of dS.
            let scores = deterministic.then_some((2, "batch heads SEQ KEYS"));
            let terms = rows.into_iter().chain(keys).chain(scores);
            Workspace { fixed: SLACK + 5 * ALIGNMENT, terms: terms.collect() }
        }
        false => Workspace { fixed: 0, terms: vec![(4, "batch heads seq")] },
    }
}

/// Where things of a block are in the scratch of a backward pass.
struct GradScratch {
    stats: Address,
    /// dQ in f32, where it is added up in no order.
    dq_sum: Address,
    /// dQ; dK and dV in packed rows.
    dq: Address,
    dkv: Address,
    plan: Address,
}

impl GradScratch {
    fn new(shape: &AttentionShape, room: &mut Room) -> Self {
        let (queries, keys) = (shape.batch * shape.seq, shape.batch * shape.keys());
        Self {
            stats: room.take(shape.row_bytes()),
            dq_sum: room.take(shape.dq_bytes()),
            dq: room.take((2 * queries * shape.heads * shape.e) as u64),
            dkv: room.take((2 * keys * shape.kv_heads * (shape.e + shape.v)) as u64),
            plan: room.take(shape.most_scratch()),
        }
    }
}

/// What the instruction says.
fn parted(call: &Call) -> Result<PartedAttention, CudaError> {
    let other = || CudaError::Internal(format!("{} is no attention over parts", call.bound.op.name()));
    PartedAttention::of(&call.bound.op).ok_or_else(other)
}

/// Queries of packed Q·K·V over packed K·V.
fn rows(call: &Call, parted: PartedAttention, qkv: Address, kv: Address) -> Rows {
    let (key_positions, count) = blocks::keys(parted, call.bound);
    let key_width = key_width(call);
    Rows { queries: qkv, keys: kv, count, key_width, positions: call.bound.positions(), key_positions }
}

/// Elements of a row of packed K·V.
fn key_width(call: &Call) -> usize {
    call.size("kv_heads") * (call.size("head_dim") + call.size("value_dim"))
}

/// The types of our own kernels: operands, and results in f32 or as they are.
fn types(call: &Call, wide: bool) -> &'static str {
    match (wide, call.float()) {
        (true, DType::BF16) => "bf16_to_f32",
        (true, DType::F16) => "f16_to_f32",
        _ => call.suffix(),
    }
}

/// Q, K and V of a block.
fn inputs(call: &Call, qkv: Address, kv: Address, block: &Block) -> [Address; 3] {
    let bytes = call.float().bytes();
    let values = call.size("kv_heads") * call.size("head_dim");
    let (query, key) = (block.query * super::width(call) * bytes, block.key * key_width(call) * bytes);
    [qkv + query as u64, kv + key as u64, kv + (key + values * bytes) as u64]
}

/// o and log-sum-exps of one step of the ring (in f32) or over gathered keys.
///
/// # Safety
/// The operands of the call are as large as its sizes say.
pub unsafe fn forward(call: Call, wide: bool) -> Result<(), CudaError> {
    let (qkv, kv, parted) = (call.input(0), call.input(1), parted(&call)?);
    let to = Attended { o: call.output(0), lse: call.output(1) };
    let mask = Mask { window: parted.window, starts: call.given(2) };
    let Some(planned) = call.attention.blocks(call.bound, parted) else {
        // SAFETY: the operands have these sizes.
        return unsafe { own_forward(call, rows(&call, parted, qkv, kv), mask, types(&call, wide), to) };
    };
    let mut room = Room(call.scratch()?);
    let unused = room.take((4 * call.size("batch") * call.size("heads") * call.size("seq")) as u64);
    let to = Attended { lse: Some(to.lse.unwrap_or(unused)), ..to };
    let rest = room.0;
    for (i, (block, shape, plan)) in planned.iter().enumerate() {
        let mut room = Room(rest);
        let o = room.take((2 * shape.batch * shape.seq * shape.heads * shape.v) as u64);
        let (stats, scratch) = (room.take(shape.row_bytes()), room.take(SLACK));
        let at = Operands { inputs: inputs(&call, qkv, kv, block), o, lse: stats, scratch, ..Operands::default() };
        // SAFETY: the operands have these sizes, and the scratch has room for all.
        unsafe {
            execute(call.stream, shape, plan, &at)?;
            let other = Attended { o: Some(o), lse: Some(stats) };
            let rows = BlockRows { first: block.query, count: block.queries, fresh: i == 0 };
            merge(call, types(&call, wide), to, other, to, rows)?;
        }
    }
    Ok(())
}

/// Rows of a block among those of all.
#[derive(Clone, Copy)]
struct BlockRows {
    first: usize,
    count: usize,
    /// Whether there is nothing before.
    fresh: bool,
}

/// Merges rows of another set of keys into those of `before`.
unsafe fn merge(
    call: Call,
    types: &str,
    before: Attended,
    other: Attended,
    to: Attended,
    BlockRows { first, count, fresh }: BlockRows,
) -> Result<(), CudaError> {
    let (seq, heads) = (call.size("seq"), call.size("heads"));
    let e = call.size("attended") / heads;
    let args = args![before.o, before.lse, other.o, other.lse, to.o, to.lse, seq, heads, e, first, count, fresh];
    let grid = [seq.div_ceil(WARPS), heads, call.size("batch")];
    // SAFETY: rows of the block are among the sequence's, which all of these have.
    unsafe { call.plain(("context", &format!("merge_{types}")), grid, 32 * WARPS, args) }
}

/// o and log-sum-exps over two sets of keys.
///
/// # Safety
/// The operands of the call are as large as its sizes say.
pub unsafe fn merge_two(call: Call) -> Result<(), CudaError> {
    let of = |first| Attended { o: Some(call.input(first)), lse: Some(call.input(first + 1)) };
    let to = Attended { o: call.output(0), lse: call.output(1) };
    let rows = BlockRows { first: 0, count: call.size("seq"), fresh: false };
    // SAFETY: both inputs and the output are o and log-sum-exps of whole sequences.
    unsafe { merge(call, "f32", of(0), of(2), to, rows) }
}

/// dq (in f32 where `wide`) and dkv in f32, from do, qkv, kv, o and log-sum-exps.
///
/// # Safety
/// The operands of the call are as large as its sizes say.
pub unsafe fn grad(call: Call, wide: bool) -> Result<(), CudaError> {
    let (dout, qkv, kv, o, lse) = (call.input(0), call.input(1), call.input(2), call.input(3), call.input(4));
    let (dq, dkv) = (call.output(0), call.output(1));
    let (heads, keys) = (call.size("heads") * call.size("head_dim"), key_width(&call));
    let parted = parted(&call)?;
    let Some(planned) = call.attention.blocks(call.bound, parted) else {
        let mask = Mask { window: parted.window, starts: call.given(5) };
        let operands = GradOperands { dout, o, lse, delta: call.scratch()? };
        let dq = dq.map(|at| GradRows { at, width: heads, types: types(&call, wide) });
        let dkv = dkv.map(|at| GradRows { at, width: keys, types: types(&call, true) });
        // SAFETY: the operands have these sizes; the scratch has a number per row.
        return unsafe { own_grad(call, rows(&call, parted, qkv, kv), mask, operands, dq, dkv) };
    };
    let (seq, count) = (call.size("seq"), blocks::keys(parted, call.bound).1);
    for (i, (block, shape, plan)) in planned.iter().enumerate() {
        let at = GradScratch::new(shape, &mut Room(call.scratch()?));
        let bytes = call.float().bytes();
        let row = (block.query * call.size("heads") * call.size("value_dim") * bytes) as u64;
        let values = (call.size("kv_heads") * call.size("head_dim") * bytes) as u64;
        let operands = Operands {
            inputs: inputs(&call, qkv, kv, block),
            o: o + row,
            lse: at.stats,
            dout: dout + row,
            gradients: [at.dq, at.dkv, at.dkv + values],
            dq: at.dq_sum,
            scratch: at.plan,
            ragged: None,
        };
        // SAFETY: the operands have these sizes, and the scratch has room for all.
        unsafe {
            statistics(call, shape, lse, at.stats, block)?;
            execute(call.stream, shape, plan, &operands)?;
            let queries = BlockRows { first: block.query, count: block.queries, fresh: i == 0 };
            let block_keys = BlockRows { first: block.key, count: block.keys, fresh: i == 0 };
            add(call, types(&call, wide), dq, at.dq, Matrix { rows: seq, width: heads }, queries)?;
            add(call, types(&call, true), dkv, at.dkv, Matrix { rows: count, width: keys }, block_keys)?;
        }
    }
    Ok(())
}

/// Log-sum-exps of a block's queries, one after the other.
unsafe fn statistics(
    call: Call,
    shape: &AttentionShape,
    from: Address,
    to: Address,
    block: &Block,
) -> Result<(), CudaError> {
    let grid = [block.queries.div_ceil(256), shape.batch * shape.heads, 1];
    let args = args![from, to, call.size("seq"), block.query, block.queries];
    // SAFETY: the block's queries are among the sequence's, and the scratch has a number for each.
    unsafe { call.plain(("context", "block_statistics"), grid, 256, args) }
}

/// Rows of this many elements.
#[derive(Clone, Copy)]
struct Matrix {
    rows: usize,
    width: usize,
}

/// Adds the rows of a block to those of all.
unsafe fn add(
    call: Call,
    types: &str,
    to: Option<Address>,
    block: Address,
    Matrix { rows, width }: Matrix,
    BlockRows { first, count, fresh }: BlockRows,
) -> Result<(), CudaError> {
    let Some(to) = to else { return Ok(()) };
    let args = args![to, block, rows, width, first, count, fresh];
    // SAFETY: the block's rows are among those of the whole, and the scratch has them.
    unsafe { call.plain(("context", &format!("add_block_{types}")), [rows, call.size("batch"), 1], 256, args) }
}

#[cfg(test)]
mod tests {
    use super::super::plans::Parts;
    use super::*;
    use crate::ops;
    use lockstep_ir::op::Ring;
    use lockstep_ir::{Axis, Dim, Op, Section, TensorType};

    #[test]
    fn planned_scratch_has_room_for_all_that_a_block_needs() {
        let types = [DType::BF16, DType::F16];
        for (dtype, deterministic) in types.into_iter().flat_map(|dtype| [false, true].map(|d| (dtype, d))) {
            let profile = ops::profile("cuda", dtype, DType::F32, deterministic);
            for (batch, seq, ranks, heads, kv_heads, e, v) in [
                (1, 2, 2, 1, 1, 16, 16),
                (3, 250, 4, 6, 2, 64, 64),
                (2, 4096, 2, 32, 8, 128, 128),
                (2, 250, 2, 16, 16, 192, 128),
            ] {
                let of = |axis, count| Section { axis, count, unit: e };
                let (q, kv) = (of(Axis::Heads, heads), of(Axis::KvHeads, kv_heads));
                let values = Section { unit: v, ..kv };
                let rows = |count, sections: &[Section]| {
                    let dims =
                        [Dim::new(Axis::Batch, batch), Dim::new(Axis::Seq, count), Dim::packed(sections.to_vec())];
                    TensorType::new(dtype, dims)
                };
                let lse = [Dim::new(Axis::Batch, batch), Dim::new(Axis::Heads, heads), Dim::new(Axis::Seq, seq)];
                let lse = TensorType::new(DType::F32, lse);
                let ring = Op::PartAttentionGrad { window: None, ring: Some(Ring { step: 1, parts: ranks }) };
                for (op, keys) in [(ring, seq), (Op::PartAttentionGrad { window: None, ring: None }, seq * ranks)] {
                    let (qkv, kv, o) = (
                        rows(seq, &[q, kv, values]),
                        rows(keys, &[kv, values]),
                        rows(seq, &[Section { unit: v, ..q }]),
                    );
                    let planned = profile.workspace(&op, &[&o, &qkv, &kv, &o, &lse]).unwrap();
                    let parts = Some(Parts { keys, causal: false, rows: (seq, keys) });
                    let (window, documents, backward) = (None, None, true);
                    let shape = AttentionShape {
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
                    };
                    let mut room = Room(0);
                    GradScratch::new(&shape, &mut room);
                    assert!(room.0 <= planned, "{shape:?}: {} of {planned} bytes", room.0);
                }
            }
        }
    }
}
