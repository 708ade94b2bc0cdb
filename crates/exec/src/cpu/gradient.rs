//! What comes before the update: sums of gradients, their norm, clipping.

use super::call::{At, Call, Kernel, Kernels, Ptr};
use super::float::{Bf16, Float};
use super::simd::vectorised;
use crate::by_kind;
use lockstep_ir::squares::{LIMBS, Squares};
use lockstep_ir::{DType, FLAT_BLOCK, StepLimits, fixed};

/// The kernels of this family.
pub fn kernels() -> Kernels {
    by_kind! { call: Call => Kernel;
        AddState => add_state(call),
        Accumulate => accumulate(call),
        SquareSum { sharers, tail } => square_sum(call, sharers, tail),
        MergeSums => merge_sums(call),
        LossSum => loss_sum(call),
        GradientNorm => gradient_norm(call),
    }
}

/// Tasks that the squares of one gradient are cut into.
const TASKS: usize = 64;
/// Scratch of `square_sum`: a sum for every task.
pub const NORM_SCRATCH: usize = TASKS * std::mem::size_of::<Squares>();

/// A gradient as a function of the index.
#[inline(always)]
pub(super) fn read(dtype: DType, ptr: Ptr<*const u8>, i: usize) -> f32 {
    // SAFETY: callers stay inside the operand.
    unsafe {
        match dtype {
            DType::Fixed64 => fixed::to_f32(*ptr.get().cast::<i64>().add(i)),
            DType::BF16 => (*ptr.get().cast::<Bf16>().add(i)).to(),
            DType::F32 => *ptr.get().cast::<f32>().add(i),
            _ => unreachable!("nothing is summed in {dtype}"),
        }
    }
}

/// The sum of squares of mean gradients. Squares are added in f64 over fixed blocks of a tensor and blocks as integers, so the
/// sum does not depend on how ranks and threads share the blocks.
pub fn square_sum(call: Call, sharers: usize, tail: usize) {
    let inputs = &call.bound.inputs;
    let count = inputs.len() - 1;
    // SAFETY: the scalars are the last input.
    let scalars = call.scalars(count);
    let inverse = f64::from(scalars.inverse());
    let share = 1.0 / sharers as f64;
    let totals = Ptr(call.scratch::<Squares>());
    let mut total = Squares::ZERO;
    for (i, &At { elements, dtype, cut_at, .. }) in inputs[..count].iter().enumerate() {
        let grad = Ptr(call.input::<u8>(i));
        // SAFETY: `from .. to` lies in the gradient.
        let squares = |from: usize, to: usize| unsafe {
            let n = to - from;
            match dtype {
                DType::F32 => squares(call.simd, grad.get().cast::<f32>().add(from), n, inverse),
                DType::BF16 => squares(call.simd, grad.get().cast::<Bf16>().add(from), n, inverse),
                _ => (from..to).map(|i| (f64::from(read(dtype, grad, i)) * inverse).powi(2)).sum(),
            }
        };
        let block = |sum: &mut Squares, from: usize, to: usize| {
            let shared = tail.saturating_sub(cut_at).clamp(from, to);
            if from < shared {
                sum.add(squares(from, shared));
            }
            if shared < to {
                sum.add(squares(shared, to) * share);
            }
        };
        let blocks = elements.div_ceil(FLAT_BLOCK);
        let grain = blocks.div_ceil(TASKS).max(1);
        call.ranges(blocks, grain, |from, to| {
            let mut sum = Squares::ZERO;
            (from..to).for_each(|b| block(&mut sum, b * FLAT_BLOCK, elements.min((b + 1) * FLAT_BLOCK)));
            // SAFETY: every task has a total of its own.
            unsafe { *totals.at(from / grain) = sum };
        });
        for task in 0..blocks.div_ceil(grain) {
            // SAFETY: written above.
            total.merge(unsafe { &*totals.at(task) });
        }
    }
    if let Some(sum) = call.output::<[i64; LIMBS]>(0) {
        // SAFETY: the op table says that the sum has as many parts.
        unsafe { *sum = total.stored() };
    }
}

/// Adds such sums.
pub fn merge_sums(call: Call) {
    let Some(total) = call.output::<i64>(0) else { return };
    for l in 0..LIMBS {
        let limbs = (0..call.bound.inputs.len()).map(|i| call.input::<i64>(i));
        // SAFETY: all operands have as many parts.
        unsafe { *total.add(l) = limbs.fold(0, |sum, x| fixed::merge(sum, *x.add(l))) };
    }
}

/// The sum of losses, as an integer.
pub fn loss_sum(call: Call) {
    let losses = Ptr(call.input::<f64>(0));
    let mut total = Squares::ZERO;
    // SAFETY: the loss has as many elements.
    (0..call.bound.inputs[0].elements).for_each(|i| total.add(unsafe { *losses.at(i) }));
    if let Some(sum) = call.output::<[i64; LIMBS]>(0) {
        // SAFETY: the op table says that the sum has as many parts.
        unsafe { *sum = total.stored() };
    }
}

