//! Copies between the memory of a device and that of its host.

use super::row::{Operand, Spec, any, row};
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

const X: &[Operand] = &[any("x")];

/// A copy is sharded as what it copies.
const fn copy(name: &'static str, samples: super::row::Samples) -> Spec {
    row(name, X, X, samples).cost(|_, _, _| Cost::HostCopy).reshards(|_, before| Some(before)).keeps_partial()
}

pub(super) static FETCH: Spec = copy("fetch", |_| samples(Op::Fetch));

pub(super) static OFFLOAD: Spec = copy("offload", |_| samples(Op::Offload));
