//! Mixtures of experts, token by token.

use super::at::{At, Definition, Definitions};
use crate::by_kind;
use lockstep_ir::op::{Dims, Routing, Score};

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        Route { given, how } => match given {
            true => vec![route_to(&at.dims, &how, at.x), at.x[1].to_vec()],
            false => route(&at.dims, &how, at.x).into(),
        },
        RouteGrad { how } => vec![route_grad(&at.dims, &how, at.x)],
        ExpertCounts { .. } => vec![counts(&at.dims, at.x[0])],
        RouterLoss { balance, z } => vec![router_loss(&at.dims, [balance, z].map(f64::from), at.x)],
        RouterLossGrad { balance, z } => {
            vec![router_loss_grad(&at.dims, [balance, z].map(|w| at.seed(2) * f64::from(w)), at.x)]
        },
        ExpertLoad { .. } => vec![load(&at.dims, at.x[0])],
        StackTotals => vec![at.x.concat()],
        MoveBias { row, rate } => vec![move_bias(&at.dims, row, f64::from(rate), at.x)],
        GroupedLinear { each } => vec![linear(&at.dims, at.sharers(each), at.x)],
        GroupedGradInput => vec![grad_input(&at.dims, at.x)],
        GroupedGradWeight { each, .. } => vec![grad_weight(&at.dims, at.sharers(each), at.x)],
        Combine { .. } => vec![combine(&at.dims, at.x[0], at.given(1))],
        CombineGrad => combine_grad(&at.dims, at.x).into(),
    }
}

fn scores(how: &Routing, logits: &[f64]) -> Vec<f64> {
    match how.score {
        Score::Sigmoid => logits.iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect(),
        Score::Softmax => {
            let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = logits.iter().map(|l| (l - most).exp()).sum();
            logits.iter().map(|l| (l - most).exp() / sum).collect()
        }
    }
}

/// The indices of the `n` largest, the largest first, and of equal ones the first.
fn largest(keys: &[f64], n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..keys.len()).collect();
    order.sort_by(|a, b| keys[*b].total_cmp(&keys[*a]));
    order.truncate(n);
    order
}

fn choose(how: &Routing, keys: &[f64]) -> Vec<usize> {
    let each = keys.len() / how.groups;
    let counted = if how.score == Score::Sigmoid { 2 } else { 1 };
    let of_group = |group: &[f64]| largest(group, counted).into_iter().map(|i| group[i]).sum::<f64>();
    let groups: Vec<f64> = keys.chunks(each).map(of_group).collect();
    let open = largest(&groups, how.top_groups);
    let free = |e: usize| how.groups == 1 || open.contains(&(e / each));
    let keys: Vec<f64> = keys.iter().enumerate().map(|(e, k)| if free(e) { *k } else { f64::NEG_INFINITY }).collect();
    largest(&keys, how.choices)
}

/// How much each of some experts counts.
fn weights_of(how: &Routing, scores: &[f64], experts: &[usize]) -> Vec<f64> {
    let sum: f64 = if how.normalise { experts.iter().map(|e| scores[*e]).sum() } else { 1.0 };
    experts.iter().map(|e| scores[*e] / sum * f64::from(how.scale)).collect()
}

fn route(dims: &Dims, how: &Routing, x: &[&[f64]]) -> [Vec<f64>; 2] {
    let (mut weights, mut chosen) = (Vec::new(), Vec::new());
    for logits in x[0].chunks(dims.size("experts")) {
        let scores = scores(how, logits);
        let bias = |e: usize| x.get(1).map_or(0.0, |bias| bias[e]);
        let keys: Vec<f64> = scores.iter().enumerate().map(|(e, s)| s + bias(e)).collect();
        let experts = choose(how, &keys);
        weights.extend(weights_of(how, &scores, &experts));
        chosen.extend(experts.iter().map(|e| *e as f64));
    }
    [weights, chosen]
}

