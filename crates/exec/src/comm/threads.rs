//! Ranks that are threads of one process.
//!
//! **Collectives.** A group has a rendezvous, made when it first acts. A collective goes in stages; a stage ends when all
//! members have arrived, under its lock, which orders the memory accesses of one stage before those of the next.
//! First each says what it asks for, and the last to arrive compares. Then each works on its part straight in the
//! others' memory, writing only what no other member touches: `AllReduce` adds one slice per member, waits, and copies
//! the other slices. At the end all wait, so that none returns while its memory is read.
//!
//! **Messages** are in the sender's send buffer; a message queue counts how many were offered and taken.
//!
//! **Failure.** The first error is kept and returned to all. Whoever waits looks for it every few milliseconds. A rank
//! that gives up first closes the rendezvous, or its message queues, and waits for those who are just copying, so that no memory is
//! freed under a reader.
//!
//! Locks are held for bookkeeping only, never while tensors are touched. In the steady state nothing is allocated.

use super::collective::{Wish, agree, copy};
use super::error::other_size;
use super::exchange::{Post, ValueRendezvous};
use super::message_queue::MessageQueue;
use super::peers::Peers;
use super::rendezvous::Rendezvous;
use super::{Action, CommError, Communicator, HostCommunicator, Piece, ProgramPlace, RankGroup};
use crate::sync::{Arc, RwLock};
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::PoisonError;
use std::time::Duration;

/// As many communicators as ranks, in one process. A rank that waits longer than `timeout` without any sign of life from
/// the rank it waits for gives up. A rank that itself waits is as alive as the one that it waits for.
pub fn threads(ranks: usize, timeout: Duration) -> Vec<std::sync::Arc<ThreadCommunicator>> {
    let shared = Arc::new(Shared {
        peers: Peers::new(ranks, Some(timeout)),
        rendezvous: RwLock::new(HashMap::new()),
        queues: RwLock::new(HashMap::new()),
        value_rendezvous: RwLock::new(HashMap::new()),
        posts: RwLock::new(HashMap::new()),
    });
    (0..ranks).map(|rank| std::sync::Arc::new(ThreadCommunicator { shared: shared.clone(), rank })).collect()
}

type Table<K, V> = RwLock<HashMap<K, Arc<V>>>;

struct Shared {
    peers: Peers,
    rendezvous: Table<RankGroup, Rendezvous>,
    /// By sender, receiver and tag.
    queues: Table<(usize, usize, u32), MessageQueue>,
    value_rendezvous: Table<RankGroup, ValueRendezvous>,
    /// By sender, receiver and tag.
    posts: Table<(usize, usize, u32), Post>,
}

/// One rank that is a thread of this process.
pub struct ThreadCommunicator {
    shared: Arc<Shared>,
    rank: usize,
}

/// An entry of a table, made on first use.
fn entry<K: Hash + Eq + Clone, V>(table: &Table<K, V>, key: &K, make: impl FnOnce() -> V) -> Arc<V> {
    if let Some(found) = table.read().unwrap_or_else(PoisonError::into_inner).get(key) {
        return found.clone();
    }
    let mut table = table.write().unwrap_or_else(PoisonError::into_inner);
    table.entry(key.clone()).or_insert_with(|| Arc::new(make())).clone()
}

impl ThreadCommunicator {
    /// Every call goes through here: an error closes this rank's send buffers.
    fn call<T>(&self, place: ProgramPlace, act: impl FnOnce() -> Result<T, CommError>) -> Result<T, CommError> {
        let result = self.peers().begin(self.rank, place).and_then(|()| act());
        match result {
            Ok(_) => self.peers().alive(self.rank),
            Err(_) => self.withdraw(),
        }
        result
    }

    /// This rank's place in the group that acts, after a look at what it asks for.
    fn index(&self, action: &Action, pieces: &[Piece], place: ProgramPlace) -> Result<usize, CommError> {
        let index = action.index(pieces, self.rank, self.ranks());
        index.map_err(|reason| self.peers().refuse(self.rank, place, reason))
    }

    /// What this rank has sent from.
    fn outgoing(&self) -> Vec<Arc<MessageQueue>> {
        let queues = self.shared.queues.read().unwrap_or_else(PoisonError::into_inner);
        queues.values().filter(|queue| queue.from == self.rank).cloned().collect()
    }

    /// Keeps others away from this rank's send buffers.
    fn withdraw(&self) {
        self.outgoing().iter().for_each(|queue| queue.close());
    }

