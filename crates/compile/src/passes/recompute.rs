//! Recompute (activation checkpointing): forward values that backward reads are recomputed instead of saved.
//!
//! A policy says which of these values a layer saves; the residual stream that enters it is always saved, a value that backward
//! does not read never is. A value that is not saved is recomputed right before the first node that reads it, from saved
//! values, by the same ops: losses and gradients have the same bits under every policy. With `every = k`, blocks of `k` layers
//! save only what enters the first, and a block never crosses two pipeline stages.

mod layers;

pub(crate) use layers::{Layers, Recomputation, recomputation};

use crate::settings::{Context, Recompute};
use crate::stage;
use lockstep_ir::graph::{Node, Phase, Source, Value};
use lockstep_ir::{Graph, TypeError, ValueId};

pub(super) fn recompute(graph: &Graph, context: &Context) -> Result<Graph, TypeError> {
    let count = graph.nodes.iter().filter_map(|n| n.layer).max().map_or(0, |l| l + 1);
    let block = match context.recompute {
        Recompute::None => return Ok(graph.clone()),
        Recompute::Selective | Recompute::Full | Recompute::Ops(_) | Recompute::Values(_) => 1,
        Recompute::Every(k) => k.max(1),
        Recompute::Sqrt => ((count as f64).sqrt().round() as usize).max(1),
    };
    // A block ends where a stage does.
    let layers = Layers::new(graph, block, &stage::cut(graph, context)?);
    let mut rewrite =
        Rewrite { saved: layers.saved(graph, &context.recompute), copies: vec![None; graph.values.len()], layers };
    let mut g = graph.clone();
    g.nodes.clear();
    for node in &graph.nodes {
        let mut node = node.clone();
        if node.phase != Phase::Forward && node.layer.is_some() {
            for v in &mut node.inputs {
                *v = rewrite.value(graph, &mut g, *v, node.layer)?;
            }
        }
        g.nodes.push(node);
    }
    Ok(g.without_dead_code())
}

struct Rewrite {
    layers: Layers,
    saved: Vec<bool>,
    /// Recomputed values.
    copies: Vec<Option<ValueId>>,
}

impl Rewrite {
    /// The value to read in backward: itself if it is saved, else a copy that is computed here if it has not been before.
    fn value(&mut self, graph: &Graph, g: &mut Graph, v: ValueId, reader: Option<usize>) -> Result<ValueId, TypeError> {
        if let Some(copy) = self.copies[v.0] {
            return Ok(copy);
        }
        let Some(node) = self.layers.made_here(graph, v, reader).filter(|_| !self.saved[v.0]) else { return Ok(v) };
        let Recomputation { op, inputs, outputs } = recomputation(node, &|v| self.saved[v.0]);
        let mut reads = Vec::new();
        for x in inputs {
            reads.push(self.value(graph, g, x, node.layer)?);
        }
        let mut copies = Vec::new();
        for output in outputs {
            copies.push(output.map(|v| {
                let value = graph.get(v);
                let name = format!("{}.recomputed", value.name);
                g.values.push(Value { name, source: Source::Node { into: None }, ..value.clone() });
                let copy = ValueId(g.values.len() - 1);
                self.copies[v.0] = Some(copy);
                copy
            }));
        }
        let Node { layer, tf32, repeated, .. } = *node;
        g.nodes.push(Node { op, inputs: reads, outputs: copies, phase: Phase::InputGrad, layer, tf32, repeated });
        Ok(self.copies[v.0].unwrap_or(v))
    }
}

#[cfg(test)]
mod tests {
    use crate::Recompute;
    use crate::passes::tests::small_model;

    /// Backward of the small model, whose norms are a layer, under a policy.
    fn backward(recompute: Recompute) -> String {
        let (mut graph, mut context) = small_model();
        graph.nodes.iter_mut().skip(1).take(4).for_each(|node| node.layer = Some(0));
        let derived = crate::autodiff(&crate::fuse(&graph, &context).unwrap(), &context).unwrap();
        context.recompute = recompute;
        let after = super::recompute(&derived, &context).unwrap();
        lockstep_ir::verify::graph(&after).unwrap();
        after.to_string().lines().filter(|l| l.starts_with(['B', 'W'])).map(|l| l.to_owned() + "\n").collect()
    }

    #[test]
    fn what_a_layer_does_not_save_is_recomputed_before_its_first_reader() {
        assert_eq!(
            backward(Recompute::Full),
            "\
B n1.recomputed: f32[batch:1, seq:4, embed:2], n1.rstd.recomputed: f32[batch:1, seq:4] = rms_norm(x, w1) { eps: 1e-5 }
B mid.recomputed: f32[batch:1, seq:4, embed:2], _, n2.rstd.recomputed: f32[batch:1, seq:4] = add_rms_norm(x, n1.recomputed, w2) { eps: 1e-5 }
W dw.w2: f32[embed:2] += grad.w2 = rms_norm_grad_weight(loss.dx, mid.recomputed, n2.rstd.recomputed)
B d.x: f32[batch:1, seq:4, embed:2] = add_rms_norm_grad(loss.dx, mid.recomputed, w2, n2.rstd.recomputed, loss.dx)
W dw.w1: f32[embed:2] += grad.w1 = rms_norm_grad_weight(d.x, x, n1.rstd.recomputed)
B d.x: f32[batch:1, seq:4, embed:2] = add_rms_norm_grad(d.x, x, w1, n1.rstd.recomputed, d.x)
W dw.table: f32[vocab:8, embed:2] += grad.table.2 = embedding_grad(d.x, tokens) { vocab: 8 }
"
        );
    }

    #[test]
    fn cheap_ops_are_recomputed_from_what_is_saved() {
        assert_eq!(
            backward(Recompute::Selective),
            "\
B _, n2.rstd.recomputed: f32[batch:1, seq:4] = rms_norm(mid, w2) { eps: 1e-5 }
W dw.w2: f32[embed:2] += grad.w2 = rms_norm_grad_weight(loss.dx, mid, n2.rstd.recomputed)
B d.x: f32[batch:1, seq:4, embed:2] = add_rms_norm_grad(loss.dx, mid, w2, n2.rstd.recomputed, loss.dx)
B _, n1.rstd.recomputed: f32[batch:1, seq:4] = rms_norm(x, w1) { eps: 1e-5 }
W dw.w1: f32[embed:2] += grad.w1 = rms_norm_grad_weight(d.x, x, n1.rstd.recomputed)
B d.x: f32[batch:1, seq:4, embed:2] = add_rms_norm_grad(d.x, x, w1, n1.rstd.recomputed, d.x)
W dw.table: f32[vocab:8, embed:2] += grad.table.2 = embedding_grad(d.x, tokens) { vocab: 8 }
"
        );
    }

    #[test]
    fn nothing_is_recomputed_where_everything_is_saved() {
        assert!(!backward(Recompute::None).contains("recomputed"));
    }
}
