//! Precision: stores parameters and activations in the compute type.
//!
//! Statistics (norms, softmax, losses), sums and the optimizer stay in f32 by the op table. The pass runs before autodiff, so
//! that the types of gradients follow from those of the forward pass.

use crate::Context;
use lockstep_ir::graph::{Source, State};
use lockstep_ir::{DType, Graph, Op, TypeError, ValueId};

pub(super) fn precision(graph: &Graph, context: &Context) -> Result<Graph, TypeError> {
    let mut g = graph.clone();
    for value in &mut g.values {
        let rounded = match &value.source {
            Source::State(State::Parameter(parameter)) => !parameter.exact,
            Source::State(State::Cache) => value.ty.dtype.is_float(),
            Source::State(_) | Source::Input | Source::Node { .. } | Source::Sum => false,
        };
        if rounded {
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
    without_idle_casts(&mut g);
    if context.precision.tf32 {
        permit_tf32(&mut g);
    }
    Ok(g)
}

/// Linear layers and the output head may round to TF32, but for those with weights that stay as they are (routers). The matmuls of their gradients follow.
fn permit_tf32(g: &mut Graph) {
    let exact: Vec<bool> = g
        .values
        .iter()
        .map(|v| matches!(&v.source, Source::State(State::Parameter(parameter)) if parameter.exact))
        .collect();
    let in_f32 = |v: &ValueId| g.values[v.0].ty.dtype == DType::F32 && !exact[v.0];
    for node in &mut g.nodes {
        let multiplies = node.op.spec().multiplies;
        let linear = matches!(node.op, Op::Linear | Op::LinearCrossEntropy { .. });
        node.tf32 = linear && multiplies.iter().all(|input| in_f32(&node.inputs[*input]));
    }
}

/// Takes out casts to the type that a value has already.
fn without_idle_casts(g: &mut Graph) {
    let mut stands_for: Vec<ValueId> = (0..g.values.len()).map(ValueId).collect();
    let nodes = std::mem::take(&mut g.nodes);
    for mut node in nodes {
        node.inputs.iter_mut().for_each(|v| *v = stands_for[v.0]);
        if let (Op::Cast { to }, [Some(output)]) = (node.op, &node.outputs[..])
            && g.ty(node.inputs[0]).dtype == to
            && !g.outputs.contains(output)
        {
            stands_for[output.0] = node.inputs[0];
            continue;
        }
        g.nodes.push(node);
    }
}

#[cfg(test)]
mod tests {
    use crate::Precision;
    use crate::passes::autodiff;
    use crate::passes::tests::{check, lines, small_model};
    use lockstep_ir::graph::{Source, State};
    use lockstep_ir::{DType, Graph};

    #[test]
    fn parameters_and_activations_are_rounded_and_statistics_are_not() {
        let (before, mut context) = small_model();
        context.precision = Precision::of(DType::BF16, DType::F32);
        let after = super::precision(&before, &context).unwrap();
        check(
            &after,
            "\
input     tokens: u32[batch:1, seq:4]
input     targets: u32[batch:1, seq:4]
parameter table: bf16[vocab:8, embed:2]
parameter w1: bf16[embed:2]
parameter w2: bf16[embed:2]
F x: bf16[batch:1, seq:4, embed:2] = embedding(tokens, table)
F n1: bf16[batch:1, seq:4, embed:2], n1.rstd: f32[batch:1, seq:4] = rms_norm(x, w1) { eps: 1e-5 }
F mid: bf16[batch:1, seq:4, embed:2] = add(x, n1)
F n2: bf16[batch:1, seq:4, embed:2], n2.rstd: f32[batch:1, seq:4] = rms_norm(mid, w2) { eps: 1e-5 }
F y: bf16[batch:1, seq:4, embed:2] = add(mid, n2)
F logits: bf16[batch:1, seq:4, vocab:8] = linear(y, table)
F loss: f64[batch:1], loss.lse: f32[batch:1, seq:4] = cross_entropy(logits, targets)
return    loss
",
        );
    }

    #[test]
    fn with_tf32_linear_layers_and_their_gradients_may_round_and_those_of_exact_weights_may_not() {
        let (mut before, mut context) = small_model();
        context.precision = Precision { tf32: true, ..Precision::FP32 };
        let matmuls = |g: &Graph| {
            let derived = autodiff(&super::precision(g, &context).unwrap(), &context).unwrap();
            lines(&derived, &[" = linear"], false).lines().map(|line| line.ends_with(" in tf32")).collect::<Vec<_>>()
        };
        assert_eq!(matmuls(&before), [true; 3]);
        for value in &mut before.values {
            if let Source::State(State::Parameter(parameter)) = &mut value.source {
                parameter.exact = true;
            }
        }
        assert_eq!(matmuls(&before), [false; 3]);
    }

    #[test]
    fn in_fp32_nothing_changes() {
        let (before, context) = small_model();
        assert_eq!(super::precision(&before, &context).unwrap(), before);
    }
}
