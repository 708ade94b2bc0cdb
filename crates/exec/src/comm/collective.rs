//! What a collective does, whatever carries its bytes: what the members agree on, and what each makes of the inputs of all.

use super::{Collective, CommError, Piece, ProgramPlace, sum};
use lockstep_ir::{Movement, units};

/// First element and number of elements of the slice that a member of a group of `members` adds: whole cache lines.
pub fn slice_of(member: usize, members: usize, piece: &Piece) -> (usize, usize) {
    let line = 64 / piece.dtype.bytes();
    let size = piece.elements.div_ceil(members).next_multiple_of(line);
    let start = piece.elements.min(member * size);
    (start, size.min(piece.elements - start))
}

/// What a rank wants of a collective.
#[derive(Clone, Copy)]
pub struct Wish<'a> {
    pub kind: Collective,
    pub pieces: &'a [Piece],
    pub place: ProgramPlace,
}

/// Whether the members of a group want the same.
pub fn agree<'a>(members: &[usize], wish: impl Fn(usize) -> Option<Wish<'a>>) -> Result<(), CommError> {
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

/// Makes the outputs of member `index` of `n` from the inputs of all. Of an `AllReduce` it is one slice of every piece, as first element and
/// number. `input` says where a member's bytes of piece `p` are that begin at `whole` of its input, and at `part` of what it has for
/// this member.
///
/// # Safety
/// Inputs and outputs are valid for what the pieces say, and nobody writes the inputs or reads the outputs meanwhile, except that
/// they may be one as [`act`](super::HostCommunicator::act) says.
pub unsafe fn combine(
    kind: Collective,
    (index, n): (usize, usize),
    pieces: &[Piece],
    slice: impl Fn(&Piece) -> (usize, usize),
    input: impl Fn(usize, usize, usize, usize) -> *const u8,
) {
    for (p, piece) in pieces.iter().enumerate() {
        let (size, bytes) = (piece.dtype.bytes(), piece.bytes());
        let in_part = |row: usize, at: usize| (row * piece.elements + at) * size;
        let in_whole = |row: usize, at: usize| (row * n * piece.elements + at) * size;
        // SAFETY: inside the tensors, for which the caller vouches. What may be an input as well is read before it is written, and not
        // written where it is copied.
        unsafe {
            match kind.movement() {
                Movement::SumsWhole => {
                    let (start, len) = slice(piece);
                    let at = start * size;
                    sum::sum(piece.dtype, n, |member| input(member, p, at, 0), piece.output.wrapping_add(at), len);
                }
                Movement::SumsParts => {
                    for (row, (whole, part, len)) in in_rows(piece, n, index) {
                        let (whole, part) = (in_whole(row, whole), in_part(row, part));
                        let input = |member| input(member, p, whole, part);
                        sum::sum(piece.dtype, n, input, piece.output.wrapping_add(part), len);
                    }
                }
                Movement::Gathers => {
                    for member in others(index, n).chain([index]) {
                        for (row, (whole, part, len)) in in_rows(piece, n, member) {
                            let (whole, part) = (in_whole(row, whole), in_part(row, part));
                            copy(input(member, p, part, part), piece.output.wrapping_add(whole), len * size);
                        }
                    }
                }
                Movement::Copies(rule) => {
                    for member in others(index, n).chain([index]) {
                        let Some(part) = rule(n, member, index) else { continue };
                        let to = piece.output.wrapping_add(part.output * bytes);
                        copy(input(member, p, part.input * bytes, 0), to, bytes);
                    }
                }
            }
        }
    }
}

/// The other members, for each member from another on.
pub fn others(index: usize, n: usize) -> impl Iterator<Item = usize> {
    (1..n).map(move |i| (index + i) % n)
}

/// Where a member's part stands in every row (see [`Piece::spans`]).
pub fn in_rows(piece: &Piece, n: usize, member: usize) -> impl Iterator<Item = (usize, (usize, usize, usize))> {
    let spans = piece.spans(n, member).into_iter().filter(|(.., len)| *len > 0);
    (0..piece.rows).flat_map(move |row| spans.clone().map(move |span| (row, span)))
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
