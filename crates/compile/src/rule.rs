//! Update rules of optimizers, with their constants.

use lockstep_ir::{Axis, Op, TensorType};

/// An update rule with its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Adam with decoupled decay.
    AdamW(AdamW),
    /// The sign of a mixture of moment and gradient.
    Lion {
        /// Share of the moment in the update.
        beta1: f32,
        /// Decay of the moment.
        beta2: f32,
    },
    /// Gradient descent with momentum.
    Sgd {
        /// Decay of the momentum.
        momentum: f32,
    },
    /// Orthogonalised momentum for matrices of layers, section by section.
    Muon {
        /// Decay of the momentum.
        momentum: f32,
        /// For all other parameters.
        rest: AdamW,
    },
}

/// AdamW's constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
}

impl Rule {
    /// The rule of an optimizer's name. A rule reads some of the constants.
    pub fn named(name: &str, adamw: AdamW, momentum: f32) -> Option<Self> {
        let AdamW { beta1, beta2, .. } = adamw;
        Some(match name {
            "adamw" => Rule::AdamW(adamw),
            "lion" => Rule::Lion { beta1, beta2 },
            "sgd" => Rule::Sgd { momentum },
            "muon" => Rule::Muon { momentum, rest: adamw },
            _ => return None,
        })
    }

    /// The rule for a parameter of this type. One that no decay is for is no matrix: biases of experts are vectors, one after the other.
    pub(crate) fn of(self, ty: &TensorType, decays: bool) -> Self {
        match self {
            Rule::Muon { rest, .. } if !decays || !is_matrix(ty) => Rule::AdamW(rest),
            rule => rule,
        }
    }

    /// The moments of a parameter, in the order in which the update reads and gives them.
    pub(crate) fn moments(self) -> &'static [&'static str] {
        match self {
            Rule::AdamW(_) => &["m", "v"],
            Rule::Lion { .. } => &["m"],
            Rule::Sgd { .. } | Rule::Muon { .. } => &["momentum"],
        }
    }

    /// What updates a parameter: by its gradient and moments, or in Muon's rule by the direction that follows from them.
    pub(crate) fn op(self, decay: f32, lr_scale: f32) -> Op {
        match self {
            Rule::AdamW(AdamW { beta1, beta2, eps }) => Op::AdamW { beta1, beta2, eps, decay, lr_scale },
            Rule::Lion { beta1, beta2 } => Op::Lion { beta1, beta2, decay, lr_scale },
            Rule::Sgd { momentum } => Op::Sgd { momentum, decay, lr_scale },
            Rule::Muon { .. } => Op::Descend { decay, lr_scale },
        }
    }

    /// The most moments that it has of a parameter.
    pub fn most_moments(self) -> usize {
        match self {
            Rule::Muon { rest, .. } => Rule::AdamW(rest).moments().len(),
            rule => rule.moments().len(),
        }
    }
}

/// Whether Muon's rule is for a parameter of this type: a matrix between features, and no table that is looked up in.
fn is_matrix(ty: &TensorType) -> bool {
    let features = |axis: Axis| !matches!(axis, Axis::Vocab | Axis::Seq);
    ty.dims.len() == 2 && ty.dims.iter().flat_map(|d| &d.sections).all(|s| features(s.axis))
}
