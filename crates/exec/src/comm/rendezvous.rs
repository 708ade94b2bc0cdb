//! Where the ranks of one group meet for collectives.

use super::peers::{Gate, Peers};
use super::{Collective, CommError, Piece, ProgramPlace, RankGroup, Wish, agree, slice_of, sum};
use crate::sync::{MutexGuard, UnsafeCell};

/// What one member wants of a collective.
#[derive(Clone, Copy)]
struct Call {
    kind: Collective,
    pieces: *const Piece,
    count: usize,
    place: ProgramPlace,
}

/// State of a rendezvous; a stage ends when all members have arrived.
struct Turn {
    /// Counts the stages that have ended.
    stage: u64,
    /// Which members have arrived at the end of this stage, and how many have not.
    arrived: Vec<bool>,
    missing: usize,
    /// Members that may be reading or writing tensors.
    touching: usize,
    /// Which members are in a collective.
    inside: Vec<bool>,
    /// A member has failed: no stage ends any more.
    closed: bool,
}

/// The rendezvous of one group. Made when the group first acts, used for all its collectives.
pub struct Rendezvous {
    members: Vec<usize>,
    /// What each member wants. Written by the member under the lock before it arrives; read by others from the end of that
    /// first stage until they arrive at the end of the last.
    calls: Vec<UnsafeCell<Option<Call>>>,
    gate: Gate<Turn>,
}

// SAFETY: `calls` and what they point to are read and written in the turns that the gate gives, see there.
unsafe impl Send for Rendezvous {}
// SAFETY: as above.
unsafe impl Sync for Rendezvous {}

impl Rendezvous {
    pub fn new(group: &RankGroup) -> Self {
        let n = group.ranks.len();
        let turn =
            Turn { stage: 0, arrived: vec![false; n], missing: n, touching: 0, inside: vec![false; n], closed: false };
        Self {
            members: group.ranks.clone(),
            calls: (0..n).map(|_| UnsafeCell::new(None)).collect(),
            gate: Gate::new(turn),
        }
    }

    /// The part of member `index` in a collective.
    ///
    /// # Safety
    /// As `Communicator::collective`; sums are of types that can be added.
    pub unsafe fn act(
        &self,
        peers: &Peers,
        index: usize,
        kind: Collective,
        pieces: &[Piece],
        place: ProgramPlace,
    ) -> Result<(), CommError> {
        let mut turn = self.gate.lock();
        if turn.inside[index] {
            let reason = "two collectives of one group at once on one channel".to_owned();
            return Err(peers.end(CommError::Refused { rank: self.members[index], place, reason }));
        }
        turn.inside[index] = true;
        let call = Call { kind, pieces: pieces.as_ptr(), count: pieces.len(), place };
        // SAFETY: this member is in no collective, so nobody reads what it wanted last.
        self.calls[index].with_mut(|wanted| unsafe { *wanted = Some(call) });
        drop(self.arrive(peers, index, turn, Waypoint::Agree, place)?);
        // SAFETY: all have agreed; everybody writes only its own outputs, and of those only what nobody reads meanwhile.
        unsafe {
            match kind {
                Collective::AllReduce => {
                    self.reduce_slice(index, pieces);
                    drop(self.arrive(peers, index, self.done(), Waypoint::Work, place)?);
                    self.fetch_slices(index, pieces);
                }
                Collective::ReduceScatter => self.reduce_part(index, pieces),
                Collective::AllGather => self.gather(index, pieces),
                Collective::Shift => self.take_from_before(index, pieces),
                Collective::AllToAll => self.take_parts(index, pieces),
            }
        }
        self.arrive(peers, index, self.done(), Waypoint::Leave, place)?.inside[index] = false;
        Ok(())
    }

