//! Score: where evaluation is asked for misses, its output head says of every target besides the loss whether greedy decoding misses it.
//! Training steps have none of it.
//!
//! Misses come from the logits of the loss. With tp, every part of the vocabulary counts its own misses, and a sum
//! tells. `eval` runs the same ops.

use crate::Context;
use lockstep_ir::graph::Node;
use lockstep_ir::{Graph, Op, TypeError};

/// Output of evaluation, where it is asked for: of every position 0 where greedy decoding gives its target, or the target does not
/// count, and a positive number where it does not.
pub const MISSES: &str = "misses";

pub(super) fn score(graph: &Graph, context: &Context) -> Result<Graph, TypeError> {
    let mut g = graph.clone();
    if !context.steps.misses {
        return Ok(g);
    }
    let head = |n: &Node| matches!(n.op, Op::LinearCrossEntropy { .. });
    let Some(at) = g.nodes.iter().position(head) else {
        // Every head of today is one of these.
        return Err(TypeError { op: "linear_score", reason: "the loss is not fused with the output head".into() });
    };
    let Node { op, inputs, outputs, phase, layer, tf32, .. } = g.nodes[at].clone();
    let Op::LinearCrossEntropy { score: false, rows } = op else { return Ok(g) };
    let behind = g.nodes.split_off(at);
    let misses = g.node(Op::LinearCrossEntropy { score: true, rows }, &inputs, MISSES, phase, layer)?[1];
    g.keep_tf32(tf32);
    g.values[misses.0].name = MISSES.to_owned();
    if let Some(node) = g.nodes.last_mut() {
        node.outputs[0] = outputs[0];
    }
    g.nodes.extend(behind.into_iter().skip(1));
    g.outputs.push(misses);
    Ok(g)
}

#[cfg(test)]
mod tests {
    use crate::Context;
    use crate::passes::tests::{lines, small_model_of};
    use crate::passes::{EVALUATION_PASSES, FORWARD_PASSES};
    use lockstep_ir::{Axes, Layout};

    /// What evaluation of the small model does with its head.
    fn head(layout: &str, misses: bool) -> String {
        let layout: Layout = layout.parse().unwrap();
        let (g, mut context) = small_model_of(2 * layout.mesh.size(Axes::SEQUENCES), 4);
        context = Context { layout, ..context };
        context.steps.misses = misses;
        let run = |g, pass: &crate::Pass| (pass.run)(&g, &context).unwrap();
        let g = FORWARD_PASSES.iter().fold(g, run).without_dead_code();
        let g = EVALUATION_PASSES.iter().fold(g, run);
        lines(&g, &["misses", "loss", "statistics", "return"], true)
    }

    #[test]
    fn misses_come_with_the_loss_where_they_are_asked_for() {
        assert_eq!(
            head("dp=2,cp=2", true),
            "\
F loss.partial: f64[batch:4] @(dp: split 0, cp: partial), misses: f32[batch:4, seq:4, scalar:1] @(dp: split 0, cp: split 1) = linear_score(y, table, targets) { rows: 8 }
F loss: f64[batch:4] @(dp: split 0) = all_reduce(loss.partial) { over: cp }
return    loss, misses
"
        );
        let before = head("dp=2,cp=2", false);
        assert!(!before.contains("misses") && before.contains("linear_cross_entropy"), "{before}");
    }

    #[test]
    fn parts_of_the_vocabulary_each_count_their_own() {
        assert_eq!(
            head("tp=2", true),
            "\
F logits.0: f32[seq:8, vocab:8] @(tp: split 1), logits.0.statistics: f32[parts:2, seq:8, scalar:3] @(tp: split 0) = vocab_logits(y, table, targets) { rows: Rows { first: 0, count: 8, ranks: 1 }, parts: 2 }
F logits.0.statistics.gathered: f32[parts:2, seq:8, scalar:3] = all_gather(logits.0.statistics) { over: tp, dim: Some(0) }
F misses.0: f32[seq:8, scalar:1] @(tp: partial) = vocab_misses(logits.0, logits.0.statistics.gathered, targets) { rows: Rows { first: 0, count: 8, ranks: 1 } }
F loss: f64[batch:2] = vocab_loss(logits.0.statistics.gathered, targets)
F misses.partial: f32[batch:2, seq:4, scalar:1] @(tp: partial) = join_rows(misses.0, targets)
F misses: f32[batch:2, seq:4, scalar:1] = all_reduce(misses.partial) { over: tp }
return    loss, misses
"
        );
    }
}
