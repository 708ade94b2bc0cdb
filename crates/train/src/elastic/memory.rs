//! Snapshots of a run's state in the memory of its ranks: what an elastic run goes on from when some of them are lost.
//!
//! Every few steps each rank copies what it would write of a checkpoint, and leaves a copy of that with another rank, on another host where
//! there are several. Both is done while steps go on. The snapshot before is kept until all ranks have the new one and the copies of it. After a loss,
//! those that are left send each other what they hold of the newest snapshot that they can put together.

use crate::checkpoint::Snapshot;
use crate::{Result, TrainError};
use lockstep_checkpoint::{HeldByMany, HeldFile, Loaded, MemoryFile};
use lockstep_exec::comm::processes::{Member, ProcessCommunicator};
use lockstep_exec::comm::{Communicator, ProgramPlace};
use lockstep_exec::{ExecError, World};
use lockstep_host::ProcessGroup;
use lockstep_infer::state::GROUPS;
use lockstep_ir::program::Tensor;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
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

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
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
    /// together, and keep what they hold: another loss may come before the next snapshot. The first `used` go on from it.
    pub(crate) fn gather(
        &self,
        (comm, used): (&ProcessCommunicator, usize),
        after: Option<u64>,
        path: &Path,
    ) -> Result<Option<Gathered>> {
        let mine = std::mem::take(&mut *lock(&self.kept));
        let found = gathered((comm, used), &mine, after, path);
        *lock(&self.kept) = mine;
        found
    }
}

/// A snapshot that several processes hold, and what reads it.
pub(crate) struct Gathered {
    pub(crate) loaded: Loaded,
    pub(crate) held: Arc<HeldTogether>,
}

/// The files of a snapshot in the memory of ranks. Whoever holds what is wanted of them sends it to all: no rank ever has all of them.
pub(crate) struct HeldTogether {
    /// By file, the rank that sends it.
    holders: Vec<usize>,
    /// Those that this rank sends.
    own: BTreeMap<usize, Arc<Vec<u8>>>,
    /// The ranks that read them.
    comm: OnceLock<Arc<ProcessCommunicator>>,
    failure: Mutex<Option<ExecError>>,
}

impl HeldTogether {
    /// These are the ranks that read them.
    pub(crate) fn read_over(&self, comm: &Arc<ProcessCommunicator>) {
        // There is one world that does.
        let _ = self.comm.set(comm.clone());
    }

    /// Refuses what was read if not all of it came.
    pub(crate) fn require_read(&self) -> Result<()> {
        lock(&self.failure).take().map_or(Ok(()), |error| Err(error.into()))
    }

    fn read_into(&self, wanted: &[(usize, Range<usize>)], all: &mut [Vec<u8>]) -> Result<(), ExecError> {
        let wrong = |what: &str| ExecError::Internal(format!("snapshots in memory: {what}"));
        let comm = self.comm.get().ok_or_else(|| wrong("they are read before there is a world"))?;
        for round in rounds(wanted) {
            let mut mine = Vec::new();
            for (of, range) in &round {
                let file = wanted[*of].0;
                if self.holders[file] == comm.rank() {
                    let bytes = self.own.get(&file).and_then(|bytes| bytes.get(range.clone()));
                    mine.extend_from_slice(bytes.ok_or_else(|| wrong("a file is not what was said"))?);
                }
            }
            let given = comm.exchange(PLACE, &mine)?;
            let mut at = vec![0; given.len()];
            for (of, range) in round {
                let (file, whole) = &wanted[of];
                let holder = self.holders[*file];
                let bytes = given[holder].get(at[holder]..at[holder] + range.len());
                let into = &mut all[of][range.start - whole.start..][..range.len()];
                into.copy_from_slice(bytes.ok_or_else(|| wrong("a rank sent too little"))?);
                at[holder] += range.len();
            }
        }
        Ok(())
    }
}

impl fmt::Debug for HeldTogether {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldTogether").field("holders", &self.holders).finish_non_exhaustive()
    }
}

impl HeldByMany for HeldTogether {
    fn read(&self, wanted: &[(usize, Range<usize>)]) -> Vec<Vec<u8>> {
        let mut all: Vec<Vec<u8>> = wanted.iter().map(|(_, range)| vec![0; range.len()]).collect();
        // The others do not take part any more.
        if lock(&self.failure).is_none()
            && let Err(error) = self.read_into(wanted, &mut all)
        {
            *lock(&self.failure) = Some(error);
        }
        all
    }
}

