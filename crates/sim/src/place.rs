//! From programs to what can be priced fast: instructions that ask the same are one demand, layers that ask the same one run.

use crate::events::{self, Channel, Outcome, Point, Repetition, SegmentTime};
use crate::price::{AtPeak, Site};
use crate::work::{Demand, Kernel, meets};
use crate::{Framework, Hardware, MeasuredTimes, SimError, Terms};
use lockstep_ir::program::{Lifetime, Segment, StepProgram, Stream};
use lockstep_ir::{Collective, Mesh, TypeError};
use std::collections::{BTreeMap, BTreeSet};

/// What an instruction does to the streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// A kernel.
    Kernel,
    /// A kernel that is part of the one before it, or a view.
    Part,
    /// A collective that the next instruction waits for.
    Blocking,
    /// A collective that gathers, and overlaps.
    Gather,
    /// A collective that sums, and overlaps.
    Reduce,
    /// An all-to-all, which overlaps with kernels and with other collectives.
    Exchange,
    Receive(usize),
    Send(usize),
    Meet,
}

const BESIDE: usize = Stream::BESIDE.len();

/// An instruction of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Step {
    /// Index of its demand.
    demand: usize,
    kind: Kind,
    /// By stream beside kernels: how far back among the collectives that were started there is the one that it waits for: 1 is the last; 0
    /// waits for none.
    waits: [usize; BESIDE],
}

/// Instructions of one layer that follow each other: what the host launches as one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Run {
    steps: Vec<Step>,
}

/// A segment of a role as indices of runs.
#[derive(Clone, Debug)]
struct Code {
    runs: Vec<usize>,
    name: &'static str,
    chunk: usize,
}

/// What one role, a pipeline stage, runs.
#[derive(Clone, Debug)]
pub(crate) struct RoleWork {
    pub stage: usize,
    demands: Vec<Demand>,
    /// Whose each demand is.
    kernels: Vec<Kernel>,
    runs: Vec<Run>,
    code: Vec<Code>,
    pub slots: Vec<usize>,
    pub micro_batches: Vec<usize>,
    pub memory_bytes: u64,
}

/// A message stream: who sends it, and what a message asks of the sender.
#[derive(Clone, Debug)]
struct Wire {
    from: usize,
    demand: usize,
    copies: usize,
}

/// The work of all roles of a run in one entry, ready to be placed on hardware. Its size grows with layers and chunks, not with
/// ranks.
#[derive(Clone, Debug)]
pub struct Workload {
    mesh: Mesh,
    pub(crate) roles: Vec<RoleWork>,
    wires: Vec<Wire>,
    /// What repeats in the slots of every role; none where something does not.
    repetitions: Vec<Repetition>,
}

/// Collects equal things once.
struct Interned<T: Ord + Clone> {
    all: Vec<T>,
    known: BTreeMap<T, usize>,
}

impl<T: Ord + Clone> Interned<T> {
    fn new() -> Self {
        Self { all: Vec::new(), known: BTreeMap::new() }
    }

    fn index(&mut self, value: T) -> usize {
        *self.known.entry(value).or_insert_with_key(|value| {
            self.all.push(value.clone());
            self.all.len() - 1
        })
    }
}

impl Workload {
    /// The work of an entry of the programs of all stages, as a framework runs it.
    pub fn new(programs: &[StepProgram], entry: &str, framework: &Framework) -> Result<Self, SimError> {
        let Some(first) = programs.first() else { return Err(SimError::NoEntry(entry.to_owned())) };
        let mut wires: BTreeMap<(usize, usize, u32), usize> = BTreeMap::new();
        let mut all: Vec<Wire> = Vec::new();
        let mut roles = Vec::new();
        for program in programs {
            let schedule = program.entry(entry).ok_or_else(|| SimError::NoEntry(entry.to_owned()))?;
            let mut wire = |from: usize, to: usize, tag: u32| {
                *wires.entry((from, to, tag)).or_insert_with(|| {
                    all.push(Wire { from, demand: 0, copies: 1 });
                    all.len() - 1
                })
            };
            let mut role = RoleWork::new(program, framework, &mut wire)?;
            role.slots = schedule.schedule.iter().map(|slot| slot.segment).collect();
            role.micro_batches = schedule.schedule.iter().map(|slot| slot.micro_batch).collect();
            for (i, demand) in role.demands.iter().enumerate() {
                if let Demand::Send { stage, tag, copies, .. } = demand {
                    let wire = &mut all[wires[&(program.stage, *stage, *tag)]];
                    (wire.demand, wire.copies) = (i, *copies);
                }
            }
            roles.push(role);
        }
        let repetition = |role: &RoleWork| Repetition::find(&role.slots, &role.micro_batches);
        let repetitions = roles.iter().map(repetition).collect::<Option<_>>().unwrap_or_default();
        Ok(Self { mesh: first.mesh, roles, wires: all, repetitions })
    }

