//! Collectives and messages between the ranks of a run.
//!
//! [`Communicator`] is one rank's end: who is where, who is alive, what ended the run. [`HostCommunicator`] moves bytes of the
//! host besides; a device has streams of its own. [`threads`](fn@threads) makes ranks that share a process, [`processes`] ranks that
//! are processes. An executor makes a [`CommunicationCall`] of every instruction that ranks run together, and gives it to a
//! [`CommunicationQueue`]. All kinds of communicators and queues are held to the same behaviour by
//! [`conformance::check`]. Sums are taken in the order of the group's ranks whatever the timing, so
//! all ranks get the same bits in every run. What goes wrong anywhere ends the run everywhere, with one error that names
//! the rank, its op and its layer.

mod buffer;
mod call;
mod collective;
mod communication_thread;
pub mod conformance;
mod error;
mod exchange;
#[cfg(all(test, loom))]
mod loom_tests;
pub mod measure;
mod message_queue;
mod peers;
pub mod processes;
mod queue;
pub mod rates;
mod rendezvous;
mod subject;
mod sum;
#[cfg(test)]
mod tests;
pub mod threads;

pub use call::{CommunicationCall, CommunicationCalls, Connection, Link, communication_calls, connections};
pub use collective::slice_of;
pub use communication_thread::CommunicationThread;
pub use error::{CommError, ProgramPlace};
pub use lockstep_ir::Collective;
pub(crate) use peers::waited;
pub use queue::{CommunicationQueue, Enqueued, Inline};
pub use subject::{Memory, Subject};
pub use threads::{ThreadCommunicator, threads};

use lockstep_ir::DType;
use peers::Peers;

/// Ranks that act together, in the order in which sums are taken.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RankGroup {
    /// The ranks, each once. All of them must name them in the same order.
    pub ranks: Vec<usize>,
    /// Keeps collectives of one group that are issued from different streams apart.
    pub channel: u32,
}

impl RankGroup {
    /// The first ranks, this many of them, in their order.
    pub fn all(ranks: usize) -> Self {
        Self { ranks: (0..ranks).collect(), channel: 0 }
    }
}

/// Where the ranks' parts of a row stand in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// One after the other.
    #[default]
    Group,
    /// In halves: of the i-th of n ranks as halves i and 2n − 1 − i of the row. Parts have an even number of elements.
    ZigZag,
}

/// One tensor of a collective, or one message; several go together in one call.
#[derive(Clone, Copy, Debug)]
pub struct Piece<A = *mut u8> {
    /// What this rank gives, which is only read.
    pub input: A,
    /// Where this rank's result goes; of a message that is sent, the send buffer.
    pub output: A,
    /// Rows of the tensor, one after the other; what follows is of each of them. An `AllReduce` and an `AllToAll` have one.
    pub rows: usize,
    /// Elements of one rank's part of a row. `AllReduce`: of the whole tensor. `ReduceScatter`: of a row of the output; that of the
    /// input has group-size times as many, and part i goes to the i-th rank of the group. `AllGather`: of a row of the input; that
    /// of the output has group-size times as many. `Shift`: of the tensor. `AllToAll`: of what goes to one rank; input and output have
    /// group-size times as many.
    pub elements: usize,
    /// Of `ReduceScatter` and `AllGather`: where the parts of a row stand.
    pub order: Order,
    /// Type of the elements.
    pub dtype: DType,
}

impl Piece {
    /// A tensor of one row, in the order of the group.
    pub const fn new(input: *mut u8, output: *mut u8, elements: usize, dtype: DType) -> Self {
        Self { input, output, rows: 1, elements, order: Order::Group, dtype }
    }

    /// A message of an even number of bytes.
    pub const fn message(input: *mut u8, output: *mut u8, bytes: usize) -> Self {
        Self::new(input, output, bytes / DType::BF16.bytes(), DType::BF16)
    }
}

impl<A: Copy> Piece<A> {
    /// The same with its memory elsewhere.
    fn map<B>(&self, at: impl Fn(A) -> B) -> Piece<B> {
        let Self { input, output, rows, elements, order, dtype } = *self;
        Piece { input: at(input), output: at(output), rows, elements, order, dtype }
    }

    /// Where the part of the `member`-th of `n` ranks stands: (first element in a row of the whole, first in a row of the part, elements).
    pub const fn spans(&self, n: usize, member: usize) -> [(usize, usize, usize); 2] {
        match self.order {
            Order::Group => [(member * self.elements, 0, self.elements), (0, 0, 0)],
            Order::ZigZag => {
                let half = self.elements / 2;
                [(member * half, 0, half), ((2 * n - 1 - member) * half, half, half)]
            }
        }
    }

    /// Bytes of one rank's part.
    pub const fn bytes(&self) -> usize {
        self.rows * self.row_bytes()
    }

    /// Bytes of one rank's part of a row.
    pub const fn row_bytes(&self) -> usize {
        self.elements * self.dtype.bytes()
    }
}

