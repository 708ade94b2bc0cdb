//! Collectives of a group of processes.

use super::inbox::{Buffer, Stream};
use super::wire::{Reader, Writer};
use super::{ProcessCommunicator, number};
use crate::comm::rendezvous::{copy, in_rows};
use crate::comm::{Collective, CommError, Order, Piece, ProgramPlace, RankGroup, Wish, agree, slice_of, sum};
use lockstep_ir::DType;

/// Tensors of so many bytes together are sent whole and added by everybody: one round instead of two.
const SMALL: usize = 4096;

/// What the members of a group have in common for all their collectives.
pub struct Channel {
    members: Vec<usize>,
    stream: Stream,
    packed: Buffer,
    /// What came, by member; none from this rank.
    received: Vec<Option<Buffer>>,
    /// Where the data of these frames begin.
    starts: Vec<usize>,
    /// What this rank asks for, as bytes that are the same wherever it is the same, and where it asks.
    wish: Writer,
    place: Writer,
}

/// Which part of a piece goes from one member to another.
#[derive(Clone, Copy)]
struct Share {
    kind: Collective,
    /// Whether what is summed over all goes whole.
    whole: bool,
    members: usize,
    from: usize,
    to: usize,
}

impl Share {
    /// First element and number of elements of a piece that is summed over all.
    fn slice(&self, piece: &Piece) -> (usize, usize) {
        if self.whole { (0, piece.elements) } else { slice_of(self.to, self.members, piece) }
    }

    /// Its bytes, without padding.
    fn bytes(&self, piece: &Piece) -> usize {
        match self.kind {
            Collective::AllReduce => self.slice(piece).1 * piece.dtype.bytes(),
            Collective::ReduceScatter | Collective::AllGather | Collective::AllToAll => piece.bytes(),
            Collective::Shift if (self.from + 1) % self.members == self.to => piece.bytes(),
            Collective::Shift => 0,
        }
    }

    /// Appends it.
    ///
    /// # Safety
    /// The piece's input is valid.
    unsafe fn pack(&self, piece: &Piece, to: &mut Buffer) {
        // SAFETY: inside the input.
        unsafe {
            match self.kind {
                Collective::AllReduce => {
                    let start = self.slice(piece).0 * piece.dtype.bytes();
                    to.push_from(piece.input.wrapping_add(start), self.bytes(piece));
                }
                Collective::ReduceScatter => {
                    let size = piece.dtype.bytes();
                    for (row, (whole, _, len)) in in_rows(piece, self.members, self.to) {
                        let at = (row * self.members * piece.elements + whole) * size;
                        to.push_from(piece.input.wrapping_add(at), len * size);
                    }
                }
                Collective::AllGather | Collective::Shift => to.push_from(piece.input, self.bytes(piece)),
                Collective::AllToAll => {
                    let bytes = piece.bytes();
                    to.push_from(piece.input.wrapping_add(self.to * bytes), bytes);
                }
            }
        }
        to.align();
    }
}

impl Channel {
    pub fn new(group: &RankGroup) -> Self {
        Self {
            members: group.ranks.clone(),
            stream: Stream::group(number(group)),
            packed: Buffer::default(),
            received: group.ranks.iter().map(|_| None).collect(),
            starts: vec![0; group.ranks.len()],
            wish: Writer::default(),
            place: Writer::default(),
        }
    }

    /// The part of member `index` in a collective.
    ///
    /// # Safety
    /// As `HostCommunicator::collective`; sums are of types that can be added.
    pub unsafe fn act(
        &mut self,
        comm: &ProcessCommunicator,
        index: usize,
        kind: Collective,
        pieces: &[Piece],
        place: ProgramPlace,
    ) -> Result<(), CommError> {
        let n = self.members.len();
        if n == 1 {
            for piece in pieces {
                // SAFETY: the caller vouches.
                unsafe { copy(piece.input, piece.output, piece.bytes()) };
            }
            return Ok(());
        }
        let small = pieces.iter().map(Piece::bytes).sum::<usize>() <= SMALL;
        let share = |from, to| Share { kind, whole: small, members: n, from, to };
        self.ask(kind, pieces, place);
        let alike = kind == Collective::AllGather || (kind == Collective::AllReduce && small);
        for i in 1..n {
            let member = (index + i) % n;
            if i == 1 || !alike {
                self.head();
                // SAFETY: the caller vouches.
                pieces.iter().for_each(|piece| unsafe { share(index, member).pack(piece, &mut self.packed) });
            }
            comm.post(self.members[member], self.stream, self.packed.bytes(), place)?;
        }
        self.collect(comm, index, place)?;
        let data = |from| pieces.iter().map(|piece| share(from, index).bytes(piece).next_multiple_of(8)).sum();
        self.agreed(index, data, (kind, pieces, place)).map_err(|error| comm.peers().end(error))?;
        // SAFETY: all have agreed and sent as much as is read here; the caller vouches for the pieces.
        unsafe {
            match kind {
                Collective::AllReduce => self.add_slices(index, share(index, index), pieces),
                Collective::ReduceScatter => self.add_parts(index, pieces),
                Collective::AllGather => self.gather(index, pieces),
                Collective::Shift => self.take((index + n - 1) % n, pieces),
                Collective::AllToAll => self.take_parts(index, pieces),
            }
        }
        self.recycle(comm);
        if kind == Collective::AllReduce && !small {
            // SAFETY: the caller vouches.
            unsafe { self.spread(comm, index, pieces, place)? };
        }
        Ok(())
    }

