//! What was chosen for a run, as the passes see it: the device, the layout, the optimizer, types, recomputation.

use crate::rule::{AdamW, Rule};
use lockstep_ir::op::Fine;
use lockstep_ir::{DType, DeviceProfile, Layout, MatmulType};
use std::collections::{BTreeMap, BTreeSet};

/// What passes may look at besides the graph.
#[derive(Clone, Debug)]
pub struct Context {
    /// The device that will run the program.
    pub device: DeviceProfile,
    /// What was chosen for the run.
    pub layout: Layout,
    /// Layers of every virtual stage; stages as equal in FLOPs as can be where it is empty.
    pub stages: Vec<usize>,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// Types of parameters, activations and gradient sums.
    pub precision: Precision,
    /// What is recomputed in backward.
    pub recompute: Recompute,
    /// What steps do besides.
    pub steps: Steps,
    /// What waits in the memory of the host.
    pub offload: Offload,
}

/// What waits in the memory of the host until it is needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// Most bytes of a rank's moments and master weights.
    pub optimizer: u64,
    /// Most bytes of what a rank saves for backward, of all micro-batches in flight.
    pub activations: u64,
}

/// What the steps of a run do besides computing gradients and moving parameters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Steps {
    /// Micro-batches of steps smaller than those of the layout: each size is an entry of the same program.
    pub smaller: Vec<usize>,
    /// Whether the gradients of the first micro-batch are measured, to tell noise from signal.
    pub noise_scale: bool,
    /// Whether a step whose loss or gradient norm is beyond [`StepLimits`](lockstep_ir::StepLimits) changes nothing.
    pub limits: bool,
    /// Whether evaluation says of every target whether greedy decoding misses it: [`MISSES`](crate::MISSES).
    pub misses: bool,
    /// Whether there is a second evaluation without fp8: [`EVALUATE_BF16`](lockstep_ir::StepProgram::EVALUATE_BF16).
    pub shadow: bool,
}

/// The optimizer: update rules, parameter groups and clipping.
#[derive(Clone, Debug, PartialEq)]
pub struct Optimizer {
    /// By which rule.
    pub rule: Rule,
    /// Decoupled weight decay, for the parameters that ask for it.
    pub decay: f32,
    /// Parameters with other numbers, by the names of their values.
    pub groups: BTreeMap<String, ParameterGroup>,
}

/// Numbers of some parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParameterGroup {
    /// Times the learning rate.
    pub lr_scale: f32,
    /// Weight decay; `None` as without a group.
    pub decay: Option<f32>,
}

impl Optimizer {
    /// AdamW for all parameters.
    pub fn adamw(adamw: AdamW, decay: f32) -> Self {
        Self { rule: Rule::AdamW(adamw), decay, groups: BTreeMap::new() }
    }
}

/// Which types a run stores and sums in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// Type of parameters and activations: `f32`, `bf16` or `f16`.
    pub compute: DType,
    /// Type of gradient sums: `f32`, `bf16`, or `fixed64` for sums that do not depend on their order.
    pub gradients: DType,
    /// Which matmuls of layers are in fp8, if any are.
    pub fp8: Option<Fp8>,
    /// Whether matmuls of linear layers and of the output head that are in f32 may round their operands to TF32.
    pub tf32: bool,
    /// What moments of matrices are kept in.
    pub moments: Moments,
    /// Whether matrices in bf16 are their own master weights: the update rounds them by random bits, and no f32 weights are kept.
    pub own_master: bool,
    /// What matrices of layers that are not trained are kept in, where that is bytes: `e4m3` or `int8` ([`rows8`](lockstep_ir::rows8)).
    pub frozen: Option<DType>,
}

/// What moments of matrices are kept in. Those of norms, embeddings and small tensors stay in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Moments {
    /// f32.
    #[default]
    F32,
    /// bf16, rounded by random bits.
    Bf16,
    /// Blocks of 8 bits ([`dynamic8`](lockstep_ir::dynamic8)), and bf16 where the rows that a rank has are no whole blocks.
    Blocks,
}

/// Which linear layers have their operands in fp8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fp8 {
    /// Those with at least this many weights on a rank; where it is not said, as many as the device gains from.
    pub weights: Option<usize>,
    /// None of this many of the model's first layers.
    pub skip_first: usize,
    /// None of this many of its last.
    pub skip_last: usize,
    /// Where units come from.
    pub scaling: Fp8Scaling,
}

/// Where the units of tensors in fp8 come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fp8Scaling {
    /// From the largest magnitude of the tensor.
    #[default]
    Current,
    /// From the largest magnitudes of activations and gradients in earlier steps; those of weights from their own.
    Delayed,
    /// From those of its rows or blocks, each for itself.
    Fine(Fine),
}

impl Fp8 {
    /// What has a unit of its own, where that is no whole tensor.
    pub fn fine(&self) -> Option<Fine> {
        match self.scaling {
            Fp8Scaling::Fine(by) => Some(by),
            Fp8Scaling::Current | Fp8Scaling::Delayed => None,
        }
    }
}

impl Precision {
    /// Everything in f32.
    pub const FP32: Precision = Precision::of(DType::F32, DType::F32);

    /// Parameters and activations in one type, and so all matmuls; gradient sums in another.
    pub const fn of(compute: DType, gradients: DType) -> Self {
        Self { compute, gradients, fp8: None, tf32: false, moments: Moments::F32, own_master: false, frozen: None }
    }

    /// What the matmuls of most FLOPs multiply in, but for those in fp8.
    pub fn multiplies(&self) -> MatmulType {
        if self.tf32 { MatmulType::Tf32 } else { self.compute.into() }
    }
}

/// What is recomputed in backward.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing: everything that backward reads is saved.
    #[default]
    None,
    /// What the op table calls cheap: norms and activation functions, which cost no matmul, and the weights of naive
    /// attention, which cost one and are large.
    Selective,
    /// All of a layer but what enters it.
    Full,
    /// All of this many layers but what enters the first.
    Every(usize),
    /// As `Every`, with the square root of the number of layers.
    Sqrt,
    /// What these ops make, by their names.
    Ops(Vec<String>),
    /// Exactly these values of the layers of each kind.
    Values(Recomputed),
}

/// Values that layers recompute.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recomputed {
    /// This many layers of every pipeline stage, from its first on, recompute `by_first`; the others recompute `by_rest`.
    pub first: usize,
    /// By the first layers.
    pub by_first: BTreeSet<Candidate>,
    /// By the others.
    pub by_rest: BTreeSet<Candidate>,
}

impl Recomputed {
    /// The same by all layers.
    pub fn by_all(values: BTreeSet<Candidate>) -> Self {
        Self { by_rest: values, ..Self::default() }
    }
}

/// A value that the layers of a kind may save or recompute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Candidate {
    /// The kind of layer: kinds are counted in order of their first layer.
    pub kind: usize,
    /// Which of the layer's forward nodes makes it.
    pub node: usize,
    /// Which output it is.
    pub output: usize,
}