/// What ranks do with pieces.
#[derive(Clone, Debug)]
pub enum Action {
    /// All of a group do it together, with pieces of the same sizes and types.
    Together(Collective, RankGroup),
    /// Every piece is a message to a rank.
    Send {
        /// The rank.
        to: usize,
        /// Separates independent streams of messages between the same two ranks; one stream is used by one thread at a time.
        tag: u32,
        /// Messages that fit into the send buffer.
        copies: usize,
    },
    /// Every piece is a message from a rank.
    Receive {
        /// The rank.
        from: usize,
        /// The stream of messages.
        tag: u32,
    },
}

impl Action {
    /// Where `rank` of `ranks` stands in the group that acts, or why this cannot be done.
    fn index(&self, pieces: &[Piece], rank: usize, ranks: usize) -> Result<usize, String> {
        let (kind, group) = match *self {
            Action::Together(kind, ref group) => (kind, group),
            Action::Send { copies: 0, .. } => return Err("a message without a send buffer".to_owned()),
            Action::Send { to, .. } if to >= ranks => {
                return Err(format!("a message from rank {rank} to rank {to} of {ranks}"));
            }
            Action::Receive { from, .. } if from >= ranks => {
                return Err(format!("a message from rank {from} to rank {rank} of {ranks}"));
            }
            Action::Send { .. } | Action::Receive { .. } => return Ok(0),
        };
        if let Some(piece) = pieces.iter().find(|piece| kind.sums() && !sum::adds(piece.dtype)) {
            return Err(format!("{kind} of {}, which has no sum", piece.dtype));
        }
        let Some(index) = group.ranks.iter().position(|&member| member == rank) else {
            return Err(format!("{kind} of the ranks {:?}, which it is not among", group.ranks));
        };
        let again = |(i, member): (usize, &usize)| *member >= ranks || group.ranks[..i].contains(member);
        if group.ranks.iter().enumerate().any(again) {
            return Err(format!("{kind} of the ranks {:?} of {ranks}", group.ranks));
        }
        Ok(index)
    }
}

/// One rank's end of the connections between ranks. Its methods may be called from several threads of the rank at once.
///
/// Once something has ended the run, every call returns the error at once. When a call has returned an error, or
/// [`fail`](Self::fail) or [`leave`](Self::leave) has returned, and no other call of this rank is under way, no other rank
/// touches this rank's memory any more.
pub trait Communicator: Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;

    /// What it knows of all ranks.
    #[doc(hidden)]
    fn peers(&self) -> &Peers;

    /// Number of ranks of the run.
    fn ranks(&self) -> usize {
        self.peers().ranks()
    }

    /// Says where this rank is now: a sign of life. Cheap; called before every instruction.
    fn at(&self, place: ProgramPlace) {
        self.peers().at(self.rank(), place);
    }

    /// This rank has ended its program: whoever waits for more of it gets an error. Waits until what it has sent is taken.
    fn leave(&self);

    /// Ends the run for everybody: this rank cannot go on.
    fn fail(&self, reason: &str) {
        self.fail_with(reason, None);
    }

    /// The same, with what to do about it, which the other threads of this process get to know.
    fn fail_with(&self, reason: &str, hint: Option<String>);

    /// What ended the run, if anything did.
    fn failure(&self) -> Option<CommError> {
        self.peers().failure().cloned()
    }
}

/// A communicator that moves bytes of the host's memory.
pub trait HostCommunicator: Communicator {
    /// Does this rank's part of an action.
    ///
    /// `Together`: nothing is touched before all ranks of the group have agreed on the sizes and types of the pieces. Returns when this
    /// rank's outputs are there and nobody reads its inputs any more.
    ///
    /// `Send`: copies every piece into the next of `copies` parts of the send buffer, each of the piece's bytes (waiting until the receiver
    /// has taken what was there), and offers it; returns without waiting for the receiver. A change of send buffer, copies or bytes
    /// within a stream first waits until everything offered has been taken.
    ///
    /// `Receive`: waits for the next messages of the stream, which must have the pieces' bytes, and copies them.
    ///
    /// # Safety
    /// The pieces' memory is valid, aligned to the element type and exclusively this rank's until return. Inputs and
    /// outputs are apart, except that an input may be exactly the output (`AllReduce`), where there is one row in the order of the group an
    /// output may be this rank's part of the input (`ReduceScatter`), and an input this rank's part of the output (`AllGather`). The
    /// send buffer of a `Send` is valid for `copies` times the piece's bytes and the stream's alone. It stays valid until all that was sent
    /// is taken, or a call has returned an error, or [`leave`](Communicator::leave) or [`fail`](Communicator::fail) has returned.
    unsafe fn act(&self, action: &Action, pieces: &[Piece], place: ProgramPlace) -> Result<(), CommError>;
}

/// Ends the run for everybody if this rank's thread panics while the guard lives.
///
/// Make it after whatever owns the memory that the communicator was told of, so that it is dropped before.
pub struct RankGuard<'a>(&'a dyn Communicator);

impl<'a> RankGuard<'a> {
    /// Guards this thread of the rank.
    pub fn new(comm: &'a dyn Communicator) -> Self {
        Self(comm)
    }
}

impl Drop for RankGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail("panicked");
        }
    }
}
