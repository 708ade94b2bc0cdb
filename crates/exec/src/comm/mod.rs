//! Collectives and messages between the ranks of a run.
//!
//! [`Communicator`] is one rank's end: who is where, who is alive, what ended the run. [`HostCommunicator`] moves bytes of the
//! host besides; a device has streams of its own. [`threads`](fn@threads) makes ranks that share a process, [`processes`] ranks that
//! are processes; all kinds, and all forms of [queues](crate::communication::CommunicationQueue), are held to the same behaviour by
//! [`conformance::check`]. Sums are taken in the order of the group's ranks whatever the timing, so
//! all ranks get the same bits in every run. What goes wrong anywhere ends the run everywhere, with one error that names
//! the rank, its op and its layer.

pub mod conformance;
mod exchange;
#[cfg(all(test, loom))]
mod loom_tests;
pub mod measure;
mod message_queue;
mod peers;
pub mod processes;
pub mod rates;
mod rendezvous;
mod subject;
mod sum;
#[cfg(test)]
mod tests;
pub mod threads;

pub use lockstep_ir::Collective;
pub(crate) use peers::{has_waited, waited};
pub use subject::{Memory, Subject};
pub use threads::{ThreadCommunicator, threads};

use lockstep_ir::{DType, units};
use std::fmt;

/// Ranks that act together, in the order in which sums are taken.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RankGroup {
    /// The ranks, each once. All of them must name them in the same order.
    pub ranks: Vec<usize>,
    /// Keeps collectives of one group that are issued from different streams apart.
    pub channel: u32,
}

/// Where the ranks' parts of a row stand in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// One behind the other.
    #[default]
    Group,
    /// In halves: of the i-th of n ranks as halves i and 2n − 1 − i of the row. Parts have an even number of elements.
    ZigZag,
}

/// One tensor of a collective; several go together in one call.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// What this rank gives.
    pub input: *const u8,
    /// Where this rank's result goes.
    pub output: *mut u8,
    /// Rows of the tensor, one behind the other; what follows is of each of them. An `AllReduce` and an `AllToAll` have one.
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

/// Where a rank is in its program: for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramPlace {
    /// The op's name.
    pub op: &'static str,
    /// The layer that the op belongs to, if any.
    pub layer: Option<usize>,
    /// The micro-batch that it works on.
    pub micro_batch: usize,
}

impl ProgramPlace {
    /// Something that no program has: a rank saves, or waits to hear whether all are to stop.
    pub const fn outside(op: &'static str) -> Self {
        Self { op, layer: None, micro_batch: usize::MAX }
    }

    /// Op and layer, without the micro-batch.
    fn brief(&self) -> String {
        self.layer.map_or_else(|| self.op.to_owned(), |layer| format!("{}, layer {layer}", self.op))
    }
}

impl fmt::Display for ProgramPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.micro_batch {
            usize::MAX => f.write_str(&self.brief()),
            micro_batch => write!(f, "{}, micro-batch {micro_batch}", self.brief()),
        }
    }
}

