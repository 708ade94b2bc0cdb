//! The slow and right evaluator: every op in f64, written as its definition, over graphs with global shapes.
//!
//! Kernels are held against it, and it is held against finite differences.

mod context;
mod experts;
mod generation;
mod heads;
mod naive;
mod rules;
mod vocab;

use lockstep_ir::graph::{Node, Source};
use lockstep_ir::op::{Dims, IGNORED_TARGET, Norm};
use lockstep_ir::squares::{LIMBS, Squares};
use lockstep_ir::{Graph, Op, StepScalars, ValueId, counter, fixed};
use std::ops::Range;

/// Evaluates a graph. `feed` gives inputs and states (token ids as whole numbers); gradient states start at zero. Returns every
/// value that was computed; a sum into a state is also found under the state.
pub fn evaluate(graph: &Graph, feed: impl Fn(ValueId) -> Option<Vec<f64>>) -> Vec<Option<Vec<f64>>> {
    let mut values: Vec<Option<Vec<f64>>> = (0..graph.values.len()).map(|i| feed(ValueId(i))).collect();
    for node in &graph.nodes {
        let inputs: Vec<&[f64]> = node
            .inputs
            .iter()
            .map(|v| values[v.0].as_deref().unwrap_or_else(|| panic!("`{}` has no value", graph.get(*v).name)))
            .collect();
        let outputs = apply(graph, node, &inputs);
        for (output, data) in node.outputs.iter().zip(outputs) {
            let Some(v) = output else { continue };
            if let Source::Node { into: Some(state) } = graph.get(*v).source {
                let sum = values[state.0].get_or_insert_with(|| vec![0.0; data.len()]);
                sum.iter_mut().zip(&data).for_each(|(s, x)| *s += x);
            }
            values[v.0] = Some(data);
        }
    }
    values
}

