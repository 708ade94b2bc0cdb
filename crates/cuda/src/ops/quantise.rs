//! fp8: largest magnitudes, bytes and their transposes, and matmuls of them.

use super::launch::{Launches, launches};
use crate::CudaError;
use crate::call::{Call, suffix};
use crate::kernels::args;
use crate::matmul::{Gemm, MatmulShape, Units, WORKSPACE};
use lockstep_exec::bound::Bound;
use lockstep_ir::op::Factor;
use lockstep_ir::{DType, Op, Seen};

/// The launches of this family.
pub fn launches() -> Launches {
    launches! { call:
        Amax { of, .. } => amax(call, of),
        Quantise { of, to, measures } => quantise(call, of, to, measures),
        Remember { row } => remember(call, row),
        Fp8Linear { .. } => forward(call),
        Fp8GradWeight => grad_weight(call),
    }
}

/// Most blocks of `amax`: each has a largest magnitude of its own.
const AMAX_BLOCKS: usize = 2048;
/// Threads of its blocks, and bytes that each of them reads at a time.
const AMAX_THREADS: usize = 256;
const PACKED: usize = 16;
/// Scratch for them, in bytes.
pub const AMAX_SCRATCH: u64 = 4 * AMAX_BLOCKS as u64;

/// How many matrices there are with a unit of their own.
fn matrices(call: Call, of: Factor) -> usize {
    if of == Factor::Stack { call.size("experts") } else { 1 }
}

/// The largest magnitude of a block's elements, then of all of a matrix.
unsafe fn amax(call: Call, of: Factor) -> Result<(), CudaError> {
    let (Some(out), Some(at)) = (call.output(0), call.bound.outputs[0]) else { return Ok(()) };
    let (count, shares) = (matrices(call, of), call.scratch()?);
    if count > AMAX_BLOCKS {
        return Err(CudaError::Internal(format!("{count} matrices, and at most {AMAX_BLOCKS} have a unit each")));
    }
    let (n, parts) = (call.bound.inputs[0].elements / count, at.elements / count);
    let blocks = (n * call.float().bytes()).div_ceil(4 * AMAX_THREADS * PACKED).clamp(1, AMAX_BLOCKS / count);
    // SAFETY: the operands have these sizes, and the scratch has room for a number of each block.
    unsafe {
        call.typed(("quantise", "amax"), [blocks, count, 1], AMAX_THREADS, args![call.input(0), shares, n])?;
        call.plain(("quantise", "amax_of_shares"), [count, 1, 1], 256, args![shares, blocks, out, parts])
    }
}

/// Rows and columns of a tile, as in `quantise.cu`.
const TILE: usize = 128;

/// Bytes, their transpose and their unit, of every matrix. Sizes are multiples of 16, as matmuls of bytes want them.
unsafe fn quantise(call: Call, of: Factor, to: DType, measures: bool) -> Result<(), CudaError> {
    let (columns, count): (usize, _) = (call.bound.columns.iter().sum(), matrices(call, of));
    let rows = call.bound.inputs[0].elements / columns.max(1) / count;
    let transposed = call.output(1).filter(|_| of.transposes());
    let (unit, lost) = (call.output(of.unit()), of.unit() + 1);
    let measures = measures && call.output(lost).is_some();
    // Kernels that do not count have the numbers start at 0 for the next, which does.
    let (seen, counts) = match measures {
        true => (counted(call, lost)?, call.output(lost)),
        false => (call.output(lost).filter(|_| !call.adds(lost)), call.output(lost)),
    };
    if !columns.is_multiple_of(16) || (transposed.is_some() && !rows.is_multiple_of(16)) {
        return Err(CudaError::Internal(format!("{rows} × {columns} elements are no multiples of 16")));
    }
    let grid = [rows.div_ceil(TILE), columns.div_ceil(TILE), count];
    let of = format!("{}_{}", call.suffix(), suffix(to));
    let kernel = format!("{}_{of}", if measures { "measure" } else { "quantise" });
    let parts = call.bound.inputs[1].elements / count;
    let args = args![call.input(0), call.input(1), parts, call.output(0), transposed, unit, seen, rows, columns];
    // SAFETY: the operands have these sizes; an output that nobody asks for is not written.
    unsafe {
        call.plain(("quantise", &kernel), grid, 256, args)?;
        match counts {
            Some(seen) => {
                let args = args![call.input(0), call.input(1), parts, seen, rows, columns];
                call.plain(("quantise", &format!("lost_{of}")), [looked_at(rows, columns), count, 1], 256, args)
            }
            None => Ok(()),
        }
    }
}

