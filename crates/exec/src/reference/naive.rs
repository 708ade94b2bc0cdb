//! Attention whose weights exist as a matrix `[b, q, s, t]`.

use super::packed::Heads;
use lockstep_ir::op::Dims;

/// Calls `f(b, h, s, t, at)` for every query and key of every head: `at` is where their weight stands.
fn each_pair(dims: &Dims, mut f: impl FnMut(usize, usize, usize, usize, usize)) {
    let (batch, seq, heads) = (dims.size("batch"), dims.size("seq"), dims.size("heads"));
    for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
        for (s, t) in (0..seq).flat_map(|s| (0..seq).map(move |t| (s, t))) {
            f(b, h, s, t, ((b * heads + h) * seq + s) * seq + t);
        }
    }
}

pub fn scores(dims: &Dims, qkv: &[f64], first: &[usize]) -> Vec<f64> {
    let g = Heads::of(dims);
    let mut p = vec![0.0; dims.size("batch") * g.heads * g.seq * g.seq];
    for (row, weights) in p.chunks_mut(g.seq).enumerate() {
        let (b, h, s) = (row / g.seq / g.heads, row / g.seq % g.heads, row % g.seq);
        let from = first[b * g.seq + s];
        weights[from..=s].copy_from_slice(&g.weights(qkv, b, from, s, h).0);
    }
    p
}

pub fn mix(dims: &Dims, p: &[f64], qkv: &[f64]) -> Vec<f64> {
    let g = Heads::of(dims);
    let mut o = vec![0.0; dims.size("batch") * g.seq * g.heads * g.v];
    each_pair(dims, |b, h, s, t, at| {
        (0..g.v).for_each(|i| o[g.out(b, s, h, i)] += p[at] * qkv[g.at(b, t, g.value(h), i)]);
    });
    o
}

pub fn mix_grad(dims: &Dims, dout: &[f64], p: &[f64], qkv: &[f64]) -> [Vec<f64>; 2] {
    let g = Heads::of(dims);
    let (mut dp, mut dqkv) = (vec![0.0; p.len()], vec![0.0; qkv.len()]);
    each_pair(dims, |b, h, s, t, at| {
        for i in 0..g.v {
            let (dout, value) = (dout[g.out(b, s, h, i)], g.at(b, t, g.value(h), i));
            dp[at] += dout * qkv[value];
            dqkv[value] += p[at] * dout;
        }
    });
    [dp, dqkv]
}

pub fn scores_grad(dims: &Dims, dp: &[f64], p: &[f64], qkv: &[f64]) -> Vec<f64> {
    let g = Heads::of(dims);
    let scale = 1.0 / (g.e as f64).sqrt();
    let mean = |row: usize| (row * g.seq..(row + 1) * g.seq).map(|at| p[at] * dp[at]).sum::<f64>();
    let means: Vec<f64> = (0..p.len() / g.seq).map(mean).collect();
    let mut dqkv = vec![0.0; qkv.len()];
    each_pair(dims, |b, h, s, t, at| {
        let ds = p[at] * (dp[at] - means[at / g.seq]) * scale;
        for i in 0..g.e {
            let (query, key) = (g.at(b, s, h, i), g.at(b, t, g.key(h), i));
            dqkv[query] += ds * qkv[key];
            dqkv[key] += ds * qkv[query];
        }
    });
    dqkv
}
