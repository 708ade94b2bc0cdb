//! Norms of positions and of heads.

use super::at::{At, Definition, Definitions, add, column_sums};
use crate::by_kind;
use lockstep_ir::op::{Dims, Norm};

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        Norm { norm, residual, eps } => {
            let (x, eps) = (at.x, f64::from(eps));
            let (sum, w) = if residual { (Some(add(x[0], x[1])), 2) } else { (None, 1) };
            let normed = sum.as_deref().unwrap_or(x[0]);
            let made: Vec<Vec<f64>> = match norm {
                Norm::Rms => rms_norm(normed, x[w], eps).into(),
                Norm::RmsPlusOne => rms_norm(normed, &plus_one(x[w]), eps).into(),
                Norm::Layer => layer_norm(normed, x[w], x[w + 1], eps).into(),
            };
            sum.into_iter().chain(made).collect()
        },
        NormGrad { norm, residual } => {
            let x = at.x;
            let dx = match norm {
                Norm::Rms => norm_grad(x[0], x[1], x[2], x[3]),
                Norm::RmsPlusOne => norm_grad(x[0], x[1], &plus_one(x[2]), x[3]),
                Norm::Layer => layer_norm_grad(x[0], x[1], x[2], x[3], x[4]),
            };
            vec![if residual { add(&dx, x[x.len() - 1]) } else { dx }]
        },
        NormGradWeight { norm } => {
            let (x, d, rstd) = (at.x, at.size("features"), at.x[at.x.len() - 1]);
            let mean = |i: usize| if norm == Norm::Layer { x[2][i / d] } else { 0.0 };
            vec![column_sums(x[0], d, |i| x[0][i] * (x[1][i] - mean(i)) * rstd[i / d])]
        },
        RowDot { plus_one: more } => {
            let (x, d) = (at.x, at.size("features"));
            let weight = |i: usize| at.given(2).map_or(1.0, |w| w[i % d] + if more { 1.0 } else { 0.0 });
            let terms: Vec<f64> = (0..x[0].len()).map(|i| x[0][i] * x[1][i] * weight(i)).collect();
            vec![terms.chunks(d).map(|row| row.iter().sum()).collect()]
        },
        NormBy { plus_one: more, eps, width } => {
            let (x, d) = (at.x, at.size("features"));
            let w = if more { plus_one(x[1]) } else { x[1].to_vec() };
            let rstd: Vec<f64> = x[2].iter().map(|sum| 1.0 / (sum / width as f64 + f64::from(eps)).sqrt()).collect();
            vec![(0..x[0].len()).map(|i| x[0][i] * rstd[i / d] * w[i % d]).collect(), rstd]
        },
        NormByGrad { plus_one: more, width } => {
            let (x, d) = (at.x, at.size("features"));
            let w = if more { plus_one(x[2]) } else { x[2].to_vec() };
            let element = |i: usize| {
                let (r, dot) = (x[3][i / d], x[4][i / d]);
                r * w[i % d] * x[0][i] - x[1][i] * r.powi(3) * dot / width as f64
            };
            vec![(0..x[0].len()).map(element).collect()]
        },
        QkNorm { plus_one: more, eps } => {
            let w = if more { plus_one(at.x[1]) } else { at.x[1].to_vec() };
            qk_norm(&at.dims, at.x[0], &w, f64::from(eps)).into()
        },
        QkNormGrad { plus_one: more } => {
            let w = if more { plus_one(at.x[2]) } else { at.x[2].to_vec() };
            vec![qk_norm_grad(&at.dims, at.x[0], at.x[1], &w, at.x[3])]
        },
        QkNormGradWeight => vec![qk_norm_grad_weight(&at.dims, at.x[0], at.x[1], at.x[2])],
    }
}

/// What a norm multiplies by whose weight is stored less 1.
fn plus_one(w: &[f64]) -> Vec<f64> {
    w.iter().map(|w| 1.0 + w).collect()
}

fn rms_norm(x: &[f64], w: &[f64], eps: f64) -> [Vec<f64>; 2] {
    let d = w.len();
    let rstd: Vec<f64> =
        x.chunks(d).map(|r| 1.0 / (r.iter().map(|x| x * x).sum::<f64>() / d as f64 + eps).sqrt()).collect();
    let y = x.iter().enumerate().map(|(i, x)| x * rstd[i / d] * w[i % d]).collect();
    [y, rstd]
}

