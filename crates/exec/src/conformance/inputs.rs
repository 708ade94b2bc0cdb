//! Numbers to fill the samples of ops with.

use super::evaluate;
use super::single::{decode, encode};
use crate::reference;
use lockstep_ir::op::{Draw, IGNORED_TARGET, NO_ROW};
use lockstep_ir::{Op, StepLimits, StepScalars, TensorType, counter};

/// What an op makes of other inputs.
struct Made {
    op: Op,
    reads: &'static [usize],
    outputs: Vec<Vec<f64>>,
}

/// The inputs of a call, as what the types can hold.
pub(super) fn draw(op: &Op, inputs: &[(TensorType, Draw)], seed: u64) -> Vec<Vec<f64>> {
    let mut drawn: Vec<Vec<f64>> = vec![Vec::new(); inputs.len()];
    // What is made from other inputs comes last.
    let made = |how: &Draw| matches!(how, Draw::Of(..) | Draw::Choices);
    let mut known: Vec<Made> = Vec::new();
    let order = inputs.iter().enumerate().filter(|(_, (_, how))| !made(how));
    for (i, (ty, how)) in order.chain(inputs.iter().enumerate().filter(|(_, (_, how))| made(how))) {
        let key = counter::key(seed, &format!("{}/{i}", op.name()));
        let normal = |j: usize| f64::from(counter::normal(key, j as u64));
        let count = ty.elements() * ty.dtype.numbers();
        let data = match how {
            Draw::Normal => (0..count).map(normal).collect(),
            Draw::Quarter => (0..count).map(|j| 0.25 * normal(j)).collect(),
            Draw::Scaled(by) => (0..count).map(|j| by * normal(j)).collect(),
            Draw::Growing => {
                let each = count / ty.dims[0].size();
                (0..count).map(|j| 32f64.powi((j / each) as i32) * normal(j)).collect()
            }
            Draw::Positive => (0..count).map(|j| f64::from((normal(j).abs() + 0.1) as f32)).collect(),
            Draw::Powers => (0..count).map(|j| 2f64.powi((counter::bits(key, j as u64) % 8) as i32 - 4)).collect(),
            Draw::Below(bound) => {
                (0..count).map(|j| (counter::bits(key, j as u64) % u64::from(*bound)) as f64).collect()
            }
            Draw::Targets(bound) => {
                let target =
                    |bits: u64| if bits >> 62 == 0 { u64::from(IGNORED_TARGET) } else { bits % u64::from(*bound) };
                (0..count).map(|j| target(counter::bits(key, j as u64)) as f64).collect()
            }
            Draw::Choices => choices(key, &drawn[..i], inputs[i - 1].0.dims[0].size()),
            // Seven steps on from one to the next: the bounds are no multiples of seven.
            Draw::Places(bound) => {
                let first = counter::bits(key, 0) % u64::from(*bound);
                let place = |j: u64| (first + 7 * j) % u64::from(*bound);
                let of = |j: u64| if j % 8 == 5 { u64::from(NO_ROW) } else { place(j) };
                (0..count as u64).map(|j| of(j) as f64).collect()
            }
            Draw::Distinct(bound) => {
                let first = counter::bits(key, 0) % u64::from(*bound);
                (0..count as u64).map(|j| ((first + j) % u64::from(*bound)) as f64).collect()
            }
            Draw::Between(low, high) => {
                let range = u64::from(high - low + 1);
                (0..count).map(|j| (counter::bits(key, j as u64) % range + u64::from(*low)) as f64).collect()
            }
            Draw::Unseen => {
                let unseen = |j: usize| counter::bits(key, j as u64).is_multiple_of(3);
                (0..count).map(|j| if unseen(j) { f64::NEG_INFINITY } else { normal(j) }).collect()
            }
            Draw::Starts { stray } => starts(ty, key, *stray),
            Draw::Scalars => {
                let s = StepScalars {
                    lr: 0.01,
                    inverse_count: 0.125,
                    clip: 0.5,
                    bias1: 0.19,
                    bias2: 0.0975,
                    loss_scale: 4.0,
                };
                s.to_array().map(f64::from).to_vec()
            }
            Draw::Limits => StepLimits { loss: 4.0, grad_norm: 5.0 }.to_array().map(f64::from).to_vec(),
            Draw::Stats => vec![2.0, 0.03125],
            Draw::Squares(norm) => reference::limbs(norm * norm),
            Draw::Of(source, output, from) => {
                let known = match known.iter().position(|made| (&made.op, &made.reads) == (source, from)) {
                    Some(at) => &known[at],
                    None => {
                        let types = from.iter().map(|&f| inputs[f].0.clone()).collect::<Vec<_>>();
                        let feeds = from.iter().map(|&f| drawn[f].clone()).collect::<Vec<_>>();
                        let outputs = evaluate(*source, &types, &feeds);
                        known.push(Made { op: *source, reads: from, outputs });
                        &known[known.len() - 1]
                    }
                };
                known.outputs[*output].clone()
            }
        };
        let mut data: Vec<f64> = data;
        if ty.dtype.is_block() {
            // A block whose largest number is negative would be another when it is rounded again.
            for block in data.chunks_mut(ty.dtype.numbers()) {
                block[0] = block.iter().fold(0.0, |most, x| most.max(x.abs()));
            }
        }
        // What the device will hold, so that both sides start from the same numbers.
        drawn[i] = decode(ty.dtype, &encode(ty.dtype, &data));
    }
    drawn
}

/// Targets of logits that are `x · wᵀ`, by a token of `vocab`.
fn choices(key: u64, operands: &[Vec<f64>], vocab: usize) -> Vec<f64> {
    let [.., x, w] = operands else { return Vec::new() };
    let k = w.len() / vocab;
    let target = |(row, x): (usize, &[f64])| {
        let logit = |w: &[f64]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>();
        let logits: Vec<f64> = w.chunks(k).map(logit).collect();
        let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let bits = counter::bits(key, row as u64);
        let largest = match bits >> 62 {
            0 => return f64::from(IGNORED_TARGET),
            1 => logits.iter().position(|logit| *logit == most),
            2 => logits.iter().rposition(|logit| *logit == most),
            _ => None,
        };
        largest.unwrap_or(bits as usize % vocab) as f64
    };
    x.chunks(k).enumerate().map(target).collect()
}

/// Documents of one position, of some, and one over the border between tiles of 128 positions.
fn starts(ty: &TensorType, key: u64, stray: bool) -> Vec<f64> {
    let seq = ty.dims[1].size();
    let mut start = 0;
    let at = |row: usize| {
        let (position, bits) = (row % seq, counter::bits(key, row as u64));
        let long = (100..190).contains(&position);
        if position == 0 || position + 1 == seq || (!long && bits.is_multiple_of(20)) || position == 18 {
            start = position;
        }
        if bits % 50 == 7 && stray { f64::from(u32::MAX) } else { start as f64 }
    };
    (0..ty.elements()).map(at).collect()
}
