//! Attention sinks: a learned logit of every head in the denominator of its softmax, without a value.
//!
//! Attention knows nothing of them. With the sink, the weights are those without it times e^lse ÷ (e^lse + e^sink), so the output of attention is
//! multiplied once, after everything that made it (the parts of a ring, say), and its log-sum-exp becomes that with the sink. Gradients of
//! attention that are given these two are those of attention with sinks, so that kernels and libraries need not know of them either.

use super::row::{Operand, ShapeRule, Spec, f32, float, row};
use super::sample::{Draw, Sample, Shapes, floats, normal, sample};
use super::{Op, Saved::Input, Saved::Output};
use crate::{Axis, Dim};

/// Attention's output is that of the heads.
const HEADS: ShapeRule = |op, _, dims| match dims.get("attended").map(|dim| dim.sections.as_slice()) {
    Some(&[heads]) if heads.axis == Axis::Heads && heads.count == dims.size("heads") => Ok(()),
    _ => Err(op.refuse("a sink of every head, and nothing but heads".into())),
};

const MADE: &[Operand] = &[float("o", "batch seq attended"), f32("lse", "batch heads seq")];
/// A sink of every head.
const SINK: Operand = f32("sink", "heads");
/// A sink of every head at every position.
const SINKS: Operand = f32("sink", "batch seq heads");

/// Heads of an odd and of an even size.
fn shapes(batch: usize) -> [Shapes; 2] {
    [Shapes::new(batch), Shapes::unequal(batch, 24, 48, 32)]
}

fn heads(s: &Shapes) -> Dim {
    Dim::new(Axis::Heads, s.q().count)
}

/// Attention's output and log-sum-exp, and sinks.
fn forward(batch: usize, each: bool) -> Vec<Sample> {
    let of = |s: Shapes| {
        let sink = if each { s.normal(heads(&s)) } else { normal([heads(&s)]) };
        // Of a log-sum-exp near the sink neither is lost; scores of real models are larger.
        let lse = |draw| (floats([s.b(), heads(&s), s.s()]), draw);
        [Draw::Normal, Draw::Scaled(8.0)]
            .map(|draw| sample(Op::AttentionSink { each }, [s.normal(s.attended()), lse(draw), sink.clone()]))
    };
    shapes(batch).into_iter().flat_map(of).collect()
}

/// The gradient of the output, the output and the log-sum-exp with sinks, and these.
fn backward(batch: usize, each: bool) -> Vec<Sample> {
    let of = |s: Shapes| {
        let sink = if each { s.normal(heads(&s)) } else { normal([heads(&s)]) };
        let lse = normal([s.b(), heads(&s), s.s()]);
        sample(Op::AttentionSinkGrad { each }, [s.normal(s.attended()), s.normal(s.attended()), lse, sink])
    };
    shapes(batch).map(of).into()
}

pub(super) static ATTENTION_SINK: Spec =
    row("attention_sink", &[float("o", "batch seq attended"), f32("lse", "batch heads seq"), SINK], MADE, |batch| {
        forward(batch, false)
    })
    .in_place(&[(0, 0), (1, 1)])
    .gradient(&[Input(2), Output(0), Output(1)])
    .splits(&["batch", "seq", "attended heads"])
    .shape(HEADS);

pub(super) static ATTENTION_SINK_EACH: Spec = row(
    "attention_sink_each",
    &[float("o", "batch seq attended"), f32("lse", "batch heads seq"), SINKS],
    MADE,
    |batch| forward(batch, true),
)
.in_place(&[(0, 0), (1, 1)])
.forward()
.splits(&["batch", "seq", "attended heads"])
.shape(HEADS);

pub(super) static ATTENTION_SINK_GRAD: Spec = row(
    "attention_sink_grad",
    &[float("do", "batch seq attended"), float("o", "batch seq attended"), f32("lse", "batch heads seq"), SINK],
    &[f32("dsink", "batch seq heads")],
    |batch| backward(batch, false),
)
.splits(&["batch", "seq", "attended heads"])
.shape(HEADS);

pub(super) static ATTENTION_SINK_EACH_GRAD: Spec = row(
    "attention_sink_each_grad",
    &[float("do", "batch seq attended"), float("o", "batch seq attended"), f32("lse", "batch heads seq"), SINKS],
    &[f32("dsink", "batch seq heads")],
    |batch| backward(batch, true),
)
.splits(&["batch", "seq", "attended heads"])
.shape(HEADS);

pub(super) static EXPAND_SINKS: Spec =
    row("expand_sinks", &[float("qkv", "batch seq qkv"), SINK], &[f32("sinks", "batch seq heads")], |batch| {
        shapes(batch).map(|s| sample(Op::ExpandSinks, [s.normal(s.qkv()), normal([heads(&s)])])).into()
    })
    .forward()
    .splits(&["batch", "seq", "qkv heads"]);
