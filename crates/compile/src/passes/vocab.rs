//! The chunked output head over parts of the vocabulary: `linear_cross_entropy` becomes, chunk by chunk, logits and statistics
//! of this rank's part, the statistics of all parts, and gradients; `linear_score` likewise, with misses instead of gradients. The logits
//! never exist whole on any rank.

use crate::Context;
use lockstep_ir::graph::{Node, Phase, Source};
use lockstep_ir::op::Rows;
use lockstep_ir::{Axes, DType, Graph, MeshAxis, Op, TypeError, ValueId};

/// Rewrites the heads that the graph has.
pub(super) fn split_head(g: &mut Graph, context: &Context) -> Result<(), TypeError> {
    while split_first(g, context)? {}
    Ok(())
}

/// Rewrites the first head; false where there is none.
fn split_first(g: &mut Graph, context: &Context) -> Result<bool, TypeError> {
    let head = |n: &Node| matches!(n.op, Op::LinearCrossEntropy { .. });
    let Some(at) = g.nodes.iter().position(head) else { return Ok(false) };
    let rest = g.nodes.split_off(at + 1);
    let Some(Node { op, inputs, outputs, layer, tf32, .. }) = g.nodes.pop() else { return Ok(false) };
    let Op::LinearCrossEntropy { rows, .. } = op else { return Ok(false) };
    let [x, w, targets, ref scalars @ ..] = inputs[..] else { return Ok(false) };
    let (loss, dx, dw, misses) = match outputs[..] {
        [loss, dx, dw] => (loss, dx, dw, None),
        [loss, misses] => (loss, None, None, misses),
        _ => return Ok(false),
    };
    // Chunks of further heads are named after their losses.
    let names = match loss.map(|loss| g.get(loss).name.clone()) {
        Some(name) if g.values.iter().any(|v| v.name == "logits.0") => format!("{name}."),
        _ => String::new(),
    };
    let mesh = &context.layout.mesh;
    let (sequences, parts, ranks) = (mesh.size(Axes::SEQUENCES), mesh.size(MeshAxis::Cp), mesh.size(Axes::TOKENS));
    let sizes = g.ty(targets).sizes();
    let (batch, seq) = (sizes[0] / sequences, sizes[1] / parts);
    // Sums in fixed point take each sequence's share on its own.
    let apart = context.precision.gradients == DType::Fixed64;
    let (spans, span) = if apart { (batch, seq) } else { (1, batch * seq) };
    let parts = context.layout.mesh.size(MeshAxis::Tp);
    let chunks = (0..spans).flat_map(|b| (0..span).step_by(rows).map(move |s| (b * span + s, rows.min(span - s))));
    let (mut statistics, mut pieces, mut missed): (Vec<ValueId>, Vec<ValueId>, Vec<ValueId>) = Default::default();
    let node = |g: &mut Graph, op, reads: &[ValueId], name: &str| {
        let made = g.node(op, reads, name, Phase::Forward, layer)?;
        g.keep_tf32(tf32);
        Ok::<_, TypeError>(made)
    };
    for (c, (first, count)) in chunks.enumerate() {
        let rows = Rows { first, count, ranks };
        let made = node(g, Op::VocabLogits { rows, parts }, &[x, w, targets], &format!("{names}logits.{c}"))?;
        statistics.push(made[1]);
        if misses.is_some() {
            let reads = [made[0], made[1], targets];
            missed.push(node(g, Op::VocabMisses { rows }, &reads, &format!("{names}misses.{c}"))?[0]);
        }
        if dx.is_none() && dw.is_none() {
            continue;
        }
        let reads = [&[made[0], made[1], x, w, targets], scalars].concat();
        let made = node(g, Op::VocabGrad { rows }, &reads, &format!("{names}d.logits.{c}"))?;
        pieces.push(made[0]);
        if let Some(dw) = dw {
            g.values[made[1].0].ty = g.ty(dw).clone();
            g.values[made[1].0].source = g.get(dw).source.clone();
        } else if let Some(last) = g.nodes.last_mut() {
            last.outputs[1] = None;
        }
    }
    let replace = |g: &mut Graph, op, mut reads: Vec<ValueId>, old: Option<ValueId>| -> Result<(), TypeError> {
        let Some(old) = old else { return Ok(()) };
        reads.push(targets);
        node(g, op, &reads, &g.get(old).name.clone())?;
        if let Some(last) = g.nodes.last_mut() {
            last.outputs[0] = Some(old);
        }
        Ok(())
    };
    replace(g, Op::VocabLoss, statistics, loss)?;
    replace(g, Op::JoinRows, pieces, dx)?;
    replace(g, Op::JoinRows, missed, misses)?;
    // The first use of the old dw is gone: what it was summed into is summed into by the chunks.
    if let Some(dw) = dw {
        g.values[dw.0].source = Source::Node { into: None };
    }
    g.nodes.extend(rest);
    Ok(true)
}

