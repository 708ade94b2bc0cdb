//! ZeRO (FSDP at level 3): reduces gradients over ranks, and shards gradients and parameters over the axes of [`Axes::ZERO`].
//!
//! A unit is what one layer does in one direction: a run of nodes of the same layer. Gradients of a unit travel in one
//! collective, as soon as the unit has made the last of them:
//!
//! - levels 0 and 1: once per step, in the last micro-batch: summed whole (0) or each rank's flat range (1);
//! - levels 2 and 3: for every micro-batch; a rank stores only its flat range.
//!
//! Ranges are summed over the axes that replicate state (HSDP) once per step.
//!
//! At level 3 parameters are stored as flat ranges too, and gathered for a unit while the unit before it computes: for forward and
//! again for backward, or once for both, which saves a gather and takes the memory of what stays.
//!
//! Before that, what tensor-parallel ranks hold as partial sums or share is reduced between them.

use crate::{Context, stage};
use lockstep_ir::graph::{Node, Phase, Source, State};
use lockstep_ir::{Axes, Graph, MeshAxis, Op, Placement, TypeError, ValueId};
use std::collections::BTreeMap;

pub(super) fn zero(graph: &Graph, context: &Context) -> Result<Graph, TypeError> {
    let mesh = context.layout.mesh;
    if mesh.size(Axes::STAGE) == 1 {
        return Ok(graph.clone());
    }
    let mut g = graph.clone();
    reduce_gradients(&mut g, context)?;
    if !sharded_from(context, 3).is_empty() {
        gather_parameters(&mut g, context)?;
    }
    Ok(g)
}

/// The axes over which ZeRO shards what it shards from `level` on; none below it.
pub(super) fn sharded_from(context: &Context, level: u8) -> Axes {
    if context.layout.zero >= level { context.layout.mesh.wide(Axes::ZERO) } else { Axes::NONE }
}

/// Those of them over which it shards a value: matrices of experts are split over ep already.
pub(super) fn shards_of(g: &Graph, context: &Context, v: ValueId, level: u8) -> Axes {
    let split = |axis: &MeshAxis| matches!(g.get(v).sharding.over(*axis), Placement::Split(_));
    sharded_from(context, level).iter().filter(|axis| !split(axis)).collect()
}

/// Sorts values by axes; those without any are left out.
pub(super) fn by_axes(values: impl IntoIterator<Item = (Axes, ValueId)>) -> BTreeMap<Axes, Vec<ValueId>> {
    let mut groups: BTreeMap<Axes, Vec<ValueId>> = BTreeMap::new();
    for (axes, v) in values.into_iter().filter(|(axes, _)| !axes.is_empty()) {
        groups.entry(axes).or_default().push(v);
    }
    groups
}

/// Ranges of nodes that belong to the same layer and direction.
fn units(nodes: &[Node]) -> Vec<std::ops::Range<usize>> {
    let key = |n: &Node| (n.layer, n.phase == Phase::Forward);
    let mut units: Vec<std::ops::Range<usize>> = Vec::new();
    for (n, node) in nodes.iter().enumerate() {
        match units.last_mut() {
            Some(unit) if key(&nodes[unit.start]) == key(node) => unit.end = n + 1,
            _ => units.push(n..n + 1),
        }
    }
    units
}

/// The gradient sums that each unit makes the last contribution to.
fn finished(g: &Graph, units: &[std::ops::Range<usize>]) -> Vec<Vec<ValueId>> {
    let mut last: BTreeMap<ValueId, usize> = BTreeMap::new();
    for (u, unit) in units.iter().enumerate() {
        for v in g.nodes[unit.clone()].iter().flat_map(|n| n.outputs.iter().flatten()) {
            if let Source::Node { into: Some(state) } = g.get(*v).source
                && matches!(g.get(state).source, Source::State(State::Gradient { .. }))
            {
                last.insert(state, u);
            }
        }
    }
    let mut result = vec![Vec::new(); units.len()];
    last.into_iter().for_each(|(state, u)| result[u].push(state));
    result
}

/// Whether a gradient sum is one of several of its parameter: those are added before they travel, or after.
fn is_tied(g: &Graph, gradient: ValueId) -> bool {
    match g.get(gradient).source {
        Source::State(State::Gradient { of }) => g.gradients_of(of).len() > 1,
        _ => false,
    }
}

