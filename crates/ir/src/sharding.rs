//! Sharding of a tensor over the mesh: replicated, split along a dimension, cut flat into ranges, or partial sums.

use crate::mesh::{Axes, Coordinates, Mesh, MeshAxis};
use crate::{Axis, Dim, Op, Section, TensorType, TypeError};

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
    /// The first entry behind them.
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
    /// `8`, or `8+4, 20` where behind four entries it goes on at 20.
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
            ty.dims = vec![Dim::new(Axis::Flat, flat_len(ty.elements(), mesh.size(flat)))];
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
        // Padding stands behind all elements, but where it is in an inner dimension.
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

/// What ranks gather of one section of a dimension: each gives so many elements of every row, and what they give stands one behind
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
    // Sections stand one behind the other only where there is one row.
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
    elements.div_ceil(ranges).next_multiple_of(FLAT_BLOCK)
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
mod tests {
    use super::*;
    use crate::program::Offsets;
    use crate::{DType, counter};

    /// Where a dimension of one section is split, the table of offsets says where each rank's part of it starts.
    fn offsets_agree(ty: &TensorType, sharding: Sharding, mesh: Mesh) {
        for (d, dim) in ty.dims.iter().enumerate().filter(|(_, dim)| dim.sections.len() == 1) {
            let Some(offsets) = Offsets::new(ty, &sharding, d, &mesh) else { continue };
            let line = TensorType::new(DType::F32, [dim.clone()]);
            let split = Sharding::REPLICATED.with(offsets.over, Placement::Split(0));
            assert_eq!((offsets.parts.len(), offsets.whole), (mesh.size(offsets.over), dim.size()));
            for at in (0..mesh.ranks()).map(|rank| mesh.coordinates(rank)) {
                let span = offsets.parts[at.index(offsets.over, &mesh)];
                let mut has = vec![None; split.local(&line, &mesh).elements()];
                for run in split.runs(&line, &mesh, at) {
                    (0..run.len).for_each(|i| has[run.local + i] = Some(run.whole + i));
                }
                for (place, entry) in has.into_iter().enumerate() {
                    let expected = Some(span.entry(place)).filter(|entry| *entry < dim.size());
                    assert_eq!(entry, expected, "{sharding} of {ty} on {mesh}");
                }
            }
        }
    }

    /// Writes the index of every element through the runs of all ranks and checks that each rank's elements are where its
    /// local shape says.
    fn covers(ty: &TensorType, sharding: Sharding, mesh: Mesh) {
        let mut seen = vec![0; ty.elements()];
        let mut first = vec![0; ty.elements()];
        for rank in 0..mesh.ranks() {
            let local = sharding.local(ty, &mesh).elements();
            let mut taken = vec![false; local];
            let held: usize = sharding.runs(ty, &mesh, mesh.coordinates(rank)).iter().map(|r| r.len).sum();
            assert_eq!(held, sharding.held(ty, &mesh, mesh.coordinates(rank)), "{sharding} of {ty} on rank {rank}");
            for r in sharding.runs(ty, &mesh, mesh.coordinates(rank)) {
                (0..r.len).for_each(|i| {
                    seen[r.whole + i] += 1;
                    assert!(
                        !std::mem::replace(&mut taken[r.local + i], true),
                        "an element stands twice on rank {rank}"
                    );
                });
            }
            for r in sharding.first_runs(ty, &mesh, mesh.coordinates(rank)) {
                (0..r.len).for_each(|i| first[r.whole + i] += 1);
                assert!(
                    (0..r.len).all(|i| taken[r.local + i]),
                    "rank {rank} does not have what it is the first to have"
                );
            }
        }
        assert!(first.iter().all(|n| *n == 1), "{sharding} of {ty} on {mesh:?}: an element has not one first holder");
        assert!(seen.iter().all(|n| *n > 0), "{sharding} of {ty} on {mesh:?} leaves elements out");
    }

