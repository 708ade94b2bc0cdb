//! Attention of context-parallel ranks: over one part of the keys at a time, which ranks pass around a ring, and over gathered keys.

use super::attention::{PerPair, WINDOWS, attended, flops_of, fused, packed_heads};
use super::cost::CostRule;
use super::row::{FlopsRule, Operand, ShapeRule, Spec, f32, float, row, u32};
use super::sample::{Draw, Sample, Shapes, floats, normal, sample};
use super::{Dims, Flops, Op, TypeError, attributes};
use crate::{Axis, Dim, TensorType};

/// Packed K·V is that of packed Q·K·V.
fn keys_and_values(op: &Op, dims: &mut Dims) -> Result<(), TypeError> {
    let q = packed_heads(op, dims)?;
    attended(op, dims)?;
    op.ask(dims, "queries", Dim::packed([q]))?;
    let [packed, kv] = ["qkv", "kv"].map(|c| dims.get(c).map_or(&[][..], |d| d.sections.as_slice()));
    match packed[1..] == *kv {
        true => Ok(()),
        false => Err(op.refuse("keys and values must be the K and V sections of the packed dimension".into())),
    }
}

/// A part of the keys and values on its way around the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    /// How far it has come.
    pub step: usize,
    /// Parts of the sequence, in zig-zag order (see [`Placement::Split`](crate::Placement::Split)).
    pub parts: usize,
}

/// In a ring queries and keys are equal parts; else queries are a part of the sequence.
const PARTS: ShapeRule = |op, _, dims| {
    keys_and_values(op, dims)?;
    attributes!(op, (Op::PartAttention { ring, .. } | Op::PartAttentionGrad { ring, .. }));
    let (s, t) = (dims.size("seq"), dims.size("keys"));
    match ring {
        Some(Ring { step, parts }) if s != t || step >= parts => {
            Err(op.refuse(format!("{s} queries over {t} keys of another part, in step {step} of {parts}")))
        }
        None if !t.is_multiple_of(s) => Err(op.refuse(format!("{s} queries of a sequence of {t}"))),
        Some(_) | None => Ok(()),
    }
};

/// Positions of the whole sequence, and what share of its attention the op is. A rank's queries are as much work as another's; a step of a
/// ring is its share of that: with a mask that is causal alone, every step of every rank is the same.
fn share_of(op: &Op, dims: &Dims) -> (usize, usize) {
    attributes!(op, (Op::PartAttention { ring, .. } | Op::PartAttentionGrad { ring, .. }));
    match ring {
        Some(Ring { parts, .. }) => (dims.size("seq") * parts, parts * parts),
        None => (dims.size("keys"), dims.size("keys") / dims.size("seq")),
    }
}

const FORWARD_FLOPS: FlopsRule = |op, dims, _| {
    attributes!(op, Op::PartAttention { window, .. });
    let (seq, of) = share_of(op, dims);
    share(flops_of(dims, seq, window, PerPair::FORWARD), of)
};

const BACKWARD_FLOPS: FlopsRule = |op, dims, _| {
    attributes!(op, Op::PartAttentionGrad { window, .. });
    let (seq, of) = share_of(op, dims);
    share(flops_of(dims, seq, window, PerPair::BACKWARD), of)
};

const FORWARD_COST: CostRule = |op, dims, _| fused(dims, share_of(op, dims).0, false);
const BACKWARD_COST: CostRule = |op, dims, _| fused(dims, share_of(op, dims).0, true);

fn share(Flops { model, causal, hardware }: Flops, of: usize) -> Flops {
    let of = of as u128;
    Flops { model: model / of, causal: causal / of, hardware: hardware / of }
}

/// The sequence, its queries' log-sum-exps, packed K·V of packed Q·K·V (input `.0`), and starts of documents where wanted.
struct Tensors {
    qkv: (TensorType, Draw),
    kv: (TensorType, Draw),
    o: TensorType,
    lse: TensorType,
    starts: Option<(TensorType, Draw)>,
}

impl Tensors {
    fn of(s: &Shapes, qkv: &'static [usize], documents: bool) -> Self {
        Self {
            qkv: s.normal(s.qkv()),
            kv: (s.act(Dim::packed([s.kv(), s.values()])), Draw::Of(Op::Slice { first: 1, count: 2 }, 0, qkv)),
            o: s.act(s.attended()),
            lse: floats([s.b(), Dim::new(Axis::Heads, s.q().count), s.s()]),
            starts: documents.then(|| s.starts()),
        }
    }
}

/// Every rank of rings of several sizes, with windows, with documents and without; once with chunks of more than a tile.
fn parted(batch: usize, of: impl Fn(&Shapes, (Option<usize>, bool), usize) -> Vec<Sample>) -> Vec<Sample> {
    // The gradient of a single score is nothing but rounding.
    let windows = WINDOWS.into_iter().filter(|window| *window != Some(1));
    let all: Vec<_> = windows.enumerate().map(|(i, window)| (window, i % 2 == 1)).collect();
    let sized = |seq, head_dim| Shapes::sized(batch, seq, head_dim);
    let mut sizes = vec![(sized(60, 20), 2, all), (sized(60, 20), 3, vec![(Some(7), true)])];
    if batch == 1 {
        sizes.push((sized(440, 20), 2, vec![(None, false), (Some(100), true)]));
        sizes.push((Shapes::unequal(batch, 60, 20, 12), 2, vec![(None, false), (Some(7), true)]));
        // Libraries take these too.
        sizes.push((sized(384, 64), 3, vec![(None, false)]));
        sizes.push((Shapes::unequal(batch, 256, 192, 128), 2, vec![(None, false)]));
    }
    let mut samples = Vec::new();
    for (shapes, parts, masks) in sizes {
        for sample in masks.into_iter().flat_map(|mask| of(&shapes, mask, parts)) {
            samples.extend((0..parts).map(|index| Sample { part: Some((index, parts)), ..sample.clone() }));
        }
    }
    samples
}

