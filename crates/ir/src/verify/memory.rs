//! Runs the memory: walks every schedule with the name of the value that each byte range holds; every read must find the value
//! that it means.

use super::{Unsound, unsound};
use crate::Axes;
use crate::graph::{Phase, State};
use crate::program::{Arg, Buffer, BufferId, Entry, Instr, Lifetime, Role, Segment, Slot, StepProgram, Stream, Sum};
use crate::walk::{ByteRange, Distinct, Event, Walk};
use std::collections::BTreeSet;
use std::ops::Range;

/// Checks the memory of every segment and every entry.
pub(super) fn check(program: &StepProgram) -> Result<(), Unsound> {
    program.entries.iter().try_for_each(|entry| check_schedule(program, entry))?;
    // Ranks differ by where their parts of buffers stand: the first and the last show all there is to see.
    let operands = program.segments.iter().flat_map(|s| &s.instrs).flat_map(Instr::operands);
    let parts = operands.fold(Axes::NONE, |axes, arg| axes.and(arg.part));
    let last = program.mesh.size(parts) - 1;
    [0, last].into_iter().take(last + 1).try_for_each(|index| {
        let first = Walk::first(program);
        let walk = Walk { here: first.here.with_index(parts, &program.mesh, index), ..first };
        let cells = Cells::new(walk);
        // Where a segment uses the overlay and what lies under it, copies of what is saved matter: each of its slots is looked at.
        let alike = |segment: &usize| !both_over_and_under(program, &program.segments[*segment]);
        let alone = (0..program.segments.len()).filter(alike);
        alone.map(|segment| Slot::new(segment, 0)).try_for_each(|slot| check_slot(walk, &cells, slot))?;
        program.entries.iter().try_for_each(|entry| check_entry(walk, &cells, entry))
    })
}

/// What a segment does with the frame, which is empty when it begins.
fn check_slot(walk: Walk, cells: &Cells, slot: Slot) -> Result<(), Unsound> {
    let (mut frame, mut pending) = (Memory::new(cells), Vec::new());
    for event in walk.slot(slot) {
        let result = keep_apart(&event, &mut pending).and_then(|()| check_overlap(&event));
        result.and_then(|()| frame.run(&event, Kind::Frame)).map_err(|reason| unsound(event.to_string(), reason))?;
    }
    Ok(())
}

/// A schedule has each run of a segment once, on memory that is there.
fn check_schedule(program: &StepProgram, entry: &Entry) -> Result<(), Unsound> {
    let at = |slot: &Slot| {
        let segment = &program.segments[slot.segment];
        format!("stage {}, entry {}, {segment} of micro-batch {}", program.stage, entry.name, slot.micro_batch)
    };
    let mut used: BTreeSet<Lifetime> = BTreeSet::new();
    for segment in entry.schedule.iter().map(|s| s.segment).collect::<BTreeSet<_>>() {
        let segment = &program.segments[segment];
        if both_over_and_under(program, segment) && segment.instrs.iter().all(|i| i.stream != Stream::Fetch) {
            let at = format!("entry {}, {segment}", entry.name);
            return Err(unsound(at, "uses the overlay and what lies under it"));
        }
        used.extend(lifetimes(program, segment));
    }
    let mut seen = BTreeSet::new();
    for slot in &entry.schedule {
        for region in program.regions.iter().filter(|r| used.contains(&r.lifetime)) {
            if slot.copy(region.lifetime) >= region.slots {
                return Err(unsound(at(slot), format!("the {} region has no such copy", region.lifetime.name())));
            }
        }
        if !seen.insert((slot.segment, slot.micro_batch)) {
            return Err(unsound(at(slot), "stands twice in the schedule"));
        }
    }
    Ok(())
}

fn lifetimes(program: &StepProgram, segment: &Segment) -> BTreeSet<Lifetime> {
    segment.instrs.iter().flat_map(|i| i.buffers()).map(|b| program.lifetime(b)).collect()
}

/// Whether a segment uses the overlay and what lies under it: only what comes from the host moves in while activations are still read.
fn both_over_and_under(program: &StepProgram, segment: &Segment) -> bool {
    let here = lifetimes(program, segment);
    let under = |l: &Lifetime| matches!(l, Lifetime::Saved(_) | Lifetime::Frame);
    here.contains(&Lifetime::Overlay) && here.iter().any(under)
}

