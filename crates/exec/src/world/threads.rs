//! Ranks that are threads of this process.
//!
//! Every rank is a thread with an executor of its own, on the CPU or on a device that all share. A program comes per pipeline
//! stage; ranks of a stage share it.

use super::{Rank, World, caught, each, first_runs, gather, scatter};
use crate::comm::Link;
use crate::comm::{Communicator, HostCommunicator, ThreadCommunicator, threads};
use crate::cpu::CpuExecutor;
use crate::sync::std_lock as lock;
use crate::{ExecError, Executor, Note, Timing};
use lockstep_ir::program::Tensor;
use lockstep_ir::{Coordinates, Hint, Mesh, MeshAxis, StepProgram};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// The ranks of a run, all in this process.
pub struct ThreadWorld {
    mesh: Mesh,
    programs: Vec<StepProgram>,
    workers: Vec<Worker>,
    board: Arc<Board>,
    /// Of every tensor: its index in the programs of the stages that have it.
    tensors: BTreeMap<String, Vec<(usize, usize)>>,
    /// What executors say, each thing once.
    notes: Vec<Note>,
}

struct Worker {
    executor: Arc<Mutex<Box<dyn Rank>>>,
    comm: Arc<ThreadCommunicator>,
    thread: Option<JoinHandle<()>>,
}

/// What the ranks are asked for, and what they answer.
struct Board {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Counts requests.
    request: u64,
    entry: Arc<str>,
    profile: bool,
    ends: bool,
    /// Ranks that have not answered yet.
    busy: usize,
    error: Option<ExecError>,
    timings: Vec<Timing>,
}

impl ThreadWorld {
    /// Loads the programs of all stages on the CPU, each on its ranks, with `threads` kernel threads per rank.
    pub fn on_cpu(programs: Vec<StepProgram>, threads: usize, timeout: Duration) -> Result<Self, ExecError> {
        Self::load(programs, timeout, |program, link| {
            let link = Link { comm: link.comm as Arc<dyn HostCommunicator>, coordinates: link.coordinates };
            Ok(Box::new(CpuExecutor::load_rank(program, threads, Some(link))?))
        })
    }

    /// Loads the programs of all stages, each on its ranks; `load` makes the executor of one. A rank that waits longer than
    /// `timeout` for another that shows no sign of life ends the run.
    pub fn load(
        programs: Vec<StepProgram>,
        timeout: Duration,
        mut load: impl FnMut(StepProgram, Link<ThreadCommunicator>) -> Result<Box<dyn Rank>, ExecError>,
    ) -> Result<Self, ExecError> {
        let Some(mesh) = programs.first().map(|p| p.mesh) else {
            return Err(ExecError::Internal("a run without programs".into()));
        };
        let board = Arc::new(Board { state: Mutex::default(), changed: Condvar::new() });
        let mut tensors: BTreeMap<String, Vec<(usize, usize)>> = BTreeMap::new();
        for (stage, program) in programs.iter().enumerate() {
            for (t, tensor) in program.tensors.iter().enumerate() {
                tensors.entry(tensor.name.clone()).or_default().push((stage, t));
            }
        }
        // Where a rank cannot be loaded, dropping this ends those that were.
        let mut world = Self { mesh, programs, workers: Vec::new(), board, tensors, notes: Vec::new() };
        for (rank, comm) in threads(mesh.ranks(), timeout).into_iter().enumerate() {
            let coordinates = mesh.coordinates(rank);
            let program = world.programs[coordinates.get(MeshAxis::Pp)].clone();
            let link = Link { comm: comm.clone(), coordinates };
            let executor = load(program, link)?;
            for note in executor.notes() {
                if !world.notes.contains(note) {
                    world.notes.push(note.clone());
                }
            }
            let executor = Arc::new(Mutex::new(executor));
            let (theirs, end, shared) = (executor.clone(), comm.clone(), world.board.clone());
            let work = move || serve(&theirs, end.as_ref(), &shared);
            let thread = std::thread::Builder::new().name(format!("lockstep-rank-{rank}")).spawn(work);
            let thread = Some(thread.map_err(|e| ExecError::Threads(mesh.ranks(), e))?);
            world.workers.push(Worker { executor, comm, thread });
        }
        Ok(world)
    }

    /// Calls `f` with the tensor as each rank that has it knows it.
    fn on_ranks(
        &self,
        name: &str,
        mut f: impl FnMut(Coordinates, &Tensor, &mut dyn Rank) -> Result<(), ExecError>,
    ) -> Result<(), ExecError> {
        let unknown = || ExecError::Internal(format!("no rank has a tensor `{name}`"));
        for &(stage, t) in self.tensors.get(name).ok_or_else(unknown)? {
            for rank in (0..self.mesh.ranks()).filter(|r| self.mesh.coordinates(*r).get(MeshAxis::Pp) == stage) {
                let tensor = &self.programs[stage].tensors[t];
                f(self.mesh.coordinates(rank), tensor, lock(&self.workers[rank].executor).as_mut())?;
            }
        }
        Ok(())
    }

