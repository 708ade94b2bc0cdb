//! What may be chosen: the axes of the search, and the values that fit a model, a batch and a number of GPUs.

use super::{LayoutChoice, SearchRequest, Trainer};
use crate::NoLayout;
use lockstep_config::{Bytes, Config, GradientPrecision, PLANNED, PrecisionPolicy, RecomputePolicy, legal};
use lockstep_ir::schedule::PipeRank;
use lockstep_ir::units::{counted, thousands};
use lockstep_ir::{ContextParallel, Layout, Mesh, MeshAxis, Schedule};

/// How the ranks of a stage split a sequence, the matrices and the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Split {
    pub tp: usize,
    pub sequence_parallel: bool,
    pub cp: usize,
    pub context: ContextParallel,
    pub ep: usize,
}

/// How layers are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Pipe {
    pub pp: usize,
    pub schedule: Schedule,
    pub chunks: usize,
}

/// How state is sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Data {
    pub replicate: usize,
    pub shard: usize,
    pub zero: u8,
    pub reshard: bool,
}

/// The most chunks of layers that a rank of an interleaved pipeline is tried with.
const MOST_CHUNKS: usize = 8;

/// The fewest tokens of a sequence that a context-parallel rank is tried with.
const LEAST_TOKENS: usize = 512;

/// The largest micro-batch that is tried where the config gives none, in tokens: kernels of as many are as fast as they get.
const MOST_TOKENS: usize = 1 << 16;

/// Whether the usual schedule takes no longer and has fewer micro-batches in flight, as it has beside GPipe.
fn dominated(schedule: Schedule) -> bool {
    let last = PipeRank { ranks: 2, rank: 1, chunks: 1, micro_batches: 8 };
    let usual = Schedule::USUAL;
    schedule.chunks() == usual.chunks()
        && schedule.least_bubble(1) >= usual.least_bubble(1)
        && schedule.most_in_flight(last) > usual.most_in_flight(last)
}

/// The axes, with what the config fixes.
pub(super) struct Space<'a> {
    pub config: &'a Config,
    pub gpus: usize,
    /// Keys that the config gives, which are not searched.
    pub fixed: Vec<&'static str>,
    /// Sizes of all steps of the run, in sequences.
    batches: Vec<usize>,
    trainer: Option<&'a dyn Trainer>,
}

impl<'a> Space<'a> {
    /// What a request leaves open.
    pub fn new(request: &SearchRequest<'a>) -> Self {
        let SearchRequest { config, gpus, free, fixed, trainer, .. } = *request;
        let given = |key: &&'static str| fixed.contains(key) || (!free && config.is_given(key));
        // `parallel.dp` follows from the number of GPUs.
        let decided = PLANNED.into_iter().filter(|key| *key != "parallel.dp").chain(["precision.gradients"]);
        let fixed = decided.filter(given).collect();
        let batches = config.batches().stages().iter().map(|stage| stage.sequences).collect();
        Self { config, gpus, fixed, batches, trainer }
    }

    pub fn is_fixed(&self, key: &str) -> bool {
        self.fixed.contains(&key)
    }

    /// All values, or the config's own where it fixes them.
    fn values<T: PartialEq>(&self, key: &str, own: T, all: impl IntoIterator<Item = T>) -> Vec<T> {
        if self.is_fixed(key) { vec![own] } else { all.into_iter().collect() }
    }

    fn legal(&self, layout: &Layout, sequences: usize) -> bool {
        let extents = legal::Extents { global_batch: sequences, micro_batch: 1, ..self.config.extents() };
        self.has(layout) && legal::check(layout, &extents).is_empty()
    }

    fn has(&self, layout: &Layout) -> bool {
        self.trainer.is_none_or(|trainer| trainer.has(layout))
    }

    /// How sequences and matrices may be split.
    pub fn splits(&self) -> Vec<Split> {
        let p = &self.config.parallel;
        let seq = self.config.train.seq;
        let sizes = |most: usize| legal::divisors(self.gpus).into_iter().filter(move |n| *n <= most);
        let mut all = Vec::new();
        for cp in self.values("parallel.cp", p.cp, sizes((seq / LEAST_TOKENS).max(1))) {
            let contexts: &[ContextParallel] = if cp == 1 { &[ContextParallel::Ring] } else { &ContextParallel::ALL };
            let own = if cp == 1 { ContextParallel::Ring } else { p.context };
            for context in self.values("parallel.context", own, contexts.iter().copied()) {
                for tp in self.values("parallel.tp", p.tp, sizes(self.config.model.heads)) {
                    let sequence_parallel: &[bool] = if tp == 1 { &[false] } else { &[false, true] };
                    let own = p.sequence_parallel;
                    for sequence_parallel in
                        self.values("parallel.sequence_parallel", own, sequence_parallel.iter().copied())
                    {
                        for ep in self.values("parallel.ep", p.ep, sizes(self.config.model.experts.unwrap_or(1))) {
                            let split = Split { tp, sequence_parallel, cp, context, ep };
                            let divides = self.gpus.is_multiple_of(tp * cp * ep);
                            if divides && self.legal(&split.layout(), ep) {
                                all.push(split);
                            }
                        }
                    }
                }
            }
        }
        all
    }

