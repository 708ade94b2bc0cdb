//! Snapshots of a run's state in the memory of its ranks: what an elastic run goes on from when some of them are lost.
//!
//! Every few steps each rank copies what it would write of a checkpoint, and leaves a copy of that with another rank, on another host where
//! there are several. Both is done while steps go on. The snapshot before is kept until all ranks have the new one and the copies of it. After a loss,
//! those that are left send each other what they hold of the newest snapshot that they can put together.

use crate::checkpoint::Snapshot;
use crate::{Result, TrainError};
use lockstep_checkpoint::{Loaded, MemoryFile};
use lockstep_exec::comm::processes::{Member, ProcessCommunicator};
use lockstep_exec::comm::{Communicator, ProgramPlace};
use lockstep_exec::{ExecError, World};
use lockstep_host::ProcessGroup;
use lockstep_infer::state::GROUPS;
use lockstep_ir::program::Tensor;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// What this process holds of snapshots.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    kept: Arc<Mutex<Vec<Kept>>>,
}

/// What a snapshot holds besides tensors.
#[derive(Clone, Debug)]
pub(crate) struct SnapshotState {
    pub(crate) step: u64,
    pub(crate) state: Value,
    pub(crate) attachments: Vec<(&'static str, Vec<u8>)>,
}

/// What this process holds of one snapshot.
#[derive(Clone, Debug)]
struct Kept {
    about: SnapshotState,
    /// The world that it was taken in, and its ranks.
    epoch: u64,
    ranks: usize,
    /// By the rank that it was of.
    files: BTreeMap<usize, Vec<MemoryFile>>,
}

/// Takes snapshots of a world.
pub(crate) struct Keeper {
    /// None while it is copied.
    snapshot: Option<Snapshot>,
    copying: Option<JoinHandle<(Snapshot, Result<()>)>>,
    comm: Arc<ProcessCommunicator>,
    kept: Arc<Mutex<Vec<Kept>>>,
    epoch: u64,
    /// Whom this rank's copies go to, and whose it holds.
    partners: Option<(usize, usize)>,
}

fn lock(kept: &Mutex<Vec<Kept>>) -> MutexGuard<'_, Vec<Kept>> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Memory {
    /// Makes ready to take snapshots in a world. All processes do this together.
    pub(crate) fn keeper(
        &self,
        comm: &Arc<ProcessCommunicator>,
        epoch: u64,
        (world, tensors): (&dyn World, &[Tensor]),
    ) -> Result<Keeper> {
        let snapshot = Some(Snapshot::new(world, tensors)?);
        let partners = partners(comm.members(), comm.rank());
        Ok(Keeper { snapshot, copying: None, comm: comm.clone(), kept: self.kept.clone(), epoch, partners })
    }

    /// The newest snapshot that all of these processes hold together, where there is one that is newer than step `after`. All call this
    /// together, and keep what they hold: another loss may come before the next snapshot.
    pub(crate) fn gather(&self, comm: &ProcessCommunicator, after: Option<u64>, path: &Path) -> Result<Option<Loaded>> {
        let mine = std::mem::take(&mut *lock(&self.kept));
        let found = gathered(comm, &mine, after, path);
        *lock(&self.kept) = mine;
        found
    }
}

/// What a process says that it holds.
#[derive(Debug, Serialize, Deserialize)]
struct Said {
    epoch: u64,
    step: u64,
    ranks: usize,
    /// Bytes of each file that it has of a rank, with the file's group.
    files: BTreeMap<usize, Vec<(String, u64)>>,
}

/// Bytes that go to all at once.
const CHUNK: usize = 64 << 20;

