//! Optimizer: appends the update, once per step: tied gradients are added, the global norm taken, every parameter updated.

use super::state_format::{StateFormat, rounding};
use super::totals::{self, sum_over};
use super::{loads, zero};
use crate::rule::Rule;
use crate::settings::{Context, ParameterGroup};
use crate::stage;
use lockstep_ir::graph::{Node, Phase, Source, State, Tally};
use lockstep_ir::{
    Axes, DType, Graph, MeshAxis, Op, Placement, Sharding, StepLimits, StepScalars, TensorType, TypeError, ValueId,
};
use std::collections::{BTreeMap, BTreeSet};

/// A parameter on its way through the update.
struct Trained {
    parameter: ValueId,
    decays: bool,
    /// Its gradient, summed over uses and ranks.
    gradient: ValueId,
    /// Ranks of the pipeline that hold a copy.
    copies: usize,
}

/// The scalars of a step, which a graph has once.
pub(super) fn scalars(g: &mut Graph) -> ValueId {
    let known = g.values.iter().position(|v| v.name == StepScalars::NAME).map(ValueId);
    known.unwrap_or_else(|| g.state(StepScalars::NAME, StepScalars::ty(), State::Scalars))
}

pub(super) fn optimizer(graph: &Graph, context: &Context) -> Result<Graph, TypeError> {
    let mut g = graph.clone();
    let scalars = scalars(&mut g);
    let trained = gradients(&mut g, context)?;
    if context.steps.noise_scale {
        probe(&mut g, context, &trained, scalars)?;
    }
    let limits = if context.steps.limits { Some(limits(&mut g, context)?) } else { None };
    let loads = loads::count(&mut g, context)?;
    let stats = norm(&mut g, context, &trained, scalars, limits)?;
    g.outputs.push(stats);
    if let Some(loads) = loads {
        loads::move_biases(&mut g, loads, stats)?;
    }
    totals::report(&mut g, &context.layout.mesh, stats)?;
    let layers = layers(&g);
    let mut next: Vec<(Option<usize>, ValueId, ValueId)> = Vec::new();
    for t in &trained {
        if let Some(range) = update(&mut g, context, t, scalars, stats)? {
            next.push((layers[t.parameter.0], t.parameter, range));
        }
    }
    // Where each rank has updated its range of a parameter, the ranges of a layer's parameters are gathered at once.
    next.sort_by_key(|(layer, w, _)| (*layer, *w));
    for layer in next.chunk_by(|a, b| a.0 == b.0) {
        for (over, ranges) in
            zero::by_axes(layer.iter().map(|(_, _, v)| (g.get(*v).sharding.axes(Placement::Flat), *v)))
        {
            let whole = g.relay(Op::AllGather { over, dim: None }, &ranges, "whole", Phase::Update, layer[0].0)?;
            for (range, whole) in ranges.iter().zip(whole) {
                let w = layer.iter().find(|(_, _, of)| of == range).map(|(_, w, _)| *w);
                g.parts.extend(w.map(|w| (w, *range)));
                g.updates.extend(w.map(|w| (w, whole)));
            }
        }
    }
    Ok(g)
}

/// The gradient of every parameter, with the sums of tied uses added and summed over ranks.
fn gradients(g: &mut Graph, context: &Context) -> Result<Vec<Trained>, TypeError> {
    let parameters: Vec<(ValueId, bool)> = g.parameters().map(|(id, _, p)| (id, p.decay)).collect();
    let mut trained = Vec::new();
    for (parameter, decays) in parameters {
        let uses = g.gradients_of(parameter);
        let Some(&first) = uses.first() else { continue };
        if uses.len() == 1 {
            trained.push(Trained { parameter, decays, gradient: g.latest(first), copies: 1 });
            continue;
        }
        let copies = copies(g, context, &uses)?;
        let sums = add_uses(g, &uses, "sum", Phase::Update)?;
        // Every sum lives where the first accumulator does.
        let mut sum = first;
        for next in sums {
            g.updates.push((sum, next));
            sum = next;
        }
        let gradient = zero::reduce(g, context, &[sum], Phase::Update, None)?[0];
        // Its range lives where the first sum does.
        g.parts.iter_mut().filter(|(state, _)| *state == sum).for_each(|part| part.0 = first);
        trained.push(Trained { parameter, decays, gradient, copies });
    }
    Ok(trained)
}

