//! Ranks that are processes, of which this is one.
//!
//! Every process runs the same driver in lockstep: what is written is the whole tensor everywhere, and each keeps its part; what
//! is read is put together from everybody's, so that all see the same and decide the same.
//!
//! A process reads only those data that its rank has a part of (`World::has`).

use super::{Rank, World, caught, each, first_runs, scatter};
use crate::comm::Link;
use crate::comm::processes::ProcessCommunicator;
use crate::comm::{Communicator, HostCommunicator, ProgramPlace};
use crate::cpu::CpuExecutor;
use crate::sync::std_lock as lock;
use crate::{ExecError, Executor, Note, Taken, Ticket, Timing};
use lockstep_ir::program::Tensor;
use lockstep_ir::{Coordinates, Mesh, MeshAxis, Run, StepProgram};
use std::borrow::Cow;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// The ranks of a run, each a process.
pub struct ProcessWorld {
    mesh: Mesh,
    programs: Vec<StepProgram>,
    here: Coordinates,
    executor: Mutex<Box<dyn Rank>>,
    notes: Vec<Note>,
    /// Those of the arena and of the host's memory, as allocated for this rank.
    allocated: [u64; 2],
    comm: Arc<ProcessCommunicator>,
    /// What was asked for by readings that are under way: tensors, each of this many micro-batches.
    later: VecDeque<Vec<(String, usize)>>,
    /// What each rank told with the last reading.
    busy_s: Mutex<Vec<f64>>,
}

impl ProcessWorld {
    /// Loads this rank's program on the CPU, of those of all stages, with `threads` kernel threads.
    pub fn on_cpu(
        programs: Vec<StepProgram>,
        threads: usize,
        comm: Arc<ProcessCommunicator>,
    ) -> Result<Self, ExecError> {
        Self::load(programs, comm, |program, link| {
            let link = Link { comm: link.comm as Arc<dyn HostCommunicator>, coordinates: link.coordinates };
            Ok(Box::new(CpuExecutor::load_rank(program, threads, Some(link))?))
        })
    }

    /// Loads this rank's program, of those of all stages; `load` makes its executor.
    pub fn load(
        programs: Vec<StepProgram>,
        comm: Arc<ProcessCommunicator>,
        load: impl FnOnce(StepProgram, Link<ProcessCommunicator>) -> Result<Box<dyn Rank>, ExecError>,
    ) -> Result<Self, ExecError> {
        let Some(mesh) = programs.first().map(|p| p.mesh).filter(|mesh| mesh.ranks() == comm.ranks()) else {
            return Err(ExecError::Internal(format!("programs of another number of ranks than {}", comm.ranks())));
        };
        let here = mesh.coordinates(comm.rank());
        let program = programs[here.get(MeshAxis::Pp)].clone();
        let executor = load(program, Link { comm: comm.clone(), coordinates: here })?;
        let (notes, allocated) = (executor.notes().to_vec(), [executor.arena_bytes(), executor.host_bytes()]);
        Ok(Self {
            mesh,
            programs,
            here,
            executor: Mutex::new(executor),
            notes,
            allocated,
            comm,
            later: VecDeque::new(),
            busy_s: Mutex::default(),
        })
    }

    /// Runs something on this rank; an error ends the run for all.
    fn on_rank<T>(&mut self, work: impl FnOnce(&mut dyn Rank) -> Result<T, ExecError>) -> Result<T, ExecError> {
        let executor = self.executor.get_mut().unwrap_or_else(PoisonError::into_inner);
        caught(|| work(executor.as_mut())).map_err(|error| {
            self.comm.fail(&error.to_string());
            executor.drain();
            match (error, self.comm.failure()) {
                // This says where this rank waited.
                (error @ ExecError::Rank(_), _) | (error, None) => error,
                // What ended the run tells more than what this rank noticed of it, if that was not the cause.
                (error, Some(failure)) => match failure {
                    crate::comm::CommError::Failed { rank, .. } if rank == self.comm.rank() => error,
                    failure => failure.into(),
                },
            }
        })
    }

    /// The tensor as this rank's program has it, if it does.
    fn own(&self, name: &str) -> Option<&Tensor> {
        self.programs[self.here.get(MeshAxis::Pp)].tensor(name)
    }

