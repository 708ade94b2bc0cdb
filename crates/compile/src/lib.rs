//! From a forward graph to a placed step program, by pure passes in one visible list.
//!
//! The compiler asks no device anything and does no I/O: what it must know comes as a [`DeviceProfile`](lockstep_ir::DeviceProfile), what was chosen
//! as a [`Layout`](lockstep_ir::Layout). The same inputs give the byte-identical program.
#![forbid(unsafe_code)]

mod ahead;
mod budget;
mod estimate;
mod forward;
mod gradients;
mod in_place;
mod join;
mod local;
mod lower;
mod memory;
mod offload;
mod passes;
mod room;
mod rule;
mod settings;
mod slots;
mod stage;

pub use budget::{Fit, fit};
pub use estimate::Estimator;
pub use forward::compile_forward;
pub use join::fusable_matmuls;
pub use lower::SEND_BUFFER_COPIES;
use passes::{AUTODIFF, EVALUATION_PASSES, passes_after};
pub use passes::{
    Effect, FIRST_STATS, FORWARD_PASSES, LOADS, MISSES, Pass, ROWS_BEYOND, SEEN, STATS, Stays, TRAINING_PASSES,
    autodiff, fp8_layers, fuse, in_bytes,
};
pub use rule::{AdamW, Rule};
pub use settings::{
    Candidate, Context, Fp8, Fp8Scaling, Moments, Offload, Optimizer, ParameterGroup, Precision, Recompute, Recomputed,
    Steps,
};
pub use stage::balanced as balanced_stages;

use lockstep_ir::op::Flops;
use lockstep_ir::roles::{self, Mismatch};
use lockstep_ir::verify::{self, Unsound};
use lockstep_ir::{Graph, StepProgram, TypeError, ValueId};
use stage::RankGraph;

/// Why a graph cannot be compiled.
#[derive(Debug, thiserror::Error, lockstep_ir::Hint)]
pub enum CompileError {
    /// A pass built a node that the op table refuses.
    #[error("internal error: {0}")]
    #[hint("this is a bug in Lockstep, please report it with your config")]
    Type(#[from] TypeError),
    /// A pass broke an invariant.
    #[error("internal error after {after}: {cause}")]
    #[hint("this is a bug in Lockstep, please report it with your config")]
    Unsound {
        /// The pass.
        after: &'static str,
        /// What is wrong.
        cause: Unsound,
    },
    /// The programs of several stages do not go together.
    #[error("internal error between stages: {0}")]
    #[hint("this is a bug in Lockstep, please report it with your config")]
    Roles(Mismatch),
}

/// A graph as one pass left it.
#[derive(Clone, Debug)]
pub struct AfterPass {
    /// The pass.
    pub pass: Pass,
    /// Whether it changed anything.
    pub changed: bool,
    /// The graph after it.
    pub graph: Graph,
}

/// A program and the way to it.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// The graph after every pass, in order.
    pub stages: Vec<AfterPass>,
    /// The placed programs, one per pipeline stage.
    pub programs: Vec<StepProgram>,
    /// FLOPs that the model needs for one micro-batch of all ranks, forward and backward.
    pub model_flops: Flops,
}

fn model_flops(graph: &Graph) -> Result<Flops, TypeError> {
    let mut sum = Flops::default();
    for node in &graph.nodes {
        let wanted: Vec<bool> = node.outputs.iter().map(Option::is_some).collect();
        sum = sum + node.op.flops(&graph.input_types(node), &wanted)?;
    }
    Ok(sum)
}

