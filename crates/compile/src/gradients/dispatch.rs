//! Gradients of rows in blocks: each of sending and taking rows is the other's.

use super::{At, Rules, Stop, attributes};
use lockstep_ir::{Op, OpKind};

pub(super) const RULES: Rules = &[
    // Where rows go does not change with them.
    (OpKind::ExpertSlots, |_| Ok(())),
    (OpKind::SendRows, send_rows),
    (OpKind::TakeRows, take_rows),
    (OpKind::RowsLinear, rows_linear),
];

fn send_rows(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::SendRows { blocks, .. });
    let reads = [at.dy(0)?, at.input(1)];
    let each = at.each(Op::TakeRows { blocks }, &reads)?;
    at.pass(Op::Combine { weighted: false }, &[each], &[0])
}

fn take_rows(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::TakeRows { blocks });
    let reads = [at.dy(0)?, at.input(1)];
    at.pass(Op::SendRows { each: true, blocks }, &reads, &[0])
}

fn rows_linear(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::RowsLinear { blocks });
    let (dy, experts) = (at.dy(0)?, at.first_dim(1));
    let dx = at.make(Op::RowsGradInput { blocks }, &[dy, at.input(1), at.input(2)], 0)?;
    at.weight(Op::RowsGradWeight { experts, blocks }, &[dy, at.input(0), at.input(2)], 1)?;
    at.add(0, dx)
}
