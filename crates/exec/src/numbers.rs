//! Whether what instructions make is finite: a look at every output, for whoever searches the first NaN of a run.
//!
//! Every output is looked at before the next kernel runs.

use crate::ExecError;
use crate::bound::{At, Bound};
use lockstep_ir::dynamic8::BLOCK_BYTES;
use lockstep_ir::graph::Phase;
use lockstep_ir::program::{Arg, Slot};
use lockstep_ir::{DType, F8, Op, StepProgram, bf16, f16, fixed, units};
use std::ops::Range;

/// The first tensor that had a number that is not finite, and what made it.
#[derive(Clone, Debug, PartialEq)]
pub struct NotFinite {
    /// Its name.
    pub tensor: String,
    /// Its first such number.
    pub value: f64,
    /// Where that is, in elements.
    pub element: usize,
    /// Elements that it has.
    pub elements: usize,
    /// The op, or those that were done as one.
    pub op: String,
    /// The layer that this belongs to.
    pub layer: Option<usize>,
    /// The part of the step.
    pub phase: Phase,
    /// The micro-batch.
    pub micro_batch: usize,
    /// Those of its inputs that are not finite themselves: of what nobody looks at, weights that were so from the start, say.
    pub inputs: Vec<String>,
}

impl std::fmt::Display for NotFinite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { tensor, value, element, elements, op, micro_batch, .. } = self;
        let of = units::thousands(*elements as u64);
        write!(f, "`{tensor}` has {value} at element {element} of {of}: made by {op}")?;
        if let Some(layer) = self.layer {
            write!(f, " in layer {layer}")?;
        }
        write!(f, ", {}, micro-batch {micro_batch}", self.phase.name())?;
        match &self.inputs[..] {
            [] => Ok(()),
            inputs => write!(f, "; not finite were already {}", inputs.join(", ")),
        }
    }
}

/// Looks at what instructions of a segment have made that are done as one, `together`: those before `first` leave nothing behind that could be
/// looked at. `find` gives the first element of an operand that is not finite, and where its second argument says so, −∞ is none.
pub fn look(
    program: &StepProgram,
    bounds: &[Bound],
    (slot, together, first): (Slot, Range<usize>, usize),
    find: impl Fn(&At, bool) -> Result<Option<(usize, f64)>, ExecError>,
) -> Result<(), ExecError> {
    let instrs = &program.segments[slot.segment].instrs;
    for i in first..together.end {
        let (bound, instr) = (&bounds[i], &instrs[i]);
        // Its NaN says that the update is not applied.
        if bound.op == Op::GradientNorm {
            continue;
        }
        for (o, (at, arg)) in bound.outputs.iter().zip(&instr.outputs).enumerate() {
            let (Some(at), Some(arg)) = (at, arg) else { continue };
            let may_see_nothing = bound.op.output(o).name == "lse";
            let Some((element, value)) = find(at, may_see_nothing)? else { continue };
            let made_by = if i == first { together.start..i + 1 } else { i..i + 1 };
            let ops: Vec<&str> = made_by.clone().map(|i| bounds[i].op.name()).collect();
            let mut inputs = Vec::new();
            for (at, arg) in made_by.flat_map(|i| bounds[i].inputs.iter().zip(&instrs[i].inputs)) {
                if !written(bounds, together.clone(), (at, slot)) && find(at, true)?.is_some() {
                    inputs.push(format!("`{}`", named(program, arg)));
                }
            }
            return Err(ExecError::NotFinite(Box::new(NotFinite {
                tensor: named(program, arg).to_owned(),
                value,
                element,
                elements: at.elements,
                op: ops.join(" and "),
                layer: instr.layer,
                phase: instr.phase,
                micro_batch: slot.micro_batch,
                inputs,
            })));
        }
    }
    Ok(())
}

fn named<'a>(program: &'a StepProgram, arg: &Arg) -> &'a str {
    &program.values[arg.value]
}

/// Whether an operand was made or overwritten by these instructions: what it was before is not known then.
fn written(bounds: &[Bound], together: Range<usize>, (at, slot): (&At, Slot)) -> bool {
    let mut outputs = bounds[together].iter().flat_map(|bound| bound.outputs.iter().flatten());
    outputs.any(|output| output.offset(slot) == at.offset(slot))
}

/// The first element that is not finite. A log-sum-exp over nothing is −∞.
pub fn first(dtype: DType, bytes: &[u8], may_see_nothing: bool) -> Option<(usize, f64)> {
    let bad = |x: &f64| !(x.is_finite() || (may_see_nothing && *x == f64::NEG_INFINITY));
    let find = |values: &mut dyn Iterator<Item = f64>| values.enumerate().find(|(_, x)| bad(x));
    match dtype {
        DType::F32 => find(&mut bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b)))),
        DType::F64 => find(&mut bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b))),
        DType::BF16 => find(&mut bytes.as_chunks().0.iter().map(|b| f64::from(bf16::to_f32(u16::from_le_bytes(*b))))),
        DType::F16 => find(&mut bytes.as_chunks().0.iter().map(|b| f64::from(f16::to_f32(u16::from_le_bytes(*b))))),
        DType::Fixed64 => {
            find(&mut bytes.as_chunks().0.iter().map(|b| f64::from(fixed::to_f32(i64::from_le_bytes(*b)))))
        }
        DType::E4M3 => find(&mut bytes.iter().map(|b| f64::from(F8::E4M3.to_f32(*b)))),
        DType::E5M2 => find(&mut bytes.iter().map(|b| f64::from(F8::E5M2.to_f32(*b)))),
        // Of a block, its scale.
        DType::Signed8 | DType::Unsigned8 => {
            let scale = |b: &[u8; BLOCK_BYTES]| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            find(&mut bytes.as_chunks().0.iter().map(scale))
        }
        DType::U32 | DType::Int8 => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_finite_is_found_in_every_type() {
        let floats = |x: &[f32]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        assert_eq!(first(DType::F32, &floats(&[1.0, f32::MAX]), false), None);
        assert_eq!(first(DType::F32, &floats(&[1.0, f32::INFINITY, f32::NAN]), false), Some((1, f64::INFINITY)));
        assert_eq!(first(DType::F32, &floats(&[1.0, f32::NEG_INFINITY]), true), None);
        let halves = |x: &[u16]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let nan = |found: Option<(usize, f64)>| found.is_some_and(|(at, x)| at == 1 && x.is_nan());
        assert!(nan(first(DType::BF16, &halves(&[0, bf16::from_f32(f32::NAN)]), false)));
        assert!(nan(first(DType::F16, &halves(&[0, f16::from_f32(f32::NAN)]), false)));
        assert!(nan(first(DType::F64, &[1.0, f64::NAN].map(f64::to_le_bytes).concat(), false)));
        assert!(nan(first(DType::Fixed64, &[5, fixed::POISON].map(i64::to_le_bytes).concat(), false)));
        assert_eq!(first(DType::U32, &[0xff; 8], false), None);
    }
}
