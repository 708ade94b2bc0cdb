//! Sharding of a tensor over the mesh: replicated, split along a dimension, cut flat into ranges, or partial sums.
//!
//! A sharding has a placement for every axis of the mesh. Several axes may split one dimension together, or cut
//! flat ranges together. What a collective makes of a sharding (`Sharding::after`), and which shardings go together
//! in other ops (`placements.rs`), is checked after every pass and in every program.
//!
//! What is split over cp is always in zig-zag order: of 2·cp chunks, index i has i and 2·cp − 1 − i, so that causal
//! attention is the same work on every rank (`blocks.rs`). Collectives over cp take and give the natural order;
//! parts along tp are inside of a chunk.

use crate::mesh::{Axes, Coordinates, Mesh, MeshAxis};
use crate::{Axis, Dim, Op, Section, TensorType, TypeError, dynamic8};

/// Placement of a tensor along one mesh axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Every rank has all of it.
    #[default]
    Replicated,
    /// Every rank has a part of this dimension, of each of its sections. Where a section has fewer entries than there are
    /// ranks, neighbours share one; where vocabulary entries do not divide, the last part is filled up with padding. Over
    /// [`MeshAxis::Cp`] parts are in zig-zag order, always: of `2·cp` equal chunks, index i has chunks i and 2·cp − 1 − i, so that
    /// causal attention is as much work on every rank.
    Split(usize),
    /// Every rank has a contiguous range of the elements, all equally long, the last filled up with padding.
    Flat,
    /// Every rank has a partial sum; the tensor is the sum over ranks.
    Partial,
}

/// Sharding of a tensor: its placement along each mesh axis. Several axes may split one dimension, and several may cut flat ranges:
/// parts then count over all of them, see [`Coordinates::index`]. Flat ranges are of what splits leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Sharding([Placement; MeshAxis::ALL.len()]);

/// Elements of a [`Placement::Flat`] range are a multiple of this, so that sums over blocks of as many elements do not depend on
/// where ranges end.
pub const FLAT_BLOCK: usize = 64;

/// From as many elements on, a range is whole blocks of 256 numbers, as moments in 8 bits have them.
const BLOCKED: usize = 4096;

/// Consecutive elements of a tensor that a rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where they start in the whole tensor.
    pub whole: usize,
    /// Where they start on the rank.
    pub local: usize,
    /// How many.
    pub len: usize,
}

/// Which entries of a dimension a part has: consecutive ones in one run, or in two where the order is zig-zag.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The first entry.
    pub first: usize,
    /// Entries of the first run.
    pub count: usize,
    /// The first entry after them.
    pub then: usize,
}

impl Span {
    /// Consecutive entries from 0 on.
    pub const ALL: Span = Span { first: 0, count: usize::MAX, then: 0 };

    /// Which entry stands at a place of the part.
    #[inline(always)]
    pub const fn entry(&self, at: usize) -> usize {
        if at < self.count { self.first + at } else { self.then + (at - self.count) }
    }

    /// Its runs as (first entry, place of that in the part, entries), where the part has `len` entries.
    pub fn runs(&self, len: usize) -> [Run; 2] {
        let count = self.count.min(len);
        let behind = Run { whole: self.then, local: count, len: len - count };
        [Run { whole: self.first, local: 0, len: count }, behind]
    }
}

impl std::fmt::Debug for Span {
    /// `8`, or `8+4, 20` where after four entries it goes on at 20.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.first)?;
        let goes_on = self.first.checked_add(self.count) == Some(self.then);
        if goes_on { Ok(()) } else { write!(f, "+{}, {}", self.count, self.then) }
    }
}

/// How ranks share out a dimension, and which of them is meant: over context-parallel ranks, those around and those inside
/// them.
#[derive(Clone, Copy)]
struct Shares {
    outer: (usize, usize),
    context: (usize, usize),
    inner: (usize, usize),
}

impl Shares {
    /// Of the rank at `at`, over these axes.
    fn new(over: Axes, mesh: &Mesh, at: Coordinates) -> Self {
        let part = |axes: Axes| (at.index(axes, mesh), mesh.size(axes));
        let of = |wanted: fn(&MeshAxis) -> bool| part(over.iter().filter(wanted).collect());
        Self {
            outer: of(|axis| *axis < MeshAxis::Cp),
            context: of(|axis| *axis == MeshAxis::Cp),
            inner: of(|axis| *axis > MeshAxis::Cp),
        }
    }

    fn parts(&self) -> usize {
        self.outer.1 * self.context.1 * self.inner.1
    }

