//! Rows of a table by token, and their gradient.

use super::row::{Spec, accumulator, float, row, u32};
use super::sample::{Draw, Shapes, embed, normal, sample, vocab};
use super::{Cost, Op, Saved::Input, Saved::Output, attributes};
use crate::{Axis, Dim};

pub(super) static EMBEDDING: Spec =
    row("embedding", &[u32("tokens", "bs"), float("table", "vd")], &[float("x", "bsd")], |batch| {
        let ids = Shapes::new(batch).ids();
        vec![sample(Op::Embedding, [(ids, Draw::Below(50)), normal([vocab(), embed()])])]
    })
    .gradient(&[Input(0)])
    .splits(&["b", "s", "v"])
    .numbers('v')
    // Rows of the table that tokens choose, not all of it.
    .cost(|_, _, _| Cost::Rows { of: Output(0), times: 2 });

pub(super) static EMBEDDING_GRAD: Spec =
    row("embedding_grad", &[float("dx", "bsd"), u32("tokens", "bs")], &[accumulator("dtable", "vd")], |batch| {
        let s = Shapes::new(batch);
        vec![sample(Op::EmbeddingGrad { vocab: 50 }, [s.normal(embed()), (s.ids(), Draw::Below(50))])]
    })
    .sums(0)
    .splits(&["b", "s", "v"])
    .numbers('v')
    .local(|op, outputs| match &outputs[0] {
        Some(table) => Op::EmbeddingGrad { vocab: table.dims[0].size() },
        None => *op,
    })
    .shape(|op, _, dims| {
        attributes!(op, Op::EmbeddingGrad { vocab });
        dims.set('v', &Dim::new(Axis::Vocab, vocab));
        Ok(())
    })
    .cost(|_, _, _| Cost::Rows { of: Input(0), times: 3 });
