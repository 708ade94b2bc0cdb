//! Gradients of norms.

use super::{At, Rules, Stop, attributes};
use lockstep_ir::op::Norm;
use lockstep_ir::{Op, OpKind, ValueId};

pub(super) const RULES: Rules = &[(OpKind::Norm, norm), (OpKind::QkNorm, qk_norm)];

impl At<'_> {
    /// Adds the gradient of a sum to both of its terms.
    fn both(&mut self, dx: ValueId) -> Result<(), Stop> {
        self.add(0, dx)?;
        self.add(1, dx)
    }
}

/// With a residual it norms its first output, and without one its first input. What has reached that value on another path is added by the
/// kernel of the input gradient.
fn norm(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::Norm { norm, residual, .. });
    let before = usize::from(residual);
    let dy = match at.dy(before) {
        Ok(dy) => dy,
        Err(stop) => return if residual { at.both(at.dy(0)?) } else { Err(stop) },
    };
    let (normed, w) = (if residual { at.output(0) } else { at.input(0) }, 1 + before);
    let statistics: Vec<ValueId> = (w..w + norm.statistics()).map(|output| at.output(output)).collect();
    at.weight(Op::NormGradWeight { norm: norm.of_weight() }, &[&[dy, normed], &statistics[..]].concat(), w)?;
    if norm == Norm::Layer {
        at.weight(Op::BiasGrad, &[dy], w + 1)?;
    }
    let other = if residual { at.dy(0).ok() } else { at.all.grads[at.node.inputs[0].0].take() };
    let reads: Vec<ValueId> = [dy, normed, at.input(w)].into_iter().chain(statistics).chain(other).collect();
    let dx = at.make(Op::NormGrad { norm, residual: other.is_some() }, &reads, 0)?;
    if residual { at.both(dx) } else { at.add(0, dx) }
}

fn qk_norm(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::QkNorm { plus_one, .. });
    let dy = at.dy(0)?;
    at.weight(Op::QkNormGradWeight, &[dy, at.input(0), at.output(1)], 1)?;
    at.pass(Op::QkNormGrad { plus_one }, &[dy, at.input(0), at.input(1), at.output(1)], &[0])
}
