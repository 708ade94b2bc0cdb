//! The static verifier: facts that hold for every graph and program before anything runs.

use crate::graph::{Graph, Phase, Source, State};
use crate::op::Elem;
use crate::program::{Arg, Instr, Lifetime, Role, StepProgram};
use crate::{DType, TensorType};
use std::collections::HashMap;

/// Why a graph or program is not sound. Always a bug of a pass, never of a user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {reason}")]
pub struct Unsound {
    /// Where.
    pub at: String,
    /// What is wrong.
    pub reason: String,
}

fn unsound(at: impl Into<String>, reason: impl Into<String>) -> Unsound {
    Unsound { at: at.into(), reason: reason.into() }
}

/// Checks that every value is defined once and before its use, that types follow the op table, and that sums into
/// states and updates fit their states.
pub fn graph(graph: &Graph) -> Result<(), Unsound> {
    let mut defined: Vec<bool> = graph.values.iter().map(|v| !matches!(v.source, Source::Node { .. })).collect();
    let mut phase = Phase::Forward;
    for (n, node) in graph.nodes.iter().enumerate() {
        let at = format!("node {n} ({})", node.op.name());
        if let Some(v) = node.inputs.iter().find(|v| !defined[v.0]) {
            return Err(unsound(at, format!("reads `{}` before it is defined", graph.get(*v).name)));
        }
        if node.phase < phase && (phase == Phase::Update || node.phase == Phase::Forward) {
            return Err(unsound(at, "stands behind a later phase"));
        }
        phase = node.phase;
        let types = node.op.infer(&graph.input_types(node)).map_err(|e| unsound(&at, e.to_string()))?;
        if types.len() != node.outputs.len() {
            return Err(unsound(at, format!("has {} outputs of {}", node.outputs.len(), types.len())));
        }
        for (ty, output) in types.iter().zip(&node.outputs) {
            let Some(v) = output else { continue };
            let value = graph.get(*v);
            if std::mem::replace(&mut defined[v.0], true) {
                return Err(unsound(at, format!("defines `{}` a second time", value.name)));
            }
            if value.ty != *ty {
                return Err(unsound(at, format!("`{}` is {} where the op gives {ty}", value.name, value.ty)));
            }
            if let Source::Node { into: Some(state) } = value.source {
                let state = graph.get(state);
                if state.source != Source::State(State::Gradient) || state.ty.dims != ty.dims {
                    return Err(unsound(at, format!("`{}` cannot be summed into `{}`", value.name, state.name)));
                }
            }
        }
    }
    for &(state, value) in &graph.updates {
        if !defined[value.0] || graph.ty(state) != graph.ty(value) {
            return Err(unsound("updates", format!("`{}` does not fit", graph.get(state).name)));
        }
    }
    match graph.outputs.iter().find(|v| !defined[v.0]) {
        Some(v) => Err(unsound("outputs", format!("`{}` is not defined", graph.get(*v).name))),
        None => Ok(()),
    }
}

/// Checks placement (inside the region, aligned, regions without gaps), types, and then *runs the memory*: every entry is
/// walked with the name of the value that each byte range holds, and every read must find the value that it means.
pub fn program(program: &StepProgram, alignment: u64) -> Result<(), Unsound> {
    let mut end = 0;
    for region in &program.regions {
        if region.lifetime == Lifetime::Overlay {
            let saved = program.regions.iter().find(|r| r.lifetime == Lifetime::Saved).map_or(end, |r| r.offset);
            if region.offset != saved || region.offset + region.bytes() > end {
                return Err(unsound("region overlay", "does not lie over the saved region and the frame"));
            }
            continue;
        }
        if region.offset != end || !region.slot_bytes.is_multiple_of(alignment) {
            return Err(unsound(format!("region {}", region.lifetime.name()), "is not packed or not aligned"));
        }
        end += region.bytes();
    }
    if end != program.arena_bytes {
        return Err(unsound("arena", format!("has {} bytes, its regions {end}", program.arena_bytes)));
    }
    for b in &program.buffers {
        if b.offset + b.bytes > program.regions[b.region].slot_bytes || !b.offset.is_multiple_of(alignment) {
            return Err(unsound(format!("buffer {}", b.name), "leaves its region or is not aligned"));
        }
    }
    for segment in &program.segments {
        for (i, instr) in segment.instrs.iter().enumerate() {
            check_instr(program, instr).map_err(|reason| unsound(format!("{} {i}", segment.name), reason))?;
        }
    }
    let overlaps = overlaps(program);
    for entry in &program.entries {
        run_memory(program, entry.name, &overlaps)?;
    }
    Ok(())
}

fn check_instr(program: &StepProgram, instr: &Instr) -> Result<(), String> {
    let name = instr.op.name();
    let types: Vec<&TensorType> = instr.inputs.iter().map(|a| &a.ty).collect();
    let inferred = instr.op.infer(&types).map_err(|e| e.to_string())?;
    for (o, (ty, output)) in inferred.iter().zip(&instr.outputs).enumerate() {
        let Some(arg) = output else { continue };
        let dtype_fits = arg.ty.dtype == ty.dtype || (arg.accumulate && arg.ty.dtype == DType::Fixed64);
        if arg.ty.dims != ty.dims || !dtype_fits {
            return Err(format!("{name}: output {o} is {} where the op gives {ty}", arg.ty));
        }
        if arg.accumulate && !matches!(instr.op.spec().outputs[o].elem, Elem::Is(DType::F32)) {
            return Err(format!("{name}: output {o} cannot be accumulated"));
        }
        for (i, input) in instr.inputs.iter().enumerate() {
            if input.buffer == arg.buffer && !instr.op.spec().in_place.contains(&(i, o)) {
                return Err(format!("{name}: output {o} overwrites input {i}"));
            }
        }
        let state = instr.op.spec().in_place.iter().find(|(_, to)| *to == o).map(|(i, _)| &instr.inputs[*i]);
        if instr.op.spec().always_in_place && state.is_some_and(|input| input.buffer != arg.buffer) {
            return Err(format!("{name}: output {o} must be in place"));
        }
    }
    for arg in instr.inputs.iter().chain(instr.outputs.iter().flatten()) {
        if arg.ty.bytes() > program.buffers[arg.buffer.0].bytes {
            return Err(format!("{name}: `{}` does not fit its buffer", program.values[arg.value]));
        }
    }
    Ok(())
}

