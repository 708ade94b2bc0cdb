//! Gradients of matmuls with weights in bytes, which are not trained.

use super::{At, Rules, Stop};
use lockstep_ir::{Op, OpKind};

pub(super) const RULES: Rules = &[(OpKind::ByteLinear, linear)];

fn linear(at: &mut At) -> Result<(), Stop> {
    let dy = at.dy(0)?;
    let dx = at.make(Op::ByteLinearGradInput, &[dy, at.input(1), at.input(2)], 0)?;
    at.add(0, dx)
}
