//! The mesh: how ranks are numbered along the axes over which work is split.
//!
//! There are six axes: pp, dp_replicate, dp, cp, ep and tp. dp is the axis that ZeRO shards over, dp_replicate has
//! groups of such ranks (HSDP), ep splits experts and has sequences of its own. Collectives and parts of buffers
//! name sets of axes; passes ask for what a set means (`Axes::SEQUENCES`, `Axes::TOKENS`, `Axes::ZERO`).

use serde::ser::{Serialize, SerializeMap, Serializer};

/// What the ranks along an axis of the mesh divide among them. In the order of the mesh, the outermost first: ranks along the last
/// are neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MeshAxis {
    /// Layers.
    Pp,
    /// The sequences of a batch; every rank along it has all state.
    DpReplicate,
    /// The sequences of a batch; ZeRO shards state over it.
    DpShard,
    /// The positions of a sequence.
    Cp,
    /// Experts, and the sequences of a batch outside of them.
    Ep,
    /// Heads, hidden units and vocabulary entries.
    Tp,
}

impl MeshAxis {
    /// All axes, in the order of the mesh.
    pub const ALL: [MeshAxis; 6] =
        [MeshAxis::Pp, MeshAxis::DpReplicate, MeshAxis::DpShard, MeshAxis::Cp, MeshAxis::Ep, MeshAxis::Tp];

    /// The name in layouts and programs.
    pub const fn name(self) -> &'static str {
        match self {
            MeshAxis::Pp => "pp",
            MeshAxis::DpReplicate => "dp_replicate",
            MeshAxis::DpShard => "dp",
            MeshAxis::Cp => "cp",
            MeshAxis::Ep => "ep",
            MeshAxis::Tp => "tp",
        }
    }
}

/// A set of axes. An index over several counts in the order of the mesh, the last axis fastest. Prints as `dp×cp`.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Axes(u8);

impl Axes {
    /// No axis.
    pub const NONE: Axes = Axes(0);
    /// Over which the sequences of a batch are split.
    pub const SEQUENCES: Axes = Axes::of(&[MeshAxis::DpReplicate, MeshAxis::DpShard, MeshAxis::Ep]);
    /// Over which the tokens of a batch are split, and so the gradients of a dense parameter are summed.
    pub const TOKENS: Axes = Axes::SEQUENCES.and(Axes::of(&[MeshAxis::Cp]));
    /// Over which ZeRO shards what a rank would have whole.
    pub const ZERO: Axes = Axes::of(&[MeshAxis::DpShard, MeshAxis::Cp, MeshAxis::Ep]);
    /// Over which the ranks of one pipeline stage differ.
    pub const STAGE: Axes = Axes::TOKENS.and(Axes::of(&[MeshAxis::Tp]));

    /// These axes.
    pub const fn of(axes: &[MeshAxis]) -> Self {
        let (mut bits, mut i) = (0, 0);
        while i < axes.len() {
            bits |= 1 << axes[i] as u8;
            i += 1;
        }
        Self(bits)
    }

    /// Those in either set.
    pub const fn and(self, other: Axes) -> Axes {
        Axes(self.0 | other.0)
    }

    /// Those in both sets.
    pub const fn within(self, other: Axes) -> Axes {
        Axes(self.0 & other.0)
    }

    /// Those that are not in the other set.
    pub const fn without(self, other: Axes) -> Axes {
        Axes(self.0 & !other.0)
    }

    /// Whether there are none.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether an axis is among them.
    pub const fn contains(self, axis: MeshAxis) -> bool {
        self.0 & 1 << axis as u8 != 0
    }

    /// The axes, in the order of the mesh.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = MeshAxis> {
        MeshAxis::ALL.into_iter().filter(move |axis| self.contains(*axis))
    }
}

impl From<MeshAxis> for Axes {
    fn from(axis: MeshAxis) -> Self {
        Axes::of(&[axis])
    }
}

impl FromIterator<MeshAxis> for Axes {
    fn from_iter<I: IntoIterator<Item = MeshAxis>>(axes: I) -> Self {
        axes.into_iter().fold(Axes::NONE, |set, axis| set.and(axis.into()))
    }
}

