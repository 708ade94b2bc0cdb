//! Collectives of a group of processes.

use super::ProcessCommunicator;
use super::inbox::Stream;
use super::wire::{read, write};
use crate::comm::buffer::Buffer;
use crate::comm::collective::{Wish, agree, combine, copy, in_rows, others, slice_of};
use crate::comm::{Collective, CommError, Communicator, Order, Piece, ProgramPlace, RankGroup};
use lockstep_ir::{DType, Movement};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Tensors of this many bytes together are sent whole and added by everybody: one round instead of two.
const SMALL: usize = 4096;

/// What the members of a group have in common for all their collectives.
pub struct Channel {
    members: Vec<usize>,
    stream: Stream,
    packed: Buffer,
    /// What came, by member; none from this rank.
    received: Vec<Option<Buffer>>,
    /// Where the data of these frames begin, and where after that those of each piece.
    starts: Vec<usize>,
    offsets: Vec<usize>,
    /// What this rank asks for, as bytes that are the same wherever it is the same, and where it asks.
    wish: Vec<u8>,
    place: Vec<u8>,
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
        match self.kind.movement() {
            Movement::SumsWhole => self.slice(piece).1 * piece.dtype.bytes(),
            Movement::SumsParts | Movement::Gathers => piece.bytes(),
            Movement::Copies(_) => {
                if self.is_sent() {
                    piece.bytes()
                } else {
                    0
                }
            }
        }
    }

    /// Whether there is anything.
    fn is_sent(&self) -> bool {
        match self.kind.movement() {
            Movement::SumsWhole | Movement::SumsParts | Movement::Gathers => true,
            Movement::Copies(rule) => rule(self.members, self.from, self.to).is_some(),
        }
    }

    /// Appends it.
    ///
    /// # Safety
    /// The piece's input is valid.
    unsafe fn pack(&self, piece: &Piece, to: &mut Buffer) {
        // SAFETY: inside the input.
        unsafe {
            match self.kind.movement() {
                Movement::SumsWhole => {
                    let start = self.slice(piece).0 * piece.dtype.bytes();
                    to.push_from(piece.input.wrapping_add(start), self.bytes(piece));
                }
                Movement::SumsParts => {
                    let size = piece.dtype.bytes();
                    for (row, (whole, _, len)) in in_rows(piece, self.members, self.to) {
                        let at = (row * self.members * piece.elements + whole) * size;
                        to.push_from(piece.input.wrapping_add(at), len * size);
                    }
                }
                Movement::Gathers => to.push_from(piece.input, piece.bytes()),
                Movement::Copies(rule) => {
                    if let Some(part) = rule(self.members, self.from, self.to) {
                        to.push_from(piece.input.wrapping_add(part.input * piece.bytes()), piece.bytes());
                    }
                }
            }
        }
        to.align();
    }
}

impl Channel {
    pub fn new(group: &RankGroup) -> Self {
        // A number that all members find for it.
        let mut hasher = DefaultHasher::new();
        group.hash(&mut hasher);
        Self {
            members: group.ranks.clone(),
            stream: Stream::group(hasher.finish()),
            packed: Buffer::default(),
            received: group.ranks.iter().map(|_| None).collect(),
            starts: vec![0; group.ranks.len()],
            offsets: Vec::new(),
            wish: Vec::new(),
            place: Vec::new(),
        }
    }

