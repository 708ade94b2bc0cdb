//! Instructions that ranks run together, as every executor runs them.

use super::{Action, CommError, HostCommunicator, Order, Piece, ProgramPlace, RankGroup};
use crate::bound::At;
use lockstep_ir::op::Transfer;
use lockstep_ir::program::{Instr, Slot, StepProgram};
use lockstep_ir::{Axes, Coordinates, MeshAxis, TensorType, gathered};
use std::collections::BTreeSet;
use std::sync::Arc;

/// An instruction of several ranks, ready to run on one of them.
pub struct CommunicationCall {
    action: Action,
    place: ProgramPlace,
    /// Bytes of a tensor's buffer after the tensor, which are to be zero.
    padding: Vec<(At, usize, usize)>,
    /// Places in the arena, and bytes from there.
    pieces: Vec<Piece<Option<(At, usize)>>>,
}

impl CommunicationCall {
    /// Resolves an instruction for the rank at `here`; `None` if a rank runs it alone.
    pub fn new(program: &StepProgram, instr: &Instr, here: Coordinates) -> Option<Self> {
        let mesh = &program.mesh;
        let channel = instr.stream as u32;
        let along = |over: Axes| RankGroup { ranks: mesh.group(here, over), channel };
        let peer = |stage: usize| mesh.rank(here.with(MeshAxis::Pp, stage));
        let transfer = instr.op.transfer()?;
        let action = match transfer {
            Transfer::SumShared { over, sharers } => {
                let first = here.index(over, mesh) / sharers * sharers;
                let ranks = mesh.group(here, over)[first..first + sharers].to_vec();
                Action::Together(transfer.collective()?, RankGroup { ranks, channel })
            }
            Transfer::Send { stage, tag } => {
                let message: u64 = instr.inputs.iter().map(|a| a.ty.bytes()).sum();
                let copies = (program.buffers[instr.workspace?.0].bytes / message.max(1)) as usize;
                Action::Send { to: peer(stage), tag, copies }
            }
            Transfer::Receive { stage, tag } => Action::Receive { from: peer(stage), tag },
            _ => Action::Together(transfer.collective()?, along(transfer.over())),
        };
        let at = |arg| At::arg(program, arg, here);
        let (mut pieces, mut padding) = (Vec::new(), Vec::new());
        let count = instr.inputs.len().max(instr.outputs.len());
        for i in 0..count {
            let (x, y) = (instr.inputs.get(i), instr.outputs.get(i).and_then(Option::as_ref));
            let (input, mut output) = (x.map(at), y.map(at));
            if let Transfer::Send { .. } = transfer {
                output = Some(At::buffer(program, instr.workspace?));
            }
            let of_output = matches!(transfer, Transfer::ReduceScatter { .. } | Transfer::Receive { .. });
            let part = if of_output { &y?.ty } else { &x?.ty };
            // Pieces of the input, where it has several.
            let (ranks, given) = match &action {
                Action::Together(kind, group) => (group.ranks.len(), kind.parts(group.ranks.len())[0]),
                Action::Send { .. } | Action::Receive { .. } => (1, 1),
            };
            let (rows, from, order) = cut(transfer, part);
            let dtype = part.dtype;
            if let (Transfer::AllGather { dim: Some(dim), over }, Some(x), Some(y)) = (transfer, x, y) {
                let sections =
                    gathered(&x.ty, &y.ty, dim, ranks).expect("the verifier has seen that parts make a whole");
                let bytes = dtype.bytes();
                pieces.extend(sections.into_iter().map(|s| {
                    let share = here.index(over, mesh) % s.sharers * s.elements;
                    let input = input.map(|at| (at, (s.part + share) * bytes));
                    let output = output.map(|at| (at, s.whole * bytes));
                    Piece { input, output, rows: s.rows, elements: s.elements, order, dtype }
                }));
                continue;
            }
            let elements = (part.elements() - from) / rows / if of_output { 1 } else { given };
            let bytes = elements * dtype.bytes();
            if let (Transfer::ReduceScatter { dim: None, .. }, Some(input), Some(x)) = (transfer, input, x) {
                padding.push((input, x.ty.bytes() as usize, bytes * ranks));
            }
            let start = from * dtype.bytes();
            let (input, output) = (input.map(|at| (at, start)), output.map(|at| (at, start)));
            pieces.push(Piece { input, output, rows, elements, order, dtype });
        }
        let place = ProgramPlace { op: instr.op.name(), layer: instr.layer, micro_batch: 0 };
        Some(Self { action, place, padding, pieces })
    }

    /// The ranks that run it, of which `rank` is one.
    pub fn connection(&self, rank: usize) -> Connection {
        match self.action {
            Action::Together(_, ref group) => Connection::Group(group.clone()),
            Action::Send { to, tag, .. } => Connection::Messages { from: rank, to, tag },
            Action::Receive { from, tag } => Connection::Messages { from, to: rank, tag },
        }
    }

