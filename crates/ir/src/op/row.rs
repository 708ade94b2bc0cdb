//! What a row of the op table says.

use super::cost::{Cost, CostRule};
use super::{Dims, Flops, LEADING, Op, ROWS, SEQ, Sample, Transfer, TypeError, names};
use crate::{DType, Placement, Sharding, TensorType};

/// Element types an operand accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elem {
    /// Exactly this type.
    Is(DType),
    /// `f32`, `bf16` or `f16`: the same for all operands of a call with the same variable.
    Float(TypeVar),
    /// `bf16` or `f16`, for outputs: whichever of them its value says.
    Rounded,
    /// One of fp8; as an output, the second type variable's.
    Fp8,
    /// Bytes of weights whose rows have units: `e4m3` or `int8`.
    Byte,
    /// A gradient accumulator: `f32`, `bf16` or `fixed64`. As an output, whichever of them its value says.
    Accumulator,
    /// Weights that an update changes: `f32`, or `bf16` where they are their own master weights. As an output, of the type of the input of
    /// its name.
    Weight,
    /// A moment that an update changes: `f32`, `bf16`, or blocks of 8 bits. As an output, as `Weight`.
    Moment,
    /// Any type.
    Any,
}

/// A variable that stands for a floating-point type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TypeVar {
    /// That of activations and parameters.
    T,
    /// Another.
    U,
}

impl TypeVar {
    pub(super) const COUNT: usize = 2;
}

/// One operand's row in the table.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// Name, for messages.
    pub name: &'static str,
    /// Names of its dimensions, with a space between them; `?` for a dimension of any size; first `…` for any leading dimensions, the same
    /// in all operands; `*` alone for any shape.
    pub dims: &'static str,
    /// Element type.
    pub elem: Elem,
}

/// What a gradient rule may look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Saved {
    /// The op's input at this index, if it is given.
    Input(usize),
    /// The op's output at this index.
    Output(usize),
}

/// Who runs an op.
#[derive(Clone, Copy, Debug)]
pub enum RunBy {
    /// A kernel, on each rank alone.
    Kernel,
    /// All ranks of a group together, on several tensors at once: there is an output for every input.
    Collective(TransferOf),
    /// Two ranks: a message.
    Message(TransferOf),
    /// Nobody: the output is a part of the input's memory.
    View,
}

/// Binds the dimensions that follow from attributes or from the sections of a packed dimension, or says why they do not fit.
pub type ShapeRule = fn(&Op, &[&TensorType], &mut Dims) -> Result<(), TypeError>;
/// What ranks do together in an op.
pub type TransferOf = fn(&Op) -> Transfer;
/// The op with the attributes that it has on one rank, whose outputs are these.
pub type LocalRule = fn(&Op, &[Option<TensorType>]) -> Op;
/// Matmul FLOPs of one call; the last says which outputs are asked for.
pub type FlopsRule = fn(&Op, &Dims, &[bool]) -> Flops;
/// The sharding of an output from that of its input; `None` where the op does not take such a one.
pub type ShardingRule = fn(&Op, Sharding) -> Option<Sharding>;
/// Sample inputs with this many sequences, which the conformance tests use. Samples of other numbers of sequences differ in nothing else; those that stand
/// alone come last.
pub type Samples = fn(usize) -> Vec<Sample>;

