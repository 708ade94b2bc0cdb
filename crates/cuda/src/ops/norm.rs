//! Norms of rows and of heads, and their gradients.

use super::launch::{Launches, launches};
use crate::CudaError;
use crate::call::{Call, suffix, sum_kind};
use crate::kernels::args;
use lockstep_ir::op::Norm;

/// The launches of this family.
pub fn launches() -> Launches {
    launches! { call:
        Norm { norm, residual, eps } => forward(call, norm, eps, residual),
        NormGrad { norm, residual } => grad(call, norm, residual),
        NormGradWeight { norm } => grad_weight(call, norm),
        RowDot { plus_one } => row_dot(call, plus_one),
        NormBy { plus_one, eps, width } => forward_by(call, eps, width, plus_one),
        NormByGrad { plus_one, width } => grad_by(call, width, plus_one),
        QkNorm { plus_one, eps } => heads_forward(call, eps, plus_one),
        QkNormGrad { plus_one } => heads_grad(call, plus_one),
        QkNormGradWeight => heads_grad_weight(call),
    }
}

/// Shares of gradients that scratch has room for: three sums of three blocks for each multiprocessor of an H100.
pub const SHARES: usize = 3 * 3 * 132;
/// Most threads of a block that keeps a row.
const THREADS: usize = 256;
/// An operand that is not there.
const NONE: Option<u64> = None;

fn name(norm: Norm) -> &'static str {
    match norm {
        Norm::Rms | Norm::RmsPlusOne => "rms_norm",
        Norm::Layer => "layer_norm",
    }
}

/// What kernels add to the weight.
fn one(plus_one: bool) -> f32 {
    if plus_one { 1.0 } else { 0.0 }
}

/// The variant of a kernel for rows of some length.
struct Variant {
    name: String,
    threads: usize,
    /// Rows that a block of the gradient's kernel takes at a time.
    rows: usize,
    /// Blocks of that kernel that run at the same time: each has a share of what is summed over rows. They do not depend on the
    /// device, since the order of sums does on them.
    blocks: usize,
}

impl Variant {
    /// That for rows of `d` elements: rows that divide into packs stay in registers.
    fn new(call: Call, d: usize) -> Self {
        let packs = d / call.pack();
        let threads = packs.next_multiple_of(32).clamp(32, THREADS);
        let chunks = packs.div_ceil(threads).next_power_of_two();
        // As the kernels are compiled: this many rows, and blocks of a multiprocessor, fit the registers.
        let (kind, rows, blocks) = match (call.wide(d), chunks) {
            (true, 1) => ("1", 2, 3),
            (true, 2) => ("2", 1, 2),
            (true, 4) => ("4", 1, 1),
            _ => ("any", 1, 3),
        };
        let threads = if kind == "any" { THREADS } else { threads };
        Self { name: format!("{}_{kind}", suffix(call.float())), threads, rows, blocks: blocks * 132 }
    }
}

/// y and the statistics of x, or of x + delta, which is kept too.
pub unsafe fn forward(call: Call, norm: Norm, eps: f32, add: bool) -> Result<(), CudaError> {
    let d = call.size("features");
    let Variant { name: kind, threads, .. } = Variant::new(call, d);
    let (prefix, delta, weights) = if add { ("add_", Some(call.input(1)), 2) } else { ("", None, 1) };
    let (w, bias) = (call.input(weights), (norm == Norm::Layer).then(|| call.input(weights + 1)));
    let (sum, first) = if add { (call.output(0), 1) } else { (None, 0) };
    let y = call.output(first);
    let (mean, rstd) = match norm {
        Norm::Rms | Norm::RmsPlusOne => (None, call.output(first + 1)),
        Norm::Layer => (call.output(first + 1), call.output(first + 2)),
    };
    let name = format!("{prefix}{}_{kind}", name(norm));
    let args = args![call.input(0), delta, w, bias, sum, y, mean, rstd, d, eps, one(norm == Norm::RmsPlusOne)];
    // SAFETY: the operands have these sizes.
    unsafe { call.plain(("norm", &name), [call.rows(), 1, 1], threads, args) }
}

