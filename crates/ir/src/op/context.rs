//! Attention of context-parallel ranks: over one part of the keys at a time, which ranks pass around a ring, and over gathered keys.

use super::attention::{WINDOWS, flops_of, fused, packed_heads};
use super::row::{Operand, ShapeRule, Spec, f32, float, row, u32};
use super::sample::{Draw, Sample, Shapes, floats, normal, sample};
use super::{Dims, Flops, Op, TypeError, attributes};
use crate::{Axis, Dim, TensorType};

/// Packed K·V is that of packed Q·K·V.
fn keys_and_values(op: &Op, dims: &mut Dims) -> Result<(), TypeError> {
    let q = packed_heads(op, dims)?;
    op.ask(dims, 'h', Dim::packed([q]))?;
    let [packed, kv] = ['p', 'w'].map(|c| dims.get(c).map_or(&[][..], |d| d.sections.as_slice()));
    match packed[1..] == *kv {
        true => Ok(()),
        false => Err(op.refuse("keys and values must be the K and V sections of the packed dimension".into())),
    }
}

/// Queries and keys are equal parts.
const RING: ShapeRule = |op, _, dims| {
    keys_and_values(op, dims)?;
    let (Op::RingAttention { step, parts, .. } | Op::RingAttentionGrad { step, parts, .. }) = *op else {
        return Ok(());
    };
    match dims.size('s') == dims.size('t') && step < parts {
        true => Ok(()),
        false => {
            let (s, t) = (dims.size('s'), dims.size('t'));
            Err(op.refuse(format!("{s} queries over {t} keys of another part, in step {step} of {parts}")))
        }
    }
};

const GATHERED: ShapeRule = |op, _, dims| {
    keys_and_values(op, dims)?;
    let (s, o) = (dims.size('s'), dims.size('o'));
    if o.is_multiple_of(s) { Ok(()) } else { Err(op.refuse(format!("{s} queries of a sequence of {o}"))) }
};

/// A step is its share of the work on a rank's queries: with a mask that is causal alone, every step of every rank is the same.
fn step_flops(dims: &Dims, (window, parts): (Option<usize>, usize), model: u128, hardware: u128) -> Flops {
    share(flops_of(dims, dims.size('s') * parts, window, model, hardware), parts * parts)
}