/// Adds the accumulators of several uses, one after the other, and returns the sum after each.
fn add_uses(g: &mut Graph, uses: &[ValueId], suffix: &str, phase: Phase) -> Result<Vec<ValueId>, TypeError> {
    let name = format!("{}.{suffix}", g.get(uses[0]).name);
    let mut sums: Vec<ValueId> = Vec::new();
    for &next in &uses[1..] {
        let before = sums.last().copied().unwrap_or(uses[0]);
        let sum = g.node(Op::AddState, &[before, next], &name, phase, None)?[0];
        g.values[sum.0].sharding = g.get(uses[0]).sharding;
        sums.push(sum);
    }
    Ok(sums)
}

/// How many ranks of the pipeline hold a parameter that is used several times.
fn copies(g: &Graph, context: &Context, uses: &[ValueId]) -> Result<usize, TypeError> {
    if context.layout.mesh.size(MeshAxis::Pp) == 1 {
        return Ok(1);
    }
    let (last, layers) = stage::layers(g);
    let sums = |n: &Node| {
        let into =
            |v: &ValueId| matches!(g.get(*v).source, Source::Node { into: Some(state) } if uses.contains(&state));
        n.outputs.iter().flatten().any(into)
    };
    let held: BTreeSet<usize> = g.nodes.iter().zip(layers).filter(|(n, _)| sums(n)).map(|(_, layer)| layer).collect();
    // At both ends: an embedding and the head that is tied to it, or layers after the head that use them too.
    let behind = stage::first_behind_head(g).unwrap_or(last);
    match held.len() <= 1 || held.iter().all(|layer| *layer == 0 || *layer >= behind) {
        true => {
            let (layout, last) = (&context.layout, context.layout.stages() - 1);
            let stages = layout.schedule.virtual_stages(layout.mesh.size(MeshAxis::Pp), layout.chunks);
            let end = |layer: &usize| if *layer == 0 { 0 } else { last };
            let rank = |layer: &usize| stages.iter().position(|own| own.contains(&end(layer)));
            Ok(held.iter().map(rank).collect::<BTreeSet<_>>().len())
        }
        false => {
            let reason = "a parameter that two layers share does not go over pipeline stages".to_owned();
            Err(TypeError { op: "gradient", reason })
        }
    }
}

