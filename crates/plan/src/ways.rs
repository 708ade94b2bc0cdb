//! What to change where a plan does not fit: the cheapest combinations of keys, each compiled, so that the bytes are those of the
//! arena, and timed, so that what they cost is known. They leave the model, the batch, the sequence and the number of ranks as
//! they are.

use crate::device::{Target, threads};
use crate::fit::{Estimate, Room, divisors, with_micro_batch};
use crate::offload::with_fitting_offload;
use crate::parallel::in_parallel;
use crate::plan::{MOST_MICRO_BATCHES, hardware_flops, prepare};
use crate::{FittingChange, Machine, MoreRanks, NearestMiss, Rates, Result, WaysToFit};
use lockstep_compile::{Estimator, Fit, Recompute, fit};
use lockstep_config::{
    Bytes, Config, GradientPrecision, MasterPrecision, MomentPrecision, OffloadSize, PrecisionPolicy, RecomputePolicy,
    legal,
};
use lockstep_ir::{MeshAxis, StepProgram, units};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

/// As many micro-batches as a step usually has at most.
const USUAL_MICRO_BATCHES: usize = 1024;

/// How many changes are shown.
const SHOWN: usize = 3;

/// The most ranks that are proposed where nothing fits on fewer.
const MOST_RANKS: usize = 1 << 14;

/// The cheapest changes that let a config fit. Without rates, time is FLOPs alone.
pub fn ways_to_fit(machine: &dyn Machine, config: &Config, room: &Room, rates: Option<Rates<'_>>) -> Result<WaysToFit> {
    let before = Estimate::of(machine, config)?;
    let search = Search { machine, config, room, rates, ranks: config.layout().mesh.ranks() };
    let whole = search.step(config, &before.programs)?;
    let needed_bytes = room.needs(&before.stages, search.ranks);
    let mut found = search.over(&search.accepted(arrangements(config)));
    // What cannot be compiled is no way out.
    found.fitting.extend(search.offloaded().unwrap_or_default());
    found.fitting.extend(search.activations_offloaded().unwrap_or_default());
    let mut changes = search.cheapest(&mut found, whole, needed_bytes);
    // Other numbers are computed only where the same ones do not fit often enough.
    for other in other_precisions(config) {
        if changes.len() >= SHOWN {
            break;
        }
        let mut more = search.over(&search.accepted(arrangements(&other)));
        found.misses.append(&mut more.misses);
        changes.extend(search.cheapest(&mut more, whole, needed_bytes));
        changes.truncate(SHOWN);
    }
    let nearest = if changes.is_empty() { search.nearest(&found) } else { None };
    Ok(WaysToFit { basis: basis(rates), needed_bytes, changes, nearest })
}

/// A config that is tried, and what came of it.
struct Tried {
    config: Config,
    needed: u64,
    arena: u64,
    step: f64,
}

#[derive(Default)]
struct Findings {
    fitting: Vec<Tried>,
    /// What does not fit, by the bytes that it needs.
    misses: Vec<(u64, Config)>,
}

struct Search<'a> {
    machine: &'a dyn Machine,
    config: &'a Config,
    room: &'a Room,
    rates: Option<Rates<'a>>,
    ranks: usize,
}

