//! Norms of rows and of heads, and their gradients.

use crate::CudaError;
use crate::call::{Call, suffix, sum_kind};
use crate::kernels::args;

/// Blocks that gradients take rows in; each has a share of the weight's gradient. Eight for each multiprocessor of an H100.
pub const BLOCKS: usize = 1056;
/// Most threads of a block that keeps a row.
const THREADS: usize = 256;
/// An operand that is not there.
const NONE: Option<u64> = None;

/// Which norm.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// By the root of the mean square.
    Rms,
    /// By the deviation, without the mean, with a bias.
    Layer,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Rms => "rms_norm",
            Kind::Layer => "layer_norm",
        }
    }
}

/// The variant of a kernel for rows of `d` elements, and its threads: rows that divide into packs stay in registers.
fn variant(call: Call, d: usize) -> (String, usize) {
    let packs = d / call.pack();
    let threads = packs.next_multiple_of(32).clamp(32, THREADS);
    let chunks = packs.div_ceil(threads).next_power_of_two();
    match call.wide(d) && chunks <= 4 {
        true => (format!("{}_{chunks}", suffix(call.float())), threads),
        false => (format!("{}_any", suffix(call.float())), THREADS),
    }
}

/// y and the statistics of x, or of x + delta, which is kept too.
pub unsafe fn forward(call: Call, norm: Kind, eps: f32, add: bool) -> Result<(), CudaError> {
    let d = call.size('d');
    let (kind, threads) = variant(call, d);
    let (prefix, delta, weights) = if add { ("add_", Some(call.input(1)), 2) } else { ("", None, 1) };
    let (w, bias) = (call.input(weights), (norm == Kind::Layer).then(|| call.input(weights + 1)));
    let (sum, first) = if add { (call.output(0), 1) } else { (None, 0) };
    let y = call.output(first);
    let (mean, rstd) = match norm {
        Kind::Rms => (None, call.output(first + 1)),
        Kind::Layer => (call.output(first + 1), call.output(first + 2)),
    };
    let name = format!("{prefix}{}_{kind}", norm.name());
    let args = args![call.input(0), delta, w, bias, sum, y, mean, rstd, d, eps];
    // SAFETY: the operands have these sizes.
    unsafe { call.plain(("norm", &name), [call.rows(), 1, 1], threads, args) }
}

/// The statistics among the inputs of a gradient that start at `first`, and how many there are.
fn statistics(call: Call, norm: Kind, first: usize) -> (Option<u64>, u64, usize) {
    match norm {
        Kind::Rms => (None, call.input(first), 1),
        Kind::Layer => (Some(call.input(first)), call.input(first + 1), 2),
    }
}

/// dx, plus what reaches the sum on the residual path.
pub unsafe fn grad(call: Call, norm: Kind, add: bool) -> Result<(), CudaError> {
    let rows = call.rows();
    // A block per row: nothing is summed over rows.
    // SAFETY: the operands have these sizes.
    unsafe { gradients(call, norm, add, rows, (None, None)) }
}

unsafe fn gradients(
    call: Call,
    norm: Kind,
    add: bool,
    blocks: usize,
    (shares, bias_shares): (Option<u64>, Option<u64>),
) -> Result<(), CudaError> {
    let Some(dx) = call.output(0) else { return Ok(()) };
    let (rows, d) = (call.rows(), call.size('d'));
    let (kind, threads) = variant(call, d);
    let (mean, rstd, count) = statistics(call, norm, 3);
    let dsum = add.then(|| call.input(3 + count));
    let name = format!("{}_grad_{kind}", norm.name());
    let args = args![call.input(0), call.input(1), call.input(2), mean, rstd, dsum, dx, shares, bias_shares, rows, d];
    // SAFETY: the operands have these sizes.
    unsafe { call.plain(("norm", &name), [blocks, 1, 1], threads, args) }
}

