//! The plan of a run: its config, the programs of all pipeline stages, and what they need.

use crate::device::{Machine, Target, threads};
use crate::fit::Room;
use crate::ways::ways_to_fit;
use crate::{PlanError, Rates, Result, groups};
use lockstep_compile::{
    AdamW, Compiled, Context, Estimator, Fit, Fp8, Fp8Scaling, Moments, Offload, Optimizer, Precision, Recompute, Rule,
    Stays, Steps, compile, fit, fp8_layers,
};
use lockstep_config::{
    Config, Fp8Recipe, FrozenPrecision, GradientPrecision, LoraConfig, MasterPrecision, MomentPrecision,
    PrecisionPolicy, RecomputePolicy, nearest,
};
use lockstep_ir::account::{self, MemoryBreakdown};
use lockstep_ir::op::{Fine, Flops};
use lockstep_ir::{Axes, Axis, DType, FusedMatmul, Graph, Layout, StepProgram, TensorType};
use lockstep_model::adapters::adapt;
use lockstep_model::{Form, ModelBuilder};
use lockstep_sim::Asked;
use std::collections::BTreeMap;

/// A compiled config with its account: what `explain` prints and `train` runs.
#[derive(Debug)]
pub struct Plan {
    /// The model's forward graph, before any pass.
    pub forward: Graph,
    /// The program and the graph after every pass.
    pub compiled: Compiled,
    /// The device it was compiled for.
    pub device: String,
    /// Which kind of device that is.
    pub target: Target,
    /// Types of parameters, activations and gradient sums.
    pub precision: Precision,
    /// Threads of the CPU executor.
    pub threads: usize,
    /// Elements of all parameters.
    pub parameters: u64,
    /// Of them, those that a token uses: of the experts of a layer, as many as it goes to.
    pub active_parameters: u64,
    /// Of all, those that training changes: adapters alone, where there are some.
    pub trained_parameters: u64,
    /// Tokens of one step, of the largest that the run has.
    pub tokens_per_step: u64,
    /// How the work is split among ranks and micro-batches.
    pub layout: Layout,
    /// Micro-batches of steps that are smaller than those of the layout.
    pub smaller_steps: Vec<usize>,
    /// FLOPs of one step, on all ranks.
    pub step_flops: Flops,
    /// Where the policy is fp8, the weight of every linear layer, and why it stays in bf16 where it does.
    pub fp8: Vec<(String, Option<Stays>)>,
    /// What is recomputed in backward.
    pub recompute: Recompute,
    /// Bytes by class, layer and moment of the rank that needs most.
    pub memory: MemoryBreakdown,
    /// The same for a rank of each pipeline stage.
    pub stages: Vec<MemoryBreakdown>,
}

impl Plan {
    /// The placed program of the first stage.
    pub fn program(&self) -> &StepProgram {
        &self.compiled.programs[0]
    }

    /// Bytes of the arenas of all ranks.
    pub fn arena_bytes(&self) -> u64 {
        let ranks = self.layout.mesh.ranks();
        self.stages.iter().map(|m| m.total_bytes * (ranks / self.stages.len()) as u64).sum()
    }

    /// Bytes that all ranks keep in the memory of their hosts.
    pub fn host_bytes(&self) -> u64 {
        let ranks = self.layout.mesh.ranks();
        self.stages.iter().map(|m| m.host_bytes * (ranks / self.stages.len()) as u64).sum()
    }

    /// Those of them that activations have.
    pub fn host_activation_bytes(&self) -> u64 {
        let ranks = self.layout.mesh.ranks();
        self.stages.iter().map(|m| m.host_activation_bytes * (ranks / self.stages.len()) as u64).sum()
    }

    /// Bytes of the arenas of all ranks, which must fit the memory that they share, where it is known; `rates` say what changes that
    /// let it fit would cost.
    pub fn require_memory(
        &self,
        machine: &dyn Machine,
        config: &Config,
        available: Option<u64>,
        rates: Option<Rates<'_>>,
    ) -> Result<u64> {
        let (ranks, total) = (self.layout.mesh.ranks(), self.arena_bytes());
        match available {
            Some(available) if total > available => {
                let room = Room { bytes: available, shared: true, place: String::new() };
                // What cannot be estimated is no help.
                let ways = ways_to_fit(machine, config, &room, rates).ok().map(Box::new);
                Err(PlanError::DoesNotFit { memory: Box::new(self.memory.clone()), ranks, available, ways })
            }
            _ => Ok(total),
        }
    }