/// The statistics among the inputs of a gradient that start at `first`, and how many there are.
fn statistics(call: Call, norm: Norm, first: usize) -> (Option<u64>, u64, usize) {
    match norm {
        Norm::Rms | Norm::RmsPlusOne => (None, call.input(first), 1),
        Norm::Layer => (Some(call.input(first)), call.input(first + 1), 2),
    }
}

/// dx, plus what reaches the sum on the residual path.
pub unsafe fn grad(call: Call, norm: Norm, add: bool) -> Result<(), CudaError> {
    let variant = Variant::new(call, call.size("features"));
    // Every row on its way at once: nothing is summed over rows.
    let blocks = call.rows().div_ceil(variant.rows);
    // SAFETY: the operands have these sizes.
    unsafe { gradients(call, norm, add, (&variant, blocks), [NONE; 3]) }
}

/// `shares`: of the weight's gradient, the bias's, and that of the bias whose gradient is the sum of dx.
unsafe fn gradients(
    call: Call,
    norm: Norm,
    add: bool,
    (variant, blocks): (&Variant, usize),
    [weight, bias, after]: [Option<u64>; 3],
) -> Result<(), CudaError> {
    let Some(dx) = call.output(0) else { return Ok(()) };
    let (rows, d) = (call.rows(), call.size("features"));
    let (mean, rstd, count) = statistics(call, norm, 3);
    let dsum = add.then(|| call.input(3 + count));
    let name = format!("{}_grad_{}", name(norm), variant.name);
    let (dy, x, w) = (call.input(0), call.input(1), call.input(2));
    let one = one(norm == Norm::RmsPlusOne);
    let args = args![dy, x, w, mean, rstd, dsum, dx, weight, bias, after, rows, d, one];
    // SAFETY: the operands have these sizes.
    unsafe { call.plain(("norm", &name), [blocks, 1, 1], variant.threads, args) }
}

/// dw (+)= Σ over rows of dy · normed x.
pub unsafe fn grad_weight(call: Call, norm: Norm) -> Result<(), CudaError> {
    let (rows, d, shares) = (call.rows(), call.size("features"), call.scratch()?);
    let variant = Variant::new(call, d);
    let blocks = variant.blocks.min(rows.div_ceil(variant.rows));
    let (mean, rstd, _) = statistics(call, norm, 2);
    let name = format!("{}_grad_{}", name(norm), variant.name);
    let args =
        args![call.input(0), call.input(1), NONE, mean, rstd, NONE, NONE, shares, NONE, NONE, rows, d, one(false)];
    // SAFETY: the operands have these sizes; the scratch has a share for every block.
    unsafe {
        call.plain(("norm", &name), [blocks, 1, 1], variant.threads, args)?;
        add_shares(&[call], shares, blocks, d)
    }
}

/// All gradients of a norm in one pass over its operands: of its weight, its bias where it has one, its input, and of the bias
/// `after` whose gradient is the sum of that over rows.
pub unsafe fn grad_all(
    weight: Call,
    bias: Option<Call>,
    (input, norm, add): (Call, Norm, bool),
    after: Option<Call>,
) -> Result<(), CudaError> {
    let (d, shares) = (input.size("features"), weight.scratch()?);
    let variant = Variant::new(input, d);
    let blocks = variant.blocks.min(input.rows().div_ceil(variant.rows));
    // Shares of one sum follow those of another.
    let mut places = (0..).map(|i| shares + (4 * i * blocks * d) as u64);
    let places = [Some(weight), bias, after].map(|sum| sum.and_then(|_| places.next()));
    let sums: Vec<Call> = [Some(weight), bias, after].into_iter().flatten().collect();
    // SAFETY: the operands have these sizes; the scratch has a share for every block and sum; a row's dy is read before its dx is
    // written.
    unsafe {
        gradients(input, norm, add, (&variant, blocks), places)?;
        add_shares(&sums, shares, blocks, d)
    }
}

