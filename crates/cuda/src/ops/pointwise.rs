//! Activation functions, sums, casts and dropout: each element on its own.

use super::launch::{Launches, launches};
use crate::CudaError;
use crate::call::{Call, THREADS, suffix};
use crate::kernels::{Value, args};
use lockstep_ir::{Op, counter};

/// Ops that are an expression of every element `x`, as lines of `kernels/map.cu`.
macro_rules! maps {
    () => {
        concat!("MAP(cast, x)\n",)
    };
}
pub(crate) use maps;

/// Places for the largest magnitudes of blocks: as in `pointwise.cu`.
const AMAX_SHARES: usize = 1024;
/// Packs of a thread there.
const AMAX_PACKS: usize = 4;

/// The launches of this family.
pub fn launches() -> Launches {
    launches! { call:
        SwiGlu => swiglu(call),
        SwiGluGrad => swiglu_grad(call),
        GeGlu => geglu(call),
        GeGluGrad => geglu_grad(call),
        ClampedSwiGlu { limit } => gated(call, CLAMPED, args![limit]),
        ClampedSwiGluGrad { limit } => gated_grad(call, CLAMPED_GRAD, args![limit]),
        Gelu => gelu(call),
        GeluGrad => gelu_grad(call),
        Dropout { rate, site, .. } => dropout(call, rate, site),
        Add => add(call),
        Scale { factor, rounded } => scale(call, factor, rounded),
        Cast { .. } => map(call, "cast"),
    }
}

/// Elements that a thread of a map has: as in `map.cu`.
const EACH: usize = 4;

/// y = an expression of x, of this name among [`maps`], in the type of y.
pub unsafe fn map(call: Call, name: &str) -> Result<(), CudaError> {
    let (Some(y), Some(at)) = (call.output(0), call.bound.outputs[0]) else { return Ok(()) };
    let kernel = format!("{name}_{}_{}", call.suffix(), suffix(at.dtype));
    let grid = [at.elements.div_ceil(EACH * THREADS), 1, 1];
    // SAFETY: the operands have as many elements.
    unsafe { call.plain(("map", &kernel), grid, THREADS, args![call.input(0), y, at.elements]) }
}

/// Blocks over rows of `n` elements, each thread a pack where rows divide into them.
pub fn over_rows(call: Call, n: usize) -> ([usize; 3], bool) {
    let wide = call.wide(n);
    let work = if wide { n / call.pack() } else { n };
    ([work.div_ceil(THREADS), call.rows(), 1], wide)
}

/// Calls `f` for parts of the rows, as many as a grid may have.
pub fn in_parts(
    grid: [usize; 3],
    mut f: impl FnMut(usize, [usize; 3]) -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    const MOST: usize = 65535;
    (0..grid[1]).step_by(MOST).try_for_each(|first| f(first, [grid[0], MOST.min(grid[1] - first), 1]))
}

pub unsafe fn swiglu(call: Call) -> Result<(), CudaError> {
    // SAFETY: the caller vouches.
    unsafe { gated(call, ("pointwise", "swiglu"), &[]) }
}

pub unsafe fn swiglu_grad(call: Call) -> Result<(), CudaError> {
    // SAFETY: the caller vouches.
    unsafe { gated_grad(call, ("pointwise", "swiglu_grad"), &[]) }
}

pub unsafe fn geglu(call: Call) -> Result<(), CudaError> {
    // SAFETY: the caller vouches.
    unsafe { gated(call, ("elements", "geglu"), &[]) }
}

pub unsafe fn geglu_grad(call: Call) -> Result<(), CudaError> {
    // SAFETY: the caller vouches.
    unsafe { gated_grad(call, ("elements", "geglu_grad"), &[]) }
}

const CLAMPED: (&str, &str) = ("elements", "clamped_swiglu");
const CLAMPED_GRAD: (&str, &str) = ("elements", "clamped_swiglu_grad");

/// y of packed gate·up, by this kernel of this source, which takes some numbers more.
unsafe fn gated(call: Call, kernel: (&str, &str), more: &[Value]) -> Result<(), CudaError> {
    let Some(y) = call.output(0) else { return Ok(()) };
    let f = call.size("ffn");
    let (grid, wide) = over_rows(call, f);
    let bytes = call.float().bytes();
    in_parts(grid, |first, grid| {
        let row = (first * f * bytes) as u64;
        let args = args![call.input(0) + 2 * row, y + row, f, wide];
        // SAFETY: the operands have these sizes.
        unsafe { call.typed(kernel, grid, THREADS, &[&args[..], more].concat()) }
    })
}

