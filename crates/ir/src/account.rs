//! What a program costs: bytes by class, layer and moment, FLOPs by kind. Read off the program, never estimated.

use crate::graph::Phase;
use crate::op::{Flops, TypeError};
use crate::program::{Buffer, Class, Entry, Instr, Lifetime, Region, Role, Slot, StepProgram, Sum, Tensor};
use crate::schedule::{ChunkCosts, Pipeline};
use crate::walk::{Distinct, Walk};
use crate::{Axes, Coordinates, Placement, timeline};
use serde::Serialize;
use std::collections::BTreeMap;

/// The memory breakdown of a program.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryBreakdown {
    /// Size of the arena; the classes sum to it.
    pub total_bytes: u64,
    /// Bytes in the memory of the host.
    pub host_bytes: u64,
    /// Those of them that activations have: the rest is optimizer state.
    pub host_activation_bytes: u64,
    /// Bytes by class name.
    pub classes: BTreeMap<&'static str, u64>,
    /// Bytes of persistent and saved buffers by layer (`None`: embedding, head and what belongs to no layer).
    pub layers: Vec<LayerBreakdown>,
    /// When most bytes are in use.
    pub peak: Moment,
}

/// One layer's part of the breakdown.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerBreakdown {
    /// Layer index; `None` for what belongs to no layer.
    pub layer: Option<usize>,
    /// Bytes by class name.
    pub classes: BTreeMap<&'static str, u64>,
}

/// A point in a schedule.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Moment {
    /// Segment that runs.
    pub segment: &'static str,
    /// Micro-batch that it works on.
    pub micro_batch: usize,
    /// Index of the instruction.
    pub instr: usize,
    /// Its op.
    pub op: &'static str,
    /// Its layer.
    pub layer: Option<usize>,
    /// Bytes that hold a value which is still needed.
    pub live_bytes: u64,
}

/// The breakdown of the training step, or of evaluation where there is no training step.
pub fn memory(program: &StepProgram) -> MemoryBreakdown {
    let mut classes: BTreeMap<&'static str, u64> = Class::ALL.iter().map(|c| (c.name(), 0)).collect();
    let mut layers: BTreeMap<Option<usize>, BTreeMap<&'static str, u64>> = BTreeMap::new();
    for (r, region) in program.regions.iter().enumerate() {
        if matches!(region.lifetime, Lifetime::Overlay | Lifetime::Step) || region.lifetime.is_in_host() {
            continue;
        }
        if region.lifetime == Lifetime::Frame {
            let mut rest = region.bytes();
            for (class, bytes) in frame_at_peak(program, r) {
                *classes.entry(class.name()).or_default() += bytes;
                rest -= bytes;
            }
            *classes.entry(Class::Activations.name()).or_default() += rest;
            continue;
        }
        let buffers = side_by_side(program, r);
        for (i, b) in buffers.iter().enumerate() {
            // A buffer owns the padding after it, so that the classes sum to the total.
            let end = buffers.get(i + 1).map_or(region.slot_bytes, |next| next.offset);
            let bytes = (end - b.offset) * region.slots as u64;
            *classes.entry(b.class.name()).or_default() += bytes;
            *layers.entry(b.layer).or_default().entry(b.class.name()).or_default() += bytes;
        }
    }
    let entry = program.entry(StepProgram::TRAIN).or(program.entries.first());
    MemoryBreakdown {
        total_bytes: program.arena_bytes,
        host_bytes: program.host_bytes,
        host_activation_bytes: saved_in_host(program),
        classes,
        layers: layers.into_iter().map(|(layer, classes)| LayerBreakdown { layer, classes }).collect(),
        peak: entry.map(|e| peak(program, e)).unwrap_or_default(),
    }
}

fn saved_in_host(program: &StepProgram) -> u64 {
    let regions = program.regions.iter().filter(|r| matches!(r.lifetime, Lifetime::SavedInHost(_)));
    regions.map(Region::bytes).sum()
}

/// The buffers of a region by offset; where chunks share the copies of a saved region, those of the chunk that needs most.
fn side_by_side(program: &StepProgram, region: usize) -> Vec<&Buffer> {
    let all = || program.buffers.iter().enumerate().filter(|(_, b)| b.region == region);
    let mut chunk_of = vec![0; program.buffers.len()];
    for segment in program.segments.iter().filter(|s| s.chunk > 0) {
        segment.instrs.iter().flat_map(Instr::buffers).for_each(|b| chunk_of[b.0] = segment.chunk);
    }
    let largest = match program.regions[region].lifetime {
        Lifetime::Saved(_) | Lifetime::SavedInHost(_) => {
            all().max_by_key(|(_, b)| b.offset + b.bytes).map(|(i, _)| chunk_of[i])
        }
        Lifetime::Run
        | Lifetime::Step
        | Lifetime::Host
        | Lifetime::MicroBatch
        | Lifetime::Frame
        | Lifetime::Overlay => None,
    };
    let counts = |i: usize| largest.is_none_or(|chunk| chunk_of[i] == chunk);
    let mut buffers: Vec<&Buffer> = all().filter(|(i, _)| counts(*i)).map(|(_, b)| b).collect();
    buffers.sort_by_key(|b| b.offset);
    buffers
}

