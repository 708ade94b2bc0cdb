//! Matmuls of activations and weights.

use super::bias;
use super::launch::{Launches, launches};
use crate::CudaError;
use crate::call::{Call, suffix};
use crate::kernels::{Block, args};
use crate::matmul::{Beside, Epilogue, Gemm, MatmulShape, WORKSPACE};
use lockstep_exec::bound::Bound;
use lockstep_ir::op::Norm;
use lockstep_ir::{DType, FEW_ROWS, Op, Workspace};

/// The launches of this family.
pub fn launches() -> Launches {
    launches! { call:
        Linear => forward(call),
        LinearGradInput => grad_input(call),
        ByteLinear => forward(call),
        ByteLinearGradInput => grad_input(call),
        LinearGradWeight => grad_weight(call),
        AddBias => bias::add_bias(call),
        BiasGrad => bias::bias_grad(call),
    }
}

/// The matmuls that an instruction may ask for, so that they can be planned before anything runs.
pub fn shapes(bound: &Bound) -> Vec<MatmulShape> {
    matmuls(bound).into_iter().map(|shape| MatmulShape { tf32: bound.tf32, ..shape }).collect()
}

fn matmuls(bound: &Bound) -> Vec<MatmulShape> {
    let size = |letter| bound.size(letter);
    let (m, input) = (size("batch") * size("seq"), bound.float);
    let plain = |gemm, m, n, output| MatmulShape::new(gemm, (m, n, size("inputs")), input, output);
    let sums = |shape: MatmulShape| [shape, MatmulShape { adds: true, ..shape }];
    let gradients = |output: usize| bound.outputs[output].map_or(DType::F32, |at| at.dtype);
    match bound.op {
        Op::Linear | Op::LinearGradInput | Op::ByteLinear | Op::ByteLinearGradInput => {
            shape(bound.op, &size, input).into_iter().collect()
        }
        Op::LinearGradWeight => {
            let (rows, output) = weight_rows(input, gradients(0), m, size("seq"));
            sums(plain(Gemm::Weight, rows, size("outputs"), output)).to_vec()
        }
        Op::LinearCrossEntropy { score: false, rows, .. } => {
            let fixed = gradients(2) == DType::Fixed64 && bound.outputs[2].is_some();
            let mut shapes = Vec::new();
            for count in super::head::chunk_sizes(m, size("seq"), rows, fixed) {
                let (_, output) = weight_rows(input, gradients(2), count, count);
                for (first, columns) in super::head::column_parts(size("vocab")) {
                    let of = |gemm, output| MatmulShape {
                        y_stride: padded(size("vocab")),
                        ..plain(gemm, count, columns, output)
                    };
                    shapes
                        .extend([of(Gemm::Forward, input), MatmulShape { adds: first > 0, ..of(Gemm::Input, input) }]);
                    shapes.extend(sums(of(Gemm::Weight, output)));
                }
            }
            shapes
        }
        Op::LinearCrossEntropy { score: true, rows } => {
            let sizes = super::head::chunk_sizes(m, size("seq"), rows, false);
            let parts = super::head::column_parts(size("vocab"));
            let of = |count, columns| MatmulShape {
                y_stride: padded(size("vocab")),
                ..plain(Gemm::Forward, count, columns, input)
            };
            sizes.iter().flat_map(|count| parts.iter().map(|(_, columns)| of(*count, *columns))).collect()
        }
        Op::VocabLogits { rows, .. } => vec![plain(Gemm::Forward, rows.count, size("vocab"), DType::F32)],
        Op::VocabGrad { rows, .. } => {
            let (_, output) = weight_rows(input, gradients(1), rows.count, rows.count);
            let weight = sums(plain(Gemm::Weight, rows.count, size("vocab"), output));
            [&[plain(Gemm::Input, rows.count, size("vocab"), input)][..], &weight].concat()
        }
        Op::Fp8Linear { .. } | Op::Fp8GradWeight | Op::FineLinear { .. } | Op::FineGradWeight { .. } => {
            super::quantise::shapes(bound)
        }
        Op::Orthogonalise => super::orthogonal::shapes(bound),
        _ => Vec::new(),
    }
}

