//! Ahead: optimizer state that comes from the memory of the host while the last backward pass of a step still runs.
//!
//! As that pass goes on, memory of activations becomes free that nothing needs before the next step. So where state is offloaded, the last
//! work of a step and its update become one segment, and the first copies from the host move up into the backward pass: each to the end of the
//! first layer at which there is room for what it brings. The arena does not grow for it; updates still begin when the norm of all gradients is
//! known, and no bit depends on it.
//!
//! This works on a program that is placed: where there is room at which moment is a matter of addresses.

use crate::room::lowest;
use lockstep_ir::graph::Phase;
use lockstep_ir::program::{BufferId, Instr, Life, Lifetime, Segment, Slot, StepProgram, Stream};
use lockstep_ir::{DeviceProfile, FusedGroup, Op};

/// The program with its first copies from the host beside the last backward pass; as it is where it has none, or no room for them.
pub(crate) fn ahead(program: StepProgram, device: &DeviceProfile) -> StepProgram {
    let Some(end) = StepEnd::of(&program, device) else { return program };
    let mut places = end.places();
    // Fewer, where these leave too little room for the rest of the update.
    while !places.is_empty() {
        if let Some(changed) = end.with(&places) {
            return changed;
        }
        places.truncate(places.len() * 3 / 4);
    }
    program
}

/// Bytes of the arena that are in use between two instructions, the last included.
#[derive(Clone, Copy)]
struct Block {
    start: u64,
    end: u64,
    first: usize,
    last: usize,
}

/// Where a copy from the host goes that comes early.
#[derive(Clone, Copy)]
struct EarlyCopy {
    /// The instruction before which it starts.
    before: usize,
    buffer: BufferId,
    /// Where in the arena.
    address: u64,
}

/// The end of every training step of a program: its last work on micro-batches, and the update.
struct StepEnd<'a> {
    program: &'a StepProgram,
    device: &'a DeviceProfile,
    update: usize,
    /// The runs of the last work, of every entry that ends with the update.
    last: Vec<Slot>,
    /// Instructions of the last work.
    works: usize,
    /// Both as one segment.
    whole: Segment,
    /// The region that the update's temporaries overlay.
    overlay: usize,
}

impl<'a> StepEnd<'a> {
    fn of(program: &'a StepProgram, device: &'a DeviceProfile) -> Option<Self> {
        let fetches = |s: &Segment| s.instrs.iter().any(|i| i.op == Op::Fetch && i.phase == Phase::Update);
        let update = program.segments.iter().position(fetches)?;
        let ends_so = program.entries.iter().filter(|e| e.schedule.last().is_some_and(|s| s.segment == update));
        let last: Option<Vec<Slot>> = ends_so.map(|e| e.schedule.iter().rev().nth(1).copied()).collect();
        let last = last?;
        let work = &program.segments[last.first()?.segment];
        // What is looked at between the two, of a step of one micro-batch, keeps them apart.
        let plain = work.instrs.iter().all(|i| matches!(i.phase, Phase::InputGrad | Phase::WeightGrad | Phase::Reduce));
        let same = last.iter().all(|slot| slot.segment == last[0].segment);
        let overlay = program.regions.iter().position(|r| r.lifetime == Lifetime::Overlay)?;
        let whole = together(work, &program.segments[update]);
        (plain && same).then_some(Self { program, device, update, last, works: work.instrs.len(), whole, overlay })
    }

    fn lifetime(&self, b: BufferId) -> Lifetime {
        self.program.lifetime(b)
    }

    fn size(&self, b: BufferId) -> u64 {
        self.device.align(self.program.buffers[b.0].bytes)
    }

    /// What backward has in the memory that the overlay covers: what is saved, until it is read for the last time, and temporaries.
    fn blocks(&self, segment: &Segment) -> Vec<Block> {
        let under = |b: BufferId| matches!(self.lifetime(b), Lifetime::Saved(_) | Lifetime::Frame);
        let block = |life: &Life, slot: &Slot| {
            let start = self.program.address(life.buffer, slot);
            let saved = matches!(self.lifetime(life.buffer), Lifetime::Saved(_));
            let first = if saved { 0 } else { life.first };
            Block { start, end: start + self.size(life.buffer), first, last: life.last }
        };
        let lives = segment.lives(under);
        self.last.iter().flat_map(|slot| lives.iter().map(move |life| block(life, slot))).collect()
    }

    /// The first copies from the host, each at the end of the first layer after which there is room for it.
    fn places(&self) -> Vec<EarlyCopy> {
        let whole = &self.whole;
        let boundary = |at: &usize| {
            let between = *at == 0 || whole.instrs[at - 1].layer != whole.instrs[*at].layer;
            between && (*at == 0 || whole.group_of(*at).is_none_or(|g| g.instrs.start == *at))
        };
        let mut boundaries = (0..self.works).filter(boundary).chain([self.works]);
        let blocks = self.blocks(whole);
        let (begin, end) = (self.program.regions[self.overlay].offset, self.program.arena_bytes);
        let mut places: Vec<EarlyCopy> = Vec::new();
        let Some(mut before) = boundaries.next() else { return places };
        let taken = |places: &[EarlyCopy], before: usize| {
            let busy = blocks.iter().filter(|b| b.last >= before).map(|b| (b.start - begin, b.end - begin));
            let here = places.iter().map(|p| (p.address - begin, p.address - begin + self.size(p.buffer)));
            busy.chain(here).collect::<Vec<_>>()
        };
        let mut busy = taken(&places, before);
        let copies = whole.instrs[self.works..].iter().filter(|i| i.op == Op::Fetch);
        for buffer in copies.filter_map(|i| i.outputs.first()?.as_ref()).map(|arg| arg.buffer) {
            let size = self.size(buffer);
            let address = loop {
                let at = begin + lowest(&mut busy, size);
                if at + size <= end {
                    break at;
                }
                let Some(next) = boundaries.next() else { return places };
                before = next;
                busy = taken(&places, before);
            };
            busy.push((address - begin, address - begin + size));
            places.push(EarlyCopy { before, buffer, address });
        }
        places
    }

