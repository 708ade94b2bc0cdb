//! Update rules of optimizers.

use super::at::{At, Definition, Definitions, matmul, scalars};
use crate::by_kind;
use lockstep_ir::TensorType;
use lockstep_ir::op::newton_schulz::{COEFFICIENTS, EPS, ITERATIONS, scale};

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        AdamW { beta1, beta2, eps, decay, lr_scale } => {
            let (x, s) = (at.x, scalars(at.x[4]));
            let [beta1, beta2, eps, decay] = [beta1, beta2, eps, decay].map(f64::from);
            let [lr, bias1, bias2] = [s.lr * lr_scale, s.bias1, s.bias2].map(f64::from);
            let g = each(x, |i| x[1][i] * x[5][1]);
            let m = each(x, |i| beta1 * x[2][i] + (1.0 - beta1) * g[i]);
            let v = each(x, |i| beta2 * x[3][i] + (1.0 - beta2) * g[i] * g[i]);
            let step = |i: usize| m[i] / bias1 / ((v[i] / bias2).sqrt() + eps);
            vec![each(x, |i| x[0][i] * (1.0 - lr * decay) - lr * step(i)), m, v]
        },
        Lion { beta1, beta2, decay, lr_scale } => lion(at.x, [beta1, beta2, decay], lr_scale).into(),
        Sgd { momentum, decay, lr_scale } => sgd(at.x, [momentum, decay], lr_scale).into(),
        Momentum { momentum: beta } => momentum(at.x, f64::from(beta)).into(),
        Orthogonalise => vec![orthogonalise(at.types[0], at.x[0])],
        Descend { decay, lr_scale } => vec![descend(at.x, f64::from(decay), lr_scale)],
    }
}

/// One number for every element of the first operand.
fn each(x: &[&[f64]], f: impl Fn(usize) -> f64) -> Vec<f64> {
    (0..x[0].len()).map(f).collect()
}

/// New weights and moment, from weights, gradient, moment, scalars and statistics.
fn lion(x: &[&[f64]], constants: [f32; 3], lr_scale: f32) -> [Vec<f64>; 2] {
    let [beta1, beta2, decay] = constants.map(f64::from);
    let (lr, factor) = (f64::from(scalars(x[3]).lr * lr_scale), x[4][1]);
    let mixed = |i: usize| beta1 * x[2][i] + (1.0 - beta1) * x[1][i] * factor;
    let sign = |x: f64| if x == 0.0 { 0.0 } else { x.signum() };
    let w = each(x, |i| x[0][i] * (1.0 - lr * decay) - lr * sign(mixed(i)));
    [w, each(x, |i| beta2 * x[2][i] + (1.0 - beta2) * x[1][i] * factor)]
}

/// As `lion`.
fn sgd(x: &[&[f64]], constants: [f32; 2], lr_scale: f32) -> [Vec<f64>; 2] {
    let [momentum, decay] = constants.map(f64::from);
    let (lr, factor) = (f64::from(scalars(x[3]).lr * lr_scale), x[4][1]);
    let m = each(x, |i| momentum * x[2][i] + x[1][i] * factor);
    [each(x, |i| x[0][i] * (1.0 - lr * decay) - lr * m[i]), m]
}

/// Momentum and update, from gradient, momentum and statistics.
fn momentum(x: &[&[f64]], beta: f64) -> [Vec<f64>; 2] {
    let factor = x[2][1];
    let m = each(x, |i| beta * x[1][i] + (1.0 - beta) * x[0][i] * factor);
    let update = each(x, |i| beta * m[i] + (1.0 - beta) * x[0][i] * factor);
    [m, update]
}

/// New weights, from weights, update and scalars.
fn descend(x: &[&[f64]], decay: f64, lr_scale: f32) -> Vec<f64> {
    let lr = f64::from(scalars(x[2]).lr * lr_scale);
    each(x, |i| x[0][i] - lr * (decay * x[0][i] + x[1][i]))
}

/// Every section of the rows on its own.
fn orthogonalise(ty: &TensorType, x: &[f64]) -> Vec<f64> {
    let columns = ty.dims[1].size();
    let mut rest = x;
    let section = |rows: usize| {
        let (matrix, after) = rest.split_at(rows * columns);
        rest = after;
        newton_schulz(matrix, rows, columns)
    };
    ty.dims[0].sections.iter().map(|s| s.size()).flat_map(section).collect()
}

fn newton_schulz(matrix: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    let [a, b, c] = COEFFICIENTS.map(f64::from);
    let norm = matrix.iter().map(|x| x * x).sum::<f64>().sqrt() + f64::from(EPS);
    let mut x: Vec<f64> = matrix.iter().map(|x| x / norm).collect();
    for _ in 0..ITERATIONS {
        let gram = matmul((rows, rows, columns), &x, false, &x, true);
        let square = matmul((rows, rows, rows), &gram, false, &gram, false);
        let polynomial: Vec<f64> = gram.iter().zip(&square).map(|(g, s)| b * g + c * s).collect();
        let next = matmul((rows, columns, rows), &polynomial, false, &x, false);
        x = x.iter().zip(next).map(|(x, next)| a * x + next).collect();
    }
    x.iter().map(|x| x * f64::from(scale(rows, columns))).collect()
}
