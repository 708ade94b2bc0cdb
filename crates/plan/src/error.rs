use crate::{LayoutChoice, WaysToFit};
use lockstep_compile::CompileError;
use lockstep_ir::account::MemoryBreakdown;
use lockstep_ir::program::Class;
use lockstep_ir::{TypeError, units};
use lockstep_model::adapters::AdapterProblem;

/// What planning gives, or why it does not.
pub type Result<T, E = PlanError> = std::result::Result<T, E>;

/// Why a config has no program, or one that does not fit.
#[derive(Debug, thiserror::Error, lockstep_ir::Hint)]
pub enum PlanError {
    /// A bug in the compiler.
    #[error("{0}")]
    #[hint(_0.hint())]
    Compile(#[from] CompileError),
    /// Programs that cannot be simulated: a bug, or a data file.
    #[error(transparent)]
    #[hint(_0.hint())]
    Simulation(#[from] lockstep_sim::SimError),
    /// More ranks than a model can be split over for generation.
    #[error("tensor-parallel ranks cannot share this model: {}", _0.reason)]
    #[hint("use {}", _0.nearest)]
    GenerationRanks(Box<lockstep_config::legal::Refusal>),
    /// No layout of the search fits: the reasons.
    #[error("{0}")]
    #[hint(_0.hint())]
    NoLayout(Box<NoLayout>),
    /// The arena is larger than the memory that is free.
    #[error(
        "the step needs {} of memory{}, {} are free:{}",
        units::bytes(memory.total_bytes),
        if *ranks > 1 { format!(" on each of {ranks} ranks") } else { String::new() },
        units::bytes(*available),
        breakdown(memory)
    )]
    #[hint(
        "{}",
        ways.as_ref().map_or_else(|| "choose a smaller model, a shorter train.seq, or a machine with more memory".to_owned(), ToString::to_string)
    )]
    DoesNotFit {
        /// What it needs.
        memory: Box<MemoryBreakdown>,
        /// Ranks that share the memory.
        ranks: usize,
        /// Bytes that are free.
        available: u64,
        /// What lets it fit, as far as that can be told.
        ways: Option<Box<WaysToFit>>,
    },
    /// What waits in the memory of the host is larger than what is free there.
    #[error(
        "{} into the memory of the host, where {} are free",
        offloads(*needed, *activations),
        units::bytes(*available)
    )]
    #[hint("{}", offload_less(*needed, *activations, *available / (*ranks).max(1) as u64))]
    HostMemory {
        /// Bytes that are asked for.
        needed: u64,
        /// Those of them that activations have.
        activations: u64,
        /// Bytes that are free.
        available: u64,
        /// Ranks that share them.
        ranks: usize,
    },
    /// The snapshots of an elastic run are larger than what is free in the memory of the hosts.
    #[error(
        "the snapshots of an elastic run take {} of host memory on all ranks, five times a checkpoint, and {} are free",
        units::bytes(*needed),
        units::bytes(*available)
    )]
    #[hint(
        "end other programs, allow the job more memory or take more hosts; without cluster.elastic, --restarts goes on from checkpoints"
    )]
    ElasticMemory {
        /// Bytes that are needed.
        needed: u64,
        /// Bytes that are free.
        available: u64,
    },
    /// An op of `recompute.ops` makes nothing that could be recomputed.
    #[error("recompute.ops: \"{op}\" makes nothing that a layer of this model saves for backward")]
    #[hint(
        "{}choose of {}",
        guess.as_ref().map_or(String::new(), |guess| format!("did you mean \"{guess}\"? ")), known.join(", ")
    )]
    NotRecomputable {
        /// The op.
        op: String,
        /// What was perhaps meant.
        guess: Option<String>,
        /// Ops whose outputs can be recomputed.
        known: Vec<&'static str>,
    },
    /// No choice of what is recomputed lets the arena fit.
    #[error(
        "recompute.budget = {} cannot be kept: the arena needs at least {} ({least} bytes), whatever is recomputed",
        units::bytes(*budget), units::bytes(*least)
    )]
    #[hint("raise it to that, or lower train.micro_batch or train.seq, or split the model over more ranks")]
    OverBudget {
        /// What was allowed.
        budget: u64,
        /// The least that is possible.
        least: u64,
    },
    /// A number of the config is not one in the type that the device computes with.
    #[error("{key} = {value} is {rounded} in fp32")]
    #[hint("choose a value that fp32 can hold")]
    Rounded {
        /// The key.
        key: &'static str,
        /// Its value.
        value: f64,
        /// What is left of it.
        rounded: f32,
    },
    /// A group of the optimizer has no parameter.
    #[error(
        "optimizer.groups: \"{pattern}\" matches no parameter{}",
        if *taken { " that groups before it have not taken" } else { "" }
    )]
    #[hint("the parameters are {}", names.join(", "))]
    EmptyGroup {
        /// Its pattern.
        pattern: String,
        /// Whether it would match some that others have.
        taken: bool,
        /// What there is, with `*` for the number of a layer.
        names: Vec<String>,
    },
    /// A target of adapters that no matmul is.
    #[error("lora.targets: no matmul of a layer is called \"{target}\"")]
    #[hint("they are {}", modules.join(", "))]
    NoTarget {
        /// The target.
        target: String,
        /// What there is, with `*` for numbers.
        modules: Vec<String>,
    },
    /// Dropout before adapters of experts.
    #[error("lora.dropout: \"{target}\" of lora.targets is {module} too, and what experts read has no dropout")]
    #[hint("remove lora.dropout, or give lora.targets modules without experts, such as [\"q_proj\", \"v_proj\"]")]
    DropsBeforeExperts {
        /// A target that is a module of experts.
        target: String,
        /// One of these modules, with `*` for numbers.
        module: String,
    },
    /// Two groups want parts of one stored tensor.
    #[error("optimizer.groups: {first} and {second} are stored as one tensor and must be in the same group")]
    #[hint("give a pattern that matches all of {}", names.join(", "))]
    SplitGroup {
        /// A parameter.
        first: String,
        /// One in another group.
        second: String,
        /// All that are stored together.
        names: Vec<String>,
    },
    /// The schedule of a step would be absurdly long.
    #[error("a step of {micro_batches} micro-batches is too long, at most {most} are allowed")]
    #[hint("raise train.micro_batch or lower train.global_batch")]
    TooManyMicroBatches {
        /// Asked for.
        micro_batches: usize,
        /// Allowed.
        most: usize,
    },
    /// The device does not do what the config asks for.
    #[error("{what} does not run with train.device = \"{device}\"")]
    #[hint("change it, or use the CPU: train.device = \"cpu\", or --device cpu")]
    NotOnDevice {
        /// What.
        what: &'static str,
        /// The device.
        device: &'static str,
    },
    /// The device has no attention for heads of this width.
    #[error(
        "{key} = {width} does not run with train.device = \"{device}\", whose kernels take heads of at most {most} elements"
    )]
    #[hint("choose {key} of at most {most}, or use the CPU: train.device = \"cpu\", or --device cpu")]
    HeadTooWide {
        /// The key of the width.
        key: &'static str,
        /// Elements of a head.
        width: usize,
        /// The most that are taken.
        most: usize,
        /// The device.
        device: &'static str,
    },
    /// A model has no positions for a text of this length.
    #[error("sequences of {tokens} tokens are longer than the {positions} positions that the model has learned")]
    #[hint("use at most {positions} tokens")]
    Positions {
        /// Tokens of a sequence.
        tokens: usize,
        /// Rows of the model's table.
        positions: usize,
    },
    /// A KV cache has no room for one text.
    #[error(
        "a KV cache of {} holds no text of {context} tokens, whose keys and values take {}",
        units::bytes(*.given),
        units::bytes(*.text)
    )]
    #[hint("give the cache more memory, or texts a shorter context")]
    Cache {
        /// Bytes of the cache.
        given: u64,
        /// Bytes of a text.
        text: u64,
        /// Most tokens of a text.
        context: usize,
    },
}

