//! Attention with document masks: every document is an entry of cuDNN's batch.

use super::document_kernels::{self, Section};
use super::plans::{AttentionShape, Operands, Ragged, SLACK, execute, scale};
use super::table::{self, Room, Table};
use super::{GradOperands, GradRows, Mask, WARPS, keys_seen};
use crate::CudaError;
use crate::call::Call;
use crate::cudnn::{Data, Plan};
use crate::driver::Address;
use crate::kernels::args;
use lockstep_ir::{DType, Workspace};

/// Scratch of the forward kernels: cuDNN's, log-sum-exps position by position, and the table of documents.
pub fn scratch(compute: DType) -> Workspace {
    match Data::fused(compute).is_some() {
        true => Workspace {
            fixed: SLACK + table::ROUNDING,
            terms: vec![(4, "batch heads seq"), (table::BYTES, "batch seq")],
        },
        false => Workspace::default(),
    }
}

/// Scratch of the backward kernels: see [`GradScratch`]. Without cuDNN, a number per row.
pub fn grad_scratch(compute: DType) -> Workspace {
    match Data::fused(compute).is_some() {
        true => Workspace {
            fixed: SLACK + table::ROUNDING,
            terms: vec![
                (4, "batch seq qkv"),
                (GUARD, "qkv"),
                (4, super::HEAD),
                (4, "batch heads seq value_dim"),
                (12, "batch heads seq"),
                (table::BYTES, "batch seq"),
            ],
        },
        false => Workspace { fixed: 0, terms: vec![(4, "batch heads seq")] },
    }
}

/// Bytes after dQ in f32 per element of a packed row: atomic additions come in tiles of rows, the last of which ends after it.
const GUARD: u64 = 4 * 256;

/// Where things are in the scratch of a backward pass.
struct GradScratch {
    /// Of cuDNN.
    plan: Address,
    table: Table,
    /// Σ dO · O of every row, for our own kernel.
    delta: Address,
    /// The same, for cuDNN; and log-sum-exps position by position.
    row_sum: Address,
    stats: Address,
    /// dQ in f32, where atomic additions go: in rows as wide as those of Q, since the library takes Q's offsets for it.
    dq: Address,
    /// With GQA, K, V, dK and dV of every query head; heads of V are then as wide as those of K.
    heads: Option<[Address; 4]>,
}

impl GradScratch {
    fn new(shape: &AttentionShape, room: &mut Room) -> Self {
        let (rows, heads) = (shape.row_bytes(), (2 * shape.batch * shape.seq * shape.heads * shape.e) as u64);
        let width = (shape.heads * shape.e + shape.kv_heads * (shape.e + shape.v)) as u64;
        Self {
            plan: room.take(SLACK),
            table: Table::new(shape, room),
            delta: room.take(rows),
            row_sum: room.take(rows),
            stats: room.take(rows),
            dq: room.take((4 * (shape.batch * shape.seq) as u64 + GUARD) * width),
            heads: shape.grouped().then(|| [(); 4].map(|()| room.take(heads))),
        }
    }
}

/// o, and the log-sum-exp of each row of scores.
///
/// # Safety
/// The operands of the call are as large as the shape says.
pub unsafe fn forward(
    call: Call,
    shape: &AttentionShape,
    plan: &Plan,
    qkv: Address,
    o: Address,
) -> Result<(), CudaError> {
    let mut room = Room(call.scratch()?);
    let (scratch, stats, table) = (room.take(SLACK), room.take(shape.row_bytes()), Table::new(shape, &mut room));
    let inputs = shape.packed(qkv);
    let ragged = Some(Ragged { table, row_sum: 0 });
    let at = Operands { inputs, o, lse: stats, scratch, ragged, ..Operands::default() };
    // SAFETY: the operands have these sizes, and the scratch has room for all.
    unsafe {
        document_kernels::fill(&table, call, shape, call.input(1))?;
        execute(call.stream, shape, plan, &at)?;
        match call.output(1) {
            Some(lse) => document_kernels::transpose(call, stats, lse, shape.seq, shape.heads),
            None => Ok(()),
        }
    }
}

