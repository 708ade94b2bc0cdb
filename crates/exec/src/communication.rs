//! Instructions that ranks run together, as every executor runs them.

use crate::bound::At;
use crate::comm::{Collective, CommError, Communicator, Piece, ProgramPlace, RankGroup};
use crate::cpu::arena;
use lockstep_ir::op::Transfer;
use lockstep_ir::program::{Instr, Slot, StepProgram, Stream};
use lockstep_ir::{Axes, Coordinates, MeshAxis, TensorType};
use std::ops::Range;
use std::sync::Arc;

/// An instruction of several ranks, ready to run on one of them.
pub struct CommunicationCall {
    what: What,
    place: ProgramPlace,
    /// Bytes of a tensor's buffer behind the tensor, which are to be zero.
    padding: Vec<(At, usize, usize)>,
    pieces: Vec<PieceAt>,
}

enum What {
    Together(Collective, RankGroup),
    Send { to: usize, tag: u32, send_buffer: At, copies: usize },
    Receive { from: usize, tag: u32 },
}

struct PieceAt {
    input: Option<(At, usize)>,
    output: Option<(At, usize)>,
    elements: usize,
    dtype: lockstep_ir::DType,
    /// Ranks whose parts are in the input, and in the output.
    parts: (usize, usize),
}

impl PieceAt {
    fn range(&self, (at, offset): (At, usize), parts: usize, slot: Slot) -> Range<usize> {
        let start = at.offset(slot) as usize + offset;
        start..start + parts * self.elements * self.dtype.bytes()
    }
}

impl CommunicationCall {
    /// Resolves an instruction for the rank at `here`; `None` if a rank runs it alone.
    pub fn new(program: &StepProgram, instr: &Instr, here: Coordinates) -> Option<Self> {
        let mesh = &program.mesh;
        let channel = u32::from(instr.stream == Stream::Communication);
        let along = |over: Axes| RankGroup { ranks: mesh.group(here, over), channel };
        let peer = |stage: usize| mesh.rank(here.with(MeshAxis::Pp, stage));
        let transfer = instr.op.transfer()?;
        let what = match transfer {
            Transfer::AllReduce { over } => What::Together(Collective::AllReduce, along(over)),
            Transfer::SumShared { over, sharers } => {
                let first = here.index(over, mesh) / sharers * sharers;
                let ranks = mesh.group(here, over)[first..first + sharers].to_vec();
                What::Together(Collective::AllReduce, RankGroup { ranks, channel })
            }
            Transfer::ReduceScatter { over, .. } => What::Together(Collective::ReduceScatter, along(over)),
            Transfer::AllGather { over, .. } => What::Together(Collective::AllGather, along(over)),
            Transfer::Send { stage, tag } => {
                let send_buffer = At::buffer(program, instr.workspace?);
                let message: u64 = instr.inputs.iter().map(|a| a.ty.bytes()).sum();
                let copies = (program.buffers[instr.workspace?.0].bytes / message.max(1)) as usize;
                What::Send { to: peer(stage), tag, send_buffer, copies }
            }
            Transfer::Receive { stage, tag } => What::Receive { from: peer(stage), tag },
        };
        let at = |arg| At::arg(program, arg, here);
        let (mut pieces, mut padding) = (Vec::new(), Vec::new());
        let count = instr.inputs.len().max(instr.outputs.len());
        for i in 0..count {
            let (x, y) = (instr.inputs.get(i), instr.outputs.get(i).and_then(Option::as_ref));
            let (input, output) = (x.map(at), y.map(at));
            let part = match transfer {
                Transfer::ReduceScatter { .. } | Transfer::Receive { .. } => &y?.ty,
                Transfer::AllReduce { .. }
                | Transfer::SumShared { .. }
                | Transfer::AllGather { .. }
                | Transfer::Send { .. } => &x?.ty,
            };
            let ranks = match &what {
                What::Together(_, group) => group.ranks.len(),
                What::Send { .. } | What::Receive { .. } => 1,
            };
            let (rows, from) = rows(transfer, part);
            let elements = (part.elements() - from) / rows;
            let bytes = elements * part.dtype.bytes();
            if let (Transfer::ReduceScatter { dim: None, .. }, Some(input), Some(x)) = (transfer, input, x) {
                padding.push((input, x.ty.bytes() as usize, bytes * ranks));
            }
            let (of_input, of_output) = match transfer {
                Transfer::ReduceScatter { .. } => (ranks, 1),
                Transfer::AllGather { .. } => (1, ranks),
                Transfer::AllReduce { .. }
                | Transfer::SumShared { .. }
                | Transfer::Send { .. }
                | Transfer::Receive { .. } => (1, 1),
            };
            let start = from * part.dtype.bytes();
            for row in 0..rows {
                let input = input.map(|at| (at, start + row * bytes * of_input));
                let output = output.map(|at| (at, start + row * bytes * of_output));
                pieces.push(PieceAt { input, output, elements, dtype: part.dtype, parts: (of_input, of_output) });
            }
        }
        let place = ProgramPlace { op: instr.op.name(), layer: instr.layer, micro_batch: 0 };
        Some(Self { what, place, padding, pieces })
    }