fn gathered(comm: &ProcessCommunicator, mine: &[Kept], after: Option<u64>, path: &Path) -> Result<Option<Loaded>> {
    let place = ProgramPlace::outside("gather snapshots");
    let exchange = |bytes: &[u8]| comm.exchange(place, bytes).map_err(ExecError::from);
    let wrong = |what: &str| TrainError::from(ExecError::Internal(format!("snapshots in memory: {what}")));
    let said = |kept: &Kept| Said {
        epoch: kept.epoch,
        step: kept.about.step,
        ranks: kept.ranks,
        files: kept.files.iter().map(|(rank, files)| (*rank, sizes(files))).collect(),
    };
    let text = serde_json::to_vec(&mine.iter().map(said).collect::<Vec<_>>()).unwrap_or_default();
    let all: Vec<Vec<Said>> =
        exchange(&text)?.iter().map(|said| serde_json::from_slice(said).unwrap_or_default()).collect();
    // (step, epoch, ranks) of those that are whole.
    let ids: BTreeSet<_> = all.iter().flatten().map(|said| (said.step, said.epoch, said.ranks)).collect();
    let of = |id: (u64, u64, usize)| {
        all.iter().enumerate().flat_map(move |(holder, said)| {
            said.iter().filter(move |s| (s.step, s.epoch, s.ranks) == id).map(move |said| (holder, said))
        })
    };
    let is_whole =
        |id: &(u64, u64, usize)| (0..id.2).all(|rank| of(*id).any(|(_, said)| said.files.contains_key(&rank)));
    let newer = |id: &&(u64, u64, usize)| after.is_none_or(|after| id.0 > after);
    let Some(id) = ids.iter().rev().filter(newer).find(|id| is_whole(id)).copied() else { return Ok(None) };
    let held = mine.iter().find(|kept| (kept.about.step, kept.epoch, kept.ranks) == id);
    // What belongs to it besides tensors is the same for all who hold some of it.
    let first = of(id).map(|(holder, _)| holder).min().unwrap_or(0);
    let about = match held.filter(|_| first == comm.rank()) {
        Some(kept) => serde_json::to_vec(&(&kept.about.state, &kept.about.attachments)).unwrap_or_default(),
        None => Vec::new(),
    };
    let about = exchange(&about)?.swap_remove(first);
    let (state, attachments): (Value, Vec<(String, Vec<u8>)>) =
        serde_json::from_slice(&about).map_err(|e| wrong(&e.to_string()))?;
    let mut files = Vec::new();
    for rank in 0..id.2 {
        let Some((holder, said)) = of(id).find(|(_, said)| said.files.contains_key(&rank)) else { continue };
        let own = held.and_then(|kept| kept.files.get(&rank));
        for (number, (group, bytes)) in said.files[&rank].iter().enumerate() {
            let mine = own.and_then(|files| files.get(number)).map(|file| &file.bytes[..]);
            let mut whole = Vec::new();
            if mine.is_none() && whole.try_reserve_exact(*bytes as usize).is_err() {
                return Err(wrong(&format!("no memory for {bytes} bytes of rank {rank}")));
            }
            for start in (0..*bytes as usize).step_by(CHUNK) {
                let end = (start + CHUNK).min(*bytes as usize);
                let given = mine.filter(|_| holder == comm.rank()).map_or(&[][..], |mine| &mine[start..end]);
                let all = exchange(given)?;
                if mine.is_none() {
                    whole.extend_from_slice(&all[holder]);
                }
            }
            files.push(match own.and_then(|files| files.get(number)) {
                Some(file) => file.clone(),
                None => MemoryFile { group: group.clone(), rank, bytes: Arc::new(whole) },
            });
        }
    }
    Ok(Some(Loaded::from_memory(id.0, path, state, attachments, &files)?))
}

fn sizes(files: &[MemoryFile]) -> Vec<(String, u64)> {
    files.iter().map(|file| (file.group.clone(), file.bytes.len() as u64)).collect()
}

/// Whom a rank's copies go to, and whose it holds: the same distance for all ranks, with which as many as possible are on another host.
fn partners(members: &[Member], rank: usize) -> Option<(usize, usize)> {
    let ranks = members.len();
    let elsewhere = |distance: usize| {
        (0..ranks).filter(|rank| members[*rank].host != members[(rank + distance) % ranks].host).count()
    };
    // The shortest of equals.
    let distance = (1..ranks).min_by_key(|distance| (ranks - elsewhere(*distance), *distance))?;
    Some(((rank + distance) % ranks, (rank + ranks - distance) % ranks))
}