/// dqkv from dO, qkv, o and the log-sum-exps. cuDNN adds dQ up with atomic additions: where the same bits are asked for, a kernel of
/// our own recomputes it, in one order. Its sums over query heads that share a key head (GQA) fail with documents, so every
/// query head gets its key head, and gradients are added up here.
///
/// # Safety
/// The operands of the call are as large as the shape says.
pub unsafe fn grad(call: Call, shape: &AttentionShape, plan: &Plan, dqkv: Address) -> Result<(), CudaError> {
    let (dout, qkv, o, lse, starts) = (call.input(0), call.input(1), call.input(2), call.input(3), call.input(4));
    let at = GradScratch::new(shape, &mut Room(call.scratch()?));
    let (mut inputs, mut gradients) = (shape.packed(qkv), shape.packed(dqkv));
    if let Some([k, v, dk, dv]) = at.heads {
        (inputs[1], inputs[2], gradients[1], gradients[2]) = (k, v, dk, dv);
    }
    let (heads, kv) = (shape.heads * shape.e, shape.kv_heads * shape.e);
    let [of_k, of_v] = [heads, heads + kv].map(|first| Section { first, count: kv });
    // SAFETY: the operands have these sizes, and the scratch has room for all.
    unsafe {
        document_kernels::fill(&at.table, call, shape, starts)?;
        document_kernels::transpose(call, lse, at.stats, shape.heads, shape.seq)?;
        if at.heads.is_some() {
            document_kernels::repeat_heads(call, shape, qkv, inputs[1], of_k)?;
            document_kernels::repeat_heads(call, shape, qkv, inputs[2], of_v)?;
        }
        let ragged = Some(Ragged { table: at.table, row_sum: at.row_sum });
        let operands = Operands { inputs, o, lse: at.stats, dout, gradients, dq: at.dq, scratch: at.plan, ragged };
        execute(call.stream, shape, plan, &operands)?;
        if at.heads.is_some() {
            document_kernels::sum_heads(call, shape, gradients[1], dqkv, of_k)?;
            document_kernels::sum_heads(call, shape, gradients[2], dqkv, of_v)?;
        }
        match call.attention.deterministic {
            false => Ok(()),
            true => ordered_dq(call, shape, at.delta, dqkv),
        }
    }
}

/// dQ, added up in one order.
unsafe fn ordered_dq(call: Call, shape: &AttentionShape, delta: Address, dqkv: Address) -> Result<(), CudaError> {
    let (dout, qkv, o, lse, starts) = (call.input(0), call.input(1), call.input(2), call.input(3), call.input(4));
    let AttentionShape { seq, heads, kv_heads, e, v, batch, .. } = *shape;
    let rows = [seq.div_ceil(WARPS), heads, batch];
    // SAFETY: the operands have these sizes.
    unsafe {
        if TENSOR_CORE_HEADS.contains(&e) && e == v {
            let window = keys_seen(shape.window);
            call.typed(("attention", "attention_delta"), rows, 32 * WARPS, args![dout, o, delta, seq, heads, e])?;
            let args = args![dout, qkv, lse, delta, starts, dqkv, seq, heads, kv_heads, window, scale(e)];
            let (name, grid) = (format!("attention_dq_{e}"), [seq.div_ceil(QUERIES), heads, batch]);
            return call.typed(("attention_dq", &name), grid, 2 * QUERIES, args);
        }
        let dq = GradRows { at: dqkv, width: super::width(&call), types: call.suffix() };
        let (mask, operands) =
            (Mask { window: shape.window, starts: Some(starts) }, GradOperands { dout, o, lse, delta });
        super::own_grad(call, super::Rows::packed(&call, qkv), mask, operands, Some(dq), None)
    }
}

/// Elements of heads that the kernel on tensor cores takes, where those of V have as many.
const TENSOR_CORE_HEADS: [usize; 4] = [32, 64, 96, 128];
/// Queries of a block of it.
const QUERIES: usize = 64;

#[cfg(test)]
mod tests {
    use super::super::tests::{operands, shapes};
    use super::*;
    use crate::ops;
    use lockstep_ir::Op;

    #[test]
    fn planned_scratch_has_room_for_all_that_documents_need() {
        for shape in shapes(false) {
            let shape = AttentionShape { documents: Some(shape.batch * shape.seq), ..shape };
            let profile = ops::profile("cuda", shape.dtype, DType::F32, false);
            let op = Op::AttentionGrad { window: None };
            let types = operands(&shape);
            let planned = profile.workspace(&op, &types.each_ref()).unwrap();
            let mut room = Room(0);
            GradScratch::new(&shape, &mut room);
            assert!(room.0 <= planned, "{shape:?}: {} of {planned} bytes", room.0);
        }
    }
}