/// What ended the run. All ranks get the same one.
#[derive(Clone, Debug, PartialEq, thiserror::Error, lockstep_ir::Hint)]
pub enum CommError {
    /// A rank cannot go on.
    #[error(
        "rank {rank}{} failed {}: {reason}",
        .host.as_ref().map_or_else(String::new, |host| format!(" on host {host}")), at(.place)
    )]
    // A process that failed has said more.
    #[hint(host.as_ref().map_or_else(|| hint.as_deref().map(str::to_owned), |_| Some(format!("look at the messages of rank {rank}"))))]
    Failed {
        /// The rank that failed.
        rank: usize,
        /// Its host, where ranks are processes.
        host: Option<String>,
        /// Where it was; `None` before its first op.
        place: Option<ProgramPlace>,
        /// What it said.
        reason: String,
        /// What to do about it, where the rank is a thread.
        hint: Option<Box<str>>,
    },
    /// The process of a rank has ended without a word, or cannot be reached any more.
    #[error("rank {rank} on host {host} is gone: {reason}; it was last heard of {}{}", at(.place), seen_by(.seen))]
    #[hint(
        "look at the messages of rank {rank} and of its host (out of memory?); the run goes on from its last \
         checkpoint"
    )]
    Lost {
        /// The rank.
        rank: usize,
        /// Its host.
        host: String,
        /// Where it was, as far as is known.
        place: Option<ProgramPlace>,
        /// How that was noticed.
        reason: String,
        /// The rank that tells of it, and where it was.
        seen: Option<Box<(usize, ProgramPlace)>>,
    },
    /// Two ranks that live have lost their connection.
    #[error(
        "rank {} on host {} and rank {} on host {} cannot reach each other any more, and both live: {reason}",
        .ranks.0, .hosts[0], .ranks.1, .hosts[1]
    )]
    #[hint("look at the network between these hosts (a link, a firewall); the run goes on from its last checkpoint")]
    Cut {
        /// The one that noticed it, and the other.
        ranks: (usize, usize),
        /// Their hosts.
        hosts: Box<[String; 2]>,
        /// How that was noticed.
        reason: String,
    },
    /// A rank waits for one that shows no sign of life.
    #[error(
        "rank {rank} waits in {}, for rank {other}, which has been {}, for {}{}",
        .place.brief(), briefly(.other_place), units::seconds(f64::from(*.seconds)), waiting(.other_waits_for)
    )]
    #[hint("look at the messages of rank {other}")]
    Stalled {
        /// The rank that waits.
        rank: usize,
        /// Where it waits.
        place: ProgramPlace,
        /// The rank that it waits for.
        other: usize,
        /// Where that one is; `None` before its first op.
        other_place: Option<ProgramPlace>,
        /// How long that one has been there.
        seconds: f32,
        /// The rank that the other waits for in turn: they wait in a circle.
        other_waits_for: Option<usize>,
    },
    /// A rank waits for one that will not come.
    #[error("rank {rank} waits in {}, for rank {other}, but rank {other} has ended its program", .place.brief())]
    #[hint("the ranks run different programs; start all of them with the same config and the same build")]
    Left {
        /// The rank that waits.
        rank: usize,
        /// Where it waits.
        place: ProgramPlace,
        /// The rank that has ended its program.
        other: usize,
    },
    /// Two ranks want different things of each other.
    #[error("ranks {} and {} do not agree: {first} against {second}", .ranks.0, .ranks.1)]
    #[hint("the ranks run different programs; start all of them with the same config and the same build")]
    Mismatch {
        /// The two ranks.
        ranks: (usize, usize),
        /// What the first wants.
        first: String,
        /// What the second wants.
        second: String,
    },
    /// A rank asks for something that no communicator can do.
    #[error("rank {rank} asks in {place} for what cannot be done: {reason}")]
    #[hint("this is a bug in Lockstep, please report it with your config")]
    Refused {
        /// The rank that asks.
        rank: usize,
        /// Where it asks.
        place: ProgramPlace,
        /// Why not.
        reason: String,
    },
}

/// Where `rank` of `ranks` stands in the group of a collective, or why that cannot be done.
fn index_in(
    group: &RankGroup,
    kind: Collective,
    pieces: &[Piece],
    (rank, ranks): (usize, usize),
) -> Result<usize, String> {
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

/// First element and number of elements of the slice that a member of a group of `members` adds: whole cache lines.
pub fn slice_of(member: usize, members: usize, piece: &Piece) -> (usize, usize) {
    let line = 64 / piece.dtype.bytes();
    let size = piece.elements.div_ceil(members).next_multiple_of(line);
    let start = piece.elements.min(member * size);
    (start, size.min(piece.elements - start))
}

/// What a rank wants of a collective.
#[derive(Clone, Copy)]
struct Wish<'a> {
    kind: Collective,
    pieces: &'a [Piece],
    place: ProgramPlace,
}

/// Whether the members of a group want the same.
fn agree<'a>(members: &[usize], wish: impl Fn(usize) -> Option<Wish<'a>>) -> Result<(), CommError> {
    let Some(first) = wish(0) else { return Ok(()) };
    for (member, rank) in members.iter().enumerate().skip(1) {
        let Some(other) = wish(member) else { continue };
        let differs =
            |(a, b): (&Piece, &Piece)| (a.rows, a.elements, a.dtype, a.order) != (b.rows, b.elements, b.dtype, b.order);
        let piece = first.pieces.iter().zip(other.pieces).position(differs);
        if first.kind == other.kind && first.pieces.len() == other.pieces.len() && piece.is_none() {
            continue;
        }
        let (first, second) = (first.describe(piece), other.describe(piece));
        return Err(CommError::Mismatch { ranks: (members[0], *rank), first, second });
    }
    Ok(())
}

impl Wish<'_> {
    /// For messages; `piece` is the first that differs.
    fn describe(&self, piece: Option<usize>) -> String {
        let Wish { kind, pieces, place } = self;
        let what = |piece: &Piece| format!("{} bytes {}", units::thousands(piece.bytes() as u64), piece.dtype);
        match (pieces, piece) {
            ([only], _) => format!("{kind} of {} in {place}", what(only)),
            (_, Some(p)) if p < pieces.len() => {
                format!("{kind} of {} as tensor {} of {} in {place}", what(&pieces[p]), p + 1, pieces.len())
            }
            _ => format!("{kind} of {} tensors in {place}", pieces.len()),
        }
    }
}