    fn index(&self) -> usize {
        (self.outer.0 * self.context.1 + self.context.0) * self.inner.1 + self.inner.0
    }

    /// The share before this one in the order of the mesh.
    fn before(&self) -> Option<Self> {
        let index = self.index().checked_sub(1)?;
        let (context, inner) = (self.context.1, self.inner.1);
        Some(Self {
            outer: (index / inner / context, self.outer.1),
            context: (index / inner % context, context),
            inner: (index % inner, inner),
        })
    }

    /// Its entries of a section, padding included: where neighbours share some, or the last are padding, in one run.
    fn span(&self, section: Section) -> Span {
        let (index, parts) = (self.index(), self.parts());
        let count = part_count(section, parts);
        if self.context.1 == 1 {
            let first = if section.count < parts { index * section.count / parts } else { index * count };
            return Span { first, count, then: first + count };
        }
        let here = count * self.inner.1;
        debug_assert_eq!(section.count, count * parts, "context-parallel parts are equal");
        debug_assert!(here.is_multiple_of(2), "a context-parallel part is two chunks");
        let (chunk, (i, n)) = (here / 2, self.context);
        let base = self.outer.0 * here * n;
        let (before, behind) = (base + i * chunk, base + (2 * n - 1 - i) * chunk);
        // A part inside this one is contiguous here, and may have some of either chunk.
        let from = self.inner.0 * count;
        match chunk.checked_sub(from).filter(|rest| *rest > 0) {
            Some(rest) => Span {
                first: before + from,
                count: rest.min(count),
                then: if rest < count { behind } else { before + from + count },
            },
            None => Span { first: behind + from - chunk, count, then: behind + from - chunk + count },
        }
    }
}

/// Entries of a section on each of `of` ranks, padding included.
fn part_count(section: Section, of: usize) -> usize {
    section.count.div_ceil(of)
}

impl Sharding {
    /// Whole everywhere.
    pub const REPLICATED: Sharding = Sharding([Placement::Replicated; MeshAxis::ALL.len()]);

    /// The placement along one axis.
    pub fn over(&self, axis: MeshAxis) -> Placement {
        self.0[axis as usize]
    }

    /// The same with another placement along these axes.
    pub fn with(mut self, axes: impl Into<Axes>, placement: Placement) -> Self {
        axes.into().iter().for_each(|axis| self.0[axis as usize] = placement);
        self
    }

    /// The axes along which it is placed so.
    pub fn axes(&self, placement: Placement) -> Axes {
        MeshAxis::ALL.into_iter().filter(|axis| self.over(*axis) == placement).collect()
    }

    /// What an op that [only changes shardings](Op::reshards) makes of it.
    pub fn after(self, op: &Op) -> Result<Sharding, TypeError> {
        let refuse = |reason| TypeError { op: op.name(), reason };
        let Some(rule) = op.spec().reshards else {
            return Err(refuse("changes more than the sharding of tensors".into()));
        };
        let whole = if self == Sharding::REPLICATED { "whole everywhere" } else { "" };
        let reason = || format!("cannot be{} of a tensor that is {whole}{self}", op.attributes());
        rule(op, self).ok_or_else(|| refuse(reason()))
    }

    /// What it has beyond another: its placements along the axes where the two differ.
    pub fn beyond(self, other: Sharding) -> Self {
        let differs = |axis: &MeshAxis| self.over(*axis) != other.over(*axis);
        let axes = MeshAxis::ALL.into_iter().filter(differs);
        axes.fold(Sharding::REPLICATED, |sharding, axis| sharding.with(axis, self.over(axis)))
    }

    /// The same before flat ranges are cut.
    pub fn uncut(self) -> Self {
        self.with(self.axes(Placement::Flat), Placement::Replicated)
    }

    /// The shape that a rank has, padding included.
    pub fn local(&self, ty: &TensorType, mesh: &Mesh) -> TensorType {
        let mut ty = ty.clone();
        for (d, dim) in ty.dims.iter_mut().enumerate() {
            let parts = mesh.size(self.axes(Placement::Split(d)));
            dim.sections.iter_mut().for_each(|section| section.count = part_count(*section, parts));
        }
        let flat = self.axes(Placement::Flat);
        if !flat.is_empty() {
            // Of blocks as many as there are of the numbers' own range.
            let numbers = ty.dtype.numbers();
            ty.dims = vec![Dim::new(Axis::Flat, flat_len(ty.elements() * numbers, mesh.size(flat)) / numbers)];
        }
        ty
    }

