//! The search itself: a queue of what may be among the fastest, each looked at more closely in its turn.

use super::LayoutChoice;
use super::bound::{Bound, Composed, Cuts, DataCollectives, InFlight, in_flight, in_flight_by_rank, parts};
use super::budget::MOST_TIGHT;
use super::proxy::{LayerCosts, layer_costs, small_policy};
use super::queue::{Entry, Node};
use super::simple::simplest;
use super::space::{Data, Pipe, Space, Split};
use super::tally::Tally;
use super::whole::exact;
use super::{RankedLayout, SearchRequest, SearchResult};
use crate::parallel::all_in_parallel;
use crate::{Evaluated, PlanError, Result};
use lockstep_compile::balanced_stages;
use lockstep_config::{GradientPrecision, RecomputePolicy};
use lockstep_ir::{ContextParallel, Layout, Schedule};
use lockstep_sim::{Constants, Framework, Terms};
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// By how much bytes of a formula, or of an estimate, may be above those of the whole programs.
const BYTES_MARGIN: f64 = 0.05;
const ESTIMATED_BYTES_MARGIN: f64 = 0.01;

/// Micro-batches up to this many sequences have a small program for their first bound; larger ones are multiples of it.
const LARGEST_ALIKE: usize = 4;

/// Choices that are looked at more closely together: threads share them.
const ROUND: usize = 8;

/// Whole programs that a search compiles at most where it has found as many layouts as are wanted, and those for each of them besides.
/// The most that a search with its end by bounds has taken is 55.
const MOST_WHOLE: u64 = 160;
const WHOLE_EACH: u64 = 8;

/// Small programs that a search compiles at most before it looks at no more keys, and then at no more choices than those that it has
/// estimated: the best of these are compiled whole. The most that a search with its end by bounds has taken is 3,087.
const MOST_SMALL: u64 = 3_200;
const SMALL_OF_CHOICES: u64 = 800;

/// Choices with the same kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    split: Split,
    micro_batch: usize,
    recompute: RecomputePolicy,
    gradients: GradientPrecision,
    /// Whether weight gradients are computed apart from input gradients.
    apart: bool,
}

/// Ranks, schedule and chunks of a pipeline.
type PipeKey = (usize, &'static str, usize);

fn pipe_key(pipe: Pipe) -> PipeKey {
    (pipe.pp, pipe.schedule.name(), pipe.chunks)
}

/// What a closer look gave.
enum Looked {
    Key(Box<LayerCosts>),
    Choices(Vec<(Bound, LayoutChoice)>),
    Estimated(LayoutChoice, Bound),
    Exact(LayoutChoice, Box<Evaluated>),
}

/// A search that is under way.
pub(super) struct Search<'a> {
    pub(super) request: &'a SearchRequest<'a>,
    pub(super) space: Space<'a>,
    terms: Terms,
    framework: Framework,
    keys: Vec<Key>,
    /// By key, of those that have been looked at.
    costs: Vec<Option<LayerCosts>>,
    /// Choices with their bounds, the fastest first: a list for every pipeline of a key that has been looked at.
    lists: Vec<Vec<(f64, LayoutChoice)>>,
    queue: BinaryHeap<Entry>,
    /// What waits since as many small programs were compiled as may be.
    aside: Vec<Entry>,
    most_small: u64,
    made: u64,
    pub(super) best: Vec<RankedLayout>,
    /// By ranks of a split.
    pipes: BTreeMap<usize, Vec<Pipe>>,
    cuts: BTreeMap<PipeKey, Cuts>,
    collectives: Remembered<(Split, Data), DataCollectives>,
    /// By pipeline and micro-batches.
    in_flight: Remembered<(PipeKey, usize), InFlight>,
    in_flight_by_rank: Remembered<(PipeKey, usize), Arc<Vec<InFlight>>>,
    /// Of small programs that have been compiled for choices.
    known: Remembered<(Key, Data), LayerCosts>,
    /// Choices that recompute the least that the config allows and do not fit, with the least time of each and their bytes.
    pub(super) tight: Vec<(Bound, LayoutChoice)>,
    pub(super) tally: Tally,
}

