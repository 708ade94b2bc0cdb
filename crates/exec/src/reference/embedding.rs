//! Rows of tables by token id.

use super::at::{At, Definition, Definitions};
use crate::by_kind;

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        Embedding => {
            let (d, table) = (at.size("features"), at.x[1]);
            let row = |t: &f64| &table[*t as usize * d..(*t as usize + 1) * d];
            vec![at.x[0].iter().flat_map(row).copied().collect()]
        },
        EmbeddingGrad { vocab } => {
            let d = at.size("features");
            let mut table = vec![0.0; vocab * d];
            for (row, token) in at.x[1].iter().enumerate() {
                for i in 0..d {
                    table[*token as usize * d + i] += at.x[0][row * d + i];
                }
            }
            vec![table]
        },
    }
}
