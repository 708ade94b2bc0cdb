//! Updates of weights and moments that are kept in fewer bits than f32.

use super::many::Many;
use crate::CudaError;
use crate::call::{Call, suffix};
use crate::kernels::args;
use lockstep_ir::dynamic8::BLOCK;
use lockstep_ir::{DType, Op};

/// What kernels call a rule and its constants, and what of an op is each tensor's own: weight decay and the factor on the learning rate.
fn rule(op: Op) -> Result<(i32, [f32; 3], [f32; 2]), CudaError> {
    Ok(match op {
        Op::AdamW { beta1, beta2, eps, decay, lr_scale } => (0, [beta1, beta2, eps], [decay, lr_scale]),
        Op::Lion { beta1, beta2, decay, lr_scale } => (1, [beta1, beta2, 0.0], [decay, lr_scale]),
        Op::Sgd { momentum, decay, lr_scale } => (2, [momentum, 0.0, 0.0], [decay, lr_scale]),
        Op::Momentum { momentum } => (3, [momentum, 0.0, 0.0], [0.0, 1.0]),
        Op::Descend { decay, lr_scale } => (4, [0.0; 3], [decay, lr_scale]),
        other => return Err(CudaError::Internal(format!("{} has no kernel for state in fewer bits", other.name()))),
    })
}

/// What kernels call a type.
fn code(dtype: DType) -> u64 {
    match dtype {
        DType::F32 => 1,
        DType::BF16 => 2,
        DType::F16 => 3,
        DType::Signed8 => 4,
        DType::Unsigned8 => 5,
        other => unreachable!("nothing is kept in {other}"),
    }
}

/// Elements of a block of threads: eight warps have sixteen blocks each.
const PER_BLOCK: usize = 8 * 16 * BLOCK;

/// Updates several tensors that have the rule, the type of gradients, scalars and statistics in common.
///
/// # Safety
/// The operands are as the op table says.
pub unsafe fn update(calls: &[Call]) -> Result<(), CudaError> {
    let Some(first) = calls.first() else { return Ok(()) };
    let (op, given) = (first.bound.op, first.bound.inputs.len());
    let input = |name: &str| (0..given).find(|i| op.input(*i, given).name == name).map(|i| first.input(i));
    let [scalars, stats, key] = ["scalars", "stats", "rounding"].map(|name| input(name).unwrap_or(0));
    // What stands in for the gradient of the last rule is the update.
    let gradient = if let Op::Momentum { .. } = op { 0 } else { 1 };
    let name = format!("update_kept_{}", suffix(first.bound.inputs[gradient].dtype));
    let (by, [a, b, eps], _) = rule(op)?;
    let args = args![scalars, stats, key, by, a, b, eps];
    let mut many = Many::<12, 32>::new();
    for call in calls {
        let Some(rounding) = &call.bound.rounding else { continue };
        let output = |name: &str| {
            let at = (0..call.bound.outputs.len()).find(|o| call.bound.op.output(*o).name == name)?;
            Some((call.output(at)?, code(call.bound.outputs[at]?.dtype)))
        };
        let outputs = ["w", "m", "v", "copy"].map(output);
        let outputs =
            [outputs[0], outputs[1], outputs[2], outputs[3].or(output("update"))].map(Option::unwrap_or_default);
        let types = outputs.iter().enumerate().fold(0, |types, (i, (_, code))| types | code << (4 * i));
        let (_, _, [decay, lr_scale]) = rule(call.bound.op)?;
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        for piece in &rounding.places {
            // Rows of a rank's part follow each other, but where there is padding between them.
            let (count, rows) = if piece.part_stride == piece.len { (1, piece.rows) } else { (piece.rows, 1) };
            for row in 0..count {
                let (from, n) = (piece.part + row * piece.part_stride, piece.len * rows);
                let whole = piece.whole + row * piece.whole_stride;
                // Of what is one row in the whole, any length of rows says the same.
                let one = rows == 1 || piece.whole_stride == piece.len;
                let (len, stride) = if one { (1 << 30, 1 << 30) } else { (piece.len, piece.whole_stride) };
                let entry = [
                    call.input(gradient),
                    outputs[0].0,
                    outputs[1].0,
                    outputs[2].0,
                    outputs[3].0,
                    from as u64,
                    n as u64,
                    whole as u64,
                    pair(len as u32, stride as u32),
                    rounding.site,
                    pair(decay.to_bits(), lr_scale.to_bits()),
                    types,
                ];
                many.push(n.div_ceil(PER_BLOCK), entry);
                if many.is_full() {
                    // SAFETY: as the kernel's struct has them; pieces lie in the operands.
                    unsafe { many.launch(*first, ("kept", &name), args)? };
                }
            }
        }
    }
    // SAFETY: as above.
    unsafe { many.launch(*first, ("kept", &name), args) }
}
