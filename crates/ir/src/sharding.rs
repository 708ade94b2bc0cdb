//! Sharding of a tensor over the mesh: replicated, split along a dimension, cut flat into ranges, or partial sums.

use crate::mesh::{Coordinates, Mesh, MeshAxis};
use crate::{Axis, Dim, Section, TensorType};

/// Placement of a tensor along one mesh axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Every rank has all of it.
    #[default]
    Replicated,
    /// Every rank has a part of this dimension, of each of its sections. Where a section has fewer entries than there are
    /// ranks, neighbours share one; where vocabulary entries do not divide, the last part is filled up with padding.
    Split(usize),
    /// Every rank has a contiguous range of the elements, all equally long, the last filled up with padding.
    Flat,
    /// Every rank has a partial sum; the tensor is the sum over ranks.
    Partial,
}

/// Sharding of a tensor: its placement along each mesh axis. Pipeline stages hold different tensors, so `pp` has no part in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Sharding {
    /// Over data-parallel ranks: `Flat` ranges are of what the other axes leave.
    pub dp: Placement,
    /// Over tensor-parallel ranks.
    pub tp: Placement,
}

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

/// Part `index` of `of` of a section's entries: (first entry, entries).
fn part(section: Section, of: usize, index: usize) -> (usize, usize) {
    let count = part_count(section, of);
    (if section.count < of { index * section.count / of } else { index * count }, count)
}

/// Entries of a section on each of `of` ranks, padding included.
fn part_count(section: Section, of: usize) -> usize {
    section.count.div_ceil(of)
}

impl Sharding {
    /// Whole everywhere.
    pub const REPLICATED: Sharding = Sharding { dp: Placement::Replicated, tp: Placement::Replicated };

    /// Over one axis.
    pub fn over(&self, axis: MeshAxis) -> Placement {
        match axis {
            MeshAxis::Dp => self.dp,
            MeshAxis::Tp => self.tp,
            MeshAxis::Pp => Placement::Replicated,
        }
    }

    /// The same with another placement along one axis.
    pub fn with(self, axis: MeshAxis, placement: Placement) -> Self {
        match axis {
            MeshAxis::Dp => Self { dp: placement, ..self },
            MeshAxis::Tp => Self { tp: placement, ..self },
            MeshAxis::Pp => self,
        }
    }

    /// The shape that a rank has, padding included.
    pub fn local(&self, ty: &TensorType, mesh: &Mesh) -> TensorType {
        let mut ty = ty.clone();
        for axis in [MeshAxis::Tp, MeshAxis::Dp] {
            match self.over(axis) {
                Placement::Split(dim) => {
                    for section in &mut ty.dims[dim].sections {
                        section.count = part_count(*section, mesh.size(axis));
                    }
                }
                Placement::Flat => {
                    let len = ty.elements().div_ceil(mesh.size(axis)).next_multiple_of(FLAT_BLOCK);
                    ty.dims = vec![Dim::new(Axis::Flat, len)];
                }
                Placement::Replicated | Placement::Partial => {}
            }
        }
        ty
    }

    /// How many neighbours over tensor parallelism share entries of each section of a dimension: 1 where none do.
    pub fn sharers(&self, dim: &Dim, mesh: &Mesh) -> Vec<usize> {
        dim.sections.iter().map(|s| (mesh.tp / s.count.max(1)).max(1)).collect()
    }

    /// Elements that flat ranges are cut from, padding included.
    fn tp_local(&self, ty: &TensorType, mesh: &Mesh) -> usize {
        Sharding { dp: Placement::Replicated, ..*self }.local(ty, mesh).elements()
    }

    /// How many elements of the whole a rank has: without padding.
    pub fn held(&self, ty: &TensorType, mesh: &Mesh, at: Coordinates) -> usize {
        let extent = |d: usize, dim: &Dim| {
            let axis = [MeshAxis::Tp, MeshAxis::Dp].into_iter().find(|a| self.over(*a) == Placement::Split(d));
            axis.map_or(dim.size(), |a| ranges(dim, mesh.size(a), at.get(a)).0.iter().map(|r| r.len).sum())
        };
        let all: usize = ty.dims.iter().enumerate().map(|(d, dim)| extent(d, dim)).product();
        match self.dp {
            // Padding stands behind all elements, but where it is in an inner dimension.
            Placement::Flat if matches!(self.tp, Placement::Split(dim) if dim > 0) && all < self.tp_local(ty, mesh) => {
                self.runs(ty, mesh, at).iter().map(|r| r.len).sum()
            }
            Placement::Flat => {
                let len = self.local(ty, mesh).elements();
                all.saturating_sub(at.dp * len).min(len)
            }
            Placement::Replicated | Placement::Split(_) | Placement::Partial => all,
        }
    }

    /// The elements that a rank has, in order; padding is in no run.
    pub fn runs(&self, ty: &TensorType, mesh: &Mesh, at: Coordinates) -> Vec<Run> {
        self.runs_of(ty, mesh, at, ranges)
    }

    /// The elements that a rank has and none before it on its stage, in order: over all ranks, every element once.
    pub fn first_runs(&self, ty: &TensorType, mesh: &Mesh, at: Coordinates) -> Vec<Run> {
        let repeats = |axis| self.over(axis) == Placement::Replicated && at.get(axis) > 0;
        match repeats(MeshAxis::Dp) || repeats(MeshAxis::Tp) {
            true => Vec::new(),
            false => self.runs_of(ty, mesh, at, first_ranges),
        }
    }

