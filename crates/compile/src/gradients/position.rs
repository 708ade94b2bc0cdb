//! Gradients of positions.

use super::{At, Rules, Stop, attributes};
use lockstep_ir::{Op, OpKind};

pub(super) const RULES: Rules = &[(OpKind::AddPositions, add_positions), (OpKind::Rope, rope)];

fn add_positions(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::AddPositions { seq });
    let dy = at.dy(0)?;
    let reads: Vec<_> = [dy].into_iter().chain(at.given(2)).collect();
    at.weight(Op::PositionsGrad { rows: at.first_dim(1), seq }, &reads, 1)?;
    at.add(0, dy)
}

/// Backwards by the same angles.
fn rope(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::Rope { inverse });
    let reads: Vec<_> = [at.dy(0)?, at.input(1)].into_iter().chain(at.given(2)).collect();
    at.pass(Op::Rope { inverse: !inverse }, &reads, &[0])
}
