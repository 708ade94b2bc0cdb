//! The CUDA executor: a step program in one allocation of one device, replayed as a CUDA graph.

use crate::attention::Written;
use crate::attention::plans::Plans;
use crate::call::Call;
use crate::device_queue::CaptureTurn;
use crate::driver::{Address, Event, Graph, Memory, Pinned, Priority, Stream};
use crate::gpu::Gpu;
use crate::linked::{Linked, Neighbours, Ready};
use crate::numbers::Numbers;
use crate::ops::fused;
use crate::progress::Progress;
use crate::staging::{Results, Staging};
use crate::watchdog::Lane;
use crate::{CudaError, initial, ops, staging};
use lockstep_exec::bound::{At, Bound, Names, check_scratch, check_write};
use lockstep_exec::initial::Initial;
use lockstep_exec::{ExecError, Executor, HostBytes, Note, Rank, Taken, Ticket, Timing, copy, numbers};
use lockstep_ir::program::{self, Instr, Role, Slot, Tensor};
use lockstep_ir::{Coordinates, DType, StepProgram, StepScalars, units};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// A loaded program on a device.
pub struct CudaExecutor {
    program: StepProgram,
    segments: Vec<Vec<Bound>>,
    names: Names,
    /// Entries that have run once, and the CUDA graphs of those that ran twice.
    ran: BTreeSet<Arc<str>>,
    graphs: BTreeMap<Arc<str>, Graph>,
    attention: Plans,
    documents: Written,
    notes: Vec<Note>,
    deterministic: bool,
    /// Where the program has several ranks.
    linked: Option<Linked>,
    staging: RefCell<Staging>,
    results: Results,
    /// The entry that was queued last: errors of the device come when the host waits.
    queued: Option<Arc<str>>,
    /// Seconds that the device computed for the entry that was read last, where it waits for other processes.
    busy_s: Option<f64>,
    stream: Arc<Stream>,
    /// Those of the program's streams beside kernels that it uses, in the order of [`program::Stream::BESIDE`].
    beside: [Option<Beside>; program::Stream::BESIDE.len()],
    /// Whether ranks capture a graph together now.
    capturing: bool,
    turn: CaptureTurn,
    /// While a run is profiled: of each instruction so far where its stream came to it, and where it was done.
    profiled: Option<Vec<Profiled>>,
    /// Where it tells how far it is, unless it tells other processes.
    lane: Option<Arc<Lane>>,
    /// Where every output is looked at.
    numbers: Option<RefCell<Numbers>>,
    /// Whether the last run came to its end.
    ended: bool,
    arena: Memory,
    gpu: Arc<Gpu>,
}

/// A stream beside the kernels.
struct Beside {
    stream: Arc<Stream>,
    /// Behind the instructions of the segment that were queued there, by index.
    marks: Vec<Option<Arc<Event>>>,
    /// Behind the last, unless it has been waited for.
    last: Option<Arc<Event>>,
    /// Whether the entry has queued anything there.
    used: bool,
}

/// An instruction that is profiled.
struct Profiled {
    slot: Slot,
    instr: usize,
    start: Event,
    end: Event,
}

/// Least bytes that are copied to or from the host at a time.
const STAGING: usize = 8 << 20;

impl CudaExecutor {
    /// Loads a program of one rank, or of the first of several that do not communicate, which was compiled for [`crate::profile`],
    /// deterministic or not.
    pub fn load(gpu: &Arc<Gpu>, program: StepProgram, deterministic: bool) -> Result<Self, ExecError> {
        let (ranks, mut instrs) = (program.mesh.ranks(), program.segments.iter().flat_map(|s| &s.instrs));
        match ranks == 1 || !instrs.any(|i| i.op.communicates()) {
            true => Self::load_rank(gpu, program, deterministic, None),
            false => Err(ExecError::Internal(format!("a program of {ranks} ranks was loaded on one"))),
        }
    }

