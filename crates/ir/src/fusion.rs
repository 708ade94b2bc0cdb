//! What a device does as one: kinds of groups of instructions, and the matmuls for which that was measured to be faster.

use crate::op::Norm;
use crate::{Op, TensorType};
use std::ops::Range;

/// Rows of a call that are few: kernels read weights once for all of them, as decoding needs it.
pub const FEW_ROWS: usize = 32;

/// Instructions that follow each other and that a device can do as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fusion {
    /// A matmul and its bias.
    MatmulBias,
    /// A matmul, its bias and the GELU after it. What the GELU reads is stored too.
    MatmulBiasGelu,
    /// The input gradient of a matmul, and the gradient of the GELU before it.
    MatmulGeluGradient,
    /// The gradients of a norm (weight, bias where it has one, input) and of the bias before it.
    NormGradients,
    /// The gradients of a GELU and of the bias before it.
    GeluBiasGradients,
    /// A SwiGLU, or its gradient, and the largest magnitude of what it makes.
    SwiGluAmax,
    /// A matmul of few rows and the SwiGLU after it. What the SwiGLU reads is not stored.
    MatmulSwiGlu,
    /// An RMS norm of very few rows and the matmul after it. What the matmul reads is not stored; the sum that was normed is.
    NormMatmul,
    /// Both: a norm, a matmul and a SwiGLU.
    NormMatmulSwiGlu,
    /// RoPE of one new position of each text, and attention over the cache. What is turned is stored in the cache alone.
    RopeAttention,
    /// Updates of many tensors by AdamW.
    AdamW,
}

impl Fusion {
    /// All kinds.
    pub const ALL: [Fusion; 11] = [
        Fusion::MatmulBias,
        Fusion::MatmulBiasGelu,
        Fusion::MatmulGeluGradient,
        Fusion::NormGradients,
        Fusion::GeluBiasGradients,
        Fusion::SwiGluAmax,
        Fusion::MatmulSwiGlu,
        Fusion::NormMatmul,
        Fusion::NormMatmulSwiGlu,
        Fusion::RopeAttention,
        Fusion::AdamW,
    ];

    /// Most rows of a call whose matmul makes the norm before it: every block of the matmul makes all of it.
    pub const NORM_ROWS: usize = 2;

    /// Whether a group of this kind may have these ops, in this order.
    pub fn fits(self, ops: &[Op]) -> bool {
        match self {
            Fusion::MatmulBias => matches!(ops, [Op::Linear | Op::ByteLinear, Op::AddBias]),
            Fusion::MatmulBiasGelu => matches!(ops, [Op::Linear, Op::AddBias, Op::Gelu]),
            Fusion::MatmulGeluGradient => matches!(ops, [Op::LinearGradInput, Op::GeluGrad]),
            Fusion::NormGradients => match ops {
                [weight, input]
                | [weight, Op::BiasGrad, input]
                | [weight, input, Op::BiasGrad]
                | [weight, Op::BiasGrad, input, Op::BiasGrad] => matches!(
                    (weight, input),
                    (Op::NormGradWeight { norm }, Op::NormGrad { norm: of, .. }) if *norm == of.of_weight()
                ),
                _ => false,
            },
            Fusion::GeluBiasGradients => matches!(ops, [Op::GeluGrad, Op::BiasGrad]),
            Fusion::SwiGluAmax => matches!(ops, [Op::SwiGlu | Op::SwiGluGrad, Op::Amax { of, .. }] if !of.is_weight()),
            Fusion::MatmulSwiGlu => matches!(ops, [Op::Linear | Op::ByteLinear, Op::SwiGlu]),
            Fusion::NormMatmul => matches!(ops, [norm, Op::Linear | Op::ByteLinear] if is_rms(norm)),
            Fusion::NormMatmulSwiGlu => {
                matches!(ops, [norm, Op::Linear | Op::ByteLinear, Op::SwiGlu] if is_rms(norm))
            }
            Fusion::RopeAttention => matches!(ops, [Op::RopeAt, Op::CachedAttention { apart: true, .. }]),
            Fusion::AdamW => ops.len() > 1 && ops.iter().all(|op| matches!(op, Op::AdamW { .. })),
        }
    }

    /// The name in printed programs.
    pub const fn name(self) -> &'static str {
        match self {
            Fusion::MatmulBias => "matmul + bias",
            Fusion::MatmulBiasGelu => "matmul + bias + GELU",
            Fusion::MatmulGeluGradient => "matmul + GELU gradient",
            Fusion::NormGradients => "norm gradients",
            Fusion::GeluBiasGradients => "GELU + bias gradients",
            Fusion::SwiGluAmax => "SwiGLU + amax",
            Fusion::MatmulSwiGlu => "matmul + SwiGLU",
            Fusion::NormMatmul => "norm + matmul",
            Fusion::NormMatmulSwiGlu => "norm + matmul + SwiGLU",
            Fusion::RopeAttention => "RoPE + attention over the cache",
            Fusion::AdamW => "AdamW of many tensors",
        }
    }
}

fn is_rms(op: &Op) -> bool {
    matches!(op, Op::Norm { norm: Norm::Rms | Norm::RmsPlusOne, .. })
}

/// Instructions of a segment that are done as one. They stand side by side, and their operands and scratch are all in use until
/// the last of them is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FusedGroup {
    /// What they are together.
    pub fusion: Fusion,
    /// Which they are, by index in the segment.
    pub instrs: Range<usize>,
}

/// A matmul that may fuse what follows it into its epilogue, if that takes less time than a kernel after it.
#[derive(Clone, Debug, PartialEq)]
pub struct FusedMatmul {
    /// What it fuses.
    pub fusion: Fusion,
    /// The matmul.
    pub op: Op,
    /// Its operands, on one rank.
    pub inputs: Vec<TensorType>,
}
