//! Pipeline schedules: in which order a stage computes its micro-batches, and when, for given costs.

mod timeline;

pub use timeline::{Costs, Deadlock, Stuck, Timeline, WaitsFor, evaluate};

use serde::Serialize;
use std::str::FromStr;

/// What a stage does with a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// The forward pass of the stage's layers.
    Forward,
    /// Their input gradients, then their weight gradients.
    Backward,
}

impl Work {
    /// The letter in pictures and messages.
    pub const fn letter(self) -> char {
        match self {
            Work::Forward => 'F',
            Work::Backward => 'B',
        }
    }
}

/// One piece of a stage's work. Prints as `F3` or `B3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct PipeSlot {
    /// What is done.
    pub work: Work,
    /// The micro-batch it is done with.
    pub micro_batch: usize,
}

impl PipeSlot {
    /// The forward pass of a micro-batch.
    pub const fn forward(micro_batch: usize) -> Self {
        Self { work: Work::Forward, micro_batch }
    }

    /// The backward pass of a micro-batch.
    pub const fn backward(micro_batch: usize) -> Self {
        Self { work: Work::Backward, micro_batch }
    }
}

impl std::fmt::Display for PipeSlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.work.letter(), self.micro_batch)
    }
}

/// An order of the work of every stage. In each, the weight gradients of a stage are summed in ascending order of
/// micro-batches, so all of them give the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Schedule {
    /// All forward passes, then all backward passes.
    #[serde(rename = "gpipe")]
    GPipe,
    /// As few forward passes as keep the stages after it busy, then a forward and a backward pass in turn.
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
}

impl Schedule {
    /// All schedules, the usual one first.
    pub const ALL: [Schedule; 2] = [Schedule::OneForwardOneBackward, Schedule::GPipe];

    /// Their names, in the same order.
    pub const NAMES: [&str; 2] = [Schedule::ALL[0].name(), Schedule::ALL[1].name()];

    /// The name in configs and layouts.
    pub const fn name(self) -> &'static str {
        match self {
            Schedule::GPipe => "gpipe",
            Schedule::OneForwardOneBackward => "1f1b",
        }
    }

    /// The slots of one stage, in order.
    pub fn slots(self, stages: usize, stage: usize, micro_batches: usize) -> Vec<PipeSlot> {
        debug_assert!(stage < stages, "stage {stage} of {stages}");
        let ahead = self.ahead(stages, stage, micro_batches);
        let first = (0..ahead).map(PipeSlot::forward);
        let both = (ahead..micro_batches).flat_map(|m| [PipeSlot::forward(m), PipeSlot::backward(m - ahead)]);
        let rest = (micro_batches - ahead..micro_batches).map(PipeSlot::backward);
        first.chain(both).chain(rest).collect()
    }

    /// The most micro-batches of a stage whose forward pass has run and whose backward pass has not ended.
    pub fn in_flight(self, stages: usize, stage: usize, micro_batches: usize) -> usize {
        match self {
            Schedule::GPipe => micro_batches,
            Schedule::OneForwardOneBackward => micro_batches.min(stages - stage),
        }
    }

    /// Forward passes before the first that a backward pass follows at once.
    fn ahead(self, stages: usize, stage: usize, micro_batches: usize) -> usize {
        match self {
            Schedule::GPipe => micro_batches,
            Schedule::OneForwardOneBackward => micro_batches.min(stages - stage - 1),
        }
    }
}

impl std::fmt::Display for Schedule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is no schedule's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a schedule\nhint: choose one of {names}", names = Schedule::NAMES.join(", "))]
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

    fn printed(schedule: Schedule, stages: usize, stage: usize, micro_batches: usize) -> String {
        let slots = schedule.slots(stages, stage, micro_batches);
        slots.iter().map(PipeSlot::to_string).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn gpipe_runs_all_forward_passes_first() {
        for stage in 0..3 {
            assert_eq!(printed(Schedule::GPipe, 3, stage, 3), "F0 F1 F2 B0 B1 B2");
        }
    }

    #[test]
    fn one_forward_one_backward_runs_ahead_by_the_stages_after_it() {
        let printed = |stage| printed(Schedule::OneForwardOneBackward, 4, stage, 5);
        assert_eq!(printed(0), "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4");
        assert_eq!(printed(2), "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4");
        assert_eq!(printed(3), "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4");
    }

    #[test]
    fn one_forward_one_backward_takes_fewer_micro_batches_than_stages() {
        assert_eq!(printed(Schedule::OneForwardOneBackward, 8, 0, 2), "F0 F1 B0 B1");
        assert_eq!(printed(Schedule::OneForwardOneBackward, 8, 7, 2), "F0 B0 F1 B1");
        assert_eq!(printed(Schedule::OneForwardOneBackward, 8, 0, 0), "");
    }

    #[test]
    fn every_schedule_has_each_slot_once_and_both_kinds_of_work_in_ascending_order() {
        for schedule in Schedule::ALL {
            for (stages, micro_batches) in (1..=8).flat_map(|p| (0..=16).map(move |m| (p, m))) {
                for stage in 0..stages {
                    let slots = schedule.slots(stages, stage, micro_batches);
                    for work in [Work::Forward, Work::Backward] {
                        let order: Vec<_> = slots.iter().filter(|s| s.work == work).map(|s| s.micro_batch).collect();
                        assert_eq!(order, Vec::from_iter(0..micro_batches), "{schedule} {stages} {stage}");
                    }
                }
            }
        }
    }

    #[test]
    fn schedules_are_read_by_their_names() {
        for schedule in Schedule::ALL {
            assert_eq!(schedule.name().parse(), Ok(schedule));
        }
        let error = "zigzag".parse::<Schedule>().expect_err("no such schedule");
        assert_eq!(error.to_string(), "\"zigzag\" is not a schedule\nhint: choose one of 1f1b, gpipe");
    }
}