/// The moment of an entry's schedule when most bytes are live, unrolled over micro-batches until it repeats itself.
///
/// Persistent tensors and host buffers count throughout; a saved or temporary buffer from the call that writes it to the
/// last call that reads it. No placement can use fewer bytes than this.
pub fn peak(program: &StepProgram, entry: &Entry) -> Moment {
    let mut best = Moment::default();
    timeline::each_planned(program, &Distinct::of(program, entry), |point| {
        let segment = &program.segments[point.slot.segment];
        if point.total() > best.live_bytes {
            best = Moment {
                segment: segment.name,
                micro_batch: point.slot.micro_batch,
                instr: point.instr,
                op: segment.instrs[point.instr].op.name(),
                layer: segment.instrs[point.instr].layer,
                live_bytes: point.total(),
            };
        }
    });
    best
}

/// What all calls of one op cost in an entry.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OpCost {
    /// Segment that calls it.
    pub segment: &'static str,
    /// The op.
    pub op: &'static str,
    /// Number of calls.
    pub calls: u64,
    /// Matmul FLOPs that the hardware is asked for.
    pub flops: f64,
    /// Bytes moved: operands read once, results written once, accumulators read and written.
    pub bytes: u64,
}

/// The cost of an entry by segment and op, in order of first use.
pub fn ops(program: &StepProgram, entry: &Entry) -> Result<Vec<OpCost>, TypeError> {
    let mut lines: Vec<OpCost> = Vec::new();
    for (s, segment) in program.segments.iter().enumerate() {
        let runs = entry.schedule.iter().filter(|slot| slot.segment == s).count() as u64;
        for instr in segment.instrs.iter().filter(|_| runs > 0) {
            let op = instr.op.name();
            let at = lines.iter().position(|l| l.segment == segment.name && l.op == op).unwrap_or_else(|| {
                lines.push(OpCost { segment: segment.name, op, calls: 0, flops: 0.0, bytes: 0 });
                lines.len() - 1
            });
            let cost = instr.cost()?;
            lines[at].calls += runs;
            lines[at].flops += runs as f64 * cost.flops.hardware as f64;
            lines[at].bytes += runs * cost.bytes;
        }
    }
    Ok(lines)
}

/// What the ranks of a stage communicate in an entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Communication {
    /// Segment that asks for it.
    pub segment: &'static str,
    /// The op.
    pub op: &'static str,
    /// The mesh axes that it goes along.
    pub axis: String,
    /// Ranks that take part.
    pub ranks: usize,
    /// Number of calls.
    pub calls: u64,
    /// Bytes of the whole tensors, of all calls.
    pub bytes: u64,
    /// Bytes that a rank sends in all calls, in a ring.
    pub sent_bytes: u64,
}

/// The collectives and messages of an entry by segment, op and axis, in order of first use.
pub fn communication(program: &StepProgram, entry: &Entry) -> Vec<Communication> {
    let mut lines: Vec<Communication> = Vec::new();
    for (s, segment) in program.segments.iter().enumerate() {
        let runs = entry.schedule.iter().filter(|slot| slot.segment == s).count() as u64;
        let transfers = segment.instrs.iter().filter_map(|i| Some((i, i.op.transfer()?)));
        for (instr, transfer) in transfers.filter(|_| runs > 0) {
            let over = transfer.over();
            let ranks = match transfer.collective() {
                Some(_) => transfer.sharers().unwrap_or(program.mesh.size(over)),
                None => 2,
            };
            let (whole, sent) = transfer.bytes(instr, ranks as u64);
            let (op, axis) = (instr.op.name(), over.to_string());
            let same = |l: &Communication| (l.segment, l.op, &l.axis, l.ranks) == (segment.name, op, &axis, ranks);
            let at = lines.iter().position(same).unwrap_or_else(|| {
                let (segment, axis) = (segment.name, axis.clone());
                lines.push(Communication { segment, op, axis, ranks, calls: 0, bytes: 0, sent_bytes: 0 });
                lines.len() - 1
            });
            lines[at].calls += runs;
            lines[at].bytes += runs * whole;
            lines[at].sent_bytes += runs * sent;
        }
    }
    lines
}