    /// Ranks of all roles.
    pub fn ranks(&self) -> usize {
        self.mesh.ranks()
    }

    /// The work on some hardware.
    pub fn on(&self, hardware: &Hardware, framework: &Framework) -> Placed<'_> {
        let at_peak = |role: &RoleWork| {
            let site = Site { hardware, mesh: &self.mesh, stage: role.stage, fp8: framework.fp8 };
            role.demands.iter().map(|demand| AtPeak::new(demand, site)).collect()
        };
        let crowded = self.roles.len() > 1 && self.ranks() > hardware.cluster.gpus_per_node;
        Placed { work: self, framework: framework.clone(), roles: self.roles.iter().map(at_peak).collect(), crowded }
    }

    /// The work on a machine that was measured, and what had to be estimated from other ops because it was not.
    pub fn measured(&self, on: &MeasuredTimes<'_>, framework: &Framework) -> (Placed<'_>, BTreeSet<String>) {
        let mut unmeasured = BTreeSet::new();
        let mut of = |(demand, kernel): (&Demand, &Kernel)| {
            let seconds = on.setting.seconds(*kernel, demand, &self.mesh, &mut unmeasured);
            AtPeak::Measured { seconds: seconds * on.factor }
        };
        let mut role = |role: &RoleWork| role.demands.iter().zip(&role.kernels).map(&mut of).collect();
        let roles = self.roles.iter().map(&mut role).collect();
        (Placed { work: self, framework: framework.clone(), roles, crowded: false }, unmeasured)
    }
}

impl RoleWork {
    fn new(
        program: &StepProgram,
        framework: &Framework,
        wire: &mut dyn FnMut(usize, usize, u32) -> usize,
    ) -> Result<Self, TypeError> {
        let (mut demands, mut runs, mut code) = (Interned::new(), Interned::new(), Vec::new());
        let here = program.stage;
        for segment in &program.segments {
            let mut list = Vec::new();
            let mut run = Run { steps: Vec::new() };
            let (mut started, mut layer): ([Vec<usize>; BESIDE], Option<usize>) = Default::default();
            for (i, instr) in segment.instrs.iter().enumerate() {
                if instr.layer != layer && !run.steps.is_empty() {
                    list.push(runs.index(std::mem::replace(&mut run, Run { steps: Vec::new() })));
                }
                layer = instr.layer;
                let demand = Demand::of(program, segment, i, framework.fuses_groups)?;
                let mut waits = [0; BESIDE];
                for (at, last) in instr.waits.iter().filter_map(|w| Some((segment.instrs[*w].stream.beside()?, w))) {
                    // Those that stand before the one that is waited for have ended with it.
                    waits[at] = started[at].len() - started[at].partition_point(|s| s <= last) + 1;
                }
                let kind = match &demand {
                    Demand::Receive { stage, tag } => Kind::Receive(wire(*stage, here, *tag)),
                    Demand::Send { stage, tag, .. } => Kind::Send(wire(here, *stage, *tag)),
                    demand if meets(demand) => Kind::Meet,
                    Demand::Collective { pattern, .. } => overlap(segment, i, *pattern),
                    Demand::Nothing => Kind::Part,
                    Demand::Matmul { .. }
                    | Demand::Attention { .. }
                    | Demand::Scores { .. }
                    | Demand::Elementwise { .. }
                    | Demand::Optimizer { .. } => {
                        let group = segment.group_of(i).filter(|_| framework.fuses_groups);
                        if group.is_some_and(|g| g.instrs.start < i) { Kind::Part } else { Kind::Kernel }
                    }
                };
                if let Some(at) = kind.stream().beside() {
                    started[at].push(i);
                }
                run.steps.push(Step { demand: demands.index((demand, Kernel::of(instr))), kind, waits });
            }
            if !run.steps.is_empty() {
                list.push(runs.index(run));
            }
            code.push(Code { runs: list, name: segment.name, chunk: segment.chunk });
        }
        let (slots, micro_batches) = (Vec::new(), Vec::new());
        let memory_bytes = memory(program);
        let (demands, kernels) = demands.all.into_iter().unzip();
        Ok(Self { stage: here, demands, kernels, runs: runs.all, code, slots, micro_batches, memory_bytes })
    }

