//! Heads in parts, as an all-to-all of context-parallel ranks takes and gives them (Ulysses).
//!
//! Blocks are `acbw`: `a` the parts of the heads, one to a rank along cp, `c` positions, `b` sequences, and `w` what a part has of every section. A
//! rank makes all blocks of its positions; an all-to-all makes of them the block of its heads at all positions, in the order of ranks.

use super::row::{ShapeRule, Spec, float, row};
use super::sample::{Draw, Shapes, normal, sample};
use super::{Dims, Op, TypeError, attributes};
use crate::{Axis, Dim, Section, Span, TensorType};

/// Most sections of a packed dimension that kernels take: Q, K and V.
pub const MOST_SECTIONS: usize = 3;

/// The position that stands in a row where `rows` positions come in the parts of so many ranks, in zig-zag order.
pub fn position_in_ranks(row: usize, rows: usize, ranks: usize) -> usize {
    let chunk = rows / (2 * ranks);
    let rank = row / (2 * chunk);
    let span = Span { first: rank * chunk, count: chunk, then: (2 * ranks - 1 - rank) * chunk };
    span.entry(row % (2 * chunk))
}

/// What is the same in both directions: every rank has two equal chunks of positions.
fn chunks(op: &Op, dims: &Dims, rows: char, ranks: usize) -> Result<(), TypeError> {
    let (rows, sections) = (dims.size(rows), dims.get('w').map_or(0, |w| w.sections.len()));
    if ranks == 0 || rows == 0 || !rows.is_multiple_of(2 * ranks) {
        return Err(op.refuse(format!("{rows} positions of {ranks} ranks, which have two equal chunks each")));
    }
    match (1..=MOST_SECTIONS).contains(&sections) {
        true => Ok(()),
        false => Err(op.refuse(format!("{sections} sections where there may be 1 to {MOST_SECTIONS}"))),
    }
}

/// The same sections with other counts.
fn counted(dims: &Dims, letter: char, count: impl Fn(usize) -> usize) -> Dim {
    let sections = dims.get(letter).map(|dim| dim.sections.clone()).unwrap_or_default();
    Dim::packed(sections.into_iter().map(|s| Section { count: count(s.count), ..s }).collect::<Vec<_>>())
}

const SPLIT: ShapeRule = |op, _, dims| {
    attributes!(op, Op::SplitHeads { parts, ranks });
    let even = |s: &Section| parts > 0 && s.count.is_multiple_of(parts);
    if !dims.get('p').is_some_and(|p| p.sections.iter().all(even)) {
        return Err(op.refuse(format!("sections that do not come in {parts} equal parts")));
    }
    op.ask(dims, 'a', Dim::new(Axis::Parts, parts))?;
    op.ask(dims, 'c', Dim::new(Axis::Rows, dims.size('s')))?;
    op.ask(dims, 'w', counted(dims, 'p', |count| count / parts))?;
    chunks(op, dims, 's', ranks)
};

const JOIN: ShapeRule = |op, _, dims| {
    attributes!(op, Op::JoinHeads { ranks });
    let parts = dims.size('a');
    op.ask(dims, 's', Dim::new(Axis::Seq, dims.size('c')))?;
    op.ask(dims, 'p', counted(dims, 'w', |count| count * parts))?;
    chunks(op, dims, 'c', ranks)
};

/// What a context-parallel rank has before an all-to-all, and behind it.
const SAMPLES: [(usize, usize); 3] = [(2, 1), (1, 3), (2, 2)];

/// Features that are Q·K·V, or queries alone; once of a size that is moved in packs.
fn shapes(batch: usize) -> Vec<(Shapes, fn(&Shapes) -> Dim)> {
    let (qkv, heads): (fn(&Shapes) -> Dim, fn(&Shapes) -> Dim) = (Shapes::qkv, Shapes::heads);
    let odd = Shapes::sized(batch, 60, 5);
    vec![(Shapes::new(batch), qkv), (odd, qkv), (odd, heads), (Shapes::sized(batch, 24, 64), heads)]
}

pub(super) static SPLIT_HEADS: Spec =
    row("split_heads", &[float("x", "bsp")], &[float("blocks", "acbw")], |batch| {
        let all = shapes(batch).into_iter().flat_map(|shape| SAMPLES.map(|how| (shape, how)));
        all.map(|((s, dim), (parts, ranks))| sample(Op::SplitHeads { parts, ranks }, [s.normal(dim(&s))])).collect()
    })
    .splits(&["b", "sc", "pa", "pw"])
    .shape(SPLIT)
    .local(|op, outputs| {
        attributes!(op, Op::SplitHeads { parts, ranks });
        let here = outputs.first().and_then(|blocks| blocks.as_ref()).map_or(parts, |blocks| blocks.dims[0].size());
        Op::SplitHeads { parts: here, ranks }
    });

pub(super) static JOIN_HEADS: Spec =
    row("join_heads", &[float("blocks", "acbw")], &[float("x", "bsp")], |batch| {
        let all = shapes(batch).into_iter().flat_map(|shape| SAMPLES.map(|how| (shape, how)));
        let blocks = |((s, dim), (parts, ranks)): ((Shapes, fn(&Shapes) -> Dim), _)| {
            let (a, c) = (Dim::new(Axis::Parts, parts), Dim::new(Axis::Rows, s.seq));
            let of: (TensorType, Draw) = normal([a, c, s.b(), dim(&s)]);
            sample(Op::JoinHeads { ranks }, [of])
        };
        all.map(blocks).collect()
    })
    .splits(&["b", "sc", "pa", "pw"])
    .shape(JOIN);