/// Why no layout fits, and what would.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, lockstep_ir::Hint)]
#[error("{reason}")]
#[hint("{hint}")]
pub struct NoLayout {
    /// What is wrong.
    pub reason: String,
    /// The nearest request that works.
    pub hint: String,
    /// Whether memory is what lacks, so that more GPUs may help.
    pub too_large: bool,
    /// Then the choice that comes nearest, where one is known.
    pub nearest: Option<Box<LayoutChoice>>,
}

impl PlanError {
    /// Whether the request was wrong, rather than the compiler.
    pub fn is_request(&self) -> bool {
        !matches!(self, PlanError::Compile(_))
    }
}

/// A graph that the op table refuses.
impl From<AdapterProblem> for PlanError {
    fn from(problem: AdapterProblem) -> Self {
        match problem {
            AdapterProblem::Type(error) => error.into(),
            AdapterProblem::NoTarget { target, modules } => PlanError::NoTarget { target, modules },
            AdapterProblem::DropsBeforeExperts { target, module } => PlanError::DropsBeforeExperts { target, module },
        }
    }
}

impl From<TypeError> for PlanError {
    fn from(error: TypeError) -> Self {
        PlanError::Compile(CompileError::Type(error))
    }
}

fn breakdown(memory: &MemoryBreakdown) -> String {
    let line = |c: &Class| format!("\n  {:<13} {}", c.name(), units::bytes(memory.classes[c.name()]));
    Class::ALL.iter().filter(|c| memory.classes[c.name()] > 0).map(line).collect()
}

/// Which keys put how many bytes into the memory of the host.
fn offloads(needed: u64, activations: u64) -> String {
    let state = needed.saturating_sub(activations);
    match (state, activations) {
        (_, 0) => format!("offload.optimizer puts {}", units::bytes(state)),
        (0, _) => format!("offload.activations puts {}", units::bytes(activations)),
        _ => format!(
            "offload.optimizer puts {} and offload.activations {}",
            units::bytes(state),
            units::bytes(activations)
        ),
    }
}

/// How to put less there: at most this many bytes of each rank.
fn offload_less(needed: u64, activations: u64, most: u64) -> String {
    let most = most >> 20;
    let rest = "end other programs, or allow the job more memory";
    match (needed.saturating_sub(activations), activations) {
        (_, 0) => format!(
            "set offload.optimizer to \"{most} MiB\" or less of each rank, or precision.moments to \"bf16\" or \"int8\", {rest}"
        ),
        (0, _) => format!(
            "set offload.activations to \"{most} MiB\" or less of each rank, or recompute.policy to \"selective\" or \"full\", {rest}"
        ),
        _ => format!(
            "set offload.optimizer and offload.activations to \"{most} MiB\" together or less of each rank, {rest}"
        ),
    }
}
