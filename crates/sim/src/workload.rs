//! The work of programs, as cost estimates read it: instructions that ask the same are one demand, layers that ask the same one run.

use crate::events::Repetition;
use crate::work::{Demand, Kernel, meets};
use crate::{Framework, Result, SimError};
use lockstep_ir::program::{Lifetime, Segment, StepProgram, Stream};
use lockstep_ir::{Collective, Mesh, TypeError};
use std::collections::BTreeMap;

/// What an instruction does to the streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
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
    /// A copy from the host's memory, which overlaps with everything else.
    Fetch,
    /// The same in the other direction.
    Offload,
    Receive(usize),
    Send(usize),
    Meet,
}

pub(crate) const BESIDE: usize = Stream::BESIDE.len();

/// An instruction of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Step {
    /// Index of its demand.
    pub demand: usize,
    pub kind: Kind,
    /// By stream beside kernels: how far back among the collectives that were started there is the one that it waits for: 1 is the last; 0
    /// waits for none.
    pub waits: [usize; BESIDE],
}

/// Instructions of one layer that follow each other: what the host launches as one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Run {
    pub steps: Vec<Step>,
}

/// A segment of a role as indices of runs.
#[derive(Clone, Debug)]
pub(crate) struct Code {
    pub runs: Vec<usize>,
    pub name: &'static str,
    pub chunk: usize,
}

/// What one role, a pipeline stage, runs.
#[derive(Clone, Debug)]
pub(crate) struct RoleWork {
    pub stage: usize,
    pub demands: Vec<Demand>,
    /// Whose each demand is.
    pub kernels: Vec<Kernel>,
    pub runs: Vec<Run>,
    pub code: Vec<Code>,
    pub slots: Vec<usize>,
    pub micro_batches: Vec<usize>,
    pub memory_bytes: u64,
}

/// A message stream: who sends it, and what a message asks of the sender.
#[derive(Clone, Debug)]
pub(crate) struct Wire {
    pub from: usize,
    pub demand: usize,
    pub copies: usize,
}

/// The work of all roles of a run in one entry, ready to be placed on hardware. Its size grows with layers and chunks, not with
/// ranks.
#[derive(Clone, Debug)]
pub struct Workload {
    pub(crate) mesh: Mesh,
    pub(crate) roles: Vec<RoleWork>,
    pub(crate) wires: Vec<Wire>,
    /// What repeats in the slots of every role; none where something does not.
    pub(crate) repetitions: Vec<Repetition>,
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
    pub fn new(programs: &[StepProgram], entry: &str, framework: &Framework) -> Result<Self> {
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
                    Demand::HostCopy { .. } if instr.stream == Stream::Fetch => Kind::Fetch,
                    Demand::HostCopy { .. } => Kind::Offload,
                    Demand::Matmul { .. }
                    | Demand::Attention { .. }
                    | Demand::Scores { .. }
                    | Demand::Elementwise { .. }
                    | Demand::Quantise { .. }
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
        (Stream::Compute | Stream::Fetch | Stream::Offload, _) => Kind::Blocking,
        (Stream::Communication, pattern) if pattern.sums() => Kind::Reduce,
        (Stream::Communication, _) => Kind::Gather,
        (Stream::Exchange, _) => Kind::Exchange,
    }
}

impl Kind {
    /// Where it runs.
    pub fn stream(self) -> Stream {
        match self {
            Kind::Gather | Kind::Reduce => Stream::Communication,
            Kind::Exchange => Stream::Exchange,
            Kind::Fetch => Stream::Fetch,
            Kind::Offload => Stream::Offload,
            Kind::Kernel | Kind::Part | Kind::Blocking | Kind::Receive(_) | Kind::Send(_) | Kind::Meet => {
                Stream::Compute
            }
        }
    }
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
        // What waits in the memory of the host is none of the device's.
        let regions = by_segment[slot.segment].iter().filter(|r| !program.regions[**r].lifetime.is_in_host());
        for &r in regions {
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
