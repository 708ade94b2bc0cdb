//! The static verifier: facts that hold for every graph and program before anything runs.

use crate::TensorType;
use crate::account::DISTINCT_MICRO_BATCHES;
use crate::graph::{Graph, Phase, Source, State};
use crate::op::Elem;
use crate::program::{BufferId, Entry, Instr, Lifetime, Role, Slot, StepProgram};
use std::collections::BTreeMap;

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
    program.entries.iter().try_for_each(|entry| run_memory(program, entry))
}

fn check_instr(program: &StepProgram, instr: &Instr) -> Result<(), String> {
    let name = instr.op.name();
    let types: Vec<&TensorType> = instr.inputs.iter().map(|a| &a.ty).collect();
    let inferred = instr.op.infer(&types).map_err(|e| e.to_string())?;
    for (o, (ty, output)) in inferred.iter().zip(&instr.outputs).enumerate() {
        let Some(arg) = output else { continue };
        let dtype_fits = arg.ty.dtype == ty.dtype || (arg.accumulate && arg.ty.dtype.accumulates());
        if arg.ty.dims != ty.dims || !dtype_fits {
            return Err(format!("{name}: output {o} is {} where the op gives {ty}", arg.ty));
        }
        if arg.accumulate && instr.op.spec().outputs[o].elem != Elem::Float {
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

/// What a range of memory holds.
struct Held {
    end: u64,
    buffer: usize,
    value: usize,
    /// The micro-batch it was made for; `None` for what outlives the step.
    owner: Option<usize>,
}

/// Memory by name: (region, copy, start) of every range that holds a value. Ranges never overlap.
#[derive(Default)]
struct Memory {
    held: BTreeMap<(usize, usize, u64), Held>,
}

impl Memory {
    /// Forgets whatever shares bytes with the range.
    fn clobber(&mut self, region: usize, copy: usize, start: u64, end: u64) {
        let before = (region, copy, 0)..(region, copy, end);
        let hit: Vec<_> =
            self.held.range(before).rev().take_while(|(_, held)| held.end > start).map(|(key, _)| *key).collect();
        hit.into_iter().for_each(|key| {
            self.held.remove(&key);
        });
    }
}

fn run_memory(program: &StepProgram, entry: &Entry) -> Result<(), Unsound> {
    let instrs = entry.schedule.iter().flat_map(|s| &program.segments[s.segment].instrs);
    let mut used: Vec<Lifetime> = instrs.flat_map(buffers_of).map(|b| lifetime(program, b.0)).collect();
    used.sort_unstable();
    used.dedup();
    if used.contains(&Lifetime::Overlay) && (used.contains(&Lifetime::Saved) || used.contains(&Lifetime::Frame)) {
        return Err(unsound(format!("entry {}", entry.name), "uses the overlay and what lies under it"));
    }
    for slot in &entry.schedule {
        for region in &program.regions {
            if copy_in(region.lifetime, *slot) >= region.slots && used.contains(&region.lifetime) {
                let at = format!("entry {}, micro-batch {}", entry.name, slot.micro_batch);
                return Err(unsound(at, format!("the {} region has no such copy", region.lifetime.name())));
            }
        }
    }
    let mut memory = Memory::default();
    for tensor in &program.tensors {
        let b = &program.buffers[tensor.buffer.0];
        let copies = match tensor.role {
            Role::Input => 0..program.regions[b.region].slots.min(DISTINCT_MICRO_BATCHES),
            Role::State(_) => 0..1,
            Role::Output | Role::StepOutput => continue,
        };
        let known = program.values.iter().position(|v| *v == tensor.name);
        let value = known.ok_or_else(|| unsound("tensors", format!("`{}` is no value", tensor.name)))?;
        for copy in copies {
            let owner = (tensor.role == Role::Input).then_some(copy);
            memory.clobber(b.region, copy, b.offset, b.offset + b.bytes);
            let held = Held { end: b.offset + b.bytes, buffer: tensor.buffer.0, value, owner };
            memory.held.insert((b.region, copy, b.offset), held);
        }
    }
    for slot in entry.schedule.iter().filter(|s| s.micro_batch < DISTINCT_MICRO_BATCHES) {
        // A new slot finds nothing in the frame.
        let stays = |region: usize| !matches!(program.regions[region].lifetime, Lifetime::Frame | Lifetime::Overlay);
        memory.held.retain(|(region, _, _), _| stays(*region));
        for (i, instr) in program.segments[slot.segment].instrs.iter().enumerate() {
            run_instr(program, instr, *slot, &mut memory).map_err(|reason| {
                let name = program.segments[slot.segment].name;
                unsound(format!("{name} micro-batch {} instruction {i}", slot.micro_batch), reason)
            })?;
        }
    }
    Ok(())
}

fn run_instr(program: &StepProgram, instr: &Instr, slot: Slot, memory: &mut Memory) -> Result<(), String> {
    let name = instr.op.name();
    let copy = |b: usize| copy_in(lifetime(program, b), slot);
    let key = |b: usize| (program.buffers[b].region, copy(b), program.buffers[b].offset);
    let owner = |b: usize| (lifetime(program, b) != Lifetime::Run).then_some(slot.micro_batch);
    for arg in &instr.inputs {
        let b = arg.buffer.0;
        let found = memory.held.get(&key(b));
        if !found.is_some_and(|h| h.buffer == b && h.value == arg.value && h.owner == owner(b)) {
            let what = found.map_or("nothing", |h| program.values[h.value].as_str());
            return Err(format!("{name} reads `{}`, the buffer holds {what}", program.values[arg.value]));
        }
    }
    let shares = |a: BufferId, b: BufferId| {
        let (x, y) = (&program.buffers[a.0], &program.buffers[b.0]);
        x.region == y.region && x.offset < y.offset + y.bytes && y.offset < x.offset + x.bytes
    };
    let outputs: Vec<BufferId> = instr.outputs.iter().flatten().map(|a| a.buffer).collect();
    if let Some(w) = instr.workspace
        && instr.inputs.iter().map(|a| a.buffer).chain(outputs.iter().copied()).any(|b| shares(w, b))
    {
        return Err(format!("{name}: scratch overlaps an operand"));
    }
    for (o, &output) in outputs.iter().enumerate() {
        // Sharing one buffer whole is in-place work, which the op table has allowed; sharing a part never is.
        if instr.inputs.iter().any(|x| x.buffer != output && shares(x.buffer, output)) {
            return Err(format!("{name}: an output overlaps an input"));
        }
        if outputs[..o].iter().any(|&other| shares(other, output)) {
            return Err(format!("{name}: two outputs overlap"));
        }
    }
    let written = outputs.iter().copied().chain(instr.workspace);
    for b in written {
        let (region, copy, start) = key(b.0);
        memory.clobber(region, copy, start, start + program.buffers[b.0].bytes);
    }
    for arg in instr.outputs.iter().flatten() {
        let b = arg.buffer.0;
        let (end, value) = (program.buffers[b].offset + program.buffers[b].bytes, arg.value);
        memory.held.insert(key(b), Held { end, buffer: b, value, owner: owner(b) });
    }
    Ok(())
}

fn lifetime(program: &StepProgram, buffer: usize) -> Lifetime {
    program.regions[program.buffers[buffer].region].lifetime
}

fn copy_in(lifetime: Lifetime, slot: Slot) -> usize {
    match lifetime {
        Lifetime::Run | Lifetime::Frame | Lifetime::Overlay => 0,
        Lifetime::MicroBatch => slot.micro_batch,
        Lifetime::Saved => slot.saved_slot,
    }
}

fn buffers_of(instr: &Instr) -> impl Iterator<Item = BufferId> {
    let args = instr.inputs.iter().chain(instr.outputs.iter().flatten());
    args.map(|a| a.buffer).chain(instr.workspace)
}
