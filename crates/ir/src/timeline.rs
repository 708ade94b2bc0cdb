//! Memory over time: the bytes of each class that are in use at every instruction.
//!
//! States and host buffers are in use throughout. A saved or temporary buffer is from the call that writes it to the last call
//! that reads it (see [`Segment::in_use`](crate::program::Segment::in_use) for collectives that overlap and what is done as one). The arena is
//! larger than the peak of this: buffers are aligned, the saved regions and the frame stand side by side even where not all of
//! both is in use, and temporary buffers that come and go leave holes in the frame.

use crate::StepProgram;
use crate::program::{Arg, BufferId, Class, Instr, Lifetime, Slot, Sum};
use crate::walk::{ByteRange, Distinct, Event, Walk};
use std::collections::BTreeMap;

/// Bytes in use while one instruction runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// The run of a segment that it belongs to.
    pub slot: Slot,
    /// Its index in the segment.
    pub instr: usize,
    /// Bytes by class, in the order of [`Class::ALL`].
    pub bytes: [u64; Class::ALL.len()],
}

impl Point {
    /// Bytes of all classes.
    pub fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }
}

/// The timeline of a schedule as planned: from the lifetimes that its buffers were given.
pub fn planned(program: &StepProgram, shown: &Distinct) -> Vec<Point> {
    let mut lives = Lives::new(program);
    for (s, slot) in shown.schedule.iter().enumerate() {
        for event in Walk::first(program).slot(*slot) {
            for b in event.instr.buffers() {
                let copy = match program.lifetime(b) {
                    Lifetime::Run | Lifetime::MicroBatch => continue,
                    Lifetime::Saved(_) => slot.micro_batch,
                    // Frames of different slots are different lives of the same bytes.
                    Lifetime::Frame | Lifetime::Overlay => s,
                };
                lives.extend((b.0 as u64, b.0 as u64, copy as u64), b, &event);
            }
            lives.points.push((Slot { micro_batch: shown.micro_batches[s], ..*slot }, event.index));
        }
    }
    lives.finish()
}

/// The timeline of a run, from the instructions that an executor says it ran, in its order: from the addresses that they wrote
/// and read, whatever the plan thought of their lifetimes.
pub fn observed(program: &StepProgram, ran: impl IntoIterator<Item = (Slot, usize)>) -> Vec<Point> {
    let mut lives = Lives::new(program);
    // How often each range has been written afresh.
    let mut generation: BTreeMap<ByteRange, u64> = BTreeMap::new();
    for (slot, index) in ran {
        let event = Walk::first(program).event(slot, index);
        for b in fresh(event.instr).chain(event.instr.workspace) {
            *generation.entry(event.buffer(b)).or_default() += 1;
        }
        for b in event.instr.buffers() {
            if matches!(program.lifetime(b), Lifetime::Run | Lifetime::MicroBatch) {
                continue;
            }
            let range = event.buffer(b);
            let writes = generation.get(&range).copied().unwrap_or(0);
            lives.extend((range.start, range.end, writes), b, &event);
        }
        lives.points.push((slot, index));
    }
    lives.finish()
}

/// Buffers that a call writes without looking at what they hold.
fn fresh(instr: &Instr) -> impl Iterator<Item = BufferId> {
    let reads = |arg: &&Arg| arg.sum != Sum::No || instr.inputs.iter().any(|i| i.buffer == arg.buffer);
    instr.outputs.iter().flatten().filter(move |arg| !reads(arg)).map(|a| a.buffer)
}

/// Lives of buffers over a list of instructions.
struct Lives<'a> {
    program: &'a StepProgram,
    always: [u64; Class::ALL.len()],
    points: Vec<(Slot, usize)>,
    /// First and last point of each life, and whose it is.
    spans: BTreeMap<(u64, u64, u64), (usize, usize, BufferId)>,
}

impl<'a> Lives<'a> {
    fn new(program: &'a StepProgram) -> Self {
        let mut always = [0; Class::ALL.len()];
        for buffer in &program.buffers {
            let region = &program.regions[buffer.region];
            if matches!(region.lifetime, Lifetime::Run | Lifetime::MicroBatch) {
                always[buffer.class as usize] += buffer.bytes * region.slots as u64;
            }
        }
        Self { program, always, points: Vec::new(), spans: BTreeMap::new() }
    }

    /// The life called `key` has the instructions during which the operands of this one, which runs now, are in use.
    fn extend(&mut self, key: (u64, u64, u64), b: BufferId, event: &Event) {
        let (from, until) = event.segment().in_use(event.index).into_inner();
        let point = |instr: usize| self.points.len() + instr - event.index;
        let (from, until) = (point(from), point(until));
        self.spans.entry(key).and_modify(|span| span.1 = span.1.max(until)).or_insert((from, until, b));
    }

    fn finish(self) -> Vec<Point> {
        let mut change = vec![[0i64; Class::ALL.len()]; self.points.len() + 1];
        for (first, last, b) in self.spans.into_values() {
            let buffer = &self.program.buffers[b.0];
            change[first][buffer.class as usize] += buffer.bytes as i64;
            change[(last + 1).min(self.points.len())][buffer.class as usize] -= buffer.bytes as i64;
        }
        let mut live = self.always.map(|bytes| bytes as i64);
        let mut point = |((slot, instr), change): ((Slot, usize), [i64; Class::ALL.len()])| {
            live.iter_mut().zip(change).for_each(|(live, delta)| *live += delta);
            Point { slot, instr, bytes: live.map(|bytes| bytes as u64) }
        };
        self.points.into_iter().zip(change).map(&mut point).collect()
    }
}
