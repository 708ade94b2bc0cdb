//! Autodiff: appends the backward pass, derived from one rule per op (`gradients`).
//!
//! Gradients are those of the weighted *sum* of token losses; the optimizer divides by the counted targets of the global batch,
//! so no micro-batch needs to know of the others. Nodes that the layer below waits for are tagged B, weight gradients W;
//! each W directly follows the B that feeds it. Every use of a parameter gets an accumulator of its own (those of a
//! tied table are added once, by the optimizer pass), named `grad.<parameter>`, `grad.<parameter>.2` and so on.
//!
//! In f16, and where gradients are summed in fixed point, they start with the step's loss scale instead of 1; the optimizer
//! takes it out again.

use super::optimizer;
use crate::gradients::Gradients;
use crate::{Context, Precision};
use lockstep_ir::graph::State;
use lockstep_ir::{DType, Graph, Op, StepScalars, TypeError, ValueId};

/// Runs the pass.
pub fn autodiff(graph: &Graph, context: &Context) -> Result<Graph, TypeError> {
    let mut g = graph.clone();
    let Precision { compute, gradients, .. } = context.precision;
    let scalars = match compute == DType::F16 || gradients == DType::Fixed64 {
        true => Some(scale(&mut g)?),
        false => None,
    };
    weigh(&mut g);
    let forward = g.nodes.clone();
    let mut all = Gradients::new(&g, gradients, scalars);
    for node in forward.iter().rev() {
        all.node(&mut g, node)?;
    }
    Ok(g.without_dead_code())
}

/// Lets gradients start with the loss scale.
fn scale(g: &mut Graph) -> Result<ValueId, TypeError> {
    let scalars = optimizer::scalars(g);
    for node in &mut g.nodes {
        if let Op::LinearCrossEntropy { .. } = node.op {
            node.inputs.push(scalars);
        }
        if node.op == Op::CrossEntropy {
            let reason =
                "has no loss scale where it stands alone: f16 and fixed point need it fused with the output head"
                    .into();
            return Err(TypeError { op: node.op.name(), reason });
        }
    }
    Ok(scalars)
}

/// Lets the gradients of a fused head, which it makes itself, start with the weight of its loss: it reads scalars of its own
/// (`step_scalars.LOSS`), whose loss scale the host multiplies by the weight.
fn weigh(g: &mut Graph) {
    for n in 0..g.nodes.len() {
        let (op, loss) = (g.nodes[n].op, g.nodes[n].outputs.first().copied().flatten());
        let weighted = g.losses.iter().any(|other| Some(other.value) == loss && other.weight != 1.0);
        if let (Op::LinearCrossEntropy { .. }, Some(loss), true) = (op, loss, weighted) {
            let name = format!("{}.{}", StepScalars::NAME, g.get(loss).name);
            let scalars = g.state(name, StepScalars::ty(), State::Scalars);
            g.nodes[n].inputs.truncate(3);
            g.nodes[n].inputs.push(scalars);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::passes::tests::{check, small_model, used_thrice};

    #[test]
    fn each_weight_gradient_stands_behind_what_feeds_it_and_tied_uses_sum_apart() {
        let (before, context) = small_model();
        let fused = crate::fuse(&before, &context).unwrap();
        let after = super::autodiff(&fused, &context).unwrap();
        let backward: String = after
            .to_string()
            .lines()
            .filter(|l| l.starts_with(['B', 'W']))
            .fold(String::new(), |text, line| text + line + "\n");
        assert_eq!(
            backward,
            "\
W dw.w2: f32[embed:2] += grad.w2 = rms_norm_grad_weight(loss.dx, mid, n2.rstd)
B d.x: f32[batch:1, seq:4, embed:2] = add_rms_norm_grad(loss.dx, mid, w2, n2.rstd, loss.dx)
W dw.w1: f32[embed:2] += grad.w1 = rms_norm_grad_weight(d.x, x, n1.rstd)
B d.x: f32[batch:1, seq:4, embed:2] = add_rms_norm_grad(d.x, x, w1, n1.rstd, d.x)
W dw.table: f32[vocab:8, embed:2] += grad.table.2 = embedding_grad(d.x, tokens) { vocab: 8 }
"
        );
        assert!(after.to_string().contains("loss.dw: f32[vocab:8, embed:2] += grad.table = "));
    }

    #[test]
    fn every_use_of_a_parameter_sums_apart_however_many_there_are() {
        let (graph, context) = used_thrice();
        let after = super::autodiff(&graph, &context).unwrap();
        let table = after.parameters().next().unwrap().0;
        let names: Vec<&str> = after.gradients_of(table).iter().map(|v| after.get(*v).name.as_str()).collect();
        assert_eq!(names, ["grad.table", "grad.table.2", "grad.table.3"]);
    }

    #[test]
    fn a_graph_without_a_loss_gets_no_backward_pass() {
        let (mut before, context) = small_model();
        before.nodes.pop();
        before.outputs.clear();
        before.losses.clear();
        let x = before.values.iter().position(|v| v.name == "logits").unwrap();
        before.outputs.push(lockstep_ir::ValueId(x));
        let after = super::autodiff(&before, &context).unwrap();
        assert_eq!(after.nodes.len(), before.nodes.len());
        check(&after, &before.without_dead_code().to_string());
    }
}
