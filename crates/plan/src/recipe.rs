//! The recipe of the lectures, with the numbers of one model: what must be sharded for it to fit, the largest micro-batch by powers
//! of two and what each gives, recomputation or not, data-parallel ranks, and the accumulation that is left of the global batch.
//!
//! It is a walk and not a search: the steps that the lectures take by hand, with every size compiled.

use crate::parallel::in_parallel;
use crate::{Evaluated, Machine, NoLayout, PlanError, Rates, Result, Room, evaluate, with_micro_batch};
use lockstep_config::{Config, RecomputePolicy, legal};
use lockstep_ir::units::counted;
use lockstep_sim::Hardware;
use serde::Serialize;
use std::sync::{Mutex, PoisonError};

/// A recipe, step by step.
#[derive(Clone, Debug, Serialize)]
pub struct Recipe {
    /// Sequences of a global batch.
    pub sequences: usize,
    /// Tokens of a sequence.
    pub seq: usize,
    /// GPUs.
    pub gpus: usize,
    /// What was sharded, in the order of the recipe, until one sequence with full recomputation fitted.
    pub rungs: Vec<RecipeRung>,
    /// Micro-batches and policies in the last of them; the largest of a policy that does not fit is the last of it.
    pub sizes: Vec<RecipeSize>,
    /// The fastest of those, by its index.
    pub chosen: usize,
    /// What it divides the GPUs into: data-parallel ranks.
    pub data_parallel: usize,
    /// Micro-batches of a step.
    pub accumulation: usize,
    /// The keys to set.
    pub keys: Vec<String>,
}

/// One way to shard, tried with one sequence and full recomputation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RecipeRung {
    /// The layout.
    pub layout: String,
    /// What is added to the rung before, and why at this place.
    pub why: &'static str,
    /// Bytes of the rank that needs most.
    pub memory_bytes: u64,
    /// Whether it fits.
    pub fits: bool,
}

/// A micro-batch under a policy.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RecipeSize {
    /// Sequences that a rank computes at once.
    pub micro_batch: usize,
    /// `recompute.policy`.
    pub policy: String,
    /// Bytes of the rank that needs most.
    pub memory_bytes: u64,
    /// Whether it fits.
    pub fits: bool,
    /// Tokens per second of one GPU, as if it fitted.
    pub tokens_per_s_per_gpu: f64,
    /// Model FLOPs utilization.
    pub mfu: f64,
    /// Seconds of a step.
    pub step_s: f64,
}

/// The policies of the recipe, from the one that saves most.
const POLICIES: [RecomputePolicy; 3] = [RecomputePolicy::None, RecomputePolicy::Selective, RecomputePolicy::Full];

const ALONE: &str = "every GPU has the whole model: no communication but that of gradients";
const ZERO: [&str; 3] = [
    "ZeRO 1 shards optimizer state over data-parallel ranks, and sends no more than they do anyhow",
    "ZeRO 2 shards gradients too: a reduce-scatter for every micro-batch",
    "ZeRO 3 (FSDP) shards parameters too: gathered for every layer, forward and backward",
];
const TP: &str = "tp before pp: it splits every matmul and, with sp, activations; it talks inside every layer, so it stays in a node";
const PP: &str = "pp when a node is not enough: it sends only activations, so it may cross nodes, but leaves a bubble";
const CP: &str = "cp last: it splits nothing but the sequence, for when the activations of one sequence do not fit";