fn route_to(dims: &Dims, how: &Routing, x: &[&[f64]]) -> Vec<f64> {
    let tokens = x[0].chunks(dims.size("experts")).zip(x[1].chunks(dims.size("choices")));
    let of = |(logits, chosen): (&[f64], &[f64])| {
        weights_of(how, &scores(how, logits), &chosen.iter().map(|e| *e as usize).collect::<Vec<_>>())
    };
    tokens.flat_map(of).collect()
}

fn route_grad(dims: &Dims, how: &Routing, x: &[&[f64]]) -> Vec<f64> {
    let (experts, choices, scale) = (dims.size("experts"), dims.size("choices"), f64::from(how.scale));
    let mut all = Vec::new();
    for (token, logits) in x[1].chunks(experts).enumerate() {
        let scores = scores(how, logits);
        let at = |i: usize| (x[0][token * choices + i], x[2][token * choices + i] as usize);
        // By the scores.
        let sum: f64 = (0..choices).map(|i| scores[at(i).1]).sum();
        let mean: f64 = (0..choices).map(|i| at(i).0 * scores[at(i).1] / sum).sum();
        let mut d = vec![0.0; experts];
        for (dw, e) in (0..choices).map(at) {
            d[e] += scale * if how.normalise { (dw - mean) / sum } else { dw };
        }
        // By the logits.
        let dot: f64 = d.iter().zip(&scores).map(|(d, s)| d * s).sum();
        all.extend(d.iter().zip(&scores).map(|(d, s)| match how.score {
            Score::Softmax => s * (d - dot),
            Score::Sigmoid => d * s * (1.0 - s),
        }));
    }
    all
}

/// y = x · wᵀ by the weights of each row's expert; `sharers` consecutive rows have one row of x.
pub fn linear(dims: &Dims, sharers: usize, x: &[&[f64]]) -> Vec<f64> {
    let (n, k) = (dims.size("outputs"), dims.size("inputs"));
    let of = |(row, expert): (usize, &f64)| {
        if expert.is_nan() {
            return vec![0.0; n];
        }
        let (x, w) = (&x[0][row / sharers * k..][..k], &x[1][*expert as usize * n * k..][..n * k]);
        w.chunks(k).map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum()).collect::<Vec<f64>>()
    };
    x[2].iter().enumerate().flat_map(of).collect()
}

pub fn grad_input(dims: &Dims, x: &[&[f64]]) -> Vec<f64> {
    let (n, k) = (dims.size("outputs"), dims.size("inputs"));
    let of = |(row, expert): (usize, &f64)| {
        if expert.is_nan() {
            return vec![0.0; k];
        }
        let (dy, w) = (&x[0][row * n..][..n], &x[1][*expert as usize * n * k..][..n * k]);
        (0..k).map(|i| (0..n).map(|j| dy[j] * w[j * k + i]).sum()).collect::<Vec<f64>>()
    };
    x[2].iter().enumerate().flat_map(of).collect()
}

pub fn grad_weight(dims: &Dims, sharers: usize, x: &[&[f64]]) -> Vec<f64> {
    let (n, k) = (dims.size("outputs"), dims.size("inputs"));
    let mut dw = vec![0.0; dims.size("experts") * n * k];
    for (row, expert) in x[2].iter().enumerate().filter(|(_, expert)| !expert.is_nan()) {
        let (dy, x) = (&x[0][row * n..][..n], &x[1][row / sharers * k..][..k]);
        for (line, dy) in dw[*expert as usize * n * k..][..n * k].chunks_mut(k).zip(dy) {
            line.iter_mut().zip(x).for_each(|(sum, x)| *sum += dy * x);
        }
    }
    dw
}

fn combine(dims: &Dims, y: &[f64], weights: Option<&[f64]>) -> Vec<f64> {
    let (d, choices) = (dims.size("features"), dims.size("choices"));
    let mut out = vec![0.0; y.len() / choices];
    for (row, y) in y.chunks(d).enumerate() {
        let weight = weights.map_or(1.0, |w| w[row]);
        out[row / choices * d..][..d].iter_mut().zip(y).for_each(|(out, y)| *out += weight * y);
    }
    out
}

