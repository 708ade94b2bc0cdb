//! Programs that tell where tokens go, and programs whose tokens go where the host says.

use lockstep_ir::graph::Phase;
use lockstep_ir::program::{Role, Tensor};
use lockstep_ir::{DType, Graph, Op, TypeError, ValueId};
use std::collections::BTreeMap;

/// The experts of all tokens, router by router; of a token as many as it has.
pub(super) type Choices = Vec<Vec<u32>>;

/// The input of a program that replays, beside the output that tells where tokens would go.
pub(super) fn given(chosen: &str) -> String {
    format!("replayed.{chosen}")
}

/// The outputs that tell where tokens go, in the order of [`Choices`].
pub(super) fn routers(tensors: &[Tensor]) -> Vec<String> {
    let of_tokens = |t: &&Tensor| t.role == Role::Output && t.whole.dtype == DType::U32;
    let mut names: Vec<String> = tensors.iter().filter(of_tokens).map(|t| t.name.clone()).collect();
    names.sort_unstable();
    names
}

/// The graph with what its routers choose as outputs.
pub(super) fn telling(mut g: Graph) -> Graph {
    let routes = g.nodes.iter().filter(|n| matches!(n.op, Op::Route { .. }));
    let chosen: Vec<ValueId> = routes.filter_map(|n| n.outputs.get(1).copied().flatten()).collect();
    g.outputs.extend(chosen);
    g
}

/// The graph with inputs in place of what its routers choose. Routers still choose, for those who ask.
pub(super) fn replaying(mut g: Graph) -> Result<Graph, TypeError> {
    let mut instead: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    for mut node in std::mem::take(&mut g.nodes) {
        node.inputs.iter_mut().for_each(|v| *v = *instead.get(v).unwrap_or(v));
        let (op, layer, inputs, outputs) = (node.op, node.layer, node.inputs.clone(), node.outputs.clone());
        g.nodes.push(node);
        if let (Op::Route { how, .. }, [logits, ..], &[Some(weights), Some(chosen)]) = (op, &inputs[..], &outputs[..]) {
            let experts = g.input(given(&g.get(chosen).name), g.ty(chosen).clone());
            let name = format!("{}.replayed", g.get(weights).name);
            let made = g.node(Op::Route { given: true, how }, &[*logits, experts], &name, Phase::Forward, layer)?;
            instead.extend([(weights, made[0]), (chosen, made[1])]);
        }
    }
    Ok(g)
}

/// How many of some choices are not among those of the same token in others, and of how many. `tokens` have them.
pub(super) fn flipped(ours: &Choices, theirs: &Choices, tokens: usize) -> (u64, u64) {
    let (mut differ, mut all) = (0, 0);
    for (ours, theirs) in ours.iter().zip(theirs) {
        let each = (ours.len() / tokens.max(1)).max(1);
        let of_tokens = ours.chunks(each).zip(theirs.chunks(each));
        differ += of_tokens.map(|(a, b)| a.iter().filter(|e| !b.contains(e)).count() as u64).sum::<u64>();
        all += ours.len() as u64;
    }
    (differ, all)
}
