//! Pipeline schedules: in which order a rank computes its chunks and micro-batches, and when, for given costs.
//!
//! A schedule is one file with a [`Generator`] and one line in [`Schedule::ALL`].
//!
//! A generator states a bound on the micro-batches in flight, and its slots are held against it. If the number of
//! micro-batches does not divide, we generate the schedule for the next multiple and drop the missing ones. All
//! ranks end a step together: the gradient norm needs all gradients.
//!
//! Where B and W are separate, weight gradients that are no matmuls are summed with B, so that inputs of norms are
//! not saved until W.

mod generator;
mod gpipe;
mod interleaved;
mod one_f_one_b;
mod timeline;
mod zb_h1;
mod zb_v;

pub use generator::{Generator, PipeRank, PipeSlot, Work};
pub use timeline::{ChunkCosts, Costs, Deadlock, Stuck, Timeline, WaitsFor, evaluate};

use serde::{Serialize, Serializer};
use std::ops::RangeInclusive;
use std::str::FromStr;

/// An order of the work of every rank, by its name.
#[derive(Clone, Copy)]
pub struct Schedule {
    name: &'static str,
    generator: &'static dyn Generator,
}

impl Schedule {
    /// All schedules, the usual one first.
    pub const ALL: [Schedule; 5] = [
        Schedule::new("1f1b", &one_f_one_b::OneForwardOneBackward),
        Schedule::new("gpipe", &gpipe::GPipe),
        Schedule::new("interleaved", &interleaved::Interleaved),
        Schedule::new("zb-h1", &zb_h1::ZbH1),
        Schedule::new("zb-v", &zb_v::ZbV),
    ];

    /// The usual one.
    pub const USUAL: Schedule = Schedule::ALL[0];

    /// Their names, in the same order.
    pub const NAMES: [&str; Schedule::ALL.len()] = {
        let mut names = [""; Schedule::ALL.len()];
        let mut i = 0;
        while i < names.len() {
            names[i] = Schedule::ALL[i].name;
            i += 1;
        }
        names
    };

    /// A schedule of this name.
    pub const fn new(name: &'static str, generator: &'static dyn Generator) -> Self {
        Self { name, generator }
    }

    /// The name in configs and layouts.
    pub const fn name(self) -> &'static str {
        self.name
    }

    /// The numbers of chunks of layers that its ranks may have; the least is the usual one.
    pub fn chunks(self) -> RangeInclusive<usize> {
        self.generator.chunks()
    }

    /// By rank: the virtual stage of every chunk.
    pub fn virtual_stages(self, ranks: usize, chunks: usize) -> Vec<Vec<usize>> {
        let stages = |rank| (0..chunks).map(|chunk| self.generator.virtual_stage(ranks, rank, chunk)).collect();
        (0..ranks).map(stages).collect()
    }

    /// The memory bound of a rank: the most forward passes of all its chunks that it may have run and whose gradients are not yet
    /// summed.
    pub fn most_in_flight(self, of: PipeRank) -> usize {
        self.generator.most_in_flight(of).min(of.chunks * of.micro_batches)
    }

    /// Whether some rank computes weight gradients (W) apart from input gradients (B).
    pub fn separates_weight_grads(self) -> bool {
        self.generator.separates_weight_grads()
    }

    /// The bubble that it leaves at least, as a share of that of 1F1B, with this many chunks and equal times of F, B and W.
    pub fn least_bubble(self, chunks: usize) -> f64 {
        self.generator.least_bubble(chunks)
    }

    /// What one rank of a pipeline does.
    ///
    /// # Panics
    ///
    /// Where a generator does not keep its memory bound, or separates weight gradients and does not say so.
    pub fn slots(self, of: PipeRank) -> Vec<PipeSlot> {
        let slots = self.generator.slots(of);
        let (found, most) = (in_flight(&slots), self.generator.most_in_flight(of));
        assert!(found <= most, "{self} has {found} chunks in flight and promised at most {most}: {of:?}");
        let separate = slots.iter().any(|slot| slot.work == Work::WeightGrad);
        assert!(!separate || self.separates_weight_grads(), "{self} separates weight gradients and does not say so");
        slots
    }

    /// What the ranks of a pipeline do.
    pub fn pipeline(self, ranks: usize, chunks: usize, micro_batches: usize) -> Pipeline {
        let slots = |rank| self.slots(PipeRank { ranks, rank, chunks, micro_batches });
        Pipeline { virtual_stages: self.virtual_stages(ranks, chunks), slots: (0..ranks).map(slots).collect() }
    }
}

/// What every rank of a pipeline does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pipeline {
    /// The virtual stage of every chunk, by rank.
    pub virtual_stages: Vec<Vec<usize>>,
    /// By rank, in order.
    pub slots: Vec<Vec<PipeSlot>>,
}

impl Pipeline {
    /// How many virtual stages there are.
    pub fn stages(&self) -> usize {
        self.virtual_stages.iter().map(Vec::len).sum()
    }