/// The norm of the gradient that the first micro-batch gave: of the sequences of each rank where those sum at the end of a step,
/// as the root of the sum of squares; of their sum where they sum for every micro-batch.
fn probe(g: &mut Graph, context: &Context, trained: &[Trained], scalars: ValueId) -> Result<(), TypeError> {
    let mesh = context.layout.mesh;
    let made = (mesh.size(MeshAxis::Pp) > 1).then(|| made(g));
    let update = g.nodes.iter().position(|n| n.phase == Phase::Update).unwrap_or(g.nodes.len());
    let after = g.nodes.split_off(update);
    // What is counted together: on stages each gradient alone, as schedules make them at other times; else by who shares it. What is
    // reduced first is counted at once, so that one such gradient at a time takes memory.
    type Group = (Option<(usize, ValueId)>, usize, usize);
    let mut squares = Vec::new();
    let mut groups: BTreeMap<Group, Vec<ValueId>> = BTreeMap::new();
    let count = |g: &mut Graph, phase: Phase, (alone, sharers, tail): Group, mut read: Vec<ValueId>| {
        read.push(scalars);
        let (op, layer) = (Op::SquareSum { sharers, tail }, alone.map(|(layer, _)| layer));
        Ok::<_, TypeError>(g.node(op, &read, "first_squares", phase, layer)?[0])
    };
    // Uses on several stages have their gradients at other times: each is kept until the end of the step.
    let mut kept: Vec<(&Trained, Vec<ValueId>)> = Vec::new();
    for t in trained {
        let uses = g.gradients_of(t.parameter);
        let layer_of = |v: &ValueId| made.as_ref().and_then(|made| made[v.0]);
        if made.is_some() && uses.len() > 1 {
            let keep = |v: &ValueId| keep_first(g, *v, Phase::Probe, layer_of(v));
            kept.push((t, uses.iter().map(keep).collect::<Result<_, _>>()?));
            continue;
        }
        let layer = layer_of(&uses[0]);
        let sums = add_uses(g, &uses, "first", Phase::Probe)?;
        let sum = sums.last().copied().unwrap_or(uses[0]);
        let whole = whole_sequences(g, context, sum, Phase::Probe, layer)?;
        let (sharers, tail) = zero::sharers(g, context, t.parameter);
        let group = (layer.map(|layer| (layer, t.parameter)), sharers, tail);
        match whole == sum {
            true => groups.entry(group).or_default().push(whole),
            false => squares.push(count(g, Phase::Probe, group, vec![whole])?),
        }
    }
    for (group, read) in groups {
        squares.push(count(g, Phase::Probe, group, read)?);
    }
    g.outputs.extend(kept.iter().flat_map(|(_, uses)| uses));
    g.nodes.extend(after);
    for (t, uses) in &kept {
        let sums = add_uses(g, uses, "sum", Phase::Update)?;
        let sum = sums.last().copied().unwrap_or(uses[0]);
        // Ranks that have other sequences look at their own.
        let sharding = g.get(sum).sharding;
        let own = sharding.axes(Placement::Partial).within(Axes::TOKENS).without(MeshAxis::Cp.into());
        g.values[sum.0].sharding = sharding.with(own, Placement::Replicated);
        let whole = whole_sequences(g, context, sum, Phase::Update, None)?;
        let (sharers, tail) = zero::sharers(g, context, t.parameter);
        squares.push(count(g, Phase::Update, (None, sharers * t.copies, tail), vec![whole])?);
    }
    for (i, v) in squares.iter().enumerate().skip(1) {
        g.values[v.0].name = format!("first_squares.{i}");
    }
    let counted = match squares[..] {
        [one] if made.is_none() => one,
        _ => g.node(Op::MergeSums, &squares, "first_squares.merged", Phase::Update, None)?[0],
    };
    // Ranks that have positions of the same sequences have the same gradient by now, or a range each.
    let positions = if context.layout.zero < 2 { Axes::from(MeshAxis::Cp) } else { Axes::NONE };
    let over = [Axes::TOKENS.without(positions), MeshAxis::Tp.into(), MeshAxis::Pp.into()];
    let total = sum_over(g, counted, &over.map(|axes| mesh.wide(axes)))?;
    let stats = g.node(Op::GradientNorm, &[total, scalars], FIRST_STATS, Phase::Update, None)?[0];
    g.outputs.extend(squares);
    g.outputs.push(stats);
    Ok(())
}

/// Of every gradient sum, the layer that its last contribution goes with.
fn made(g: &Graph) -> Vec<Option<usize>> {
    let mut made = vec![None; g.values.len()];
    for (node, layer) in g.nodes.iter().zip(stage::layers(g).1) {
        for v in node.outputs.iter().flatten() {
            if let Source::Node { into: Some(sum) } = g.get(*v).source {
                made[sum.0] = Some(layer);
            }
        }
    }
    made
}

