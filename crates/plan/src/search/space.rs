//! What may be chosen: the axes of the search, and the values that fit a model, a batch and a number of GPUs.

use lockstep_config::{Config, GradientPrecision, PrecisionPolicy, RecomputePolicy, legal};
use lockstep_ir::{ContextParallel, Layout, Mesh, MeshAxis, Schedule};

/// One choice of everything that a search decides. Prints as `dp=64 zero=1 tp=8 sp, micro-batch 2, recompute full`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayoutChoice {
    /// How the work is split.
    pub layout: Layout,
    /// Sequences that a rank computes at once.
    pub micro_batch: usize,
    /// What backward recomputes.
    pub recompute: RecomputePolicy,
    /// What gradients are accumulated in.
    pub gradients: GradientPrecision,
}

impl LayoutChoice {
    /// The choice that a config has made.
    pub fn of(config: &Config) -> Self {
        Self {
            layout: config.layout(),
            micro_batch: config.train.micro_batch,
            recompute: config.recompute.policy,
            gradients: config.precision.gradients,
        }
    }

    /// The run that a config describes, by this choice.
    pub fn config(&self, config: &Config) -> Config {
        let mut config = config.at(&self.layout);
        config.train.micro_batch = self.micro_batch;
        config.recompute.policy = self.recompute;
        config.precision.gradients = self.gradients;
        config
    }
}

impl std::fmt::Display for LayoutChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, micro-batch {}, recompute {}", self.layout, self.micro_batch, self.recompute)?;
        match self.gradients {
            GradientPrecision::Fp32 => Ok(()),
            GradientPrecision::Bf16 => f.write_str(", bf16 gradients"),
        }
    }
}

/// How the ranks of a stage split a sequence and the matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Split {
    pub tp: usize,
    pub sequence_parallel: bool,
    pub cp: usize,
    pub gather: bool,
}

/// How layers are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Pipe {
    pub pp: usize,
    pub schedule: Schedule,
    pub chunks: usize,
}

/// How state is sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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

/// The largest micro-batch that is tried where the config gives none, in sequences.
const MOST_SEQUENCES: usize = 64;

/// The axes, with what the config fixes.
pub(super) struct Space<'a> {
    pub config: &'a Config,
    pub gpus: usize,
    /// Keys that the config gives, which are not searched.
    pub fixed: Vec<&'static str>,
    /// Sizes of all steps of the run, in sequences.
    batches: Vec<usize>,
}

/// Keys that a search decides, unless they are given. `parallel.dp` follows from the number of GPUs.
const DECIDED: [&str; 12] = [
    "parallel.dp_replicate",
    "parallel.cp",
    "parallel.context",
    "parallel.tp",
    "parallel.pp",
    "parallel.zero",
    "parallel.reshard_after_forward",
    "parallel.sequence_parallel",
    "parallel.schedule",
    "parallel.virtual",
    "train.micro_batch",
    "recompute.policy",
];

impl<'a> Space<'a> {
    /// For a config on so many GPUs. With `free`, keys that the config gives are searched too.
    pub fn new(config: &'a Config, gpus: usize, free: bool) -> Self {
        let given = |key: &&'static str| !free && config.is_given(key);
        let fixed = DECIDED.into_iter().chain(["precision.gradients"]).filter(given).collect();
        let batches = config.batches().stages().iter().map(|stage| stage.sequences).collect();
        Self { config, gpus, fixed, batches }
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
        legal::check(layout, &extents).is_empty()
    }

    /// How sequences and matrices may be split.
    pub fn splits(&self) -> Vec<Split> {
        let p = &self.config.parallel;
        let seq = self.config.train.seq;
        let sizes = |most: usize| divisors(self.gpus).into_iter().filter(move |n| *n <= most);
        let mut all = Vec::new();
        for cp in self.values("parallel.cp", p.cp, sizes((seq / LEAST_TOKENS).max(1))) {
            let gathers: &[bool] = if cp == 1 { &[false] } else { &[false, true] };
            let own = cp > 1 && p.context == ContextParallel::Gather;
            for gather in self.values("parallel.context", own, gathers.iter().copied()) {
                for tp in self.values("parallel.tp", p.tp, sizes(self.config.model.heads)) {
                    let sequence_parallel: &[bool] = if tp == 1 { &[false] } else { &[false, true] };
                    let own = p.sequence_parallel;
                    for sequence_parallel in
                        self.values("parallel.sequence_parallel", own, sequence_parallel.iter().copied())
                    {
                        let split = Split { tp, sequence_parallel, cp, gather };
                        let divides = self.gpus.is_multiple_of(tp * cp);
                        if divides && self.legal(&split.layout(), 1) {
                            all.push(split);
                        }
                    }
                }
            }
        }
        all
    }

