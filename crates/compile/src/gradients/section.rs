//! Gradients of sections of a packed dimension.

use super::{At, Rules, Stop, attributes};
use lockstep_ir::{Op, OpKind};

pub(super) const RULES: Rules = &[(OpKind::Slice, slice), (OpKind::Concat, concat)];

/// Kept until all sections have theirs (`join_slices`).
fn slice(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::Slice { first, count });
    let (dy, value) = (at.dy(0)?, at.node.inputs[0]);
    let known = |(a, b, _): &(usize, usize, _)| (*a, *b) == (first, count);
    let slices = at.all.slices.entry(value).or_default();
    match slices.iter().position(known) {
        None => slices.push((first, count, dy)),
        Some(i) => {
            let before = slices[i].2;
            let sum = at.make(Op::Add, &[before, dy], 0)?;
            at.all.slices.entry(value).or_default()[i].2 = sum;
        }
    }
    Ok(())
}

fn concat(at: &mut At) -> Result<(), Stop> {
    let (dy, mut first) = (at.dy(0)?, 0);
    for input in 0..at.node.inputs.len() {
        let count = at.g.ty(at.node.inputs[input]).dims.last().map_or(0, |dim| dim.sections.len());
        at.pass(Op::Slice { first, count }, &[dy], &[input])?;
        first += count;
    }
    Ok(())
}
