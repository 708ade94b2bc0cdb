//! What a graph is for, and the few places where that changes how an architecture is written down.
//!
//! There are three forms: `Loss`, `NextToken` and `Score`. An architecture is written once and does not ask which it is.

use crate::names;
use lockstep_config::AttentionMethod;
use lockstep_ir::graph::{Loss, State};
use lockstep_ir::{Axis, DType, Dim, Graph, Op, TensorType, TypeError, ValueId, counter};

/// What a forward graph computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The loss of every sequence, for training and evaluation.
    Loss {
        /// Sequences.
        batch: usize,
        /// Tokens of each.
        seq: usize,
        /// Positions that the rotary table holds, at least `seq`.
        context: usize,
        /// Whether attention and positions keep to the document that a token is from; an input says where each starts.
        documents: bool,
    },
    /// The logits after some new tokens of some texts, where the keys and values of all tokens before them are in a cache of pages.
    NextToken {
        /// Texts that have new tokens.
        batch: usize,
        /// Most new tokens of each.
        positions: usize,
        /// The cache.
        cache: CacheShape,
        /// Tokens that may be taken, of the vocabulary.
        known: usize,
    },
    /// The loss of given tokens after some new tokens of some texts, with the same cache.
    Score {
        /// Runs of new tokens. Several may be of one text: all keys and values are in the cache before any position looks at them.
        batch: usize,
        /// Most new tokens of each.
        positions: usize,
        /// The cache.
        cache: CacheShape,
    },
}

/// Sizes of a cache of keys and values: pages of positions, which texts have as they grow. Row by row a table says which pages a text has, block after
/// block. Layers with a sliding window have pages and a table of their own: a text gives back those that no window reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// Texts that may have pages at once.
    pub slots: usize,
    /// Most pages of a text.
    pub blocks: usize,
    /// Positions of a page.
    pub page: usize,
    /// Pages of layers that see all positions.
    pub pages: usize,
    /// Pages of layers with a sliding window.
    pub window_pages: usize,
    /// Whether a call has new tokens of a text in one place alone.
    pub apart: bool,
}

impl CacheShape {
    /// Most positions of a text.
    pub fn context(&self) -> usize {
        self.blocks * self.page
    }
}

impl Form {
    /// Sequences, tokens of each, and positions of the rotary table.
    pub fn extents(self) -> (usize, usize, usize) {
        match self {
            Form::Loss { batch, seq, context, .. } => (batch, seq, context),
            Form::NextToken { batch, positions, cache, .. } | Form::Score { batch, positions, cache } => {
                (batch, positions, cache.context())
            }
        }
    }
}

/// The inputs that a form has besides the tokens, and what an architecture leaves to them: positions, attention, the result.
#[derive(Clone, Debug)]
pub enum FormInputs {
    /// Of [`Form::Loss`].
    Loss {
        /// The token that follows each position.
        targets: ValueId,
        /// Where the document of each position starts, if that matters.
        starts: Option<ValueId>,
        /// The keys of dropout, and its rate, if there is any.
        dropout: Option<(ValueId, f32)>,
    },
    /// Of [`Form::NextToken`] and [`Form::Score`].
    NextToken {
        /// How many tokens of each sequence are in the cache.
        start: ValueId,
        /// How many are new.
        count: ValueId,
        /// Which row of the table each has.
        slot: ValueId,
        /// The cache.
        cache: CacheShape,
        /// What is asked of the logits.
        asked: AskedLogits,
    },
}

/// What is asked of the logits after new tokens.
#[derive(Clone, Copy, Debug)]
pub enum AskedLogits {
    /// Those after the last, and the most probable of this many tokens.
    Last {
        /// Tokens that may be taken.
        known: usize,
        /// Whether a call may have several new tokens.
        several: bool,
    },
    /// The loss of these tokens.
    Targets(ValueId),
}

