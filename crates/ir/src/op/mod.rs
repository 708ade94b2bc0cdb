//! The op table: every operation, declared once.
//!
//! A row says what an op is called, what it reads and writes (each operand's dimensions as letters, its element type),
//! which output may take over which input's memory, what its gradient may look at, and what it costs. Shape inference,
//! the verifier, autodiff, lowering, the account of FLOPs and bytes and every executor read these rows.
//!
//! Letters: `b` batch, `s` sequence, `d`/`k`/`n` features, `p` packed Q·K·V, `h` heads × head_dim, `q` query heads,
//! `u` key and value heads, `e` head_dim, `g` packed gate·up, `f` ffn, `v` vocabulary, `t` rows of a table or positions of a cache, `r` table columns,
//! `a` the shorter side of a matrix (or parts of a vocabulary), `w` packed K·V of a cache, `l` a single position, `c` rows of a chunk, `z` step scalars, `m` statistics. A letter that stands in two
//! operands is the same dimension in both; a letter in the inputs that no output has is summed over.

mod dims;
pub mod newton_schulz;
mod table;

pub use dims::Dims;
pub use table::{Elem, Operand, Saved, Spec};

use crate::mesh::MeshAxis;
use crate::{Axis, DType, Dim, Section, TensorType};

/// An operation with its attributes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    /// Rows of a table, chosen by token id.
    Embedding,
    /// Adds each position's gradient to its token's row.
    EmbeddingGrad {
        /// Rows of the table.
        vocab: usize,
    },
    /// `y = x · wᵀ`.
    Linear,
    /// `dx = dy · w`.
    LinearGradInput,
    /// `dw = dyᵀ · x`, summed over all positions.
    LinearGradWeight,
    /// `y = x / rms(x) · w`.
    RmsNorm {
        /// Added to the mean square.
        eps: f32,
    },
    /// `sum = x + delta`, `y = sum / rms(sum) · w`.
    AddRmsNorm {
        /// Added to the mean square.
        eps: f32,
    },
    /// Input gradient of either norm.
    RmsNormGrad,
    /// Input gradient of `AddRmsNorm` plus the gradient that reaches `sum` on the residual path.
    AddRmsNormGrad,
    /// Weight gradient of either norm.
    RmsNormGradWeight,
    /// Rotates the Q and K sections of packed Q·K·V by position (rotate-half convention).
    Rope {
        /// Rotate backwards: the gradient.
        inverse: bool,
        /// Positions count from the start of each document, a number on the device for every position. A start after its
        /// position counts as that position.
        documents: bool,
    },
    /// As `Rope`, from position `start` of each sequence on, a number on the device. Positions past the table take its last
    /// row.
    RopeAt,
    /// Causal scaled-dot-product attention over packed Q·K·V, with the log-sum-exp of each row of scores.
    Attention {
        /// A query sees the keys from the start of its document on, a number on the device for every position. A start
        /// after its position counts as that position.
        documents: bool,
    },
    /// Gradient of `Attention`; recomputes the scores tile by tile.
    AttentionGrad {
        /// As in `Attention`.
        documents: bool,
    },
    /// Attention of `count` new positions over themselves and all before them: their keys and values are written into the
    /// cache from position `start` on, in place. Rows past `count` give zeros and leave the cache as it is.
    CachedAttention,
    /// Of each sequence, the last of `count` positions.
    LastPosition,
    /// `y = silu(gate) · up` over packed gate·up.
    SwiGlu,
    /// Gradient of `SwiGlu`.
    SwiGluGrad,
    /// Elementwise sum.
    Add,
    /// Sum of token losses per sequence, with the log-sum-exp of each row of logits.
    CrossEntropy,
    /// Gradient of the sum of token losses.
    CrossEntropyGrad,
    /// `CrossEntropy(Linear(x, w))` and its gradients, chunk by chunk, so that the logits never exist whole. Where gradients
    /// are summed in fixed point, a chunk never crosses two sequences: a sequence's share does not depend on its neighbours.
    LinearCrossEntropy {
        /// Most positions of a chunk.
        rows: usize,
        /// Gradients start with the step's loss scale, a number on the device, instead of 1.
        scaled: bool,
    },
    /// Adds one gradient accumulator to another: the second use of a tied parameter.
    AddState,
    /// Adds a value to its sum over micro-batches.
    Accumulate,
    /// The sum of the squares of mean gradients, as an integer of 128 bits in four parts: exact, so that it does not depend on
    /// who adds what to what. Elements from `tail` on stand on `sharers` ranks and count in shares.
    SquareSum {
        /// Ranks that hold the elements from `tail` on.
        sharers: usize,
        /// First shared element of each gradient, counted before flat cuts.
        tail: usize,
    },
    /// Adds such sums.
    MergeSums,
    /// From the sum of squares to the norm of the mean gradient, and the factor that scales and clips gradients (NaN where one
    /// is not finite).
    GradientNorm,
    /// One AdamW update with decoupled decay, and the new weights in bf16 where asked for; does nothing where the factor is
    /// NaN.
    AdamW {
        /// Decay of the first moment.
        beta1: f32,
        /// Decay of the second moment.
        beta2: f32,
        /// Added to the root of the second moment.
        eps: f32,
        /// Decoupled weight decay, multiplied by the learning rate.
        decay: f32,
        /// Times the step's learning rate.
        lr_scale: f32,
    },
    /// One Lion update: the sign of a mixture of moment and gradient, with decoupled decay; otherwise as `AdamW`.
    Lion {
        /// Share of the moment in the update.
        beta1: f32,
        /// Decay of the moment.
        beta2: f32,
        /// As in `AdamW`.
        decay: f32,
        /// As in `AdamW`.
        lr_scale: f32,
    },
    /// One update by gradient and momentum, with decoupled decay; otherwise as `AdamW`.
    Sgd {
        /// Decay of the momentum.
        momentum: f32,
        /// As in `AdamW`.
        decay: f32,
        /// As in `AdamW`.
        lr_scale: f32,
    },
    /// The momentum of gradients, and the mixture of both that looks one step ahead (Nesterov); zeros, and the momentum as it
    /// was, where the factor is NaN.
    Momentum {
        /// Decay of the momentum.
        momentum: f32,
    },
    /// Of every section of the rows on its own: the nearest matrix with orthogonal rows or columns, about, by five
    /// Newton–Schulz iterations, times 0.2·√(its longer side), which gives it the size of an AdamW update.
    Orthogonalise,
    /// `w = w − lr · (decay · w + update)`, and the new weights in bf16 where asked for; does nothing where the factor is NaN.
    Descend {
        /// As in `AdamW`.
        decay: f32,
        /// As in `AdamW`.
        lr_scale: f32,
    },
    /// Logits of some positions over a part of the vocabulary, and of each position what the loss needs to know of this part:
    /// largest logit, sum of exponentials below it, the target's logit (−∞ where the target is elsewhere).
    VocabLogits {
        /// Which positions.
        rows: Rows,
        /// Parts of the vocabulary.
        parts: usize,
    },
    /// Sum of token losses per sequence, from the statistics of all parts of the vocabulary, chunk by chunk.
    VocabLoss,
    /// Gradients of the sum of token losses of some positions: this part's share of dx, and dw.
    VocabGrad {
        /// Which positions.
        rows: Rows,
        /// As in `LinearCrossEntropy`.
        scaled: bool,
    },
    /// Chunks of positions, one behind the other.
    JoinRows,
    /// Partial sums become whole on every rank.
    AllReduce {
        /// Over these ranks.
        axis: MeshAxis,
    },
    /// Adds up, between neighbours over tensor parallelism, the rows that they share: all sections of the outermost dimension
    /// but the first.
    SumShared {
        /// Neighbours that share.
        sharers: usize,
    },
    /// Partial sums become whole parts.
    ReduceScatter {
        /// Over these ranks.
        axis: MeshAxis,
        /// Parts of this dimension; flat ranges if `None`.
        dim: Option<usize>,
    },
    /// Parts become whole on every rank.
    AllGather {
        /// Over these ranks.
        axis: MeshAxis,
        /// Parts of this dimension; flat ranges if `None`.
        dim: Option<usize>,
    },
    /// This rank's flat range of a whole: a view, no work.
    Shard {
        /// Over these ranks.
        axis: MeshAxis,
    },
    /// To the same rank of another pipeline stage.
    Send {
        /// The stage.
        stage: usize,
        /// Which stream of messages.
        tag: u32,
    },
    /// From the same rank of another pipeline stage.
    Receive {
        /// The stage.
        stage: usize,
        /// Which stream of messages.
        tag: u32,
    },
}

