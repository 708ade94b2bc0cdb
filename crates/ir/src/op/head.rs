//! The output head and its loss: whole, in chunks, and in parts of the vocabulary.
//!
//! A target may be `IGNORED_TARGET`: the tokens of a prompt have neither loss nor gradient. The host knows how many
//! targets count.

use super::row::{Spec, accumulator, f32, f64, float, row, u32};
use super::sample::{Draw, Shapes, embed, floats, normal, sample, scalars, vocab};
use super::{Cost, Dims, Flops, Matmuls, Op, Rows, Saved::Input, Saved::Output, attributes};
use crate::{Axis, Dim, TensorType};

pub(super) static CROSS_ENTROPY: Spec = row(
    "cross_entropy",
    &[float("logits", "batch seq vocab"), u32("targets", "batch seq")],
    &[f64("loss", "batch"), f32("lse", "batch seq")],
    |batch| {
        let s = Shapes::new(batch);
        vec![sample(Op::CrossEntropy, [s.normal(vocab()), (s.ids(), Draw::Targets(50))])]
    },
)
.gradient(&[Input(0), Input(1), Output(1)])
.splits(&["batch", "seq"]);

pub(super) static CROSS_ENTROPY_GRAD: Spec = row(
    "cross_entropy_grad",
    &[float("logits", "batch seq vocab"), u32("targets", "batch seq"), f32("lse", "batch seq")],
    &[float("dlogits", "batch seq vocab")],
    |batch| {
        let s = Shapes::new(batch);
        let lse = (s.row(), Draw::Of(Op::CrossEntropy, 1, &[0, 1]));
        vec![sample(Op::CrossEntropyGrad { weight: 0.75 }, [s.normal(vocab()), (s.ids(), Draw::Targets(50)), lse])]
    },
)
.in_place(&[(0, 0)])
.splits(&["batch", "seq"]);

/// This many matmuls, chunk by chunk of rows. Every chunk reads the weights, and adds to their gradient; the last may have fewer rows.
fn chunked(dims: &Dims, matmuls: u64) -> Cost {
    let [tokens, cols, inner, rows] = ["batch seq", "vocab", "inputs", "rows"].map(|names| dims.product(names) as u64);
    let chunks = tokens.div_ceil(rows.clamp(1, tokens.max(1))).max(1);
    Cost::Matmul(Matmuls {
        calls: matmuls * chunks,
        gradients: if matmuls > 2 { cols * inner } else { 0 },
        logits: tokens * cols,
        reread: (chunks - 1) * matmuls * cols * inner,
        ..Matmuls::one(tokens.div_ceil(chunks), cols, inner)
    })
}

/// The matmul of the logits, and one for each gradient that is used.
fn matmuls(wanted: &[bool]) -> u64 {
    1 + wanted.iter().skip(1).filter(|w| **w).count() as u64
}

pub(super) static LINEAR_CROSS_ENTROPY: Spec = row(
    "linear_cross_entropy",
    &[
        float("x", "batch seq inputs"),
        float("w", "vocab inputs"),
        u32("targets", "batch seq"),
        f32("scalars", "scalars"),
    ],
    &[f64("loss", "batch"), float("dx", "batch seq inputs"), accumulator("dw", "vocab inputs")],
    |batch| {
        // Enough columns for several blocks of a kernel that cuts the vocabulary.
        let s = Shapes::new(batch);
        let table = floats([Dim::new(Axis::Vocab, 400), embed()]);
        let inputs = [s.normal(embed()), (table, Draw::Quarter), (s.ids(), Draw::Targets(400)), scalars()];
        let op = Op::LinearCrossEntropy { score: false, rows: 23 };
        vec![sample(op, &inputs[..3]), sample(op, inputs)]
    },
)
.optional(1)
.sums(2)
.gradient(&[Output(1), Output(2)])
.splits(&["batch", "seq"])
.shape(|op, _, dims| {
    attributes!(op, Op::LinearCrossEntropy { rows, .. });
    dims.set("rows", &Dim::new(Axis::Seq, rows));
    Ok(())
})
.flops(|_, dims, wanted| Flops::all(2 * u128::from(matmuls(wanted)) * dims.product("batch seq inputs vocab")))
.multiplies(&[0, 1], |_, dims, call| chunked(dims, matmuls(call.wanted)));

