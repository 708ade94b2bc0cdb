//! Activation functions, sums, casts and dropout.

use super::at::{At, Definition, Definitions, add, sigmoid};
use crate::by_kind;
use lockstep_ir::{DType, bf16, counter, f16};

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        SwiGlu => vec![gate_up(at.x[0], at.size("ffn"), |g, u| g * sigmoid(g) * u)],
        SwiGluGrad => {
            let (x, f) = (at.x, at.size("ffn"));
            let gate = gate_up(x[1], f, |g, u| u * sigmoid(g) * (1.0 + g * (1.0 - sigmoid(g))));
            let up = gate_up(x[1], f, |g, _| g * sigmoid(g));
            vec![gate_up_grad(x[0], f, &gate, &up)]
        },
        GeGlu => vec![gate_up(at.x[0], at.size("ffn"), |g, u| gelu(g) * u)],
        GeGluGrad => {
            let (x, f) = (at.x, at.size("ffn"));
            let (gate, up) = (gate_up(x[1], f, |g, u| u * gelu_slope(g)), gate_up(x[1], f, |g, _| gelu(g)));
            vec![gate_up_grad(x[0], f, &gate, &up)]
        },
        ClampedSwiGlu { limit } => {
            let y = |g, u| {
                let (g, u) = clamped(limit, g, u);
                (u + 1.0) * g * sigmoid(QUICK * g)
            };
            vec![gate_up(at.x[0], at.size("ffn"), y)]
        },
        ClampedSwiGluGrad { limit } => {
            let (x, f) = (at.x, at.size("ffn"));
            let by_gate = |g: f64, u| {
                let (held, u) = clamped(limit, g, u);
                let s = sigmoid(QUICK * held);
                if held < g { 0.0 } else { (u + 1.0) * s * (1.0 + QUICK * g * (1.0 - s)) }
            };
            let by_up = |g, u: f64| {
                let (g, held) = clamped(limit, g, u);
                if held == u { g * sigmoid(QUICK * g) } else { 0.0 }
            };
            vec![gate_up_grad(x[0], f, &gate_up(x[1], f, by_gate), &gate_up(x[1], f, by_up))]
        },
        Gelu => vec![at.x[0].iter().map(|x| gelu(*x)).collect()],
        GeluGrad => vec![at.x[0].iter().zip(at.x[1]).map(|(dy, x)| dy * gelu_slope(*x)).collect()],
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
        Scale { factor, rounded } => {
            let factor = match at.types[0].dtype {
                DType::BF16 if rounded => bf16::to_f32(bf16::from_f32(factor)),
                DType::F16 if rounded => f16::to_f32(f16::from_f32(factor)),
                _ => factor,
            };
            vec![at.x[0].iter().map(|x| f64::from(factor) * x).collect()]
        },
        // Rounding is for those who store numbers.
        Cast { .. } => vec![at.x[0].to_vec()],
    }
}

/// What the gate is multiplied by in the sigmoid of a clamped SwiGLU.
const QUICK: f64 = 1.702;

/// Gate and up, as far as they go.
fn clamped(limit: f32, gate: f64, up: f64) -> (f64, f64) {
    let limit = f64::from(limit);
    (gate.min(limit), up.clamp(-limit, limit))
}

/// The argument of the hyperbolic tangent in gelu, and its derivative.
fn gelu_tanh(x: f64) -> (f64, f64) {
    let root = (2.0 / std::f64::consts::PI).sqrt();
    (root * (x + 0.044715 * x * x * x), root * (1.0 + 3.0 * 0.044715 * x * x))
}

fn gelu(x: f64) -> f64 {
    x * sigmoid(2.0 * gelu_tanh(x).0)
}

fn gelu_slope(x: f64) -> f64 {
    let (u, du) = gelu_tanh(x);
    sigmoid(2.0 * u) + x * sigmoid(2.0 * u) * sigmoid(-2.0 * u) * 2.0 * du
}

/// The gradient of packed gate·up from that of what they make, and the derivatives by each.
fn gate_up_grad(dy: &[f64], f: usize, gate: &[f64], up: &[f64]) -> Vec<f64> {
    let pick = |i: usize| match (i / (2 * f), i % (2 * f)) {
        (row, c) if c < f => dy[row * f + c] * gate[row * f + c],
        (row, c) => dy[row * f + c - f] * up[row * f + c - f],
    };
    (0..2 * dy.len()).map(pick).collect()
}

fn gate_up(x: &[f64], f: usize, y: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    x.chunks(2 * f).flat_map(|row| (0..f).map(|i| y(row[i], row[f + i])).collect::<Vec<_>>()).collect()
}