    /// How layers may be split, of pipelines on this many GPUs.
    pub fn pipes(&self, gpus: usize) -> Vec<Pipe> {
        let (p, layers) = (&self.config.parallel, self.config.model.layers);
        let mut all = Vec::new();
        let sizes = legal::divisors(gpus).into_iter().filter(|pp| *pp <= layers);
        for pp in self.values("parallel.pp", p.pp, sizes) {
            let schedules = Schedule::ALL.into_iter().filter(|s| !dominated(*s));
            let schedules = schedules.filter(|s| pp > 1 || *s == Schedule::USUAL);
            for schedule in self.values("parallel.schedule", p.schedule, schedules) {
                let (least, most) = schedule.chunks().into_inner();
                let chunks = least..=most.min(MOST_CHUNKS);
                for chunks in self.values("parallel.virtual", p.r#virtual, chunks) {
                    let pipe = Pipe { pp, schedule, chunks };
                    let cut = &p.stages;
                    let as_cut = cut.is_empty() || cut.len() == pp * chunks;
                    if gpus.is_multiple_of(pp) && as_cut && self.legal(&pipe.layout(), 1) {
                        all.push(pipe);
                    }
                }
            }
        }
        all
    }

    /// How state may be sharded over this many ranks that have sequences of their own.
    pub fn data(&self, ranks: usize, Split { cp, ep, .. }: Split) -> Vec<Data> {
        let p = &self.config.parallel;
        let mut all = Vec::new();
        for replicate in self.values("parallel.dp_replicate", p.dp_replicate, legal::divisors(ranks)) {
            if !ranks.is_multiple_of(replicate * ep) {
                continue;
            }
            let shard = ranks / (replicate * ep);
            for zero in self.values("parallel.zero", p.zero, 0..=3) {
                // Copies of what is not sharded are ranks of dp.
                if zero == 0 && replicate > 1 && !self.is_fixed("parallel.dp_replicate") {
                    continue;
                }
                let reshard: &[bool] = if zero == 3 { &[true, false] } else { &[true] };
                for reshard in
                    self.values("parallel.reshard_after_forward", p.reshard_after_forward, reshard.iter().copied())
                {
                    let data = Data { replicate, shard, zero, reshard };
                    if (zero == 0 || shard * cp * ep > 1) && (reshard || zero == 3) && self.has(&data.layout()) {
                        all.push(data);
                    }
                }
            }
        }
        all
    }

    /// Micro-batches that this many data-parallel ranks can divide all batches into, in sequences.
    pub fn micro_batches(&self, ranks: usize) -> Vec<usize> {
        let divides = |size: &usize| self.batches.iter().all(|batch| batch.is_multiple_of(ranks * size));
        let most = MOST_TOKENS / self.config.train.seq;
        let powers = (0..).map(|n| 1usize << n).take_while(|size| *size == 1 || *size <= most);
        let sizes = self.values("train.micro_batch", self.config.train.micro_batch, powers);
        let few = |size: &usize| self.accumulation(ranks, *size) <= crate::plan::MOST_MICRO_BATCHES;
        sizes.into_iter().filter(|size| divides(size) && few(size)).collect()
    }

    /// Micro-batches of the largest step.
    pub fn accumulation(&self, ranks: usize, micro_batch: usize) -> usize {
        self.largest_batch() / (ranks * micro_batch)
    }

    /// Sequences of the largest step.
    pub fn largest_batch(&self) -> usize {
        self.batches.iter().copied().max().unwrap_or(1)
    }