    /// The rank of every virtual stage, and which of its chunks it is.
    pub fn places(&self) -> Vec<(usize, usize)> {
        let mut places = vec![(0, 0); self.stages()];
        for (rank, stages) in self.virtual_stages.iter().enumerate() {
            stages.iter().enumerate().for_each(|(chunk, stage)| places[*stage] = (rank, chunk));
        }
        places
    }

    /// By rank: the most forward passes of all its chunks that have run and whose gradients are not yet summed.
    pub fn in_flight(&self) -> Vec<usize> {
        self.slots.iter().map(|slots| in_flight(slots)).collect()
    }
}

fn in_flight(slots: &[PipeSlot]) -> usize {
    let (mut now, mut most) = (0usize, 0);
    for slot in slots {
        now += usize::from(slot.work == Work::Forward);
        most = most.max(now);
        now = now.saturating_sub(usize::from(slot.work.sums_gradients()));
    }
    most
}

impl Default for Schedule {
    fn default() -> Self {
        Self::USUAL
    }
}

impl PartialEq for Schedule {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Schedule {}

impl std::hash::Hash for Schedule {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl std::fmt::Debug for Schedule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl std::fmt::Display for Schedule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl Serialize for Schedule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}

/// A name that is no schedule's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, lockstep_ir::Hint)]
#[error("{0:?} is not a schedule")]
#[hint("choose one of {names}", names = Schedule::NAMES.join(", "))]
pub struct UnknownSchedule(pub String);

impl FromStr for Schedule {
    type Err = UnknownSchedule;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let found = Schedule::ALL.into_iter().find(|schedule| schedule.name() == name);
        found.ok_or_else(|| UnknownSchedule(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_ir::Hint;

    pub(super) const GPIPE: Schedule = Schedule::ALL[1];

    pub(super) fn named(name: &str) -> Schedule {
        name.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    pub(super) fn printed(schedule: Schedule, of: PipeRank) -> String {
        schedule.slots(of).iter().map(PipeSlot::to_string).collect::<Vec<_>>().join(" ")
    }

    /// Every schedule with the chunks it may have, up to four.
    pub(super) fn all() -> impl Iterator<Item = (Schedule, usize)> {
        let chunks = |schedule: Schedule| (1..=4).filter(move |chunks| schedule.chunks().contains(chunks));
        Schedule::ALL.into_iter().flat_map(move |schedule| chunks(schedule).map(move |chunks| (schedule, chunks)))
    }

    #[test]
    fn every_schedule_has_each_slot_once_and_each_kind_of_work_in_ascending_order() {
        for (schedule, chunks) in all() {
            for (ranks, micro_batches) in (1..=8).flat_map(|p| (0..=16).map(move |m| (p, m))) {
                for slots in schedule.pipeline(ranks, chunks, micro_batches).slots {
                    let kinds: std::collections::BTreeSet<_> = slots.iter().map(|s| (s.chunk, s.work)).collect();
                    for kind in &kinds {
                        let order: Vec<_> =
                            slots.iter().filter(|s| (s.chunk, s.work) == *kind).map(|s| s.micro_batch).collect();
                        assert_eq!(order, Vec::from_iter(0..micro_batches), "{schedule} {ranks}");
                    }
                    let works = if slots.iter().any(|s| s.work == Work::WeightGrad) { 3 } else { 2 };
                    assert!(micro_batches == 0 || kinds.len() == works * chunks, "{schedule} {ranks}");
                }
            }
        }
    }

    #[test]
    fn virtual_stages_and_places_are_inverse() {
        for (schedule, chunks) in all() {
            for ranks in 1..=8 {
                let pipeline = schedule.pipeline(ranks, chunks, 1);
                for (stage, (rank, chunk)) in pipeline.places().into_iter().enumerate() {
                    assert_eq!(pipeline.virtual_stages[rank][chunk], stage);
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "greedy has 2 chunks in flight and promised at most 1")]
    fn a_generator_that_breaks_its_memory_bound_is_found_out() {
        struct Greedy;
        impl Generator for Greedy {
            fn slots(&self, of: PipeRank) -> Vec<PipeSlot> {
                gpipe::GPipe.slots(of)
            }

            fn most_in_flight(&self, _of: PipeRank) -> usize {
                1
            }
        }
        Schedule::new("greedy", &Greedy).pipeline(2, 1, 2);
    }

    #[test]
    #[should_panic(expected = "silent separates weight gradients and does not say so")]
    fn a_generator_that_separates_weight_gradients_says_so() {
        struct Silent;
        impl Generator for Silent {
            fn slots(&self, of: PipeRank) -> Vec<PipeSlot> {
                zb_v::ZbV.slots(of)
            }
        }
        Schedule::new("silent", &Silent).pipeline(2, 2, 2);
    }

    #[test]
    fn schedules_are_read_by_their_names() {
        for schedule in Schedule::ALL {
            assert_eq!(schedule.name().parse(), Ok(schedule));
        }
        let error = "zigzag".parse::<Schedule>().expect_err("no such schedule");
        assert_eq!(
            error.with_hint(),
            "\"zigzag\" is not a schedule\nhint: choose one of 1f1b, gpipe, interleaved, zb-h1, zb-v"
        );
    }
}