    /// How many neighbours over the axes that split a dimension share entries of each of its sections: 1 where none do.
    pub fn sharers(&self, ty: &TensorType, dim: usize, mesh: &Mesh) -> Vec<usize> {
        let parts = mesh.size(self.axes(Placement::Split(dim)));
        ty.dims[dim].sections.iter().map(|s| (parts / s.count.max(1)).max(1)).collect()
    }

    /// Which entries of a dimension of one section each rank has, by index over the axes that split it.
    pub fn spans(&self, ty: &TensorType, dim: usize, mesh: &Mesh) -> Vec<Span> {
        let (section, over) = (ty.dims[dim].sections[0], self.axes(Placement::Split(dim)));
        let span = |index| {
            let span = Shares::new(over, mesh, Coordinates::default().with_index(over, mesh, index)).span(section);
            let Span { first, count, then } = span;
            Span { first: first * section.unit, count: count * section.unit, then: then * section.unit }
        };
        (0..mesh.size(over)).map(span).collect()
    }

    /// How many elements of the whole a rank has: without padding.
    pub fn held(&self, ty: &TensorType, mesh: &Mesh, at: Coordinates) -> usize {
        let extent = |(d, dim)| self.ranges(ranges, (d, dim), mesh, at).0.iter().map(|r| r.len).sum::<usize>();
        let all: usize = ty.dims.iter().enumerate().map(extent).product();
        let flat = self.axes(Placement::Flat);
        if flat.is_empty() {
            return all;
        }
        // Padding follows all elements, but where it is in an inner dimension.
        let inner = (1..ty.dims.len()).any(|d| !self.axes(Placement::Split(d)).is_empty());
        if inner && all < self.uncut().local(ty, mesh).elements() {
            return self.runs(ty, mesh, at).iter().map(|r| r.len).sum();
        }
        let len = self.local(ty, mesh).elements();
        all.saturating_sub(at.index(flat, mesh) * len).min(len)
    }

    /// The elements that a rank has, in order; padding is in no run.
    pub fn runs(&self, ty: &TensorType, mesh: &Mesh, at: Coordinates) -> Vec<Run> {
        self.runs_of(ty, mesh, at, ranges)
    }

    /// Whether a rank before this one on its stage has the same elements.
    pub fn repeats(&self, at: Coordinates) -> bool {
        self.axes(Placement::Replicated).within(Axes::STAGE).iter().any(|axis| at.get(axis) > 0)
    }

    /// The elements that a rank has and none before it on its stage, in order: over all ranks, every element once.
    pub fn first_runs(&self, ty: &TensorType, mesh: &Mesh, at: Coordinates) -> Vec<Run> {
        match self.repeats(at) {
            true => Vec::new(),
            false => self.runs_of(ty, mesh, at, first_ranges),
        }
    }

    /// The elements that a rank has of the ranges that `ranges` gives of split dimensions.
    fn runs_of(&self, ty: &TensorType, mesh: &Mesh, at: Coordinates, ranges: Ranges) -> Vec<Run> {
        // Ranges of each dimension as (start in the whole, start on the rank, length), and the rank's extent.
        let mut runs = vec![Run { whole: 0, local: 0, len: 1 }];
        for (d, dim) in ty.dims.iter().enumerate() {
            let (ranges, extent) = self.ranges(ranges, (d, dim), mesh, at);
            runs = nest(&runs, &ranges, dim.size(), extent);
        }
        let flat = self.axes(Placement::Flat);
        if !flat.is_empty() {
            let len = self.local(ty, mesh).elements();
            let from = at.index(flat, mesh) * len;
            runs = runs.into_iter().filter_map(|r| clip(r, from, from + len)).collect();
        }
        runs
    }

    /// What a rank has of one dimension, and how long it is there.
    fn ranges(&self, ranges: Ranges, (d, dim): (usize, &Dim), mesh: &Mesh, at: Coordinates) -> (Vec<Run>, usize) {
        let split = self.axes(Placement::Split(d));
        match split.is_empty() {
            true => (vec![Run { whole: 0, local: 0, len: dim.size() }], dim.size()),
            false => ranges(dim, Shares::new(split, mesh, at)),
        }
    }
}

/// What ranks gather of one section of a dimension: each gives this many elements of every row, and what they give stands one after
/// the other, in rank order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gathered {
    /// Where the section starts in a rank's part, in elements.
    pub part: usize,
    /// Where it starts in the whole.
    pub whole: usize,
    /// Rows.
    pub rows: usize,
    /// Elements of a row that a rank gives.
    pub elements: usize,
    /// Neighbours that have the same elements of the section: the first gives the first of as many shares, and so on.
    pub sharers: usize,
}

