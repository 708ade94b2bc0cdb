//! Sample inputs of ops: calls at awkward sizes, and how their inputs are drawn.
//!
//! Every row has its samples. Tests of the table and the conformance suite of executors go over all of them.

use super::{Elem, Op, OpKind};
use crate::{Axis, DType, Dim, Section, StepRounding, StepScalars, TensorType};

/// How an input is drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Draw {
    /// Normal.
    Normal,
    /// Normal, a quarter as large: weights whose matmuls give logits as models have them.
    Quarter,
    /// Normal, this many times as large.
    Scaled(f64),
    /// Normal, each entry of the first dimension 32 times as large as the one before: weights of experts.
    Growing,
    /// Normal, made positive: second moments, reciprocal deviations.
    Positive,
    /// Powers of two, from a sixteenth to 8: units of fp8.
    Powers,
    /// Whole numbers below this bound: token ids, say.
    Below(u32),
    /// The same as targets, a quarter of them ignored.
    Targets(u32),
    /// Targets of the logits that the two inputs before have: the first of the largest, the last of them, any, or ignored.
    Choices,
    /// Different whole numbers below this bound, every eighth of them [`NO_ROW`](super::NO_ROW).
    Places(u32),
    /// Different whole numbers below this bound.
    Distinct(u32),
    /// Whole numbers from the first to the second.
    Between(u32, u32),
    /// Where the document of each position starts: documents of one position up to most of the sequence, and one that starts
    /// at the last position.
    Starts {
        /// Here and there a start after its position.
        stray: bool,
    },
    /// Normal, and −∞ for one in three: log-sum-exps of queries that saw no key.
    Unseen,
    /// Scalars of a step.
    Scalars,
    /// Limits of a step: 4 for the loss, 5 for the norm.
    Limits,
    /// Statistics of a step.
    Stats,
    /// A sum of squares, in parts: that of a norm.
    Squares(f64),
    /// Output `.1` of op `.0` on inputs `.2`, which this op's gradient needs to be consistent.
    Of(Op, usize, &'static [usize]),
}

/// A call to try an op with.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// What is computed.
    pub op: Op,
    /// Its inputs. Floating-point operands stand there as `f32`.
    pub inputs: Vec<(TensorType, Draw)>,
    /// Where one of several context-parallel ranks tries it on its part: the rank's index, and how many there are. The inputs are
    /// those of all.
    pub part: Option<(usize, usize)>,
}

impl Sample {
    /// The types of the inputs with activations and parameters in `compute` and gradient sums in `sums`.
    pub fn types(&self, compute: DType, sums: DType) -> Vec<TensorType> {
        let typed = |(i, (ty, _)): (usize, &(TensorType, Draw))| {
            let dtype = match self.op.input(i, self.inputs.len()).elem {
                Elem::Float(_) => compute,
                Elem::Accumulator => sums,
                Elem::Is(_) | Elem::Rounded | Elem::Fp8 | Elem::Byte | Elem::Weight | Elem::Moment | Elem::Any => {
                    ty.dtype
                }
            };
            TensorType::new(dtype, ty.dims.clone())
        };
        self.inputs.iter().enumerate().map(typed).collect()
    }
}

/// The samples of every op with this many sequences.
pub fn samples(batch: usize) -> impl Iterator<Item = Sample> {
    OpKind::ALL.iter().flat_map(|kind| kind.rows()).flat_map(move |row| (row.samples)(batch))
}

/// One sample.
pub(super) fn sample(op: Op, inputs: impl Into<Vec<(TensorType, Draw)>>) -> Sample {
    Sample { op, inputs: inputs.into(), part: None }
}

/// The same on every context-parallel rank too.
pub(super) fn with_parts(samples: Vec<Sample>, parts: usize) -> Vec<Sample> {
    let parted = samples.iter().flat_map(|s| (0..parts).map(|i| Sample { part: Some((i, parts)), ..s.clone() }));
    samples.iter().cloned().chain(parted).collect()
}

/// A tensor of floats.
pub(super) fn floats(dims: impl Into<Vec<Dim>>) -> TensorType {
    TensorType::new(DType::F32, dims)
}

/// A drawn tensor of floats.
pub(super) fn normal(dims: impl Into<Vec<Dim>>) -> (TensorType, Draw) {
    (floats(dims), Draw::Normal)
}

