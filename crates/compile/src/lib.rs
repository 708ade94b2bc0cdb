//! From a forward graph to a placed step program, by pure passes in one visible list.
//!
//! The compiler asks no device anything and does no I/O: what it must know comes as a [`DeviceProfile`], what was chosen
//! as a [`Layout`]. The same inputs give the byte-identical program.
#![forbid(unsafe_code)]

mod budget;
mod estimate;
mod forward;
mod local;
mod lower;
mod memory;
mod passes;
mod slots;
mod stage;

pub use budget::{Fit, fit};
pub use estimate::Estimator;
pub use forward::compile_forward;
pub use lower::SEND_BUFFER_COPIES;
pub use passes::{
    AdamW, Candidate, Effect, FIRST_STATS, FORWARD_PASSES, Group, Optimizer, Pass, Precision, Recompute, Recomputed,
    Rule, STATS, TRAINING_PASSES, autodiff, fuse,
};
use passes::{DERIVED, SHARDING};

use lockstep_ir::op::Flops;
use lockstep_ir::roles::{self, Mismatch};
use lockstep_ir::verify::{self, Unsound};
use lockstep_ir::{DeviceProfile, Graph, Layout, StepProgram, TypeError};

/// What passes may look at besides the graph.
#[derive(Clone, Debug)]
pub struct Context {
    /// The device that will run the program.
    pub device: DeviceProfile,
    /// What was chosen for the run.
    pub layout: Layout,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// Types of parameters, activations and gradient sums.
    pub precision: Precision,
    /// What is recomputed in backward.
    pub recompute: Recompute,
    /// What steps do besides.
    pub steps: Steps,
}

/// What the steps of a run do besides computing gradients and moving parameters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Steps {
    /// Micro-batches of steps smaller than those of the layout: each size is an entry of the same program.
    pub smaller: Vec<usize>,
    /// Whether the gradients of the first micro-batch are measured, to tell noise from signal.
    pub noise_scale: bool,
}

/// Why a graph cannot be compiled.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// A pass built a node that the op table refuses.
    #[error("internal error: {0}\nhint: this is a bug in Lockstep, please report it with your config")]
    Type(#[from] TypeError),
    /// A pass broke an invariant.
    #[error(
        "internal error after {after}: {cause}\nhint: this is a bug in Lockstep, please report it with your config"
    )]
    Unsound {
        /// The pass.
        after: &'static str,
        /// What is wrong.
        cause: Unsound,
    },
    /// The programs of several stages do not go together.
    #[error("internal error between stages: {0}\nhint: this is a bug in Lockstep, please report it with your config")]
    Roles(Mismatch),
}

/// A graph as one pass left it.
#[derive(Clone, Debug)]
pub struct Stage {
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
    pub stages: Vec<Stage>,
    /// The placed programs, one per pipeline stage.
    pub programs: Vec<StepProgram>,
}

impl Compiled {
    /// FLOPs that the model needs for one micro-batch of all ranks, forward and backward.
    pub fn model_flops(&self) -> Result<Flops, TypeError> {
        model_flops(&self.stages[DERIVED].graph)
    }
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
    let mut passes: Vec<Stage> = Vec::new();
    let mut graph = forward.clone();
    // Evaluation shares the forward pass as it is stored and fused, before gradients are added to it.
    let mut evaluate = graph.clone();
    for (p, pass) in TRAINING_PASSES.into_iter().enumerate() {
        let after = (pass.run)(&graph, context)?;
        check(pass.name, verify::graph(&after))?;
        passes.push(Stage { pass, changed: after != graph, graph: after.clone() });
        graph = after;
        if p + 1 == FORWARD_PASSES.len() {
            evaluate = evaluated(&graph);
            for pass in &TRAINING_PASSES[SHARDING] {
                evaluate = (pass.run)(&evaluate, context)?;
                check(pass.name, verify::graph(&evaluate))?;
            }
        }
    }
    let pipeline = context.layout.pipeline();
    let cuts = stage::cut(&passes[DERIVED].graph, pipeline.stages())?;
    let mut programs = Vec::new();
    for rank in 0..pipeline.slots.len() {
        let extract = |graph| stage::extract(graph, &cuts, &pipeline, rank);
        let program = memory::place(lower::lower(&extract(&graph)?, &extract(&evaluate)?, context, rank)?, context);
        check("memory", verify::program(&program, context.device.alignment))?;
        programs.push(program);
    }
    roles::check(&programs).map_err(CompileError::Roles)?;
    Ok(Compiled { stages: passes, programs })
}

/// The forward pass as evaluation runs it.
fn evaluated(stored: &Graph) -> Graph {
    stored.clone().without_dropout().without_dead_code()
}

fn check(after: &'static str, result: Result<(), Unsound>) -> Result<(), CompileError> {
    result.map_err(|cause| CompileError::Unsound { after, cause })
}
