//! What updates keep in bf16: every number is one of the two neighbours of the exact one, and the random bits say which.

use lockstep_ir::op::Elem;
use lockstep_ir::{DType, Op, StepRounding, bf16, counter};

/// Share of numbers that may be rounded the other way: those that are as near to the border as sums in f32 are wrong.
const OTHER_WAY: f64 = 0.03;

/// What is wrong with an output of an update that rounds by random bits, if anything is.
pub(super) fn strays(
    op: &Op,
    output: usize,
    dtype: DType,
    inputs: &[Vec<f64>],
    exact: &[f64],
    found: &[f64],
) -> Option<String> {
    let changed = matches!(op.output(output).elem, Elem::Weight | Elem::Moment);
    let key = (0..inputs.len()).find(|i| op.input(*i, inputs.len()).name == "rounding")?;
    if dtype != DType::BF16 || !changed {
        return None;
    }
    let neighbours = exact.iter().zip(found).position(|(exact, found)| !is_neighbour(*exact, *found));
    if let Some(at) = neighbours {
        return Some(format!("element {at} of output {output} is no neighbour of {:e}", exact[at]));
    }
    // The first state that changes has given the bits their name.
    let site = counter::key(0, &format!("in{}", op.spec().in_place.first()?.0));
    let stream = StepRounding::from_array([inputs[key][0] as u32, inputs[key][1] as u32]).stream(site);
    let which = match op.output(output).name {
        "w" => 0,
        "m" => 1,
        _ => 2,
    };
    let rounded = |i: usize| {
        let bits = StepRounding::bits(stream, i as u32)[which];
        f64::from(bf16::to_f32(StepRounding::round(exact[i] as f32, bits)))
    };
    let other = (0..exact.len()).filter(|i| exact[*i].is_finite() && rounded(*i) != found[*i]).count();
    (other as f64 > (OTHER_WAY * exact.len() as f64).max(2.0))
        .then(|| format!("{other} of {} elements of output {output} are not rounded by their random bits", exact.len()))
}

/// Whether rounding up or down takes one number to the other, where the exact one is known as well as sums in f32 give it.
fn is_neighbour(exact: f64, found: f64) -> bool {
    if !exact.is_finite() || exact == 0.0 {
        return exact.is_nan() == found.is_nan();
    }
    let unit = 2f64.powi(exact.abs().log2().floor() as i32 - 7);
    (found - exact).abs() <= 1.01 * unit + 1e-6
}
