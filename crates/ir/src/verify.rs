//! The static verifier: facts that hold for every graph and program before anything runs.

mod memory;

use crate::fusion::FusedGroup;
use crate::graph::{Graph, Node, Phase, Source, State};
use crate::op::{Elem, Operand, Transfer};
use crate::placements::Placed;
use crate::program::{Arg, BufferId, Instr, Lifetime, Offsets, Segment, Slot, StepProgram, Stream, Sum};
use crate::walk::Walk;
use crate::{Axes, DType, Dim, Op, Placement, TensorType, ValueId, gathered, placements};

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
    let given = |source: &Source| matches!(source, Source::Input | Source::State(_));
    let mut defined: Vec<bool> = graph.values.iter().map(|v| given(&v.source)).collect();
    let mut phase = Phase::Prepare;
    for (n, node) in graph.nodes.iter().enumerate() {
        let at = format!("node {n} ({})", node.op.name());
        if let Some(v) = node.inputs.iter().find(|v| !defined[v.0]) {
            return Err(unsound(at, format!("reads `{}` before it is defined", graph.get(*v).name)));
        }
        // A partial sum must be reduced before use: only reductions, ops that pass it on and those that look at a rank's own part
        // may read one.
        if let Some(v) = graph.unreduced(node) {
            return Err(unsound(at, format!("reads `{}`, which is not summed over ranks", graph.get(v).name)));
        }
        if node.phase < phase && (phase == Phase::Update || node.phase <= Phase::Forward) {
            return Err(unsound(at, "comes after a later phase"));
        }
        phase = node.phase;
        check_shardings(graph, node).map_err(|reason| unsound(&at, reason))?;
        let types = node.op.infer(&graph.input_types(node)).map_err(|e| unsound(&at, e.to_string()))?;
        if types.len() != node.outputs.len() {
            return Err(unsound(at, format!("has {} outputs of {}", node.outputs.len(), types.len())));
        }
        for (o, (ty, output)) in types.iter().zip(&node.outputs).enumerate() {
            let Some(v) = output else { continue };
            let value = graph.get(*v);
            if std::mem::replace(&mut defined[v.0], true) {
                return Err(unsound(at, format!("defines `{}` a second time", value.name)));
            }
            let dtype_fits = value.ty.dtype == ty.dtype || follows(node.op.output(o), value.ty.dtype);
            if value.ty.dims != ty.dims || !dtype_fits {
                return Err(unsound(at, format!("`{}` is {} where the op gives {ty}", value.name, value.ty)));
            }
            if let Source::Node { into: Some(id) } = value.source {
                let state = graph.get(id);
                let sums =
                    matches!(state.source, Source::State(State::Gradient { .. } | State::Total(_)) | Source::Sum);
                defined[id.0] = true;
                if !sums || state.ty != value.ty {
                    return Err(unsound(at, format!("`{}` cannot be summed into `{}`", value.name, state.name)));
                }
            }
        }
    }
    for &(state, value) in graph.updates.iter().chain(&graph.parts) {
        if !defined[value.0] || graph.ty(state) != graph.ty(value) {
            return Err(unsound("updates", format!("`{}` does not fit", graph.get(state).name)));
        }
    }
    match graph.outputs.iter().find(|v| !defined[v.0]) {
        Some(v) => Err(unsound("outputs", format!("`{}` is not defined", graph.get(*v).name))),
        None => Ok(()),
    }
}

/// The shardings of what a node reads and makes; of a sum, where it adds to one.
fn check_shardings(graph: &Graph, node: &Node) -> Result<(), String> {
    let sharding = |v: ValueId| match graph.get(v).source {
        Source::Node { into: Some(sum) } => graph.get(sum).sharding,
        Source::Node { into: None } | Source::Input | Source::State(_) | Source::Sum => graph.get(v).sharding,
    };
    let rank = |v: ValueId| graph.ty(v).dims.len();
    let inputs: Vec<Placed> = node.inputs.iter().map(|v| (graph.get(*v).sharding, rank(*v))).collect();
    let outputs: Vec<Option<Placed>> = node.outputs.iter().map(|v| v.map(|v| (sharding(v), rank(v)))).collect();
    operand_shardings(&node.op, node.phase, &inputs, &outputs)
}