/// One number of each position.
fn one() -> Dim {
    Dim::new(Axis::Scalar, 1)
}

pub(super) static LINEAR_SCORE: Spec = row(
    "linear_score",
    &[float("x", "batch seq inputs"), float("w", "vocab inputs"), u32("targets", "batch seq")],
    &[f64("loss", "batch"), f32("misses", "batch seq one")],
    |batch| {
        // Small whole numbers, so that logits are exact in every type and many are equal.
        let s = Shapes::new(batch);
        let bits = |ty| (ty, Draw::Between(0, 1));
        let of = |tokens| {
            let table = bits(floats([Dim::new(Axis::Vocab, tokens), embed()]));
            sample(
                Op::LinearCrossEntropy { score: true, rows: 23 },
                [bits(s.act(embed())), table, (s.ids(), Draw::Choices)],
            )
        };
        vec![of(400), of(7)]
    },
)
.splits(&["batch", "seq"])
.shape(|op, _, dims| {
    attributes!(op, Op::LinearCrossEntropy { rows, .. });
    dims.set("rows", &Dim::new(Axis::Seq, rows));
    dims.set("one", &one());
    Ok(())
})
.flops(|_, dims, _| Flops::all(2 * dims.product("batch seq inputs vocab")))
.multiplies(&[0, 1], |_, dims, _| chunked(dims, 1));

/// Some positions of one rank.
const CHUNK: Rows = Rows { first: 7, count: 23, ranks: 1 };

fn statistics(rows: usize) -> TensorType {
    floats([Dim::new(Axis::Parts, 1), Dim::new(Axis::Seq, rows), Dim::new(Axis::Scalar, 3)])
}

pub(super) static VOCAB_LOGITS: Spec = row(
    "vocab_logits",
    &[float("x", "batch seq inputs"), float("w", "vocab inputs"), u32("targets", "batch seq")],
    &[f32("logits", "rows vocab"), f32("statistics", "parts rows statistics")],
    |batch| {
        let s = Shapes::new(batch);
        let inputs = [s.normal(embed()), normal([vocab(), embed()]), (s.ids(), Draw::Below(50))];
        vec![sample(Op::VocabLogits { rows: CHUNK, parts: 1 }, inputs)]
    },
)
.splits(&["batch rows", "seq rows", "vocab parts"])
.same_over_tp(&["seq rows"])
.numbers("vocab")
.local(|op, _| {
    attributes!(op, Op::VocabLogits { rows, .. });
    Op::VocabLogits { rows: rows.of_one_rank(), parts: 1 }
})
.shape(|op, _, dims| {
    attributes!(op, Op::VocabLogits { rows, parts });
    dims.set("rows", &Dim::new(Axis::Seq, rows.count * rows.ranks));
    dims.set("parts", &Dim::new(Axis::Parts, parts));
    dims.set("statistics", &Dim::new(Axis::Scalar, 3));
    Ok(())
})
.flops(|_, dims, _| Flops::all(2 * dims.product("rows inputs vocab")))
.multiplies(&[0, 1], |_, dims, _| {
    let of = Matmuls::of(dims, "rows", "vocab", "inputs");
    Cost::Matmul(Matmuls { logits: of.rows * of.cols, ..of })
});

pub(super) static VOCAB_LOSS: Spec = row(
    "vocab_loss",
    &[f32("statistics", "parts ? statistics"), u32("targets", "batch seq")],
    &[f64("loss", "batch")],
    |batch| {
        let s = Shapes::new(batch);
        let chunk = |rows| (statistics(rows), Draw::Positive);
        let rest = s.batch * s.seq - CHUNK.count;
        vec![sample(Op::VocabLoss, [chunk(CHUNK.count), chunk(rest), (s.ids(), Draw::Targets(50))])]
    },
)
.variadic()
.splits(&["batch ?", "seq ?"]);

