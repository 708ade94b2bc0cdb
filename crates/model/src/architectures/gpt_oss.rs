//! gpt-oss: the shared decoder with attention sinks, biases, and a mixture of experts with a clamped SwiGLU, whose tensors are of all experts.

use crate::decoder::build_named;
use crate::form::Form;
use crate::mixture::ExpertNames;
use lockstep_config::ModelConfig;
use lockstep_ir::{Graph, TypeError};

pub(crate) fn build(m: &ModelConfig, form: Form) -> Result<Graph, TypeError> {
    let together = Some(["gate_up_proj", "down_proj"]);
    build_named(m, form, &ExpertNames { router: "router", together, ..ExpertNames::APART })
}