/// The matmul of an op that is one, of these sizes and this type.
pub fn shape(op: Op, size: &dyn Fn(&'static str) -> usize, input: DType) -> Option<MatmulShape> {
    let gemm = match op {
        Op::Linear | Op::ByteLinear => Gemm::Forward,
        Op::LinearGradInput | Op::ByteLinearGradInput => Gemm::Input,
        _ => return None,
    };
    let (m, n, k) = (size("batch") * size("seq"), size("outputs"), size("inputs"));
    Some(MatmulShape::new(gemm, (m, n, k), input, input))
}

/// Elements from one row of logits to the next: whole packs, which the matrix units and 16-byte accesses want.
pub fn padded(vocab: usize) -> usize {
    vocab.next_multiple_of(8)
}

/// Whether a matmul into a sum of this type is made in f32 first: cuBLASLt neither adds in fixed point nor rounds matmuls of f32 or f16 to
/// bf16.
pub fn apart(compute: DType, gradients: DType) -> bool {
    gradients == DType::Fixed64 || (compute != DType::BF16 && gradients == DType::BF16)
}

/// Rows of one matmul into a weight gradient, and its type: sums in fixed point take a sequence at a time.
fn weight_rows(compute: DType, gradients: DType, rows: usize, seq: usize) -> (usize, DType) {
    let rows = if gradients == DType::Fixed64 { seq } else { rows };
    (rows, if apart(compute, gradients) { DType::F32 } else { gradients })
}

/// Whether the kernels for few rows take a matmul: the weights are read once, whatever the rows.
fn is_skinny(call: Call) -> bool {
    let [outputs, inputs] = ["outputs", "inputs"].map(|name| call.size(name));
    // Steps over the depth are 128 bytes of weights.
    let (typed, step) = match units(call) {
        Some(_) => (call.float() == DType::BF16, 128),
        None => (call.float() != DType::F32, 64),
    };
    call.rows() <= FEW_ROWS && typed && inputs.is_multiple_of(step) && outputs.is_multiple_of(16)
}

/// The units of the rows of a matmul's weight, where it is in bytes.
fn units(call: Call) -> Option<u64> {
    matches!(call.op(), Op::ByteLinear | Op::ByteLinearGradInput).then(|| call.input(2))
}

/// The source of a kernel for few rows, and its name for the types of a matmul.
fn kernel(call: Call, name: &str) -> (&'static str, String) {
    match units(call) {
        Some(_) => ("bytes", format!("{name}_{}_{}", call.suffix(), suffix(call.bound.inputs[1].dtype))),
        None => ("skinny", format!("{name}_{}", call.suffix())),
    }
}

/// The weights of a matmul in the type of its activations: those in bytes are widened after the matmul's scratch.
unsafe fn weights(call: Call) -> Result<u64, CudaError> {
    let Some(units) = units(call) else { return Ok(call.input(1)) };
    let (rows, columns, to) = (call.size("outputs"), call.size("inputs"), call.scratch()? + WORKSPACE);
    let name = format!("widen_{}_{}", call.suffix(), suffix(call.bound.inputs[1].dtype));
    // SAFETY: the operands have these sizes, and the scratch has room for all elements.
    unsafe { call.plain(("bytes", &name), [rows, 1, 1], 256, args![call.input(1), units, to, columns])? };
    Ok(to)
}

/// Scratch of matmuls of weights in bytes: the matmul's, and the weights in the type of activations.
pub fn byte_scratch(compute: DType) -> Workspace {
    Workspace { fixed: WORKSPACE, terms: vec![(compute.bytes() as u64, "outputs inputs")] }
}

/// With more inputs than this a matmul of few rows is deep, with more outputs than `MANY` there are more tiles of 16 than multiprocessors of a large GPU, and from `WIDE`
/// outputs on it is wide.
const DEEP: usize = 4096;
const MANY: usize = 16 * 132;
const WIDE: usize = 16384;

/// How a kernel for few rows is cut, as `skinny.cuh` has it: tiles of 16 rows of the weight for a block, its warps, steps that each reads ahead, blocks that
/// share a depth.
struct Cut {
    kind: &'static str,
    tiles: usize,
    warps: usize,
    ahead: usize,
    split: usize,
}

impl Cut {
    const fn new(kind: &'static str, tiles: usize, warps: usize, ahead: usize, split: usize) -> Cut {
        Cut { kind, tiles, warps, ahead, split }
    }

    /// Of `8 * eights` rows. GPUs whose blocks have less than 128 KiB of shared memory cut a deep matmul of one row as others.
    fn of(call: Call, eights: usize, outputs: usize, glu: bool) -> Cut {
        let deep = call.size("inputs") > DEEP;
        let roomy = (90..120).contains(&call.kernels.capability());
        // A step of weights in bytes has twice the depth.
        let ahead = if units(call).is_some() { 1 } else { 2 };
        match eights {
            1 if glu => Cut::new("glu", 2, 8, 2, 1),
            1 if outputs >= WIDE => Cut::new("wide", 2, 8, 2, 1),
            1 if deep && outputs <= MANY && roomy => Cut::new("deep", 1, 32, 2, 1),
            1 => Cut::new("narrow", 1, 16, ahead, 1),
            _ if glu => Cut::new("glu", 4, 4, 3, 1),
            _ if outputs >= WIDE => Cut::new("wide", 4, 4, 2, 1),
            _ if deep => Cut::new("deep", 2, 4, 4, 4),
            _ => Cut::new("narrow", 2, 8, 3, 2),
        }
    }

    /// The same where the matmul makes the norm of its input.
    fn of_norm(outputs: usize, glu: bool) -> Cut {
        match outputs {
            _ if glu => Cut::new("glu", 2, 8, 2, 1),
            WIDE.. => Cut::new("wide", 2, 8, 2, 1),
            // Twice as many tiles as multiprocessors: blocks that are small all run at once.
            _ if outputs > 2 * MANY => Cut::new("middle", 1, 8, 2, 1),
            _ => Cut::new("narrow", 1, 16, 2, 1),
        }
    }

    fn grid(&self, outputs: usize, glu: bool) -> [usize; 3] {
        [outputs.div_ceil(self.tiles * if glu { 8 } else { 16 }) * self.split, 1, 1]
    }

    /// With shared memory for the weights that are read ahead, and `more` bytes. Sums of all warps, which take that memory over, need less.
    fn block(&self, more: usize) -> Block {
        Block { threads: 32 * self.warps, shared: self.warps * self.ahead * self.tiles * 2048 + more }
    }
}

/// y = x · wᵀ, with a bias where one is given, or its SwiGLU, by a kernel for few rows.
unsafe fn skinny(call: Call, bias: Option<u64>, y: u64, glu: bool) -> Result<(), CudaError> {
    let [outputs, inputs] = ["outputs", "inputs"].map(|name| call.size(name));
    let outputs = if glu { outputs / 2 } else { outputs };
    let eights = call.rows().div_ceil(8).next_power_of_two();
    let cut = Cut::of(call, eights, outputs, glu);
    let args = args![call.input(0), call.input(1), units(call), bias, y, call.rows(), outputs, inputs];
    let (source, name) = kernel(call, &format!("skinny_{eights}_{}", cut.kind));
    // SAFETY: the operands have these sizes.
    unsafe { call.on().launch_with((source, &name), cut.grid(outputs, glu), cut.block(0), None, args) }
}

/// y = SwiGLU of x · wᵀ, by a kernel for few rows; false where there is none for this matmul.
pub unsafe fn forward_with_swiglu(gemm: Call, swiglu: Call) -> Result<bool, CudaError> {
    let Some(y) = swiglu.output(0) else { return Ok(true) };
    if !is_skinny(gemm) {
        return Ok(false);
    }
    // SAFETY: the operands have these sizes.
    unsafe { skinny(gemm, None, y, true)? };
    Ok(true)
}

/// y = x · wᵀ, or the SwiGLU of it, where x is the norm of what stands in memory; false where there is no kernel for this matmul.
pub unsafe fn forward_of_norm(norm: Call, gemm: Call, swiglu: Option<Call>) -> Result<bool, CudaError> {
    let Op::Norm { norm: kind, residual, eps } = norm.op() else { return Ok(false) };
    let Some(y) = swiglu.unwrap_or(gemm).output(0) else { return Ok(true) };
    let (inputs, glu) = (gemm.size("inputs"), swiglu.is_some());
    let outputs = gemm.size("outputs") / if glu { 2 } else { 1 };
    if !is_skinny(gemm) || !outputs.is_multiple_of(16) || inputs > MOST_NORMED {
        return Ok(false);
    }
    let (delta, weight) = if residual { (Some(norm.input(1)), norm.input(2)) } else { (None, norm.input(1)) };
    let sum = if residual { norm.output(0) } else { None };
    let one = if kind == Norm::RmsPlusOne { 1.0f32 } else { 0.0 };
    let cut = Cut::of_norm(outputs, glu);
    let (w, rows) = (gemm.input(1), gemm.rows());
    let args = args![norm.input(0), delta, weight, sum, w, units(gemm), y, rows, outputs, inputs, eps, one];
    let (source, name) = kernel(gemm, &format!("skinny_norm_{}", cut.kind));
    let block = cut.block(rows * inputs * gemm.float().bytes());
    // SAFETY: the operands have these sizes.
    unsafe { gemm.on().launch_with((source, &name), cut.grid(outputs, glu), block, None, args)? };
    Ok(true)
}

/// Elements of a row whose norm the matmul after it makes: as many as its threads keep.
const MOST_NORMED: usize = 4096;

/// y = x · wᵀ.
pub unsafe fn forward(call: Call) -> Result<(), CudaError> {
    let Some(y) = call.output(0) else { return Ok(()) };
    if is_skinny(call) {
        // SAFETY: the caller vouches.
        return unsafe { skinny(call, None, y, false) };
    }
    let shape = shapes(call.bound)[0];
    // SAFETY: the operands have these sizes.
    unsafe { call.multiply(&shape, (call.input(0), weights(call)?), y, call.scratch()?) }
}

/// The matmul of an instruction that has one, with an epilogue.
pub fn with_epilogue(bound: &Bound, epilogue: Epilogue) -> Option<MatmulShape> {
    shapes(bound).first().map(|shape| MatmulShape { epilogue, ..*shape })
}

/// A matmul whose result goes to `to` by way of an epilogue.
unsafe fn multiply_with(call: Call, epilogue: Epilogue, beside: Beside, to: u64) -> Result<(), CudaError> {
    let none = || CudaError::Internal(format!("{} is no matmul", call.bound.op.name()));
    let shape = with_epilogue(call.bound, epilogue).ok_or_else(none)?;
    // SAFETY: the operands have these sizes.
    let factors = (call.input(0), unsafe { weights(call)? });
    // SAFETY: as above.
    unsafe { call.matmul.multiply_with(call.stream, &shape, factors, beside, to, call.scratch()?) }
}

/// y = x · wᵀ + bias.
pub unsafe fn forward_with_bias(gemm: Call, bias: Call) -> Result<(), CudaError> {
    let Some(y) = bias.output(0) else { return Ok(()) };
    if is_skinny(gemm) {
        // SAFETY: the caller vouches.
        return unsafe { skinny(gemm, Some(bias.input(1)), y, false) };
    }
    // SAFETY: the operands have these sizes.
    unsafe { multiply_with(gemm, Epilogue::Bias, Beside { bias: bias.input(1), matrix: 0 }, y) }
}

/// y = GELU of x · wᵀ + bias, which is saved.
pub unsafe fn forward_with_gelu(gemm: Call, bias: Call, gelu: Call) -> Result<(), CudaError> {
    let (Some(kept), Some(y)) = (bias.output(0), gelu.output(0)) else { return Ok(()) };
    // SAFETY: the operands have these sizes.
    unsafe { multiply_with(gemm, Epilogue::BiasGelu, Beside { bias: bias.input(1), matrix: kept }, y) }
}

/// dx = dy · w times the derivative of the GELU before.
pub unsafe fn grad_input_of_gelu(gemm: Call, gelu: Call) -> Result<(), CudaError> {
    let Some(dx) = gelu.output(0) else { return Ok(()) };
    // SAFETY: the operands have these sizes.
    unsafe { multiply_with(gemm, Epilogue::GeluDerivative, Beside { bias: 0, matrix: gelu.input(1) }, dx) }
}

/// dx = dy · w.
pub unsafe fn grad_input(call: Call) -> Result<(), CudaError> {
    let Some(dx) = call.output(0) else { return Ok(()) };
    let shape = shapes(call.bound)[0];
    // SAFETY: the operands have these sizes.
    unsafe { call.multiply(&shape, (call.input(0), weights(call)?), dx, call.scratch()?) }
}

/// dw (+)= dyᵀ · x.
pub unsafe fn grad_weight(call: Call) -> Result<(), CudaError> {
    let (n, k, seq) = (call.size("outputs"), call.size("inputs"), call.size("seq"));
    let scratch = call.scratch()?;
    let sizes = (call.rows(), seq, n, k);
    let factors = (call.input(0), call.input(1));
    // SAFETY: the operands have these sizes.
    unsafe { weight_product(call, sizes, n, factors, (0, 0, call.adds(0)), scratch, scratch + WORKSPACE) }
}

/// Rows of output `output` from `first` on (+)= dyᵀ · x over `rows` rows, in sequences of `seq`. Sums in fixed point add up each sequence's share, which
/// is made at `share`.
///
/// # Safety
/// The operands have these sizes.
pub unsafe fn weight_product(
    call: Call,
    (rows, seq, n, k): (usize, usize, usize, usize),
    y_stride: usize,
    (dy, x): (u64, u64),
    (output, first, adds): (usize, usize, bool),
    scratch: u64,
    share: u64,
) -> Result<(), CudaError> {
    let (Some(dw), Some(at)) = (call.output(output), call.bound.outputs[output]) else { return Ok(()) };
    let dw = dw + (first * k * at.dtype.bytes()) as u64;
    let input = call.float();
    let plain = MatmulShape::new(Gemm::Weight, (rows, n, k), input, at.dtype);
    let shape = MatmulShape { adds, y_stride, ..plain };
    if !apart(input, at.dtype) {
        // SAFETY: the caller vouches.
        return unsafe { call.multiply(&shape, (dy, x), dw, scratch) };
    }
    let (together, output) = weight_rows(input, at.dtype, rows, seq);
    let shape = MatmulShape { m: together, output, adds: false, ..shape };
    for s in 0..rows / together {
        let row = (s * together * input.bytes()) as u64;
        // SAFETY: the caller vouches.
        unsafe {
            call.multiply(&shape, (dy + row * y_stride as u64, x + row * k as u64), share, scratch)?;
            super::gradient::add_f32(call, share, dw, at.dtype, adds || s > 0, n * k)?;
        }
    }
    Ok(())
}
