//! Where a position stands: tables of positions, and RoPE.

use super::at::{At, Definition, Definitions, add};
use crate::by_kind;
use lockstep_ir::op::Dims;

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        AddPositions { .. } => {
            vec![add(at.x[0], &rows_of(&at.dims, at.x[1], &positions(&at.dims, at.given(2))))]
        },
        AddPositionsAt => vec![add(at.x[0], &rows_of(&at.dims, at.x[1], &rows_from(&at.dims, at.x[2])))],
        PositionsGrad { .. } => {
            let (d, positions) = (at.size("features"), positions(&at.dims, at.given(1)));
            let mut table = vec![0.0; at.size("table") * d];
            at.x[0].iter().enumerate().for_each(|(i, dx)| table[positions[i / d] * d + i % d] += dx);
            vec![table]
        },
        Rope { inverse } => {
            let positions = positions(&at.dims, at.given(2));
            vec![rope(&at.dims, at.x[0], at.x[1], &positions, if inverse { -1.0 } else { 1.0 })]
        },
        RopeAt => vec![rope(&at.dims, at.x[0], at.x[1], &rows_from(&at.dims, at.x[2]), 1.0)],
    }
}

/// The position of every row in its sequence, or in its document.
pub fn positions(dims: &Dims, given: Option<&[f64]>) -> Vec<usize> {
    starts(dims, given).iter().enumerate().map(|(row, start)| row % dims.size("seq") - start).collect()
}

/// Rows of a table, one after the other.
fn rows_of(dims: &Dims, table: &[f64], rows: &[usize]) -> Vec<f64> {
    let d = dims.size("features");
    rows.iter().flat_map(|row| &table[row * d..(row + 1) * d]).copied().collect()
}

/// Rope's angles for every sequence and position: the row of the table, clamped to its last.
fn rows_from(dims: &Dims, start: &[f64]) -> Vec<usize> {
    let row = |b: usize, s: usize| (start[b] as usize + s).min(dims.size("table") - 1);
    (0..dims.size("batch")).flat_map(|b| (0..dims.size("seq")).map(move |s| row(b, s))).collect()
}

/// Where the document of every row starts: given, or 0; a start after its row counts as the row.
pub fn starts(dims: &Dims, given: Option<&[f64]>) -> Vec<usize> {
    let seq = dims.size("seq");
    (0..dims.size("batch") * seq).map(|row| given.map_or(0, |starts| (starts[row] as usize).min(row % seq))).collect()
}

fn rope(dims: &Dims, qkv: &[f64], table: &[f64], positions: &[usize], sign: f64) -> Vec<f64> {
    let (e, width) = (dims.size("head_dim"), dims.size("qkv"));
    let rotated = (dims.size("heads") + dims.size("kv_heads")) * e;
    let turned = dims.size("columns");
    let half = turned / 2;
    let element = |at: usize| {
        let (row, column) = (at / width, at % width);
        if column >= rotated || column % e >= turned {
            return qkv[at];
        }
        let i = column % e % half;
        let angles = &table[positions[row] * turned..][..turned];
        let (cos, sin) = (angles[i], angles[half + i] * sign);
        if column % e < half { qkv[at] * cos - qkv[at + half] * sin } else { qkv[at] * cos + qkv[at - half] * sin }
    };
    (0..qkv.len()).map(element).collect()
}
