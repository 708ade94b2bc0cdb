//! Shapes whose dimensions know what they mean.

use crate::DType;
use serde::Serialize;

/// What a dimension means to the model. Sharding, recomputation and reports speak of these, never of positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// Sequences.
    Batch,
    /// Positions in a sequence.
    Seq,
    /// Width of the residual stream.
    Embed,
    /// Query heads.
    Heads,
    /// Key and value heads.
    KvHeads,
    /// Elements of one head, where they stand alone.
    HeadDim,
    /// Hidden units of the feed-forward layer.
    Ffn,
    /// Vocabulary entries.
    Vocab,
    /// A vector of step scalars or statistics.
    Scalar,
    /// Elements of any tensor, cut into ranges.
    Flat,
    /// Parts of a vocabulary.
    Parts,
    /// Experts of a layer.
    Experts,
    /// The experts that a token goes to.
    Choices,
    /// Rows of blocks that go to experts.
    Rows,
    /// Width of an adapter: the rank of what it adds to a weight.
    LowRank,
    /// Width of what queries, or keys and values, are compressed to (MLA).
    Latent,
}

impl Axis {
    /// The name used in printed graphs.
    pub const fn name(self) -> &'static str {
        match self {
            Axis::Batch => "batch",
            Axis::Seq => "seq",
            Axis::Embed => "embed",
            Axis::Heads => "heads",
            Axis::KvHeads => "kv_heads",
            Axis::HeadDim => "head_dim",
            Axis::Ffn => "ffn",
            Axis::Vocab => "vocab",
            Axis::Scalar => "scalar",
            Axis::Flat => "flat",
            Axis::Parts => "parts",
            Axis::Experts => "experts",
            Axis::Choices => "choices",
            Axis::Rows => "rows",
            Axis::LowRank => "low_rank",
            Axis::Latent => "latent",
        }
    }
}

/// A run of `count` entries along an axis, each `unit` elements wide: 8 heads of 64 elements, say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Section {
    /// What is counted, and what a mesh axis may split.
    pub axis: Axis,
    /// How many entries.
    pub count: usize,
    /// Elements of one entry; never split.
    pub unit: usize,
}

impl Section {
    /// Elements in this section.
    pub const fn size(self) -> usize {
        self.count * self.unit
    }
}

/// One dimension: usually one section, several where projections are packed side by side (Q, K and V; gate and up).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Dim {
    /// The sections, in storage order.
    pub sections: Vec<Section>,
}

impl Dim {
    /// A plain dimension.
    pub fn new(axis: Axis, size: usize) -> Self {
        Self::packed([Section { axis, count: size, unit: 1 }])
    }

    /// Entries of `unit` elements each: heads, say.
    pub fn grouped(axis: Axis, count: usize, unit: usize) -> Self {
        Self::packed([Section { axis, count, unit }])
    }

    /// Several sections side by side.
    pub fn packed(sections: impl Into<Vec<Section>>) -> Self {
        Self { sections: sections.into() }
    }

    /// Elements along this dimension.
    pub fn size(&self) -> usize {
        self.sections.iter().map(|s| s.size()).sum()
    }
}

impl std::fmt::Display for Dim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, s) in self.sections.iter().enumerate() {
            let plus = if i == 0 { "" } else { "+" };
            write!(f, "{plus}{}:{}", s.axis.name(), s.count)?;
            if s.unit != 1 {
                write!(f, "×{}", s.unit)?;
            }
        }
        Ok(())
    }
}

/// Element type and dimensions of a tensor, row-major.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct TensorType {
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first.
    pub dims: Vec<Dim>,
}

impl TensorType {
    /// A type from its parts.
    pub fn new(dtype: DType, dims: impl Into<Vec<Dim>>) -> Self {
        Self { dtype, dims: dims.into() }
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.dims.iter().map(Dim::size).product()
    }

    /// Bytes of the dense tensor.
    pub fn bytes(&self) -> u64 {
        self.elements() as u64 * self.dtype.bytes() as u64
    }

    /// Bytes before the rows that neighbours share, where they share some: those of the outermost dimension's first section, Q, where
    /// there are others. A single section is shared as a whole.
    pub fn unshared_bytes(&self) -> u64 {
        match self.dims.first().map(|d| (d.size(), &d.sections[..])) {
            Some((rows, [first, _, ..])) if rows > 0 => self.bytes() / rows as u64 * first.size() as u64,
            _ => 0,
        }
    }

    /// Sizes of the dimensions.
    pub fn sizes(&self) -> Vec<usize> {
        self.dims.iter().map(Dim::size).collect()
    }
}

impl std::fmt::Display for TensorType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (i, d) in self.dims.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}{d}")?;
        }
        f.write_str("]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_dimensions_print_their_sections() {
        let heads = |axis, count| Section { axis, count, unit: 64 };
        let qkv = Dim::packed([heads(Axis::Heads, 8), heads(Axis::KvHeads, 2), heads(Axis::KvHeads, 2)]);
        let ty = TensorType::new(DType::F32, [Dim::new(Axis::Batch, 4), qkv]);
        assert_eq!(ty.to_string(), "f32[batch:4, heads:8×64+kv_heads:2×64+kv_heads:2×64]");
        assert_eq!(ty.bytes(), 4 * 4 * 12 * 64);
    }
}
