//! A copy in host memory of what a checkpoint holds: steps go on while it is written.
//!
//! The memory is taken once, before the first step, and is what the plan says. Filling it is one copy; whoever has tensors on a device
//! fills the same bytes from there.

use crate::TrainError;
use crate::rank_parts::{RankPart, of_rank};
use crate::state::GROUPS;
use lockstep_checkpoint::{About, CheckpointError, Draft, Keep, PartRef, TensorBytes, TensorGroup, TensorRef, save};
use lockstep_exec::{ExecError, Executor, World, copy, cpu};
use lockstep_ir::program::Tensor;
use lockstep_ir::{Coordinates, DType};
use std::borrow::Cow;
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
    bytes: Vec<u8>,
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

/// The most bytes that are asked of an executor at once: what lies on a device takes as much memory again on the way.
const CHUNK: usize = 64 << 20;

/// More threads than these do not copy faster.
const MOST_THREADS: usize = 8;

impl Snapshot {
    /// Takes the memory for what the ranks of this process hold, and touches all of it: the first copy is as fast as the others.
    pub(crate) fn new(world: &dyn World, tensors: &[Tensor]) -> Result<Self, TrainError> {
        let (mesh, programs) = (world.mesh(), world.programs());
        let made = Mutex::new(Vec::new());
        world.each_rank(
            &|at, _| {
                let mut end = 0;
                let mut place = |part: RankPart| {
                    let start = end;
                    end += part.bytes();
                    (part, start)
                };
                let parts: Vec<_> = GROUPS
                    .iter()
                    .map(|group| {
                        let parts = of_rank((&mesh, programs), tensors, group, at).into_iter();
                        (*group, parts.map(&mut place).collect())
                    })
                    .collect();
                let mut bytes: Vec<u8> = Vec::new();
                let taken = bytes.try_reserve_exact(end);
                if taken.is_ok() {
                    bytes.resize(end, 0);
                }
                let rank = RankSnapshot { rank: mesh.rank(at), parts, bytes };
                let result = taken.map(|()| rank).map_err(|_| TrainError::NoSnapshot { bytes: end as u64 });
                made.lock().unwrap_or_else(PoisonError::into_inner).push(result);
            },
            &mut || {},
        )?;
        let made = made.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut ranks = made.into_iter().collect::<Result<Vec<_>, _>>()?;
        ranks.sort_by_key(|rank| rank.rank);
        Ok(Self { ranks, whole: mesh.ranks() == 1 })
    }

    /// Bytes of host memory.
    pub(crate) fn bytes(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.bytes.len() as u64).sum()
    }

    /// Copies what the ranks have now.
    pub(crate) fn fill(&mut self, world: &dyn World) -> Result<(), TrainError> {
        let mesh = world.mesh();
        let ranks: Vec<_> = self.ranks.iter_mut().map(|rank| (rank.rank, Mutex::new(rank))).collect();
        let threads = (cpu::cores() / ranks.len().max(1)).clamp(1, MOST_THREADS);
        let failed = Mutex::new(None);
        let fill = |at: Coordinates, executor: &dyn Executor| {
            let number = mesh.rank(at);
            let Some((_, rank)) = ranks.iter().find(|(rank, _)| *rank == number) else { return Ok(()) };
            rank.lock().unwrap_or_else(PoisonError::into_inner).fill(executor, threads)
        };
        world.each_rank(
            &|at, executor| {
                if let Err(error) = fill(at, executor) {
                    failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                }
            },
            &mut || {},
        )?;
        let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
        failed.map_or(Ok(()), |error: ExecError| Err(error.into()))
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
        let mut rest = &mut self.bytes[..];
        let mut pieces = Vec::new();
        // Parts lie in memory in this order.
        for part in self.parts.iter().flat_map(|(_, parts)| parts).map(|(part, _)| part) {
            for piece in &part.pieces {
                for from in piece.clone().step_by(CHUNK) {
                    let range = from..piece.end.min(from + CHUNK);
                    let (to, behind) = std::mem::take(&mut rest).split_at_mut(range.len());
                    rest = behind;
                    match executor.read_range(&part.tensor, 0, range)? {
                        Cow::Borrowed(bytes) => pieces.push((to, bytes)),
                        Cow::Owned(bytes) => copy(to, &bytes),
                    }
                }
            }
        }
        copy_all(pieces, threads);
        Ok(())
    }

    /// The tensors of a checkpoint of one rank.
    fn groups(&self, writing: &Writing) -> Vec<TensorGroup<'_>> {
        let tensor = |(part, start): &(RankPart, usize)| TensorRef {
            name: part.name.clone(),
            dtype: DType::F32,
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

/// Copies pieces on so many threads, each about as many bytes.
fn copy_all(mut pieces: Vec<(&mut [u8], &[u8])>, threads: usize) {
    let total: usize = pieces.iter().map(|(to, _)| to.len()).sum();
    let share = total.div_ceil(threads.max(1));
    let run = |pieces: Vec<(&mut [u8], &[u8])>| pieces.into_iter().for_each(|(to, from)| to.copy_from_slice(from));
    std::thread::scope(|scope| {
        while !pieces.is_empty() {
            let mut bytes = 0;
            let enough = pieces.iter().rposition(|(to, _)| {
                bytes += to.len();
                bytes >= share
            });
            let mine = pieces.split_off(enough.unwrap_or(0));
            if pieces.is_empty() {
                run(mine);
            } else {
                scope.spawn(move || run(mine));
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_is_copied_once_on_any_number_of_threads() {
        let from: Vec<u8> = (0..1000).map(|i| i as u8).collect();
        for threads in [1, 2, 3, 8, 2000] {
            let mut to = vec![0; 1000];
            let mut pieces = Vec::new();
            let (mut rest, mut at) = (&mut to[..], 0);
            for len in [0, 1, 400, 7, 99, 0, 300, 193] {
                let (piece, behind) = rest.split_at_mut(len);
                pieces.push((piece, &from[at..at + len]));
                (rest, at) = (behind, at + len);
            }
            copy_all(pieces, threads);
            assert_eq!(to, from, "{threads} threads");
        }
    }
}