/// Ranges in the order in which they are sent, cut so that all of a round are of [`CHUNK`] bytes at most. Each with its place among those that are wanted.
fn rounds(wanted: &[(usize, Range<usize>)]) -> Vec<Vec<(usize, Range<usize>)>> {
    let (mut rounds, mut room) = (vec![Vec::new()], CHUNK);
    for (of, (_, range)) in wanted.iter().enumerate() {
        let mut start = range.start;
        while start < range.end {
            if room == 0 {
                rounds.push(Vec::new());
                room = CHUNK;
            }
            let end = range.end.min(start + room);
            rounds.last_mut().into_iter().for_each(|round| round.push((of, start..end)));
            (room, start) = (room - (end - start), end);
        }
    }
    rounds.retain(|round| !round.is_empty());
    rounds
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

const PLACE: ProgramPlace = ProgramPlace::outside("gather snapshots");

fn gathered(
    (comm, used): (&ProcessCommunicator, usize),
    mine: &[Kept],
    after: Option<u64>,
    path: &Path,
) -> Result<Option<Gathered>> {
    let exchange = |bytes: &[u8]| comm.exchange(PLACE, bytes).map_err(ExecError::from);
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
    // Who sends the files of a rank: the holders take turns. A spare passes what nobody else has on to one that goes on.
    let (mut files, mut holders, mut passed) = (Vec::new(), Vec::new(), Vec::new());
    for rank in 0..id.2 {
        let who: Vec<(usize, &Said)> = of(id).filter(|(_, said)| said.files.contains_key(&rank)).collect();
        let stay: Vec<usize> = who.iter().map(|(holder, _)| *holder).filter(|holder| *holder < used).collect();
        let Some((from, said)) = who.first() else { continue };
        for (group, bytes) in &said.files[&rank] {
            let number = files.len();
            files.push((group.clone(), rank, *bytes as usize));
            holders.push(match stay.is_empty() {
                true => {
                    passed.push((number, *from, rank % used));
                    rank % used
                }
                false => stay[rank % stay.len()],
            });
        }
    }
    let own = |file: usize| {
        let (group, rank, _) = &files[file];
        held?.files.get(rank)?.iter().find(|file| file.group == *group)
    };
    // What belongs to it besides tensors is the same for all who hold some of it. Headers are small; those who send a file say its own.
    let sender = |file: usize| passed.iter().find(|(of, ..)| *of == file).map_or(holders[file], |(_, from, _)| *from);
    let first = of(id).map(|(holder, _)| holder).min().unwrap_or(0);
    let about = held.filter(|_| first == comm.rank()).map(|kept| (&kept.about.state, &kept.about.attachments));
    let (mut numbers, mut text) = (Vec::new(), Vec::new());
    for file in (0..files.len()).filter(|file| sender(*file) == comm.rank()) {
        let header = own(file).ok_or_else(|| wrong("a file is not what was said"))?.header()?;
        numbers.push((file, header.len()));
        text.extend_from_slice(header);
    }
    // Their numbers and lengths first, then the headers.
    let begin = serde_json::to_vec(&(about, numbers)).unwrap_or_default();
    let told = exchange(&[&(begin.len() as u64).to_le_bytes()[..], &begin, &text].concat())?;
    let (mut state, mut headers) = (None, BTreeMap::new());
    for (rank, told) in told.iter().enumerate() {
        let (length, told) = told.split_first_chunk().ok_or_else(|| wrong("a rank said too little"))?;
        let (begin, mut text) = told
            .split_at_checked(u64::from_le_bytes(*length) as usize)
            .ok_or_else(|| wrong("a rank said too little"))?;
        let (about, numbers): (Option<About>, Vec<(usize, usize)>) =
            serde_json::from_slice(begin).map_err(|e| wrong(&e.to_string()))?;
        state = if rank == first { about } else { state };
        for (file, length) in numbers {
            let (header, rest) = text.split_at_checked(length).ok_or_else(|| wrong("a rank said too little"))?;
            headers.insert(file, header.to_vec());
            text = rest;
        }
    }
    let (state, attachments) = state.ok_or_else(|| wrong("nobody has their state"))?;
    let mut kept = BTreeMap::new();
    for (file, from, to) in passed {
        if let Some(bytes) = pass_on(comm, (files[file].2, own(file)), (from, to))? {
            kept.insert(file, Arc::new(bytes));
        }
    }
    for file in (0..files.len()).filter(|file| holders[*file] == comm.rank()) {
        if let Some(own) = own(file) {
            kept.insert(file, own.bytes.clone());
        }
    }
    let described = files.into_iter().enumerate().map(|(file, (group, rank, bytes))| HeldFile {
        group,
        rank,
        header: headers.remove(&file).unwrap_or_default(),
        bytes,
    });
    let described: Vec<HeldFile> = described.collect();
    let held = HeldTogether { holders, own: kept, comm: OnceLock::new(), failure: Mutex::default() };
    let held = Arc::new(held);
    let loaded = Loaded::from_memory((id.0, path), state, attachments, &described, held.clone())?;
    Ok(Some(Gathered { loaded, held }))
}

/// What a snapshot has besides tensors.
type About = (Value, Vec<(String, Vec<u8>)>);

/// Sends a file from one rank to another, which gets its bytes. All take part.
fn pass_on(
    comm: &ProcessCommunicator,
    (bytes, own): (usize, Option<&MemoryFile>),
    (from, to): (usize, usize),
) -> Result<Option<Vec<u8>>> {
    let mut whole = Vec::new();
    if to == comm.rank() && whole.try_reserve_exact(bytes).is_err() {
        let text = format!("snapshots in memory: no memory for {bytes} bytes");
        return Err(ExecError::Internal(text).into());
    }
    for start in (0..bytes).step_by(CHUNK) {
        let mine = own.filter(|_| from == comm.rank()).and_then(|own| own.bytes.get(start..bytes.min(start + CHUNK)));
        let all = comm.exchange(PLACE, mine.unwrap_or_default()).map_err(ExecError::from)?;
        if to == comm.rank() {
            whole.extend_from_slice(&all[from]);
        }
    }
    Ok((to == comm.rank()).then_some(whole))
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
    fn rounds_are_all_that_is_wanted_in_pieces_that_fit() {
        let wanted = [(3, 5..5), (0, 10..20), (1, 0..2 * CHUNK + 7), (0, 0..1)];
        let rounds = rounds(&wanted);
        assert!(rounds.iter().all(|round| round.iter().map(|(_, range)| range.len()).sum::<usize>() <= CHUNK));
        let mut ends: Vec<usize> = wanted.iter().map(|(_, range)| range.start).collect();
        for (of, range) in rounds.into_iter().flatten() {
            assert_eq!(range.start, ends[of], "in order");
            ends[of] = range.end;
        }
        assert!(ends.iter().zip(&wanted).all(|(end, (_, range))| *end == range.end));
    }

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
