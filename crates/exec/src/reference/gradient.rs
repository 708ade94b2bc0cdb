//! Sums of gradients, and their norm.

use super::at::{At, Definition, Definitions, add, scalars};
use crate::by_kind;
use lockstep_ir::fixed;
use lockstep_ir::squares::{LIMBS, Squares};

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        AddState => vec![add(at.x[0], at.x[1])],
        Accumulate => vec![at.x[0].to_vec()],
        SquareSum { sharers, tail } => {
            let (scalars, grads) = (scalars(at.x[at.x.len() - 1]), &at.x[..at.x.len() - 1]);
            let inverse = f64::from(scalars.inverse());
            let share = |i: usize| if i < tail { 1.0 } else { 1.0 / sharers as f64 };
            let squares =
                grads.iter().flat_map(|g| g.iter().enumerate().map(|(i, g)| (g * inverse).powi(2) * share(i)));
            vec![limbs(squares.sum())]
        },
        MergeSums => vec![at.x[1..].iter().fold(at.x[0].to_vec(), |sum, x| add(&sum, x))],
        LossSum => vec![limbs(at.x[0].iter().sum())],
        GradientNorm => {
            let (scalars, norm) = (scalars(at.x[1]), from_limbs(at.x[0]).sqrt());
            let loss = |losses: &[f64]| from_limbs(losses) * f64::from(scalars.inverse_count);
            let beyond = at.given(3).is_some_and(|limits| loss(at.x[2]) > limits[0] || norm > limits[1]);
            let factor = f64::from(scalars.inverse()) * (f64::from(scalars.clip) / norm).min(1.0);
            vec![vec![norm, if beyond { f64::NAN } else { factor }]]
        },
    }
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
