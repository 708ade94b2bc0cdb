//! What a call asks of the hardware.

use super::{Dims, Flops, Op, Saved, TypeError};
use crate::TensorType;

/// What a call asks of the hardware. Where nothing else is said, its operands are read once and its results written once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cost {
    /// Nothing: a view.
    Nothing,
    /// Matmuls of equal extents, one after the other.
    Matmul(Matmuls),
    /// Fused attention.
    Attention {
        /// Elements of a head.
        head_dim: u64,
        /// Positions of a whole sequence.
        seq: u64,
        /// Whether it is the gradient.
        backward: bool,
    },
    /// Attention whose scores exist.
    Scores,
    /// A kernel that does nothing but read and write.
    Elementwise,
    /// The same, of an operand that stands for the rest: rows of a table that tokens choose are as many as tokens.
    Rows {
        /// The operand.
        of: Saved,
        /// How often its bytes are moved.
        times: u64,
    },
    /// The largest magnitude of a tensor, or its bytes in fp8.
    Quantise,
    /// An update of parameters.
    Optimizer,
    /// A copy over the link between a device and its host.
    HostCopy,
}

/// Matmuls of equal extents, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matmuls {
    /// Rows of the output.
    pub rows: u64,
    /// Columns of the output.
    pub cols: u64,
    /// Terms of each sum.
    pub inner: u64,
    /// How many matmuls.
    pub calls: u64,
    /// Weights whose gradient is added to a sum.
    pub gradients: u64,
    /// Logits that are made, or whose gradients are read.
    pub logits: u64,
    /// How often operands and results are moved.
    pub passes: u64,
    /// Weights that are read or summed once more than that.
    pub reread: u64,
}

impl Matmuls {
    pub(super) const fn one(rows: u64, cols: u64, inner: u64) -> Self {
        Self { rows, cols, inner, calls: 1, gradients: 0, logits: 0, passes: 1, reread: 0 }
    }

    /// One matmul, by the names of its rows, columns and terms.
    pub(super) fn of(dims: &Dims, rows: &'static str, cols: &'static str, inner: &'static str) -> Self {
        let [rows, cols, inner] = [rows, cols, inner].map(|of| dims.product(of) as u64);
        Self::one(rows, cols, inner)
    }

    /// The weight gradients of this many weights, each over its share of the terms.
    pub(super) fn of_weights(weights: u64, dims: &Dims, terms: u64, call: &Call) -> Self {
        let (calls, rows, cols) = (weights.max(1), dims.size("outputs") as u64, dims.size("inputs") as u64);
        let gradients = if call.sums { calls * rows * cols } else { 0 };
        Self { calls, gradients, ..Self::one(rows, cols, terms.div_ceil(calls)) }
    }
}

/// What is asked of a call besides its inputs.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// Which outputs are asked for.
    pub wanted: &'a [bool],
    /// Whether one of them is added to a sum.
    pub sums: bool,
}

/// What a call asks of the hardware.
pub type CostRule = fn(&Op, &Dims, &Call) -> Cost;

impl Op {
    /// What a call with these input types asks of the hardware, and its matmul FLOPs.
    pub fn cost(&self, inputs: &[&TensorType], call: &Call) -> Result<(Cost, Flops), TypeError> {
        let (spec, dims) = (self.spec(), self.bind(inputs)?);
        Ok(((spec.cost)(self, &dims, call), (spec.flops)(self, &dims, call.wanted)))
    }
}
