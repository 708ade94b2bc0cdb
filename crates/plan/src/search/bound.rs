//! How long a step takes at least, and how many bytes it needs at least: formulas over what a layer costs.

use super::LayoutChoice;
use super::proxy::{LayerCosts, Linear};
use super::space::{Data, Pipe, Split};
use lockstep_compile::SEND_BUFFER_COPIES;
use lockstep_ir::schedule::{ChunkCosts, Costs, PipeRank, Work, evaluate};
use lockstep_ir::{Axes, Collective, Layout, MeshAxis};
use lockstep_sim::collective::{Group, PlacedCollective};
use lockstep_sim::{Hardware, Terms};

/// The collectives of data-parallel ranks: seconds of one byte, and of none, by pattern and axes.
#[derive(Clone, Copy, Debug)]
pub(super) struct DataCollectives {
    scatter: Rate,
    gather: Rate,
    all_reduce: Rate,
    /// Over copies of what is sharded.
    across: Rate,
    /// What overlapping costs, of the time that overlaps.
    overlap: f64,
}

#[derive(Clone, Copy, Debug)]
struct Rate {
    least: f64,
    per_byte: f64,
}

impl Rate {
    fn seconds(&self, bytes: f64) -> f64 {
        if bytes > 0.0 { self.least + self.per_byte * bytes } else { 0.0 }
    }
}

impl DataCollectives {
    /// Of the ranks of a layout.
    pub fn new(layout: &Layout, hardware: &Hardware, terms: &Terms) -> Self {
        const BYTES: u64 = 1 << 30;
        let rate = |pattern: Collective, over: Axes| {
            let group = Group::of(&layout.mesh, over, 0, hardware.cluster.gpus_per_node);
            let seconds = |bytes: u64| PlacedCollective::new(pattern, over, group, bytes, hardware).seconds(terms);
            let least = seconds(0);
            Rate { least, per_byte: (seconds(BYTES) - least).max(0.0) / BYTES as f64 }
        };
        Self {
            scatter: rate(Collective::ReduceScatter, Axes::ZERO),
            gather: rate(Collective::AllGather, Axes::ZERO),
            all_reduce: rate(Collective::AllReduce, Axes::TOKENS),
            across: rate(Collective::AllReduce, MeshAxis::DpReplicate.into()),
            overlap: terms.overlap_cost,
        }
    }
}

/// Chunks that a rank of a pipeline has in flight, by what is saved: from the forward pass to the backward pass, or to the input
/// gradients where these are separate; from the forward pass to the weight gradients; from input to weight gradients.
pub(super) type InFlight = [f64; 3];

/// Of the first rank, at least.
pub(super) fn in_flight(pipe: Pipe, micro_batches: usize) -> InFlight {
    let of = |micro_batches| PipeRank { ranks: pipe.pp, rank: 0, chunks: pipe.chunks, micro_batches };
    match pipe.schedule.separates_weight_grads() {
        false => [pipe.schedule.most_in_flight(of(micro_batches)) as f64, 0.0, 0.0],
        true => in_flight_of(pipe, of(micro_batches.min(3 * pipe.pp))),
    }
}

/// Of every rank.
pub(super) fn in_flight_by_rank(pipe: Pipe, micro_batches: usize) -> Vec<InFlight> {
    let few = micro_batches.min(4 * pipe.pp);
    let of = |rank| PipeRank { ranks: pipe.pp, rank, chunks: pipe.chunks, micro_batches: few };
    (0..pipe.pp).map(|rank| in_flight_of(pipe, of(rank))).collect()
}

fn in_flight_of(pipe: Pipe, of: PipeRank) -> InFlight {
    let (mut now, mut most) = ([0i64; 3], [0i64; 3]);
    for slot in pipe.schedule.slots(of) {
        let change = match slot.work {
            Work::Forward => [1, 1, 0],
            Work::InputGrad => [-1, 0, 1],
            Work::WeightGrad => [0, -1, -1],
            Work::Backward => [-1, -1, 0],
        };
        for i in 0..3 {
            now[i] += change[i];
            most[i] = most[i].max(now[i]);
        }
    }
    most.map(|most| most as f64)
}

/// The share of input gradients in a backward pass, at least.
const INPUT_GRADIENTS: f64 = 0.4;

