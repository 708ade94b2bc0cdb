//! The CUDA executor: a step program in one allocation of one device, replayed as a recorded graph.

use crate::attention::Plans;
use crate::call::Call;
use crate::driver::{Address, Event, Graph, Memory, Pinned, Stream};
use crate::gpu::Gpu;
use crate::linked::Linked;
use crate::ops::join::{self, Groups};
use crate::{CudaError, initial, ops};
use lockstep_exec::bound::{Bound, check_scratch};
use lockstep_exec::exchange::Link;
use lockstep_exec::initial::Initial;
use lockstep_exec::{ExecError, Executor, Note, Rank, Timing};
use lockstep_ir::program::{Instr, Lifetime, Role, Slot, Tensor};
use lockstep_ir::{Coordinates, DType, StepProgram, units};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// A loaded program on a device.
pub struct CudaExecutor {
    program: StepProgram,
    segments: Vec<Vec<Bound>>,
    /// Of every instruction: those that are done with it as one.
    joined: Vec<Groups>,
    tensors: BTreeMap<String, usize>,
    /// Entries that have run once, and what was recorded of those that ran twice.
    ran: BTreeSet<Arc<str>>,
    graphs: BTreeMap<Arc<str>, Graph>,
    attention: Plans,
    deterministic: bool,
    /// Where the program has several ranks.
    linked: Option<Linked>,
    staging: RefCell<Pinned>,
    stream: Stream,
    arena: Memory,
    gpu: Arc<Gpu>,
}

/// Bytes that are copied to or from the host at a time.
const STAGING: usize = 8 << 20;

impl CudaExecutor {
    /// Loads a program of one rank that was compiled for [`crate::profile`], deterministic or not.
    pub fn load(gpu: &Arc<Gpu>, program: StepProgram, deterministic: bool) -> Result<Self, ExecError> {
        match program.mesh.ranks() {
            1 => Self::load_rank(gpu, program, deterministic, None),
            ranks => Err(ExecError::Internal(format!("a program of {ranks} ranks was loaded on one"))),
        }
    }

    /// The same for one of several ranks that share the device.
    pub fn load_rank(
        gpu: &Arc<Gpu>,
        program: StepProgram,
        deterministic: bool,
        link: Option<Link>,
    ) -> Result<Self, ExecError> {
        let here = link.as_ref().map_or(Coordinates::default(), |l| l.coordinates);
        let bind = |i: &Instr| Bound::new(&program, i, here).map_err(|e| ExecError::Internal(e.to_string()));
        let segments = program.segments.iter().map(|s| s.instrs.iter().map(bind).collect::<Result<Vec<_>, _>>());
        let segments: Vec<Vec<Bound>> = segments.collect::<Result<Vec<_>, _>>()?;
        let together = program.segments.iter().flat_map(|s| &s.instrs).find(|i| i.op.communicates());
        if let (Some(instr), None) = (together, &link) {
            return Err(ExecError::Internal(format!("{} on one rank", instr.op.name())));
        }
        check_scratch(&program, &segments, |compute, gradients| ops::profile("", compute, gradients, deterministic))?;
        // Products are tried out before the arena takes the memory.
        let products = gpu.matmul(deterministic)?;
        let joined = join::groups(&program, &segments, &|shape| products.worth(shape))?;
        for (bounds, groups) in segments.iter().zip(&joined) {
            let mut shapes = groups.iter().flat_map(|group| join::shapes(bounds, group));
            shapes.try_for_each(|shape| products.prepare(shape))?;
        }
        let attention = Plans::new(gpu, segments.iter().flatten(), deterministic);
        let device = &gpu.device;
        let arena = Memory::new(device, program.arena_bytes).map_err(|e| match e {
            CudaError::OutOfMemory => ExecError::OutOfMemory(units::bytes(program.arena_bytes)),
            other => other.into(),
        })?;
        let linked = link.map(|link| Linked::new(&program, link)).transpose()?;
        let tensors = program.tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        let stream = Stream::new(device)?;
        // States start at zero.
        // SAFETY: all of the arena.
        unsafe { stream.fill(arena.base, 0, arena.bytes as usize)? };
        stream.wait()?;
        Ok(Self {
            segments,
            joined,
            tensors,
            ran: BTreeSet::new(),
            graphs: BTreeMap::new(),
            attention,
            deterministic,
            linked,
            staging: RefCell::new(Pinned::new(device, STAGING)?),
            stream,
            arena,
            gpu: gpu.clone(),
            program,
        })
    }