    fn ask(&mut self, entry: &str, profile: bool) -> Result<Vec<Timing>, ExecError> {
        let unknown = || ExecError::Internal(format!("the program has no entry `{entry}`"));
        let entry = self.programs[0].entry(entry).ok_or_else(unknown)?.name.clone();
        let mut state = lock(&self.board.state);
        (state.entry, state.profile, state.busy) = (entry, profile, self.workers.len());
        (state.error, state.timings) = (None, Vec::new());
        state.request += 1;
        self.board.changed.notify_all();
        while state.busy > 0 {
            state = self.board.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        // What ended the run tells more than what a rank noticed of it.
        match (self.workers[0].comm.failure(), state.error.take()) {
            (Some(failure), _) => Err(failure.into()),
            (None, Some(error)) => Err(error),
            (None, None) => Ok(std::mem::take(&mut state.timings)),
        }
    }
}

/// A rank's life: runs what it is asked to.
fn serve(executor: &Mutex<Box<dyn Rank>>, comm: &dyn Communicator, board: &Board) {
    let mut seen = 0;
    loop {
        let mut state = lock(&board.state);
        while state.request == seen && !state.ends {
            state = board.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.ends {
            break;
        }
        seen = state.request;
        let (entry, profile) = (state.entry.clone(), state.profile);
        drop(state);
        let mut executor = lock(executor);
        let result = caught(|| match profile {
            true => executor.profile(&entry),
            false => executor.run(&entry).map(|()| Vec::new()),
        });
        if let Err(error) = &result {
            comm.fail_with(&error.to_string(), error.hint());
            executor.drain();
        }
        drop(executor);
        let mut state = lock(&board.state);
        match result {
            Ok(timings) if comm.rank() == 0 => state.timings = timings,
            Ok(_) => {}
            Err(error) => state.error = state.error.take().or(Some(error)),
        }
        state.busy -= 1;
        drop(state);
        board.changed.notify_all();
    }
    comm.leave();
}

impl World for ThreadWorld {
    fn programs(&self) -> &[StepProgram] {
        &self.programs
    }

    fn each_rank(
        &self,
        f: &(dyn Fn(Coordinates, &dyn Executor) + Sync),
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ExecError> {
        let ranks = self.workers.iter().enumerate();
        each(ranks.map(|(rank, worker)| (self.mesh.coordinates(rank), worker.executor.as_ref())), f, meanwhile)
    }
}

impl Executor for ThreadWorld {
    fn arena_bytes(&self) -> u64 {
        self.workers.iter().map(|w| lock(&w.executor).arena_bytes()).sum()
    }

    fn host_bytes(&self) -> u64 {
        self.workers.iter().map(|w| lock(&w.executor).host_bytes()).sum()
    }

    fn notes(&self) -> &[Note] {
        &self.notes
    }

    fn check_numbers(&mut self) -> bool {
        self.workers.iter().all(|w| lock(&w.executor).check_numbers())
    }

    fn write(&mut self, tensor: &str, micro_batch: usize, data: &[u8]) -> Result<(), ExecError> {
        let mesh = self.mesh;
        self.on_ranks(tensor, |at, t, executor| executor.write(tensor, micro_batch, &scatter(t, &mesh, at, data)?))
    }

    fn read(&self, tensor: &str, micro_batch: usize) -> Result<Cow<'_, [u8]>, ExecError> {
        let mesh = self.mesh;
        let mut whole = Vec::new();
        self.on_ranks(tensor, |at, t, executor| {
            gather(t, &mesh, at, &mut whole, || executor.read(tensor, micro_batch))
        })?;
        Ok(Cow::Owned(whole))
    }

    fn read_all(&self, tensors: &[&str], take: &mut dyn FnMut(usize, usize, &[u8])) -> Result<(), ExecError> {
        for (rank, worker) in self.workers.iter().enumerate() {
            let at = self.mesh.coordinates(rank);
            // What this rank has and none before it.
            let mut parts = Vec::new();
            for (i, name) in tensors.iter().enumerate() {
                let unknown = || ExecError::Internal(format!("no rank has a tensor `{name}`"));
                let stages = self.tensors.get(*name).ok_or_else(unknown)?;
                let here = stages.iter().filter(|(stage, _)| *stage == at.get(MeshAxis::Pp));
                for (stage, t) in here {
                    let tensor = &self.programs[*stage].tensors[*t];
                    parts.push((i, first_runs(tensor, &self.mesh, at)?));
                }
            }
            parts.retain(|(_, runs)| !runs.is_empty());
            let names: Vec<&str> = parts.iter().map(|(i, _)| tensors[*i]).collect();
            lock(&worker.executor).read_all(&names, &mut |part, first, bytes| {
                let (i, runs) = &parts[part];
                for run in runs {
                    let (start, end) = (run.local.max(first), (run.local + run.len).min(first + bytes.len()));
                    if start < end {
                        take(*i, run.whole + start - run.local, &bytes[start - first..end - first]);
                    }
                }
            })?;
        }
        Ok(())
    }

    fn run(&mut self, entry: &str) -> Result<(), ExecError> {
        self.ask(entry, false).map(|_| ())
    }

    /// When each instruction ran on the first rank.
    fn profile(&mut self, entry: &str) -> Result<Vec<Timing>, ExecError> {
        self.ask(entry, true)
    }
}

impl Drop for ThreadWorld {
    fn drop(&mut self) {
        lock(&self.board.state).ends = true;
        self.board.changed.notify_all();
        for worker in &mut self.workers {
            if let Some(thread) = worker.thread.take() {
                // What went wrong there has been told.
                let _ = thread.join();
            }
        }
    }
}