/// What threads have found out, by what it is of.
type Remembered<K, V> = Mutex<BTreeMap<K, V>>;

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is known under a key, or is found out now.
fn remembered<K: Ord, V: Clone>(known: &Remembered<K, V>, key: K, find: impl FnOnce() -> V) -> V {
    let found = lock(known).get(&key).cloned();
    found.unwrap_or_else(|| {
        let value = find();
        lock(known).insert(key, value.clone());
        value
    })
}

impl<'a> Search<'a> {
    pub fn new(request: &'a SearchRequest<'a>) -> Self {
        let framework = request.trainer.map_or_else(Framework::lockstep, |trainer| trainer.framework().clone());
        let own = || Constants::builtin().terms(&framework, request.hardware);
        Self {
            terms: request.trainer.map_or_else(own, |trainer| trainer.terms()),
            request,
            space: Space::new(request),
            framework,
            keys: Vec::new(),
            costs: Vec::new(),
            lists: Vec::new(),
            queue: BinaryHeap::new(),
            aside: Vec::new(),
            most_small: MOST_SMALL,
            made: 0,
            best: Vec::new(),
            pipes: BTreeMap::new(),
            cuts: BTreeMap::new(),
            collectives: Mutex::default(),
            in_flight: Mutex::default(),
            in_flight_by_rank: Mutex::default(),
            known: Mutex::default(),
            tight: Vec::new(),
            tally: Tally::new(request.room.bytes),
        }
    }

    fn push(&mut self, seconds: f64, node: Node) {
        self.made += 1;
        self.queue.push(Entry { seconds, number: self.made, node });
    }

    /// The choice of a key that has no data parallelism.
    fn alone(&self, key: Key) -> LayoutChoice {
        let data = Data { replicate: 1, shard: 1, zero: 0, reshard: true };
        let schedule = Schedule::ALL.into_iter().find(|schedule| schedule.separates_weight_grads() == key.apart);
        let pipe = Pipe { pp: 1, schedule: schedule.unwrap_or(Schedule::USUAL), chunks: 1 };
        let own = self.space.choice(key.split, pipe, data, key.micro_batch, key.recompute, key.gradients);
        LayoutChoice { layout: Layout { micro_batches: 1, ..own.layout }, ..own }
    }

