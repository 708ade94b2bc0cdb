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

use super::message_queue::{MessageQueue, SendBuffer};
use super::peers::Peers;
use super::rendezvous::{Rendezvous, copy};
use super::{Collective, CommError, Communicator, Piece, ProgramPlace, RankGroup, sum};
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// As many communicators as ranks, in one process. A rank that waits longer than `timeout` without any sign of life from
/// the rank it waits for gives up. A rank that itself waits is as alive as the one that it waits for.
pub fn threads(ranks: usize, timeout: Duration) -> Vec<Arc<dyn Communicator>> {
    let shared = Arc::new(Shared {
        peers: Peers::new(ranks, timeout),
        rendezvous: RwLock::new(HashMap::new()),
        queues: RwLock::new(HashMap::new()),
    });
    (0..ranks).map(|rank| Arc::new(Threads { shared: shared.clone(), rank }) as Arc<dyn Communicator>).collect()
}

type Table<K, V> = RwLock<HashMap<K, Arc<V>>>;

struct Shared {
    peers: Peers,
    rendezvous: Table<RankGroup, Rendezvous>,
    /// By sender, receiver and tag.
    queues: Table<(usize, usize, u32), MessageQueue>,
}

/// One rank.
struct Threads {
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

impl Threads {
    fn peers(&self) -> &Peers {
        &self.shared.peers
    }

    /// Every call starts here.
    fn begin(&self, place: ProgramPlace) -> Result<(), CommError> {
        if let Some(error) = self.peers().failure() {
            return Err(error.clone());
        }
        if self.peers().has_left(self.rank) {
            return Err(self.refuse(place, "this rank has ended its program"));
        }
        self.peers().alive(self.rank);
        Ok(())
    }

    /// And ends here.
    fn end(&self, result: Result<(), CommError>) -> Result<(), CommError> {
        match result {
            Ok(()) => self.peers().alive(self.rank),
            Err(_) => self.withdraw(),
        }
        result
    }

    fn refuse(&self, place: ProgramPlace, reason: impl Into<String>) -> CommError {
        self.peers().end(CommError::Refused { rank: self.rank, place, reason: reason.into() })
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

    /// This rank's place in the group, after a look at what it asks for.
    fn index(
        &self,
        kind: Collective,
        group: &RankGroup,
        pieces: &[Piece],
        place: ProgramPlace,
    ) -> Result<usize, CommError> {
        if let Some(piece) = pieces.iter().find(|piece| kind.sums() && !sum::adds(piece.dtype)) {
            return Err(self.refuse(place, format!("{kind} of {}, which has no sum", piece.dtype)));
        }
        let Some(index) = group.ranks.iter().position(|&rank| rank == self.rank) else {
            return Err(self.refuse(place, format!("{kind} of the ranks {:?}, which it is not among", group.ranks)));
        };
        let again = |(i, rank): (usize, &usize)| *rank >= self.ranks() || group.ranks[..i].contains(rank);
        if group.ranks.iter().enumerate().any(again) {
            return Err(self.refuse(place, format!("{kind} of the ranks {:?} of {}", group.ranks, self.ranks())));
        }
        Ok(index)
    }

    fn queue(&self, from: usize, to: usize, tag: u32, place: ProgramPlace) -> Result<Arc<MessageQueue>, CommError> {
        if from.max(to) >= self.ranks() {
            let reason = format!("a message from rank {from} to rank {to} of {}", self.ranks());
            return Err(self.refuse(place, reason));
        }
        Ok(entry(&self.shared.queues, &(from, to, tag), || MessageQueue::new(from, to)))
    }
}

impl Communicator for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.peers().ranks()
    }

    fn at(&self, place: ProgramPlace) {
        self.peers().at(self.rank, place);
    }

    unsafe fn collective(
        &self,
        kind: Collective,
        group: &RankGroup,
        pieces: &[Piece],
        place: ProgramPlace,
    ) -> Result<(), CommError> {
        let act = || {
            self.begin(place)?;
            let index = self.index(kind, group, pieces, place)?;
            if group.ranks.len() == 1 {
                for piece in pieces {
                    // SAFETY: the caller vouches.
                    unsafe { copy(piece.input, piece.output, piece.bytes()) };
                }
                return Ok(());
            }
            let rendezvous = entry(&self.shared.rendezvous, group, || Rendezvous::new(group));
            // SAFETY: the caller vouches.
            unsafe { rendezvous.act(self.peers(), index, kind, pieces, place) }
        };
        self.end(act())
    }

    unsafe fn send(
        &self,
        to: usize,
        tag: u32,
        data: *const u8,
        bytes: usize,
        send_buffer: *mut u8,
        copies: usize,
        place: ProgramPlace,
    ) -> Result<(), CommError> {
        let act = || {
            self.begin(place)?;
            if copies == 0 {
                return Err(self.refuse(place, "a message without a send buffer"));
            }
            let queue = self.queue(self.rank, to, tag, place)?;
            // SAFETY: the caller vouches.
            unsafe { queue.send(self.peers(), data, SendBuffer { memory: send_buffer, bytes, copies }, place) }
        };
        self.end(act())
    }

    unsafe fn receive(
        &self,
        from: usize,
        tag: u32,
        data: *mut u8,
        bytes: usize,
        place: ProgramPlace,
    ) -> Result<(), CommError> {
        let act = || {
            self.begin(place)?;
            let queue = self.queue(from, self.rank, tag, place)?;
            // SAFETY: the caller vouches.
            unsafe { queue.receive(self.peers(), data, bytes, place) }
        };
        self.end(act())
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

    fn fail(&self, reason: &str) {
        self.peers().fail(self.rank, reason);
        self.withdraw();
    }

    fn failure(&self) -> Option<CommError> {
        self.peers().failure().cloned()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.peers().leave(self.rank);
        self.withdraw();
    }
}