    /// A mesh of all axes, and placements over them: any number of axes split a dimension, of what is left any number cut ranges.
    #[test]
    fn every_element_is_somewhere_and_no_place_is_used_twice() {
        for case in 0..400u64 {
            let draw = |i: u64, n: u64| (counter::bits(counter::key(7, "placement"), case * 32 + i) % n) as usize;
            let size = |axis: MeshAxis| match axis {
                MeshAxis::Pp => 1,
                MeshAxis::DpReplicate | MeshAxis::Cp | MeshAxis::Ep => 1 + draw(axis as u64, 2),
                MeshAxis::DpShard => 1 + draw(axis as u64, 4),
                MeshAxis::Tp => 1 << draw(axis as u64, 4),
            };
            let mesh = MeshAxis::ALL.into_iter().fold(Mesh::ONE, |mesh, axis| mesh.with(axis, size(axis)));
            let heads = |axis, count| Section { axis, count, unit: 1 + draw(8, 3) };
            let packed =
                Dim::packed([heads(Axis::Heads, 48 * (1 + draw(9, 2))), heads(Axis::KvHeads, 1 << draw(10, 3))]);
            let context = mesh.size(MeshAxis::Cp);
            let plain = Dim::new(Axis::Vocab, 1 + draw(11, 40));
            // What context-parallel ranks may split: two chunks for each.
            let seq = Dim::new(Axis::Seq, 2 * mesh.size(Axes::STAGE) * (1 + draw(14, 3)));
            let batch = Dim::new(Axis::Batch, mesh.size(Axes::TOKENS) * (1 + draw(12, 3)));
            let dims = match draw(13, 3) {
                0 => vec![packed, plain],
                1 => vec![plain, packed],
                _ => vec![batch, if context > 1 { seq } else { plain }, packed],
            };
            let shared = dims.iter().position(|dim| dim.sections.len() > 1);
            let rank = dims.len();
            let ty = TensorType::new(DType::F32, dims);
            let mut sharding = Sharding::REPLICATED;
            for axis in Axes::STAGE.iter() {
                let placement = match draw(16 + axis as u64, 2 + rank as u64) {
                    0 => Placement::Replicated,
                    1 => Placement::Flat,
                    d if axis == MeshAxis::Cp && ty.dims[d - 2].sections[0].axis != Axis::Seq => Placement::Replicated,
                    d => Placement::Split(d - 2),
                };
                sharding = sharding.with(axis, placement);
            }
            // Heads divide, and key and value heads divide or are divided.
            let parts = shared.map_or(1, |d| mesh.size(sharding.axes(Placement::Split(d))));
            let divides = ty.dims.iter().flat_map(|dim| &dim.sections).all(|s| match s.axis {
                Axis::Heads => s.count.is_multiple_of(parts),
                Axis::KvHeads => s.count.is_multiple_of(parts) || parts.is_multiple_of(s.count),
                _ => true,
            });
            if divides {
                covers(&ty, sharding, mesh);
                offsets_agree(&ty, sharding, mesh);
            }
        }
    }

    #[test]
    fn sections_are_gathered_one_by_one_and_neighbours_give_a_share_each_of_what_they_share() {
        let heads = |axis, count| Section { axis, count, unit: 2 };
        let packed = |q, kv| Dim::packed([heads(Axis::Heads, q), heads(Axis::KvHeads, kv), heads(Axis::KvHeads, kv)]);
        let matrix = |rows: Dim, columns| TensorType::new(DType::F32, [rows, Dim::new(Axis::Embed, columns)]);
        let piece = |part, whole, elements, sharers| Gathered { part, whole, rows: 1, elements, sharers };
        let four = gathered(&matrix(packed(1, 1), 3), &matrix(packed(4, 2), 3), 0, 4).unwrap();
        assert_eq!(four, [piece(0, 0, 6, 1), piece(6, 24, 3, 2), piece(12, 36, 3, 2)]);
        let two = gathered(&matrix(packed(2, 1), 3), &matrix(packed(4, 2), 3), 0, 2).unwrap();
        assert_eq!(two, [piece(0, 0, 12, 1), piece(12, 24, 6, 1), piece(18, 36, 6, 1)]);
        // Columns: as many of every row.
        let columns = gathered(&matrix(packed(4, 2), 3), &matrix(packed(4, 2), 6), 1, 2).unwrap();
        assert_eq!(columns, [Gathered { part: 0, whole: 0, rows: 16, elements: 3, sharers: 1 }]);
        // Shares that do not come out even, and parts of something else.
        assert_eq!(gathered(&matrix(packed(8, 1), 3), &matrix(packed(64, 2), 3), 0, 8), None);
        assert_eq!(gathered(&matrix(packed(1, 1), 3), &matrix(packed(4, 2), 3), 0, 3), None);
    }

    const DP: MeshAxis = MeshAxis::DpShard;
    const TP: MeshAxis = MeshAxis::Tp;

    #[test]
    fn neighbours_share_a_head_where_there_are_more_ranks() {
        let mesh = Mesh::ONE.with(TP, 4);
        let heads = |axis, count| Section { axis, count, unit: 2 };
        let packed = Dim::packed([heads(Axis::Heads, 4), heads(Axis::KvHeads, 2)]);
        let ty = TensorType::new(DType::F32, [packed]);
        let sharding = Sharding::REPLICATED.with(TP, Placement::Split(0));
        assert_eq!(sharding.local(&ty, &mesh).to_string(), "f32[heads:1×2+kv_heads:1×2]");
        assert_eq!(sharding.sharers(&ty, 0, &mesh), [1, 2]);
        let of = |tp| sharding.runs(&ty, &mesh, Coordinates::default().with(TP, tp));
        let run = |whole, local| Run { whole, local, len: 2 };
        assert_eq!(of(1), [run(2, 0), run(8, 2)]);
        assert_eq!(of(2), [run(4, 0), run(10, 2)]);
    }

