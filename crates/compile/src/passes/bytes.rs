//! Bytes: keeps matrices of layers that are not trained in one byte an element, with a unit for each row.
//!
//! These are the weights beside adapters, and in a program that trains nothing all of them. Embedding, head, norms, routers and experts stay as they
//! are.

use crate::Context;
use lockstep_ir::graph::{Source, State};
use lockstep_ir::{DType, Graph, Op, TensorType, TypeError, ValueId};
use std::collections::BTreeMap;

pub(super) fn bytes(graph: &Graph, context: &Context) -> Result<Graph, TypeError> {
    let mut g = graph.clone();
    let Some(to) = context.precision.frozen else { return Ok(g) };
    let mut units: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    for n in 0..g.nodes.len() {
        let Some(w) = g.nodes[n].inputs.get(1).copied().filter(|w| in_bytes(graph, *w)) else { continue };
        let unit = *units.entry(w).or_insert_with(|| {
            let ty = TensorType::new(DType::F32, [g.ty(w).dims[0].clone()]);
            let name = format!("{}.unit", g.get(w).name);
            g.state(name, ty, State::Unit { of: w })
        });
        let node = &mut g.nodes[n];
        (node.op, node.tf32) = (Op::ByteLinear, false);
        node.inputs.push(unit);
        g.values[w.0].ty.dtype = to;
    }
    Ok(g)
}

/// Whether a value is a weight that matmuls of layers read and nothing else does, and that is not trained: where any is said to be frozen, one of those.
pub fn in_bytes(g: &Graph, w: ValueId) -> bool {
    let some_are_frozen = g.parameters().any(|(_, _, parameter)| parameter.frozen);
    let Source::State(State::Parameter(parameter)) = &g.get(w).source else { return false };
    let mut readers = g.nodes.iter().filter(|node| node.inputs.contains(&w));
    let multiplied = readers.all(|node| node.op == Op::Linear && node.inputs[1] == w && node.layer.is_some());
    multiplied && !parameter.exact && (parameter.frozen || !some_are_frozen)
}

#[cfg(test)]
mod tests {
    use crate::Precision;
    use crate::passes::tests::{lines, small_model};
    use lockstep_ir::graph::{Parameter, Source, State};
    use lockstep_ir::{Axis, DType, Dim, Graph, Init, Op, TensorType};

    /// The small model with a matmul in its layer.
    fn with_matmul() -> (Graph, crate::Context) {
        let (mut g, mut context) = small_model();
        context.precision = Precision { frozen: Some(DType::Int8), ..Precision::of(DType::BF16, DType::F32) };
        let dims = [Dim::new(Axis::Ffn, 3), Dim::new(Axis::Embed, 2)];
        let parameter = State::Parameter(Parameter::new(Init::Ones, vec!["up".into()]));
        let up = g.state("up", TensorType::new(DType::F32, dims), parameter);
        let y = g.values.iter().position(|v| v.name == "y").map(lockstep_ir::ValueId).unwrap();
        let wide = g.op(Op::Linear, &[y, up], "wide").unwrap()[0];
        g.nodes.last_mut().unwrap().layer = Some(0);
        g.outputs.push(wide);
        (g, context)
    }

    fn bytes(g: &Graph, context: &crate::Context) -> String {
        let g = super::super::precision::precision(g, context).unwrap();
        lines(&super::bytes(&g, context).unwrap(), &["linear", "unit "], true)
    }

    #[test]
    fn matrices_of_layers_are_bytes_and_the_head_is_not() {
        let (g, context) = with_matmul();
        assert_eq!(
            bytes(&g, &context),
            "\
unit      up.unit: f32[ffn:3]
F logits: bf16[batch:1, seq:4, vocab:8] = linear(y, table)
F wide: bf16[batch:1, seq:4, ffn:3] = byte_linear(y, up, up.unit)
"
        );
    }

    #[test]
    fn where_some_are_frozen_those_alone_are_bytes() {
        let (mut g, context) = with_matmul();
        let freeze = |g: &mut Graph, name: &str| {
            let value = g.values.iter_mut().find(|v| v.name == name).unwrap();
            let Source::State(State::Parameter(parameter)) = &mut value.source else { unreachable!() };
            parameter.frozen = true;
        };
        freeze(&mut g, "w1");
        assert!(!bytes(&g, &context).contains("byte_linear"));
        freeze(&mut g, "up");
        assert!(bytes(&g, &context).contains("byte_linear"));
    }
}