impl std::fmt::Display for Axes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.iter().map(MeshAxis::name).collect();
        f.write_str(&names.join("×"))
    }
}

impl std::fmt::Debug for Axes {
    /// As it is displayed: attributes of ops are printed so.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.is_empty() { "none" } else { "" })?;
        std::fmt::Display::fmt(self, f)
    }
}

/// Sizes of the mesh, by axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mesh([usize; MeshAxis::ALL.len()]);

impl Mesh {
    /// The mesh of one rank.
    pub const ONE: Mesh = Mesh([1; MeshAxis::ALL.len()]);

    /// The same but for the size along one axis.
    pub const fn with(mut self, axis: MeshAxis, size: usize) -> Mesh {
        self.0[axis as usize] = size;
        self
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.0.iter().product()
    }

    /// How many ranks differ along these axes only.
    pub fn size(&self, over: impl Into<Axes>) -> usize {
        over.into().iter().map(|axis| self.0[axis as usize]).product()
    }

    /// Those of the axes that have more than one rank. Shardings and collectives name no others.
    pub fn wide(&self, axes: Axes) -> Axes {
        axes.iter().filter(|axis| self.0[*axis as usize] > 1).collect()
    }

    /// Where a rank stands.
    pub fn coordinates(&self, rank: usize) -> Coordinates {
        debug_assert!(rank < self.ranks(), "rank {rank} of {}", self.ranks());
        let mut at = Coordinates::default();
        let mut rest = rank;
        for axis in MeshAxis::ALL.into_iter().rev() {
            at.0[axis as usize] = rest % self.0[axis as usize];
            rest /= self.0[axis as usize];
        }
        at
    }

    /// The rank that stands at `at`.
    pub fn rank(&self, at: Coordinates) -> usize {
        debug_assert!(at.0.iter().zip(&self.0).all(|(index, size)| index < size), "{at:?} is outside {self:?}");
        at.0.iter().zip(&self.0).fold(0, |rank, (index, size)| rank * size + index)
    }

    /// The ranks that differ from the one at `at` along these axes only, in the order of their index; it is among them.
    pub fn group(&self, at: Coordinates, over: impl Into<Axes>) -> Vec<usize> {
        let over = over.into();
        (0..self.size(over)).map(|index| self.rank(at.with_index(over, self, index))).collect()
    }
}

impl std::fmt::Display for Mesh {
    /// `dp=2 tp=2 pp=1`, other axes where they have more than one rank.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sizes: Vec<String> = self.shown().map(|axis| format!("{}={}", axis.name(), self.size(axis))).collect();
        f.write_str(&sizes.join(" "))
    }
}

impl Serialize for Mesh {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        self.shown().try_for_each(|axis| map.serialize_entry(axis.name(), &self.size(axis)))?;
        map.end()
    }
}

impl Mesh {
    /// The axes that a reader expects, in the order in which layouts name them.
    fn shown(&self) -> impl Iterator<Item = MeshAxis> {
        let order = MeshAxis::ALL.into_iter().skip(1).chain([MeshAxis::Pp]);
        let usual = Axes::of(&[MeshAxis::DpShard, MeshAxis::Tp, MeshAxis::Pp]);
        let mesh = *self;
        order.filter(move |axis| usual.contains(*axis) || mesh.size(*axis) != 1)
    }
}

/// Where a rank stands in the mesh: its index along every axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Coordinates([usize; MeshAxis::ALL.len()]);

impl Coordinates {
    /// The index along one axis.
    pub const fn get(self, axis: MeshAxis) -> usize {
        self.0[axis as usize]
    }

    /// The same place but for the index along one axis.
    pub const fn with(mut self, axis: MeshAxis, index: usize) -> Coordinates {
        self.0[axis as usize] = index;
        self
    }

    /// The index among the ranks that differ along these axes only.
    pub fn index(self, over: impl Into<Axes>, mesh: &Mesh) -> usize {
        over.into().iter().fold(0, |index, axis| index * mesh.size(axis) + self.get(axis))
    }

