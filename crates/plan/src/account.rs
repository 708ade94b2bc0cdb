//! What a config costs beside what it could: every recompute policy, twice the batch, sequence, width and depth, and the analytical
//! formulas of the literature. All of it is read off programs that are compiled for the purpose.

use crate::fit::{policies_of, sent_bytes};
use crate::formulas::{Formula, formulas};
use crate::plan::{hardware_flops, prepare, training_context};
use crate::projections::{Projection, projections};
use crate::{Machine, Plan, Result, groups};
use lockstep_compile::{Context, Estimator, Recompute};
use lockstep_config::{Config, RecomputePolicy};
use lockstep_ir::account;
use lockstep_ir::program::{Class, Lifetime, Region};
use lockstep_ir::{Layout, StepProgram};
use serde::Serialize;
use std::collections::BTreeMap;

/// The account of a config.
#[derive(Clone, Debug, Serialize)]
pub struct Account {
    /// Parameters and model FLOPs by projection; they sum to all that there are.
    pub projections: Vec<Projection>,
    /// What each recompute policy saves and costs; the first saves everything.
    pub policies: Vec<PolicyCost>,
    /// Under ZeRO 3: what it costs to gather parameters again for backward, and to keep them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reshard: Vec<ReshardCost>,
    /// Scaling: how everything grows when one extent is doubled.
    pub scaling: Vec<Scaling>,
    /// The program's counts beside analytical formulas.
    pub formulas: Vec<Formula>,
}

/// What a recompute policy saves and costs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PolicyCost {
    /// The policy, as the config names it.
    pub policy: String,
    /// Whether it is the config's.
    pub chosen: bool,
    /// Bytes of activations that are saved for backward, for all micro-batches in flight, on the rank with the largest arena.
    pub saved_bytes: u64,
    /// Bytes of the largest arena.
    pub arena_bytes: u64,
    /// Bytes that the arena has less than under `none`.
    pub less_than_none_bytes: i64,
    /// FLOPs of a step on all ranks that `none` does not need.
    pub added_flops: f64,
    /// The same as a share of all FLOPs under `none`.
    pub added_share: f64,
    /// Under a budget: what layers recompute.
    #[serde(rename = "gives_up", skip_serializing_if = "Option::is_none")]
    pub recomputed: Option<Vec<(String, Vec<String>)>>,
}

/// What a choice of `parallel.reshard_after_forward` costs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReshardCost {
    /// The choice.
    pub reshard_after_forward: bool,
    /// Whether it is the config's.
    pub chosen: bool,
    /// Bytes of the largest arena.
    pub arena_bytes: u64,
    /// Bytes that such a rank sends in a step, in a ring.
    pub sent_bytes: u64,
}

/// How many times as large everything is when one extent is doubled.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Scaling {
    /// The extent: `batch` (sequences of a micro-batch), `sequence` (learned positions with it), `width` (dim, heads and ffn together) or `depth`.
    pub doubled: &'static str,
    /// Elements of all parameters.
    pub parameters: f64,
    /// Model FLOPs of a step.
    pub model_flops: f64,
    /// Hardware FLOPs of a step.
    pub hardware_flops: f64,
    /// Bytes of the largest arena.
    pub arena_bytes: f64,
    /// Its bytes by class; classes that have none are left out.
    pub classes: BTreeMap<&'static str, f64>,
}

/// Compiles a planned config under every policy and at twice every extent.
pub fn account(machine: &dyn Machine, config: &Config, plan: &Plan) -> Result<Account> {
    let (mut context, _) = training_context(machine, config);
    context.optimizer.groups = groups::resolve(config, &plan.forward)?;
    // Scaling has nothing to do with the rest.
    std::thread::scope(|scope| {
        let scaling = scope.spawn(|| scaling(machine, config, plan));
        let estimator = Estimator::new(&plan.forward, &context)?;
        let none = estimator.programs(Recompute::None)?;
        let policies = policies(config, plan, &estimator, &none)?;
        let full = policies.iter().find(|p| p.policy == RecomputePolicy::Full.word()).map_or(0.0, |p| p.added_flops);
        let formulas = formulas(config, plan, estimator.derived(), &none, full)?;
        let reshard = reshard(plan, &context)?;
        let experts_per_token = config.model.experts_per_token.unwrap_or(1);
        let projections = projections(plan, estimator.derived(), experts_per_token)?;
        let scaling = scaling.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok(Account { projections, policies, reshard, scaling, formulas })
    })
}

/// The program with the largest arena.
fn largest(programs: &[StepProgram]) -> Option<&StepProgram> {
    programs.iter().max_by_key(|p| p.arena_bytes)
}