fn check_entry(walk: Walk, cells: &Cells, entry: &Entry) -> Result<(), Unsound> {
    let program = walk.program;
    let shown = Distinct::of(program, entry);
    let micro_batches = shown.schedule.iter().map(|s| s.micro_batch + 1).max().unwrap_or(0);
    let mut memory = Memory::at_start(program, cells, micro_batches)?;
    for (slot, &micro_batch) in shown.schedule.iter().zip(&shown.micro_batches) {
        if both_over_and_under(program, &program.segments[slot.segment]) {
            check_slot(walk, cells, *slot)?;
        }
        for event in walk.slot(*slot) {
            memory.run(&event, Kind::Lasting { micro_batches }).map_err(|reason| {
                let event = walk.event(Slot { micro_batch, ..*slot }, event.index);
                unsound(format!("{}: {event}", entry.name), reason)
            })?;
        }
    }
    memory.holds_states(program).map_err(|reason| unsound(format!("end of entry {}", entry.name), reason))
}

/// A collective that overlaps with what follows it.
struct Pending {
    instr: usize,
    reads: Vec<ByteRange>,
    writes: Vec<ByteRange>,
}

/// Keeps what runs at the same time apart.
fn keep_apart(event: &Event, pending: &mut Vec<Pending>) -> Result<(), String> {
    let instr = event.instr;
    let instrs = &event.segment().instrs;
    for &last in &instr.waits {
        let another = |stream: Stream| stream != Stream::Compute && stream != instr.stream;
        if last >= event.index || !another(instrs[last].stream) {
            return Err(format!("waits for instruction {last}"));
        }
    }
    let stream = |p: &Pending| instrs[p.instr].stream;
    let waited = |p: &Pending| instr.waits.iter().any(|&w| instrs[w].stream == stream(p) && w >= p.instr);
    if instr.stream == Stream::Compute {
        pending.retain(|p| !waited(p));
    }
    if pending.is_empty() && instr.stream == Stream::Compute {
        return Ok(());
    }
    let reads: Vec<ByteRange> = instr.inputs.iter().map(|a| event.operand(a)).collect();
    let mut writes: Vec<ByteRange> = instr.outputs.iter().flatten().map(|a| event.operand(a)).collect();
    writes.extend(instr.workspace.map(|w| event.buffer(w)));
    let overlap = |a: &[ByteRange], b: &[ByteRange]| a.iter().any(|x| b.iter().any(|y| x.overlaps(y)));
    let touched =
        |p: &&Pending| overlap(&writes, &p.reads) || overlap(&writes, &p.writes) || overlap(&reads, &p.writes);
    // Collectives of one stream follow each other.
    let beside = |p: &&Pending| stream(p) != instr.stream && !waited(p);
    if let Some(p) = pending.iter().filter(beside).find(touched) {
        return Err(format!("touches what instruction {} still works on", p.instr));
    }
    if instr.stream != Stream::Compute {
        pending.push(Pending { instr: event.index, reads, writes });
    }
    Ok(())
}

/// Keeps what one instruction touches apart.
fn check_overlap(event: &Event) -> Result<(), String> {
    let instr = event.instr;
    let shares = |a, b| event.buffer(a).overlaps(&event.buffer(b));
    let outputs: Vec<&Arg> = instr.outputs.iter().flatten().collect();
    let operands = instr.operands().map(|a| a.buffer);
    if let Some(w) = instr.workspace
        && operands.into_iter().any(|b| shares(w, b))
    {
        return Err("scratch overlaps an operand".to_owned());
    }
    for (o, output) in outputs.iter().enumerate() {
        // Sharing one buffer whole is in-place work, which the op table has allowed; sharing a part never is.
        if instr.inputs.iter().any(|x| x.buffer != output.buffer && shares(x.buffer, output.buffer)) {
            return Err("an output overlaps an input".to_owned());
        }
        if outputs[..o].iter().any(|other| shares(other.buffer, output.buffer)) {
            return Err("two outputs overlap".to_owned());
        }
    }
    Ok(())
}

/// Which memory is looked at.
#[derive(Clone, Copy)]
enum Kind {
    /// What lives inside a segment.
    Frame,
    /// The rest, in a schedule of this many micro-batches.
    Lasting { micro_batches: usize },
}

/// What a range of memory holds.
#[derive(Clone, Copy)]
struct Held {
    range: ByteRange,
    buffer: usize,
    value: usize,
    /// The micro-batch it was made for; `None` for what outlives the step.
    owner: Option<usize>,
    /// Of a sum over micro-batches: how many are in it.
    summed: Option<usize>,
    /// Whether none of its bytes have been written since.
    whole: bool,
}

/// The arena cut where any operand begins or ends: an operand is a range of cells, and a cell never holds parts of two values.
struct Cells {
    bounds: Vec<u64>,
    /// By buffer and copy of its region.
    of_buffers: Vec<Vec<Range<usize>>>,
    /// By buffer: whether it shares cells with one that outlives segments.
    under_lasting: Vec<bool>,
}