/// Consecutive positions of a micro-batch, counted over its sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// The first, on each data-parallel rank.
    pub first: usize,
    /// How many, on each data-parallel rank.
    pub count: usize,
    /// Data-parallel ranks that the shapes speak of.
    pub ranks: usize,
}

/// Floating-point operations of one call, multiply and add counted as two; matrix products only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flops {
    /// What the model needs, attention counted in full.
    pub model: u128,
    /// The same with the masked half of causal attention left out.
    pub causal: u128,
    /// What this op really asks of the hardware, recomputed scores included, attention in full.
    pub hardware: u128,
}

impl std::ops::Add for Flops {
    type Output = Flops;

    fn add(self, other: Flops) -> Flops {
        Flops {
            model: self.model + other.model,
            causal: self.causal + other.causal,
            hardware: self.hardware + other.hardware,
        }
    }
}

/// Why an op refuses its inputs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op}: {reason}")]
pub struct TypeError {
    /// The op's name.
    pub op: &'static str,
    /// What does not fit.
    pub reason: String,
}

impl Op {
    /// The op's name.
    pub fn name(&self) -> &'static str {
        self.spec().name
    }

    /// The table row of output `index`.
    pub fn output(&self, index: usize) -> &'static Operand {
        let spec = self.spec();
        &spec.outputs[if spec.each { 0 } else { index }]
    }

    /// Whether ranks work together in it.
    pub fn communicates(&self) -> bool {
        let spec = self.spec();
        spec.each || matches!(self, Op::Send { .. } | Op::Receive { .. })
    }

    /// The table row of input `index` when the op is called with `count` inputs.
    pub fn input(&self, index: usize, count: usize) -> &'static Operand {
        let spec = self.spec();
        if !spec.variadic {
            return &spec.inputs[index];
        }
        let repeated = count + 1 - spec.inputs.len();
        &spec.inputs[if index < repeated { 0 } else { index + 1 - repeated }]
    }

    /// Output types for these input types, or why they do not fit.
    pub fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, TypeError> {
        let spec = self.spec();
        let dims = self.bind(inputs)?;
        if spec.each {
            return Ok(inputs.iter().map(|ty| (*ty).clone()).collect());
        }
        let output = |o: &Operand| {
            let elem = match o.elem {
                Elem::Is(dtype) => dtype,
                Elem::Float => dims.float(),
                Elem::Rounded => DType::BF16,
                Elem::Accumulator | Elem::Any => match inputs.first() {
                    // Nothing is summed in f16.
                    Some(input) if o.elem == Elem::Accumulator && input.dtype == DType::F16 => DType::F32,
                    Some(input) => input.dtype,
                    None => return Err(self.refuse("has no input to take its type from".into())),
                },
            };
            let shape = match o.dims {
                "*" => Ok(inputs[0].dims.clone()),
                letters => letters.chars().map(|c| dims.get(c).cloned().ok_or(c)).collect(),
            };
            match shape {
                Ok(dims) => Ok(TensorType::new(elem, dims)),
                Err(c) => Err(self.refuse(format!("dimension `{c}` of output `{}` is unknown", o.name))),
            }
        };
        spec.outputs.iter().map(output).collect()
    }

    /// Matrix-product FLOPs of one call with these input types; `wanted` says which outputs are asked for.
    pub fn flops(&self, inputs: &[&TensorType], wanted: &[bool]) -> Result<Flops, TypeError> {
        let dims = self.bind(inputs)?;
        let same = |n| Flops { model: n, causal: n, hardware: n };
        let attention = |model: u128, hardware: u128| {
            let square = dims.product("bssh");
            Flops { model: model * square, causal: model * square / 2, hardware: hardware * square }
        };
        Ok(match self {
            Op::Linear | Op::LinearGradInput | Op::LinearGradWeight => same(2 * dims.product("bsnk")),
            // One product for the logits, one for each gradient that somebody wants.
            Op::LinearCrossEntropy { .. } => {
                let products = 1 + wanted.iter().skip(1).filter(|w| **w).count() as u128;
                same(2 * products * dims.product("bskv"))
            }
            Op::VocabLogits { .. } => same(2 * dims.product("ckv")),
            Op::VocabGrad { .. } => same(2 * wanted.iter().filter(|w| **w).count() as u128 * dims.product("ckv")),
            // Where documents end is known on the device only: what they mask is counted.
            Op::Attention { .. } => attention(4, 4),
            Op::AttentionGrad { .. } => attention(8, 10),
            // Not the model's.
            Op::Orthogonalise => {
                let sections = inputs[0].dims[0].sections.iter();
                let hardware = sections.map(|s| newton_schulz::flops(s.size(), dims.size('k'))).sum();
                Flops { hardware, ..Flops::default() }
            }
            // How full the cache is is known on the device only: every new position counts over all of it.
            Op::CachedAttention => same(4 * dims.product("bsth")),
            Op::Embedding
            | Op::EmbeddingGrad { .. }
            | Op::RmsNorm { .. }
            | Op::AddRmsNorm { .. }
            | Op::RmsNormGrad
            | Op::AddRmsNormGrad
            | Op::RmsNormGradWeight
            | Op::Rope { .. }
            | Op::RopeAt
            | Op::LastPosition
            | Op::SwiGlu
            | Op::SwiGluGrad
            | Op::Add
            | Op::CrossEntropy
            | Op::CrossEntropyGrad
            | Op::AddState
            | Op::Accumulate
            | Op::SquareSum { .. }
            | Op::MergeSums
            | Op::GradientNorm
            | Op::AdamW { .. }
            | Op::Lion { .. }
            | Op::Sgd { .. }
            | Op::Momentum { .. }
            | Op::Descend { .. }
            | Op::VocabLoss
            | Op::JoinRows
            | Op::AllReduce { .. }
            | Op::SumShared { .. }
            | Op::ReduceScatter { .. }
            | Op::AllGather { .. }
            | Op::Shard { .. }
            | Op::Send { .. }
            | Op::Receive { .. } => Flops::default(),
        })
    }

    /// The dimension behind every letter for these inputs.
    pub fn bind(&self, inputs: &[&TensorType]) -> Result<Dims, TypeError> {
        let spec = self.spec();
        let fits = if spec.variadic { inputs.len() >= spec.inputs.len() } else { inputs.len() == spec.inputs.len() };
        if !fits {
            return Err(self.refuse(format!("takes {} inputs, got {}", spec.inputs.len(), inputs.len())));
        }
        let mut dims = Dims::default();
        for (i, ty) in inputs.iter().enumerate() {
            let operand = self.input(i, inputs.len());
            let ok = match operand.elem {
                Elem::Is(dtype) => ty.dtype == dtype,
                Elem::Float => {
                    matches!(ty.dtype, DType::F32 | DType::BF16 | DType::F16)
                        && *dims.float.get_or_insert(ty.dtype) == ty.dtype
                }
                Elem::Rounded => matches!(ty.dtype, DType::BF16 | DType::F16),
                Elem::Accumulator => ty.dtype.accumulates(),
                Elem::Any => true,
            };
            if !ok {
                return Err(self.refuse(format!("input `{}` has type {}", operand.name, ty.dtype)));
            }
            if operand.dims == "*" {
                continue;
            }
            if operand.dims.len() != ty.dims.len() {
                return Err(self.refuse(format!("input `{}` must be [{}], is {ty}", operand.name, operand.dims)));
            }
            for (letter, dim) in operand.dims.chars().zip(&ty.dims) {
                if letter != '?'
                    && let Some(known) = dims.set(letter, dim)
                    && known != dim
                {
                    return Err(self.refuse(format!("input `{}` has {dim} where `{letter}` is {known}", operand.name)));
                }
            }
        }
        self.derive(&mut dims)?;
        Ok(dims)
    }

    /// Fills in the letters that follow from attributes or from the sections of a packed dimension.
    fn derive(&self, dims: &mut Dims) -> Result<(), TypeError> {
        match self {
            Op::EmbeddingGrad { vocab } => {
                dims.set('v', &Dim::new(Axis::Vocab, *vocab));
            }
            Op::Rope { .. } | Op::RopeAt => {
                let q = self.packed_heads(dims)?;
                let columns = dims.size('r');
                if columns != q.unit {
                    return Err(self.refuse(format!("table has {columns} columns for heads of {}", q.unit)));
                }
                if dims.size('t') < dims.size('s') {
                    return Err(self.refuse(format!("table has {} rows for {}", dims.size('t'), dims.size('s'))));
                }
            }
            Op::Attention { .. } | Op::AttentionGrad { .. } => {
                let q = self.packed_heads(dims)?;
                let out = Dim::packed([q]);
                if let Some(known) = dims.set('h', &out)
                    && *known != out
                {
                    return Err(self.refuse(format!("`do` has {known} where the heads are {out}")));
                }
            }
            Op::CachedAttention => {
                let q = self.packed_heads(dims)?;
                dims.set('h', &Dim::packed([q]));
                let [packed, cached] = ['p', 'w'].map(|c| dims.get(c).map_or(&[][..], |d| d.sections.as_slice()));
                if packed[1..] != *cached {
                    return Err(self.refuse("the cache must hold the K and V sections of the packed dimension".into()));
                }
                if dims.size('t') < dims.size('s') {
                    return Err(self.refuse(format!("cache has {} rows for {}", dims.size('t'), dims.size('s'))));
                }
            }
            Op::LastPosition => {
                dims.set('l', &Dim::new(Axis::Seq, 1));
            }
            Op::SwiGlu | Op::SwiGluGrad => match dims.get('g').map(|g| g.sections.as_slice()) {
                Some(&[gate, up]) if gate == up => {
                    dims.set('f', &Dim::packed([gate]));
                }
                _ => return Err(self.refuse("the packed dimension must be two equal sections".into())),
            },
            Op::LinearCrossEntropy { rows, .. } => {
                dims.set('c', &Dim::new(Axis::Seq, *rows));
            }
            Op::SquareSum { .. } => {
                dims.set('m', &Dim::new(Axis::Scalar, 4));
            }
            Op::Orthogonalise => {
                let (rows, columns) = (dims.get('n').cloned(), dims.size('k'));
                let short = rows.iter().flat_map(|n| &n.sections).map(|s| s.size().min(columns)).max();
                dims.set('a', &Dim::new(Axis::Embed, short.unwrap_or(0)));
            }
            Op::GradientNorm => {
                dims.set('y', &Dim::new(Axis::Scalar, 2));
            }
            Op::VocabLogits { rows, parts } => {
                dims.set('c', &Dim::new(Axis::Seq, rows.count * rows.ranks));
                dims.set('a', &Dim::new(Axis::Parts, *parts));
                dims.set('j', &Dim::new(Axis::Scalar, 3));
            }
            Op::Embedding
            | Op::Linear
            | Op::LinearGradInput
            | Op::LinearGradWeight
            | Op::RmsNorm { .. }
            | Op::AddRmsNorm { .. }
            | Op::RmsNormGrad
            | Op::AddRmsNormGrad
            | Op::RmsNormGradWeight
            | Op::Add
            | Op::CrossEntropy
            | Op::CrossEntropyGrad
            | Op::AddState
            | Op::Accumulate
            | Op::MergeSums
            | Op::AdamW { .. }
            | Op::Lion { .. }
            | Op::Sgd { .. }
            | Op::Momentum { .. }
            | Op::Descend { .. }
            | Op::VocabLoss
            | Op::VocabGrad { .. }
            | Op::JoinRows
            | Op::AllReduce { .. }
            | Op::SumShared { .. }
            | Op::ReduceScatter { .. }
            | Op::AllGather { .. }
            | Op::Shard { .. }
            | Op::Send { .. }
            | Op::Receive { .. } => {}
        }
        Ok(())
    }

    /// The Q section of packed Q·K·V, having bound the numbers of heads and their size.
    fn packed_heads(&self, dims: &mut Dims) -> Result<Section, TypeError> {
        let sections = dims.get('p').map(|p| p.sections.clone()).unwrap_or_default();
        match sections[..] {
            [q, k, v] if k == v && k.unit == q.unit && k.count > 0 && q.count.is_multiple_of(k.count) => {
                dims.set('q', &Dim::new(Axis::Heads, q.count));
                dims.set('u', &Dim::new(Axis::KvHeads, k.count));
                dims.set('e', &Dim::new(Axis::HeadDim, q.unit));
                Ok(q)
            }
            _ => Err(self.refuse("the packed dimension must be Q, K and V, with K's heads dividing Q's".into())),
        }
    }

    fn refuse(&self, reason: String) -> TypeError {
        TypeError { op: self.name(), reason }
    }
}

#[cfg(test)]
mod tests;