/// The first micro-batch's gradient of whole sequences: what ranks have of other positions of them, or share, is added up, and the sum
/// over micro-batches left as it is.
fn whole_sequences(
    g: &mut Graph,
    context: &Context,
    sum: ValueId,
    phase: Phase,
    layer: Option<usize>,
) -> Result<ValueId, TypeError> {
    let mesh = context.layout.mesh;
    let positions = g.get(sum).sharding.axes(Placement::Partial).within(mesh.wide(MeshAxis::Cp.into()));
    let mut whole = sum;
    if !positions.is_empty() {
        whole = g.relay(Op::AllReduce { over: positions }, &[whole], "positions", phase, layer)?[0];
    }
    let sharding = g.get(whole).sharding;
    let cut = !sharding.axes(Placement::Flat).is_empty();
    let split = sharding.over(MeshAxis::Tp) == Placement::Split(0);
    if whole == sum && !cut && split && zero::sharers(g, context, whole).0 > 1 {
        // Neighbours add in place.
        whole = keep_first(g, sum, phase, layer)?;
    }
    Ok(zero::sum_over_tensor_parallel(g, context, &[whole], phase, layer)?[0])
}

/// A copy of a gradient as it is after the first micro-batch.
fn keep_first(g: &mut Graph, sum: ValueId, phase: Phase, layer: Option<usize>) -> Result<ValueId, TypeError> {
    let name = format!("{}.first", g.get(sum).name);
    let copy = g.node(Op::Accumulate, &[sum], &name, phase, layer)?[0];
    g.values[copy.0].sharding = g.get(sum).sharding;
    Ok(copy)
}

/// The sum of all losses of the step over all ranks, and what it and the norm may be.
fn limits(g: &mut Graph, context: &Context) -> Result<[ValueId; 2], TypeError> {
    let mesh = context.layout.mesh;
    let loss = g.outputs.iter().copied().find(|v| g.ty(*v).dtype == DType::F64);
    let made = loss.and_then(|loss| Some((loss, g.nodes.iter().position(|n| n.outputs.contains(&Some(loss)))?)));
    let Some((loss, made)) = made else {
        let reason = "there are no losses that a step could be limited by".to_owned();
        return Err(TypeError { op: Op::LossSum.name(), reason });
    };
    let layer = g.nodes[made].layer;
    let after = g.nodes.split_off(made + 1);
    let sum = g.node(Op::LossSum, &[loss], "losses", Phase::Forward, layer)?[0];
    let added = g.node(Op::Accumulate, &[sum], "losses.sum", Phase::Forward, layer)?[0];
    g.nodes.extend(after);
    let split = g.get(loss).sharding.axes(Placement::Split(0));
    let partial = Sharding::REPLICATED.with(split, Placement::Partial);
    let total = g.state("losses.total", g.ty(sum).clone(), State::Total(Tally::Losses));
    g.values[added.0].ty = g.ty(sum).clone();
    g.values[added.0].source = Source::Node { into: Some(total) };
    [sum, added, total].iter().for_each(|v| g.values[v.0].sharding = partial);
    let mut all = sum_over(g, total, &[split])?;
    let stages = mesh.wide(MeshAxis::Pp.into());
    if !stages.is_empty() {
        // Apart from the total, which stays 0 on stages that have no losses.
        let here = g.node(Op::MergeSums, &[all], "losses.here", Phase::Update, None)?[0];
        all = sum_over(g, here, &[stages])?;
    }
    Ok([all, g.state(StepLimits::NAME, StepLimits::ty(), State::Scalars)])
}