#[cfg(test)]
mod tests {
    use crate::passes::tests::{derived, lines};
    use lockstep_ir::{Graph, Op};

    fn chunks_of(g: &mut Graph, count: usize) {
        for node in &mut g.nodes {
            if let Op::LinearCrossEntropy { rows, .. } = &mut node.op {
                *rows = count;
            }
        }
    }

    #[test]
    fn the_head_becomes_chunks_of_positions_whose_logits_are_of_a_part_of_the_vocabulary() {
        let (mut g, context) = derived("dp=2,tp=2".parse().unwrap(), 20);
        chunks_of(&mut g, 32);
        super::split_head(&mut g, &context).unwrap();
        assert_eq!(
            lines(&g, &[" = vocab_", " = join_"], true),
            "\
F logits.0: f32[seq:64, vocab:8], logits.0.statistics: f32[parts:2, seq:64, scalar:3] = vocab_logits(y, table, targets) { rows: Rows { first: 0, count: 32, ranks: 2 }, parts: 2 }
F d.logits.0: f32[seq:64, embed:2], d.logits.0.dw: f32[vocab:8, embed:2] += grad.table = vocab_grad(logits.0, logits.0.statistics, y, table, targets) { rows: Rows { first: 0, count: 32, ranks: 2 } }
F logits.1: f32[seq:16, vocab:8], logits.1.statistics: f32[parts:2, seq:16, scalar:3] = vocab_logits(y, table, targets) { rows: Rows { first: 32, count: 8, ranks: 2 }, parts: 2 }
F d.logits.1: f32[seq:16, embed:2], d.logits.1.dw: f32[vocab:8, embed:2] += grad.table = vocab_grad(logits.1, logits.1.statistics, y, table, targets) { rows: Rows { first: 32, count: 8, ranks: 2 } }
F loss: f64[batch:4] = vocab_loss(logits.0.statistics, logits.1.statistics, targets)
F loss.dx: f32[batch:4, seq:20, embed:2] = join_rows(d.logits.0, d.logits.1, targets)
"
        );
    }

    #[test]
    fn chunks_of_sums_in_fixed_point_do_not_cross_sequences() {
        let (mut g, mut context) = derived("tp=2".parse().unwrap(), 40);
        chunks_of(&mut g, 32);
        context.precision.gradients = lockstep_ir::DType::Fixed64;
        super::split_head(&mut g, &context).unwrap();
        assert_eq!(
            lines(&g, &[" = vocab_logits"], false),
            "\
F logits.0, logits.0.statistics = vocab_logits(y, table, targets) { rows: Rows { first: 0, count: 32, ranks: 1 }, parts: 2 }
F logits.1, logits.1.statistics = vocab_logits(y, table, targets) { rows: Rows { first: 32, count: 8, ranks: 1 }, parts: 2 }
F logits.2, logits.2.statistics = vocab_logits(y, table, targets) { rows: Rows { first: 40, count: 32, ranks: 1 }, parts: 2 }
F logits.3, logits.3.statistics = vocab_logits(y, table, targets) { rows: Rows { first: 72, count: 8, ranks: 1 }, parts: 2 }
"
        );
    }
}
