//! The search over layouts: which of all that fit a model, a batch and a number of GPUs is the fastest.
//!
//! Every choice has a bound on its step time, and is looked at more closely only while that bound could still put it among the
//! fastest. First all choices with the same kernels (a [`Key`]) share one: the time of their kernels alone, without communication,
//! bubble or recomputation. Then a small program of the key is compiled, and formulas over its layers bound every choice
//! of it, with its pipeline, the collectives of its data parallelism and its bytes ([`bound`]). Then a small program of the choice
//! itself is composed to an estimate ([`proxy`]). What is still among the fastest is compiled whole and simulated ([`evaluate`]):
//! only such choices are results. The order does not depend on threads.

mod bound;
mod proxy;
mod space;
mod tally;

pub use space::LayoutChoice;
pub use tally::{Rejection, SearchCounts};

use crate::parallel::in_parallel;
use crate::{Evaluated, Machine, PlanError, Rates, Room, evaluate};
use bound::{Composed, Cuts, DataCollectives, in_flight, parts, separate};
use lockstep_compile::balanced_stages;
use lockstep_config::{Config, GradientPrecision, RecomputePolicy};
use lockstep_sim::{Constants, Framework, Hardware, Terms};
use proxy::{LayerCosts, layer_costs, small_policy};
use space::{Data, Pipe, Space, Split};
use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::{Mutex, PoisonError};
use tally::Tally;

/// What a search is for.
#[derive(Clone)]
pub struct SearchRequest<'a> {
    /// What compiles.
    pub machine: &'a dyn Machine,
    /// The run.
    pub config: &'a Config,
    /// How many GPUs it has.
    pub gpus: usize,
    /// The GPUs.
    pub hardware: &'a Hardware,
    /// Memory of each.
    pub room: &'a Room,
    /// Whether keys that the config gives are searched too.
    pub free: bool,
    /// How many layouts are wanted.
    pub wanted: usize,
    /// Threads that search.
    pub threads: usize,
}

/// A layout with what it costs.
#[derive(Clone, Debug)]
pub struct RankedLayout {
    /// What was chosen.
    pub choice: LayoutChoice,
    /// Its programs, simulated.
    pub evaluated: Evaluated,
}

/// What a search found.
#[derive(Clone, Debug)]
pub struct SearchResult {
    /// The fastest that fit, in order; first the simplest of those that are as fast within [`SIMPLER`].
    pub best: Vec<RankedLayout>,
    /// How many were looked at.
    pub counts: SearchCounts,
    /// What was left out, by reason.
    pub rejected: Vec<Rejection>,
    /// Keys that the config fixes.
    pub fixed: Vec<&'static str>,
}

/// Of layouts whose step times differ by less than this share, the simplest is preferred.
pub const SIMPLER: f64 = 0.005;

/// By how much a formula, or an estimate, may be above the simulated time.
const FORMULA_MARGIN: f64 = 0.005;
const ESTIMATE_MARGIN: f64 = 0.005;

/// The same for bytes.
const BYTES_MARGIN: f64 = 0.05;

/// Micro-batches up to so many sequences have a small program for their first bound; larger ones are multiples of it.
const LARGEST_ALIKE: usize = 4;

/// Choices that are looked at more closely together: threads share them.
const ROUND: usize = 8;

/// Choices with the same kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    split: Split,
    micro_batch: usize,
    recompute: RecomputePolicy,
}

