//! Kernels around the plans of documents: the table, statistics in the other order, key heads for every query head.

use super::plans::AttentionShape;
use super::table::Table;
use crate::CudaError;
use crate::call::Call;
use crate::driver::Address;
use crate::kernels::{Value, args};

/// Queues what fills a table from where the document of each position starts.
///
/// # Safety
/// The addresses of the table and the starts are of the call's arena.
pub unsafe fn fill(table: &Table, call: Call, shape: &AttentionShape, starts: Address) -> Result<(), CudaError> {
    let (tokens, bound) = (shape.batch * shape.seq, shape.documents.unwrap_or_default());
    let apart = Value::Long(table.apart);
    let packed = shape.heads * shape.e + shape.kv_heads * (shape.e + shape.v);
    let (rows, stats) = (shape.heads * shape.v, shape.heads);
    let args = args![starts, table.offsets[0], table.lengths, tokens, shape.seq, bound, apart, packed, rows, stats];
    // SAFETY: the table has an entry per document and the starts one per token, by the caller's word.
    unsafe { call.plain(("documents", "document_table"), [tokens.div_ceil(1024), 1, 1], 1024, args) }
}

/// Queues the transposition of `rows` × `columns` statistics of every sequence.
///
/// # Safety
/// Both have as many elements.
pub unsafe fn transpose(call: Call, from: Address, to: Address, rows: usize, columns: usize) -> Result<(), CudaError> {
    let grid = [rows.div_ceil(32), columns.div_ceil(32), call.size("batch")];
    // SAFETY: a number per row and column is read of the one and written to the other, both of that size by the caller's word.
    unsafe { call.plain(("documents", "transpose_statistics"), grid, 256, args![from, to, rows, columns]) }
}

/// Elements of packed rows: the first, and how many.
#[derive(Clone, Copy)]
pub struct Section {
    pub first: usize,
    pub count: usize,
}

/// Queues a copy of the key heads of a section of packed rows, one for every query head.
///
/// # Safety
/// Both are as large as the shape says.
pub unsafe fn repeat_heads(
    call: Call,
    shape: &AttentionShape,
    packed: Address,
    rows: Address,
    section: Section,
) -> Result<(), CudaError> {
    // SAFETY: the contract is this one's, the section is one of the packed rows.
    unsafe { copy_heads(call, shape, "repeat_heads", shape.heads * shape.e, packed, rows, section) }
}

/// Queues the way back: what query heads have of one head of the section is added up.
///
/// # Safety
/// Both are as large as the shape says.
pub unsafe fn sum_heads(
    call: Call,
    shape: &AttentionShape,
    rows: Address,
    packed: Address,
    section: Section,
) -> Result<(), CudaError> {
    let kernel = format!("sum_heads_{}", call.suffix());
    // SAFETY: the contract is this one's, the section is one of the packed rows.
    unsafe { copy_heads(call, shape, &kernel, section.count, rows, packed, section) }
}

unsafe fn copy_heads(
    call: Call,
    shape: &AttentionShape,
    kernel: &str,
    written: usize,
    from: Address,
    to: Address,
    Section { first, count }: Section,
) -> Result<(), CudaError> {
    let (heads, width) = (shape.heads * shape.e, (shape.heads + 2 * shape.kv_heads) * shape.e);
    let packs = shape.batch * shape.seq * written / 8;
    let args = args![from, to, packs, shape.e / 8, count / 8, heads / 8, first / 8, width / 8];
    // SAFETY: packs of the section are read and as many are written, which both have by the callers' words.
    unsafe { call.plain(("documents", kernel), [packs.div_ceil(256), 1, 1], 256, args) }
}