    /// Of pieces that are where they say, whatever the slot, for an arena that starts at 0.
    pub(super) fn absolute(action: Action, pieces: &[Piece], place: ProgramPlace) -> Self {
        let at = |address: *mut u8| Some((At::absolute(address as usize as u64), 0));
        Self { action, place, padding: Vec::new(), pieces: pieces.iter().map(|piece| piece.map(at)).collect() }
    }

    /// What it does at a slot of a schedule in an arena that starts at `base`, and where in the program that is. Its pieces go to
    /// `pieces`.
    pub fn resolve(&self, base: *mut u8, slot: Slot, pieces: &mut Vec<Piece>) -> (&Action, ProgramPlace) {
        let address = |at: Option<(At, usize)>| {
            at.map_or(std::ptr::null_mut(), |(at, offset)| at.address(base, slot).wrapping_add(offset))
        };
        pieces.clear();
        pieces.extend(self.pieces.iter().map(|piece| piece.map(address)));
        (&self.action, ProgramPlace { micro_batch: slot.micro_batch, ..self.place })
    }

    /// Bytes that are to be zero before it runs, as addresses and lengths.
    pub fn padding(&self, base: *mut u8, slot: Slot) -> impl Iterator<Item = (*mut u8, usize)> {
        let range = move |(at, from, to): &(At, usize, usize)| {
            (at.address(base, slot).wrapping_add(*from), to.saturating_sub(*from))
        };
        self.padding.iter().map(range)
    }

    /// Runs it on the host's memory.
    ///
    /// # Safety
    /// `base` is the arena of the program that this was made for, nobody else touches the operands meanwhile.
    pub(super) unsafe fn run(
        &self,
        comm: &dyn HostCommunicator,
        base: *mut u8,
        slot: Slot,
        pieces: &mut Vec<Piece>,
    ) -> Result<(), CommError> {
        let (action, place) = self.resolve(base, slot, pieces);
        comm.at(place);
        // SAFETY: the verifier has checked that operands lie in the arena and overlap only in place.
        unsafe {
            self.padding(base, slot).for_each(|(at, bytes)| at.write_bytes(0, bytes));
            comm.act(action, pieces, place)
        }
    }
}

/// How ranks communicate a tensor: how many rows, the first element that counts, and the order of parts, which is zig-zag over
/// context-parallel ranks.
fn cut(transfer: Transfer, part: &TensorType) -> (usize, usize, Order) {
    let order = |over: Axes| if over == MeshAxis::Cp.into() { Order::ZigZag } else { Order::Group };
    match transfer {
        Transfer::ReduceScatter { dim: Some(dim), over } => {
            (part.dims[..dim].iter().map(|d| d.size()).product(), 0, order(over))
        }
        Transfer::AllGather { dim: Some(_), over } => (1, 0, order(over)),
        Transfer::SumShared { .. } => (1, part.unshared_bytes() as usize / part.dtype.bytes(), Order::Group),
        _ => (1, 0, Order::Group),
    }
}

/// Ranks that do something together, for libraries that want to know of them before.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Connection {
    /// Collectives of a group.
    Group(RankGroup),
    /// A stream of messages.
    Messages {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// Which of the streams between the two.
        tag: u32,
    },
}

impl Connection {
    /// Its ranks; the order is that of the group. A rank that sends to itself, as the last one of zb-v does, is one.
    pub fn ranks(&self) -> Vec<usize> {
        match self {
            Connection::Group(group) => group.ranks.clone(),
            Connection::Messages { from, to, .. } if from == to => vec![*from],
            Connection::Messages { from, to, .. } => vec![*from, *to],
        }
    }
}

/// The connections of all ranks that run the programs of these stages, in one order. What a rank does alone needs none.
pub fn connections(programs: &[StepProgram]) -> Vec<Connection> {
    let Some(mesh) = programs.first().map(|p| p.mesh) else { return Vec::new() };
    let mut found = BTreeSet::new();
    for rank in 0..mesh.ranks() {
        let here = mesh.coordinates(rank);
        let calls = communication_calls(&programs[here.get(MeshAxis::Pp)], here);
        found.extend(calls.iter().flatten().flatten().map(|call| call.connection(rank)));
    }
    found.into_iter().filter(|connection| connection.ranks().len() > 1).collect()
}

/// A rank's connection to the others.
pub struct Link<C: ?Sized> {
    /// Its communicator.
    pub comm: Arc<C>,
    /// Where it stands.
    pub coordinates: Coordinates,
}

/// Every instruction of several ranks, by segment and index.
pub type CommunicationCalls = Vec<Vec<Option<Arc<CommunicationCall>>>>;

/// Those of a program, for the rank at `here`.
pub fn communication_calls(program: &StepProgram, here: Coordinates) -> CommunicationCalls {
    let call = |i: &Instr| CommunicationCall::new(program, i, here).map(Arc::new);
    program.segments.iter().map(|s| s.instrs.iter().map(call).collect()).collect()
}