    /// Why there is no choice at all, and what would have one.
    pub fn nothing_divides(&self) -> NoLayout {
        let (config, gpus) = (self.config, counted(self.gpus, "GPU"));
        let splits = self.splits();
        if splits.is_empty() || splits.iter().all(|s| self.pipes(self.gpus / (s.tp * s.cp)).is_empty()) {
            let (tp, cp, pp) = (config.parallel.tp, config.parallel.cp * config.parallel.ep, config.parallel.pp);
            let own = legal::check(&config.layout(), &config.extents());
            if let Some(refusal) = own.first() {
                let (reason, hint) = (refusal.reason.clone(), format!("use {}", refusal.nearest));
                return NoLayout { reason, hint, too_large: false, nearest: None };
            }
            let fixed = tp * cp * pp;
            let fewer = (self.gpus / fixed * fixed).max(fixed);
            let reason = format!("what the config fixes takes {fixed} ranks or a multiple, and the plan is for {gpus}");
            let hint = format!("give --gpus {fewer}, or --free to search these keys too");
            return NoLayout { reason, hint, too_large: false, nearest: None };
        }
        // The fewest ranks that share the batch, wherever the GPUs may be otherwise of use.
        let ranks = |s: &Split| {
            let inside = s.tp * s.cp;
            self.pipes(self.gpus / inside).into_iter().map(move |p| self.gpus / (inside * p.pp)).collect::<Vec<_>>()
        };
        let mut sizes: Vec<usize> = splits.iter().flat_map(ranks).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let each = if self.is_fixed("train.micro_batch") { config.train.micro_batch } else { 1 };
        let batch = self.largest_batch();
        let near = |ranks: &usize| {
            let round = ranks * each;
            [(batch / round * round).max(round), batch.next_multiple_of(round)]
        };
        let mut nearest: Vec<usize> = sizes.iter().flat_map(near).collect();
        nearest.sort_unstable_by_key(|n| (n.abs_diff(batch), *n));
        nearest.dedup();
        let list: Vec<String> = nearest.iter().take(2).map(|n| thousands(*n as u64)).collect();
        let of = if each > 1 { format!(" in micro-batches of {each}") } else { String::new() };
        let counts: Vec<String> = sizes.iter().map(|n| thousands(*n as u64)).collect();
        NoLayout {
            reason: format!(
                "no layout of {gpus} divides a batch of {} sequences{of}: they leave {} data-parallel ranks",
                thousands(batch as u64),
                counts.join(" or ")
            ),
            hint: format!("use train.global_batch = {}, or another number of GPUs", list.join(" or ")),
            too_large: false,
            nearest: None,
        }
    }

    pub fn policies(&self) -> Vec<RecomputePolicy> {
        let all = [RecomputePolicy::None, RecomputePolicy::Selective, RecomputePolicy::Full];
        self.values("recompute.policy", self.config.recompute.policy, all)
    }

    pub fn gradients(&self) -> Vec<GradientPrecision> {
        let own = self.config.precision.gradients;
        let mixed = match self.config.precision.policy {
            PrecisionPolicy::Bf16 | PrecisionPolicy::Fp8 => !self.config.train.reproducible,
            PrecisionPolicy::Fp32 | PrecisionPolicy::Tf32 | PrecisionPolicy::Fp16 => false,
        };
        let all = [GradientPrecision::Fp32, GradientPrecision::Bf16];
        if mixed { self.values("precision.gradients", own, all) } else { vec![own] }
    }

    /// The choice that these make up.
    pub fn choice(
        &self,
        split: Split,
        pipe: Pipe,
        data: Data,
        micro_batch: usize,
        recompute: RecomputePolicy,
        gradients: GradientPrecision,
    ) -> LayoutChoice {
        let ranks = data.replicate * data.shard * split.ep;
        let mesh = Mesh::ONE
            .with(MeshAxis::Pp, pipe.pp)
            .with(MeshAxis::DpReplicate, data.replicate)
            .with(MeshAxis::DpShard, data.shard)
            .with(MeshAxis::Cp, split.cp)
            .with(MeshAxis::Ep, split.ep)
            .with(MeshAxis::Tp, split.tp);
        let layout = Layout {
            micro_batches: self.accumulation(ranks, micro_batch),
            mesh,
            zero: data.zero,
            reshard_after_forward: data.reshard,
            ..split.layout()
        };
        let layout = Layout { schedule: pipe.schedule, chunks: pipe.chunks, ..layout };
        // Of policies that a search tries none has one.
        let budget = self.config.recompute.budget.filter(|_| recompute == RecomputePolicy::Budget).map(|Bytes(n)| n);
        let offload = self.config.offload.optimizer.most_bytes();
        LayoutChoice { layout, micro_batch, recompute, budget, gradients, offload }
    }
}

impl Split {
    fn layout(&self) -> Layout {
        Layout {
            mesh: Mesh::ONE.with(MeshAxis::Cp, self.cp).with(MeshAxis::Ep, self.ep).with(MeshAxis::Tp, self.tp),
            sequence_parallel: self.sequence_parallel,
            context: self.context,
            ..Layout::single(1)
        }
    }
}

impl Data {
    fn layout(&self) -> Layout {
        let mesh = Mesh::ONE.with(MeshAxis::DpReplicate, self.replicate).with(MeshAxis::DpShard, self.shard);
        Layout { mesh, zero: self.zero, reshard_after_forward: self.reshard, ..Layout::single(1) }
    }
}

impl Pipe {
    fn layout(&self) -> Layout {
        let mesh = Mesh::ONE.with(MeshAxis::Pp, self.pp);
        Layout { mesh, schedule: self.schedule, chunks: self.chunks, ..Layout::single(1) }
    }
}
