//! Groups of instructions that are done as one, as the program has them.

use super::{bias, linear, norm, optimizer, pointwise};
use crate::CudaError;
use crate::attention;
use crate::call::Call;
use crate::matmul::{Epilogue, MatmulShape};
use lockstep_exec::bound::Bound;
use lockstep_ir::op::Norm;
use lockstep_ir::program::Segment;
use lockstep_ir::{FusedGroup, FusedMatmul, Fusion, Op};

/// What a matmul does besides, in a group of this kind that begins with one.
fn epilogue(fusion: Fusion) -> Option<Epilogue> {
    match fusion {
        Fusion::MatmulBias => Some(Epilogue::Bias),
        Fusion::MatmulBiasGelu => Some(Epilogue::BiasGelu),
        Fusion::MatmulGeluGradient => Some(Epilogue::GeluDerivative),
        _ => None,
    }
}

/// The matmuls that a segment needs, so that they can be planned before anything runs.
pub fn shapes(segment: &Segment, bounds: &[Bound]) -> Vec<MatmulShape> {
    let of = |i: usize| match segment.group_of(i).and_then(|g| Some((epilogue(g.fusion)?, g.instrs.start))) {
        None => linear::shapes(&bounds[i]),
        Some((epilogue, first)) if first == i => linear::with_epilogue(&bounds[i], epilogue).into_iter().collect(),
        Some(_) => Vec::new(),
    };
    (0..bounds.len()).flat_map(of).collect()
}

/// The matmul that a device may time.
pub fn shape(matmul: &FusedMatmul) -> Result<Option<MatmulShape>, CudaError> {
    let refused = |e: lockstep_ir::TypeError| CudaError::Internal(e.to_string());
    let dims = matmul.op.bind(&matmul.inputs.iter().collect::<Vec<_>>()).map_err(refused)?;
    let plain = linear::shape(matmul.op, &|name| dims.size(name), matmul.inputs[0].dtype);
    Ok(epilogue(matmul.fusion).zip(plain).map(|(epilogue, shape)| MatmulShape { epilogue, ..shape }))
}

/// The first instruction of a group whose outputs are there when it is done.
pub fn first_written(group: &FusedGroup) -> usize {
    match group.fusion {
        Fusion::MatmulSwiGlu | Fusion::NormMatmul | Fusion::NormMatmulSwiGlu | Fusion::RopeAttention => {
            group.instrs.end - 1
        }
        other => group.instrs.start + usize::from(epilogue(other).is_some()),
    }
}

/// Queues the instructions of a group.
///
/// # Safety
/// As for [`super::issue`].
pub unsafe fn issue(group: &FusedGroup, calls: &[Call]) -> Result<(), CudaError> {
    let other = || CudaError::Internal(format!("no {}: {} instructions", group.fusion.name(), calls.len()));
    // SAFETY: the caller vouches.
    unsafe {
        match (group.fusion, calls) {
            (Fusion::MatmulBias, [gemm, bias]) => linear::forward_with_bias(*gemm, *bias),
            (Fusion::MatmulBiasGelu, [gemm, bias, gelu]) => linear::forward_with_gelu(*gemm, *bias, *gelu),
            (Fusion::MatmulGeluGradient, [gemm, gelu]) => linear::grad_input_of_gelu(*gemm, *gelu),
            (Fusion::GeluBiasGradients, [gelu, bias]) => bias::gelu_bias_grad(*gelu, *bias),
            (Fusion::SwiGluAmax, [swiglu, amax]) => pointwise::swiglu_amax(*swiglu, *amax),
            (Fusion::MatmulSwiGlu, [gemm, glu]) => or_apart(linear::forward_with_swiglu(*gemm, *glu)?, calls),
            (Fusion::NormMatmul, [norm, gemm]) => or_apart(linear::forward_of_norm(*norm, *gemm, None)?, calls),
            (Fusion::NormMatmulSwiGlu, [norm, gemm, glu]) => {
                or_apart(linear::forward_of_norm(*norm, *gemm, Some(*glu))?, calls)
            }
            (Fusion::RopeAttention, [rope, cached]) => or_apart(attention::turned(*rope, *cached)?, calls),
            (Fusion::AdamW, [_, ..]) => optimizer::adamw_many(calls),
            (Fusion::NormGradients, [weight, rest @ ..]) => {
                let input = rest.iter().position(|c| norm_input(&c.bound.op).is_some()).ok_or_else(other)?;
                let (kind, add) = norm_input(&rest[input].bound.op).ok_or_else(other)?;
                let (bias, after) = (rest[..input].first().copied(), rest.get(input + 1).copied());
                norm::grad_all(*weight, bias, (rest[input], kind, add), after)
            }
            (_, _) => Err(other()),
        }
    }
}

/// Queues instructions one after the other, where no kernel has done them as one.
unsafe fn or_apart(done: bool, calls: &[Call]) -> Result<(), CudaError> {
    // SAFETY: the caller vouches.
    calls.iter().filter(|_| !done).try_for_each(|call| unsafe { super::issue(*call) })
}

/// Of the input gradient of a norm: which norm, and whether it adds.
fn norm_input(op: &Op) -> Option<(Norm, bool)> {
    if let Op::NormGrad { norm, residual } = *op { Some((norm, residual)) } else { None }
}

#[cfg(test)]
mod tests;
