//! Checkpoints that are written while steps go on: a snapshot, a thread that writes it, and the processes of a run in step.
//!
//! Processes agree on how far their saves are at steps alone.

use super::snapshot::{Snapshot, Writing};
use crate::Result;
use lockstep_checkpoint::{About, BucketMirror, CheckpointError, Draft, Keep, require_space};
use lockstep_exec::{ExecError, World};
use lockstep_ir::Hint;
use lockstep_ir::program::Tensor;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A checkpoint that is to be written.
#[derive(Clone, Debug)]
pub struct SaveRequest {
    /// Where checkpoints are.
    pub dir: PathBuf,
    /// Steps finished.
    pub step: u64,
    /// What belongs to it besides tensors.
    pub state: Value,
    /// Files that belong to it, with their names.
    pub attachments: Vec<(&'static str, Vec<u8>)>,
    /// Which checkpoints stay.
    pub keep: Keep,
    /// A second place for it: a folder, or an address in a bucket.
    pub mirror: Option<PathBuf>,
}

impl SaveRequest {
    /// Calls `f` with what the checkpoint holds besides tensors.
    pub(crate) fn about<T>(&self, f: impl FnOnce(About<'_>) -> T) -> T {
        let attachments: Vec<(&str, &[u8])> = self.attachments.iter().map(|(name, file)| (*name, &file[..])).collect();
        f(About { state: &self.state, attachments: &attachments })
    }

    /// Copies a checkpoint that is there to the second place, if there is one, as long as nobody gives the copy up.
    pub(crate) fn mirrored(&self, path: PathBuf, given_up: &AtomicBool) -> Published {
        // Where the first place failed, the second is the only one.
        let second = self.mirror.as_ref().filter(|mirror| **mirror != self.dir);
        let failed = second.and_then(|mirror| match BucketMirror::of(mirror) {
            None => lockstep_checkpoint::mirror(&path, mirror, &self.keep).err(),
            Some(bucket) => bucket.and_then(|bucket| bucket.copy(&path, &self.keep, given_up)).err(),
        });
        // One line: where a bucket refuses, what to do about it is not seen from its words.
        let told = |error: CheckpointError| match &error {
            CheckpointError::Bucket { error } => format!("{error} ({})", error.hint()),
            error => error.to_string(),
        };
        (path, failed.map(told))
    }
}

/// How a save in the background ended.
#[derive(Clone, Debug)]
pub enum SaveEnd {
    /// The checkpoint is there.
    Saved {
        /// Its step.
        step: u64,
        /// Where.
        path: PathBuf,
        /// Seconds that steps waited for the snapshot.
        stall_s: f64,
        /// Seconds until it was there.
        save_s: f64,
        /// Why its second place has none, in a line; known to the first process.
        mirror_failed: Option<String>,
    },
    /// It is not, and the checkpoints before it are untouched.
    Failed {
        /// Its step.
        step: u64,
        /// The rank whose part could not be written, where it is a process.
        rank: Option<usize>,
        /// Why.
        cause: SaveFailure,
    },
}

/// Why a checkpoint was not written, as processes tell each other.
#[derive(Clone, Debug, Default, Serialize, Deserialize, thiserror::Error, Hint)]
#[error("{text}")]
#[hint(hint.clone())]
pub struct SaveFailure {
    pub(crate) text: String,
    pub(crate) hint: Option<String>,
}

impl SaveFailure {
    fn told(&self) -> Vec<u8> {
        said(FAILED, &serde_json::to_vec(self).unwrap_or_default())
    }

    fn heard(told: &[u8]) -> Self {
        serde_json::from_slice(told).unwrap_or_default()
    }
}

impl From<CheckpointError> for SaveFailure {
    fn from(error: CheckpointError) -> Self {
        Self { text: error.to_string(), hint: error.hint() }
    }
}

impl From<&str> for SaveFailure {
    fn from(text: &str) -> Self {
        Self { text: text.to_owned(), hint: None }
    }
}

/// Host memory for one snapshot, and the save under way.
pub(crate) struct Saver {
    /// None while the snapshot is being written.
    snapshot: Option<Snapshot>,
    in_flight: Option<InFlight>,
    snapshot_bytes: u64,
    processes: usize,
}

struct InFlight {
    request: Arc<SaveRequest>,
    begun: Instant,
    stall_s: f64,
    writing: Writing,
    phase: Phase,
}

enum Phase {
    /// One process writes and publishes everything.
    All(JoinHandle<(Snapshot, Result<Published, CheckpointError>)>),
    /// Every process writes its parts. The draft stays where that fails: others may not have found its folder yet.
    Parts(JoinHandle<(Snapshot, Draft, Result<(), CheckpointError>)>),
    /// All parts are written; the first process gives the checkpoint its name, and copies it to the second place.
    Publish(Option<Publishing>),
    /// It could not be begun.
    Failed(SaveFailure),
}

struct Publishing {
    thread: JoinHandle<Result<Published, CheckpointError>>,
    /// Whether the checkpoint is there.
    published: Arc<AtomicBool>,
    /// Whether its copy is not waited for.
    given_up: Arc<AtomicBool>,
}

/// Where a checkpoint is, and why its second place has none.
type Published = (PathBuf, Option<String>);

/// What a process says of its part of a save.
const BUSY: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;

/// How often a save is looked at that is waited for.
const LOOK_EVERY: Duration = Duration::from_millis(5);

impl Saver {
    /// Takes the memory for a snapshot. All processes do this together.
    pub(crate) fn new(world: &dyn World, tensors: &[Tensor]) -> Result<Self> {
        let snapshot = Snapshot::new(world, tensors)?;
        let processes = world.exchange("save", &[])?.len();
        Ok(Self { snapshot_bytes: snapshot.bytes(), snapshot: Some(snapshot), in_flight: None, processes })
    }

