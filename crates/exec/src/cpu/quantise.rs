//! fp8, emulated: the bytes are those of any other device, products are added in f32.
//!
//! A unit is a power of two, so a byte times its unit is a bf16 exactly, and a matmul of bytes is one of these.

use super::call::{Call, Kernel, Kernels, Ptr};
use super::float::{Bf16, Float};
use super::gemm::{Matrix, Target, gemm};
use super::linear::weight_product_of;
use super::simd::vectorised;
use crate::by_kind;
use lockstep_ir::op::Factor;
use lockstep_ir::{DType, F8, Seen};
use std::sync::atomic::{AtomicU64, Ordering};

/// The kernels of this family.
pub fn kernels<T: Float>() -> Kernels {
    by_kind! { call: Call => Kernel;
        Amax { of, .. } => amax::<T>(call, of),
        Quantise { of, to, measures } => quantise::<T>(call, of, to, measures),
        Remember { row } => remember(call, row),
        Fp8Linear { .. } => forward::<T>(call),
        Fp8GradWeight => grad_weight(call),
    }
}

/// Scratch of a matmul of bytes: that of the matmul, and its operands as bf16.
pub fn scratch(gemm: u64, per_k: u64) -> (u64, Vec<(u64, &'static str)>) {
    (gemm + 2 * 64, vec![(per_k, "inputs"), (2, "batch seq inputs"), (2, "outputs inputs")])
}

/// The same of a weight gradient, with what its sum needs besides.
pub fn weight_scratch(gemm: u64, share: Vec<(u64, &'static str)>) -> (u64, Vec<(u64, &'static str)>) {
    (gemm + 2 * 64, [vec![(2, "outputs batch seq"), (2, "inputs batch seq")], share].concat())
}

/// Elements of a task.
const GRAIN: usize = 1 << 14;

/// How many there are with a unit of their own.
fn matrices(call: Call, of: Factor) -> usize {
    if of == Factor::Stack { call.size("experts") } else { 1 }
}

/// The largest magnitude of every matrix. NaN is larger than all.
fn amax<T: Float>(call: Call, of: Factor) {
    let (x, count) = (Ptr(call.input::<T>(0)), matrices(call, of));
    let (Some(out), Some(at)) = (call.output::<f32>(0), call.bound.outputs[0]) else { return };
    let (n, parts) = (call.bound.inputs[0].elements / count, at.elements / count);
    for matrix in 0..count {
        // As bits, magnitudes have the order of numbers.
        let most = std::sync::atomic::AtomicU32::new(0);
        call.ranges(n, GRAIN, |from, to| {
            // SAFETY: the elements are the operand's.
            let here = unsafe { largest_magnitude(call.simd, x.at(matrix * n + from), to - from) };
            most.fetch_max(here, std::sync::atomic::Ordering::Relaxed);
        });
        let most = f32::from_bits(most.into_inner());
        // SAFETY: the output has as many elements.
        (0..parts).for_each(|i| unsafe { *out.add(matrix * parts + i) = most });
    }
}

vectorised! {
    unsafe fn largest_magnitude<T>(x: *const T, n: usize) -> u32 {
        (0..n).fold(0, |most: u32, i| most.max((*x.add(i)).to().to_bits() & 0x7fff_ffff))
    }
}

vectorised! {
    unsafe fn round<T>(x: *const T, q: *mut u8, n: usize, format: F8, scale: f32) -> () {
        for i in 0..n {
            *q.add(i) = format.from_f32((*x.add(i)).to() * scale);
        }
    }
}

/// Rows and columns of a block that is transposed at a time.
const BLOCK: usize = 64;

/// Bytes, their transpose and their unit, of every matrix.
fn quantise<T: Float>(call: Call, of: Factor, to: DType, measures: bool) {
    let Some(format) = F8::of(to) else { unreachable!("the op table refuses {to}") };
    let count = matrices(call, of);
    let each = call.bound.inputs[0].elements / count;
    let parts = call.bound.inputs[1].elements / count;
    let units = call.output::<f32>(of.unit());
    let seen = Counts::asked(call, of.unit() + 1);
    for matrix in 0..count {
        // SAFETY: the op table says that the input is they, and that there is a unit for every matrix.
        let unit = unsafe {
            let parts = Ptr(call.input::<f32>(1)).slice(matrix * parts, parts);
            let most = parts.iter().map(|x| x.to_bits() & 0x7fff_ffff).max().unwrap_or(0);
            let unit = format.unit(f32::from_bits(most));
            if let Some(units) = units {
                *units.add(matrix) = unit;
            }
            unit
        };
        // SAFETY: matrices have as many elements.
        let at = |bytes: *mut u8| Ptr(unsafe { bytes.add(matrix * each) });
        let q = call.output::<u8>(0).map(at);
        let transposed = call.output::<u8>(1).filter(|_| of.transposes()).map(at);
        // SAFETY: as above.
        let x = Ptr(unsafe { call.input::<T>(0).add(matrix * each) });
        quantise_matrix(call, (x, each), (q, transposed), format, unit);
        if let Some(seen) = &seen {
            seen.count(call, (x, each), measures, format, |_| unit);
        }
    }
    if let Some(seen) = seen {
        seen.store(call, of.unit() + 1);
    }
}

/// Counts of what rounding loses.
pub struct Counts([AtomicU64; Seen::COUNT]);

impl Counts {
    /// Of an output, where it is asked for.
    pub fn asked(call: Call, output: usize) -> Option<Self> {
        call.output::<f64>(output).map(|_| Self(std::array::from_fn(|_| AtomicU64::new(0))))
    }

    /// Counts x `[rows, columns]`, of `n` elements, whose element `i` has the unit `unit(i)`.
    pub fn count<T: Float>(
        &self,
        call: Call,
        (x, n): (Ptr<*const T>, usize),
        measures: bool,
        format: F8,
        unit: impl Fn(usize) -> f32 + Sync,
    ) {
        let columns: usize = call.bound.columns.iter().sum();
        let (rows, across) = (n / columns, columns.div_ceil(Seen::TILE));
        let add = |place: usize, count: u64| {
            self.0[place].fetch_add(count, Ordering::Relaxed);
        };
        call.ranges(rows.div_ceil(Seen::TILE) * across, 1, |from, to| {
            let mut lost = [0; Seen::CLASSES];
            for part in from..to {
                let (top, left) = (part / across * Seen::TILE, part % across * Seen::TILE);
                let (bottom, right) = ((top + Seen::TILE).min(rows), (left + Seen::TILE).min(columns));
                // SAFETY: the elements are the operand's.
                let element = |at: usize| unsafe { (*x.at(at)).to() };
                let all = (top..bottom).flat_map(|row| (left..right).map(move |column| row * columns + column));
                if part % Seen::EVERY == 0 {
                    for at in all.clone() {
                        let [large, small] = format.loses(element(at), unit(at));
                        [true, large, small].iter().enumerate().for_each(|(i, here)| lost[i] += u64::from(*here));
                    }
                }
                if measures {
                    let most = all.map(|at| element(at).to_bits() & 0x7fff_ffff).max().unwrap_or(0);
                    if let Some(place) = Seen::place(f32::from_bits(most)) {
                        add(place, 1);
                    }
                }
            }
            lost.iter().enumerate().for_each(|(place, count)| add(place, *count));
        });
    }

    /// Writes them, or adds them to what is there.
    pub fn store(self, call: Call, output: usize) {
        let Some(out) = call.output::<f64>(output) else { return };
        for (i, count) in self.0.into_iter().enumerate() {
            // SAFETY: the output has as many numbers.
            unsafe {
                let before = if call.adds(output) { *out.add(i) } else { 0.0 };
                *out.add(i) = before + count.into_inner() as f64;
            }
        }
    }
}

/// The newest magnitude first, where one was seen that has bounds; guesses go with it.
fn remember(call: Call, row: usize) {
    let (Some(next), steps) = (call.output::<f32>(0), call.size("steps")) else { return };
    // SAFETY: the operands have these sizes, and the shape rule has checked the row. The output may be where the first input is.
    unsafe {
        let seen = Ptr(call.input::<f64>(1)).slice(row * Seen::COUNT, Seen::COUNT);
        let applied = !(*call.input::<f32>(2).add(1)).is_nan();
        let history: Vec<f32> = (0..steps).map(|i| *call.input::<f32>(0).add(i)).collect();
        let largest = Seen::largest(seen).filter(|_| applied);
        for i in 0..steps {
            *next.add(i) = match (largest, i) {
                (Some(largest), 0) => largest,
                (Some(_), _) => history[i - 1].max(0.0),
                (None, _) => history[i],
            };
        }
    }
}

/// x `[rows, columns]`, of `n` elements.
fn quantise_matrix<T: Float>(
    call: Call,
    (x, n): (Ptr<*const T>, usize),
    (q, transposed): (Option<Ptr<*mut u8>>, Option<Ptr<*mut u8>>),
    format: F8,
    unit: f32,
) {
    let columns: usize = call.bound.columns.iter().sum();
    let rows = n / columns;
    call.ranges(rows, BLOCK, |from, to| {
        let mut block = [[0u8; BLOCK]; BLOCK];
        for first in (0..columns).step_by(BLOCK) {
            let wide = BLOCK.min(columns - first);
            // SAFETY: rows from .. to belong to this task.
            unsafe {
                for (row, line) in (from..to).zip(&mut block) {
                    let at = row * columns + first;
                    round(call.simd, x.at(at), line.as_mut_ptr(), wide, format, 1.0 / unit);
                    if let Some(q) = q {
                        std::ptr::copy_nonoverlapping(line.as_ptr(), q.at(at), wide);
                    }
                }
                if let Some(transposed) = transposed {
                    (0..wide).for_each(|column| {
                        let line = transposed.at((first + column) * rows + from);
                        block[..to - from].iter().enumerate().for_each(|(row, bytes)| *line.add(row) = bytes[column]);
                    });
                }
            }
        }
    });
}

/// Input `i` in the units of the input after it, as bf16 at `to`; where the next scratch starts. Equal parts of it have a unit each.
///
/// # Safety
/// There is room for all elements.
pub unsafe fn widened(call: Call, i: usize, to: *mut Bf16) -> *mut Bf16 {
    let (at, units) = (call.bound.inputs[i], call.bound.inputs[i + 1].elements);
    let Some(format) = F8::of(at.dtype) else { unreachable!("the op table refuses {}", at.dtype) };
    let (from, out, each) = (Ptr(call.input::<u8>(i)), Ptr(to), at.elements / units);
    for part in 0..units {
        // SAFETY: the op table says that the next input has the units.
        let unit = unsafe { *call.input::<f32>(i + 1).add(part) };
        let table: [Bf16; 256] = std::array::from_fn(|bits| Bf16::of(format.to_f32(bits as u8) * unit));
        call.ranges(each, GRAIN, |first, last| {
            let (first, last) = (part * each + first, part * each + last);
            // SAFETY: elements first .. last belong to this task.
            (first..last).for_each(|i| unsafe { *out.at(i) = table[usize::from(*from.at(i))] });
        });
    }
    // SAFETY: inside the scratch, which is planned with the padding.
    unsafe { to.add(at.elements.next_multiple_of(32)) }
}

/// y = a · bᵀ.
fn forward<T: Float>(call: Call) {
    let (rows, n, k) = (call.size("batch") * call.size("seq"), call.size("outputs"), call.size("inputs"));
    let Some(y) = call.output::<T>(0) else { return };
    // SAFETY: sizes come from the operands' types; the scratch holds both operands and the matmul's after them.
    unsafe {
        let a: *mut Bf16 = call.scratch();
        let b = widened(call, 0, a);
        let scratch = widened(call, 2, b).cast();
        let (a, b) = (Matrix::rows(a.cast_const(), k), Matrix::rows(b.cast_const(), k).transposed());
        gemm(call.pool, call.simd, (rows, n, k), a, b, Target::new(y, n), scratch);
    }
}

/// dw = dyᵀ · x, of transposes.
fn grad_weight(call: Call) {
    let (batch, seq, n, k) = (call.size("batch"), call.size("seq"), call.size("outputs"), call.size("inputs"));
    let Some(dw) = call.accumulator(0) else { return };
    // SAFETY: as in `forward`; sums that are not in f32 have n · k floats of scratch after the matmul's.
    unsafe {
        let dy: *mut Bf16 = call.scratch();
        let x = widened(call, 0, dy);
        let scratch: *mut f32 = widened(call, 2, x).cast();
        let rows = batch * seq;
        let factors = [dy, x].map(|m| Matrix::rows(m.cast_const(), rows).transposed());
        let share = scratch.byte_add(call.gemm_scratch());
        weight_product_of(call, (batch, seq, n, k), factors, dw, scratch, share);
    }
}
