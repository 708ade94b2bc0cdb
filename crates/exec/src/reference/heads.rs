//! Heads in parts, over sequences that are there whole.

use super::at::{At, Definition, Definitions};
use crate::by_kind;
use lockstep_ir::Dim;
use lockstep_ir::op::Dims;

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        SplitHeads { ranks, .. } => vec![split(&at.dims, &at.types[0].dims[2], at.x[0], ranks)],
        JoinHeads { ranks } => vec![join(&at.dims, &at.types[0].dims[3], at.x[0], ranks)],
    }
}

/// Blocks `[a, c, b, w]` of x `[b, s, p]`.
fn split(dims: &Dims, packed: &Dim, x: &[f64], ranks: usize) -> Vec<f64> {
    let parts = dims.size("parts");
    let widths: Vec<usize> = packed.sections.iter().map(|s| s.size() / parts).collect();
    places(dims, &widths, ranks).into_iter().map(|at| x[at]).collect()
}

/// x `[b, s, p]` of blocks `[a, c, b, w]`.
fn join(dims: &Dims, packed: &Dim, blocks: &[f64], ranks: usize) -> Vec<f64> {
    let widths: Vec<usize> = packed.sections.iter().map(|s| s.size()).collect();
    let mut x = vec![0.0; blocks.len()];
    places(dims, &widths, ranks).into_iter().zip(blocks).for_each(|(at, value)| x[at] = *value);
    x
}

/// Of every element of the blocks, in their order, where it stands in x; a part has this many elements of each section.
fn places(dims: &Dims, widths: &[usize], ranks: usize) -> Vec<usize> {
    let [parts, rows, batch] = ["parts", "rows", "batch"].map(|name| dims.size(name));
    let features = parts * widths.iter().sum::<usize>();
    // Positions as ranks have them: an early chunk and a late one.
    let chunk = rows / (2 * ranks);
    let chunks = (0..ranks).flat_map(|rank| [rank, 2 * ranks - 1 - rank]);
    let positions: Vec<usize> = chunks.flat_map(|i| i * chunk..(i + 1) * chunk).collect();
    let mut places = Vec::new();
    for part in 0..parts {
        for position in &positions {
            for sequence in 0..batch {
                let mut section = (sequence * rows + position) * features;
                for width in widths {
                    places.extend((0..*width).map(|i| section + part * width + i));
                    section += parts * width;
                }
            }
        }
    }
    places
}