    /// This member touches no tensors for now.
    fn done(&self) -> MutexGuard<'_, Turn> {
        let mut turn = self.gate.lock();
        turn.touching -= 1;
        turn
    }

    /// Waits until all members have arrived. An error comes only when nobody touches tensors, and nobody will.
    fn arrive<'g>(
        &'g self,
        peers: &Peers,
        index: usize,
        mut turn: MutexGuard<'g, Turn>,
        stage: Waypoint,
        place: ProgramPlace,
    ) -> Result<MutexGuard<'g, Turn>, CommError> {
        let me = self.members[index];
        let mut result = Ok(());
        if !turn.closed {
            turn.arrived[index] = true;
            turn.missing -= 1;
            if turn.missing == 0 {
                match stage {
                    Waypoint::Agree => result = self.agree().map_err(|error| peers.end(error)),
                    Waypoint::Work | Waypoint::Leave => {}
                }
                if result.is_ok() {
                    turn.stage += 1;
                    turn.arrived.fill(false);
                    turn.missing = self.members.len();
                    // Counted for all here, so that none is missed who has yet to wake.
                    turn.touching = if stage == Waypoint::Leave { 0 } else { self.members.len() };
                    self.gate.announce();
                    return Ok(turn);
                }
            }
        }
        if result.is_ok() {
            let before = turn.stage;
            let absent = |turn: &Turn, rank: usize| {
                self.members.iter().zip(&turn.arrived).any(|(&member, &here)| member == rank && !here)
            };
            (turn, result) = peers.wait((me, place), &self.gate, turn, |turn| turn.stage != before, absent);
        }
        if let Err(error) = result {
            turn.closed = true;
            self.gate.announce();
            // Others may still read this member's tensors; they do not wait for anybody while they do.
            while turn.touching > 0 {
                turn = self.gate.sleep(turn);
            }
            return Err(error);
        }
        Ok(turn)
    }

    /// Whether all members want the same. Called by the last to arrive, under the lock.
    fn agree(&self) -> Result<(), CommError> {
        let wish = |member: usize| {
            // SAFETY: all members have arrived and wait, so calls and pieces stay as they are.
            let call = self.calls[member].with(|call| unsafe { *call })?;
            // SAFETY: as above.
            let pieces = unsafe { std::slice::from_raw_parts(call.pieces, call.count) };
            Some(Wish { kind: call.kind, pieces, place: call.place })
        };
        agree(&self.members, wish)
    }

    /// What member `member` wants done with piece `p`.
    ///
    /// # Safety
    /// Between the first stage and the last, with `p` among the pieces.
    unsafe fn piece(&self, member: usize, p: usize) -> Piece {
        // SAFETY: the caller vouches; all members have as many pieces.
        match self.calls[member].with(|call| unsafe { *call }) {
            // SAFETY: as above.
            Some(call) => unsafe { *call.pieces.add(p) },
            None => unreachable!("a member that has arrived has a call"),
        }
    }

    /// Sums this member's slices of all inputs into its outputs.
    unsafe fn reduce_slice(&self, index: usize, pieces: &[Piece]) {
        for (p, piece) in pieces.iter().enumerate() {
            let (start, n) = slice_of(index, self.members.len(), piece);
            let at = start * piece.dtype.bytes();
            // SAFETY: inside the tensors. Nobody else reads this slice of this member's input, which may be its output.
            unsafe {
                let input = |member| self.piece(member, p).input.add(at);
                sum::sum(piece.dtype, self.members.len(), input, piece.output.add(at), n);
            }
        }
    }

    /// Copies the slices of the other members from their outputs.
    unsafe fn fetch_slices(&self, index: usize, pieces: &[Piece]) {
        for member in self.others(index) {
            for (p, piece) in pieces.iter().enumerate() {
                let (start, n) = slice_of(member, self.members.len(), piece);
                let size = piece.dtype.bytes();
                // SAFETY: inside the tensors; the owner has written its slice, and this copy of it is read by nobody.
                unsafe {
                    let from = self.piece(member, p).output.add(start * size);
                    copy(from, piece.output.add(start * size), n * size);
                }
            }
        }
    }

    /// Sums this member's part of all inputs into its output.
    unsafe fn reduce_part(&self, index: usize, pieces: &[Piece]) {
        for (p, piece) in pieces.iter().enumerate() {
            let (n, size) = (self.members.len(), piece.dtype.bytes());
            for (row, (whole, part, len)) in in_rows(piece, n, index) {
                // SAFETY: inside the tensors. Nobody else reads this part of this member's input, which may be its output.
                unsafe {
                    let input = |member| self.piece(member, p).input.add((row * n * piece.elements + whole) * size);
                    sum::sum(piece.dtype, n, input, piece.output.add((row * piece.elements + part) * size), len);
                }
            }
        }
    }

    /// Copies all inputs into this member's outputs.
    unsafe fn gather(&self, index: usize, pieces: &[Piece]) {
        for member in self.others(index).chain([index]) {
            for (p, piece) in pieces.iter().enumerate() {
                let (n, size) = (self.members.len(), piece.dtype.bytes());
                for (row, (whole, part, len)) in in_rows(piece, n, member) {
                    // SAFETY: inside the tensors. The part of the output that may be this member's input is not written.
                    unsafe {
                        let from = self.piece(member, p).input.add((row * piece.elements + part) * size);
                        copy(from, piece.output.add((row * n * piece.elements + whole) * size), len * size);
                    }
                }
            }
        }
    }

    /// Copies the inputs of the member before this one.
    unsafe fn take_from_before(&self, index: usize, pieces: &[Piece]) {
        let n = self.members.len();
        for (p, piece) in pieces.iter().enumerate() {
            // SAFETY: inside the tensors, which are apart.
            unsafe { copy(self.piece((index + n - 1) % n, p).input, piece.output, piece.bytes()) };
        }
    }

    /// Copies this member's part of every input.
    unsafe fn take_parts(&self, index: usize, pieces: &[Piece]) {
        for member in self.others(index).chain([index]) {
            for (p, piece) in pieces.iter().enumerate() {
                let bytes = piece.bytes();
                // SAFETY: inside the tensors, which are apart.
                unsafe {
                    copy(self.piece(member, p).input.add(index * bytes), piece.output.add(member * bytes), bytes)
                };
            }
        }
    }

    /// The other members, each rank starting at another.
    fn others(&self, index: usize) -> impl Iterator<Item = usize> {
        let n = self.members.len();
        (1..n).map(move |i| (index + i) % n)
    }
}

/// Where a member's part stands in every row (see [`Piece::spans`]).
pub fn in_rows(piece: &Piece, n: usize, member: usize) -> impl Iterator<Item = (usize, (usize, usize, usize))> {
    let spans = piece.spans(n, member).into_iter().filter(|(.., len)| *len > 0);
    (0..piece.rows).flat_map(move |row| spans.clone().map(move |span| (row, span)))
}

/// What the members wait for each other before.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Waypoint {
    /// Touching anything.
    Agree,
    /// Reading each other's outputs.
    Work,
    /// Returning.
    Leave,
}

/// Copies bytes, unless they are there already.
///
/// # Safety
/// Both are good for this many bytes, and apart or the same.
pub unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    if bytes > 0 && from != to.cast_const() {
        // SAFETY: the caller vouches.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
    }
}
