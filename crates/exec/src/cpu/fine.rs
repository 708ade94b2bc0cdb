//! fp8 with many units in a tensor, emulated as in `quantise.rs`.

use super::call::{Call, Kernel, Kernels, Ptr};
use super::float::{Bf16, Float};
use super::gemm::{Matrix, Target, gemm};
use super::linear::weight_product_of;
use super::quantise::Counts;
use crate::by_kind;
use lockstep_ir::op::{BLOCK, Fine};
use lockstep_ir::{DType, F8};

/// The kernels of this family.
pub fn kernels<T: Float>() -> Kernels {
    by_kind! { call: Call => Kernel;
        QuantiseFine { by, weight, to } => quantise::<T>(call, (by, weight), to),
        FineLinear { by, .. } => forward::<T>(call, by),
        FineGradWeight { by } => grad_weight(call, by),
    }
}

/// A matrix that is quantised.
#[derive(Clone, Copy)]
struct Tensor<T> {
    x: Ptr<*const T>,
    rows: usize,
    columns: usize,
    format: F8,
}

/// Bytes with units: of rows, and of columns where it is the transpose.
fn quantise<T: Float>(call: Call, (by, weight): (Fine, bool), to: DType) {
    let Some(format) = F8::of(to) else { unreachable!("the op table refuses {to}") };
    let columns: usize = call.bound.columns.iter().sum();
    let rows = call.bound.inputs[0].elements / columns;
    let tensor = Tensor { x: Ptr(call.input::<T>(0)), rows, columns, format };
    // Rows and columns that share a unit.
    let (of_rows, of_columns) = match (by, weight) {
        (Fine::Rows, _) => ((1, columns), (rows, 1)),
        (Fine::Blocks, false) => ((1, BLOCK), (BLOCK, 1)),
        (Fine::Blocks, true) => ((BLOCK, BLOCK), (BLOCK, BLOCK)),
    };
    let (q, units) = (call.output::<u8>(0), call.output::<f32>(1));
    let (transposed, units_transposed) = (call.output::<u8>(2), call.output::<f32>(3));
    if q.is_some() || units.is_some() {
        tensor.round(call, of_rows, q.map(Ptr), units.map(Ptr), false);
    }
    if transposed.is_some() || units_transposed.is_some() {
        tensor.round(call, of_columns, transposed.map(Ptr), units_transposed.map(Ptr), true);
    }
    if let (Some(seen), Some(units)) = (Counts::asked(call, 4), units.map(Ptr)) {
        let width = of_rows.1;
        // SAFETY: every row has a unit for every `width` columns.
        let unit = |i: usize| unsafe { *units.at(i % columns / width * rows + i / columns) };
        seen.count(call, (tensor.x, rows * columns), false, format, unit);
        seen.store(call, 4);
    }
}

impl<T: Float> Tensor<T> {
    /// Parts of `height` rows and `width` columns have a unit each. It is written down for each row of the part, those of all rows one after the
    /// other, and then for the next columns; the other way round where the result is the transpose.
    fn round(
        self,
        call: Call,
        (height, width): (usize, usize),
        q: Option<Ptr<*mut u8>>,
        units: Option<Ptr<*mut f32>>,
        transpose: bool,
    ) {
        let Self { x, rows, columns, format } = self;
        let across = columns.div_ceil(width);
        call.ranges(rows.div_ceil(height) * across, 1, |from, to| {
            for part in from..to {
                let (first, left) = (part / across * height, part % across * width);
                let (end, right) = ((first + height).min(rows), (left + width).min(columns));
                let all = || (first..end).flat_map(move |row| (left..right).map(move |column| (row, column)));
                // SAFETY: the elements are the operand's; those of a part, and its units, are one task's.
                unsafe {
                    let at = |(row, column)| (*x.at(row * columns + column)).to();
                    let most = all().map(|at_| at(at_).to_bits() & 0x7fff_ffff).max().unwrap_or(0);
                    let unit = format.unit(f32::from_bits(most));
                    if let Some(units) = units {
                        match transpose {
                            false => (first..end).for_each(|row| *units.at(left / width * rows + row) = unit),
                            true => {
                                (left..right).for_each(|column| *units.at(first / height * columns + column) = unit)
                            }
                        }
                    }
                    if let Some(q) = q {
                        for (row, column) in all() {
                            let to = if transpose { column * rows + row } else { row * columns + column };
                            *q.at(to) = format.from_f32(at((row, column)) * (1.0 / unit));
                        }
                    }
                }
            }
        });
    }
}

/// Input `i`, whose rows have `k` elements, in the units of the input after it, as bf16 at `to`; where the next scratch starts.
///
/// # Safety
/// There is room for all elements.
unsafe fn widened(call: Call, i: usize, k: usize, by: Fine, to: *mut Bf16) -> *mut Bf16 {
    let at = call.bound.inputs[i];
    let Some(format) = F8::of(at.dtype) else { unreachable!("the op table refuses {}", at.dtype) };
    let (from, units, out, rows) = (Ptr(call.input::<u8>(i)), Ptr(call.input::<f32>(i + 1)), Ptr(to), at.elements / k);
    call.rows(rows, |first, last| {
        for (row, column) in (first..last).flat_map(|row| (0..k).map(move |column| (row, column))) {
            // SAFETY: rows first .. last belong to this task.
            unsafe {
                let unit = *units.at(if by == Fine::Rows { row } else { column / BLOCK * rows + row });
                *out.at(row * k + column) = Bf16::of(format.to_f32(*from.at(row * k + column)) * unit);
            }
        }
    });
    // SAFETY: inside the scratch, which is planned with the padding.
    unsafe { to.add(at.elements.next_multiple_of(32)) }
}

/// y = a · bᵀ.
fn forward<T: Float>(call: Call, by: Fine) {
    let (rows, n, k) = (call.size("batch") * call.size("seq"), call.size("outputs"), call.size("inputs"));
    let Some(y) = call.output::<T>(0) else { return };
    // SAFETY: sizes come from the operands' types; the scratch holds both operands and the matmul's after them.
    unsafe {
        let a: *mut Bf16 = call.scratch();
        let b = widened(call, 0, k, by, a);
        let scratch = widened(call, 2, k, by, b).cast();
        let (a, b) = (Matrix::rows(a.cast_const(), k), Matrix::rows(b.cast_const(), k).transposed());
        gemm(call.pool, call.simd, (rows, n, k), a, b, Target::new(y, n), scratch);
    }
}

/// dw = dyᵀ · x, of transposes.
fn grad_weight(call: Call, by: Fine) {
    let (batch, seq, n, k) = (call.size("batch"), call.size("seq"), call.size("outputs"), call.size("inputs"));
    let Some(dw) = call.accumulator(0) else { return };
    // SAFETY: as in `forward`; sums that are not in f32 have n · k floats of scratch after the matmul's.
    unsafe {
        let rows = batch * seq;
        let dy: *mut Bf16 = call.scratch();
        let x = widened(call, 0, rows, by, dy);
        let scratch: *mut f32 = widened(call, 2, rows, by, x).cast();
        let factors = [dy, x].map(|m| Matrix::rows(m.cast_const(), rows).transposed());
        let share = scratch.byte_add(call.gemm_scratch());
        weight_product_of(call, (batch, seq, n, k), factors, dw, scratch, share);
    }
}
