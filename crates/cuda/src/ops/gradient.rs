//! Sums of gradients, and their norm.

use super::launch::{Launches, launches};
use super::many::Many;
use crate::CudaError;
use crate::call::{Call, THREADS, suffix, sum_kind};
use crate::kernels::args;
use lockstep_ir::DType;
use lockstep_ir::squares::LIMBS;

/// The launches of this family.
pub fn launches() -> Launches {
    launches! { call:
        AddState => add_state(call),
        Accumulate => accumulate(call),
        SquareSum { sharers, tail } => square_sum(call, sharers, tail),
        MergeSums => merge_sums(call),
        LossSum => loss_sum(call),
        GradientNorm => gradient_norm(call),
    }
}

fn each(n: usize) -> [usize; 3] {
    [n.div_ceil(THREADS), 1, 1]
}

pub unsafe fn add_state(call: Call) -> Result<(), CudaError> {
    let Some(sum) = call.output(0) else { return Ok(()) };
    let at = call.bound.inputs[0];
    let args = args![call.input(0), call.input(1), sum, sum_kind(at.dtype), at.elements];
    // SAFETY: the operands have as many elements.
    unsafe { call.plain(("sums", "add_state"), each(at.elements), THREADS, args) }
}

pub unsafe fn accumulate(call: Call) -> Result<(), CudaError> {
    let Some(sum) = call.output(0) else { return Ok(()) };
    let at = call.bound.inputs[0];
    let args = args![call.input(0), sum, sum_kind(at.dtype), call.adds(0), at.elements];
    // SAFETY: the operands have as many elements.
    unsafe { call.plain(("sums", "accumulate"), each(at.elements), THREADS, args) }
}

/// Adds `n` numbers to an accumulator, or puts them there.
///
/// # Safety
/// Both have as many elements.
pub unsafe fn add_f32(call: Call, x: u64, sum: u64, dtype: DType, adds: bool, n: usize) -> Result<(), CudaError> {
    // SAFETY: the caller vouches.
    unsafe { call.plain(("sums", "sum_f32"), each(n), THREADS, args![x, sum, sum_kind(dtype), adds, n]) }
}

/// Scratch: the limbs of the sum, and a mark.
pub unsafe fn square_sum(call: Call, sharers: usize, tail: usize) -> Result<(), CudaError> {
    /// Elements of a block of threads.
    const CHUNK: usize = THREADS * 4 * 8;
    let Some(out) = call.output(0) else { return Ok(()) };
    let (totals, last) = (call.scratch()?, call.bound.inputs.len() - 1);
    let args = args![call.input(last), totals, 1.0 / sharers as f64];
    let gradients = &call.bound.inputs[..last];
    // SAFETY: the operands have as many elements; the scratch has as many numbers.
    unsafe { call.stream.fill(totals, 0, (LIMBS + 1) * 8)? };
    for dtype in [DType::F32, DType::BF16, DType::Fixed64] {
        let name = format!("square_sum_{}", suffix(dtype));
        let mut many = Many::<3>::new();
        for (i, at) in gradients.iter().enumerate().filter(|(_, at)| at.dtype == dtype) {
            let tail = tail.saturating_sub(at.cut_at).min(at.elements);
            many.push(at.elements.div_ceil(CHUNK), [call.input(i), at.elements as u64, tail as u64]);
            if many.is_full() {
                // SAFETY: address, elements and tail, as the kernel's struct has them.
                unsafe { many.launch(call, ("optimizer", &name), args)? };
            }
        }
        // SAFETY: as above.
        unsafe { many.launch(call, ("optimizer", &name), args)? };
    }
    // SAFETY: the scratch has the limbs and a mark, the output the limbs.
    unsafe { call.plain(("optimizer", "square_sum_end"), [1, 1, 1], 1, args![totals, out]) }
}

pub unsafe fn merge_sums(call: Call) -> Result<(), CudaError> {
    let Some(total) = call.output(0) else { return Ok(()) };
    (0..call.bound.inputs.len()).try_for_each(|i| {
        // SAFETY: all have as many parts, fewer than 32.
        unsafe { call.plain(("optimizer", "merge_sum"), [1, 1, 1], 32, args![call.input(i), total, i > 0]) }
    })
}

pub unsafe fn loss_sum(call: Call) -> Result<(), CudaError> {
    let Some(sum) = call.output(0) else { return Ok(()) };
    let args = args![call.input(0), call.bound.inputs[0].elements, sum];
    // SAFETY: there are as many losses, and the limbs of a sum.
    unsafe { call.plain(("optimizer", "loss_sum"), [1, 1, 1], 1, args) }
}

pub unsafe fn gradient_norm(call: Call) -> Result<(), CudaError> {
    let Some(stats) = call.output(0) else { return Ok(()) };
    let args = args![call.input(0), call.input(1), call.given(2), call.given(3), stats];
    // SAFETY: the operands have the sizes that the kernel knows.
    unsafe { call.plain(("optimizer", "gradient_norm"), [1, 1, 1], 1, args) }
}