    /// Ranks that enqueue a collective on a device agree on it, and bring a value each. The last to come calls `act` with the pieces and
    /// values of all, in the order of the group; all get what it gives. Nothing is touched here.
    pub fn agree<T: Send + 'static, R: Clone + Send + 'static>(
        &self,
        action: &Action,
        pieces: &[Piece],
        place: ProgramPlace,
        value: T,
        act: impl FnOnce(Vec<(Vec<Piece>, T)>) -> R,
    ) -> Result<R, CommError> {
        self.call(place, || {
            let index = self.index(action, pieces, place)?;
            let Action::Together(kind, group) = action else {
                return Err(self.peers().refuse(self.rank, place, "messages that ranks agree on"));
            };
            let rendezvous = entry(&self.shared.value_rendezvous, group, || ValueRendezvous::new(group));
            let mine = (*kind, SendPieces(pieces.to_vec()), place, value);
            let result = rendezvous.meet(self.peers(), index, place, mine, |all| {
                let wish = |member: usize| {
                    let (kind, pieces, place, _): &(_, SendPieces, _, T) = all.get(member)?;
                    Some(Wish { kind: *kind, pieces: &pieces.0, place: *place })
                };
                agree(&group.ranks, wish)?;
                Ok(act(all.into_iter().map(|(_, pieces, _, value)| (pieces.0, value)).collect()))
            })?;
            result.map_err(|error| self.peers().end(error))
        })
    }

    /// All ranks of the run bring a value each, and all get what `act` makes of them.
    pub fn meet<T: Send + 'static, R: Clone + Send + 'static>(
        &self,
        place: ProgramPlace,
        value: T,
        act: impl FnOnce(Vec<T>) -> R,
    ) -> Result<R, CommError> {
        self.call(place, || {
            let group = RankGroup { channel: u32::MAX, ..RankGroup::all(self.ranks()) };
            let rendezvous = entry(&self.shared.value_rendezvous, &group, || ValueRendezvous::new(&group));
            rendezvous.meet(self.peers(), self.rank, place, value, act)
        })
    }

    /// Hands a value to another rank.
    pub fn post<T: Send + 'static>(&self, to: usize, tag: u32, value: T, place: ProgramPlace) -> Result<(), CommError> {
        self.call(place, || {
            self.index(&Action::Send { to, tag, copies: 1 }, &[], place)?;
            entry(&self.shared.posts, &(self.rank, to, tag), || Post::new(self.rank, to)).send(value);
            Ok(())
        })
    }

    /// Waits for the next value of another rank.
    pub fn fetch<T: 'static>(&self, from: usize, tag: u32, place: ProgramPlace) -> Result<T, CommError> {
        self.call(place, || {
            self.index(&Action::Receive { from, tag }, &[], place)?;
            let post = entry(&self.shared.posts, &(from, self.rank, tag), || Post::new(from, self.rank));
            post.receive(self.peers(), place)
        })
    }

    /// Ends the run because a message has another size than this rank expects.
    pub fn refuse_size(&self, from: usize, theirs: usize, ours: usize, place: ProgramPlace) -> CommError {
        let error = self.peers().end(other_size((from, self.rank), theirs, ours, place));
        self.withdraw();
        error
    }
}

/// Pieces that another thread looks at: their sizes, and addresses for a device.
struct SendPieces(Vec<Piece>);

// SAFETY: nobody reads or writes at their addresses on this thread's account; who enqueues them vouches for the memory.
unsafe impl Send for SendPieces {}

impl Communicator for ThreadCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn peers(&self) -> &Peers {
        &self.shared.peers
    }

    fn leave(&self) {
        self.peers().leave(self.rank);
        let place = ProgramPlace { op: "leave", layer: None, micro_batch: 0 };
        for queue in self.outgoing() {
            if queue.flush(self.peers(), place).is_err() {
                break;
            }
        }
        self.withdraw();
    }

    fn fail_with(&self, reason: &str, hint: Option<String>) {
        self.peers().fail(self.rank, None, reason, hint);
        self.withdraw();
    }
}

impl HostCommunicator for ThreadCommunicator {
    unsafe fn act(&self, action: &Action, pieces: &[Piece], place: ProgramPlace) -> Result<(), CommError> {
        let queue = |from, to, tag| entry(&self.shared.queues, &(from, to, tag), || MessageQueue::new(from, to));
        self.call(place, || {
            let index = self.index(action, pieces, place)?;
            // SAFETY: the caller vouches.
            unsafe {
                match *action {
                    Action::Together(_, ref group) if group.ranks.len() == 1 => {
                        pieces.iter().for_each(|piece| copy(piece.input, piece.output, piece.bytes()));
                        Ok(())
                    }
                    Action::Together(kind, ref group) => {
                        let rendezvous = entry(&self.shared.rendezvous, group, || Rendezvous::new(group));
                        rendezvous.act(self.peers(), index, kind, pieces, place)
                    }
                    Action::Send { to, tag, copies } => {
                        let queue = queue(self.rank, to, tag);
                        pieces.iter().try_for_each(|piece| queue.send(self.peers(), piece, copies, place))
                    }
                    Action::Receive { from, tag } => {
                        let queue = queue(from, self.rank, tag);
                        pieces.iter().try_for_each(|piece| queue.receive(self.peers(), piece, place))
                    }
                }
            }
        })
    }
}

impl Drop for ThreadCommunicator {
    fn drop(&mut self) {
        self.peers().leave(self.rank);
        self.withdraw();
    }
}