fn apply(graph: &Graph, node: &Node, x: &[&[f64]]) -> Vec<Vec<f64>> {
    let types = graph.input_types(node);
    let dims = node.op.bind(&types).unwrap_or_else(|e| panic!("{e}"));
    let rows = dims.size("batch") * dims.size("seq");
    let sharers = |each| if each { 1 } else { dims.size("choices") };
    match node.op {
        Op::Embedding => vec![embedding(&dims, x[0], x[1])],
        Op::EmbeddingGrad { vocab } => {
            let d = dims.size("features");
            let mut table = vec![0.0; vocab * d];
            for (row, token) in x[1].iter().enumerate() {
                for i in 0..d {
                    table[*token as usize * d + i] += x[0][row * d + i];
                }
            }
            vec![table]
        }
        Op::Linear => vec![matmul((rows, dims.size("outputs"), dims.size("inputs")), x[0], false, x[1], true)],
        Op::LinearGradInput => {
            vec![matmul((rows, dims.size("inputs"), dims.size("outputs")), x[0], false, x[1], false)]
        }
        Op::LinearGradWeight => {
            vec![matmul((dims.size("outputs"), dims.size("inputs"), rows), x[0], true, x[1], false)]
        }
        Op::AddBias => vec![x[0].iter().enumerate().map(|(i, x0)| x0 + x[1][i % x[1].len()]).collect()],
        Op::BiasGrad => vec![column_sums(x[0], dims.size("features"), |i| x[0][i])],
        Op::Norm { norm, residual, eps } => {
            let (sum, first) = if residual { (Some(add(x[0], x[1])), 1) } else { (None, 0) };
            let (normed, eps) = (sum.as_deref().unwrap_or(x[0]), f64::from(eps));
            let made: Vec<Vec<f64>> = match norm {
                Norm::Rms => rms_norm(normed, x[first + 1], eps).into(),
                Norm::Layer => layer_norm(normed, x[first + 1], x[first + 2], eps).into(),
            };
            sum.into_iter().chain(made).collect()
        }
        Op::NormGrad { norm, residual } => {
            let dx = match norm {
                Norm::Rms => norm_grad(x[0], x[1], x[2], x[3]),
                Norm::Layer => layer_norm_grad(x[0], x[1], x[2], x[3], x[4]),
            };
            vec![if residual { add(&dx, x[x.len() - 1]) } else { dx }]
        }
        Op::NormGradWeight { norm } => {
            let (d, rstd) = (dims.size("features"), x[x.len() - 1]);
            let mean = |i: usize| if norm == Norm::Layer { x[2][i / d] } else { 0.0 };
            vec![column_sums(x[0], d, |i| x[0][i] * (x[1][i] - mean(i)) * rstd[i / d])]
        }
        Op::AddPositions { .. } => {
            vec![add(x[0], &rows_of(&dims, x[1], &positions(&dims, given(x, 2))))]
        }
        Op::AddPositionsAt => vec![add(x[0], &rows_of(&dims, x[1], &generation::rows_from(&dims, x[2])))],
        Op::PositionsGrad { .. } => {
            let (d, positions) = (dims.size("features"), positions(&dims, given(x, 1)));
            let mut table = vec![0.0; dims.size("table") * d];
            x[0].iter().enumerate().for_each(|(i, dx)| table[positions[i / d] * d + i % d] += dx);
            vec![table]
        }
        Op::QkNorm { eps } => qk_norm(&dims, x[0], x[1], f64::from(eps)).into(),
        Op::QkNormGrad => vec![qk_norm_grad(&dims, x[0], x[1], x[2], x[3])],
        Op::QkNormGradWeight => vec![qk_norm_grad_weight(&dims, x[0], x[1], x[2])],
        Op::Rope { inverse } => {
            let positions = positions(&dims, given(x, 2));
            vec![rope(&dims, x[0], x[1], &positions, if inverse { -1.0 } else { 1.0 })]
        }
        Op::RopeAt => vec![rope(&dims, x[0], x[1], &generation::rows_from(&dims, x[2]), 1.0)],
        Op::Attention { window } => attention(&dims, x[0], &first_keys(&dims, given(x, 1), window)).into(),
        Op::AttentionGrad { window } => {
            vec![attention_grad(&dims, x[0], x[1], &first_keys(&dims, given(x, 4), window))]
        }
        Op::PartAttention { window, ring } => {
            context::attention(&dims, x[0], x[1], &first_keys(&dims, given(x, 2), window), ring).into()
        }
        Op::PartAttentionGrad { window, ring } => {
            context::grad(&dims, x, &first_keys(&dims, given(x, 5), window), ring).into()
        }
        Op::AttentionMerge => context::merge(&dims, x).into(),
        Op::SplitHeads { ranks, .. } => vec![heads::split(&dims, &types[0].dims[2], x[0], ranks)],
        Op::JoinHeads { ranks } => vec![heads::join(&dims, &types[0].dims[3], x[0], ranks)],
        Op::AttentionScores { window } => {
            vec![naive::scores(&dims, x[0], &first_keys(&dims, given(x, 1), window))]
        }
        Op::AttentionScoresGrad { .. } => vec![naive::scores_grad(&dims, x[0], x[1], x[2])],
        Op::AttentionMix { .. } => vec![naive::mix(&dims, x[0], x[1])],
        Op::AttentionMixGrad { .. } => naive::mix_grad(&dims, x[0], x[1], x[2]).into(),
        Op::CachedAttention { window } => generation::cached_attention(&dims, x, window).into(),
        Op::LastPosition => vec![generation::last_position(&dims, x[0], x[1])],
        Op::Route { given: true, how } => vec![experts::route_to(&dims, &how, x), x[1].to_vec()],
        Op::Route { given: false, how } => experts::route(&dims, &how, x).into(),
        Op::RouteGrad { how } => vec![experts::route_grad(&dims, &how, x)],
        Op::ExpertCounts { .. } => vec![experts::counts(&dims, x[0])],
        Op::RouterLoss { balance, z } => vec![experts::router_loss(&dims, [balance, z].map(f64::from), x)],
        Op::RouterLossGrad { balance, z } => {
            let seed = given(x, 2).map_or(1.0, |s| f64::from(scalars(s).loss_scale));
            vec![experts::router_loss_grad(&dims, [balance, z].map(|w| seed * f64::from(w)), x)]
        }
        Op::ExpertLoad { .. } => vec![experts::load(&dims, x[0])],
        Op::StackLoads => vec![x.concat()],
        Op::MoveBias { row, rate } => vec![experts::move_bias(&dims, row, f64::from(rate), x)],
        Op::GroupedLinear { each } => vec![experts::linear(&dims, sharers(each), x)],
        Op::GroupedGradInput => vec![experts::grad_input(&dims, x)],
        Op::GroupedGradWeight { each, .. } => vec![experts::grad_weight(&dims, sharers(each), x)],
        Op::ExpertSlots { experts, blocks } => experts::slots(&dims, experts, blocks, x[0]).into(),
        Op::SendRows { each, .. } => vec![experts::send_rows(&dims, sharers(each), x)],
        Op::TakeRows { .. } => vec![experts::take_rows(&dims, x)],
        Op::RowsLinear { .. } => vec![experts::linear(&dims, 1, &[x[0], x[1], &experts::of_rows(&dims, x[2])])],
        Op::RowsGradInput { .. } => vec![experts::grad_input(&dims, &[x[0], x[1], &experts::of_rows(&dims, x[2])])],
        Op::RowsGradWeight { .. } => {
            vec![experts::grad_weight(&dims, 1, &[x[0], x[1], &experts::of_rows(&dims, x[2])])]
        }
        Op::Combine { .. } => vec![experts::combine(&dims, x[0], given(x, 1))],
        Op::CombineGrad => experts::combine_grad(&dims, x).into(),
        Op::SwiGlu => {
            let f = dims.size("ffn");
            vec![gate_up(x[0], f, |g, u| g * sigmoid(g) * u)]
        }
        Op::SwiGluGrad => {
            let f = dims.size("ffn");
            let gate = gate_up(x[1], f, |g, u| u * sigmoid(g) * (1.0 + g * (1.0 - sigmoid(g))));
            let up = gate_up(x[1], f, |g, _| g * sigmoid(g));
            let at = |i: usize| (i / (2 * f), i % (2 * f));
            let pick = |i: usize| match at(i) {
                (row, c) if c < f => x[0][row * f + c] * gate[row * f + c],
                (row, c) => x[0][row * f + c - f] * up[row * f + c - f],
            };
            vec![(0..x[1].len()).map(pick).collect()]
        }
        Op::Gelu => vec![x[0].iter().map(|x| x * sigmoid(2.0 * gelu_tanh(*x).0)).collect()],
        Op::GeluGrad => {
            let slope = |x: f64| {
                let (u, du) = gelu_tanh(x);
                sigmoid(2.0 * u) + x * sigmoid(2.0 * u) * sigmoid(-2.0 * u) * 2.0 * du
            };
            vec![x[0].iter().zip(x[1]).map(|(dy, x)| dy * slope(*x)).collect()]
        }
        Op::Dropout { rate, site, seq } => {
            let (d, below) = (dims.size("features"), counter::threshold(rate));
            let element = |i: usize| {
                let (b, s) = (i / d / seq, i / d % seq);
                let key = x[1][2 * b] as u64 | (x[1][2 * b + 1] as u64) << 32;
                let drops = counter::row_bits(counter::row(key, site, s as u64), (i % d) as u32) < below;
                if drops { 0.0 } else { x[0][i] / (1.0 - f64::from(rate)) }
            };
            vec![(0..x[0].len()).map(element).collect()]
        }
        Op::Add => vec![add(x[0], x[1])],
        // Rounding is for those who store numbers.
        Op::Cast { .. } => vec![x[0].to_vec()],
        Op::Slice { first, .. } => {
            let sections = types[0].dims.last().map_or(&[][..], |d| &d.sections);
            let (at, n) = (sections[..first].iter().map(|s| s.size()).sum::<usize>(), dims.size("sections"));
            vec![x[0].chunks(dims.size("packed")).flat_map(|row| &row[at..at + n]).copied().collect()]
        }
        Op::Concat => {
            let widths: Vec<usize> = x.iter().map(|part| part.len() / rows).collect();
            let row = |r: usize| x.iter().zip(&widths).flat_map(move |(part, n)| &part[r * n..(r + 1) * n]);
            vec![(0..rows).flat_map(row).copied().collect()]
        }
        Op::CrossEntropy => cross_entropy(&dims, x[0], x[1]).into(),
        Op::CrossEntropyGrad { weight } => vec![cross_entropy_grad(x[0], x[1], f64::from(weight))],
        Op::LinearCrossEntropy { score: false, .. } => {
            let seed = given(x, 3).map_or(1.0, |s| f64::from(scalars(s).loss_scale));
            let (k, v) = (dims.size("inputs"), dims.size("vocab"));
            let logits = matmul((rows, v, k), x[0], false, x[1], true);
            let [loss, _] = cross_entropy(&dims, &logits, x[2]);
            let dlogits = cross_entropy_grad(&logits, x[2], seed);
            let dx = matmul((rows, k, v), &dlogits, false, x[1], false);
            let dw = matmul((v, k, rows), &dlogits, true, x[0], false);
            vec![loss, dx, dw]
        }
        Op::LinearCrossEntropy { score: true, .. } => {
            let (k, v) = (dims.size("inputs"), dims.size("vocab"));
            let logits = matmul((rows, v, k), x[0], false, x[1], true);
            let [loss, _] = cross_entropy(&dims, &logits, x[2]);
            let missed = |(row, target): (&[f64], &f64)| {
                let target = *target as usize;
                f64::from(row.get(target).is_some_and(|hit| vocab::is_beaten(row, 0, *hit, target)))
            };
            vec![loss, logits.chunks(v).zip(x[2]).map(missed).collect()]
        }
        Op::AddState => vec![add(x[0], x[1])],
        Op::Accumulate | Op::Shard { .. } | Op::Part { .. } => vec![x[0].to_vec()],
        Op::SquareSum { sharers, tail } => {
            let (scalars, grads) = (scalars(x[x.len() - 1]), &x[..x.len() - 1]);
            let inverse = f64::from(scalars.inverse());
            let share = |i: usize| if i < tail { 1.0 } else { 1.0 / sharers as f64 };
            let squares =
                grads.iter().flat_map(|g| g.iter().enumerate().map(|(i, g)| (g * inverse).powi(2) * share(i)));
            vec![limbs(squares.sum())]
        }
        Op::MergeSums => vec![x[1..].iter().fold(x[0].to_vec(), |sum, x| add(&sum, x))],
        Op::LossSum => vec![limbs(x[0].iter().sum())],
        Op::GradientNorm => {
            let scalars = scalars(x[1]);
            let norm = from_limbs(x[0]).sqrt();
            let loss = |losses: &[f64]| from_limbs(losses) * f64::from(scalars.inverse_count);
            let beyond = given(x, 3).is_some_and(|limits| loss(x[2]) > limits[0] || norm > limits[1]);
            let factor = f64::from(scalars.inverse()) * (f64::from(scalars.clip) / norm).min(1.0);
            vec![vec![norm, if beyond { f64::NAN } else { factor }]]
        }
        Op::Lion { beta1, beta2, decay, lr_scale } => rules::lion(x, [beta1, beta2, decay], lr_scale).into(),
        Op::Sgd { momentum, decay, lr_scale } => rules::sgd(x, [momentum, decay], lr_scale).into(),
        Op::Momentum { momentum } => rules::momentum(x, f64::from(momentum)).into(),
        Op::Orthogonalise => vec![rules::orthogonalise(types[0], x[0])],
        Op::Descend { decay, lr_scale } => vec![rules::descend(x, f64::from(decay), lr_scale)],
        Op::AdamW { beta1, beta2, eps, decay, lr_scale } => {
            let s = scalars(x[4]);
            let [beta1, beta2, eps, decay] = [beta1, beta2, eps, decay].map(f64::from);
            let [lr, bias1, bias2] = [s.lr * lr_scale, s.bias1, s.bias2].map(f64::from);
            let n = x[0].len();
            let g: Vec<f64> = x[1].iter().map(|g| g * x[5][1]).collect();
            let m: Vec<f64> = (0..n).map(|i| beta1 * x[2][i] + (1.0 - beta1) * g[i]).collect();
            let v: Vec<f64> = (0..n).map(|i| beta2 * x[3][i] + (1.0 - beta2) * g[i] * g[i]).collect();
            let step = |i: usize| m[i] / bias1 / ((v[i] / bias2).sqrt() + eps);
            let w = (0..n).map(|i| x[0][i] * (1.0 - lr * decay) - lr * step(i)).collect();
            vec![w, m, v]
        }
        Op::VocabLogits { rows, parts } => vocab::logits(&dims, x[0], x[1], x[2], rows, parts).into(),
        Op::VocabLoss => vec![vocab::loss(&dims, &x[..x.len() - 1], x[x.len() - 1])],
        Op::VocabMisses { rows } => vec![vocab::misses(&dims, x[0], x[1], x[2], rows)],
        Op::VocabGrad { rows } => {
            let seed = given(x, 5).map_or(1.0, |s| f64::from(scalars(s).loss_scale));
            vocab::grad(&dims, x, rows, seed).into()
        }
        Op::JoinRows => vec![x[..x.len() - 1].concat()],
        // Whole tensors, as graphs speak of them, are the same before and after.
        Op::AllReduce { .. }
        | Op::SumShared { .. }
        | Op::ReduceScatter { .. }
        | Op::AllGather { .. }
        | Op::Shift { .. }
        | Op::AllToAll { .. } => x.iter().map(|x| x.to_vec()).collect(),
        Op::Send { .. } | Op::Receive { .. } => panic!("stages exist in programs only"),
    }
}