    /// What the rank at `at` has of a tensor and no rank before it, in bytes; of stages that have the same tensor, the first.
    fn first_runs(&self, name: &str, at: Coordinates) -> Result<Vec<Run>, ExecError> {
        let (stage, tensor) = self.known(name)?;
        let runs = first_runs(tensor, &self.mesh, at)?;
        Ok(if stage == at.get(MeshAxis::Pp) { runs } else { Vec::new() })
    }

    /// The first stage that has a tensor, and the tensor as it knows it.
    fn known(&self, name: &str) -> Result<(usize, &Tensor), ExecError> {
        let unknown = || ExecError::Internal(format!("no rank has a tensor `{name}`"));
        self.programs.iter().enumerate().find_map(|(stage, p)| Some((stage, p.tensor(name)?))).ok_or_else(unknown)
    }

    /// Appends what this rank has of a tensor, and no rank before it, of its part.
    fn add_own(&self, name: &str, part: &[u8], mine: &mut Vec<u8>) -> Result<(), ExecError> {
        let runs = self.first_runs(name, self.here)?;
        runs.iter().for_each(|run| mine.extend(&part[run.local..run.local + run.len]));
        Ok(())
    }

    /// Gives all ranks these bytes, and how long this one computed, and takes everybody's.
    fn exchange_parts(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, ExecError> {
        let busy = lock(&self.executor).busy_s().unwrap_or(f64::NAN);
        let all = self.exchange("read", &[&busy.to_le_bytes(), mine].concat())?;
        let (mut busy_s, mut parts) = (Vec::with_capacity(all.len()), Vec::with_capacity(all.len()));
        for bytes in &all {
            let short = || ExecError::Internal("a rank gave too little".into());
            let (busy, part) = bytes.split_first_chunk().ok_or_else(short)?;
            busy_s.push(f64::from_le_bytes(*busy));
            parts.push(part.to_vec());
        }
        *lock(&self.busy_s) = busy_s;
        Ok(parts)
    }

    /// The whole of a tensor from what every rank gave, where that starts `at`.
    fn put_together(&self, name: &str, at: &mut [usize], all: &[Vec<u8>]) -> Result<Vec<u8>, ExecError> {
        let mut whole = vec![0; self.known(name)?.1.whole.bytes() as usize];
        for (rank, (bytes, at)) in all.iter().zip(at).enumerate() {
            for run in self.first_runs(name, self.mesh.coordinates(rank))? {
                let short = || ExecError::Internal(format!("rank {rank} gave too little of `{name}`"));
                let part = bytes.get(*at..*at + run.len).ok_or_else(short)?;
                whole[run.whole..run.whole + run.len].copy_from_slice(part);
                *at += run.len;
            }
        }
        Ok(whole)
    }
}

impl World for ProcessWorld {
    fn programs(&self) -> &[StepProgram] {
        &self.programs
    }

    fn has(&self, tensor: &str, elements: Range<usize>) -> bool {
        let meets = |run: Run| run.whole < elements.end && elements.start < run.whole + run.len;
        let own = self.own(tensor);
        own.is_some_and(|t| t.sharding.runs(&t.whole, &self.mesh, self.here).into_iter().any(meets))
    }

    fn rank_busy_s(&self) -> Vec<f64> {
        let told = lock(&self.busy_s);
        if told.iter().any(|seconds| seconds.is_nan()) { Vec::new() } else { told.clone() }
    }

    fn process(&self) -> usize {
        self.comm.rank()
    }

    fn exchange(&self, op: &'static str, mine: &[u8]) -> Result<Vec<Vec<u8>>, ExecError> {
        self.comm.at(ProgramPlace::outside(op));
        Ok(self.comm.exchange(ProgramPlace::outside(op), mine)?)
    }

