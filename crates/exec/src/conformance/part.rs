//! What one of several context-parallel ranks has of a sample.

use lockstep_ir::op::{Operand, Ring, SEQ, Sample, Split, names};
use lockstep_ir::program::Offsets;
use lockstep_ir::{Coordinates, Mesh, MeshAxis, Op, Placement, Sharding, TensorType};

/// A context-parallel rank that tries an op on its part.
#[derive(Clone, Copy)]
pub struct Part {
    index: usize,
    pub mesh: Mesh,
}

impl Part {
    /// Of a sample that is tried in parts.
    pub fn of(sample: &Sample) -> Option<Self> {
        sample.part.map(|(index, parts)| Self { index, mesh: Mesh::ONE.with(MeshAxis::Cp, parts) })
    }

    /// Sharding of an operand of `rank` dimensions: split along positions, where it has them.
    pub fn sharding(&self, op: &Op, operand: &Operand, rank: usize) -> Sharding {
        let along = op.spec().splits.iter().find(|group| names(group).next() == Some(SEQ));
        let dim = along.and_then(|group| operand.dim_of(Split::Group(group), rank));
        dim.map_or(Sharding::REPLICATED, |dim| Sharding::REPLICATED.with(MeshAxis::Cp, Placement::Split(dim)))
    }

    /// The sharding of an output: one without positions is a partial sum.
    pub fn output_sharding(&self, op: &Op, output: usize, rank: usize) -> Sharding {
        match self.sharding(op, op.output(output), rank) {
            Sharding::REPLICATED => Sharding::REPLICATED.with(MeshAxis::Cp, Placement::Partial),
            split => split,
        }
    }

    /// Where the rank stands whose part of an operand this rank has: keys and values have come around the ring.
    fn here(&self, op: &Op, operand: &Operand) -> Coordinates {
        let step = match *op {
            Op::PartAttention { ring: Some(Ring { step, .. }), .. }
            | Op::PartAttentionGrad { ring: Some(Ring { step, .. }), .. }
                if names(operand.dims).any(|name| name == "keys") =>
            {
                step
            }
            _ => 0,
        };
        let parts = self.mesh.ranks();
        Coordinates::default().with(MeshAxis::Cp, (self.index + parts - step) % parts)
    }

    /// The rank's part of an operand: its type and elements.
    pub fn local(&self, op: &Op, operand: &Operand, ty: &TensorType, data: &[f64]) -> (TensorType, Vec<f64>) {
        let sharding = self.sharding(op, operand, ty.dims.len());
        let local = sharding.local(ty, &self.mesh);
        let mut part = vec![0.0; local.elements()];
        for run in sharding.runs(ty, &self.mesh, self.here(op, operand)) {
            part[run.local..run.local + run.len].copy_from_slice(&data[run.whole..run.whole + run.len]);
        }
        (local, part)
    }

    /// Zeros where other ranks have an operand. A sum over positions then is what this rank adds to it.
    pub fn alone(&self, op: &Op, operand: &Operand, ty: &TensorType, data: &mut [f64]) {
        let sharding = self.sharding(op, operand, ty.dims.len());
        let whole = data.to_vec();
        data.fill(0.0);
        for run in sharding.runs(ty, &self.mesh, self.here(op, operand)) {
            let range = run.whole..run.whole + run.len;
            data[range.clone()].copy_from_slice(&whole[range]);
        }
    }

    /// The table of offsets of the op on whole inputs, turned so that this rank is the first.
    pub fn offsets(&self, op: &Op, types: &[TensorType]) -> Option<Offsets> {
        let (_, at, dim) = op.numbered(types.len()).filter(|(input, ..)| *input)?;
        let sharding = self.sharding(op, op.input(at, types.len()), types[at].dims.len());
        let mut offsets = Offsets::new(&types[at], &sharding, dim, &self.mesh)?;
        offsets.parts.rotate_left(self.index);
        Some(offsets)
    }
}
