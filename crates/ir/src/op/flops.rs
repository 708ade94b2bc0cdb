//! What ops cost in matmuls.

use super::{Op, TypeError};
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

impl Flops {
    /// The same by every way of counting.
    pub(super) const fn all(n: u128) -> Self {
        Self { model: n, causal: n, hardware: n }
    }
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
        Ok((self.spec().flops)(self, &self.bind(inputs)?, wanted))
    }
}
