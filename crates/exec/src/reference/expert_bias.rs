//! Biases of experts.

use super::at::{At, Definition, Definitions};
use super::dispatch::of_rows;
use crate::by_kind;
use std::borrow::Cow;

/// What these ops are.
pub fn definitions() -> Definitions {
    by_kind! { at: &At => Definition;
        GroupedBias { rows } => {
            let (n, experts) = (at.size("outputs"), experts(at, 2, rows));
            let of = |(x, expert): (&[f64], &f64)| match expert.is_nan() {
                true => x.to_vec(),
                false => x.iter().zip(&at.x[1][*expert as usize * n..]).map(|(x, bias)| x + bias).collect(),
            };
            vec![at.x[0].chunks(n).zip(experts.iter()).flat_map(of).collect()]
        },
        GroupedBiasGrad { rows, experts: count } => {
            let (n, experts) = (at.size("outputs"), experts(at, 1, rows));
            let mut sums = vec![0.0; count * n];
            for (dy, expert) in at.x[0].chunks(n).zip(experts.iter()).filter(|(_, expert)| !expert.is_nan()) {
                sums[*expert as usize * n..][..n].iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy);
            }
            vec![sums]
        },
    }
}

/// The expert of every row, which an input says; NaN where there is none.
fn experts<'a>(at: &At<'a>, input: usize, rows: bool) -> Cow<'a, [f64]> {
    if rows { Cow::Owned(of_rows(&at.dims, at.x[input])) } else { Cow::Borrowed(at.x[input]) }
}