/// dw (+)= Σ over rows of dy · normed x.
pub unsafe fn grad_weight(call: Call, norm: Kind) -> Result<(), CudaError> {
    let (rows, d, shares) = (call.rows(), call.size('d'), call.scratch()?);
    let (kind, threads) = variant(call, d);
    let blocks = BLOCKS.min(rows);
    let (mean, rstd, _) = statistics(call, norm, 2);
    let name = format!("{}_grad_{kind}", norm.name());
    let args = args![call.input(0), call.input(1), NONE, mean, rstd, NONE, NONE, shares, NONE, rows, d];
    // SAFETY: the operands have these sizes; the scratch has a share for every block.
    unsafe {
        call.plain(("norm", &name), [blocks, 1, 1], threads, args)?;
        add_shares(call, shares, blocks, d)
    }
}

/// All gradients of a norm in one pass over its operands: of its weight, its bias where it has one, and its input.
pub unsafe fn grad_both(weight: Call, bias: Option<Call>, input: Call, norm: Kind, add: bool) -> Result<(), CudaError> {
    let (d, shares) = (input.size('d'), weight.scratch()?);
    // Shares of the bias stand behind those of the weight.
    let most = if bias.is_some() { BLOCKS / 2 } else { BLOCKS };
    let blocks = most.min(input.rows());
    let behind = shares + (4 * blocks * d) as u64;
    // SAFETY: the operands have these sizes; the scratch has a share for every block; a row's dy is read before its dx is
    // written.
    unsafe {
        gradients(input, norm, add, blocks, (Some(shares), bias.map(|_| behind)))?;
        add_shares(weight, shares, blocks, d)?;
        bias.map_or(Ok(()), |bias| add_shares(bias, behind, blocks, d))
    }
}

/// The first output (+)= the sum of `count` shares of `d` numbers.
///
/// # Safety
/// There are so many.
pub unsafe fn add_shares(call: Call, shares: u64, count: usize, d: usize) -> Result<(), CudaError> {
    let (Some(out), Some(at)) = (call.output(0), call.bound.outputs[0]) else { return Ok(()) };
    let args = args![shares, out, sum_kind(at.dtype), call.adds(0), count, d];
    // SAFETY: the caller vouches.
    unsafe { call.plain(("sums", "add_shares"), [d.div_ceil(32), 1, 1], 1024, args) }
}

/// Warps of a block; each has a head.
const WARPS: usize = 8;

/// A warp per position and head of packed Q·K·V.
fn heads(call: Call) -> [usize; 3] {
    [(call.rows() * (call.size('q') + 2 * call.size('u'))).div_ceil(WARPS), 1, 1]
}

pub unsafe fn heads_forward(call: Call, eps: f32) -> Result<(), CudaError> {
    let [q, u, e] = ['q', 'u', 'e'].map(|c| call.size(c));
    let args = args![call.input(0), call.input(1), call.output(0), call.output(1), call.rows(), q, u, e, eps];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("norm", "qk_norm"), heads(call), 32 * WARPS, args) }
}

pub unsafe fn heads_grad(call: Call) -> Result<(), CudaError> {
    let Some(dqkv) = call.output(0) else { return Ok(()) };
    let [q, u, e] = ['q', 'u', 'e'].map(|c| call.size(c));
    let args = args![call.input(0), call.input(1), call.input(2), call.input(3), dqkv, call.rows(), q, u, e];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("norm", "qk_norm_grad"), heads(call), 32 * WARPS, args) }
}

pub unsafe fn heads_grad_weight(call: Call) -> Result<(), CudaError> {
    let [q, u, e] = ['q', 'u', 'e'].map(|c| call.size(c));
    let (rows, shares) = (call.rows(), call.scratch()?);
    let blocks = BLOCKS.min(rows);
    let args = args![call.input(0), call.input(1), call.input(2), shares, rows, q, u, e];
    // SAFETY: the operands and the scratch have these sizes.
    unsafe {
        call.typed(("norm", "qk_norm_grad_weight"), [blocks, 1, 1], THREADS, args)?;
        add_shares(call, shares, blocks, 2 * e)
    }
}
