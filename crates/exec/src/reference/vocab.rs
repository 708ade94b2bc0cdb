//! The output head over parts of the vocabulary.

use super::at::{log_sum_exp, matmul};
use lockstep_ir::op::{Dims, IGNORED_TARGET, Rows};

/// Numbers of a position and part.
const STATISTICS: usize = 3;

pub(super) fn logits(dims: &Dims, x: &[f64], w: &[f64], targets: &[f64], rows: Rows, parts: usize) -> [Vec<f64>; 2] {
    let (k, v) = (dims.size("inputs"), dims.size("vocab"));
    let chunk = &x[rows.first * k..(rows.first + rows.count) * k];
    let logits = matmul((rows.count, v, k), chunk, false, w, true);
    let size = v.div_ceil(parts);
    let mut statistics = vec![0.0; parts * rows.count * STATISTICS];
    for a in 0..parts {
        let (from, to) = ((a * size).min(v), ((a + 1) * size).min(v));
        for row in 0..rows.count {
            let x = &logits[row * v + from..row * v + to];
            let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum = x.iter().map(|x| (x - max).exp()).sum();
            let target = (targets[rows.first + row] as usize).checked_sub(from).filter(|i| *i < to - from);
            let numbers = [max, sum, target.map_or(f64::NEG_INFINITY, |i| x[i])];
            statistics[(a * rows.count + row) * STATISTICS..][..STATISTICS].copy_from_slice(&numbers);
        }
    }
    [logits, statistics]
}

/// The log-sum-exp of a position, and its target's logit.
fn combine(statistics: &[f64], parts: usize, row: usize) -> (f64, f64) {
    let rows = statistics.len() / parts / STATISTICS;
    let part = |a: usize| &statistics[(a * rows + row) * STATISTICS..][..STATISTICS];
    let lse: Vec<f64> = (0..parts).map(|a| part(a)[0] + part(a)[1].ln()).collect();
    (log_sum_exp(&lse), (0..parts).map(|a| part(a)[2]).fold(f64::NEG_INFINITY, f64::max))
}

pub(super) fn loss(dims: &Dims, chunks: &[&[f64]], targets: &[f64]) -> Vec<f64> {
    let (parts, seq) = (dims.size("parts"), dims.size("seq"));
    let rows = |chunk: &[f64]| chunk.len() / parts / STATISTICS;
    let each = chunks.iter().flat_map(|c| (0..rows(c)).map(|row| combine(c, parts, row)));
    let counted = |((lse, logit), target): ((f64, f64), &f64)| if is_counted(*target) { lse - logit } else { 0.0 };
    let losses: Vec<f64> = each.zip(targets).map(counted).collect();
    losses.chunks(seq).map(|sequence| sequence.iter().sum()).collect()
}

/// Whether one of the logits, whose tokens are those from `first` on, is taken before the target's.
pub(super) fn is_beaten(logits: &[f64], first: usize, hit: f64, target: usize) -> bool {
    logits.iter().enumerate().any(|(i, logit)| *logit > hit || (*logit == hit && first + i < target))
}

pub(super) fn misses(dims: &Dims, logits: &[f64], statistics: &[f64], targets: &[f64], rows: Rows) -> Vec<f64> {
    let (v, parts) = (dims.size("vocab"), dims.size("parts"));
    let size = v.div_ceil(parts);
    let beaten = |(row, logits): (usize, &[f64])| {
        let (target, (_, hit)) = (targets[rows.first + row], combine(statistics, parts, row));
        let part = |(a, part): &(usize, &[f64])| is_beaten(part, a * size, hit, target as usize);
        if is_counted(target) { logits.chunks(size).enumerate().filter(part).count() as f64 } else { 0.0 }
    };
    logits.chunks(v).enumerate().map(beaten).collect()
}

/// From logits, statistics, x, w and targets.
pub(super) fn grad(dims: &Dims, x: &[&[f64]], rows: Rows, seed: f64) -> [Vec<f64>; 2] {
    let (k, v, parts) = (dims.size("inputs"), dims.size("vocab"), dims.size("parts"));
    let chunk = &x[2][rows.first * k..(rows.first + rows.count) * k];
    let hit = |i: usize| if x[4][rows.first + i / v] as usize == i % v { 1.0 } else { 0.0 };
    let lse: Vec<f64> = (0..rows.count).map(|row| combine(x[1], parts, row).0).collect();
    let seed = |i: usize| if is_counted(x[4][rows.first + i / v]) { seed } else { 0.0 };
    let element = |(i, x): (usize, &f64)| seed(i) * ((x - lse[i / v]).exp() - hit(i));
    let dlogits: Vec<f64> = x[0].iter().enumerate().map(element).collect();
    let dx = matmul((rows.count, k, v), &dlogits, false, x[3], false);
    let dw = matmul((v, k, rows.count), &dlogits, true, chunk, false);
    [dx, dw]
}

/// Whether a position's loss counts.
pub(super) fn is_counted(target: f64) -> bool {
    target != f64::from(IGNORED_TARGET)
}
