//! The output head and its loss: logits exist a chunk of rows at a time.

use super::launch::{Launches, launches};
use super::linear::{padded, weight_product};
use crate::CudaError;
use crate::call::{Call, THREADS};
use crate::driver::{ALIGNMENT, Address};
use crate::kernels::args;
use crate::matmul::{Gemm, MatmulShape, WORKSPACE};
use lockstep_exec::bound::At;
use lockstep_ir::DType;
use lockstep_ir::op::Rows;

/// The launches of this family.
pub fn launches() -> Launches {
    launches! { call:
        CrossEntropy => cross_entropy(call),
        CrossEntropyGrad { weight } => cross_entropy_grad(call, weight),
        LinearCrossEntropy { score, rows } => {
            if score { linear_score(call, rows) } else { linear_cross_entropy(call, rows) }
        },
        VocabLogits { rows, .. } => vocab_logits(call, rows),
        VocabLoss => vocab_loss(call),
        VocabMisses { rows } => vocab_misses(call, rows),
        VocabGrad { rows } => vocab_grad(call, rows),
        JoinRows => join_rows(call),
    }
}

/// Where the loss scale stands among the step's scalars, in bytes.
pub const LOSS_SCALE: u64 = 4 * 5;

/// Threads of a row of logits.
fn row_threads(call: Call, v: usize) -> usize {
    (v / call.pack()).next_multiple_of(32).clamp(32, 1024)
}

/// Chunks of `m` rows: first row and count. Where gradients are summed in fixed point, a chunk stays in its sequence.
fn chunks(m: usize, seq: usize, rows: usize, fixed: bool) -> Vec<(usize, usize)> {
    let whole = if fixed { seq } else { m };
    let starts = (0..m).step_by(whole.max(1));
    starts.flat_map(|s| (0..whole).step_by(rows.max(1)).map(move |r| (s + r, rows.min(whole - r)))).collect()
}