    fn tensor(&self, name: &str, micro_batch: usize) -> Result<(&Tensor, Address, usize), ExecError> {
        let unknown = || ExecError::Internal(format!("the program has no tensor `{name}`"));
        let tensor = &self.program.tensors[*self.tensors.get(name).ok_or_else(unknown)?];
        let region = &self.program.regions[self.program.buffers[tensor.buffer.0].region];
        if region.lifetime == Lifetime::MicroBatch && micro_batch >= region.slots {
            return Err(ExecError::Internal(format!("`{name}` has no micro-batch {micro_batch}")));
        }
        let before = if tensor.part { self.here().dp as u64 * tensor.ty.bytes() } else { 0 };
        let offset = self.program.address(tensor.buffer, micro_batch, 0) + before;
        Ok((tensor, self.arena.base + offset, tensor.ty.bytes() as usize))
    }

    fn here(&self) -> Coordinates {
        self.linked.as_ref().map_or(Coordinates::default(), Linked::coordinates)
    }

    fn issue(&self, slot: Slot, instr: usize) -> Result<(), CudaError> {
        let matmul = self.gpu.matmul(self.deterministic)?;
        let call = |instr: usize| Call {
            bound: &self.segments[slot.segment][instr],
            kernels: &self.gpu.kernels,
            matmul,
            attention: &self.attention,
            stream: &self.stream,
            base: self.arena.base,
            slot,
            coordinates: self.here(),
        };
        // SAFETY: the arena is this program's.
        unsafe {
            match &self.joined[slot.segment][instr][..] {
                [] => Ok(()),
                [one] => ops::issue(call(*one)),
                group => join::issue_joined(&group.iter().map(|i| call(*i)).collect::<Vec<_>>()),
            }
        }
    }

    fn issue_all(&self, schedule: &[Slot]) -> Result<(), CudaError> {
        for slot in schedule {
            (0..self.segments[slot.segment].len()).try_for_each(|instr| self.issue(*slot, instr))?;
        }
        Ok(())
    }

    /// Runs an instruction of a program of several ranks.
    fn run_linked(&mut self, slot: Slot, instr: usize) -> Result<(), ExecError> {
        let Some(linked) = &mut self.linked else { return Ok(()) };
        let layer = self.program.segments[slot.segment].instrs[instr].layer;
        linked.at(self.segments[slot.segment][instr].op.name(), layer, slot.micro_batch);
        // SAFETY: the arena is this program's.
        match unsafe { linked.run(&self.stream, self.arena.base, slot, instr)? } {
            true => Ok(()),
            false => Ok(self.issue(slot, instr)?),
        }
    }

    /// As [`Executor::profile`], where ranks wait for each other.
    fn profile_linked(&mut self, schedule: Vec<Slot>) -> Result<Vec<Timing>, ExecError> {
        let begin = Instant::now();
        let mut timings = Vec::new();
        for slot in schedule {
            for instr in 0..self.segments[slot.segment].len() {
                let start = Instant::now();
                self.run_linked(slot, instr)?;
                self.stream.wait()?;
                let (start_s, seconds) = ((start - begin).as_secs_f64(), start.elapsed().as_secs_f64());
                timings.push(Timing { slot, instr, start_s, seconds });
            }
        }
        Ok(timings)
    }

    fn entry(&self, name: &str) -> Result<(Arc<str>, Vec<Slot>), ExecError> {
        let unknown = || ExecError::Internal(format!("the program has no entry `{name}`"));
        let entry = self.program.entry(name).ok_or_else(unknown)?;
        Ok((entry.name.clone(), entry.schedule.clone()))
    }
}

