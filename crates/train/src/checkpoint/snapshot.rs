//! A copy in host memory of what a checkpoint holds: steps go on while it is written.
//!
//! The memory is taken once, before the first step, and is what the plan says. Filling it is one copy; whoever has tensors on a device
//! fills the same bytes from there.

use super::rank_parts::{RankPart, of_each, of_rank};
use crate::{Result, TrainError};
use lockstep_checkpoint::{
    About, CheckpointError, Draft, Keep, MemoryFile, PartRef, TensorBytes, TensorGroup, TensorRef, save,
};
use lockstep_exec::{ExecError, Executor, HostBytes, World, cpu};
use lockstep_infer::state::GROUPS;
use lockstep_ir::Coordinates;
use lockstep_ir::program::Tensor;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What the ranks of this process write of a checkpoint, as it was when it was last [filled](Snapshot::fill).
pub(crate) struct Snapshot {
    /// By ascending rank.
    ranks: Vec<RankSnapshot>,
    /// Whether one rank has everything.
    whole: bool,
}

struct RankSnapshot {
    rank: usize,
    /// By the groups of a checkpoint; each with where its bytes begin.
    parts: Vec<(&'static str, Vec<(RankPart, usize)>)>,
    bytes: HostBytes,
}

/// How far a write is, and whether it is still wanted.
#[derive(Clone, Default)]
pub(crate) struct Writing {
    written: Arc<AtomicU64>,
    unwanted: Arc<AtomicBool>,
}

impl Writing {
    /// Bytes written so far.
    pub(crate) fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Ends the write with an error, soon.
    pub(crate) fn cancel(&self) {
        self.unwanted.store(true, Ordering::Relaxed);
    }
}

impl Snapshot {
    /// Takes the memory for what the ranks of this process hold, and touches all of it: the first copy is as fast as the others.
    pub(crate) fn new(world: &dyn World, tensors: &[Tensor]) -> Result<Self> {
        let (mesh, programs) = (world.mesh(), world.programs());
        let make = |at: Coordinates, executor: &dyn Executor| {
            let mut end = 0;
            let mut place = |part: RankPart| {
                let start = end;
                end += part.bytes();
                (part, start)
            };
            let group = |group: &&'static str| {
                let parts = of_rank((&mesh, programs), tensors, group, at).into_iter();
                (*group, parts.map(&mut place).collect())
            };
            let (parts, rank) = (GROUPS.iter().map(group).collect(), mesh.rank(at));
            let bytes = executor.host_memory(end).ok_or(TrainError::NoSnapshot { bytes: end as u64 })?;
            Ok(RankSnapshot { rank, parts, bytes })
        };
        let ranks = of_each(world, make, &mut || {})?.into_iter().collect::<Result<Vec<_>>>()?;
        Ok(Self { ranks, whole: mesh.ranks() == 1 })
    }

    /// Bytes of host memory.
    pub(crate) fn bytes(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.bytes.len() as u64).sum()
    }

    /// Copies what the ranks have now.
    pub(crate) fn fill(&mut self, world: &dyn World) -> Result<()> {
        let mesh = world.mesh();
        let ranks: Vec<_> = self.ranks.iter_mut().map(|rank| (rank.rank, Mutex::new(rank))).collect();
        // Ranks have different shares: one that is done leaves its cores to the others.
        let threads = cpu::cores();
        let fill = |at: Coordinates, executor: &dyn Executor| {
            let number = mesh.rank(at);
            let Some((_, rank)) = ranks.iter().find(|(rank, _)| *rank == number) else { return Ok(()) };
            rank.lock().unwrap_or_else(PoisonError::into_inner).fill(executor, threads)
        };
        Ok(of_each(world, fill, &mut || {})?.into_iter().collect::<Result<(), ExecError>>()?)
    }

    /// Writes the checkpoint of `step` into `dir`, where this process has all ranks.
    pub(crate) fn save(
        &self,
        dir: &Path,
        step: u64,
        about: About<'_>,
        keep: &Keep,
        writing: &Writing,
    ) -> Result<PathBuf, CheckpointError> {
        match &self.ranks[..] {
            [rank] if self.whole => {
                let progress = &mut |done, _| writing.written.store(done, Ordering::Relaxed);
                save(dir, step, &rank.groups(writing), about, keep.clone(), progress)
            }
            _ => {
                let draft = Draft::begin(dir, step)?;
                self.write(&draft, writing)?;
                draft.publish(about, keep.clone())
            }
        }
    }

    /// What this process's ranks would write, as files in memory.
    pub(crate) fn files(&self) -> Result<Vec<MemoryFile>, CheckpointError> {
        let wanted = Writing::default();
        let mut files = Vec::new();
        for rank in &self.ranks {
            for (group, parts) in &rank.parts {
                let parts: Vec<PartRef<'_>> =
                    parts.iter().map(|(part, start)| part.with(vec![rank.data(part, *start, &wanted)])).collect();
                files.extend(MemoryFile::of(group, rank.rank, &parts)?);
            }
        }
        Ok(files)
    }

    /// Writes the parts of this process's ranks, all at once.
    pub(crate) fn write(&self, draft: &Draft, writing: &Writing) -> Result<(), CheckpointError> {
        let write = |rank: &RankSnapshot| {
            rank.parts.iter().try_for_each(|(group, parts)| {
                let parts: Vec<PartRef<'_>> =
                    parts.iter().map(|(part, start)| part.with(vec![rank.data(part, *start, writing)])).collect();
                draft.write(rank.rank, group, &parts, &mut |bytes| {
                    writing.written.fetch_add(bytes, Ordering::Relaxed);
                })
            })
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = self.ranks.iter().map(|rank| scope.spawn(move || write(rank))).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            // The first rank's error.
            threads.into_iter().map(join).fold(Ok(()), Result::and)
        })
    }
}

impl RankSnapshot {
    fn fill(&mut self, executor: &dyn Executor, threads: usize) -> Result<(), ExecError> {
        // Parts lie in memory in this order.
        let parts = self.parts.iter().flat_map(|(_, parts)| parts).map(|(part, _)| part);
        let pieces = parts.flat_map(|part| part.pieces.iter().map(|piece| (part.tensor.as_str(), piece.clone())));
        executor.copy_out(&pieces.collect::<Vec<_>>(), &mut self.bytes, threads)
    }

    /// The tensors of a checkpoint of one rank.
    fn groups(&self, writing: &Writing) -> Vec<TensorGroup<'_>> {
        let tensor = |(part, start): &(RankPart, usize)| TensorRef {
            name: part.name.clone(),
            dtype: part.dtype,
            shape: part.shape.clone(),
            data: self.data(part, *start, writing),
        };
        let group =
            |(name, parts): &(&'static str, Vec<_>)| TensorGroup { name, tensors: parts.iter().map(tensor).collect() };
        self.parts.iter().map(group).collect()
    }

    /// The bytes of a part, until they are not wanted any more.
    fn data(&self, part: &RankPart, start: usize, writing: &Writing) -> TensorBytes<'_> {
        let (bytes, unwanted) = (&self.bytes[start..start + part.bytes()], writing.unwanted.clone());
        TensorBytes::new(bytes.len(), move |range: Range<usize>, take| match unwanted.load(Ordering::Relaxed) {
            true => Err(io::Error::other("the run has ended")),
            false => take(&bytes[range]),
        })
    }
}
