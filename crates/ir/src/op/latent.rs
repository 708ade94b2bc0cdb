//! Heads of multi-head latent attention (MLA): packed Q·K·V from queries, from what the latent expands to, and from the one key that all
//! heads share.
//!
//! A head of Q is a part without position and then one with RoPE, in pairs, as published weights have them. A head of `kv` is the part of a
//! key without position, and then a value. In packed Q·K·V the part with RoPE stands first, evens before odds, as [`Rope`](Op::Rope) rotates
//! it. Scores do not see the order: Q and K have the same.
//!
//! Where context-parallel ranks send each other the latent, each builds packed K·V from what it gets: from the latent, which expands there, and
//! from the shared key, which its owner has rotated.
//!
//! A score is q · (W c), W being the head's rows of keys of the weight by which the latent c expands, and that is (q W) · c. So queries may
//! absorb W, and attention is over latents, which one matmul per head then turns into values: the form of generation, whose cache holds latents.

use super::row::{Operand, ShapeRule, Spec, f32, float, row, u32};
use super::sample::{Shapes, normal, sample, with_parts};
use super::{Cost, Dims, Flops, Matmuls, Op, TypeError, attributes};
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
            sample(Op::LatentHeads { absorbed: false, scale }, [s.normal(s.heads()), s.normal(kv), s.normal(shared)])
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

pub(super) static SHARED_KEY: Spec = row(
    "shared_key",
    &[float("x", "batch seq shared"), f32("table", "table columns"), u32("starts", "batch seq")],
    &[float("y", "batch seq shared")],
    |batch| {
        let of = |inverse, inputs: &[_]| sample(Op::SharedKey { inverse }, inputs);
        let both = |(s, rope): (Shapes, usize)| {
            let columns = || Dim::new(Axis::HeadDim, rope);
            let inputs = [s.normal(columns()), normal([s.s(), columns()]), s.starts()];
            [false, true]
                .into_iter()
                .flat_map(move |inverse| (1..=3).map(|n| of(inverse, &inputs[..n])).collect::<Vec<_>>())
        };
        with_parts(sizes(batch).into_iter().flat_map(both).collect(), 2)
    },
)
.optional(2)
.splits(&["batch", "seq"])
// All ranks that have heads of a position read it.
.same_over_tp(&["seq"])
.numbers("seq")
.product()
.shape(|op, _, dims| {
    let (rope, given) = (dims.size("shared"), dims.get("columns").is_some());
    if !rope.is_multiple_of(2) || given && (dims.size("columns") != rope || dims.size("table") < dims.size("seq")) {
        let [rows, columns, seq] = ["table", "columns", "seq"].map(|name| dims.size(name));
        return Err(op.refuse(format!("a table of {rows} × {columns} for {seq} keys of {rope} elements")));
    }
    Ok(())
});

/// Binds what a latent expands to and packed K·V: this many heads, elements of K without position, of these with RoPE, and of V.
fn keys_and_values(op: &Op, dims: &mut Dims, [heads, plain, rope, value]: [usize; 4]) -> Result<(), TypeError> {
    if heads == 0 || value == 0 || !rope.is_multiple_of(2) {
        let reason = format!("{heads} heads of {} elements, {rope} of them with RoPE, and {value} of V", plain + rope);
        return Err(op.refuse(reason));
    }
    let of = |unit| Section { axis: Axis::KvHeads, count: heads, unit };
    op.ask(dims, "expanded", Dim::grouped(Axis::KvHeads, heads, plain + value))?;
    op.ask(dims, "shared", Dim::new(Axis::HeadDim, rope))?;
    op.ask(dims, "kv", Dim::packed([of(plain + rope), of(value)]))?;
    let sizes = [
        ("heads", Axis::KvHeads, heads),
        ("head_dim", Axis::HeadDim, plain + rope),
        ("value_dim", Axis::HeadDim, value),
    ];
    for (name, axis, size) in sizes {
        dims.set(name, &Dim::new(axis, size));
    }
    Ok(())
}