impl Search<'_> {
    /// Seconds of a step, or without rates the FLOPs of a rank.
    fn step(&self, config: &Config, programs: &[StepProgram]) -> Result<f64> {
        match self.rates {
            Some(rates) => Ok(rates.step_s(programs, self.ranks, threads(self.machine, config, self.ranks))?),
            None => Ok(hardware_flops(programs)? as f64 / self.ranks as f64),
        }
    }

    /// Those of the arrangements that the config's rules accept, read again with the keys that they change. A layout that was planned
    /// follows from no key.
    fn accepted(&self, mut all: Vec<Config>) -> Vec<Config> {
        if self.config.layout_planned().is_none() {
            all.retain(|config| self.config.accepts(&overrides(&changed_keys(self.config, config))));
        }
        all
    }

    /// Tries all arrangements, on as many threads as the machine has cores; the order of what is found does not depend on that.
    fn over(&self, all: &[Config]) -> Findings {
        let done: Vec<Mutex<Findings>> = all.iter().map(|_| Mutex::default()).collect();
        let one = |i: usize| {
            // What cannot be compiled is no way out.
            let found = self.arrangement(&all[i]).unwrap_or_default();
            *done[i].lock().unwrap_or_else(PoisonError::into_inner) = found;
        };
        in_parallel(all.len(), self.machine.cores().min(all.len()), &one, &|_| {});
        let mut findings = Findings::default();
        for part in done {
            let mut part = part.into_inner().unwrap_or_else(PoisonError::into_inner);
            findings.fitting.append(&mut part.fitting);
            findings.misses.append(&mut part.misses);
        }
        findings
    }

    /// One way to shard: under every policy the largest micro-batch that fits. Steps of very many micro-batches, which take long to
    /// place, are looked at only where no others fit.
    fn arrangement(&self, config: &Config) -> Result<Findings> {
        let few = sizes(config, USUAL_MICRO_BATCHES);
        let found = self.sized(config, &few)?;
        let all = sizes(config, MOST_MICRO_BATCHES);
        if found.fitting.is_empty() && all.len() > few.len() { self.sized(config, &all) } else { Ok(found) }
    }

    fn sized(&self, config: &Config, sizes: &[usize]) -> Result<Findings> {
        let mut findings = Findings::default();
        let mut estimators: BTreeMap<usize, Estimator> = BTreeMap::new();
        let mut policies = policies(config);
        // Where the strongest does not fit in the smallest, the others do not either.
        policies.reverse();
        for (policy, recompute) in policies {
            let mut changed = config.clone();
            if policy != config.recompute.policy {
                (changed.recompute.policy, changed.recompute.ops) = (policy, Vec::new());
            }
            let mut fitting: Option<Tried> = None;
            let (mut from, mut to) = (0, sizes.len());
            while from < to {
                // The smallest first: where it does not fit, none does.
                let middle = if to == sizes.len() && from == 0 && fitting.is_none() { to - 1 } else { (from + to) / 2 };
                let size = sizes[middle];
                if let Entry::Vacant(entry) = estimators.entry(size) {
                    let sized = with_micro_batch(config, size);
                    let (forward, context, _) = prepare(self.machine, &sized, lockstep_model::build_form)?;
                    entry.insert(Estimator::new(&forward, &context)?);
                }
                let found = Estimate::under(&estimators[&size], recompute.clone())?;
                let (needed, sized) = (self.room.needs(&found.stages, self.ranks), with_micro_batch(&changed, size));
                if needed <= self.room.bytes {
                    let step = self.step(&sized, &found.programs)?;
                    fitting = Some(Tried { config: sized, needed, arena: found.arena(), step });
                    to = middle;
                } else {
                    findings.misses.push((needed, sized));
                    from = middle + 1;
                }
            }
            match fitting {
                Some(tried) => {
                    let size = tried.config.train.micro_batch;
                    if policy == RecomputePolicy::Full {
                        findings.fitting.extend(self.budget(&with_micro_batch(config, size), &estimators[&size])?);
                    }
                    findings.fitting.push(tried);
                }
                None if policy == RecomputePolicy::Full => return Ok(findings),
                None => {}
            }
        }
        Ok(findings)
    }

    /// With as little optimizer state in the memory of the host as lets it fit, under the config's own policy and under the strongest. A CPU
    /// has no other memory, and what copies cost FLOPs do not tell.
    fn offloaded(&self) -> Result<Vec<Tried>> {
        let is_gpu = matches!(Target::of(self.machine, self.config), Target::Cuda { .. });
        if self.rates.is_none() || !is_gpu || self.config.offload.optimizer.most_bytes() > 0 {
            return Ok(Vec::new());
        }
        let mut all = Vec::new();
        for policy in [self.config.recompute.policy, RecomputePolicy::Full] {
            let mut config = self.config.clone();
            (config.recompute.policy, config.offload.optimizer) = (policy, OffloadSize::Auto);
            let config = with_fitting_offload(self.machine, config, self.room, self.rates)?;
            let found = Estimate::of(self.machine, &config)?;
            let needed = self.room.needs(&found.stages, self.ranks);
            if needed <= self.room.bytes {
                let step = self.step(&config, &found.programs)?;
                all.push(Tried { config, needed, arena: found.arena(), step });
                break;
            }
        }
        Ok(all)
    }

    /// With the activations in the memory of the host that let it fit at the least cost, under the config's own policy.
    fn activations_offloaded(&self) -> Result<Option<Tried>> {
        let is_gpu = matches!(Target::of(self.machine, self.config), Target::Cuda { .. });
        if self.rates.is_none() || !is_gpu || self.config.offload.activations.most_bytes() > 0 {
            return Ok(None);
        }
        let mut config = self.config.clone();
        config.offload.activations = OffloadSize::Auto;
        let config = with_fitting_offload(self.machine, config, self.room, self.rates)?;
        let found = Estimate::of(self.machine, &config)?;
        let needed = self.room.needs(&found.stages, self.ranks);
        if needed > self.room.bytes {
            return Ok(None);
        }
        let step = self.step(&config, &found.programs)?;
        Ok(Some(Tried { config, needed, arena: found.arena(), step }))
    }

    /// As little recomputation as lets it fit, in the given layout.
    fn budget(&self, config: &Config, estimator: &Estimator) -> Result<Option<Tried>> {
        let ranks = if self.room.shared { self.ranks as u64 } else { 1 };
        // A whole number of MiB, as a person would write it.
        let budget = (self.room.bytes / ranks) >> 20 << 20;
        if budget == 0 || config.layout().mesh != self.config.layout().mesh {
            return Ok(None);
        }
        let Fit::Recompute(recompute) = fit(estimator, budget)? else { return Ok(None) };
        let found = Estimate::under(estimator, recompute)?;
        let needed = self.room.needs(&found.stages, self.ranks);
        let mut config = config.clone();
        (config.recompute.policy, config.recompute.ops) = (RecomputePolicy::Budget, Vec::new());
        config.recompute.budget = Some(Bytes(budget));
        let step = self.step(&config, &found.programs)?;
        Ok((needed <= self.room.bytes).then(|| Tried { config, needed, arena: found.arena(), step }))
    }

    /// The cheapest of what fits. Of those that set the same keys or more, only the cheapest: the others are no other way out,
    /// unless there are too few.
    fn cheapest(&self, found: &mut Findings, whole: f64, before: u64) -> Vec<FittingChange> {
        let change = |tried: &Tried| FittingChange {
            keys: changed_keys(self.config, &tried.config),
            saved_bytes: before.saturating_sub(tried.needed),
            arena_bytes: tried.arena,
            slowdown: tried.step / whole - 1.0,
            step_s: self.rates.map(|_| tried.step),
            other_numbers: tried.config.precision != self.config.precision,
        };
        let mut all: Vec<FittingChange> = found.fitting.iter().map(change).collect();
        // A tenth of a percent is no difference: fewer keys are better then.
        let cost = |c: &FittingChange| ((1e3 * c.slowdown).round() as i64, c.keys.len());
        all.sort_by(|a, b| cost(a).cmp(&cost(b)).then_with(|| a.keys.cmp(&b.keys)));
        all.dedup_by(|a, b| a.keys == b.keys);
        let mut chosen: Vec<FittingChange> = Vec::new();
        let mut rest = Vec::new();
        for change in all {
            let another = chosen.iter().all(|known| !names(known).is_subset(&names(&change)));
            if another && chosen.len() < SHOWN { chosen.push(change) } else { rest.push(change) }
        }
        chosen.extend(rest);
        chosen.truncate(SHOWN);
        chosen.sort_by_key(cost);
        chosen
    }

    fn nearest(&self, found: &Findings) -> Option<NearestMiss> {
        let (needed_bytes, config) = found.misses.iter().min_by_key(|(needed, _)| *needed)?;
        Some(NearestMiss {
            keys: changed_keys(self.config, config),
            needed_bytes: *needed_bytes,
            missing_bytes: needed_bytes - self.room.bytes,
            ranks: if self.room.shared { None } else { self.more_ranks(config) },
        })
    }

    /// Twice, four times … as many ranks, until it fits.
    fn more_ranks(&self, least: &Config) -> Option<MoreRanks> {
        let mut ranks = self.ranks;
        while ranks < MOST_RANKS {
            ranks *= 2;
            for config in on_more(self.config, least, ranks / self.ranks) {
                let Ok(found) = Estimate::of(self.machine, &config) else { continue };
                if self.room.needs(&found.stages, ranks) <= self.room.bytes {
                    return Some(MoreRanks { ranks, keys: changed_keys(self.config, &config) });
                }
            }
        }
        None
    }
}