    /// Bytes of host memory that the snapshot has.
    pub(crate) fn snapshot_bytes(&self) -> u64 {
        self.snapshot_bytes
    }

    /// Copies what the ranks have now and begins to write it, `bytes` on all of them. Nothing else may be under way.
    pub(crate) fn begin(&mut self, world: &dyn World, request: SaveRequest, bytes: u64) -> Result<()> {
        let begun = Instant::now();
        let (Some(mut snapshot), None) = (self.snapshot.take(), &self.in_flight) else {
            return Err(ExecError::Internal("two checkpoints are saved at once".into()).into());
        };
        if let Err(error) = snapshot.fill(world) {
            self.snapshot = Some(snapshot);
            return Err(error);
        }
        let (request, writing) = (Arc::new(request), Writing::default());
        let phase = match self.processes {
            1 => {
                let (request, writing) = (request.clone(), writing.clone());
                Phase::All(spawn(move || {
                    let SaveRequest { dir, step, keep, .. } = &*request;
                    let room = require_space(dir, snapshot.bytes());
                    let save = || request.about(|about| snapshot.save(dir, *step, about, keep, &writing));
                    let result = room.and_then(|()| save()).map(|path| request.mirrored(path, &AtomicBool::new(false)));
                    (snapshot, result)
                })?)
            }
            _ => match self.join_draft(world, &request, bytes)? {
                Ok(draft) => {
                    let writing = writing.clone();
                    Phase::Parts(spawn(move || {
                        let result = snapshot.write(&draft, &writing);
                        (snapshot, draft, result)
                    })?)
                }
                Err(cause) => {
                    self.snapshot = Some(snapshot);
                    Phase::Failed(cause)
                }
            },
        };
        let stall_s = begun.elapsed().as_secs_f64();
        self.in_flight = Some(InFlight { request, begun, stall_s, writing, phase });
        Ok(())
    }

    /// The draft that the first process begins, for all of them, or why there is none.
    fn join_draft(&self, world: &dyn World, request: &SaveRequest, bytes: u64) -> Result<Result<Draft, SaveFailure>> {
        let SaveRequest { dir, step, .. } = request;
        if world.process() > 0 {
            let told = first(world.exchange("save", &[])?);
            return Ok(match told.split_first() {
                Some((&DONE, folder)) => Ok(Draft::join(dir, *step, &path(folder))),
                Some((_, cause)) => Err(SaveFailure::heard(cause)),
                None => Err("the first process began no checkpoint".into()),
            });
        }
        let draft = require_space(dir, bytes).and_then(|()| Draft::begin(dir, *step)).map_err(SaveFailure::from);
        let told = match &draft {
            Ok(draft) => said(DONE, draft.folder().as_os_str().as_bytes()),
            Err(cause) => cause.told(),
        };
        world.exchange("save", &told)?;
        Ok(draft)
    }

