//! The nearest orthogonal matrix, by Newton–Schulz iterations on cuBLASLt matmuls in f32.

use crate::CudaError;
use crate::call::{Call, THREADS};
use crate::driver::ALIGNMENT;
use crate::kernels::args;
use crate::matmul::{Gemm, MatmulShape, WORKSPACE};
use lockstep_exec::bound::Bound;
use lockstep_ir::op::newton_schulz::{COEFFICIENTS, EPS, ITERATIONS, scale};
use lockstep_ir::{DType, Workspace};

/// Shares of a norm.
const SHARES: usize = 256;

/// A matmul's; the matrix and what is added to it; two squares of its shorter side; shares of the norm.
pub fn scratch() -> Workspace {
    let fixed = WORKSPACE + (8 * SHARES) as u64 + 5 * ALIGNMENT;
    Workspace { fixed, terms: vec![(8, "outputs inputs"), (8, "short short")] }
}

/// The Gram matrix of the shorter side, its square, and the polynomial times the matrix.
fn gemms(rows: usize, columns: usize) -> [MatmulShape; 3] {
    let shape = |gemm, m, n, k| {
        let dtype = DType::F32;
        MatmulShape::new(gemm, (m, n, k), dtype, dtype)
    };
    let short = rows.min(columns);
    let square = shape(Gemm::Forward, short, short, short);
    match rows <= columns {
        true => [shape(Gemm::Forward, rows, rows, columns), square, shape(Gemm::Input, rows, rows, columns)],
        false => [shape(Gemm::Weight, rows, columns, columns), square, shape(Gemm::Forward, rows, columns, columns)],
    }
}

/// All matmuls of an instruction.
pub fn shapes(bound: &Bound) -> Vec<MatmulShape> {
    bound.sections.iter().flat_map(|rows| gemms(*rows, bound.size("inputs"))).collect()
}

pub unsafe fn orthogonalise(call: Call) -> Result<(), CudaError> {
    let Some(out) = call.output(0) else { return Ok(()) };
    let columns = call.size("inputs");
    let mut first = 0;
    for &rows in &call.bound.sections {
        let at = (4 * first * columns) as u64;
        // SAFETY: a section of both operands.
        unsafe { section(call, call.input(0) + at, out + at, rows, columns)? };
        first += rows;
    }
    Ok(())
}

/// One matrix.
unsafe fn section(call: Call, input: u64, out: u64, rows: usize, columns: usize) -> Result<(), CudaError> {
    let (n, short) = (rows * columns, rows.min(columns));
    let mut end = call.scratch()?;
    let mut take = |bytes: u64| {
        let here = end;
        end += bytes.next_multiple_of(ALIGNMENT);
        here
    };
    let (work, shares) = (take(WORKSPACE), take((8 * SHARES) as u64));
    let [x, next] = [(); 2].map(|()| take(4 * n as u64));
    let [gram, square] = [(); 2].map(|()| take((4 * short * short) as u64));
    let [gram_of, square_of, times] = gemms(rows, columns);
    let [a, b, c] = COEFFICIENTS;
    let each = |n: usize| [n.div_ceil(THREADS), 1, 1];
    let mix = |x: u64, y: u64, to: u64, n: usize, a: f32, b: f32| {
        // SAFETY: the operands have as many elements.
        unsafe { call.plain(("optimizer", "combine"), each(n), THREADS, args![x, y, to, n, a, b]) }
    };
    // SAFETY: the operands and the scratch have these sizes.
    unsafe {
        call.plain(("optimizer", "matrix_squares"), [SHARES, 1, 1], 256, args![input, shares, n])?;
        call.plain(("optimizer", "divide_by_norm"), each(n), 256, args![input, shares, x, n, EPS])?;
        for _ in 0..ITERATIONS {
            call.multiply(&gram_of, (x, x), gram, work)?;
            call.multiply(&square_of, (gram, gram), square, work)?;
            mix(gram, square, gram, short * short, b, c)?;
            let factors = if rows <= columns { (gram, x) } else { (x, gram) };
            call.multiply(&times, factors, next, work)?;
            mix(x, next, x, n, a, 1.0)?;
        }
        mix(x, x, out, n, scale(rows, columns), 0.0)
    }
}
