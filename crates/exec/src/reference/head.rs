//! The output head and its loss: whole, in chunks, and in parts of the vocabulary.

use super::at::{At, Definition, Definitions, log_sum_exp, matmul};
use super::vocab::{self, is_counted};
use crate::by_kind;
use lockstep_ir::op::Dims;

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        CrossEntropy => cross_entropy(&at.dims, at.x[0], at.x[1]).into(),
        CrossEntropyGrad { weight } => vec![cross_entropy_grad(at.x[0], at.x[1], f64::from(weight))],
        LinearCrossEntropy { score, .. } => {
            let (x, rows, k, v) = (at.x, at.rows(), at.size("inputs"), at.size("vocab"));
            let logits = matmul((rows, v, k), x[0], false, x[1], true);
            let [loss, _] = cross_entropy(&at.dims, &logits, x[2]);
            if score {
                let missed = |(row, target): (&[f64], &f64)| {
                    let target = *target as usize;
                    f64::from(row.get(target).is_some_and(|hit| vocab::is_beaten(row, 0, *hit, target)))
                };
                return vec![loss, logits.chunks(v).zip(x[2]).map(missed).collect()];
            }
            let dlogits = cross_entropy_grad(&logits, x[2], at.seed(3));
            let dx = matmul((rows, k, v), &dlogits, false, x[1], false);
            let dw = matmul((v, k, rows), &dlogits, true, x[0], false);
            vec![loss, dx, dw]
        },
        VocabLogits { rows, parts } => vocab::logits(&at.dims, at.x[0], at.x[1], at.x[2], rows, parts).into(),
        VocabLoss => vec![vocab::loss(&at.dims, &at.x[..at.x.len() - 1], at.x[at.x.len() - 1])],
        VocabMisses { rows } => vec![vocab::misses(&at.dims, at.x[0], at.x[1], at.x[2], rows)],
        VocabGrad { rows } => vocab::grad(&at.dims, at.x, rows, at.seed(5)).into(),
        JoinRows => vec![at.x[..at.x.len() - 1].concat()],
    }
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