    fn each_rank(
        &self,
        f: &(dyn Fn(Coordinates, &dyn Executor) + Sync),
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ExecError> {
        each([(self.here, &self.executor)].into_iter(), f, &mut || {
            self.comm.at(ProgramPlace::outside("save"));
            meanwhile();
        })
    }
}

impl ProcessWorld {
    /// Bytes of all ranks: of this one as allocated, of the others as planned.
    fn with_others(&self, own: u64, planned: impl Fn(&StepProgram) -> u64) -> u64 {
        let planned = |rank| planned(&self.programs[self.mesh.coordinates(rank).get(MeshAxis::Pp)]);
        let others = (0..self.mesh.ranks()).filter(|&rank| rank != self.comm.rank());
        others.map(planned).sum::<u64>() + own
    }
}

impl Executor for ProcessWorld {
    fn arena_bytes(&self) -> u64 {
        self.with_others(self.allocated[0], |program| program.arena_bytes)
    }

    fn host_bytes(&self) -> u64 {
        self.with_others(self.allocated[1], |program| program.host_bytes)
    }

    fn write(&mut self, tensor: &str, micro_batch: usize, data: &[u8]) -> Result<(), ExecError> {
        match self.own(tensor) {
            Some(own) => {
                let part = scatter(own, &self.mesh, self.here, data)?;
                lock(&self.executor).write(tensor, micro_batch, &part)
            }
            None => self.known(tensor).map(|_| ()),
        }
    }

    fn read(&self, tensor: &str, micro_batch: usize) -> Result<Cow<'_, [u8]>, ExecError> {
        let mut mine = Vec::new();
        if !self.first_runs(tensor, self.here)?.is_empty() {
            let executor = lock(&self.executor);
            self.add_own(tensor, &executor.read(tensor, micro_batch)?, &mut mine)?;
        }
        let all = self.exchange_parts(&mine)?;
        Ok(Cow::Owned(self.put_together(tensor, &mut vec![0; all.len()], &all)?))
    }

    /// Queues the reading of what this rank has of them.
    fn read_later(&mut self, tensors: &[(String, usize)]) -> Result<Option<Ticket>, ExecError> {
        let mut own = Vec::new();
        for tensor in tensors {
            own.extend((!self.first_runs(&tensor.0, self.here)?.is_empty()).then(|| tensor.clone()));
        }
        let ticket = self.on_rank(|rank| rank.read_later(&own))?;
        if ticket.is_some() {
            self.later.push_back(tensors.to_vec());
        }
        Ok(ticket)
    }

    fn take(&mut self, ticket: Ticket) -> Result<Taken, ExecError> {
        let taken = self.on_rank(|rank| rank.take(ticket))?;
        let asked = self.later.pop_front().ok_or_else(|| ExecError::Internal("nothing was queued".into()))?;
        let (mut parts, mut mine) = (taken.tensors.iter(), Vec::new());
        let one_by_one = || asked.iter().flat_map(|(name, count)| (0..*count).map(move |_| name));
        for name in one_by_one() {
            if !self.first_runs(name, self.here)?.is_empty() {
                let short = || ExecError::Internal(format!("a reading has nothing of `{name}`"));
                self.add_own(name, parts.next().ok_or_else(short)?, &mut mine)?;
            }
        }
        let all = self.exchange_parts(&mine)?;
        let mut at = vec![0; all.len()];
        let tensors = one_by_one().map(|name| self.put_together(name, &mut at, &all)).collect::<Result<_, _>>()?;
        Ok(Taken { tensors, time: taken.time })
    }

    fn pass(&mut self, from: &str, to: &str) -> Result<(), ExecError> {
        match (self.own(from), self.own(to)) {
            (Some(a), Some(b)) if a.sharding == b.sharding => self.on_rank(|rank| rank.pass(from, to)),
            _ => {
                let bytes = self.read(from, 0)?.into_owned();
                self.write(to, 0, &bytes)
            }
        }
    }

    fn run(&mut self, entry: &str) -> Result<(), ExecError> {
        self.on_rank(|rank| rank.run(entry))
    }

    /// When each instruction ran on this rank.
    fn profile(&mut self, entry: &str) -> Result<Vec<Timing>, ExecError> {
        self.on_rank(|rank| rank.profile(entry))
    }

    fn check_numbers(&mut self) -> bool {
        lock(&self.executor).check_numbers()
    }

    fn notes(&self) -> &[Note] {
        &self.notes
    }
}

impl Drop for ProcessWorld {
    fn drop(&mut self) {
        // Before the arena goes. This rank has not left: what ends a run may not have been told yet.
        self.comm.drain();
    }
}
