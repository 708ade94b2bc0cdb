//! Attention over packed Q·K·V: fused, with weights that exist, and over a cache.
//!
//! Heads of V, and so those of the output, may be of another size than those of Q and K.
//!
//! A sliding window is an attribute. Where each position's document starts is an optional operand, numbers on the
//! device, so that one program serves all batches; kernels clamp a start to its position. Attention with weights
//! that exist is two ops with the weights between them, so its quadratic memory is an ordinary value. A cache is a
//! state that an op changes in part, in place; its position and the number of new tokens are inputs on the device.
//!
//! Latent attention (MLA) over a cache has one key head that all heads of Q share. Its key is the K section and the V section together, so
//! the cache holds the latent once: as the rest of the key, and as the value.

use super::row::{Operand, Samples, ShapeRule, Spec, f32, float, row, u32};
use super::sample::{Draw, Sample, Shapes, embed, floats, normal, sample};
use super::{Cost, Dims, Flops, Op, Saved::Input, Saved::Output, TypeError, attributes};
use crate::{Axis, DType, Dim, Section, TensorType};

/// Whether K and V are one key that all heads of Q share: that of latent attention over a cache.
fn is_latent([q, k, v]: [Section; 3]) -> bool {
    k.count == 1 && k.unit + v.unit == q.unit
}

/// The Q section of packed Q·K·V, having bound the numbers of heads and their sizes: of Q and K, of V, and the larger of the two. In latent
/// attention over a cache, K is the part of a key that is no value.
pub(super) fn packed_heads(op: &Op, dims: &mut Dims) -> Result<Section, TypeError> {
    let sections = dims.get("qkv").map(|p| p.sections.clone()).unwrap_or_default();
    let keys_fit = |sections: [Section; 3]| match op {
        Op::CachedAttention { latent: true, .. } => is_latent(sections),
        Op::RopeAt if is_latent(sections) => dims.size("columns") <= sections[1].unit,
        _ => sections[0].unit == sections[1].unit,
    };
    match sections[..] {
        [q, k, v]
            if Section { unit: k.unit, ..v } == k
                && keys_fit([q, k, v])
                && k.count > 0
                && q.count.is_multiple_of(k.count) =>
        {
            op.ask(dims, "heads", Dim::new(Axis::Heads, q.count))?;
            dims.set("kv_heads", &Dim::new(Axis::KvHeads, k.count));
            let sizes = [("head_dim", q.unit), ("value_dim", v.unit), ("widest_dim", q.unit.max(v.unit))];
            for (name, size) in sizes {
                dims.set(name, &Dim::new(Axis::HeadDim, size));
            }
            Ok(q)
        }
        _ => Err(op.refuse("the packed dimension must be Q, K and V, with K's heads dividing Q's".into())),
    }
}

/// Binds the output of attention: the heads of Q, of V's size.
pub(super) fn attended(op: &Op, dims: &mut Dims) -> Result<(), TypeError> {
    let q = packed_heads(op, dims)?;
    let out = Dim::packed([Section { unit: dims.size("value_dim"), ..q }]);
    op.ask(dims, "attended", out)
}

const FUSED: ShapeRule = |op, _, dims| attended(op, dims);

const NAIVE: ShapeRule = |op, inputs, dims| {
    FUSED(op, inputs, dims)?;
    let keys = dims.get("seq").cloned().unwrap_or(Dim::new(Axis::Seq, 1));
    op.ask(dims, "keys", keys)
};

/// How many matmuls of a query head's size and how many of a value head's size an op is: FLOPs of each per query and key, by the
/// formulas of models and as kernels compute them.
#[derive(Clone, Copy)]
pub(super) struct PerPair {
    pub model: [u128; 2],
    pub hardware: [u128; 2],
}

impl PerPair {
    /// Scores, and the sum of values.
    pub const FORWARD: PerPair = PerPair { model: [2, 2], hardware: [2, 2] };
    /// Gradients of Q and K, of scores and V; kernels recompute the scores.
    pub const BACKWARD: PerPair = PerPair { model: [4, 4], hardware: [6, 4] };

    const fn both(each: [u128; 2]) -> Self {
        Self { model: each, hardware: each }
    }
}

/// A query of a window counts as many keys as the window has.
fn flops(dims: &Dims, window: Option<usize>, each: PerPair) -> Flops {
    flops_of(dims, dims.size("seq"), window, each)
}

/// The same of sequences of `s` positions.
pub(super) fn flops_of(dims: &Dims, s: usize, window: Option<usize>, each: PerPair) -> Flops {
    let w = window.unwrap_or(s).min(s);
    let (whole, seen) = ((s * w) as u128, ((2 * s - w) * w) as u128);
    let (model, hardware) = (of_heads(dims, each.model), of_heads(dims, each.hardware));
    Flops { model: model * whole, causal: model * seen / 2, hardware: hardware * whole }
}