/// Bytes of states, on all ranks of a stage together, that hold no element: they fill up parts of the vocabulary and flat ranges.
pub fn padding(program: &StepProgram) -> u64 {
    let mesh = &program.mesh;
    let stage = mesh.size(Axes::STAGE);
    let padding = |t: &Tensor| {
        let split: Axes = Axes::STAGE.iter().filter(|a| matches!(t.sharding.over(*a), Placement::Split(_))).collect();
        // Other ranks hold the same, or together once what is cut into ranges.
        let cut = if t.part.is_empty() { t.sharding.axes(Placement::Flat) } else { Axes::NONE };
        let copies = stage / mesh.size(split) / mesh.size(cut);
        let at = |part| Coordinates::default().with_index(split, mesh, part);
        let held = (0..mesh.size(split)).map(|part| t.sharding.uncut().held(&t.whole, mesh, at(part)));
        program.buffers[t.buffer.0].bytes * stage as u64 - (held.sum::<usize>() * t.whole.dtype.bytes() * copies) as u64
    };
    program.tensors.iter().filter(|t| matches!(t.role, Role::State(_))).map(padding).sum()
}

/// Total FLOPs of an entry.
pub fn flops(program: &StepProgram, entry: &Entry) -> Result<Flops, TypeError> {
    let mut per_segment = Vec::new();
    for segment in &program.segments {
        let mut sum = Flops::default();
        for instr in &segment.instrs {
            sum = sum + instr.cost()?.flops;
        }
        per_segment.push(sum);
    }
    Ok(entry.schedule.iter().fold(Flops::default(), |sum, slot| sum + per_segment[slot.segment]))
}

/// What one call costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Matmul FLOPs.
    pub flops: Flops,
    /// Bytes moved: operands read once, results written once, accumulators read and written.
    pub bytes: u64,
}

impl Instr {
    /// What one call of this instruction costs.
    pub fn cost(&self) -> Result<Cost, TypeError> {
        let types: Vec<_> = self.inputs.iter().map(|a| &a.ty).collect();
        let wanted: Vec<bool> = self.outputs.iter().map(Option::is_some).collect();
        let read = self.inputs.iter().map(|a| a.ty.bytes());
        let written = self.outputs.iter().flatten().map(|a| a.ty.bytes() * if a.sum == Sum::No { 1 } else { 2 });
        let mut flops = self.op.flops(&types, &wanted)?;
        // An op of the forward pass that runs in backward is recomputed: the model does not need it, nor what another rank computes too.
        if self.repeated || (self.phase == Phase::InputGrad && self.op.spec().is_forward()) {
            (flops.model, flops.causal) = (0, 0);
        }
        Ok(Cost { flops, bytes: read.chain(written).sum() })
    }
}

/// Bytes of the frame, at the call with most of them in use, that are not activations.
fn frame_at_peak(program: &StepProgram, frame: usize) -> Vec<(Class, u64)> {
    let mut best: (u64, Vec<(Class, u64)>) = (0, Vec::new());
    for segment in &program.segments {
        let mut changes: BTreeMap<usize, Vec<(usize, bool)>> = BTreeMap::new();
        for life in segment.lives(|b| program.buffers[b.0].region == frame) {
            changes.entry(life.first).or_default().push((life.buffer.0, true));
            changes.entry(life.last + 1).or_default().push((life.buffer.0, false));
        }
        let mut live: BTreeMap<Class, u64> = BTreeMap::new();
        for now in changes.values() {
            for (b, begins) in now {
                let bytes = live.entry(program.buffers[*b].class).or_default();
                *bytes = if *begins { *bytes + program.buffers[*b].bytes } else { *bytes - program.buffers[*b].bytes };
            }
            let total = live.values().sum();
            if total > best.0 {
                let other = live.iter().filter(|(class, _)| **class != Class::Activations);
                best = (total, other.map(|(class, bytes)| (*class, *bytes)).collect());
            }
        }
    }
    best.1
}

/// FLOPs of every virtual stage of a pipeline for one micro-batch.
pub fn chunk_costs(programs: &[StepProgram], pipeline: &Pipeline) -> Result<Vec<ChunkCosts>, TypeError> {
    let mut costs = vec![ChunkCosts::default(); pipeline.stages()];
    for (program, stages) in programs.iter().zip(&pipeline.virtual_stages) {
        let Some(entry) = program.entry(StepProgram::TRAIN) else { continue };
        let first: Vec<Slot> = entry.schedule.iter().filter(|slot| slot.micro_batch == 0).copied().collect();
        for event in Walk::first(program).events(&first) {
            let cost = &mut costs[stages[event.segment().chunk]];
            let sum = match event.instr.phase {
                Phase::Forward => &mut cost.forward,
                Phase::InputGrad => &mut cost.input_grad,
                Phase::WeightGrad | Phase::Reduce => &mut cost.weight_grad,
                Phase::Prepare | Phase::Probe | Phase::Update => continue,
            };
            *sum += event.instr.cost()?.flops.hardware as f64;
        }
    }
    Ok(costs)
}
