//! Where the ranks of one group meet for collectives.

use super::collective::{Wish, agree, combine, copy, others, slice_of};
use super::peers::{Gate, Peers};
use super::{Collective, CommError, Piece, ProgramPlace, RankGroup};
use crate::sync::{MutexGuard, UnsafeCell};

/// What one member wants of a collective.
#[derive(Clone, Copy)]
struct Call {
    kind: Collective,
    pieces: *const [Piece],
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
            return Err(peers.refuse(
                self.members[index],
                place,
                "two collectives of one group at once on one channel",
            ));
        }
        turn.inside[index] = true;
        let call = Call { kind, pieces, place };
        // SAFETY: this member is in no collective, so nobody reads what it wanted last.
        self.calls[index].with_mut(|wanted| unsafe { *wanted = Some(call) });
        drop(self.arrive(peers, index, turn, Waypoint::Agree, place)?);
        let n = self.members.len();
        // SAFETY: all have agreed; everybody writes only its own outputs, and of those only what nobody reads meanwhile.
        unsafe {
            let input = |member, p, at, _| self.piece(member, p).input.cast_const().wrapping_add(at);
            combine(kind, (index, n), pieces, |piece| slice_of(index, n, piece), input);
            if kind == Collective::AllReduce {
                drop(self.arrive(peers, index, self.done(), Waypoint::Work, place)?);
                self.fetch_slices(index, pieces);
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
                if stage == Waypoint::Agree {
                    result = self.agree().map_err(|error| peers.end(error));
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
            (turn, result) = peers.wait(me, place, &self.gate, turn, |turn| turn.stage != before, absent);
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
            Some(Wish { kind: call.kind, pieces: unsafe { &*call.pieces }, place: call.place })
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
            Some(call) => unsafe { (&*call.pieces)[p] },
            None => unreachable!("a member that has arrived has a call"),
        }
    }

    /// Copies the slices of the other members from their outputs.
    unsafe fn fetch_slices(&self, index: usize, pieces: &[Piece]) {
        for member in others(index, self.members.len()) {
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