    /// All keys, each with the time of the kernels of the most favourable one that splits matrices alike.
    pub fn begin(&mut self, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<()> {
        let gpus = self.request.gpus;
        let splits = self.space.splits();
        let (policies, gradients) = (self.space.policies(), self.space.gradients());
        let narrowest = gradients.iter().copied().max().unwrap_or(GradientPrecision::Fp32);
        let mut favourable: BTreeMap<(usize, usize, usize), Key> = BTreeMap::new();
        for &split in &splits {
            let inside = split.tp * split.cp;
            if !self.pipes.contains_key(&inside) {
                let pipes = self.space.pipes(gpus / inside);
                self.pipes.insert(inside, pipes);
            }
            let mut sizes: Vec<usize> = Vec::new();
            for pipe in &self.pipes[&inside] {
                let ranks = gpus / (inside * pipe.pp);
                if !ranks.is_multiple_of(split.ep) {
                    continue;
                }
                let here = self.space.micro_batches(ranks);
                let each = self.space.data(ranks, split).len() * policies.len() * gradients.len();
                self.tally.counts.legal += (here.len() * each) as u64;
                sizes.extend(here);
            }
            sizes.sort_unstable();
            sizes.dedup();
            for micro_batch in sizes {
                let one = Split { cp: 1, context: ContextParallel::default(), ..split };
                let like = Split { sequence_parallel: split.tp > 1, ..one };
                let like = if splits.contains(&like) { like } else { one };
                let (recompute, small) = (small_policy(policies[0]), micro_batch.min(LARGEST_ALIKE));
                let alike = Key { split: like, micro_batch: small, recompute, gradients: narrowest, apart: false };
                favourable.entry((split.tp, split.ep, small)).or_insert(alike);
                for &recompute in &policies {
                    for &gradients in &gradients {
                        for apart in [false, true] {
                            self.keys.push(Key { split, micro_batch, recompute, gradients, apart });
                        }
                    }
                }
            }
        }
        if self.keys.is_empty() {
            return Err(PlanError::NoLayout(Box::new(self.space.nothing_divides())));
        }
        let asked: Vec<Key> = favourable.values().copied().collect();
        let costs = self.in_rounds(asked.len(), progress, &|i| self.costs_of(&self.alone(asked[i])))?;
        self.tally.counts.small += asked.len() as u64;
        let known: BTreeMap<(usize, usize, usize), LayerCosts> = favourable.into_keys().zip(costs).collect();
        if let Some(costs) = known.values().next() {
            self.cut(costs.flops);
        }
        self.costs = vec![None; self.keys.len()];
        for at in 0..self.keys.len() {
            let Key { split, micro_batch, .. } = self.keys[at];
            let small = micro_batch.min(LARGEST_ALIKE);
            let times = micro_batch as f64 / small as f64 / split.cp as f64;
            let costs = known[&(split.tp, split.ep, small)].on_tokens(times);
            // Where not even what is saved fits, nothing of the key does.
            if let Some(seconds) = self.favourable(self.keys[at], &costs) {
                self.push(seconds, Node::Key(at));
            }
        }
        Ok(())
    }

    /// The pipelines of a key by their index, with the micro-batches of each.
    fn pipes_of(&self, key: Key) -> impl Iterator<Item = (usize, Pipe, usize)> {
        let inside = key.split.tp * key.split.cp;
        let pipes = self.pipes[&inside].iter().copied().enumerate();
        pipes.filter(move |(_, pipe)| pipe.schedule.separates_weight_grads() == key.apart).filter_map(
            move |(i, pipe)| {
                let ranks = self.request.gpus / (inside * pipe.pp);
                let shares = ranks.is_multiple_of(key.split.ep);
                let divides = shares && self.space.micro_batches(ranks).contains(&key.micro_batch);
                divides.then(|| (i, pipe, self.space.accumulation(ranks, key.micro_batch)))
            },
        )
    }

    /// The least that a choice of a key takes, of costs that are no more than its own; none where nothing fits.
    fn favourable(&self, key: Key, costs: &LayerCosts) -> Option<f64> {
        let share = match key.recompute {
            RecomputePolicy::None => 1.0 - BYTES_MARGIN,
            RecomputePolicy::Selective => 0.3,
            RecomputePolicy::Full
            | RecomputePolicy::EveryK
            | RecomputePolicy::Sqrt
            | RecomputePolicy::List
            | RecomputePolicy::Budget => 0.0,
        };
        let of = |(_, pipe, micro_batches): (usize, Pipe, usize)| {
            let composed = self.composed(costs, pipe, micro_batches);
            let saved = composed.saved_bytes(self.first_in_flight(pipe, micro_batches));
            let fits = self.request.trainer.is_some() || saved * share <= self.request.room.bytes as f64;
            fits.then(|| composed.pipeline())
        };
        self.pipes_of(key).filter_map(of).min_by(f64::total_cmp)
    }

    /// Cuts the layers for every pipeline, as the compiler does.
    fn cut(&mut self, [layer, last]: [f64; 2]) {
        let layers = self.request.config.model.layers;
        let mut flops = vec![layer; layers];
        flops[layers - 1] = last;
        let mut known: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        let given = &self.request.config.parallel.stages;
        for &pipe in self.pipes.values().flatten() {
            let count = pipe.pp * pipe.chunks;
            let stages = known.entry(count).or_insert_with(|| {
                if given.len() == count {
                    return given.clone();
                }
                let cuts = balanced_stages(&flops, count);
                let ends = cuts.iter().copied().chain([layers]);
                let starts = [0].into_iter().chain(cuts.iter().copied());
                ends.zip(starts).map(|(end, start)| end - start).collect()
            });
            let own = self.request.trainer.and_then(|trainer| trainer.stages(pipe.pp));
            self.cuts.entry(pipe_key(pipe)).or_insert_with(|| Cuts::new(pipe, own.as_ref().unwrap_or(stages)));
        }
    }

    fn costs_of(&self, choice: &LayoutChoice) -> Result<LayerCosts> {
        layer_costs(self.request, choice, &self.terms, &self.framework)
    }

    /// Calls `each` for all indices on all threads; the results are in order.
    pub(super) fn in_rounds<T: Send>(
        &self,
        count: usize,
        progress: &(dyn Fn(u64, u64) + Sync),
        each: &(dyn Fn(usize) -> Result<T> + Sync),
    ) -> Result<Vec<T>> {
        let counts = &self.tally.counts;
        let heard = |_| progress(counts.small, counts.compiled);
        all_in_parallel(count, self.request.threads, each, &heard).into_iter().collect()
    }

    /// Whether enough is known: nothing that is left can be faster than what is wanted.
    fn is_done(&self, entry: &Entry) -> bool {
        let last = self.best.get(self.request.wanted - 1);
        last.is_some_and(|last| entry.least() > last.evaluated.forecast.step_s)
    }

    /// Whether as many programs were compiled as may be, and there are layouts to show: what is left could still be faster.
    pub fn is_spent(&mut self) -> bool {
        let small = self.tally.counts.small;
        if small >= self.most_small {
            let choices = small < self.most_small + SMALL_OF_CHOICES;
            let (looked_at, aside): (Vec<Entry>, Vec<Entry>) = self.queue.drain().partition(|entry| match entry.node {
                Node::Key(_) => false,
                Node::Pipe { .. } | Node::Bounded { .. } => choices,
                Node::Estimated(_) => true,
            });
            self.queue = looked_at.into();
            self.aside.extend(aside);
        }
        let most = MOST_WHOLE + WHOLE_EACH * self.request.wanted as u64;
        let enough = self.tally.counts.compiled >= most && self.best.len() >= self.request.wanted;
        let next = self.queue.peek().filter(|entry| !self.is_done(entry)).map(Entry::least);
        let aside = self.aside.iter().filter(|entry| !self.is_done(entry)).map(Entry::least).min_by(f64::total_cmp);
        let left = match next {
            Some(next) if enough => Some(aside.map_or(next, |aside| aside.min(next))),
            Some(_) => None,
            None if self.best.is_empty() => {
                // None of those that were estimated fits.
                self.most_small = if aside.is_some() { small + MOST_SMALL } else { self.most_small };
                self.queue.extend(self.aside.drain(..));
                None
            }
            None => aside,
        };
        self.tally.stopped_at(left);
        left.is_some()
    }

    /// Looks more closely at what may be the fastest; false where nothing is left to do.
    pub fn round(&mut self, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<bool> {
        let mut nodes = Vec::new();
        while nodes.len() < ROUND && self.queue.peek().is_some_and(|entry| !self.is_done(entry)) {
            let Some(Entry { node, .. }) = self.queue.pop() else { break };
            if let Node::Bounded { list, at } = node
                && let Some((seconds, _)) = self.lists[list].get(at + 1)
            {
                self.push(*seconds, Node::Bounded { list, at: at + 1 });
            }
            nodes.push(node);
        }
        let before = self.small_programs();
        let looked = self.in_rounds(nodes.len(), progress, &|i| self.look(&nodes[i]))?;
        self.tally.counts.small += self.small_programs() - before;
        for (node, looked) in nodes.iter().zip(looked) {
            match looked {
                Looked::Key(costs) => {
                    self.tally.counts.small += 1;
                    if let Node::Key(at) = node {
                        self.expand(*at, *costs);
                    }
                }
                Looked::Choices(choices) => self.list(choices),
                Looked::Estimated(choice, Bound { seconds, bytes }) => {
                    match self.may_fit(&choice, bytes, ESTIMATED_BYTES_MARGIN) {
                        true => self.push(seconds, Node::Estimated(choice)),
                        false => self.too_large(choice, Bound { seconds, bytes }),
                    }
                }
                Looked::Exact(choice, evaluated) => {
                    self.tally.counts.compiled += 1;
                    let verdict = self.request.room.verdict(&evaluated.stages, self.request.gpus);
                    match verdict.fits {
                        true => self.rank(RankedLayout { choice, evaluated: *evaluated }),
                        false => {
                            let (seconds, bytes) = (evaluated.forecast.step_s, verdict.planned_bytes as f64);
                            self.too_large(choice, Bound { seconds, bytes });
                        }
                    }
                }
            }
        }
        Ok(!nodes.is_empty())
    }

    /// Whether bytes that are above the true ones by a margin at most may be few enough. Of some policies, and of other frameworks, no
    /// formula knows.
    fn may_fit(&self, choice: &LayoutChoice, bytes: f64, margin: f64) -> bool {
        let unknown = small_policy(choice.recompute) != choice.recompute || self.request.trainer.is_some();
        unknown || bytes * (1.0 - margin) <= self.request.room.bytes as f64
    }

    /// Leaves out what does not fit, and remembers what would if a part of it were recomputed, or waited in the memory of the host.
    fn too_large(&mut self, choice: LayoutChoice, bound: Bound) {
        self.tally.too_large(choice, bound.bytes as u64);
        if self.space.policies().first() == Some(&choice.recompute) {
            self.tight.push((bound, choice));
            if self.tight.len() >= 2 * MOST_TIGHT {
                self.nearest();
            }
        }
    }

    pub(super) fn rank(&mut self, layout: RankedLayout) {
        let seconds = layout.evaluated.forecast.step_s;
        let at = self.best.partition_point(|known| known.evaluated.forecast.step_s <= seconds);
        self.best.insert(at, layout);
        if self.best.len() > self.request.wanted
            && let Some(RankedLayout { choice, evaluated }) = self.best.pop()
        {
            self.tally.slower(choice, evaluated.forecast.step_s);
        }
    }

    fn look(&self, node: &Node) -> Result<Looked> {
        match *node {
            Node::Key(at) => Ok(Looked::Key(Box::new(self.costs_of(&self.alone(self.keys[at]))?))),
            Node::Pipe { key, pipe } => Ok(Looked::Choices(self.choices(key, pipe))),
            Node::Bounded { list, at } => {
                let choice = self.lists[list][at].1;
                Ok(Looked::Estimated(choice, self.estimate(&choice)?))
            }
            Node::Estimated(choice) => Ok(Looked::Exact(choice, Box::new(exact(self.request, &choice)?))),
        }
    }

    /// How many have been compiled for choices.
    pub(super) fn small_programs(&self) -> u64 {
        lock(&self.known).len() as u64
    }

    /// A choice as its own small program has it.
    pub(super) fn estimate(&self, choice: &LayoutChoice) -> Result<Bound> {
        let (split, pipe, data) = parts(choice);
        let LayoutChoice { micro_batch, recompute, gradients, .. } = *choice;
        let key = Key { split, micro_batch, recompute, gradients, apart: pipe.schedule.separates_weight_grads() };
        let known = lock(&self.known).get(&(key, data)).copied();
        let costs = match known {
            Some(costs) => costs,
            None => self.costs_of(choice)?,
        };
        lock(&self.known).insert((key, data), costs);
        let micro_batches = choice.layout.micro_batches;
        let composed = self.composed(&costs, pipe, micro_batches);
        let place = (pipe_key(pipe), micro_batches);
        let by_rank = || Arc::new(in_flight_by_rank(pipe, micro_batches));
        let in_flight = remembered(&self.in_flight_by_rank, place, by_rank);
        Ok(Bound { seconds: composed.step(), bytes: composed.bytes(&in_flight) })
    }

    fn first_in_flight(&self, pipe: Pipe, micro_batches: usize) -> InFlight {
        remembered(&self.in_flight, (pipe_key(pipe), micro_batches), || in_flight(pipe, micro_batches))
    }

    fn composed<'c>(&'c self, costs: &'c LayerCosts, pipe: Pipe, micro_batches: usize) -> Composed<'c> {
        Composed { costs, pipe, cuts: &self.cuts[&pipe_key(pipe)], micro_batches, host_step: self.terms.host_step }
    }

    /// Bounds every pipeline of a key.
    fn expand(&mut self, at: usize, costs: LayerCosts) {
        let of = |(i, pipe, micro_batches): (usize, Pipe, usize)| {
            (i, self.composed(&costs, pipe, micro_batches).pipeline() + self.terms.host_step)
        };
        let bounds: Vec<(usize, f64)> = self.pipes_of(self.keys[at]).map(of).collect();
        for (pipe, seconds) in bounds {
            self.push(seconds, Node::Pipe { key: at, pipe });
        }
        self.costs[at] = Some(costs);
    }

    /// Every choice of a pipeline of a key, bounded.
    fn choices(&self, key: usize, pipe: usize) -> Vec<(Bound, LayoutChoice)> {
        let Some(costs) = &self.costs[key] else { return Vec::new() };
        let Key { split, micro_batch, recompute, gradients, .. } = self.keys[key];
        let inside = split.tp * split.cp;
        let pipe = self.pipes[&inside][pipe];
        let ranks = self.request.gpus / (inside * pipe.pp);
        let micro_batches = self.space.accumulation(ranks, micro_batch);
        let composed = self.composed(costs, pipe, micro_batches);
        let (pipeline_s, in_flight) = (composed.timed(), self.first_in_flight(pipe, micro_batches));
        let bounded = |data: Data| {
            let choice = self.space.choice(split, pipe, data, micro_batch, recompute, gradients);
            let (hardware, terms) = (self.request.hardware, &self.terms);
            // Ranks of a stage stand together, whatever the pipeline.
            let placed = || DataCollectives::new(&choice.layout, hardware, terms);
            let collectives = remembered(&self.collectives, (split, data), placed);
            (composed.bound(pipeline_s, split, data, in_flight, &collectives), choice)
        };
        self.space.data(ranks, split).into_iter().map(bounded).collect()
    }

    /// Lists choices that may fit by their bounds.
    fn list(&mut self, choices: Vec<(Bound, LayoutChoice)>) {
        let mut list: Vec<(f64, LayoutChoice)> = Vec::new();
        for (Bound { seconds, bytes }, choice) in choices {
            match self.may_fit(&choice, bytes, BYTES_MARGIN) {
                true => list.push((seconds, choice)),
                false => self.too_large(choice, Bound { seconds, bytes }),
            }
        }
        list.sort_by(|a, b| a.0.total_cmp(&b.0));
        if let Some((seconds, _)) = list.first() {
            self.push(*seconds, Node::Bounded { list: self.lists.len(), at: 0 });
        }
        self.lists.push(list);
    }

    pub fn end(mut self) -> Result<SearchResult> {
        if self.best.is_empty() {
            return Err(PlanError::NoLayout(Box::new(self.tally.nothing_fits(self.request))));
        }
        let simple = simplest(&self.best);
        let first = self.best.remove(simple);
        self.best.insert(0, first);
        let (counts, rejected) = self.tally.end(&self.best, self.request);
        Ok(SearchResult { best: self.best, counts, rejected, fixed: self.space.fixed })
    }
}
