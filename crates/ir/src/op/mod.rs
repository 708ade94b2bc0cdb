//! The op table: every operation, declared once.
//!
//! A row says what an op is called, what it reads and writes (each operand's dimensions as letters, its element type),
//! which output may take over which input's memory, what its gradient may look at, and what it costs. Shape inference,
//! the verifier, autodiff, lowering, the account of FLOPs and bytes and every executor read these rows.
//!
//! Letters: `b` batch, `s` sequence, `d`/`k`/`n` features, `p` packed Q·K·V, `h` heads × head_dim, `q` query heads,
//! `u` key and value heads, `e` head_dim, `g` packed gate·up, `f` ffn, `v` vocabulary, `t` rows of a table, positions of a cache
//! or keys, `r` table columns, `a` the
//! shorter side of a matrix or parts of a vocabulary, `w` packed K·V of a cache, `o` a whole sequence of which `s` may be a part, `x` query and key heads
//! together, `i` packed weights of their norms, `l` a single position, `c` rows of a chunk, `z` step scalars or words of a key,
//! `m` statistics. A letter that stands in two operands is the same dimension in both; a letter in the inputs that no output has
//! is summed over.

mod derive;
mod dims;
mod flops;
pub mod newton_schulz;
mod table;
#[cfg(test)]
mod tests;

pub use dims::Dims;
pub use flops::Flops;
pub use table::{Elem, Operand, Saved, Spec};

use crate::mesh::{Axes, MeshAxis};
use crate::{DType, TensorType};

