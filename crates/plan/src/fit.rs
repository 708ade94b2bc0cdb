//! What fits a memory: the default micro-batch, the largest one under every recompute policy, layouts side by side.
//! All of it is read off programs that are compiled for the purpose, as [`crate::account`] does.

use crate::pipeline::pipeline_timeline;
use crate::plan::{MOST_MICRO_BATCHES, hardware_flops, prepare, settle_policy};
use crate::{Machine, PlanError, Result};
use lockstep_compile::{Estimator, Recompute};
use lockstep_config::{Config, RecomputePolicy, legal};
use lockstep_ir::account::{self, MemoryBreakdown};
use lockstep_ir::{Layout, StepProgram, units};
use lockstep_sim::GpuSpec;
use serde::Serialize;
use std::collections::BTreeMap;

/// Memory that a plan is held against.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// Bytes.
    pub bytes: u64,
    /// Whether all ranks share it; else each rank has as much.
    pub shared: bool,
    /// Whose it is: `on an H100 80GB`.
    pub place: String,
}

/// Whether a plan fits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// Whether it does.
    pub fits: bool,
    /// Bytes that are planned: of all ranks where they share the memory, else of the rank that needs most.
    pub planned_bytes: u64,
    /// Bytes that there are.
    pub memory_bytes: u64,
    /// Where.
    pub place: String,
    /// The plan's ranks.
    pub ranks: usize,
    /// Whether all of them share the memory; else each has as much.
    pub shared: bool,
}

impl Room {
    /// The memory of a GPU, of which every rank has one.
    pub fn of(gpu: &GpuSpec) -> Self {
        let place = format!("on {} {}", Self::article(gpu), gpu.label());
        Self { bytes: gpu.memory_bytes, shared: false, place }
    }

    /// The article of a GPU's label: an H100, an RTX 4090, a B200.
    pub fn article(gpu: &GpuSpec) -> &'static str {
        if gpu.name.starts_with(['a', 'h', 'l', 'm', 'r']) { "an" } else { "a" }
    }

    /// What a plan of these stages needs of it.
    pub(crate) fn needs(&self, stages: &[MemoryBreakdown], ranks: usize) -> u64 {
        let arenas = stages.iter().map(|stage| stage.total_bytes);
        match self.shared {
            true => arenas.map(|bytes| bytes * (ranks / stages.len().max(1)) as u64).sum(),
            false => arenas.max().unwrap_or(0),
        }
    }

    /// Whether a plan of these stages fits.
    pub fn verdict(&self, stages: &[MemoryBreakdown], ranks: usize) -> Verdict {
        let planned_bytes = self.needs(stages, ranks);
        Verdict {
            fits: planned_bytes <= self.bytes,
            planned_bytes,
            memory_bytes: self.bytes,
            place: self.place.clone(),
            ranks,
            shared: self.shared,
        }
    }
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [planned, memory] = [self.planned_bytes, self.memory_bytes].map(units::bytes);
        match self.fits {
            true => write!(f, "fits: {planned} of {memory} {}", self.place)?,
            false => write!(f, "does NOT fit: {planned} planned, {memory} {}", self.place)?,
        }
        match (self.ranks, self.shared) {
            (1, _) => Ok(()),
            (ranks, true) => write!(f, ", for all {ranks} ranks together"),
            (_, false) => write!(f, ", for the rank that needs most"),
        }
    }
}

/// Programs of a config that will not run.
pub(crate) struct Estimate {
    pub programs: Vec<StepProgram>,
    pub stages: Vec<MemoryBreakdown>,
}

impl Estimate {
    /// Under the config's own recompute policy.
    pub(crate) fn of(machine: &dyn Machine, config: &Config) -> Result<Self> {
        let (forward, mut context, _) = prepare(machine, config, lockstep_model::build_form)?;
        settle_policy(config, &forward, &mut context)?;
        Self::under(&Estimator::new(&forward, &context)?, context.recompute.clone())
    }

    pub(crate) fn under(estimator: &Estimator, recompute: Recompute) -> Result<Self> {
        let programs = estimator.programs(recompute)?;
        let stages = programs.iter().map(account::memory).collect();
        Ok(Self { programs, stages })
    }

    /// The largest arena of a rank.
    pub(crate) fn arena(&self) -> u64 {
        self.stages.iter().map(|stage| stage.total_bytes).max().unwrap_or(0)
    }
}