/// A rank's queries are as much work as another's.
fn gathered_flops(dims: &Dims, window: Option<usize>, model: u128, hardware: u128) -> Flops {
    let (s, o) = (dims.size('s'), dims.size('o'));
    share(flops_of(dims, o, window, model, hardware), o / s)
}

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
            kv: (s.act(Dim::packed([s.kv(), s.kv()])), Draw::Of(Op::Slice { first: 1, count: 2 }, 0, qkv)),
            o: s.act(s.heads()),
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
    let mut sizes = vec![(60, 20, 2, all), (60, 20, 3, vec![(Some(7), true)])];
    if batch == 1 {
        sizes.push((440, 20, 2, vec![(None, false), (Some(100), true)]));
        // Libraries take it too.
        sizes.push((384, 64, 3, vec![(None, false)]));
    }
    let mut samples = Vec::new();
    for (seq, head_dim, parts, masks) in sizes {
        for sample in masks.into_iter().flat_map(|mask| of(&Shapes::sized(batch, seq, head_dim), mask, parts)) {
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
    let inputs = [s.normal(s.heads()), t.qkv, t.kv, (t.o, of(0)), (t.lse, of(1))];
    inputs.into_iter().chain(t.starts).collect()
}

pub(super) static RING_ATTENTION: Spec = row(
    "ring_attention",
    &[float("qkv", "bsp"), float("kv", "btw"), u32("starts", "bs")],
    &[f32("o", "bsh"), f32("lse", "bqs")],
    |batch| {
        parted(batch, |s, (window, documents), parts| {
            let t = Tensors::of(s, &[0], documents);
            let inputs: Vec<_> = [t.qkv, t.kv].into_iter().chain(t.starts).collect();
            let of = |step| sample(Op::RingAttention { window, step, parts }, inputs.clone());
            (0..parts).map(of).collect()
        })
    },
)
.optional(1)
.splits(&["b", "st", "phquw"])
.numbers('s')
.forward()
.shape(RING)
.flops(|op, dims, _| {
    attributes!(op, Op::RingAttention { window, parts, .. });
    step_flops(dims, (window, parts), 4, 4)
})
.multiplies(&[0, 1], |op, dims, _| {
    attributes!(op, Op::RingAttention { parts, .. });
    fused(dims, dims.size('s') * parts, false)
});

const BACKWARD: [Operand; 5] =
    [float("do", "bsh"), float("qkv", "bsp"), float("kv", "btw"), float("o", "bsh"), f32("lse", "bqs")];

pub(super) static RING_ATTENTION_GRAD: Spec = row(
    "ring_attention_grad",
    &[BACKWARD[0], BACKWARD[1], BACKWARD[2], BACKWARD[3], BACKWARD[4], u32("starts", "bs")],
    &[f32("dq", "bsh"), f32("dkv", "btw")],
    |batch| {
        parted(batch, |s, (window, documents), parts| {
            let inputs = backward(s, window, documents);
            let of = |step| sample(Op::RingAttentionGrad { window, step, parts }, inputs.clone());
            (0..parts).map(of).collect()
        })
    },
)
.optional(1)
.splits(&["b", "st", "phquw"])
.numbers('s')
.shape(RING)
.flops(|op, dims, _| {
    attributes!(op, Op::RingAttentionGrad { window, parts, .. });
    step_flops(dims, (window, parts), 8, 10)
})
.multiplies(&[0, 1, 2, 3], |op, dims, _| {
    attributes!(op, Op::RingAttentionGrad { parts, .. });
    fused(dims, dims.size('s') * parts, true)
});

pub(super) static ATTENTION_MERGE: Spec = row(
    "attention_merge",
    &[f32("o", "bsh"), f32("lse", "bqs"), f32("other", "bsh"), f32("other_lse", "bqs")],
    &[f32("o", "bsh"), f32("lse", "bqs")],
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
.splits(&["b", "s", "hq"])
.shape(|op, _, dims| match dims.get('h').map(|h| h.sections.as_slice()) {
    Some(&[heads]) if heads.count == dims.size('q') => Ok(()),
    _ => Err(op.refuse("a log-sum-exp of every head".into())),
});

pub(super) static GATHERED_ATTENTION: Spec = row(
    "gathered_attention",
    &[float("qkv", "bsp"), float("kv", "bow"), u32("starts", "bs")],
    &[float("o", "bsh"), f32("lse", "bqs")],
    |batch| {
        parted(batch, |s, (window, documents), _| {
            let t = Tensors::of(s, &[0], documents);
            let inputs: Vec<_> = [t.qkv, t.kv].into_iter().chain(t.starts).collect();
            vec![sample(Op::GatheredAttention { window }, inputs)]
        })
    },
)
.optional(1)
.splits(&["b", "s", "phquw"])
.numbers('s')
.forward()
.shape(GATHERED)
.flops(|op, dims, _| {
    attributes!(op, Op::GatheredAttention { window });
    gathered_flops(dims, window, 4, 4)
})
.multiplies(&[0, 1], |_, dims, _| fused(dims, dims.size('o'), false));

pub(super) static GATHERED_ATTENTION_GRAD: Spec = row(
    "gathered_attention_grad",
    &[BACKWARD[0], BACKWARD[1], float("kv", "bow"), BACKWARD[3], BACKWARD[4], u32("starts", "bs")],
    &[float("dq", "bsh"), f32("dkv", "bow")],
    |batch| {
        parted(batch, |s, (window, documents), _| {
            vec![sample(Op::GatheredAttentionGrad { window }, backward(s, window, documents))]
        })
    },
)
.optional(1)
.splits(&["b", "s", "phquw"])
.numbers('s')
.shape(GATHERED)
.flops(|op, dims, _| {
    attributes!(op, Op::GatheredAttentionGrad { window });
    gathered_flops(dims, window, 8, 10)
})
.multiplies(&[0, 1, 2, 3], |_, dims, _| fused(dims, dims.size('o'), true));