impl Keeper {
    /// Begins a snapshot of a step, if all processes are done with the one before. All call this at the same steps.
    pub(crate) fn take(&mut self, group: ProcessGroup<'_>, world: &dyn World, about: SnapshotState) -> Result<()> {
        let done = self.copying.as_ref().is_none_or(JoinHandle::is_finished);
        if !group.all("snapshot", done)? {
            return Ok(());
        }
        self.wait()?;
        // All have the last one, so those before it are not needed.
        let mut kept = lock(&self.kept);
        let newest = kept.iter().map(|kept| kept.about.step).max();
        kept.retain(|kept| Some(kept.about.step) == newest);
        drop(kept);
        let Some(mut snapshot) = self.snapshot.take() else {
            return Err(ExecError::Internal("two snapshots at once".into()).into());
        };
        if let Err(error) = snapshot.fill(world) {
            self.snapshot = Some(snapshot);
            return Err(error);
        }
        let (comm, kept, epoch, partners) = (self.comm.clone(), self.kept.clone(), self.epoch, self.partners);
        let copy = move || {
            let done = copy(&snapshot, (&comm, partners), about, epoch, &kept);
            (snapshot, done)
        };
        let thread = std::thread::Builder::new().name("lockstep-snapshot".into()).spawn(copy);
        self.copying = Some(thread.map_err(|error| ExecError::Threads(1, error))?);
        Ok(())
    }

    /// Forgets all snapshots: the run goes back before them.
    pub(crate) fn forget(&mut self) -> Result<()> {
        self.wait()?;
        lock(&self.kept).clear();
        Ok(())
    }

    /// Waits until the copies are there.
    pub(crate) fn wait(&mut self) -> Result<()> {
        let Some(thread) = self.copying.take() else { return Ok(()) };
        let (snapshot, done) = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        self.snapshot = Some(snapshot);
        done
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // What ends the run ends the copies; the thread's memory goes with it.
        if let Some(thread) = self.copying.take() {
            drop(thread.join());
        }
    }
}

/// Keeps what a snapshot has, and a copy of a partner's.
fn copy(
    snapshot: &Snapshot,
    (comm, partners): (&ProcessCommunicator, Option<(usize, usize)>),
    about: SnapshotState,
    epoch: u64,
    kept: &Mutex<Vec<Kept>>,
) -> Result<()> {
    let (step, rank) = (about.step, comm.rank());
    let mine = snapshot.files()?;
    let files = BTreeMap::from([(rank, mine.clone())]);
    lock(kept).push(Kept { about, epoch, ranks: comm.ranks(), files });
    let Some((to, from)) = partners else { return Ok(()) };
    let place = ProgramPlace::outside("copy a snapshot");
    let wrong = || TrainError::from(ExecError::Internal(format!("the copy of rank {from} is not what it said")));
    let send = |bytes: &[u8]| comm.pass_on(place, bytes, to, from).map_err(ExecError::from);
    let theirs: Vec<(String, u64)> =
        serde_json::from_slice(&send(&serde_json::to_vec(&sizes(&mine)).unwrap_or_default())?).map_err(|_| wrong())?;
    let mut copies = Vec::new();
    // One message for each group, so that both ends count alike.
    for group in GROUPS {
        let mine = mine.iter().find(|file| file.group == group).map_or(&[][..], |file| &file.bytes[..]);
        let bytes = send(mine)?;
        match theirs.iter().find(|(of, _)| of == group) {
            Some((_, size)) if *size == bytes.len() as u64 => {
                copies.push(MemoryFile { group: group.to_owned(), rank: from, bytes: Arc::new(bytes) });
            }
            None if bytes.is_empty() => {}
            _ => return Err(wrong()),
        }
    }
    let mut kept = lock(kept);
    let of = kept.iter_mut().find(|kept| kept.about.step == step && kept.epoch == epoch);
    of.map(|kept| kept.files.insert(from, copies));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_go_to_other_hosts_where_there_are_some() {
        let members = |hosts: &[&str]| -> Vec<Member> {
            hosts.iter().map(|host| Member { host: (*host).into(), pid: 1, cores: 1 }).collect()
        };
        assert_eq!(partners(&members(&["a"]), 0), None);
        assert_eq!(partners(&members(&["a", "a", "a"]), 0), Some((1, 2)));
        let two = members(&["a", "a", "b", "b"]);
        let all: Vec<_> = (0..4).map(|rank| partners(&two, rank)).collect();
        assert_eq!(all, [Some((2, 2)), Some((3, 3)), Some((0, 0)), Some((1, 1))]);
        // Every copy is held by one rank, and is not its own.
        let uneven = members(&["a", "a", "a", "b", "c"]);
        let held: BTreeSet<_> = (0..5).filter_map(|rank| Some(partners(&uneven, rank)?.0)).collect();
        assert_eq!(held.len(), 5);
        assert!((0..5).all(|rank| partners(&uneven, rank).is_some_and(|(to, _)| to != rank)));
    }
}