/// This many FLOPs of every element of all query heads and of all outputs.
fn of_heads(dims: &Dims, [queries, values]: [u128; 2]) -> u128 {
    queries * dims.product("batch heads head_dim") + values * dims.product("batch heads value_dim")
}

/// Fused attention over sequences of `seq` positions.
pub(super) fn fused(dims: &Dims, seq: usize, backward: bool) -> Cost {
    Cost::Attention { head_dim: dims.size("head_dim") as u64, seq: seq as u64, backward }
}

/// Weights that exist are computed for all keys.
fn naive_flops(dims: &Dims, window: Option<usize>, each: [u128; 2]) -> Flops {
    Flops { hardware: of_heads(dims, each) * dims.product("seq seq"), ..flops(dims, window, PerPair::both(each)) }
}

/// All keys; one; less than a tile; across tiles; past the start.
pub(super) const WINDOWS: [Option<usize>; 5] = [None, Some(1), Some(7), Some(100), Some(1000)];

/// Samples at the usual size and, once, of sequences of several tiles, of heads wider than a tile, of heads whose values are narrower or
/// wider, and of sizes that libraries take too; each with all windows, with documents and without.
fn tiled(batch: usize, of: impl Fn(&Shapes, Option<usize>, Option<(TensorType, Draw)>) -> Sample) -> Vec<Sample> {
    let mut sizes = vec![Shapes::new(batch)];
    if batch == 1 {
        let larger = [(1, 300, 20), (1, 140, 150), (2, 192, 64)];
        sizes.extend(larger.map(|(batch, seq, head_dim)| Shapes::sized(batch, seq, head_dim)));
        let unequal = [(2, 60, 20, 12), (1, 60, 12, 20), (1, 128, 192, 128)];
        sizes.extend(unequal.map(|(batch, seq, head_dim, values)| Shapes::unequal(batch, seq, head_dim, values)));
    }
    let mut samples = Vec::new();
    for s in &sizes {
        // Libraries take documents that are apart.
        let starts = (s.ids(), Draw::Starts { stray: !s.head_dim.is_multiple_of(64) });
        for window in WINDOWS {
            samples.extend([of(s, window, None), of(s, window, Some(starts.clone()))]);
        }
    }
    samples
}

pub(super) static ATTENTION: Spec = row(
    "attention",
    &[float("qkv", "batch seq qkv"), u32("starts", "batch seq")],
    &[float("o", "batch seq attended"), f32("lse", "batch heads seq")],
    |batch| {
        tiled(batch, |s, window, starts| {
            let inputs: Vec<_> = [s.normal(s.qkv())].into_iter().chain(starts).collect();
            sample(Op::Attention { window }, inputs)
        })
    },
)
.optional(1)
.gradient(&[Input(0), Input(1), Output(0), Output(1)])
.splits(&["batch", "qkv attended heads kv_heads"])
.shape(FUSED)
// Where documents end is known on the device only: what they mask is counted.
.flops(|op, dims, _| {
    attributes!(op, Op::Attention { window });
    flops(dims, window, PerPair::FORWARD)
})
.multiplies(&[0], |_, dims, _| fused(dims, dims.size("seq"), false));

pub(super) static ATTENTION_GRAD: Spec = row(
    "attention_grad",
    &[
        float("do", "batch seq attended"),
        float("qkv", "batch seq qkv"),
        float("o", "batch seq attended"),
        f32("lse", "batch heads seq"),
        u32("starts", "batch seq"),
    ],
    &[float("dqkv", "batch seq qkv")],
    |batch| {
        tiled(batch, |s, window, starts| {
            let reads: &[usize] = if starts.is_some() { &[1, 4] } else { &[1] };
            let of = |output| Draw::Of(Op::Attention { window }, output, reads);
            let lse = floats([s.b(), Dim::new(Axis::Heads, s.q().count), s.s()]);
            let inputs = [s.normal(s.attended()), s.normal(s.qkv()), (s.act(s.attended()), of(0)), (lse, of(1))];
            sample(Op::AttentionGrad { window }, inputs.into_iter().chain(starts).collect::<Vec<_>>())
        })
    },
)
.optional(1)
.splits(&["batch", "qkv attended heads kv_heads"])
.shape(FUSED)
.flops(|op, dims, _| {
    attributes!(op, Op::AttentionGrad { window });
    flops(dims, window, PerPair::BACKWARD)
})
.multiplies(&[0, 1, 2], |_, dims, _| fused(dims, dims.size("seq"), true));

/// Shapes whose values are as wide as queries, and of others.
fn both_widths(batch: usize) -> [Shapes; 2] {
    [Shapes::new(batch), Shapes::unequal(batch, 60, 20, 12)]
}