/// How the layers of a model are cut for a pipeline.
#[derive(Clone, Debug)]
pub(super) struct Cuts {
    /// Every virtual stage.
    stages: Vec<Layers>,
    ranks: Vec<Layers>,
    /// By rank.
    virtual_stages: Vec<Vec<usize>>,
}

/// What a rank or a chunk of a pipeline has.
#[derive(Clone, Copy, Debug)]
struct Layers {
    layers: f64,
    chunks: f64,
    embedding: bool,
    head: bool,
}

impl Layers {
    fn of(&self, cost: &Linear) -> f64 {
        let extra = |has: bool, cost: f64| if has { cost } else { 0.0 };
        cost.base * self.chunks
            + cost.each * self.layers
            + extra(self.embedding, cost.first)
            + extra(self.head, cost.last)
            - extra(self.embedding && self.head, cost.shared)
    }

    /// The same without embedding and head.
    fn inner(&self) -> Self {
        Self { embedding: false, head: false, ..*self }
    }
}

impl Cuts {
    /// Of a pipeline whose virtual stages have this many layers each.
    pub fn new(pipe: Pipe, stages: &[usize]) -> Self {
        let last = stages.len() - 1;
        let stage = |(i, layers): (usize, &usize)| Layers {
            layers: *layers as f64,
            chunks: 1.0,
            embedding: i == 0,
            head: i == last,
        };
        let stages: Vec<Layers> = stages.iter().enumerate().map(stage).collect();
        let virtual_stages = pipe.schedule.virtual_stages(pipe.pp, pipe.chunks);
        let rank = |own: &Vec<usize>| Layers {
            layers: own.iter().map(|s| stages[*s].layers).sum(),
            chunks: own.len() as f64,
            embedding: own.contains(&0),
            head: own.contains(&last),
        };
        let ranks = virtual_stages.iter().map(rank).collect();
        Self { stages, ranks, virtual_stages }
    }

    /// The chunks of a rank.
    fn chunks(&self, rank: usize) -> impl Iterator<Item = &Layers> {
        self.virtual_stages[rank].iter().map(|stage| &self.stages[*stage])
    }
}

/// What a formula says of a choice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bound {
    pub seconds: f64,
    pub bytes: f64,
}

/// What is composed.
pub(super) struct Composed<'a> {
    pub costs: &'a LayerCosts,
    pub pipe: Pipe,
    pub cuts: &'a Cuts,
    pub micro_batches: usize,
    pub host_step: f64,
}

