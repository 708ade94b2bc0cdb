//! What rounding to fp8 loses: counted for every tensor where it is rounded, over all micro-batches and ranks. What is rounded again in backward, or
//! recomputed, counts once.
//!
//! The step gives it out, and where units are those of earlier steps (delayed scaling) the histories of largest magnitudes go on by it
//! (`totals.rs`). Counts are whole numbers, so it does not matter who adds what. They are of some tiles of what a rank has, so layouts look at other
//! elements; histories know the largest magnitudes of all.

use crate::Context;
use lockstep_ir::graph::{Fp8Class, Node, Phase, Source, State, Tally, Value};
use lockstep_ir::{Graph, Op, TypeError, ValueId};
use std::collections::BTreeSet;

/// Which output of an op says what rounding lost, and whether it rounds a weight.
fn rounds(op: Op) -> Option<(usize, bool)> {
    match op {
        Op::Quantise { of, .. } => Some((of.unit() + 1, of.is_weight())),
        Op::QuantiseFine { weight, .. } => Some((4, weight)),
        _ => None,
    }
}

/// Counts what every tensor loses. What backward quantises once more has been counted in forward.
pub(super) fn watch(graph: &Graph, _: &Context) -> Result<Graph, TypeError> {
    let mut g = graph.clone();
    let before = |node: &&Node| node.phase == Phase::Forward && rounds(node.op).is_some();
    let known: BTreeSet<&[ValueId]> = graph.nodes.iter().filter(before).map(|node| &node.inputs[..]).collect();
    for (n, node) in graph.nodes.iter().enumerate() {
        let Some((output, weight)) = rounds(node.op) else { continue };
        let class = match (weight, node.phase) {
            (true, _) => Fp8Class::Weights,
            (false, Phase::Forward) => Fp8Class::Activations,
            (false, _) => Fp8Class::Gradients,
        };
        if node.phase != Phase::Forward && known.contains(&node.inputs[..]) {
            continue;
        }
        let ty = node.op.infer(&graph.input_types(node))?.swap_remove(output);
        let name = format!("{}.seen", graph.get(node.inputs[0]).name);
        let total = g.state(format!("{name}.{n}.total"), ty, State::Total(Tally::Fp8(class)));
        g.values.push(Value { name, source: Source::Node { into: Some(total) }, ..g.get(total).clone() });
        g.nodes[n].outputs[output] = Some(ValueId(g.values.len() - 1));
    }
    Ok(g)
}

#[cfg(test)]
mod tests {
    use crate::passes::fp8::tests::graph;
    use crate::passes::tests::lines;
    use crate::passes::{FP8, PRECISION, RECOMPUTE, autodiff, passes_after};
    use crate::settings::{Fp8, Fp8Scaling, Recompute};
    use lockstep_ir::Graph;

    /// Two matmuls after all passes, recomputed, on two ranks.
    fn trained(scaling: Fp8Scaling) -> Graph {
        let (g, mut context) = graph(64, "dp=2");
        context.precision.fp8 = Some(Fp8 { weights: Some(0), scaling, ..Fp8::default() });
        context.recompute = Recompute::Full;
        let stored = (FP8.run)(&(PRECISION.run)(&g, &context).unwrap(), &context).unwrap();
        let watched = super::watch(&autodiff(&stored, &context).unwrap(), &context).unwrap();
        let recomputed = (RECOMPUTE.run)(&watched, &context).unwrap();
        passes_after(&RECOMPUTE).fold(recomputed, |g, pass| (pass.run)(&g, &context).unwrap())
    }

    #[test]
    fn tensors_count_what_they_lose_once_and_histories_go_on_by_it() {
        let (current, delayed) = (trained(Fp8Scaling::Current), trained(Fp8Scaling::Delayed));
        // x, both weights, and the gradient of each matmul; x and weights once more in backward.
        let counts = |g: &Graph| lines(g, &["+= "], true).matches(".seen: f64").count();
        assert_eq!([counts(&current), counts(&delayed)], [5; 2]);
        assert!(lines(&current, &["quantise"], true).lines().count() > 5);
        assert_eq!(lines(&current, &["remember", "history"], true), "");
        assert_eq!(lines(&delayed, &[" amax("], true), "");
        assert_eq!(
            lines(&delayed, &["remember", "fp8_seen", "history  ", "update    history"], true),
            "\
history   history.x.up: f32[scalar:16]
history   history.dy.other: f32[scalar:16]
history   history.dy.up: f32[scalar:16]
U fp8_seen.here: f64[scalar:5, scalar:128] @(dp: partial) = stack_totals(x.seen.1.total, up.seen.3.total, other.seen.6.total, d.sum.seen.11.total, d.sum.seen.15.total)
U fp8_seen: f64[scalar:5, scalar:128] = all_reduce(fp8_seen.here) { over: dp }
U history.x.up.next: f32[scalar:16] = remember(history.x.up, fp8_seen, gradient_stats) { row: 0 }
U history.dy.other.next: f32[scalar:16] = remember(history.dy.other, fp8_seen, gradient_stats) { row: 3 }
U history.dy.up.next: f32[scalar:16] = remember(history.dy.up, fp8_seen, gradient_stats) { row: 4 }
update    history.x.up <- history.x.up.next
update    history.dy.other <- history.dy.other.next
update    history.dy.up <- history.dy.up.next
return    loss, gradient_stats, fp8_seen
"
        );
    }
}
