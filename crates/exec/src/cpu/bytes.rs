//! Matmuls of weights in bytes: widened first, which loses nothing in bf16 and f32, and then multiplied as any others. So a row has the same bits
//! whatever is beside it.

use super::call::{Call, Kernel, Kernels, Ptr};
use super::float::Float;
use super::gemm::{Matrix, Target, gemm};
use crate::by_kind;
use lockstep_ir::{DType, rows8};

/// The kernels of this family.
pub fn kernels<T: Float>() -> Kernels {
    by_kind! { call: Call => Kernel;
        ByteLinear => forward::<T>(call),
        ByteLinearGradInput => grad_input::<T>(call),
    }
}

/// Scratch beside that of the matmul: the weights as activations are stored.
pub fn scratch(compute: DType) -> (u64, &'static str) {
    (compute.bytes() as u64, "outputs inputs")
}

/// The weights in their units, at the start of the scratch, and where the rest of it starts.
///
/// # Safety
/// There is room for all elements.
unsafe fn widened<T: Float>(call: Call) -> (*const T, *mut f32) {
    let (at, columns) = (call.bound.inputs[1], call.size("inputs"));
    let (from, to) = (Ptr(call.input::<u8>(1)), Ptr(call.scratch::<T>()));
    let numbers: [f32; 256] = std::array::from_fn(|byte| rows8::to_f32(at.dtype, byte as u8));
    call.rows(at.elements / columns, |first, last| {
        for row in first..last {
            // SAFETY: the op table says that the next input has a unit for every row, and rows belong to this task.
            unsafe {
                let unit = *call.input::<f32>(2).add(row);
                let table = numbers.map(|x| T::of(x * unit));
                (row * columns..(row + 1) * columns).for_each(|i| *to.at(i) = table[usize::from(*from.at(i))]);
            }
        }
    });
    // SAFETY: inside the scratch, which is planned with the padding.
    let rest = unsafe { to.0.byte_add((at.elements * size_of::<T>()).next_multiple_of(64)) };
    (to.0.cast_const(), rest.cast())
}

/// y = x · wᵀ.
fn forward<T: Float>(call: Call) {
    let (rows, n, k) = (call.size("batch") * call.size("seq"), call.size("outputs"), call.size("inputs"));
    let Some(y) = call.output::<T>(0) else { return };
    // SAFETY: sizes come from the operands' types; the scratch holds the weights and the matmul's after them.
    unsafe {
        let (w, scratch) = widened::<T>(call);
        let (x, w) = (Matrix::rows(call.input::<T>(0), k), Matrix::rows(w, k).transposed());
        gemm(call.pool, call.simd, (rows, n, k), x, w, Target::new(y, n), scratch);
    }
}

/// dx = dy · w.
fn grad_input<T: Float>(call: Call) {
    let (rows, n, k) = (call.size("batch") * call.size("seq"), call.size("outputs"), call.size("inputs"));
    let Some(dx) = call.output::<T>(0) else { return };
    // SAFETY: as in `forward`.
    unsafe {
        let (w, scratch) = widened::<T>(call);
        let (dy, w) = (Matrix::rows(call.input::<T>(0), n), Matrix::rows(w, k));
        gemm(call.pool, call.simd, (rows, k, n), dy, w, Target::new(dx, k), scratch);
    }
}