/// The first output of each call, three at most, (+)= the sum of `count` shares of `d` numbers. The shares of one follow those
/// of the other.
///
/// # Safety
/// At `shares` there are `count` shares of `d` numbers for each call.
pub unsafe fn add_shares(calls: &[Call], shares: u64, count: usize, d: usize) -> Result<(), CudaError> {
    let Some(first) = calls.first() else { return Ok(()) };
    let mut to = [(NONE, 0); 3];
    for (to, call) in to.iter_mut().zip(calls) {
        let (Some(out), Some(at)) = (call.output(0), call.bound.outputs[0]) else { return Ok(()) };
        *to = (Some(out), sum_kind(at.dtype) + 4 * i32::from(call.adds(0)));
    }
    let [(a, how_a), (b, how_b), (c, how_c)] = to;
    let args = args![shares, a, how_a, b, how_b, c, how_c, count, d];
    // SAFETY: the caller vouches.
    unsafe { first.plain(("sums", "add_shares"), [d.div_ceil(32), calls.len(), 1], 1024, args) }
}

/// Sums over the features of every row.
pub unsafe fn row_dot(call: Call, plus_one: bool) -> Result<(), CudaError> {
    let Some(dot) = call.output(0) else { return Ok(()) };
    let w = (call.bound.inputs.len() > 2).then(|| call.input(2));
    let args = args![call.input(0), call.input(1), w, dot, call.size("features"), one(plus_one)];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("norm", "row_dot"), [call.rows(), 1, 1], THREADS, args) }
}

/// y and the statistic of rows whose sums of squares are there.
pub unsafe fn forward_by(call: Call, eps: f32, width: usize, plus_one: bool) -> Result<(), CudaError> {
    let (x, w, squares, d) = (call.input(0), call.input(1), call.input(2), call.size("features"));
    let args = args![x, w, squares, call.output(0), call.output(1), d, width as f32, eps, one(plus_one)];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("norm", "norm_by"), [call.rows(), 1, 1], THREADS, args) }
}

/// dx of rows whose sums of dy · w · x are there.
pub unsafe fn grad_by(call: Call, width: usize, plus_one: bool) -> Result<(), CudaError> {
    let Some(dx) = call.output(0) else { return Ok(()) };
    let [dy, x, w, rstd, dot] = [0, 1, 2, 3, 4].map(|i| call.input(i));
    let args = args![dy, x, w, rstd, dot, dx, call.size("features"), width as f32, one(plus_one)];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("norm", "norm_by_grad"), [call.rows(), 1, 1], THREADS, args) }
}

/// Warps of a block; each has a head.
const WARPS: usize = 8;

/// A warp per position and head of packed Q·K·V.
fn heads(call: Call) -> [usize; 3] {
    [(call.rows() * (call.size("heads") + 2 * call.size("kv_heads"))).div_ceil(WARPS), 1, 1]
}

pub unsafe fn heads_forward(call: Call, eps: f32, plus_one: bool) -> Result<(), CudaError> {
    let [q, u, e] = ["heads", "kv_heads", "head_dim"].map(|name| call.size(name));
    let (y, rstd) = (call.output(0), call.output(1));
    let args = args![call.input(0), call.input(1), y, rstd, call.rows(), q, u, e, eps, one(plus_one)];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("norm", "qk_norm"), heads(call), 32 * WARPS, args) }
}

pub unsafe fn heads_grad(call: Call, plus_one: bool) -> Result<(), CudaError> {
    let Some(dqkv) = call.output(0) else { return Ok(()) };
    let [q, u, e] = ["heads", "kv_heads", "head_dim"].map(|name| call.size(name));
    let (dy, qkv, w, rstd) = (call.input(0), call.input(1), call.input(2), call.input(3));
    let args = args![dy, qkv, w, rstd, dqkv, call.rows(), q, u, e, one(plus_one)];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("norm", "qk_norm_grad"), heads(call), 32 * WARPS, args) }
}

pub unsafe fn heads_grad_weight(call: Call) -> Result<(), CudaError> {
    let [q, u, e] = ["heads", "kv_heads", "head_dim"].map(|name| call.size(name));
    let (rows, shares) = (call.rows(), call.scratch()?);
    let blocks = SHARES.min(rows);
    let args = args![call.input(0), call.input(1), call.input(2), shares, rows, q, u, e];
    // SAFETY: the operands and the scratch have these sizes.
    unsafe {
        call.typed(("norm", "qk_norm_grad_weight"), [blocks, 1, 1], THREADS, args)?;
        add_shares(&[call], shares, blocks, 2 * e)
    }
}
