//! Activation functions, sums, casts and dropout.

use super::at::{At, Definition, Definitions, add, sigmoid};
use crate::by_kind;
use lockstep_ir::counter;

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        SwiGlu => vec![gate_up(at.x[0], at.size("ffn"), |g, u| g * sigmoid(g) * u)],
        SwiGluGrad => {
            let (x, f) = (at.x, at.size("ffn"));
            let gate = gate_up(x[1], f, |g, u| u * sigmoid(g) * (1.0 + g * (1.0 - sigmoid(g))));
            let up = gate_up(x[1], f, |g, _| g * sigmoid(g));
            let pick = |i: usize| match (i / (2 * f), i % (2 * f)) {
                (row, c) if c < f => x[0][row * f + c] * gate[row * f + c],
                (row, c) => x[0][row * f + c - f] * up[row * f + c - f],
            };
            vec![(0..x[1].len()).map(pick).collect()]
        },
        Gelu => vec![at.x[0].iter().map(|x| x * sigmoid(2.0 * gelu_tanh(*x).0)).collect()],
        GeluGrad => {
            let slope = |x: f64| {
                let (u, du) = gelu_tanh(x);
                sigmoid(2.0 * u) + x * sigmoid(2.0 * u) * sigmoid(-2.0 * u) * 2.0 * du
            };
            vec![at.x[0].iter().zip(at.x[1]).map(|(dy, x)| dy * slope(*x)).collect()]
        },
        Dropout { rate, site, seq } => {
            let (x, d, below) = (at.x, at.size("features"), counter::threshold(rate));
            let element = |i: usize| {
                let (b, s) = (i / d / seq, i / d % seq);
                let key = x[1][2 * b] as u64 | (x[1][2 * b + 1] as u64) << 32;
                let drops = counter::row_bits(counter::row(key, site, s as u64), (i % d) as u32) < below;
                if drops { 0.0 } else { x[0][i] / (1.0 - f64::from(rate)) }
            };
            vec![(0..x[0].len()).map(element).collect()]
        },
        Add => vec![add(at.x[0], at.x[1])],
        // Rounding is for those who store numbers.
        Cast { .. } => vec![at.x[0].to_vec()],
    }
}

/// The argument of the hyperbolic tangent in gelu, and its derivative.
fn gelu_tanh(x: f64) -> (f64, f64) {
    let root = (2.0 / std::f64::consts::PI).sqrt();
    (root * (x + 0.044715 * x * x * x), root * (1.0 + 3.0 * 0.044715 * x * x))
}

fn gate_up(x: &[f64], f: usize, y: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    x.chunks(2 * f).flat_map(|row| (0..f).map(|i| y(row[i], row[f + i])).collect::<Vec<_>>()).collect()
}