/// How the parts that ranks have of a dimension make up the whole; `None` where they do not.
pub fn gathered(part: &TensorType, whole: &TensorType, dim: usize, ranks: usize) -> Option<Vec<Gathered>> {
    let (mine, all) = (&part.dims.get(dim)?.sections, &whole.dims.get(dim)?.sections);
    let rows: usize = part.dims[..dim].iter().map(Dim::size).product();
    let inner: usize = part.dims[dim + 1..].iter().map(Dim::size).product();
    // Sections stand one after the other only where there is one row.
    if mine.len() != all.len() || (rows > 1 && mine.len() > 1) {
        return None;
    }
    let mut at = (0, 0);
    let piece = |(mine, all): (&Section, &Section)| {
        let sharers = (mine.count * ranks).checked_div(all.count).filter(|n| n * all.count == mine.count * ranks)?;
        let (held, given) = (mine.size() * inner, mine.size() * inner / sharers.max(1));
        let fits = mine.unit == all.unit && (sharers == 1 || mine.count == 1) && given * sharers == held;
        let piece = Gathered { part: at.0, whole: at.1, rows, elements: given, sharers };
        at = (at.0 + held, at.1 + all.size() * inner);
        fits.then_some(piece)
    };
    mine.iter().zip(all).map(piece).collect()
}

/// Elements of each of `ranges` flat ranges, padding included.
fn flat_len(elements: usize, ranges: usize) -> usize {
    let share = elements.div_ceil(ranges);
    share.next_multiple_of(if share < BLOCKED { FLAT_BLOCK } else { dynamic8::BLOCK })
}

/// Which ranges of a dimension a rank has, and how long the dimension is there.
type Ranges = fn(dim: &Dim, shares: Shares) -> (Vec<Run>, usize);

/// What a rank has of one dimension but for what the rank before it has too.
fn first_ranges(dim: &Dim, shares: Shares) -> (Vec<Run>, usize) {
    let (mut mine, extent) = ranges(dim, shares);
    if let Some(before) = shares.before() {
        // Neighbours share whole entries of a section, so they have them at the same place.
        let (before, _) = ranges(dim, before);
        mine.retain(|run| !before.contains(run));
    }
    (mine, extent)
}

/// What a rank has of one dimension, and how long it is there.
fn ranges(dim: &Dim, shares: Shares) -> (Vec<Run>, usize) {
    let (mut whole, mut local) = (0, 0);
    let mut result = Vec::new();
    for &section in &dim.sections {
        let count = part_count(section, shares.parts());
        for run in shares.span(section).runs(count) {
            let held = run.len.min(section.count.saturating_sub(run.whole)) * section.unit;
            if held > 0 {
                let (first, at) = (run.whole * section.unit, run.local * section.unit);
                result.push(Run { whole: whole + first, local: local + at, len: held });
            }
        }
        whole += section.size();
        local += count * section.unit;
    }
    (result, local)
}

/// Runs of rows times ranges of columns; a row has `whole` columns in the tensor and `local` on the rank.
fn nest(rows: &[Run], columns: &[Run], whole: usize, local: usize) -> Vec<Run> {
    let complete = columns.len() == 1 && columns[0].len == whole && whole == local;
    let mut result: Vec<Run> = Vec::new();
    for row in rows {
        if complete {
            result.push(Run { whole: row.whole * whole, local: row.local * local, len: row.len * whole });
            continue;
        }
        for i in 0..row.len {
            for c in columns {
                let (w, l) = ((row.whole + i) * whole + c.whole, (row.local + i) * local + c.local);
                result.push(Run { whole: w, local: l, len: c.len });
            }
        }
    }
    result
}

/// The part of a run that lies in a range of the rank's elements, counted from the start of the range.
fn clip(run: Run, from: usize, to: usize) -> Option<Run> {
    let (start, end) = (run.local.max(from), (run.local + run.len).min(to));
    (start < end).then(|| Run { whole: run.whole + (start - run.local), local: start - from, len: end - start })
}

impl std::fmt::Display for Sharding {
    /// `dp: split batch, tp: partial`, nothing where every rank has all of it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut first = true;
        for axis in MeshAxis::ALL {
            let text = match self.over(axis) {
                Placement::Replicated => continue,
                Placement::Split(dim) => format!("split {dim}"),
                Placement::Flat => "flat".into(),
                Placement::Partial => "partial".into(),
            };
            write!(f, "{}{}: {text}", if first { "" } else { ", " }, axis.name())?;
            first = false;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