fn policies(config: &Config, plan: &Plan, estimator: &Estimator, none: &[StepProgram]) -> Result<Vec<PolicyCost>> {
    let mut all = policies_of(config);
    let own = match config.recompute.policy {
        policy @ (RecomputePolicy::List | RecomputePolicy::Budget) => {
            all.push((policy.to_string(), plan.recompute.clone()));
            all.len() - 1
        }
        RecomputePolicy::None
        | RecomputePolicy::Selective
        | RecomputePolicy::Full
        | RecomputePolicy::EveryK
        | RecomputePolicy::Sqrt => all.iter().position(|(_, policy)| *policy == plan.recompute).unwrap_or(0),
    };
    let arena = |programs: &[StepProgram]| largest(programs).map_or(0, |p| p.arena_bytes);
    let before = (arena(none), hardware_flops(none)?);
    let mut costs = Vec::new();
    for (row, (policy, recompute)) in all.into_iter().enumerate() {
        let recomputed = match &recompute {
            Recompute::Values(values) => Some(estimator.recomputed_values(values)),
            _ => None,
        };
        let made;
        let programs = match (row == own, &recompute) {
            (true, _) => &plan.compiled.programs,
            (false, Recompute::None) => none,
            (false, _) => {
                made = estimator.programs(recompute)?;
                &made
            }
        };
        let saved = |p: &StepProgram| {
            let saved = |r: &&Region| matches!(r.lifetime, Lifetime::Saved(_) | Lifetime::SavedInHost(_));
            p.regions.iter().filter(saved).map(Region::bytes).sum()
        };
        let added_flops = hardware_flops(programs)? as f64 - before.1 as f64;
        costs.push(PolicyCost {
            policy,
            chosen: row == own,
            saved_bytes: largest(programs).map_or(0, saved),
            arena_bytes: arena(programs),
            less_than_none_bytes: before.0 as i64 - arena(programs) as i64,
            added_flops,
            added_share: added_flops / before.1 as f64,
            recomputed,
        });
    }
    Ok(costs)
}

/// Both choices of what becomes of gathered parameters; none where nothing is gathered.
fn reshard(plan: &Plan, context: &Context) -> Result<Vec<ReshardCost>> {
    let choices: &[bool] = if plan.layout.zero == 3 { &[true, false] } else { &[] };
    let mut costs = Vec::new();
    for &reshard_after_forward in choices {
        let chosen = plan.layout.reshard_after_forward == reshard_after_forward;
        let made;
        let programs = match chosen {
            true => &plan.compiled.programs,
            false => {
                let layout = Layout { reshard_after_forward, ..context.layout };
                let context = Context { layout, ..context.clone() };
                made = Estimator::new(&plan.forward, &context)?.programs(plan.recompute.clone())?;
                &made
            }
        };
        let (arena_bytes, sent_bytes) = largest(programs).map_or((0, 0), |p| (p.arena_bytes, sent_bytes(p)));
        costs.push(ReshardCost { reshard_after_forward, chosen, arena_bytes, sent_bytes });
    }
    Ok(costs)
}

/// A config with one extent doubled.
fn doubled(config: &Config, extent: &str) -> Config {
    let mut config = config.clone();
    let (model, train) = (&mut config.model, &mut config.train);
    match extent {
        "batch" => {
            let ramp = train.batch_ramp.iter_mut().map(|size| &mut size.global_batch);
            [&mut train.micro_batch, &mut train.global_batch].into_iter().chain(ramp).for_each(|n| *n *= 2);
        }
        "sequence" => {
            train.seq *= 2;
            model.positions = model.positions.map(|positions| positions * 2);
        }
        "width" => {
            let extents = [&mut model.dim, &mut model.heads, &mut model.kv_heads, &mut model.ffn];
            extents.into_iter().chain(&mut model.expert_ffn).for_each(|n| *n *= 2);
        }
        _ => model.layers *= 2,
    }
    config
}

fn scaling(machine: &dyn Machine, config: &Config, plan: &Plan) -> Result<Vec<Scaling>> {
    let mut rows = Vec::new();
    for extent in ["batch", "sequence", "width", "depth"] {
        let config = doubled(config, extent);
        let (forward, context, _) = prepare(machine, &config, lockstep_model::build_form)?;
        let estimator = Estimator::new(&forward, &context)?;
        let mut recompute = plan.recompute.clone();
        if let (Recompute::Values(recomputed), "depth") = (&mut recompute, extent) {
            recomputed.first *= 2;
        }
        let programs = estimator.programs(recompute)?;
        let model = estimator.model_flops()?.model * context.layout.micro_batches as u128;
        let parameters: usize = forward.parameters().map(|(_, v, _)| v.ty.elements()).sum();
        let Some(bill) = largest(&programs).map(account::memory) else { continue };
        let class = |c: &Class| {
            let before = plan.memory.classes[c.name()];
            (before > 0).then(|| (c.name(), bill.classes[c.name()] as f64 / before as f64))
        };
        rows.push(Scaling {
            doubled: extent,
            parameters: parameters as f64 / plan.parameters as f64,
            model_flops: model as f64 / plan.step_flops.model as f64,
            hardware_flops: hardware_flops(&programs)? as f64 / plan.step_flops.hardware as f64,
            arena_bytes: bill.total_bytes as f64 / plan.memory.total_bytes as f64,
            classes: Class::ALL.iter().filter_map(class).collect(),
        });
    }
    Ok(rows)
}