    /// The same for one of several ranks.
    pub fn load_rank(
        gpu: &Arc<Gpu>,
        program: StepProgram,
        deterministic: bool,
        neighbours: Option<Neighbours>,
    ) -> Result<Self, ExecError> {
        let here = neighbours.as_ref().map_or(Coordinates::default(), Neighbours::coordinates);
        let bind = |i: &Instr| Bound::new(&program, i, here).map_err(|e| ExecError::Internal(e.to_string()));
        let segments = program.segments.iter().map(|s| s.instrs.iter().map(bind).collect::<Result<Vec<_>, _>>());
        let segments: Vec<Vec<Bound>> = segments.collect::<Result<Vec<_>, _>>()?;
        let together = program.segments.iter().flat_map(|s| &s.instrs).find(|i| i.op.communicates());
        if let (Some(instr), None) = (together, &neighbours) {
            return Err(ExecError::Internal(format!("{} on one rank", instr.op.name())));
        }
        check_scratch(&program, &segments, |compute, gradients| ops::profile("", compute, gradients, deterministic))?;
        // Matmuls are tried out before the arena takes the memory.
        let gemms = gpu.matmul(deterministic)?;
        for (segment, bounds) in program.segments.iter().zip(&segments) {
            fused::shapes(segment, bounds).into_iter().try_for_each(|shape| gemms.prepare(shape))?;
        }
        let attention = Plans::new(&gpu.attention, segments.iter().flatten(), deterministic);
        let mut notes = attention.notes.clone();
        if matches!(neighbours, Some(Neighbours::Threads(..))) {
            let text = "ranks share one GPU: good to check a layout, slower to train than one rank";
            notes.push(Note::Warning(text.into()));
        }
        gpu.note_context()?;
        let device = &gpu.device;
        let arena = Memory::new(device, program.arena_bytes).map_err(|e| match e {
            CudaError::OutOfMemory => CudaError::Arena {
                arena: units::bytes(program.arena_bytes),
                free: device.free_bytes().map_or("none".to_owned(), units::bytes),
                memory: units::bytes(device.memory),
            },
            other => other,
        })?;
        let stream = Arc::new(Stream::new(device)?);
        let longest = segments.iter().map(Vec::len).max().unwrap_or(0);
        let mut beside = [const { None }; program::Stream::BESIDE.len()];
        for (made, _) in beside.iter_mut().zip(program::Stream::BESIDE).filter(|(_, on)| program.uses(*on)) {
            let stream = Arc::new(Stream::with_priority(device, Priority::Collectives)?);
            *made = Some(Beside { stream, marks: vec![None; longest], last: None, used: false });
        }
        let turn = match &neighbours {
            Some(Neighbours::Threads(_, turn)) => turn.clone(),
            Some(Neighbours::Processes(..)) | None => CaptureTurn::default(),
        };
        let streams = (&stream, beside.each_ref().map(|beside| beside.as_ref().map(|b| &b.stream)));
        let lane = match &neighbours {
            Some(Neighbours::Processes(..)) => None,
            Some(Neighbours::Threads(..)) | None => gpu.watchdog.lane(device, &program)?,
        };
        let linked = neighbours.map(|n| Linked::new(gpu, &program, n, streams, deterministic)).transpose()?;
        // States start at zero.
        // SAFETY: all of the arena.
        unsafe { stream.fill(arena.base, 0, arena.bytes as usize)? };
        stream.wait()?;
        let staging = STAGING.max(input_bytes(&program));
        Ok(Self {
            segments,
            names: Names::new(&program),
            ran: BTreeSet::new(),
            graphs: BTreeMap::new(),
            attention,
            documents: Written::new(&program),
            notes,
            deterministic,
            linked,
            staging: RefCell::new(Staging::new(device, staging)?),
            results: Results::default(),
            queued: None,
            busy_s: None,
            stream,
            beside,
            capturing: false,
            turn,
            profiled: None,
            lane,
            numbers: None,
            ended: true,
            arena,
            gpu: gpu.clone(),
            program,
        })
    }

