//! The mesh: how ranks are numbered along the axes over which work is split.

use serde::Serialize;

/// What the ranks along an axis of the mesh divide among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MeshAxis {
    /// The sequences of a batch.
    Dp,
    /// Heads, hidden units and vocabulary entries.
    Tp,
    /// Layers.
    Pp,
}

impl MeshAxis {
    /// All axes, in the order in which layouts name them.
    pub const ALL: [MeshAxis; 3] = [MeshAxis::Dp, MeshAxis::Tp, MeshAxis::Pp];

    /// The name in layouts.
    pub const fn name(self) -> &'static str {
        match self {
            MeshAxis::Dp => "dp",
            MeshAxis::Tp => "tp",
            MeshAxis::Pp => "pp",
        }
    }
}

/// Sizes of the mesh; ranks are numbered with tp fastest, then dp, then pp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Mesh {
    /// Ranks that compute on sequences of their own.
    pub dp: usize,
    /// Ranks among which the matrices of a layer are split.
    pub tp: usize,
    /// Stages among which the layers are split.
    pub pp: usize,
}

impl Mesh {
    /// The mesh of one rank.
    pub const ONE: Mesh = Mesh { dp: 1, tp: 1, pp: 1 };

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.dp * self.tp * self.pp
    }

    /// The size along one axis.
    pub fn size(&self, axis: MeshAxis) -> usize {
        match axis {
            MeshAxis::Dp => self.dp,
            MeshAxis::Tp => self.tp,
            MeshAxis::Pp => self.pp,
        }
    }

    /// The size along one axis, to change it.
    pub fn size_mut(&mut self, axis: MeshAxis) -> &mut usize {
        match axis {
            MeshAxis::Dp => &mut self.dp,
            MeshAxis::Tp => &mut self.tp,
            MeshAxis::Pp => &mut self.pp,
        }
    }

    /// Where a rank stands.
    pub fn coordinates(&self, rank: usize) -> Coordinates {
        debug_assert!(rank < self.ranks(), "rank {rank} of {}", self.ranks());
        Coordinates { tp: rank % self.tp, dp: rank / self.tp % self.dp, pp: rank / (self.tp * self.dp) }
    }

    /// The rank that stands at `c`.
    pub fn rank(&self, c: Coordinates) -> usize {
        debug_assert!(MeshAxis::ALL.iter().all(|&axis| c.get(axis) < self.size(axis)), "{c:?} is outside {self:?}");
        (c.pp * self.dp + c.dp) * self.tp + c.tp
    }

    /// The ranks that differ from `c` along `axis` only, in order; the one at `c` is among them.
    pub fn group(&self, c: Coordinates, axis: MeshAxis) -> Vec<usize> {
        (0..self.size(axis)).map(|at| self.rank(c.with(axis, at))).collect()
    }
}

/// Where a rank stands in the mesh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Coordinates {
    /// Along dp.
    pub dp: usize,
    /// Along tp.
    pub tp: usize,
    /// Along pp: the stage.
    pub pp: usize,
}

impl Coordinates {
    /// The coordinate along one axis.
    pub fn get(self, axis: MeshAxis) -> usize {
        match axis {
            MeshAxis::Dp => self.dp,
            MeshAxis::Tp => self.tp,
            MeshAxis::Pp => self.pp,
        }
    }

    /// The same place but for the coordinate along one axis.
    pub fn with(self, axis: MeshAxis, at: usize) -> Coordinates {
        match axis {
            MeshAxis::Dp => Coordinates { dp: at, ..self },
            MeshAxis::Tp => Coordinates { tp: at, ..self },
            MeshAxis::Pp => Coordinates { pp: at, ..self },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESH: Mesh = Mesh { dp: 3, tp: 2, pp: 4 };

    #[test]
    fn ranks_are_numbered_with_tp_fastest_then_dp_then_pp() {
        let at = |dp, tp, pp| MESH.rank(Coordinates { dp, tp, pp });
        assert_eq!([at(0, 0, 0), at(0, 1, 0), at(1, 0, 0), at(2, 1, 0), at(0, 0, 1)], [0, 1, 2, 5, 6]);
        assert_eq!(MESH.ranks(), 24);
        assert_eq!(Mesh::ONE.ranks(), 1);
    }

    #[test]
    fn coordinates_and_ranks_are_inverse() {
        for rank in 0..MESH.ranks() {
            assert_eq!(MESH.rank(MESH.coordinates(rank)), rank);
        }
    }

    #[test]
    fn the_groups_of_an_axis_share_out_all_ranks() {
        for axis in MeshAxis::ALL {
            let mut seen = vec![0; MESH.ranks()];
            for rank in 0..MESH.ranks() {
                let c = MESH.coordinates(rank);
                let group = MESH.group(c, axis);
                assert_eq!(group.len(), MESH.size(axis), "{}", axis.name());
                assert_eq!(group[c.get(axis)], rank);
                assert!(group.is_sorted());
                seen[group[0]] += 1;
            }
            assert!(seen.iter().all(|&n| n == 0 || n == MESH.size(axis)));
        }
        assert_eq!(MESH.group(MESH.coordinates(9), MeshAxis::Tp), [8, 9]);
        assert_eq!(MESH.group(MESH.coordinates(9), MeshAxis::Dp), [7, 9, 11]);
        assert_eq!(MESH.group(MESH.coordinates(9), MeshAxis::Pp), [3, 9, 15, 21]);
    }
}
