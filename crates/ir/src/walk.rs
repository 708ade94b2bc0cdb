//! The walk over an entry: slot by slot, instruction by instruction, with the bytes of the arena that each touches.
//!
//! Verifier, role check and timelines read it; none of them knows how a slot chooses its copies of a region.

use crate::mesh::{Coordinates, MeshAxis};
use crate::program::{Arg, BufferId, Entry, Instr, Segment, Slot, StepProgram};
use std::collections::BTreeSet;

/// A range of bytes of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteRange {
    /// The first byte.
    pub start: u64,
    /// After the last byte.
    pub end: u64,
}

impl ByteRange {
    /// Whether they share a byte.
    pub fn overlaps(&self, other: &ByteRange) -> bool {
        self.start < other.end && other.start < self.end
    }
}

/// A program as one of its ranks runs it.
#[derive(Clone, Copy)]
pub struct Walk<'a> {
    /// The program.
    pub program: &'a StepProgram,
    /// Where the rank stands.
    pub here: Coordinates,
}

/// An instruction at a slot of a schedule. Prints its rank, segment, micro-batch, op and layer.
#[derive(Clone, Copy)]
pub struct Event<'a> {
    /// Who runs it.
    pub walk: Walk<'a>,
    /// When: the run of a segment.
    pub slot: Slot,
    /// Its index in the segment.
    pub index: usize,
    /// The instruction.
    pub instr: &'a Instr,
}

impl<'a> Walk<'a> {
    /// As the first rank of the program's stage runs it.
    pub fn first(program: &'a StepProgram) -> Self {
        Self { program, here: Coordinates::default().with(MeshAxis::Pp, program.stage) }
    }

    /// The instructions of a schedule, in order.
    pub fn events(self, schedule: &'a [Slot]) -> impl Iterator<Item = Event<'a>> {
        schedule.iter().flat_map(move |slot| self.slot(*slot))
    }

    /// The instructions of one slot, in order.
    pub fn slot(self, slot: Slot) -> impl Iterator<Item = Event<'a>> {
        let instrs = self.program.segments[slot.segment].instrs.iter().enumerate();
        instrs.map(move |(index, instr)| Event { walk: self, slot, index, instr })
    }

    /// Where an operand is in its buffer: all of it, or the rank's part.
    pub fn part(self, arg: &Arg, whole: ByteRange) -> ByteRange {
        if arg.part.is_empty() {
            return whole;
        }
        let index = self.here.index(arg.part, &self.program.mesh);
        let start = whole.start + index as u64 * arg.ty.bytes();
        ByteRange { start, end: start + arg.ty.bytes() }
    }

    /// An instruction of a slot.
    pub fn event(self, slot: Slot, index: usize) -> Event<'a> {
        Event { walk: self, slot, index, instr: &self.program.segments[slot.segment].instrs[index] }
    }
}

impl<'a> Event<'a> {
    /// Its segment.
    pub fn segment(&self) -> &'a Segment {
        &self.walk.program.segments[self.slot.segment]
    }

    /// Where a buffer is.
    pub fn buffer(&self, buffer: BufferId) -> ByteRange {
        let start = self.walk.program.address(buffer, &self.slot);
        ByteRange { start, end: start + self.walk.program.buffers[buffer.0].bytes }
    }

    /// Where an operand is: its buffer, or the rank's part of it.
    pub fn operand(&self, arg: &Arg) -> ByteRange {
        self.walk.part(arg, self.buffer(arg.buffer))
    }
}

impl std::fmt::Display for Event<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Walk { program, here } = self.walk;
        let (segment, m, op) = (self.segment(), self.slot.micro_batch, self.instr.op.name());
        if program.mesh.ranks() > 1 {
            write!(f, "rank {} (stage {}), ", program.mesh.rank(here), program.stage)?;
        }
        write!(f, "{segment} of micro-batch {m}, instruction {} ({op}", self.index)?;
        if let Some(layer) = self.instr.layer {
            write!(f, ", layer {layer}")?;
        }
        f.write_str(")")
    }
}

/// A schedule without what repeats: readers of it see all there is to see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Distinct {
    /// The slots that are left, their micro-batches counted as if there were no others.
    pub schedule: Vec<Slot>,
    /// The micro-batch of each in the whole schedule.
    pub micro_batches: Vec<usize>,
    /// Micro-batches that were left out.
    pub left_out: usize,
}

impl Distinct {
    /// All of a schedule.
    pub fn whole(entry: &Entry) -> Self {
        let micro_batches = entry.schedule.iter().map(|s| s.micro_batch).collect();
        Self { schedule: entry.schedule.clone(), micro_batches, left_out: 0 }
    }

    /// Leaves out what repeats literally: slots with the same segments and copies of the saved regions, on micro-batches that are
    /// higher by a constant, as many of every chunk. The first two periods stay. What a period reads was written by itself, by the period before it or
    /// before all of them; so if the first two are sound, every other is, and what follows the last finds what it would find
    /// after the second, but for the numbers of micro-batches.
    pub fn of(program: &StepProgram, entry: &Entry) -> Self {
        Self::cut(program, &entry.schedule).unwrap_or_else(|| Self::whole(entry))
    }

