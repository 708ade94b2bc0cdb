//! Fuse: replaces groups of forward ops by one op that moves fewer bytes.
//!
//! - `add` whose sum feeds an `rms_norm` or `layer_norm` of the same layer → `add_rms_norm`, `add_layer_norm` (the sum is
//!   normed while in cache). Across layers they stay apart where a loss is computed: the residual stream is the only tensor that crosses that seam;
//! - `linear` read only by a `cross_entropy` → `linear_cross_entropy` (the logits never exist whole).

use crate::Context;
use lockstep_ir::graph::{Node, Phase, Source};
use lockstep_ir::{Axes, Graph, MeshAxis, Op, TypeError, ValueId};

/// Runs the pass.
pub fn fuse(graph: &Graph, context: &Context) -> Result<Graph, TypeError> {
    let mut g = graph.clone();
    add_norm(&mut g);
    while linear_cross_entropy(&mut g, context)? {}
    Ok(g)
}

fn add_norm(g: &mut Graph) {
    let mut n = 0;
    while n < g.nodes.len() {
        if let Op::Norm { norm, residual: false, eps } = g.nodes[n].op {
            let op = Op::Norm { norm, residual: true, eps };
            let x = g.nodes[n].inputs[0];
            // The sum moves from where it was added to where it is normed, so nothing may read it in between.
            let add = producer(g, x).filter(|&a| {
                let same_layer = g.losses.is_empty() || g.nodes[a].layer == g.nodes[n].layer;
                same_layer && g.nodes[a].op == Op::Add && g.readers()[x.0].first() == Some(&n)
            });
            if let Some(a) = add {
                let (add, norm) = (&g.nodes[a], &g.nodes[n]);
                let fused = Node {
                    op,
                    inputs: [&add.inputs[..2], &norm.inputs[1..]].concat(),
                    outputs: [&add.outputs[..1], &norm.outputs[..]].concat(),
                    phase: Phase::Forward,
                    layer: norm.layer,
                    tf32: false,
                    repeated: false,
                };
                g.nodes[n] = fused;
                g.nodes.remove(a);
                continue;
            }
        }
        n += 1;
    }
}

/// Fuses the first head that is not; false where there is none.
fn linear_cross_entropy(g: &mut Graph, context: &Context) -> Result<bool, TypeError> {
    let linear = |n: usize| {
        let logits = g.nodes[n].inputs[0];
        let l = producer(g, logits).filter(|&l| g.nodes[l].op == Op::Linear)?;
        (g.readers()[logits.0] == [n] && !g.outputs.contains(&logits)).then_some((l, n))
    };
    let mut heads = (0..g.nodes.len()).filter(|n| g.nodes[*n].op == Op::CrossEntropy);
    let Some((l, n)) = heads.find_map(linear) else { return Ok(false) };
    let (x, w, targets) = (g.nodes[l].inputs[0], g.nodes[l].inputs[1], g.nodes[n].inputs[1]);
    // What one rank sees of both.
    let mesh = context.layout.mesh;
    let (positions, vocab) = (
        g.ty(targets).elements() / mesh.size(Axes::SEQUENCES),
        g.ty(w).dims[0].size().div_ceil(mesh.size(MeshAxis::Tp)),
    );
    // Whole tiles of rows.
    let most = (context.device.cross_entropy_logits / vocab).clamp(32, context.device.cross_entropy_rows);
    let tile = if most < 1024 { 32 } else { 128 };
    let rows = (most / tile * tile).min(positions);
    let loss = g.nodes[n].outputs[0];
    let layer = g.nodes[n].layer;
    let behind = g.nodes.split_off(n + 1);
    g.nodes.remove(n);
    g.nodes.remove(l);
    let name = loss.map_or("loss".to_owned(), |v| g.get(v).name.clone());
    g.node(Op::LinearCrossEntropy { score: false, rows }, &[x, w, targets], &name, Phase::Forward, layer)?;
    if let (Some(node), Some(_)) = (g.nodes.last_mut(), loss) {
        node.outputs[0] = loss;
    }
    g.nodes.extend(behind);
    Ok(true)
}

fn producer(g: &Graph, v: ValueId) -> Option<usize> {
    matches!(g.get(v).source, Source::Node { .. }).then_some(())?;
    g.nodes.iter().position(|n| n.outputs.contains(&Some(v)))
}

#[cfg(test)]
mod tests {
    use crate::passes::tests::{check, small_model};

    #[test]
    fn additions_join_norms_of_their_layer_and_the_head_joins_the_loss() {
        let (before, context) = small_model();
        let after = super::fuse(&before, &context).unwrap();
        check(
            &after,
            "\
input     tokens: u32[batch:1, seq:4]
input     targets: u32[batch:1, seq:4]
parameter table: f32[vocab:8, embed:2]
parameter w1: f32[embed:2]
parameter w2: f32[embed:2]
F x: f32[batch:1, seq:4, embed:2], = embedding(tokens, table)
F n1: f32[batch:1, seq:4, embed:2], n1.rstd: f32[batch:1, seq:4] = rms_norm(x, w1) { eps: 1e-5 }
F mid: f32[batch:1, seq:4, embed:2], n2: f32[batch:1, seq:4, embed:2], n2.rstd: f32[batch:1, seq:4] = add_rms_norm(x, n1, w2) { eps: 1e-5 }
F y: f32[batch:1, seq:4, embed:2] = add(mid, n2)
F loss: f64[batch:1], loss.dx: f32[batch:1, seq:4, embed:2], loss.dw: f32[vocab:8, embed:2] = linear_cross_entropy(y, table, targets) { rows: 4 }
return    loss
",
        );
    }

    #[test]
    fn logits_that_are_used_stay() {
        let (mut before, context) = small_model();
        let logits = before.values.iter().position(|v| v.name == "logits").unwrap();
        before.outputs.push(lockstep_ir::ValueId(logits));
        let after = super::fuse(&before, &context).unwrap();
        assert!(after.nodes.iter().any(|n| n.op == lockstep_ir::Op::CrossEntropy));
    }
}
