//! Slots: which segments the work of a schedule needs, with which of them every node runs, and which copies of the saved regions each slot uses.
//!
//! A copy is taken where a lifetime begins, the lowest that is free, and given back where the lifetime ends. All chunks take
//! from the same copies.

use lockstep_ir::graph::{Phase, Source};
use lockstep_ir::program::Saved;
use lockstep_ir::schedule::{PipeSlot, Work};
use lockstep_ir::{Graph, Op, TypeError, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// A kind of work and the segment that does it.
pub(crate) struct WorkSegment {
    pub work: Work,
    pub name: &'static str,
    /// For the last micro-batch of a step, where that has reductions over ranks besides.
    pub last: &'static str,
    pub phases: &'static [Phase],
}

const FORWARD: WorkSegment =
    WorkSegment { work: Work::Forward, name: "forward", last: "forward_last", phases: &[Phase::Forward] };

const WHOLE: [WorkSegment; 2] = [
    FORWARD,
    WorkSegment {
        work: Work::Backward,
        name: "backward",
        last: "backward_last",
        phases: &[Phase::InputGrad, Phase::WeightGrad, Phase::Reduce],
    },
];

const SEPARATE: [WorkSegment; 3] = [
    FORWARD,
    WorkSegment { work: Work::InputGrad, name: "input_grad", last: "input_grad_last", phases: &[Phase::InputGrad] },
    WorkSegment {
        work: Work::WeightGrad,
        name: "weight_grad",
        last: "weight_grad_last",
        phases: &[Phase::WeightGrad, Phase::Reduce],
    },
];

/// Whether a schedule separates B and W.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Works {
    separate: bool,
}

impl Works {
    pub(crate) fn new(slots: &[PipeSlot]) -> Self {
        Self { separate: slots.iter().any(|s| s.work == Work::WeightGrad) }
    }

    /// The work that has the nodes of a phase; `None` for what is done once per step.
    pub(crate) fn of_phase(self, phase: Phase) -> Option<Work> {
        self.segments().iter().find(|s| s.phases.contains(&phase)).map(|s| s.work)
    }

    /// The segments of a chunk.
    pub(crate) fn segments(self) -> &'static [WorkSegment] {
        if self.separate { &SEPARATE } else { &WHOLE }
    }

    /// The saved regions that it needs.
    pub(crate) fn saved(self) -> &'static [Saved] {
        if self.separate { &Saved::ALL } else { &[Saved::ForwardToBackward] }
    }

    /// The region of what is made in one kind of work and last read in another.
    pub(crate) fn region(self, from: Option<Work>, to: Option<Work>) -> Saved {
        match (from, to) {
            _ if !self.separate => Saved::ForwardToBackward,
            (Some(Work::Forward), Some(Work::InputGrad)) => Saved::ForwardToBackward,
            (Some(Work::Forward), _) => Saved::ForwardToWeightGrad,
            _ => Saved::BackwardToWeightGrad,
        }
    }
}

/// The phase with which every node runs. A gradient is received with the input gradients, whoever reads it first. So are weight
/// gradients summed that are no matmuls (of norms, biases and tables): they take little time, and what they read need not be saved
/// until W.
pub(crate) fn phases(g: &Graph) -> Result<Vec<Phase>, TypeError> {
    // Values that are there only with the weight gradients.
    let mut late: BTreeSet<ValueId> = BTreeSet::new();
    let mut phases = Vec::new();
    for node in &g.nodes {
        let wanted: Vec<bool> = node.outputs.iter().map(Option::is_some).collect();
        let sums = |v: &ValueId| matches!(g.get(*v).source, Source::Node { into: Some(_) });
        let summed = |flops: u128| {
            let late = node.inputs.iter().any(|v| late.contains(v));
            flops == 0 && !late && !node.op.communicates() && node.outputs.iter().flatten().all(sums)
        };
        let received = matches!(node.op, Op::Receive { .. });
        let early = received || summed(node.op.flops(&g.input_types(node), &wanted)?.hardware);
        phases.push(if early && node.phase == Phase::WeightGrad { Phase::InputGrad } else { node.phase });
        if phases.last() == Some(&Phase::WeightGrad) {
            late.extend(node.outputs.iter().flatten());
        }
    }
    Ok(phases)
}