fn reduce_gradients(g: &mut Graph, context: &Context) -> Result<(), TypeError> {
    let every_time = sharded_from(context, 2);
    let units = units(&g.nodes);
    let finished = finished(g, &units);
    let starts: Vec<Phase> = g.nodes.iter().map(|n| n.phase).collect();
    let nodes = std::mem::take(&mut g.nodes);
    let mut nodes = nodes.into_iter();
    // What forward units finish travels once backward begins, in the last micro-batch only.
    let mut late: Vec<ValueId> = Vec::new();
    // A unit's ranges are added to the gradient once the next unit has computed: they travel meanwhile.
    let mut travelling: Vec<Node> = Vec::new();
    // What is scattered for every micro-batch, by unit.
    let mut ranges: Vec<(Vec<ValueId>, Option<usize>)> = Vec::new();
    for (u, (unit, states)) in units.iter().zip(finished).enumerate() {
        let mine: Vec<Node> = nodes.by_ref().take(unit.len()).collect();
        let (layer, forward) = (mine[0].layer, mine[0].phase == Phase::Forward);
        if !every_time.is_empty() {
            // What no other rank has a range of is summed where it is.
            let groups = by_axes(states.iter().map(|s| (shards_of(g, context, *s, 2), *s)));
            let temporary = |g: &mut Graph, (over, states): (Axes, Vec<ValueId>)| {
                let temporary = states.iter().map(|s| gather_into_temporary(g, &mine, *s)).collect::<Vec<_>>();
                (over, states, temporary)
            };
            let groups: Vec<_> = groups.into_iter().map(|group| temporary(g, group)).collect();
            g.nodes.extend(mine);
            g.nodes.append(&mut travelling);
            let phase = if forward { Phase::Forward } else { Phase::WeightGrad };
            for (over, states, temporary) in groups {
                let whole = sum_over_tensor_parallel(g, context, &temporary, phase, layer)?;
                travelling.extend(scatter_into(g, over, &whole, &states, phase, layer)?);
            }
            let turns = units.get(u + 1).is_none_or(|next| (starts[next.start] == Phase::Forward) != forward);
            if turns {
                g.nodes.append(&mut travelling);
            }
            ranges.push((states, layer));
            continue;
        }
        if !forward {
            let due = std::mem::take(&mut late);
            reduce_once(g, context, &due, None)?;
        }
        g.nodes.extend(mine);
        let alone: Vec<ValueId> = states.into_iter().filter(|s| !is_tied(g, *s)).collect();
        match forward {
            true => late.extend(alone),
            false => reduce_once(g, context, &alone, layer)?,
        }
    }
    for (states, layer) in ranges {
        let alone: Vec<ValueId> = states.into_iter().filter(|s| !is_tied(g, *s)).collect();
        reduce_once(g, context, &alone, layer)?;
    }
    Ok(())
}

/// Sums over ranks at the end of a step, in place.
fn reduce_once(g: &mut Graph, context: &Context, states: &[ValueId], layer: Option<usize>) -> Result<(), TypeError> {
    reduce(g, context, states, Phase::Reduce, layer).map(|_| ())
}

/// Reduces partial gradient sums over all ranks, and returns the results.
pub(super) fn reduce(
    g: &mut Graph,
    context: &Context,
    states: &[ValueId],
    phase: Phase,
    layer: Option<usize>,
) -> Result<Vec<ValueId>, TypeError> {
    let mut now = sum_over_tensor_parallel(g, context, states, phase, layer)?;
    let moved = states.iter().zip(&now).filter(|(state, value)| state != value);
    g.updates.extend(moved.map(|(state, value)| (*state, *value)));
    let partial = |g: &Graph, v: ValueId| g.get(v).sharding.axes(Placement::Partial);
    let mut axes: Vec<Axes> = now.iter().map(|v| partial(g, *v)).filter(|axes| !axes.is_empty()).collect();
    axes.sort_unstable();
    axes.dedup();
    for axes in axes {
        let scattered = axes.within(sharded_from(context, 1));
        let summed = axes.without(scattered);
        let which: Vec<usize> = (0..now.len()).filter(|i| partial(g, now[*i]) == axes).collect();
        if !scattered.is_empty() {
            let op = Op::ReduceScatter { over: scattered, dim: None };
            relay_some(g, op, "scattered", &mut now, &which, phase, layer)?;
            g.parts.extend(which.iter().map(|i| (states[*i], now[*i])));
        }
        if !summed.is_empty() {
            relay_some(g, Op::AllReduce { over: summed }, "summed", &mut now, &which, phase, layer)?;
            let live = if scattered.is_empty() { &mut g.updates } else { &mut g.parts };
            live.extend(which.iter().map(|i| (states[*i], now[*i])));
        }
    }
    Ok(now)
}