    pub fn name(&self, segment: usize) -> (&'static str, usize) {
        (self.code[segment].name, self.code[segment].chunk)
    }
}

fn overlap(segment: &Segment, index: usize, pattern: Collective) -> Kind {
    match (segment.instrs[index].stream, pattern) {
        (Stream::Compute, _) => Kind::Blocking,
        (Stream::Communication, Collective::AllGather | Collective::Shift | Collective::AllToAll) => Kind::Gather,
        (Stream::Communication, Collective::AllReduce | Collective::ReduceScatter) => Kind::Reduce,
        (Stream::Exchange, _) => Kind::Exchange,
    }
}

impl Kind {
    /// Where it runs.
    fn stream(self) -> Stream {
        match self {
            Kind::Gather | Kind::Reduce => Stream::Communication,
            Kind::Exchange => Stream::Exchange,
            Kind::Kernel | Kind::Part | Kind::Blocking | Kind::Receive(_) | Kind::Send(_) | Kind::Meet => {
                Stream::Compute
            }
        }
    }
}

/// Seconds of a kernel with the gap behind it, which is below 0 where clocks around kernels were measured with them.
fn with_gap(seconds: f64, terms: &Terms) -> f64 {
    (seconds + terms.kernel_gap).max(0.25 * seconds)
}

/// The end of the last copy of a region that any schedule of a program uses: what it allocates.
fn memory(program: &StepProgram) -> u64 {
    let mut used: Vec<bool> = vec![false; program.regions.len()];
    let mut by_segment: Vec<Vec<usize>> = Vec::new();
    for segment in &program.segments {
        let mut regions: Vec<usize> =
            segment.instrs.iter().flat_map(|i| i.buffers()).map(|b| program.buffers[b.0].region).collect();
        regions.sort_unstable();
        regions.dedup();
        by_segment.push(regions);
    }
    let mut end = 0;
    for tensor in &program.tensors {
        used[program.buffers[tensor.buffer.0].region] = true;
    }
    for slot in program.entries.iter().flat_map(|entry| &entry.schedule) {
        for &r in &by_segment[slot.segment] {
            let region = &program.regions[r];
            used[r] = true;
            end = end.max(region.offset + (slot.copy(region.lifetime) as u64 + 1) * region.slot_bytes);
        }
    }
    // What the host writes and reads is there for every micro-batch.
    let whole = |lifetime: Lifetime| matches!(lifetime, Lifetime::Run | Lifetime::MicroBatch);
    let regions = program.regions.iter().zip(&used).filter(|(region, used)| **used && whole(region.lifetime));
    regions.map(|(region, _)| region.offset + region.bytes()).fold(end, u64::max)
}

/// A workload on some hardware: what is left to price are the constants.
#[derive(Clone, Debug)]
pub struct Placed<'a> {
    work: &'a Workload,
    framework: Framework,
    roles: Vec<Vec<AtPeak>>,
    /// Whether a pipeline goes over several nodes.
    crowded: bool,
}

/// What a segment's time is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Parts {
    /// Waiting for the host.
    pub host: f64,
    /// Collectives that kernels waited for.
    pub exposed: f64,
    /// What overlapping costs.
    pub overlap: f64,
}

/// When the instructions of a segment run, from its start.
pub(crate) struct Marks {
    /// Start, end, index of the instruction and of its demand, and the stream.
    pub all: Vec<(f64, f64, usize, usize, Stream)>,
}

/// The price list of a workload under some constants.
pub(crate) struct Priced {
    /// By role and demand.
    pub demands: Vec<Vec<f64>>,
    /// By role and segment.
    pub segments: Vec<Vec<SegmentTime>>,
    /// By role and segment.
    pub parts: Vec<Vec<Parts>>,
    pub channels: Vec<Channel>,
}