    fn cut(program: &StepProgram, slots: &[Slot]) -> Option<Self> {
        let (start, period, shift, periods) = repetition(slots)?;
        let (from, to) = (start + 2 * period, start + periods * period);
        let left_out = (periods - 2) * shift;
        let of = |slot: &Slot| (program.segments[slot.segment].chunk, slot.micro_batch);
        let all = |slots: &[Slot]| slots.iter().map(of).collect::<BTreeSet<_>>();
        let (before, dropped) = (all(&slots[..from]), all(&slots[from..to]));
        let mut schedule = slots[..from].to_vec();
        for slot in &slots[to..] {
            // What began before the periods and ends after them, and what is no micro-batch's.
            let stays = before.contains(&of(slot)) && !dropped.contains(&of(slot));
            let m = slot.micro_batch;
            schedule.push(Slot { micro_batch: if stays { m } else { m.checked_sub(left_out)? }, ..*slot });
        }
        let micro_batches = slots[..from].iter().chain(&slots[to..]).map(|s| s.micro_batch).collect();
        Some(Self { schedule, micro_batches, left_out })
    }
}

/// Three periods or more of a schedule that repeats itself around its middle: where they start, slots and micro-batches of one,
/// and how many there are.
fn repetition(slots: &[Slot]) -> Option<(usize, usize, usize, usize)> {
    let middle = slots.len() / 2;
    (middle + 1..slots.len()).find_map(|again| {
        let (period, shift) = (again - middle, slots[again].micro_batch.checked_sub(slots[middle].micro_batch)?);
        // The first micro-batch of a step begins sums where others add.
        let repeats = |i: usize| {
            let (Some(this), Some(next)) = (slots.get(i), slots.get(i + period)) else { return false };
            let later = Slot { micro_batch: this.micro_batch + shift, ..*this };
            this.micro_batch > 0 && shift > 0 && *next == later
        };
        let start = (0..=middle).rev().take_while(|i| repeats(*i)).last()?;
        let end = (middle..slots.len()).take_while(|i| repeats(*i)).last()? + 1;
        let periods = (end + period - start) / period;
        // A period has as many micro-batches of every chunk and kind of work.
        let count = |slots: &[Slot], segment: usize| slots.iter().filter(|s| s.segment == segment).count();
        let segments: BTreeSet<usize> = slots.iter().map(|s| s.segment).collect();
        let whole = |s: &usize| count(slots, *s) == 1 || count(&slots[start..start + period], *s) == shift;
        (periods > 2 && segments.iter().all(whole)).then_some((start, period, shift, periods))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mesh;
    use crate::program::Segment;

    /// A program of empty segments, those of chunk 1 after those of chunk 0: forward, backward, the last backward; then the update.
    fn program() -> StepProgram {
        let segment =
            |s: usize| Segment { name: "s", chunk: if s == 6 { 0 } else { s / 3 }, instrs: vec![], groups: vec![] };
        StepProgram {
            mesh: Mesh::ONE,
            stage: 0,
            arena_bytes: 0,
            host_bytes: 0,
            regions: vec![],
            buffers: vec![],
            values: vec![],
            tensors: vec![],
            segments: (0..7).map(segment).collect(),
            entries: vec![],
        }
    }

    /// (segment, micro-batch, copy) of every slot.
    fn check(slots: &[(usize, usize, usize)], left: &[(usize, usize)], left_out: usize) {
        let slot = |&(segment, micro_batch, copy): &_| Slot { saved: [copy, 0, 0], ..Slot::new(segment, micro_batch) };
        let entry = Entry { name: "train".into(), schedule: slots.iter().map(slot).collect() };
        let distinct = Distinct::of(&program(), &entry);
        let found: Vec<_> = distinct.schedule.iter().map(|s| (s.segment, s.micro_batch)).collect();
        assert_eq!((found.as_slice(), distinct.left_out), (left, left_out));
        assert_eq!(distinct.micro_batches.len(), left.len());
    }

    #[test]
    fn of_what_repeats_two_periods_stay() {
        let mut slots: Vec<_> = (0..9).flat_map(|m| [(0, m, 0), (1, m, 0)]).collect();
        slots.extend([(0, 9, 0), (2, 9, 0), (6, 0, 0)]);
        let left = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (2, 3), (6, 0)];
        check(&slots, &left, 6);
    }

    #[test]
    fn copies_that_come_round_are_part_of_a_period() {
        // Two in flight: the period has two micro-batches.
        let mut slots = vec![(0, 0, 0)];
        slots.extend((1..10).flat_map(|m| [(0, m, m % 2), (1, m - 1, (m - 1) % 2)]));
        slots.extend([(2, 9, 1), (6, 0, 0)]);
        let left = [0, 1, 0, 2, 1, 3, 2, 4, 3, 5, 4];
        let entry: Vec<_> = slots.iter().map(|s| s.1).collect();
        assert_eq!(entry.len(), 21);
        let kinds = [0, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1];
        let mut left: Vec<(usize, usize)> = kinds.into_iter().zip(left).collect();
        left.extend([(2, 5), (6, 0)]);
        check(&slots, &left, 4);
    }

    #[test]
    fn a_slot_that_differs_in_its_copy_ends_the_repetition() {
        let mut slots: Vec<_> = (0..10).flat_map(|m| [(0, m, 0), (1, m, 0)]).collect();
        slots[10].2 = 1;
        let whole: Vec<_> = slots.iter().map(|s| (s.0, s.1)).collect();
        check(&slots, &whole, 0);
    }

    #[test]
    fn what_repeats_of_one_chunk_alone_stays() {
        // Eight micro-batches of chunk 0, then of chunk 1, one after the other.
        let chunk = |c: usize| (0..8).flat_map(move |m| [(3 * c, m, 0), (3 * c + 1, m, 0)]);
        let slots: Vec<_> = chunk(0).chain(chunk(1)).collect();
        let whole: Vec<_> = slots.iter().map(|s| (s.0, s.1)).collect();
        check(&slots, &whole, 0);
    }
}
