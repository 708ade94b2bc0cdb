//! What updates keep in bf16: every number is one of the two neighbours of the exact one, and the random bits say which. And what they keep where
//! they are not applied.

use super::{CaseOutcome, Load, Way, decode, encode, execute};
use crate::ExecError;
use lockstep_ir::op::{Elem, Sample};
use lockstep_ir::{DType, DeviceProfile, Op, StepRounding, TensorType, bf16, counter};

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

/// An update whose factor on gradients is NaN is not applied: weights and moments stay as they are, and what is rounded from weights is written
/// anew. None of other ops.
pub(super) fn check_suppressed(
    profile: &DeviceProfile,
    load: Load,
    sample: &Sample,
    types: &[TensorType],
    inputs: &[Vec<f64>],
) -> Result<Option<CaseOutcome>, ExecError> {
    let op = &sample.op;
    let stats = (0..types.len()).find(|i| op.input(*i, types.len()).name == "stats");
    let rounds = op.spec().outputs.iter().any(|output| output.elem == Elem::Rounded);
    let Some(stats) = stats.filter(|_| rounds && sample.part.is_none()) else { return Ok(None) };
    let mut inputs = inputs.to_vec();
    inputs[stats][1] = f64::NAN;
    let found = execute(profile, load, sample, types, &inputs, Way::Apart)?;
    let held = |i: usize| decode(types[i].dtype, &encode(types[i].dtype, &inputs[i]));
    let inferred = op.infer(&types.iter().collect::<Vec<_>>()).map_err(|e| ExecError::Internal(e.to_string()))?;
    let wrong = |o: &usize| match (op.output(*o).elem, op.spec().in_place.iter().find(|(_, to)| to == o)) {
        (_, Some((input, _))) => found[*o] != held(*input),
        // Weights that are their own master weights have no copy.
        (Elem::Rounded, None) if types[0].dtype == DType::F32 => {
            let dtype = inferred[*o].dtype;
            found[*o] != decode(dtype, &encode(dtype, &held(0)))
        }
        _ => false,
    };
    let failure = (0..found.len()).find(wrong).map(|o| format!("output {o} is not what it was"));
    let types: Vec<String> = types.iter().map(ToString::to_string).collect();
    let case = format!("{}({}) that is not applied", op.name(), types.join(", "));
    Ok(Some(CaseOutcome { case, error: 0.0, limit: 0.0, failure }))
}