pub(super) static LATENT_KEYS: Spec = row(
    "latent_keys",
    &[float("expanded", "… expanded"), float("shared", "… shared")],
    &[float("kv", "… kv")],
    |batch| {
        let of = |(s, rope): (Shapes, usize)| {
            let value = s.values().unit;
            let expanded = Dim::grouped(Axis::KvHeads, s.q().count, s.head_dim - rope + value);
            sample(Op::LatentKeys { value }, [s.normal(expanded), s.normal(Dim::new(Axis::HeadDim, rope))])
        };
        sizes(batch).map(of).into()
    },
)
.splits(&["…", "expanded kv"])
.shape(|op, _, dims| {
    attributes!(op, Op::LatentKeys { value });
    let (Some(expanded), rope) = (only(dims, "expanded"), dims.size("shared")) else {
        return Err(op.refuse("keys and values must be heads alone".into()));
    };
    if value > expanded.unit {
        return Err(op.refuse(format!("{value} elements of V of {} that a head expands to", expanded.unit)));
    }
    keys_and_values(op, dims, [expanded.count, expanded.unit - value, rope, value])
});

pub(super) static LATENT_KEYS_GRAD: Spec = row(
    "latent_keys_grad",
    &[float("dkv", "… kv")],
    &[float("dexpanded", "… expanded"), float("dshared", "… shared")],
    |batch| {
        let of = |(s, rope): (Shapes, usize)| {
            let kv = |unit| Section { axis: Axis::KvHeads, count: s.q().count, unit };
            sample(Op::LatentKeysGrad { rope }, [s.normal(Dim::packed([kv(s.head_dim), kv(s.values().unit)]))])
        };
        sizes(batch).map(of).into()
    },
)
.splits(&["…", "expanded kv"])
.linear()
.shape(|op, _, dims| {
    attributes!(op, Op::LatentKeysGrad { rope });
    match dims.get("kv").map_or(&[][..], |dim| &dim.sections) {
        &[k, v] if k.count == v.count && rope <= k.unit => {
            keys_and_values(op, dims, [k.count, k.unit - rope, rope, v.unit])
        }
        _ => Err(op.refuse("the packed dimension must be K and V".into())),
    }
});

/// The weight by which keys and values of heads expand from the latent: of every head the rows of its key, then those of its value.
const W: Operand = float("w", "expanded latent");

/// A matmul per head, of these terms and columns.
fn per_head(dims: &Dims, inner: &'static str, cols: &'static str) -> (Flops, Cost) {
    let flops = Flops::all(2 * dims.product("… heads") * dims.product(inner) * dims.product(cols));
    let one = Matmuls::of(dims, "…", cols, inner);
    (flops, Cost::Matmul(Matmuls { calls: dims.size("heads") as u64, ..one }))
}