    fn tensor(&self, name: &str, micro_batch: usize) -> Result<(&Tensor, Address, usize), ExecError> {
        let (tensor, offset) = self.names.find(&self.program, self.here(), (name, micro_batch))?;
        Ok((tensor, self.arena.base + offset, tensor.ty.bytes() as usize))
    }

    fn here(&self) -> Coordinates {
        self.linked.as_ref().map_or(Coordinates::default(), Linked::coordinates)
    }

    /// Queues a kernel, or several that are done as one.
    fn kernels(&self, slot: Slot, instr: usize, stream: &Stream) -> Result<(), CudaError> {
        let matmul = self.gpu.matmul(self.deterministic)?;
        let call = |instr: usize| Call {
            bound: &self.segments[slot.segment][instr],
            kernels: &self.gpu.kernels,
            matmul,
            attention: &self.attention,
            stream,
            base: self.arena.base,
            slot,
        };
        let _turn = self.turn.take(self.capturing);
        // SAFETY: the arena is this program's.
        unsafe {
            match self.program.segments[slot.segment].group_of(instr) {
                None => ops::issue(call(instr)),
                Some(group) if group.instrs.start == instr => {
                    fused::issue(group, &group.instrs.clone().map(call).collect::<Vec<_>>())
                }
                // Done with the first of its group.
                Some(_) => Ok(()),
            }
        }
    }

    /// Looks at what a kernel, or several that are done as one, make, where that is asked for. What communication brings was looked at where
    /// it was made.
    fn look(&self, slot: Slot, instr: usize, stream: &Stream) -> Result<(), ExecError> {
        let Some(looks) = &self.numbers else { return Ok(()) };
        let (together, first) = match self.program.segments[slot.segment].group_of(instr) {
            None => (instr..instr + 1, instr),
            Some(group) if group.instrs.start == instr => (group.instrs.clone(), fused::first_written(group)),
            Some(_) => return Ok(()),
        };
        let find = |at: &At, may_see_nothing| {
            let range = (self.arena.base + at.offset(slot), at.elements, at.dtype);
            // SAFETY: the operand lies in the arena.
            self.behind(unsafe { looks.borrow_mut().first((&self.gpu.kernels, stream), range, may_see_nothing) })
        };
        numbers::look(&self.program, &self.segments[slot.segment], (slot, together, first), find)
    }

    /// Queues an instruction on its stream, behind what it waits for.
    fn issue(&mut self, slot: Slot, index: usize) -> Result<(), ExecError> {
        let instrs = &self.program.segments[slot.segment].instrs;
        let instr = &instrs[index];
        let (op, layer, on) = (instr.op.name(), instr.layer, instr.stream);
        if let Some(linked) = &self.linked {
            linked.at(op, layer, slot.micro_batch);
        }
        let beside = |on: program::Stream| on.beside().and_then(|at| self.beside[at].as_ref());
        let marks = instr.waits.iter().filter_map(|last| beside(instrs[*last].stream)?.marks[*last].as_ref());
        let stream = match beside(on) {
            Some(own) => {
                // It starts behind all kernels that were queued before it.
                let _turn = self.turn.take(self.capturing);
                self.behind(Event::mark(&self.stream).and_then(|mark| own.stream.wait_for(&mark)))?;
                self.behind(marks.into_iter().try_for_each(|mark| own.stream.wait_for(mark)))?;
                own.stream.clone()
            }
            None => {
                self.behind(marks.into_iter().try_for_each(|mark| self.wait_for(mark)))?;
                self.stream.clone()
            }
        };
        if let (Some(lane), program::Stream::Compute) = (&self.lane, on) {
            let _turn = self.turn.take(self.capturing);
            self.behind(lane.before((&self.gpu.kernels, &stream), slot, index))?;
        }
        let start = self.profiled.is_some().then(|| self.clocked(&stream)).transpose()?;
        let together = match &mut self.linked {
            // SAFETY: the arena is this program's.
            Some(linked) => unsafe { linked.enqueue(self.arena.base, (slot, index), on)? },
            None => false,
        };
        if !together {
            self.behind(self.kernels(slot, index, &stream))?;
            self.look(slot, index, &stream)?;
        }
        if let Some(start) = start {
            let end = self.clocked(&stream)?;
            self.profiled.get_or_insert_default().push(Profiled { slot, instr: index, start, end });
        }
        if let Some(at) = on.beside() {
            let mark = {
                let _turn = self.turn.take(self.capturing);
                self.behind(Event::mark(&stream))?
            };
            if let Some(own) = &mut self.beside[at] {
                own.marks[index] = Some(mark.clone());
                (own.last, own.used) = (Some(mark), true);
            }
        }
        Ok(())
    }

