//! Memory over the first steps, as planned; a run gives the same form.

use crate::PlanError;
use lockstep_ir::program::Class;
use lockstep_ir::timeline::{self, Point};
use lockstep_ir::walk::Distinct;
use lockstep_ir::{DType, StepProgram};
use lockstep_sim::GpuSpec;

/// Memory over time.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryTimeline {
    /// One per instruction, in order.
    pub marks: Vec<Mark>,
    /// Size of the arena.
    pub arena_bytes: u64,
    /// Bytes of the arena up to the last that was ever written, if this comes from a run.
    pub touched_bytes: Option<u64>,
    /// What the marks' times are.
    pub clock: Clock,
    /// Micro-batches that are left out because they repeat those before them.
    pub left_out: usize,
}

/// What times mean.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Instructions since the start.
    Instructions,
    /// Seconds, at the least that an accelerator of this name takes: FLOPs at its peak or bytes moved at its bandwidth.
    /// Collectives take none: how long they would take is not known here.
    PeakRates(String),
    /// Seconds, as measured.
    Measured,
}

/// One instruction and what was in use while it ran.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mark {
    /// When it began.
    pub start: f64,
    /// When it ended.
    pub end: f64,
    /// The step, from 0.
    pub step: usize,
    /// The segment.
    pub segment: &'static str,
    /// The micro-batch.
    pub micro_batch: usize,
    /// The op.
    pub op: &'static str,
    /// Its layer.
    pub layer: Option<usize>,
    /// Bytes that a collective moves.
    pub moved_bytes: Option<u64>,
    /// Bytes by class, in the order of [`Class::ALL`].
    pub bytes: [u64; Class::ALL.len()],
}

impl Mark {
    /// What a point of a program's memory is, at these times.
    pub fn new(program: &StepProgram, step: usize, start: f64, end: f64, point: &Point) -> Self {
        let segment = &program.segments[point.slot.segment];
        let instr = &segment.instrs[point.instr];
        Self {
            start,
            end,
            step,
            segment: segment.name,
            micro_batch: point.slot.micro_batch,
            op: instr.op.name(),
            layer: instr.layer,
            moved_bytes: instr.op.communicates().then(|| instr.cost().map_or(0, |cost| cost.bytes)),
            bytes: point.bytes,
        }
    }

    /// Bytes of all classes.
    pub fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }
}

impl MemoryTimeline {
    /// The mark with most bytes, the first of several.
    pub fn peak(&self) -> Option<&Mark> {
        self.marks.iter().reduce(|best, mark| if mark.total() > best.total() { mark } else { best })
    }
}

/// Instructions of a step that are shown one by one; of longer steps only micro-batches that differ.
const MOST: usize = 1 << 18;

/// The timeline of the first `steps` steps as planned: every step is the same. With an accelerator and the type of matmuls,
/// in seconds.
pub fn planned_timeline(
    program: &StepProgram,
    steps: usize,
    gpu: Option<(&GpuSpec, DType)>,
) -> Result<MemoryTimeline, PlanError> {
    let mut marks = Vec::new();
    let mut left_out = 0;
    if let Some(entry) = program.entry(StepProgram::TRAIN) {
        let instrs: usize = entry.schedule.iter().map(|slot| program.segments[slot.segment].instrs.len()).sum();
        let shown = if instrs <= MOST { Distinct::whole(entry) } else { Distinct::of(program, entry) };
        left_out = shown.left_out;
        let points = timeline::planned(program, &shown);
        let mut now = 0.0;
        for step in 0..steps {
            for point in &points {
                let instr = &program.segments[point.slot.segment].instrs[point.instr];
                let cost = instr.cost()?;
                let least = |(gpu, compute): (&GpuSpec, DType)| match instr.op.communicates() {
                    true => 0.0,
                    false => (cost.flops.hardware as f64 / gpu.peak(compute)).max(cost.bytes as f64 / gpu.bytes_per_s),
                };
                let end = now + gpu.map_or(1.0, least);
                marks.push(Mark::new(program, step, now, end, point));
                now = end;
            }
        }
    }
    let clock = gpu.map_or(Clock::Instructions, |(gpu, _)| Clock::PeakRates(gpu.name.clone()));
    Ok(MemoryTimeline { marks, arena_bytes: program.arena_bytes, touched_bytes: None, clock, left_out })
}
