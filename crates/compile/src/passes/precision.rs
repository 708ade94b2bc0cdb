//! Precision: stores parameters and activations in the compute type.
//!
//! Statistics (norms, softmax, losses), sums and the optimizer stay in f32 by the op table. The pass runs before autodiff, so
//! that the types of gradients follow from those of the forward pass.

use crate::Context;
use lockstep_ir::graph::{Source, State};
use lockstep_ir::{DType, Graph, TypeError};

/// Which types a run stores and sums in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// Type of parameters and activations: `f32`, `bf16` or `f16`.
    pub compute: DType,
    /// Type of gradient sums: `f32`, `bf16`, or `fixed64` for sums that do not depend on their order.
    pub gradients: DType,
}

impl Precision {
    /// Everything in f32.
    pub const FP32: Precision = Precision { compute: DType::F32, gradients: DType::F32 };
}

pub(super) fn precision(graph: &Graph, context: &Context) -> Result<Graph, TypeError> {
    let mut g = graph.clone();
    for value in &mut g.values {
        if matches!(value.source, Source::State(State::Parameter(_) | State::Cache)) {
            value.ty.dtype = context.precision.compute;
        }
    }
    for n in 0..g.nodes.len() {
        let types = g.nodes[n].op.infer(&g.input_types(&g.nodes[n]))?;
        for (output, ty) in g.nodes[n].outputs.clone().into_iter().zip(types) {
            if let Some(v) = output {
                g.values[v.0].ty = ty;
            }
        }
    }
    Ok(g)
}
