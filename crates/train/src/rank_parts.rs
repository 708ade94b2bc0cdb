//! What each rank writes of a checkpoint: of everything that several ranks hold, the first of them.

use crate::TrainError;
use crate::state::{self, GROUPS, Part};
use lockstep_checkpoint::{Draft, PartRef, Slice};
use lockstep_exec::{Executor, Ranks};
use lockstep_ir::program::Tensor;
use lockstep_ir::{Coordinates, DType, MeshAxis, Run};
use std::sync::mpsc;

/// Bytes of an element: checkpoints hold f32.
const WIDTH: usize = 4;

/// Lets all ranks write their parts at once, straight from their arenas or devices. `tensors` are those of all stages, each once.
pub(crate) fn write(
    ranks: &Ranks,
    tensors: &[Tensor],
    draft: &Draft,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), TrainError> {
    let total: usize = state::stored(tensors).iter().map(|(_, _, _, part)| part.elements * WIDTH).sum();
    let (chunks, written) = mpsc::channel();
    let work = move || {
        ranks.at_once(|at, executor| {
            let chunks = chunks.clone();
            for group in GROUPS {
                let parts = parts_of(ranks, tensors, group, at, executor)?;
                let mut wrote = |bytes| {
                    // It is heard until the last rank has ended.
                    let _ = chunks.send(bytes);
                };
                draft.write(ranks.mesh().rank(at), group, &parts, &mut wrote)?;
            }
            Ok(())
        })
    };
    let results: Result<Vec<Result<(), TrainError>>, _> = std::thread::scope(|scope| {
        let work = scope.spawn(work);
        let mut done = 0;
        for bytes in written {
            done += bytes;
            progress(done, total as u64);
        }
        work.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    results?.into_iter().collect()
}

/// What a rank writes of a group.
fn parts_of<'a>(
    ranks: &Ranks,
    tensors: &[Tensor],
    group: &str,
    at: Coordinates,
    executor: &'a dyn Executor,
) -> Result<Vec<PartRef<'a>>, TrainError> {
    let mesh = ranks.mesh();
    // Of stages that have the same tensor, the first.
    let stage = |tensor: &Tensor| ranks.programs().iter().position(|p| p.tensor(&tensor.name).is_some());
    let mut result = Vec::new();
    let mut runs_of: Option<(&str, Vec<Run>)> = None;
    for (_, name, tensor, part) in state::stored(tensors).into_iter().filter(|(of, ..)| *of == group) {
        if stage(tensor) != Some(at.get(MeshAxis::Pp)) {
            continue;
        }
        if runs_of.as_ref().is_none_or(|(of, _)| *of != tensor.name) {
            runs_of = Some((&tensor.name, tensor.sharding.first_runs(&tensor.whole, &mesh, at)));
        }
        let runs = runs_of.as_ref().map_or(&[][..], |(_, runs)| runs);
        let runs: Vec<Run> = runs.iter().filter_map(|run| within(*run, &part)).collect();
        if runs.is_empty() {
            continue;
        }
        let slices = Slice::of_runs(runs.iter().map(|run| (run.whole, run.len)));
        let piece = |(start, len)| state::bytes(executor, &tensor.name, start * WIDTH..(start + len) * WIDTH);
        let data = joined(&runs).map(piece).collect();
        result.push(PartRef { name, dtype: DType::F32, shape: part.shape, slices, data });
    }
    Ok(result)
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
