//! Heads in parts, as an all-to-all of context-parallel ranks takes and gives them (Ulysses).
//!
//! Blocks are `parts rows batch part`: the parts of the heads, one to a rank along cp, positions, sequences, and what a part has of every section. A
//! rank makes all blocks of its positions; an all-to-all makes of them the block of its heads at all positions, in the order of ranks.
//!
//! The copies around the all-to-all put positions from zig-zag order into the order of ranks and back; attention in
//! between is that of one rank.

use super::row::{ShapeRule, Spec, float, row};
use super::sample::{Shapes, normal, sample};
use super::{Dims, Op, TypeError, attributes};
use crate::{Axis, Dim, Section, Span};

/// Most sections of a packed dimension that kernels take: Q, K and V.
pub const MOST_SECTIONS: usize = 3;

/// The position that stands in a row where `rows` positions come in the parts of this many ranks, in zig-zag order.
pub fn position_in_ranks(row: usize, rows: usize, ranks: usize) -> usize {
    let chunk = rows / (2 * ranks);
    let rank = row / (2 * chunk);
    let span = Span { first: rank * chunk, count: chunk, then: (2 * ranks - 1 - rank) * chunk };
    span.entry(row % (2 * chunk))
}

/// What is the same in both directions: every rank has two equal chunks of positions.
fn chunks(op: &Op, dims: &Dims, rows: &str, ranks: usize) -> Result<(), TypeError> {
    let (rows, sections) = (dims.size(rows), dims.get("part").map_or(0, |w| w.sections.len()));
    if ranks == 0 || rows == 0 || !rows.is_multiple_of(2 * ranks) {
        return Err(op.refuse(format!("{rows} positions of {ranks} ranks, which have two equal chunks each")));
    }
    match (1..=MOST_SECTIONS).contains(&sections) {
        true => Ok(()),
        false => Err(op.refuse(format!("{sections} sections where there may be 1 to {MOST_SECTIONS}"))),
    }
}

/// The same sections with other counts.
fn counted(dims: &Dims, name: &str, count: impl Fn(usize) -> usize) -> Dim {
    let sections = dims.get(name).map(|dim| dim.sections.clone()).unwrap_or_default();
    Dim::packed(sections.into_iter().map(|s| Section { count: count(s.count), ..s }).collect::<Vec<_>>())
}

const SPLIT: ShapeRule = |op, _, dims| {
    attributes!(op, Op::SplitHeads { parts, ranks });
    let even = |s: &Section| parts > 0 && s.count.is_multiple_of(parts);
    if !dims.get("packed").is_some_and(|p| p.sections.iter().all(even)) {
        return Err(op.refuse(format!("sections that do not come in {parts} equal parts")));
    }
    op.ask(dims, "parts", Dim::new(Axis::Parts, parts))?;
    op.ask(dims, "rows", Dim::new(Axis::Rows, dims.size("seq")))?;
    op.ask(dims, "part", counted(dims, "packed", |count| count / parts))?;
    chunks(op, dims, "seq", ranks)
};

const JOIN: ShapeRule = |op, _, dims| {
    attributes!(op, Op::JoinHeads { ranks });
    let parts = dims.size("parts");
    op.ask(dims, "seq", Dim::new(Axis::Seq, dims.size("rows")))?;
    op.ask(dims, "packed", counted(dims, "part", |count| count * parts))?;
    chunks(op, dims, "rows", ranks)
};

/// Shapes, features and (parts, ranks): what a context-parallel rank has before an all-to-all, and after it. Features are Q·K·V or queries
/// alone, once of a size that is moved in packs.
fn calls(batch: usize) -> Vec<(Shapes, Dim, (usize, usize))> {
    let (odd, even) = (Shapes::sized(batch, 60, 5), Shapes::sized(batch, 24, 64));
    let features = [(odd, odd.qkv()), (odd, odd.heads()), (even, even.qkv())];
    let how = [(2, 1), (1, 3), (2, 2)];
    features.into_iter().flat_map(|(s, dim)| how.map(|how| (s, dim.clone(), how))).collect()
}

pub(super) static SPLIT_HEADS: Spec =
    row("split_heads", &[float("x", "batch seq packed")], &[float("blocks", "parts rows batch part")], |batch| {
        let of = |(s, dim, (parts, ranks)): (Shapes, Dim, _)| sample(Op::SplitHeads { parts, ranks }, [s.normal(dim)]);
        calls(batch).into_iter().map(of).collect()
    })
    .splits(&["batch", "seq rows", "packed parts", "packed part"])
    .same_over_tp(&["seq rows", "packed parts"])
    .shape(SPLIT)
    .local(|op, outputs| {
        attributes!(op, Op::SplitHeads { parts, ranks });
        let here = outputs.first().and_then(|blocks| blocks.as_ref()).map_or(parts, |blocks| blocks.dims[0].size());
        Op::SplitHeads { parts: here, ranks }
    });

pub(super) static JOIN_HEADS: Spec =
    row("join_heads", &[float("blocks", "parts rows batch part")], &[float("x", "batch seq packed")], |batch| {
        let of = |(s, dim, (parts, ranks)): (Shapes, Dim, _)| {
            let (a, c) = (Dim::new(Axis::Parts, parts), Dim::new(Axis::Rows, s.seq));
            sample(Op::JoinHeads { ranks }, [normal([a, c, s.b(), dim])])
        };
        calls(batch).into_iter().map(of).collect()
    })
    .splits(&["batch", "seq rows", "packed parts", "packed part"])
    .same_over_tp(&["seq rows", "packed parts"])
    .shape(JOIN);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    #[test]
    fn positions_come_in_the_parts_of_ranks_an_early_and_a_late_chunk_each() {
        let order = |rows, ranks| (0..rows).map(|row| position_in_ranks(row, rows, ranks)).collect::<Vec<_>>();
        assert_eq!(order(8, 1), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(order(8, 2), [0, 1, 6, 7, 2, 3, 4, 5]);
        assert_eq!(order(6, 3), [0, 5, 1, 4, 2, 3]);
    }

    #[test]
    fn heads_come_in_equal_parts_of_every_section_and_positions_in_two_chunks_of_every_rank() {
        let head = |axis, count| Section { axis, count, unit: 4 };
        let kv = head(Axis::KvHeads, 2);
        let packed = Dim::packed([head(Axis::Heads, 6), kv, kv]);
        let x = crate::TensorType::new(DType::F32, [Dim::new(Axis::Batch, 3), Dim::new(Axis::Seq, 8), packed]);
        let split = |parts, ranks| Op::SplitHeads { parts, ranks }.infer(&[&x]).map(|mut y| y.remove(0));
        let blocks = split(2, 1).unwrap();
        assert_eq!(blocks.to_string(), "f32[parts:2, rows:8, batch:3, heads:3×4+kv_heads:1×4+kv_heads:1×4]");
        assert_eq!(Op::JoinHeads { ranks: 1 }.infer(&[&blocks]).unwrap(), std::slice::from_ref(&x));
        let refused = |parts, ranks| split(parts, ranks).unwrap_err().to_string();
        assert_eq!(refused(3, 1), "split_heads: sections that do not come in 3 equal parts");
        assert_eq!(refused(2, 3), "split_heads: 8 positions of 3 ranks, which have two equal chunks each");
    }
}
