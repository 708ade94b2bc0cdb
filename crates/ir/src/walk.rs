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
    /// Behind the last byte.
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
        let whole = self.buffer(arg.buffer);
        match arg.part.is_empty() {
            true => whole,
            false => {
                let index = self.walk.here.index(arg.part, &self.walk.program.mesh);
                let start = whole.start + index as u64 * arg.ty.bytes();
                ByteRange { start, end: start + arg.ty.bytes() }
            }
        }
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
    /// higher by a constant. The first two periods stay. What a period reads was written by itself, by the period before it or
    /// before all of them; so if the first two are sound, every other is, and what follows the last finds what it would find
    /// behind the second, but for the numbers of micro-batches.
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
            // What began before the periods and ends behind them, and what is no micro-batch's.
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
        (periods > 2).then_some((start, period, shift, periods))
    })
}
