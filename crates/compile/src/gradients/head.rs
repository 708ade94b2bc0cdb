//! Gradients of losses. They are where gradients start: a loss's own gradient is its weight.

use super::{At, Rules, Stop};
use lockstep_ir::{Op, OpKind, TypeError};

pub(super) const RULES: Rules =
    &[(OpKind::CrossEntropy, cross_entropy), (OpKind::LinearCrossEntropy, linear_cross_entropy)];

fn cross_entropy(at: &mut At) -> Result<(), Stop> {
    let weight = at.loss_weight(0)?;
    let reads = [at.input(0), at.input(1), at.output(1)];
    at.pass(Op::CrossEntropyGrad { weight }, &reads, &[0])
}

/// It makes its gradients itself, times the loss scale that it reads.
fn linear_cross_entropy(at: &mut At) -> Result<(), Stop> {
    let weight = at.loss_weight(0)?;
    if weight != 1.0 && at.node.inputs.len() < 4 {
        let reason = format!("makes gradients of a loss of weight 1, not {weight}, where it reads no scalars");
        return Err(TypeError { op: at.node.op.name(), reason }.into());
    }
    if at.is_trained(at.node.inputs[1]) {
        at.sum_into_state(at.output(2), at.node.inputs[1]);
    }
    at.add(0, at.output(1))
}
