//! The gradient of an embedding table.

use super::Rules;
use lockstep_ir::{Op, OpKind};

pub(super) const RULES: Rules = &[(OpKind::Embedding, |at| {
    let reads = [at.dy(0)?, at.input(0)];
    at.weight(Op::EmbeddingGrad { vocab: at.first_dim(1) }, &reads, 1)
})];