/// One op's row in the table.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Name in printed graphs.
    pub name: &'static str,
    /// Inputs, in order. With `variadic`, the first repeats.
    pub inputs: &'static [Operand],
    /// Outputs, in order.
    pub outputs: &'static [Operand],
    /// Sample inputs, which the conformance tests use.
    pub samples: Samples,
    /// How many of the last inputs may be left out. Presence alone decides; there is no attribute for it.
    pub optional: usize,
    /// Whether the first input may be given any number of times.
    pub variadic: bool,
    /// (input, output) pairs that may share memory, if the input is not read afterwards.
    pub in_place: &'static [(usize, usize)],
    /// Whether those pairs must share memory: the op changes a state, or a part of it, where it is.
    pub always_in_place: bool,
    /// Outputs that the op makes even where they are unused: it works on them itself.
    pub always_made: &'static [usize],
    /// The output that may be added to a sum where that is: a weight gradient.
    pub sums: Option<usize>,
    /// What the gradient rule reads besides the output gradients; `None` if the op has no gradient.
    pub gradient_reads: Option<&'static [Saved]>,
    /// Dimensions along which the op may be sharded, as groups of names that are split together, positions first; `…` for any one of
    /// the leading dimensions. An operand without a dimension of the group is whole on every rank if it is an input, and a partial sum if
    /// it is an output.
    pub splits: &'static [&'static str],
    /// Of these groups those that tensor-parallel ranks do not split: they have the same rows of blocks and chunks, and of parts of the
    /// heads a part each.
    pub same_over_tp: &'static [&'static str],
    /// The dimension whose entries the op tells apart by number: where ranks split it, it must know where their parts start.
    pub numbers: Option<&'static str>,
    /// A second dimension whose entries it numbers, which ranks split over other axes: it is told where its part starts.
    pub counts: Option<&'static str>,
    /// Outputs that a rank has for itself where the op is split along a dimension that they lack: no partial sums.
    pub own: &'static [usize],
    /// Whether partial sums may be read as they are: what comes out is a partial sum too.
    pub partial: PartialSums,
    /// Whether its outputs are chunks, joined by another op before they are reduced.
    pub chunks: bool,
    /// Outputs that are worth recomputing: they follow from what is saved for backward anyway, and cost no matmul, or a
    /// small one beside their bytes (attention scores).
    pub cheap: &'static [usize],
    /// Whether it is of the forward pass though it has no gradient rule: it is made after autodiff. In backward it is recomputed.
    pub forward: bool,
    /// Who runs it.
    pub run_by: RunBy,
    /// For ops that change nothing but shardings.
    pub reshards: Option<ShardingRule>,
    /// Dimensions that no input has.
    pub shape: ShapeRule,
    /// Attributes that speak of what all ranks have.
    pub local: LocalRule,
    /// What it costs in matmuls.
    pub flops: FlopsRule,
    /// What it asks of the hardware.
    pub cost: CostRule,
    /// Inputs that enter a matmul: the matrix units take them in their type.
    pub multiplies: &'static [usize],
}

pub(super) const fn f32(name: &'static str, dims: &'static str) -> Operand {
    Operand { name, dims, elem: Elem::Is(DType::F32) }
}

pub(super) const fn bf16(name: &'static str, dims: &'static str) -> Operand {
    Operand { name, dims, elem: Elem::Is(DType::BF16) }
}

pub(super) const fn rounded(name: &'static str, dims: &'static str) -> Operand {
    Operand { name, dims, elem: Elem::Rounded }
}

pub(super) const fn float(name: &'static str, dims: &'static str) -> Operand {
    Operand { name, dims, elem: Elem::Float(TypeVar::T) }
}

pub(super) const fn other_float(name: &'static str, dims: &'static str) -> Operand {
    Operand { name, dims, elem: Elem::Float(TypeVar::U) }
}

pub(super) const fn fp8(name: &'static str, dims: &'static str) -> Operand {
    Operand { name, dims, elem: Elem::Fp8 }
}

pub(super) const fn byte(name: &'static str, dims: &'static str) -> Operand {
    Operand { name, dims, elem: Elem::Byte }
}

pub(super) const fn f64(name: &'static str, dims: &'static str) -> Operand {
    Operand { name, dims, elem: Elem::Is(DType::F64) }
}

pub(super) const fn u32(name: &'static str, dims: &'static str) -> Operand {
    Operand { name, dims, elem: Elem::Is(DType::U32) }
}

pub(super) const fn fixed(name: &'static str, dims: &'static str) -> Operand {
    Operand { name, dims, elem: Elem::Is(DType::Fixed64) }
}

pub(super) const fn weight(name: &'static str) -> Operand {
    Operand { name, dims: "*", elem: Elem::Weight }
}

pub(super) const fn moment(name: &'static str) -> Operand {
    Operand { name, dims: "*", elem: Elem::Moment }
}

