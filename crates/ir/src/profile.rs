//! What the compiler must know of a device: plain data.

use crate::Op;
use crate::TensorType;
use crate::op::{Dims, TypeError};
use std::collections::BTreeMap;

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
    /// Kernel scratch, by op name; ops not listed need none.
    pub workspaces: BTreeMap<&'static str, Workspace>,
}

/// Scratch bytes of one kernel: a constant plus terms that grow with the op's dimensions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Workspace {
    /// Bytes whatever the shapes.
    pub fixed: u64,
    /// Bytes per product of the sizes behind these letters (see the op table).
    pub terms: Vec<(u64, &'static str)>,
}

impl Workspace {
    fn bytes(&self, dims: &Dims) -> u64 {
        self.fixed + self.terms.iter().map(|(bytes, letters)| bytes * dims.product(letters) as u64).sum::<u64>()
    }
}

impl DeviceProfile {
    /// Scratch bytes of `op` on these inputs.
    pub fn workspace(&self, op: &Op, inputs: &[&TensorType]) -> Result<u64, TypeError> {
        match self.workspaces.get(op.name()) {
            None => Ok(0),
            Some(workspace) => Ok(workspace.bytes(&op.bind(inputs)?)),
        }
    }

    /// `bytes` rounded up to the alignment.
    pub fn align(&self, bytes: u64) -> u64 {
        bytes.next_multiple_of(self.alignment)
    }
}