/// The residual stream's width.
pub(super) fn embed() -> Dim {
    Dim::new(Axis::Embed, 71)
}

/// Hidden units.
pub(super) fn ffn() -> Dim {
    Dim::new(Axis::Ffn, 37)
}

/// Gate and up.
pub(super) fn gate_up() -> Dim {
    let ffn = Section { axis: Axis::Ffn, count: 37, unit: 1 };
    Dim::packed([ffn, ffn])
}

/// A vocabulary.
pub(super) fn vocab() -> Dim {
    Dim::new(Axis::Vocab, 50)
}

/// The step's scalars.
pub(super) fn scalars() -> (TensorType, Draw) {
    (StepScalars::ty(), Draw::Scalars)
}

/// The step's key of random bits.
pub(super) fn rounding() -> (TensorType, Draw) {
    (StepRounding::ty(), Draw::Below(u32::MAX))
}

/// Shapes of a micro-batch.
#[derive(Clone, Copy)]
pub(super) struct Shapes {
    pub batch: usize,
    pub seq: usize,
    pub head_dim: usize,
    /// That of values.
    value_dim: usize,
    /// Leading dimensions: 1 for tokens of all sequences, 2 for sequences and positions, 3 for several of each position.
    leading: usize,
}

impl Shapes {
    pub fn new(batch: usize) -> Self {
        Self::sized(batch, 60, 20)
    }

    pub fn sized(batch: usize, seq: usize, head_dim: usize) -> Self {
        Self::unequal(batch, seq, head_dim, head_dim)
    }

    /// The same where heads of V are of another size.
    pub fn unequal(batch: usize, seq: usize, head_dim: usize, value_dim: usize) -> Self {
        Self { batch, seq, head_dim, value_dim, leading: 2 }
    }

    /// Of ops that take any leading dimensions.
    pub fn any_leading(batch: usize) -> [Self; 3] {
        [2, 1, 3].map(|leading| Self { leading, ..Self::new(batch) })
    }

    pub fn b(&self) -> Dim {
        Dim::new(Axis::Batch, self.batch)
    }

    pub fn s(&self) -> Dim {
        Dim::new(Axis::Seq, self.seq)
    }

    /// Features of every position.
    pub fn act(&self, features: Dim) -> TensorType {
        let leading = self.row().dims.into_iter();
        floats(leading.chain([features]).collect::<Vec<_>>())
    }

    /// The same, drawn.
    pub fn normal(&self, features: Dim) -> (TensorType, Draw) {
        (self.act(features), Draw::Normal)
    }

    /// A number of every position.
    pub fn row(&self) -> TensorType {
        floats(match self.leading {
            1 => vec![Dim::new(Axis::Batch, self.batch * self.seq)],
            2 => vec![self.b(), self.s()],
            _ => vec![self.b(), Dim::new(Axis::Seq, self.seq / 4), Dim::new(Axis::Parts, 4)],
        })
    }

    /// A whole number of every position.
    pub fn ids(&self) -> TensorType {
        TensorType::new(DType::U32, [self.b(), self.s()])
    }

    /// Where documents start.
    pub fn starts(&self) -> (TensorType, Draw) {
        (self.ids(), Draw::Starts { stray: true })
    }

    /// A whole number of every sequence.
    pub fn number(&self) -> TensorType {
        TensorType::new(DType::U32, [self.b()])
    }

    pub fn q(&self) -> Section {
        Section { axis: Axis::Heads, count: 6, unit: self.head_dim }
    }

    pub fn kv(&self) -> Section {
        Section { axis: Axis::KvHeads, count: 2, unit: self.head_dim }
    }

    /// Packed Q·K·V.
    pub fn qkv(&self) -> Dim {
        Dim::packed([self.q(), self.kv(), self.values()])
    }

    /// V of packed Q·K·V.
    pub fn values(&self) -> Section {
        Section { unit: self.value_dim, ..self.kv() }
    }

    /// What attention gives.
    pub fn attended(&self) -> Dim {
        Dim::packed([Section { unit: self.value_dim, ..self.q() }])
    }

    /// All query heads.
    pub fn heads(&self) -> Dim {
        Dim::packed([self.q()])
    }
}
