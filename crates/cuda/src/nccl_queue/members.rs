//! The collectives of a group over NCCL.

use super::NcclQueue;
use crate::CudaError;
use crate::collectives::{self, Sent, add_sent};
use crate::driver::{ALIGNMENT, Address};
use crate::nccl::{Ask, NcclComm, SumType};
use lockstep_exec::comm::{Order, Piece, slice_of};
use lockstep_ir::{CopiedPart, DType};

/// The members of a group, of which this rank is `me` of `n`.
pub(super) struct Members<'a> {
    pub queue: &'a mut NcclQueue,
    pub communicator: &'a NcclComm,
    pub me: usize,
    pub n: usize,
}

/// Whether a rank's part of a tensor is of one piece in the whole.
fn in_one(piece: &Piece) -> bool {
    piece.rows == 1 && piece.order == Order::Group
}

/// Whole elements of a piece that lies in one.
fn flat(elements: usize, dtype: DType, parts: Address, stride: usize) -> Sent {
    Sent { rows: 1, elements, parts, stride: stride as u64, order: Order::Group, dtype }
}

impl Members<'_> {
    fn ask(&self, asks: &[Ask]) -> Result<(), CudaError> {
        self.queue.queue(self.communicator, &self.queue.stream, asks)
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, n) = (self.me, self.n);
        (1..n).map(move |i| (me + i) % n)
    }

    /// Room for this many bytes per piece, one after the other: where each begins.
    fn room(&mut self, bytes: &[usize]) -> Result<Vec<Address>, CudaError> {
        let mut at = 0;
        let starts: Vec<u64> = bytes
            .iter()
            .map(|bytes| {
                let start = at;
                at += (*bytes as u64).next_multiple_of(ALIGNMENT);
                start
            })
            .collect();
        let base = self.queue.scratch(at)?;
        Ok(starts.into_iter().map(|start| base + start).collect())
    }

    /// Those of the pieces whose parts do not lie in one, with room for all parts of each.
    fn scattered(&mut self, pieces: &[Piece]) -> Result<Vec<(Sent, Piece)>, CudaError> {
        let (n, pieces): (_, Vec<&Piece>) = (self.n, pieces.iter().filter(|p| !in_one(p)).collect());
        let rooms = self.room(&pieces.iter().map(|p| p.bytes() * n).collect::<Vec<_>>())?;
        let sent = |(p, parts): (&&Piece, u64)| {
            let Piece { rows, elements, order, dtype, .. } = **p;
            (Sent { rows, elements, parts, stride: p.bytes() as u64, order, dtype }, **p)
        };
        Ok(pieces.iter().zip(rooms).map(sent).collect())
    }

    /// Parts as messages, by the rule of a collective that copies.
    pub fn copies(
        &self,
        pieces: &[Piece],
        rule: impl Fn(usize, usize, usize) -> Option<CopiedPart>,
    ) -> Result<(), CudaError> {
        let (me, n) = (self.me, self.n);
        let mut asks = Vec::new();
        for piece in pieces {
            let bytes = piece.bytes();
            let input = |part: CopiedPart| piece.input as u64 + (part.input * bytes) as u64;
            let output = |part: CopiedPart| piece.output as u64 + (part.output * bytes) as u64;
            for other in self.others() {
                asks.extend(rule(n, me, other).map(|part| Ask::Send { input: input(part), bytes, to: other }));
                asks.extend(rule(n, other, me).map(|part| Ask::Receive { output: output(part), bytes, from: other }));
            }
            if let Some(part) = rule(n, me, me) {
                // SAFETY: who enqueues vouches for the piece, whose input and output are apart.
                unsafe { self.queue.stream.copy(output(part), input(part), bytes)? };
            }
        }
        self.ask(&asks)
    }

    pub fn gather(&mut self, pieces: &[Piece]) -> Result<(), CudaError> {
        let scattered = self.scattered(pieces)?;
        let gather = |p: &Piece, output| Ask::AllGather { input: p.input as u64, output, bytes: p.bytes() };
        let whole = pieces.iter().filter(|p| in_one(p)).map(|p| gather(p, p.output as u64));
        let asks: Vec<Ask> = whole.chain(scattered.iter().map(|(sent, p)| gather(p, sent.parts))).collect();
        self.ask(&asks)?;
        let wholes: Vec<_> = scattered.iter().map(|(sent, p)| (*sent, p.output as u64)).collect();
        // SAFETY: scratch has room for all parts, the output for the whole.
        unsafe { collectives::parts(self.queue.on(), self.n, false, &wholes) }
    }

    pub fn all_reduce(&self, pieces: &[Piece]) -> Result<(), CudaError> {
        let sum = |p: &Piece| {
            let (input, output, elements) = (p.input as u64, p.output as u64, p.rows * p.elements);
            SumType::of(p.dtype).map(|of| Ask::AllReduce { input, output, elements, of })
        };
        self.ask(&pieces.iter().filter_map(sum).collect::<Vec<_>>())
    }

    /// Cuts inputs whose parts do not lie in one into parts that do.
    fn cut(&mut self, pieces: &[Piece]) -> Result<Vec<(Sent, Piece)>, CudaError> {
        let scattered = self.scattered(pieces)?;
        let wholes: Vec<_> = scattered.iter().map(|(sent, p)| (*sent, p.input as u64)).collect();
        // SAFETY: scratch has room for all parts, the input is the whole.
        unsafe { collectives::parts(self.queue.on(), self.n, true, &wholes)? };
        Ok(scattered)
    }

    pub fn reduce_scatter(&mut self, pieces: &[Piece]) -> Result<(), CudaError> {
        let scattered = self.cut(pieces)?;
        let sum = |p: &Piece, input| {
            let (output, elements) = (p.output as u64, p.rows * p.elements);
            SumType::of(p.dtype).map(|of| Ask::ReduceScatter { input, output, elements, of })
        };
        let whole = pieces.iter().filter(|p| in_one(p)).map(|p| sum(p, p.input as u64));
        self.ask(&whole.chain(scattered.iter().map(|(sent, p)| sum(p, sent.parts))).flatten().collect::<Vec<_>>())
    }

    /// Sends every other member bytes of each piece, and receives as many: `give` says where a member's are. Gives where the first
    /// member's are, and what is added to them.
    fn swap(
        &mut self,
        rooms: &[Address],
        bytes: &[usize],
        give: impl Fn(usize, usize) -> Ask,
    ) -> Result<(), CudaError> {
        let mut asks = Vec::new();
        for other in self.others() {
            for (piece, (room, bytes)) in rooms.iter().zip(bytes).enumerate() {
                asks.push(give(piece, other));
                if *bytes > 0 {
                    asks.push(Ask::Receive { output: room + (other * bytes) as u64, bytes: *bytes, from: other });
                }
            }
        }
        asks.retain(|ask| !matches!(ask, Ask::Send { bytes: 0, .. }));
        self.ask(&asks)
    }

    /// As `all_reduce`, in the order of the group, of small pieces: all get all of them.
    pub fn add_whole(&mut self, pieces: &[Piece]) -> Result<(), CudaError> {
        let bytes: Vec<usize> = pieces.iter().map(Piece::bytes).collect();
        let rooms = self.room(&bytes.iter().map(|b| b * self.n).collect::<Vec<_>>())?;
        self.swap(&rooms, &bytes, |p, to| Ask::Send { input: pieces[p].input as u64, bytes: bytes[p], to })?;
        let sent = |(p, room): (&Piece, &Address)| {
            (flat(p.rows * p.elements, p.dtype, *room, p.bytes()), p.input as u64, p.output as u64)
        };
        self.add(&pieces.iter().zip(&rooms).map(sent).collect::<Vec<_>>())
    }

    /// As `all_reduce`, in the order of the group: every member adds a slice, and all get the slices of all.
    pub fn add_slices(&mut self, pieces: &[Piece]) -> Result<(), CudaError> {
        let (me, n) = (self.me, self.n);
        let slice = |p: &Piece, member: usize| {
            let ((start, elements), size) = (slice_of(member, n, p), p.dtype.bytes());
            ((start * size) as u64, elements * size)
        };
        let bytes: Vec<usize> = pieces.iter().map(|p| slice(p, me).1).collect();
        let rooms = self.room(&bytes.iter().map(|b| b * n).collect::<Vec<_>>())?;
        self.swap(&rooms, &bytes, |p, to| {
            let (start, bytes) = slice(&pieces[p], to);
            Ask::Send { input: pieces[p].input as u64 + start, bytes, to }
        })?;
        let sent = |(p, room): (&Piece, &Address)| {
            let (start, bytes) = slice(p, me);
            (flat(bytes / p.dtype.bytes(), p.dtype, *room, bytes), p.input as u64 + start, p.output as u64 + start)
        };
        self.add(&pieces.iter().zip(&rooms).map(sent).collect::<Vec<_>>())?;
        let mut asks = Vec::new();
        for (other, p) in self.others().flat_map(|other| pieces.iter().map(move |p| (other, p))) {
            let ((mine, bytes), (theirs, theirs_bytes)) = (slice(p, me), slice(p, other));
            let (send, receive) = (p.output as u64 + mine, p.output as u64 + theirs);
            asks.extend((bytes > 0).then_some(Ask::Send { input: send, bytes, to: other }));
            asks.extend((theirs_bytes > 0).then_some(Ask::Receive {
                output: receive,
                bytes: theirs_bytes,
                from: other,
            }));
        }
        self.ask(&asks)
    }

    /// As `reduce_scatter`, in the order of the group.
    pub fn add_parts(&mut self, pieces: &[Piece]) -> Result<(), CudaError> {
        let (me, n) = (self.me, self.n);
        // Of every piece room for all parts twice: those of this rank, where they do not lie in one, and those that are sent.
        let twice = pieces.iter().flat_map(|p| [if in_one(p) { 0 } else { p.bytes() * n }, p.bytes() * n]);
        let rooms = self.room(&twice.collect::<Vec<_>>())?;
        let mut cut = Vec::new();
        for (p, rooms) in pieces.iter().zip(rooms.as_chunks::<2>().0).filter(|(p, _)| !in_one(p)) {
            let Piece { rows, elements, order, dtype, .. } = *p;
            cut.push((
                Sent { rows, elements, parts: rooms[0], stride: p.bytes() as u64, order, dtype },
                p.input as u64,
            ));
        }
        // SAFETY: scratch has room for all parts, the input is the whole.
        unsafe { collectives::parts(self.queue.on(), n, true, &cut)? };
        let bytes: Vec<usize> = pieces.iter().map(Piece::bytes).collect();
        let part = |p: usize, member: usize| {
            let first = if in_one(&pieces[p]) { pieces[p].input as u64 } else { rooms[2 * p] };
            first + (member * bytes[p]) as u64
        };
        let others: Vec<Address> = rooms.as_chunks::<2>().0.iter().map(|rooms| rooms[1]).collect();
        self.swap(&others, &bytes, |p, to| Ask::Send { input: part(p, to), bytes: bytes[p], to })?;
        let sent = |(i, p): (usize, &Piece)| {
            (flat(p.rows * p.elements, p.dtype, others[i], bytes[i]), part(i, me), p.output as u64)
        };
        self.add(&pieces.iter().enumerate().map(sent).collect::<Vec<_>>())
    }

    fn add(&self, tensors: &[(Sent, Address, Address)]) -> Result<(), CudaError> {
        // SAFETY: scratch has room for what all have sent; who enqueues vouches for the pieces.
        unsafe { add_sent(self.queue.on(), self.me, self.n, tensors) }
    }
}
