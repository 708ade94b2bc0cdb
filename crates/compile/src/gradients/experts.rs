//! Gradients of routers and of matmuls of experts.

use super::{At, Rules, Stop, attributes};
use lockstep_ir::{Op, OpKind, ValueId};

pub(super) const RULES: Rules = &[
    (OpKind::Route, route),
    // Counts do not change with what is chosen a little more.
    (OpKind::ExpertCounts, |_| Ok(())),
    (OpKind::RouterLoss, router_loss),
    (OpKind::GroupedLinear, grouped_linear),
    (OpKind::Combine, combine),
];

fn route(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::Route { how, .. });
    let reads = [at.dy(0)?, at.input(0), at.output(1)];
    at.pass(Op::RouteGrad { how }, &reads, &[0])
}

fn router_loss(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::RouterLoss { balance, z });
    let weight = at.loss_weight(0)?;
    let op = Op::RouterLossGrad { balance: weight * balance, z: weight * z };
    let reads: Vec<ValueId> = [at.input(0), at.input(1)].into_iter().chain(at.all.scalars).collect();
    at.pass(op, &reads, &[0])
}

impl At<'_> {
    /// Appends the gradient of the first input by each of a token's choices, which are to be added up.
    pub(super) fn each(&mut self, op: Op, reads: &[ValueId]) -> Result<ValueId, Stop> {
        let name = format!("{}.each", self.name(self.node.inputs[0]));
        Ok(self.append(op, reads, &name)?[0])
    }
}

fn grouped_linear(at: &mut At) -> Result<(), Stop> {
    attributes!(at, Op::GroupedLinear { each });
    let (dy, experts) = (at.dy(0)?, at.first_dim(1));
    let (reads, weight) = ([dy, at.input(1), at.input(2)], Op::GroupedGradWeight { each, experts });
    let dx = if each { at.make(Op::GroupedGradInput, &reads, 0)? } else { at.each(Op::GroupedGradInput, &reads)? };
    at.weight(weight, &[dy, at.input(0), at.input(2)], 1)?;
    if each { at.add(0, dx) } else { at.pass(Op::Combine { weighted: false }, &[dx], &[0]) }
}

fn combine(at: &mut At) -> Result<(), Stop> {
    let reads = [at.dy(0)?, at.input(0), at.input(1)];
    at.pass(Op::CombineGrad, &reads, &[0, 1])
}