    /// Writes down what this rank asks for.
    fn ask(&mut self, kind: Collective, pieces: &[Piece], place: ProgramPlace) {
        self.wish.0.clear();
        self.wish.u8(kind as u8);
        for piece in pieces {
            self.wish.size(piece.rows);
            self.wish.size(piece.elements);
            self.wish.u8(u8::from(piece.order == Order::ZigZag));
            self.wish.u8(DTYPES.iter().position(|dtype| *dtype == piece.dtype).unwrap_or(DTYPES.len()) as u8);
        }
        self.place.0.clear();
        self.place.place(place);
    }

    /// Begins a frame with what this rank asks for.
    fn head(&mut self) {
        self.packed.clear();
        self.packed.push(&(self.wish.0.len() as u32).to_le_bytes());
        self.packed.push(&(self.place.0.len() as u32).to_le_bytes());
        self.packed.push(&self.wish.0);
        self.packed.push(&self.place.0);
        self.packed.align();
    }

    /// Waits for a frame of every other member.
    fn collect(&mut self, comm: &ProcessCommunicator, index: usize, place: ProgramPlace) -> Result<(), CommError> {
        let others = self.members.iter().enumerate().filter(|(member, _)| *member != index).map(|(_, rank)| *rank);
        let mut state = comm.wait_for(place, others, self.stream)?;
        for (member, rank) in self.members.iter().enumerate().filter(|(member, _)| *member != index) {
            self.received[member] = state.pop(*rank, self.stream);
        }
        Ok(())
    }

    fn recycle(&mut self, comm: &ProcessCommunicator) {
        self.received.iter_mut().filter_map(Option::take).for_each(|frame| comm.inbox.recycle(frame));
    }

    /// Finds where the data of every member's frame begin, if all ask for the same and have sent as many bytes as `data`
    /// says.
    fn agreed(
        &mut self,
        index: usize,
        data: impl Fn(usize) -> usize,
        (kind, pieces, place): (Collective, &[Piece], ProgramPlace),
    ) -> Result<(), CommError> {
        let mut same = true;
        for (member, (frame, start)) in self.received.iter().zip(&mut self.starts).enumerate() {
            let Some(frame) = frame else { continue };
            match head_of(frame.bytes()) {
                Some((wish, _, at)) if wish == self.wish.0 && frame.bytes().len() == at + data(member) => *start = at,
                _ => same = false,
            }
        }
        if same {
            return Ok(());
        }
        let wishes: Vec<_> = self.received.iter().map(|frame| read_wish(frame.as_ref()?.bytes())).collect();
        agree(&self.members, |member| {
            if member == index {
                return Some(Wish { kind, pieces, place });
            }
            let (kind, pieces, place) = wishes[member].as_ref()?;
            Some(Wish { kind: *kind, pieces, place: *place })
        })?;
        let reason = "ranks that send what others do not expect".to_owned();
        Err(CommError::Refused { rank: self.members[index], place, reason })
    }

    /// The address of a member's part of a piece.
    fn part(&self, member: usize, offset: usize) -> *const u8 {
        let at = self.starts[member] + offset;
        self.received[member].as_ref().map_or(std::ptr::null(), |frame| frame.bytes()[at..].as_ptr())
    }

    /// Sums this member's slices into its outputs.
    unsafe fn add_slices(&self, index: usize, mine: Share, pieces: &[Piece]) {
        let mut offset = 0;
        for piece in pieces {
            let (start, n) = mine.slice(piece);
            let at = start * piece.dtype.bytes();
            let input = |member| match member == index {
                true => piece.input.wrapping_add(at),
                false => self.part(member, offset),
            };
            // SAFETY: the frames have this many elements, aligned to 8 bytes; the caller vouches for the piece.
            unsafe { sum::sum(piece.dtype, self.members.len(), input, piece.output.wrapping_add(at), n) };
            offset += mine.bytes(piece).next_multiple_of(8);
        }
    }

    /// Sums this member's part of all inputs into its output.
    unsafe fn add_parts(&self, index: usize, pieces: &[Piece]) {
        let (mut offset, n) = (0, self.members.len());
        for piece in pieces {
            let size = piece.dtype.bytes();
            for (row, (whole, part, len)) in in_rows(piece, n, index) {
                let at = (row * piece.elements + part) * size;
                let input = |member| match member == index {
                    true => piece.input.wrapping_add((row * n * piece.elements + whole) * size),
                    false => self.part(member, offset + at),
                };
                // SAFETY: as above; rows and halves of them are whole elements.
                unsafe { sum::sum(piece.dtype, n, input, piece.output.wrapping_add(at), len) };
            }
            offset += piece.bytes().next_multiple_of(8);
        }
    }