/// Whether a micro-batch takes a copy of the region in this work.
fn begins(saved: Saved, work: Work) -> bool {
    match saved {
        Saved::ForwardToBackward | Saved::ForwardToWeightGrad => work == Work::Forward,
        Saved::BackwardToWeightGrad => work == Work::InputGrad,
    }
}

/// Whether it gives the copy back after this work.
fn ends(saved: Saved, work: Work) -> bool {
    match saved {
        Saved::ForwardToBackward => matches!(work, Work::Backward | Work::InputGrad),
        Saved::ForwardToWeightGrad | Saved::BackwardToWeightGrad => work == Work::WeightGrad,
    }
}

/// Copies of each region that a schedule needs, in the order of [`Saved::ALL`].
pub(crate) fn copies(slots: &[PipeSlot]) -> [usize; Saved::ALL.len()] {
    allot(slots)
        .into_iter()
        .fold([1; Saved::ALL.len()], |most, copies| std::array::from_fn(|s| most[s].max(copies[s] + 1)))
}

/// The copies that every slot uses, in the order of [`Saved::ALL`]; 0 of what it does not use.
pub(crate) fn allot(slots: &[PipeSlot]) -> Vec<[usize; Saved::ALL.len()]> {
    let mut copies = vec![[0; Saved::ALL.len()]; slots.len()];
    for &saved in Works::new(slots).saved() {
        let mut free: Vec<bool> = Vec::new();
        let mut held: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        for (slot, copies) in slots.iter().zip(&mut copies) {
            let of = (slot.chunk, slot.micro_batch);
            if begins(saved, slot.work) {
                let lowest = free.iter().position(|free| *free).unwrap_or(free.len());
                free.resize(free.len().max(lowest + 1), false);
                free[lowest] = false;
                held.insert(of, lowest);
            }
            copies[saved as usize] = held.get(&of).copied().unwrap_or(0);
            if ends(saved, slot.work)
                && let Some(copy) = held.remove(&of)
            {
                free[copy] = true;
            }
        }
    }
    copies
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_ir::Schedule;

    fn check(slots: &[PipeSlot], expected: &str) {
        let text = |(slot, copies): (&PipeSlot, [usize; 3])| {
            let copies: Vec<String> =
                Works::new(slots).saved().iter().map(|s| copies[*s as usize].to_string()).collect();
            format!("{slot}:{}", copies.join("/"))
        };
        let all: Vec<String> = slots.iter().zip(allot(slots)).map(text).collect();
        assert_eq!(all.join(" "), expected);
    }

    #[test]
    fn copies_come_round_in_order_of_micro_batches() {
        for schedule in ["1f1b", "gpipe"].map(|name| name.parse::<Schedule>().unwrap()) {
            for (ranks, m) in (1..=6).flat_map(|p| (1..=12).map(move |m| (p, m))) {
                let pipeline = schedule.pipeline(ranks, 1, m);
                for (slots, in_flight) in pipeline.slots.iter().zip(pipeline.in_flight()) {
                    for (slot, copies) in slots.iter().zip(allot(slots)) {
                        assert_eq!(copies, [slot.micro_batch % in_flight, 0, 0]);
                    }
                }
            }
        }
    }

    #[test]
    fn what_waits_for_weight_gradients_has_copies_of_its_own() {
        let f = |m| PipeSlot::forward(0, m);
        let (b, w) = (|m| PipeSlot::input_grad(0, m), |m| PipeSlot::weight_grad(0, m));
        check(
            &[f(0), b(0), f(1), b(1), w(0), f(2), b(2), w(1), w(2)],
            "F0:0/0/0 B0:0/0/0 F1:0/1/0 B1:0/1/1 W0:0/0/0 F2:0/0/0 B2:0/0/0 W1:0/1/1 W2:0/0/0",
        );
    }

    #[test]
    fn chunks_take_from_the_same_copies() {
        let (f, b) = (PipeSlot::forward, PipeSlot::backward);
        check(&[f(0, 0), f(1, 0), b(1, 0), f(0, 1), b(0, 0), b(0, 1)], "F0:0 F0.1:1 B0.1:1 F1:1 B0:0 B1:1");
    }
}
