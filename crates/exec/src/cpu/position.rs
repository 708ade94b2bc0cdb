//! Ops that find their rows by numbers on the device: where each sequence goes on, and how many of its positions count.

use super::call::{Call, Kernel, Kernels, Ptr};
use super::embedding::add_rows;
use super::float::Float;
use super::pointwise::{add_table, rotate};
use crate::by_kind;
use lockstep_ir::op::NO_ROW;

/// The kernels of this family.
pub fn kernels<T: Float>() -> Kernels {
    by_kind! { call: Call => Kernel;
        AddPositions { seq } => add::<T>(call, seq),
        AddPositionsAt => add_at::<T>(call),
        PositionsGrad { seq, .. } => grad::<T>(call, seq),
        Rope { inverse } => rope::<T>(call, inverse),
        RopeAt => rope_at::<T>(call),
    }
}

/// Rope of qkv `[b, s, (q + 2u)·e]` from position `start[b]` on.
pub fn rope_at<T: Float>(call: Call) {
    rotate::<T>(call, 1.0, rows_from_start(&call));
}

/// The row of a table for every row of `[b, s]`: from `start[b]` on, input 2, and the last where there are no more.
fn rows_from_start(call: &Call) -> impl Fn(usize) -> usize + Sync + use<> {
    let (seq, table_rows) = (call.size("seq"), call.size("table"));
    let start = Ptr(call.input::<u32>(2));
    move |row| {
        // SAFETY: there is an element per sequence.
        let start = unsafe { *start.at(row / seq) } as usize;
        start.saturating_add(row % seq).min(table_rows - 1)
    }
}

/// y `[b, s, d]` = x + table `[t, d]`, from row `start[b]` on.
pub fn add_at<T: Float>(call: Call) {
    add_table::<T>(call, rows_from_start(&call));
}

/// y `[b, s, d]` = x + table `[t, d]` by positions in sequences of `seq`, or in documents.
pub fn add<T: Float>(call: Call, seq: usize) {
    let position = positions(&call, seq, call.given(2));
    add_table::<T>(call, position);
}

/// dtable `[t, d]` += dx `[b, s, d]` by the same positions.
pub fn grad<T: Float>(call: Call, seq: usize) {
    let position = positions(&call, seq, call.given(1));
    add_rows::<T>(call, call.size("table"), |row| Some(position(row)));
}

/// The position of every row of `[b, s]` in sequences of `seq`, of which this rank may have a part; with `starts[b, seq]` in its
/// document.
fn positions(call: &Call, seq: usize, starts: Option<*const u32>) -> impl Fn(usize) -> usize + Sync + use<> {
    let (here, places) = (call.size("seq"), call.positions());
    let starts = starts.map(Ptr);
    move |row| {
        let position = places.entry(row % here);
        // SAFETY: there is an element per position of the whole sequences.
        let start = starts.map_or(0, |starts| unsafe { *starts.at(row / here * seq + position) } as usize);
        position.saturating_sub(start)
    }
}

/// Rope of qkv `[b, s, (q + 2u)·e]` by positions in sequences, of which this rank may have a part, or, with `starts[b, s]`, in
/// documents.
pub fn rope<T: Float>(call: Call, inverse: bool) {
    let (sign, position) = (if inverse { -1.0 } else { 1.0 }, row_positions(&call));
    rotate::<T>(call, sign, position);
}

/// The position of every row of `[b, s]` in sequences, of which this rank may have a part, or, with `starts[b, s]`, in documents.
pub fn row_positions(call: &Call) -> impl Fn(usize) -> usize + Sync + use<> {
    let (here, places) = (call.size("seq"), call.positions());
    let starts = call.given::<u32>(2).map(Ptr);
    move |row| {
        // SAFETY: there is an element per row.
        let start = starts.map_or(0, |starts| unsafe { *starts.at(row) } as usize);
        places.entry(row % here).saturating_sub(start)
    }
}

/// The first of the largest of the first `known` logits of each row; [`NO_ROW`] where one is not a number or none is finite.
pub fn argmax<T: Float>(call: Call, known: usize) {
    let vocab = call.size("vocab");
    let logits = Ptr(call.input::<T>(0));
    let Some(token) = call.output::<u32>(0).map(Ptr) else { return };
    call.rows(call.size("batch") * call.size("seq"), |from, to| {
        for row in from..to {
            let mut best = (f32::NEG_INFINITY, NO_ROW);
            // SAFETY: the row belongs to this task.
            unsafe {
                for (i, x) in logits.slice(row * vocab, known).iter().enumerate() {
                    let x = x.to();
                    if x.is_nan() || x == f32::INFINITY {
                        best = (f32::INFINITY, NO_ROW);
                        break;
                    }
                    if x > best.0 {
                        best = (x, i as u32);
                    }
                }
                *token.at(row) = best.1;
            }
        }
    });
}

/// y `[b, 1, d]` = x `[b, s, d]` at position `count[b] − 1`.
pub fn last_position<T: Float>(call: Call) {
    let (seq, d) = (call.size("seq"), call.size("features"));
    let (x, count) = (Ptr(call.input::<T>(0)), Ptr(call.input::<u32>(1)));
    let Some(y) = call.output::<T>(0).map(Ptr) else { return };
    call.ranges(call.size("batch"), 1, |b, _| {
        // SAFETY: sequence b belongs to this task; the count is checked against the sequence.
        unsafe {
            let count = *count.at(b) as usize;
            assert!((1..=seq).contains(&count), "{count} of {seq} positions");
            y.slice(b * d, d).copy_from_slice(x.slice((b * seq + count - 1) * d, d));
        }
    });
}