/// Ranks, schedule and chunks of a pipeline.
type PipeKey = (usize, &'static str, usize);

/// What a small program depends on.
type Kernels = (Key, Data, GradientPrecision, bool);

/// What is known of some choices.
#[derive(Clone, Copy, Debug)]
enum Node {
    /// By index.
    Key(usize),
    /// A choice of a key that has been expanded, and those that come after it.
    Bounded {
        key: usize,
        at: usize,
    },
    Estimated(LayoutChoice),
}

struct Entry {
    seconds: f64,
    /// In the order of their making.
    number: u64,
    node: Node,
}

impl Entry {
    /// The least that its best choice takes.
    fn least(&self) -> f64 {
        match self.node {
            Node::Key(_) | Node::Bounded { .. } => self.seconds * (1.0 - FORMULA_MARGIN),
            Node::Estimated(_) => self.seconds * (1.0 - ESTIMATE_MARGIN),
        }
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The fastest is the greatest.
impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        other.least().total_cmp(&self.least()).then(other.number.cmp(&self.number))
    }
}

/// What a closer look gave.
enum Looked {
    /// With weight gradients in the backward pass, and apart.
    Key(Box<[LayerCosts; 2]>),
    Estimated(LayoutChoice, f64, f64),
    Exact(LayoutChoice, Box<Evaluated>),
}

/// A search that is under way.
struct Search<'a> {
    request: &'a SearchRequest<'a>,
    space: Space<'a>,
    terms: Terms,
    framework: Framework,
    keys: Vec<Key>,
    /// By key: its choices with their bounds, the fastest first.
    choices: Vec<Vec<(f64, LayoutChoice)>>,
    queue: BinaryHeap<Entry>,
    made: u64,
    best: Vec<RankedLayout>,
    collectives: BTreeMap<(Split, usize, usize, usize), DataCollectives>,
    /// By ranks of a split.
    pipes: BTreeMap<usize, Vec<Pipe>>,
    /// By pipeline: ranks, schedule and chunks.
    cuts: BTreeMap<PipeKey, Cuts>,
    /// By pipeline and micro-batches.
    in_flight: Mutex<BTreeMap<(PipeKey, usize), [f64; 3]>>,
    /// Of small programs that have been compiled for choices.
    known: Mutex<BTreeMap<Kernels, LayerCosts>>,
    tally: Tally,
}