/// What slowdowns rest on.
fn basis(rates: Option<Rates<'_>>) -> String {
    match rates {
        Some(Rates::Catalogue(hardware)) => {
            format!("predicted on {}, {}", hardware.gpu.label(), hardware.cluster.label)
        }
        Some(Rates::Measured(profile)) => format!("predicted by profile {} of this machine", profile.name),
        None => "estimated by FLOPs alone: no GPU was named, and this machine has no profile".into(),
    }
}

/// The micro-batches that may be tried, from the largest: divisors of the config's own, or where that was found for want of
/// memory, of a rank's batch.
fn sizes(config: &Config, most: usize) -> Vec<usize> {
    let own = config.train.micro_batch;
    let all = if config.micro_batch_found().is_some() { own * config.accumulation_steps() } else { own };
    let few = |size: &usize| config.accumulation_steps().saturating_mul(own) / size <= most;
    divisors(all).into_iter().filter(|size| *size == own || few(size)).collect()
}

/// The config's own policy, and those that save less, the strongest last.
fn policies(config: &Config) -> Vec<(RecomputePolicy, Recompute)> {
    let (selective, full) =
        ((RecomputePolicy::Selective, Recompute::Selective), (RecomputePolicy::Full, Recompute::Full));
    match config.recompute.policy {
        RecomputePolicy::None => vec![(RecomputePolicy::None, Recompute::None), selective, full],
        RecomputePolicy::Selective => vec![selective, full],
        RecomputePolicy::List => vec![(RecomputePolicy::List, Recompute::Ops(config.recompute.ops.clone())), full],
        RecomputePolicy::EveryK => {
            vec![(RecomputePolicy::EveryK, Recompute::Every(config.recompute.every)), (full.0, full.1)]
        }
        RecomputePolicy::Sqrt => vec![(RecomputePolicy::Sqrt, Recompute::Sqrt), full],
        RecomputePolicy::Full | RecomputePolicy::Budget => vec![full],
    }
}