    /// The elements that a rank has of the ranges that `ranges` gives of split dimensions.
    fn runs_of(&self, ty: &TensorType, mesh: &Mesh, at: Coordinates, ranges: Ranges) -> Vec<Run> {
        let split =
            |dim: usize| [MeshAxis::Tp, MeshAxis::Dp].into_iter().find(|a| self.over(*a) == Placement::Split(dim));
        // Ranges of each dimension as (start in the whole, start on the rank, length), and the rank's extent.
        let mut runs = vec![Run { whole: 0, local: 0, len: 1 }];
        for (d, dim) in ty.dims.iter().enumerate() {
            let (ranges, extent) = match split(d) {
                None => (vec![Run { whole: 0, local: 0, len: dim.size() }], dim.size()),
                Some(axis) => ranges(dim, mesh.size(axis), at.get(axis)),
            };
            runs = nest(&runs, &ranges, dim.size(), extent);
        }
        if self.dp == Placement::Flat {
            let len = self.tp_local(ty, mesh).div_ceil(mesh.dp).next_multiple_of(FLAT_BLOCK);
            let (from, to) = (at.dp * len, (at.dp + 1) * len);
            runs = runs.into_iter().filter_map(|r| clip(r, from, to)).collect();
        }
        runs
    }
}

/// Which ranges of a dimension part `index` of `of` has, and how long the dimension is there.
type Ranges = fn(dim: &Dim, of: usize, index: usize) -> (Vec<Run>, usize);

/// What a rank has of one dimension but for what the rank before it has too.
fn first_ranges(dim: &Dim, of: usize, index: usize) -> (Vec<Run>, usize) {
    let (mut mine, extent) = ranges(dim, of, index);
    if index > 0 {
        // Neighbours share whole entries of a section, so they have them at the same place.
        let (before, _) = ranges(dim, of, index - 1);
        mine.retain(|run| !before.contains(run));
    }
    (mine, extent)
}

/// What a rank has of one dimension, and how long it is there.
fn ranges(dim: &Dim, of: usize, index: usize) -> (Vec<Run>, usize) {
    let (mut whole, mut local) = (0, 0);
    let mut result = Vec::new();
    for &section in &dim.sections {
        let (first, count) = part(section, of, index);
        let held = count.min(section.count.saturating_sub(first));
        if held > 0 {
            result.push(Run { whole: whole + first * section.unit, local, len: held * section.unit });
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
        for axis in [MeshAxis::Dp, MeshAxis::Tp] {
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
    use crate::{DType, counter};

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

    #[test]
    fn every_element_is_somewhere_and_no_place_is_used_twice() {
        for case in 0..200u64 {
            let draw = |i: u64, n: u64| (counter::bits(counter::key(7, "placement"), case * 16 + i) % n) as usize;
            let (dp, tp) = (1 + draw(0, 4), 1 << draw(1, 4));
            let mesh = Mesh { dp, tp, pp: 1 };
            let heads = |axis, count| Section { axis, count, unit: 1 + draw(2, 3) };
            let kv = 1 << draw(3, 3);
            let packed = Dim::packed([heads(Axis::Heads, 8 * (1 + draw(4, 2))), heads(Axis::KvHeads, kv)]);
            let plain = Dim::new(Axis::Vocab, 1 + draw(5, 40));
            let batch = Dim::new(Axis::Batch, dp * (1 + draw(6, 3)));
            for dims in [vec![packed.clone(), plain.clone()], vec![plain.clone(), packed.clone()]] {
                let ty = TensorType::new(DType::F32, dims);
                for tp in [Placement::Replicated, Placement::Split(0), Placement::Split(1)] {
                    for dp in [Placement::Replicated, Placement::Flat] {
                        covers(&ty, Sharding { dp, tp }, mesh);
                    }
                }
            }
            let ty = TensorType::new(DType::F32, [batch, plain, packed]);
            for tp in [Placement::Replicated, Placement::Split(1), Placement::Split(2)] {
                covers(&ty, Sharding { dp: Placement::Split(0), tp }, mesh);
            }
        }
    }

    #[test]
    fn neighbours_share_a_head_where_there_are_more_ranks() {
        let mesh = Mesh { dp: 1, tp: 4, pp: 1 };
        let heads = |axis, count| Section { axis, count, unit: 2 };
        let packed = Dim::packed([heads(Axis::Heads, 4), heads(Axis::KvHeads, 2)]);
        let ty = TensorType::new(DType::F32, [packed]);
        let sharding = Sharding { tp: Placement::Split(0), ..Sharding::REPLICATED };
        assert_eq!(sharding.local(&ty, &mesh).to_string(), "f32[heads:1×2+kv_heads:1×2]");
        assert_eq!(sharding.sharers(&ty.dims[0], &mesh), [1, 2]);
        let of = |tp| sharding.runs(&ty, &mesh, Coordinates { dp: 0, tp, pp: 0 });
        let run = |whole, local| Run { whole, local, len: 2 };
        assert_eq!(of(1), [run(2, 0), run(8, 2)]);
        assert_eq!(of(2), [run(4, 0), run(10, 2)]);
    }

    #[test]
    fn flat_ranges_are_of_what_tensor_parallelism_leaves() {
        let mesh = Mesh { dp: 2, tp: 2, pp: 1 };
        let ty = TensorType::new(DType::F32, [Dim::new(Axis::Ffn, 4), Dim::new(Axis::Embed, 50)]);
        let sharding = Sharding { dp: Placement::Flat, tp: Placement::Split(0) };
        assert_eq!(sharding.local(&ty, &mesh).elements(), 64);
        let runs = sharding.runs(&ty, &mesh, Coordinates { dp: 1, tp: 1, pp: 0 });
        assert_eq!(runs, [Run { whole: 164, local: 0, len: 36 }]);
    }
}