fn operand_shardings(op: &Op, phase: Phase, inputs: &[Placed], outputs: &[Option<Placed>]) -> Result<(), String> {
    if op.reshards() {
        for ((x, _), (y, _)) in inputs.iter().zip(outputs.iter().flatten()) {
            let after = x.after(op).map_err(|e| e.reason)?;
            if after != *y {
                return Err(format!("what is {x} becomes {after}, and is taken to be {y}"));
            }
        }
        return Ok(());
    }
    // Updates take elements as they are, and messages anything.
    let computes = match phase {
        // A copy too takes elements as they are.
        Phase::Prepare => *op != Op::Accumulate,
        Phase::Forward | Phase::InputGrad | Phase::WeightGrad => true,
        Phase::Reduce | Phase::Probe | Phase::Update => false,
    };
    let computes = computes && !op.communicates();
    if computes { placements::check(op, inputs, outputs) } else { Ok(()) }
}

/// Whether an output takes its type from its value: sums of gradients, and rounded copies.
fn follows(operand: &Operand, dtype: DType) -> bool {
    match operand.elem {
        Elem::Accumulator => dtype.accumulates(),
        Elem::Rounded => dtype.is_rounded(),
        Elem::Is(_) | Elem::Float(_) | Elem::Fp8 | Elem::Byte | Elem::Weight | Elem::Moment | Elem::Any => false,
    }
}

