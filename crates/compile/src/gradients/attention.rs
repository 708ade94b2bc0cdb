//! Gradients of attention.

use super::{At, Rules, Stop, attributes};
use lockstep_ir::{Op, OpKind};

pub(super) const RULES: Rules =
    &[(OpKind::Attention, attention), (OpKind::AttentionScores, scores), (OpKind::AttentionMix, mix)];

fn attention(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::Attention { window });
    let reads = [at.dy(0)?, at.input(0), at.output(0), at.output(1)];
    let reads: Vec<_> = reads.into_iter().chain(at.given(1)).collect();
    at.pass(Op::AttentionGrad { window }, &reads, &[0])
}

fn scores(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::AttentionScores { window });
    let reads = [at.dy(0)?, at.output(0), at.input(0)];
    at.pass(Op::AttentionScoresGrad { window }, &reads, &[0])
}

fn mix(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::AttentionMix { window });
    let reads = [at.dy(0)?, at.input(0), at.input(1)];
    at.pass(Op::AttentionMixGrad { window }, &reads, &[0, 1])
}
