//! Gradients of matmuls with weights, and of biases.

use super::{At, Rules, Stop};
use lockstep_ir::{Op, OpKind};

pub(super) const RULES: Rules = &[(OpKind::Linear, linear), (OpKind::AddBias, add_bias)];

fn linear(at: &mut At) -> Result<(), Stop> {
    let dy = at.dy(0)?;
    let dx = at.make(Op::LinearGradInput, &[dy, at.input(1)], 0)?;
    let x = at.cast_again(0)?;
    at.weight(Op::LinearGradWeight, &[dy, x], 1)?;
    at.add(0, dx)
}

fn add_bias(at: &mut At) -> Result<(), Stop> {
    let dy = at.dy(0)?;
    at.weight(Op::BiasGrad, &[dy], 1)?;
    at.add(0, dy)
}