    /// A mark with a clock.
    fn clocked(&self, stream: &Stream) -> Result<Event, ExecError> {
        self.behind(Event::new(&self.gpu.device).and_then(|event| event.record(stream).map(|()| event)))
    }

    /// Lets kernels wait for what ranks do together beside them.
    fn wait_for(&self, mark: &Event) -> Result<(), CudaError> {
        let _turn = self.turn.take(self.capturing);
        match self.progress() {
            Some(progress) => progress.held((&self.gpu.kernels, &self.stream), || self.stream.wait_for(mark)),
            None => self.stream.wait_for(mark),
        }
    }

    fn progress(&self) -> Option<&Progress> {
        self.linked.as_ref().and_then(Linked::progress)
    }

    /// A segment ends when all streams have.
    fn join(&mut self) -> Result<(), ExecError> {
        let last = self.beside.each_mut().map(|beside| beside.as_mut().and_then(|own| own.last.take()));
        self.behind(last.iter().flatten().try_for_each(|mark| self.wait_for(mark)))
    }

    fn issue_all(&mut self, schedule: &[Slot]) -> Result<(), ExecError> {
        self.beside.iter_mut().flatten().for_each(|own| own.used = false);
        for slot in schedule {
            (0..self.segments[slot.segment].len()).try_for_each(|instr| self.issue(*slot, instr))?;
            self.join()?;
        }
        if let Some(linked) = &mut self.linked {
            linked.settle()?;
        }
        let _turn = self.turn.take(self.capturing);
        for own in self.beside.iter().flatten().filter(|own| own.used) {
            self.behind(Event::mark(&own.stream).and_then(|mark| self.stream.wait_for(&mark)))?;
        }
        self.behind(self.lane.as_ref().map_or(Ok(()), |lane| lane.ended((&self.gpu.kernels, &self.stream))))
    }

    /// Whether this rank, or the only one, has the CUDA graphs.
    fn leads(&self) -> bool {
        self.linked.as_ref().is_none_or(Linked::leads)
    }

    /// Records an entry. Ranks that share the device record theirs together: their streams fork from the first rank's and join it
    /// again, so that one graph, which the first rank has, is of all of them.
    fn capture(&mut self, schedule: &[Slot]) -> Result<Option<Graph>, ExecError> {
        if !self.leads() {
            return self.record(schedule, false).map(|()| None);
        }
        let capture = self.behind(self.stream.begin_capture())?;
        let recorded = self.record(schedule, true);
        // Where a rank has failed, others may not have noticed yet.
        let _turn = self.turn.take(self.linked.is_some());
        match recorded {
            Ok(()) => self.behind(capture.end()).map(Some),
            Err(error) => {
                drop(capture);
                Err(error)
            }
        }
    }

    fn record(&mut self, schedule: &[Slot], leads: bool) -> Result<(), ExecError> {
        // Ranks wait for the marks of the others: those that follow at the begin, the first at the end.
        let meet = |this: &Self, shows: bool| {
            let Some(linked) = &this.linked else { return Ok(()) };
            let mark = || {
                let _turn = this.turn.take(true);
                Event::mark(&this.stream)
            };
            let mark = if shows { Some(this.behind(mark())?) } else { None };
            let marks = linked.share(mark)?;
            let _turn = this.turn.take(true);
            let waited = marks.iter().filter(|_| !shows).try_for_each(|mark| this.stream.wait_for(mark));
            this.behind(waited)
        };
        meet(self, leads)?;
        self.capturing = self.linked.is_some();
        let issued = self.issue_all(schedule);
        self.capturing = false;
        issued?;
        meet(self, !leads)
    }