/// Checks placement (inside the region, aligned, regions without gaps), types, and then *runs the memory*: every entry is
/// walked with the name of the value that each byte range holds, and every read must find the value that it means.
pub fn program(program: &StepProgram, alignment: u64) -> Result<(), Unsound> {
    let (mut end, mut host_end) = (0, program.arena_bytes);
    for region in &program.regions {
        if region.lifetime == Lifetime::Overlay {
            let saved =
                program.regions.iter().find(|r| matches!(r.lifetime, Lifetime::Saved(_))).map_or(end, |r| r.offset);
            if region.offset != saved || region.offset + region.bytes() > end {
                return Err(unsound("region overlay", "does not lie over the saved regions and the frame"));
            }
            continue;
        }
        if region.lifetime == Lifetime::Step {
            let run = program.regions.iter().find(|r| r.lifetime == Lifetime::Run);
            if run.is_none_or(|run| region.offset != run.offset || region.bytes() > run.bytes()) {
                return Err(unsound("region step", "does not lie over what outlives the step"));
            }
            continue;
        }
        if region.lifetime.is_in_host() {
            if region.offset != host_end || !region.slot_bytes.is_multiple_of(alignment) {
                let at = format!("region {}", region.lifetime.name());
                return Err(unsound(at, "is not packed in the memory of the host, or not aligned"));
            }
            host_end += region.bytes();
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
    let in_host = host_end - program.arena_bytes;
    if in_host != program.host_bytes {
        return Err(unsound("host memory", format!("has {} bytes, its regions {in_host}", program.host_bytes)));
    }
    for b in &program.buffers {
        if b.offset + b.bytes > program.regions[b.region].slot_bytes || !b.offset.is_multiple_of(alignment) {
            return Err(unsound(format!("buffer {}", b.name), "leaves its region or is not aligned"));
        }
    }
    for (s, segment) in program.segments.iter().enumerate() {
        for (i, instr) in segment.instrs.iter().enumerate() {
            let at = || Walk::first(program).event(Slot::new(s, 0), i).to_string();
            check_instr(program, instr).map_err(|reason| unsound(at(), reason))?;
        }
        let mut end = 0;
        for group in &segment.groups {
            let at = || format!("stage {}, {segment} {:?} ({})", program.stage, group.instrs, group.fusion.name());
            if group.instrs.start < end {
                return Err(unsound(at(), "stands where another group does"));
            }
            check_group(program, segment, group).map_err(|reason| unsound(at(), reason))?;
            end = group.instrs.end;
        }
    }
    memory::check(program)
}

fn check_instr(program: &StepProgram, instr: &Instr) -> Result<(), String> {
    let name = instr.op.name();
    if instr.op.communicates() {
        check_collective(program, instr)?;
    } else {
        check_types(program, instr)?;
        check_offsets(program, instr)?;
    }
    let placed = |arg: &Arg| (arg.sharding, arg.ty.dims.len());
    let inputs: Vec<Placed> = instr.inputs.iter().map(placed).collect();
    let outputs: Vec<Option<Placed>> = instr.outputs.iter().map(|o| o.as_ref().map(placed)).collect();
    let shardings = operand_shardings(&instr.op, instr.phase, &inputs, &outputs);
    shardings.map_err(|reason| format!("{name}: {reason}"))?;
    let spec = instr.op.spec();
    let each = spec.each();
    for (o, arg) in instr.outputs.iter().enumerate().filter_map(|(o, arg)| Some((o, arg.as_ref()?))) {
        if arg.sum != Sum::No && spec.sums != Some(o) {
            return Err(format!("{name}: output {o} cannot be accumulated"));
        }
        for (i, input) in instr.inputs.iter().enumerate() {
            // A part of a whole: how collectives work in place.
            let part = each && i == o && input.part != arg.part;
            let pair = if each { i == o && !spec.in_place.is_empty() } else { spec.in_place.contains(&(i, o)) };
            if input.buffer == arg.buffer && !pair && !part {
                return Err(format!("{name}: output {o} overwrites input {i}"));
            }
        }
        let state = match each {
            true => instr.inputs.get(o),
            false => spec.in_place.iter().find(|(_, to)| *to == o).map(|(i, _)| &instr.inputs[*i]),
        };
        let same = |input: &Arg| input.buffer == arg.buffer && input.part == arg.part;
        if spec.always_in_place && state.is_some_and(|input| !same(input)) {
            return Err(format!("{name}: output {o} must be in place"));
        }
    }
    let copies = [
        (&instr.inputs.iter().collect::<Vec<_>>(), Op::Fetch),
        (&instr.outputs.iter().flatten().collect(), Op::Offload),
    ];
    for (operands, copy) in copies {
        // Kernels never touch the memory of the host.
        if operands.iter().any(|arg| program.lifetime(arg.buffer).is_in_host() != (instr.op == copy)) {
            return Err(format!("{name}: works on the wrong memory"));
        }
    }
    for arg in instr.operands() {
        if !(arg.part.is_empty() || arg.part == arg.sharding.axes(Placement::Flat)) {
            let value = &program.values[arg.value];
            return Err(format!("{name}: `{value}` is {}, and its part is counted over {}", arg.sharding, arg.part));
        }
        if arg.ty.bytes() * program.mesh.size(arg.part) as u64 > program.buffers[arg.buffer.0].bytes {
            return Err(format!("{name}: `{}` does not fit its buffer", program.values[arg.value]));
        }
    }
    Ok(())
}

/// A group is of a kind that its ops can be, waits for nothing once it has begun, and is one moment: what any of its instructions
/// touches shares memory with what another does only where that is the same buffer.
fn check_group(program: &StepProgram, segment: &Segment, group: &FusedGroup) -> Result<(), String> {
    let instrs = segment.instrs.get(group.instrs.clone()).ok_or("has instructions that are not there")?;
    if !group.fusion.fits(&instrs.iter().map(|i| i.op).collect::<Vec<_>>()) {
        return Err("has other ops".into());
    }
    if instrs.iter().any(|i| i.stream != Stream::Compute) || instrs[1..].iter().any(|i| !i.waits.is_empty()) {
        return Err("waits for another stream".into());
    }
    let mut touched: Vec<BufferId> = instrs.iter().flat_map(Instr::buffers).collect();
    touched.sort_unstable_by_key(|b| (program.buffers[b.0].region, program.buffers[b.0].offset, b.0));
    touched.dedup();
    for pair in touched.windows(2) {
        let [a, b] = [pair[0], pair[1]].map(|b| &program.buffers[b.0]);
        if a.region == b.region && b.offset < a.offset + a.bytes {
            return Err(format!("`{}` and `{}` share memory", a.name, b.name));
        }
    }
    Ok(())
}

/// Where parts start: the op must know it of a dimension that ranks split, over the axes that do, and the parts make up the whole.
fn check_offsets(program: &StepProgram, instr: &Instr) -> Result<(), String> {
    let given = instr.inputs.len();
    check_starts(program, instr, &instr.offsets, instr.op.numbered(given))?;
    check_starts(program, instr, &instr.counted, instr.op.counted(given))
}

fn check_starts(
    program: &StepProgram,
    instr: &Instr,
    offsets: &Option<Offsets>,
    numbered: Option<(bool, usize, usize)>,
) -> Result<(), String> {
    let name = instr.op.name();
    let refuse = |reason: String| Err(format!("{name}: {reason}"));
    let split = numbered.and_then(|(input, at, dim)| {
        let arg = if input { instr.inputs.get(at) } else { instr.outputs[at].as_ref() };
        arg.map(|arg| (arg, dim))
    });
    let over = split.map_or(Axes::NONE, |(arg, dim)| arg.sharding.axes(Placement::Split(dim)));
    let (Some(offsets), Some((arg, dim))) = (offsets, split) else {
        return match (offsets, over.is_empty()) {
            (None, true) => Ok(()),
            (None, false) => refuse(format!("does not know where parts over {over} start")),
            (Some(_), _) => refuse("numbers nothing".into()),
        };
    };
    let entries = arg.ty.dims[dim].size();
    let mut runs: Vec<(usize, usize)> =
        offsets.parts.iter().flat_map(|part| part.runs(entries)).map(|run| (run.whole, run.len)).collect();
    runs.sort_unstable();
    let end = runs.iter().fold(0, |end, (start, len)| if *start <= end { end.max(start + len) } else { end });
    if offsets.over != over || offsets.parts.len() != program.mesh.size(over) {
        return refuse(format!("parts over {over} start where parts over {} do", offsets.over));
    }
    if end < offsets.whole {
        return refuse(format!("parts of {entries} from {:?} on leave out some of {}", offsets.parts, offsets.whole));
    }
    Ok(())
}

fn check_types(program: &StepProgram, instr: &Instr) -> Result<(), String> {
    let types: Vec<&TensorType> = instr.inputs.iter().map(|a| &a.ty).collect();
    let mut inferred = instr.op.infer(&types).map_err(|e| e.to_string())?;
    if instr.op.reshards() {
        // What a rank takes of what it has.
        for ((x, y), ty) in instr.inputs.iter().zip(instr.outputs.iter().flatten()).zip(&mut inferred) {
            *ty = y.sharding.beyond(x.sharding).local(&x.ty, &program.mesh);
        }
    }
    for (o, (ty, output)) in inferred.iter().zip(&instr.outputs).enumerate() {
        let Some(arg) = output else { continue };
        if arg.ty.dims != ty.dims || !(arg.ty.dtype == ty.dtype || follows(instr.op.output(o), arg.ty.dtype)) {
            return Err(format!("{}: output {o} is {} where the op gives {ty}", instr.op.name(), arg.ty));
        }
    }
    Ok(())
}

/// The shapes of a collective on one rank: parts times ranks make a whole, flat ranges with padding.
fn check_collective(program: &StepProgram, instr: &Instr) -> Result<(), String> {
    let bytes = |arg: &Arg| program.buffers[arg.buffer.0].bytes;
    let Some(transfer) = instr.op.transfer() else { return Err(format!("{} is no collective", instr.op.name())) };
    for (x, y) in instr.inputs.iter().zip(instr.outputs.iter().flatten()) {
        let ranks = |over: Axes| program.mesh.size(over);
        let fits = match transfer {
            Transfer::AllGather { over, dim: Some(dim) } => gathered(&x.ty, &y.ty, dim, ranks(over)).is_some(),
            Transfer::AllGather { over, dim: None } => bytes(y) >= x.ty.bytes() * ranks(over) as u64,
            Transfer::ReduceScatter { over, dim: Some(_) } => x.ty.elements() == y.ty.elements() * ranks(over),
            Transfer::ReduceScatter { over, dim: None } => bytes(x) >= y.ty.bytes() * ranks(over) as u64,
            Transfer::AllReduce { .. } | Transfer::SumShared { .. } | Transfer::Shift { .. } => x.ty == y.ty,
            // Every block is one piece, on both sides.
            Transfer::AllToAll { over, from, to } => {
                let before = |ty: &TensorType, dim: usize| ty.dims[..dim].iter().map(Dim::size).product::<usize>();
                let size = |ty: &TensorType, dim: usize| ty.dims[dim].size();
                let grows = size(&y.ty, from) == size(&x.ty, from) * ranks(over);
                let shrinks = size(&x.ty, to) == size(&y.ty, to) * ranks(over);
                grows && shrinks && before(&x.ty, to) == 1 && before(&y.ty, from) == 1
            }
            Transfer::Send { .. } | Transfer::Receive { .. } => return Ok(()),
        };
        if !fits || x.ty.dtype != y.ty.dtype {
            return Err(format!("{}: {} does not go with {}", instr.op.name(), x.ty, y.ty));
        }
    }
    let together = instr.op.spec().each();
    match !together || (instr.inputs.len() == instr.outputs.len() && instr.outputs.iter().all(Option::is_some)) {
        true => Ok(()),
        false => Err(format!("{}: an input has no output", instr.op.name())),
    }
}
