//! RMSNorm, alone and with the residual addition. Shapes: x, delta, sum, y `[rows, d]`; rstd `[rows]`; w `[d]`.

use super::call::{Accumulator, Call, Ptr};
use super::simd;
use lockstep_ir::fixed;

/// `add` says whether the call is `AddRmsNorm`.
pub fn forward(call: Call, eps: f32, add: bool) {
    let (rows, d) = (call.size('b') * call.size('s'), call.size('d'));
    let x = Ptr(call.input::<f32>(0));
    let delta = add.then(|| Ptr(call.input::<f32>(1)));
    let w = Ptr(call.input::<f32>(if add { 2 } else { 1 }));
    let first = usize::from(add);
    let sum = if add { call.output::<f32>(0).map(Ptr) } else { None };
    let y = call.output::<f32>(first).map(Ptr);
    let rstd = call.output::<f32>(first + 1).map(Ptr);
    call.rows(rows, |from, to| {
        // SAFETY: rows from .. to of every operand belong to this task; `sum` may be the memory of `x` or `delta`,
        // so those three are touched element by element.
        unsafe {
            let w = w.slice(0, d);
            for row in from..to {
                let at = row * d;
                let normed: &[f32] = match (delta, sum) {
                    (Some(delta), Some(sum)) => {
                        for i in at..at + d {
                            *sum.at(i) = *x.at(i) + *delta.at(i);
                        }
                        sum.slice(at, d)
                    }
                    _ => x.slice(at, d),
                };
                let mean = simd::sum(d, |i| normed[i] * normed[i]) / d as f32;
                let scale = 1.0 / (mean + eps).sqrt();
                if let Some(y) = y {
                    for ((y, x), w) in y.slice(at, d).iter_mut().zip(normed).zip(w) {
                        *y = x * scale * w;
                    }
                }
                if let Some(rstd) = rstd {
                    *rstd.at(row) = scale;
                }
            }
        }
    });
}

/// dx = rstd · (w·dy − x · rstd² · mean(w·dy·x)), plus `dsum` where `add` says so.
pub fn grad(call: Call, add: bool) {
    let (rows, d) = (call.size('b') * call.size('s'), call.size('d'));
    let (dy, x) = (Ptr(call.input::<f32>(0)), Ptr(call.input::<f32>(1)));
    let (w, rstd) = (Ptr(call.input::<f32>(2)), Ptr(call.input::<f32>(3)));
    let dsum = add.then(|| Ptr(call.input::<f32>(4)));
    let Some(dx) = call.output::<f32>(0).map(Ptr) else { return };
    call.rows(rows, |from, to| {
        // SAFETY: rows from .. to belong to this task; `dx` may be the memory of `dy` or `dsum`, so those are touched
        // element by element.
        unsafe {
            let w = w.slice(0, d);
            for row in from..to {
                let at = row * d;
                let x = x.slice(at, d);
                let scale = *rstd.at(row);
                let dot = simd::sum(d, |i| w[i] * *dy.at(at + i) * x[i]);
                let shrink = dot * scale * scale * scale / d as f32;
                for i in 0..d {
                    let own = scale * w[i] * *dy.at(at + i) - x[i] * shrink;
                    *dx.at(at + i) = match dsum {
                        Some(dsum) => *dsum.at(at + i) + own,
                        None => own,
                    };
                }
            }
        }
    });
}

/// dw = Σ over rows of dy · x · rstd.
pub fn grad_weight(call: Call) {
    const COLUMNS: usize = 64;
    let (batch, seq, d) = (call.size('b'), call.size('s'), call.size('d'));
    let (dy, x) = (Ptr(call.input::<f32>(0)), Ptr(call.input::<f32>(1)));
    let rstd = Ptr(call.input::<f32>(2));
    let Some(dw) = call.accumulator(0).map(Ptr) else { return };
    call.ranges(d, COLUMNS, |from, to| {
        let n = to - from;
        let column_sums = |first: usize, rows: usize| {
            let mut sums = [0.0f32; COLUMNS];
            for row in first..first + rows {
                // SAFETY: inputs are not written meanwhile.
                unsafe {
                    let (dy, x) = (dy.slice(row * d + from, n), x.slice(row * d + from, n));
                    let scale = *rstd.at(row);
                    for i in 0..n {
                        sums[i] += dy[i] * x[i] * scale;
                    }
                }
            }
            sums
        };
        match dw.get() {
            Accumulator::Float { sum, add } => {
                let sums = column_sums(0, batch * seq);
                for (i, s) in sums.iter().enumerate().take(n) {
                    // SAFETY: columns from .. to belong to this task.
                    unsafe {
                        let at = sum.add(from + i);
                        *at = if add { *at + s } else { *s };
                    }
                }
            }
            Accumulator::Fixed { sum, add } => {
                for b in 0..batch {
                    let sums = column_sums(b * seq, seq);
                    for (i, s) in sums.iter().enumerate().take(n) {
                        // SAFETY: columns from .. to belong to this task.
                        unsafe {
                            let at = sum.add(from + i);
                            *at = fixed::add(if add || b > 0 { *at } else { 0 }, *s);
                        }
                    }
                }
            }
        }
    });
}