/// The gradient of packed gate·up.
unsafe fn gated_grad(call: Call, kernel: (&str, &str), more: &[Value]) -> Result<(), CudaError> {
    let Some(out) = call.output(0) else { return Ok(()) };
    let f = call.size("ffn");
    let (grid, wide) = over_rows(call, f);
    let bytes = call.float().bytes();
    in_parts(grid, |first, grid| {
        let row = (first * f * bytes) as u64;
        let args = args![call.input(0) + row, call.input(1) + 2 * row, out + 2 * row, f, wide];
        // SAFETY: the operands have these sizes.
        unsafe { call.typed(kernel, grid, THREADS, &[&args[..], more].concat()) }
    })
}

/// A SwiGLU or its gradient, with the largest magnitude of what it makes: blocks leave theirs in a few places, which are looked at in the end.
pub unsafe fn swiglu_amax(call: Call, amax: Call) -> Result<(), CudaError> {
    let (Some(y), Some(out), Some(at)) = (call.output(0), amax.output(0), amax.bound.outputs[0]) else { return Ok(()) };
    let (f, shares) = (call.size("ffn"), amax.scratch()?);
    if !call.wide(f) {
        return Err(CudaError::Internal(format!("a SwiGLU of {f} features is to be quantised")));
    }
    let gradient = call.op() == Op::SwiGluGrad;
    let packs = call.bound.inputs[usize::from(gradient)].elements / 2 / call.pack();
    let grid = [packs.div_ceil(AMAX_PACKS * THREADS), 1, 1];
    let (name, args) = match gradient {
        false => ("swiglu_amax", &args![call.input(0), y, f, packs, shares][..]),
        true => ("swiglu_grad_amax", &args![call.input(0), call.input(1), y, f, packs, shares][..]),
    };
    // SAFETY: the operands have these sizes, and the scratch has room for the shares.
    unsafe {
        call.plain(("pointwise", "no_shares"), [1, 1, 1], AMAX_SHARES, args![shares])?;
        call.typed(("pointwise", name), grid, THREADS, args)?;
        amax.plain(("quantise", "amax_of_shares"), [1, 1, 1], 256, args![shares, AMAX_SHARES, out, at.elements])
    }
}

pub unsafe fn add(call: Call) -> Result<(), CudaError> {
    let Some(sum) = call.output(0) else { return Ok(()) };
    let n = call.bound.inputs[0].elements;
    let grid = [n.div_ceil(call.pack() * THREADS), 1, 1];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("pointwise", "add"), grid, THREADS, args![call.input(0), call.input(1), sum, n]) }
}

/// Blocks of threads that have a pack each.
fn packs(call: Call, n: usize) -> [usize; 3] {
    [n.div_ceil(call.pack() * THREADS), 1, 1]
}

pub unsafe fn scale(call: Call, factor: f32, rounded: bool) -> Result<(), CudaError> {
    let Some(y) = call.output(0) else { return Ok(()) };
    let n = call.bound.inputs[0].elements;
    let args = args![call.input(0), y, n, factor, rounded];
    // SAFETY: the operands have as many elements.
    unsafe { call.typed(("elements", "scale"), packs(call, n), THREADS, args) }
}

pub unsafe fn gelu(call: Call) -> Result<(), CudaError> {
    let Some(y) = call.output(0) else { return Ok(()) };
    let n = call.bound.inputs[0].elements;
    // SAFETY: the operands have as many elements.
    unsafe { call.typed(("elements", "gelu"), packs(call, n), THREADS, args![call.input(0), y, n]) }
}

pub unsafe fn gelu_grad(call: Call) -> Result<(), CudaError> {
    let Some(dx) = call.output(0) else { return Ok(()) };
    let n = call.bound.inputs[0].elements;
    let args = args![call.input(0), call.input(1), dx, n];
    // SAFETY: the operands have as many elements.
    unsafe { call.typed(("elements", "gelu_grad"), packs(call, n), THREADS, args) }
}

pub unsafe fn dropout(call: Call, rate: f32, site: u64) -> Result<(), CudaError> {
    let Some(y) = call.output(0) else { return Ok(()) };
    let [first, count, then] = call.span();
    let (below, scale) = (counter::threshold(rate) as usize, 1.0 / (1.0 - rate));
    let (x, keys, d, seq) = (call.input(0), call.input(1), call.size("features"), call.size("seq"));
    let feature = call.bound.counted_from();
    let args = args![x, keys, y, d, feature, seq, first, count, then, Value::Long(site), below, scale];
    // SAFETY: the operands have these sizes.
    unsafe { call.typed(("elements", "dropout"), [call.rows(), 1, 1], THREADS, args) }
}
