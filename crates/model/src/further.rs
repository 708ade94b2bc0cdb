//! Multi-token prediction (MTP), as DeepSeek-V3 is trained with it: modules after the last layer predict further tokens, one each. A module has the
//! embeddings of the tokens that its predictions follow, and what the model or the module before it made of the tokens up to there; embedding
//! and output head are the model's. Their losses are added to that of training. Evaluation and generation are without it.

use crate::decoder::{Decoder, rms_norm};
use crate::form::FormInputs;
use crate::names as values;
use crate::parameters::matrix;
use lockstep_ir::graph::Loss;
use lockstep_ir::{Axis, DType, Dim, Graph, Op, Section, TensorType, TypeError, ValueId};

/// Adds the modules of a model after `n`, the normed result of its layers. Their losses count `mtp_loss` together.
pub(crate) fn further_tokens(
    g: &mut Graph,
    decoder: &Decoder,
    n: ValueId,
    (table, head): (ValueId, ValueId),
) -> Result<(), TypeError> {
    let (m, FormInputs::Loss { targets, .. }) = (decoder.m, &decoder.form_inputs) else { return Ok(()) };
    let ids = TensorType { dtype: DType::U32, ..g.ty(*targets).clone() };
    let mut before = n;
    for depth in 1..=m.mtp_depth {
        let tokens = g.input(values::further(values::TOKENS, depth), ids.clone());
        let wanted = g.input(values::further(values::TARGETS, depth), ids.clone());
        // Names count on from the last layer.
        let layer = m.layers + depth - 1;
        let at = |name: &str| format!("layers.{layer}.{name}");
        let hf = |name: &str| format!("model.layers.{layer}.{name}.weight");
        g.enter_layer(Some(layer));
        let e = decoder.embedded(g, tokens, table, (&at("embedded"), &at("next_embedding")))?;
        let e = rms_norm(g, m, e, (&at("embedding_norm"), &[hf("enorm")]), &at("embedding_normed"))?;
        let h = rms_norm(g, m, before, (&at("hidden_norm"), &[hf("hnorm")]), &at("hidden_normed"))?;
        let both = g.op(Op::Concat, &[e, h], &at("both"))?[0];
        let half = Section { axis: Axis::Embed, count: m.dim, unit: 1 };
        let dims = [decoder.embed(), Dim::packed([half, half])];
        let w = matrix(g, &at("wjoin"), dims, &decoder.normal, &[hf("eh_proj")]);
        let x = g.op(Op::Linear, &[both, w], &at("joined"))?[0];
        let x = decoder.layer(g, x, layer)?;
        // Heads are no part of a layer: they are not recomputed.
        g.enter_layer(None);
        before = rms_norm(g, m, x, (&at("head_norm"), &[hf("shared_head.norm")]), &at("n"))?;
        let logits = g.op(Op::Linear, &[before, head], &at("logits"))?[0];
        let value = g.op(Op::CrossEntropy, &[logits, wanted], &values::further(values::LOSS, depth))?[0];
        g.losses.push(Loss { value, weight: (m.mtp_loss / m.mtp_depth as f64) as f32 });
        g.outputs.push(value);
    }
    Ok(())
}