    /// Makes plans for the documents that the host wrote, where those that there are do not take as many, and says whether it did.
    fn fit_documents(&mut self) -> Result<bool, ExecError> {
        let most = self.documents.most();
        if self.attention.fits(most) {
            return Ok(false);
        }
        self.behind(self.stream.wait())?;
        self.attention.fit(&self.gpu.attention, self.segments.iter().flatten(), most);
        Ok(true)
    }

    /// What can be done with an entry, by all ranks together. Where plans have changed, graphs are captured anew; where numbers are looked at,
    /// none is.
    fn prepare(&mut self, entry: &str) -> Result<Ready, ExecError> {
        let changed = self.fit_documents()?;
        if !self.leads() {
            // The first rank replays the graph of all ranks on its own stream: what was written on this one is there before.
            self.behind(self.stream.wait())?;
        }
        let ran = self.numbers.is_none() && self.ran.contains(entry);
        let captured = ran && self.graphs.contains_key(entry);
        let mine = Ready { ran, captured, changed };
        let ready = match &self.linked {
            Some(linked) => linked.agree(mine, self.documents.any())?,
            None => Ready::together(&[mine]),
        };
        if ready.changed {
            self.graphs.clear();
            self.ran.clear();
        }
        Ok(ready)
    }

    /// Whether what the device does may never end, since another process has failed.
    fn gave_up(&self) -> bool {
        self.linked.as_ref().is_some_and(Linked::give_up)
    }

    fn enter(&self) -> Result<(), ExecError> {
        self.behind(self.gpu.device.enter())
    }

    /// What came of a call. The device tells of errors late, at whatever is called next: they are of what was queued before.
    fn behind<T>(&self, called: Result<T, CudaError>) -> Result<T, ExecError> {
        called.map_err(|error| error.behind(self.queued.as_deref()).into())
    }

    /// Ranks that share the device run to the end: others are told of what fails here. One that follows another's graph has nothing
    /// to wait for. Processes go on.
    fn ran_together(&self, graph: bool) -> Result<(), ExecError> {
        match &self.linked {
            Some(linked) if linked.shares_the_device() && (linked.leads() || !graph) => self.behind(self.stream.wait()),
            _ => Ok(()),
        }
    }

    /// As [`Executor::run`].
    fn run_entry(&mut self, entry: &str) -> Result<(), ExecError> {
        self.enter()?;
        let begun = self.results.begin(&self.gpu.device, &self.stream);
        self.behind(begun)?;
        self.behind(self.progress().map_or(Ok(()), |progress| progress.reset_clock(&self.stream)))?;
        let ready = self.prepare(entry)?;
        if ready.captured {
            if let Some((name, graph)) = self.graphs.get_key_value(entry) {
                self.queued = Some(name.clone());
                self.behind(self.stream.replay(graph))?;
            }
            return self.ran_together(true);
        }
        let (name, schedule) = self.entry(entry)?;
        self.queued = Some(name.clone());
        if let Some(linked) = &mut self.linked {
            linked.begin(&name, ready.ran);
        }
        if !ready.ran {
            // The first run loads what libraries load late.
            self.issue_all(&schedule)?;
            self.ran.insert(name);
        } else if let Some(graph) = self.capture(&schedule)? {
            self.behind(self.stream.replay(&graph))?;
            self.graphs.insert(name, graph);
        }
        self.ran_together(ready.ran)
    }

    fn entry(&self, name: &str) -> Result<(Arc<str>, Vec<Slot>), ExecError> {
        let unknown = || ExecError::Internal(format!("the program has no entry `{name}`"));
        let entry = self.program.entry(name).ok_or_else(unknown)?;
        Ok((entry.name.clone(), entry.schedule.clone()))
    }
}

