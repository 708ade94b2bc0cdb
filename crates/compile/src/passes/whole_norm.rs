//! Norms over dimensions that tensor-parallel ranks split, such as all of Q: a norm becomes a sum of squares of each rank's part, which is a
//! partial sum, and the norm of the part by that sum. So does its input gradient. The gradient of the weight needs no other rank.
//!
//! Where neighbours share a key head, its features are counted once for each of them, and so they are in the width that the
//! sum is divided by: the mean is the same. In the gradient each of them adds as much less.

use lockstep_ir::graph::Node;
use lockstep_ir::op::Norm;
use lockstep_ir::{Axis, Graph, Op, TypeError, ValueId};

/// Rewrites the norms that this many tensor-parallel ranks share.
pub(super) fn split_norms(g: &mut Graph, tp: usize) -> Result<(), TypeError> {
    for node in std::mem::take(&mut g.nodes) {
        match (node.op, node.inputs.first().and_then(|x| shared_width(g, *x, tp))) {
            (Op::Norm { norm: norm @ (Norm::Rms | Norm::RmsPlusOne), residual: false, eps }, Some(width)) => {
                let [x, w] = node.inputs[..] else { unreachable!("the op table refuses it") };
                let name = node.outputs.iter().flatten().next().map_or(String::new(), |y| g.get(*y).name.clone());
                let op = Op::RowDot { plus_one: false };
                let squares = g.node(op, &[x, x], &format!("{name}.squares"), node.phase, node.layer)?[0];
                let op = Op::NormBy { plus_one: norm == Norm::RmsPlusOne, eps, width };
                g.nodes.push(Node { op, inputs: vec![x, w, squares], ..node });
            }
            (Op::NormGrad { norm: norm @ (Norm::Rms | Norm::RmsPlusOne), residual: false }, Some(width)) => {
                let [dy, x, w, rstd] = node.inputs[..] else { unreachable!("the op table refuses it") };
                let plus_one = norm == Norm::RmsPlusOne;
                let name = format!("{}.dot", g.get(dy).name);
                let dot = g.node(Op::RowDot { plus_one }, &[dy, x, w], &name, node.phase, node.layer)?[0];
                let op = Op::NormByGrad { plus_one, width };
                g.nodes.push(Node { op, inputs: vec![dy, x, w, rstd, dot], ..node });
            }
            _ => g.nodes.push(node),
        }
    }
    Ok(())
}

/// How many features of a position all ranks have together, where they split them.
fn shared_width(g: &Graph, x: ValueId, tp: usize) -> Option<usize> {
    let sections = &g.ty(x).dims.last()?.sections;
    let heads = sections.iter().all(|s| matches!(s.axis, Axis::Heads | Axis::KvHeads));
    // Of fewer heads than ranks, each rank has one.
    heads.then(|| sections.iter().map(|s| s.count.max(tp) * s.unit).sum())
}

#[cfg(test)]
mod tests {
    use crate::passes::tests::lines;
    use lockstep_ir::graph::Phase;
    use lockstep_ir::op::Norm;
    use lockstep_ir::{Axis, DType, Dim, Graph, Op, Section, TensorType};

    /// A norm over the heads of an input, and its gradients.
    fn norm_of(axis: Axis, count: usize) -> Graph {
        let mut g = Graph::new();
        let features = Dim::packed([Section { axis, count, unit: 8 }]);
        let (batch, seq) = (Dim::new(Axis::Batch, 1), Dim::new(Axis::Seq, 4));
        let row = TensorType::new(DType::F32, [batch, seq, features.clone()]);
        let w = g.input("w", TensorType::new(DType::F32, [features]));
        let (x, dy) = (g.input("x", row.clone()), g.input("dy", row));
        let y = g.op(Op::rms_norm_plus_one(1e-5), &[x, w], "y").unwrap();
        let (norm, phase) = (Norm::RmsPlusOne, Phase::InputGrad);
        g.node(Op::NormGradWeight { norm: norm.of_weight() }, &[dy, x, y[1]], "dw", Phase::WeightGrad, None).unwrap();
        g.node(Op::NormGrad { norm, residual: false }, &[dy, x, w, y[1]], "dx", phase, None).unwrap();
        g
    }

    #[test]
    fn norms_over_heads_take_sums_of_all_ranks() {
        let mut g = norm_of(Axis::Heads, 4);
        super::split_norms(&mut g, 2).unwrap();
        assert_eq!(
            lines(&g, &[" = "], false),
            "\
F y.squares = row_dot(x, x) { plus_one: false }
F y, y.rstd = rms_norm_by(x, w, y.squares) { plus_one: true, eps: 1e-5, width: 32 }
W dw = rms_norm_grad_weight(dy, x, y.rstd)
B dy.dot = row_dot(dy, x, w) { plus_one: true }
B dx = rms_norm_by_grad(dy, x, w, y.rstd, dy.dot) { plus_one: true, width: 32 }
"
        );
        // Each of four ranks has one of two key heads: features count twice in sum and width.
        let mut g = norm_of(Axis::KvHeads, 2);
        super::split_norms(&mut g, 4).unwrap();
        assert!(lines(&g, &["rms_norm_by("], false).contains("width: 32"));
        // The residual stream is whole on every rank.
        let mut g = norm_of(Axis::Embed, 4);
        let before = g.clone();
        super::split_norms(&mut g, 2).unwrap();
        assert_eq!(g.to_string(), before.to_string());
    }
}
