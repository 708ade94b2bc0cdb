//! Where a position stands: tables of positions, and RoPE.

use super::attention::packed_heads;
use super::row::{ShapeRule, Spec, accumulator, f32, float, row, u32};
use super::sample::{Draw, Shapes, embed, normal, sample, with_parts};
use super::{Op, Saved::Input};
use crate::{Axis, Dim, TensorType};

/// A rank may have a part of each sequence; starts of documents are of all of it.
const POSITIONS: ShapeRule = |op, _, dims| {
    if let Op::PositionsGrad { rows, .. } = *op {
        dims.set("table", &Dim::new(Axis::Seq, rows));
    }
    if let Op::AddPositions { seq } | Op::PositionsGrad { seq, .. } = *op {
        let (whole, rows, part) = (dims.get("whole_seq").map_or(seq, Dim::size), dims.size("table"), dims.size("seq"));
        if whole != seq || rows < seq || !seq.is_multiple_of(part) {
            let reason = format!("{part} of {seq} positions with {whole} starts and {rows} rows of a table");
            return Err(op.refuse(reason));
        }
    }
    Ok(())
};

/// A table of more rows than sequences have positions.
fn table() -> (TensorType, Draw) {
    normal([Dim::new(Axis::Seq, 65), embed()])
}

/// Where sequences go on: some positions leave the table.
fn start(s: &Shapes) -> (TensorType, Draw) {
    (s.number(), Draw::Between(0, 20))
}

pub(super) static ADD_POSITIONS: Spec = row(
    "add_positions",
    &[float("x", "batch seq features"), float("table", "table features"), u32("starts", "batch whole_seq")],
    &[float("y", "batch seq features")],
    |batch| {
        let s = Shapes::new(batch);
        let op = Op::AddPositions { seq: s.seq };
        let inputs = [s.normal(embed()), table(), s.starts()];
        with_parts(vec![sample(op, &inputs[..2]), sample(op, inputs)], 2)
    },
)
.optional(1)
.in_place(&[(0, 0)])
.gradient(&[Input(2)])
.splits(&["batch", "seq"])
.numbers("seq")
.shape(POSITIONS);

pub(super) static ADD_POSITIONS_AT: Spec = row(
    "add_positions_at",
    &[float("x", "batch seq features"), float("table", "table features"), u32("start", "batch")],
    &[float("y", "batch seq features")],
    |batch| {
        let s = Shapes::new(batch);
        vec![sample(Op::AddPositionsAt, [s.normal(embed()), table(), start(&s)])]
    },
)
.in_place(&[(0, 0)]);

pub(super) static POSITIONS_GRAD: Spec = row(
    "positions_grad",
    &[float("dx", "batch seq features"), u32("starts", "batch whole_seq")],
    &[accumulator("dtable", "table features")],
    |batch| {
        let s = Shapes::new(batch);
        let op = Op::PositionsGrad { rows: 65, seq: s.seq };
        let inputs = [s.normal(embed()), s.starts()];
        with_parts(vec![sample(op, &inputs[..1]), sample(op, inputs)], 2)
    },
)
.optional(1)
.sums(0)
.splits(&["batch", "seq"])
.numbers("seq")
.shape(POSITIONS);

const ROTATED: ShapeRule = |op, _, dims| {
    let (q, columns) = (packed_heads(op, dims)?, dims.size("columns"));
    if columns == 0 || columns > q.unit || !columns.is_multiple_of(2) {
        return Err(op.refuse(format!("table has {columns} columns for heads of {}", q.unit)));
    }
    if dims.size("table") < dims.size("seq") {
        return Err(op.refuse(format!("table has {} rows for {}", dims.size("table"), dims.size("seq"))));
    }
    Ok(())
};

/// Shapes, and how many elements of a head are rotated: all; some, where V is narrower; some in packs.
fn turned(batch: usize) -> [(Shapes, usize); 3] {
    [(Shapes::new(batch), 20), (Shapes::unequal(batch, 60, 20, 12), 6), (Shapes::unequal(batch, 60, 48, 32), 16)]
}

fn angles(s: &Shapes, columns: usize) -> (TensorType, Draw) {
    normal([s.s(), Dim::new(Axis::HeadDim, columns)])
}

pub(super) static ROPE: Spec = row(
    "rope",
    &[float("qkv", "batch seq qkv"), f32("table", "table columns"), u32("starts", "batch seq")],
    &[float("rotated", "batch seq qkv")],
    |batch| {
        let of = |inverse, inputs: &[_]| sample(Op::Rope { inverse }, inputs);
        let both = |(s, columns)| {
            let inputs = [Shapes::normal(&s, s.qkv()), angles(&s, columns), s.starts()];
            [false, true].into_iter().flat_map(move |inverse| [of(inverse, &inputs[..2]), of(inverse, &inputs)])
        };
        with_parts(turned(batch).into_iter().flat_map(both).collect(), 2)
    },
)
.optional(1)
.in_place(&[(0, 0)])
.gradient(&[Input(1), Input(2)])
.splits(&["batch", "seq", "qkv heads kv_heads"])
.numbers("seq")
.shape(ROTATED);

pub(super) static ROPE_AT: Spec = row(
    "rope_at",
    &[float("qkv", "batch seq qkv"), f32("table", "table columns"), u32("start", "batch")],
    &[float("rotated", "batch seq qkv")],
    |batch| {
        let of = |(s, columns)| sample(Op::RopeAt, [Shapes::normal(&s, s.qkv()), angles(&s, columns), start(&s)]);
        turned(batch).map(of).into()
    },
)
.splits(&["qkv heads kv_heads"])
.in_place(&[(0, 0)])
.shape(ROTATED);