    /// What a step achieves, for the simulator.
    pub fn asked(&self) -> Asked {
        Asked {
            tokens: self.tokens_per_step,
            model_flops: self.step_flops.model as f64,
            hardware_flops: self.step_flops.hardware as f64,
            compute: self.precision.multiplies(),
        }
    }

    /// Model FLOPs per token.
    pub fn model_flops_per_token(&self) -> f64 {
        self.step_flops.model as f64 / self.tokens_per_step as f64
    }
}

/// What the passes need to know of a config, and the threads of a rank.
pub(crate) fn training_context(machine: &dyn Machine, config: &Config) -> (Context, usize) {
    let threads = threads(machine, config, config.layout().mesh.ranks());
    let precision = precision(config);
    let context = Context {
        device: machine.profile(Target::of(machine, config), threads, precision),
        layout: config.layout(),
        stages: config.parallel.stages.clone(),
        optimizer: optimizer(config),
        precision,
        recompute: recompute(config),
        steps: Steps {
            smaller: smaller_steps(config),
            noise_scale: config.train.noise_scale,
            limits: config.spikes.skip,
            misses: !config.eval.tasks.is_empty(),
            shadow: config.precision.shadow_every > 0,
        },
        offload: Offload {
            optimizer: config.offload.optimizer.most_bytes(),
            activations: config.offload.activations.most_bytes(),
        },
    };
    (context, threads)
}

/// Settles what only the layers can tell: whether a list of ops is one, and what a budget allows.
pub(crate) fn settle_policy(config: &Config, forward: &Graph, context: &mut Context) -> Result<()> {
    let listed = matches!(context.recompute, Recompute::Ops(_));
    if !listed && config.recompute.budget.is_none() {
        return Ok(());
    }
    let estimator = Estimator::new(forward, context)?;
    if let Recompute::Ops(ops) = &context.recompute {
        let known = estimator.recomputable();
        if let Some(op) = ops.iter().find(|op| !known.contains(op.as_str())) {
            let guess = nearest(op, known.iter().copied()).map(str::to_owned);
            let known = known.into_iter().collect();
            return Err(PlanError::NotRecomputable { op: op.clone(), guess, known });
        }
    }
    if let Some(budget) = config.recompute.budget {
        context.recompute = match fit(&estimator, budget.0)? {
            Fit::Recompute(recompute) => recompute,
            Fit::Least(least) => return Err(PlanError::OverBudget { budget: budget.0, least }),
        };
    }
    Ok(())
}

/// A config's forward graph, for the micro-batches of all data-parallel ranks, and what its passes need to know.
pub(crate) fn prepare(machine: &dyn Machine, config: &Config, build: ModelBuilder) -> Result<(Graph, Context, usize)> {
    let (mut context, threads) = training_context(machine, config);
    let (seq, documents) = (config.train.seq, config.data.document_mask);
    let form = Form::Loss { batch: config.round(), seq, context: seq, documents };
    let forward = adapted(build(&config.model, form)?, &config.lora)?;
    context.optimizer.groups = groups::resolve(config, &forward)?;
    Ok((forward, context, threads))
}

/// A model's graph with the adapters that a config asks for.
pub(crate) fn adapted(graph: Graph, lora: &LoraConfig) -> Result<Graph> {
    Ok(adapt(graph, lora)?)
}

/// Elements of the parameters that a token uses.
fn active_parameters(forward: &Graph, config: &Config) -> u64 {
    let top = config.model.experts_per_token.unwrap_or(1);
    let of = |ty: &TensorType, exact: bool| match &ty.dims[..] {
        // A matrix or a bias of every expert; those of routers are in f32.
        [experts, ..] if experts.sections[0].axis == Axis::Experts && !exact => ty.elements() / experts.size() * top,
        _ => ty.elements(),
    };
    forward.parameters().map(|(_, value, parameter)| of(&value.ty, parameter.exact) as u64).sum()
}

/// Elements of the parameters that are not frozen.
fn trained_parameters(forward: &Graph) -> u64 {
    let trained = forward.parameters().filter(|(_, _, parameter)| !parameter.frozen);
    trained.map(|(_, value, _)| value.ty.elements() as u64).sum()
}

/// Elements of all parameters of a config's model.
pub fn parameters(config: &Config) -> Result<u64> {
    let form = Form::Loss { batch: 1, seq: config.train.seq, context: config.train.seq, documents: false };
    let forward = lockstep_model::build_form(&config.model, form)?;
    Ok(forward.parameters().map(|(_, v, _)| v.ty.elements() as u64).sum())
}

