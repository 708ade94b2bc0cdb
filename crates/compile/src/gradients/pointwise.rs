//! Gradients of ops on each element.

use super::{Rules, attributes};
use lockstep_ir::{Op, OpKind};

pub(super) const RULES: Rules = &[
    (OpKind::SwiGlu, |at| at.pass(Op::SwiGluGrad, &[at.dy(0)?, at.input(0)], &[0])),
    (OpKind::GeGlu, |at| at.pass(Op::GeGluGrad, &[at.dy(0)?, at.input(0)], &[0])),
    (OpKind::ClampedSwiGlu, |at| {
        attributes!(at, Op::ClampedSwiGlu { limit });
        at.pass(Op::ClampedSwiGluGrad { limit }, &[at.dy(0)?, at.input(0)], &[0])
    }),
    (OpKind::Gelu, |at| at.pass(Op::GeluGrad, &[at.dy(0)?, at.input(0)], &[0])),
    // The same mask.
    (OpKind::Dropout, |at| at.pass(at.node.op, &[at.dy(0)?, at.input(1)], &[0])),
    (OpKind::Add, |at| {
        let dy = at.dy(0)?;
        at.add(0, dy)?;
        at.add(1, dy)
    }),
    (OpKind::Scale, |at| at.pass(at.node.op, &[at.dy(0)?], &[0])),
    (OpKind::Cast, |at| {
        let to = at.g.ty(at.node.inputs[0]).dtype;
        at.pass(Op::Cast { to }, &[at.dy(0)?], &[0])
    }),
];