    /// The part of member `index` in a collective.
    ///
    /// # Safety
    /// As `HostCommunicator::act`; sums are of types that can be added.
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
        for member in others(index, n) {
            if member == (index + 1) % n || !alike {
                self.head();
                // SAFETY: the caller vouches.
                pieces.iter().for_each(|piece| unsafe { share(index, member).pack(piece, &mut self.packed) });
            }
            comm.post(self.members[member], self.stream, self.packed.bytes(), place)?;
        }
        self.collect(comm, index, place)?;
        let padded = |from, piece: &Piece| share(from, index).bytes(piece).next_multiple_of(8);
        let data = |from| pieces.iter().map(|piece| padded(from, piece)).sum();
        self.agreed(index, data, Wish { kind, pieces, place }).map_err(|error| comm.peers().end(error))?;
        // Those that send anything send as much.
        let sender = others(index, n).find(|from| share(*from, index).is_sent()).unwrap_or(index);
        let mut end = 0;
        self.offsets.clear();
        self.offsets.extend(pieces.iter().map(|piece| {
            end += padded(sender, piece);
            end - padded(sender, piece)
        }));
        let input = |member: usize, p: usize, whole: usize, part: usize| match &self.received[member] {
            Some(frame) => frame.bytes()[self.starts[member] + self.offsets[p] + part..].as_ptr(),
            None => pieces[p].input.cast_const().wrapping_add(whole),
        };
        // SAFETY: all have agreed and sent as much as is read here, aligned to 8 bytes; the caller vouches for the pieces.
        unsafe { combine(kind, (index, n), pieces, |piece| share(index, index).slice(piece), input) };
        self.recycle(comm);
        if kind == Collective::AllReduce && !small {
            // SAFETY: the caller vouches.
            unsafe { self.spread(comm, index, pieces, place)? };
        }
        Ok(())
    }

    /// Writes down what this rank asks for.
    fn ask(&mut self, kind: Collective, pieces: &[Piece], place: ProgramPlace) {
        self.wish.clear();
        self.wish.push(kind as u8);
        for piece in pieces {
            self.wish.extend((piece.rows as u64).to_le_bytes());
            self.wish.extend((piece.elements as u64).to_le_bytes());
            self.wish.push(u8::from(piece.order == Order::ZigZag));
            self.wish.push(DTYPES.iter().position(|dtype| *dtype == piece.dtype).unwrap_or(DTYPES.len()) as u8);
        }
        self.place.clear();
        write(&mut self.place, &place);
    }

    /// Begins a frame with what this rank asks for.
    fn head(&mut self) {
        self.packed.clear();
        self.packed.push(&(self.wish.len() as u32).to_le_bytes());
        self.packed.push(&(self.place.len() as u32).to_le_bytes());
        self.packed.push(&self.wish);
        self.packed.push(&self.place);
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
    fn agreed(&mut self, index: usize, data: impl Fn(usize) -> usize, mine: Wish<'_>) -> Result<(), CommError> {
        let mut same = true;
        for (member, (frame, start)) in self.received.iter().zip(&mut self.starts).enumerate() {
            let Some(frame) = frame else { continue };
            match head_of(frame.bytes()) {
                Some((wish, _, at)) if wish == self.wish && frame.bytes().len() == at + data(member) => *start = at,
                _ => same = false,
            }
        }
        if same {
            return Ok(());
        }
        let wishes: Vec<_> = self.received.iter().map(|frame| read_wish(frame.as_ref()?.bytes())).collect();
        agree(&self.members, |member| {
            if member == index {
                return Some(mine);
            }
            let (kind, pieces, place) = wishes[member].as_ref()?;
            Some(Wish { kind: *kind, pieces, place: *place })
        })?;
        let reason = "ranks that send what others do not expect".to_owned();
        Err(CommError::Refused { rank: self.members[index], place: mine.place, reason })
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
        for member in others(index, n) {
            comm.post(self.members[member], self.stream, self.packed.bytes(), place)?;
        }
        self.collect(comm, index, place)?;
        for (member, frame) in self.received.iter().enumerate() {
            let Some(frame) = frame else { continue };
            let mut offset = 0;
            for piece in pieces {
                let ((start, len), size) = (slice_of(member, n, piece), piece.dtype.bytes());
                let Some(part) = frame.bytes().get(offset..offset + len * size) else {
                    return Err(comm.peers().refuse(comm.rank, place, "ranks that send what others do not expect"));
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
    let ([wish, place], rest) = frame.split_first_chunk::<8>().map(|(head, rest)| {
        let lengths: &[[u8; 4]] = head.as_chunks().0;
        ([0, 1].map(|i| u32::from_le_bytes(lengths[i]) as usize), rest)
    })?;
    let (wish, rest) = rest.split_at_checked(wish)?;
    Some((wish, rest.get(..place)?, (8 + wish.len() + place).next_multiple_of(8)))
}

/// What a frame asks for, read.
fn read_wish(frame: &[u8]) -> Option<(Collective, Vec<Piece>, ProgramPlace)> {
    let (wish, place, _) = head_of(frame)?;
    let (kind, pieces) = wish.split_first()?;
    let null = std::ptr::null_mut();
    let piece = |piece: &[u8; 18]| {
        let [rows, elements] = [0, 1].map(|i| u64::from_le_bytes(piece.as_chunks().0[i]) as usize);
        let order = if piece[16] == 0 { Order::Group } else { Order::ZigZag };
        Some(Piece { rows, order, ..Piece::new(null, null, elements, *DTYPES.get(piece[17] as usize)?) })
    };
    let pieces = pieces.as_chunks().0.iter().map(piece).collect::<Option<_>>()?;
    Some((*Collective::ALL.get(*kind as usize)?, pieces, read(place)?))
}