    /// The same place but for the index along these axes.
    pub fn with_index(self, over: impl Into<Axes>, mesh: &Mesh, index: usize) -> Coordinates {
        let mut rest = index;
        over.into().iter().rev().fold(self, |at, axis| {
            let here = rest % mesh.size(axis);
            rest /= mesh.size(axis);
            at.with(axis, here)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESH: Mesh = Mesh::ONE.with(MeshAxis::Pp, 4).with(MeshAxis::DpShard, 3).with(MeshAxis::Tp, 2);

    #[test]
    fn ranks_are_numbered_with_tp_fastest_then_dp_then_pp() {
        let here = Coordinates::default();
        let at = |dp, tp, pp| MESH.rank(here.with(MeshAxis::DpShard, dp).with(MeshAxis::Tp, tp).with(MeshAxis::Pp, pp));
        assert_eq!([at(0, 0, 0), at(0, 1, 0), at(1, 0, 0), at(2, 1, 0), at(0, 0, 1)], [0, 1, 2, 5, 6]);
        assert_eq!(MESH.ranks(), 24);
        assert_eq!(Mesh::ONE.ranks(), 1);
    }

    #[test]
    fn a_mesh_prints_the_usual_axes_and_those_of_several_ranks() {
        assert_eq!(MESH.to_string(), "dp=3 tp=2 pp=4");
        assert_eq!(Mesh::ONE.with(MeshAxis::DpReplicate, 2).to_string(), "dp_replicate=2 dp=1 tp=1 pp=1");
        assert_eq!(Axes::ZERO.to_string(), "dp×cp×ep");
        assert_eq!(format!("{:?}", Axes::NONE), "none");
    }

    #[test]
    fn sets_of_axes_are_sets() {
        let (zero, tokens) = (Axes::ZERO, Axes::TOKENS);
        assert_eq!(tokens.without(zero), MeshAxis::DpReplicate.into());
        assert_eq!(tokens.within(zero), zero);
        assert_eq!(zero.and(MeshAxis::DpReplicate.into()), tokens);
        assert_eq!(MESH.wide(tokens), MeshAxis::DpShard.into());
        assert_eq!(MeshAxis::ALL.into_iter().collect::<Axes>(), Axes::STAGE.and(MeshAxis::Pp.into()));
    }

    /// Sizes of 1 to 3 along every axis.
    fn meshes() -> impl Iterator<Item = Mesh> {
        (0..60u64).map(|case| {
            let size = |axis: MeshAxis| {
                let bits = crate::counter::bits(crate::counter::key(3, "mesh"), case * 8 + axis as u64);
                1 + (bits % if axis == MeshAxis::Tp { 3 } else { 2 }) as usize
            };
            MeshAxis::ALL.into_iter().fold(Mesh::ONE, |mesh, axis| mesh.with(axis, size(axis)))
        })
    }

    #[test]
    fn coordinates_and_ranks_are_inverse() {
        for mesh in meshes() {
            for rank in 0..mesh.ranks() {
                assert_eq!(mesh.rank(mesh.coordinates(rank)), rank);
            }
        }
    }

    #[test]
    fn the_groups_over_any_axes_share_out_all_ranks() {
        for mesh in meshes() {
            for over in (0..1 << MeshAxis::ALL.len()).step_by(5).map(Axes) {
                let mut seen = vec![0; mesh.ranks()];
                for rank in 0..mesh.ranks() {
                    let at = mesh.coordinates(rank);
                    let group = mesh.group(at, over);
                    assert_eq!(group.len(), mesh.size(over), "{over}");
                    assert_eq!(group[at.index(over, &mesh)], rank);
                    assert!(group.is_sorted());
                    seen[group[0]] += 1;
                }
                assert!(seen.iter().all(|&n| n == 0 || n == mesh.size(over)));
            }
        }
        let at = MESH.coordinates(9);
        assert_eq!(MESH.group(at, MeshAxis::Tp), [8, 9]);
        assert_eq!(MESH.group(at, MeshAxis::DpShard), [7, 9, 11]);
        assert_eq!(MESH.group(at, MeshAxis::Pp), [3, 9, 15, 21]);
        assert_eq!(MESH.group(at, Axes::of(&[MeshAxis::Tp, MeshAxis::DpShard])), [6, 7, 8, 9, 10, 11]);
    }
}