pub(super) static VOCAB_MISSES: Spec = row(
    "vocab_misses",
    &[f32("logits", "rows vocab"), f32("statistics", "parts rows statistics"), u32("targets", "batch seq")],
    &[f32("misses", "rows one")],
    |batch| {
        // The target's logit, which is the last of the statistics, is as large as the largest logits, or next to that.
        let logits = (floats([Dim::new(Axis::Seq, CHUNK.count), vocab()]), Draw::Between(0, 9));
        let statistics = (statistics(CHUNK.count), Draw::Between(8, 10));
        let targets = (Shapes::new(batch).ids(), Draw::Targets(50));
        vec![sample(Op::VocabMisses { rows: CHUNK }, [logits, statistics, targets])]
    },
)
.splits(&["batch rows", "seq rows", "vocab"])
.same_over_tp(&["seq rows"])
.numbers("vocab")
.chunks()
.local(|op, _| {
    attributes!(op, Op::VocabMisses { rows });
    Op::VocabMisses { rows: rows.of_one_rank() }
})
.shape(|_, _, dims| {
    dims.set("one", &one());
    Ok(())
});

pub(super) static VOCAB_GRAD: Spec = row(
    "vocab_grad",
    &[
        f32("logits", "rows vocab"),
        f32("statistics", "parts rows statistics"),
        float("x", "batch seq inputs"),
        float("w", "vocab inputs"),
        u32("targets", "batch seq"),
        f32("scalars", "scalars"),
    ],
    &[float("dx", "rows inputs"), accumulator("dw", "vocab inputs")],
    |batch| {
        let s = Shapes::new(batch);
        let of = |output| Draw::Of(Op::VocabLogits { rows: CHUNK, parts: 1 }, output, &[2, 3, 4]);
        let inputs = [
            (floats([Dim::new(Axis::Seq, CHUNK.count), vocab()]), of(0)),
            (statistics(CHUNK.count), of(1)),
            s.normal(embed()),
            normal([vocab(), embed()]),
            (s.ids(), Draw::Targets(50)),
            scalars(),
        ];
        let op = Op::VocabGrad { rows: CHUNK };
        vec![sample(op, &inputs[..5]), sample(op, inputs)]
    },
)
.optional(1)
.sums(1)
.splits(&["batch rows", "seq rows", "vocab"])
.same_over_tp(&["seq rows"])
.numbers("vocab")
.chunks()
.local(|op, _| {
    attributes!(op, Op::VocabGrad { rows });
    Op::VocabGrad { rows: rows.of_one_rank() }
})
.flops(|_, dims, wanted| {
    Flops::all(2 * wanted.iter().filter(|w| **w).count() as u128 * dims.product("rows inputs vocab"))
})
.multiplies(&[2, 3], |_, dims, call| {
    let of = Matmuls::of(dims, "rows", "vocab", "inputs");
    let calls = call.wanted.iter().filter(|w| **w).count() as u64;
    Cost::Matmul(Matmuls { calls, gradients: of.cols * of.inner, ..of })
});

pub(super) static JOIN_ROWS: Spec = row(
    "join_rows",
    &[float("part", "? inputs"), u32("targets", "batch seq")],
    &[float("joined", "batch seq inputs")],
    |batch| {
        let s = Shapes::new(batch);
        let chunk = |rows| normal([Dim::new(Axis::Seq, rows), embed()]);
        let rest = s.batch * s.seq - CHUNK.count;
        vec![sample(Op::JoinRows, [chunk(CHUNK.count), chunk(rest), (s.ids(), Draw::Below(50))])]
    },
)
.variadic()
.splits(&["batch ?", "seq ?"])
.keeps_partial();