/// FLOPs that the hardware is asked for in a step, on all ranks.
pub(crate) fn hardware_flops(programs: &[StepProgram]) -> Result<u128> {
    let mut sum = 0;
    for program in programs {
        if let Some(entry) = program.entry(StepProgram::TRAIN) {
            let ranks = program.mesh.size(Axes::STAGE) as u128;
            sum += account::flops(program, entry)?.hardware * ranks;
        }
    }
    Ok(sum)
}

/// Micro-batches of the steps that are smaller than the largest.
fn smaller_steps(config: &Config) -> Vec<usize> {
    let batches = config.batches();
    let smaller = batches.stages().iter().map(|stage| stage.sequences).filter(|n| *n < batches.largest());
    smaller.map(|sequences| sequences / config.round()).collect()
}

/// The update rule of a config, and its constants.
pub(crate) fn optimizer(config: &Config) -> Optimizer {
    let o = &config.optimizer;
    // The schema gives every rule the constants that it reads.
    let [beta1, beta2, eps, momentum] = [o.beta1, o.beta2, o.eps, o.momentum].map(|x| x.unwrap_or(0.0) as f32);
    let rule = Rule::named(o.name.word(), AdamW { beta1, beta2, eps }, momentum);
    let rule = rule.unwrap_or_else(|| unreachable!("optimizer.name = {} has no update rule", o.name));
    Optimizer { rule, decay: o.weight_decay as f32, groups: BTreeMap::new() }
}

/// Compiles a config for a machine.
pub fn plan(machine: &dyn Machine, config: &Config) -> Result<Plan> {
    plan_with(machine, config, lockstep_model::build_form)
}

/// The same for an architecture of the caller's own, whatever the config names.
pub fn plan_with(machine: &dyn Machine, config: &Config, build: ModelBuilder) -> Result<Plan> {
    plan_for(machine, config, build, Vec::new())
}

/// The same for a device that has measured which matmuls are faster with what they can fuse into their epilogue (see
/// [`lockstep_compile::fusable_matmuls`]).
pub fn plan_measured(machine: &dyn Machine, config: &Config, faster: Vec<FusedMatmul>) -> Result<Plan> {
    plan_for(machine, config, lockstep_model::build_form, faster)
}

fn plan_for(machine: &dyn Machine, config: &Config, build: ModelBuilder, faster: Vec<FusedMatmul>) -> Result<Plan> {
    check_numbers(config)?;
    let target = Target::of(machine, config);
    target.check(config)?;
    let (forward, mut context, threads) = prepare(machine, config, build)?;
    context.device.faster = faster;
    settle_policy(config, &forward, &mut context)?;
    let compiled = compile(&forward, &context)?;
    let hardware = hardware_flops(&compiled.programs)?;
    // The model is what it was before any rank repeated or padded a part of it.
    let whole = compiled.model_flops;
    let micro_batches = context.layout.micro_batches as u128;
    let step_flops = Flops { model: whole.model * micro_batches, causal: whole.causal * micro_batches, hardware };
    let typed = compiled.stages.iter().find(|after| after.pass.name == "precision");
    let fp8 = typed.map_or(Vec::new(), |after| fp8_layers(&after.graph, &context));
    let stages: Vec<MemoryBreakdown> = compiled.programs.iter().map(account::memory).collect();
    Ok(Plan {
        layout: context.layout,
        recompute: context.recompute,
        smaller_steps: context.steps.smaller,
        device: context.device.name,
        target,
        precision: context.precision,
        threads,
        parameters: forward.parameters().map(|(_, v, _)| v.ty.elements() as u64).sum(),
        active_parameters: active_parameters(&forward, config),
        trained_parameters: trained_parameters(&forward),
        tokens_per_step: (config.batches().largest() * config.train.seq) as u64,
        step_flops,
        fp8,
        memory: stages.iter().max_by_key(|m| m.total_bytes).cloned().unwrap_or_else(|| stages[0].clone()),
        stages,
        forward,
        compiled,
    })
}

/// What a config wants to be recomputed in backward.
fn recompute(config: &Config) -> Recompute {
    match config.recompute.policy {
        RecomputePolicy::None => Recompute::None,
        RecomputePolicy::Selective => Recompute::Selective,
        RecomputePolicy::Full => Recompute::Full,
        RecomputePolicy::EveryK => Recompute::Every(config.recompute.every),
        RecomputePolicy::Sqrt => Recompute::Sqrt,
        RecomputePolicy::List => Recompute::Ops(config.recompute.ops.clone()),
        // What a budget allows is known when the layers are.
        RecomputePolicy::Budget => Recompute::None,
    }
}