/// Room for what a step is given: inputs of all micro-batches, and its scalars.
fn input_bytes(program: &StepProgram) -> usize {
    let room = |t: &Tensor| (t.ty.bytes() as usize).next_multiple_of(staging::ALIGNMENT);
    let slots = |t: &Tensor| program.regions[program.buffers[t.buffer.0].region].slots;
    let inputs = program.tensors.iter().filter(|t| t.role == Role::Input || t.name == StepScalars::NAME);
    inputs.map(|t| room(t) * slots(t)).sum()
}

impl Executor for CudaExecutor {
    fn arena_bytes(&self) -> u64 {
        self.arena.bytes
    }

    fn notes(&self) -> &[Note] {
        &self.notes
    }

    fn write(&mut self, tensor: &str, micro_batch: usize, data: &[u8]) -> Result<(), ExecError> {
        let (found, address, _) = self.tensor(tensor, micro_batch)?;
        check_write(found, data)?;
        self.documents.note(tensor, micro_batch, data);
        self.enter()?;
        // SAFETY: the address and size are the tensor's.
        let copied = unsafe { self.staging.get_mut().send(&self.stream, address, data) };
        self.behind(copied)
    }

    fn fill(&mut self, tensors: &[(&str, DType)], values: &Initial) -> Result<(), ExecError> {
        let mut places = Vec::new();
        for (name, dtype) in tensors {
            let (_, address, bytes) = self.tensor(name, 0)?;
            let fits = values.elements() * dtype.bytes() == bytes && matches!(dtype, DType::F32 | DType::BF16);
            if !fits || !initial::drawn_here(values.init) {
                return values.write(self, tensors);
            }
            places.push((address, *dtype));
        }
        self.enter()?;
        for (address, dtype) in places {
            // SAFETY: the tensor has as many elements.
            self.behind(unsafe { initial::draw(&self.gpu.kernels, &self.stream, address, dtype, values) })?;
        }
        self.behind(self.stream.wait())
    }

