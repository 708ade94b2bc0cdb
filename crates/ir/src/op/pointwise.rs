//! Ops on each element: activation functions, additions, dropout, casts.

use super::row::{ANY_OPERAND, ShapeRule, Spec, TypeVar, float, other_float, row, u32};
use super::sample::{Draw, Shapes, embed, ffn, gate_up, sample, with_parts};
use super::{Op, Saved::Input, attributes};
use crate::{Axis, DType, Dim, TensorType};

/// Gate and up have equally many units.
const GATED: ShapeRule = |op, _, dims| match dims.get("gate_up").map(|g| g.sections.as_slice()) {
    Some(&[gate, up]) if gate == up => op.ask(dims, "ffn", Dim::packed([gate])),
    _ => Err(op.refuse("the packed dimension must be two equal sections".into())),
};

pub(super) static SWIGLU: Spec = row("swiglu", &[float("gate_up", "… gate_up")], &[float("y", "… ffn")], |batch| {
    Shapes::any_leading(batch).map(|s| sample(Op::SwiGlu, [s.normal(gate_up())])).into()
})
.gradient(&[Input(0)])
.splits(&["…", "gate_up ffn"])
.cheap(&[0])
.shape(GATED);

pub(super) static SWIGLU_GRAD: Spec = row(
    "swiglu_grad",
    &[float("dy", "… ffn"), float("gate_up", "… gate_up")],
    &[float("dgate_up", "… gate_up")],
    |batch| Shapes::any_leading(batch).map(|s| sample(Op::SwiGluGrad, [s.normal(ffn()), s.normal(gate_up())])).into(),
)
.in_place(&[(1, 0)])
.splits(&["…", "gate_up ffn"])
.shape(GATED);

pub(super) static GEGLU: Spec = row("geglu", &[float("gate_up", "… gate_up")], &[float("y", "… ffn")], |batch| {
    Shapes::any_leading(batch).map(|s| sample(Op::GeGlu, [s.normal(gate_up())])).into()
})
.gradient(&[Input(0)])
.splits(&["…", "gate_up ffn"])
.cheap(&[0])
.shape(GATED);

pub(super) static GEGLU_GRAD: Spec = row(
    "geglu_grad",
    &[float("dy", "… ffn"), float("gate_up", "… gate_up")],
    &[float("dgate_up", "… gate_up")],
    |batch| Shapes::any_leading(batch).map(|s| sample(Op::GeGluGrad, [s.normal(ffn()), s.normal(gate_up())])).into(),
)
.in_place(&[(1, 0)])
.splits(&["…", "gate_up ffn"])
.shape(GATED);

/// Such that some of what is normal is clamped.
const LIMIT: f32 = 1.25;

pub(super) static CLAMPED_SWIGLU: Spec =
    row("clamped_swiglu", &[float("gate_up", "… gate_up")], &[float("y", "… ffn")], |batch| {
        let op = Op::ClampedSwiGlu { limit: LIMIT };
        Shapes::any_leading(batch).map(|s| sample(op, [s.normal(gate_up())])).into()
    })
    .gradient(&[Input(0)])
    .splits(&["…", "gate_up ffn"])
    .cheap(&[0])
    .shape(GATED);

pub(super) static CLAMPED_SWIGLU_GRAD: Spec = row(
    "clamped_swiglu_grad",
    &[float("dy", "… ffn"), float("gate_up", "… gate_up")],
    &[float("dgate_up", "… gate_up")],
    |batch| {
        let op = Op::ClampedSwiGluGrad { limit: LIMIT };
        Shapes::any_leading(batch).map(|s| sample(op, [s.normal(ffn()), s.normal(gate_up())])).into()
    },
)
.in_place(&[(1, 0)])
.splits(&["…", "gate_up ffn"])
.shape(GATED);

pub(super) static GELU: Spec = row("gelu", &[float("x", "… ffn")], &[float("y", "… ffn")], |batch| {
    Shapes::any_leading(batch).map(|s| sample(Op::Gelu, [s.normal(ffn())])).into()
})
.in_place(&[(0, 0)])
.gradient(&[Input(0)])
.splits(&["…", "ffn"])
.cheap(&[0]);

pub(super) static GELU_GRAD: Spec =
    row("gelu_grad", &[float("dy", "… ffn"), float("x", "… ffn")], &[float("dx", "… ffn")], |batch| {
        Shapes::any_leading(batch).map(|s| sample(Op::GeluGrad, [s.normal(ffn()), s.normal(ffn())])).into()
    })
    .in_place(ANY_OPERAND)
    .splits(&["…", "ffn"]);

pub(super) static DROPOUT: Spec = row(
    "dropout",
    &[float("x", "batch seq features"), u32("keys", "batch words")],
    &[float("y", "batch seq features")],
    |batch| {
        let s = Shapes::new(batch);
        let keys = TensorType::new(DType::U32, [s.b(), Dim::new(Axis::Scalar, 2)]);
        let op = Op::Dropout { rate: 0.3, site: 0x1234_5678_9abc_def0, seq: s.seq };
        with_parts(vec![sample(op, [s.normal(embed()), (keys, Draw::Below(u32::MAX))])], 2)
    },
)
.in_place(&[(0, 0)])
.gradient(&[Input(1)])
.splits(&["batch", "seq", "features"])
.numbers("seq")
.counts("features")
.shape(|op, _, dims| {
    attributes!(op, Op::Dropout { seq, .. });
    let (part, words) = (dims.size("seq"), dims.size("words"));
    match seq.is_multiple_of(part) && words == 2 {
        true => Ok(()),
        false => Err(op.refuse(format!("{part} of {seq} positions with keys of {words} words"))),
    }
});

pub(super) static ADD: Spec =
    row("add", &[float("a", "… features"), float("b", "… features")], &[float("sum", "… features")], |batch| {
        Shapes::any_leading(batch).map(|s| sample(Op::Add, [s.normal(embed()), s.normal(embed())])).into()
    })
    .in_place(ANY_OPERAND)
    .gradient(&[])
    .linear()
    .splits(&["…", "features"]);

pub(super) static SCALE: Spec = row("scale", &[float("x", "… features")], &[float("y", "… features")], |batch| {
    // No type but f32 has these factors.
    let factors = [(25.298_22, true), (0.974_679_4, false), (-0.3, true)];
    let of = |(s, (factor, rounded)): (Shapes, _)| sample(Op::Scale { factor, rounded }, [s.normal(embed())]);
    Shapes::any_leading(batch).into_iter().zip(factors).map(of).collect()
})
.in_place(&[(0, 0)])
.gradient(&[])
.linear()
.splits(&["…", "features"]);

pub(super) static CAST: Spec =
    row("cast", &[float("x", "… features")], &[other_float("y", "… features")], |batch| {
        let to = [DType::F32, DType::BF16, DType::F16];
        Shapes::any_leading(batch)
            .into_iter()
            .zip(to)
            .map(|(s, to)| sample(Op::Cast { to }, [s.normal(embed())]))
            .collect()
    })
    .gradient(&[])
    .linear()
    .splits(&["…", "features"])
    .shape(|op, _, dims| {
        attributes!(op, Op::Cast { to });
        if !to.is_float() {
            return Err(op.refuse(format!("{to} is no floating-point type")));
        }
        dims.set_float(TypeVar::U, to);
        Ok(())
    });