pub(super) static ABSORBED_LATENT_HEADS: Spec = row(
    "absorbed_latent_heads",
    &[float("q", "… q"), W, float("c", "… latent"), float("shared", "… shared")],
    &[float("qkv", "… qkv")],
    |batch| {
        let of =
            |((seq, heads, plain, rope, value, rank), scale): ((usize, usize, usize, usize, usize, usize), f32)| {
                let s = Shapes::sized(batch, seq, plain + rope);
                let (q, latent) = (Dim::grouped(Axis::Heads, heads, plain + rope), Dim::new(Axis::Latent, rank));
                let w = normal([Dim::grouped(Axis::KvHeads, heads, plain + value), latent.clone()]);
                let inputs = [s.normal(q), w, s.normal(latent), s.normal(Dim::new(Axis::HeadDim, rope))];
                sample(Op::LatentHeads { absorbed: true, scale }, inputs)
            };
        of_heads().into_iter().zip([1.0, 1.5, 1.0, 0.75, 1.0]).map(of).collect()
    },
)
.splits(&["…", "q expanded qkv"])
.shape(|op, _, dims| {
    let (Some(q), Some(w), rank) = (only(dims, "q"), only(dims, "expanded"), dims.size("latent")) else {
        return Err(op.refuse("queries and the weight of keys and values must be heads alone".into()));
    };
    let rope = dims.size("shared");
    let plain = q.unit.saturating_sub(rope);
    let value = w.unit.saturating_sub(plain);
    if rope >= q.unit || value == 0 || q.count == 0 || !rope.is_multiple_of(2) {
        let reason =
            format!("{} heads of {} elements, {rope} of them with RoPE, and rows of {}", q.count, q.unit, w.unit);
        return Err(op.refuse(reason));
    }
    op.ask(dims, "q", Dim::grouped(Axis::Heads, q.count, q.unit))?;
    op.ask(dims, "expanded", Dim::grouped(Axis::KvHeads, q.count, w.unit))?;
    op.ask(dims, "latent", Dim::new(Axis::Latent, rank))?;
    op.ask(dims, "shared", Dim::new(Axis::HeadDim, rope))?;
    let key = |unit| Section { axis: Axis::KvHeads, count: 1, unit };
    let queries = Section { axis: Axis::Heads, count: q.count, unit: rope + rank };
    op.ask(dims, "qkv", Dim::packed([queries, key(rope), key(rank)]))?;
    let sizes = [("heads", Axis::Heads, q.count), ("plain", Axis::HeadDim, plain), ("row", Axis::HeadDim, w.unit)];
    for (name, axis, size) in sizes {
        dims.set(name, &Dim::new(axis, size));
    }
    Ok(())
})
.flops(|_, dims, _| per_head(dims, "plain", "latent").0)
.multiplies(&[0, 1], |_, dims, _| per_head(dims, "plain", "latent").1);

/// Positions, heads, elements of a head of Q without position and with RoPE, of one of V, and of the latent: odd sizes; sizes of which a tile is
/// whole, in one tile and across several; one position, as decoding has it, at the sizes of DeepSeek's models too.
fn of_heads() -> [(usize, usize, usize, usize, usize, usize); 5] {
    [
        (60, 3, 5, 6, 7, 11),
        (60, 2, 32, 16, 32, 64),
        (70, 2, 48, 16, 80, 160),
        (1, 4, 10, 6, 12, 20),
        (1, 2, 128, 64, 128, 512),
    ]
}

pub(super) static LATENT_VALUES: Spec =
    row("latent_values", &[float("x", "… summed"), W], &[float("y", "… values")], |batch| {
        let of = |(seq, heads, plain, _, value, rank)| {
            let s = Shapes::sized(batch, seq, rank);
            let w = normal([Dim::grouped(Axis::KvHeads, heads, plain + value), Dim::new(Axis::Latent, rank)]);
            sample(Op::LatentValues { value }, [s.normal(Dim::grouped(Axis::Heads, heads, rank)), w])
        };
        of_heads().map(of).into()
    })
    .splits(&["…", "summed expanded values"])
    .shape(|op, _, dims| {
        attributes!(op, Op::LatentValues { value });
        let (Some(x), Some(w), rank) = (only(dims, "summed"), only(dims, "expanded"), dims.size("latent")) else {
            return Err(op.refuse("latents and the weight of keys and values must be heads alone".into()));
        };
        if value == 0 || value > w.unit || x.unit != rank {
            return Err(op.refuse(format!("{value} rows of {}, latents of {} elements for {rank}", w.unit, x.unit)));
        }
        op.ask(dims, "expanded", Dim::grouped(Axis::KvHeads, x.count, w.unit))?;
        op.ask(dims, "latent", Dim::new(Axis::Latent, rank))?;
        op.ask(dims, "values", Dim::grouped(Axis::Heads, x.count, value))?;
        let sizes =
            [("heads", Axis::Heads, x.count), ("value_dim", Axis::HeadDim, value), ("row", Axis::HeadDim, w.unit)];
        for (name, axis, size) in sizes {
            dims.set(name, &Dim::new(axis, size));
        }
        Ok(())
    })
    .flops(|_, dims, _| per_head(dims, "latent", "value_dim").0)
    .multiplies(&[0, 1], |_, dims, _| per_head(dims, "latent", "value_dim").1);