impl Composed<'_> {
    /// A step as its schedule runs it, of costs that hold for the choice itself. Messages take no time.
    pub fn step(&self) -> f64 {
        let costs = self.costs;
        let rank = self.heaviest();
        self.timed() + rank.of(&costs.last) + rank.of(&costs.update) + self.host_step
    }

    /// All micro-batches in the order of the schedule; where there are many, the last ones at the pace of the heaviest rank.
    pub fn timed(&self) -> f64 {
        let (pp, m) = (self.pipe.pp, self.micro_batches);
        if pp == 1 {
            return self.pipeline();
        }
        let run = if m > 4 * pp { 3 * pp + m % pp } else { m };
        let chunk = |stage: &Layers| {
            let weight_grad = stage.of(&self.costs.weight_grad);
            let input_grad = stage.of(&self.costs.backward) - weight_grad;
            ChunkCosts { forward: stage.of(&self.costs.forward), input_grad, weight_grad }
        };
        let chunks = self.cuts.stages.iter().map(chunk).collect();
        let pipeline = self.pipe.schedule.pipeline(pp, self.pipe.chunks, run);
        match evaluate(&pipeline, &Costs { chunks, transfer: 0.0 }, SEND_BUFFER_COPIES) {
            Ok(timeline) => timeline.total + (m - run) as f64 * self.heaviest().of(&self.both()),
            Err(_) => self.pipeline(),
        }
    }

    fn both(&self) -> Linear {
        self.costs.forward.plus(&self.costs.backward)
    }

    /// The rank that computes longest.
    fn heaviest(&self) -> Layers {
        let both = self.both();
        let ranks = self.cuts.ranks.iter().copied();
        let longest = ranks.max_by(|a, b| a.of(&both).total_cmp(&b.of(&both)));
        longest.unwrap_or_else(|| unreachable!("a pipeline has a rank"))
    }

    /// All micro-batches at least: as long as the heaviest rank computes, beside the bubble that the schedule leaves; and as the first
    /// takes to the last stage and the last back, with all others of the last chunk between them.
    pub fn pipeline(&self) -> f64 {
        let both = self.both();
        let most = self.heaviest().of(&both);
        let m = self.micro_batches as f64;
        if self.pipe.pp == 1 {
            return m * most;
        }
        let sum = |cost: &Linear| self.cuts.ranks.iter().map(|rank| rank.of(cost)).sum::<f64>();
        let fill = (sum(&both) - most).max(0.0) * self.pipe.schedule.least_bubble(self.pipe.chunks);
        let back = if self.pipe.schedule.separates_weight_grads() { INPUT_GRADIENTS } else { 1.0 };
        let there_and_back = sum(&self.costs.forward) + back * sum(&self.costs.backward);
        // Weight gradients that are separate wait until the last micro-batch is on its way back.
        let heaviest = self.heaviest();
        let between = heaviest.of(&self.costs.forward) + back * heaviest.of(&self.costs.backward);
        (m * most + fill).max(there_and_back + (m - 1.0) * between / self.pipe.chunks as f64)
    }

    /// A step at least, of costs without data parallelism whose micro-batches take this many seconds, with the chunks that the first rank
    /// has in flight.
    pub fn bound(
        &self,
        pipeline_s: f64,
        split: Split,
        data: Data,
        in_flight: InFlight,
        collectives: &DataCollectives,
    ) -> Bound {
        let costs = self.costs;
        // What is of experts is split over ep before.
        let shards = (data.shard * split.cp * split.ep) as f64;
        let m = self.micro_batches as f64;
        // The heaviest sets the pace; the first is the last to be done, and its gradients the last to be summed.
        let (rank, first) = (self.heaviest(), self.cuts.ranks[0]);
        let (forward, backward) = (rank.of(&costs.forward), rank.of(&costs.backward));
        let sharded = |bytes: f64, from: u8| if data.zero >= from { bytes / shards } else { bytes };
        let scatter = |rank: Layers| {
            let sums = rank.of(&costs.gradients);
            let copies = data.replicate > 1 && data.zero > 0;
            let across = if copies { collectives.across.seconds(sums / shards) } else { 0.0 };
            collectives.scatter.seconds(sums) + across
        };
        let gather = collectives.gather.seconds(rank.of(&costs.parameters));
        let update = sharded(rank.of(&costs.update), 1);
        // What kernels do not hide, and what hiding costs them.
        let over = |communication: f64, kernels: f64| {
            (communication - kernels).max(0.0) + collectives.overlap * communication.min(kernels)
        };
        let more = match data.zero {
            0 => over(collectives.all_reduce.seconds(first.of(&costs.gradients)), first.of(&costs.backward)) + update,
            1 => over(scatter(first), first.of(&costs.backward)) + update.max(gather),
            2 => m * over(scatter(rank), backward) + update.max(gather),
            _ => {
                let again = if data.reshard { gather } else { 0.0 };
                m * (over(gather, forward) + over(scatter(rank) + again, backward)) + update
            }
        };
        let state = |rank: &Layers| {
            let [parameters, sums, optimizer] =
                [&costs.parameters, &costs.gradients, &costs.optimizer].map(|cost| rank.of(cost));
            sharded(parameters, 3) + sharded(sums, 2) + sharded(optimizer, 1)
        };
        let last = self.cuts.ranks.len() - 1;
        let of = |(rank, in_flight): (usize, InFlight)| state(&self.cuts.ranks[rank]) + self.saved(rank, in_flight);
        let bytes = [(0, in_flight), (last, [1.0, 0.0, 0.0])].map(of);
        let frame = costs.frames.into_iter().fold(f64::INFINITY, f64::min);
        Bound { seconds: pipeline_s + more + self.host_step, bytes: bytes[0].max(bytes[1]) + frame }
    }

    /// Bytes of the rank that needs most, of costs that hold for the choice itself, with the chunks that ranks have in flight.
    pub fn bytes(&self, in_flight: &[InFlight]) -> f64 {
        let costs = self.costs;
        let state = costs.parameters.plus(&costs.gradients).plus(&costs.optimizer).plus(&costs.held);
        let state = state.plus(&costs.inputs.scaled(self.micro_batches as f64));
        let frame = |chunk: &Layers| {
            let [first, one, two, last] = costs.frames;
            let of = |has: bool, bytes: f64| if has { bytes } else { 0.0 };
            one.max(two).max(of(chunk.embedding, first)).max(of(chunk.head, last))
        };
        let of = |(rank, in_flight): (usize, &InFlight)| {
            let frame = self.cuts.chunks(rank).map(frame).fold(0.0, f64::max);
            let saved: f64 =
                costs.saved.iter().zip(in_flight).map(|(saved, n)| self.largest(rank, saved, false) * n).sum();
            self.cuts.ranks[rank].of(&state) + saved + frame
        };
        in_flight.iter().enumerate().map(of).fold(0.0, f64::max)
    }

    /// Bytes that micro-batches in flight save at least on the first rank.
    pub fn saved_bytes(&self, in_flight: InFlight) -> f64 {
        self.saved(0, in_flight)
    }

    fn saved(&self, rank: usize, in_flight: InFlight) -> f64 {
        self.costs.saved.iter().zip(in_flight).map(|(saved, n)| self.largest(rank, saved, true) * n).sum()
    }

    /// What the largest chunk of a rank saves; all have as much room.
    fn largest(&self, rank: usize, saved: &Linear, inner: bool) -> f64 {
        let of = |chunk: &Layers| if inner { chunk.inner().of(saved) } else { chunk.of(saved) };
        self.cuts.chunks(rank).map(of).fold(0.0, f64::max)
    }
}

