//! The optimizers that `optimizer.name` names, and what of a config follows from each.
//!
//! An optimizer is a line here, a rule of the same name in `compile/src/rule.rs`, and its op. Defaults,
//! keys that it does not read, texts, moments and the size of checkpoints follow from these.

use crate::value::{Field, Value};
use crate::words::words;

/// The meaning of `optimizer.name`.
macro_rules! meaning {
    () => {
        " The optimizer. adamw: Adam with decoupled weight decay. lion: the sign of a moment. sgd: with momentum. muon: orthogonalised \
         momentum for the matrices of layers, adamw for embeddings, output head, norms and biases; the learning rate is adamw's."
    };
}
pub(crate) use meaning;

/// The constants that an optimizer reads, with their defaults, and what it needs of a layout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Facts {
    pub beta1: Option<f64>,
    pub beta2: Option<f64>,
    pub eps: Option<f64>,
    pub momentum: Option<f64>,
    /// Ranks gather whole matrices, those of heads that they share too.
    pub gathers_matrices: bool,
}

impl Facts {
    const NONE: Self = Self { beta1: None, beta2: None, eps: None, momentum: None, gathers_matrices: false };
    const ADAMW: Self = Self { beta1: Some(0.9), beta2: Some(0.95), eps: Some(1e-8), ..Self::NONE };
}

/// A constant of optimizers, by key.
pub(crate) type Constant = fn(&Facts) -> Option<f64>;

/// All constants.
pub(crate) const CONSTANTS: [(&str, Constant); 4] = [
    ("optimizer.beta1", |facts| facts.beta1),
    ("optimizer.beta2", |facts| facts.beta2),
    ("optimizer.eps", |facts| facts.eps),
    ("optimizer.momentum", |facts| facts.momentum),
];

/// Who has a constant by which default: `0.9 for sgd, 0.95 for muon`.
pub(crate) fn defaults(constant: Constant) -> String {
    let mut groups: Vec<(f64, Vec<&str>)> = Vec::new();
    for name in OptimizerName::ALL {
        let Some(usual) = constant(&name.facts()) else { continue };
        match groups.iter_mut().find(|(value, _)| *value == usual) {
            Some((_, names)) => names.push(name.word()),
            None => groups.push((usual, vec![name.word()])),
        }
    }
    let group = |(usual, names): &(f64, Vec<&str>)| match &names[..] {
        [first @ .., last] if !first.is_empty() => format!("{usual:?} for {} and {last}", first.join(", ")),
        names => format!("{usual:?} for {}", names.concat()),
    };
    groups.iter().map(group).collect::<Vec<_>>().join(", ")
}

/// Every optimizer, a line each: its name, its word in `run.toml` and its facts.
macro_rules! optimizers {
    ($($(#[$doc:meta])+ $Variant:ident = $word:literal, $facts:expr;)+) => {
        words! {
            /// The optimizer.
            OptimizerName {
                $($(#[$doc])+ $Variant = $word,)+
            }
        }

        impl OptimizerName {
            pub(crate) const fn facts(self) -> Facts {
                match self {
                    $(Self::$Variant => $facts,)+
                }
            }
        }
    };
}

optimizers! {
    /// Adam with decoupled weight decay.
    AdamW = "adamw", Facts::ADAMW;
    /// The sign of a moment.
    Lion = "lion", Facts { beta1: Some(0.9), beta2: Some(0.99), ..Facts::NONE };
    /// Momentum.
    Sgd = "sgd", Facts { momentum: Some(0.9), ..Facts::NONE };
    /// Orthogonalised momentum for matrices, AdamW for the rest.
    Muon = "muon", Facts { momentum: Some(0.95), gathers_matrices: true, ..Facts::ADAMW };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_default_says_whose_it_is() {
        let said: Vec<String> = CONSTANTS.iter().map(|(_, constant)| defaults(*constant)).collect();
        assert_eq!(
            said,
            [
                "0.9 for adamw, lion and muon",
                "0.95 for adamw and muon, 0.99 for lion",
                "1e-8 for adamw and muon",
                "0.9 for sgd, 0.95 for muon"
            ]
        );
    }
}