    /// The program with its first copies at their places, if there is room for the rest of the update beside them.
    fn with(&self, places: &[EarlyCopy]) -> Option<StepProgram> {
        let whole = moved(&self.whole, self.works, places);
        let mut blocks = self.blocks(&whole);
        let overlay = &self.program.regions[self.overlay];
        let mut lives = whole.lives(|b| self.lifetime(b) == Lifetime::Overlay);
        lives.sort_by_key(|l| (std::cmp::Reverse(self.size(l.buffer)), l.first, l.buffer));
        let mut program = self.program.clone();
        let mut put = |life: &Life, address: u64, blocks: &mut Vec<Block>| {
            program.buffers[life.buffer.0].offset = address - overlay.offset;
            let end = address + self.size(life.buffer);
            blocks.push(Block { start: address, end, first: life.first, last: life.last });
        };
        let early = |life: &Life| places.iter().find(|p| p.buffer == life.buffer);
        for (life, place) in lives.iter().filter_map(|life| Some((life, early(life)?))) {
            put(life, place.address, &mut blocks);
        }
        for life in lives.iter().filter(|life| early(life).is_none()) {
            let beside = blocks.iter().filter(|b| b.first <= life.last && life.first <= b.last);
            let mut beside: Vec<_> = beside.map(|b| (b.start - overlay.offset, b.end - overlay.offset)).collect();
            let address = overlay.offset + lowest(&mut beside, self.size(life.buffer));
            if address + self.size(life.buffer) > self.program.arena_bytes {
                return None;
            }
            put(life, address, &mut blocks);
        }
        program.regions[self.overlay].slot_bytes = program.arena_bytes - overlay.offset;
        program.segments[self.update] = whole;
        for entry in &mut program.entries {
            if entry.schedule.last().is_some_and(|s| s.segment == self.update) {
                entry.schedule.pop();
                entry.schedule.iter_mut().rev().take(1).for_each(|slot| slot.segment = self.update);
            }
        }
        Some(program)
    }
}

/// The last work of a step and its update as one segment. The first kernel of the update waits for all that the work has on other streams.
fn together(work: &Segment, update: &Segment) -> Segment {
    let works = work.instrs.len();
    let mut instrs = work.instrs.clone();
    instrs.extend(update.instrs.iter().cloned().map(|mut instr| {
        instr.waits.iter_mut().for_each(|w| *w += works);
        instr
    }));
    let on = |stream: Stream| work.instrs.iter().rposition(|i| i.stream == stream);
    let under_way: Vec<usize> = Stream::BESIDE.into_iter().filter_map(on).collect();
    if let Some(first) = instrs[works..].iter_mut().find(|i| i.stream == Stream::Compute) {
        first.waits.extend(under_way);
    }
    let shifted = |g: &FusedGroup| FusedGroup { instrs: g.instrs.start + works..g.instrs.end + works, ..g.clone() };
    let groups = work.groups.iter().cloned().chain(update.groups.iter().map(shifted)).collect();
    let name = if work.name.starts_with("weight_grad") {
        Segment::WEIGHT_GRAD_AND_UPDATE
    } else {
        Segment::BACKWARD_AND_UPDATE
    };
    Segment { name, chunk: work.chunk, instrs, groups }
}

/// The segment with its first copies from the host moved up to their places.
fn moved(whole: &Segment, works: usize, places: &[EarlyCopy]) -> Segment {
    let copies = (works..whole.instrs.len()).filter(|i| whole.instrs[*i].op == Op::Fetch);
    let mut early = copies.zip(places).map(|(copy, place)| (place.before, copy)).peekable();
    let mut order: Vec<usize> = Vec::with_capacity(whole.instrs.len());
    let last = early.clone().map(|(_, copy)| copy).last();
    for at in 0..whole.instrs.len() {
        while let Some((_, copy)) = early.next_if(|(before, _)| *before <= at) {
            order.push(copy);
        }
        let gone = at >= works && whole.instrs[at].op == Op::Fetch && last.is_some_and(|last| at <= last);
        order.extend((!gone).then_some(at));
    }
    let mut place = vec![0; whole.instrs.len()];
    order.iter().enumerate().for_each(|(to, from)| place[*from] = to);
    let instr = |from: &usize| {
        let mut instr: Instr = whole.instrs[*from].clone();
        instr.waits.iter_mut().for_each(|w| *w = place[*w]);
        instr
    };
    let group = |g: &FusedGroup| {
        let start = place[g.instrs.start];
        FusedGroup { instrs: start..start + g.instrs.len(), ..g.clone() }
    };
    let groups = whole.groups.iter().map(group).collect();
    Segment { name: whole.name, chunk: whole.chunk, instrs: order.iter().map(instr).collect(), groups }
}

#[cfg(test)]
mod tests;