/// Compiles a model's forward graph to its training and evaluation program.
pub fn compile(forward: &Graph, context: &Context) -> Result<Compiled, CompileError> {
    let mut passed: Vec<AfterPass> = Vec::new();
    let mut graph = forward.clone();
    let mut run = |pass: Pass, graph: &mut Graph| -> Result<(), CompileError> {
        let after = run(pass, graph, context)?;
        passed.push(AfterPass { pass, changed: after != *graph, graph: after.clone() });
        *graph = after;
        Ok(())
    };
    FORWARD_PASSES.into_iter().try_for_each(|pass| run(pass, &mut graph))?;
    let evaluations = evaluations(forward, &graph, context)?;
    run(AUTODIFF, &mut graph)?;
    let pipeline = context.layout.pipeline();
    let cuts = stage::cut(&graph, context)?;
    let model_flops = model_flops(&graph)?;
    passes_after(&AUTODIFF).try_for_each(|pass| run(pass, &mut graph))?;
    let mut programs = Vec::new();
    for rank in 0..pipeline.slots.len() {
        let extract = |graph: &Graph| stage::extract(graph, &cuts, &pipeline, rank);
        let evaluations = of_rank(&evaluations, extract)?;
        let train = offload::offload(in_place::in_place(extract(&graph)?, context), context, rank)?;
        let program = placed(lower::lower(&train, &evaluations, context, rank)?, context);
        check("memory", verify::program(&program, context.device.alignment))?;
        programs.push(program);
    }
    roles::check(&programs).map_err(CompileError::Roles)?;
    Ok(Compiled { stages: passed, programs, model_flops })
}

/// What a run evaluates, each by the name of its entry: the forward pass as it is `stored`, and without fp8 where that is
/// asked for.
fn evaluations(forward: &Graph, stored: &Graph, context: &Context) -> Result<Vec<Evaluation<Graph>>, CompileError> {
    let mut all = vec![(StepProgram::EVALUATE, evaluated(stored, context)?)];
    if context.steps.shadow {
        let mut context = context.clone();
        (context.precision.fp8, context.steps.misses) = (None, false);
        let stored = FORWARD_PASSES.into_iter().try_fold(forward.clone(), |graph, pass| run(pass, &graph, &context))?;
        all.push((StepProgram::EVALUATE_BF16, evaluated(&stored, &context)?));
    }
    Ok(all)
}

/// The name of an entry and what it evaluates.
type Evaluation<G> = (&'static str, G);

/// What one rank of the pipeline has of each evaluation.
fn of_rank(
    all: &[Evaluation<Graph>],
    extract: impl Fn(&Graph) -> Result<RankGraph, TypeError>,
) -> Result<Vec<Evaluation<RankGraph>>, TypeError> {
    all.iter().map(|(name, graph)| Ok((*name, extract(graph)?))).collect()
}

/// The forward pass as evaluation runs it: shared as it is stored and fused, before gradients are added to it.
fn evaluated(stored: &Graph, context: &Context) -> Result<Graph, CompileError> {
    let graph = of_one_loss(stored.clone()).without_dropout().without_dead_code();
    EVALUATION_PASSES.into_iter().try_fold(graph, |graph, pass| run(pass, &graph, context))
}

/// A graph whose host reads the first of its losses alone: others are of training.
fn of_one_loss(mut graph: Graph) -> Graph {
    let is_loss = |v: &ValueId| graph.losses.iter().any(|loss| loss.value == *v);
    let others: Vec<ValueId> = graph.outputs.iter().copied().filter(is_loss).skip(1).collect();
    graph.outputs.retain(|v| !others.contains(v));
    graph
}

/// What was lowered, with what the device does as one and where every buffer stands.
fn placed(lowered: lower::Unplaced, context: &Context) -> StepProgram {
    let mut joined = join::join(lowered, &context.device);
    offload::bounded(&mut joined.segments);
    ahead::ahead(memory::place(joined, context), &context.device)
}

/// Runs a pass and checks what it has made.
fn run(pass: Pass, graph: &Graph, context: &Context) -> Result<Graph, CompileError> {
    let after = (pass.run)(graph, context)?;
    check(pass.name, verify::graph(&after))?;
    Ok(after)
}

fn check(after: &'static str, result: Result<(), Unsound>) -> Result<(), CompileError> {
    result.map_err(|cause| CompileError::Unsound { after, cause })
}
