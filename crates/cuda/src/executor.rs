//! The CUDA executor: a step program in one allocation of one device, replayed as a CUDA graph.

mod graphs;
mod issue;

use crate::attention::Written;
use crate::attention::plans::Plans;
use crate::device_queue::CaptureTurn;
use crate::driver::{Address, Event, Graph, Memory, Pinned, Priority, Stream};
use crate::gpu::Gpu;
use crate::linked::{Linked, Neighbours};
use crate::numbers::Numbers;
use crate::ops::fused;
use crate::staging::{Results, Staging};
use crate::watchdog::Lane;
use crate::{CudaError, initial, ops, staging};
use lockstep_exec::bound::{Bound, Names, check_scratch, check_write};
use lockstep_exec::initial::Initial;
use lockstep_exec::{ExecError, Executor, HostBytes, Note, Rank, Taken, Ticket, Timing, copy};
use lockstep_ir::graph::State;
use lockstep_ir::program::{self, Instr, Role, Slot, Tensor};
use lockstep_ir::{Coordinates, DType, Op, StepProgram, units};
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
    /// What waits in the memory of the host.
    host: Option<Pinned>,
    gpu: Arc<Gpu>,
}

/// A stream beside the kernels.
struct Beside {
    stream: Arc<Stream>,
    /// After the instructions of the segment that were queued there, by index.
    marks: Vec<Option<Arc<Event>>>,
    /// After the last, unless it has been waited for.
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
        let in_fp8 = |b: &Bound| matches!(b.op, Op::Quantise { .. } | Op::QuantiseFine { .. });
        if !gpu.device.has_fp8() && segments.iter().flatten().any(in_fp8) {
            let (name, capability) = (gpu.device.name.clone(), gpu.device.capability);
            return Err(CudaError::NoFp8 { name, capability }.into());
        }
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
        let host = match program.host_bytes {
            0 => None,
            bytes => Some(Pinned::zeroed(device, bytes)?),
        };
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
        let mut beside_streams = beside.each_ref().map(|beside| beside.as_ref().map(|b| &b.stream));
        for (stream, on) in beside_streams.iter_mut().zip(program::Stream::BESIDE) {
            *stream = stream.filter(|_| !on.copies());
        }
        let lane = match &neighbours {
            Some(Neighbours::Processes(..)) => None,
            Some(Neighbours::Threads(..)) | None => gpu.watchdog.lane(device, &program)?,
        };
        let linked =
            neighbours.map(|n| Linked::new(gpu, &program, n, &stream, beside_streams, deterministic)).transpose()?;
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
            host,
            gpu: gpu.clone(),
            program,
        })
    }

    fn tensor(&self, name: &str, micro_batch: usize) -> Result<(&Tensor, Address, usize), ExecError> {
        let (tensor, offset) = self.names.find(&self.program, self.here(), (name, micro_batch))?;
        let base = if offset < self.arena.bytes { self.arena.base } else { self.host_base() };
        Ok((tensor, base.wrapping_add(offset), tensor.ty.bytes() as usize))
    }

    /// Where addresses of the host's memory count from.
    fn host_base(&self) -> Address {
        self.host.as_ref().map_or(0, |host| host.address().wrapping_sub(self.arena.bytes))
    }

    fn here(&self) -> Coordinates {
        self.linked.as_ref().map_or(Coordinates::default(), Linked::coordinates)
    }

    /// Where another process has failed, ends what the device does.
    fn give_up(&mut self) {
        if let Some(linked) = &self.linked {
            linked.give_up(&mut self.graphs);
        }
    }

    fn enter(&self) -> Result<(), ExecError> {
        self.behind(self.gpu.device.enter())
    }

    /// What came of a call. The device tells of errors late, at whatever is called next: they are of what was queued before.
    fn behind<T>(&self, called: Result<T, CudaError>) -> Result<T, ExecError> {
        called.map_err(|error| error.behind(self.queued.as_deref()).into())
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
    let inputs = program.tensors.iter().filter(|t| t.role == Role::Input || t.role == Role::State(State::Scalars));
    inputs.map(|t| room(t) * slots(t)).sum()
}

impl Executor for CudaExecutor {
    fn arena_bytes(&self) -> u64 {
        self.arena.bytes
    }

    fn host_bytes(&self) -> u64 {
        self.host.as_ref().map_or(0, |host| host.bytes() as u64)
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
        let copied = unsafe { self.staging.get_mut().send(self.gpu.kernels.on(&self.stream), address, data) };
        self.behind(copied)
    }

    fn fill(&mut self, tensors: &[(&str, DType)], values: &Initial) -> Result<(), ExecError> {
        let mut places = Vec::new();
        for (name, dtype) in tensors {
            let (_, address, bytes) = self.tensor(name, 0)?;
            let fits =
                values.elements() * dtype.bytes() == bytes && matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
            if !fits || !initial::drawn_here(values.init) {
                return values.write(self, tensors);
            }
            places.push((address, *dtype));
        }
        self.enter()?;
        for (address, dtype) in places {
            // SAFETY: the tensor has as many elements.
            self.behind(unsafe { initial::draw(self.gpu.kernels.on(&self.stream), address, dtype, values) })?;
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
        let queued = unsafe { self.results.queue(&self.gpu.device, self.gpu.kernels.on(&self.stream), &ranges) };
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

    fn pass(&mut self, from: &str, to: &str) -> Result<(), ExecError> {
        let ((_, from, bytes), (_, to, room)) = (self.tensor(from, 0)?, self.tensor(to, 0)?);
        if bytes != room {
            return Err(ExecError::Internal(format!("{bytes} bytes are passed to where {room} are")));
        }
        self.enter()?;
        // SAFETY: both are tensors of this size, which are apart.
        self.behind(unsafe { self.gpu.kernels.on(&self.stream).copy(to, from, bytes) })
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
        self.give_up();
        // A device that was abandoned is not entered any more.
        if self.gpu.device.enter().is_err() {
            return;
        }
        // What is queued uses the memory. An error has been seen by whoever waited before, or nobody waits for it.
        let _ = self.stream.wait();
        self.give_up();
        if self.gpu.device.enter().is_err() {
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
        self.give_up();
    }
}

// SAFETY: the staging is used by `&self` methods of one owner at a time: an executor is not shared between threads.
unsafe impl Send for CudaExecutor {}