/// The sizes that chunks have.
pub fn chunk_sizes(m: usize, seq: usize, rows: usize, fixed: bool) -> Vec<usize> {
    let mut sizes: Vec<usize> = chunks(m, seq, rows, fixed).iter().map(|c| c.1).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Columns of a vocabulary: first and count. Matmuls of sizes that are no multiple of 8 are many times slower, so what is left
/// over goes on its own.
pub fn column_parts(v: usize) -> Vec<(usize, usize)> {
    let whole = v / 8 * 8;
    [(0, whole), (whole, v - whole)].into_iter().filter(|(_, count)| *count > 0).collect()
}

/// Loss, dx and dw. Scratch: a matmul's; logits of a chunk; losses of all rows; for sums in fixed point dw once.
pub unsafe fn linear_cross_entropy(call: Call, rows: usize) -> Result<(), CudaError> {
    // SAFETY: the caller vouches.
    unsafe { chunked(call, rows, (call.output(1), call.bound.outputs[2]), None) }
}

/// Loss and misses. Scratch: a matmul's; logits of a chunk; losses of all rows.
pub unsafe fn linear_score(call: Call, rows: usize) -> Result<(), CudaError> {
    // SAFETY: the caller vouches.
    unsafe { chunked(call, rows, (None, None), call.output(1)) }
}

/// The loss, and what is asked for besides: gradients are outputs 1 and 2.
unsafe fn chunked(
    call: Call,
    rows: usize,
    (dx, dw): (Option<Address>, Option<At>),
    misses: Option<Address>,
) -> Result<(), CudaError> {
    let (m, seq, k, v) = (call.rows(), call.size("seq"), call.size("inputs"), call.size("vocab"));
    let (x, w, targets) = (call.input(0), call.input(1), call.input(2));
    let input = call.float();
    let bytes = input.bytes() as u64;
    let fixed = dw.is_some_and(|at| at.dtype == DType::Fixed64);
    let scratch = call.scratch()?;
    let logits = scratch + WORKSPACE;
    let (stride, parts) = (padded(v), column_parts(v));
    let losses = logits + (rows as u64 * stride as u64 * bytes).next_multiple_of(ALIGNMENT);
    let share = losses + (4 * m as u64).next_multiple_of(ALIGNMENT);
    // What gradients start with, among the step's scalars.
    let scale = call.given(3).map(|scalars| scalars + LOSS_SCALE);
    let gradients = dx.is_some() || dw.is_some();
    for (c, (first, count)) in chunks(m, seq, rows, fixed).into_iter().enumerate() {
        let at = (first * k) as u64 * bytes;
        let plain = MatmulShape::new(Gemm::Forward, (count, v, k), input, input);
        let forward = MatmulShape { y_stride: stride, ..plain };
        // SAFETY: the operands and the scratch have these sizes.
        unsafe {
            for &(first, n) in &parts {
                let (w, to) = (w + (first * k) as u64 * bytes, logits + first as u64 * bytes);
                call.multiply(&MatmulShape { n, ..forward }, (x + at, w), to, scratch)?;
            }
            let out = gradients.then_some(logits);
            let lse: Option<u64> = None;
            let place = 4 * first as u64;
            let args = args![logits, targets + place, losses + place, lse, out, scale, v, stride, call.wide(stride)];
            call.typed(("loss", "cross_entropy"), [count, 1, 1], row_threads(call, v), args)?;
            if let Some(misses) = misses {
                let args = args![logits, targets + place, misses + place, v, stride];
                call.typed(("loss", "misses"), [count, 1, 1], row_threads(call, v), args)?;
            }
            if !gradients {
                continue;
            }
            let adds = call.adds(2) || c > 0;
            for &(first, n) in &parts {
                let (dlogits, w) = (logits + first as u64 * bytes, w + (first * k) as u64 * bytes);
                if let Some(dx) = dx {
                    let shape = MatmulShape { gemm: Gemm::Input, n, adds: first > 0, ..forward };
                    call.multiply(&shape, (dlogits, w), dx + at, scratch)?;
                }
                let sizes = (count, count, n, k);
                weight_product(call, sizes, stride, (dlogits, x + at), (2, first, adds), scratch, share)?;
            }
        }
    }
    let Some(loss) = call.output(0) else { return Ok(()) };
    // SAFETY: losses of all rows are there.
    unsafe { call.plain(("loss", "sum_losses"), [call.size("batch"), 1, 1], 256, args![losses, loss, seq]) }
}

pub unsafe fn cross_entropy(call: Call) -> Result<(), CudaError> {
    let (seq, v, losses) = (call.size("seq"), call.size("vocab"), call.scratch()?);
    let out: Option<u64> = None;
    let args = args![call.input(0), call.input(1), losses, call.output(1), out, out, v, v, call.wide(v)];
    // SAFETY: the operands and the scratch have these sizes.
    unsafe {
        call.typed(("loss", "cross_entropy"), [call.rows(), 1, 1], row_threads(call, v), args)?;
        match call.output(0) {
            Some(loss) => call.plain(("loss", "sum_losses"), [call.size("batch"), 1, 1], 256, args![losses, loss, seq]),
            None => Ok(()),
        }
    }
}

pub unsafe fn cross_entropy_grad(call: Call, weight: f32) -> Result<(), CudaError> {
    let Some(out) = call.output(0) else { return Ok(()) };
    let args = args![call.input(0), call.input(1), call.input(2), out, call.size("vocab"), weight];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("loss", "cross_entropy_grad"), [call.rows(), 1, 1], THREADS, args) }
}

/// Logits of a chunk over this rank's part of the vocabulary, and their statistics.
pub unsafe fn vocab_logits(call: Call, rows: Rows) -> Result<(), CudaError> {
    let (Some(logits), Some(statistics)) = (call.output(0), call.output(1)) else { return Ok(()) };
    let (k, v, part, input) = (call.size("inputs"), call.size("vocab"), call.vocab_part(), call.float());
    let x = call.input(0) + (rows.first * k * input.bytes()) as u64;
    let targets = call.input(2) + 4 * rows.first as u64;
    let shape = MatmulShape::new(Gemm::Forward, (rows.count, v, k), input, DType::F32);
    let args = args![logits, targets, statistics, v, part.first, part.entries];
    // SAFETY: the operands and the scratch have these sizes.
    unsafe {
        call.multiply(&shape, (x, call.input(1)), logits, call.scratch()?)?;
        call.plain(("loss", "vocab_statistics"), [rows.count, 1, 1], row_threads(call, v), args)
    }
}

