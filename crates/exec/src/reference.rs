//! The slow and right evaluator: every op in f64, written as its definition, over graphs with global shapes.
//!
//! Kernels are held against it, and it is held against finite differences. Definitions are in the file of their op's family.

mod at;
mod attention;
mod bytes;
mod cached;
mod collective;
mod context;
mod dispatch;
mod embedding;
mod expert_bias;
mod experts;
mod fine;
mod gradient;
mod head;
mod heads;
mod latent;
mod linear;
mod memory;
mod naive;
mod norm;
mod optimizer;
mod packed;
mod pointwise;
mod position;
mod quantise;
mod section;
mod sink;
mod vocab;

pub(crate) use gradient::{from_limbs, limbs};

use at::{At, Definition};
use lockstep_ir::graph::Source;
use lockstep_ir::{Graph, OpKind, ValueId};
use std::collections::BTreeMap;
use std::sync::LazyLock;

static DEFINITIONS: LazyLock<BTreeMap<OpKind, Definition>> = LazyLock::new(|| {
    let families = [
        attention::definitions(),
        bytes::definitions(),
        collective::definitions(),
        context::definitions(),
        dispatch::definitions(),
        embedding::definitions(),
        expert_bias::definitions(),
        experts::definitions(),
        fine::definitions(),
        gradient::definitions(),
        head::definitions(),
        heads::definitions(),
        latent::definitions(),
        linear::definitions(),
        memory::definitions(),
        norm::definitions(),
        optimizer::definitions(),
        pointwise::definitions(),
        position::definitions(),
        quantise::definitions(),
        section::definitions(),
        sink::definitions(),
    ];
    families.into_iter().flatten().collect()
});

/// Evaluates a graph. `feed` gives inputs and states (token ids as whole numbers); gradient states start at zero. Returns every
/// value that was computed; a sum into a state is also found under the state.
pub fn evaluate(graph: &Graph, feed: impl Fn(ValueId) -> Option<Vec<f64>>) -> Vec<Option<Vec<f64>>> {
    let mut values: Vec<Option<Vec<f64>>> = (0..graph.values.len()).map(|i| feed(ValueId(i))).collect();
    for node in &graph.nodes {
        let inputs: Vec<&[f64]> = node
            .inputs
            .iter()
            .map(|v| values[v.0].as_deref().unwrap_or_else(|| panic!("`{}` has no value", graph.get(*v).name)))
            .collect();
        let types = graph.input_types(node);
        let dims = node.op.bind(&types).unwrap_or_else(|e| panic!("{e}"));
        let Some(definition) = DEFINITIONS.get(&node.op.kind()) else {
            panic!("{} exists in programs only", node.op.name());
        };
        let outputs = definition(&At { op: node.op, types: &types, dims, x: &inputs });
        for (output, data) in node.outputs.iter().zip(outputs) {
            let Some(v) = output else { continue };
            if let Source::Node { into: Some(state) } = graph.get(*v).source {
                let sum = values[state.0].get_or_insert_with(|| vec![0.0; data.len()]);
                sum.iter_mut().zip(&data).for_each(|(s, x)| *s += x);
            }
            values[v.0] = Some(data);
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_op_but_messages_between_stages_has_a_definition() {
        let without = |kind: &&OpKind| !DEFINITIONS.contains_key(kind);
        let without: Vec<&OpKind> = OpKind::ALL.iter().filter(without).collect();
        assert_eq!(without, [&OpKind::Send, &OpKind::Receive]);
    }
}
