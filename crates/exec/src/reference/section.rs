//! Sections of packed dimensions.

use super::at::{At, Definition, Definitions};
use crate::by_kind;

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        Part { .. } => vec![at.x[0].to_vec()],
        Slice { first, .. } => {
            let sections = at.types[0].dims.last().map_or(&[][..], |d| &d.sections);
            let (from, n) = (sections[..first].iter().map(|s| s.size()).sum::<usize>(), at.size("sections"));
            vec![at.x[0].chunks(at.size("packed")).flat_map(|row| &row[from..from + n]).copied().collect()]
        },
        Concat => {
            let (x, rows) = (at.x, at.rows());
            let widths: Vec<usize> = x.iter().map(|part| part.len() / rows).collect();
            let row = |r: usize| x.iter().zip(&widths).flat_map(move |(part, n)| &part[r * n..(r + 1) * n]);
            vec![(0..rows).flat_map(row).copied().collect()]
        },
    }
}