fn norm_grad(dy: &[f64], x: &[f64], w: &[f64], rstd: &[f64]) -> Vec<f64> {
    let d = w.len();
    let dot = |row: usize| (0..d).map(|i| w[i] * dy[row * d + i] * x[row * d + i]).sum::<f64>();
    let dots: Vec<f64> = (0..rstd.len()).map(dot).collect();
    let element = |i: usize| {
        let r = rstd[i / d];
        r * w[i % d] * dy[i] - x[i] * r.powi(3) * dots[i / d] / d as f64
    };
    (0..x.len()).map(element).collect()
}

fn layer_norm(x: &[f64], w: &[f64], b: &[f64], eps: f64) -> [Vec<f64>; 3] {
    let d = w.len();
    let average = |row: &[f64]| row.iter().sum::<f64>() / d as f64;
    let mean: Vec<f64> = x.chunks(d).map(average).collect();
    let centred: Vec<f64> = x.iter().enumerate().map(|(i, x)| x - mean[i / d]).collect();
    let [normed, rstd] = rms_norm(&centred, w, eps);
    [normed.iter().enumerate().map(|(i, y)| y + b[i % d]).collect(), mean, rstd]
}

fn layer_norm_grad(dy: &[f64], x: &[f64], w: &[f64], mean: &[f64], rstd: &[f64]) -> Vec<f64> {
    let d = w.len();
    let centred: Vec<f64> = x.iter().enumerate().map(|(i, x)| x - mean[i / d]).collect();
    let dx = norm_grad(dy, &centred, w, rstd);
    // Centring takes the mean away, of the gradient too; where x is centred, only the first term has one.
    let shift = |row: usize| (0..d).map(|i| w[i] * dy[row * d + i]).sum::<f64>() * rstd[row] / d as f64;
    let shifts: Vec<f64> = (0..rstd.len()).map(shift).collect();
    dx.iter().enumerate().map(|(i, dx)| dx - shifts[i / d]).collect()
}

/// Calls `f(head, weight, norm)` for every head of Q and K in every row: where its elements, its weight and its norm stand.
fn each_normed_head(dims: &Dims, mut f: impl FnMut(usize, usize, usize)) {
    let (e, q, heads) = (dims.size("head_dim"), dims.size("heads"), dims.size("normed"));
    for (row, h) in (0..dims.size("batch") * dims.size("seq")).flat_map(|row| (0..heads).map(move |h| (row, h))) {
        f(row * dims.size("qkv") + h * e, if h < q { 0 } else { e }, row * heads + h);
    }
}

fn qk_norm(dims: &Dims, qkv: &[f64], w: &[f64], eps: f64) -> [Vec<f64>; 2] {
    let e = dims.size("head_dim");
    let (mut y, mut rstd) = (qkv.to_vec(), Vec::new());
    each_normed_head(dims, |at, weight, _| {
        let [head, scale] = rms_norm(&qkv[at..at + e], &w[weight..weight + e], eps);
        y[at..at + e].copy_from_slice(&head);
        rstd.extend(scale);
    });
    [y, rstd]
}

fn qk_norm_grad(dims: &Dims, dy: &[f64], qkv: &[f64], w: &[f64], rstd: &[f64]) -> Vec<f64> {
    let e = dims.size("head_dim");
    let mut dx = dy.to_vec();
    each_normed_head(dims, |at, weight, n| {
        let head = at..at + e;
        let grad = norm_grad(&dy[head.clone()], &qkv[head.clone()], &w[weight..weight + e], &rstd[n..n + 1]);
        dx[head].copy_from_slice(&grad);
    });
    dx
}

fn qk_norm_grad_weight(dims: &Dims, dy: &[f64], qkv: &[f64], rstd: &[f64]) -> Vec<f64> {
    let e = dims.size("head_dim");
    let mut dw = vec![0.0; 2 * e];
    each_normed_head(dims, |at, weight, n| {
        (0..e).for_each(|i| dw[weight + i] += dy[at + i] * qkv[at + i] * rstd[n]);
    });
    dw
}
