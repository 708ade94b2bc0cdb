//! What each op does on the device.

mod dispatch;
mod elements;
mod embedding;
mod experts;
pub mod fused;
mod grouped;
mod head;
mod linear;
mod naive;
mod norm;
mod optimizer;
mod orthogonal;
mod pointwise;
mod router;
mod sections;

use crate::call::Call;
use crate::driver::ALIGNMENT;
use crate::matmul::WORKSPACE;
use crate::{CudaError, attention};
use lockstep_ir::{DType, DeviceProfile, Fusion, Op, Workspace};
use std::collections::BTreeMap;

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
        ("linear_grad_weight", Workspace { fixed: WORKSPACE, terms: share("outputs inputs") }),
        ("linear_cross_entropy", Workspace { fixed: WORKSPACE + 3 * ALIGNMENT, terms: head }),
        ("linear_score", of(WORKSPACE + 3 * ALIGNMENT, &score)),
        ("rms_norm_grad_weight", shares(norm::SHARES, "features")),
        ("layer_norm_grad_weight", shares(norm::SHARES, "features")),
        ("qk_norm_grad_weight", shares(norm::SHARES, "weights")),
        ("bias_grad", shares(elements::SHARES, "features")),
        ("attention_scores_grad", of(0, &[(4, "batch heads seq")])),
        ("embedding_grad", of(4 * ALIGNMENT, &[(8, "batch seq"), (8, "vocab")])),
        ("cross_entropy", of(0, &[(4, "batch seq")])),
        ("square_sum", fixed(ALIGNMENT)),
        ("orthogonalise", orthogonal::scratch()),
        ("attention", attention::scratch(compute)),
        ("attention_grad", attention::grad_scratch(compute, deterministic)),
        ("ring_attention", attention::context::scratch(compute)),
        ("ring_attention_grad", attention::context::grad_scratch(compute, deterministic)),
        ("gathered_attention", attention::context::scratch(compute)),
        ("gathered_attention_grad", attention::context::grad_scratch(compute, deterministic)),
        ("vocab_logits", fixed(WORKSPACE)),
        ("vocab_loss", of(0, &[(4, "batch seq")])),
        ("vocab_grad", vocab_grad),
        ("router_loss", of(0, &[(4, "batch seq")])),
        ("grouped_linear", experts::scratch()),
        ("grouped_linear_each", experts::scratch()),
        ("grouped_grad_input", experts::scratch()),
        ("grouped_grad_weight", experts::weight_scratch(compute)),
        ("grouped_grad_weight_each", experts::weight_scratch(compute)),
        ("rows_linear", experts::scratch()),
        ("rows_grad_input", experts::scratch()),
        ("rows_grad_weight", experts::weight_scratch(compute)),
    ]);
    let workspaces_with_optional = BTreeMap::from([
        ("attention", attention::documents::scratch(compute)),
        ("attention_grad", attention::documents::grad_scratch(compute)),
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
    }
}

/// Ops that are an expression of every element `x`, as lines of `kernels/map.cu`.
macro_rules! maps {
    () => {
        concat!("MAP(cast, x)\n",)
    };
}
pub(crate) use maps;