    fn read(&self, tensor: &str, micro_batch: usize) -> Result<Cow<'_, [u8]>, ExecError> {
        let (_, _, bytes) = self.tensor(tensor, micro_batch)?;
        self.read_range(tensor, micro_batch, 0..bytes)
    }

    fn read_range(&self, tensor: &str, micro_batch: usize, range: Range<usize>) -> Result<Cow<'_, [u8]>, ExecError> {
        let (_, address, bytes) = self.tensor(tensor, micro_batch)?;
        if range.start > range.end || range.end > bytes {
            return Err(ExecError::Internal(format!("`{tensor}` has no bytes {range:?}")));
        }
        self.enter()?;
        let mut data = vec![0u8; range.len()];
        let from = address + range.start as u64;
        let ranges = [(from, range.len())];
        let mut take = |_, first: usize, bytes: &[u8]| copy(&mut data[first..first + bytes.len()], bytes);
        // SAFETY: the address and size are of a range of the tensor.
        self.behind(unsafe { self.staging.borrow_mut().fetch(&self.stream, &ranges, &mut take) })?;
        Ok(Cow::Owned(data))
    }

    fn read_all(&self, tensors: &[&str], take: &mut dyn FnMut(usize, usize, &[u8])) -> Result<(), ExecError> {
        let range = |name: &&str| self.tensor(name, 0).map(|(_, address, bytes)| (address, bytes));
        let ranges = tensors.iter().map(range).collect::<Result<Vec<_>, _>>()?;
        self.enter()?;
        // SAFETY: addresses and sizes are the tensors'.
        self.behind(unsafe { self.staging.borrow_mut().fetch(&self.stream, &ranges, take) })
    }

    fn host_memory(&self, bytes: usize) -> Option<HostBytes> {
        let mut pinned = Pinned::new(&self.gpu.device, bytes).ok()?;
        pinned.slice().fill(0);
        Some(Box::new(pinned))
    }

    fn copy_out(&self, ranges: &[(&str, Range<usize>)], mut to: &mut [u8], _: usize) -> Result<(), ExecError> {
        self.enter()?;
        for (name, range) in ranges {
            let (_, address, bytes) = self.tensor(name, 0)?;
            let part = to.split_off_mut(..range.len()).filter(|_| range.start <= range.end && range.end <= bytes);
            let part = part.ok_or_else(|| ExecError::Internal(format!("`{name}` has no bytes {range:?} to copy")))?;
            // SAFETY: a range of the tensor; the memory is the caller's until the stream has been waited for.
            self.behind(unsafe { self.stream.to_host(part, address + range.start as u64) })?;
        }
        self.behind(self.stream.wait())
    }

    fn run(&mut self, entry: &str) -> Result<(), ExecError> {
        self.ended = false;
        self.run_entry(entry)?;
        self.ended = true;
        Ok(())
    }

    fn read_later(&mut self, tensors: &[(String, usize)]) -> Result<Option<Ticket>, ExecError> {
        let mut ranges = Vec::new();
        for (name, micro_batches) in tensors {
            for m in 0..*micro_batches {
                let (_, address, bytes) = self.tensor(name, m)?;
                ranges.push((address, bytes));
            }
        }
        ranges.extend(self.progress().map(|progress| (progress.waited(), size_of::<u64>())));
        self.enter()?;
        // SAFETY: addresses and sizes are the tensors', and those of a number of the device's.
        let queued = unsafe { self.results.queue(&self.gpu.device, &self.stream, &ranges) };
        Ok(Some(Ticket(self.behind(queued)?)))
    }

    fn take(&mut self, ticket: Ticket) -> Result<Taken, ExecError> {
        self.enter()?;
        let taken = self.results.take(ticket.0);
        let mut taken = self.behind(taken)?;
        if self.progress().is_some()
            && let Some(waited) = taken.tensors.pop().and_then(|bytes| bytes.try_into().ok())
        {
            let waited_s = u64::from_le_bytes(waited) as f64 * 1e-9;
            self.busy_s = taken.time.map(|time| (time.since_begin - waited_s).max(0.0));
        }
        Ok(taken)
    }

    fn busy_s(&self) -> Option<f64> {
        self.busy_s
    }

    fn check_numbers(&mut self) -> bool {
        self.numbers = Numbers::new(&self.gpu.device).ok().map(RefCell::new);
        self.numbers.is_some()
    }

    fn profile(&mut self, entry: &str) -> Result<Vec<Timing>, ExecError> {
        self.enter()?;
        self.prepare(entry)?;
        let (name, schedule) = self.entry(entry)?;
        self.queued = Some(name.clone());
        if let Some(linked) = &mut self.linked {
            linked.begin(&name, false);
        }
        self.ended = false;
        let begin = self.clocked(&self.stream)?;
        self.profiled = Some(Vec::new());
        let issued = self.issue_all(&schedule);
        let profiled = self.profiled.take().unwrap_or_default();
        issued?;
        self.behind(self.stream.wait())?;
        self.ended = true;
        let timing = |p: &Profiled| {
            let (start_s, seconds) = (self.behind(p.start.since(&begin))?, self.behind(p.end.since(&p.start))?);
            Ok(Timing { slot: p.slot, instr: p.instr, start_s, seconds })
        };
        profiled.iter().map(timing).collect()
    }
}

impl Drop for CudaExecutor {
    fn drop(&mut self) {
        if self.gave_up() || self.gpu.device.enter().is_err() {
            return;
        }
        // What is queued uses the memory. An error has been seen by whoever waited before, or nobody waits for it.
        let _ = self.stream.wait();
        if self.gave_up() {
            return;
        }
        // Other ranks' streams use it as well, and where a run has failed nobody has waited for them.
        if self.linked.as_ref().is_some_and(Linked::shares_the_device) && !self.ended {
            let _ = self.gpu.device.wait();
        }
        // Before the communicators that they use.
        self.graphs.clear();
    }
}

impl Rank for CudaExecutor {
    fn drain(&mut self) {
        self.gave_up();
    }
}

// SAFETY: the staging is used by `&self` methods of one owner at a time: an executor is not shared between threads.
unsafe impl Send for CudaExecutor {}