impl<'a> Placed<'a> {
    /// Seconds of a step under some constants, the host's time of a step included.
    pub fn price(&self, terms: &Terms) -> Result<f64, SimError> {
        let priced = self.priced(terms, None);
        let slots = self.slots();
        let Priced { segments, channels, .. } = &priced;
        Ok(events::run_repeating(&slots, segments, channels, &self.work.repetitions)?.total + terms.host_step)
    }

    /// By role: the names of its segments, and how long each takes where it waits for nobody, and the host for no other stages; 0 for
    /// those that the entry does not run.
    pub fn segments(&self, terms: &Terms) -> Vec<Vec<(&'static str, f64)>> {
        let priced = Placed { crowded: false, ..self.clone() }.priced(terms, None);
        let role = |(role, times): (&RoleWork, &Vec<SegmentTime>)| {
            role.code.iter().zip(times).map(|(code, time)| (code.name, time.seconds)).collect()
        };
        self.work.roles.iter().zip(&priced.segments).map(role).collect()
    }

    /// Runs every slot, and says when each ended.
    pub(crate) fn run(&self, priced: &Priced) -> Result<Outcome, SimError> {
        events::run(&self.slots(), &priced.segments, &priced.channels, true)
    }

    fn slots(&self) -> Vec<&'a [usize]> {
        self.work.roles.iter().map(|role| role.slots.as_slice()).collect()
    }

    pub(crate) fn work(&self) -> &'a Workload {
        self.work
    }

    pub(crate) fn demand(&self, role: usize, demand: usize) -> &'a Demand {
        &self.work.roles[role].demands[demand]
    }

    /// Prices everything; with `marks`, says by role and segment when instructions run.
    pub(crate) fn priced(&self, terms: &Terms, mut marks: Option<&mut Vec<Vec<Marks>>>) -> Priced {
        let demands: Vec<Vec<f64>> =
            self.roles.iter().map(|role| role.iter().map(|at_peak| at_peak.seconds(terms)).collect()).collect();
        let (mut segments, mut parts) = (Vec::new(), Vec::new());
        for (r, role) in self.work.roles.iter().enumerate() {
            let mut used = vec![false; role.code.len()];
            role.slots.iter().for_each(|segment| used[*segment] = true);
            let stretches: Vec<Stretch> =
                role.runs.iter().map(|run| self.stretch(r, run, &demands[r], terms)).collect();
            let (mut times, mut of) = (Vec::new(), Vec::new());
            let mut shown = Vec::new();
            for (code, used) in role.code.iter().zip(used) {
                let mut mark = marks.is_some().then(|| Marks { all: Vec::new() });
                let (time, part) = match used {
                    true => self.segment(role, code, &demands[r], &stretches, terms, mark.as_mut()),
                    false => Default::default(),
                };
                times.push(time);
                of.push(part);
                shown.extend(mark);
            }
            segments.push(times);
            parts.push(of);
            if let Some(marks) = &mut marks {
                marks.push(shown);
            }
        }
        let channel = |wire: &Wire| Channel { copies: wire.copies, seconds: demands[wire.from][wire.demand] };
        let channels = self.work.wires.iter().map(channel).collect();
        Priced { demands, segments, parts, channels }
    }

    /// Whether an overlapping collective overlaps in this framework.
    fn overlaps(&self, kind: Kind) -> bool {
        match kind {
            Kind::Gather | Kind::Exchange => self.framework.overlaps_gathers,
            Kind::Reduce => self.framework.overlaps_reductions,
            Kind::Kernel | Kind::Part | Kind::Blocking | Kind::Receive(_) | Kind::Send(_) | Kind::Meet => false,
        }
    }

    /// How much longer a run takes because the host launches it.
    fn stretch(&self, role: usize, run: &Run, demands: &[f64], terms: &Terms) -> Stretch {
        let (mut gpu, mut host, mut plain) = (0.0, 0.0, true);
        for step in &run.steps {
            match step.kind {
                Kind::Kernel => {
                    gpu += with_gap(demands[step.demand], terms);
                    host += terms.host_op;
                }
                Kind::Part => gpu += demands[step.demand],
                Kind::Blocking => {
                    gpu += demands[step.demand];
                    host += terms.host_collective;
                    // Beside messages between nodes, the host waits for all ranks of a collective.
                    if let AtPeak::Collective(collective) = &self.roles[role][step.demand] {
                        host += if self.crowded { terms.host_crowd * collective.crowd() } else { 0.0 };
                    }
                }
                Kind::Gather | Kind::Reduce | Kind::Exchange => {
                    plain = false;
                    host += terms.host_collective;
                }
                Kind::Receive(_) | Kind::Send(_) => {
                    plain = false;
                    host += terms.host_message;
                }
                Kind::Meet => plain = false,
            }
            plain &= step.waits == [0; BESIDE];
        }
        let sharp = terms.host_sharpness;
        let both = match gpu > 0.0 && host > 0.0 {
            // The norm of both, with the larger one factored out.
            true => {
                let (more, less) = (f64::max(gpu, host), f64::min(gpu, host));
                more * (1.0 + (less / more).powf(sharp)).powf(1.0 / sharp)
            }
            false => gpu + host,
        };
        Stretch {
            factor: if gpu > 0.0 { both / gpu } else { 1.0 },
            alone: if gpu > 0.0 { 0.0 } else { both },
            gpu,
            plain,
        }
    }

    fn segment(
        &self,
        role: &RoleWork,
        code: &Code,
        demands: &[f64],
        stretches: &[Stretch],
        terms: &Terms,
        mut marks: Option<&mut Marks>,
    ) -> (SegmentTime, Parts) {
        let mut now = 0.0f64;
        let mut beside: [Ends; BESIDE] = Default::default();
        let (mut overlapping, mut parts) = (0.0, Parts::default());
        let mut deferred: Vec<(usize, usize, f64)> = Vec::new();
        let mut points = Vec::new();
        // Runs have all instructions of the segment, in order; the count holds where marks are wanted.
        let mut next = 0;
        for &r in &code.runs {
            let stretch = stretches[r];
            now += stretch.alone;
            parts.host += stretch.alone + stretch.gpu * (stretch.factor - 1.0);
            if stretch.plain && marks.is_none() {
                now += stretch.gpu * stretch.factor;
                continue;
            }
            for step in &role.runs[r].steps {
                let (seconds, instr) = (demands[step.demand], next);
                next += 1;
                for (ends, back) in beside.iter().zip(step.waits).filter(|(_, back)| *back > 0) {
                    let until = ends.all.len().checked_sub(back).map_or(0.0, |at| ends.all[at].0);
                    parts.exposed += (until - now).max(0.0);
                    now = now.max(until);
                }
                match step.kind {
                    Kind::Kernel | Kind::Part | Kind::Blocking => {
                        let seconds = if step.kind == Kind::Kernel { with_gap(seconds, terms) } else { seconds };
                        let end = now + seconds * stretch.factor;
                        if let Some(marks) = &mut marks {
                            marks.all.push((now, end, instr, step.demand, Stream::Compute));
                        }
                        now = end;
                    }
                    // Sums that do not overlap wait until the segment has sent what others wait for.
                    Kind::Reduce if !self.framework.overlaps_reductions => {
                        deferred.push((instr, step.demand, seconds));
                        beside[0].all.push((now, None));
                    }
                    Kind::Gather | Kind::Reduce | Kind::Exchange => {
                        let own = usize::from(step.kind == Kind::Exchange);
                        let start = beside[own].last().max(now);
                        let shared = beside[1 - own].share(start, seconds, marks.as_deref_mut());
                        let end = start + seconds + shared;
                        let mark = marks.as_mut().map(|marks| {
                            marks.all.push((start, end, instr, step.demand, step.kind.stream()));
                            marks.all.len() - 1
                        });
                        beside[own].all.push((end, mark));
                        overlapping += seconds;
                        if !self.overlaps(step.kind) {
                            parts.exposed += (end - now).max(0.0);
                            now = now.max(end);
                        }
                    }
                    Kind::Receive(channel) => points.push((now, Point::Receive(channel))),
                    Kind::Send(channel) => points.push((now, Point::Send(channel))),
                    Kind::Meet => points.push((now, Point::Meet(seconds))),
                }
            }
        }
        let last = beside.iter().map(Ends::last).fold(0.0, f64::max);
        parts.exposed += (last - now).max(0.0);
        now = now.max(last);
        for (instr, demand, seconds) in deferred {
            if let Some(marks) = &mut marks {
                marks.all.push((now, now + seconds, instr, demand, Stream::Communication));
            }
            parts.exposed += seconds;
            now += seconds;
        }
        // What ran beside kernels made both slower.
        parts.overlap = terms.overlap_cost * (overlapping - parts.exposed).max(0.0);
        let slower = if now > 0.0 { 1.0 + parts.overlap / now } else { 1.0 };
        points.iter_mut().for_each(|(at, _)| *at *= slower);
        if let Some(marks) = marks {
            marks.all.iter_mut().for_each(|(start, end, ..)| (*start, *end) = (*start * slower, *end * slower));
        }
        (SegmentTime { seconds: now * slower, points }, parts)
    }

    /// Seconds of blocking collectives, and by demand how often it is asked for, in a segment of a role.
    pub(crate) fn counts(&self, role: usize, segment: usize) -> (Vec<usize>, f64, f64) {
        let role = &self.work.roles[role];
        let mut counts = vec![0; role.demands.len()];
        let (mut kernels, mut blocking) = (0.0, Vec::new());
        for step in role.code[segment].runs.iter().flat_map(|run| &role.runs[*run].steps) {
            counts[step.demand] += 1;
            kernels += f64::from(step.kind == Kind::Kernel);
            if step.kind == Kind::Blocking {
                blocking.push(step.demand);
            }
        }
        (counts, kernels, blocking.len() as f64)
    }

    /// The demands of the collectives of a segment that the next instruction waits for.
    pub(crate) fn blocking(&self, role: usize, segment: usize) -> Vec<usize> {
        let role = &self.work.roles[role];
        let steps = role.code[segment].runs.iter().flat_map(|run| &role.runs[*run].steps);
        steps.filter(|step| matches!(step.kind, Kind::Blocking | Kind::Meet)).map(|step| step.demand).collect()
    }
}