impl FormInputs {
    /// Declares them.
    pub fn declare(g: &mut Graph, form: Form) -> Self {
        let batch = |n| Dim::new(Axis::Batch, n);
        let seq = |n| Dim::new(Axis::Seq, n);
        match form {
            Form::Loss { batch: b, seq: s, documents, .. } => {
                let mut numbers = |name| g.input(name, TensorType::new(DType::U32, [batch(b), seq(s)]));
                let targets = numbers(names::TARGETS);
                let starts = documents.then(|| numbers(names::DOCUMENT_STARTS));
                FormInputs::Loss { targets, starts, dropout: None }
            }
            Form::NextToken { batch: b, positions, cache, .. } | Form::Score { batch: b, positions, cache } => {
                let mut number = |name| g.input(name, TensorType::new(DType::U32, [batch(b)]));
                let [start, count, slot] = [names::START, names::COUNT, names::SLOT].map(&mut number);
                let asked = match form {
                    Form::NextToken { known, .. } => AskedLogits::Last { known, several: positions > 1 },
                    _ => AskedLogits::Targets(
                        g.input(names::TARGETS, TensorType::new(DType::U32, [batch(b), seq(positions)])),
                    ),
                };
                FormInputs::NextToken { start, count, slot, cache, asked }
            }
        }
    }

    /// Whether keys and values of all positions are in a cache.
    pub fn has_cache(&self) -> bool {
        matches!(self, FormInputs::NextToken { .. })
    }

    /// The same with dropout at this rate. Generation has none.
    pub fn dropping(mut self, g: &mut Graph, rate: f64) -> Self {
        if let FormInputs::Loss { targets, dropout, .. } = &mut self
            && rate > 0.0
        {
            let batch = g.ty(*targets).dims[0].clone();
            let keys = g.input(names::DROPOUT_KEYS, TensorType::new(DType::U32, [batch, Dim::new(Axis::Scalar, 2)]));
            *dropout = Some((keys, rate as f32));
        }
        self
    }

    /// Dropout, where there is any; `name` is the site.
    pub fn drop(&self, g: &mut Graph, x: ValueId, name: &str) -> Result<ValueId, TypeError> {
        match self {
            FormInputs::Loss { targets, dropout: Some((keys, rate)), .. } => {
                let (seq, site) = (g.ty(*targets).dims[1].size(), counter::key(0, name));
                Ok(g.op(Op::Dropout { rate: *rate, site, seq }, &[x, *keys], name)?[0])
            }
            FormInputs::Loss { .. } | FormInputs::NextToken { .. } => Ok(x),
        }
    }

    /// Adds to every position its row of a learned table.
    pub fn place(&self, g: &mut Graph, x: ValueId, table: ValueId, name: &str) -> Result<ValueId, TypeError> {
        let (op, numbers) = match self {
            FormInputs::Loss { targets, starts, .. } => {
                let seq = g.ty(*targets).dims[1].size();
                (Op::AddPositions { seq }, *starts)
            }
            FormInputs::NextToken { start, .. } => (Op::AddPositionsAt, Some(*start)),
        };
        let inputs: Vec<ValueId> = [x, table].into_iter().chain(numbers).collect();
        Ok(g.op(op, &inputs, name)?[0])
    }

    /// RoPE on the Q and K of packed Q·K·V.
    pub fn rotate(
        &self,
        g: &mut Graph,
        qkv: ValueId,
        angles: ValueId,
        at: &dyn Fn(&str) -> String,
    ) -> Result<ValueId, TypeError> {
        let (op, numbers) = match self {
            FormInputs::Loss { starts, .. } => (Op::Rope { inverse: false }, *starts),
            FormInputs::NextToken { start, .. } => (Op::RopeAt, Some(*start)),
        };
        let inputs: Vec<ValueId> = [qkv, angles].into_iter().chain(numbers).collect();
        Ok(g.op(op, &inputs, &at("rotated"))?[0])
    }

    /// Causal attention over packed Q·K·V, in a sliding window if there is one.
    pub fn attend(
        &self,
        g: &mut Graph,
        qkv: ValueId,
        how: (AttentionMethod, Option<usize>),
        at: &dyn Fn(&str) -> String,
    ) -> Result<ValueId, TypeError> {
        self.attend_with(g, qkv, how, None, at)
    }

