//! fp8: what the formats say, in f64.

use super::at::{At, Definition, Definitions, matmul};
use crate::by_kind;
use lockstep_ir::{DType, F8};

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        Amax { parts, .. } => vec![vec![amax(at.x[0]); parts]],
        Quantise { to, .. } => quantise(at, to),
        Fp8Linear { .. } => {
            let y = matmul((at.rows(), at.size("outputs"), at.size("inputs")), at.x[0], false, at.x[2], true);
            vec![in_units(at, y)]
        },
        Fp8GradWeight => {
            let dw = matmul((at.size("outputs"), at.size("inputs"), at.rows()), at.x[0], false, at.x[2], true);
            vec![in_units(at, dw)]
        },
    }
}

fn amax(x: &[f64]) -> f64 {
    x.iter().fold(0.0, |most: f64, x| most.max(x.abs()))
}

/// A product of bytes in the units of its operands.
fn in_units(at: &At, product: Vec<f64>) -> Vec<f64> {
    product.into_iter().map(|y| y * at.x[1][0] * at.x[3][0]).collect()
}

fn quantise(at: &At, to: DType) -> Vec<Vec<f64>> {
    let Some(format) = F8::of(to) else { unreachable!("the op table refuses {to}") };
    let unit = f64::from(format.unit(amax(at.x[1]) as f32));
    let q: Vec<f64> = at.x[0].iter().map(|x| nearest(to, x / unit)).collect();
    let columns = at.types[0].dims.last().map_or(1, |d| d.size());
    let rows = q.len() / columns;
    let transposed = (0..q.len()).map(|i| q[i % rows * columns + i / rows]).collect();
    vec![q, transposed, vec![unit]]
}

/// The nearest number of a format: steps of equal size between two powers of two, and below the smallest normal one.
fn nearest(to: DType, x: f64) -> f64 {
    let (mantissa, smallest, largest) = if to == DType::E4M3 { (3, -6, 448.0) } else { (2, -14, 57344.0) };
    let exponent = if x == 0.0 { smallest } else { (x.abs().log2().floor() as i32).max(smallest) };
    let step = 2f64.powi(exponent - mantissa);
    ((x / step).round_ties_even() * step).clamp(-largest, largest)
}
