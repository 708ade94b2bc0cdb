//! What a step has counted, over all its micro-batches and ranks.

use lockstep_ir::graph::{Node, Phase, Source, State, Tally};
use lockstep_ir::{Axes, Graph, Mesh, MeshAxis, Op, Placement, TypeError, ValueId};
use std::collections::BTreeMap;

/// Output of the training step of a model in fp8: what rounding lost, a row of [`Seen`](lockstep_ir::Seen) for every tensor.
pub const SEEN: &str = "fp8_seen";

/// Sums what ranks have counted, over one set of axes after the other.
pub(super) fn sum_over(g: &mut Graph, counted: ValueId, over: &[Axes]) -> Result<ValueId, TypeError> {
    let mut total = counted;
    for &over in over {
        g.values[counted.0].sharding = g.get(counted).sharding.with(over, Placement::Partial);
    }
    for &over in over.iter().filter(|over| !over.is_empty()) {
        total = g.relay(Op::AllReduce { over }, &[total], &over.to_string(), Phase::Update, None)?[0];
    }
    Ok(total)
}

/// Gives out what all tensors of the step have lost, and moves histories on.
pub(super) fn report(g: &mut Graph, mesh: &Mesh, stats: ValueId) -> Result<(), TypeError> {
    let counts = |v: &ValueId| matches!(g.get(*v).source, Source::State(State::Total(Tally::Fp8(_))));
    let totals: Vec<ValueId> = (0..g.values.len()).map(ValueId).filter(counts).collect();
    if totals.is_empty() {
        return Ok(());
    }
    let here = g.node(Op::StackTotals, &totals, SEEN, Phase::Update, None)?[0];
    // A total is 0 on stages that do not have its layer.
    let seen = sum_over(g, here, &[mesh.wide(Axes::STAGE), mesh.wide(MeshAxis::Pp.into())])?;
    if seen != here {
        g.values[here.0].name = format!("{SEEN}.here");
        g.values[seen.0].name = SEEN.to_owned();
    }
    g.outputs.push(seen);
    let rows: BTreeMap<ValueId, usize> = totals.into_iter().enumerate().map(|(row, total)| (total, row)).collect();
    let row_of = |v: &ValueId| match g.get(*v).source {
        Source::Node { into: Some(total) } => rows.get(&total).copied(),
        _ => None,
    };
    let is_history = |v: &&ValueId| matches!(g.get(**v).source, Source::State(State::History(_)));
    let moved =
        |node: &Node| Some((node.outputs.iter().flatten().find_map(row_of)?, *node.inputs.iter().find(is_history)?));
    for (row, history) in g.nodes.iter().filter_map(moved).collect::<Vec<_>>() {
        let name = format!("{}.next", g.get(history).name);
        let next = g.node(Op::Remember { row }, &[history, seen, stats], &name, Phase::Update, None)?[0];
        g.updates.push((history, next));
    }
    Ok(())
}
