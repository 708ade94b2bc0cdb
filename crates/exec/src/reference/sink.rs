//! Attention sinks.

use super::at::{At, Definition, Definitions, dot, log_sum_exp, sigmoid};
use crate::by_kind;
use lockstep_ir::op::Dims;

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        AttentionSink { .. } => with_sinks(&at.dims, at.x).into(),
        AttentionSinkGrad { .. } => vec![grad(&at.dims, at.x)],
        ExpandSinks => vec![(0..at.rows()).flat_map(|_| at.x[1]).copied().collect()],
    }
}

/// Of every head of every position: where its log-sum-exp stands, and its sink.
fn each<'a>(dims: &'a Dims, lse: &'a [f64], sinks: &'a [f64]) -> impl Iterator<Item = (usize, f64)> + 'a {
    let (seq, heads) = (dims.size("seq"), dims.size("heads"));
    (0..lse.len()).map(move |i| {
        let (row, h) = (i / heads, i % heads);
        ((row / seq * heads + h) * seq + row % seq, sinks[i % sinks.len()])
    })
}

/// o and lse.
fn with_sinks(dims: &Dims, x: &[&[f64]]) -> [Vec<f64>; 2] {
    let v = dims.size("attended") / dims.size("heads");
    let (o, lse) = (x[0], x[1]);
    let mut sum = vec![0.0; lse.len()];
    let mut out = Vec::with_capacity(o.len());
    for (o, (at, sink)) in o.chunks(v).zip(each(dims, lse, x[2])) {
        out.extend(o.iter().map(|o| o * sigmoid(lse[at] - sink)));
        sum[at] = log_sum_exp(&[lse[at], sink]);
    }
    [out, sum]
}

/// Of every position what it adds to the gradient of each sink, from do, o, lse and sinks.
fn grad(dims: &Dims, x: &[&[f64]]) -> Vec<f64> {
    let v = dims.size("attended") / dims.size("heads");
    let rows = x[0].chunks(v).zip(x[1].chunks(v)).zip(each(dims, x[2], x[3]));
    rows.map(|((dout, o), (at, sink))| -(sink - x[2][at]).exp() * dot(dout, o)).collect()
}