fn combine_grad(dims: &Dims, x: &[&[f64]]) -> [Vec<f64>; 2] {
    let (d, choices) = (dims.size("features"), dims.size("choices"));
    let of = |row: usize| &x[0][row / choices * d..][..d];
    let rows = x[2].len();
    let dy = (0..rows).flat_map(|row| of(row).iter().map(move |dout| dout * x[2][row])).collect();
    let dot = |row: usize| of(row).iter().zip(&x[1][row * d..]).map(|(dout, y)| dout * y).sum();
    [dy, (0..rows).map(dot).collect()]
}

fn counts(dims: &Dims, chosen: &[f64]) -> Vec<f64> {
    let of = |chosen: &[f64]| {
        let mut counts = vec![0.0; dims.size("experts")];
        chosen.iter().for_each(|e| counts[*e as usize] += 1.0);
        counts
    };
    chosen.chunks(dims.size("seq") * dims.size("choices")).flat_map(of).collect()
}

fn load(dims: &Dims, chosen: &[f64]) -> Vec<f64> {
    let mut load = vec![0.0; dims.size("experts")];
    chosen.iter().for_each(|e| load[*e as usize] += 1.0);
    load
}

fn move_bias(dims: &Dims, row: usize, rate: f64, x: &[&[f64]]) -> Vec<f64> {
    let experts = dims.size("experts");
    let load = &x[1][row * experts..][..experts];
    let mean = load.iter().sum::<f64>() / experts as f64;
    let step = |n: f64| if n == mean || x[2][1].is_nan() { 0.0 } else { rate * (mean - n).signum() };
    x[0].iter().zip(load).map(|(bias, n)| bias + step(*n)).collect()
}

/// Of each sequence: softmax scores and log-sum-exp of every token, and how much of its tokens each expert gets.
fn of_sequences<'a>(dims: &Dims, x: &[&'a [f64]]) -> impl Iterator<Item = (Vec<(Vec<f64>, f64)>, Vec<f64>)> + use<'a> {
    let (seq, experts) = (dims.size("seq"), dims.size("experts"));
    let of_token = |logits: &[f64]| {
        let sum: f64 = logits.iter().map(|l| l.exp()).sum();
        (logits.iter().map(|l| l.exp() / sum).collect::<Vec<f64>>(), sum.ln())
    };
    x[0].chunks(seq * experts).zip(x[1].chunks(experts)).map(move |(logits, counts)| {
        let all: f64 = counts.iter().sum();
        (logits.chunks(experts).map(of_token).collect(), counts.iter().map(|n| n / all).collect())
    })
}

fn router_loss(dims: &Dims, [balance, z]: [f64; 2], x: &[&[f64]]) -> Vec<f64> {
    let experts = dims.size("experts") as f64;
    let of = |(tokens, shares): (Vec<(Vec<f64>, f64)>, Vec<f64>)| {
        let of_token = |(scores, lse): &(Vec<f64>, f64)| {
            let even: f64 = scores.iter().zip(&shares).map(|(p, share)| p * share).sum();
            balance * experts * even + z * lse * lse
        };
        tokens.iter().map(of_token).sum()
    };
    of_sequences(dims, x).map(of).collect()
}

fn router_loss_grad(dims: &Dims, [balance, z]: [f64; 2], x: &[&[f64]]) -> Vec<f64> {
    let experts = dims.size("experts") as f64;
    let mut d = Vec::new();
    for (tokens, shares) in of_sequences(dims, x) {
        for (scores, lse) in &tokens {
            let mean: f64 = scores.iter().zip(&shares).map(|(p, share)| p * share).sum();
            let of = |(p, share): (&f64, &f64)| p * (balance * experts * (share - mean) + 2.0 * z * lse);
            d.extend(scores.iter().zip(&shares).map(of));
        }
    }
    d
}