    /// Copies all inputs into this member's outputs.
    unsafe fn gather(&self, index: usize, pieces: &[Piece]) {
        let (mut offset, n) = (0, self.members.len());
        for piece in pieces {
            let size = piece.dtype.bytes();
            for member in 0..n {
                for (row, (whole, part, len)) in in_rows(piece, n, member) {
                    let at = (row * piece.elements + part) * size;
                    let input = match member == index {
                        true => piece.input.wrapping_add(at),
                        false => self.part(member, offset + at),
                    };
                    let to = piece.output.wrapping_add((row * n * piece.elements + whole) * size);
                    // SAFETY: inside the frames and the piece, for which the caller vouches; what may be the input is not written.
                    unsafe { copy(input, to, len * size) };
                }
            }
            offset += piece.bytes().next_multiple_of(8);
        }
    }

    /// Copies the inputs of a member into this one's outputs.
    unsafe fn take(&self, member: usize, pieces: &[Piece]) {
        let mut offset = 0;
        for piece in pieces {
            // SAFETY: inside the frame and the piece, for which the caller vouches.
            unsafe { copy(self.part(member, offset), piece.output, piece.bytes()) };
            offset += piece.bytes().next_multiple_of(8);
        }
    }

    /// Copies what every member has sent, and this one's own part, into its outputs.
    unsafe fn take_parts(&self, index: usize, pieces: &[Piece]) {
        let mut offset = 0;
        for piece in pieces {
            let bytes = piece.bytes();
            for member in 0..self.members.len() {
                let input = match member == index {
                    true => piece.input.wrapping_add(index * bytes),
                    false => self.part(member, offset),
                };
                // SAFETY: inside the frames and the piece, for which the caller vouches.
                unsafe { copy(input, piece.output.wrapping_add(member * bytes), bytes) };
            }
            offset += bytes.next_multiple_of(8);
        }
    }

    /// Sends round the slices that this member has summed, and fetches the others'.
    unsafe fn spread(
        &mut self,
        comm: &ProcessCommunicator,
        index: usize,
        pieces: &[Piece],
        place: ProgramPlace,
    ) -> Result<(), CommError> {
        let n = self.members.len();
        self.packed.clear();
        for piece in pieces {
            let ((start, len), size) = (slice_of(index, n, piece), piece.dtype.bytes());
            // SAFETY: inside the output.
            unsafe { self.packed.push_from(piece.output.wrapping_add(start * size), len * size) };
            self.packed.align();
        }
        for i in 1..n {
            comm.post(self.members[(index + i) % n], self.stream, self.packed.bytes(), place)?;
        }
        self.collect(comm, index, place)?;
        for (member, frame) in self.received.iter().enumerate() {
            let Some(frame) = frame else { continue };
            let mut offset = 0;
            for piece in pieces {
                let ((start, len), size) = (slice_of(member, n, piece), piece.dtype.bytes());
                let Some(part) = frame.bytes().get(offset..offset + len * size) else {
                    return Err(comm.refuse(place, "ranks that send what others do not expect"));
                };
                // SAFETY: inside the output.
                unsafe { copy(part.as_ptr(), piece.output.wrapping_add(start * size), len * size) };
                offset += (len * size).next_multiple_of(8);
            }
        }
        self.recycle(comm);
        Ok(())
    }
}

const DTYPES: [DType; 6] = [DType::F32, DType::BF16, DType::F16, DType::F64, DType::Fixed64, DType::U32];

/// What a frame asks for, where, and where its data begin.
fn head_of(frame: &[u8]) -> Option<(&[u8], &[u8], usize)> {
    let mut head = Reader(frame);
    let (wish, place) = (head.u32()? as usize, head.u32()? as usize);
    let (wish, rest) = head.0.split_at_checked(wish)?;
    let at = (8 + wish.len() + place).next_multiple_of(8);
    Some((wish, rest.get(..place)?, at))
}

/// What a frame asks for, read.
fn read_wish(frame: &[u8]) -> Option<(Collective, Vec<Piece>, ProgramPlace)> {
    let (wish, place, _) = head_of(frame)?;
    let mut wish = Reader(wish);
    let kind = *Collective::ALL.get(wish.u8()? as usize)?;
    let mut pieces = Vec::new();
    while !wish.0.is_empty() {
        let (rows, elements) = (wish.size()?, wish.size()?);
        let order = if wish.u8()? == 0 { Order::Group } else { Order::ZigZag };
        let dtype = *DTYPES.get(wish.u8()? as usize)?;
        pieces.push(Piece { input: std::ptr::null(), output: std::ptr::null_mut(), rows, elements, order, dtype });
    }
    Some((kind, pieces, Reader(place).place()?))
}
