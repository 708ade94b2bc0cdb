//! Copies between the memory of a device and that of its host.

use super::row::{Spec, moment, row};
use super::sample::{Sample, embed, ffn, normal, sample};
use super::{Cost, Op};
use crate::DType;

/// A state of every type that is kept.
fn samples(op: Op) -> Vec<Sample> {
    let state = normal([ffn(), embed()]);
    let mut half = state.clone();
    half.0.dtype = DType::BF16;
    vec![sample(op, [state]), sample(op, [half])]
}

pub(super) static FETCH: Spec =
    row("fetch", &[moment("state")], &[moment("state")], |_| samples(Op::Fetch)).cost(|_, _, _| Cost::HostCopy);

pub(super) static OFFLOAD: Spec =
    row("offload", &[moment("state")], &[moment("state")], |_| samples(Op::Offload)).cost(|_, _, _| Cost::HostCopy);