    /// How many pieces it has.
    pub fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// What it reads of the arena, in bytes.
    pub fn reads(&self, slot: Slot) -> impl Iterator<Item = Range<usize>> + '_ {
        self.pieces.iter().filter_map(move |p| Some(p.range(p.input?, p.parts.0, slot)))
    }

    /// What it writes of the arena, in bytes.
    pub fn writes(&self, slot: Slot) -> impl Iterator<Item = Range<usize>> + '_ {
        self.pieces.iter().filter_map(move |p| Some(p.range(p.output?, p.parts.1, slot)))
    }

    /// Runs it.
    ///
    /// # Safety
    /// `base` is the arena of the program that this was made for, nobody else touches the operands meanwhile.
    pub unsafe fn run(
        &self,
        comm: &dyn Communicator,
        base: *mut u8,
        slot: Slot,
        scratch: &mut Vec<Piece>,
    ) -> Result<(), CommError> {
        let place = ProgramPlace { micro_batch: slot.micro_batch, ..self.place };
        comm.at(place);
        let address = |(at, offset): (At, usize)| at.address(base, slot).wrapping_add(offset);
        let none = std::ptr::null_mut();
        scratch.clear();
        scratch.extend(self.pieces.iter().map(|p| Piece {
            input: p.input.map_or(none, address).cast_const(),
            output: p.output.map_or(none, address),
            elements: p.elements,
            dtype: p.dtype,
        }));
        // SAFETY: the verifier has checked that operands lie in the arena and overlap only in place.
        unsafe {
            for (at, from, to) in &self.padding {
                at.address(base, slot).add(*from).write_bytes(0, to.saturating_sub(*from));
            }
            match &self.what {
                What::Together(kind, group) => comm.collective(*kind, group, scratch, place),
                What::Send { to, tag, send_buffer, copies } => {
                    let send_buffer = send_buffer.address(base, slot);
                    scratch
                        .iter()
                        .try_for_each(|p| comm.send(*to, *tag, p.input, p.bytes(), send_buffer, *copies, place))
                }
                What::Receive { from, tag } => {
                    scratch.iter().try_for_each(|p| comm.receive(*from, *tag, p.output, p.bytes(), place))
                }
            }
        }
    }
}

/// A tensor as pieces that ranks communicate: how many rows, and the first element that counts.
fn rows(transfer: Transfer, part: &TensorType) -> (usize, usize) {
    let before = |dim: usize| part.dims[..dim].iter().map(|d| d.size()).product();
    match transfer {
        Transfer::AllGather { dim: Some(dim), .. } | Transfer::ReduceScatter { dim: Some(dim), .. } => (before(dim), 0),
        Transfer::SumShared { .. } => (1, part.first_section_bytes() as usize / part.dtype.bytes()),
        Transfer::AllGather { dim: None, .. }
        | Transfer::ReduceScatter { dim: None, .. }
        | Transfer::AllReduce { .. }
        | Transfer::Send { .. }
        | Transfer::Receive { .. } => (1, 0),
    }
}

/// A rank's connection to the others.
#[derive(Clone)]
pub struct Link {
    /// Its communicator.
    pub comm: Arc<dyn Communicator>,
    /// Where it stands.
    pub coordinates: Coordinates,
}

/// Every instruction of several ranks, by segment and index.
pub type CommunicationCalls = Vec<Vec<Option<CommunicationCall>>>;

/// Those of a program, for the rank at `here`.
pub fn communication_calls(program: &StepProgram, here: Coordinates) -> CommunicationCalls {
    let call = |i: &Instr| CommunicationCall::new(program, i, here);
    program.segments.iter().map(|s| s.instrs.iter().map(call).collect()).collect()
}

/// The arena of a device as the host sees it. Bytes that are not communicated take no memory: the system gives pages when they are
/// written.
pub struct Mirror {
    /// Touched by addresses only: other ranks read what they were shown.
    _memory: Vec<u8>,
    bytes: usize,
    /// Where the arena starts in the memory.
    base: *mut u8,
}

// SAFETY: it owns its memory.
unsafe impl Send for Mirror {}

impl Mirror {
    /// Of an arena of this many bytes.
    pub fn new(bytes: u64) -> Self {
        // Zeros that come from the system are not written here.
        let (bytes, alignment) = (bytes as usize, arena::ALIGNMENT as usize);
        let mut memory = vec![0; bytes + alignment];
        let start = memory.as_mut_ptr();
        let base = start.wrapping_add(start.align_offset(alignment));
        Self { _memory: memory, bytes, base }
    }

    /// Some of its bytes: what a communication call reads, or has written.
    pub fn range(&mut self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.bytes, "{range:?} is outside the arena");
        // SAFETY: the range is inside; other ranks touch what they were shown, while a communication call runs or in its send buffer.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(range.start), range.len()) }
    }

    /// Runs a communication call on these bytes.
    pub fn run(
        &mut self,
        call: &CommunicationCall,
        comm: &dyn Communicator,
        slot: Slot,
        scratch: &mut Vec<Piece>,
    ) -> Result<(), CommError> {
        // SAFETY: the mirror is as large as the arena that the call was made for, and this call's alone.
        unsafe { call.run(comm, self.base, slot, scratch) }
    }
}
