//! The ranks of a run from outside: whole tensors in, whole tensors out.
//!
//! A [`Rank`] runs one rank's program on its own parts of tensors. A [`World`] has them all, or those of this process: it cuts
//! whole tensors into the ranks' parts and puts them together again, runs an entry on all of them, and says what ended the run.
//!
//! So training, resuming and `verify` do not look at ranks. Only writing a checkpoint asks each rank for what it
//! has.

mod alone;
mod processes;
mod threads;

pub use alone::Alone;
pub use processes::ProcessWorld;
pub use threads::ThreadWorld;

use crate::sync::std_lock;
use crate::{ExecError, Executor};
use lockstep_ir::program::Tensor;
use lockstep_ir::{Coordinates, Mesh, Placement, Run, StepProgram};
use std::borrow::Cow;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::time::Duration;

/// An executor that is one of several. Its tensors are that rank's parts.
pub trait Rank: Executor {
    /// After an error: returns when nobody works on its arena any more.
    fn drain(&mut self) {}
}

/// The ranks that run a program together. As an executor it takes and gives whole tensors; `run` ends for all ranks with the same
/// error if it fails on one.
pub trait World: Executor {
    /// The programs, one per pipeline stage.
    fn programs(&self) -> &[StepProgram];

    /// Calls `f` for all ranks of this process at once, with the tensors of each; `meanwhile` now and then on the caller's thread,
    /// and once after the last.
    fn each_rank(
        &self,
        f: &(dyn Fn(Coordinates, &dyn Executor) + Sync),
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ExecError>;

    /// Whether a rank of this process has any of these elements of a tensor: others need not be written.
    fn has(&self, _tensor: &str, _elements: Range<usize>) -> bool {
        true
    }

    /// Which of the world's processes this is; the first where all ranks are of one.
    fn process(&self) -> usize {
        0
    }

    /// Seconds that each rank computed in the entry that ran last, without those in which it waited for others. Known where ranks
    /// are processes that can tell, once something was read; else empty.
    fn rank_busy_s(&self) -> Vec<f64> {
        Vec::new()
    }

    /// Every process gives some bytes, and all get everybody's, by process. `op` is for messages.
    fn exchange(&self, _op: &'static str, mine: &[u8]) -> Result<Vec<Vec<u8>>, ExecError> {
        Ok(vec![mine.to_vec()])
    }
}

impl dyn World + '_ {
    /// How ranks are numbered.
    pub fn mesh(&self) -> Mesh {
        self.programs().first().map_or(Mesh::ONE, |program| program.mesh)
    }
}

/// Does a rank's work; a panic is an error.
fn caught<T>(work: impl FnOnce() -> Result<T, ExecError>) -> Result<T, ExecError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("panicked");
        Err(ExecError::Internal(text.to_owned()))
    })
}

/// How often `each` looks whether all have ended.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// [`World::each_rank`] of these ranks.
fn each<'a>(
    ranks: impl ExactSizeIterator<Item = (Coordinates, &'a Mutex<Box<dyn Rank>>)>,
    f: &(dyn Fn(Coordinates, &dyn Executor) + Sync),
    meanwhile: &mut dyn FnMut(),
) -> Result<(), ExecError> {
    std::thread::scope(|scope| {
        let (count, mut threads) = (ranks.len(), Vec::with_capacity(ranks.len()));
        for (i, (at, executor)) in ranks.enumerate() {
            let thread = std::thread::Builder::new().name(format!("lockstep-each-{i}"));
            let thread = thread.spawn_scoped(scope, move || f(at, std_lock(executor).as_ref()));
            threads.push(thread.map_err(|e| ExecError::Threads(count, e))?);
        }
        while !threads.iter().all(|thread| thread.is_finished()) {
            meanwhile();
            std::thread::sleep(LOOK_EVERY);
        }
        meanwhile();
        let panicked = |_| ExecError::Internal("a rank's thread panicked".into());
        threads.into_iter().try_for_each(|thread| thread.join().map_err(panicked))
    })
}

/// The part of a whole tensor that the rank at `at` has.
fn scatter<'a>(tensor: &Tensor, mesh: &Mesh, at: Coordinates, whole: &'a [u8]) -> Result<Cow<'a, [u8]>, ExecError> {
    let width = tensor.whole.dtype.bytes();
    if whole.len() as u64 != tensor.whole.bytes() {
        let (name, bytes) = (&tensor.name, tensor.whole.bytes());
        return Err(ExecError::Internal(format!("`{name}` takes {bytes} bytes, got {}", whole.len())));
    }
    let runs = tensor.sharding.runs(&tensor.whole, mesh, at);
    if is_whole(tensor, &runs) {
        return Ok(Cow::Borrowed(whole));
    }
    let mut local = vec![0; tensor.ty.bytes() as usize];
    for run in runs {
        let (from, to, len) = (run.whole * width, run.local * width, run.len * width);
        local[to..to + len].copy_from_slice(&whole[from..from + len]);
    }
    Ok(Cow::Owned(local))
}

/// Whether a rank that has these runs has all of the tensor, and nothing besides.
fn is_whole(tensor: &Tensor, runs: &[Run]) -> bool {
    let all = Run { whole: 0, local: 0, len: tensor.whole.elements() };
    runs == [all] && tensor.ty.bytes() == tensor.whole.bytes()
}

/// Puts what the rank at `at` has of a tensor, and no rank before it, where it belongs in the whole. `read` gives the rank's part,
/// and is not asked where the rank has nothing to add.
fn gather<'a>(
    tensor: &Tensor,
    mesh: &Mesh,
    at: Coordinates,
    whole: &mut Vec<u8>,
    read: impl FnOnce() -> Result<Cow<'a, [u8]>, ExecError>,
) -> Result<(), ExecError> {
    let runs = first_runs(tensor, mesh, at)?;
    if runs == [Run { whole: 0, local: 0, len: tensor.whole.bytes() as usize }]
        && tensor.ty.bytes() == tensor.whole.bytes()
    {
        *whole = read()?.into_owned();
        return Ok(());
    }
    if whole.is_empty() {
        *whole = vec![0; tensor.whole.bytes() as usize];
    }
    if runs.is_empty() {
        return Ok(());
    }
    let local = read()?;
    for run in runs {
        whole[run.whole..run.whole + run.len].copy_from_slice(&local[run.local..run.local + run.len]);
    }
    Ok(())
}

/// The ranges of a tensor, in bytes, that the rank at `at` has and no rank before it.
fn first_runs(tensor: &Tensor, mesh: &Mesh, at: Coordinates) -> Result<Vec<Run>, ExecError> {
    if !tensor.sharding.axes(Placement::Partial).is_empty() {
        return Err(ExecError::Internal(format!("`{}` is not summed over ranks", tensor.name)));
    }
    let width = tensor.whole.dtype.bytes();
    let bytes = |run: Run| Run { whole: run.whole * width, local: run.local * width, len: run.len * width };
    Ok(tensor.sharding.first_runs(&tensor.whole, mesh, at).into_iter().map(bytes).collect())
}