/// The target of a position whose loss does not count (a token of a prompt, say): it adds neither loss nor gradient.
pub const IGNORED_TARGET: u32 = u32::MAX;

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
    /// `y = x + b`, the same vector at every position.
    AddBias,
    /// `db = dy`, summed over all positions.
    BiasGrad,
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
    /// Normalises every head of the Q and K sections of packed Q·K·V: `y = x / rms(x) · w`. The weight holds that of all Q heads, then
    /// that of all K heads; V stays as it is.
    QkNorm {
        /// Added to the mean square.
        eps: f32,
    },
    /// Input gradient of `QkNorm`.
    QkNormGrad,
    /// Weight gradient of `QkNorm`.
    QkNormGradWeight,
    /// `y = (x − mean(x)) / deviation(x) · w + b`.
    LayerNorm {
        /// Added to the variance.
        eps: f32,
    },
    /// `sum = x + delta`, `y = (sum − mean(sum)) / deviation(sum) · w + b`.
    AddLayerNorm {
        /// Added to the variance.
        eps: f32,
    },
    /// Input gradient of either layer norm.
    LayerNormGrad,
    /// Input gradient of `AddLayerNorm` plus the gradient that reaches `sum` on the residual path.
    AddLayerNormGrad,
    /// Weight gradient of either layer norm; that of the bias is `BiasGrad`.
    LayerNormGradWeight,
    /// Adds to each position its row of a table.
    AddPositions {
        /// Positions of a whole sequence, of which a rank may have a part.
        seq: usize,
        /// Positions count from the start of each document, a number on the device for every position of the whole
        /// sequence. A start after its position counts as that position.
        documents: bool,
    },
    /// As `AddPositions`, from position `start` of each sequence on, a number on the device. Positions past the table take its
    /// last row.
    AddPositionsAt,
    /// Adds each position's gradient to its row of the table.
    PositionsGrad {
        /// Rows of the table.
        rows: usize,
        /// As in `AddPositions`.
        seq: usize,
        /// As in `AddPositions`.
        documents: bool,
    },
    /// RoPE: rotates the Q and K sections of packed Q·K·V by position (rotate-half convention).
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
        /// Sliding window: a query sees so many keys at most, its own the last of them; all before it if `None`. None at all counts as one.
        window: Option<usize>,
    },
    /// Gradient of `Attention`; recomputes the scores tile by tile.
    AttentionGrad {
        /// As in `Attention`.
        documents: bool,
        /// As in `Attention`.
        window: Option<usize>,
    },
    /// The weights of `Attention`, as a matrix that exists: softmax of scaled scores, zero for keys that a query does not see.
    AttentionScores {
        /// As in `Attention`.
        documents: bool,
        /// As in `Attention`.
        window: Option<usize>,
    },
    /// Gradient of `AttentionScores`, in the Q and K sections; zero in V.
    AttentionScoresGrad {
        /// As in `Attention`.
        window: Option<usize>,
    },
    /// The values of packed Q·K·V, summed with such weights.
    AttentionMix {
        /// As in `Attention`: keys before it weigh nothing.
        window: Option<usize>,
    },
    /// Gradients of `AttentionMix`: of the weights, and of the V section; zero in Q and K.
    AttentionMixGrad {
        /// As in `AttentionMix`.
        window: Option<usize>,
    },
    /// Attention of `count` new positions over themselves and all before them: their keys and values are written into the
    /// cache from position `start` on, in place. Rows past `count` give zeros and leave the cache as it is.
    CachedAttention {
        /// As in `Attention`.
        window: Option<usize>,
    },
    /// Of each sequence, the last of `count` positions.
    LastPosition,
    /// `y = silu(gate) · up` over packed gate·up.
    SwiGlu,
    /// Gradient of `SwiGlu`.
    SwiGluGrad,
    /// `y = gelu(x)`, in the form with a hyperbolic tangent.
    Gelu,
    /// Gradient of `Gelu`.
    GeluGrad,
    /// Each element either 0 or scaled by 1 / (1 − rate), by a mask that is a function of the sequence's key, the site,
    /// position and feature (`counter::row_bits`): any rank of any layout draws the same. Its gradient is the same op.
    Dropout {
        /// The fraction of elements that become 0.
        rate: f32,
        /// The place in the model.
        site: u64,
        /// Positions of a whole sequence, of which a rank may have a part.
        seq: usize,
    },
    /// Elementwise sum.
    Add,
    /// Sum of token losses per sequence, with the log-sum-exp of each row of logits. A position whose target is
    /// [`IGNORED_TARGET`] has no loss, here and in the other ops of the output head.
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
    /// The sum of the squares of mean gradients, as a wide integer in parts ([`crate::squares`]): exact over the range of f32,
    /// so that it does not depend on who adds what to what. Elements from `tail` on stand on `sharers` ranks and count in
    /// shares.
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
        /// Over the ranks along these axes.
        over: Axes,
    },
    /// Adds up, between neighbours, the rows that they share: all sections of the outermost dimension but the first.
    SumShared {
        /// Neighbours along these axes.
        over: Axes,
        /// How many share.
        sharers: usize,
    },
    /// Partial sums become whole parts.
    ReduceScatter {
        /// Over the ranks along these axes.
        over: Axes,
        /// Parts of this dimension; flat ranges if `None`.
        dim: Option<usize>,
    },
    /// Parts become whole on every rank.
    AllGather {
        /// Over the ranks along these axes.
        over: Axes,
        /// Parts of this dimension; flat ranges if `None`.
        dim: Option<usize>,
    },
    /// This rank's flat range of a whole: a view, no work.
    Shard {
        /// Over the ranks along these axes.
        over: Axes,
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
    /// The first, on each rank that has sequences of its own.
    pub first: usize,
    /// How many, on each such rank.
    pub count: usize,
    /// Such ranks that the shapes speak of.
    pub ranks: usize,
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

    /// Its attributes as printed programs show them: all that two ops of one name can differ in; empty where there are none.
    pub fn attributes(&self) -> String {
        let all = format!("{self:?}");
        all.find('{').map_or(String::new(), |at| format!(" {}", &all[at..]))
    }

    /// The table row of output `index`.
    pub fn output(&self, index: usize) -> &'static Operand {
        let spec = self.spec();
        &spec.outputs[if spec.each { 0 } else { index }]
    }

    /// The axes along which ranks work together in it; none where a rank works alone.
    pub fn over(&self) -> Axes {
        match *self {
            Op::AllReduce { over }
            | Op::ReduceScatter { over, .. }
            | Op::AllGather { over, .. }
            | Op::SumShared { over, .. } => over,
            Op::Send { .. } | Op::Receive { .. } => MeshAxis::Pp.into(),
            _ => Axes::NONE,
        }
    }

    /// Whether all it does is to change the shardings of tensors, each for itself.
    pub fn reshards(&self) -> bool {
        self.spec().each || matches!(self, Op::Shard { .. })
    }

    /// Whether ranks work together in it.
    pub fn communicates(&self) -> bool {
        let spec = self.spec();
        spec.each || matches!(self, Op::Send { .. } | Op::Receive { .. })
    }

    /// The operand and dimension that have the letter which the op [numbers](Spec::numbers): (whether it is an input, its index,
    /// the dimension). Inputs come first.
    pub fn numbered(&self, inputs: usize) -> Option<(bool, usize, usize)> {
        let spec = self.spec();
        let letter = spec.numbers?;
        let find = |dims: &str| dims.chars().position(|c| c == letter);
        let input = (0..inputs).find_map(|i| Some((true, i, find(self.input(i, inputs).dims)?)));
        input.or_else(|| (0..spec.outputs.len()).find_map(|o| Some((false, o, find(spec.outputs[o].dims)?))))
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

    fn refuse(&self, reason: String) -> TypeError {
        TypeError { op: self.name(), reason }
    }
}