/// Finds the fastest layouts. `progress` hears how many small programs and how many whole ones are compiled.
pub fn search(request: &SearchRequest, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<SearchResult, PlanError> {
    let framework = Framework::lockstep();
    let space = Space::new(request.config, request.gpus, request.free);
    let mut search = Search {
        terms: Constants::builtin().terms(&framework, request.hardware),
        request,
        space,
        framework,
        keys: Vec::new(),
        choices: Vec::new(),
        queue: BinaryHeap::new(),
        made: 0,
        best: Vec::new(),
        collectives: BTreeMap::new(),
        pipes: BTreeMap::new(),
        cuts: BTreeMap::new(),
        in_flight: Mutex::default(),
        known: Mutex::default(),
        tally: Tally::new(request.room.bytes),
    };
    search.begin(progress)?;
    while search.round(progress)? {}
    search.end()
}

/// Every choice that divides, in no order that means anything: what a search without bounds would look at.
pub fn every_choice(request: &SearchRequest) -> Vec<LayoutChoice> {
    let space = Space::new(request.config, request.gpus, request.free);
    let mut all = Vec::new();
    for split in space.splits() {
        for pipe in space.pipes(request.gpus / (split.tp * split.cp)) {
            let ranks = request.gpus / (split.tp * split.cp * pipe.pp);
            for micro_batch in space.micro_batches(ranks) {
                for data in space.data(ranks, split.cp) {
                    for recompute in space.policies() {
                        for gradients in space.gradients() {
                            all.push(space.choice(split, pipe, data, micro_batch, recompute, gradients));
                        }
                    }
                }
            }
        }
    }
    all
}

/// The fastest that a layout is with any micro-batch, recompute policy and type of gradients that the config leaves open; where
/// none fits, the one that needs least. None where it does not divide the batch.
pub fn at_layout(request: &SearchRequest, layout: &lockstep_ir::Layout) -> Result<Option<RankedLayout>, PlanError> {
    let space = Space::new(request.config, request.gpus, request.free);
    let (_, _, data) = parts(&LayoutChoice { layout: *layout, ..LayoutChoice::of(request.config) });
    let ranks = data.replicate * data.shard;
    let mut all = Vec::new();
    for micro_batch in space.micro_batches(ranks) {
        for recompute in space.policies() {
            for gradients in space.gradients() {
                let layout = lockstep_ir::Layout { micro_batches: space.accumulation(ranks, micro_batch), ..*layout };
                all.push(LayoutChoice { layout, micro_batch, recompute, gradients });
            }
        }
    }
    let found: Vec<Mutex<Option<Result<Evaluated, PlanError>>>> = all.iter().map(|_| Mutex::new(None)).collect();
    let one = |i: usize| {
        let config = all[i].config(request.config);
        let evaluated = evaluate(request.machine, &config, Rates::Catalogue(request.hardware));
        *found[i].lock().unwrap_or_else(PoisonError::into_inner) = Some(evaluated);
    };
    in_parallel(all.len(), request.threads, &one, &|_| {});
    let mut best: Option<((bool, f64), RankedLayout)> = None;
    for (choice, found) in all.into_iter().zip(found) {
        let Some(evaluated) = found.into_inner().unwrap_or_else(PoisonError::into_inner) else { continue };
        let evaluated = evaluated?;
        let verdict = request.room.verdict(&evaluated.stages, request.gpus);
        let rank = match verdict.fits {
            true => (false, evaluated.forecast.step_s),
            false => (true, verdict.planned_bytes as f64),
        };
        if best.as_ref().is_none_or(|(known, _)| rank < *known) {
            best = Some((rank, RankedLayout { choice, evaluated }));
        }
    }
    Ok(best.map(|(_, layout)| layout))
}

impl Search<'_> {
    fn push(&mut self, seconds: f64, node: Node) {
        self.made += 1;
        self.queue.push(Entry { seconds, number: self.made, node });
    }

    /// The choice of a key that has no data parallelism.
    fn alone(&self, key: Key) -> LayoutChoice {
        let data = Data { replicate: 1, shard: 1, zero: 0, reshard: true };
        let pipe = Pipe { pp: 1, schedule: lockstep_ir::Schedule::USUAL, chunks: 1 };
        let own = self.space.choice(key.split, pipe, data, key.micro_batch, key.recompute, GradientPrecision::Fp32);
        let layout = lockstep_ir::Layout { micro_batches: 1, ..own.layout };
        LayoutChoice { layout, ..own }
    }

    /// All keys, each with the time of the kernels of the most favourable one that splits matrices alike.
    fn begin(&mut self, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<(), PlanError> {
        let gpus = self.request.gpus;
        let splits = self.space.splits();
        let policies = self.space.policies();
        let mut favourable: BTreeMap<(usize, usize), Key> = BTreeMap::new();
        for &split in &splits {
            let inside = split.tp * split.cp;
            if !self.pipes.contains_key(&inside) {
                let pipes = self.space.pipes(gpus / inside);
                self.pipes.insert(inside, pipes);
            }
            let mut sizes: Vec<usize> = Vec::new();
            for pipe in &self.pipes[&inside] {
                let ranks = gpus / (inside * pipe.pp);
                let here = self.space.micro_batches(ranks);
                let each = self.space.data(ranks, split.cp).len() * policies.len() * self.space.gradients().len();
                self.tally.counts.legal += (here.len() * each) as u64;
                sizes.extend(here);
            }
            sizes.sort_unstable();
            sizes.dedup();
            for micro_batch in sizes {
                let like = Split { cp: 1, gather: false, sequence_parallel: split.tp > 1, ..split };
                let like = if splits.contains(&like) { like } else { Split { cp: 1, gather: false, ..split } };
                let (recompute, micro_batch_alike) = (small_policy(policies[0]), micro_batch.min(LARGEST_ALIKE));
                let alike = Key { split: like, micro_batch: micro_batch_alike, recompute };
                favourable.entry((split.tp, micro_batch_alike)).or_insert(alike);
                for &recompute in &policies {
                    self.keys.push(Key { split, micro_batch, recompute });
                }
            }
        }
        if self.keys.is_empty() {
            return Err(PlanError::NoLayout(Box::new(self.space.nothing_divides())));
        }
        let asked: Vec<Key> = favourable.values().copied().collect();
        let costs = self.in_rounds(asked.len(), progress, &|i| self.costs(&self.alone(asked[i])))?;
        self.tally.counts.small += asked.len() as u64;
        let known: BTreeMap<(usize, usize), LayerCosts> = favourable.into_keys().zip(costs).collect();
        if let Some(costs) = known.values().next() {
            self.cut(costs.flops);
        }
        self.choices = vec![Vec::new(); self.keys.len()];
        for at in 0..self.keys.len() {
            let Key { split, micro_batch, .. } = self.keys[at];
            let small = micro_batch.min(LARGEST_ALIKE);
            let times = micro_batch as f64 / small as f64 / split.cp as f64;
            let costs = known[&(split.tp, small)].on_tokens(times);
            // Where not even what is saved fits, nothing of the key does.
            if let Some(seconds) = self.favourable(self.keys[at], &costs) {
                self.push(seconds, Node::Key(at));
            }
        }
        Ok(())
    }

    /// The least that a choice of a key takes, of costs that are no more than its own; none where nothing fits.
    fn favourable(&self, key: Key, costs: &LayerCosts) -> Option<f64> {
        let Key { split, micro_batch, recompute } = key;
        let inside = split.tp * split.cp;
        let share = match recompute {
            RecomputePolicy::None => 1.0 - BYTES_MARGIN,
            RecomputePolicy::Selective => 0.3,
            RecomputePolicy::Full
            | RecomputePolicy::EveryK
            | RecomputePolicy::Sqrt
            | RecomputePolicy::List
            | RecomputePolicy::Budget => 0.0,
        };
        let of = |pipe: &Pipe| {
            let ranks = self.request.gpus / (inside * pipe.pp);
            if !self.space.micro_batches(ranks).contains(&micro_batch) {
                return None;
            }
            let composed = self.composed(costs, *pipe, self.space.accumulation(ranks, micro_batch));
            let fits = composed.saved_bytes() * share <= self.request.room.bytes as f64;
            fits.then(|| composed.pipeline())
        };
        self.pipes[&inside].iter().filter_map(of).min_by(f64::total_cmp)
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
            let key = (pipe.pp, pipe.schedule.name(), pipe.chunks);
            self.cuts.entry(key).or_insert_with(|| Cuts::new(pipe, stages.clone()));
        }
    }

    fn costs(&self, choice: &LayoutChoice) -> Result<LayerCosts, PlanError> {
        layer_costs(self.request, choice, &self.terms, &self.framework)
    }

    /// Calls `each` for all indices on all threads; the results are in order.
    fn in_rounds<T: Send>(
        &self,
        count: usize,
        progress: &(dyn Fn(u64, u64) + Sync),
        each: &(dyn Fn(usize) -> Result<T, PlanError> + Sync),
    ) -> Result<Vec<T>, PlanError> {
        let found: Vec<Mutex<Option<Result<T, PlanError>>>> = (0..count).map(|_| Mutex::new(None)).collect();
        let one = |i: usize| *found[i].lock().unwrap_or_else(PoisonError::into_inner) = Some(each(i));
        let counts = &self.tally.counts;
        in_parallel(count, self.request.threads, &one, &|_| progress(counts.small, counts.compiled));
        let taken = |found: Mutex<Option<_>>| found.into_inner().unwrap_or_else(PoisonError::into_inner);
        found.into_iter().filter_map(taken).collect()
    }

    /// Whether enough is known: nothing that is left can be faster than what is wanted.
    fn is_done(&self, entry: &Entry) -> bool {
        let last = self.best.get(self.request.wanted - 1);
        last.is_some_and(|last| entry.least() > last.evaluated.forecast.step_s)
    }

    /// Looks more closely at what may be the fastest; false where nothing is left to do.
    fn round(&mut self, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<bool, PlanError> {
        let mut nodes = Vec::new();
        while nodes.len() < ROUND && self.queue.peek().is_some_and(|entry| !self.is_done(entry)) {
            let Some(Entry { node, .. }) = self.queue.pop() else { break };
            if let Node::Bounded { key, at } = node
                && let Some((seconds, _)) = self.choices[key].get(at + 1)
            {
                self.push(*seconds, Node::Bounded { key, at: at + 1 });
            }
            nodes.push(node);
        }
        let looked = self.in_rounds(nodes.len(), progress, &|i| self.look(&nodes[i]))?;
        for (node, looked) in nodes.iter().zip(looked) {
            match looked {
                Looked::Key(costs) => {
                    self.tally.counts.small += 2;
                    if let Node::Key(at) = node {
                        self.expand(*at, &costs);
                    }
                }
                Looked::Estimated(choice, seconds, bytes) => {
                    self.tally.counts.small += 1;
                    match self.may_fit(&choice, bytes) {
                        true => self.push(seconds, Node::Estimated(choice)),
                        false => self.tally.too_large(choice, bytes as u64),
                    }
                }
                Looked::Exact(choice, evaluated) => {
                    self.tally.counts.compiled += 1;
                    let verdict = self.request.room.verdict(&evaluated.stages, self.request.gpus);
                    match verdict.fits {
                        true => self.rank(RankedLayout { choice, evaluated: *evaluated }),
                        false => self.tally.too_large(choice, verdict.planned_bytes),
                    }
                }
            }
        }
        Ok(!nodes.is_empty())
    }

    /// Whether bytes that a formula gives may be few enough; of some policies no formula knows.
    fn may_fit(&self, choice: &LayoutChoice, bytes: f64) -> bool {
        let unknown = small_policy(choice.recompute) != choice.recompute;
        unknown || bytes * (1.0 - BYTES_MARGIN) <= self.request.room.bytes as f64
    }

    fn rank(&mut self, layout: RankedLayout) {
        let seconds = layout.evaluated.forecast.step_s;
        let at = self.best.partition_point(|known| known.evaluated.forecast.step_s <= seconds);
        self.best.insert(at, layout);
        if self.best.len() > self.request.wanted
            && let Some(RankedLayout { choice, evaluated }) = self.best.pop()
        {
            self.tally.slower(choice, evaluated.forecast.step_s);
        }
    }

    fn look(&self, node: &Node) -> Result<Looked, PlanError> {
        match *node {
            Node::Key(at) => {
                let Key { split, .. } = self.keys[at];
                let choice = self.alone(self.keys[at]);
                let pipe = self.pipes[&(split.tp * split.cp)].iter().find(|pipe| separate(pipe.schedule));
                let apart = pipe.map(|pipe| {
                    let layout = lockstep_ir::Layout { schedule: pipe.schedule, chunks: pipe.chunks, ..choice.layout };
                    self.costs(&LayoutChoice { layout, ..choice })
                });
                let together = self.costs(&choice)?;
                Ok(Looked::Key(Box::new([together, apart.transpose()?.unwrap_or(together)])))
            }
            Node::Bounded { key, at } => {
                let choice = self.choices[key][at].1;
                let (_, pipe, data) = parts(&choice);
                let kernels = (self.keys[key], data, choice.gradients, separate(pipe.schedule));
                let lock = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
                let known = lock().get(&kernels).copied();
                let costs = match known {
                    Some(costs) => costs,
                    None => self.costs(&choice)?,
                };
                lock().insert(kernels, costs);
                let composed = self.composed(&costs, pipe, choice.layout.micro_batches);
                Ok(Looked::Estimated(choice, composed.step(), composed.bytes()))
            }
            Node::Estimated(choice) => {
                let config = choice.config(self.request.config);
                let evaluated = evaluate(self.request.machine, &config, Rates::Catalogue(self.request.hardware))?;
                Ok(Looked::Exact(choice, Box::new(evaluated)))
            }
        }
    }

    fn composed<'c>(&'c self, costs: &'c LayerCosts, pipe: Pipe, micro_batches: usize) -> Composed<'c> {
        let key = (pipe.pp, pipe.schedule.name(), pipe.chunks);
        let lock = || self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        let known = lock().get(&(key, micro_batches)).copied();
        let in_flight = known.unwrap_or_else(|| in_flight(pipe, micro_batches));
        lock().insert((key, micro_batches), in_flight);
        Composed { costs, pipe, cuts: &self.cuts[&key], micro_batches, in_flight, host_step: self.terms.host_step }
    }

    /// Bounds every choice of a key.
    fn expand(&mut self, at: usize, [together, apart]: &[LayerCosts; 2]) {
        let Key { split, micro_batch, recompute } = self.keys[at];
        let (gpus, inside) = (self.request.gpus, split.tp * split.cp);
        let mut all: Vec<(f64, LayoutChoice)> = Vec::new();
        for pipe in self.pipes[&inside].clone() {
            let ranks = gpus / (inside * pipe.pp);
            if !self.space.micro_batches(ranks).contains(&micro_batch) {
                continue;
            }
            let micro_batches = self.space.accumulation(ranks, micro_batch);
            let costs = if separate(pipe.schedule) { apart } else { together };
            for data in self.space.data(ranks, split.cp) {
                for gradients in self.space.gradients() {
                    let choice = self.space.choice(split, pipe, data, micro_batch, recompute, gradients);
                    let placed = (split, pipe.pp, data.replicate, data.shard);
                    let (hardware, terms) = (self.request.hardware, &self.terms);
                    let collectives = *self
                        .collectives
                        .entry(placed)
                        .or_insert_with(|| DataCollectives::new(&choice.layout, hardware, terms));
                    let composed = self.composed(costs, pipe, micro_batches);
                    let bound = composed.bound(split, data, gradients, &collectives);
                    match self.may_fit(&choice, bound.bytes) {
                        true => all.push((bound.seconds, choice)),
                        false => self.tally.too_large(choice, bound.bytes as u64),
                    }
                }
            }
        }
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        if let Some((seconds, _)) = all.first() {
            self.push(*seconds, Node::Bounded { key: at, at: 0 });
        }
        self.choices[at] = all;
    }

    fn end(mut self) -> Result<SearchResult, PlanError> {
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

/// The simplest of the layouts that are as fast as the first, within [`SIMPLER`].
fn simplest(best: &[RankedLayout]) -> usize {
    let fastest = best[0].evaluated.forecast.step_s;
    let near = best.iter().enumerate().filter(|(_, l)| l.evaluated.forecast.step_s <= fastest * (1.0 + SIMPLER));
    near.min_by_key(|(i, l)| (complexity(&l.choice), *i)).map_or(0, |(i, _)| i)
}

/// How much there is to know of a layout.
fn complexity(choice: &LayoutChoice) -> usize {
    let (split, pipe, data) = parts(choice);
    let pipeline = match pipe.pp {
        1 => 0,
        _ => 4 + 2 * usize::from(pipe.schedule != lockstep_ir::Schedule::USUAL) + pipe.chunks,
    };
    let context = if split.cp > 1 { 4 + usize::from(split.gather) } else { 0 };
    let tensor = if split.tp > 1 { 3 + usize::from(split.sequence_parallel) } else { 0 };
    let replicas = 2 * usize::from(data.replicate > 1);
    let sharding = usize::from(data.zero) + usize::from(!data.reshard);
    let recompute = match choice.recompute {
        RecomputePolicy::None => 0,
        RecomputePolicy::Selective | RecomputePolicy::Full => 1,
        RecomputePolicy::EveryK | RecomputePolicy::Sqrt | RecomputePolicy::List | RecomputePolicy::Budget => 2,
    };
    let gradients = match choice.gradients {
        GradientPrecision::Fp32 => 0,
        GradientPrecision::Bf16 => 3,
    };
    pipeline + context + tensor + replicas + sharding + recompute + gradients
}
