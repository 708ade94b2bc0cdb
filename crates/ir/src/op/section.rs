//! Sections of packed dimensions: taken out, and put side by side.

use super::collective::{all, last};
use super::row::{Spec, f32, float, row};
use super::sample::{Shapes, embed, ffn, normal, sample};
use super::{Op, attributes};
use crate::{Axes, Dim, Placement};

pub(super) static SLICE: Spec = row("slice", &[float("x", "… packed")], &[float("y", "… sections")], |batch| {
    let sections = [(0, 1), (1, 2), (2, 1)];
    let of = |(s, (first, count)): (Shapes, _)| sample(Op::Slice { first, count }, [s.normal(s.qkv())]);
    Shapes::any_leading(batch).into_iter().zip(sections).map(of).collect()
})
.gradient(&[])
.linear()
.splits(&["…", "packed sections"])
.shape(|op, _, dims| {
    attributes!(op, Op::Slice { first, count });
    let sections = dims.get("packed").map(|p| p.sections.clone()).unwrap_or_default();
    match sections.get(first..first + count).filter(|sections| !sections.is_empty()) {
        Some(sections) => op.ask(dims, "sections", Dim::packed(sections)),
        None => Err(op.refuse(format!("{count} sections from {first} on, of {}", sections.len()))),
    }
});

pub(super) static CONCAT: Spec = row("concat", &[float("part", "… ?")], &[float("whole", "… packed")], |batch| {
    let of = |s: Shapes| sample(Op::Concat, [s.normal(s.heads()), s.normal(s.qkv()), s.normal(ffn())]);
    Shapes::any_leading(batch).map(of).into()
})
.variadic()
.gradient(&[])
.linear()
.splits(&["…", "? packed"])
.shape(|op, inputs, dims| {
    let sections = inputs.iter().filter_map(|part| part.dims.last()).flat_map(|dim| dim.sections.clone());
    op.ask(dims, "packed", Dim::packed(sections.collect::<Vec<_>>()))
});

pub(super) static PART: Spec = row("part", &[f32("whole", "*")], &[f32("part", "*")], |_| {
    vec![sample(Op::Part { over: Axes::NONE, dim: 1 }, [normal([ffn(), embed()])])]
})
.reshards(|op, before| {
    attributes!(op, Op::Part { over, dim });
    let fits = all(before, over, Placement::Replicated) && last(before, over, Some(dim));
    fits.then(|| before.with(over, Placement::Split(dim)))
});
