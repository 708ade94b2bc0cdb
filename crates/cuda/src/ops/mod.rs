//! What each op does on the device.

mod attention;
mod bias;
mod context;
mod dispatch;
mod embedding;
mod expert_bias;
mod experts;
mod fine;
pub mod fused;
mod gradient;
mod grouped;
mod head;
mod heads;
mod kept;
mod latent;
mod launch;
mod linear;
mod many;
mod memory;
mod naive;
mod norm;
mod optimizer;
mod orthogonal;
pub mod pointwise;
mod position;
mod quantise;
mod router;
mod section;
mod sink;

use crate::CudaError;
use crate::call::Call;
use crate::driver::ALIGNMENT;
use crate::matmul::WORKSPACE;
use launch::Launch;
use lockstep_ir::{DType, DeviceProfile, FP8_WEIGHTS, Fusion, OpKind, Workspace};
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// What the compiler must know of this executor, for these types of parameters and of gradient sums, and for the same bits every
/// time or not.
pub fn profile(name: &str, compute: DType, gradients: DType, deterministic: bool) -> DeviceProfile {
    let fixed = |bytes| Workspace { fixed: bytes, terms: Vec::new() };
    let of = |fixed, terms: &[(u64, &'static str)]| Workspace { fixed, terms: terms.to_vec() };
    let share = |letters| if linear::apart(compute, gradients) { vec![(4, letters)] } else { Vec::new() };
    let shares = |count: usize, letter| of(0, &[(4 * count as u64, letter)]);
    let logits = (compute.bytes() as u64, "rows vocab");
    // Rows of logits end in padding.
    let score = [logits, (8 * compute.bytes() as u64, "rows"), (4, "batch seq")];
    let head = [&score[..], &share("vocab inputs")].concat();
    let vocab_grad = of(WORKSPACE + ALIGNMENT, &[&[logits][..], &share("vocab inputs")].concat());
    let workspaces = BTreeMap::from([
        ("linear", fixed(WORKSPACE)),
        ("linear_grad_input", fixed(WORKSPACE)),
        ("byte_linear", linear::byte_scratch(compute)),
        ("byte_linear_grad_input", linear::byte_scratch(compute)),
        ("linear_grad_weight", Workspace { fixed: WORKSPACE, terms: share("outputs inputs") }),
        ("amax", fixed(quantise::AMAX_SCRATCH)),
        ("weight_amax", fixed(quantise::AMAX_SCRATCH)),
        ("quantise_rowwise", fine::scratch(["batch seq", "features"])),
        ("quantise_rowwise_weight", fine::scratch(["outputs", "inputs"])),
        ("rowwise_linear", fixed(WORKSPACE)),
        ("blockwise_linear", fixed(WORKSPACE)),
        ("rowwise_grad_weight", Workspace { fixed: WORKSPACE, terms: quantise::share(gradients) }),
        ("blockwise_grad_weight", Workspace { fixed: WORKSPACE, terms: quantise::share(gradients) }),
        ("fp8_linear", fixed(WORKSPACE)),
        ("fp8_grad_weight", Workspace { fixed: WORKSPACE, terms: quantise::share(gradients) }),
        ("linear_cross_entropy", Workspace { fixed: WORKSPACE + 3 * ALIGNMENT, terms: head }),
        ("linear_score", of(WORKSPACE + 3 * ALIGNMENT, &score)),
        ("rms_norm_grad_weight", shares(norm::SHARES, "features")),
        ("layer_norm_grad_weight", shares(norm::SHARES, "features")),
        ("qk_norm_grad_weight", shares(norm::SHARES, "weights")),
        ("bias_grad", shares(bias::SHARES, "features")),
        ("attention_scores_grad", of(0, &[(4, "batch heads seq")])),
        ("embedding_grad", of(4 * ALIGNMENT, &[(8, "batch seq"), (8, "vocab")])),
        ("cross_entropy", of(0, &[(4, "batch seq")])),
        ("square_sum", fixed(ALIGNMENT)),
        ("orthogonalise", orthogonal::scratch()),
        ("attention", crate::attention::scratch(compute)),
        ("cached_attention", crate::attention::cached_scratch(compute)),
        ("cached_latent_attention", crate::attention::latent::scratch(compute)),
        ("attention_grad", crate::attention::grad_scratch(compute, deterministic)),
        ("ring_attention", crate::attention::context::scratch(compute)),
        ("ring_attention_grad", crate::attention::context::grad_scratch(compute, deterministic)),
        ("gathered_attention", crate::attention::context::scratch(compute)),
        ("gathered_attention_grad", crate::attention::context::grad_scratch(compute, deterministic)),
        ("vocab_logits", fixed(WORKSPACE)),
        ("vocab_loss", of(0, &[(4, "batch seq")])),
        ("vocab_grad", vocab_grad),
        ("router_loss", of(0, &[(4, "batch seq")])),
        ("choices_amax", fixed(quantise::AMAX_SCRATCH)),
        ("blocks_amax", fixed(quantise::AMAX_SCRATCH)),
        ("stack_amax", fixed(quantise::AMAX_SCRATCH)),
        ("fp8_grouped", experts::scratch()),
        ("fp8_grouped_each", experts::scratch()),
        ("fp8_rows", experts::scratch()),
        ("fp8_grouped_grad_weight", experts::fp8_weight_scratch()),
        ("fp8_grouped_grad_weight_each", experts::fp8_weight_scratch()),
        ("fp8_rows_grad_weight", experts::fp8_weight_scratch()),
        ("grouped_linear", experts::scratch()),
        ("grouped_linear_each", experts::scratch()),
        ("grouped_grad_input", experts::scratch()),
        ("grouped_grad_weight", experts::weight_scratch(compute)),
        ("grouped_grad_weight_each", experts::weight_scratch(compute)),
        ("rows_linear", experts::scratch()),
        ("rows_grad_input", experts::scratch()),
        ("rows_grad_weight", experts::weight_scratch(compute)),
        ("grouped_bias_grad", experts::scratch()),
        ("rows_bias_grad", experts::scratch()),
    ]);
    let workspaces_with_optional = BTreeMap::from([
        ("attention", crate::attention::documents::scratch(compute)),
        ("attention_grad", crate::attention::documents::grad_scratch(compute)),
        // Kernels of our own.
        ("ring_attention", Workspace::default()),
        ("ring_attention_grad", of(0, &[(4, "batch heads seq")])),
        ("gathered_attention", Workspace::default()),
        ("gathered_attention_grad", of(0, &[(4, "batch heads seq")])),
    ]);
    DeviceProfile {
        name: name.to_owned(),
        alignment: ALIGNMENT,
        cross_entropy_logits: 1 << 29,
        cross_entropy_rows: 8192,
        workspaces,
        workspaces_with_optional,
        fusions: Fusion::ALL.to_vec(),
        faster: Vec::new(),
        fp8_weights: FP8_WEIGHTS,
    }
}

/// The launches of all families.
static LAUNCHES: LazyLock<BTreeMap<OpKind, Launch>> = LazyLock::new(|| {
    let families = [
        attention::launches(),
        context::launches(),
        dispatch::launches(),
        embedding::launches(),
        expert_bias::launches(),
        experts::launches(),
        fine::launches(),
        gradient::launches(),
        head::launches(),
        heads::launches(),
        latent::launches(),
        linear::launches(),
        memory::launches(),
        norm::launches(),
        optimizer::launches(),
        pointwise::launches(),
        position::launches(),
        quantise::launches(),
        section::launches(),
        sink::launches(),
    ];
    families.into_iter().flatten().collect()
});

/// Queues an instruction.
///
/// # Safety
/// The arena is that of the program which the call is of.
pub unsafe fn issue(call: Call) -> Result<(), CudaError> {
    let none = || CudaError::Internal(format!("{} is no kernel", call.bound.op.name()));
    // SAFETY: the caller vouches.
    unsafe { LAUNCHES.get(&call.op().kind()).ok_or_else(none)?(call) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_op_that_a_kernel_runs_has_a_launch() {
        let with_kernel = OpKind::ALL.iter().filter(|kind| kind.rows()[0].has_kernel());
        assert_eq!(LAUNCHES.keys().copied().collect::<Vec<_>>(), with_kernel.copied().collect::<Vec<_>>());
    }
}