    /// How layers may be split, of pipelines on so many GPUs. GPipe takes the time of 1F1B and more memory.
    pub fn pipes(&self, gpus: usize) -> Vec<Pipe> {
        let (p, layers) = (&self.config.parallel, self.config.model.layers);
        let mut all = Vec::new();
        let sizes = divisors(gpus).into_iter().filter(|pp| *pp <= layers);
        for pp in self.values("parallel.pp", p.pp, sizes) {
            let schedules = Schedule::ALL.into_iter().filter(|s| s.name() != "gpipe");
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

    /// How state may be sharded over so many data-parallel ranks, each of which is so many context-parallel ones.
    pub fn data(&self, ranks: usize, cp: usize) -> Vec<Data> {
        let p = &self.config.parallel;
        let mut all = Vec::new();
        for replicate in self.values("parallel.dp_replicate", p.dp_replicate, divisors(ranks)) {
            if !ranks.is_multiple_of(replicate) {
                continue;
            }
            let shard = ranks / replicate;
            for zero in self.values("parallel.zero", p.zero, 0..=3) {
                // Copies of what is not sharded are ranks of dp.
                if zero == 0 && replicate > 1 && !self.is_fixed("parallel.dp_replicate") {
                    continue;
                }
                let reshard: &[bool] = if zero == 3 { &[true, false] } else { &[true] };
                for reshard in
                    self.values("parallel.reshard_after_forward", p.reshard_after_forward, reshard.iter().copied())
                {
                    if (zero == 0 || shard * cp > 1) && (reshard || zero == 3) {
                        all.push(Data { replicate, shard, zero, reshard });
                    }
                }
            }
        }
        all
    }

    /// Micro-batches that so many data-parallel ranks can divide all batches into, in sequences.
    pub fn micro_batches(&self, ranks: usize) -> Vec<usize> {
        let divides = |size: &usize| self.batches.iter().all(|batch| batch.is_multiple_of(ranks * size));
        let powers = (0..).map(|n| 1usize << n).take_while(|size| *size <= MOST_SEQUENCES);
        let sizes = self.values("train.micro_batch", self.config.train.micro_batch, powers);
        let few = |size: &usize| self.accumulation(ranks, *size) <= crate::plan::MOST_MICRO_BATCHES;
        sizes.into_iter().filter(|size| divides(size) && few(size)).collect()
    }

    /// Micro-batches of the largest step.
    pub fn accumulation(&self, ranks: usize, micro_batch: usize) -> usize {
        self.batches.iter().max().map_or(1, |batch| batch / (ranks * micro_batch))
    }

    pub fn policies(&self) -> Vec<RecomputePolicy> {
        let all = [RecomputePolicy::None, RecomputePolicy::Selective, RecomputePolicy::Full];
        self.values("recompute.policy", self.config.recompute.policy, all)
    }

    pub fn gradients(&self) -> Vec<GradientPrecision> {
        let own = self.config.precision.gradients;
        let mixed = match self.config.precision.policy {
            PrecisionPolicy::Bf16 => !self.config.train.reproducible,
            PrecisionPolicy::Fp32 | PrecisionPolicy::Fp16 => false,
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
        let ranks = data.replicate * data.shard;
        let mesh = Mesh::ONE
            .with(MeshAxis::Pp, pipe.pp)
            .with(MeshAxis::DpReplicate, data.replicate)
            .with(MeshAxis::DpShard, data.shard)
            .with(MeshAxis::Cp, split.cp)
            .with(MeshAxis::Tp, split.tp);
        let layout = Layout {
            micro_batches: self.accumulation(ranks, micro_batch),
            mesh,
            zero: data.zero,
            reshard_after_forward: data.reshard,
            ..split.layout()
        };
        let layout = Layout { schedule: pipe.schedule, chunks: pipe.chunks, ..layout };
        LayoutChoice { layout, micro_batch, recompute, gradients }
    }
}

impl Split {
    fn layout(&self) -> Layout {
        Layout {
            mesh: Mesh::ONE.with(MeshAxis::Cp, self.cp).with(MeshAxis::Tp, self.tp),
            sequence_parallel: self.sequence_parallel,
            context: if self.gather { ContextParallel::Gather } else { ContextParallel::Ring },
            ..Layout::single(1)
        }
    }
}

impl Pipe {
    fn layout(&self) -> Layout {
        let mesh = Mesh::ONE.with(MeshAxis::Pp, self.pp);
        Layout { mesh, schedule: self.schedule, chunks: self.chunks, ..Layout::single(1) }
    }
}

/// The divisors of a number, from the least.
pub(super) fn divisors(n: usize) -> Vec<usize> {
    let small = (1..).take_while(|d| d * d <= n).filter(|d| n.is_multiple_of(*d));
    let mut all: Vec<usize> = small.flat_map(|d| [d, n / d]).collect();
    all.sort_unstable();
    all.dedup();
    all
}
