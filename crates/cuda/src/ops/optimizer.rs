//! Update rules of optimizers.

use super::kept;
use super::launch::{Launches, launches};
use super::many::Many;
use super::orthogonal::orthogonalise;
use crate::CudaError;
use crate::call::{Call, THREADS, suffix};
use crate::kernels::args;
use lockstep_ir::{DType, Op};

/// The launches of this family.
pub fn launches() -> Launches {
    launches! { call:
        AdamW { .. } => adamw_many(&[call]),
        Lion { beta1, beta2, decay, lr_scale } => by_moment(call, "lion", [beta1, beta2, decay, lr_scale]),
        Sgd { momentum, decay, lr_scale } => by_moment(call, "sgd", [momentum, 0.0, decay, lr_scale]),
        Momentum { momentum: beta } => momentum(call, beta),
        Orthogonalise => orthogonalise(call),
        Descend { decay, lr_scale } => descend(call, decay, lr_scale),
    }
}

/// What kernels are called that round new parameters to output `copy`. Some parameters are f32 and have none; where all are, any kernel does.
fn rounded(calls: &[Call], copy: usize) -> &'static str {
    let copies = calls.iter().find_map(|call| call.bound.outputs[copy]);
    suffix(copies.map_or(DType::BF16, |at| at.dtype))
}

fn each(n: usize) -> [usize; 3] {
    [n.div_ceil(THREADS), 1, 1]
}

/// AdamW of several tensors that have constants, types, scalars and statistics in common.
pub unsafe fn adamw_many(calls: &[Call]) -> Result<(), CudaError> {
    let Some(first) = calls.first() else { return Ok(()) };
    let Op::AdamW { beta1, beta2, eps, .. } = first.bound.op else { return Ok(()) };
    let (kept, calls): (Vec<Call>, Vec<Call>) = calls.iter().partition(|call| call.bound.rounding.is_some());
    // SAFETY: the caller vouches.
    unsafe { kept::update(&kept)? };
    let name = format!("adamw_{}_{}", suffix(first.bound.inputs[1].dtype), rounded(&calls, 3));
    let args = args![first.input(4), first.input(5), beta1, beta2, eps];
    let mut many = Many::<7>::new();
    for call in &calls {
        let (Some(w), Some(m), Some(v)) = (call.output(0), call.output(1), call.output(2)) else { continue };
        let Op::AdamW { decay, lr_scale, .. } = call.bound.op else { continue };
        let n = call.bound.inputs[0].elements;
        let numbers = u64::from(decay.to_bits()) | u64::from(lr_scale.to_bits()) << 32;
        let entry = [call.input(1), w, m, v, call.output(3).unwrap_or(0), n as u64, numbers];
        many.push(n.div_ceil(4 * THREADS), entry);
        if many.is_full() {
            // SAFETY: as the kernel's struct has them; the operands have as many elements.
            unsafe { many.launch(*first, ("optimizer", &name), args)? };
        }
    }
    // SAFETY: as above.
    unsafe { many.launch(*first, ("optimizer", &name), args) }
}

/// Lion or SGD: a rule with one moment.
pub unsafe fn by_moment(call: Call, rule: &str, [a, b, decay, lr_scale]: [f32; 4]) -> Result<(), CudaError> {
    if call.bound.rounding.is_some() {
        // SAFETY: the caller vouches.
        return unsafe { kept::update(&[call]) };
    }
    let (Some(w), Some(m)) = (call.output(0), call.output(1)) else { return Ok(()) };
    let n = call.bound.inputs[0].elements;
    let name = format!("{rule}_{}_{}", suffix(call.bound.inputs[1].dtype), rounded(&[call], 2));
    let (grad, scalars, stats) = (call.input(1), call.input(3), call.input(4));
    let args = args![grad, scalars, stats, w, m, call.output(2), n, a, b, decay, lr_scale];
    // SAFETY: the operands have as many elements.
    unsafe { call.plain(("optimizer", &name), each(n), THREADS, args) }
}

pub unsafe fn momentum(call: Call, beta: f32) -> Result<(), CudaError> {
    if call.bound.rounding.is_some() {
        // SAFETY: the caller vouches.
        return unsafe { kept::update(&[call]) };
    }
    let Some(m) = call.output(0) else { return Ok(()) };
    let at = call.bound.inputs[0];
    let name = format!("momentum_{}", suffix(at.dtype));
    let args = args![call.input(0), call.input(2), m, call.output(1), at.elements, beta];
    // SAFETY: the operands have as many elements.
    unsafe { call.plain(("optimizer", &name), each(at.elements), THREADS, args) }
}

pub unsafe fn descend(call: Call, decay: f32, lr_scale: f32) -> Result<(), CudaError> {
    if call.bound.rounding.is_some() {
        // SAFETY: the caller vouches.
        return unsafe { kept::update(&[call]) };
    }
    let Some(w) = call.output(0) else { return Ok(()) };
    let n = call.bound.inputs[0].elements;
    let args = args![call.input(1), call.input(2), call.input(3), w, call.output(1), n, decay, lr_scale];
    let name = format!("descend_{}", rounded(&[call], 1));
    // SAFETY: the operands have as many elements.
    unsafe { call.plain(("optimizer", &name), each(n), THREADS, args) }
}