/// The norm of all gradients over all ranks.
fn norm(
    g: &mut Graph,
    context: &Context,
    trained: &[Trained],
    scalars: ValueId,
    limits: Option<[ValueId; 2]>,
) -> Result<ValueId, TypeError> {
    let mesh = context.layout.mesh;
    // The axes along which ranks have parts of a gradient: what is of others than the rest is added up apart.
    let parted = |g: &Graph, v: ValueId| {
        let parts = |axis: &MeshAxis| matches!(g.get(v).sharding.over(*axis), Placement::Split(_) | Placement::Flat);
        Axes::TOKENS.iter().filter(parts).collect::<Axes>()
    };
    let mut groups: BTreeMap<Axes, BTreeMap<(usize, usize), Vec<ValueId>>> = BTreeMap::new();
    for t in trained {
        let (sharers, tail) = zero::sharers(g, context, t.parameter);
        let group = groups.entry(parted(g, t.gradient)).or_default();
        group.entry((sharers * t.copies, tail)).or_default().push(t.gradient);
    }
    let (apart, stages) = (groups.len() > 1, mesh.size(MeshAxis::Pp) > 1);
    let (mut totals, mut over) = (Vec::new(), Axes::NONE);
    for (axes, group) in groups {
        let mut sums = Vec::new();
        for ((sharers, tail), mut gradients) in group {
            gradients.push(scalars);
            sums.push(g.node(Op::SquareSum { sharers, tail }, &gradients, "squares", Phase::Update, None)?[0]);
        }
        let merged = match sums[..] {
            [one] if apart || !stages => one,
            _ => g.node(Op::MergeSums, &sums, "squares.merged", Phase::Update, None)?[0],
        };
        over = axes;
        totals.push(if apart { sum_over(g, merged, &[axes])? } else { merged });
    }
    let total = match totals[..] {
        [one] => one,
        _ => {
            over = Axes::NONE;
            g.node(Op::MergeSums, &totals, "squares.all", Phase::Update, None)?[0]
        }
    };
    let over = [over, MeshAxis::Tp.into(), MeshAxis::Pp.into()];
    let total = sum_over(g, total, &over.map(|axes| mesh.wide(axes)))?;
    let reads: Vec<ValueId> = [total, scalars].into_iter().chain(limits.into_iter().flatten()).collect();
    Ok(g.node(Op::GradientNorm, &reads, STATS, Phase::Update, None)?[0])
}

/// Updates a parameter, or this rank's range of it: returns that range where the others must learn of it.
fn update(
    g: &mut Graph,
    context: &Context,
    t: &Trained,
    scalars: ValueId,
    stats: ValueId,
) -> Result<Option<ValueId>, TypeError> {
    let w = t.parameter;
    let name = g.get(w).name.clone();
    let group = context.optimizer.groups.get(&name).copied().unwrap_or(ParameterGroup { lr_scale: 1.0, decay: None });
    let usual = if t.decays { context.optimizer.decay } else { 0.0 };
    let (lr_scale, decay) = (group.lr_scale, group.decay.unwrap_or(usual));
    let ty = TensorType::new(DType::F32, g.ty(w).dims.clone());
    let over = zero::shards_of(g, context, w, 1);
    let sharded = !over.is_empty();
    let sharding = g.get(w).sharding.with(over, Placement::Flat);
    let state = |g: &mut Graph, name: String, ty: TensorType, state: State| {
        let id = g.state(name, ty, state);
        g.values[id.0].sharding = sharding;
        id
    };
    let rule = context.optimizer.rule.of(&ty, t.decays);
    let format = StateFormat::of(g, context, w, sharding);
    let moment = |g: &mut Graph, which| {
        state(g, format!("{which}.{name}"), format.moment(&ty, which), State::Moment { of: w, which })
    };
    let moments: Vec<ValueId> = rule.moments().iter().map(|which| moment(g, which)).collect();
    let key = format.rounds().then(|| rounding(g));
    // Where the parameter is in bf16 or fp16 (mixed precision), the update works on its f32 master weights and rounds once more.
    let rounded = g.ty(w).dtype != DType::F32 && !format.own_master;
    let whole_here = g.get(w).sharding.axes(Placement::Flat).is_empty();
    let master = match (rounded, sharded && whole_here) {
        (true, _) => state(g, format!("master.{name}"), ty.clone(), State::Master { of: w }),
        (false, true) => g.relay(Op::Shard { over }, &[w], "range", Phase::Update, None)?[0],
        (false, false) => w,
    };
    let mut reads = match rule {
        Rule::Muon { momentum, .. } => {
            let moved = [t.gradient, moments[0], stats].into_iter().chain(key).collect::<Vec<_>>();
            vec![master, direction(g, momentum, &moved, sharding)?]
        }
        _ => [&[master, t.gradient], &moments[..]].concat(),
    };
    reads.extend([scalars, stats].into_iter().chain(key));
    let new = g.node(rule.op(decay, lr_scale), &reads, &format!("{name}.next"), Phase::Update, None)?;
    new.iter().for_each(|v| g.values[v.0].sharding = sharding);
    // Weights first, then the moments that the op itself updates, then the rounded copy.
    let copy = new.len() - 1;
    if rounded {
        g.values[new[copy].0].ty.dtype = g.ty(w).dtype;
    }
    g.updates.extend(moments.into_iter().zip(new[1..copy].iter().copied()));
    let moved = if rounded { new[copy] } else { new[0] };
    if rounded {
        g.updates.push((master, new[0]));
    } else if let Some(node) = g.nodes.last_mut() {
        node.outputs[copy] = None;
    }
    if sharded && whole_here {
        return Ok(Some(moved));
    }
    g.updates.push((w, moved));
    Ok(None)
}

