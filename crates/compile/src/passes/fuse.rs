//! Fuse: replaces groups of forward ops by one op that moves fewer bytes.
//!
//! - `add` whose sum feeds an `rms_norm` of the same layer → `add_rms_norm` (the sum is normed while in cache). Across
//!   layers they stay apart: the residual stream is the only tensor that crosses that seam;
//! - `linear` read only by `cross_entropy` → `linear_cross_entropy` (the logits never exist whole).

use crate::Context;
use lockstep_ir::graph::{Node, Phase, Source};
use lockstep_ir::{Graph, Op, TypeError, ValueId};

/// Runs the pass.
pub fn fuse(graph: &Graph, context: &Context) -> Result<Graph, TypeError> {
    let mut g = graph.clone();
    add_rms_norm(&mut g);
    linear_cross_entropy(&mut g, context)?;
    Ok(g)
}

fn add_rms_norm(g: &mut Graph) {
    let mut n = 0;
    while n < g.nodes.len() {
        if let Op::RmsNorm { eps } = g.nodes[n].op {
            let x = g.nodes[n].inputs[0];
            // The sum moves from where it was added to where it is normed, so nobody may read it in between.
            let add = producer(g, x).filter(|&a| {
                let same_layer = g.nodes[a].layer == g.nodes[n].layer;
                same_layer && g.nodes[a].op == Op::Add && g.readers()[x.0].first() == Some(&n)
            });
            if let Some(a) = add {
                let (add, norm) = (&g.nodes[a], &g.nodes[n]);
                let fused = Node {
                    op: Op::AddRmsNorm { eps },
                    inputs: vec![add.inputs[0], add.inputs[1], norm.inputs[1]],
                    outputs: vec![add.outputs[0], norm.outputs[0], norm.outputs[1]],
                    phase: Phase::Forward,
                    layer: norm.layer,
                };
                g.nodes[n] = fused;
                g.nodes.remove(a);
                continue;
            }
        }
        n += 1;
    }
}

fn linear_cross_entropy(g: &mut Graph, context: &Context) -> Result<(), TypeError> {
    let Some(n) = g.nodes.iter().position(|n| n.op == Op::CrossEntropy) else { return Ok(()) };
    let logits = g.nodes[n].inputs[0];
    let Some(l) = producer(g, logits).filter(|&l| g.nodes[l].op == Op::Linear) else { return Ok(()) };
    if g.readers()[logits.0] != [n] || g.outputs.contains(&logits) {
        return Ok(());
    }
    let (x, w, targets) = (g.nodes[l].inputs[0], g.nodes[l].inputs[1], g.nodes[n].inputs[1]);
    let seq = g.ty(targets).dims[1].size();
    let rows = chunk_rows(context.device.cross_entropy_rows, seq);
    let loss = g.nodes[n].outputs[0];
    let layer = g.nodes[n].layer;
    g.nodes.remove(n);
    g.nodes.remove(l);
    let name = loss.map_or("loss".to_owned(), |v| g.get(v).name.clone());
    g.node(Op::LinearCrossEntropy { rows }, &[x, w, targets], &name, Phase::Forward, layer)?;
    if let (Some(node), Some(_)) = (g.nodes.last_mut(), loss) {
        node.outputs[0] = loss;
    }
    Ok(())
}

/// The largest chunk up to `most` that divides the sequence, so that a chunk never crosses two sequences and the sums
/// of a sequence do not depend on its neighbours.
fn chunk_rows(most: usize, seq: usize) -> usize {
    (1..=most.min(seq)).rev().find(|&r| seq.is_multiple_of(r)).unwrap_or(1)
}

fn producer(g: &Graph, v: ValueId) -> Option<usize> {
    matches!(g.get(v).source, Source::Node { .. }).then_some(())?;
    g.nodes.iter().position(|n| n.outputs.contains(&Some(v)))
}