/// The same config in less precision, step by step: from fp32 to bf16, to gradients that are summed in bf16, moments in bf16, then in 8 bits with
/// weights that are their own master weights.
fn other_precisions(config: &Config) -> Vec<Config> {
    let mut all = Vec::new();
    let mut other = config.clone();
    match config.precision.policy {
        PrecisionPolicy::Fp32 | PrecisionPolicy::Tf32 => {
            other.precision.policy = PrecisionPolicy::Bf16;
            all.push(other.clone());
        }
        PrecisionPolicy::Bf16 | PrecisionPolicy::Fp8 | PrecisionPolicy::Fp16 => {}
    }
    // Reproducible sums have a type of their own.
    if config.precision.policy != PrecisionPolicy::Fp16
        && config.precision.gradients == GradientPrecision::Fp32
        && !config.train.reproducible
    {
        other.precision.gradients = GradientPrecision::Bf16;
        all.push(other.clone());
    }
    // What an optimizer keeps in fewer bytes: first what is known to be harmless.
    if config.precision.moments == MomentPrecision::Fp32 {
        other.precision.moments = MomentPrecision::Bf16;
        all.push(other.clone());
    }
    let own = config.precision.policy != PrecisionPolicy::Fp16 && config.precision.master == MasterPrecision::Fp32;
    if own || config.precision.moments != MomentPrecision::Int8 {
        other.precision.moments = MomentPrecision::Int8;
        if own {
            other.precision.master = MasterPrecision::Bf16;
        }
        all.push(other);
    }
    all
}