pub(super) const fn any(name: &'static str) -> Operand {
    Operand { name, dims: "*", elem: Elem::Any }
}

pub(super) const fn accumulator(name: &'static str, dims: &'static str) -> Operand {
    Operand { name, dims, elem: Elem::Accumulator }
}

/// The pairs of an op of two operands that may work in place of either.
pub(super) const ANY_OPERAND: &[(usize, usize)] = &[(0, 0), (1, 0)];

/// A row without anything special to say.
pub(super) const fn row(
    name: &'static str,
    inputs: &'static [Operand],
    outputs: &'static [Operand],
    samples: Samples,
) -> Spec {
    Spec {
        name,
        inputs,
        outputs,
        samples,
        optional: 0,
        variadic: false,
        in_place: &[],
        always_in_place: false,
        always_made: &[],
        sums: None,
        gradient_reads: None,
        splits: &[],
        same_over_tp: &[],
        numbers: None,
        counts: None,
        own: &[],
        partial: PartialSums::Reduced,
        chunks: false,
        cheap: &[],
        forward: false,
        run_by: RunBy::Kernel,
        reshards: None,
        shape: |_, _, _| Ok(()),
        local: |op, _| *op,
        flops: |_, _, _| Flops { model: 0, causal: 0, hardware: 0 },
        cost: |_, _, _| Cost::Elementwise,
        multiplies: &[],
    }
}

/// A dimension along which an op is sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Those of this group.
    Group(&'static str),
    /// This one of the leading dimensions.
    Leading(usize),
}

impl std::fmt::Display for Split {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Split::Group(group) => write!(f, "`{group}`"),
            Split::Leading(dim) => write!(f, "leading dimension {dim}"),
        }
    }
}

impl Split {
    /// Whether another dimension is split instead where both would be over the same ranks: positions are gathered and rows sent,
    /// weights are not.
    pub fn gives_way(&self) -> bool {
        match self {
            Split::Group(group) => names(group).next().is_some_and(|name| [SEQ, ROWS].contains(&name)),
            Split::Leading(_) => true,
        }
    }
}

impl Operand {
    /// Its leading dimensions, where it has `rank` dimensions.
    fn leading(&self, rank: usize) -> usize {
        match self.dims.starts_with(LEADING) {
            true => (rank + 1).saturating_sub(names(self.dims).count()),
            false => 0,
        }
    }

    /// Which of its `rank` dimensions is split along `split`.
    pub fn dim_of(&self, split: Split, rank: usize) -> Option<usize> {
        let leading = self.leading(rank);
        match split {
            Split::Leading(i) => (i < leading).then_some(i),
            Split::Group(group) => {
                let mut own = names(self.dims).filter(|name| *name != LEADING);
                own.position(|name| names(group).any(|other| other == name)).map(|at| leading + at)
            }
        }
    }
}

/// Which inputs may be partial sums over some ranks, so that the outputs are partial sums too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartialSums {
    /// None: they are reduced first.
    Reduced,
    /// Any.
    Kept,
    /// All of them together.
    Together,
    /// One of them, where no other is split over these ranks.
    One,
}

impl PartialSums {
    /// Whether inputs that are placed so over an axis, partial sums among them, may be read as they are.
    pub fn may_be_read(self, inputs: impl Iterator<Item = Placement> + Clone) -> bool {
        let partial = |placement: &Placement| *placement == Placement::Partial;
        match self {
            PartialSums::Reduced => false,
            PartialSums::Kept => true,
            PartialSums::Together => inputs.clone().all(|placement| partial(&placement)),
            PartialSums::One => {
                let split = |placement: Placement| matches!(placement, Placement::Split(_) | Placement::Flat);
                inputs.clone().filter(partial).count() == 1 && !inputs.clone().any(split)
            }
        }
    }
}