/// Tiles whose elements are looked at.
pub fn looked_at(rows: usize, columns: usize) -> usize {
    (rows.div_ceil(Seen::TILE) * columns.div_ceil(Seen::TILE)).div_ceil(Seen::EVERY)
}

/// The output that counts what rounding loses, where it is asked for: kernels add to it.
pub fn counted(call: Call, output: usize) -> Result<Option<u64>, CudaError> {
    let seen = call.output(output);
    if let Some(seen) = seen.filter(|_| !call.adds(output)) {
        // SAFETY: the output has as many numbers; a double of zero bits is zero.
        unsafe { call.stream.fill(seen, 0, 8 * Seen::COUNT)? };
    }
    Ok(seen)
}

/// The largest magnitudes of the last steps, one step further.
unsafe fn remember(call: Call, row: usize) -> Result<(), CudaError> {
    let (Some(next), steps) = (call.output(0), call.size("steps")) else { return Ok(()) };
    if steps > 1024 {
        return Err(CudaError::Internal(format!("{steps} steps, and a block has 1024 threads")));
    }
    let seen = call.input(1) + (8 * row * Seen::COUNT) as u64;
    // SAFETY: the operands have these sizes; the shape rule has checked the row.
    unsafe {
        call.plain(("quantise", "remember"), [1, 1, 1], 1024, args![call.input(0), seen, call.input(2), next, steps])
    }
}

/// The matmuls of an instruction, with and without a sum that they add to.
pub fn shapes(bound: &Bound) -> Vec<MatmulShape> {
    let (m, n, k) = (bound.size("batch") * bound.size("seq"), bound.size("outputs"), bound.size("inputs"));
    let second = bound.inputs[2].dtype;
    let units = match bound.op {
        Op::FineLinear { by, .. } | Op::FineGradWeight { by } => Units::of(by),
        _ => Units::One,
    };
    let of = |gemm, output| MatmulShape {
        second,
        units,
        ..MatmulShape::new(gemm, (m, n, k), bound.inputs[0].dtype, output)
    };
    match bound.op {
        Op::Fp8Linear { to } | Op::FineLinear { to, .. } => vec![of(Gemm::Forward, to)],
        _ => {
            let dtype = bound.outputs[0].map_or(DType::F32, |at| at.dtype);
            let shape = of(Gemm::WeightOfTransposes, if dtype == DType::Fixed64 { DType::F32 } else { dtype });
            vec![shape, MatmulShape { adds: true, ..shape }]
        }
    }
}

/// Scratch of sums in fixed point: the product in f32.
pub fn share(gradients: DType) -> Vec<(u64, &'static str)> {
    if gradients == DType::Fixed64 { vec![(4, "outputs inputs")] } else { Vec::new() }
}

unsafe fn multiply(call: Call, shape: &MatmulShape, to: u64) -> Result<(), CudaError> {
    let (factors, units) = ((call.input(0), call.input(2)), (call.input(1), call.input(3)));
    // SAFETY: the operands have the shape's sizes.
    unsafe { call.matmul.multiply_in_units(call.stream, shape, factors, units, to, call.scratch()?) }
}

/// y = a · bᵀ.
pub unsafe fn forward(call: Call) -> Result<(), CudaError> {
    let Some(y) = call.output(0) else { return Ok(()) };
    // SAFETY: the operands have these sizes.
    unsafe { multiply(call, &shapes(call.bound)[0], y) }
}

/// dw (+)= dyᵀ · x, of transposes.
pub unsafe fn grad_weight(call: Call) -> Result<(), CudaError> {
    let (Some(dw), Some(at)) = (call.output(0), call.bound.outputs[0]) else { return Ok(()) };
    let [plain, adding] = shapes(call.bound)[..] else { return Ok(()) };
    // SAFETY: the operands have these sizes, and the scratch those of a sum in fixed point after the matmul's.
    unsafe {
        match at.dtype {
            DType::Fixed64 => {
                let share = call.scratch()? + WORKSPACE;
                multiply(call, &plain, share)?;
                super::gradient::add_f32(call, share, dw, at.dtype, call.adds(0), at.elements)
            }
            _ => multiply(call, if call.adds(0) { &adding } else { &plain }, dw),
        }
    }
}