/// stats = [norm of the mean gradient, factor to apply]; the factor is NaN where the norm is not finite in f32, and where it or
/// the mean loss is beyond the limits of the step.
pub fn gradient_norm(call: Call) {
    // SAFETY: the op table says that the sum has as many parts.
    let (sum, scalars) = unsafe { (Squares::from_stored(&*call.input(0)), call.scalars(1)) };
    let norm = sum.value().sqrt() as f32;
    let admitted = match (call.given(2), call.given(3)) {
        (Some(losses), Some(limits)) => {
            // SAFETY: as above; there are as many limits.
            let (losses, limits) =
                unsafe { (Squares::from_stored(&*losses), Ptr::<*const f32>(limits).slice(0, StepLimits::COUNT)) };
            let loss = losses.value() * f64::from(scalars.inverse_count);
            StepLimits::from_slice(limits).admit(loss, norm)
        }
        _ => true,
    };
    // In f64, since a ratio of two f32 need not be one.
    let clip = if norm > scalars.clip { f64::from(scalars.clip) / f64::from(norm) } else { 1.0 };
    let applied = norm.is_finite() && admitted;
    let factor = if applied { (f64::from(scalars.inverse()) * clip) as f32 } else { f32::NAN };
    if let Some(stats) = call.output::<f32>(0) {
        // SAFETY: stats has two elements.
        unsafe {
            *stats = norm;
            *stats.add(1) = factor;
        }
    }
}

vectorised! {
    /// Σ (scale · x)², in an order that depends on `n` only.
    pub(super) unsafe fn squares<T>(x: *const T, n: usize, scale: f64) -> f64 {
        let mut sums = [0.0f64; 8];
        for start in (0..n / 8 * 8).step_by(8) {
            for (lane, sum) in sums.iter_mut().enumerate() {
                let g = f64::from((*x.add(start + lane)).to()) * scale;
                *sum += g * g;
            }
        }
        for i in n / 8 * 8..n {
            sums[i % 8] += (f64::from((*x.add(i)).to()) * scale).powi(2);
        }
        sums.iter().sum()
    }
}

/// sum = a + b, of two gradient accumulators.
pub fn add_state(call: Call) {
    let At { elements, dtype, .. } = call.bound.inputs[0];
    let (a, b) = (Ptr(call.input::<u8>(0)), Ptr(call.input::<u8>(1)));
    let Some(sum) = call.output::<u8>(0).map(Ptr) else { return };
    call.rows(elements, |from, to| {
        // SAFETY: elements from .. to belong to this task; `sum` may be the memory of `a` or `b`.
        unsafe { merge(dtype, a, b, sum, from, to) };
    });
}

/// sum = x in the first micro-batch, sum + x later.
pub fn accumulate(call: Call) {
    let At { elements, dtype, .. } = call.bound.inputs[0];
    let (x, Some(sum)) = (Ptr(call.input::<u8>(0)), call.output::<u8>(0).map(Ptr)) else { return };
    let adds = call.adds(0);
    call.rows(elements, |from, to| {
        // SAFETY: elements from .. to belong to this task.
        unsafe {
            match adds {
                true => merge(dtype, Ptr(sum.get().cast_const()), x, sum, from, to),
                false => {
                    let (at, bytes) = (from * dtype.bytes(), (to - from) * dtype.bytes());
                    std::ptr::copy_nonoverlapping(x.at(at), sum.at(at), bytes);
                }
            }
        }
    });
}

/// `sum[i] = a[i] + b[i]` for `from ≤ i < to`.
///
/// # Safety
/// The operands have these elements; `sum` is `a`, `b` or apart from both.
unsafe fn merge(dtype: DType, a: Ptr<*const u8>, b: Ptr<*const u8>, sum: Ptr<*mut u8>, from: usize, to: usize) {
    for i in from..to {
        // SAFETY: the caller vouches.
        unsafe {
            match dtype {
                DType::Fixed64 => {
                    let x = fixed::merge(*a.get().cast::<i64>().add(i), *b.get().cast::<i64>().add(i));
                    *sum.get().cast::<i64>().add(i) = x;
                }
                DType::BF16 => {
                    let x = (*a.get().cast::<Bf16>().add(i)).to() + (*b.get().cast::<Bf16>().add(i)).to();
                    *sum.get().cast::<Bf16>().add(i) = Bf16::of(x);
                }
                DType::F32 => {
                    *sum.get().cast::<f32>().add(i) = *a.get().cast::<f32>().add(i) + *b.get().cast::<f32>().add(i)
                }
                _ => unreachable!("nothing is summed in {dtype}"),
            }
        }
    }
}