impl Spec {
    /// Along what the op may be sharded where dimension `dim` of an operand of `rank` dimensions is split: rows of a chunk are split
    /// with sequences or with positions.
    pub fn splits_of(&self, operand: &Operand, rank: usize, dim: usize) -> Vec<Split> {
        let split = |group: &&'static str| match group.starts_with(LEADING) {
            true => Split::Leading(dim),
            false => Split::Group(group),
        };
        self.splits.iter().map(split).filter(|split| operand.dim_of(*split, rank) == Some(dim)).collect()
    }

    /// Whether there is an output for every input, of the same type: collectives over several tensors at once.
    pub const fn each(&self) -> bool {
        matches!(self.run_by, RunBy::Collective(_))
    }

    /// Whether each rank runs a kernel of its own for it.
    pub const fn has_kernel(&self) -> bool {
        matches!(self.run_by, RunBy::Kernel)
    }

    /// Whether it is of the forward pass: in backward it is recomputed.
    pub const fn is_forward(&self) -> bool {
        self.forward || self.gradient_reads.is_some()
    }

    /// Whether its output is a part of its input's memory.
    pub const fn is_view(&self) -> bool {
        matches!(self.run_by, RunBy::View)
    }

    pub(super) const fn optional(self, optional: usize) -> Spec {
        Spec { optional, ..self }
    }

    pub(super) const fn variadic(self) -> Spec {
        Spec { variadic: true, ..self }
    }

    pub(super) const fn in_place(self, in_place: &'static [(usize, usize)]) -> Spec {
        Spec { in_place, ..self }
    }

    pub(super) const fn always_in_place(self, in_place: &'static [(usize, usize)]) -> Spec {
        Spec { in_place, always_in_place: true, ..self }
    }

    pub(super) const fn always_made(self, always_made: &'static [usize]) -> Spec {
        Spec { always_made, ..self }
    }

    pub(super) const fn sums(self, output: usize) -> Spec {
        Spec { sums: Some(output), ..self }
    }

    pub(super) const fn gradient(self, reads: &'static [Saved]) -> Spec {
        Spec { gradient_reads: Some(reads), ..self }
    }

    pub(super) const fn splits(self, splits: &'static [&'static str]) -> Spec {
        Spec { splits, ..self }
    }

    pub(super) const fn same_over_tp(self, groups: &'static [&'static str]) -> Spec {
        Spec { same_over_tp: groups, ..self }
    }

    pub(super) const fn numbers(self, name: &'static str) -> Spec {
        Spec { numbers: Some(name), ..self }
    }

    pub(super) const fn counts(self, name: &'static str) -> Spec {
        Spec { counts: Some(name), ..self }
    }

    pub(super) const fn own(self, own: &'static [usize]) -> Spec {
        Spec { own, ..self }
    }

    pub(super) const fn keeps_partial(self) -> Spec {
        Spec { partial: PartialSums::Kept, ..self }
    }

    /// Adds its inputs up, scales one or takes a part of it.
    pub(super) const fn linear(self) -> Spec {
        Spec { partial: PartialSums::Together, ..self }
    }

    /// Linear in each input alone.
    pub(super) const fn product(self) -> Spec {
        Spec { partial: PartialSums::One, ..self }
    }

    pub(super) const fn chunks(self) -> Spec {
        Spec { chunks: true, ..self }
    }

    pub(super) const fn cheap(self, cheap: &'static [usize]) -> Spec {
        Spec { cheap, ..self }
    }

    pub(super) const fn forward(self) -> Spec {
        Spec { forward: true, ..self }
    }

    pub(super) const fn run_by(self, run_by: RunBy) -> Spec {
        Spec { run_by, ..self }
    }

    pub(super) const fn reshards(self, reshards: ShardingRule) -> Spec {
        Spec { reshards: Some(reshards), ..self }
    }

    pub(super) const fn shape(self, shape: ShapeRule) -> Spec {
        Spec { shape, ..self }
    }

    pub(super) const fn local(self, local: LocalRule) -> Spec {
        Spec { local, ..self }
    }

    pub(super) const fn flops(self, flops: FlopsRule) -> Spec {
        Spec { flops, ..self }
    }

    pub(super) const fn cost(self, cost: CostRule) -> Spec {
        Spec { cost, ..self }
    }

    /// These inputs enter a matmul, at this cost.
    pub(super) const fn multiplies(self, multiplies: &'static [usize], cost: CostRule) -> Spec {
        Spec { multiplies, cost, ..self }
    }
}
