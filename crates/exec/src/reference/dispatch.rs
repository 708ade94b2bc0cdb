//! Rows of tokens in blocks, and matmuls of blocks.

use super::at::{At, Definition, Definitions};
use super::experts::{grad_input, grad_weight, linear};
use crate::by_kind;
use lockstep_ir::op::{Blocks, Dims, NO_ROW};

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        ExpertSlots { experts, blocks } => slots(&at.dims, experts, blocks, at.x[0]).into(),
        SendRows { each, .. } => vec![send_rows(&at.dims, at.sharers(each), at.x)],
        TakeRows { .. } => vec![take_rows(&at.dims, at.x)],
        RowsLinear { .. } => vec![linear(&at.dims, 1, &[at.x[0], at.x[1], &of_rows(&at.dims, at.x[2])])],
        RowsGradInput { .. } => vec![grad_input(&at.dims, &[at.x[0], at.x[1], &of_rows(&at.dims, at.x[2])])],
        RowsGradWeight { .. } => vec![grad_weight(&at.dims, 1, &[at.x[0], at.x[1], &of_rows(&at.dims, at.x[2])])],
    }
}

/// Places of choices, the experts of places, and how many choices of every sequence have no place.
fn slots(dims: &Dims, experts: usize, blocks: Blocks, chosen: &[f64]) -> [Vec<f64>; 3] {
    let (all, each) = (dims.size("rows"), experts / blocks.parts);
    let mut owners = vec![f64::from(NO_ROW); blocks.parts * all];
    let mut filled = vec![0; blocks.parts * blocks.ranks];
    let place = |(i, expert): (usize, &f64)| {
        let (rank, part) = (i * blocks.ranks / chosen.len(), *expert as usize / each);
        let filled = &mut filled[part * blocks.ranks + rank];
        *filled += 1;
        if *filled > blocks.rows {
            return f64::from(NO_ROW);
        }
        let at = part * all + rank * blocks.rows + *filled - 1;
        owners[at] = (*expert as usize % each) as f64;
        at as f64
    };
    let slots: Vec<f64> = chosen.iter().enumerate().map(place).collect();
    let missing = |slots: &[f64]| slots.iter().filter(|slot| **slot == f64::from(NO_ROW)).count() as f64;
    let beyond = slots.chunks(dims.size("seq") * dims.size("choices")).map(missing).collect();
    [slots, owners, beyond]
}

/// Rows at the places of choices, of which `sharers` have one.
fn send_rows(dims: &Dims, sharers: usize, x: &[&[f64]]) -> Vec<f64> {
    let d = dims.size("features");
    let mut rows = vec![0.0; dims.size("parts") * dims.size("rows") * d];
    for (i, slot) in x[1].iter().enumerate().filter(|(_, slot)| **slot != f64::from(NO_ROW)) {
        rows[*slot as usize * d..][..d].copy_from_slice(&x[0][i / sharers * d..][..d]);
    }
    rows
}

fn take_rows(dims: &Dims, x: &[&[f64]]) -> Vec<f64> {
    let d = dims.size("features");
    let of = |slot: &f64| match *slot == f64::from(NO_ROW) {
        true => vec![f64::NAN; d],
        false => x[0][*slot as usize * d..][..d].to_vec(),
    };
    x[1].iter().flat_map(of).collect()
}

/// The expert of every row of blocks, counted over all parts; NaN where there is none.
pub fn of_rows(dims: &Dims, owners: &[f64]) -> Vec<f64> {
    let each = (dims.size("experts") / dims.size("parts")) as f64;
    let of = |(row, owner): (usize, &f64)| match *owner < each {
        true => (row / dims.size("rows")) as f64 * each + owner,
        false => f64::NAN,
    };
    owners.iter().enumerate().map(of).collect()
}
