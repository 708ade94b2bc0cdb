//! Whether the shardings of an op's operands go together, by the dimensions of its row.

use crate::op::Split;
use crate::{Axes, Op, Placement, Sharding};

/// An operand's sharding and the number of its dimensions.
pub(crate) type Placed = (Sharding, usize);

/// Checks the operands of an op that does not communicate, along every axis of a stage: what is split, is split along one of the op's
/// groups of dimensions, in every operand that has them; an output without them is a partial sum, or the rank's own.
pub(crate) fn check(op: &Op, inputs: &[Placed], outputs: &[Option<Placed>]) -> Result<(), String> {
    // Ops on flat ranges take every element on its own.
    if inputs.iter().any(|(sharding, _)| !sharding.axes(Placement::Flat).is_empty()) {
        return Ok(());
    }
    let spec = op.spec();
    // With whether it is a partial sum where it lacks what is split.
    let given = inputs.iter().enumerate().map(|(i, placed)| (op.input(i, inputs.len()), placed, true, false));
    let own = |o: usize| spec.own.contains(&o);
    let made =
        outputs.iter().enumerate().filter_map(|(o, placed)| Some((op.output(o), placed.as_ref()?, false, !own(o))));
    let operands: Vec<_> = given.chain(made).collect();
    let alike = |i: usize| !std::ptr::eq(op.input(i, inputs.len()), &spec.inputs[0]) || inputs[i].0 == inputs[0].0;
    if spec.variadic && !(1..inputs.len()).all(alike) {
        return Err("takes several tensors of one sharding".into());
    }
    for axis in Axes::STAGE.iter() {
        let mut may: Option<Vec<Split>> = None;
        for (operand, (sharding, rank), ..) in &operands {
            let Placement::Split(dim) = sharding.over(axis) else { continue };
            let splits = spec.splits_of(operand, *rank, dim);
            let Some(split) = splits.first() else {
                return Err(format!("`{}` cannot be split along dimension {dim}, over {}", operand.name, axis.name()));
            };
            let both =
                may.as_ref().map_or(splits.clone(), |may| may.iter().filter(|s| splits.contains(s)).copied().collect());
            if let (true, Some([other, ..])) = (both.is_empty(), may.as_deref()) {
                return Err(format!("is split along {other} and along {split} over {}", axis.name()));
            }
            may = Some(both);
        }
        let chosen = may.and_then(|may| may.first().copied());
        let partial = inputs.iter().any(|(sharding, _)| sharding.over(axis) == Placement::Partial);
        for (operand, (sharding, rank), input, sums) in &operands {
            let found = sharding.over(axis);
            let expected = match chosen.and_then(|split| operand.dim_of(split, *rank)) {
                Some(dim) => Placement::Split(dim),
                None if *input && found == Placement::Partial => Placement::Partial,
                None if *sums && (partial || chosen.is_some()) => Placement::Partial,
                None => Placement::Replicated,
            };
            if found != expected {
                let (name, axis) = (operand.name, axis.name());
                return Err(format!("`{name}` is {found:?} over {axis} where the others make it {expected:?}"));
            }
        }
    }
    Ok(())
}
