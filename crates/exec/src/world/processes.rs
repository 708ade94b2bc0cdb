//! Ranks that are processes, of which this is one.
//!
//! Every process runs the same driver in lockstep: what is written is the whole tensor everywhere, and each keeps its part; what
//! is read is put together from everybody's, so that all see the same and decide the same.

use super::{Rank, World, scatter};
use crate::comm::processes::ProcessCommunicator;
use crate::comm::{Communicator, HostCommunicator, ProgramPlace};
use crate::communication::Link;
use crate::cpu::CpuExecutor;
use crate::{ExecError, Executor, Note, Timing};
use lockstep_ir::program::Tensor;
use lockstep_ir::{Coordinates, Mesh, MeshAxis, Placement, Run, StepProgram};
use std::borrow::Cow;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The ranks of a run, each a process.
pub struct ProcessWorld {
    mesh: Mesh,
    programs: Vec<StepProgram>,
    here: Coordinates,
    executor: Mutex<Box<dyn Rank>>,
    notes: Vec<Note>,
    arena_bytes: u64,
    comm: Arc<ProcessCommunicator>,
    /// What each rank told with the last reading.
    busy_s: Mutex<Vec<f64>>,
}

/// How often `each_rank` looks whether this rank has ended.
const LOOK_EVERY: Duration = Duration::from_millis(1);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ProcessWorld {
    /// Loads this rank's program on the CPU, of those of all stages, with `threads` kernel threads.
    pub fn on_cpu(
        programs: Vec<StepProgram>,
        threads: usize,
        comm: Arc<ProcessCommunicator>,
    ) -> Result<Self, ExecError> {
        let Some(mesh) = programs.first().map(|p| p.mesh).filter(|mesh| mesh.ranks() == comm.ranks()) else {
            return Err(ExecError::Internal(format!("programs of another number of ranks than {}", comm.ranks())));
        };
        let here = mesh.coordinates(comm.rank());
        let program = programs[here.get(MeshAxis::Pp)].clone();
        let link = Link { comm: comm.clone() as Arc<dyn HostCommunicator>, coordinates: here };
        let executor = CpuExecutor::load_rank(program, threads, Some(link))?;
        let (notes, arena_bytes) = (executor.notes().to_vec(), executor.arena_bytes());
        Ok(Self {
            mesh,
            programs,
            here,
            executor: Mutex::new(Box::new(executor)),
            notes,
            arena_bytes,
            comm,
            busy_s: Mutex::default(),
        })
    }

    /// Runs something on this rank; an error ends the run for all.
    fn on_rank<T>(&mut self, work: impl FnOnce(&mut dyn Rank) -> Result<T, ExecError>) -> Result<T, ExecError> {
        let executor = self.executor.get_mut().unwrap_or_else(PoisonError::into_inner);
        let result = catch_unwind(AssertUnwindSafe(|| work(executor.as_mut()))).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("panicked");
            Err(ExecError::Internal(text.to_owned()))
        });
        result.map_err(|error| {
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

    /// What the rank at `at` has of a tensor and no rank before it.
    fn first_runs(&self, name: &str, at: Coordinates) -> Vec<Run> {
        // Of stages that have the same tensor, the first.
        let stage = self.programs.iter().position(|p| p.tensor(name).is_some());
        match stage.and_then(|stage| self.programs[stage].tensor(name)) {
            Some(tensor) if stage == Some(at.get(MeshAxis::Pp)) => {
                tensor.sharding.first_runs(&tensor.whole, &self.mesh, at)
            }
            _ => Vec::new(),
        }
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
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("lockstep-each".into());
            let work = || f(self.here, lock(&self.executor).as_ref());
            let thread = thread.spawn_scoped(scope, work).map_err(|e| ExecError::Threads(1, e))?;
            while !thread.is_finished() {
                self.comm.at(ProgramPlace::outside("save"));
                meanwhile();
                std::thread::sleep(LOOK_EVERY);
            }
            meanwhile();
            thread.join().map_err(|_| ExecError::Internal("a rank's thread panicked".into()))
        })
    }
}

impl Executor for ProcessWorld {
    /// Bytes of the arenas of all ranks: of this one as allocated, of the others as planned.
    fn arena_bytes(&self) -> u64 {
        let planned = |rank| self.programs[self.mesh.coordinates(rank).get(MeshAxis::Pp)].arena_bytes;
        let others = (0..self.mesh.ranks()).filter(|&rank| rank != self.comm.rank());
        others.map(planned).sum::<u64>() + self.arena_bytes
    }

    fn write(&mut self, tensor: &str, micro_batch: usize, data: &[u8]) -> Result<(), ExecError> {
        if let Some(own) = self.programs[self.here.get(MeshAxis::Pp)].tensor(tensor) {
            let part = scatter(own, &self.mesh, self.here, data)?;
            return lock(&self.executor).write(tensor, micro_batch, &part);
        }
        match self.programs.iter().any(|p| p.tensor(tensor).is_some()) {
            true => Ok(()),
            false => Err(ExecError::Internal(format!("no rank has a tensor `{tensor}`"))),
        }
    }

    fn read(&self, tensor: &str, micro_batch: usize) -> Result<Cow<'_, [u8]>, ExecError> {
        let unknown = || ExecError::Internal(format!("no rank has a tensor `{tensor}`"));
        let known = self.programs.iter().find_map(|p| p.tensor(tensor)).ok_or_else(unknown)?;
        if !known.sharding.axes(Placement::Partial).is_empty() {
            return Err(ExecError::Internal(format!("`{tensor}` is not summed over ranks")));
        }
        let width = known.whole.dtype.bytes();
        // How long this rank computed goes along.
        let busy = lock(&self.executor).busy_s().unwrap_or(f64::NAN);
        let mut mine = busy.to_le_bytes().to_vec();
        let runs = self.first_runs(tensor, self.here);
        if !runs.is_empty() && self.own(tensor).is_some() {
            let executor = lock(&self.executor);
            let local = executor.read(tensor, micro_batch)?;
            runs.iter().for_each(|run| mine.extend(&local[run.local * width..(run.local + run.len) * width]));
        }
        let all = self.exchange("read", &mine)?;
        let mut whole = vec![0; known.whole.bytes() as usize];
        let mut busy_s = Vec::with_capacity(all.len());
        for (rank, bytes) in all.iter().enumerate() {
            let Some((busy, bytes)) = bytes.split_first_chunk() else { continue };
            busy_s.push(f64::from_le_bytes(*busy));
            let mut at = 0;
            for run in self.first_runs(tensor, self.mesh.coordinates(rank)) {
                let (from, to) = (at..at + run.len * width, run.whole * width..(run.whole + run.len) * width);
                let short = || ExecError::Internal(format!("rank {rank} gave too little of `{tensor}`"));
                whole[to].copy_from_slice(bytes.get(from).ok_or_else(short)?);
                at += run.len * width;
            }
        }
        *lock(&self.busy_s) = busy_s;
        Ok(Cow::Owned(whole))
    }

    fn run(&mut self, entry: &str) -> Result<(), ExecError> {
        self.on_rank(|rank| rank.run(entry))
    }

    /// When each instruction ran on this rank.
    fn profile(&mut self, entry: &str) -> Result<Vec<Timing>, ExecError> {
        self.on_rank(|rank| rank.profile(entry))
    }

    fn notes(&self) -> &[Note] {
        &self.notes
    }
}

impl Drop for ProcessWorld {
    fn drop(&mut self) {
        // Before the arena goes.
        self.comm.leave();
    }
}
