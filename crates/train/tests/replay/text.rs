//! What runs, as text to hash: kernels with their attributes, shapes, offsets, streams and order; not what values and dimensions are called.

use lockstep_ir::op::Ring;
use lockstep_ir::program::{Arg, Instr, Segment, Sum};
use lockstep_ir::{Op, StepProgram, TensorType};
use std::fmt::Write;

/// The name under which the corpus knows a kernel, and its attributes. An op that gets another name, or becomes an attribute of another,
/// keeps its old one here, so that the corpus stays as it is.
fn kernel(op: &Op) -> String {
    let ring = match *op {
        Op::PartAttention { window, ring } | Op::PartAttentionGrad { window, ring } => Some((window, ring)),
        _ => None,
    };
    let attributes = match ring {
        Some((window, Some(Ring { step, parts }))) => {
            format!(" {{ window: {window:?}, step: {step}, parts: {parts} }}")
        }
        Some((window, None)) => format!(" {{ window: {window:?} }}"),
        None => op.attributes(),
    };
    let name = if *op == Op::StackTotals { "stack_loads" } else { op.name() };
    format!("{name}{attributes}")
}

/// What lies where, by lifetime: tensors by the names that checkpoints and hosts know.
pub fn memory(program: &StepProgram) -> String {
    let mut text = String::new();
    for region in &program.regions {
        let (lifetime, slots) = (region.lifetime.name(), region.slots);
        writeln!(text, "{lifetime} at {}: {slots} of {} bytes", region.offset, region.slot_bytes).unwrap();
    }
    for tensor in &program.tensors {
        writeln!(text, "{}: {} at {}", tensor.name, shape(&tensor.ty), place(program, tensor.buffer.0)).unwrap();
    }
    text
}

/// The instructions of a segment.
pub fn segment(program: &StepProgram, segment: &Segment) -> String {
    segment.instrs.iter().enumerate().map(|(at, i)| instruction(program, segment, at, i)).collect()
}

/// The schedule of every entry.
pub fn entries(program: &StepProgram) -> String {
    let slots = |entry: &lockstep_ir::program::Entry| format!("{}: {:?}\n", entry.name, entry.schedule);
    program.entries.iter().map(slots).collect()
}

fn instruction(program: &StepProgram, segment: &Segment, at: usize, instr: &Instr) -> String {
    let operand = |a: &Arg| {
        let sum = match a.sum {
            Sum::No => "",
            Sum::AfterFirst => " +first",
            Sum::Always => " +",
        };
        format!("{} at {}{sum} {} {}", shape(&a.ty), place(program, a.buffer.0), a.sharding, a.part)
    };
    let inputs: Vec<String> = instr.inputs.iter().map(operand).collect();
    let outputs: Vec<String> = instr.outputs.iter().map(|o| o.as_ref().map_or("_".to_owned(), operand)).collect();
    let scratch = instr.workspace.map(|w| format!("{} bytes at {}", program.buffers[w.0].bytes, place(program, w.0)));
    let group = segment.group_of(at).map(|group| (group.fusion.name(), group.instrs.clone()));
    let tf32 = if instr.tf32 { " in tf32" } else { "" };
    format!(
        "{} {:?} {:?} {}{tf32} <- {inputs:?} -> {outputs:?} after {:?}, scratch {scratch:?}, group {group:?}, {:?}\n",
        instr.phase.letter(),
        instr.stream,
        instr.layer,
        kernel(&instr.op),
        instr.waits,
        instr.offsets,
    )
}

fn place(program: &StepProgram, buffer: usize) -> String {
    let buffer = &program.buffers[buffer];
    format!("{}+{}", program.regions[buffer.region].lifetime.name(), buffer.offset)
}

/// Sizes of dimensions, by section.
fn shape(ty: &TensorType) -> String {
    let dim = |d: &lockstep_ir::Dim| d.sections.iter().map(|s| s.size().to_string()).collect::<Vec<_>>().join("+");
    format!("{}[{}]", ty.dtype.name(), ty.dims.iter().map(dim).collect::<Vec<_>>().join(","))
}
