//! Memory over the first steps, as planned; a run gives the same form.

use crate::Result;
use lockstep_ir::graph::Phase;
use lockstep_ir::op::Transfer;
use lockstep_ir::program::{Arg, Class, Instr};
use lockstep_ir::timeline::{self, Point};
use lockstep_ir::walk::Distinct;
use lockstep_ir::{MatmulType, MeshAxis, StepProgram};
use lockstep_sim::GpuSpec;
use serde::Serialize;

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

/// The four phases of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StepPhase {
    /// Forward, with the loss.
    Forward,
    /// Backward, with what is recomputed for it.
    Backward,
    /// Sums of gradients over ranks.
    GradientReduction,
    /// The gradient norm and the update of the parameters.
    OptimizerStep,
}

impl StepPhase {
    /// In the order of a step.
    pub const ALL: [Self; 4] = [Self::Forward, Self::Backward, Self::GradientReduction, Self::OptimizerStep];

    /// The name for people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::GradientReduction => "gradient reduction",
            Self::OptimizerStep => "optimizer step",
        }
    }

    /// That of an instruction. Of collectives that sum, those over data-parallel ranks are of gradients, and in the update those that read
    /// a gradient; others sum activations, losses and norms.
    fn of(program: &StepProgram, instr: &Instr) -> Self {
        let gradient = |arg: &Arg| program.buffers[arg.buffer.0].class == Class::Gradients;
        let reduces = match instr.op.transfer() {
            Some(
                transfer @ (Transfer::AllReduce { .. } | Transfer::ReduceScatter { .. } | Transfer::SumShared { .. }),
            ) => match instr.phase {
                Phase::Update | Phase::Probe => instr.inputs.iter().any(gradient),
                _ => transfer.over().iter().any(|axis| matches!(axis, MeshAxis::DpShard | MeshAxis::DpReplicate)),
            },
            _ => false,
        };
        match instr.phase {
            _ if reduces => Self::GradientReduction,
            Phase::Reduce => Self::GradientReduction,
            Phase::Prepare | Phase::Forward => Self::Forward,
            Phase::InputGrad | Phase::WeightGrad => Self::Backward,
            Phase::Probe | Phase::Update => Self::OptimizerStep,
        }
    }
}

/// When a phase of a step runs, in the units of the timeline's clock. Phases alternate where a step has several micro-batches, and
/// gradients are reduced between the layers of backward.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PhaseTime {
    /// Which.
    pub phase: StepPhase,
    /// When its first instruction begins.
    pub begins: f64,
    /// When its last instruction ends.
    pub ends: f64,
    /// How long its instructions take.
    pub takes: f64,
    /// How many there are.
    pub instructions: usize,
    /// Bytes that its collectives move.
    pub communicated_bytes: u64,
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
    /// Which of the four phases of a step it belongs to.
    pub phase: StepPhase,
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
            phase: StepPhase::of(program, instr),
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

    /// The phases of the first step, of which those are left out that have no instruction.
    pub fn phases(&self) -> Vec<PhaseTime> {
        let time = |phase: &StepPhase| {
            let mine = || self.marks.iter().filter(|mark| mark.step == 0 && mark.phase == *phase);
            Some(PhaseTime {
                phase: *phase,
                begins: mine().next()?.start,
                ends: mine().next_back()?.end,
                takes: mine().map(|mark| mark.end - mark.start).sum(),
                instructions: mine().count(),
                communicated_bytes: mine().filter_map(|mark| mark.moved_bytes).sum(),
            })
        };
        StepPhase::ALL.iter().filter_map(time).collect()
    }
}

/// Instructions of a step that are shown one by one; of longer steps only micro-batches that differ.
const MOST: usize = 1 << 18;

/// The timeline of the first `steps` steps as planned: every step is the same. With an accelerator and the type of linear
/// layers' matmuls, in seconds.
pub fn planned_timeline(
    program: &StepProgram,
    steps: usize,
    gpu: Option<(&GpuSpec, MatmulType)>,
) -> Result<MemoryTimeline> {
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
                let least = |(gpu, compute): (&GpuSpec, MatmulType)| match instr.op.communicates() {
                    true => 0.0,
                    false => {
                        let matmul = gpu.peak(instr.multiplies_in(compute));
                        (cost.flops.hardware as f64 / matmul).max(cost.bytes as f64 / gpu.bytes_per_s)
                    }
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
