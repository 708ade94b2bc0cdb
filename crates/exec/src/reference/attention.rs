//! Attention over whole sequences: fused, with the weights as a matrix, and over a cache.

use super::at::{At, Definition, Definitions, add_scaled, dot};
use super::packed::Heads;
use super::position::starts;
use super::{cached, naive};
use crate::by_kind;
use lockstep_ir::op::{Dims, NO_ROW};

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        Attention { window } => attention(&at.dims, at.x[0], &first_keys(&at.dims, at.given(1), window)).into(),
        AttentionGrad { window } => {
            vec![attention_grad(&at.dims, at.x, &first_keys(&at.dims, at.given(4), window))]
        },
        AttentionScores { window } => {
            vec![naive::scores(&at.dims, at.x[0], &first_keys(&at.dims, at.given(1), window))]
        },
        AttentionScoresGrad { .. } => vec![naive::scores_grad(&at.dims, at.x[0], at.x[1], at.x[2])],
        AttentionMix { .. } => vec![naive::mix(&at.dims, at.x[0], at.x[1])],
        AttentionMixGrad { .. } => naive::mix_grad(&at.dims, at.x[0], at.x[1], at.x[2]).into(),
        CachedAttention { latent, window, .. } => cached::attention(&at.dims, at.x, latent, window).into(),
        Argmax { known } => {
            let rows = at.x[0].chunks(at.size("vocab")).map(|row| &row[..known]);
            vec![rows.map(|row| {
                let first = row.iter().position(|x| *x == row.iter().copied().fold(f64::NEG_INFINITY, f64::max));
                let fits = row.iter().all(|x| !x.is_nan() && *x != f64::INFINITY);
                first.filter(|i| fits && row[*i].is_finite()).map_or(f64::from(NO_ROW), |i| i as f64)
            }).collect()]
        },
        LastPosition => {
            let (seq, d, count) = (at.size("seq"), at.size("features"), at.x[1]);
            let row = |b: usize| (b * seq + count[b] as usize - 1) * d;
            vec![(0..at.size("batch")).flat_map(|b| &at.x[0][row(b)..row(b) + d]).copied().collect()]
        },
    }
}

/// The first key that every query sees: where its document starts, but no more than a window before it.
pub fn first_keys(dims: &Dims, given: Option<&[f64]>, window: Option<usize>) -> Vec<usize> {
    let seq = dims.size("seq");
    let first = |(row, start): (usize, usize)| {
        start.max((row % seq + 1).saturating_sub(window.map_or(usize::MAX, |w| w.max(1))))
    };
    starts(dims, given).into_iter().enumerate().map(first).collect()
}

fn attention(dims: &Dims, qkv: &[f64], first: &[usize]) -> [Vec<f64>; 2] {
    let g = Heads::of(dims);
    let batch = dims.size("batch");
    let mut o = vec![0.0; batch * g.seq * g.heads * g.v];
    let mut lse = vec![0.0; batch * g.heads * g.seq];
    for b in 0..batch {
        for h in 0..g.heads {
            for s in 0..g.seq {
                let from = first[b * g.seq + s];
                let (p, row_lse) = g.weights(qkv, b, from, s, h);
                lse[(b * g.heads + h) * g.seq + s] = row_lse;
                let o = &mut o[g.out_range(b, s, h)];
                (from..=s).for_each(|t| add_scaled(o, p[t - from], &qkv[g.range(b, t, g.value(h))]));
            }
        }
    }
    [o, lse]
}

/// dqkv, from do, qkv, o and lse: with sinks, these two are not those of the scores alone.
fn attention_grad(dims: &Dims, x: &[&[f64]], first: &[usize]) -> Vec<f64> {
    let (dout, qkv, o, lse) = (x[0], x[1], x[2], x[3]);
    let g = Heads::of(dims);
    let scale = 1.0 / (g.e as f64).sqrt();
    let mut dqkv = vec![0.0; qkv.len()];
    for b in 0..dims.size("batch") {
        for h in 0..g.heads {
            for s in 0..g.seq {
                let from = first[b * g.seq + s];
                let (dout, o) = (&dout[g.out_range(b, s, h)], &o[g.out_range(b, s, h)]);
                let (mean, lse) = (dot(dout, o), lse[(b * g.heads + h) * g.seq + s]);
                for t in from..=s {
                    let score = dot(&qkv[g.range(b, s, h)], &qkv[g.range(b, t, g.key(h))]) * scale;
                    let p = (score - lse).exp();
                    let ds = p * (dot(dout, &qkv[g.range(b, t, g.value(h))]) - mean) * scale;
                    add_scaled(&mut dqkv[g.range(b, t, g.value(h))], p, dout);
                    add_scaled(&mut dqkv[g.range(b, s, h)], ds, &qkv[g.range(b, t, g.key(h))]);
                    add_scaled(&mut dqkv[g.range(b, t, g.key(h))], ds, &qkv[g.range(b, s, h)]);
                }
            }
        }
    }
    dqkv
}