/// The config's own way to shard, and others of as many ranks: a higher ZeRO stage, data-parallel ranks that become tensor-,
/// pipeline-, context- or expert-parallel ones.
fn arrangements(config: &Config) -> Vec<Config> {
    let mut all = vec![config.clone()];
    let own = &config.parallel;
    if own.zero == 3 && !own.reshard_after_forward {
        let mut changed = config.clone();
        changed.parallel.reshard_after_forward = true;
        all.push(changed);
    }
    for zero in own.zero + 1..=3 {
        let mut changed = config.clone();
        changed.parallel.zero = zero;
        all.push(changed);
    }
    for times in [2, 4, 8].into_iter().filter(|times| own.dp.is_multiple_of(*times)) {
        for axis in [MeshAxis::Tp, MeshAxis::Pp, MeshAxis::Cp, MeshAxis::Ep] {
            let mut changed = config.clone();
            let p = &mut changed.parallel;
            p.dp /= times;
            match axis {
                MeshAxis::Tp => (p.tp, p.sequence_parallel) = (p.tp * times, true),
                MeshAxis::Pp => (p.pp, p.stages) = (p.pp * times, Vec::new()),
                MeshAxis::Cp => p.cp *= times,
                _ => p.ep *= times,
            }
            // ZeRO 1 sends no more than ZeRO 0.
            p.zero = if p.dp > 1 { p.zero.max(1) } else { 0 };
            all.push(changed);
        }
    }
    all.retain(legal);
    all
}

/// More ranks, as everything is sharded that can be.
fn on_more(config: &Config, least: &Config, times: usize) -> Vec<Config> {
    let mut all = Vec::new();
    for tp in [1, 2, 4, 8].into_iter().filter(|tp| times.is_multiple_of(*tp)) {
        let mut changed = least.clone();
        let (p, own) = (&mut changed.parallel, &config.parallel);
        (p.dp, p.cp, p.pp, p.tp) = (own.dp * (times / tp), own.cp, own.pp, own.tp * tp);
        (p.sequence_parallel, p.zero) = (p.tp > 1, if p.dp > 1 { 3 } else { 0 });
        all.push(changed);
    }
    all.retain(legal);
    all
}

fn legal(config: &Config) -> bool {
    legal::check(&config.layout(), &config.extents()).is_empty()
}