impl Cells {
    fn new(walk: Walk) -> Self {
        let program = walk.program;
        let range = |b: &Buffer, copy: usize| {
            let region = &program.regions[b.region];
            let start = region.offset + copy as u64 * region.slot_bytes + b.offset;
            ByteRange { start, end: start + b.bytes }
        };
        let copies = |b: &Buffer| 0..program.regions[b.region].slots;
        let mut bounds: Vec<u64> = Vec::new();
        for b in &program.buffers {
            bounds.extend(copies(b).map(|copy| range(b, copy)).flat_map(|range| [range.start, range.end]));
        }
        for operand in program.segments.iter().flat_map(|s| &s.instrs).flat_map(Instr::operands) {
            if !operand.part.is_empty() {
                let b = &program.buffers[operand.buffer.0];
                let part = |copy: usize| walk.part(operand, range(b, copy));
                bounds.extend(copies(b).map(part).flat_map(|range| [range.start, range.end]));
            }
        }
        bounds.sort_unstable();
        bounds.dedup();
        let mut cells = Self { bounds, of_buffers: Vec::new(), under_lasting: Vec::new() };
        let of_buffer = |b: &Buffer| copies(b).map(|copy| cells.range(range(b, copy))).collect();
        let of_buffers: Vec<Vec<Range<usize>>> = program.buffers.iter().map(of_buffer).collect();
        let mut lasting = vec![false; cells.bounds.len()];
        for (b, ranges) in program.buffers.iter().zip(&of_buffers) {
            if !is_temporary(program.regions[b.region].lifetime) {
                ranges.iter().for_each(|range| lasting[range.clone()].fill(true));
            }
        }
        let under = |ranges: &Vec<Range<usize>>| ranges.iter().any(|range| lasting[range.clone()].contains(&true));
        cells.under_lasting = of_buffers.iter().map(under).collect();
        cells.of_buffers = of_buffers;
        cells
    }

    /// The cells of bytes that begin and end where an operand does.
    fn range(&self, range: ByteRange) -> Range<usize> {
        let at = |address: u64| self.bounds.partition_point(|bound| *bound < address);
        at(range.start)..at(range.end)
    }

    fn of_buffer(&self, event: &Event, buffer: BufferId) -> Range<usize> {
        let copy = event.slot.copy(event.walk.program.lifetime(buffer));
        // A copy that is not there is refused elsewhere.
        self.of_buffers[buffer.0].get(copy).cloned().unwrap_or_else(|| self.range(event.buffer(buffer)))
    }

    fn of_operand(&self, event: &Event, arg: &Arg) -> Range<usize> {
        if arg.part.is_empty() { self.of_buffer(event, arg.buffer) } else { self.range(event.operand(arg)) }
    }
}

/// Whether it is empty when a segment begins.
fn is_temporary(lifetime: Lifetime) -> bool {
    match lifetime {
        Lifetime::Frame | Lifetime::Overlay => true,
        Lifetime::Run
        | Lifetime::Step
        | Lifetime::Host
        | Lifetime::MicroBatch
        | Lifetime::Saved(_)
        | Lifetime::SavedInHost(_) => false,
    }
}

/// Memory by name: what was written last to every cell.
struct Memory<'a> {
    cells: &'a Cells,
    /// All that was written.
    written: Vec<Held>,
    /// By cell: which of them.
    last: Vec<Option<u32>>,
}

impl<'a> Memory<'a> {
    fn new(cells: &'a Cells) -> Self {
        Self { cells, written: Vec::new(), last: vec![None; cells.bounds.len()] }
    }

    /// What the host has written. Gradients are what a step makes of them.
    fn at_start(program: &StepProgram, cells: &'a Cells, micro_batches: usize) -> Result<Self, Unsound> {
        let mut memory = Memory::new(cells);
        for tensor in &program.tensors {
            let copies = match &tensor.role {
                Role::Input => micro_batches.min(program.regions[program.buffers[tensor.buffer.0].region].slots),
                Role::State(State::Gradient { .. }) => 0,
                Role::State(_) => 1,
                Role::Output | Role::StepOutput => continue,
            };
            let value = tensor.value.0;
            if program.values.get(value) != Some(&tensor.name) {
                return Err(unsound("tensors", format!("`{}` is no value", tensor.name)));
            }
            for copy in 0..copies {
                let owner = (tensor.role == Role::Input).then_some(copy);
                let start = program.address(tensor.buffer, &Slot::new(0, copy));
                let range = ByteRange { start, end: start + program.buffers[tensor.buffer.0].bytes };
                let buffer = tensor.buffer.0;
                memory.write(cells.range(range), Held { range, buffer, value, owner, summed: None, whole: true });
            }
        }
        Ok(memory)
    }

    /// Forgets whatever has bytes in these cells.
    fn clobber(&mut self, range: Range<usize>) {
        for last in &mut self.last[range] {
            if let Some(before) = last.take() {
                self.written[before as usize].whole = false;
            }
        }
    }

