//! Gradients of norms.

use super::{At, Rules, Stop};
use lockstep_ir::{Op, OpKind, ValueId};

pub(super) const RULES: Rules = &[
    (OpKind::RmsNorm, rms_norm),
    (OpKind::LayerNorm, layer_norm),
    (OpKind::AddRmsNorm, add_rms_norm),
    (OpKind::AddLayerNorm, add_layer_norm),
    (OpKind::QkNorm, qk_norm),
];

impl At<'_> {
    /// The input gradient of a norm (a layer norm if it reads a mean too), plus `dsum` where another path has reached the same value.
    fn norm_input(&mut self, reads: &[ValueId], dsum: Option<ValueId>) -> Result<ValueId, Stop> {
        let op = match (reads.len() == 5, dsum.is_some()) {
            (false, false) => Op::RmsNormGrad,
            (false, true) => Op::AddRmsNormGrad,
            (true, false) => Op::LayerNormGrad,
            (true, true) => Op::AddLayerNormGrad,
        };
        let reads: Vec<ValueId> = reads.iter().copied().chain(dsum).collect();
        self.make(op, &reads, 0)
    }

    /// The input gradient of a norm of the first input. What has reached that on the residual path is added by the same kernel.
    fn norm(&mut self, reads: &[ValueId]) -> Result<(), Stop> {
        let before = self.all.grads[self.node.inputs[0].0].take();
        let dx = self.norm_input(reads, before)?;
        self.add(0, dx)
    }

    /// The same of a norm of the sum of two inputs.
    fn norm_of_sum(&mut self, reads: &[ValueId]) -> Result<(), Stop> {
        let dx = self.norm_input(reads, self.dy(0).ok())?;
        self.both(dx)
    }

    fn both(&mut self, dx: ValueId) -> Result<(), Stop> {
        self.add(0, dx)?;
        self.add(1, dx)
    }
}

fn rms_norm(at: &mut At) -> Result<(), Stop> {
    let dy = at.dy(0)?;
    at.weight(Op::RmsNormGradWeight, &[dy, at.input(0), at.output(1)], 1)?;
    at.norm(&[dy, at.input(0), at.input(1), at.output(1)])
}

fn layer_norm(at: &mut At) -> Result<(), Stop> {
    let dy = at.dy(0)?;
    at.weight(Op::LayerNormGradWeight, &[dy, at.input(0), at.output(1), at.output(2)], 1)?;
    at.weight(Op::BiasGrad, &[dy], 2)?;
    at.norm(&[dy, at.input(0), at.input(1), at.output(1), at.output(2)])
}

fn add_rms_norm(at: &mut At) -> Result<(), Stop> {
    let Ok(dy) = at.dy(1) else { return at.both(at.dy(0)?) };
    at.weight(Op::RmsNormGradWeight, &[dy, at.output(0), at.output(2)], 2)?;
    at.norm_of_sum(&[dy, at.output(0), at.input(2), at.output(2)])
}

fn add_layer_norm(at: &mut At) -> Result<(), Stop> {
    let Ok(dy) = at.dy(1) else { return at.both(at.dy(0)?) };
    at.weight(Op::LayerNormGradWeight, &[dy, at.output(0), at.output(2), at.output(3)], 2)?;
    at.weight(Op::BiasGrad, &[dy], 3)?;
    at.norm_of_sum(&[dy, at.output(0), at.input(2), at.output(2), at.output(3)])
}

fn qk_norm(at: &mut At) -> Result<(), Stop> {
    let dy = at.dy(0)?;
    at.weight(Op::QkNormGradWeight, &[dy, at.input(0), at.output(1)], 1)?;
    at.pass(Op::QkNormGrad, &[dy, at.input(0), at.input(1), at.output(1)], &[0])
}
