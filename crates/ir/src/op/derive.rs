//! Letters of an op that none of its inputs has as they are.

use super::{Dims, Op, TypeError};
use crate::{Axis, Dim, Section, squares};

impl Op {
    /// Fills in the letters that follow from attributes or from the sections of a packed dimension.
    pub(super) fn derive(&self, dims: &mut Dims) -> Result<(), TypeError> {
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
            Op::QkNorm { .. } | Op::QkNormGrad | Op::QkNormGradWeight => {
                let q = self.packed_heads(dims)?;
                let norms = [(Axis::Heads, q.count), (Axis::KvHeads, dims.size('u'))];
                let norms = Dim::packed(norms.map(|(axis, count)| Section { axis, count, unit: 1 }));
                let weight = Section { axis: Axis::HeadDim, count: q.unit, unit: 1 };
                self.ask(dims, 'x', norms)?;
                self.ask(dims, 'i', Dim::packed([weight, weight]))?;
            }
            Op::Attention { .. } | Op::AttentionGrad { .. } => {
                let out = Dim::packed([self.packed_heads(dims)?]);
                self.ask(dims, 'h', out)?;
            }
            Op::AttentionScores { .. }
            | Op::AttentionScoresGrad { .. }
            | Op::AttentionMix { .. }
            | Op::AttentionMixGrad { .. } => {
                let out = Dim::packed([self.packed_heads(dims)?]);
                let keys = dims.get('s').cloned().unwrap_or(Dim::new(Axis::Seq, 1));
                self.ask(dims, 'h', out)?;
                self.ask(dims, 't', keys)?;
            }
            Op::CachedAttention { .. } => {
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
            Op::AddPositions { seq, .. } | Op::PositionsGrad { seq, .. } => {
                if let Op::PositionsGrad { rows, .. } = self {
                    dims.set('t', &Dim::new(Axis::Seq, *rows));
                }
                let (whole, rows) = (dims.get('o').map_or(*seq, Dim::size), dims.size('t'));
                if whole != *seq || rows < *seq || !seq.is_multiple_of(dims.size('s')) {
                    let part = dims.size('s');
                    let reason = format!("{part} of {seq} positions with {whole} starts and {rows} rows of a table");
                    return Err(self.refuse(reason));
                }
            }
            Op::Dropout { seq, .. } => {
                let (part, words) = (dims.size('s'), dims.size('z'));
                if !seq.is_multiple_of(part) || words != 2 {
                    return Err(self.refuse(format!("{part} of {seq} positions with keys of {words} words")));
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
                dims.set('m', &Dim::new(Axis::Scalar, squares::LIMBS));
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
            | Op::AddBias
            | Op::BiasGrad
            | Op::RmsNorm { .. }
            | Op::AddRmsNorm { .. }
            | Op::RmsNormGrad
            | Op::AddRmsNormGrad
            | Op::RmsNormGradWeight
            | Op::LayerNorm { .. }
            | Op::AddLayerNorm { .. }
            | Op::LayerNormGrad
            | Op::AddLayerNormGrad
            | Op::LayerNormGradWeight
            | Op::AddPositionsAt
            | Op::Gelu
            | Op::GeluGrad
            | Op::Add
            | Op::CrossEntropy
            | Op::CrossEntropyGrad { .. }
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
                self.ask(dims, 'q', Dim::new(Axis::Heads, q.count))?;
                dims.set('u', &Dim::new(Axis::KvHeads, k.count));
                dims.set('e', &Dim::new(Axis::HeadDim, q.unit));
                Ok(q)
            }
            _ => Err(self.refuse("the packed dimension must be Q, K and V, with K's heads dividing Q's".into())),
        }
    }

    /// Binds a letter that follows from the packed dimension; an operand may have said the same.
    fn ask(&self, dims: &mut Dims, letter: char, dim: Dim) -> Result<(), TypeError> {
        match dims.set(letter, &dim) {
            Some(known) if *known != dim => {
                Err(self.refuse(format!("`{letter}` is {known} where the heads ask for {dim}")))
            }
            _ => Ok(()),
        }
    }
}