/// The keys in which a config differs from another, as far as they are changed here.
fn changed_keys(before: &Config, after: &Config) -> Vec<String> {
    let mut keys = Vec::new();
    let mut key = |name: &str, before: String, after: String| {
        if before != after {
            keys.push(format!("{name} = {after}"));
        }
    };
    let (b, a) = (&before.parallel, &after.parallel);
    let sizes = [("dp", b.dp, a.dp), ("cp", b.cp, a.cp), ("ep", b.ep, a.ep), ("tp", b.tp, a.tp), ("pp", b.pp, a.pp)];
    for (name, before, after) in sizes {
        key(&format!("parallel.{name}"), before.to_string(), after.to_string());
    }
    key("parallel.zero", b.zero.to_string(), a.zero.to_string());
    for (name, before, after) in [
        ("parallel.reshard_after_forward", b.reshard_after_forward, a.reshard_after_forward),
        ("parallel.sequence_parallel", b.sequence_parallel, a.sequence_parallel),
    ] {
        key(name, before.to_string(), after.to_string());
    }
    key("train.micro_batch", before.train.micro_batch.to_string(), after.train.micro_batch.to_string());
    let word = |policy: RecomputePolicy| format!("\"{policy}\"");
    key("recompute.policy", word(before.recompute.policy), word(after.recompute.policy));
    let size =
        |config: &Config| config.recompute.budget.map_or(String::new(), |Bytes(n)| format!("\"{} MiB\"", n >> 20));
    if after.recompute.policy == RecomputePolicy::Budget {
        key("recompute.budget", size(before), size(after));
    }
    let size = |size: OffloadSize| match size {
        OffloadSize::Most(Bytes(n)) => format!("\"{} MiB\"", n >> 20),
        OffloadSize::All(all) => all.to_string(),
        OffloadSize::Auto => "\"auto\"".to_owned(),
    };
    key("offload.optimizer", size(before.offload.optimizer), size(after.offload.optimizer));
    key("offload.activations", size(before.offload.activations), size(after.offload.activations));
    let word = |policy: PrecisionPolicy| format!("\"{policy}\"");
    key("precision.policy", word(before.precision.policy), word(after.precision.policy));
    let word = |gradients: GradientPrecision| format!("\"{gradients}\"");
    key("precision.gradients", word(before.precision.gradients), word(after.precision.gradients));
    let word = |moments: MomentPrecision| format!("\"{moments}\"");
    key("precision.moments", word(before.precision.moments), word(after.precision.moments));
    let word = |master: MasterPrecision| format!("\"{master}\"");
    key("precision.master", word(before.precision.master), word(after.precision.master));
    keys
}

/// Keys as `--set` takes them: `parallel.ep=2`.
fn overrides(keys: &[String]) -> Vec<String> {
    keys.iter().map(|key| key.replacen(" = ", "=", 1)).collect()
}

fn names(change: &FittingChange) -> BTreeSet<&str> {
    change.keys.iter().filter_map(|key| key.split(' ').next()).collect()
}

impl std::fmt::Display for WaysToFit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const LAST: &str = "choose a smaller model, a shorter train.seq, or a machine with more memory";
        if self.changes.is_empty() {
            let Some(miss) = &self.nearest else { return write!(f, "{LAST}") };
            write!(
                f,
                "no recomputation, micro-batch, precision or sharding on as many ranks lets it fit; the least is"
            )?;
            if !miss.keys.is_empty() {
                write!(f, "\n  {}", miss.keys.join(", "))?;
            }
            let [needed, missing] = [miss.needed_bytes, miss.missing_bytes].map(units::bytes);
            write!(f, "\n     needs {needed}, {missing} more than there are")?;
            return match &miss.ranks {
                Some(MoreRanks { ranks, keys }) => {
                    write!(f, "\nit fits on {} ranks:\n  {}", units::thousands(*ranks as u64), keys.join(", "))
                }
                None => write!(f, "\n{LAST}"),
            };
        }
        let n = self.changes.len();
        let which = if n == 1 {
            "this change makes it fit".into()
        } else {
            format!("the {n} cheapest changes that make it fit")
        };
        write!(f, "{which} (time {}):", self.basis)?;
        for change in &self.changes {
            write!(f, "\n  {}\n     saves {}, ", change.keys.join(", "), units::bytes(change.saved_bytes))?;
            let percent = 100.0 * change.slowdown;
            match percent {
                p if p.abs() < 0.05 => write!(f, "as fast")?,
                p if p > 0.0 => write!(f, "{p:.1}% slower")?,
                p => write!(f, "{:.1}% faster", -p)?,
            }
            if change.other_numbers {
                write!(f, "; computes other numbers")?;
            }
        }
        Ok(())
    }
}
