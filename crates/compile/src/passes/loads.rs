//! The loads of experts: how many tokens each gets in a step, over all micro-batches and ranks, and the biases that move against them.
//!
//! What a router chooses is counted where it is chosen, once, and counts are whole numbers: every layout has the same.
//!
//! The optimizer pass adds these ops, so neither models nor evaluation know of them. A bias of the choice is a
//! parameter without a gradient (`Parameter::balance`).

use super::totals::sum_over;
use crate::Context;
use lockstep_ir::graph::{Node, Phase, Source, State, Tally};
use lockstep_ir::{Axes, Graph, MeshAxis, Op, Placement, Sharding, TypeError, ValueId};

/// Output of the training step of a model with experts: the tokens of every expert, a row for each layer that has some.
pub const LOADS: &str = "expert_loads";

/// What a router reads and chooses.
struct Choice {
    bias: Option<ValueId>,
    chosen: ValueId,
    experts: usize,
}

/// What a node chooses, if it is a router that has a choice.
fn choice(g: &Graph, node: &Node) -> Option<Choice> {
    match (node.op, node.phase) {
        (Op::Route { .. }, Phase::Forward) => {
            let experts = g.ty(node.inputs[0]).dims.last()?.size();
            let bias = node.inputs.get(1).copied();
            Some(Choice { bias, chosen: node.outputs[1]?, experts }).filter(|choice| choice.experts > 1)
        }
        _ => None,
    }
}

/// Counts what all routers choose, and gives the loads of the step; nothing where there are no routers.
pub(super) fn count(g: &mut Graph, context: &Context) -> Result<Option<ValueId>, TypeError> {
    let mut totals = Vec::new();
    let mut over = Axes::NONE;
    let mut nodes = Vec::new();
    for node in std::mem::take(&mut g.nodes) {
        let (counted, layer) = (choice(g, &node), node.layer);
        nodes.push(node);
        let Some(Choice { chosen, experts, .. }) = counted else { continue };
        let name = layer.map_or("load".to_owned(), |layer| format!("layers.{layer}.load"));
        let load = g.node(Op::ExpertLoad { experts }, &[chosen], &name, Phase::Forward, layer)?[0];
        nodes.append(&mut g.nodes);
        let total = g.state(format!("{name}.total"), g.ty(load).clone(), State::Total(Tally::Loads));
        g.values[load.0].source = Source::Node { into: Some(total) };
        let tokens = g.get(chosen).sharding;
        let split = |all: Axes, dim| all.and(tokens.axes(Placement::Split(dim)));
        over = (0..g.ty(chosen).dims.len()).fold(over, split);
        let partial = Sharding::REPLICATED.with(over, Placement::Partial);
        [load, total].iter().for_each(|v| g.values[v.0].sharding = partial);
        totals.push(total);
    }
    g.nodes = nodes;
    if totals.is_empty() {
        return Ok(None);
    }
    let here = g.node(Op::StackTotals, &totals, LOADS, Phase::Update, None)?[0];
    // A total is 0 on stages that do not have its layer.
    let loads = sum_over(g, here, &[over, context.layout.mesh.wide(MeshAxis::Pp.into())])?;
    if loads != here {
        g.values[here.0].name = format!("{LOADS}.here");
        g.values[loads.0].name = LOADS.to_owned();
    }
    g.outputs.push(loads);
    Ok(Some(loads))
}

/// Moves the biases of routers that have a rate.
pub(super) fn move_biases(g: &mut Graph, loads: ValueId, stats: ValueId) -> Result<(), TypeError> {
    let choices: Vec<Choice> = g.nodes.iter().filter_map(|node| choice(g, node)).collect();
    for (row, bias) in choices.iter().enumerate().filter_map(|(row, choice)| Some((row, choice.bias?))) {
        let Source::State(State::Parameter(parameter)) = &g.get(bias).source else { continue };
        let Some(rate) = parameter.balance.filter(|rate| *rate > 0.0) else { continue };
        let name = format!("{}.next", g.get(bias).name);
        let next = g.node(Op::MoveBias { row, rate }, &[bias, loads, stats], &name, Phase::Update, None)?[0];
        g.updates.push((bias, next));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::Context;
    use crate::passes::TRAINING_PASSES;
    use crate::passes::tests::{lines, small_model_of};
    use lockstep_ir::graph::{Parameter, State};
    use lockstep_ir::op::Routing;
    use lockstep_ir::{Axes, Axis, DType, Dim, Graph, Init, Layout, Op, TensorType, ValueId};

    /// The small model with three experts in front of its head, and a bias of their choice that moves.
    fn routed(layout: Layout) -> Graph {
        let (mut g, context) = small_model_of(2 * layout.mesh.size(Axes::SEQUENCES), 4);
        let head = g.nodes.iter().position(|n| n.op == Op::Linear).unwrap();
        let y = ValueId(g.values.iter().position(|v| v.name == "y").unwrap());
        let (experts, embed) = (Dim::new(Axis::Experts, 3), Dim::new(Axis::Embed, 2));
        let mut state = |name: &str, dims: Vec<Dim>, balance| {
            let parts = vec![name.to_owned()];
            let parameter = Parameter { decay: false, exact: true, balance, ..Parameter::new(Init::Ones, parts) };
            g.state(name, TensorType::new(DType::F32, dims), State::Parameter(parameter))
        };
        let router = state("router", vec![experts.clone(), embed.clone()], None);
        let bias = state("bias", vec![experts.clone()], Some(0.5));
        let w = state("w", vec![experts, embed.clone(), embed], None);
        let before = g.nodes.len();
        g.enter_layer(Some(1));
        let logits = g.op(Op::Linear, &[y, router], "routing").unwrap()[0];
        let routed = g.op(Op::Route { given: false, how: Routing::top(2) }, &[logits, bias], "routed").unwrap();
        let each = g.op(Op::GroupedLinear { each: false }, &[y, w, routed[1]], "each").unwrap()[0];
        let out = g.op(Op::Combine { weighted: true }, &[each, routed[0]], "out").unwrap()[0];
        let late = g.nodes.split_off(before);
        g.nodes[head].inputs[0] = out;
        late.into_iter().rev().for_each(|node| g.nodes.insert(head, node));
        let context = Context { layout, ..context };
        TRAINING_PASSES.iter().fold(g, |g, pass| (pass.run)(&g, &context).unwrap())
    }

    #[test]
    fn choices_are_counted_once_summed_over_ranks_and_biases_move() {
        let found = |layout: &str| {
            let words = ["load", "move_bias", "update    bias", "return"];
            lines(&routed(layout.parse().unwrap()), &words, true)
        };
        assert_eq!(
            found("dp=2,zero=3"),
            "\
total     layers.1.load.total: f64[experts:3] @(dp: partial)
F layers.1.load: f64[experts:3] @(dp: partial) += layers.1.load.total = expert_load(routed.chosen) { experts: 3 }
U expert_loads.here: f64[scalar:1, experts:3] @(dp: partial) = stack_totals(layers.1.load.total)
U expert_loads: f64[scalar:1, experts:3] = all_reduce(expert_loads.here) { over: dp }
U bias.next: f32[experts:3] = move_bias(bias, expert_loads, gradient_stats) { row: 0, rate: 0.5 }
update    bias <- bias.next
return    loss, expert_loads, gradient_stats
"
        );
    }
}