/// Queues an instruction.
///
/// # Safety
/// The arena is that of the program which the call is of.
pub unsafe fn issue(call: Call) -> Result<(), CudaError> {
    // SAFETY: the verifier has checked that operands lie in the arena and overlap only in place.
    unsafe {
        match call.bound.op {
            Op::Embedding => embedding::forward(call),
            Op::EmbeddingGrad { .. } => embedding::grad(call),
            Op::Linear => linear::forward(call),
            Op::LinearGradInput => linear::grad_input(call),
            Op::LinearGradWeight => linear::grad_weight(call),
            Op::AddBias => elements::add_bias(call),
            Op::BiasGrad => elements::bias_grad(call),
            Op::Norm { norm, residual, eps } => norm::forward(call, norm, eps, residual),
            Op::NormGrad { norm, residual } => norm::grad(call, norm, residual),
            Op::NormGradWeight { norm } => norm::grad_weight(call, norm),
            Op::QkNorm { eps } => norm::heads_forward(call, eps),
            Op::QkNormGrad => norm::heads_grad(call),
            Op::QkNormGradWeight => norm::heads_grad_weight(call),
            Op::AddPositions { seq } => elements::add_positions(call, Some(seq)),
            Op::AddPositionsAt => elements::add_positions(call, None),
            Op::PositionsGrad { seq, .. } => elements::positions_grad(call, seq),
            Op::Dropout { rate, site, .. } => elements::dropout(call, rate, site),
            Op::Gelu => elements::gelu(call),
            Op::GeluGrad => elements::gelu_grad(call),
            Op::AttentionScores { window } => naive::scores(call, window),
            Op::AttentionScoresGrad { .. } => naive::scores_grad(call),
            Op::AttentionMix { .. } => naive::mix(call),
            Op::AttentionMixGrad { .. } => naive::mix_grad(call),
            Op::Rope { inverse } => pointwise::rope(call, inverse),
            Op::RopeAt => pointwise::rope_at(call),
            Op::Attention { window } => attention::forward(call, window),
            Op::AttentionGrad { window } => attention::grad(call, window),
            Op::PartAttention { ring, .. } => attention::context::forward(call, ring.is_some()),
            Op::PartAttentionGrad { ring, .. } => attention::context::grad(call, ring.is_some()),
            Op::AttentionMerge => attention::context::merge_two(call),
            Op::SplitHeads { ranks, .. } => sections::heads(call, ranks, false),
            Op::JoinHeads { ranks } => sections::heads(call, ranks, true),
            Op::CachedAttention { window } => attention::cached(call, window),
            Op::LastPosition => pointwise::last_position(call),
            Op::SwiGlu => pointwise::swiglu(call),
            Op::SwiGluGrad => pointwise::swiglu_grad(call),
            Op::Add => pointwise::add(call),
            Op::Cast { .. } => pointwise::map(call, "cast"),
            Op::Slice { first, .. } => sections::slice(call, first),
            Op::Concat => sections::concat(call),
            Op::CrossEntropy => head::cross_entropy(call),
            Op::CrossEntropyGrad { weight } => head::cross_entropy_grad(call, weight),
            Op::LinearCrossEntropy { score: false, rows } => head::linear_cross_entropy(call, rows),
            Op::LinearCrossEntropy { score: true, rows } => head::linear_score(call, rows),
            Op::AddState => optimizer::add_state(call),
            Op::Accumulate => optimizer::accumulate(call),
            Op::SquareSum { sharers, tail } => optimizer::square_sum(call, sharers, tail),
            Op::MergeSums => optimizer::merge_sums(call),
            Op::LossSum => optimizer::loss_sum(call),
            Op::GradientNorm => optimizer::gradient_norm(call),
            Op::AdamW { .. } => optimizer::adamw(call),
            Op::Lion { beta1, beta2, decay, lr_scale } => {
                optimizer::by_moment(call, "lion", [beta1, beta2, decay, lr_scale])
            }
            Op::Sgd { momentum, decay, lr_scale } => {
                optimizer::by_moment(call, "sgd", [momentum, 0.0, decay, lr_scale])
            }
            Op::Momentum { momentum } => optimizer::momentum(call, momentum),
            Op::Orthogonalise => orthogonal::orthogonalise(call),
            Op::Descend { decay, lr_scale } => optimizer::descend(call, decay, lr_scale),
            Op::VocabLogits { rows, .. } => head::vocab_logits(call, rows),
            Op::VocabLoss => head::vocab_loss(call),
            Op::VocabMisses { rows } => head::vocab_misses(call, rows),
            Op::VocabGrad { rows } => head::vocab_grad(call, rows),
            Op::JoinRows => head::join_rows(call),
            Op::Part { .. } => sections::part(call),
            Op::Route { given: false, ref how } => router::route(call, how),
            Op::Route { given: true, ref how } => router::route_to(call, how),
            Op::RouteGrad { ref how } => router::route_grad(call, how),
            Op::ExpertCounts { .. } => router::counts(call),
            Op::RouterLoss { balance, z } => router::router_loss(call, balance, z),
            Op::RouterLossGrad { balance, z } => router::router_loss_grad(call, balance, z),
            Op::GroupedLinear { each } => experts::linear(call, call.bound.sharers(each)),
            Op::GroupedGradInput => experts::grad_input(call),
            Op::GroupedGradWeight { each, .. } => experts::grad_weight(call, call.bound.sharers(each)),
            Op::ExpertSlots { blocks, .. } => dispatch::slots(call, blocks),
            Op::SendRows { each, .. } => dispatch::send_rows(call, call.bound.sharers(each)),
            Op::TakeRows { .. } => dispatch::take_rows(call),
            Op::RowsLinear { .. } => experts::linear(call, 1),
            Op::RowsGradInput { .. } => experts::grad_input(call),
            Op::RowsGradWeight { .. } => experts::grad_weight(call, 1),
            Op::Combine { weighted } => experts::combine(call, weighted),
            Op::CombineGrad => experts::combine_grad(call),
            Op::ExpertLoad { .. } => router::load(call),
            Op::StackLoads => router::stack_loads(call),
            Op::MoveBias { row, rate } => router::move_bias(call, row, rate),
            Op::AllReduce { .. }
            | Op::SumShared { .. }
            | Op::ReduceScatter { .. }
            | Op::AllGather { .. }
            | Op::Shift { .. }
            | Op::AllToAll { .. }
            | Op::Shard { .. }
            | Op::Send { .. }
            | Op::Receive { .. } => Err(CudaError::Internal(format!("{} is no kernel", call.bound.op.name()))),
        }
    }
}