/// The types that a config asks for.
fn precision(config: &Config) -> Precision {
    let compute = match config.precision.policy {
        PrecisionPolicy::Fp32 | PrecisionPolicy::Tf32 => DType::F32,
        PrecisionPolicy::Bf16 | PrecisionPolicy::Fp8 => DType::BF16,
        PrecisionPolicy::Fp16 => DType::F16,
    };
    let gradients = match (config.train.reproducible, config.precision.gradients) {
        (true, GradientPrecision::Fp32 | GradientPrecision::Bf16) => DType::Fixed64,
        (false, GradientPrecision::Fp32) => DType::F32,
        (false, GradientPrecision::Bf16) => DType::BF16,
    };
    let fp8 = (config.precision.policy == PrecisionPolicy::Fp8).then_some(Fp8 {
        weights: config.precision.fp8_weights,
        skip_first: config.precision.fp8_skip_first,
        skip_last: config.precision.fp8_skip_last,
        scaling: match config.precision.fp8_recipe {
            Fp8Recipe::Current => Fp8Scaling::Current,
            Fp8Recipe::Delayed => Fp8Scaling::Delayed,
            Fp8Recipe::Rowwise => Fp8Scaling::Fine(Fine::Rows),
            Fp8Recipe::Block => Fp8Scaling::Fine(Fine::Blocks),
        },
    });
    let moments = match config.precision.moments {
        MomentPrecision::Fp32 => Moments::F32,
        MomentPrecision::Bf16 => Moments::Bf16,
        MomentPrecision::Int8 => Moments::Blocks,
    };
    let frozen = match config.precision.frozen {
        FrozenPrecision::Policy => None,
        FrozenPrecision::Fp8 => Some(DType::E4M3),
        FrozenPrecision::Int8 => Some(DType::Int8),
    };
    let own_master = config.precision.master == MasterPrecision::Bf16;
    let tf32 = config.precision.policy == PrecisionPolicy::Tf32;
    Precision { compute, gradients, fp8, tf32, moments, own_master, frozen }
}

/// Most micro-batches of a step.
pub(crate) const MOST_MICRO_BATCHES: usize = 1 << 16;

/// Refuses numbers that fp32 cannot hold and schedules that no machine can.
fn check_numbers(config: &Config) -> Result<()> {
    let o = &config.optimizer;
    let positive = |x: f32| x > 0.0 && x.is_finite();
    let below_one = |x: f64| (x as f32) < 1.0;
    let checks = [
        ("optimizer.lr", o.lr, positive(o.lr as f32)),
        ("optimizer.eps", o.eps.unwrap_or(1.0), o.eps.is_none_or(|x| positive(x as f32))),
        ("optimizer.beta1", o.beta1.unwrap_or(0.0), o.beta1.is_none_or(below_one)),
        ("optimizer.beta2", o.beta2.unwrap_or(0.0), o.beta2.is_none_or(below_one)),
        ("optimizer.momentum", o.momentum.unwrap_or(0.0), o.momentum.is_none_or(below_one)),
        ("optimizer.weight_decay", o.weight_decay, o.weight_decay == 0.0 || positive(o.weight_decay as f32)),
        ("optimizer.grad_clip", o.grad_clip, o.grad_clip == 0.0 || positive(o.grad_clip as f32)),
        ("model.dropout", config.model.dropout, below_one(config.model.dropout)),
        ("model.norm_eps", config.model.norm_eps, positive(config.model.norm_eps as f32)),
    ];
    let whole = |x: f64| x == 0.0 || positive(x as f32);
    let groups = o
        .groups
        .iter()
        .flat_map(|g| [("optimizer.groups.lr_scale", g.lr_scale), ("optimizer.groups.weight_decay", g.weight_decay)]);
    let groups = groups.filter_map(|(key, value)| value.map(|value| (key, value, whole(value))));
    for (key, value, fits) in checks.into_iter().chain(groups) {
        if !fits {
            return Err(PlanError::Rounded { key, value, rounded: value as f32 });
        }
    }
    match config.accumulation_steps() {
        micro_batches if micro_batches > MOST_MICRO_BATCHES => {
            Err(PlanError::TooManyMicroBatches { micro_batches, most: MOST_MICRO_BATCHES })
        }
        _ => Ok(()),
    }
}