/// Inputs of the backward ops, and how they are made from another.
fn backward(s: &Shapes, window: Option<usize>, documents: bool) -> Vec<(TensorType, Draw)> {
    let t = Tensors::of(s, &[1], documents);
    let reads: &[usize] = if documents { &[1, 5] } else { &[1] };
    let of = |output| Draw::Of(Op::Attention { window }, output, reads);
    let inputs = [s.normal(s.attended()), t.qkv, t.kv, (t.o, of(0)), (t.lse, of(1))];
    inputs.into_iter().chain(t.starts).collect()
}

pub(super) static RING_ATTENTION: Spec = row(
    "ring_attention",
    &[float("qkv", "batch seq qkv"), float("kv", "batch keys kv"), u32("starts", "batch seq")],
    &[f32("o", "batch seq attended"), f32("lse", "batch heads seq")],
    |batch| {
        parted(batch, |s, (window, documents), parts| {
            let t = Tensors::of(s, &[0], documents);
            let inputs: Vec<_> = [t.qkv, t.kv].into_iter().chain(t.starts).collect();
            let of = |step| sample(Op::PartAttention { window, ring: Some(Ring { step, parts }) }, inputs.clone());
            (0..parts).map(of).collect()
        })
    },
)
.optional(1)
.splits(&["batch", "seq keys", "qkv attended heads kv_heads kv"])
.numbers("seq")
.forward()
.shape(PARTS)
.flops(FORWARD_FLOPS)
.multiplies(&[0, 1], FORWARD_COST);

const BACKWARD: [Operand; 6] = [
    float("do", "batch seq attended"),
    float("qkv", "batch seq qkv"),
    float("kv", "batch keys kv"),
    float("o", "batch seq attended"),
    f32("lse", "batch heads seq"),
    u32("starts", "batch seq"),
];

pub(super) static RING_ATTENTION_GRAD: Spec =
    row("ring_attention_grad", &BACKWARD, &[f32("dq", "batch seq queries"), f32("dkv", "batch keys kv")], |batch| {
        parted(batch, |s, (window, documents), parts| {
            let inputs = backward(s, window, documents);
            let of = |step| sample(Op::PartAttentionGrad { window, ring: Some(Ring { step, parts }) }, inputs.clone());
            (0..parts).map(of).collect()
        })
    })
    .optional(1)
    .splits(&["batch", "seq keys", "qkv attended queries heads kv_heads kv"])
    .numbers("seq")
    .shape(PARTS)
    .flops(BACKWARD_FLOPS)
    .multiplies(&[0, 1, 2, 3], BACKWARD_COST);

pub(super) static ATTENTION_MERGE: Spec = row(
    "attention_merge",
    &[
        f32("o", "batch seq attended"),
        f32("lse", "batch heads seq"),
        f32("other", "batch seq attended"),
        f32("other_lse", "batch heads seq"),
    ],
    &[f32("o", "batch seq attended"), f32("lse", "batch heads seq")],
    |batch| {
        let s = Shapes::new(batch);
        let lse = || normal([s.b(), Dim::new(Axis::Heads, s.q().count), s.s()]);
        let one = sample(Op::AttentionMerge, [s.normal(s.heads()), lse(), s.normal(s.heads()), lse()]);
        // Nothing was seen in one of the two, or in both.
        let unseen = |(ty, _): (TensorType, Draw)| (ty, Draw::Unseen);
        let some = sample(Op::AttentionMerge, [s.normal(s.heads()), unseen(lse()), s.normal(s.heads()), unseen(lse())]);
        vec![one, some]
    },
)
.in_place(&[(0, 0), (1, 1)])
.splits(&["batch", "seq", "attended heads"])
.shape(|op, _, dims| match dims.get("attended").map(|h| h.sections.as_slice()) {
    Some(&[heads]) if heads.count == dims.size("heads") => Ok(()),
    _ => Err(op.refuse("a log-sum-exp of every head".into())),
});

pub(super) static GATHERED_ATTENTION: Spec = row(
    "gathered_attention",
    &[float("qkv", "batch seq qkv"), float("kv", "batch keys kv"), u32("starts", "batch seq")],
    &[float("o", "batch seq attended"), f32("lse", "batch heads seq")],
    |batch| {
        parted(batch, |s, (window, documents), _| {
            let t = Tensors::of(s, &[0], documents);
            let inputs: Vec<_> = [t.qkv, t.kv].into_iter().chain(t.starts).collect();
            vec![sample(Op::PartAttention { window, ring: None }, inputs)]
        })
    },
)
.optional(1)
.splits(&["batch", "seq", "qkv attended heads kv_heads kv"])
.numbers("seq")
.forward()
.shape(PARTS)
.flops(FORWARD_FLOPS)
.multiplies(&[0, 1], FORWARD_COST);

pub(super) static GATHERED_ATTENTION_GRAD: Spec = row(
    "gathered_attention_grad",
    &BACKWARD,
    &[float("dq", "batch seq queries"), f32("dkv", "batch keys kv")],
    |batch| {
        parted(batch, |s, (window, documents), _| {
            vec![sample(Op::PartAttentionGrad { window, ring: None }, backward(s, window, documents))]
        })
    },
)
.optional(1)
.splits(&["batch", "seq", "qkv attended queries heads kv_heads kv"])
.numbers("seq")
.shape(PARTS)
.flops(BACKWARD_FLOPS)
.multiplies(&[0, 1, 2, 3], BACKWARD_COST);