const P: Operand = float("p", "batch heads seq keys");

fn weights(s: &Shapes) -> TensorType {
    floats([s.b(), Dim::new(Axis::Heads, s.q().count), s.s(), s.s()])
}

/// Weights of attention over these inputs.
const fn drawn_weights(inputs: &'static [usize]) -> Draw {
    Draw::Of(Op::AttentionScores { window: None }, 0, inputs)
}

pub(super) static ATTENTION_SCORES: Spec =
    row("attention_scores", &[float("qkv", "batch seq qkv"), u32("starts", "batch seq")], &[P], |batch| {
        let of = |window, inputs: &[_]| sample(Op::AttentionScores { window }, inputs);
        let of_shapes = |s: Shapes| {
            let inputs = [s.normal(s.qkv()), s.starts()];
            WINDOWS.into_iter().flat_map(move |window| [of(window, &inputs[..1]), of(window, &inputs)])
        };
        both_widths(batch).into_iter().flat_map(of_shapes).collect()
    })
    .optional(1)
    .gradient(&[Input(0), Output(0)])
    .splits(&["batch", "qkv heads kv_heads"])
    .cheap(&[0])
    .shape(NAIVE)
    .flops(|op, dims, _| {
        attributes!(op, Op::AttentionScores { window });
        naive_flops(dims, window, [2, 0])
    })
    .multiplies(&[0], |_, _, _| Cost::Scores);

pub(super) static ATTENTION_SCORES_GRAD: Spec = row(
    "attention_scores_grad",
    &[float("dp", "batch heads seq keys"), P, float("qkv", "batch seq qkv")],
    &[float("dqkv", "batch seq qkv")],
    |batch| {
        let of = |s: Shapes| {
            let inputs = [normal(weights(&s).dims), (weights(&s), drawn_weights(&[2])), s.normal(s.qkv())];
            sample(Op::AttentionScoresGrad { window: None }, inputs)
        };
        both_widths(batch).map(of).into()
    },
)
.splits(&["batch", "qkv heads kv_heads"])
.shape(NAIVE)
.flops(|op, dims, _| {
    attributes!(op, Op::AttentionScoresGrad { window });
    naive_flops(dims, window, [4, 0])
})
.multiplies(&[0, 1, 2], |_, _, _| Cost::Scores);

pub(super) static ATTENTION_MIX: Spec =
    row("attention_mix", &[P, float("qkv", "batch seq qkv")], &[float("o", "batch seq attended")], |batch| {
        let of = |s: Shapes| {
            let inputs = [(weights(&s), drawn_weights(&[1])), s.normal(s.qkv())];
            sample(Op::AttentionMix { window: None }, inputs)
        };
        both_widths(batch).map(of).into()
    })
    .gradient(&[Input(0), Input(1)])
    .splits(&["batch", "qkv attended heads kv_heads"])
    .shape(NAIVE)
    .flops(|op, dims, _| {
        attributes!(op, Op::AttentionMix { window });
        naive_flops(dims, window, [0, 2])
    })
    .multiplies(&[0, 1], |_, _, _| Cost::Scores);

pub(super) static ATTENTION_MIX_GRAD: Spec = row(
    "attention_mix_grad",
    &[float("do", "batch seq attended"), P, float("qkv", "batch seq qkv")],
    &[float("dp", "batch heads seq keys"), float("dqkv", "batch seq qkv")],
    |batch| {
        let of = |s: Shapes| {
            let inputs = [s.normal(s.attended()), (weights(&s), drawn_weights(&[2])), s.normal(s.qkv())];
            sample(Op::AttentionMixGrad { window: None }, inputs)
        };
        both_widths(batch).map(of).into()
    },
)
.splits(&["batch", "qkv attended heads kv_heads"])
.shape(NAIVE)
.flops(|op, dims, _| {
    attributes!(op, Op::AttentionMixGrad { window });
    naive_flops(dims, window, [0, 4])
})
.multiplies(&[0, 1, 2], |_, _, _| Cost::Scores);

/// Samples of attention over a cache, for packed Q·K·V of these shapes: pages in any order; new positions on both sides of a border between
/// two, and fewer than there is room for. And one position each, as decoding has it.
fn over_cache(s: &Shapes, qkv: &Dim, latent: bool) -> Vec<Sample> {
    let kv = Dim::packed(&qkv.sections[1..]);
    let cache = normal([Dim::new(Axis::Batch, 9), Dim::new(Axis::Seq, 96), kv]);
    let table = TensorType::new(DType::U32, [Dim::new(Axis::Batch, 4), Dim::new(Axis::Seq, 2)]);
    let (pages, slot) = ((table, Draw::Distinct(9)), (s.number(), Draw::Distinct(4)));
    let (start, count) = if s.seq == 1 { ((0, 190), (0, 1)) } else { ((70, 110), (49, 60)) };
    let between = |(low, high)| (s.number(), Draw::Between(low, high));
    let sink = normal([Dim::new(Axis::Heads, qkv.sections[0].count)]);
    let inputs = [s.normal(qkv.clone()), cache, pages, slot, between(start), between(count), sink];
    let of = |window, apart, given| sample(Op::CachedAttention { latent, window, apart }, &inputs[..given]);
    let both = WINDOWS.into_iter().flat_map(|window| [(window, false), (window, true)]);
    both.flat_map(|(window, apart)| [of(window, apart, 6), of(window, apart, 7)]).collect()
}