    /// Looks at the save under way, and says how it ended if it has. All processes look at the same points.
    pub(crate) fn poll(&mut self, world: &dyn World) -> Result<Option<SaveEnd>> {
        let Some(mut save) = self.in_flight.take() else { return Ok(None) };
        let (step, begun, stall_s) = (save.request.step, save.begun, save.stall_s);
        let saved = |(path, mirror_failed): Published| {
            let save_s = begun.elapsed().as_secs_f64();
            SaveEnd::Saved { step, path, stall_s, save_s, mirror_failed }
        };
        let failed = |rank, cause| SaveEnd::Failed { step, rank, cause };
        match save.phase {
            Phase::All(thread) if !thread.is_finished() => save.phase = Phase::All(thread),
            Phase::All(thread) => {
                let (snapshot, result) = joined(thread);
                self.snapshot = Some(snapshot);
                return Ok(Some(result.map_or_else(|error| failed(None, error.into()), saved)));
            }
            Phase::Parts(thread) => {
                let mine = if thread.is_finished() { DONE } else { BUSY };
                if any(&world.exchange("save", &[mine])?, BUSY) {
                    save.phase = Phase::Parts(thread);
                } else {
                    let (snapshot, draft, result) = joined(thread);
                    self.snapshot = Some(snapshot);
                    match self.hand_over(world, result.map(|()| draft))? {
                        Err((rank, cause)) => return Ok(Some(failed(Some(rank), cause))),
                        Ok(None) => save.phase = Phase::Publish(None),
                        Ok(Some(draft)) => {
                            let request = save.request.clone();
                            let (published, given_up) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
                            let (is_published, is_given_up) = (published.clone(), given_up.clone());
                            let publish = move || {
                                let path = request.about(|about| draft.publish(about, request.keep.clone()))?;
                                is_published.store(true, Ordering::Release);
                                Ok(request.mirrored(path, &is_given_up))
                            };
                            let thread = spawn(publish)?;
                            save.phase = Phase::Publish(Some(Publishing { thread, published, given_up }));
                        }
                    }
                }
            }
            Phase::Publish(publishing) => {
                let mut mirror_failed = None;
                let told = match publishing {
                    Some(publishing) if !publishing.thread.is_finished() => {
                        save.phase = Phase::Publish(Some(publishing));
                        said(BUSY, &[])
                    }
                    Some(publishing) => {
                        save.phase = Phase::Publish(None);
                        match joined(publishing.thread) {
                            Ok((path, failed)) => {
                                mirror_failed = failed;
                                said(DONE, path.as_os_str().as_bytes())
                            }
                            Err(error) => SaveFailure::from(error).told(),
                        }
                    }
                    None => {
                        save.phase = Phase::Publish(None);
                        Vec::new()
                    }
                };
                let told = first(world.exchange("save", &told)?);
                match told.split_first() {
                    Some((&DONE, of)) => return Ok(Some(saved((path(of), mirror_failed)))),
                    Some((&FAILED, cause)) => return Ok(Some(failed(Some(0), SaveFailure::heard(cause)))),
                    _ => {}
                }
            }
            Phase::Failed(cause) => return Ok(Some(failed(Some(0), cause))),
        }
        self.in_flight = Some(save);
        Ok(None)
    }

    /// Gives what every process has written to the first, which publishes it; or says whose write failed.
    fn hand_over(
        &self,
        world: &dyn World,
        result: Result<Draft, CheckpointError>,
    ) -> Result<Result<Option<Draft>, (usize, SaveFailure)>> {
        let mut draft = None;
        let told = match result {
            Err(error) => SaveFailure::from(error).told(),
            Ok(mine) if world.process() == 0 => {
                draft = Some(mine);
                said(DONE, &[])
            }
            Ok(mine) => match mine.hand_over() {
                Ok(written) => said(DONE, &written),
                Err(error) => SaveFailure::from(error).told(),
            },
        };
        let all = world.exchange("save", &told)?;
        if let Some(rank) = all.iter().position(|told| told.first() != Some(&DONE)) {
            return Ok(Err((rank, SaveFailure::heard(all[rank].get(1..).unwrap_or_default()))));
        }
        if let Some(draft) = &draft {
            for written in &all[1..] {
                draft.take_over(&written[1..])?;
            }
        }
        Ok(Ok(draft))
    }

    /// Waits for the save under way, if there is one. `progress` hears the bytes that this process has written and those that it
    /// writes.
    pub(crate) fn wait(&mut self, world: &dyn World, progress: &mut dyn FnMut(u64, u64)) -> Result<Option<SaveEnd>> {
        loop {
            let end = self.poll(world)?;
            let Some(save) = &self.in_flight else { return Ok(end) };
            progress(save.writing.written().min(self.snapshot_bytes), self.snapshot_bytes);
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

impl Drop for Saver {
    /// A save that this process does alone is finished. One that needs others, who may be gone, is not; and where others wait to go on without those, a copy
    /// in a bucket, which may take minutes, is abandoned.
    fn drop(&mut self) {
        let Some(save) = self.in_flight.take() else { return };
        match save.phase {
            Phase::All(thread) => drop(thread.join()),
            Phase::Parts(thread) => {
                save.writing.cancel();
                drop(thread.join());
            }
            Phase::Publish(Some(Publishing { thread, published, given_up })) => {
                given_up.store(true, Ordering::Release);
                while !published.load(Ordering::Acquire) && !thread.is_finished() {
                    std::thread::sleep(LOOK_EVERY);
                }
            }
            Phase::Publish(None) | Phase::Failed(_) => {}
        }
    }
}

fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>> {
    let thread = std::thread::Builder::new().name("lockstep-save".into());
    Ok(thread.spawn(work).map_err(|error| ExecError::Threads(1, error))?)
}

fn joined<T>(thread: JoinHandle<T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn said(what: u8, more: &[u8]) -> Vec<u8> {
    [&[what], more].concat()
}

fn any(all: &[Vec<u8>], what: u8) -> bool {
    all.iter().any(|told| told.first() == Some(&what))
}

fn first(all: Vec<Vec<u8>>) -> Vec<u8> {
    all.into_iter().next().unwrap_or_default()
}

/// Paths go between processes of one file system, as the system has them.
fn path(bytes: &[u8]) -> PathBuf {
    Path::new(&OsString::from_vec(bytes.to_vec())).to_owned()
}
