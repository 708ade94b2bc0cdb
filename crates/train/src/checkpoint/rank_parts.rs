//! What each rank writes of a checkpoint: of everything that several ranks hold, the first of them.
//!
//! Opening a checkpoint proves that the slices make up every tensor, and readers see whole tensors. So a run
//! resumes in any other layout.

use crate::Result;
use lockstep_checkpoint::{Draft, PartRef, Slice, TensorBytes};
use lockstep_exec::{ExecError, Executor, World};
use lockstep_infer::state::{self, GROUPS, Part};
use lockstep_ir::program::Tensor;
use lockstep_ir::{Coordinates, DType, Mesh, MeshAxis, Run, StepProgram};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Lets the ranks of this process write their parts at once, straight from their arenas or devices. `tensors` are those of all
/// stages, each once. `progress` hears the bytes written and the bytes in all, its last word being that all are.
pub(crate) fn write(
    world: &dyn World,
    tensors: &[Tensor],
    draft: &Draft,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<()> {
    let total = state::bytes_of(tensors);
    let (mesh, programs) = (world.mesh(), world.programs());
    let (written, mut done) = (AtomicU64::new(0), 0);
    let write_rank = |at: Coordinates, executor: &dyn Executor| {
        for group in GROUPS {
            let parts = of_rank((&mesh, programs), tensors, group, at);
            let data =
                |part: &RankPart| part.pieces.iter().map(|p| state::bytes(executor, &part.tensor, p.clone())).collect();
            let parts: Vec<PartRef<'_>> = parts.iter().map(|part| part.with(data(part))).collect();
            let mut wrote = |bytes| {
                written.fetch_add(bytes, Ordering::Relaxed);
            };
            draft.write(mesh.rank(at), group, &parts, &mut wrote)?;
        }
        Ok(())
    };
    let results: Vec<Result<()>> = of_each(world, write_rank, &mut || {
        let now = written.load(Ordering::Relaxed);
        if std::mem::replace(&mut done, now) != now {
            progress(now, total);
        }
    })?;
    progress(total, total);
    // The first rank's error.
    results.into_iter().collect()
}

/// What `f` gives for each rank of this process, by ascending rank; it is called for all at once, and `meanwhile` now and then.
pub(crate) fn of_each<T: Send>(
    world: &dyn World,
    f: impl Fn(Coordinates, &dyn Executor) -> T + Sync,
    meanwhile: &mut dyn FnMut(),
) -> Result<Vec<T>, ExecError> {
    let (mesh, found) = (world.mesh(), Mutex::new(BTreeMap::new()));
    let each = |at: Coordinates, executor: &dyn Executor| {
        let result = f(at, executor);
        found.lock().unwrap_or_else(PoisonError::into_inner).insert(mesh.rank(at), result);
    };
    world.each_rank(&each, meanwhile)?;
    Ok(found.into_inner().unwrap_or_else(PoisonError::into_inner).into_values().collect())
}

/// What a rank writes of an unpacked tensor.
#[derive(Clone, Debug)]
pub(crate) struct RankPart {
    /// The unpacked tensor's name.
    pub(crate) name: String,
    /// Sizes of its dimensions.
    pub(crate) shape: Vec<usize>,
    /// Which of its elements these are.
    slices: Vec<Slice>,
    /// Their type.
    pub(crate) dtype: DType,
    /// The tensor of the program that has them.
    pub(crate) tensor: String,
    /// Where they lie in the rank's part of it, in bytes.
    pub(crate) pieces: Vec<Range<usize>>,
}

impl RankPart {
    /// The part with its bytes.
    pub(crate) fn with<'a>(&self, data: Vec<TensorBytes<'a>>) -> PartRef<'a> {
        let RankPart { name, shape, slices, dtype, .. } = self.clone();
        PartRef { name, dtype, shape, slices, data }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.pieces.iter().map(Range::len).sum()
    }
}

/// What a rank writes of a group.
pub(crate) fn of_rank(
    (mesh, programs): (&Mesh, &[StepProgram]),
    tensors: &[Tensor],
    group: &str,
    at: Coordinates,
) -> Vec<RankPart> {
    // Of stages that have the same tensor, the first.
    let stage = |tensor: &Tensor| programs.iter().position(|p| p.tensor(&tensor.name).is_some());
    let mut result = Vec::new();
    let mut runs_of: Option<(&str, Vec<Run>)> = None;
    for (_, name, tensor, part) in state::stored(tensors).into_iter().filter(|(of, ..)| *of == group) {
        if stage(tensor) != Some(at.get(MeshAxis::Pp)) {
            continue;
        }
        if runs_of.as_ref().is_none_or(|(of, _)| *of != tensor.name) {
            runs_of = Some((&tensor.name, tensor.sharding.first_runs(&tensor.whole, mesh, at)));
        }
        let runs = runs_of.as_ref().map_or(&[][..], |(_, runs)| runs);
        let runs: Vec<Run> = runs.iter().filter_map(|run| within(*run, &part)).collect();
        if runs.is_empty() {
            continue;
        }
        let slices = Slice::of_runs(runs.iter().map(|run| (run.whole, run.len)));
        let (dtype, width) = (tensor.whole.dtype, tensor.whole.dtype.bytes());
        let pieces = joined(&runs).map(|(start, len)| start * width..(start + len) * width).collect();
        result.push(RankPart { name, shape: part.shape, slices, dtype, tensor: tensor.name.clone(), pieces });
    }
    result
}

/// What a run has of an unpacked tensor, counted from that tensor's start.
fn within(run: Run, part: &Part) -> Option<Run> {
    let (start, end) = (run.whole.max(part.start), (run.whole + run.len).min(part.start + part.elements));
    let local = run.local + start.saturating_sub(run.whole);
    (start < end).then(|| Run { whole: start - part.start, local, len: end - start })
}

/// Where runs lie on the rank, as (start, length); neighbours become one.
fn joined(runs: &[Run]) -> impl Iterator<Item = (usize, usize)> {
    runs.chunk_by(|a, b| a.local + a.len == b.local).map(|r| (r[0].local, r.iter().map(|run| run.len).sum()))
}
