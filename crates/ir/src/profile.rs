//! What the compiler must know of a device: plain data.

use crate::op::{Dims, TypeError, names};
use crate::{FusedMatmul, Fusion, Op, TensorType};
use std::collections::BTreeMap;

/// [`DeviceProfile::fp8_weights`] of an H200, and of what stands in for one: the same layers are in fp8 wherever a config runs.
pub const FP8_WEIGHTS: usize = 1 << 20;

/// What the compiler must know of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceProfile {
    /// Name, for people.
    pub name: String,
    /// Every buffer starts at a multiple of this many bytes.
    pub alignment: u64,
    /// Logits that the chunked cross-entropy may hold at a time.
    pub cross_entropy_logits: usize,
    /// Most rows of it at a time.
    pub cross_entropy_rows: usize,
    /// Kernel scratch by the name of the op's row; ops not listed need none.
    pub workspaces: BTreeMap<&'static str, Workspace>,
    /// Kernel scratch of calls with all optional operands, where it is not that of calls without.
    pub workspaces_with_optional: BTreeMap<&'static str, Workspace>,
    /// Instructions that it does as one where they follow each other.
    pub fusions: Vec<Fusion>,
    /// Matmuls that were measured to take less time with GELU, or its derivative, in their epilogue than with a kernel after them.
    pub faster: Vec<FusedMatmul>,
    /// Weights of one rank from which on a linear layer takes less time in fp8 than in bf16, what is quantised for it included.
    pub fp8_weights: usize,
}

/// Scratch bytes of one kernel: a constant plus terms that grow with the op's dimensions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Workspace {
    /// Bytes whatever the shapes.
    pub fixed: u64,
    /// Bytes per product of the sizes of these names (see the op table). A name in capitals is that size in whole tiles of
    /// [`Workspace::TILE`].
    pub terms: Vec<(u64, &'static str)>,
}

impl Workspace {
    /// What a name in capitals counts whole ones of.
    pub const TILE: usize = 128;

    fn bytes(&self, dims: &Dims) -> u64 {
        let size = |name: &str| match name.starts_with(|c: char| c.is_ascii_uppercase()) {
            true => dims.size(&name.to_ascii_lowercase()).next_multiple_of(Self::TILE) as u128,
            false => dims.size(name) as u128,
        };
        let terms = self.terms.iter().map(|(bytes, of)| bytes * names(of).map(size).product::<u128>() as u64);
        self.fixed + terms.sum::<u64>()
    }
}

impl DeviceProfile {
    /// Scratch bytes of `op` on these inputs.
    pub fn workspace(&self, op: &Op, inputs: &[&TensorType]) -> Result<u64, TypeError> {
        let spec = op.spec();
        let with_optional = self.workspaces_with_optional.get(spec.name);
        match with_optional.filter(|_| inputs.len() == spec.inputs.len()).or(self.workspaces.get(spec.name)) {
            None => Ok(0),
            Some(workspace) => Ok(workspace.bytes(&op.bind(inputs)?)),
        }
    }

    /// `bytes` rounded up to the alignment.
    pub fn align(&self, bytes: u64) -> u64 {
        bytes.next_multiple_of(self.alignment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Axis, DType, Dim};

    #[test]
    fn names_in_capitals_count_whole_tiles() {
        let profile = DeviceProfile {
            name: String::new(),
            alignment: 1,
            cross_entropy_logits: 1,
            cross_entropy_rows: 1,
            workspaces: BTreeMap::from([(
                "add",
                Workspace { fixed: 5, terms: vec![(2, "batch SEQ SEQ"), (1, "batch seq")] },
            )]),
            workspaces_with_optional: BTreeMap::new(),
            fusions: Vec::new(),
            faster: Vec::new(),
            fp8_weights: 0,
        };
        let bytes = |seq: usize| {
            let x = TensorType::new(
                DType::F32,
                [Dim::new(Axis::Batch, 3), Dim::new(Axis::Seq, seq), Dim::new(Axis::Embed, 7)],
            );
            profile.workspace(&Op::Add, &[&x, &x]).unwrap()
        };
        assert_eq!(bytes(128), 5 + 2 * 3 * 128 * 128 + 3 * 128);
        assert_eq!(bytes(129), 5 + 2 * 3 * 256 * 256 + 3 * 129);
    }

    #[test]
    fn scratch_of_calls_with_optional_operands_may_be_another() {
        let of = |fixed| BTreeMap::from([("positions_grad", Workspace { fixed, terms: Vec::new() })]);
        let profile = DeviceProfile {
            name: String::new(),
            alignment: 1,
            cross_entropy_logits: 1,
            cross_entropy_rows: 1,
            workspaces: of(1),
            workspaces_with_optional: of(2),
            fusions: Vec::new(),
            faster: Vec::new(),
            fp8_weights: 0,
        };
        let (b, s) = (Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, 4));
        let dx = TensorType::new(DType::F32, [b.clone(), s.clone(), Dim::new(Axis::Embed, 7)]);
        let starts = TensorType::new(DType::U32, [b, s]);
        let op = Op::PositionsGrad { rows: 4, seq: 4 };
        assert_eq!(profile.workspace(&op, &[&dx]), Ok(1));
        assert_eq!(profile.workspace(&op, &[&dx, &starts]), Ok(2));
    }
}
