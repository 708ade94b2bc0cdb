//! Rows of tables by token id, and sums into them.

use super::call::{Accumulator, Call, Kernel, Kernels, Ptr};
use super::float::{Bf16, Float};
use crate::by_kind;
use lockstep_ir::fixed;

/// The kernels of this family.
pub fn kernels<T: Float>() -> Kernels {
    by_kind! { call: Call => Kernel;
        Embedding => embedding::<T>(call),
        EmbeddingGrad { .. } => embedding_grad::<T>(call),
    }
}

/// x `[rows, d]` = table `[v, d]` at tokens `[rows]`; zeros for tokens of another rank's part.
pub fn embedding<T: Float>(call: Call) {
    let (rows, d, part) = (call.size("batch") * call.size("seq"), call.size("features"), call.vocab_part());
    let (tokens, table) = (Ptr(call.input::<u32>(0)), Ptr(call.input::<T>(1)));
    let Some(x) = call.output::<T>(0).map(Ptr) else { return };
    call.rows(rows, |from, to| {
        for row in from..to {
            // SAFETY: rows from .. to belong to this task; the token is checked against the table.
            unsafe {
                match part.find(*tokens.at(row)) {
                    Some(token) => x.slice(row * d, d).copy_from_slice(table.slice(token * d, d)),
                    None => x.slice(row * d, d).fill(T::of(0.0)),
                }
            }
        }
    });
}

/// dtable `[v, d]` += dx `[rows, d]` at tokens `[rows]`, in row order.
pub fn embedding_grad<T: Float>(call: Call) {
    let (part, tokens) = (call.vocab_part(), Ptr(call.input::<u32>(1)));
    // SAFETY: there is a token per row.
    add_rows::<T>(call, call.size("vocab"), |row| unsafe { part.find(*tokens.at(row)) });
}

/// The sum `[v, d]` += dx `[rows, d]`, each row to the one that `to` names (below `v`), if any, in row order.
pub fn add_rows<T: Float>(call: Call, v: usize, to: impl Fn(usize) -> Option<usize> + Sync) {
    const COLUMNS: usize = 32;
    let (rows, d) = (call.size("batch") * call.size("seq"), call.size("features"));
    let dx = Ptr(call.input::<T>(0));
    let Some(dtable) = call.accumulator(0).map(Ptr) else { return };
    call.ranges(d, COLUMNS, |from, end| {
        let n = end - from;
        // SAFETY: columns from .. end of every row belong to this task; the caller vouches for the rows.
        unsafe {
            let here = |row: usize| Some((to(row)? * d + from, dx.slice(row * d + from, n)));
            let rows = (0..rows).filter_map(here);
            match dtable.get() {
                Accumulator::Float { sum, add } => {
                    let sum = Ptr(sum);
                    if !add {
                        (0..v).for_each(|row| sum.slice(row * d + from, n).fill(0.0));
                    }
                    rows.for_each(|(at, dx)| sum.slice(at, n).iter_mut().zip(dx).for_each(|(s, x)| *s += x.to()));
                }
                Accumulator::Bf16 { sum, add } => {
                    let sum = Ptr(sum);
                    if !add {
                        (0..v).for_each(|row| sum.slice(row * d + from, n).fill(Bf16(0)));
                    }
                    let add = |s: &mut Bf16, x: &T| *s = Bf16::of(s.to() + x.to());
                    rows.for_each(|(at, dx)| sum.slice(at, n).iter_mut().zip(dx).for_each(|(s, x)| add(s, x)));
                }
                Accumulator::Fixed { sum, add } => {
                    let sum = Ptr(sum);
                    if !add {
                        (0..v).for_each(|row| sum.slice(row * d + from, n).fill(0));
                    }
                    let add = |s: &mut i64, x: &T| *s = fixed::add(*s, x.to());
                    rows.for_each(|(at, dx)| sum.slice(at, n).iter_mut().zip(dx).for_each(|(s, x)| add(s, x)));
                }
            }
        }
    });
}
