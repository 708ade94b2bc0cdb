//! Gradients of the heads of latent attention.

use super::{At, Rules, Stop, attributes};
use lockstep_ir::{Op, OpKind};

pub(super) const RULES: Rules = &[(OpKind::LatentHeads, latent_heads)];

fn latent_heads(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::LatentHeads { scale, .. });
    let rope = at.g.ty(at.node.inputs[2]).dims.last().map_or(0, |dim| dim.size());
    at.pass(Op::LatentHeadsGrad { rope, scale }, &[at.dy(0)?], &[0, 1, 2])
}
