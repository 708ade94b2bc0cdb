//! Matmuls of weights in bytes.

use super::at::{At, Definition, Definitions, matmul};
use crate::by_kind;

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        ByteLinear => {
            vec![matmul((at.rows(), at.size("outputs"), at.size("inputs")), at.x[0], false, &weights(at), true)]
        },
        ByteLinearGradInput => {
            vec![matmul((at.rows(), at.size("inputs"), at.size("outputs")), at.x[0], false, &weights(at), false)]
        },
    }
}

/// The weights, each row in its unit.
fn weights(at: &At) -> Vec<f64> {
    let rows = at.x[1].chunks(at.size("inputs"));
    rows.zip(at.x[2]).flat_map(|(row, unit)| row.iter().map(move |w| w * unit)).collect()
}