const OVER_CACHE: &[Operand] = &[
    float("qkv", "batch seq qkv"),
    float("cache", "pages page kv"),
    u32("table", "slots blocks"),
    u32("slot", "batch"),
    u32("start", "batch"),
    u32("count", "batch"),
    f32("sink", "heads"),
];
const FROM_CACHE: &[Operand] = &[float("o", "batch seq attended"), float("cache", "pages page kv")];

/// Attention over a cache, by this name.
const fn cached(name: &'static str, samples: Samples) -> Spec {
    row(name, OVER_CACHE, FROM_CACHE, samples)
        .optional(1)
        .splits(&["qkv attended heads kv"])
        .always_in_place(&[(1, 1)])
        .shape(|op, _, dims| {
            attended(op, dims)?;
            let [packed, cached] = ["qkv", "kv"].map(|c| dims.get(c).map_or(&[][..], |d| d.sections.as_slice()));
            if packed[1..] != *cached {
                return Err(op.refuse("the cache must hold the K and V sections of the packed dimension".into()));
            }
            let room = dims.product("blocks page") as usize;
            if room < dims.size("seq") {
                return Err(op.refuse(format!(
                    "a text has room for {room} positions in the cache, {} are new",
                    dims.size("seq")
                )));
            }
            Ok(())
        })
        // How full the cache is is known on the device only: every new position counts over all of it.
        .flops(|op, dims, _| {
            attributes!(op, Op::CachedAttention { window, .. });
            let t = dims.product("blocks page") as usize;
            Flops::all(of_heads(dims, [2, 2]) * dims.product("seq") * window.unwrap_or(t).min(t) as u128)
        })
        .multiplies(&[0, 1], |_, dims, _| fused(dims, dims.size("seq"), false))
}

pub(super) static CACHED_ATTENTION: Spec = cached("cached_attention", |batch| {
    let one = [Shapes::sized(batch, 1, 20), Shapes::unequal(batch, 1, 20, 12)];
    let wide = [(1, 64), (60, 64), (1, 128), (60, 128)].map(|(seq, head)| Shapes::sized(batch, seq, head));
    both_widths(batch).into_iter().chain(one).chain(wide).flat_map(|s| over_cache(&s, &s.qkv(), false)).collect()
});

pub(super) static CACHED_LATENT_ATTENTION: Spec = cached("cached_latent_attention", |batch| {
    // Heads, elements of a key with RoPE, and of a latent: few; as DeepSeek's models have them, in one group of heads and in more.
    let sizes = [(60, 6, 6, 11), (1, 6, 6, 11), (60, 20, 16, 64), (1, 20, 16, 64), (1, 16, 64, 512)];
    let of = |(seq, heads, rope, rank): (usize, usize, usize, usize)| {
        let s = Shapes::sized(batch, seq, rope + rank);
        let of = |axis, count, unit| Section { axis, count, unit };
        let kv = |unit| of(Axis::KvHeads, 1, unit);
        let qkv = Dim::packed([of(Axis::Heads, heads, rope + rank), kv(rope), kv(rank)]);
        over_cache(&s, &qkv, true)
    };
    sizes.into_iter().flat_map(of).collect()
});

pub(super) static LAST_POSITION: Spec = row(
    "last_position",
    &[float("x", "batch seq features"), u32("count", "batch")],
    &[float("y", "batch one features")],
    |batch| {
        let s = Shapes::new(batch);
        vec![sample(Op::LastPosition, [s.normal(embed()), (s.number(), Draw::Between(1, 60))])]
    },
)
.shape(|_, _, dims| {
    dims.set("one", &Dim::new(Axis::Seq, 1));
    Ok(())
});

pub(super) static ARGMAX: Spec =
    row("argmax", &[float("logits", "batch seq vocab")], &[u32("token", "batch seq")], |batch| {
        let of = |entries, known| {
            let logits = floats([Dim::new(Axis::Batch, batch), Dim::new(Axis::Seq, 2), Dim::new(Axis::Vocab, entries)]);
            sample(Op::Argmax { known }, [(logits, Draw::Normal)])
        };
        vec![of(50, 50), of(50, 41), of(5003, 5003)]
    });
