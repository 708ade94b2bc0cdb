//! Ops on each element: activation functions, additions, dropout.

use super::row::{ANY_OPERAND, ShapeRule, Spec, float, row, u32};
use super::sample::{Draw, Shapes, embed, ffn, gate_up, sample};
use super::{Op, Saved::Input, attributes};
use crate::{Axis, DType, Dim, TensorType};

/// Gate and up have equally many units.
const GATED: ShapeRule = |op, _, dims| match dims.get('g').map(|g| g.sections.as_slice()) {
    Some(&[gate, up]) if gate == up => op.ask(dims, 'f', Dim::packed([gate])),
    _ => Err(op.refuse("the packed dimension must be two equal sections".into())),
};

pub(super) static SWIGLU: Spec = row("swiglu", &[float("gate_up", "bsg")], &[float("y", "bsf")], |batch| {
    vec![sample(Op::SwiGlu, [Shapes::new(batch).normal(gate_up())])]
})
.gradient(&[Input(0)])
.splits(&["b", "s", "gf"])
.cheap(&[0])
.shape(GATED);

pub(super) static SWIGLU_GRAD: Spec =
    row("swiglu_grad", &[float("dy", "bsf"), float("gate_up", "bsg")], &[float("dgate_up", "bsg")], |batch| {
        let s = Shapes::new(batch);
        vec![sample(Op::SwiGluGrad, [s.normal(ffn()), s.normal(gate_up())])]
    })
    .in_place(&[(1, 0)])
    .splits(&["b", "s", "gf"])
    .shape(GATED);

pub(super) static GELU: Spec = row("gelu", &[float("x", "bsf")], &[float("y", "bsf")], |batch| {
    vec![sample(Op::Gelu, [Shapes::new(batch).normal(ffn())])]
})
.in_place(&[(0, 0)])
.gradient(&[Input(0)])
.splits(&["b", "s", "f"])
.cheap(&[0]);

pub(super) static GELU_GRAD: Spec =
    row("gelu_grad", &[float("dy", "bsf"), float("x", "bsf")], &[float("dx", "bsf")], |batch| {
        let x = Shapes::new(batch).normal(ffn());
        vec![sample(Op::GeluGrad, [x.clone(), x])]
    })
    .in_place(ANY_OPERAND)
    .splits(&["b", "s", "f"]);

pub(super) static DROPOUT: Spec =
    row("dropout", &[float("x", "bsd"), u32("keys", "bz")], &[float("y", "bsd")], |batch| {
        let s = Shapes::new(batch);
        let keys = TensorType::new(DType::U32, [s.b(), Dim::new(Axis::Scalar, 2)]);
        let op = Op::Dropout { rate: 0.3, site: 0x1234_5678_9abc_def0, seq: s.seq };
        vec![sample(op, [s.normal(embed()), (keys, Draw::Below(u32::MAX))])]
    })
    .in_place(&[(0, 0)])
    .gradient(&[Input(1)])
    .splits(&["b", "s"])
    .shape(|op, _, dims| {
        attributes!(op, Op::Dropout { seq, .. });
        let (part, words) = (dims.size('s'), dims.size('z'));
        match seq.is_multiple_of(part) && words == 2 {
            true => Ok(()),
            false => Err(op.refuse(format!("{part} of {seq} positions with keys of {words} words"))),
        }
    });

pub(super) static ADD: Spec = row("add", &[float("a", "bsd"), float("b", "bsd")], &[float("sum", "bsd")], |batch| {
    let x = Shapes::new(batch).normal(embed());
    vec![sample(Op::Add, [x.clone(), x])]
})
.in_place(ANY_OPERAND)
.gradient(&[])
.splits(&["b", "s", "d"]);