/// Walks the recipe for a config on this many GPUs: its layout, micro-batch and policy are found anew, the rest is the config's.
pub fn recipe(
    machine: &dyn Machine,
    config: &Config,
    gpus: usize,
    hardware: &Hardware,
    room: &Room,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<Recipe> {
    let mut config = config.clone();
    config.train.batch_ramp.clear();
    (config.recompute.ops, config.recompute.budget) = (Vec::new(), None);
    let none = |reason: String, hint: &str| {
        PlanError::NoLayout(Box::new(NoLayout { reason, hint: hint.to_owned(), too_large: false, nearest: None }))
    };
    let try_one = |config: &Config| evaluate(machine, config, Rates::Catalogue(hardware));
    let mut rungs = Vec::new();
    let mut base = None;
    for (candidate, why) in ladder(&config, gpus, hardware.cluster.gpus_per_node) {
        let mut least = with_micro_batch(&candidate, 1);
        least.recompute.policy = RecomputePolicy::Full;
        let found = try_one(&least)?;
        let fits = room.verdict(&found.stages, gpus).fits;
        let layout = candidate.layout().to_string();
        rungs.push(RecipeRung { layout, why, memory_bytes: found.memory().total_bytes, fits });
        if fits {
            base = Some(candidate);
            break;
        }
    }
    let base = base.ok_or_else(|| match rungs.last() {
        None => none(
            format!("no layout of {} divides train.global_batch = {}", counted(gpus, "GPU"), config.train.global_batch),
            "give a number of GPUs that divides it, or another global batch",
        ),
        Some(last) => none(
            format!(
                "one sequence with full recomputation needs {} of {} on {}, sharded as far as the recipe goes ({})",
                lockstep_ir::units::bytes(last.memory_bytes),
                lockstep_ir::units::bytes(room.bytes),
                counted(gpus, "GPU"),
                last.layout
            ),
            "give more GPUs, or a smaller model or train.seq",
        ),
    })?;
    let ranks = base.parallel.dp;
    let each = config.train.global_batch / ranks;
    let sizes: Vec<usize> =
        (0..).map(|i| 1 << i).take_while(|size| *size <= each).filter(|s| each.is_multiple_of(*s)).collect();
    let all: Vec<(usize, RecomputePolicy)> =
        POLICIES.iter().flat_map(|policy| sizes.iter().map(|size| (*size, *policy))).collect();
    let found: Vec<Mutex<Option<Result<Evaluated>>>> = all.iter().map(|_| Mutex::new(None)).collect();
    // Beyond the first size that does not fit nothing is looked for.
    let over: [Mutex<usize>; 3] = std::array::from_fn(|_| Mutex::new(usize::MAX));
    let one = |i: usize| {
        let (size, policy) = all[i];
        let of = &over[i / sizes.len()];
        if *of.lock().unwrap_or_else(PoisonError::into_inner) < size {
            return;
        }
        let mut sized = with_micro_batch(&base, size);
        sized.recompute.policy = policy;
        let result = try_one(&sized);
        if result.as_ref().is_ok_and(|found| !room.verdict(&found.stages, gpus).fits) {
            let mut least = of.lock().unwrap_or_else(PoisonError::into_inner);
            *least = size.min(*least);
        }
        *found[i].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
    };
    in_parallel(all.len(), machine.cores(), &one, &|done| progress(done, all.len()));
    let mut rows = Vec::new();
    for ((size, policy), found) in all.iter().zip(found) {
        let before = over[rank_of(*policy)].lock().map_or(usize::MAX, |size| *size);
        let Some(found) = found.into_inner().unwrap_or_else(PoisonError::into_inner) else { continue };
        if *size > before {
            continue;
        }
        let found = found?;
        rows.push(RecipeSize {
            micro_batch: *size,
            policy: policy.to_string(),
            memory_bytes: found.memory().total_bytes,
            fits: room.verdict(&found.stages, gpus).fits,
            tokens_per_s_per_gpu: found.forecast.tokens_per_s_per_gpu,
            mfu: found.forecast.mfu,
            step_s: found.forecast.step_s,
        });
    }
    let fitting = rows.iter().enumerate().filter(|(_, row)| row.fits);
    let fastest =
        fitting.max_by(|a, b| a.1.tokens_per_s_per_gpu.total_cmp(&b.1.tokens_per_s_per_gpu).then(b.0.cmp(&a.0)));
    let Some((chosen, row)) = fastest else {
        return Err(none("no micro-batch fits".into(), "give more GPUs, or a smaller model or train.seq"));
    };
    let p = &base.parallel;
    let mut keys =
        vec![format!("train.micro_batch = {}", row.micro_batch), format!("recompute.policy = \"{}\"", row.policy)];
    keys.push(format!("parallel.dp = {}", p.dp));
    for (name, value) in [("zero", usize::from(p.zero)), ("tp", p.tp), ("pp", p.pp), ("cp", p.cp)] {
        if value != usize::from(name != "zero") {
            keys.push(format!("parallel.{name} = {value}"));
        }
    }
    if p.sequence_parallel {
        keys.push("parallel.sequence_parallel = true".into());
    }
    Ok(Recipe {
        sequences: config.train.global_batch,
        seq: config.train.seq,
        gpus,
        rungs,
        chosen,
        data_parallel: ranks,
        accumulation: each / row.micro_batch,
        keys,
        sizes: rows,
    })
}

fn rank_of(policy: RecomputePolicy) -> usize {
    POLICIES.iter().position(|known| *known == policy).unwrap_or(0)
}

/// The ways to shard in the order in which they are tried, as far as they divide the model, the batch and the GPUs.
fn ladder(config: &Config, gpus: usize, node: usize) -> Vec<(Config, &'static str)> {
    let mut all = Vec::new();
    let mut push = |tp: usize, pp: usize, cp: usize, zero: u8, why: &'static str| {
        let split = tp * pp * cp;
        if split > gpus || !gpus.is_multiple_of(split) {
            return;
        }
        let mut changed = with_micro_batch(config, 1);
        let p = &mut changed.parallel;
        (p.dp, p.dp_replicate, p.ep, p.tp, p.pp, p.cp) = (gpus / split, 1, 1, tp, pp, cp);
        (p.sequence_parallel, p.reshard_after_forward) = (tp > 1, true);
        p.zero = if p.dp > 1 { zero } else { 0 };
        (p.schedule, p.r#virtual, p.stages) = (lockstep_ir::Schedule::USUAL, 1, Vec::new());
        let divides = changed.train.global_batch.is_multiple_of(p.dp);
        let known = all.iter().any(|(known, _): &(Config, _)| known.parallel == changed.parallel);
        if divides && !known && legal::check(&changed.layout(), &changed.extents()).is_empty() {
            all.push((changed, why));
        }
    };
    push(1, 1, 1, 0, ALONE);
    for zero in 1..=3u8 {
        push(1, 1, 1, zero, ZERO[usize::from(zero) - 1]);
    }
    let mut tp = 1;
    while 2 * tp <= node && 2 * tp <= gpus {
        tp *= 2;
        push(tp, 1, 1, 1, TP);
    }
    let mut pp = 1;
    while 2 * pp * tp <= gpus && 2 * pp <= config.model.layers {
        pp *= 2;
        push(tp, pp, 1, 1, PP);
    }
    let mut cp = 1;
    while 2 * cp * tp <= gpus && cp < 64 {
        cp *= 2;
        let left = (gpus / (tp * cp)).min(pp);
        push(tp, left, cp, 1, CP);
        push(tp, 1, cp, 3, CP);
    }
    all
}
