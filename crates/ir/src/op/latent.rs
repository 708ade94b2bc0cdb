//! Heads of multi-head latent attention (MLA): packed Q·K·V from queries, from what the latent expands to, and from the one key that all
//! heads share.
//!
//! A head of Q is a part without position and then one with RoPE, in pairs, as published weights have them. A head of `kv` is the part of a
//! key without position, and then a value. In packed Q·K·V the part with RoPE stands first, evens before odds, as [`Rope`](Op::Rope) rotates
//! it. Scores do not see the order: Q and K have the same.

use super::row::{ShapeRule, Spec, float, row};
use super::sample::{Shapes, sample};
use super::{Dims, Op, TypeError, attributes};
use crate::{Axis, Dim, Section};

/// Elements of a head: of Q and K, of these with RoPE, and of V.
struct Sizes {
    heads: usize,
    head: usize,
    rope: usize,
    value: usize,
}

impl Sizes {
    /// Binds all dimensions, or says why they do not fit.
    fn bind(&self, op: &Op, dims: &mut Dims) -> Result<(), TypeError> {
        let &Self { heads, head, rope, value } = self;
        if heads == 0 || value == 0 || rope > head || !rope.is_multiple_of(2) {
            return Err(
                op.refuse(format!("{heads} heads of {head} elements, {rope} of them with RoPE, and {value} of V"))
            );
        }
        let of = |axis, unit| Section { axis, count: heads, unit };
        let (q, k, v) = (of(Axis::Heads, head), of(Axis::KvHeads, head), of(Axis::KvHeads, value));
        op.ask(dims, "q", Dim::packed([q]))?;
        op.ask(dims, "kv", Dim::grouped(Axis::KvHeads, heads, head - rope + value))?;
        op.ask(dims, "shared", Dim::new(Axis::HeadDim, rope))?;
        op.ask(dims, "qkv", Dim::packed([q, k, v]))?;
        let sizes =
            [("heads", Axis::Heads, heads), ("head_dim", Axis::HeadDim, head), ("value_dim", Axis::HeadDim, value)];
        for (name, axis, size) in sizes {
            dims.set(name, &Dim::new(axis, size));
        }
        Ok(())
    }
}

/// The only section of a dimension.
fn only(dims: &Dims, name: &str) -> Option<Section> {
    dims.get(name).and_then(|dim| if let [section] = dim.sections[..] { Some(section) } else { None })
}

const HEADS: ShapeRule = |op, _, dims| {
    let (Some(q), Some(kv)) = (only(dims, "q"), only(dims, "kv")) else {
        return Err(op.refuse("queries, keys and values must be heads alone".into()));
    };
    let rope = dims.size("shared");
    let value = (kv.unit + rope).saturating_sub(q.unit);
    Sizes { heads: q.count, head: q.unit, rope, value }.bind(op, dims)
};

const HEADS_GRAD: ShapeRule = |op, _, dims| {
    attributes!(op, Op::LatentHeadsGrad { rope, .. });
    match dims.get("qkv").map_or(&[][..], |dim| &dim.sections) {
        &[q, _, v] => Sizes { heads: q.count, head: q.unit, rope, value: v.unit }.bind(op, dims),
        _ => Err(op.refuse("the packed dimension must be Q, K and V".into())),
    }
};

/// Shapes of the heads, and how many elements have RoPE: odd sizes, and sizes that are moved in packs.
fn sizes(batch: usize) -> [(Shapes, usize); 2] {
    [(Shapes::unequal(batch, 60, 11, 7), 6), (Shapes::unequal(batch, 24, 48, 32), 16)]
}

const FACTORS: [f32; 2] = [1.0, 1.5];

pub(super) static LATENT_HEADS: Spec = row(
    "latent_heads",
    &[float("q", "… q"), float("kv", "… kv"), float("shared", "… shared")],
    &[float("qkv", "… qkv")],
    |batch| {
        let of = |((s, rope), scale): ((Shapes, usize), f32)| {
            let q = s.q();
            let kv = Dim::grouped(Axis::KvHeads, q.count, q.unit - rope + s.values().unit);
            let shared = Dim::new(Axis::HeadDim, rope);
            sample(Op::LatentHeads { scale }, [s.normal(s.heads()), s.normal(kv), s.normal(shared)])
        };
        sizes(batch).into_iter().zip(FACTORS).map(of).collect()
    },
)
.gradient(&[])
.splits(&["…", "q kv qkv"])
.shape(HEADS);

pub(super) static LATENT_HEADS_GRAD: Spec = row(
    "latent_heads_grad",
    &[float("dqkv", "… qkv")],
    &[float("dq", "… q"), float("dkv", "… kv"), float("dshared", "… shared")],
    |batch| {
        let of = |((s, rope), scale): ((Shapes, usize), f32)| {
            let kv = |unit| Section { axis: Axis::KvHeads, count: s.q().count, unit };
            let qkv = Dim::packed([s.q(), kv(s.head_dim), kv(s.values().unit)]);
            sample(Op::LatentHeadsGrad { rope, scale }, [s.normal(qkv)])
        };
        sizes(batch).into_iter().zip(FACTORS).map(of).collect()
    },
)
.splits(&["…", "q kv qkv"])
.shape(HEADS_GRAD);
