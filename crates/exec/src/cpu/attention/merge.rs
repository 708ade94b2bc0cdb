//! Attention over two sets of keys, by log-sum-exp.

use super::super::call::{Call, Ptr};

/// o `[b, s, q·v]` and lse `[b, q, s]` over the keys of both inputs; either may be in place of the first.
pub fn merge(call: Call) {
    let (seq, heads) = (call.size("seq"), call.size("heads"));
    let v = call.size("attended") / heads;
    let [o, other] = [0, 2].map(|i| Ptr(call.input::<f32>(i)));
    let [lse, other_lse] = [1, 3].map(|i| Ptr(call.input::<f32>(i)));
    let (to, to_lse) = (call.output::<f32>(0).map(Ptr), call.output::<f32>(1).map(Ptr));
    call.rows(call.size("batch") * seq, |from, end| {
        for (row, h) in (from..end).flat_map(|row| (0..heads).map(move |h| (row, h))) {
            let (at, statistic) = ((row * heads + h) * v, (row / seq * heads + h) * seq + row % seq);
            // SAFETY: rows from .. end belong to this task.
            unsafe {
                let (a, b) = (*lse.at(statistic), *other_lse.at(statistic));
                let top = a.max(b);
                // Neither has seen a key.
                let base = if top == f32::NEG_INFINITY { 0.0 } else { top };
                let (weight, other_weight) = ((a - base).exp(), (b - base).exp());
                let sum = weight + other_weight;
                let inverse = if sum == 0.0 { 0.0 } else { 1.0 / sum };
                if let Some(to) = to {
                    for i in at..at + v {
                        *to.at(i) = (*o.at(i) * weight + *other.at(i) * other_weight) * inverse;
                    }
                }
                if let Some(to_lse) = to_lse {
                    *to_lse.at(statistic) = top + sum.ln();
                }
            }
        }
    });
}