    /// The same with attention sinks, a number of every head, if there are any. Attention whose weights exist has none.
    pub fn attend_with(
        &self,
        g: &mut Graph,
        qkv: ValueId,
        (method, window): (AttentionMethod, Option<usize>),
        sinks: Option<ValueId>,
        at: &dyn Fn(&str) -> String,
    ) -> Result<ValueId, TypeError> {
        match self {
            FormInputs::Loss { starts, .. } => {
                let inputs: Vec<ValueId> = [qkv].into_iter().chain(*starts).collect();
                match method {
                    AttentionMethod::Flash => {
                        let Some(sinks) = sinks else {
                            return Ok(g.op(Op::Attention { window }, &inputs, &at("o"))?[0]);
                        };
                        let made = g.op(Op::Attention { window }, &inputs, &at("attended"))?;
                        Ok(g.op(Op::AttentionSink { each: false }, &[made[0], made[1], sinks], &at("o"))?[0])
                    }
                    AttentionMethod::Naive => {
                        let p = g.op(Op::AttentionScores { window }, &inputs, &at("p"))?[0];
                        Ok(g.op(Op::AttentionMix { window }, &[p, qkv], &at("o"))?[0])
                    }
                }
            }
            FormInputs::NextToken { start, count, slot, cache: shape, .. } => {
                let (name, pages) = match window {
                    None => (names::PAGES, shape.pages),
                    Some(_) => (names::WINDOW_PAGES, shape.window_pages),
                };
                let table = g.values.iter().position(|v| v.name == name).map(ValueId).unwrap_or_else(|| {
                    let dims = [Dim::new(Axis::Batch, shape.slots), Dim::new(Axis::Seq, shape.blocks)];
                    g.state(name.to_owned(), TensorType::new(DType::U32, dims), State::Cache)
                });
                let sections = g.ty(qkv).dims.last().map_or(&[][..], |packed| &packed.sections);
                let kv = Dim::packed(sections.get(1..).unwrap_or_default());
                // Of a key that all heads share, the K section is what is no value.
                let latent = matches!(sections, [q, k, _] if q.unit != k.unit);
                let dims = [Dim::new(Axis::Batch, pages), Dim::new(Axis::Seq, shape.page), kv];
                let cache = g.state(at("kv_cache"), TensorType::new(DType::F32, dims), State::Cache);
                let inputs: Vec<ValueId> =
                    [qkv, cache, table, *slot, *start, *count].into_iter().chain(sinks).collect();
                let out = g.op(Op::CachedAttention { latent, window, apart: shape.apart }, &inputs, &at("o"))?;
                g.updates.push((cache, out[1]));
                Ok(out[0])
            }
        }
    }

    /// The positions whose logits are used.
    pub fn wanted(&self, g: &mut Graph, x: ValueId) -> Result<ValueId, TypeError> {
        match self {
            FormInputs::NextToken { count, asked: AskedLogits::Last { several: true, .. }, .. } => {
                Ok(g.op(Op::LastPosition, &[x, *count], "x_last")?[0])
            }
            FormInputs::NextToken { .. } | FormInputs::Loss { .. } => Ok(x),
        }
    }

    /// Makes the graph yield what the form asks for.
    pub fn finish(&self, g: &mut Graph, logits: ValueId) -> Result<(), TypeError> {
        let output = match self {
            FormInputs::Loss { targets, .. } => {
                let value = g.op(Op::CrossEntropy, &[logits, *targets], names::LOSS)?[0];
                g.losses.push(Loss { value, weight: 1.0 });
                value
            }
            FormInputs::NextToken { asked: AskedLogits::Targets(targets), .. } => {
                g.op(Op::CrossEntropy, &[logits, *targets], names::LOSS)?[0]
            }
            FormInputs::NextToken { asked: AskedLogits::Last { known, .. }, .. } => {
                let token = g.op(Op::Argmax { known: *known }, &[logits], names::NEXT)?[0];
                g.outputs.push(token);
                logits
            }
        };
        g.outputs.push(output);
        Ok(())
    }
}