/// An optional input.
fn given<'a>(x: &[&'a [f64]], i: usize) -> Option<&'a [f64]> {
    x.get(i).copied()
}

/// A number as the parts that `Op::SquareSum` gives, each a fixed-point number.
pub(crate) fn limbs(x: f64) -> Vec<f64> {
    let mut sum = Squares::ZERO;
    sum.add(x);
    sum.stored().map(|limb| limb as f64 / (1u64 << 36) as f64).to_vec()
}

/// Back from there.
pub(crate) fn from_limbs(x: &[f64]) -> f64 {
    let mut stored = [0; LIMBS];
    let limb = |x: f64| if x.is_nan() { fixed::POISON } else { (x * (1u64 << 36) as f64) as i64 };
    stored.iter_mut().zip(x).for_each(|(to, x)| *to = limb(*x));
    Squares::from_stored(&stored).value()
}

fn scalars(x: &[f64]) -> StepScalars {
    let x: Vec<f32> = x.iter().map(|x| *x as f32).collect();
    StepScalars::from_slice(&x)
}

fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// Sums of `term(i)` over the rows of `d` elements that `of` has, by column.
fn column_sums(of: &[f64], d: usize, term: impl Fn(usize) -> f64) -> Vec<f64> {
    (0..d).map(|column| (column..of.len()).step_by(d).map(&term).sum()).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// a (m × k, or its transpose in memory) · b (k × n, or its transpose in memory).
fn matmul((m, n, k): (usize, usize, usize), a: &[f64], a_transposed: bool, b: &[f64], b_transposed: bool) -> Vec<f64> {
    let a_at = |i: usize, l: usize| if a_transposed { a[l * m + i] } else { a[i * k + l] };
    let b_at = |l: usize, j: usize| if b_transposed { b[j * k + l] } else { b[l * n + j] };
    let element = |at: usize| (0..k).map(|l| a_at(at / n, l) * b_at(l, at % n)).sum();
    (0..m * n).map(element).collect()
}

fn embedding(dims: &Dims, tokens: &[f64], table: &[f64]) -> Vec<f64> {
    let d = dims.size("features");
    tokens.iter().flat_map(|t| &table[*t as usize * d..(*t as usize + 1) * d]).copied().collect()
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

/// The argument of the hyperbolic tangent in gelu, and its derivative.
fn gelu_tanh(x: f64) -> (f64, f64) {
    let root = (2.0 / std::f64::consts::PI).sqrt();
    (root * (x + 0.044715 * x * x * x), root * (1.0 + 3.0 * 0.044715 * x * x))
}

/// The position of every row in its sequence, or in its document.
fn positions(dims: &Dims, given: Option<&[f64]>) -> Vec<usize> {
    starts(dims, given).iter().enumerate().map(|(row, start)| row % dims.size("seq") - start).collect()
}

/// Rows of a table, one behind the other.
fn rows_of(dims: &Dims, table: &[f64], rows: &[usize]) -> Vec<f64> {
    let d = dims.size("features");
    rows.iter().flat_map(|row| &table[row * d..(row + 1) * d]).copied().collect()
}

/// Where the document of every row starts: given, or 0; a start after its row counts as the row.
fn starts(dims: &Dims, given: Option<&[f64]>) -> Vec<usize> {
    let seq = dims.size("seq");
    (0..dims.size("batch") * seq).map(|row| given.map_or(0, |starts| (starts[row] as usize).min(row % seq))).collect()
}

/// The first key that every query sees: where its document starts, but no more than a window before it.
fn first_keys(dims: &Dims, given: Option<&[f64]>, window: Option<usize>) -> Vec<usize> {
    let seq = dims.size("seq");
    let first = |(row, start): (usize, usize)| {
        start.max((row % seq + 1).saturating_sub(window.map_or(usize::MAX, |w| w.max(1))))
    };
    starts(dims, given).into_iter().enumerate().map(first).collect()
}

fn rope(dims: &Dims, qkv: &[f64], table: &[f64], positions: &[usize], sign: f64) -> Vec<f64> {
    let (e, width) = (dims.size("head_dim"), dims.size("qkv"));
    let rotated = (dims.size("heads") + dims.size("kv_heads")) * e;
    let half = e / 2;
    let element = |at: usize| {
        let (row, column) = (at / width, at % width);
        if column >= rotated {
            return qkv[at];
        }
        let i = column % e % half;
        let angles = &table[positions[row] * e..][..e];
        let (cos, sin) = (angles[i], angles[half + i] * sign);
        if column % e < half { qkv[at] * cos - qkv[at + half] * sin } else { qkv[at] * cos + qkv[at - half] * sin }
    };
    (0..qkv.len()).map(element).collect()
}

fn gate_up(x: &[f64], f: usize, y: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    x.chunks(2 * f).flat_map(|row| (0..f).map(|i| y(row[i], row[f + i])).collect::<Vec<_>>()).collect()
}

struct Heads {
    seq: usize,
    heads: usize,
    kv_heads: usize,
    e: usize,
}

impl Heads {
    fn of(dims: &Dims) -> Self {
        Self {
            seq: dims.size("seq"),
            heads: dims.size("heads"),
            kv_heads: dims.size("kv_heads"),
            e: dims.size("head_dim"),
        }
    }

    /// Index in qkv of element `i` at position `s` for head `h`: query heads first, then keys, then values.
    fn at(&self, b: usize, s: usize, h: usize, i: usize) -> usize {
        ((b * self.seq + s) * (self.heads + 2 * self.kv_heads) + h) * self.e + i
    }

    /// Where the head stands in qkv, and where its output does.
    fn range(&self, b: usize, s: usize, h: usize) -> Range<usize> {
        self.at(b, s, h, 0)..self.at(b, s, h, 0) + self.e
    }

    fn out_range(&self, b: usize, s: usize, h: usize) -> Range<usize> {
        self.out(b, s, h, 0)..self.out(b, s, h, 0) + self.e
    }

    fn key(&self, h: usize) -> usize {
        self.heads + h / (self.heads / self.kv_heads)
    }

    fn value(&self, h: usize) -> usize {
        self.key(h) + self.kv_heads
    }

    fn out(&self, b: usize, s: usize, h: usize, i: usize) -> usize {
        ((b * self.seq + s) * self.heads + h) * self.e + i
    }

    /// Weights of the keys from ..= s, and the log-sum-exp of their scores.
    fn weights(&self, qkv: &[f64], b: usize, from: usize, s: usize, h: usize) -> (Vec<f64>, f64) {
        let query = &qkv[self.range(b, s, h)];
        let dot = |t: usize| dot(query, &qkv[self.range(b, t, self.key(h))]);
        let scores: Vec<f64> = (from..=s).map(|t| dot(t) / (self.e as f64).sqrt()).collect();
        let lse = log_sum_exp(&scores);
        (scores.iter().map(|x| (x - lse).exp()).collect(), lse)
    }
}

fn attention(dims: &Dims, qkv: &[f64], first: &[usize]) -> [Vec<f64>; 2] {
    let g = Heads::of(dims);
    let batch = dims.size("batch");
    let mut o = vec![0.0; batch * g.seq * g.heads * g.e];
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

fn attention_grad(dims: &Dims, dout: &[f64], qkv: &[f64], first: &[usize]) -> Vec<f64> {
    let g = Heads::of(dims);
    let scale = 1.0 / (g.e as f64).sqrt();
    let mut dqkv = vec![0.0; qkv.len()];
    for b in 0..dims.size("batch") {
        for h in 0..g.heads {
            for s in 0..g.seq {
                let from = first[b * g.seq + s];
                let (p, _) = g.weights(qkv, b, from, s, h);
                let dout = &dout[g.out_range(b, s, h)];
                let dp: Vec<f64> = (from..=s).map(|t| dot(dout, &qkv[g.range(b, t, g.value(h))])).collect();
                let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
                for t in from..=s {
                    let p = p[t - from];
                    let ds = p * (dp[t - from] - mean) * scale;
                    add_scaled(&mut dqkv[g.range(b, t, g.value(h))], p, dout);
                    add_scaled(&mut dqkv[g.range(b, s, h)], ds, &qkv[g.range(b, t, g.key(h))]);
                    add_scaled(&mut dqkv[g.range(b, t, g.key(h))], ds, &qkv[g.range(b, s, h)]);
                }
            }
        }
    }
    dqkv
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `to` += `by` · `x`.
fn add_scaled(to: &mut [f64], by: f64, x: &[f64]) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += by * x);
}

fn log_sum_exp(x: &[f64]) -> f64 {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    max + x.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
}

fn cross_entropy(dims: &Dims, logits: &[f64], targets: &[f64]) -> [Vec<f64>; 2] {
    let v = logits.len() / targets.len();
    let lse: Vec<f64> = logits.chunks(v).map(log_sum_exp).collect();
    let token = |row: usize| match is_counted(targets[row]) {
        true => lse[row] - logits[row * v + targets[row] as usize],
        false => 0.0,
    };
    let seq = dims.size("seq");
    let loss = (0..dims.size("batch")).map(|b| (b * seq..(b + 1) * seq).map(token).sum()).collect();
    [loss, lse]
}

fn cross_entropy_grad(logits: &[f64], targets: &[f64], weight: f64) -> Vec<f64> {
    let v = logits.len() / targets.len();
    let lse: Vec<f64> = logits.chunks(v).map(log_sum_exp).collect();
    let hit = |i: usize| if targets[i / v] as usize == i % v { 1.0 } else { 0.0 };
    let element = |(i, x): (usize, &f64)| match is_counted(targets[i / v]) {
        true => weight * ((x - lse[i / v]).exp() - hit(i)),
        false => 0.0,
    };
    logits.iter().enumerate().map(element).collect()
}

/// Whether a position's loss counts.
fn is_counted(target: f64) -> bool {
    target != f64::from(IGNORED_TARGET)
}
