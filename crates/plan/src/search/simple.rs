//! Which of layouts that are as fast there is least to know of.

use super::bound::parts;
use super::{LayoutChoice, RankedLayout};
use lockstep_config::{GradientPrecision, RecomputePolicy};
use lockstep_ir::ContextParallel;

/// Of layouts whose step times differ by less than this share, the simplest is preferred.
pub const SIMPLER: f64 = 0.005;

/// The simplest of the layouts that are as fast as the first, within [`SIMPLER`].
pub(super) fn simplest(best: &[RankedLayout]) -> usize {
    let fastest = best[0].evaluated.forecast.step_s;
    let near = best.iter().enumerate().filter(|(_, l)| l.evaluated.forecast.step_s <= fastest * (1.0 + SIMPLER));
    near.min_by_key(|(i, l)| (complexity(&l.choice), *i)).map_or(0, |(i, _)| i)
}

/// How much there is to know of a layout.
fn complexity(choice: &LayoutChoice) -> usize {
    let (split, pipe, data) = parts(choice);
    let pipeline = match pipe.pp {
        1 => 0,
        _ => 4 + 2 * usize::from(pipe.schedule != lockstep_ir::Schedule::USUAL) + pipe.chunks,
    };
    let context = if split.cp > 1 { 4 + usize::from(split.context != ContextParallel::default()) } else { 0 };
    let tensor = if split.tp > 1 { 3 + usize::from(split.sequence_parallel) } else { 0 };
    let experts = 3 * usize::from(split.ep > 1);
    let replicas = 2 * usize::from(data.replicate > 1);
    let sharding = usize::from(data.zero) + usize::from(!data.reshard);
    let recompute = match choice.recompute {
        RecomputePolicy::None => 0,
        RecomputePolicy::Selective | RecomputePolicy::Full => 1,
        RecomputePolicy::EveryK | RecomputePolicy::Sqrt | RecomputePolicy::List | RecomputePolicy::Budget => 2,
    };
    let gradients = match choice.gradients {
        GradientPrecision::Fp32 => 0,
        GradientPrecision::Bf16 => 3,
    };
    let offload = 2 * usize::from(choice.offload > 0);
    pipeline + context + tensor + experts + replicas + sharding + recompute + gradients + offload
}
