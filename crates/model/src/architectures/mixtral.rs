//! Mixtral: the shared decoder with a mixture of experts in place of its MLP.

use crate::decoder::build_named;
use crate::form::Form;
use crate::mixture::ExpertNames;
use lockstep_config::ModelConfig;
use lockstep_ir::{Graph, TypeError};

pub(crate) fn build(m: &ModelConfig, form: Form) -> Result<Graph, TypeError> {
    build_named(m, form, &ExpertNames { block: "block_sparse_moe", matrices: ["w1", "w3", "w2"], ..ExpertNames::APART })
}
