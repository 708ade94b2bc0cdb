//! The gradient of every op that has one: a rule per kind, in the file of its family.
//!
//! A rule appends the nodes of backward that its op asks for. The op table says what it may read (`Spec::gradient_reads`).

mod at;
mod attention;
mod bytes;
mod dispatch;
mod embedding;
mod expert_bias;
mod experts;
mod head;
mod latent;
mod linear;
mod norm;
mod pointwise;
mod position;
mod quantise;
mod section;
mod sink;

pub use at::Gradients;

use at::{At, Rules, Stop, attributes};
use lockstep_ir::graph::Node;
use lockstep_ir::{DType, Graph, Op, TypeError, ValueId};
use std::collections::BTreeMap;

const FAMILIES: [Rules; 15] = [
    attention::RULES,
    bytes::RULES,
    dispatch::RULES,
    embedding::RULES,
    expert_bias::RULES,
    experts::RULES,
    head::RULES,
    latent::RULES,
    linear::RULES,
    norm::RULES,
    pointwise::RULES,
    position::RULES,
    quantise::RULES,
    section::RULES,
    sink::RULES,
];

impl Gradients {
    /// None yet.
    pub fn new(g: &Graph, accumulator: DType, scalars: Option<ValueId>) -> Self {
        let rules = FAMILIES.into_iter().flatten().copied().collect();
        let (grads, losses) = (vec![None; g.values.len()], g.losses.clone());
        Self { grads, losses, slices: BTreeMap::new(), accumulator, casts: widening_casts(g), scalars, rules }
    }

    /// Appends what backward has for a node of forward. Nodes come from the last to the first.
    pub fn node(&mut self, g: &mut Graph, node: &Node) -> Result<(), TypeError> {
        let mut at = At { all: self, g, node };
        for v in node.outputs.iter().flatten() {
            at.join_slices(*v)?;
        }
        let rule = node.op.spec().gradient_reads.and(at.all.rules.get(&node.op.kind()));
        let Some(rule) = rule else { return Ok(()) };
        match rule(&mut at) {
            Ok(()) | Err(Stop::Unreached) => Ok(()),
            Err(Stop::Refused(error)) => Err(error),
        }
    }
}

/// Values that are another one in a wider type.
fn widening_casts(g: &Graph) -> BTreeMap<ValueId, (Op, ValueId)> {
    let cast = |node: &Node| match (node.op, node.outputs[0]) {
        (op @ Op::Cast { to }, Some(output)) if to.bytes() > g.ty(node.inputs[0]).dtype.bytes() => {
            Some((output, (op, node.inputs[0])))
        }
        (_, _) => None,
    };
    g.nodes.iter().filter_map(cast).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_ir::OpKind;

    #[test]
    fn every_op_with_a_gradient_has_one_rule() {
        let mut ruled: Vec<OpKind> = FAMILIES.into_iter().flatten().map(|(kind, _)| *kind).collect();
        ruled.sort();
        let has_gradient = |kind: &&OpKind| kind.rows().iter().any(|row| row.gradient_reads.is_some());
        let with_gradient = OpKind::ALL.iter().filter(has_gradient);
        let mut with_gradient: Vec<OpKind> = with_gradient.copied().collect();
        with_gradient.sort();
        assert_eq!(ruled, with_gradient);
    }
}