    #[test]
    fn context_parallel_parts_are_an_early_and_a_late_chunk() {
        let mesh = Mesh::ONE.with(MeshAxis::Cp, 2).with(TP, 2);
        let ty = TensorType::new(DType::U32, [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, 16)]);
        let split = Sharding::REPLICATED.with(MeshAxis::Cp, Placement::Split(1));
        assert_eq!(format!("{:?}", split.spans(&ty, 1, &mesh)), "[0+4, 12, 4]");
        let run = |whole, local, len| Run { whole, local, len };
        let of = |cp| split.runs(&ty, &mesh, Coordinates::default().with(MeshAxis::Cp, cp));
        assert_eq!(of(0), [run(0, 0, 4), run(12, 4, 4)]);
        assert_eq!(of(1), [run(4, 0, 4), run(8, 4, 4)]);
        // A piece of a part, over tp, may have some of either chunk.
        let pieces = split.with(TP, Placement::Split(1));
        assert_eq!(format!("{:?}", pieces.spans(&ty, 1, &mesh)), "[0, 12, 4, 8]");
        let thirds = TensorType::new(DType::U32, [Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, 12)]);
        let mesh = Mesh::ONE.with(MeshAxis::Cp, 2).with(TP, 3);
        assert_eq!(format!("{:?}", pieces.spans(&thirds, 1, &mesh)), "[0, 2+1, 9, 10, 3, 5, 7]");
    }

    #[test]
    fn flat_ranges_are_of_what_splits_leave() {
        let mesh = Mesh::ONE.with(DP, 2).with(TP, 2);
        let ty = TensorType::new(DType::F32, [Dim::new(Axis::Ffn, 4), Dim::new(Axis::Embed, 50)]);
        let sharding = Sharding::REPLICATED.with(DP, Placement::Flat).with(TP, Placement::Split(0));
        assert_eq!(sharding.local(&ty, &mesh).elements(), 64);
        let runs = sharding.runs(&ty, &mesh, Coordinates::default().with(DP, 1).with(TP, 1));
        assert_eq!(runs, [Run { whole: 164, local: 0, len: 36 }]);
    }

    #[test]
    fn ranges_over_several_axes_count_over_all_of_them() {
        let mesh = Mesh::ONE.with(MeshAxis::DpReplicate, 2).with(DP, 2).with(MeshAxis::Cp, 2);
        let ty = TensorType::new(DType::F32, [Dim::new(Axis::Embed, 200)]);
        let sharding = Sharding::REPLICATED.with(Axes::of(&[DP, MeshAxis::Cp]), Placement::Flat);
        let of = |rank| sharding.runs(&ty, &mesh, mesh.coordinates(rank));
        assert_eq!(of(2), [Run { whole: 128, local: 0, len: 64 }]);
        assert_eq!(of(3), [Run { whole: 192, local: 0, len: 8 }]);
        assert_eq!(of(6), of(2));
        assert_eq!(sharding.to_string(), "dp: flat, cp: flat");
    }

    #[test]
    fn a_collective_takes_what_it_changes_and_nothing_else() {
        let (dp, cp, tp) = (DP.into(), Axes::from(MeshAxis::Cp), Axes::from(TP));
        let both = Axes::of(&[DP, MeshAxis::Cp]);
        let at = |axes: Axes, placement| Sharding::REPLICATED.with(axes, placement);
        let partial = at(both, Placement::Partial);
        let flat = at(both, Placement::Flat);
        let split = at(cp.and(tp), Placement::Split(1));
        assert_eq!(partial.after(&Op::AllReduce { over: both }), Ok(Sharding::REPLICATED));
        assert_eq!(partial.after(&Op::ReduceScatter { over: both, dim: None }), Ok(flat));
        assert_eq!(flat.after(&Op::AllGather { over: both, dim: None }), Ok(Sharding::REPLICATED));
        assert_eq!(Sharding::REPLICATED.after(&Op::Shard { over: both }), Ok(flat));
        assert_eq!(split.after(&Op::AllGather { over: tp, dim: Some(1) }), Ok(at(cp, Placement::Split(1))));
        let refused = [
            (partial, Op::AllReduce { over: tp }),
            (flat, Op::AllGather { over: dp, dim: None }),
            (split, Op::AllGather { over: cp, dim: Some(1) }),
            (split, Op::AllGather { over: tp, dim: Some(0) }),
            (flat, Op::Shard { over: tp }),
            (partial, Op::Add),
        ];
        for (sharding, op) in refused {
            assert!(sharding.after(&op).is_err(), "{} of {sharding}", op.name());
        }
        let refusal = split.after(&Op::AllReduce { over: tp }).unwrap_err().to_string();
        assert_eq!(refusal, "all_reduce: cannot be { over: tp } of a tensor that is cp: split 1, tp: split 1");
    }
}
