//! Whether the shardings of an op's operands go together, by the letters of its row.

use crate::{Axes, Op, Placement, Sharding};

/// Checks the operands of an op that does not communicate, along every axis of a stage: what is split, is split along one of the op's
/// groups of letters, in every operand that has them; an output without them is a partial sum.
pub(crate) fn check(op: &Op, inputs: &[Sharding], outputs: &[Option<Sharding>]) -> Result<(), String> {
    // Ops on flat ranges take every element on its own.
    if inputs.iter().any(|sharding| !sharding.axes(Placement::Flat).is_empty()) {
        return Ok(());
    }
    let spec = op.spec();
    let operands = (inputs.iter().enumerate().map(|(i, sharding)| (op.input(i, inputs.len()), sharding, true)))
        .chain(outputs.iter().enumerate().filter_map(|(o, sharding)| Some((op.output(o), sharding.as_ref()?, false))));
    let operands: Vec<_> = operands.collect();
    let alike = |i: usize| !std::ptr::eq(op.input(i, inputs.len()), &spec.inputs[0]) || inputs[i] == inputs[0];
    if spec.variadic && !(1..inputs.len()).all(alike) {
        return Err("takes several tensors of one sharding".into());
    }
    for axis in Axes::STAGE.iter() {
        let mut group = "";
        for (operand, sharding, _) in &operands {
            let Placement::Split(dim) = sharding.over(axis) else { continue };
            let letter = operand.dims.chars().nth(dim).unwrap_or('*');
            let Some(split) = spec.splits.iter().find(|group| group.contains(letter)) else {
                return Err(format!("`{}` cannot be split along dimension {dim}, over {}", operand.name, axis.name()));
            };
            if !group.is_empty() && group != *split {
                return Err(format!("is split along `{group}` and along `{split}` over {}", axis.name()));
            }
            group = split;
        }
        let partial = inputs.iter().any(|sharding| sharding.over(axis) == Placement::Partial);
        for (operand, sharding, input) in &operands {
            let found = sharding.over(axis);
            let dim = operand.dims.chars().position(|letter| group.contains(letter));
            let expected = match dim {
                Some(dim) => Placement::Split(dim),
                None if *input && found == Placement::Partial => Placement::Partial,
                None if !input && (partial || !group.is_empty()) => Placement::Partial,
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
