//! What ops cost in matmuls.

use super::{Op, TypeError, newton_schulz};
use crate::TensorType;

/// Floating-point operations of one call, multiply and add counted as two; matmuls only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flops {
    /// What the model needs: every query over all keys, or over as many as its sliding window has.
    pub model: u128,
    /// The same with what the mask hides left out: half of causal attention, and what is before a sliding window. The diagonal counts
    /// half: `s²/2` pairs of positions, `s·w − w²/2` in a window of `w`.
    pub causal: u128,
    /// What this op really asks of the hardware, recomputed scores included; keys as for the model, or all
    /// where the weights of attention exist.
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

impl Op {
    /// Matmul FLOPs of one call with these input types; `wanted` says which outputs are asked for.
    pub fn flops(&self, inputs: &[&TensorType], wanted: &[bool]) -> Result<Flops, TypeError> {
        let dims = self.bind(inputs)?;
        let same = |n| Flops { model: n, causal: n, hardware: n };
        // A query of a window counts as many keys as the window has.
        let attention = |window: Option<usize>, model: u128, hardware: u128| {
            let s = dims.size('s');
            let w = window.unwrap_or(s).min(s);
            let (whole, seen) = (dims.product("bsh") * w as u128, dims.product("bh") * ((2 * s - w) * w) as u128);
            Flops { model: model * whole, causal: model * seen / 2, hardware: hardware * whole }
        };
        // Weights that exist are computed for all keys.
        let naive = |window: Option<usize>, each: u128| Flops {
            hardware: each * dims.product("bssh"),
            ..attention(window, each, each)
        };
        Ok(match self {
            Op::Linear | Op::LinearGradInput | Op::LinearGradWeight => same(2 * dims.product("bsnk")),
            // One matmul for the logits, one for each gradient that is used.
            Op::LinearCrossEntropy { .. } => {
                let matmuls = 1 + wanted.iter().skip(1).filter(|w| **w).count() as u128;
                same(2 * matmuls * dims.product("bskv"))
            }
            Op::VocabLogits { .. } => same(2 * dims.product("ckv")),
            Op::VocabGrad { .. } => same(2 * wanted.iter().filter(|w| **w).count() as u128 * dims.product("ckv")),
            // Where documents end is known on the device only: what they mask is counted.
            Op::Attention { window, .. } => attention(*window, 4, 4),
            Op::AttentionGrad { window, .. } => attention(*window, 8, 10),
            Op::AttentionScores { window, .. } | Op::AttentionMix { window } => naive(*window, 2),
            Op::AttentionScoresGrad { window } | Op::AttentionMixGrad { window } => naive(*window, 4),
            // Not the model's.
            Op::Orthogonalise => {
                let sections = inputs[0].dims[0].sections.iter();
                let hardware = sections.map(|s| newton_schulz::flops(s.size(), dims.size('k'))).sum();
                Flops { hardware, ..Flops::default() }
            }
            // How full the cache is is known on the device only: every new position counts over all of it.
            Op::CachedAttention { window } => {
                let t = dims.size('t');
                same(4 * dims.product("bsh") * window.unwrap_or(t).min(t) as u128)
            }
            Op::Embedding
            | Op::EmbeddingGrad { .. }
            | Op::AddBias
            | Op::BiasGrad
            | Op::RmsNorm { .. }
            | Op::AddRmsNorm { .. }
            | Op::RmsNormGrad
            | Op::AddRmsNormGrad
            | Op::RmsNormGradWeight
            | Op::QkNorm { .. }
            | Op::QkNormGrad
            | Op::QkNormGradWeight
            | Op::LayerNorm { .. }
            | Op::AddLayerNorm { .. }
            | Op::LayerNormGrad
            | Op::AddLayerNormGrad
            | Op::LayerNormGradWeight
            | Op::AddPositions { .. }
            | Op::AddPositionsAt
            | Op::PositionsGrad { .. }
            | Op::Rope { .. }
            | Op::RopeAt
            | Op::LastPosition
            | Op::SwiGlu
            | Op::SwiGluGrad
            | Op::Gelu
            | Op::GeluGrad
            | Op::Dropout { .. }
            | Op::Add
            | Op::CrossEntropy
            | Op::CrossEntropyGrad { .. }
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
}