/// The parts of a choice.
pub(super) fn parts(choice: &LayoutChoice) -> (Split, Pipe, Data) {
    let l = &choice.layout;
    let size = |axis: MeshAxis| l.mesh.size(axis);
    let (tp, cp, ep) = (size(MeshAxis::Tp), size(MeshAxis::Cp), size(MeshAxis::Ep));
    let split = Split { tp, sequence_parallel: l.sequence_parallel, cp, context: l.context, ep };
    let pipe = Pipe { pp: size(MeshAxis::Pp), schedule: l.schedule, chunks: l.chunks };
    let (replicate, shard) = (size(MeshAxis::DpReplicate), size(MeshAxis::DpShard));
    (split, pipe, Data { replicate, shard, zero: l.zero, reshard: l.reshard_after_forward })
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_ir::Schedule;
    use lockstep_ir::schedule::{Generator, PipeSlot};

    /// The order of ZB-H1, under a name that nothing knows.
    struct Renamed(Schedule);

    impl Generator for Renamed {
        fn slots(&self, of: PipeRank) -> Vec<PipeSlot> {
            self.0.slots(of)
        }

        fn most_in_flight(&self, of: PipeRank) -> usize {
            self.0.most_in_flight(of)
        }

        fn separates_weight_grads(&self) -> bool {
            true
        }

        fn least_bubble(&self, _chunks: usize) -> f64 {
            1.0 / 3.0
        }
    }

    /// The bound on a step of equal times of F, B and W, its time, and what is in flight.
    fn of(schedule: Schedule, pp: usize, micro_batches: usize) -> (f64, f64, InFlight) {
        let each = |each: f64| Linear { each, ..Linear::default() };
        let (forward, backward, weight_grad) = (each(1.0), each(2.0), each(1.0));
        let costs = LayerCosts { forward, backward, weight_grad, ..LayerCosts::default() };
        let pipe = Pipe { pp, schedule, chunks: *schedule.chunks().start() };
        let cuts = Cuts::new(pipe, &vec![2; pp * pipe.chunks]);
        let step = Composed { costs: &costs, pipe, cuts: &cuts, micro_batches, host_step: 0.0 };
        (step.pipeline(), step.timed(), in_flight(pipe, micro_batches))
    }

    #[test]
    fn what_a_schedule_is_called_does_not_matter_and_no_bound_is_above_its_time() {
        let zb_h1 = "zb-h1".parse().unwrap();
        let renamed = Schedule::new("renamed", Box::leak(Box::new(Renamed(zb_h1))));
        for (pp, micro_batches) in [(2, 4), (4, 8), (4, 32)] {
            assert_eq!(of(renamed, pp, micro_batches), of(zb_h1, pp, micro_batches));
            for schedule in Schedule::ALL {
                let (bound, timed, _) = of(schedule, pp, micro_batches);
                assert!(bound <= timed + 1e-9, "{schedule} pp={pp}: {bound} > {timed}");
            }
        }
    }
}