/// Whether a config fits; a budget that cannot be kept does not.
fn fits(machine: &dyn Machine, config: &Config, room: &Room) -> Result<bool> {
    match Estimate::of(machine, config) {
        Ok(found) => Ok(room.verdict(&found.stages, config.layout().mesh.ranks()).fits),
        Err(PlanError::OverBudget { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The divisors of a number, from the largest.
pub(crate) fn divisors(n: usize) -> Vec<usize> {
    legal::divisors(n).into_iter().rev().collect()
}

/// The micro-batches that may take the place of the config's own, from the largest: its divisors, as far as a step has not too
/// many of them.
fn micro_batches(config: &Config) -> Vec<usize> {
    let own = config.train.micro_batch;
    let few = |size: &usize| config.accumulation_steps().saturating_mul(own / size) <= MOST_MICRO_BATCHES;
    divisors(own).into_iter().filter(|size| *size == own || few(size)).collect()
}

/// The largest micro-batch that fits, of those that divide the config's own; `None` where none does.
fn largest_divisor(machine: &dyn Machine, config: &Config, room: &Room) -> Result<Option<usize>> {
    let sizes = micro_batches(config);
    // A smaller micro-batch never needs more.
    let (mut from, mut to) = (0, sizes.len());
    while from < to {
        let middle = (from + to) / 2;
        if fits(machine, &with_micro_batch(config, sizes[middle]), room)? { to = middle } else { from = middle + 1 }
    }
    Ok(sizes.get(from).copied())
}

/// The same run with another micro-batch.
pub fn with_micro_batch(config: &Config, sequences: usize) -> Config {
    let mut config = config.clone();
    config.train.micro_batch = sequences;
    config
}

/// The config with the default of `train.micro_batch` that fits: the whole batch of a rank, or where that does not fit, the
/// largest divisor that does; where none does, the least. A given value stays.
pub fn with_fitting_micro_batch(machine: &dyn Machine, config: &Config, room: &Room) -> Result<Config> {
    if !config.micro_batch_is_default() || config.train.micro_batch == 1 || fits(machine, config, room)? {
        return Ok(config.clone());
    }
    let memory = format!("{} {}", units::bytes(room.bytes), room.place);
    Ok(match largest_divisor(machine, config, room)? {
        Some(sequences) => config.with_default_micro_batch(sequences, &format!("the largest that fits {memory}")),
        None => {
            let least = micro_batches(config).pop().unwrap_or(1);
            config.with_default_micro_batch(least, &format!("the least, and more than fits {memory}"))
        }
    })
}

/// The largest micro-batch under one recompute policy.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LargestMicroBatch {
    /// The policy, as the config names it.
    pub policy: String,
    /// Sequences; none where not even one fits.
    pub micro_batch: Option<usize>,
    /// Sequences of a step of as many such micro-batches as the config has; none where not even one fits.
    pub global_batch: Option<usize>,
    /// The largest that fits and divides the batch of a rank, for the config's own batch; none where none does.
    pub dividing_micro_batch: Option<usize>,
    /// Bytes of the arena at the largest size, or at one sequence.
    pub arena_bytes: u64,
    /// FLOPs of a step as a share of those without recomputation.
    pub hardware_flops: f64,
}

/// Micro-batches beyond this many sequences are not looked for.
const MOST_SEQUENCES: usize = 1 << 16;

/// The largest micro-batch that fits this many bytes of each rank, under every recompute policy: with as many micro-batches in a step as
/// the config has, whatever batch that makes, and of those that divide the config's own batch.
pub fn largest_micro_batches(machine: &dyn Machine, config: &Config, bytes: u64) -> Result<Vec<LargestMicroBatch>> {
    let mut sizes = Sizes { machine, config, micro_batches: config.accumulation_steps(), estimators: BTreeMap::new() };
    let mut rows = Vec::new();
    for (name, recompute) in policies_of(config) {
        let mut arena = |sequences: usize| sizes.estimate(sequences, &recompute).map(|found| found.arena());
        let least = arena(1)?;
        let micro_batch = if least > bytes { None } else { Some(largest(bytes, least, &mut arena)?) };
        let at = micro_batch.unwrap_or(1);
        let found = sizes.estimate(at, &recompute)?;
        let none = sizes.estimate(at, &Recompute::None)?;
        let share = hardware_flops(&found.programs)? as f64 / hardware_flops(&none.programs)? as f64;
        let global_batch = micro_batch.map(|size| with_micro_batch(config, size).round() * config.accumulation_steps());
        rows.push(LargestMicroBatch {
            policy: name,
            micro_batch,
            global_batch,
            dividing_micro_batch: largest_dividing(machine, config, &recompute, micro_batch, bytes)?,
            arena_bytes: found.arena(),
            hardware_flops: share,
        });
    }
    Ok(rows)
}

/// The largest micro-batch that divides the batch of a rank and fits, where up to `most` sequences are known to fit about so.
fn largest_dividing(
    machine: &dyn Machine,
    config: &Config,
    recompute: &Recompute,
    most: Option<usize>,
    bytes: u64,
) -> Result<Option<usize>> {
    let Some(most) = most else { return Ok(None) };
    let batch = config.train.micro_batch * config.accumulation_steps();
    let few = |size: &usize| batch / size <= MOST_MICRO_BATCHES;
    for size in divisors(batch).into_iter().filter(|size| *size <= most).filter(few) {
        let (forward, context, _) = prepare(machine, &with_micro_batch(config, size), lockstep_model::build_form)?;
        // More micro-batches take some bytes more: their tokens.
        if Estimate::under(&Estimator::new(&forward, &context)?, recompute.clone())?.arena() <= bytes {
            return Ok(Some(size));
        }
    }
    Ok(None)
}

/// The largest size that fits, where one sequence does. Arenas grow in a line, nearly: it is followed to a guess, and the guess
/// put right by halves.
fn largest(bytes: u64, one: u64, arena: &mut dyn FnMut(usize) -> Result<u64>) -> Result<usize> {
    let (mut fits, mut known) = (1, one);
    let mut over = None;
    let each = arena(2)?.saturating_sub(one).max(1);
    for attempt in 0.. {
        let highest = over.unwrap_or(MOST_SEQUENCES + 1) - 1;
        if fits >= highest {
            break;
        }
        let guess = match (attempt, over) {
            (2.., Some(over)) => (fits + over) / 2,
            _ => fits.saturating_add(usize::try_from((bytes - known) / each).unwrap_or(MOST_SEQUENCES)),
        };
        let next = guess.clamp(fits + 1, highest);
        match arena(next)? {
            found if found <= bytes => (fits, known) = (next, found),
            _ => over = Some(next),
        }
    }
    Ok(fits)
}

/// Estimators of a config at several micro-batch sizes.
struct Sizes<'a> {
    machine: &'a dyn Machine,
    config: &'a Config,
    micro_batches: usize,
    estimators: BTreeMap<usize, Estimator>,
}

impl Sizes<'_> {
    fn estimate(&mut self, sequences: usize, recompute: &Recompute) -> Result<Estimate> {
        if !self.estimators.contains_key(&sequences) {
            let mut config = with_micro_batch(self.config, sequences);
            config.train.global_batch = config.round() * self.micro_batches;
            config.train.batch_ramp.clear();
            let (forward, context, _) = prepare(self.machine, &config, lockstep_model::build_form)?;
            // The last few are asked for again, by other policies.
            while self.estimators.len() >= 4 {
                self.estimators.pop_last();
            }
            self.estimators.insert(sequences, Estimator::new(&forward, &context)?);
        }
        Estimate::under(&self.estimators[&sequences], recompute.clone())
    }
}

/// What one layout needs.
#[derive(Clone, Debug, Serialize)]
pub struct LayoutCost {
    /// The layout.
    pub layout: String,
    /// Its ranks.
    pub ranks: usize,
    /// Sequences that a rank computes at once.
    pub micro_batch: usize,
    /// Bytes of the rank with the largest arena.
    pub memory: MemoryBreakdown,
    /// Bytes that such a rank sends in a step, in a ring.
    pub sent_bytes: u64,
    /// Pipeline bubble: the share of all ranks' time in which they are idle, if time is FLOPs and transfers are free.
    pub bubble: f64,
    /// The most micro-batches that a rank has in flight, in the activations of all its layers.
    pub in_flight: f64,
    /// Whether it fits, where the memory is known.
    pub verdict: Option<Verdict>,
}

/// A config at several layouts, each of which fits its model and batch.
pub fn layout_costs(
    machine: &dyn Machine,
    config: &Config,
    layouts: &[Layout],
    room: Option<&Room>,
) -> Result<Vec<LayoutCost>> {
    let mut rows = Vec::new();
    for layout in layouts {
        let config = config.at(layout);
        let found = Estimate::of(machine, &config)?;
        let largest = found.stages.iter().zip(&found.programs).max_by_key(|(stage, _)| stage.total_bytes);
        let Some((memory, program)) = largest else { continue };
        let ranks = layout.mesh.ranks();
        rows.push(LayoutCost {
            layout: layout.to_string(),
            ranks,
            micro_batch: config.train.micro_batch,
            memory: memory.clone(),
            sent_bytes: sent_bytes(program),
            bubble: pipeline_timeline(&found.programs, &config.layout()).map_or(0.0, |timeline| timeline.bubble()),
            in_flight: most_in_flight(&config.layout()),
            verdict: room.map(|room| room.verdict(&found.stages, ranks)),
        });
    }
    Ok(rows)
}

/// What sequences of one length need.
#[derive(Clone, Debug, Serialize)]
pub struct LengthCost {
    /// Tokens of a sequence.
    pub seq: usize,
    /// Tokens of a micro-batch.
    pub micro_batch_tokens: usize,
    /// Bytes of the rank with the largest arena.
    pub memory: MemoryBreakdown,
    /// Whether it fits, where the memory is known.
    pub verdict: Option<Verdict>,
}

/// A config at several sequence lengths, with as many sequences in a micro-batch and a step. Learned positions grow where there are too
/// few.
pub fn length_costs(
    machine: &dyn Machine,
    config: &Config,
    lengths: &[usize],
    room: Option<&Room>,
) -> Result<Vec<LengthCost>> {
    let mut rows = Vec::new();
    for &seq in lengths {
        let mut config = config.clone();
        config.train.seq = seq;
        config.model.positions = config.model.positions.map(|positions| positions.max(seq));
        let found = Estimate::of(machine, &config)?;
        let Some(memory) = found.stages.iter().max_by_key(|stage| stage.total_bytes) else { continue };
        rows.push(LengthCost {
            seq,
            micro_batch_tokens: config.train.micro_batch * seq,
            memory: memory.clone(),
            verdict: room.map(|room| room.verdict(&found.stages, config.layout().mesh.ranks())),
        });
    }
    Ok(rows)
}

/// The most micro-batches that a rank has in flight, in the activations of all its layers.
fn most_in_flight(layout: &Layout) -> f64 {
    let chunks = layout.pipeline().in_flight().into_iter().max().unwrap_or(0);
    chunks as f64 / layout.chunks as f64
}

/// Bytes that a rank sends in a step, in a ring.
pub(crate) fn sent_bytes(program: &StepProgram) -> u64 {
    let entry = program.entry(StepProgram::TRAIN);
    let all = entry.map_or(Vec::new(), |entry| account::communication(program, entry));
    all.iter().map(|collective| collective.sent_bytes).sum()
}

/// The policies that need nothing but a name, from the one that saves everything.
pub(crate) fn policies_of(config: &Config) -> Vec<(String, Recompute)> {
    let every = config.recompute.every;
    let row = |policy: &RecomputePolicy| {
        Some(match policy {
            RecomputePolicy::None => (policy.to_string(), Recompute::None),
            RecomputePolicy::Selective => (policy.to_string(), Recompute::Selective),
            RecomputePolicy::Full => (policy.to_string(), Recompute::Full),
            RecomputePolicy::EveryK => (format!("{policy}, k = {every}"), Recompute::Every(every)),
            RecomputePolicy::Sqrt => (policy.to_string(), Recompute::Sqrt),
            RecomputePolicy::List | RecomputePolicy::Budget => return None,
        })
    };
    RecomputePolicy::ALL.iter().filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_size_is_found_on_lines_and_on_steps() {
        let steps = |n: usize| 100 + 10 * n as u64 + 64 * (n as u64 / 7);
        for bytes in [111, 125, 400, 1000, 12_345] {
            let found = largest(bytes, steps(1), &mut |n| Ok(steps(n))).unwrap();
            assert!(steps(found) <= bytes && steps(found + 1) > bytes, "{bytes}: {found}");
        }
        assert_eq!(divisors(12), [12, 6, 4, 3, 2, 1]);
    }
}
