//! Newton–Schulz iterations on matrices that stand one after the other.

use super::call::{Call, Ptr};
use super::gemm::{Matrix, Target, gemm};
use super::gradient::squares;
use super::simd::vectorised;
use lockstep_ir::op::newton_schulz::{COEFFICIENTS, EPS, ITERATIONS, scale};

/// Parts that the elements of a matrix are cut into to take its norm.
const PARTS: usize = 64;

/// Scratch: a matmul's, the parts of a norm, two square matrices and a whole one.
pub fn scratch(gemm: u64) -> (u64, Vec<(u64, &'static str)>) {
    (gemm + 8 * PARTS as u64, vec![(8, "short short"), (4, "outputs inputs")])
}

/// Every section of the rows on its own.
pub fn orthogonalise(call: Call) {
    let columns = call.size("inputs");
    let Some(x) = call.output::<f32>(0) else { return };
    let input = call.input::<f32>(0);
    let mut first = 0;
    for &rows in &call.bound.sections {
        // SAFETY: the sections make up the rows.
        unsafe { matrix(call, (rows, columns), input.add(first * columns), x.add(first * columns)) };
        first += rows;
    }
}

/// # Safety
/// `from` and `x` have `rows · columns` elements and are the same or apart; the call has the scratch.
unsafe fn matrix(call: Call, (rows, columns): (usize, usize), from: *const f32, x: *mut f32) {
    let (short, elements) = (rows.min(columns), rows * columns);
    let scratch = call.scratch::<f32>();
    // SAFETY: inside the scratch that was planned: `short` is at most the letter a.
    let (parts, square, other, product) = unsafe {
        let parts = scratch.byte_add(call.gemm_scratch()).cast::<f64>();
        let square = parts.add(PARTS).cast::<f32>();
        (parts, square, square.add(short * short), square.add(2 * short * short))
    };
    // SAFETY: tasks take disjoint ranges of the operands and parts.
    unsafe {
        let (from, to, sums) = (Ptr(from), Ptr(x), Ptr(parts));
        let grain = elements.div_ceil(PARTS).max(1);
        call.ranges(elements, grain, |start, end| {
            *sums.at(start / grain) = squares(call.simd, from.at(start), end - start, 1.0);
        });
        let norm = sums.slice(0, elements.div_ceil(grain)).iter().sum::<f64>().sqrt() as f32;
        call.rows(elements, |start, end| {
            combine(call.simd, from.at(start), from.at(start), to.at(start), end - start, 1.0 / (norm + EPS), 0.0);
        });
    }
    let [a, b, c] = COEFFICIENTS;
    let into = |ptr, stride| Target::F32 { ptr, stride, add: false };
    let mul = |sizes, a, b, c| {
        // SAFETY: the matrices have these sizes, and the product goes where neither factor is.
        unsafe { gemm::<f32>(call.pool, call.simd, sizes, a, b, c, scratch) }
    };
    // SAFETY: as above; `square`, `other` and `product` are apart.
    unsafe {
        for iteration in 0..ITERATIONS {
            // The last iteration brings the size in.
            let size = if iteration + 1 == ITERATIONS { scale(rows, columns) } else { 1.0 };
            let matrix = Matrix::rows(x.cast_const(), columns);
            let wide = rows <= columns;
            match wide {
                true => mul((rows, rows, columns), matrix, matrix.transposed(), into(square, short)),
                false => mul((columns, columns, rows), matrix.transposed(), matrix, into(square, short)),
            }
            let gram = Matrix::rows(square.cast_const(), short);
            mul((short, short, short), gram, gram, into(other, short));
            let (square, other) = (Ptr(square.cast_const()), Ptr(other));
            call.rows(short * short, |start, end| {
                let at = other.at(start);
                combine(call.simd, square.at(start), at.cast_const(), at, end - start, b * size, c * size);
            });
            let polynomial = Matrix::rows(other.get().cast_const(), short);
            match wide {
                true => mul((rows, columns, rows), polynomial, matrix, into(product, columns)),
                false => mul((rows, columns, columns), matrix, polynomial, into(product, columns)),
            }
            let (x, product) = (Ptr(x), Ptr(product.cast_const()));
            call.rows(elements, |start, end| {
                let at = x.at(start);
                combine(call.simd, at.cast_const(), product.at(start), at, end - start, a * size, 1.0);
            });
        }
    }
}

vectorised! {
    /// `to = p · a + q · b`; `to` may be `a` or `b`.
    unsafe fn combine<T>(a: *const T, b: *const T, to: *mut f32, n: usize, p: f32, q: f32) -> () {
        for i in 0..n {
            *to.add(i) = p * (*a.add(i)).to() + q * (*b.add(i)).to();
        }
    }
}
