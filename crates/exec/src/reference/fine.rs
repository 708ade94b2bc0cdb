//! fp8 with many units in a tensor, in f64.

use super::at::{At, Definition, Definitions, matmul};
use super::quantise::{nearest, seen};
use crate::by_kind;
use lockstep_ir::op::{BLOCK, Fine};
use lockstep_ir::{DType, F8};

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        QuantiseFine { by, weight, to } => quantise(at, (by, weight), to),
        FineLinear { by, .. } => {
            let (rows, n, k) = (at.rows(), at.size("outputs"), at.size("inputs"));
            vec![matmul((rows, n, k), &scaled(at, 0, k, by), false, &scaled(at, 2, k, by), true)]
        },
        FineGradWeight { by } => {
            let (n, k, rows) = (at.size("outputs"), at.size("inputs"), at.rows());
            vec![matmul((n, k, rows), &scaled(at, 0, rows, by), false, &scaled(at, 2, rows, by), true)]
        },
    }
}

/// Input `i`, whose rows have `k` elements, in the units of the input after it.
fn scaled(at: &At, i: usize, k: usize, by: Fine) -> Vec<f64> {
    let (x, units) = (at.x[i], at.x[i + 1]);
    let rows = x.len() / k;
    let unit = |at: usize| match by {
        Fine::Rows => units[at / k],
        Fine::Blocks => units[at % k / BLOCK * rows + at / k],
    };
    x.iter().enumerate().map(|(at, x)| x * unit(at)).collect()
}

fn quantise(at: &At, (by, weight): (Fine, bool), to: DType) -> Vec<Vec<f64>> {
    let Some(format) = F8::of(to) else { unreachable!("the op table refuses {to}") };
    let x = at.x[0];
    let columns = at.types[0].dims.last().map_or(1, |d| d.size());
    let rows = x.len() / columns;
    // Of a part of the tensor.
    let unit = |rows: std::ops::Range<usize>, columns_of: std::ops::Range<usize>| {
        let all = rows.flat_map(|row| columns_of.clone().map(move |column| row * columns + column));
        f64::from(format.unit(all.fold(0.0, |most: f64, at| most.max(x[at].abs())) as f32))
    };
    let block = |i: usize| i / BLOCK * BLOCK..(i / BLOCK + 1) * BLOCK;
    let of_row = |row: usize, column: usize| match (by, weight) {
        (Fine::Rows, _) => unit(row..row + 1, 0..columns),
        (Fine::Blocks, false) => unit(row..row + 1, block(column)),
        (Fine::Blocks, true) => unit(block(row), block(column)),
    };
    let of_column = |row: usize, column: usize| match (by, weight) {
        (Fine::Rows, _) => unit(0..rows, column..column + 1),
        (Fine::Blocks, false) => unit(block(row), column..column + 1),
        (Fine::Blocks, true) => unit(block(row), block(column)),
    };
    let blocks = |n: usize| if by == Fine::Rows { 1 } else { n / BLOCK };
    let units: Vec<f64> = (0..blocks(columns))
        .flat_map(|block| (0..rows).map(move |row| (row, block * BLOCK)))
        .map(|(r, c)| of_row(r, c))
        .collect();
    let units_transposed: Vec<f64> = (0..blocks(rows))
        .flat_map(|block| (0..columns).map(move |column| (block * BLOCK, column)))
        .map(|(r, c)| of_column(r, c))
        .collect();
    let unit_at = |row: usize, column: usize| units[if by == Fine::Rows { row } else { column / BLOCK * rows + row }];
    let transposed_at = |row: usize, column: usize| {
        units_transposed[if by == Fine::Rows { column } else { row / BLOCK * columns + column }]
    };
    let seen = seen(x, columns, to, false, |i| unit_at(i / columns, i % columns));
    let q = (0..x.len()).map(|i| nearest(to, x[i] / unit_at(i / columns, i % columns))).collect();
    let transposed = (0..x.len())
        .map(|i| (i % rows, i / rows))
        .map(|(row, column)| nearest(to, x[row * columns + column] / transposed_at(row, column)))
        .collect();
    vec![q, units, transposed, units_transposed, seen]
}