/// Puts some of the values through one collective.
fn relay_some(
    g: &mut Graph,
    op: Op,
    suffix: &str,
    now: &mut [ValueId],
    which: &[usize],
    phase: Phase,
    layer: Option<usize>,
) -> Result<(), TypeError> {
    if which.is_empty() {
        return Ok(());
    }
    let inputs: Vec<ValueId> = which.iter().map(|i| now[*i]).collect();
    let outputs = g.relay(op, &inputs, suffix, phase, layer)?;
    which.iter().zip(outputs).for_each(|(i, v)| now[*i] = v);
    Ok(())
}

/// Reduces what tensor-parallel ranks hold as partial sums, and rows that neighbours share.
pub(super) fn sum_over_tensor_parallel(
    g: &mut Graph,
    context: &Context,
    values: &[ValueId],
    phase: Phase,
    layer: Option<usize>,
) -> Result<Vec<ValueId>, TypeError> {
    let over = Axes::from(MeshAxis::Tp);
    let mut now = values.to_vec();
    let partial = |v: &ValueId| g.get(*v).sharding.over(MeshAxis::Tp) == Placement::Partial;
    let which: Vec<usize> = (0..now.len()).filter(|i| partial(&now[*i])).collect();
    relay_some(g, Op::AllReduce { over }, "whole", &mut now, &which, phase, layer)?;
    // Ranges are cut from what has been summed.
    let shared = |g: &Graph, v: ValueId| {
        let sharding = g.get(v).sharding;
        let whole = sharding.axes(Placement::Flat).is_empty() && sharding.over(MeshAxis::Tp) == Placement::Split(0);
        if whole { sharers(g, context, v).0 } else { 1 }
    };
    let mut counts: Vec<usize> = now.iter().map(|v| shared(g, *v)).filter(|n| *n > 1).collect();
    counts.sort_unstable();
    counts.dedup();
    for sharers in counts {
        let which: Vec<usize> = (0..now.len()).filter(|i| shared(g, now[*i]) == sharers).collect();
        relay_some(g, Op::SumShared { over, sharers }, "whole", &mut now, &which, phase, layer)?;
    }
    Ok(now)
}

/// Tensor-parallel ranks that share a tensor's rows from some element on, and that element.
pub(super) fn sharers(g: &Graph, context: &Context, v: ValueId) -> (usize, usize) {
    let (mesh, value) = (context.layout.mesh, g.get(v));
    match value.sharding.over(MeshAxis::Tp) {
        Placement::Split(0) => {
            let counts = value.sharding.sharers(&value.ty, 0, &mesh);
            let before = Some(counts.iter().take_while(|n| **n == 1).count()).filter(|n| *n < counts.len());
            let Some(before) = before else { return (1, 0) };
            let local = value.sharding.uncut().local(&value.ty, &mesh);
            let rows: usize = local.dims[0].sections[..before].iter().map(|s| s.size()).sum();
            (counts[before], rows * local.elements() / local.dims[0].size().max(1))
        }
        Placement::Split(_) => (1, 0),
        Placement::Replicated | Placement::Partial | Placement::Flat => (mesh.size(MeshAxis::Tp), 0),
    }
}

/// Lets the nodes that sum into `state` sum into a temporary of their micro-batch instead.
fn gather_into_temporary(g: &mut Graph, nodes: &[Node], state: ValueId) -> ValueId {
    let mut temporary = g.get(state).clone();
    temporary.name = format!("{}.here", temporary.name);
    temporary.source = Source::Sum;
    g.values.push(temporary);
    let id = ValueId(g.values.len() - 1);
    for v in nodes.iter().flat_map(|n| n.outputs.iter().flatten()) {
        if g.get(*v).source == (Source::Node { into: Some(state) }) {
            g.values[v.0].source = Source::Node { into: Some(id) };
        }
    }
    id
}