    fn write(&mut self, range: Range<usize>, held: Held) {
        self.clobber(range.clone());
        self.last[range].fill(Some(self.written.len() as u32));
        self.written.push(held);
    }

    /// What an instruction reads must be there; then it has written.
    fn run(&mut self, event: &Event, kind: Kind) -> Result<(), String> {
        let program = event.walk.program;
        let (instr, m) = (event.instr, event.slot.micro_batch);
        let counts = |arg: &&Arg| is_temporary(program.lifetime(arg.buffer)) == matches!(kind, Kind::Frame);
        for arg in instr.inputs.iter().filter(counts) {
            let held = self.read(event, arg)?;
            let whole = matches!(instr.phase, Phase::Reduce | Phase::Update);
            if let (Kind::Lasting { micro_batches }, Some(summed), true) = (kind, held.summed, whole)
                && summed != micro_batches
            {
                let name = &program.values[arg.value];
                return Err(format!("reads `{name}`, the sum of {summed} of {micro_batches} micro-batches"));
            }
        }
        let outputs = || instr.outputs.iter().flatten();
        let mut sums = Vec::new();
        for arg in outputs().filter(counts) {
            let adds = match (arg.sum, kind) {
                (Sum::No, _) => false,
                (Sum::AfterFirst, Kind::Lasting { .. }) => m > 0,
                (Sum::AfterFirst, Kind::Frame) | (Sum::Always, _) => true,
            };
            let before = if adds { self.read(event, arg)?.summed } else { None };
            sums.push(match arg.sum {
                Sum::No => None,
                Sum::Always => before,
                Sum::AfterFirst if !adds || before == Some(m) => Some(m + 1),
                Sum::AfterFirst => {
                    let (name, summed) = (&program.values[arg.value], before.unwrap_or(0));
                    return Err(format!("adds micro-batch {m} to `{name}`, the sum of the first {summed}"));
                }
            });
        }
        let cells = self.cells;
        let matters = |b: BufferId| matches!(kind, Kind::Frame) || cells.under_lasting[b.0];
        for arg in outputs().filter(|arg| matters(arg.buffer)) {
            self.clobber(cells.of_operand(event, arg));
        }
        if let Some(workspace) = instr.workspace.filter(|w| matters(*w)) {
            self.clobber(cells.of_buffer(event, workspace));
        }
        for (arg, summed) in outputs().filter(counts).zip(sums) {
            let (buffer, value, owner) = (arg.buffer.0, arg.value, owner(event, arg));
            let held = Held { range: event.operand(arg), buffer, value, owner, summed, whole: true };
            self.write(cells.of_operand(event, arg), held);
        }
        Ok(())
    }

    /// What uses the memory of a state within an entry must have given it back, written anew: the next entry and the host read it.
    fn holds_states(&self, program: &StepProgram) -> Result<(), String> {
        for tensor in &program.tensors {
            // Gradients are what a step makes of them.
            if !matches!(&tensor.role, Role::State(state) if !matches!(state, State::Gradient { .. })) {
                continue;
            }
            let cells = self.cells.of_buffers[tensor.buffer.0].first().cloned().unwrap_or_default();
            let holds = |last: &Option<u32>| last.is_some_and(|at| self.written[at as usize].buffer == tensor.buffer.0);
            if !self.last[cells].iter().all(holds) {
                return Err(format!("`{}` is not there any more", tensor.name));
            }
        }
        Ok(())
    }

    /// What is where an operand is.
    fn read(&self, event: &Event, arg: &Arg) -> Result<Held, String> {
        let range = event.operand(arg);
        let first = self.last[self.cells.of_operand(event, arg)].first().copied().flatten();
        let found = first.map(|written| self.written[written as usize]).filter(|held| {
            let starts = !arg.part.is_empty() || held.range.start == range.start;
            held.whole && starts && held.range.end >= range.end
        });
        let means = |h: &Held| h.buffer == arg.buffer.0 && h.value == arg.value && h.owner == owner(event, arg);
        let values = &event.walk.program.values;
        match found {
            Some(held) if means(&held) => Ok(held),
            Some(Held { value, owner: Some(m), .. }) if value == arg.value => {
                Err(format!("reads `{}`, the buffer holds that of micro-batch {m}", values[value]))
            }
            other => {
                let holds = other.map_or("nothing", |held| values[held.value].as_str());
                Err(format!("reads `{}`, the buffer holds {holds}", values[arg.value]))
            }
        }
    }
}

/// The micro-batch that an operand belongs to.
fn owner(event: &Event, arg: &Arg) -> Option<usize> {
    let lifetime = event.walk.program.lifetime(arg.buffer);
    let of_all = matches!(lifetime, Lifetime::Run | Lifetime::Step | Lifetime::Host);
    (!of_all).then_some(event.slot.micro_batch)
}