/// For every buffer, the others that share bytes with it.
fn overlaps(program: &StepProgram) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..program.buffers.len()).collect();
    order.sort_by_key(|&i| (program.buffers[i].region, program.buffers[i].offset));
    let mut result = vec![Vec::new(); program.buffers.len()];
    for (k, &i) in order.iter().enumerate() {
        let a = &program.buffers[i];
        for &j in &order[k + 1..] {
            let b = &program.buffers[j];
            if b.region != a.region || b.offset >= a.offset + a.bytes {
                break;
            }
            result[i].push(j);
            result[j].push(i);
        }
    }
    result
}

/// What a copy of a buffer holds: a value, and the micro-batch it was made for (`None` for what outlives the step).
type Holds = HashMap<(usize, usize), (usize, Option<usize>)>;

fn run_memory(program: &StepProgram, entry: &str, overlaps: &[Vec<usize>]) -> Result<(), Unsound> {
    // Three micro-batches show every transition between neighbours; more would repeat them.
    const MICRO_BATCHES: usize = 3;
    let Some(entry) = program.entry(entry) else { return Err(unsound("entries", format!("no `{entry}`"))) };
    let mut holds: Holds = HashMap::new();
    let instrs = entry.schedule.iter().flat_map(|s| &program.segments[s.segment].instrs);
    let buffers =
        instrs.flat_map(|i| i.inputs.iter().chain(i.outputs.iter().flatten()).map(|a| a.buffer).chain(i.workspace));
    let used: Vec<Lifetime> = buffers.map(|b| program.regions[program.buffers[b.0].region].lifetime).collect();
    if used.contains(&Lifetime::Overlay) && (used.contains(&Lifetime::Saved) || used.contains(&Lifetime::Frame)) {
        return Err(unsound(format!("entry {}", entry.name), "uses the overlay and what lies under it"));
    }
    let lifetime = |b: usize| program.regions[program.buffers[b].region].lifetime;
    let id = |name: &str| program.values.iter().position(|v| v == name);
    for tensor in &program.tensors {
        let copies = match tensor.role {
            Role::Input => 0..MICRO_BATCHES,
            Role::State(_) => 0..1,
            Role::Output | Role::StepOutput => continue,
        };
        let value = id(&tensor.name).ok_or_else(|| unsound("tensors", format!("`{}` is no value", tensor.name)))?;
        for copy in copies {
            let owner = (tensor.role == Role::Input).then_some(copy);
            holds.insert((tensor.buffer.0, copy), (value, owner));
        }
    }
    for slot in entry.schedule.iter().filter(|s| s.micro_batch < MICRO_BATCHES) {
        let segment = &program.segments[slot.segment];
        let copy_of = |b: usize| match lifetime(b) {
            Lifetime::Run | Lifetime::Frame | Lifetime::Overlay => 0,
            Lifetime::MicroBatch => slot.micro_batch,
            Lifetime::Saved => slot.saved_slot,
        };
        // A new slot finds nothing in the frame.
        holds.retain(|(b, _), _| !matches!(lifetime(*b), Lifetime::Frame | Lifetime::Overlay));
        for (i, instr) in segment.instrs.iter().enumerate() {
            let at = || format!("{} micro-batch {} instruction {i}", segment.name, slot.micro_batch);
            let owner = |arg: &Arg| match lifetime(arg.buffer.0) {
                Lifetime::Run => None,
                _ => Some(slot.micro_batch),
            };
            for arg in &instr.inputs {
                let b = arg.buffer.0;
                let found = holds.get(&(b, copy_of(b)));
                if found != Some(&(arg.value, owner(arg))) {
                    let what = found.map_or("nothing", |(v, _)| program.values[*v].as_str());
                    let reason =
                        format!("{} reads `{}`, the buffer holds {what}", instr.op.name(), program.values[arg.value]);
                    return Err(unsound(at(), reason));
                }
            }
            let mut clobber = |b: usize| {
                holds.remove(&(b, copy_of(b)));
                for &other in &overlaps[b] {
                    holds.remove(&(other, copy_of(other)));
                }
            };
            if let Some(w) = instr.workspace {
                clobber(w.0);
                if instr
                    .inputs
                    .iter()
                    .chain(instr.outputs.iter().flatten())
                    .any(|a| overlaps[w.0].contains(&a.buffer.0))
                {
                    return Err(unsound(at(), format!("{}: scratch overlaps an operand", instr.op.name())));
                }
            }
            for arg in instr.outputs.iter().flatten() {
                if instr.inputs.iter().any(|x| overlaps[arg.buffer.0].contains(&x.buffer.0)) {
                    return Err(unsound(at(), format!("{}: an output overlaps an input", instr.op.name())));
                }
                clobber(arg.buffer.0);
            }
            for arg in instr.outputs.iter().flatten() {
                holds.insert((arg.buffer.0, copy_of(arg.buffer.0)), (arg.value, owner(arg)));
            }
        }
    }
    Ok(())
}