/// Losses from the statistics of all chunks.
pub unsafe fn vocab_loss(call: Call) -> Result<(), CudaError> {
    let Some(loss) = call.output(0) else { return Ok(()) };
    let (parts, losses) = (call.size("parts"), call.scratch()?);
    let mut done = 0;
    let chunks = call.bound.inputs.len() - 1;
    let targets = call.input(chunks);
    for (c, at) in call.bound.inputs[..chunks].iter().enumerate() {
        let (rows, place) = (at.elements / (parts * 3), 4 * done as u64);
        let args = args![call.input(c), targets + place, losses + place, parts, rows];
        // SAFETY: chunks together have the positions of all sequences.
        unsafe { call.plain(("loss", "vocab_losses"), [rows.div_ceil(THREADS), 1, 1], THREADS, args)? };
        done += rows;
    }
    // SAFETY: losses of all rows are there.
    unsafe {
        call.plain(("loss", "sum_losses"), [call.size("batch"), 1, 1], 256, args![losses, loss, call.size("seq")])
    }
}

/// Misses of a chunk by this rank's part of the vocabulary.
pub unsafe fn vocab_misses(call: Call, rows: Rows) -> Result<(), CudaError> {
    let Some(misses) = call.output(0) else { return Ok(()) };
    let (v, parts, part) = (call.size("vocab"), call.size("parts"), call.vocab_part());
    let targets = call.input(2) + 4 * rows.first as u64;
    let args = args![call.input(0), call.input(1), targets, misses, parts, v, part.first, part.entries];
    // SAFETY: the operands have these sizes.
    unsafe { call.plain(("loss", "vocab_misses"), [rows.count, 1, 1], row_threads(call, v), args) }
}

/// This part's share of dx, and dw. Scratch: a matmul's; dlogits in the compute type; for sums in fixed point dw once.
pub unsafe fn vocab_grad(call: Call, rows: Rows) -> Result<(), CudaError> {
    let (k, v, parts, part, input) =
        (call.size("inputs"), call.size("vocab"), call.size("parts"), call.vocab_part(), call.float());
    let x = call.input(2) + (rows.first * k * input.bytes()) as u64;
    let targets = call.input(4) + 4 * rows.first as u64;
    let scratch = call.scratch()?;
    let (dlogits, count) = (scratch + WORKSPACE, rows.count);
    let share = dlogits + ((count * v * input.bytes()) as u64).next_multiple_of(ALIGNMENT);
    let scale = call.given(5).map(|scalars| scalars + LOSS_SCALE);
    let args = args![call.input(0), call.input(1), targets, dlogits, scale, parts, v, part.first, part.entries];
    // SAFETY: the operands and the scratch have these sizes.
    unsafe {
        call.typed(("loss", "vocab_grad"), [count, 1, 1], row_threads(call, v), args)?;
        if let Some(dx) = call.output(0) {
            let shape = MatmulShape::new(Gemm::Input, (count, v, k), input, input);
            call.multiply(&shape, (dlogits, call.input(3)), dx, scratch)?;
        }
        weight_product(call, (count, count, v, k), v, (dlogits, x), (1, 0, call.adds(1)), scratch, share)
    }
}

/// Chunks of rows, one after the other.
pub unsafe fn join_rows(call: Call) -> Result<(), CudaError> {
    let Some(mut to) = call.output(0) else { return Ok(()) };
    for (i, part) in call.bound.inputs[..call.bound.inputs.len() - 1].iter().enumerate() {
        let bytes = part.elements * part.dtype.bytes();
        // SAFETY: chunks together are as large as the output.
        unsafe { call.stream.copy(to, call.input(i), bytes)? };
        to += bytes as u64;
    }
    Ok(())
}
