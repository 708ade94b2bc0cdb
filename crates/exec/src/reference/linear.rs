//! Matmuls of activations and weights, and biases.

use super::at::{At, Definition, Definitions, column_sums, matmul};
use crate::by_kind;

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        Linear => vec![matmul((at.rows(), at.size("outputs"), at.size("inputs")), at.x[0], false, at.x[1], true)],
        LinearGradInput => {
            vec![matmul((at.rows(), at.size("inputs"), at.size("outputs")), at.x[0], false, at.x[1], false)]
        },
        LinearGradWeight => {
            vec![matmul((at.size("outputs"), at.size("inputs"), at.rows()), at.x[0], true, at.x[1], false)]
        },
        AddBias => vec![at.x[0].iter().enumerate().map(|(i, x)| x + at.x[1][i % at.x[1].len()]).collect()],
        BiasGrad => vec![column_sums(at.x[0], at.size("features"), |i| at.x[0][i])],
    }
}