/// Reduce-scatters sums into flat ranges, and returns the nodes that add them to the gradients.
fn scatter_into(
    g: &mut Graph,
    over: Axes,
    whole: &[ValueId],
    states: &[ValueId],
    phase: Phase,
    layer: Option<usize>,
) -> Result<Vec<Node>, TypeError> {
    if whole.is_empty() {
        return Ok(Vec::new());
    }
    let op = Op::ReduceScatter { over, dim: None };
    let ranges = g.relay(op, whole, "scattered", phase, layer)?;
    let before = g.nodes.len();
    for (range, &state) in ranges.into_iter().zip(states) {
        g.values[state.0].sharding = g.get(range).sharding;
        let name = format!("{}.sum", g.get(range).name);
        let sum = g.node(Op::Accumulate, &[range], &name, phase, layer)?[0];
        g.values[sum.0].sharding = g.get(range).sharding;
        g.values[sum.0].source = Source::Node { into: Some(state) };
    }
    Ok(g.nodes.split_off(before))
}

/// Shards parameters into flat ranges and gathers each unit's before the unit in front of it computes. Backward gathers again what
/// forward has gathered, unless it is to stay.
fn gather_parameters(g: &mut Graph, context: &Context) -> Result<(), TypeError> {
    // Biases that balance experts have no gradient, and stay whole.
    let parameter =
        |g: &Graph, v: &ValueId| matches!(&g.get(*v).source, Source::State(State::Parameter(p)) if p.balance.is_none());
    let units = units(&g.nodes);
    let places = stage::layers(g).1;
    // What forward has gathered, by parameter and the layer that it goes with.
    let mut kept: BTreeMap<(ValueId, usize), ValueId> = BTreeMap::new();
    let mut nodes: Vec<Vec<Node>> = Vec::new();
    let all = std::mem::take(&mut g.nodes);
    let mut all = all.into_iter();
    units.iter().for_each(|u| nodes.push(all.by_ref().take(u.len()).collect()));
    let parameters: Vec<ValueId> = g.parameters().map(|(id, _, _)| id).filter(|v| parameter(g, v)).collect();
    for v in parameters {
        g.values[v.0].sharding = g.get(v).sharding.with(shards_of(g, context, v, 3), Placement::Flat);
    }
    // Forward and backward are segments of their own, so a unit is not gathered ahead in one for the other.
    let mut gathers: Vec<Vec<Node>> = Vec::new();
    for (unit, range) in nodes.iter_mut().zip(&units) {
        let (place, forward) = (places[range.start], unit[0].phase == Phase::Forward);
        for v in unit.iter_mut().flat_map(|n| &mut n.inputs).filter(|_| !forward) {
            *v = kept.get(&(*v, place)).copied().unwrap_or(*v);
        }
        let mut needed: Vec<ValueId> =
            unit.iter().flat_map(|n| &n.inputs).copied().filter(|v| parameter(g, v)).collect();
        needed.sort_unstable();
        needed.dedup();
        let (layer, phase) = (unit[0].layer, if forward { Phase::Forward } else { Phase::InputGrad });
        for (over, needed) in by_axes(needed.into_iter().map(|v| (g.get(v).sharding.axes(Placement::Flat), v))) {
            let whole = g.relay(Op::AllGather { over, dim: None }, &needed, "whole", phase, layer)?;
            if !context.layout.reshard_after_forward {
                kept.extend(needed.iter().zip(&whole).map(|(w, whole)| ((*w, place), *whole)));
            }
            for v in unit.iter_mut().flat_map(|n| &mut n.inputs) {
                if let Some(at) = needed.iter().position(|p| p == v) {
                    *v = whole[at];
                }
            }
        }
        gathers.push(std::mem::take(&mut g.nodes));
    }
    let forward: Vec<bool> = nodes.iter().map(|unit| unit[0].phase == Phase::Forward).collect();
    for u in 0..nodes.len() {
        let first = u == 0 || forward[u - 1] != forward[u];
        if first {
            g.nodes.append(&mut gathers[u]);
        }
        if u + 1 < nodes.len() && forward[u + 1] == forward[u] {
            g.nodes.append(&mut gathers[u + 1]);
        }
        g.nodes.append(&mut nodes[u]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::passes::shard::shard;
    use crate::passes::tests::{derived, lines};
    use lockstep_ir::{Layout, Mesh, MeshAxis};

    /// What reduces, adds and gathers, and where it goes.
    fn moved(layout: Layout) -> String {
        let (before, context) = derived(layout, 4);
        let after = super::zero(&shard(&before, &context).unwrap(), &context).unwrap();
        lines(&after, &[" = all_", " = reduce_", " = sum_", " = accumulate", "update ", "range "], false)
    }

    #[test]
    fn gradients_are_summed_whole_once_a_step() {
        assert_eq!(
            moved("dp=2".parse().unwrap()),
            "\
R grad.w2.summed, grad.w1.summed = all_reduce(grad.w2, grad.w1) { over: dp }
update    grad.w2 <- grad.w2.summed
update    grad.w1 <- grad.w1.summed
"
        );
    }

    #[test]
    fn a_rank_has_a_range_of_each_sum_from_level_1_on() {
        assert_eq!(
            moved("dp=2,zero=1".parse().unwrap()),
            "\
R grad.w2.scattered @(dp: flat), grad.w1.scattered @(dp: flat) = reduce_scatter(grad.w2, grad.w1) { over: dp, dim: None }
range     grad.w2 <- grad.w2.scattered
range     grad.w1 <- grad.w1.scattered
"
        );
    }

    #[test]
    fn sums_of_every_micro_batch_are_scattered_from_level_2_on() {
        assert_eq!(
            moved("dp=2,zero=2".parse().unwrap()),
            "\
F grad.table.here.scattered @(dp: flat) = reduce_scatter(grad.table.here) { over: dp, dim: None }
F grad.table.here.scattered.sum @(dp: flat) += grad.table = accumulate(grad.table.here.scattered)
W grad.w2.here.scattered @(dp: flat), grad.w1.here.scattered @(dp: flat), grad.table.2.here.scattered @(dp: flat) = reduce_scatter(grad.w2.here, grad.w1.here, grad.table.2.here) { over: dp, dim: None }
W grad.w2.here.scattered.sum @(dp: flat) += grad.w2 = accumulate(grad.w2.here.scattered)
W grad.w1.here.scattered.sum @(dp: flat) += grad.w1 = accumulate(grad.w1.here.scattered)
W grad.table.2.here.scattered.sum @(dp: flat) += grad.table.2 = accumulate(grad.table.2.here.scattered)
"
        );
    }

    #[test]
    fn parameters_are_gathered_before_they_are_used_at_level_3() {
        assert_eq!(
            moved("dp=2,zero=3".parse().unwrap()),
            "\
F table.whole, w1.whole, w2.whole = all_gather(table, w1, w2) { over: dp, dim: None }
F grad.table.here.scattered @(dp: flat) = reduce_scatter(grad.table.here) { over: dp, dim: None }
F grad.table.here.scattered.sum @(dp: flat) += grad.table = accumulate(grad.table.here.scattered)
B w1.whole, w2.whole = all_gather(w1, w2) { over: dp, dim: None }
W grad.w2.here.scattered @(dp: flat), grad.w1.here.scattered @(dp: flat), grad.table.2.here.scattered @(dp: flat) = reduce_scatter(grad.w2.here, grad.w1.here, grad.table.2.here) { over: dp, dim: None }
W grad.w2.here.scattered.sum @(dp: flat) += grad.w2 = accumulate(grad.w2.here.scattered)
W grad.w1.here.scattered.sum @(dp: flat) += grad.w1 = accumulate(grad.w1.here.scattered)
W grad.table.2.here.scattered.sum @(dp: flat) += grad.table.2 = accumulate(grad.table.2.here.scattered)
"
        );
    }

    #[test]
    fn what_stays_gathered_is_not_gathered_again() {
        let gathers = |text: &str| {
            let all = moved(text.parse().unwrap());
            all.lines().filter(|line| line.contains("all_gather")).map(str::to_owned).collect::<Vec<_>>()
        };
        let [forward, backward] = &gathers("dp=2,zero=3")[..] else { panic!("two gathers") };
        assert!(forward.starts_with('F') && backward.starts_with('B'));
        assert_eq!(gathers("dp=2,zero=3,no-reshard"), [forward.as_str()]);
    }

    #[test]
    fn partial_sums_of_tensor_parallel_ranks_are_summed_first() {
        assert_eq!(
            moved("dp=2,zero=1,tp=2,sp".parse().unwrap()),
            "\
F x.scattered @(dp: split 0, tp: split 1) = reduce_scatter(x) { over: tp, dim: Some(1) }
F y.gathered @(dp: split 0) = all_gather(y) { over: tp, dim: Some(1) }
F logits.0.statistics.gathered @(dp: split 1) = all_gather(logits.0.statistics) { over: tp, dim: Some(0) }
F loss.dx.scattered @(dp: split 0, tp: split 1) = reduce_scatter(loss.dx) { over: tp, dim: Some(1) }
W d.x.gathered @(dp: split 0) = all_gather(d.x) { over: tp, dim: Some(1) }
R grad.w2.whole @(dp: partial), grad.w1.whole @(dp: partial) = all_reduce(grad.w2, grad.w1) { over: tp }
R grad.w2.whole.scattered @(dp: flat), grad.w1.whole.scattered @(dp: flat) = reduce_scatter(grad.w2.whole, grad.w1.whole) { over: dp, dim: None }
update    grad.w2 <- grad.w2.whole
update    grad.w1 <- grad.w1.whole
range     grad.w2 <- grad.w2.whole.scattered
range     grad.w1 <- grad.w1.whole.scattered
"
        );
    }

    #[test]
    fn ranges_are_summed_over_the_ranks_that_have_them_too() {
        let mesh = Mesh::ONE.with(MeshAxis::DpReplicate, 2).with(MeshAxis::DpShard, 2).with(MeshAxis::Ep, 2);
        let layout = |zero| Layout { mesh, zero, ..Layout::single(2) };
        assert_eq!(
            moved(layout(0)),
            "\
R grad.w2.summed, grad.w1.summed = all_reduce(grad.w2, grad.w1) { over: dp_replicate×dp×ep }
update    grad.w2 <- grad.w2.summed
update    grad.w1 <- grad.w1.summed
"
        );
        assert_eq!(
            moved(layout(1)),
            "\
R grad.w2.scattered @(dp_replicate: partial, dp: flat, ep: flat), grad.w1.scattered @(dp_replicate: partial, dp: flat, ep: flat) = reduce_scatter(grad.w2, grad.w1) { over: dp×ep, dim: None }
R grad.w2.scattered.summed @(dp: flat, ep: flat), grad.w1.scattered.summed @(dp: flat, ep: flat) = all_reduce(grad.w2.scattered, grad.w1.scattered) { over: dp_replicate }
range     grad.w2 <- grad.w2.scattered
range     grad.w1 <- grad.w1.scattered
range     grad.w2 <- grad.w2.scattered.summed
range     grad.w1 <- grad.w1.scattered.summed
"
        );
        assert_eq!(
            moved(layout(2)),
            "\
F grad.table.here.scattered @(dp_replicate: partial, dp: flat, ep: flat) = reduce_scatter(grad.table.here) { over: dp×ep, dim: None }
F grad.table.here.scattered.sum @(dp_replicate: partial, dp: flat, ep: flat) += grad.table = accumulate(grad.table.here.scattered)
W grad.w2.here.scattered @(dp_replicate: partial, dp: flat, ep: flat), grad.w1.here.scattered @(dp_replicate: partial, dp: flat, ep: flat), grad.table.2.here.scattered @(dp_replicate: partial, dp: flat, ep: flat) = reduce_scatter(grad.w2.here, grad.w1.here, grad.table.2.here) { over: dp×ep, dim: None }
W grad.w2.here.scattered.sum @(dp_replicate: partial, dp: flat, ep: flat) += grad.w2 = accumulate(grad.w2.here.scattered)
W grad.w1.here.scattered.sum @(dp_replicate: partial, dp: flat, ep: flat) += grad.w1 = accumulate(grad.w1.here.scattered)
W grad.table.2.here.scattered.sum @(dp_replicate: partial, dp: flat, ep: flat) += grad.table.2 = accumulate(grad.table.2.here.scattered)
R grad.w2.summed @(dp: flat, ep: flat), grad.w1.summed @(dp: flat, ep: flat) = all_reduce(grad.w2, grad.w1) { over: dp_replicate }
update    grad.w2 <- grad.w2.summed
update    grad.w1 <- grad.w1.summed
"
        );
    }
}