/// The error for a message of `theirs` bytes from a rank to one that expects `ours`.
fn other_size((from, to): (usize, usize), theirs: usize, ours: usize, place: ProgramPlace) -> CommError {
    CommError::Mismatch {
        ranks: (from, to),
        first: format!("a message of {} bytes", units::thousands(theirs as u64)),
        second: format!("receive of {} bytes in {place}", units::thousands(ours as u64)),
    }
}

fn at(place: &Option<ProgramPlace>) -> String {
    place.map_or_else(|| "before its first op".to_owned(), |p| format!("in {p}"))
}

fn seen_by(by: &Option<Box<(usize, ProgramPlace)>>) -> String {
    by.as_deref().map_or_else(String::new, |(rank, place)| format!("; rank {rank} waited in {}", place.brief()))
}

fn briefly(place: &Option<ProgramPlace>) -> String {
    place.map_or_else(|| "before its first op".to_owned(), |p| format!("in {}", p.brief()))
}

fn waiting(other: &Option<usize>) -> String {
    other.map_or_else(String::new, |other| format!(", waiting for rank {other}"))
}

/// One rank's end of the connections between ranks. Its methods may be called from several threads of the rank at once.
///
/// Once something has ended the run, every call returns the error at once. When a call has returned an error, or
/// [`fail`](Self::fail) or [`leave`](Self::leave) has returned, and no other call of this rank is under way, no other rank
/// touches this rank's memory any more.
pub trait Communicator: Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;

    /// Number of ranks of the run.
    fn ranks(&self) -> usize;

    /// Says where this rank is now: a sign of life. Cheap; called before every instruction.
    fn at(&self, place: ProgramPlace);

    /// This rank has ended its program: whoever waits for more of it gets an error. Waits until what it has sent is taken.
    fn leave(&self);

    /// Ends the run for everybody: this rank cannot go on.
    fn fail(&self, reason: &str) {
        self.fail_with(reason, None);
    }

    /// The same, with what to do about it, which the other threads of this process get to know.
    fn fail_with(&self, reason: &str, hint: Option<String>);

    /// What ended the run, if anything did.
    fn failure(&self) -> Option<CommError>;
}

/// A communicator that moves bytes of the host's memory, and returns when it has.
pub trait HostCommunicator: Communicator {
    /// Does `kind` together with the other ranks of the group, which call it with pieces of the same sizes and types.
    /// Nothing is touched before all have agreed on that. Returns when this rank's outputs are there and nobody reads its
    /// inputs any more.
    ///
    /// # Safety
    /// The pieces' memory is valid, aligned to the element type and exclusively this rank's until return. Inputs and
    /// outputs are apart, except that an input may be exactly the output (`AllReduce`), where there is one row in the order of the group an
    /// output may be this rank's part of the input (`ReduceScatter`), and an input this rank's part of the output (`AllGather`).
    unsafe fn collective(
        &self,
        kind: Collective,
        group: &RankGroup,
        pieces: &[Piece],
        place: ProgramPlace,
    ) -> Result<(), CommError>;

    /// Copies `bytes` bytes into the next of `copies` parts of `send_buffer`, each of `bytes` bytes (waiting until the receiver
    /// has taken what was there), and offers it to `to`; returns without waiting for the receiver. `tag` separates
    /// independent streams of messages between the same two ranks; one stream is used by one thread at a time.
    ///
    /// A change of send buffer, copies or bytes within a stream first waits until everything offered has been taken.
    ///
    /// # Safety
    /// `data` is valid for `bytes` bytes, and `send_buffer` for `copies` times as many. The send buffer is the stream's alone and
    /// stays valid until all that was sent is taken, or a call has returned an error, or [`leave`](Communicator::leave) or
    /// [`fail`](Communicator::fail) has returned.
    #[allow(clippy::too_many_arguments)]
    unsafe fn send(
        &self,
        to: usize,
        tag: u32,
        data: *const u8,
        bytes: usize,
        send_buffer: *mut u8,
        copies: usize,
        place: ProgramPlace,
    ) -> Result<(), CommError>;

    /// Waits for the next message of `from` with this tag, which must have `bytes` bytes, and copies it.
    ///
    /// # Safety
    /// `data` is valid for writes of `bytes` bytes and exclusively this call's.
    unsafe fn receive(
        &self,
        from: usize,
        tag: u32,
        data: *mut u8,
        bytes: usize,
        place: ProgramPlace,
    ) -> Result<(), CommError>;
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