impl Executor for CudaExecutor {
    fn arena_bytes(&self) -> u64 {
        self.arena.bytes
    }

    fn notes(&self) -> &[Note] {
        &self.attention.notes
    }

    fn write(&mut self, tensor: &str, micro_batch: usize, data: &[u8]) -> Result<(), ExecError> {
        let (found, address, bytes) = self.tensor(tensor, micro_batch)?;
        if data.len() != bytes || matches!(found.role, Role::Output | Role::StepOutput) {
            return Err(ExecError::Internal(format!("`{tensor}` takes {bytes} bytes, got {}", data.len())));
        }
        self.gpu.device.enter()?;
        let mut staging = self.staging.borrow_mut();
        for (i, part) in data.chunks(STAGING).enumerate() {
            staging.slice()[..part.len()].copy_from_slice(part);
            let to = address + (i * STAGING) as u64;
            // SAFETY: the address and size are the tensor's; the copy is done before the staging is used again.
            unsafe { self.stream.to_device(to, &staging.slice()[..part.len()])? };
            self.stream.wait()?;
        }
        Ok(())
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
        self.gpu.device.enter()?;
        for (address, dtype) in places {
            // SAFETY: the tensor has as many elements.
            unsafe { initial::draw(&self.gpu.kernels, &self.stream, address, dtype, values)? };
        }
        Ok(self.stream.wait()?)
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
        self.gpu.device.enter()?;
        let (address, mut data) = (address + range.start as u64, vec![0u8; range.len()]);
        let mut staging = self.staging.borrow_mut();
        for (i, part) in data.chunks_mut(STAGING).enumerate() {
            let from = address + (i * STAGING) as u64;
            // SAFETY: the address and size are the tensor's; the copy is done before the staging is read.
            unsafe { self.stream.to_host(&mut staging.slice()[..part.len()], from)? };
            self.stream.wait()?;
            part.copy_from_slice(&staging.slice()[..part.len()]);
        }
        Ok(Cow::Owned(data))
    }

    fn run(&mut self, entry: &str) -> Result<(), ExecError> {
        self.gpu.device.enter()?;
        if let Some(graph) = self.graphs.get(entry) {
            self.stream.replay(graph)?;
            return Ok(self.stream.wait()?);
        }
        let (name, schedule) = self.entry(entry)?;
        if self.linked.is_some() {
            for slot in schedule {
                (0..self.segments[slot.segment].len()).try_for_each(|instr| self.run_linked(slot, instr))?;
            }
        } else if self.ran.insert(name.clone()) {
            // The first run loads what libraries load late.
            self.issue_all(&schedule)?;
        } else {
            let graph = self.stream.capture(|| self.issue_all(&schedule))?;
            self.stream.replay(&graph)?;
            self.graphs.insert(name, graph);
        }
        Ok(self.stream.wait()?)
    }

    fn profile(&mut self, entry: &str) -> Result<Vec<Timing>, ExecError> {
        self.gpu.device.enter()?;
        let (_, schedule) = self.entry(entry)?;
        if self.linked.is_some() {
            return self.profile_linked(schedule);
        }
        let event = || Event::new(&self.gpu.device);
        let begin = event()?;
        begin.record(&self.stream)?;
        let mut marks = Vec::new();
        for slot in schedule {
            for instr in 0..self.segments[slot.segment].len() {
                self.issue(slot, instr)?;
                let end = event()?;
                end.record(&self.stream)?;
                marks.push((slot, instr, end));
            }
        }
        self.stream.wait()?;
        let mut start_s = 0.0;
        let mut timings = Vec::new();
        for (slot, instr, end) in marks {
            let now = end.since(&begin)?;
            timings.push(Timing { slot, instr, start_s, seconds: now - start_s });
            start_s = now;
        }
        Ok(timings)
    }
}

impl Rank for CudaExecutor {}

// SAFETY: the staging is used by `&self` methods of one owner at a time: an executor is not shared between threads.
unsafe impl Send for CudaExecutor {}
