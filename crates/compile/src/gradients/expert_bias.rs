//! Gradients of biases of experts.

use super::{At, Rules, Stop, attributes};
use lockstep_ir::{Op, OpKind};

pub(super) const RULES: Rules = &[(OpKind::GroupedBias, grouped_bias)];

fn grouped_bias(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::GroupedBias { rows });
    let (dy, experts) = (at.dy(0)?, at.first_dim(1));
    at.weight(Op::GroupedBiasGrad { rows, experts }, &[dy, at.input(2)], 1)?;
    at.add(0, dy)
}