/// The orthogonalised momentum, from what [`Op::Momentum`] reads. Where ranks hold ranges or parts of it, each gathers the whole matrix, works on it, and keeps its own.
fn direction(g: &mut Graph, momentum: f32, reads: &[ValueId], sharding: Sharding) -> Result<ValueId, TypeError> {
    let moment = reads[1];
    let name = format!("{}.update", g.get(moment).name);
    let moved = g.node(Op::Momentum { momentum }, reads, &name, Phase::Update, None)?;
    moved.iter().for_each(|v| g.values[v.0].sharding = sharding);
    g.values[moved[0].0].name = format!("{}.next", g.get(moment).name);
    g.values[moved[1].0].name = name.clone();
    g.updates.push((moment, moved[0]));
    let ranges = sharding.axes(Placement::Flat);
    let split =
        [0, 1].map(|dim| (dim, sharding.axes(Placement::Split(dim)))).into_iter().find(|(_, over)| !over.is_empty());
    let mut whole = moved[1];
    let relay = |g: &mut Graph, op, v: &mut ValueId, suffix| -> Result<(), TypeError> {
        *v = g.relay(op, &[*v], suffix, Phase::Update, None)?[0];
        Ok(())
    };
    if !ranges.is_empty() {
        relay(g, Op::AllGather { over: ranges, dim: None }, &mut whole, "whole")?;
    }
    if let Some((dim, over)) = split {
        relay(g, Op::AllGather { over, dim: Some(dim) }, &mut whole, "gathered")?;
    }
    let mut direction = g.node(Op::Orthogonalise, &[whole], &format!("{name}.orthogonal"), Phase::Update, None)?[0];
    g.values[direction.0].sharding = g.get(whole).sharding;
    if let Some((dim, over)) = split {
        relay(g, Op::Part { over, dim }, &mut direction, "part")?;
    }
    if !ranges.is_empty() {
        relay(g, Op::Shard { over: ranges }, &mut direction, "range")?;
    }
    Ok(direction)
}

/// The layer of the first node that reads each value.
fn layers(g: &Graph) -> Vec<Option<usize>> {
    g.readers().iter().map(|readers| readers.first().and_then(|n| g.nodes[*n].layer)).collect()
}

/// Output of the training step: gradient norm, and the factor that was applied to gradients.
pub const STATS: &str = "gradient_stats";

/// The same of the gradients that the first micro-batch gave, where [`Steps::noise_scale`](crate::Steps) asks for it.
pub const FIRST_STATS: &str = "first_gradient_stats";