/// When the collectives of a stream beside kernels end, and where each is marked.
#[derive(Default)]
struct Ends {
    all: Vec<(f64, Option<usize>)>,
}

impl Ends {
    /// When the last ends.
    fn last(&self) -> f64 {
        self.all.last().map_or(0.0, |(end, _)| *end)
    }

    /// Another stream's collective starts, of so many seconds by itself: while both run each has half of the links, so that both end later by
    /// what they share. Says how much that is.
    fn share(&mut self, start: f64, seconds: f64, mut marks: Option<&mut Marks>) -> f64 {
        let shared = seconds.min(self.last() - start).max(0.0);
        for (end, mark) in self.all.iter_mut().rev().take_while(|(end, _)| *end > start) {
            *end += shared.min(*end - start);
            if let (Some(marks), Some(mark)) = (&mut marks, mark) {
                marks.all[*mark].1 = *end;
            }
        }
        shared
    }
}

#[derive(Clone, Copy)]
struct Stretch {
    /// How many times as long its kernels take.
    factor: f64,
    /// Seconds of the host where it has no kernels.
    alone: f64,
    /// Seconds of its kernels.
    gpu: f64,
    /// Whether nothing in it overlaps, waits or meets.
    plain: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collectives_of_two_streams_share_the_links_and_end_as_late_together_as_one_after_the_other() {
        let of = |ends: &[f64]| Ends { all: ends.iter().map(|end| (*end, None)).collect() };
        let after = |ends: &[f64], start: f64, seconds: f64| {
            let mut ends = of(ends);
            let shared = ends.share(start, seconds, None);
            (shared, ends.all.iter().map(|(end, _)| *end).collect::<Vec<_>>())
        };
        // A short one beside a backlog of six seconds takes twice as long, and the backlog ends that much later.
        assert_eq!(after(&[2.0, 4.0, 10.0], 4.0, 1.0), (1.0, vec![2.0, 4.0, 11.0]));
        // A long one shares until the backlog is done.
        assert_eq!(after(&[2.0, 6.0], 4.0, 5.0), (2.0, vec![2.0, 8.0]));
        // Nothing else runs.
        assert_eq!(after(&[2.0], 4.0, 5.0), (0.0, vec![2.0]));
        assert_eq!(after(&[], 0.0, 5.0), (0.0, vec![]));
    }
}
