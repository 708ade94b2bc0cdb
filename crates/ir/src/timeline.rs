//! Memory over time: the bytes of each class that are in use at every instruction.
//!
//! States and host buffers are in use throughout. A saved or temporary buffer is from the call that writes it to the last call
//! that reads it (see [`Segment::in_use`](crate::program::Segment::in_use) for collectives that overlap and what is done as one). The arena is
//! larger than the peak of this: buffers are aligned, the saved regions and the frame stand side by side even where not all of
//! both is in use, and temporary buffers that come and go leave holes in the frame.
//!
//! There are two timelines, and they must agree: this one from the lifetimes of buffers, the other from the
//! addresses that instructions used.

use crate::StepProgram;
use crate::program::{Arg, BufferId, Class, Instr, Life, Lifetime, Segment, Slot, Sum};
use crate::walk::{ByteRange, Distinct, Event, Walk};
use std::collections::{BTreeMap, HashMap};

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
    let mut points = Vec::new();
    each_planned(program, shown, |point| points.push(point));
    points
}

/// What a segment has in use, wherever it stands in a schedule.
struct InSegment {
    /// By instruction: bytes of temporaries.
    temporaries: Vec<[i64; Class::ALL.len()]>,
    /// From which to which instruction it uses saved buffers.
    saved: Vec<Life>,
}

impl InSegment {
    fn new(program: &StepProgram, segment: &Segment) -> Self {
        let temporary = |b: BufferId| matches!(program.lifetime(b), Lifetime::Frame | Lifetime::Overlay);
        let mut temporaries = vec![[0; Class::ALL.len()]; segment.instrs.len()];
        for life in segment.lives(temporary) {
            let buffer = &program.buffers[life.buffer.0];
            for bytes in &mut temporaries[life.first..=life.last] {
                bytes[buffer.class as usize] += buffer.bytes as i64;
            }
        }
        Self { temporaries, saved: segment.lives(|b| matches!(program.lifetime(b), Lifetime::Saved(_))) }
    }
}

/// Shows the points of a planned timeline one by one.
pub(crate) fn each_planned(program: &StepProgram, shown: &Distinct, mut visit: impl FnMut(Point)) {
    let segments: Vec<InSegment> = program.segments.iter().map(|s| InSegment::new(program, s)).collect();
    // By slot: the instruction before which a saved buffer begins or ends to count.
    let mut changes: Vec<Vec<(usize, BufferId, bool)>> = vec![Vec::new(); shown.schedule.len()];
    // By buffer and micro-batch: the last slot that uses it, and the instruction after that use.
    let mut last: HashMap<(BufferId, usize), (usize, usize)> = HashMap::new();
    for (s, slot) in shown.schedule.iter().enumerate() {
        for life in &segments[slot.segment].saved {
            if last.insert((life.buffer, slot.micro_batch), (s, life.last + 1)).is_none() {
                changes[s].push((life.first, life.buffer, true));
            }
        }
    }
    for ((buffer, _), (s, behind)) in last {
        changes[s].push((behind, buffer, false));
    }
    let mut live = always(program);
    for ((slot, &micro_batch), mut changes) in shown.schedule.iter().zip(&shown.micro_batches).zip(changes) {
        changes.sort_unstable();
        let mut changes = changes.into_iter().peekable();
        let mut change_up_to = |instr: usize, live: &mut [i64; Class::ALL.len()]| {
            while let Some((_, b, begins)) = changes.next_if(|(at, ..)| *at <= instr) {
                let buffer = &program.buffers[b.0];
                live[buffer.class as usize] += if begins { buffer.bytes as i64 } else { -(buffer.bytes as i64) };
            }
        };
        let temporaries = &segments[slot.segment].temporaries;
        for (instr, own) in temporaries.iter().enumerate() {
            change_up_to(instr, &mut live);
            let bytes = std::array::from_fn(|class| (live[class] + own[class]) as u64);
            visit(Point { slot: Slot { micro_batch, ..*slot }, instr, bytes });
        }
        change_up_to(temporaries.len(), &mut live);
    }
}

/// Bytes that count throughout.
fn always(program: &StepProgram) -> [i64; Class::ALL.len()] {
    let mut always = [0; Class::ALL.len()];
    for buffer in &program.buffers {
        let region = &program.regions[buffer.region];
        if matches!(region.lifetime, Lifetime::Run | Lifetime::MicroBatch) {
            always[buffer.class as usize] += (buffer.bytes * region.slots as u64) as i64;
        }
    }
    always
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
            let lifetime = program.lifetime(b);
            // What uses memory of the run within a step counts with whose memory it is.
            if matches!(lifetime, Lifetime::Run | Lifetime::Step | Lifetime::MicroBatch) || lifetime.is_in_host() {
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
    points: Vec<(Slot, usize)>,
    /// First and last point of each life, and whose it is.
    spans: BTreeMap<(u64, u64, u64), (usize, usize, BufferId)>,
}

impl<'a> Lives<'a> {
    fn new(program: &'a StepProgram) -> Self {
        Self { program, points: Vec::new(), spans: BTreeMap::new() }
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
        let mut live = always(self.program);
        let mut point = |((slot, instr), change): ((Slot, usize), [i64; Class::ALL.len()])| {
            live.iter_mut().zip(change).for_each(|(live, delta)| *live += delta);
            Point { slot, instr, bytes: live.map(|bytes| bytes as u64) }
        };
        self.points.into_iter().zip(change).map(&mut point).collect()
    }
}
