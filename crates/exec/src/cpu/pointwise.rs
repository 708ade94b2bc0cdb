//! Ops that look at one position at a time: embedding, rope, SwiGLU, addition.

use super::call::{Accumulator, Call, Ptr};
use super::simd;
use lockstep_ir::fixed;

/// x `[rows, d]` = table `[v, d]` at tokens `[rows]`.
pub fn embedding(call: Call) {
    let (rows, d, v) = (call.size('b') * call.size('s'), call.size('d'), call.size('v'));
    let (tokens, table) = (Ptr(call.input::<u32>(0)), Ptr(call.input::<f32>(1)));
    let Some(x) = call.output::<f32>(0).map(Ptr) else { return };
    call.rows(rows, |from, to| {
        for row in from..to {
            // SAFETY: rows from .. to belong to this task; the token is checked against the table.
            unsafe {
                let token = checked_token(*tokens.at(row), v);
                x.slice(row * d, d).copy_from_slice(table.slice(token * d, d));
            }
        }
    });
}

/// dtable `[v, d]` += dx `[rows, d]` at tokens `[rows]`, in row order.
pub fn embedding_grad(call: Call) {
    const COLUMNS: usize = 32;
    let (rows, d, v) = (call.size('b') * call.size('s'), call.size('d'), call.size('v'));
    let (dx, tokens) = (Ptr(call.input::<f32>(0)), Ptr(call.input::<u32>(1)));
    let Some(dtable) = call.accumulator(0).map(Ptr) else { return };
    call.ranges(d, COLUMNS, |from, to| {
        let n = to - from;
        // SAFETY: columns from .. to of every row belong to this task; tokens are checked against the table.
        unsafe {
            match dtable.get() {
                Accumulator::Float { sum, add } => {
                    let sum = Ptr(sum);
                    if !add {
                        (0..v).for_each(|row| sum.slice(row * d + from, n).fill(0.0));
                    }
                    for row in 0..rows {
                        let token = checked_token(*tokens.at(row), v);
                        let dx = dx.slice(row * d + from, n);
                        for (s, x) in sum.slice(token * d + from, n).iter_mut().zip(dx) {
                            *s += x;
                        }
                    }
                }
                Accumulator::Fixed { sum, add } => {
                    let sum = Ptr(sum);
                    if !add {
                        (0..v).for_each(|row| sum.slice(row * d + from, n).fill(0));
                    }
                    for row in 0..rows {
                        let token = checked_token(*tokens.at(row), v);
                        let dx = dx.slice(row * d + from, n);
                        for (s, x) in sum.slice(token * d + from, n).iter_mut().zip(dx) {
                            *s = fixed::add(*s, *x);
                        }
                    }
                }
            }
        }
    });
}

/// A token as an index into a table of `vocab` rows.
#[inline(always)]
pub fn checked_token(token: u32, vocab: usize) -> usize {
    assert!((token as usize) < vocab, "token {token} is outside the vocabulary of {vocab}");
    token as usize
}

/// Rotates the first `q + u` heads of every row of qkv `[b, s, (q + 2u)·e]` by the angles of its position.
pub fn rope(call: Call, inverse: bool) {
    let seq = call.size('s');
    rotate(call, if inverse { -1.0 } else { 1.0 }, |row| row % seq);
}

/// The same, with the position of every row (below the table's rows) and the sign of the angles given.
pub fn rotate(call: Call, sign: f32, position: impl Fn(usize) -> usize + Sync) {
    let (seq, e) = (call.size('s'), call.size('e'));
    let (rotated, width) = (call.size('q') + call.size('u'), call.size('p'));
    let (qkv, table) = (Ptr(call.input::<f32>(0)), Ptr(call.input::<f32>(1)));
    let Some(out) = call.output::<f32>(0).map(Ptr) else { return };
    let half = e / 2;
    call.rows(call.size('b') * seq, |from, to| {
        for row in from..to {
            // SAFETY: rows from .. to belong to this task; `out` may be the memory of `qkv`, so both are touched element
            // by element.
            unsafe {
                let (cos, sin) = table.slice(position(row) * e, e).split_at(half);
                for head in 0..rotated {
                    let at = row * width + head * e;
                    for i in 0..half {
                        let (x, y) = (*qkv.at(at + i), *qkv.at(at + half + i));
                        let s = sin[i] * sign;
                        *out.at(at + i) = x * cos[i] - y * s;
                        *out.at(at + half + i) = y * cos[i] + x * s;
                    }
                }
                for i in row * width + rotated * e..(row + 1) * width {
                    *out.at(i) = *qkv.at(i);
                }
            }
        }
    });
}

/// y `[rows, f]` = silu(gate) · up, of gate_up `[rows, 2f]`.
pub fn swiglu(call: Call) {
    let (rows, f) = (call.size('b') * call.size('s'), call.size('f'));
    let gate_up = Ptr(call.input::<f32>(0));
    let Some(y) = call.output::<f32>(0).map(Ptr) else { return };
    call.rows(rows, |from, to| {
        for row in from..to {
            // SAFETY: rows from .. to belong to this task.
            unsafe {
                let (gate, up) = gate_up.slice(row * 2 * f, 2 * f).split_at(f);
                for ((y, &g), &u) in y.slice(row * f, f).iter_mut().zip(gate).zip(up) {
                    *y = g * sigmoid(g) * u;
                }
            }
        }
    });
}

/// dgate_up `[rows, 2f]` from dy `[rows, f]` and gate_up.
pub fn swiglu_grad(call: Call) {
    let (rows, f) = (call.size('b') * call.size('s'), call.size('f'));
    let (dy, gate_up) = (Ptr(call.input::<f32>(0)), Ptr(call.input::<f32>(1)));
    let Some(out) = call.output::<f32>(0).map(Ptr) else { return };
    call.rows(rows, |from, to| {
        for row in from..to {
            let at = row * 2 * f;
            // SAFETY: rows from .. to belong to this task; `out` may be the memory of `gate_up`, so both are touched
            // element by element.
            unsafe {
                let dy = dy.slice(row * f, f);
                for (i, &dy) in dy.iter().enumerate() {
                    let (g, u) = (*gate_up.at(at + i), *gate_up.at(at + f + i));
                    let s = sigmoid(g);
                    *out.at(at + i) = dy * u * s * (1.0 + g * (1.0 - s));
                    *out.at(at + f + i) = dy * g * s;
                }
            }
        }
    });
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + simd::exp(-x))
}

/// sum = a + b.
pub fn add(call: Call) {
    let n = call.size('b') * call.size('s') * call.size('d');
    let (a, b) = (Ptr(call.input::<f32>(0)), Ptr(call.input::<f32>(1)));
    let Some(sum) = call.output::<f32>(0).map(Ptr) else { return };
    call.rows(n, |from, to| {
        for i in from..to {
            // SAFETY: elements from .. to belong to this task; `sum` may be the memory of an input.
            unsafe { *sum.at(i) = *a.at(i) + *b.at(i) };
        }
    });
}
